"""PUREVK_CHECK: right programs pass, and a defect is named."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import knobs
from purevk.checking.walk import Counts
from purevk.cli.inputs import make_inputs
from purevk.errors import DifferenceError
from purevk.ops.registry import Pointwise, Rewrite
from purevk.passes import pipeline
from tests.checking.harness import breaking, redefined
from tests.harness import DATA, NO_TORCH, in_threads, python

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.device


def counts_of(program: purevk.Program) -> Counts:
    """What the last call compared."""
    found = [each.counts for each in program.method("forward").specializations]
    counts = next(each for each in reversed(found) if each is not None)
    assert counts is not None
    return counts


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)

    def forward(self, x: Any) -> Any:
        x = self.norm(torch.nn.functional.gelu(self.linear(x)))
        return torch.relu(x - x.mean(0)), x.sort(-1)


class Loop(torch.nn.Module):
    """A loop whose number of iterations the host decides, with a branch inside."""

    def forward(self, x: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            x = torch.cond(x.sum() > 10, lambda x: torch.tanh(x), lambda x: torch.exp2(x), (x,))
            return i + 1, x

        return torch.while_loop(lambda i, x: i < 3, step, (torch.tensor(0), x))[1]


class Masked(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        chosen = x[x > 0]
        return chosen * 2, chosen.sum()


class Dropped(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.nn.functional.dropout(x.exp(), 0.5, True) + 1


def test_a_healthy_module(checking: Path) -> None:
    x, module = torch.randn(3, 8), Mixed().eval()
    program = purevk.compile(module, (x,))
    torch.testing.assert_close(program(x)[0], module(x)[0])
    assert counts_of(program).checked >= 6 and not counts_of(program).unchecked


def layer(x: Any, weight: Any, bias: Any) -> Any:
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias)


class Rotated(torch.nn.Module):
    """Heads that rotate, behind a norm or not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.randn(2, 5, 8))

    def forward(self, x: Any) -> Any:
        normal = torch.nn.functional.rms_norm(x, (8,), None, 1e-3)
        return [self.turned(each, *self.angles[..., : each.shape[-1]]) for each in (normal, x)]

    def turned(self, x: Any, cos: Any, sin: Any) -> Any:
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat((-two, one), -1) * sin


def test_rotations(checking: Path) -> None:
    from tests.passes.decoding.harness import ops_of

    x, module = torch.randn(2, 3, 5, 8), Rotated()
    program = purevk.compile(module, (x,))
    for found, wanted in zip(program(x), module(x)):
        torch.testing.assert_close(found, wanted)
    assert {"purevk.rotate_halves", "purevk.norm fused"} <= set(ops_of(program))
    assert counts_of(program).checked >= 2 and not counts_of(program).unchecked


@pytest.mark.parametrize("heads_first", [False, True])
def test_rotations_to_caches(checking: Path, heads_first: bool) -> None:
    from tests.passes.decoding.harness import NormedProjections, ops_of

    module = NormedProjections(layer, heads_first)
    call = (torch.randn(1, 3, 24), torch.tensor(4))
    wanted = copy.deepcopy(module)(*call)
    program = purevk.compile(module, call)
    torch.testing.assert_close(program(*call), wanted, rtol=1e-5, atol=1e-5)
    assert "purevk.norm to cache" in ops_of(program)
    assert "purevk.norm" not in counts_of(program).unchecked


def test_weights_that_change(checking: Path) -> None:
    """The check compares with the weights of this call."""
    x, module = torch.randn(3, 8), Mixed().eval()
    program = purevk.compile(module, (x,))
    with torch.no_grad():
        module.linear.weight.mul_(3)
    torch.testing.assert_close(program(x)[0], module(x)[0])


def test_dynamic_sizes(checking: Path) -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    module = Mixed().eval()
    program = purevk.compile(module, (torch.randn(5, 8),), dynamic_shapes=({0: rows},))
    for count in (2, 5, 64):
        program(torch.randn(count, 8))
        assert counts_of(program).checked >= 6


def test_data_dependent_sizes(checking: Path) -> None:
    x = torch.tensor([1.0, -1.0, 2.0, -3.0, 4.0])
    program = purevk.compile(Masked(), (x,))
    assert program(x)[1] == 7 and program(-x)[1] == 4
    assert counts_of(program).checked >= 3


@pytest.mark.parametrize("name", ["branch", "counter", "dynamic_views", "linear_relu_half", "topk"])
def test_files(checking: Path, name: str) -> None:
    with purevk.load(DATA / f"{name}.pte") as program:
        method = program.method("forward")
        given = make_inputs(method.graph, Namespace(input=[], size=[], seed=0), name)
        for _ in range(2):  # a state has other elements at the second call
            method.run_flat(given)
        assert counts_of(program).checked > 0


def test_states_are_those_of_the_program(checking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs the nodes once more, on copies of the states."""
    x = np.ones((2, 4), np.float32)
    with purevk.load(DATA / "counter.pte") as program:
        checked = [program.forward(x) for _ in range(3)]
        monkeypatch.setenv(knobs.CHECK.name, "0")
        program.reset_state()
        for want in checked:
            np.testing.assert_array_equal(program.forward(x), want)
    assert not np.array_equal(checked[0], checked[1])


def test_random_operators_are_named(checking: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(64)
    program = purevk.compile(Dropped(), (x,))
    torch.manual_seed(3)
    first = program(x), program(x)
    assert "random" in caplog.text and "dropout" in caplog.text
    assert counts_of(program).random and counts_of(program).checked >= 2
    torch.manual_seed(3)
    second = program(x), program(x)  # the check draws no seeds
    for one, two in zip(first, second):
        assert torch.equal(one, two)


# -- defects -------------------------------------------------------------------------------------
def test_a_wrong_operator_is_named(checking: Path) -> None:
    x, module = torch.randn(3, 8), Mixed().eval()
    with redefined("aten.gelu.default", Pointwise("x * 0.51")):
        program = purevk.compile(module, (x,))
        with pytest.raises(DifferenceError) as caught:
            program(x)
    error = caught.value
    assert error.operator == "aten.gelu.default" and error.source and error.node == 1
    assert "float32[3,16]" in error.why and Path(error.path).parent == checking
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and vars(again) == vars(error)
    with np.load(error.path) as saved:
        given = torch.from_numpy(saved["input_0"])
        expected = torch.nn.functional.gelu(given).numpy()
        np.testing.assert_array_equal(saved["expected_0"], expected)
        np.testing.assert_allclose(saved["got_0"], saved["input_0"] * 0.51, rtol=1e-6)
        distance = np.abs(saved["got_0"] - expected)
        assert error.largest == pytest.approx(distance.max()) == distance[error.index]
        assert "aten.gelu.default" in str(saved["node"])


def test_a_small_error_is_found(checking: Path) -> None:
    with redefined("aten.exp2.default", Pointwise("exp2(x) * 1.0003")):
        with pytest.raises(DifferenceError, match=r"aten\.exp2\.default"):
            purevk.compile(Loop(), (torch.rand(3),))(torch.rand(3))


def test_a_wrong_element_is_found(checking: Path) -> None:
    """One element of a result is wrong."""
    wrong = Rewrite(lambda builder, node: builder.aten.relu(node.args[0]))
    x = torch.arange(1.0, 9.0)
    x[5] = -1e-3
    with redefined("aten.abs.default", wrong):
        program = purevk.compile(Abs(), (x,))
        with pytest.raises(DifferenceError) as caught:
            program(x)
    assert caught.value.index == (5,) and caught.value.largest == pytest.approx(1e-3)


class Abs(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.abs() + 1


def test_a_node_in_a_loop_is_named(checking: Path) -> None:
    """The second branch is wrong; it runs in the first iterations."""
    with redefined("aten.tanh.default", Pointwise("x")):
        program = purevk.compile(Loop(), (torch.rand(3),))
        with pytest.raises(DifferenceError) as caught:
            program(torch.ones(3) * 2)  # exp2 makes 12 in all, and then tanh runs
    assert caught.value.operator == "aten.tanh.default"
    program = purevk.compile(Loop(), (torch.rand(3),))
    program(torch.ones(3) * 2)
    assert counts_of(program).checked >= 10


def test_a_wrong_pass_is_told_apart(checking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = breaking(pipeline.share_cats, "aten.sub.Tensor", "aten.relu.default")
    monkeypatch.setattr(pipeline, "share_cats", broken)
    x = torch.randn(3, 4)
    program = purevk.compile(Difference(), (x, x + 1))
    with pytest.raises(DifferenceError, match="right by itself") as caught:
        program(x, x + 1)
    assert caught.value.node is None and "PUREVK_SKIP_PASSES" in caught.value.next
    monkeypatch.setenv(knobs.SKIP_PASSES.name, "share_cats")
    program = purevk.compile(Difference(), (x, x + 1))
    torch.testing.assert_close(program(x, x + 1), torch.zeros(3, 4))


class Difference(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return torch.relu(x - y)


def test_torch_compile_does_not_hide_it(checking: Path) -> None:
    """Under torch.compile, what fails runs in eager torch. A difference is raised."""
    torch._dynamo.reset()
    x = torch.randn(7)
    compiled = torch.compile(Abs(), backend="purevk")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), x.abs() + 1)
    torch._dynamo.reset()
    with redefined("aten.abs.default", Pointwise("x")), torch.no_grad():
        with pytest.raises(DifferenceError, match=r"aten\.abs"):
            torch.compile(Abs(), backend="purevk")(-x.abs())


def test_the_default_folder_and_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path))
    monkeypatch.delenv(knobs.DUMP.name, raising=False)
    x = torch.randn(4)
    with redefined("aten.abs.default", Pointwise("x")):
        program = purevk.compile(Abs(), (x,))
        program(x)  # nobody asks for a check
        monkeypatch.setenv(knobs.CHECK.name, "1")
        with pytest.raises(DifferenceError) as caught:
            program(-x.abs())
    assert Path(caught.value.path).parent == tmp_path / "check"


def test_torch_is_needed() -> None:
    source = NO_TORCH + (
        "import json, numpy, purevk\n"
        f"program = purevk.load({str(DATA / 'linear_relu.pte')!r})\n"
        "try:\n"
        "    program.forward(numpy.zeros((2, 5), numpy.float32))\n"
        "except purevk.FallbackError as error:\n"
        "    print(json.dumps([error.what, error.next]))\n"
    )
    what, next_ = python(source, **{knobs.CHECK.name: "1"})
    assert what == "a check of the device needs torch" and "pip install torch" in next_


@pytest.mark.slow
def test_threads_check_their_programs(checking: Path) -> None:
    """Pipelines of single nodes are made and destroyed while other threads submit. Destroyed at the
    wrong moment, they made drivers give wrong results."""
    from tests.models.harness import exported, samples_of

    paths = [exported(name) for name in ("decoder", "decoder", "minilm_sdpa_dyn")]

    def run(path: Path) -> None:
        with purevk.load(path) as program:
            inputs, _ = samples_of(path)[0]
            for _ in range(4):
                program.forward(*inputs)

    in_threads(*(partial(run, path) for path in paths))
