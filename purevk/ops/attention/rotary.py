"""Rotary embeddings, and the grid of anchor points."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.lower.copies import emit_copy
from purevk.lower.expression import Expression, Step
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.operands import slice_of
from purevk.lower.pointwise import emit_pointwise
from purevk.ops.attention.attention import supports_attention
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import Program
from purevk.ops.reduce.turn import require_angles
from purevk.ops.registry import Kernel, ShapeError, define, rewrite_node
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits

HALVES = "purevk.rotate_halves"


# -- pairs of neighbours --------------------------------------------------------------------------
def _rotary_shape(
    xq: TensorType, xk: TensorType, freqs_cos: TensorType, freqs_sin: TensorType
) -> tuple[TensorType, TensorType]:
    return xq, xk


_PAIRS = Expression(
    (DType.float32,) * 4,
    (),
    (
        Step("$0 * $2 - $1 * $3", (0, 1, 2, 3), DType.float32),
        Step("$0 * $3 + $1 * $2", (0, 1, 2, 3), DType.float32),
    ),
    (4, 5),
)


def _pairs_lower(lowering: Lowering, node: Node) -> None:
    """x [B, S, H, D] in pairs (x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos), the angles [S, D /
    2]."""
    x, out = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    half = (*x.dims[:3], x.dims[3] // 2)

    def lane(operand: Operand, number: int) -> Operand:
        strides = (*operand.strides[:3], 2 * operand.strides[3])
        return Operand(
            operand.storage,
            Layout(operand.offset + number * operand.strides[3], strides),
            TensorType(operand.dtype, half),
        )

    angles = []
    for name in ("cos", "sin"):
        angle = lowering.operand(node.tensor(name))
        layout = Layout(angle.offset, (angle.strides[0], 0, angle.strides[1]))
        angles.append(
            Operand(angle.storage, layout, TensorType(angle.dtype, (x.dims[1], x.dims[2], half[3])))
        )
    emit_pointwise(
        lowering,
        _PAIRS,
        [lane(x, 0), lane(x, 1), *angles],
        (),
        [lane(out, 0), lane(out, 1)],
        label="rotary",
    )


def _pairs_shape(x: TensorType, cos: TensorType, sin: TensorType) -> TensorType:
    return x


define("purevk.rotate_pairs", _pairs_shape, Kernel(_pairs_lower))


@rewrite_node("et_vk.apply_rotary_emb.default", _rotary_shape, supports=supports_attention)
def _expand_rotary(builder: Builder, node: Node) -> tuple[Value, Value]:
    cos, sin = node.tensor("freqs_cos"), node.tensor("freqs_sin")
    xq, xk = (builder.purevk.rotate_pairs(node.tensor(name), cos, sin) for name in ("xq", "xk"))
    return xq, xk


# -- halves (Hugging Face's form) -----------------------------------------------------------------
_HALVES = Expression(
    (DType.float32,) * 6,
    (),
    (
        Step("$0 * $2 - $1 * $3", (0, 1, 2, 3), DType.float32),
        Step("$0 * $2 + $1 * $3", (1, 0, 4, 5), DType.float32),
    ),
    (6, 7),
)


def _halves_shape(x: TensorType, cos: TensorType, sin: TensorType, start: Size = 0) -> TensorType:
    """x [B, S, H, D], cos and sin [rows, R], R <= D: rows start .. start + S of the tables rotate the
    first R numbers."""
    if x.rank != 4 or cos.rank != 2 or cos.dims[1] > x.dims[3] or cos.dims[1] % 2:
        raise ShapeError(f"cannot rotate {x} by angles {cos}")
    return x


def _halves_lower(lowering: Lowering, node: Node) -> None:
    x, out = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    tables = [lowering.operand(node.tensor(name)) for name in ("cos", "sin")]
    start = node.size("start")
    width = tables[0].dims[1]
    half = width // 2
    require_angles(lowering, node, x.dims[1])

    def angle(table: Operand, first: Size) -> Operand:
        rows, columns = table.strides
        layout = Layout(table.offset + start * rows + first * columns, (rows, 0, columns))
        return Operand(table.storage, layout, TensorType(table.dtype, (x.dims[1], x.dims[2], half)))

    parts = [slice_of(x, 3, 0, half), slice_of(x, 3, half, half)]
    starts: tuple[Size, Size] = (0, half)
    angles = [angle(table, first) for first in starts for table in tables]
    results = [slice_of(out, 3, 0, half), slice_of(out, 3, half, half)]
    emit_pointwise(lowering, _HALVES, [*parts, *angles], (), results, label="rotary")
    if width != x.dims[3]:
        rest = x.dims[3] - width
        emit_copy(
            lowering, slice_of(x, 3, width, rest), slice_of(out, 3, width, rest), label="rotary"
        )


def _supports(node: Node, traits: DeviceTraits) -> str | None:
    for value in node.inputs:
        if value.type.dtype not in (DType.float32, DType.float16):
            return f"no kernel for {value.type.dtype.name}"
    return None


define(HALVES, _halves_shape, Kernel(_halves_lower, supports=_supports))


def _hf_shape(
    xq: TensorType,
    xk: TensorType,
    freqs_cos: TensorType,
    freqs_sin: TensorType,
    start_pos: Size = 0,
) -> tuple[TensorType, TensorType]:
    if freqs_cos.rank == 3 and not (isinstance(start_pos, int) and start_pos == 0):
        raise ShapeError(f"angles {freqs_cos} of a batch cannot start at row {start_pos}")
    return xq, xk


@rewrite_node("et_vk.apply_rotary_emb_hf.default", _hf_shape, supports=_supports)
def _expand_hf(builder: Builder, node: Node) -> tuple[Value, ...]:
    """Angles [rows, R] rotate x [B, S, H, D]. Angles [B, S, R] rotate x [B, H, S, D]: these are the
    shapes in transformers, and executorch takes them for the same pattern."""
    inputs = (node.tensor("xq"), node.tensor("xk"))
    cos, sin, start = node.tensor("freqs_cos"), node.tensor("freqs_sin"), node.size("start_pos")
    if cos.type.rank == 2:
        return tuple(builder.emit(HALVES, x, cos, sin, start) for x in inputs)
    return tuple(_rotate_heads(builder, x, cos, sin) for x in inputs)


def _rotate_heads(
    builder: Builder, x: Value, cos: Value, sin: Value, op: str = HALVES, width: Size | None = None
) -> Value:
    """x [B, H, S, D] by angles [B, S, columns], or of a batch of 1; `width`: numbers of each row that
    are rotated, if not all."""
    batch, heads, rows, size = x.type.dims
    columns = cos.type.dims[2]
    tables = [
        builder.aten.reshape(
            builder.aten.expand(each, (batch, rows, columns)), (batch * rows, columns)
        )
        for each in (cos, sin)
    ]
    rotated = builder.aten.permute(x, (0, 2, 1, 3))
    rotated = builder.aten.reshape(rotated, (1, batch * rows, heads, size))
    if width is None or width == size:
        rotated = builder.emit(op, rotated, *tables)
    else:
        first, others = (
            builder.aten.slice.Tensor(rotated, dim=3, start=start, end=end)
            for start, end in ((0, width), (width, size))
        )
        rotated = builder.aten.cat((builder.emit(op, first, *tables), others), dim=3)
    rotated = builder.aten.view(rotated, (batch, rows, heads, size))
    return builder.aten.permute(rotated, (0, 2, 1, 3))


# -- angles computed from positions --------------------------------------------------------------
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)


@signature("x, position_ids, inv_freq, interleaved=False, attention_scale=1.0")
def _rope_shape(x: TensorType, position_ids: TensorType, inv_freq: TensorType) -> TensorType:
    """x [B, H, T, D], positions [B, T] or [1, T], frequencies [R / 2], R <= D: the first R numbers
    are rotated."""
    if (x.rank, position_ids.rank, inv_freq.rank) != (4, 2, 1):
        raise ShapeError(f"cannot rotate {x} at {position_ids} with {inv_freq}")
    if position_ids.dims[0] not in (1, x.dims[0]) or position_ids.dims[1] != x.dims[2]:
        raise ShapeError(f"positions {position_ids} of {x}")
    if 2 * inv_freq.dims[0] > x.dims[3]:
        raise ShapeError(f"{inv_freq.dims[0]} frequencies for rows of {x.dims[3]} numbers")
    return x


def _supports_rope(node: Node, traits: DeviceTraits) -> str | None:
    dtype = node.tensor("x").type.dtype
    return None if dtype in _FLOATS else f"no kernel for {dtype.name}"


# The operator of executorch's native backend.
@rewrite_node("native.rope.default", _rope_shape, supports=_supports_rope)
def _expand_rope(builder: Builder, node: Node) -> Value:
    """Angles in float32; their cosines and sines in the dtype of x."""
    x, aten = node.tensor("x"), builder.aten
    positions = aten._to_copy(node.tensor("position_ids"), DType.float32)
    frequencies = aten._to_copy(node.tensor("inv_freq"), DType.float32)
    angles = aten.mul.Tensor(aten.unsqueeze(positions, dim=2), frequencies)
    pairs, width = node.bool("interleaved"), 2 * frequencies.type.dims[0]
    dtype = x.type.dtype
    wide = DType.float32 if dtype is DType.bfloat16 else dtype

    def table(values: Value) -> Value:
        values = aten._to_copy(aten.mul.Scalar(values, node.float("attention_scale")), dtype)
        values = aten._to_copy(values, wide)
        return values if pairs else aten.cat((values, values), dim=2)

    tables = (table(aten.cos(angles)), table(aten.sin(angles)))
    op = "purevk.rotate_pairs" if pairs else HALVES
    rotated = _rotate_heads(
        builder, aten._to_copy(x, wide), *tables, op=op, width=width if pairs else None
    )
    return aten._to_copy(rotated, dtype)


# -- pairs with interleaved angles ---------------------------------------------------------------
def _interleaved_shape(x: TensorType, freqs_cis: TensorType) -> TensorType:
    if x.rank != 3 or freqs_cis.numel != x.dims[1] * x.dims[2]:
        raise ShapeError(f"cannot rotate {x} by angles {freqs_cis}")
    return x


@rewrite_node("et_vk.apply_rotary_emb_interleaved.default", _interleaved_shape, supports=_supports)
def _expand_interleaved(builder: Builder, node: Node) -> Value:
    """x [B, N, C]; the angles, of any shape, are N rows of C / 2 pairs (cos, sin)."""
    x, angles = node.tensor("x"), node.tensor("freqs_cis")
    batch, rows, width = x.type.dims
    pairs = builder.aten.view(angles, (rows, width // 2, 2))
    cos, sin = (builder.aten.select.int(pairs, dim=2, index=at) for at in (0, 1))
    heads = builder.aten.view(x, (batch, rows, 1, width))
    return builder.aten.view(builder.purevk.rotate_pairs(heads, cos, sin), x.type.dims)


# -- anchor points -------------------------------------------------------------------------------
def _priors_shape(x: TensorType, stride: int, offset: float) -> TensorType:
    return TensorType(DType.float32, (x.dims[-2] * x.dims[-1], 2))


@rewrite_node("et_vk.grid_priors.default", _priors_shape)
def _expand_priors(builder: Builder, node: Node) -> Value:
    """(x, y) of every pixel, row by row: (index + offset) * stride."""
    stride, offset = node.int("stride"), node.float("offset")
    height, width = node.tensor("x").type.dims[-2:]
    dtype = node.result.type.dtype

    def points(count: Size, shape: tuple[Size, ...]) -> Value:
        numbers = builder.purevk.iota(count)
        program = Program(builder, numbers.type.dims)
        point = program.step(
            "($0 + $1) * $2", program.real(numbers), program.real(offset), program.real(stride)
        )
        line = builder.aten.view(program.emit((point, dtype)), shape)
        return builder.aten.expand(line, (height, width, 1))

    pair = (points(width, (1, width, 1)), points(height, (height, 1, 1)))
    return builder.aten.view(builder.aten.cat(pair, dim=2), (height * width, 2))
