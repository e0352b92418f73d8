"""The recipes on the engines themselves, over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
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
from tests.fuzz.mutations import apply, draw_changes
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


class Lookup(torch.nn.Module):
    """A dict as result, an input by name only, dynamic sizes, and indices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(50, 4)

    def forward(self, ids: Any, *, scale: Any) -> Any:
        rows = self.table(ids)
        return {"mean": rows.mean(1) * scale[:, None], "sums": rows.sum(2), "none": None}


@pytest.fixture(scope="module")
def lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "lookup.pvk"
    batch, length = torch.export.Dim("batch", min=1, max=8), torch.export.Dim("n", min=1, max=6)
    shapes = {"ids": {0: batch, 1: length}, "scale": {0: batch}}
    kwargs = {"scale": torch.ones(2)}
    example = torch.zeros(2, 3, dtype=torch.long)
    with purevk.compile(Lookup(), (example,), kwargs=kwargs, dynamic_shapes=shapes) as program:
        program.save(path)
    return path


def _expected_lookup(ids: list[int], scale: float) -> dict[str, np.ndarray]:
    with torch.no_grad():
        outputs = Lookup()(torch.tensor([ids]), scale=torch.tensor([scale]))
    return {name: outputs[name][0].numpy() for name in ("mean", "sums")}


# Bodies of wrong requests for one sample of `Lookup`, and words of the answer.
WRONG: list[tuple[bytes, bytes]] = [
    (b'{"ids": [1, 50], "scale": 1}', b"ids[1]"),
    (b'{"ids": [1, 0, -1], "scale": 1}', b"ids[2]"),
    (b'{"ids": [1, null], "scale": 1}', b"ids[1] is None"),
    (b'{"ids": [1, 2], "scale": null}', b"scale is None"),
    (b'{"ids": ["1"], "scale": 1}', b"ids[0] is '1'"),
    (b'{"ids": [1, 2.5], "scale": 1}', b"ids[1] is 2.5"),
    (b'{"ids": [1' + b"0" * 30 + b'], "scale": 1}', b"ids[0] is 1"),
    (b'{"ids": [1], "scale": 1e39}', b"scale is 1e+39"),
    (b'{"ids": [1, 2, 3, 4, 5, 6, 7], "scale": 1}', b"exported for 1 to 6"),
    (b'{"ids": [], "scale": 1}', b"exported for 1 to 6"),
    (b'{"ids": [[1]], "scale": 1}', b"is expected"),
    (b'{"ids": [[1], [1, 2]], "scale": 1}', b"ids is no tensor"),
    (b'{"ids": {"a": 1}, "scale": 1}', b"ids is {'a': 1}"),
    (b'{"ids": [1]}', b"lacks the inputs scale"),
    (b'{"ids": [1], "scale": 1, "x": 1}', b"there is no input x"),
    (b'{"ids": ' + b"[" * 40 + b"1" + b"]" * 40 + b', "scale": 1}', b"is expected"),
    (b'{"ids": ' + b"[" * 40 + b"null" + b"]" * 40 + b', "scale": 1}', b"ids is no tensor"),
    (b"[1]", b"has the inputs"),
    (b"null", b"has the inputs"),
    (b'{"ids": [1', b"no JSON"),
    (b"", b"no JSON"),
    (b"\xff\xfe", b"no JSON"),
    (b"[" * 100_000, b"nested too deeply"),
    (b'{"ids": [' + b"9" * 5000 + b'], "scale": 1}', b"no JSON"),
]


def _check_lookup(address: str) -> None:
    """Requests of several sizes, 8 at a time, with wrong ones among them."""
    rng = np.random.default_rng(5)
    samples = [
        (rng.integers(0, 50, rng.integers(1, 7)).tolist(), float(number)) for number in range(66)
    ]
    bodies = [json.dumps({"ids": ids, "scale": scale}).encode() for ids, scale in samples]
    mixed = [*bodies]
    for number, (body, _) in enumerate(WRONG):
        mixed.insert(number * 4 + 1, body)
    with ThreadPoolExecutor(8) as pool:
        answers = dict(zip(mixed, pool.map(lambda body: _ask(address, body), mixed)))
    for body, words in WRONG:
        code, text = answers[body]
        assert 400 <= code < 500 and words in text, (body[:60], code, text)
    for body, sample in zip(bodies, samples):
        code, text = answers[body]
        assert code == 200, (body, code, text)
        outputs, expected = json.loads(text), _expected_lookup(*sample)
        assert outputs.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(outputs[name], values, 1e-5, 1e-6)
    expected = _expected_lookup([1, 2, 3], 0.5)

    def check(outputs: Any) -> None:
        for name, values in expected.items():
            np.testing.assert_allclose(outputs[name], values, 1e-5, 1e-6)

    _check_changed(address, {"ids": [1, 2, 3], "scale": 0.5}, 150, check)


def _check_changed(address: str, sound: Any, count: int, check: Any) -> None:
    """Changed requests get an answer or 4xx, and sound ones beside them are answered."""
    body = json.dumps(sound).encode()
    bodies = []
    for number in range(count):
        draw = random.Random(number)
        bodies += [apply(body, draw_changes(draw, "request", body)), body][: 1 + (number % 4 == 0)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: _ask(address, each), bodies))
    for each, (code, text) in zip(bodies, answers):
        assert code == 200 or 400 <= code < 500, (each, code, text)
        if each == body:
            assert code == 200
            check(json.loads(text))


def _ask(address: str, value: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Sends bytes, or a value as JSON. The status and the body of the answer."""
    body = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    headers = headers or {"Content-Type": "application/json"}
    request = urllib.request.Request(address, body, headers)
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


def test_ray_data_with_named_outputs(cluster: Any, lookup: Path) -> None:
    from purevk.integrations.ray import MapBatches

    ids = np.random.default_rng(3).integers(0, 50, (20, 5))
    rows = [{"ids": each, "scale": np.float32(at)} for at, each in enumerate(ids)]
    options = {"fn_constructor_args": (str(lookup),), "batch_size": 8, "concurrency": 1}
    dataset = cluster.data.from_items(rows).map_batches(MapBatches, **options)
    for row in dataset.take_all():
        for name, values in _expected_lookup(row["ids"].tolist(), row["scale"]).items():
            np.testing.assert_allclose(row[name], values, 1e-5, 1e-6)


def test_ray_serve(cluster: Any, model: Any, file: Path, lookup: Path) -> None:
    from ray import serve

    from purevk.integrations.ray import Deployment

    port = _free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(Deployment.bind(str(file), max_batch_size=4))
        _check_requests(f"http://127.0.0.1:{port}/", model)
        serve.run(Deployment.bind(str(lookup), max_batch_size=4))
        _check_lookup(f"http://127.0.0.1:{port}/")
    finally:
        serve.shutdown()


LITSERVE = """
import sys
import litserve
from purevk.integrations import litserve as recipe
from purevk.integrations.litserve import ProgramAPI
recipe._gate.limit = int(sys.argv[4])
api = ProgramAPI(sys.argv[1], max_batch_size=int(sys.argv[3]), batch_timeout=0.01)
server = litserve.LitServer(api, accelerator="cpu")
server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)
"""


@contextlib.contextmanager
def _litserve(file: Path, log: Path, size: int, limit: int = 256) -> Iterator[str]:
    """The address of a server, which SIGTERM ends with all its processes."""
    port = _free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", LITSERVE, str(file), str(port), str(size), str(limit)],
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
        yield f"{address}/predict"
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
        with contextlib.suppress(ProcessLookupError):
            for _ in range(100):
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            pytest.fail("processes of the server are left")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.mark.parametrize("size", [1, 4])
def test_litserve(model: Any, file: Path, lookup: Path, tmp_path: Path, size: int) -> None:
    pytest.importorskip("litserve")
    with _litserve(file, tmp_path / "log", size) as address:
        _check_requests(address, model)
    with _litserve(lookup, tmp_path / "log", size) as address:
        _check_lookup(address)
        code, text = _ask(address, b" " * ((64 << 20) + 1))
        assert code == 413 and b"more than" in text


def test_litserve_refuses_requests_above_its_limit(lookup: Path, tmp_path: Path) -> None:
    pytest.importorskip("litserve")
    body = {"ids": [1, 2], "scale": 1}
    with _litserve(lookup, tmp_path / "log", 4, limit=2) as address, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: _ask(address, body), range(40)))
        assert {code for code, _ in answers} == {200, 503}
        assert all(b"try again later" in text for code, text in answers if code == 503)
        assert _ask(address, body)[0] == 200
        health = address.replace("/predict", "/health")
        assert _ask(health)[0] == 200


KSERVE = """
import sys
import kserve
from purevk.integrations.kserve import ProgramModel, Server
of = {"kserve": kserve.ModelServer, "purevk": Server}[sys.argv[4]]
server = of(http_port=int(sys.argv[2]), grpc_port=int(sys.argv[3]))
server.start([ProgramModel("model", sys.argv[1])])
"""


@contextlib.contextmanager
def _kserve(file: Path, log: Path, server: str) -> Iterator[tuple[str, int]]:
    """The address of a server for REST, and its port of gRPC. SIGTERM ends it."""
    port, grpc_port = _free_port(), _free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", KSERVE, str(file), str(port), str(grpc_port), server],
            env=knobs.child_environment({"PYTHONPATH": str(ROOT)}),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        codes, end = [], time.monotonic() + 60
        while 200 not in codes and time.monotonic() < end and process.poll() is None:
            codes.append(_ask(f"{address}/v2/models/model/ready")[0])
            time.sleep(0.1)
        assert codes[-1:] == [200], log.read_text()
        assert set(codes) <= {0, 503, 200}
        yield address, grpc_port
        process.terminate()
        assert process.wait(40) in (0, -signal.SIGTERM)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.mark.parametrize("server", ["kserve", "purevk"])
def test_kserve(model: Any, file: Path, tmp_path: Path, server: str) -> None:
    """The Open Inference Protocol, with KServe's own clients."""
    kserve = pytest.importorskip("kserve")
    x = np.random.default_rng(3).standard_normal((6, 5), np.float32)
    with _kserve(file, tmp_path / "log", server) as (address, grpc_port):
        described = json.loads(_ask(f"{address}/v2/models/model")[1])
        assert described["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 5]}]
        (output,) = described["outputs"]
        assert (output["datatype"], output["shape"]) == ("FP32", [-1, 3])
        asyncio.run(_ask_kserve(kserve, address, f"127.0.0.1:{grpc_port}", model, x))
        right = {"name": "input", "shape": [1, 5], "datatype": "FP32", "data": [0.0] * 5}
        for inputs, words in (
            ([{**right, "name": "x"}], b"there is no input x"),
            ([right, {**right, "name": "x"}], b"there is no input x"),
            ([right, right], b"twice"),
            ([], b"lacks the inputs input"),
            ([{**right, "data": [0.0] * 4}], b"reshape"),
            ([{**right, "shape": [10**30, 5]}], b"shape"),
            ([{**right, "shape": [-1, 5]}], b"shape"),
            ([{**right, "shape": [0, 5], "data": []}], b"exported for 1 to 16"),
            ([{**right, "data": [0.0] * 4 + [None]}], b"input[4] is None"),
            ([{**right, "data": ["1"] * 5}], b"input[0] is '1'"),
            ([{**right, "datatype": "INT64", "data": [0.5] * 5}], b"input[0] is 0.5"),
            ([{**right, "datatype": "INT64", "data": [0] * 5}], b"has dtype int64"),
            ([{**right, "datatype": "BYTES"}], b"datatype BYTES"),
            ([{**right, "datatype": "FP99"}], b"datatype FP99"),
        ):
            code, answer = _ask(f"{address}/v2/models/model/infer", {"inputs": inputs})
            assert code == 400 and words in answer, answer
        for path, body, words in (
            ("v1/models/model:predict", {"instances": [[0.0] * 5]}, b"version 2 of the protocol"),
            ("v2/models/model/infer", {"inputs": [right], "outputs": [{"name": "y"}]}, b"output y"),
            ("v2/models/model/infer", b'{"inputs": [', b"JSON"),
            ("v2/models/model/infer", b"[" * 100_000, b"pars"),
            ("v2/models/model/infer", {"inputs": {}}, b"list"),
            ("v2/models/model/infer", {"inputs": [{**right, "data": None}]}, b"data"),
            ("v1/models/model:predict", b"{", b"request format"),
        ):
            code, answer = _ask(f"{address}/{path}", body)
            assert 400 <= code < 500 and words in answer, (path, body, code, answer)
        metrics = _ask(f"{address}/metrics")[1].decode()
        assert "purevk_calls_total 5.0" in metrics and "purevk_compiles_total" in metrics
        assert "purevk_failures_total 2.0" in metrics  # a size and a dtype


def test_kserve_with_named_outputs(lookup: Path, tmp_path: Path) -> None:
    """A dict of outputs, by REST and gRPC; no request ends or changes the server."""
    kserve = pytest.importorskip("kserve")
    rng = np.random.default_rng(4)
    with _kserve(lookup, tmp_path / "log", "purevk") as (address, grpc_port):
        infer = f"{address}/v2/models/model/infer"
        described = json.loads(_ask(f"{address}/v2/models/model")[1])
        assert [each["name"] for each in described["inputs"]] == ["ids", "scale"]
        assert [each["name"] for each in described["outputs"]] == ["mean", "sums"]

        def body(ids: list[list[int]], scale: list[float]) -> dict[str, Any]:
            shape = [len(ids), len(ids[0])]
            return {
                "inputs": [
                    {"name": "ids", "shape": shape, "datatype": "INT64", "data": ids},
                    {"name": "scale", "shape": shape[:1], "datatype": "FP32", "data": scale},
                ]
            }

        def check(outputs: dict[str, Any], ids: list[list[int]], scale: list[float]) -> None:
            for row, expected in enumerate(map(_expected_lookup, ids, scale)):
                for name, values in outputs.items():
                    np.testing.assert_allclose(values[row], expected[name], 1e-5, 1e-6)

        for _ in range(5):
            rows, length = rng.integers(1, 9), rng.integers(1, 7)
            ids, scale = rng.integers(0, 50, (rows, length)).tolist(), rng.random(rows).tolist()
            code, answer = _ask(infer, body(ids, scale))
            assert code == 200, answer
            outputs = {
                each["name"]: np.reshape(each["data"], each["shape"])
                for each in json.loads(answer)["outputs"]
            }
            assert outputs.keys() == {"mean", "sums"}
            check(outputs, ids, scale)
        code, answer = _ask(infer, {**body([[1, 2]], [1]), "outputs": [{"name": "sums"}]})
        assert code == 200 and [o["name"] for o in json.loads(answer)["outputs"]] == ["sums"]
        for wrong, words in (
            (body([[1, 50]], [1]), b"ids[0, 1]"),
            (body([[1] * 7], [1]), b"exported for 1 to 6"),
            (body([[1]] * 9, [1] * 9), b"exported for 1 to 8"),
            (body([[1]] * 2, [1, 1]) | {"inputs": body([[1]] * 2, [1, 1])["inputs"][:1]}, b"scale"),
        ):
            code, answer = _ask(infer, wrong)
            assert code == 400 and words in answer, (wrong, code, answer)

        def check_changed(answer: Any) -> None:
            arrays = {o["name"]: np.reshape(o["data"], o["shape"]) for o in answer["outputs"]}
            check(arrays, [[3, 4]], [2.0])

        _check_changed(infer, body([[3, 4]], [2.0]), 200, check_changed)
        for headers, data in (
            ({"Inference-Header-Content-Length": "x"}, b"{}"),
            ({"Inference-Header-Content-Length": "2"}, b"{}"),
            ({"Inference-Header-Content-Length": "3"}, b"[1]abc"),
            ({"Inference-Header-Content-Length": "-1"}, b'{"inputs": [{}]}'),
            *_binary_requests(),
            ({"ce-id": "1", "ce-source": "x"}, b"\0"),
        ):
            code, answer = _ask(
                infer, data, {**headers, "Content-Type": "application/octet-stream"}
            )
            assert 400 <= code < 500, (headers, data, code, answer)
        unknown = f"{address}/v2/models/%1b%5b2J%c2%9b/infer"
        assert _ask(unknown, body([[1]], [1]))[0] == 404
        log = (tmp_path / "log").read_text()
        assert "\\x1b[2J" in log and not {"\x1b", "\x9b"} & set(log)
        for name in ("load", "unload"):
            assert _ask(f"{address}/v2/repository/models/model/{name}", b"")[0] == 400
        code, answer = _ask(infer, b" " * ((64 << 20) + 1))
        assert code == 413 and b"more than" in answer
        asyncio.run(_ask_grpc(kserve, f"127.0.0.1:{grpc_port}", check))
        assert _ask(infer, body([[1]], [1]))[0] == 200
        for port in (int(address.rpartition(":")[2]), grpc_port):
            with pytest.raises(OSError):  # another address of this machine
                socket.create_connection(("127.0.0.2", port), 5).close()


def _binary_requests() -> Iterator[tuple[dict[str, str], bytes]]:
    """Requests with a part in binary, and other types in their JSON."""
    tensor = {
        "name": "ids",
        "shape": [1, 1],
        "datatype": "INT64",
        "parameters": {"binary_data_size": 8},
    }
    for change in (
        {"inputs": [{**tensor, "name": ["ids"]}]},
        {"inputs": [{**tensor, "name": {"a": 1}}]},
        {"inputs": [{**tensor, "shape": {"a": 1}}]},
        {"inputs": [{**tensor, "parameters": 1}]},
        {"outputs": [{"name": "sums", "parameters": 1 << 40}]},
        {"outputs": [{"name": ["sums"]}]},
        {"parameters": [1]},
        {"parameters": "text"},
    ):
        head = json.dumps({"inputs": [tensor], **change}).encode()
        yield {"Inference-Header-Content-Length": str(len(head))}, head + bytes(8)


async def _ask_grpc(kserve: Any, address: str, check: Any) -> None:
    """Right and wrong requests by gRPC."""
    import grpc
    from kserve.inference_client import InferenceGRPCClient

    client = InferenceGRPCClient(address)
    scale = np.ones(2, np.float32)

    async def ask(ids: np.ndarray) -> Any:
        inputs = []
        for name, array, kind in (("ids", ids, "INT64"), ("scale", scale, "FP32")):
            inputs.append(kserve.InferInput(name, list(array.shape), kind))
            inputs[-1].set_data_from_numpy(array, binary_data=True)
        return await client.infer(kserve.InferRequest("model", inputs))

    ids = np.array([[1, 2, 3], [4, 5, 6]])
    answer = await ask(ids)
    check({each.name: each.as_numpy() for each in answer.outputs}, ids.tolist(), scale.tolist())
    with pytest.raises(grpc.RpcError) as refused:
        await ask(ids + 47)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ids[1, 2]" in refused.value.details()
    await client.close()


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
