"""Operators that move or repeat elements: flips, rolls, padding, triangles, repetition."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.ir import Dim, Layout, Node, Scalar, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import emit_copy
from purevk.lower.expression import literal
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map import MapSpec, coordinates
from purevk.ops.builder import Builder
from purevk.ops.facts import Moves
from purevk.ops.map import NAME as MAP
from purevk.ops.map import mapped, others
from purevk.ops.registry import Kernel, ShapeError, define, rewrite
from purevk.ops.shapes import is_empty, wrap, wrap_all


def glsl_number(value: Scalar, dtype: DType) -> str:
    """A number as GLSL of the type in which `purevk.map` computes on elements of `dtype`.

    Raises:
        GraphError: it is complex, or known only at a call.
    """
    if isinstance(value, (complex, Dim)):
        raise GraphError(f"a kernel needs the number {value} as a real constant")
    return str(int(bool(value))) if dtype is DType.bool else literal(value, dtype)


# -- flips and rolls -----------------------------------------------------------------------------
@rewrite("aten.flip.default", lambda x, dims: x, moves=Moves.ALL)
def _flip(builder: Builder, node: Node, x: Value, dims: Sequence[int]) -> Value:
    rank = x.type.rank
    chosen = {wrap(d, rank) for d in dims} if rank else set()
    at = coordinates(rank, **{f"d{d}": f"x_size_{d} - 1 - i{d}" for d in chosen})
    return mapped(
        builder, f"r = X({at});", {"X": x}, x.type, order=0, lanes=others(tuple(chosen), rank)
    )


@rewrite("aten.roll.default", lambda x, shifts, dims=(): x, moves=Moves.ALL)
def _roll(
    builder: Builder,
    node: Node,
    x: Value,
    shifts: Size | tuple[Size, ...],
    dims: int | tuple[int, ...],
) -> Value:
    shifts = shifts if isinstance(shifts, tuple) else (shifts,)
    dims = (dims,) if isinstance(dims, int) else tuple(dims or ())
    if is_empty(x.type) or not x.type.rank:
        return builder.aten.alias(x)
    if not dims:
        flat = builder.aten.view(x, (x.type.numel,))
        return builder.aten.view(builder.aten.roll(flat, shifts, (0,)), x.type.dims)
    rank = x.type.rank
    total: dict[int, Size] = {}
    for shift, dim in zip(shifts, dims):
        d = wrap(dim, rank)
        total[d] = (total.get(d, 0) + shift) % x.type.dims[d]
    at = coordinates(rank, **{f"d{d}": f"pv_circle(i{d} - shift_{d}, x_size_{d})" for d in total})
    return mapped(
        builder,
        f"r = X({at});",
        {"X": x},
        x.type,
        numbers={f"shift_{d}": size for d, size in total.items()},
        order=0,
        lanes=others(list(total), rank),
    )


# -- padding -------------------------------------------------------------------------------------
def _padded(x: TensorType, pad: Sequence[Size]) -> TensorType:
    """The type after padding; `pad` has the sizes before and after the last dim, then those of the
    dim before it, ..."""
    if len(pad) % 2 or len(pad) > 2 * x.rank:
        raise ShapeError(f"cannot pad {x} by {list(pad)}")
    sizes = list(x.dims)
    for k in range(len(pad) // 2):
        sizes[-1 - k] = sizes[-1 - k] + pad[2 * k] + pad[2 * k + 1]
        if _dims.upper(sizes[-1 - k]) < 0:
            raise ShapeError(f"cannot pad {x} by {list(pad)}")
    return x.with_dims(sizes)


_BEYOND = {
    "reflect": "pv_reflect(i{d} - before_{d}, x_size_{d})",
    "replicate": "clamp(i{d} - before_{d}, 0, x_size_{d} - 1)",
    "circular": "pv_circle(i{d} - before_{d}, x_size_{d})",
    "constant": "i{d} - before_{d}",
}


def pad(
    builder: Builder,
    x: Value,
    pads: Sequence[Size],
    mode: str = "constant",
    value: Scalar | None = None,
) -> Value:
    """`x` with elements added (or, if negative, removed) at the ends of its last dims."""
    if mode == "circular" and any(isinstance(size, int) and size < 0 for size in pads):
        # The elements that are left after the cut repeat.
        x = pad(builder, x, tuple(_dims.minimum(size, 0) for size in pads))
        pads = tuple(_dims.maximum(size, 0) for size in pads)
    rank, type = x.type.rank, _padded(x.type, pads)
    before = {rank - 1 - k: pads[2 * k] for k in range(len(pads) // 2)}
    moved = {
        d: start
        for d, start in before.items()
        if not _is_zero(start) or not _is_zero(pads[2 * (rank - 1 - d) + 1])
    }
    if not moved:
        return builder.aten.alias(x)
    value = 0 if value is None else value  # not `or`: -0.0 keeps its sign
    fill = glsl_number(value, x.type.dtype)
    if is_empty(x.type):
        return builder.aten.full(type.dims, value, type.dtype)
    read = "r = X({});".format(
        coordinates(rank, **{f"d{d}": _BEYOND[mode].format(d=d) for d in moved})
    )
    if mode == "constant":
        inside = " && ".join(f"i{d} >= before_{d} && i{d} < before_{d} + x_size_{d}" for d in moved)
        read = f"r = T_R({fill}); if ({inside}) {{ {read} }}"
    return mapped(
        builder,
        read,
        {"X": x},
        type,
        numbers={f"before_{d}": size for d, size in moved.items()},
        order=0,
        lanes=others(list(moved), rank),
    )


def _is_zero(size: Size) -> bool:
    return isinstance(size, int) and size == 0


def _pad_shape(x: TensorType, pad: Sequence[Size], value: Scalar = 0) -> TensorType:
    return _padded(x, pad)


rewrite("aten.constant_pad_nd.default", _pad_shape)(
    lambda builder, node, x, pads, value: pad(builder, x, pads, "constant", value)
)
for _count in (1, 2, 3):
    rewrite(f"aten.reflection_pad{_count}d.default", lambda x, padding: _padded(x, padding))(
        lambda builder, node, x, pads: pad(builder, x, pads, "reflect")
    )
    rewrite(f"aten.replication_pad{_count}d.default", lambda x, padding: _padded(x, padding))(
        lambda builder, node, x, pads: pad(builder, x, pads, "replicate")
    )
rewrite("aten._pad_circular.default", lambda x, pad: _padded(x, pad))(
    lambda builder, node, x, pads: pad(builder, x, pads, "circular")
)
rewrite("aten.pad.default", lambda x, pad, mode="constant", value=None: _padded(x, pad))(
    lambda builder, node, x, pads, mode, value: pad(builder, x, pads, mode, value)
)


# -- triangles and diagonals ---------------------------------------------------------------------
_TRIANGLES = {"tril": "<=", "triu": ">="}


def _triangle_body(name: str, rank: int) -> str:
    beyond = f"i{rank - 1} - i{rank - 2} {_TRIANGLES[name]} diagonal"
    return f"r = T_R(0); if ({beyond}) r = X({coordinates(rank)});"


def triangle_of(node: Node) -> tuple[bool, Size] | None:
    """Whether a node is an expanded `triu`, and its diagonal; None if it is no `tril` either."""
    if node.op != MAP:
        return None
    spec = node.attribute("spec", MapSpec)
    for name in _TRIANGLES:
        if spec.body == _triangle_body(name, node.result.type.rank):
            return name == "triu", node.sizes("numbers")[0]
    return None


def _triangle(name: str) -> None:
    def shape(x: TensorType, diagonal: int = 0) -> TensorType:
        if x.rank < 2:
            raise ShapeError(f"{name} takes a matrix, not {x}")
        return x

    def expand(builder: Builder, node: Node, x: Value, diagonal: int) -> Value:
        rank = x.type.rank
        return mapped(
            builder,
            _triangle_body(name, rank),
            {"X": x},
            x.type,
            numbers={"diagonal": diagonal},
            order=0,
            lanes=others((rank - 1, rank - 2), rank),
        )

    rewrite(f"aten.{name}.default", shape)(expand)


for _name in _TRIANGLES:
    _triangle(_name)


def _diag_embed_shape(x: TensorType, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TensorType:
    a, b = wrap(dim1, x.rank + 1), wrap(dim2, x.rank + 1)
    if a == b:
        raise ShapeError("the two dims of a diagonal must differ")
    length = x.dims[-1] + abs(offset)
    rest = list(x.dims[:-1])
    for d in sorted((a, b)):
        rest.insert(d, length)
    return x.with_dims(rest)


@rewrite("aten.diag_embed.default", _diag_embed_shape)
def _diag_embed(builder: Builder, node: Node, x: Value, offset: int, dim1: int, dim2: int) -> Value:
    rank = x.type.rank + 1
    a, b = wrap(dim1, rank), wrap(dim2, rank)
    rest = [f"i{d}" for d in range(rank) if d not in (a, b)]
    diagonal = f"i{a}" if offset >= 0 else f"i{b}"
    body = f"r = T_R(0); if (i{b} - i{a} == shift) r = X({', '.join([*rest, diagonal])});"
    return mapped(builder, body, {"X": x}, node.result.type, numbers={"shift": offset})


# -- repetition ----------------------------------------------------------------------------------
def _interleave_shape(
    x: TensorType, repeats: Size, dim: int | None = None, output_size: Size | None = None
) -> TensorType:
    if dim is None:
        return x.with_dims((x.numel * repeats,))
    at = wrap(dim, x.rank)
    return x.with_dims(
        [size * repeats if d == at else size for d, size in enumerate(x.dims or (1,))]
    )


@rewrite("aten.repeat_interleave.self_int", _interleave_shape, moves=Moves.SOME)
def _interleave(
    builder: Builder,
    node: Node,
    x: Value,
    repeats: Size,
    dim: int | None,
    output_size: Size | None,
) -> Value:
    if dim is None or not x.type.rank:
        x, dim = builder.aten.view(x, (x.type.numel,)), 0
    rank, at = x.type.rank, wrap(dim, x.type.rank)
    body = f"r = X({coordinates(rank, **{f'd{at}': f'i{at} / repeats'})});"
    return mapped(
        builder,
        body,
        {"X": x},
        node.result.type,
        numbers={"repeats": repeats},
        order=0,
        lanes=others((at,), rank),
    )


def _tile_dims(x: TensorType, dims: Sequence[Size]) -> tuple[Size, ...]:
    return (1,) * (x.rank - len(dims)) + tuple(dims)


rewrite(
    "aten.tile.default",
    lambda x, dims: x.with_dims(
        tuple(
            n * size
            for n, size in zip(_tile_dims(x, dims), (1,) * (len(dims) - x.rank) + tuple(x.dims))
        )
    ),
)(lambda builder, node, x, dims: builder.aten.repeat(x, _tile_dims(x.type, dims)))


# -- writing a part ------------------------------------------------------------------------------
def _copy_shape(x: TensorType, src: TensorType, non_blocking: bool = False) -> TensorType:
    return x


@rewrite("aten.copy.default", _copy_shape, moves=Moves.TENSORS)
def _copy(builder: Builder, node: Node, x: Value, src: Value, non_blocking: bool) -> Value:
    cast = builder.aten._to_copy(src, x.type.dtype)
    return cast if cast.type.dims == x.type.dims else builder.aten.expand(cast, x.type.dims)


def _reversed_lower(lowering: Lowering, node: Node) -> None:
    """Copies the elements in reverse along a dim. The result is row-major, whatever the layout of
    the input is."""
    source, target = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    dim = node.int("dim")
    step, last = source.strides[dim], source.dims[dim] - 1
    layout = Layout(
        source.offset + last * step,
        tuple(-s if d == dim else s for d, s in enumerate(source.strides)),
    )
    emit_copy(lowering, Operand(source.storage, layout, source.type), target)


REVERSED = "purevk.reversed"
define(REVERSED, lambda x, dim: x, Kernel(_reversed_lower), moves=Moves.ALL)


def _rotated_shape(x: TensorType, k: int = 1, dims: Sequence[int] = (0, 1)) -> TensorType:
    a, b = wrap_all(dims, x.rank)
    sizes = list(x.dims)
    if k % 2:
        sizes[a], sizes[b] = sizes[b], sizes[a]
    return x.with_dims(sizes)


@rewrite("aten.rot90.default", _rotated_shape)
def _rotate(builder: Builder, node: Node, x: Value, k: int, dims: Sequence[int]) -> Value:
    a, b = wrap_all(dims, x.type.rank)
    quarters = k % 4
    if quarters == 2:
        return builder.aten.flip(x, (a, b))
    if quarters == 0:
        return builder.aten.alias(x)
    return builder.emit(REVERSED, builder.aten.transpose.int(x, a, b), a if quarters == 1 else b)


# -- parts ---------------------------------------------------------------------------------------
def _narrow_shape(x: TensorType, dim: int, start: Size, length: Size) -> TensorType:
    at = wrap(dim, x.rank)
    return x.with_dims([length if d == at else size for d, size in enumerate(x.dims)])


@rewrite("aten.narrow_copy.default", _narrow_shape, moves=Moves.SOME)
def _narrow(builder: Builder, node: Node, x: Value, dim: int, start: Size, length: Size) -> Value:
    at = wrap(dim, x.type.rank)
    start = start + x.type.dims[at] if isinstance(start, int) and start < 0 else start
    return builder.aten.slice.Tensor(x, at, start, start + length)
