"""Operators that move complex numbers: the pairs move as real numbers do, with one more dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from purevk.dtypes import DType
from purevk.ir import Arg, Dim, Node, TensorType, Value, map_values
from purevk.ops import registry
from purevk.ops.complex.split import Made, NoKernelError, Pairs, Parts, Split, apply_by, computing
from purevk.ops.complex.views import pair_type
from purevk.ops.movement.bits import VIEW_DTYPE
from purevk.ops.promotion import real_dtype
from purevk.ops.shapes import wrap


def emit_part(split: Split, node: Node, number: int) -> tuple[Value, ...]:
    """A node for the real (0) or the imaginary (1) parts of its complex arguments. Complex numbers
    and dtypes among the arguments are replaced by their parts too."""
    dtype = computing(node)

    def part(value: Value) -> Value:
        if not value.type.dtype.is_complex:
            return value
        parts = split.parts(value, dtype)
        return parts.imaginary if number else parts.real

    def visit(arg: Arg) -> Arg:
        if isinstance(arg, DType):
            return arg.component if arg.is_complex else arg
        if isinstance(arg, complex):
            return arg.imag if number else arg.real
        if isinstance(arg, tuple):
            return tuple(visit(item) for item in arg)
        return map_values(arg, part)

    args = tuple(visit(arg) for arg in node.args)
    types = tuple(_real_type(value.type) for value in node.results)
    return split.builder.emit_all(node.op, *args, results=types)


def _real_type(type: TensorType) -> TensorType:
    return type.with_dtype(type.dtype.component) if type.dtype.is_complex else type


def by_parts(split: Split, node: Node) -> Sequence[Made]:
    """Applies an operator to the real and to the imaginary parts."""
    both = zip(emit_part(split, node, 0), emit_part(split, node, 1))
    return [Parts(real, imaginary) for real, imaginary in both]


# Linear operators on elements, whose other arguments are sizes, indices and masks of bools.
apply_by(
    "aten.gather.default",
    "aten.take.default",
    "aten.scatter.src",
    "aten.scatter_add.default",
    "aten.index_add.default",
    "aten.index_copy.default",
    "aten.index_put.default",
    "aten._unsafe_index_put.default",
    "aten.masked_scatter.default",
    "aten.select_scatter.default",
    "aten.slice_scatter.default",
    "aten.diagonal_scatter.default",
    "aten.tril.default",
    "aten.triu.default",
    "aten.diag_embed.default",
    "aten.repeat_interleave.self_int",
    "aten.rot90.default",
    "aten.pixel_shuffle.default",
    "aten.pixel_unshuffle.default",
    "aten.channel_shuffle.default",
    "aten.put.default",
    "aten.unfold_backward.default",
    refuse=lambda node: _scaled(node),
)(by_parts)


def _scaled(node: Node) -> str | None:
    if "alpha" in node_parameters(node) and isinstance(node.arg("alpha"), complex):
        return "no kernel for a complex alpha"
    return None


def node_parameters(node: Node) -> tuple[str, ...]:
    """The names of a node's parameters."""
    return registry.definition_of(node).parameters


@apply_by(
    "aten.constant_pad_nd.default",
    "aten.pad.default",
    "aten.reflection_pad1d.default",
    "aten.reflection_pad2d.default",
    "aten.reflection_pad3d.default",
    "aten.replication_pad1d.default",
    "aten.replication_pad2d.default",
    "aten.replication_pad3d.default",
    "aten._pad_circular.default",
    "aten.index_fill.int_Scalar",
    "aten.scatter.value",
)
def _filled(split: Split, node: Node) -> Sequence[Made]:
    """The imaginary part of a real number is 0."""
    if "value" in node_parameters(node):
        number = node.arg("value")
        if isinstance(number, (Value, Dim)):
            raise NoKernelError("no kernel for complex numbers and a value that only a call knows")
        if number is not None:
            node = node.with_arguments(value=complex(number))  # type: ignore[arg-type]
    return by_parts(split, node)


def _moves(*names: str) -> Callable[[Callable[[Split, Node, Value], Arg]], None]:
    """Registers operators that are applied to the pairs if these exist, else to the parts.

    The decorated function gets the pairs, and returns the result or the results.
    """

    def decorate(function: Callable[[Split, Node, Value], Arg]) -> None:
        def apply(split: Split, node: Node) -> Sequence[Made]:
            x = node.inputs[0]
            if not split.has_pairs(x):
                return by_parts(split, node)
            made = function(split, node, split.pairs(x))
            values = made if isinstance(made, tuple) else (made,)
            return [Pairs(value) for value in values if isinstance(value, Value)]

        apply_by(*names)(apply)

    return decorate


@_moves(
    "aten.view.default",
    "aten.squeeze.dims",
    "aten.unsqueeze.default",
    "aten.flatten.using_ints",
)
def _view(split: Split, node: Node, pairs: Value) -> Value:
    return split.builder.aten.view(pairs, (*node.result.type.dims, 2))


@_moves("aten.expand.default")
def _expand(split: Split, node: Node, pairs: Value) -> Value:
    lead = node.result.type.rank + 1 - pairs.type.rank
    if lead:
        pairs = split.builder.aten.view(pairs, ((1,) * lead + pairs.type.dims))
    return split.builder.aten.expand(pairs, (*node.result.type.dims, 2))


@_moves("aten.permute.default")
def _permute(split: Split, node: Node, pairs: Value) -> Value:
    rank = pairs.type.rank - 1
    order = tuple(wrap(d, rank) for d in node.ints("dims"))
    return split.builder.aten.permute(pairs, (*order, rank))


@_moves("aten.transpose.int", "aten.t.default", "aten.numpy_T.default")
def _transpose(split: Split, node: Node, pairs: Value) -> Value:
    rank = pairs.type.rank - 1
    order = list(range(rank))
    if node.op != "aten.transpose.int":
        order.reverse()
    elif order:
        a, b = (wrap(node.int(name), rank) for name in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
    return split.builder.aten.permute(pairs, (*order, rank))


@_moves(
    "aten.slice.Tensor",
    "aten.select.int",
    "aten.split_with_sizes.default",
    "aten.unbind.int",
    "aten.index_select.default",
    "aten.narrow_copy.default",
)
def _along_dim(split: Split, node: Node, pairs: Value) -> tuple[Value, ...]:
    """Operators along a dim that is counted from the front or the end."""
    rank = pairs.type.rank - 1
    if not rank:
        raise NoKernelError(f"no kernel for a complex number without dims in {node.op}")
    moved = node.with_arguments(dim=wrap(node.int("dim"), rank))
    args = tuple(pairs if arg is node.inputs[0] else arg for arg in moved.args)
    types = tuple(pair_type(value.type) for value in node.results)
    return split.builder.emit_all(node.op, *args, results=types)


@_moves("aten.flip.default")
def _flip(split: Split, node: Node, pairs: Value) -> Value:
    rank = pairs.type.rank - 1
    return split.builder.aten.flip(pairs, tuple(wrap(d, rank) for d in node.ints("dims")))


@_moves("aten.roll.default")
def _roll(split: Split, node: Node, pairs: Value) -> Value:
    rank, dims = pairs.type.rank - 1, node.ints("dims")
    if dims:
        return split.builder.aten.roll(pairs, node.args[1], tuple(wrap(d, rank) for d in dims))
    flat = split.builder.aten.view(pairs, (node.result.type.numel, 2))
    rolled = split.builder.aten.roll(flat, node.args[1], (0,))
    return split.builder.aten.view(rolled, pairs.type.dims)


@_moves("aten.repeat.default")
def _repeat(split: Split, node: Node, pairs: Value) -> Value:
    return split.builder.aten.repeat(pairs, (*node.sizes("repeats"), 1))


@_moves("aten.tile.default")
def _tile(split: Split, node: Node, pairs: Value) -> Value:
    return split.builder.aten.tile(pairs, (*node.sizes("dims"), 1))


@_moves("aten.unfold.default")
def _unfold(split: Split, node: Node, pairs: Value) -> Value:
    rank = pairs.type.rank - 1
    if not rank:
        raise NoKernelError("no kernel for the windows of a complex number without dims")
    at = wrap(node.int("dimension"), rank)
    made = split.builder.aten.unfold(pairs, at, node.int("size"), node.int("step"))
    return _last_but_one(split, made)


@_moves("aten.diagonal.default")
def _diagonal(split: Split, node: Node, pairs: Value) -> Value:
    rank = pairs.type.rank - 1
    dims = (wrap(node.int(name), rank) for name in ("dim1", "dim2"))
    made = split.builder.aten.diagonal(pairs, node.int("offset"), *dims)
    return _last_but_one(split, made)


def _last_but_one(split: Split, value: Value) -> Value:
    """Swaps the last two dims: a view has put a new dim behind the parts."""
    rank = value.type.rank
    order = (*range(rank - 2), rank - 1, rank - 2)
    return split.builder.aten.permute(value, order)


@_moves("aten.as_strided.default")
def _as_strided(split: Split, node: Node, pairs: Value) -> Value:
    strides = tuple(2 * stride for stride in node.sizes("stride"))
    offset = node.arg("storage_offset")
    start = 0 if offset is None else 2 * node.size("storage_offset")
    sizes = (*node.result.type.dims, 2)
    return split.builder.aten.as_strided(pairs, sizes, (*strides, 1), start)


@apply_by("aten.cat.default", "aten.stack.default")
def _cat(split: Split, node: Node) -> Made:
    tensors, dtype, rank = node.tensors("tensors"), computing(node), node.result.type.rank
    dim = wrap(node.int("dim"), rank)
    if node.op == "aten.cat.default":
        # torch leaves out empty tensors of rank 1.
        tensors = tuple(tensor for tensor in tensors if tensor.type.rank == rank) or tensors
    pairs = tuple(split.pairs(tensor, dtype) for tensor in tensors)
    return Pairs(split.emit(node.op, pairs, dim))


@apply_by("aten.index.Tensor")
def _index(split: Split, node: Node) -> Made:
    x, indices = node.tensor("x"), node.arg("indices")
    made = split.builder.emit_all(
        node.op, split.pairs(x), indices, results=(pair_type(node.result.type),)
    )
    return Pairs(made[0])


@apply_by("purevk.store")
def _store(split: Split, node: Node) -> Sequence[Made]:
    """A state of complex numbers is written through its view as pairs."""
    state, value = node.tensor("state"), node.tensor("value")
    pairs = split.pairs(value, state.type.dtype.component)
    split.builder.purevk.store.all(split.pairs(state), pairs)
    return []


@apply_by("aten.copy.default")
def _copy(split: Split, node: Node) -> Made:
    pairs = split.pairs(node.tensor("src"), node.result.type.dtype.component)
    target = split.builder.aten.expand(pairs, (*node.result.type.dims, 2))
    return Pairs(split.builder.aten.alias(target))


@apply_by(VIEW_DTYPE)
def _view_dtype(split: Split, node: Node) -> Made:
    """The pairs in one row are real numbers: these are viewed as those of the result."""
    value, result = node.tensor("x"), node.result.type
    sizes = value.type.dims
    if value.type.dtype.is_complex:
        value = split.pairs(value)
        sizes = (*sizes[:-1], 2 * sizes[-1]) if sizes else (2,)
    value = split.builder.aten.view(value, sizes or (1,))
    dtype = real_dtype(result.dtype)
    if value.type.dtype is not dtype:
        value = split.emit(VIEW_DTYPE, value, dtype)
    if not result.dtype.is_complex:
        return split.builder.aten.view(value, result.dims)
    return Pairs(split.builder.aten.view(value, (*result.dims, 2)))
