"""What engines serve: a worker alone, and Triton's Python backend on a fake of its utilities."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
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
    (tmp_path / "1" / "model.pte").write_bytes(file.read_bytes())
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
