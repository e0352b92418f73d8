"""Models looked at without their weights: the plan is that of the loaded program, and nothing of
the weights is read."""

from __future__ import annotations

import json

import pytest

resource = pytest.importorskip("resource")
torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk.errors import InputError, UnsupportedProgramError  # noqa: E402
from purevk.graph.context import default_context  # noqa: E402
from purevk.graph.limits import DeviceLimits  # noqa: E402
from tests.harness import DATA  # noqa: E402

LIMITS = DeviceLimits(bytes_per_second=1e9, flops_per_second=1e10)


class Net(torch.nn.Module):
    """Linear layers, a convolution, norms, attention, a buffer that is written, and one weight used
    twice."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, width)
        self.mixer = torch.nn.Conv1d(width, width, 3, padding=1)
        self.batch = torch.nn.BatchNorm1d(width)
        self.norm = torch.nn.LayerNorm(width)
        self.out = torch.nn.Linear(width, 50, bias=False)
        self.out.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = self.batch(self.mixer(x.transpose(1, 2))).transpose(1, 2)
        heads = self.norm(x).unflatten(-1, (4, -1)).transpose(1, 2)
        x = (
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            .transpose(1, 2)
            .flatten(2)
        )
        self.seen.add_(x.mean((0, 1)))
        return self.out(torch.nn.functional.gelu(x) + self.seen)


def _shapes() -> dict:
    return {"ids": {1: torch.export.Dim("n", min=2, max=32)}}


@pytest.mark.device
def test_the_plan_is_that_of_the_loaded_program() -> None:
    ids = torch.zeros(1, 7, dtype=torch.int64)
    with torch.device("meta"):
        planned = purevk.plan(
            Net().eval(), (ids,), _shapes(), device=default_context(), limits=LIMITS
        )
    with purevk.compile(Net().eval(), (ids,), _shapes()) as program:
        report, loaded = planned.report(), program.report()
        assert (report["dispatches"], report["segments"]) == (
            loaded["dispatches"],
            loaded["segments"],
        )
        assert {"weights": 0, **report["memory"]} == {
            **vars(program.memory),
            "weights": report["memory"]["weights"],
        }
        assert 0 < report["memory"]["weights"] <= program.memory.weights
        labels = [
            [node["label"] for segment in graph.data()["segments"] for node in segment["nodes"]]
            for graph in (planned.graph(), program.graph())
        ]
        assert labels[0] == labels[1]
        kernels = [
            dispatch.kernel for dispatch in program.method("forward").executable.plan.dispatches
        ]
        assert [dispatch.kernel for dispatch in planned.plan.dispatches] == kernels


def test_cost() -> None:
    with torch.device("meta"):
        module = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)
        ).eval()
    batch = {"input": {0: torch.export.Dim("n", min=2, max=16)}}
    planned = purevk.plan(module, (torch.zeros(4, 64),), batch, device="typical", limits=LIMITS)
    (name,) = (symbol.name for symbol in planned.plan.graph.symbols)
    for size in (16, 3):
        costs = planned.costs(**{name: size})
        matmuls = [cost for cost in costs if cost.flops >= 2 * size * 128 * 32]
        assert sum(cost.flops for cost in matmuls) == pytest.approx(
            2 * size * 128 * (64 + 32), rel=0.1
        )
        moved = 4 * (128 * 64 + 128 + 32 * 128 + 32 + size * (64 + 128 + 128 + 32))
        assert sum(cost.nbytes for cost in matmuls) == pytest.approx(moved, rel=0.15)
        for cost in costs:
            assert cost.seconds >= max(cost.nbytes / 1e9, cost.flops / 1e10) * 0.999
        report = planned.report(**{name: size})
        assert report["seconds"] == pytest.approx(sum(cost.seconds for cost in costs))
        assert report["flops"] == sum(cost.flops for cost in costs)
    assert planned.report()["flops"] == planned.report(**{name: 16})["flops"]
    assert "Gflop" in str(planned) and "at least" in str(planned)
    assert " in 1 segment, 0 nodes on the CPU" in str(planned) and " 1 nodes" not in str(planned)
    with pytest.raises(InputError, match="no size is named"):
        planned.costs(other=3)


def test_no_weights_are_needed() -> None:
    """A layer of 16 GiB, in less than one of it."""
    with torch.device("meta"):
        module = torch.nn.Linear(1 << 16, 1 << 16, bias=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    planned = purevk.plan(module, (torch.empty(1, 1 << 16, device="meta"),), device="typical")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20
    assert planned.memory.weights >= 1 << 34
    assert planned.report()["bytes"] >= 1 << 34
    assert (
        planned.kernels
        and json.loads(planned.graph().to_json())["constants"][0]["bytes"] == 1 << 34
    )
    with pytest.raises(UnsupportedProgramError, match="cannot run"):
        planned.forward(torch.empty(1, 1 << 16))


def test_examples_are_those_that_compile_takes() -> None:
    module, x = torch.nn.Linear(4, 3).eval(), torch.rand(1, 4)
    batch = torch.export.Dim("batch", max=8)
    for given in (x, [x], (x.numpy(),)):
        planned = purevk.plan(module, given, device="typical")
        assert str(planned).startswith("Linear(float32[1,4])")
    planned = purevk.plan(module, (x,), ({0: batch},), device="typical")
    assert "<=8,4])" in str(planned).partition("\n")[0]
    with pytest.raises(InputError, match="function is nothing to plan"):
        purevk.plan(lambda x: x, (x,), device="typical")
    with pytest.raises(TypeError, match="required argument") as caught:
        purevk.plan(module, device="typical")
    if hasattr(Exception, "add_note"):
        assert "example inputs" in caught.value.__notes__[0]


def test_weights_that_share_memory_count_once() -> None:
    with torch.device("meta"):
        module = Net(64).eval()
        separate = Net(64).eval()
        separate.out.weight = torch.nn.Parameter(torch.empty(50, 64))
    ids = torch.zeros(1, 7, dtype=torch.int64)
    one, two = (purevk.plan(each, (ids,), device="typical") for each in (module, separate))
    assert len(two.plan.graph.constants) == len(one.plan.graph.constants) + 1


def test_files_can_be_planned() -> None:
    planned = purevk.plan(DATA / "linear_relu.pte", device="typical")
    assert planned.report()["dispatches"] == 1 and planned.name == "linear_relu.pte"
    with pytest.raises(InputError, match="no method"):
        purevk.plan(DATA / "linear_relu.pte", device="typical", method="backward")
    with pytest.raises(InputError, match="device="):
        purevk.plan(DATA / "linear_relu.pte", device="gpu")


def test_values_of_missing_weights_are_not_made_up() -> None:
    class Repeated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.count

    with torch.device("meta"):
        module = Repeated()
    planned = purevk.plan(module, (torch.zeros(4),), device="typical")
    assert (
        "count" not in str(planned) and len(planned.plan.graph.constants) == 1
    )  # read at a call, and no literal
