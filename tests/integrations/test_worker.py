"""What engines serve: a worker alone, and Triton's Python backend on a fake of its utilities."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import tracemalloc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.integrations.values import read_values
from purevk.integrations.worker import LATENCY_BOUNDS, Worker
from tests.harness import DATA

pytestmark = pytest.mark.device
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU()).eval()


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with a dynamic batch."""
    path = tmp_path_factory.mktemp("worker") / "model.pvk"
    batch = torch.export.Dim("batch", min=1, max=16)
    shapes = {"input": {0: batch}}
    with purevk.compile(model, (torch.zeros(3, 5),), dynamic_shapes=shapes) as program:
        program.save(path)
    return path


@pytest.fixture
def worker(file: Path) -> Iterator[Worker]:
    worker = Worker(file, batch_sizes=(1, 7))
    yield worker
    worker.close()


def _samples(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 5), np.float32)


def _expected(model: Any, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(x)).numpy()


def test_a_batch_is_split_as_eager_torch_has_it(worker: Worker, model: Any) -> None:
    (name,) = [spec.name for spec in worker.program.inputs]
    (output,) = [spec.name for spec in worker.program.outputs]
    x = _samples(7)
    found = worker.batch([worker.sample({name: each.tolist()}) for each in x])
    expected = _expected(model, x)
    np.testing.assert_allclose([each[output] for each in found], expected, 1e-5, 1e-6)
    columns = worker.columns({name: x, "key": np.arange(7)})
    assert columns.keys() == {name, "key", output}
    assert worker.columns({name: x, "key": np.arange(7)}, keep_inputs=False).keys() == {
        "key",
        output,
    }
    np.testing.assert_allclose(columns[output], expected, 1e-5, 1e-6)


def test_counters(worker: Worker) -> None:
    before = worker.stats
    assert before.calls == before.queue == before.failures == 0  # the warmup does not count
    worker.forward(_samples(2))
    with pytest.raises(purevk.PurevkError):
        worker.forward(np.zeros((2, 4), np.float32))
    stats = worker.stats
    assert (stats.calls, stats.failures, stats.queue) == (2, 1, 0)
    assert sum(stats.latencies) == 2 and stats.seconds > 0
    assert stats.compiles == before.compiles  # the warmup compiled all
    assert len(stats.latencies) == len(LATENCY_BOUNDS) + 1


@pytest.mark.parametrize(
    "value, words",
    [
        ({}, "has the inputs"),
        ({"input": [1.0]}, "no batch dimension"),
        ({"input": [[1.0] * 5]}, "no batch dimension"),
        ({"input": ["a"] * 5}, "is no tensor"),
        ([1.0], "has the inputs"),
    ],
)
def test_a_wrong_sample_is_refused_alone(worker: Worker, value: Any, words: str) -> None:
    with pytest.raises(purevk.InputError, match=words):
        worker.sample(value)


def test_a_program_without_a_batch_is_refused() -> None:
    worker = Worker(DATA / "linear_relu.pte")
    (spec,) = worker.program.inputs
    with pytest.raises(purevk.PurevkError, match="expected"):
        worker.batch([worker.sample({spec.name: [0.0] * 5})])
    worker.close()


class Lookup(torch.nn.Module):
    """Named outputs, an input by name only, and indices: inputs, and those that the model computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(50, 4)

    def forward(self, ids: Any, *, pair: Any, flag: bool = True) -> Any:
        rows = self.table(ids)
        computed = self.table((pair["at"] * 2).long())
        return {
            "mean": rows.mean(1) + pair["x"][:, None],
            "by": (computed, None),
            "ids": rows.sum(2),
        }


def _saved(model: Any, path: Path, lowest: int = 1) -> Path:
    batch = torch.export.Dim("batch", min=lowest, max=8)
    shapes = {
        "ids": {0: batch, 1: torch.export.Dim("n", min=1, max=6)},
        "pair": {"at": {0: batch}, "x": {0: batch}},
        "flag": None,
    }
    rows = lowest + 1
    example = torch.zeros(rows, 3, dtype=torch.long)
    pair = {"at": torch.ones(rows), "x": torch.ones(rows)}
    with purevk.compile(
        model, (example,), kwargs={"pair": pair, "flag": True}, dynamic_shapes=shapes
    ) as program:
        program.save(path)
    return path


@pytest.fixture(scope="module", params=[1, 3])
def lookup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A worker whose calls have at least so many samples."""
    folder = tmp_path_factory.mktemp("lookup")
    with contextlib.closing(Worker(_saved(Lookup(), folder / "m.pvk", request.param))) as worker:
        yield worker


def _eager(ids: Any, at: Any, x: Any) -> dict[str, np.ndarray]:
    pair = {"at": torch.as_tensor(at), "x": torch.as_tensor(x)}
    with torch.no_grad():
        outputs = Lookup()(torch.as_tensor(ids), pair=pair)
    return {"mean": outputs["mean"], "by.0": outputs["by"][0], "ids": outputs["ids"]}


def _compare(outputs: Any, expected: dict[str, Any]) -> None:
    assert outputs.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name], values, 1e-5, 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_batches_of_mixed_requests(lookup: Worker, seed: int) -> None:
    """Requests of any sizes, with wrong ones among them: each gets its own answer or error."""
    rng = np.random.default_rng(seed)
    samples, expected = [], []
    for _ in range(20):
        ids = rng.integers(0, 50, rng.integers(1, 7))
        at, x = rng.integers(0, 50) / 2, rng.random()
        wrong = rng.integers(6)
        if wrong == 0:  # an index that the model computes: known during the call only
            at = float(rng.choice([-3, 30]))
        if wrong == 1:
            ids[rng.integers(len(ids))] = rng.choice([-1, 50, 2**40])
        values = {"ids": ids.tolist(), "pair.at": at, "pair.x": x}
        if wrong == 1:
            element = int(np.argmax((ids < 0) | (ids >= 50)))
            with pytest.raises(purevk.InputError, match=rf"(?s)has the index.*ids\[{element}\]"):
                lookup.sample(values)
            continue
        if rng.integers(2):
            values["flag"] = True
        samples.append(lookup.sample(values))
        expected.append(
            None if wrong == 0 else _eager(ids[None], np.float32([at]), np.float32([x]))
        )
    results = lookup.batch(samples)
    assert len(results) == len(expected)
    for result, outputs in zip(results, expected):
        if outputs is None:
            assert isinstance(result, purevk.InputError), result
        else:
            _compare(result, {name: values[0] for name, values in outputs.items()})


def test_names_of_outputs(lookup: Worker) -> None:
    batch = {
        "ids": np.arange(15).reshape(5, 3),
        "pair.at": np.arange(5, dtype=np.float32),
        "pair.x": np.ones(5, np.float32),
    }
    expected = _eager(*batch.values())
    _compare(lookup.forward(*batch.values(), True), expected)
    assert lookup.columns(batch, keep_inputs=False).keys() == expected.keys()
    with pytest.raises(purevk.InputError, match="flag is False"):
        lookup.sample({"ids": [1], "pair.at": 1, "pair.x": 1, "flag": False})
    for length in (0, 7):
        with pytest.raises(purevk.SizeConstraintError, match="exported for 1 to 6"):
            lookup.sample({"ids": [1] * length, "pair.at": 1, "pair.x": 1})


class Numbers(torch.nn.Module):
    """A Python number that is the same for all samples, and one of the whole batch."""

    def forward(self, x: Any, k: int) -> Any:
        return {"y": x * k, "scale": 3, "rows": x.shape[0] if k else 0}


class OneNumber(torch.nn.Module):
    def forward(self, x: Any, k: int) -> Any:
        return {"y": x * k, "scale": 3}


def test_numbers(tmp_path: Path) -> None:
    """Samples with other integers run in calls of their own."""
    shapes = {"x": {0: torch.export.Dim("batch", min=1, max=8)}, "k": torch.export.Dim.DYNAMIC}
    for number, module in enumerate((OneNumber(), Numbers())):
        path = tmp_path / f"{number}.pvk"
        with purevk.compile(module, (torch.ones(2, 3), 5), dynamic_shapes=shapes) as program:
            program.save(path)
    with contextlib.closing(Worker(tmp_path / "0.pvk")) as worker:
        samples = [worker.sample({"x": [1, 2, 3], "k": k % 2 + 2}) for k in range(5)]
        before = worker.stats.calls
        for k, result in enumerate(worker.batch(samples)):
            np.testing.assert_array_equal(result["y"], np.array([1, 2, 3]) * (k % 2 + 2))
            assert result["scale"] == 3
        assert worker.stats.calls == before + 2
        for k in (None, "1", 10**30, 2.5, [1], True):
            with pytest.raises(purevk.InputError, match="k is"):
                worker.sample({"x": [1, 2, 3], "k": k})
    with contextlib.closing(Worker(tmp_path / "1.pvk")) as worker:
        with pytest.raises(purevk.InputError, match="rows: integer has no batch dimension"):
            worker.sample({"x": [1, 2, 3], "k": 1})


def test_bfloat16(tmp_path: Path) -> None:
    """Requests have numbers, not the bits that purevk has for numpy."""
    path = tmp_path / "m.pvk"
    shapes = {"input": {0: torch.export.Dim("batch", min=1, max=8)}}
    model = torch.nn.Softplus().bfloat16()
    example = torch.zeros(2, 5, dtype=torch.bfloat16)
    with purevk.compile(model, (example,), dynamic_shapes=shapes) as program:
        program.save(path)
    x = torch.cat([torch.randn(6, 5) * 3, torch.tensor([[1.00390625, 1.01171875, 3e38, -0.0, 0]])])
    with contextlib.closing(Worker(path)) as worker:
        results = worker.batch([worker.sample({"input": row.tolist()}) for row in x])
        with pytest.raises(purevk.InputError, match="input.1. is 1e.39"):
            worker.sample({"input": [0, 1e39, 0, 0, 0]})
    outputs = torch.tensor(np.array([next(iter(each.values())) for each in results]))
    torch.testing.assert_close(outputs, model(x.bfloat16()).float(), rtol=1e-2, atol=1e-3)


DTYPES = ("bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64")
_VALUES = (0, 1, -1, 127, 255, 2**31, -(2**63), 2**63, 2**64, 10**30, 10**400, 0.5, 1.0, -0.0, 65504.0,
           1e5, 1e39, 1e300, math.inf, math.nan, True, None, "1", "x", b"1", {}, 1j, object())  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_values_of_requests(dtype: str, seed: int) -> None:
    """An array has exactly the values of the request, or the first element that is none is named."""
    draw = random.Random(f"{dtype}{seed}")
    kind = np.dtype(dtype)
    for _ in range(60):
        shape = [draw.randint(1, 3) for _ in range(draw.randint(0, 2))]
        count = math.prod(shape)
        elements = [draw.choice((0, 1)) for _ in range(count)]
        for _ in range(draw.randint(0, 2)):
            elements[draw.randrange(count)] = draw.choice(_VALUES)
        right = [_is_of(kind, element) for element in elements]
        value = np.empty(count, object)
        value[:] = elements
        nested = value.reshape(shape).tolist()
        if all(right):
            array = read_values("x", nested, kind)
            assert array.dtype == kind and array.shape == tuple(shape)
            exact = np.array([kind.type(float(e) if kind.kind == "f" else e) for e in elements])
            np.testing.assert_array_equal(array.ravel(), exact)
            continue
        with pytest.raises(purevk.InputError, match="x is no tensor") as refused:
            read_values("x", nested, kind)
        indices = [
            list(map(int, np.unravel_index(at, shape))) for at in range(count) if not right[at]
        ]
        named = [f"x{index if index else ''} is" for index in indices]
        assert any(each in str(refused.value) for each in named), (nested, refused.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nested_values(dtype: str) -> None:
    """Any depth, also beyond the 32 and 64 dims of numpy."""
    for depth in (0, 1, 31, 32, 33, 63, 64, 65, 900):
        for leaf in (1, None, "a", 10**400, 0.5, [], {}, [1, [2]]):
            value: Any = leaf
            for _ in range(depth):
                value = [value]
            try:
                array = read_values("x", value, np.dtype(dtype))
            except purevk.InputError as error:
                assert "x is no tensor" in error.what
            else:
                assert array.dtype == dtype and depth <= 64


def test_memory_of_values() -> None:
    """A long text among numbers does not make each of them as long."""
    for wrong in ("a" * 20_000, 10**4000, None, ["a" * 20_000], b"a" * 20_000):
        for dtype in ("float32", "int64"):
            tracemalloc.start()
            with pytest.raises(purevk.InputError, match="x.2000. is"):
                read_values("x", [1] * 2000 + [wrong], np.dtype(dtype))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 1 << 20


def _is_of(dtype: np.dtype, element: Any) -> bool:
    """Whether a dtype has a number: integers exactly, floats up to rounding."""
    if not isinstance(element, (bool, int, float)):
        return False
    if dtype.kind == "f":
        try:
            with np.errstate(over="ignore"):
                rounded = dtype.type(float(element))
        except OverflowError:
            return False
        return bool(np.isfinite(rounded)) or not math.isfinite(element)
    if isinstance(element, float) and not element.is_integer():
        return False
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool(low <= element <= high)


def test_prometheus(worker: Worker) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    registry.register(worker)
    worker.forward(_samples(2))
    text = prometheus.generate_latest(registry).decode()
    assert "purevk_calls_total 1.0" in text and "purevk_queue 0.0" in text
    assert 'purevk_latency_seconds_bucket{le="+Inf"} 1.0' in text
    assert "purevk_compiles_total" in text


def test_ray_data_without_ray_serve(
    monkeypatch: pytest.MonkeyPatch, file: Path, model: Any
) -> None:
    """`ray[data]` alone has not what Ray Serve needs."""
    fake = types.ModuleType("ray")
    context = types.SimpleNamespace(get_accelerator_ids=lambda: {"GPU": []})
    fake.get_runtime_context = lambda: context  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)
    names = [f"purevk.integrations.{name}" for name in ("ray", "ray_device", "ray_serve")]
    # `from ray import serve` also finds a Ray Serve that an earlier test imported.
    for name in (*names, "ray.serve"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from purevk.integrations.ray import MapBatches

    x = _samples(3)
    found = MapBatches(str(file), keep_inputs=False)({"input": x})
    np.testing.assert_allclose(*found.values(), _expected(model, x), 1e-5, 1e-6)
    with pytest.raises(ImportError, match="serve"):
        from purevk.integrations.ray import Deployment  # noqa: F401
    for name in names[:2]:  # they have the fake one
        monkeypatch.delitem(sys.modules, name)


class _Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self.name, self._array = name, array

    def as_numpy(self) -> np.ndarray:
        return self._array


def _fake_utilities() -> types.ModuleType:
    """What the recipe uses of https://github.com/triton-inference-server/python_backend#usage."""
    fake = types.ModuleType("triton_python_backend_utils")
    fake.Tensor = _Tensor  # type: ignore[attr-defined]
    fake.TritonError = lambda message: message  # type: ignore[attr-defined]
    fake.InferenceResponse = lambda output_tensors=(), error=None: (  # type: ignore[attr-defined]
        types.SimpleNamespace(output_tensors=output_tensors, error=error)
    )
    fake.get_input_tensor_by_name = lambda request, name: request.get(name)  # type: ignore[attr-defined]
    return fake


def test_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: Path, model: Any) -> None:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", _fake_utilities())
    monkeypatch.delitem(sys.modules, "purevk.integrations.triton", raising=False)
    from purevk.integrations.triton import TritonPythonModel

    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.pvk").write_bytes(file.read_bytes())
    triton = TritonPythonModel()
    triton.initialize(
        {
            "model_repository": str(tmp_path),
            "model_version": "1",
            "model_instance_kind": "CPU",
            "model_instance_device_id": "0",
        }
    )
    x, wrong = _samples(3), np.zeros((3, 4), np.float32)
    good, bad, none = triton.execute(
        [
            *({"input": _Tensor("input", each)} for each in (x, wrong)),
            {"other": _Tensor("other", x)},
        ]
    )
    triton.finalize()
    assert good.error is None and bad.error and not bad.output_tensors
    assert "lacks the inputs input" in none.error and not none.output_tensors
    np.testing.assert_allclose(good.output_tensors[0].as_numpy(), _expected(model, x), 1e-5, 1e-6)
    assert triton.worker.stats.failures == 1
