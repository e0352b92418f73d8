"""Complex numbers as real ones, without a device."""

from __future__ import annotations

import torch

from purevk.ir import Graph
from purevk.ir.verify import verify
from purevk.passes.complex import split_complex
from purevk.passes.fusion.pointwise import fuse_pointwise
from purevk.passes.pipeline import optimize
from purevk.passes.placement import assign_hosts
from purevk.schedule.planning import make_plan
from tests.ops.harness import Recorder
from tests.passes.harness import TRAITS

aten = torch.ops.aten


def recorded(fn, *inputs: torch.Tensor) -> Graph:
    recorder = Recorder()
    made = fn(recorder.call, *(recorder.input(x) for x in inputs))
    return recorder.importer.finish(list(made))


def chain(call, x, y):
    product = call(aten.mul.Tensor, (x, y), {})
    return call(aten.add.Tensor, (product, x), {}), call(aten.abs.default, (product,), {})


X = torch.zeros(3, 4, dtype=torch.complex64)


def test_only_views_take_complex_numbers() -> None:
    after = split_complex(recorded(chain, X, X), TRAITS)
    verify(after)
    views = ("aten.view_as_real.default", "aten.view_as_complex.default")
    for node in after.nodes:
        values = (*node.inputs, *node.results)
        assert node.op in views or not any(value.type.dtype.is_complex for value in values)
    assert [value.type.dtype.name for value in after.inputs] == ["complex64", "complex64"]
    assert [value.type.dtype.name for value in after.outputs] == ["complex64", "float32"]


def test_operators_without_a_rule_run_on_the_cpu() -> None:
    def mixed(call, x):
        angle = call(aten.sinc.default, (call(aten.neg.default, (x,), {}),), {})
        return (call(aten.mul.Tensor, (angle, 2j), {}),)

    after = split_complex(assign_hosts(recorded(mixed, X), TRAITS), TRAITS)
    verify(after)
    (host,) = [node for node in after.nodes if node.op == "purevk.host"]
    assert host.args[1] == "no kernel for complex numbers"
    assert all(value.type.dtype.name == "complex64" for value in (*host.inputs, *host.results))


def test_both_parts_are_fused() -> None:
    """A program with two results joins the one program that reads both."""

    def three(call, x, y):
        product = call(aten.mul.Tensor, (call(aten.mul.Tensor, (x, y), {}), x), {})
        return (call(aten.mul.Tensor, (product, y), {}),)

    graph = optimize(recorded(three, X, X), TRAITS)
    programs = [node for node in graph.nodes if node.op == "purevk.pointwise"]
    assert len(programs) == 1 and len(programs[0].results) == 2
    assert fuse_pointwise(graph, TRAITS).nodes == graph.nodes


def test_a_program_writes_pairs() -> None:
    """The parts of a result have its bytes: nothing copies them."""
    plan = make_plan(optimize(recorded(chain, X, X), TRAITS), TRAITS)
    assert {each.kernel.template for each in plan.dispatches} == {"elementwise/pointwise.comp"}
    output = plan.assignment.graph.outputs[0]
    storage = plan.assignment.storages[output]
    parts = [value for value, other in plan.assignment.storages.items() if other is storage]
    layouts = {
        (plan.assignment.layouts[value].offset, plan.assignment.layouts[value].strides)
        for value in parts
    }
    assert {(0, (8, 2)), (1, (8, 2))} <= layouts
