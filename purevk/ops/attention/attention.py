"""Attention in one kernel, and the operators of LLMs that keep a KV cache."""

from __future__ import annotations

import math
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ir.dims import product
from purevk.lower.copies import dense, emit_copy
from purevk.lower.expression import Expression, Step
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4
from purevk.lower.operands import broadcast_strides, slice_of
from purevk.lower.pointwise import emit_pointwise
from purevk.ops.attention.choice import choose
from purevk.ops.builder import Builder
from purevk.ops.image_layout import LayoutQuery
from purevk.ops.registry import Kernel, Operator, Rewrite, ShapeError, register
from purevk.ops.shapes import broadcast

NAME = "purevk.attention"
HEADS_FIRST_OUT = (
    0,
    2,
    1,
    3,
)  # the result [B, H, S, D] lies as [B, S, H, D], which the next product reads as one matrix


def _attention_shape(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    mask: TensorType | None = None,
    scale: float = 1.0,
    causal: bool = False,
    start: Size = 0,
    length: Size | None = None,
) -> TensorType:
    if not q.rank == k.rank == v.rank == 4 or q.dims[3] != k.dims[3] or k.dims[2] != v.dims[2]:
        raise ShapeError(f"attention of {q} over {k} and {v}")
    return q.with_dims((*q.dims[:3], v.dims[3]))


def _rows(lowering: Lowering, operand: Operand) -> Operand:
    """An operand whose last dim is dense and whose strides and offset are multiples of 4; copied if
    need be."""
    unit = isinstance(operand.strides[3], int) and operand.strides[3] == 1
    outer = [
        s
        for size, s in zip(operand.dims[:3], operand.strides[:3])
        if not (isinstance(size, int) and size == 1)
    ]
    if unit and isinstance(operand.offset, int) and gcd4(operand.offset, *outer):
        return operand
    return dense(lowering, operand)


def _stride(operand: Operand, dim: int) -> Size:
    size = operand.dims[dim]
    return 0 if isinstance(size, int) and size == 1 else operand.strides[dim]


def _attention_lower(lowering: Lowering, node: Node) -> None:
    q_value, k_value, v_value, mask_value, scale, causal, start, length = node.args
    out = lowering.operand(node.result)
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    q, k, v = (_rows(lowering, lowering.operand(value)) for value in (q_value, k_value, v_value))
    batches, heads, queries, _ = q.dims
    width, value_width = _dims.specialize(q.dims[3]), _dims.specialize(v.dims[3])
    key_heads, keys = k.dims[1], k.dims[2] if length is None else length
    macros: dict[str, Any] = {
        "HEAD_DIM": width,
        "VALUE_DIM": value_width,
        "T_Q": q.dtype.glsl,
        "T_K": k.dtype.glsl,
        "T_V": v.dtype.glsl,
        "T_OUT": out.dtype.glsl,
        "CAUSAL": int(causal),
    }
    buffers: list[tuple[Operand, str]] = []
    for name, operand in (("TEXEL_Q", q), ("TEXEL_K", k), ("TEXEL_V", v)):
        texel = lowering.texel(operand, True)
        macros[name] = int(bool(texel))
        buffers.append((operand, "r" + texel))
    axes = ("batch", "head", "row", "column")
    mask_params: dict[str, Size] = {
        **{f"mask_{axis}": 0 for axis in axes},
        "offset_mask": 0,
    }
    if mask_value is not None:
        mask = lowering.operand(mask_value)
        if not isinstance(mask.offset, int):
            mask = dense(lowering, mask)
        steps = broadcast_strides(mask, (batches, heads, queries, k.dims[2]))
        mask_params = {
            **{f"mask_{axis}": step for axis, step in zip(axes, steps)},
            "offset_mask": mask.offset,
        }
        texel = lowering.texel(mask, False)
        macros.update(
            {
                "MASK": 2 if mask.dtype is DType.bool else 1,
                "T_MASK": mask.dtype.glsl,
                "TEXEL_MASK": int(bool(texel)),
            }
        )
        buffers.append((mask, "r" + texel))
    buffers.append((out, "w"))
    operands = {"q": q, "k": k, "v": v, "o": out}
    params: dict[str, Size] = {
        "S": queries,
        "T": keys,
        "group": heads // key_heads,
        "scale_bits": bits_of(scale),
        "start": start,
        **{
            f"{name}_{axis}": _stride(operand, d)
            for name, operand in operands.items()
            for d, axis in enumerate(("batch", "head", "row"))
        },
        **{f"offset_{name}": operand.offset for name, operand in operands.items()},
        **mask_params,
    }
    flops = 2 * batches * heads * queries * k.dims[2] * (width + value_width)
    halves = q.dtype is k.dtype is v.dtype is DType.float16
    choose(lowering.traits, batches, heads, queries, k.dims[2], width, value_width, halves).emit(
        lowering, buffers, macros, params, out, (batches, heads, queries, keys, value_width), flops
    )


def _supports(node: Node, traits: Any) -> str | None:
    for value in node.inputs:
        if value.type.dtype not in (DType.float32, DType.float16, DType.bfloat16, DType.bool):
            return f"no kernel for {value.type.dtype.name}"
    return None


MAX_WIDTH = 256


def head_width_fits(width: Size, value_width: Size) -> bool:
    """Whether the attention kernels take heads of this width. One that calls may change is taken
    for its bound, under a guard."""
    return all(
        w % 4 == 0 and 0 < w <= MAX_WIDTH
        for w in (_dims.specialize(width), _dims.specialize(value_width))
    )


def _result_order(node: Node, query: LayoutQuery) -> tuple[tuple[int, ...] | None]:
    """What leaves the graph lies as the host wants it."""
    return (None if node.result in query.outputs else HEADS_FIRST_OUT,)


register(
    Operator(
        NAME,
        _attention_shape,
        Kernel(_attention_lower, layouts=_result_order, supports=_supports, bfloat16=False),
    )
)


# -- scaled_dot_product_attention ----------------------------------------------------------------
def _sdpa_shape(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    attn_mask: TensorType | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> TensorType:
    lead = q.dims[:-2] if enable_gqa else broadcast(q.dims[:-2], k.dims[:-2], v.dims[:-2])
    return q.with_dims((*lead, q.dims[-2], v.dims[-1]))


def _refuse_sdpa(node: Node, traits: Any) -> str | None:
    q, k, v = node.args[:3]
    aten = node.op.startswith("aten.")
    if aten and node.args[4]:
        return "attention with dropout is random"
    if not 2 <= q.type.rank == k.type.rank == v.type.rank:
        return f"no kernel for ranks {q.type.rank}, {k.type.rank} and {v.type.rank}"
    if aten and node.args[7] and (q.type.rank < 3 or not _groups_divide(q.type, k.type, v.type)):
        return "no kernel for heads of keys that do not divide those of queries"
    return None if q.type.dtype is DType.float64 else _supports(node, traits)


def _groups_divide(q: TensorType, *others: TensorType) -> bool:
    return all(q.dims[-3] % each.dims[-3] == 0 for each in others)


def _default_scale(scale: float | None, width: Size) -> float:
    return 1.0 / math.sqrt(_dims.specialize(width)) if scale is None else float(scale)


def _to_four(builder: Builder, value: Value, lead: tuple[Size, ...]) -> Value:
    """[..., S, D] as [B, H, S, D], the dims before S expanded to `lead`, where the heads may stay
    fewer."""
    rank = value.type.rank
    wanted = (*lead, *value.type.dims[-2:])
    if rank == 4:
        wanted = (wanted[0], value.type.dims[1], *wanted[2:])
    if value.type.dims != wanted:
        value = builder.emit("aten.expand.default", value, wanted)
    if rank < 4:
        return builder.emit("aten.view.default", value, (*(1,) * (4 - rank), *wanted))
    return (
        value
        if rank == 4
        else builder.emit("aten.reshape.default", value, (product(wanted[:-3]), *wanted[-3:]))
    )


def _expand_sdpa(builder: Builder, node: Node) -> Value:
    q, k, v, mask, _, causal, scale, gqa = node.args
    return _sdpa(builder, q, k, v, mask, bool(causal), scale, bool(gqa))


def _sdpa(
    builder: Builder,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Value:
    """Attention of torch's kind: any rank, the dims before the last two broadcast."""
    scale = _default_scale(scale, q.type.dims[-1])
    lead = broadcast(*(each.type.dims[:-3] for each in (q, k, v)))
    if q.type.rank > 2:
        heads = (
            q.type.dims[-3:-2] if gqa else broadcast(*(each.type.dims[-3:-2] for each in (q, k, v)))
        )
        lead = (*lead, *heads)
    if (gqa and q.type.rank != 4) or k.type.dims[:-2] != v.type.dims[:-2]:
        k, v = (_repeated(builder, each, lead) for each in (k, v))
    if q.type.rank == 4 and q.type.dims[1] != lead[1]:
        q = builder.emit("aten.expand.default", q, (*lead, *q.type.dims[2:]))
    dims = (*lead, q.type.dims[-2], v.type.dims[-1])
    q4, k4, v4 = (_to_four(builder, each, lead) for each in (q, k, v))
    if mask is not None and mask.type.rank > 4:
        mask = _to_four(builder, mask, lead)
    elif mask is not None and mask.type.rank == 3 and q.type.rank < 4:
        mask = builder.emit("aten.unsqueeze.default", mask, 0)
    made = _attend(builder, q4, k4, v4, mask, scale, causal)
    return made if made.type.dims == dims else builder.emit("aten.reshape.default", made, dims)


def _repeated(builder: Builder, value: Value, lead: tuple[Size, ...]) -> Value:
    """Keys or values [..., H, S, D] with each head as often as the queries [..., heads of `lead`]
    want it."""
    *_, heads, rows, width = value.type.dims
    if heads in (1, lead[-1]):
        return builder.emit("aten.expand.default", value, (*lead, rows, width))
    each = builder.emit("aten.unsqueeze.default", value, -3)
    each = builder.emit(
        "aten.expand.default", each, (*lead[:-1], heads, lead[-1] // heads, rows, width)
    )
    return builder.emit("aten.reshape.default", each, (*lead, rows, width))


def _attend(
    builder: Builder, q: Value, k: Value, v: Value, mask: Value | None, scale: float, causal: bool
) -> Value:
    """Attention [B, H, S, D] of any width: one kernel, on padded heads where it needs them, or two
    products."""
    width, value_width = q.type.dims[3], v.type.dims[3]
    wide = q.type.dtype is DType.float64  # in two products
    if not wide and head_width_fits(width, value_width):
        return builder.emit(NAME, q, k, v, mask, scale, causal, 0, None)
    if not wide and all(
        isinstance(size, int) and 0 < size <= MAX_WIDTH for size in (width, value_width)
    ):
        q, k, v = (
            builder.emit("aten.constant_pad_nd.default", each, (0, -each.type.dims[3] % 4), 0)
            if each.type.dims[3] % 4
            else each
            for each in (q, k, v)
        )
        made = builder.emit(NAME, q, k, v, mask, scale, causal, 0, None)
        return builder.emit("aten.slice.Tensor", made, 3, 0, value_width, 1)
    heads, rows, keys = q.type.dims[1], q.type.dims[2], k.type.dims[2]
    if k.type.dims[1] != heads:
        k, v = (_repeated(builder, each, q.type.dims[:2]) for each in (k, v))
    scores = builder.emit(
        "aten.matmul.default", q, builder.emit("aten.permute.default", k, (0, 1, 3, 2))
    )
    scores = builder.emit("aten.mul.Scalar", scores, scale)
    if causal:
        seen = builder.emit(
            "aten.tril.default",
            builder.emit("aten.full.default", (rows, keys), True, DType.bool),
            0,
        )
        scores = builder.emit("aten.where.ScalarOther", seen, scores, -math.inf)
    if mask is not None and mask.type.dtype is DType.bool:
        scores = builder.emit("aten.where.ScalarOther", mask, scores, -math.inf)
    elif mask is not None:
        scores = builder.emit("aten.add.Tensor", scores, mask, 1)
    weights = builder.emit("purevk.softmax", scores, -1, False, True, v.type.dtype)
    return builder.emit("aten.matmul.default", weights, v)


register(
    Operator(
        "aten.scaled_dot_product_attention.default",
        _sdpa_shape,
        Rewrite(_expand_sdpa, _refuse_sdpa),
    )
)


def _etvk_sdpa_shape(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    attn_mask: TensorType | None = None,
    scale: float | None = None,
) -> TensorType:
    return q.with_dims((*q.dims[:-1], v.dims[-1]))


register(
    Operator(
        "et_vk.sdpa.default",
        _etvk_sdpa_shape,
        Rewrite(
            lambda builder, node: _sdpa(builder, *node.args[:4], False, node.args[4], False),
            _refuse_sdpa,
        ),
    )
)


# -- KV cache ------------------------------------------------------------------------------------
def _write_lower(lowering: Lowering, node: Node) -> None:
    state, value, dim, start = node.args
    target, source = lowering.operand(state), lowering.operand(value)
    lowering.require(
        start + source.dims[dim],
        target.dims[dim],
        f"the cache of {node.source} is too small for this call",
        "the call would write up to row {left} of {right}",
        "call reset_state(), or export the model with a larger cache",
    )
    lowering.require(
        0,
        start,
        f"the call would write before the cache of {node.source}",
        "it would start at row {right}",
        "pass a position of 0 or more",
    )
    emit_copy(lowering, source, slice_of(target, dim, start, source.dims[dim]))


register(
    Operator(
        "purevk.write", lambda state, value, dim, start: None, Kernel(_write_lower), mutates=(0,)
    )
)


def _sdpa_with_kv_cache_shape(
    query: TensorType,
    key: TensorType,
    value: TensorType,
    key_cache: TensorType,
    value_cache: TensorType,
    start_pos: Size,
    seq_len: Size,
    attn_mask: TensorType | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> TensorType:
    if not query.rank == key.rank == key_cache.rank == 4:
        raise ShapeError(f"attention of {query} with a cache {key_cache}")
    return query


def _attend_cache(
    builder: Builder,
    query: Value,
    keys: Value,
    values: Value,
    start: Size,
    mask: Value | None,
    causal: bool,
    scale: float | None,
) -> Value:
    """Attention of [B, S, H, D] over the first start + S rows of caches [B, T, H, D]."""
    first = [
        builder.emit("aten.permute.default", each, (0, 2, 1, 3)) for each in (query, keys, values)
    ]
    length = start + query.type.dims[1]
    made = builder.emit(
        NAME, *first, mask, _default_scale(scale, query.type.dims[3]), bool(causal), start, length
    )
    return builder.emit("aten.permute.default", made, (0, 2, 1, 3))


def _expand_sdpa_with_kv_cache(builder: Builder, node: Node) -> Value:
    query, key, value, key_cache, value_cache, start, _, mask, _, causal, scale = node.args
    builder.emit_all("purevk.write", key_cache, key, 1, start)
    builder.emit_all("purevk.write", value_cache, value, 1, start)
    return _attend_cache(builder, query, key_cache, value_cache, start, mask, causal, scale)


def _refuse_cache(node: Node, traits: Any) -> str | None:
    if not head_width_fits(node.args[0].type.dims[3], node.args[2].type.dims[3]):
        return f"no kernel for heads of width {node.args[0].type.dims[3]}"
    return _supports(node, traits)


register(
    Operator(
        "llama.sdpa_with_kv_cache.default",
        _sdpa_with_kv_cache_shape,
        Rewrite(_expand_sdpa_with_kv_cache, _refuse_cache),
        mutates=(3, 4),
    )
)


def _custom_sdpa_shape(
    query: TensorType,
    key: TensorType,
    value: TensorType,
    start_pos: Size,
    attn_mask: TensorType | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> TensorType:
    return query


def _expand_custom_sdpa(builder: Builder, node: Node) -> Value:
    query, key, value, start, mask, _, causal, scale = node.args
    return _attend_cache(builder, query, key, value, start, mask, causal, scale)


register(
    Operator(
        "llama.custom_sdpa.default", _custom_sdpa_shape, Rewrite(_expand_custom_sdpa, _refuse_cache)
    )
)


def _update_cache_shape(value: TensorType, cache: TensorType, start_pos: Size) -> TensorType:
    return TensorType(value.dtype, (1,))


def _expand_update_cache(builder: Builder, node: Node) -> Value:
    value, cache, start = node.args
    builder.emit_all("purevk.write", cache, value, 1, start)
    return builder.emit("aten.full.default", (1,), 0.0, value.type.dtype)


register(
    Operator(
        "llama.update_cache.default",
        _update_cache_shape,
        Rewrite(_expand_update_cache),
        mutates=(1,),
    )
)


# -- rotary embedding ----------------------------------------------------------------------------
def _rotary_shape(
    xq: TensorType, xk: TensorType, freqs_cos: TensorType, freqs_sin: TensorType
) -> tuple[TensorType, TensorType]:
    return xq, xk


_ROTATE = Expression(
    (DType.float32,) * 4,
    (),
    (
        Step("$0 * $2 - $1 * $3", (0, 1, 2, 3), DType.float32),
        Step("$0 * $3 + $1 * $2", (0, 1, 2, 3), DType.float32),
    ),
    (4, 5),
)


def _rotate_lower(lowering: Lowering, node: Node) -> None:
    """x [B, S, H, D] in pairs (x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos), the angles [S, D /
    2]."""
    x_value, cos_value, sin_value = node.args
    x, out = lowering.operand(x_value), lowering.operand(node.result)
    half = (*x.dims[:3], x.dims[3] // 2)

    def lane(operand: Operand, number: int) -> Operand:
        strides = (*operand.strides[:3], 2 * operand.strides[3])
        return Operand(
            operand.storage,
            Layout(operand.offset + number * operand.strides[3], strides),
            TensorType(operand.dtype, half),
        )

    angles = []
    for value in (cos_value, sin_value):
        angle = lowering.operand(value)
        layout = Layout(angle.offset, (angle.strides[0], 0, angle.strides[1]))
        angles.append(
            Operand(angle.storage, layout, TensorType(angle.dtype, (x.dims[1], x.dims[2], half[3])))
        )
    emit_pointwise(
        lowering,
        _ROTATE,
        [lane(x, 0), lane(x, 1), *angles],
        (),
        [lane(out, 0), lane(out, 1)],
        label="rotary",
    )


register(Operator("purevk.rotate_pairs", lambda x, cos, sin: x, Kernel(_rotate_lower)))


def _expand_rotary(builder: Builder, node: Node) -> tuple[Value, Value]:
    xq, xk, cos, sin = node.args
    return builder.emit("purevk.rotate_pairs", xq, cos, sin), builder.emit(
        "purevk.rotate_pairs", xk, cos, sin
    )


register(
    Operator("et_vk.apply_rotary_emb.default", _rotary_shape, Rewrite(_expand_rotary, _supports))
)
