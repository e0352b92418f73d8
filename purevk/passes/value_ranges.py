"""What is known of integers before a model runs: the least and the greatest that each element of a
tensor can be. Most indices that models compute are positions, or the results of a sort or an argmax.
Positions may be floats for a while, if those are whole numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Dim, Graph, Node, Size, Value
from purevk.ir import dims as _dims
from purevk.ops import registry
from purevk.ops.facts import Moves
from purevk.ops.shapes import wrap
from purevk.passes.rewrite import changing

_DEPTH = 64  # nodes that a value is followed through
# Bits of a float's significand: so many bits of a whole number are exact.
_EXACT_BITS = {DType.bfloat16: 8, DType.float16: 11, DType.float32: 24, DType.float64: 53}


class Range(NamedTuple):
    """The least and the greatest that an element can be."""

    least: Size
    greatest: Size

    def within(self, lowest: Size, below: Size) -> bool:
        """Whether all elements are from `lowest` to `below`, without it, whatever the sizes are. No
        comparison of sizes is noted as a guard."""
        return _never_less(self.least, lowest) and _never_less(below - 1, self.greatest)


def _never_less(left: Size, right: Size) -> bool:
    difference = left - right
    return _is_bounded(difference) and _dims.range_of(difference)[0] >= 0


def _is_bounded(size: Size) -> bool:
    """Whether the bounds of the symbols hold at each call: those of numbers such as positions are not
    compared, and may be negative."""
    return all(symbol.is_size for symbol in _dims.symbols(size))


class ValueRanges:
    """The ranges of the integers of a graph, and of floats that are whole numbers."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made = graph.producers()
        self._moving = changing(graph.nodes)
        self._known: dict[Value, Range | None] = {}

    def include(self, makers: Mapping[Value, Node]) -> None:
        """Takes nodes into account that are not in the graph."""
        self._made.update(makers)

    def of(self, value: Value, depth: int = 0) -> Range | None:
        """The range of the elements of a tensor; None if it is not known."""
        if value not in self._known:
            range_ = None
            if depth < _DEPTH and value not in self._moving:
                range_ = self._find(value, depth)
            if range_ is not None and not _fits(range_, value.type.dtype):
                range_ = None  # numbers may wrap, or are not bounded
            self._known[value] = range_
        return self._known[value]

    def _find(self, value: Value, depth: int) -> Range | None:
        constant = self._graph.constants.get(value)
        whole = value.type.dtype.is_int or value.type.dtype is DType.bool
        if constant is not None and whole:
            array = constant.array(value.type) if constant.known else np.empty(0)
            return Range(int(array.min()), int(array.max())) if array.size else None
        node = self._made.get(value)
        if value.type.dtype is DType.bool:
            return Range(0, 1)
        if node is None:
            return None
        rule, moves = _RULES.get(node.op), registry.movement(node)
        if rule is None and moves is not Moves.NO:
            rule = _same if moves >= Moves.SOME else _all_of
        if rule is None or not (whole or moves is not Moves.NO or node.op in _OF_FLOATS):
            return None
        return rule(_Known(self, node, value, depth + 1))


class _Known(NamedTuple):
    """A node with the ranges of its arguments."""

    ranges: ValueRanges
    node: Node
    result: Value
    depth: int

    def arg(self, name: str) -> Range | None:
        """The range of a tensor or a whole number."""
        return self.range_of(self.node.arg(name))

    def range_of(self, arg: object) -> Range | None:
        if isinstance(arg, Value):
            return self.ranges.of(arg, self.depth)
        if isinstance(arg, float) and arg.is_integer():
            arg = int(arg)
        if isinstance(arg, (int, Dim)) and _is_bounded(arg):
            return Range(arg, arg)
        return None

    def size_along(self) -> Size:
        """The size of x along a dim; of all of x if there is no dim."""
        x = self.node.tensor("x")
        dim = self.node.arg("dim")
        if not isinstance(dim, int) or not x.type.rank:
            return x.type.numel
        return x.type.dims[wrap(dim, x.type.rank)]


def _fits(range_: Range, dtype: DType) -> bool:
    if not (_is_bounded(range_.least) and _is_bounded(range_.greatest)):
        return False
    if dtype is DType.bool:
        return True
    least, greatest = _dims.range_of(range_.least)[0], _dims.range_of(range_.greatest)[1]
    if not dtype.is_int:
        exact = 1 << _EXACT_BITS[dtype] if dtype in _EXACT_BITS else -1
        return -exact <= least and greatest <= exact
    numbers = np.iinfo(dtype.numpy)
    return int(numbers.min) <= least and greatest <= int(numbers.max)


def _join(a: Range | None, b: Range | None) -> Range | None:
    """Of elements of one or the other tensor."""
    if a is None or b is None:
        return None
    return Range(_dims.minimum(a.least, b.least), _dims.maximum(a.greatest, b.greatest))


# -- rules ---------------------------------------------------------------------------------------
_Rule = Callable[[_Known], "Range | None"]


def _same(facts: _Known) -> Range | None:
    """All elements are among those of the first argument, or between two of them."""
    first = facts.node.args[0]
    return facts.range_of(first) if isinstance(first, Value) else None


def _all_of(facts: _Known) -> Range | None:
    """All elements are among those of the operands."""
    first, *others = (facts.range_of(value) for value in facts.node.inputs)
    for range_ in others:
        first = _join(first, range_)
    return first


def _number_along(facts: _Known) -> Range | None:
    """The number of an element along a dim, or with it, as the first result, the element."""
    if facts.result is not facts.node.results[-1]:
        return _same(facts)
    return Range(0, _dims.maximum(facts.size_along() - 1, 0))


def _arange(facts: _Known) -> Range | None:
    node = facts.node
    count = facts.result.type.dims[0]
    start = 0 if node.op == "aten.arange.default" else node.arg("start")
    step = node.arg("step") if node.op == "aten.arange.start_step" else 1
    if not isinstance(start, (int, Dim)) or not isinstance(step, int):
        return None
    last = start + step * (count - 1)
    return Range(start, last) if step > 0 else Range(last, start)


def _sum(facts: _Known, sign: int = 1) -> Range | None:
    x, y, alpha = facts.arg("x"), facts.arg("y"), facts.node.arg("alpha")
    if x is None or y is None or not isinstance(alpha, int):
        return None
    factor = alpha * sign
    low, high = (y.least, y.greatest) if factor >= 0 else (y.greatest, y.least)
    return Range(x.least + low * factor, x.greatest + high * factor)


def _product(facts: _Known) -> Range | None:
    factor, operand = _number(facts.arg("y")), facts.arg("x")
    if factor is None:
        factor, operand = _number(facts.arg("x")), facts.arg("y")
    if factor is None or operand is None:
        return None
    ends = (operand.least * factor, operand.greatest * factor)
    return Range(*(ends if factor >= 0 else ends[::-1]))


def _number(range_: Range | None) -> int | None:
    """The number that all elements are, if it is one."""
    if range_ is None or isinstance(range_.least, Dim) or isinstance(range_.greatest, Dim):
        return None
    return range_.least if range_.least == range_.greatest else None


def _divisor(facts: _Known) -> int | None:
    number = _number(facts.arg("y"))
    return number if number is not None and number > 0 else None


def _remainder(facts: _Known) -> Range | None:
    divisor = _divisor(facts)
    return None if divisor is None else Range(0, divisor - 1)


def _quotient(facts: _Known) -> Range | None:
    x, divisor = facts.arg("x"), _divisor(facts)
    mode = facts.node.arg("rounding_mode") if facts.node.op.startswith("aten.div.") else "floor"
    if x is None or divisor is None or mode != "floor":
        return None
    return Range(x.least // divisor, x.greatest // divisor)


def _clamp(facts: _Known) -> Range | None:
    least, greatest = facts.arg("x") or _every(facts.result)
    for name, bound in (("min", _dims.maximum), ("max", _dims.minimum)):
        if facts.node.arg(name) is None:
            continue
        limit = facts.arg(name)
        if limit is None:
            return None
        least, greatest = bound(least, limit.least), bound(greatest, limit.greatest)
    return Range(least, greatest)


def _larger(facts: _Known) -> Range | None:
    x, y = (facts.arg(name) or _every(facts.result) for name in ("x", "y"))
    return Range(_dims.maximum(x.least, y.least), _dims.maximum(x.greatest, y.greatest))


def _smaller(facts: _Known) -> Range | None:
    x, y = (facts.arg(name) or _every(facts.result) for name in ("x", "y"))
    return Range(_dims.minimum(x.least, y.least), _dims.minimum(x.greatest, y.greatest))


def _every(value: Value) -> Range:
    numbers = np.iinfo(value.type.dtype.numpy)
    return Range(int(numbers.min), int(numbers.max))


def _where(facts: _Known) -> Range | None:
    return _join(facts.range_of(facts.node.args[1]), facts.range_of(facts.node.args[2]))


def _counted(facts: _Known) -> Range | None:
    """A running sum."""
    x = _same(facts)
    if x is None:
        return None
    count = facts.size_along()
    return Range(
        _dims.minimum(x.least, x.least * count), _dims.maximum(x.greatest, x.greatest * count)
    )


def _nonzero(facts: _Known) -> Range:
    sizes = facts.node.tensor("x").type.dims
    greatest: Size = 0
    for size in sizes:
        greatest = _dims.maximum(greatest, size - 1)
    return Range(0, greatest)


def _place(facts: _Known) -> Range:
    """How many elements of a sorted row are less."""
    node = facts.node
    name = "boundaries" if node.op == "aten.bucketize.Tensor" else "sorted_sequence"
    dims = node.tensor(name).type.dims
    return Range(0, dims[-1] if dims else 1)


_RULES: dict[str, _Rule] = {
    f"aten.{name}": rule
    for rule, names in (
        (_same, "_to_copy.default amax.default amin.default"),
        (
            _number_along,
            "argmax.default argmin.default argsort.default argsort.stable max.dim min.dim"
            " sort.default sort.stable topk.default",
        ),
        (_arange, "arange.default arange.start arange.start_step"),
        (_sum, "add.Tensor"),
        (lambda facts: _sum(facts, -1), "sub.Tensor"),
        (_product, "mul.Tensor"),
        (_remainder, "remainder.Tensor"),
        (_quotient, "floor_divide.default div.Tensor_mode"),
        (_clamp, "clamp.default"),
        (_larger, "clamp_min.default maximum.default"),
        (_smaller, "clamp_max.default minimum.default"),
        (_where, "where.self"),
        (lambda facts: facts.arg("fill_value"), "full.default full_like.default"),
        (lambda facts: facts.arg("s"), "scalar_tensor.default"),
        (lambda facts: Range(0, 0), "zeros.default zeros_like.default"),
        (lambda facts: Range(1, 1), "ones.default ones_like.default"),
        (_counted, "cumsum.default"),
        (_nonzero, "nonzero.default"),
        (_place, "bucketize.Tensor searchsorted.Tensor"),
    )
    for name in names.split()
}
# Those that compute whole floats of whole floats.
_OF_FLOATS = {
    f"aten.{name}"
    for name in (
        "_to_copy.default add.Tensor arange.default arange.start arange.start_step full.default"
        " mul.Tensor ones.default sub.Tensor zeros.default"
    ).split()
}
