"""deploy/serve.py, with a cache that `purevk warmup` has filled."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import knobs
from tests.harness import DATA, ROOT

pytest.importorskip("kserve", reason="scripts/engines.sh runs these tests with the engines")
pytestmark = [pytest.mark.device, pytest.mark.slow]
MODEL = DATA / "linear_relu.pte"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(folder: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        knobs.CACHE.name: f"{folder},only=1",
    }
    port = _free_port()
    command = [sys.executable, str(ROOT / "deploy" / "serve.py"), str(MODEL), "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--grpc-port", str(_free_port()), "--max-body", "4000"],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    return process, f"http://127.0.0.1:{port}"


def _ask(address: str, value: Any = None) -> tuple[int, Any]:
    body = None if value is None else json.dumps(value).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        return 0, str(error).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that was warmed up."""
    folder, log = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("log") / "log"
    command = [sys.executable, "-m", "purevk", "warmup", str(MODEL)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), knobs.CACHE.name: str(folder)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    process, address = _start(folder, log)
    try:
        code, end = 0, time.monotonic() + 60
        while code != 200 and time.monotonic() < end and process.poll() is None:
            code = _ask(f"{address}/v2/health/ready")[0]
            time.sleep(0.1)
        assert code == 200, log.read_text()
        assert "is ready on" in log.read_text()
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30) in (0, -signal.SIGTERM)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _request(x: np.ndarray) -> dict[str, Any]:
    with purevk.load(MODEL) as program:
        (spec,) = program.inputs
    tensor = {"name": spec.name, "shape": list(x.shape), "datatype": "FP32"}
    return {"inputs": [{**tensor, "data": x.reshape(-1).tolist()}]}


def test_the_server_answers(server: str) -> None:
    assert _ask(f"{server}/v2/health/live")[0] == 200
    x = np.linspace(-1, 1, 10, dtype=np.float32).reshape(2, 5)
    code, body = _ask(f"{server}/v2/models/model/infer", _request(x))
    assert code == 200, body
    (output,) = json.loads(body)["outputs"]
    with purevk.load(MODEL) as program:
        made = np.array(output["data"], np.float32).reshape(output["shape"])
        np.testing.assert_allclose(made, program.forward(x), rtol=1e-5)
    metrics = _ask(f"{server}/metrics")[1].decode()
    assert "purevk_compiles_total 0.0" in metrics  # the warmup had compiled everything


def test_the_server_refuses(server: str) -> None:
    code, body = _ask(f"{server}/v2/models/model/infer", _request(np.ones((3, 5), np.float32)))
    assert code == 400 and b"float32[2,5] is expected" in body, body
    assert _ask(f"{server}/v2/models/other/infer", _request(np.ones((2, 5))))[0] == 404
    code, body = _ask(f"{server}/v2/models/model/infer", _request(np.ones((2, 500))))
    assert code == 413 and b"more than 4000 bytes" in body, body


def test_only_this_machine_can_connect(server: str) -> None:
    """Unless --host says otherwise."""
    port = int(server.rpartition(":")[2])
    with pytest.raises(OSError):  # another address of this machine
        socket.create_connection(("127.0.0.2", port), 5).close()


def test_a_cold_cache_ends_the_server(tmp_path: Path) -> None:
    process, _ = _start(tmp_path / "cache", tmp_path / "log")
    assert process.wait(60) == 1
    assert "must not be compiled" in (tmp_path / "log").read_text()
