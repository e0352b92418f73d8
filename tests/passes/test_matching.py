"""Patterns of nodes, on graphs that a recorder makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from purevk.ir import Node, Value
from purevk.passes.matching import Match, Matcher, Num, Pattern, Var, Via, one_of, op
from tests.ops.harness import Recorder, tensor

aten = torch.ops.aten
X = Var("x")
MUL, ADD = "aten.mul.Tensor", "aten.add.Tensor"
SILU = op(MUL, x=X, y=op("aten.sigmoid.default", x=X), swap=True)


class Graphs:
    """A graph of two inputs, whose last values are its results."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.a, self.b = (self.recorder.input(tensor(2, 3, seed=seed)) for seed in range(2))

    def __call__(self, operator: Callable[..., object], *args: object, **keywords: object) -> Value:
        return self.recorder.call(operator, args, keywords)

    def match(self, pattern: Pattern, *results: Value, shared: bool = False) -> Match | None:
        """How the first result matches."""
        graph = self.recorder.importer.finish([*results])
        return Matcher(graph).match(pattern, results[0], shared)


@pytest.mark.parametrize("swap", [False, True])
def test_operands_in_either_order(swap: bool) -> None:
    g = Graphs()
    pair = g.a, g(aten.sigmoid.default, g.a)
    match = g.match(SILU, g(aten.mul.Tensor, *(pair[::-1] if swap else pair)))
    assert match is not None and match.value("x") is g.a
    assert [node.op for node in match.nodes] == [MUL, "aten.sigmoid.default"]


def test_a_variable_is_one_tensor() -> None:
    g = Graphs()
    assert g.match(SILU, g(aten.mul.Tensor, g.b, g(aten.sigmoid.default, g.a))) is None


def test_nobody_else_reads_what_is_inside() -> None:
    g = Graphs()
    inner = g(aten.sigmoid.default, g.a)
    result = g(aten.mul.Tensor, g.a, inner)
    assert g.match(SILU, result, inner) is None
    assert g.match(SILU, result, inner, shared=True) is not None


def test_other_choices_are_tried_where_a_later_argument_does_not_fit() -> None:
    """x is the first factor at first, and then the second one."""
    g = Graphs()
    product = g(aten.mul.Tensor, g.a, g.b)
    result = g(aten.add.Tensor, product, g(aten.neg.default, g.b))
    pattern = op(ADD, x=op(MUL, x=X, y=Var("y"), swap=True), y=op("aten.neg.default", x=X))
    match = g.match(pattern, result)
    assert match is not None and (match.value("x"), match.value("y")) == (g.b, g.a)


@pytest.mark.parametrize(("number", "fits"), [(0.5, True), (0.25, False)])
@pytest.mark.parametrize("kind", ["number", "constant", "fill"])
def test_numbers(kind: str, number: float, fits: bool) -> None:
    g = Graphs()
    if kind == "constant":
        operand: object = g.recorder.constant(torch.tensor(number))
    else:
        operand = number if kind == "number" else g(aten.full.default, [2, 1], number)
    result = g(aten.mul.Tensor, g.a, operand)
    assert (g.match(op(MUL, x=X, y=0.5), result) is not None) == fits
    match = g.match(op(MUL, y=Num("factor")), result)
    assert match is not None and match.number("factor") == number


def test_lists_choices_and_functions() -> None:
    """The halves of a tensor, one of them negated, in a list."""

    def half(number: int) -> Pattern:
        def whole(matcher: Matcher, value: Value) -> Value | None:
            node = matcher.producer(value, "aten.slice.Tensor")
            return node.tensor("x") if node and node.size("start") == number else None

        return Via(whole, X)

    def last(cat: Node) -> bool:
        return cat.int("dim") == 1

    g = Graphs()
    first, second = (g(aten.slice.Tensor, g.a, 1, at, at + 1) for at in (0, 1))
    negated = g(aten.neg.default, second)
    results = [g(aten.cat.default, [negated, first], dim) for dim in (1, 0)]
    tensors = (op("aten.neg.default", x=half(1)), half(0))
    pattern = one_of(op(ADD), op("aten.cat.default", tensors=tensors, when=last))
    found = [g.match(pattern, result, shared=True) for result in results]
    assert found[0] is not None and found[0].value("x") is g.a and found[1] is None
    wrong = op("aten.cat.default", tensors=(half(0), half(0)))
    assert g.match(wrong, results[0], shared=True) is None


def test_through_views() -> None:
    g = Graphs()
    product = g(aten.mul.Tensor, g.a, g.b)
    views = [g(aten.view.default, product, [6])]
    views.append(g(aten.view.default, views[0], [3, 2]))
    matcher = Matcher(g.recorder.importer.finish([g(aten.neg.default, views[1])]))
    node, passed = matcher.through(views[1], lambda node: node.op == "aten.view.default")
    assert node is not None and node.result is product
    assert [view.result for view in passed] == views[::-1]
    matcher = Matcher(g.recorder.importer.finish([views[1], views[0]]))
    assert matcher.through(views[1], lambda node: True)[0] is None
