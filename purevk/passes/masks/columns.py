"""Tensors whose elements along the last dim follow from one column: what a mask is built from."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Arg, Dim, Graph, Node, Size, Value, values_in
from purevk.lower.expression import Expression, literal
from purevk.ops import registry
from purevk.ops.elementwise.pointwise import NAME as POINTWISE
from purevk.ops.elementwise.program import constant
from purevk.ops.facts import Moves
from purevk.ops.index.gather import NAME as GATHER
from purevk.ops.index.gather import GatherDims
from purevk.ops.movement.slices import slice_bounds
from purevk.ops.reduce.scan import NAME as SCAN
from purevk.ops.shapes import wrap
from purevk.passes.rewrite import Rewriter
from purevk.passes.simplify import static_value
from purevk.tuning import DeviceTraits

# Tensors have fewer rows. A limit of keys beyond it says the same as the number itself.
MOST_KEYS = 2**28
INTEGERS = {DType.int32: 2**29, DType.int64: 2**61}
"""Dtypes of positions, with a number of which twice as much does not overflow."""
_MOST_DEPTH = 40  # nodes of a mask, one after another
_T = TypeVar("_T")
_COMPARISONS = {
    f"aten.{name}.{kind}": getattr(operator, name)
    for name in ("le", "lt", "ge", "gt", "eq", "ne")
    for kind in ("Tensor", "Scalar")
}
_INTEGER = re.compile(r"(?:int64_t)?\(?(-?[0-9]+)\)?")
# The operands of a sum in their order, and the sign of the second.
_SUMS = {
    "aten.add.Tensor": ("x", "y", 1),
    "aten.sub.Tensor": ("x", "y", -1),
    "aten.rsub.Scalar": ("y", "x", -1),
}


class Line(NamedTuple):
    """Integers along the last dim: `sign` (-1, 0 or 1) times the position, plus `rest`, which is the
    same at all positions. If `rest` is a tensor, its last dim has the size 1, or it has no dims."""

    sign: int
    rest: Value | Size


class Columns:
    """Follows tensors back to what makes them, and emits columns: tensors with one element in place of
    each row.

    Attributes:
        made: the node that makes each value.
        at: the number of the node after which new nodes come.
        memo: what is known of a value that a node reads. Files may have graphs with more paths than
            can be followed.
        depth: how many nodes are being followed.
    """

    def __init__(self, graph: Graph, rewriter: Rewriter, traits: DeviceTraits) -> None:
        self.graph, self.rewriter, self.traits = graph, rewriter, traits
        self.made = graph.producers()
        self.at = -1
        self.memo: dict[tuple[object, ...], Any] = {}
        self.depth = 0
        self._tables: dict[tuple[DType, tuple[int, ...], bytes], Value] = {}
        self._position = {node: number for number, node in enumerate(graph.nodes)}
        self._writes: dict[Value, list[int]] = {}  # of each state: the numbers of nodes
        self._state = {state: state for state in graph.states}  # that a value is, or is a view of
        for number, node in enumerate(graph.nodes):
            written = values_in(node.args) if node.graphs else registry.mutated(node)
            for value in written:
                self._writes.setdefault(self._state.get(value, value), []).append(number)
            if registry.is_view(node) and node.inputs[0] in self._state:
                self._state.update(dict.fromkeys(node.results, self._state[node.inputs[0]]))

    def begin(self, at: int) -> None:
        """Starts another mask, whose new nodes come after node number `at`."""
        self.at, self.depth = at, 0
        self.memo.clear()

    def once(self, key: tuple[object, ...], follow: Callable[[], _T | None]) -> _T | None:
        """What `follow` gives, which is called once for each key; None where one calls the other too
        many times."""
        if key not in self.memo:
            if self.depth >= _MOST_DEPTH:
                return None
            self.depth += 1
            self.memo[key] = follow()
            self.depth -= 1
        answer: _T | None = self.memo[key]
        return answer

    def emit(self, op: str, *args: Arg) -> Value:
        """A new node."""
        return self.rewriter.emit(op, *args)

    def table(self, array: np.ndarray, dtype: DType) -> Value:
        """A constant. Layers that each have a mask share it."""
        key = dtype, array.shape, array.tobytes()
        if key not in self._tables:
            self._tables[key] = self.rewriter.constant(array, dtype)
        return self._tables[key]

    def whole(self, number: Size) -> Value:
        """An int32 [1]."""
        if isinstance(number, Dim):
            return constant(self.rewriter, number, (1,), DType.int32)
        clamped = max(-MOST_KEYS, min(number, MOST_KEYS))
        return self.table(np.array([clamped]), DType.int32)

    def operand(self, value: Value, user: Node) -> Value | None:
        """A value that new nodes are to read as the node `user` does; None if it may change in between,
        or the device lacks its dtype."""
        state = self._state.get(value, value)
        read = self._position[user]
        if any(read < write <= self.at for write in self._writes.get(state, ())):
            return None
        lacks = value.type.dtype is DType.int64 and not self.traits.has("int64")
        return None if lacks else value

    def changes(self, value: Value) -> bool:
        """Whether a value is a state that the graph writes, or a view of one."""
        return bool(self._writes.get(self._state.get(value, value)))

    def number(self, arg: Arg) -> float | int | bool | None:
        """The number that all elements of an argument are, or None. Of floats only 0 and -inf are
        told apart."""
        if isinstance(arg, (bool, int, float)):
            return arg
        if not isinstance(arg, Value):
            return None
        node, adds = self.made.get(arg), False
        # What moves elements has the number of its operand, if it is the same everywhere; sums, if it is 0.
        while node is not None and (node.op == SCAN or registry.movement(node) >= Moves.SOME):
            adds |= node.op == SCAN
            if node.op == SCAN and node.str("kind") != "sum":
                return None
            arg = node.inputs[0]
            node = self.made.get(arg)
        if adds:  # sums of nothing
            return 0 if self.number(arg) == 0 else None
        if node is not None and node.op in _COMPARISONS:
            return self._known_comparison(node)
        if node is None or node.op != POINTWISE:
            return static_value(self.graph.constants, arg)
        expression, dtype = node.attribute("expression", Expression), arg.type.dtype
        if expression.inputs or expression.scalars or len(expression.steps) != 1:
            return None
        text = expression.steps[0].glsl
        if dtype is DType.bool:
            return {"true": True, "false": False}.get(text)
        if dtype.is_float:
            return next((x for x in (0.0, -float("inf")) if text == literal(x, dtype)), None)
        match = _INTEGER.fullmatch(text)
        return int(match[1]) if match else None

    def _known_comparison(self, node: Node) -> bool | None:
        """Whether a comparison of lines is true everywhere, or false everywhere."""
        lines = [self.line_of(node.arg(name), node) for name in "xy"]
        if lines[0] is None or lines[1] is None or lines[0].sign != lines[1].sign:
            return None
        left, right = lines[0].rest, lines[1].rest
        if not isinstance(left, int) or not isinstance(right, int):
            return None
        holds: bool = _COMPARISONS[node.op](left, right)
        return holds

    def line(self, value: Value, user: Node) -> Line | None:
        """A tensor of integers as the node `user` reads it; None if it is no line."""
        if value.type.dtype not in INTEGERS:
            return None
        return self.once((value, user), lambda: self._line(value, user))

    def _line(self, value: Value, user: Node) -> Line | None:
        number = self.number(value)
        if isinstance(number, int):
            return Line(0, number)
        if is_column(value):
            column = self._known_column(value)
            read = self.operand(value, user)
            return column or (None if read is None else Line(0, read))
        if value in self.graph.constants:
            return self._constant_line(value)
        node = self.made.get(value)
        if node is None:
            return None
        if node.op == "purevk.iota":
            return Line(1, 0)
        if node.op in _SUMS and node.scalar("alpha") == 1:
            return self._sum(node)
        if node.op == "aten.neg.default":
            line = self.line(node.tensor("x"), node)
            return None if line is None else Line(-line.sign, self.total(0, -1, line.rest))
        if node.op == "aten._to_copy.default":
            return self._converted(node, value.type.dtype)
        if node.op == "aten.expand.default" and is_column(node.tensor("x")):
            return self.line(node.tensor("x"), node)
        if node.op == "aten.cat.default":
            return self._joined(node)
        if node.op == GATHER:
            line = self._line_at_line(node)
            if line is not None:
                return line
        return self._moved_line(node)

    def _converted(self, node: Node, dtype: DType) -> Line | None:
        line = self.line(node.tensor("x"), node)
        if line is None or node.tensor("x").type.dtype is dtype:
            return line
        offset = line.rest
        if dtype is DType.int32:  # numbers may be cut
            whole = not isinstance(offset, Value) and (
                isinstance(offset, Dim) or abs(offset) < MOST_KEYS
            )
            return line if whole else None
        if not isinstance(offset, Value):
            return line
        return Line(line.sign, self.rewriter.aten._to_copy(offset, dtype))

    def _constant_line(self, value: Value) -> Line | None:
        constant = self.graph.constants[value]
        if not constant.known or 0 in value.type.dims:
            return None
        numbers = constant.array(value.type)
        column = numbers[..., :1]
        if abs(column.astype(np.float64)).max() >= MOST_KEYS:
            return None
        if not (numbers == column + np.arange(numbers.shape[-1])).all():
            return None
        if column.size == 1:
            return Line(1, int(column.reshape(-1)[0]))
        if value.type.dtype is DType.int64 and not self.traits.has("int64"):
            return None
        return Line(1, self.table(column, value.type.dtype))

    def _known_column(self, value: Value) -> Line | None:
        """A column that is one known number: an element of a line, plus a number."""
        node = self.made.get(value)
        if node is None:
            return None
        if node.op in _SUMS and node.scalar("alpha") == 1:
            *names, sign = _SUMS[node.op]
            lines = [self.line_of(node.arg(name), node) for name in names]
            rests = [None if line is None or line.sign else line.rest for line in lines]
            if isinstance(rests[0], int) and isinstance(rests[1], int):
                return Line(0, rests[0] + sign * rests[1])
        if node.op != "aten.slice.Tensor" or not self.moves(node):
            return None
        tensor_line, low = self.line(node.tensor("x"), node), self.first_kept(node)
        if tensor_line is None or not isinstance(tensor_line.rest, int) or not isinstance(low, int):
            return None
        return Line(0, tensor_line.rest + tensor_line.sign * low)

    def _joined(self, node: Node) -> Line | None:
        """Lines that go on where the one before them ends."""
        tensors, rank = node.tensors("tensors"), node.result.type.rank
        if wrap(node.int("dim"), rank) != rank - 1:
            return None
        first: Size | None = None
        length: Size = 0
        for tensor in tensors:
            line = self.line(tensor, node) if tensor.type.rank == rank else None
            if line is None or isinstance(line.rest, Value):
                return None
            if line.sign != 1 and not is_column(tensor):
                return None
            first = line.rest if first is None else first
            if line.rest != first + length:
                return None
            length = length + tensor.type.dims[-1]
        return None if first is None else Line(1, first)

    def _sum(self, node: Node) -> Line | None:
        *names, sign = _SUMS[node.op]
        lines = [self.line_of(node.arg(name), node) for name in names]
        if lines[0] is None or lines[1] is None:
            return None
        left, right = lines[0], lines[1]
        if not -1 <= left.sign + sign * right.sign <= 1:
            return None
        return Line(left.sign + sign * right.sign, self.total(left.rest, sign, right.rest))

    def line_of(self, arg: Arg, user: Node) -> Line | None:
        """The line of an operand, which may be a number."""
        if isinstance(arg, Value):
            return self.line(arg, user)
        whole = isinstance(arg, (int, Dim)) and not isinstance(arg, bool)
        return Line(0, arg) if whole else None  # type: ignore[arg-type]

    def total(self, left: Value | Size, sign: int, right: Value | Size) -> Value | Size:
        """A sum, or with the sign -1 a difference."""
        if isinstance(left, Value) or isinstance(right, Value):
            if not isinstance(right, Value) and isinstance(right, int) and right == 0:
                return left
            return self.emit("aten.add.Tensor" if sign > 0 else "aten.sub.Tensor", left, right, 1)
        return left + sign * right

    def _line_at_line(self, node: Node) -> Line | None:
        """A gather from one row of a line, at positions that are a line too."""
        dims, x = node.attribute("dims", GatherDims), node.tensor("x")
        if not dims.x or dims.x[-1] is not None or dims.index[-1] != 1:
            return None
        if x.type.rank - 1 not in dims.selected:
            return None
        index = node.tensors("indices")[dims.selected.index(x.type.rank - 1)]
        values, line = self.line(x, node), self.line(index, node)
        if values is None or line is None or isinstance(values.rest, Value) or values.sign != 1:
            return None
        # Positions below 0 would count from the end.
        if line.sign != 1 or not isinstance(line.rest, int) or line.rest < 0:
            return None
        return Line(1, values.rest + line.rest)

    def _moved_line(self, node: Node) -> Line | None:
        if not self.moves(node):
            return None
        line = self.line(node.tensor("x"), node)
        if line is None:
            return None
        low = self.first_kept(node)
        offset = line.rest if line.sign == 0 else self.total(line.rest, line.sign, low)
        if isinstance(offset, Value):
            moved = self.moved(node, offset)
            return None if moved is None else Line(line.sign, moved)
        return Line(line.sign, offset)

    def moves(self, node: Node) -> bool:
        """Whether a node only moves whole rows, or keeps neighbouring elements of all of them."""
        if not node.args or not isinstance(node.args[0], Value) or len(node.results) != 1:
            return False
        x, result = node.args[0].type, node.result.type
        if not x.rank or not result.rank:
            return False
        if registry.is_reshape(node) or node.op == "aten.expand.default":
            return x.dims[-1] == result.dims[-1]
        if _is_copy(node):
            return True
        if node.op == "aten.permute.default":
            return wrap(node.ints("dims")[-1], x.rank) == x.rank - 1
        if node.op == "aten.slice.Tensor":
            return wrap(node.int("dim"), x.rank) != x.rank - 1 or node.int("step") == 1
        if node.op == "aten.select.int":
            return wrap(node.int("dim"), x.rank) != x.rank - 1
        if node.op == GATHER:
            dims = node.attribute("dims", GatherDims)
            return dims.x[-1] == x.rank - 1 and dims.index[-1] is None
        return False

    def first_kept(self, node: Node) -> Size:
        """The position along the last dim that becomes position 0 of a node that `moves`."""
        if node.op != "aten.slice.Tensor":
            return 0
        x = node.tensor("x")
        if wrap(node.int("dim"), x.type.rank) != x.type.rank - 1:
            return 0
        start, end = (node.optional_size(name) for name in ("start", "end"))
        return slice_bounds(x.type.dims[-1], start, end, 1)[0]

    def moved(self, node: Node, column: Value) -> Value | None:
        """The column of the result of a node that `moves`, from one of its input."""
        x, result = node.tensor("x").type, node.result.type
        if _is_copy(node) or node.op == "aten.expand.default":
            return column
        if node.op == "aten.slice.Tensor" and wrap(node.int("dim"), x.rank) == x.rank - 1:
            return column
        return self.again(node, self.expanded(column, (*x.dims[:-1], 1)), (*result.dims[:-1], 1))

    def again(self, node: Node, x: Value, dims: tuple[Size, ...]) -> Value | None:
        """A node that `moves`, applied to another tensor; `dims` are the sizes of the result."""
        if registry.is_reshape(node):
            return x if x.type.dims == dims else self.rewriter.aten.view(x, dims)
        if _is_copy(node) or node.op == "aten.expand.default":
            return self.expanded(x, dims)
        if node.op == GATHER:
            indices = [self.operand(index, node) for index in node.tensors("indices")]
            if None in indices:
                return None
            return self.emit(GATHER, x, tuple(indices), dims, node.attribute("dims", GatherDims))
        return self.emit(node.op, x, *node.args[1:])

    def expanded(self, value: Value, dims: tuple[Size, ...]) -> Value:
        """A value broadcast to `dims`."""
        return value if value.type.dims == dims else self.rewriter.aten.expand(value, dims)

    def limit(self, high: Line, low: Line) -> Value:
        """`high.rest - low.rest` as int32, without overflow: beyond `MOST_KEYS` it is any number beyond
        that on the same side."""
        upper, lower = high.rest, low.rest
        if not isinstance(upper, Value) and not isinstance(lower, Value):
            return self.whole(upper - lower)
        if not isinstance(upper, Value) and isinstance(upper, int) and abs(upper) < MOST_KEYS:
            upper, lower = upper, self._clamped(lower, upper - MOST_KEYS, upper + MOST_KEYS)
        elif not isinstance(lower, Value) and isinstance(lower, int) and abs(lower) < MOST_KEYS:
            upper = self._clamped(upper, lower - MOST_KEYS, lower + MOST_KEYS)
        else:
            upper, lower = (self._within(bound) for bound in (upper, lower))
            return self._narrow(self._clamped(self.total(upper, -1, lower), -MOST_KEYS, MOST_KEYS))
        return self._narrow(self.total(upper, -1, lower))

    def _within(self, offset: Value | Size) -> Value | Size:
        if not isinstance(offset, Value):
            return offset
        most = INTEGERS[offset.type.dtype]
        return self._clamped(offset, -most, most)

    def _clamped(self, offset: Value | Size, low: int, high: int) -> Value:
        assert isinstance(offset, Value)
        return self.rewriter.aten.clamp(offset, low, high)

    def _narrow(self, offset: Value | Size) -> Value:
        assert isinstance(offset, Value)
        if offset.type.dtype is DType.int32:
            return offset
        return self.rewriter.aten._to_copy(offset, DType.int32)


def _is_copy(node: Node) -> bool:
    """Whether the result is the operand."""
    return registry.movement(node) is Moves.IN_ORDER and not registry.is_view(node)


def is_column(value: Value) -> bool:
    """Whether a value is the same at all positions of the last dim, because it broadcasts."""
    last = value.type.dims[-1] if value.type.dims else 1
    return isinstance(last, int) and last == 1
