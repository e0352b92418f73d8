"""A service: a model behind KServe's server, asked over HTTP by several clients at once.

    python examples/service.py

The script trains the network of classify_digits.py, saves it, and warms up its kernels. Then it
starts deploy/serve.py, which answers the Open Inference Protocol once the model has run, and asks it
about digits that the training did not see. Needs `kserve`, torch and scikit-learn: `make test-engines`
makes an environment with them, build/engines.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from classify_digits import TRAIN, digits, network, train

import purevk

SERVER = Path(__file__).resolve().parent.parent / "deploy" / "serve.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(address: str, value: Any = None) -> bytes:
    """GET, or POST of a value as JSON."""
    body = None if value is None else json.dumps(value).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    if importlib.util.find_spec("kserve") is None:
        sys.exit(
            "kserve is not installed in this environment: pip install kserve, or run this with"
            " build/engines/bin/python, which `make test-engines` makes"
        )
    torch.manual_seed(0)

    images, labels = digits()
    model = network()
    train(model, images[:TRAIN], labels[:TRAIN], options.epochs)
    batch = torch.export.Dim("batch", min=1, max=64)
    file = Path(tempfile.mkdtemp()) / "digits.pvk"
    with purevk.compile(model.eval(), (images[:2],), [{0: batch}]) as program:
        program.save(file)
        name = program.inputs[0].name
    subprocess.run([sys.executable, "-m", "purevk", "warmup", str(file)], check=True)

    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, str(SERVER), str(file), "--port", str(port)]
    server = subprocess.Popen(
        [*command, "--grpc-port", str(free_port())],
        env={**os.environ, "PUREVK_CACHE": f"{os.environ.get('PUREVK_CACHE', '')},only=1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        start = time.perf_counter()
        while True:
            try:
                ask(f"{address}/v2/models/model/ready")
                break
            except OSError:
                if server.poll() is not None or time.perf_counter() - start > 60:
                    sys.exit("the server did not start")
                time.sleep(0.1)
        print(f"the server was ready after {time.perf_counter() - start:.1f} s")

        def classify(at: int) -> tuple[int, float]:
            pixels = images[at : at + 1]
            tensor = {"name": name, "shape": list(pixels.shape), "datatype": "FP32"}
            request = {"inputs": [{**tensor, "data": pixels.flatten().tolist()}]}
            began = time.perf_counter()
            answer = json.loads(ask(f"{address}/v2/models/model/infer", request))
            scores = answer["outputs"][0]["data"]
            return scores.index(max(scores)), time.perf_counter() - began

        unseen = range(TRAIN, len(images))
        start = time.perf_counter()
        with ThreadPoolExecutor(options.clients) as clients:
            found = list(clients.map(classify, unseen))
        seconds = time.perf_counter() - start
        right = sum(guess == int(labels[at]) for at, (guess, _) in zip(unseen, found))
        times = sorted(each for _, each in found)
        print(f"{right} of {len(found)} digits are right")
        print(
            f"{len(found) / seconds:.0f} requests a second of {options.clients} clients; latency"
            f" {statistics.median(times) * 1e3:.1f} ms, 99 % below {times[-len(times) // 100] * 1e3:.1f}"
        )
        metrics = ask(f"{address}/metrics").decode().splitlines()
        print(
            *[line for line in metrics if line.startswith("purevk_") and "bucket" not in line][:6],
            sep="\n",
        )
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
