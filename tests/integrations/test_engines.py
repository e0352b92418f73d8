"""The recipes on the engines themselves, over loopback."""

from __future__ import annotations

import asyncio
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import knobs
from tests.harness import ROOT

pytestmark = [pytest.mark.device, pytest.mark.slow]
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU()).eval()


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "model.pvk"
    shapes = {"input": {0: torch.export.Dim("batch", min=1, max=16)}}
    with purevk.compile(model, (torch.zeros(3, 5),), dynamic_shapes=shapes) as program:
        program.save(path)
    return path


def _expected(model: Any, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(x)).numpy()


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_requests(address: str, model: Any) -> None:
    """16 requests, 4 at a time, get each its own answer; a wrong one among them fails alone."""
    x = np.random.default_rng(1).standard_normal((16, 5), np.float32)
    bodies = [{"input": each.tolist()} for each in x]
    with ThreadPoolExecutor(4) as pool:
        *answers, wrong = pool.map(lambda body: _ask(address, body), [*bodies, {"input": [0.0]}])
    assert [code for code, _ in answers] == [200] * 16, answers
    found = [next(iter(json.loads(body).values())) for _, body in answers]
    np.testing.assert_allclose(found, _expected(model, x), 1e-5, 1e-6)
    assert wrong[0] == 400 and b"is expected" in wrong[1], wrong


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield ray
    ray.shutdown()


def test_ray_data(cluster: Any, model: Any, file: Path) -> None:
    from purevk.integrations.ray import MapBatches

    x = np.random.default_rng(2).standard_normal((30, 5), np.float32)
    dataset = cluster.data.from_items(
        [{"input": each, "key": at} for at, each in enumerate(x)], override_num_blocks=2
    )
    for options in ({}, {"keep_inputs": False}):
        rows = dataset.map_batches(
            MapBatches,
            fn_constructor_args=(str(file),),
            fn_constructor_kwargs=options,
            batch_size=8,
            concurrency=1,
        ).take_all()
        rows.sort(key=lambda row: row["key"])
        assert ("input" in rows[0]) is (not options)
        (name,) = rows[0].keys() - {"input", "key"}
        np.testing.assert_allclose([row[name] for row in rows], _expected(model, x), 1e-5, 1e-6)


def test_ray_serve(cluster: Any, model: Any, file: Path) -> None:
    from ray import serve

    from purevk.integrations.ray import Deployment

    port = _free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(Deployment.bind(str(file), max_batch_size=4))
        _check_requests(f"http://127.0.0.1:{port}/", model)
    finally:
        serve.shutdown()


LITSERVE = """
import sys
import litserve
from purevk.integrations.litserve import ProgramAPI
api = ProgramAPI(sys.argv[1], max_batch_size=int(sys.argv[3]), batch_timeout=0.01)
server = litserve.LitServer(api, accelerator="cpu")
server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)
"""


@pytest.mark.parametrize("size", [1, 4])
def test_litserve(model: Any, file: Path, tmp_path: Path, size: int) -> None:
    pytest.importorskip("litserve")
    port = _free_port()
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", LITSERVE, str(file), str(port), str(size)],
            env=knobs.child_environment({"PYTHONPATH": str(ROOT)}),
            stdout=out,
            stderr=out,
            start_new_session=True,  # its workers end with it
        )
    address = f"http://127.0.0.1:{port}"
    try:
        codes, end = [], time.monotonic() + 60
        while 200 not in codes and time.monotonic() < end and process.poll() is None:
            codes.append(_ask(f"{address}/health")[0])
            time.sleep(0.1)
        assert codes[-1:] == [200], log.read_text()
        assert set(codes) <= {0, 503, 200}  # not ready before the workers are
        _check_requests(f"{address}/predict", model)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


KSERVE = """
import sys
import kserve
from purevk.integrations.kserve import ProgramModel
server = kserve.ModelServer(http_port=int(sys.argv[2]), grpc_port=int(sys.argv[3]))
server.start([ProgramModel("model", sys.argv[1])])
"""


def test_kserve(model: Any, file: Path, tmp_path: Path) -> None:
    """The Open Inference Protocol, with KServe's own clients."""
    kserve = pytest.importorskip("kserve")
    port, grpc_port = _free_port(), _free_port()
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", KSERVE, str(file), str(port), str(grpc_port)],
            env=knobs.child_environment({"PYTHONPATH": str(ROOT)}),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    x = np.random.default_rng(3).standard_normal((6, 5), np.float32)
    try:
        codes, end = [], time.monotonic() + 60
        while 200 not in codes and time.monotonic() < end and process.poll() is None:
            codes.append(_ask(f"{address}/v2/models/model/ready")[0])
            time.sleep(0.1)
        assert codes[-1:] == [200], log.read_text()
        assert set(codes) <= {0, 503, 200}
        described = json.loads(_ask(f"{address}/v2/models/model")[1])
        assert described["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 5]}]
        (output,) = described["outputs"]
        assert (output["datatype"], output["shape"]) == ("FP32", [-1, 3])
        asyncio.run(_ask_kserve(kserve, address, f"127.0.0.1:{grpc_port}", model, x))
        right = {"name": "input", "shape": [1, 5], "datatype": "FP32", "data": [0.0] * 5}
        for inputs, words in (
            ([{**right, "name": "x"}], b"there is no input x"),
            ([right, {**right, "name": "x"}], b"there is no input x"),
            ([], b"lacks the inputs input"),
            ([{**right, "data": [0.0] * 4}], b"reshape"),
        ):
            code, answer = _ask(f"{address}/v2/models/model/infer", {"inputs": inputs})
            assert code == 400 and words in answer, answer
        metrics = _ask(f"{address}/metrics")[1].decode()
        assert "purevk_calls_total 3.0" in metrics and "purevk_compiles_total" in metrics
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


async def _ask_kserve(kserve: Any, rest: str, grpc: str, model: Any, x: np.ndarray) -> None:
    """The same batch over JSON, over REST with binary tensors, and over gRPC."""
    from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig

    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:
        for binary in (False, True):
            given = kserve.InferInput("input", list(x.shape), "FP32")
            given.set_data_from_numpy(x, binary_data=binary)
            request = kserve.InferRequest("model", [given])
            answer = await client.infer(rest, request, model_name="model")
            (output,) = answer.outputs
            np.testing.assert_allclose(output.as_numpy(), _expected(model, x), 1e-5, 1e-6)
    client = InferenceGRPCClient(grpc)
    given = kserve.InferInput("input", list(x.shape), "FP32")
    given.set_data_from_numpy(x, binary_data=True)
    answer = await client.infer(kserve.InferRequest("model", [given]))
    (output,) = answer.outputs
    np.testing.assert_allclose(output.as_numpy(), _expected(model, x), 1e-5, 1e-6)
    await client.close()
