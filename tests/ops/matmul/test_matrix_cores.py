"""Plans for a device with matrix cores, which the device of the tests need not have: the macros are
those that the templates declare."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from purevk.graph.context import typical_traits
from purevk.lower.lowering import Dispatch
from purevk.passes.pipeline import optimize
from purevk.schedule.planning import make_plan
from tests.ops.harness import Recorder
from tests.ops.matmul import test_choice

aten = torch.ops.aten
FEATURES = typical_traits().features
LARGE = replace(test_choice.LARGE, features=FEATURES)
WORKGROUPS = replace(test_choice.WORKGROUPS, features=FEATURES)


def planned(fn, *inputs: torch.Tensor, traits=LARGE) -> list[Dispatch]:
    recorder = Recorder()
    made = fn(recorder.call, *(recorder.input(x) for x in inputs))
    graph = optimize(recorder.importer.finish([made]), traits)
    return list(make_plan(graph, traits).dispatches)


def half(*sizes: int) -> torch.Tensor:
    return torch.zeros(sizes, dtype=torch.float16)


def residual(call, x, weight, bias, other):
    made = call(aten.linear.default, (x, weight, bias), {})
    return call(aten.add.Tensor, (made, other), {})


@pytest.mark.parametrize("traits", [LARGE, WORKGROUPS], ids=["subgroups", "workgroups"])
def test_a_residual_is_read_ahead(traits) -> None:
    inputs = half(6304, 768), half(768, 768), half(768), half(6304, 768)
    (dispatch,) = planned(residual, *inputs, traits=traits)
    macros = dict(dispatch.kernel.macros)
    assert dispatch.kernel.template == "matmul/matmul_tiled.comp"
    assert macros["VEC8_A"] == macros["VEC8_B"] == macros["COOPMAT"] == "1"
    assert macros["EXTRAS"] and macros["EXTRAS_WORDS"] == "2"


def test_rows_that_are_not_aligned_are_read_by_four() -> None:
    inputs = half(6304, 764), half(768, 764), half(768), half(6304, 768)
    (dispatch,) = planned(residual, *inputs)
    macros = dict(dispatch.kernel.macros)
    assert macros["COOPMAT"] == "1" and macros["VEC4_A"] == "1" and "VEC8_A" not in macros


@pytest.mark.parametrize(("channels", "wide"), [(64, True), (60, False)])
def test_convolutions(channels: int, wide: bool) -> None:
    def convolved(call, x, weight, other):
        made = call(aten.conv2d.default, (x, weight, None, [1, 1], [1, 1]), {})
        return call(aten.add.Tensor, (made, other), {})

    sizes = (4, channels, 28, 28)
    dispatches = planned(convolved, half(*sizes), half(channels, channels, 3, 3), half(*sizes))
    (tiled,) = [d for d in dispatches if d.kernel.template == "conv/conv2d_tiled.comp"]
    macros = dict(tiled.kernel.macros)
    assert macros["COOPMAT"] == "1" and (macros.get("VEC8_A") == "1") == wide
