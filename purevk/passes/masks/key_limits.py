"""Attention whose mask lets each query see the keys between two positions takes these positions, and no
mask: causal masks, sliding windows, valid lengths of a cache, and what is true of several of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Arg, Graph, Node, Value
from purevk.ops import registry
from purevk.ops.attention.attention import NAME, key_count
from purevk.ops.movement.rearrange import triangle_of
from purevk.passes.masks.columns import MOST_KEYS, Columns, is_column
from purevk.passes.rewrite import Rewriter
from purevk.tuning import DeviceTraits

_ROWS = 4096  # of a constant mask, read at once
_COMPARISONS = {
    "le": ("ge", "gt"),
    "lt": ("gt", "ge"),
    "ge": ("le", "lt"),
    "gt": ("lt", "le"),
    "eq": ("eq", "ne"),
    "ne": ("ne", "eq"),
}
"""Comparisons of x with y: the same of y with x, and the one that is true where it is false."""


def find_key_limits(graph: Graph, traits: DeviceTraits) -> Graph:
    """Gives attention the first key and the one after the last of each query as `limits`. What else a
    mask says stays a mask. Masks that hide a key between two others stay.

    Sums of positions are taken not to overflow.
    """
    masks_ = {node: mask for node in graph.nodes if (mask := _mask_of(node)) is not None}
    if not masks_:
        return graph
    rewriter = Rewriter(graph, traits)
    finder = _Finder(Columns(graph, rewriter, traits))
    masks = set(masks_.values())
    limits_of: dict[Value, _Found | None] = {}
    for number, node in enumerate(graph.nodes):
        mask = masks_.get(node)
        if mask is not None:
            if mask not in limits_of:  # no node makes it
                limits_of[mask] = finder.find(mask, node, number - 1)
            limits = limits_of[mask]
            if limits is not None:
                node = node.with_arguments(mask=limits.rest, limits=limits.both)
        rewriter.keep(node)
        # New nodes come where the mask is made: what they read may change later.
        for new_mask in masks.intersection(node.results):
            limits_of[new_mask] = finder.find(new_mask, node, number)
    return rewriter.finish()


def _mask_of(node: Node) -> Value | None:
    """The mask of an attention that may take limits."""
    if node.op != NAME or node.arg("functions") is not None or node.arg("limits") is not None:
        return None
    mask = node.optional_tensor("mask")
    if mask is None or is_column(mask) or mask.type.dims[-1] != key_count(node):
        return None
    return mask


class _Limits(NamedTuple):
    """Which keys are seen: from `first` on, before `last`, where `rest` is true.

    `first` and `last` are columns of int32, `rest` a mask of booleans. None sets no limit. `empty`: no
    key is seen at all.
    """

    first: Value | None = None
    last: Value | None = None
    rest: Value | None = None
    empty: bool = False


_Part = tuple[Arg, bool]  # a condition, and whether it is negated


class _Found(NamedTuple):
    both: Value  # [..., 1] or [..., 2]
    rest: Value | None


class _Finder:
    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._emit = columns.emit

    def find(self, mask: Value, user: Node, at: int) -> _Found | None:
        """The limits of a mask, as new nodes after node number `at`; None if it has none."""
        columns, nodes = self.columns, self.columns.rewriter.nodes
        start = len(nodes)
        columns.begin(at)
        columns.rewriter.source = user.source
        boolean = mask.type.dtype is DType.bool
        limits = self._seen(mask, user) if boolean else self._added(mask, user)
        if limits is None or (limits.first is None and limits.last is None):
            del nodes[start:]
            return None
        last = limits.last or columns.whole(MOST_KEYS)
        if limits.first is None:
            both = last if last.type.rank else self._emit("aten.view.default", last, (1,))
        else:
            number = self._emit("purevk.iota", 2, DType.int32)
            is_first = self._emit("aten.eq.Scalar", number, 0)
            both = self._emit("aten.where.self", is_first, limits.first, last)
        return _Found(both, limits.rest)

    # -- conditions ------------------------------------------------------------------------------
    def _seen(self, arg: Arg, user: Node, negated: bool = False) -> _Limits | None:
        """Where a condition is true, or false if it is negated."""
        if not isinstance(arg, Value):
            return self._follow(arg, user, negated)
        return self.columns.once((arg, user, negated), lambda: self._follow(arg, user, negated))

    def _follow(self, arg: Arg, user: Node, negated: bool) -> _Limits | None:
        number = self.columns.number(arg)
        if number is not None:
            return _Limits() if bool(number) is not negated else self._nothing()
        if not isinstance(arg, Value) or arg.type.dtype is not DType.bool:
            return None
        if is_column(arg):
            condition = self.columns.operand(arg, user)
            return None if condition is None else self._where_column(condition, negated)
        return self._of_value(arg, negated, self._of_condition)

    def _of_value(
        self, value: Value, negated: bool, follow: Callable[[Node, str, bool], _Limits | None]
    ) -> _Limits | None:
        """The limits of a constant; or what `follow` finds from the node that makes a value and the
        name of its operator."""
        if value in self.columns.graph.constants:
            return self._of_table(value, negated)
        node = self.columns.made.get(value)
        if node is None:
            return None
        definition = registry.find(node.op)
        return follow(node, node.op if definition is None else definition.name, negated)

    def _of_condition(self, node: Node, name: str, negated: bool) -> _Limits | None:
        kind = name.split(".")[1]
        if kind in ("logical_not", "bitwise_not"):
            return self._seen(node.arg("x"), node, not negated)
        if kind in ("logical_and", "bitwise_and", "mul"):
            return self._joined("and", [(node.arg(x), False) for x in "xy"], node, negated)
        if kind in ("logical_or", "bitwise_or"):
            return self._joined("or", [(node.arg(x), False) for x in "xy"], node, negated)
        if name == "aten.where.self":
            return self._chosen(node, "x", "y", negated)
        if name == "aten.masked_fill.Scalar":
            return self._chosen(node, "y", "x", negated)
        if kind in _COMPARISONS:
            return self._compared(kind, node, negated)
        if kind == "_to_copy":
            return self._seen(node.arg("x"), node, negated)
        if triangle_of(node) is not None:
            inside = self._triangle(node, negated)
            within = self._seen(node.tensors("inputs")[0], node, negated)
            return self._any([inside, within]) if negated else self._all([inside, within])
        return self._moved(node, lambda x: self._seen(x, node, negated))

    def _joined(
        self, kind: str, parts: Sequence[_Part], node: Node, negated: bool
    ) -> _Limits | None:
        """Where all conditions are true (`kind` "and"), or any ("or"); where not, if negated."""
        if negated:
            kind = "or" if kind == "and" else "and"
            parts = [(arg, not part) for arg, part in parts]
        part_limits = [self._seen(arg, node, part) for arg, part in parts]
        if kind == "or":
            return self._any(part_limits)
        for number, ((arg, part), limits) in enumerate(zip(parts, part_limits)):
            if limits is None and any(part_limits):
                part_limits[number] = self._kept(arg, node, part)
        return self._all(part_limits)

    def _kept(self, arg: Arg, user: Node, negated: bool) -> _Limits | None:
        """A condition that stays a mask."""
        if not isinstance(arg, Value) or arg.type.dtype is not DType.bool:
            return None
        # Attention reads it later.
        if self.columns.changes(arg) or self.columns.operand(arg, user) is None:
            return None
        return _Limits(rest=self._emit("aten.logical_not.default", arg) if negated else arg)

    def _chosen(self, node: Node, first: str, second: str, negated: bool) -> _Limits | None:
        """`cond ? first : second`, arguments of which one is the same everywhere."""
        for same, condition, inverse in ((second, first, False), (first, second, True)):
            number = self.columns.number(node.arg(same))
            if number is not None:
                kind, opposite = ("or", not inverse) if number else ("and", inverse)
                parts = [(node.arg("cond"), opposite), (node.arg(condition), False)]
                return self._joined(kind, parts, node, negated)
        return None

    def _compared(self, kind: str, node: Node, negated: bool) -> _Limits | None:
        """Where a comparison is true: of positions, or of a condition with true or false."""
        x, y = node.arg("x"), node.arg("y")
        for left, right in ((x, y), (y, x)):
            if isinstance(left, Value) and left.type.dtype is DType.bool and kind in ("eq", "ne"):
                number = self.columns.number(right)
                if number not in (0, 1):
                    return None
                return self._seen(left, node, negated ^ (kind == "ne") ^ (not number))
        lines = [self.columns.line_of(operand, node) for operand in (x, y)]
        if lines[0] is None or lines[1] is None:
            return None
        left, right = lines[0], lines[1]
        kind = _COMPARISONS[kind][1] if negated else kind
        if left.sign < right.sign:
            left, right, kind = right, left, _COMPARISONS[kind][0]
        if left.sign - right.sign != 1 or kind == "ne":
            return None
        limit = self.columns.limit(right, left)  # the position compared with it
        if kind in ("lt", "ge"):
            return _Limits(last=limit) if kind == "lt" else _Limits(first=limit)
        after = self._emit("aten.add.Tensor", limit, 1, 1)
        if kind == "eq":
            return _Limits(limit, after)
        return _Limits(last=after) if kind == "le" else _Limits(first=after)

    def _triangle(self, node: Node, negated: bool) -> _Limits:
        """The triangle that `tril` or `triu` keeps, or the rest of the matrix."""
        triangle = triangle_of(node)
        assert triangle is not None
        is_upper, diagonal = triangle
        row = self._emit("purevk.iota", node.result.type.dims[-2], DType.int32)
        row = self._emit("aten.view.default", row, (node.result.type.dims[-2], 1))
        edge = self._emit("aten.add.Tensor", row, diagonal + (0 if is_upper else 1), 1)
        return _Limits(first=edge) if is_upper is not negated else _Limits(last=edge)

    def _where_column(self, condition: Value, negated: bool) -> _Limits:
        """All keys or none, in each row."""
        most, none = self.columns.whole(MOST_KEYS), self.columns.whole(0)
        pair = (none, most) if negated else (most, none)
        return _Limits(last=self._emit("aten.where.self", condition, *pair))

    def _of_table(self, table: Value, negated: bool) -> _Limits | None:
        """A constant mask, by its content."""
        constant = self.columns.graph.constants[table]
        if not constant.known or 0 in table.type.dims:
            return None
        array = constant.array(table.type)
        if table.type.dtype is DType.bool:
            return self._of_rows(array, lambda rows: (rows != 0) ^ negated)
        if table.type.dtype is DType.bfloat16:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        elif table.type.dtype not in (DType.float32, DType.float16):
            return None
        return self._of_rows(array, _unmasked)

    def _of_rows(
        self, array: np.ndarray, seen_of: Callable[[np.ndarray], np.ndarray | None]
    ) -> _Limits | None:
        keys, rows = array.shape[-1], array.reshape(-1, array.shape[-1])
        edges = np.zeros((2, len(rows)), np.int32)
        for at in range(0, len(rows), _ROWS):
            seen = seen_of(rows[at : at + _ROWS])
            if seen is None:
                return None
            count = seen.sum(-1)
            first = np.where(count > 0, seen.argmax(-1), 0)
            last = np.where(count > 0, keys - seen[:, ::-1].argmax(-1), 0)
            if (last - first != count).any():
                return None
            edges[:, at : at + _ROWS] = first, last
        limits = [
            None
            if (edge == unlimited).all()
            else self.columns.table(edge.reshape(*array.shape[:-1], 1), DType.int32)
            for edge, unlimited in zip(edges, (0, keys))
        ]
        return _Limits(limits[0], limits[1])

    # -- masks that are added --------------------------------------------------------------------
    def _added(self, arg: Arg, user: Node) -> _Limits | None:
        """Where a mask of 0 and -inf is 0."""
        if not isinstance(arg, Value):
            return self._follow_added(arg)
        return self.columns.once((arg, user, None), lambda: self._follow_added(arg))

    def _follow_added(self, arg: Arg) -> _Limits | None:
        number = self.columns.number(arg)
        if number is not None:
            return {0.0: _Limits(), -float("inf"): self._nothing()}.get(float(number))
        if not isinstance(arg, Value) or not arg.type.dtype.is_float or is_column(arg):
            return None
        return self._of_value(arg, False, self._of_added)

    def _of_added(self, node: Node, name: str, negated: bool) -> _Limits | None:
        if name == "aten.where.self":
            return self._chosen_scores(node, "x", "y")
        if name == "aten.masked_fill.Scalar":
            return self._chosen_scores(node, "y", "x")
        if name == "aten.add.Tensor" and node.scalar("alpha") == 1:
            return self._all([self._added(node.arg(x), node) for x in "xy"])
        if name == "aten._to_copy.default":
            return self._added(node.arg("x"), node)
        if triangle_of(node) is not None:
            limits = self._added(node.tensors("inputs")[0], node)
            return self._any([self._triangle(node, True), limits])
        return self._moved(node, lambda x: self._added(x, node))

    def _chosen_scores(self, node: Node, first: str, second: str) -> _Limits | None:
        for same, operand, negated in ((second, first, False), (first, second, True)):
            if self.columns.number(node.arg(same)) == -float("inf"):
                cond = node.arg("cond")
                seen = self._seen(cond, node, negated) or self._kept(cond, node, negated)
                return self._all([seen, self._added(node.arg(operand), node)])
        return None

    # -- limits ----------------------------------------------------------------------------------
    def _nothing(self) -> _Limits:
        return _Limits(last=self.columns.whole(0), empty=True)

    def _all(self, limits: Sequence[_Limits | None]) -> _Limits | None:
        """Where all conditions are true."""
        joined: _Limits | None = _Limits()
        for limit in limits:
            if limit is None or joined is None:
                return None
            if limit.empty or joined.empty:
                joined = self._nothing()
                continue
            joined = _Limits(
                self._both("aten.maximum.default", joined.first, limit.first),
                self._both("aten.minimum.default", joined.last, limit.last),
                self._both("aten.logical_and.default", joined.rest, limit.rest),
            )
        return joined

    def _any(self, limits: Sequence[_Limits | None]) -> _Limits | None:
        """Where any condition is true: if all limit the same end, or one is always true."""
        if _Limits() in limits:
            return _Limits()
        first, second = limits
        if first is not None and first.empty:
            return second
        if second is not None and second.empty:
            return first
        if first is None or second is None or first.rest is not None or second.rest is not None:
            return None
        if first.first is None and second.first is None:
            assert first.last is not None and second.last is not None
            return _Limits(last=self._emit("aten.maximum.default", first.last, second.last))
        if first.last is None and second.last is None:
            assert first.first is not None and second.first is not None
            return _Limits(first=self._emit("aten.minimum.default", first.first, second.first))
        return None

    def _both(self, op: str, left: Value | None, right: Value | None) -> Value | None:
        if left is None or right is None:
            return left or right
        return self._emit(op, left, right)

    def _moved(self, node: Node, follow: Callable[[Value], _Limits | None]) -> _Limits | None:
        """The limits of a node that moves rows, from those of its input."""
        columns = self.columns
        if node.op == "aten.expand.default" and is_column(node.tensor("x")):
            return follow(node.tensor("x"))
        if not columns.moves(node):
            return None
        x, result = node.tensor("x"), node.result.type
        line = follow(x)
        if line is None or line.empty:
            return line
        low = columns.first_kept(node)
        ends: list[Value | None] = []
        for end in (line.first, line.last):
            moved = None if end is None else columns.moved(node, end)
            if moved is None and end is not None:
                return None
            ends.append(moved if moved is None else columns.total(moved, -1, low))  # type: ignore[arg-type]
        offset = line.rest
        if offset is not None:
            offset = columns.again(node, columns.expanded(offset, x.type.dims), result.dims)
            if offset is None:
                return None
        return _Limits(ends[0], ends[1], offset)


def _unmasked(rows: np.ndarray) -> np.ndarray | None:
    """Where numbers that are all 0 or -inf are 0."""
    seen = rows == 0
    return seen if (seen | (rows == -np.inf)).all() else None
