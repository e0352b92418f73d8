"""Reads parts of tensors in pointwise programs: parts of parts are parts of one tensor, so that a
program has an input for each part once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from purevk.ir import Node, Size, Value
from purevk.lower.expression import ROUND, Expression, ExpressionBuilder, Term
from purevk.ops.elementwise.pointwise import NAME as PROGRAM
from purevk.ops.shapes import wrap
from purevk.passes.rewrite import Rewriter

_VIEW = "aten.view.default"


class Box(NamedTuple):
    """Where the elements of a tensor are in another one: the first one, the steps between them, and
    how many there are along each dim."""

    starts: tuple[Size, ...]
    steps: tuple[int, ...]
    sizes: tuple[Size, ...]

    def inside(self, outer: Box) -> Box:
        """The same elements in the tensor in which `outer` is."""
        pairs = zip(outer.starts, outer.steps, self.starts)
        starts = tuple(start + step * inner for start, step, inner in pairs)
        steps = tuple(a * b for a, b in zip(outer.steps, self.steps))
        return Box(starts, steps, self.sizes)


def whole(sizes: Sequence[Size]) -> Box:
    """All elements of a tensor of these sizes."""
    return Box((0,) * len(sizes), (1,) * len(sizes), tuple(sizes))


class PartReader:
    """Reads parts of the tensors of a graph.

    Args:
        made: the node that makes each value. The caller may replace nodes.
        written: values whose elements change during a call.
        rewriter: gets the slices that are read.
    """

    def __init__(
        self, producers: Mapping[Value, Node], written: Collection[Value], rewriter: Rewriter
    ) -> None:
        self._made, self._written, self._rewriter = producers, written, rewriter
        self._views: dict[tuple[Value, Box], Value] = {}

    def read(self, builder: ExpressionBuilder, value: Value, box: Box) -> Term:
        """The elements of a tensor at a box. What only converts its elements is done again."""
        base, box = self._source(value, box)
        node = self._made.get(base)
        if (
            node is not None
            and _converts(node)
            and not any(operand in self._written for operand in node.inputs)
        ):
            (source,) = node.tensors("inputs")
            if source.type.dims == base.type.dims:
                expression = node.attribute("expression", Expression)
                return builder.inline(expression, [self.read(builder, source, box)])[0]
        view = self.view(base, box)
        return builder.input(view, view.type.dtype)

    def _source(self, value: Value, box: Box) -> tuple[Value, Box]:
        """The tensor of which a value is a part, and which part."""
        while True:
            node = self._made.get(value)
            if node is None or value in self._written:
                return value, box
            part = self._part_of(node, value)
            if part is None:
                return value, box
            value, outer = part
            box = box.inside(outer)

    def _part_of(self, node: Node, value: Value) -> tuple[Value, Box] | None:
        """The tensor that a view is a part of, and where."""
        dims = value.type.dims
        if node.op in ("aten.select.int", "aten.unbind.int"):
            # One of every `count` elements along the last dim, as a view splits it.
            pairs = node.tensor("x")
            view = self._made.get(pairs)
            last = pairs.type.rank - 1
            if view is None or view.op != _VIEW or wrap(node.int("dim"), last + 1) != last:
                return None
            if not last:
                return None
            x, count = view.tensor("x"), pairs.type.dims[last]
            if not isinstance(count, int) or x.type.dims != (*dims[:-1], dims[-1] * count):
                return None
            at: Size = node.results.index(value)
            if node.op == "aten.select.int":
                at = node.size("index")
            if not isinstance(at, int) or not -count <= at < count:
                return None
            lead = last - 1
            return x, Box((*(0,) * lead, at % count), (*(1,) * lead, count), dims)
        if node.op not in ("aten.slice.Tensor", "aten.split_with_sizes.default"):
            return None
        x = node.tensor("x")
        dim = wrap(node.int("dim"), x.type.rank)
        step, start = 1, _start(node, value, dim)
        if node.op == "aten.slice.Tensor":
            step = node.int("step")
        if start is None:
            return None
        starts = tuple(start if d == dim else 0 for d in range(len(dims)))
        return x, Box(starts, tuple(step if d == dim else 1 for d in range(len(dims))), dims)

    def view(self, base: Value, box: Box) -> Value:
        """The part of a tensor at a box."""
        box_view = self._views.get((base, box))
        if box_view is not None:
            return box_view
        value = base
        for dim, (start, step, size) in enumerate(zip(*box)):
            if start == 0 and step == 1 and size == value.type.dims[dim]:
                continue
            end = start + (size - 1) * step + 1
            value = self._rewriter.aten.slice.Tensor(value, dim, start, end, step)
        self._views[base, box] = value
        return value


def within(box: Box, value: Value) -> Box:
    """A box of a tensor as that of a value that broadcasts to it."""
    dims = value.type.dims
    lead = len(box.sizes) - len(dims)
    dims_ = [
        (0, 1, 1) if dim == 1 else (box.starts[lead + d], box.steps[lead + d], box.sizes[lead + d])
        for d, dim in enumerate(dims)
    ]
    starts, steps, sizes = zip(*dims_) if dims_ else ((), (), ())
    return Box(starts, steps, sizes)


def _start(node: Node, value: Value, dim: int) -> int | None:
    """The index along a dim at which a slice or a part of a split starts, if it is known."""
    x = node.tensor("x")
    start: Size = 0
    if node.op == "aten.slice.Tensor":
        start = node.optional_size("start") or 0
    else:
        for result in node.results:
            if result is value:
                break
            start = start + result.type.dims[dim]
    size = x.type.dims[dim]
    if not isinstance(start, int) or not isinstance(size, int):
        return 0 if isinstance(start, int) and start == 0 else None
    start = start + size if start < 0 else start
    return min(max(start, 0), size)


def _converts(node: Node) -> bool:
    """Whether a program only converts elements to another dtype."""
    if node.op != PROGRAM or len(node.results) != 1 or node.sizes("scalars"):
        return False
    expression = node.attribute("expression", Expression)
    if len(expression.inputs) != 1 or len(expression.steps) > 1:
        return False
    glsl = expression.steps[0].glsl if expression.steps else "$0"
    return glsl in ("$0", *ROUND.values())
