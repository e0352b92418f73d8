"""Concatenations of pointwise programs become programs that write their results into place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Size, Value
from purevk.lower.expression import Expression, ExpressionBuilder, Step, Term
from purevk.ops.attention.rotary import HALVES
from purevk.ops.elementwise.pieces import NAME as PIECES
from purevk.ops.elementwise.pieces import Piece, pieces_of
from purevk.ops.elementwise.pointwise import NAME as PROGRAM
from purevk.ops.shapes import wrap
from purevk.passes.fusion.parts import Box, PartReader, whole, within
from purevk.passes.fusion.pointwise import MAX_BUFFERS, MAX_CODE, MAX_STEPS
from purevk.passes.rewrite import Rewriter, changing, reader_counts
from purevk.tuning import DeviceTraits

_CAT, _VIEW, _PERMUTE = "aten.cat.default", "aten.view.default", "aten.permute.default"
_WRITE = "purevk.write_part"
_SWAP = (0, 2, 1, 3)  # [B, S, H, D] to [B, H, S, D] and back
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
_MOST = 8  # results of one tensor
_SHORT = 64  # bytes: shorter runs are written together, or by the kernel of a concatenation


def join_pieces(graph: Graph, traits: DeviceTraits) -> Graph:
    """Concatenates in place.

    A program whose result is only concatenated writes it where it belongs, and so does a rotation.
    A program that reads nothing but the concatenation of such results, and other tensors at the
    same indices, becomes part of them: `x * cos + cat(-x2, x1) * sin` reads and writes once. What is
    stacked along a new last dim and flattened is written with steps. A tensor whose halves are
    overwritten one after the other is a concatenation too.
    """
    return _Joiner(graph, traits).run()


class _Joiner:
    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self._graph = graph
        self._readers = reader_counts(graph)
        self._written = changing(graph.nodes)
        self._made = graph.producers()
        # As they were: those that are pieces by now are part of what overwrites more of them.
        self._writes = {node.result: node for node in graph.nodes if node.op == _WRITE}
        self._rewriter = Rewriter(graph)
        self._together = traits.profile.coalesces_accesses
        self._reader = PartReader(self._made, self._written, self._rewriter)

    def run(self) -> Graph:
        rewriter = self._rewriter
        for node in self._graph.nodes:
            rewriter.source = node.source
            replacement = self._visit(node)
            if replacement is not None:
                self._made[node.result] = replacement
            rewriter.keep(node if replacement is None else replacement)
        return rewriter.finish()

    def _visit(self, node: Node) -> Node | None:
        """The node of pieces that takes the place of a node, if there is one."""
        if node.op not in (_CAT, _VIEW, _WRITE, PROGRAM) or len(node.results) != 1:
            return None
        if node.result.type.dtype not in _FLOATS:
            return None
        if node.op == PROGRAM:
            return self._after_pieces(node)
        if node.op == _VIEW:
            return self._stacked(node)
        parts = self._overwritten(node) if node.op == _WRITE else self._joined(node)
        if parts is None or (node.op == _CAT and all(_is_copy(part) for part in parts)):
            return None
        pieces = self._together_or_apart(parts)
        return None if pieces is None else self._node(node, pieces)

    def _node(self, node: Node, pieces: Sequence[Piece]) -> Node | None:
        dims, dtype = node.result.type.dims, node.result.type.dtype
        if (
            len(pieces) > 1
            and self._together
            and any(_is_short(piece, dims, dtype) for piece in pieces)
        ):
            return None
        args: tuple[Any, ...] = (tuple(map(tuple, pieces)), dims, dtype)
        return Node(PIECES, args, node.results, node.source)

    # -- concatenations -----------------------------------------------------------------------------
    def _joined(self, node: Node) -> list[Piece] | None:
        """The pieces of a concatenation, one or more for each of its tensors."""
        values, rank = node.tensors("tensors"), node.result.type.rank
        dtype, dim = node.result.type.dtype, wrap(node.int("dim"), rank)
        if not 1 < len(values) <= _MOST or self._written.intersection(values):
            return None
        pieces: list[Piece] = []
        start: Size = 0
        for value in values:
            if value.type.rank != rank or value.type.dtype is not dtype:
                return None
            pieces += self._moved(value, dim, start)
            start = start + value.type.dims[dim]
        return pieces

    def _moved(self, value: Value, dim: int, start: Size) -> list[Piece]:
        """A tensor as pieces of one in which it starts at an index of a dim."""
        return [
            part._replace(
                starts=tuple(
                    (*starts[:dim], starts[dim] + start, *starts[dim + 1 :])
                    for starts in part.starts
                )
            )
            for part in self._parts(value)
        ]

    # -- tensors that are written part by part ------------------------------------------------------
    def _overwritten(self, node: Node) -> list[Piece] | None:
        """The pieces of a tensor of which slices along one dim were overwritten."""
        rank = node.result.type.rank
        dim = _written_slice(node, rank)
        slices = None if dim is None else self._slices(node, dim[0])
        if dim is None or slices is None or len(slices) > 2:
            return None
        pieces: list[Piece] = []
        for start, size, value, first in slices:
            if value.type.rank != rank or value.type.dtype is not node.result.type.dtype:
                return None
            if value in self._written:
                return None
            if (first, size) != (0, value.type.dims[dim[0]]):
                box = whole(value.type.dims)
                starts = tuple(first if d == dim[0] else 0 for d in range(rank))
                sizes = tuple(size if d == dim[0] else extent for d, extent in enumerate(box.sizes))
                value = self._reader.view(value, Box(starts, box.steps, sizes))
            pieces += self._moved(value, dim[0], start)
        return pieces

    def _slices(self, node: Node, dim: int) -> list[tuple[int, int, Value, int]] | None:
        """Where slices of a tensor start, their sizes, the tensors that they are from, and where they
        start there."""
        written = _written_slice(node, node.result.type.rank)
        if written is None or written[0] != dim:
            return None
        _, start, end = written
        x, source = node.tensor("x"), node.tensor("source")
        before = self._writes.get(x) if self._readers[x] == 1 else None
        slices = None if before is None else self._slices(before, dim)
        if slices is None:
            size = x.type.dims[dim]
            slices = [(0, size, x, 0)] if isinstance(size, int) else []
        visible: list[tuple[int, int, Value, int]] = [(start, end - start, source, 0)]
        for at, size, value, first in slices:
            if at < start:
                visible.append((at, min(size, start - at), value, first))
            if at + size > end:
                skipped = max(end - at, 0)
                visible.append((at + skipped, size - skipped, value, first + skipped))
        return sorted(visible, key=lambda piece: piece[0])

    def _stacked(self, view: Node) -> Node | None:
        """Tensors that are stacked along a new last dim, which then becomes one with the dim before
        it. Between both, a program may change their elements."""
        after, stack = None, self._only_reader(view.tensor("x"))
        if stack is not None and stack.op == PROGRAM:
            if len(stack.inputs) != 1 or len(stack.results) != 1:
                return None
            after, stack = stack, self._only_reader(stack.inputs[0])
        if stack is None or stack.op != _CAT:
            return None
        dims, values = stack.result.type.dims, stack.tensors("tensors")
        rank, count = len(dims), len(values)
        if rank < 2 or wrap(stack.int("dim"), rank) != rank - 1 or not 1 < count <= _MOST:
            return None
        if view.result.type.dims != (*dims[:-2], dims[-2] * count):
            return None
        if after is not None and after.sizes("sizes") != dims:
            return None
        joined: list[Piece] = []
        for position, value in enumerate(values):
            flat = self._before_unsqueeze(value)
            if flat is None or value.type.dtype is not stack.result.type.dtype:
                return None
            starts, steps = (*(0,) * (rank - 2), position), (*(1,) * (rank - 2), count)
            for part in self._parts(flat):
                if part.sizes != flat.type.dims:
                    return None
                joined.append(part._replace(starts=(starts,), steps=steps))
        if after is None and all(_is_copy(part) for part in joined):
            return None
        pieces = self._together_or_apart(joined, after, stack.result)
        return None if pieces is None else self._node(view, pieces)

    def _only_reader(self, value: Value) -> Node | None:
        """The node that makes a value for one reader alone."""
        return self._made.get(value) if self._readers[value] == 1 else None

    def _before_unsqueeze(self, value: Value) -> Value | None:
        """The tensor that a value is with a dim of 1 behind its others."""
        view = self._made.get(value)
        if view is None or view.op not in (_VIEW, "aten.unsqueeze.default"):
            return None
        if self._readers[value] != 1 or value in self._written:
            return None
        flat = view.inputs[0]
        return flat if value.type.dims == (*flat.type.dims, 1) else None

    def _parts(self, value: Value) -> tuple[Piece, ...]:
        """A tensor as pieces: those of the node that makes it for this reader alone, or a copy."""
        node, dims = self._made.get(value), value.type.dims
        if node is not None and self._readers[value] == 1 and not self._reads_written(node):
            if node.op == PIECES:
                return pieces_of(node)
            if node.op == PROGRAM and len(node.results) == 1:
                expression = node.attribute("expression", Expression)
                inputs, scalars = node.tensors("inputs"), node.sizes("scalars")
                return (_piece(expression, inputs, scalars, dims),)
            rotated = self._rotated(node)
            if rotated is not None:
                return rotated
        copied = Expression((value.type.dtype,), (), (), (0,))
        return (_piece(copied, (value,), (), dims),)

    def _rotated(self, node: Node) -> tuple[Piece, ...] | None:
        """The halves of a rotation, and what it leaves as it is. Two of its dims may be exchanged
        before and after it."""
        swapped = node.op == _PERMUTE and node.ints("dims") == _SWAP
        if swapped:
            rotation = self._only_reader(node.inputs[0])
            if rotation is None or self._reads_written(rotation):
                return None
            node = rotation
        if node.op != HALVES:
            return None
        x, cos, sin = (node.tensor(name) for name in ("x", "cos", "sin"))
        width, rewriter = cos.type.dims[1], self._rewriter
        if node.size("start") != 0 or cos.type.dims[0] != x.type.dims[1]:
            return None
        if swapped:
            before = self._made.get(x)
            if before is not None and before.op == _PERMUTE and before.ints("dims") == _SWAP:
                x = before.tensor("x")
            else:
                x = rewriter.emit(_PERMUTE, x, _SWAP)
        dims, last = x.type.dims, x.type.dims[3]
        if not isinstance(width, int) or not isinstance(last, int):
            return None
        half = width // 2

        def columns(value: Value, first: int, count: int) -> Value:
            at = len(value.type.dims) - 1
            starts = (*(0,) * at, first)
            sizes = (*value.type.dims[:at], count)
            return self._reader.view(value, Box(starts, (1,) * (at + 1), sizes))

        angles = [
            rewriter.aten.unsqueeze(columns(table, first, half), 0 if swapped else 1)
            for first in (0, half)
            for table in (cos, sin)
        ]
        inputs = (columns(x, 0, half), columns(x, half, half), *angles)
        kind = x.type.dtype
        steps = (
            Step("$0 * $2 - $1 * $3", (0, 1, 2, 3), kind, "rotary"),
            Step("$0 * $2 + $1 * $3", (1, 0, 4, 5), kind),
        )
        expression = Expression(tuple(v.type.dtype for v in inputs), (), steps, (6, 7))
        starts = tuple((0, 0, 0, first) for first in (0, half))
        turned = Piece(expression, inputs, (), (*dims[:3], half), (1,) * 4, starts)
        if width == last:
            return (turned,)
        tail = columns(x, width, last - width)
        copied = _piece(Expression((kind,), (), (), (0,)), (tail,), (), tail.type.dims)
        return (turned, copied._replace(starts=((0, 0, 0, width),)))

    def _reads_written(self, node: Node) -> bool:
        return not self._written.isdisjoint(node.inputs)

    # -- programs on concatenations -----------------------------------------------------------------
    def _after_pieces(self, node: Node) -> Node | None:
        """A program that reads a concatenation, as part of its pieces."""
        if self._reads_written(node):
            return None
        sizes = node.sizes("sizes")
        for value in node.tensors("inputs"):
            maker = self._made.get(value)
            if maker is None or maker.op != PIECES or self._readers[value] != 1:
                continue
            if value.type.dims != sizes or self._reads_written(maker):
                continue
            pieces = self._together_or_apart(pieces_of(maker), node, value)
            if pieces is not None and len(pieces) <= len(pieces_of(maker)):
                return self._node(node, pieces)
        return None

    def _together_or_apart(
        self, parts: Sequence[Piece], after: Node | None = None, joined: Value | None = None
    ) -> list[Piece] | None:
        """Pieces of equal sizes as one each, where that is not too large."""
        groups: dict[tuple[tuple[Size, ...], tuple[int, ...]], list[Piece]] = {}
        for part in parts:
            groups.setdefault((part.sizes, part.steps), []).append(part)
        pieces: list[Piece] = []
        for group in groups.values():
            joint = self._combined(group, after, joined)
            singles = [joint] if joint else [self._combined([e], after, joined) for e in group]
            for single in singles:
                if single is None:
                    return None
                pieces.append(single)
        return pieces

    def _combined(
        self, parts: Sequence[Piece], after: Node | None, joined: Value | None
    ) -> Piece | None:
        """Pieces of equal sizes as one; None if that is too large."""
        builder = ExpressionBuilder()
        outputs: list[Term] = []
        for part in parts:
            refs = [
                self._reader.read(builder, value, within(whole(part.sizes), value))
                for value in part.inputs
            ]
            scalars = zip(part.scalars, part.expression.scalars)
            refs += [builder.scalar(size, dtype) for size, dtype in scalars]
            results = builder.inline(part.expression, refs)
            for starts, result in zip(part.starts, results):
                box = Box(starts, part.steps, part.sizes)
                if after is not None:
                    result = self._followed(builder, after, joined, result, box)
                outputs.append(result)
        if len(builder.inputs) + len(outputs) > MAX_BUFFERS:
            return None
        if not builder.needs_at_most(MAX_STEPS, MAX_CODE, outputs):
            return None
        return Piece(
            builder.build(outputs),
            tuple(builder.inputs),
            tuple(builder.scalars),
            parts[0].sizes,
            parts[0].steps,
            tuple(starts for part in parts for starts in part.starts),
        )

    def _followed(
        self,
        builder: ExpressionBuilder,
        node: Node,
        joined: Value | None,
        result: Term,
        box: Box,
    ) -> Term:
        """The result of a program at a box of a concatenation, whose element is `result`."""
        expression = node.attribute("expression", Expression)
        refs = [
            result if value is joined else self._reader.read(builder, value, within(box, value))
            for value in node.tensors("inputs")
        ]
        scalars = zip(node.sizes("scalars"), expression.scalars)
        refs += [builder.scalar(size, dtype) for size, dtype in scalars]
        return builder.inline(expression, refs)[0]


def _piece(
    expression: Expression,
    inputs: tuple[Value, ...],
    scalars: tuple[Size, ...],
    sizes: tuple[Size, ...],
) -> Piece:
    """A piece at the start of a tensor."""
    box = whole(sizes)
    return Piece(expression, inputs, scalars, box.sizes, box.steps, (box.starts,))


def _written_slice(node: Node, rank: int) -> tuple[int, int, int] | None:
    """The dim, the start and the end of the slice that a node overwrites, if they are known."""
    if node.str("op") != "aten.slice.Tensor":
        return None
    dim, start, end, step = (*node.arg_list("args"), None, None, None, None)[:4]
    if not isinstance(dim, int) or step not in (None, 1):
        return None
    size = node.result.type.dims[wrap(dim, rank)]
    start, end = 0 if start is None else start, size if end is None else end
    if not isinstance(size, int) or not isinstance(start, int) or not isinstance(end, int):
        return None
    first, last = (
        max(min(bound + size if bound < 0 else bound, size), 0) for bound in (start, end)
    )
    return (wrap(dim, rank), first, last) if first < last else None


def _is_copy(piece: Piece) -> bool:
    return not piece.expression.steps


def _is_short(piece: Piece, sizes: Sequence[Size], dtype: DType) -> bool:
    """Whether results have so few neighbours in a tensor of `sizes` that writing them apart takes many
    writes of memory."""
    columns = {starts[-1] for starts in piece.starts if starts[:-1] == piece.starts[0][:-1]}
    width = piece.sizes[-1] * len(columns)
    if width == sizes[-1]:
        return False  # whole rows
    apart = piece.steps[-1] != 1
    return apart or (isinstance(width, int) and width * dtype.itemsize < _SHORT)
