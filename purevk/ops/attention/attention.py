"""Attention in one kernel."""

from __future__ import annotations

import math

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.declared import texel_form
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4
from purevk.lower.operands import broadcast_strides
from purevk.ops.attention.choice import choose
from purevk.ops.attention.kernels import Attention, Choice, Coopmat, Problem
from purevk.ops.attention.score_program import ScoreProgram, capped_scores
from purevk.ops.attention.score_writer import ScoreFunctions, write_functions
from purevk.ops.builder import Builder
from purevk.ops.image_layout import LayoutQuery
from purevk.ops.matmul.fragments import BLOCK, blocks_type
from purevk.ops.random.sampling import dropped
from purevk.ops.registry import Kernel, ShapeError, define, rewrite_node
from purevk.ops.shapes import broadcast
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits

NAME = "purevk.attention"
MAX_WIDTH = 256
# The result [B, H, S, D] is [B, S, H, D] in memory. The next matmul reads that as one matrix.
HEADS_LAST = (0, 2, 1, 3)


@signature(
    "q, k, v, mask=None, scale=1.0, causal=False, start: Size = 0, "
    "length: Size | None = None, functions=None, sizes=(), extras=(), limits=None, "
    "sinks=None, blocks=False, pages=None, page=0, softcap=0.0"
)
def _attention_shape(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    limits: TensorType | None,
    sinks: TensorType | None,
    blocks: bool,
    pages: TensorType | None,
    page: int,
    length: Size | None,
    softcap: float,
) -> TensorType:
    """Queries [B, H, S, D], keys and values [B, G, T, D].

    Args:
        mask: [B, H, S, T], of floats that are added or of booleans; it may broadcast.
        causal: query s sees the keys up to s + start.
        length: how many of the keys there are; None: all.
        functions, sizes, extras: see `ScoreProgram`.
        limits: int32 [B, H, S, 1], the key after the last that a query sees, or [B, H, S, 2], the
            first one too; it may broadcast.
        sinks: [B, H, S, 1], the score of a key without values that each query sees too; it may
            broadcast.
        blocks: the result is a matrix [B * S, H * D] in the order of fragments, where
            `writes_blocks` says that the kernel can store it.
        softcap: scores, times `scale`, become tanh(score / softcap) * softcap; 0: they do not.
        pages: int32 [B, P] or [1, P], for keys and values [1, G, rows, D] of all batches: the first
            row of each `page` keys, in their order. `length` is given then.
    """
    if (
        not q.rank == k.rank == v.rank == 4
        or not _dims.assume(q.dims[3], "==", k.dims[3])
        or not _dims.assume(k.dims[2], "==", v.dims[2])
    ):
        raise ShapeError(f"attention of {q} over {k} and {v}")
    if limits is not None and (limits.dtype is not DType.int32 or limits.dims[-1] not in (1, 2)):
        raise ShapeError(f"{limits} are no limits of keys")
    if sinks is not None and (sinks.rank != 4 or sinks.dims[3] != 1):
        raise ShapeError(f"{sinks} are no sinks of queries")
    if not 0 <= softcap < math.inf:
        raise ShapeError(f"scores cannot be bounded by {softcap}")
    (batches, heads, queries), width = q.dims[:3], v.dims[3]
    if pages is not None and (
        pages.dtype is not DType.int32
        or pages.rank != 2
        or k.dims[0] != 1
        or length is None
        or _dims.upper(length) > page * _dims.upper(pages.dims[1])
        or page & (page - 1)
    ):
        raise ShapeError(f"{pages} are no pages of {length} keys {k}")
    if blocks:
        return blocks_type(q.dtype, batches * queries, heads * width)
    return q.with_dims((batches, heads, queries, width))


def _rows(lowering: Lowering, operand: Operand) -> Operand:
    """An operand whose last dim is dense and whose strides and offset are multiples of 4; copied if
    need be."""
    contiguous = isinstance(operand.strides[3], int) and operand.strides[3] == 1
    outer = [
        s
        for size, s in zip(operand.dims[:3], operand.strides[:3])
        if not (isinstance(size, int) and size == 1)
    ]
    if contiguous and isinstance(operand.offset, int) and gcd4(operand.offset, *outer):
        return operand
    return dense(lowering, operand)


def _stride(operand: Operand, dim: int) -> Size:
    size = operand.dims[dim]
    return 0 if isinstance(size, int) and size == 1 else operand.strides[dim]


def _attention_lower(lowering: Lowering, node: Node) -> None:
    mask_value, length = node.optional_tensor("mask"), node.optional_size("length")
    out = lowering.operand(node.result)
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    q, k, v = (_rows(lowering, lowering.operand(node.tensor(name))) for name in "qkv")
    batches, heads, queries, _ = q.dims
    width, value_width = _dims.specialize(q.dims[3]), _dims.specialize(v.dims[3])
    blocks = node.bool("blocks")
    if blocks:  # its strides are not read
        dims = (batches, heads, queries, value_width)
        layout = Layout(out.offset, Layout.dense(dims).strides)
        out = Operand(out.storage, layout, TensorType(out.dtype, dims))
    key_heads, keys = k.dims[1], k.dims[2] if length is None else length
    macros: dict[str, str | int] = {
        "HEAD_DIM": width,
        "VALUE_DIM": value_width,
        "T_Q": q.dtype.glsl,
        "T_K": k.dtype.glsl,
        "T_V": v.dtype.glsl,
        "T_OUT": out.dtype.glsl,
        "CAUSAL": int(node.bool("causal")),
        **({"BLOCKS_OUT": 1} if blocks else {}),
    }
    buffers: dict[str, tuple[Operand, str]] = {}
    for name, operand in (("q", q), ("k", k), ("v", v)):
        texel = lowering.texel(operand, True, bits=True)
        macros[f"TEXEL_{name.upper()}"] = texel_form(texel)
        buffers[name] = (operand, "r" + texel)
    axes = ("batch", "head", "row", "column")
    mask_params: dict[str, Size] = {
        **{f"mask_{axis}": 0 for axis in axes},
        "offset_mask": 0,
    }
    if mask_value is not None:
        mask = lowering.operand(mask_value)
        if not isinstance(mask.offset, int):
            mask = dense(lowering, mask)
        steps = broadcast_strides(mask, (batches, heads, queries, key_count(node)))
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
        buffers["mask"] = (mask, "r" + texel)
    limits_value = node.optional_tensor("limits")
    if limits_value is not None:
        limits = lowering.operand(limits_value)
        columns = _dims.specialize(limits.dims[-1])
        if columns > 1 and limits.strides[-1] != 1:
            limits = dense(lowering, limits)
        steps = broadcast_strides(limits, (batches, heads, queries, columns))
        mask_params.update({f"limits_{axis}": step for axis, step in zip(axes[:3], steps)})
        mask_params["offset_limits"] = limits.offset
        macros["LIMITS"] = columns
        buffers["limits"] = (limits, "r")
    sinks_value = node.optional_tensor("sinks")
    if sinks_value is not None:
        sinks = lowering.operand(sinks_value)
        steps = broadcast_strides(sinks, (batches, heads, queries, 1))
        mask_params.update({f"sinks_{axis}": step for axis, step in zip(axes[:3], steps)})
        mask_params["offset_sinks"] = sinks.offset
        macros.update({"SINKS": 1, "T_SINKS": sinks.dtype.glsl})
        buffers["sinks"] = (sinks, "r")
    pages_value = node.optional_tensor("pages")
    if pages_value is not None:
        pages = lowering.operand(pages_value)
        if pages.strides[1] != 1:
            pages = dense(lowering, pages)
        mask_params["pages_batch"] = broadcast_strides(pages, (batches, pages.dims[1]))[0]
        mask_params["offset_pages"] = pages.offset
        macros["PAGES"] = node.int("page")
        buffers["pages"] = (pages, "r")
    buffers["out"] = (out, "w")
    written = ScoreFunctions()
    program, sizes = node.optional_attribute("functions", ScoreProgram), node.sizes("sizes")
    if node.float("softcap"):
        program, sizes = capped_scores(node.float("softcap"))
    if program is not None:
        extras = [lowering.operand(value) for value in node.tensors("extras")]
        written = write_functions(program, sizes, extras)
        macros.update(written.macros)
        buffers.update(written.buffers)
    operands = {"q": q, "k": k, "v": v, "o": out}
    params: dict[str, Size] = {
        "S": queries,
        "T": keys,
        "group": heads // key_heads,
        "scale_bits": bits_of(node.float("scale")),
        "start": node.size("start"),
        **{
            f"{name}_{axis}": _stride(operand, d)
            for name, operand in operands.items()
            for d, axis in enumerate(("batch", "head", "row"))
        },
        **{f"offset_{name}": operand.offset for name, operand in operands.items()},
        **mask_params,
        **written.params,
    }
    flops = 2 * batches * heads * queries * key_count(node) * (width + value_width)
    choice = _choice(lowering.traits, node)
    choice.emit(
        lowering,
        Attention(buffers, macros, params, out, batches, heads, queries, value_width, flops),
    )


def key_count(node: Node) -> Size:
    """How many keys a mask has a column for."""
    length = node.optional_size("length")
    if length is None or node.arg("pages") is None:
        return node.tensor("k").type.dims[2]
    return length


def _choice(traits: DeviceTraits, node: Node) -> Choice:
    q, k, v = (node.tensor(name).type for name in "qkv")
    batches, heads, queries, width = q.dims
    half = q.dtype is k.dtype is v.dtype and q.dtype.itemsize == 2
    problem = Problem(
        batches,
        heads,
        queries,
        key_count(node),
        _dims.specialize(width),
        _dims.specialize(v.dims[3]),
        half,
        half and q.dtype is DType.bfloat16,
        node.bool("causal") or node.optional_tensor("limits") is not None,
        _dims.specialize(heads) // _dims.specialize(k.dims[1]),
    )
    return choose(traits, problem)


def writes_blocks(traits: DeviceTraits, node: Node) -> bool:
    """Whether the kernel of a `purevk.attention` can store its result in the order of fragments."""
    width = _dims.specialize(node.tensor("v").type.dims[3])
    made = width % BLOCK == 0 and _dims.upper(node.tensor("q").type.numel) > 0
    return made and isinstance(_choice(traits, node), Coopmat)


def supports_attention(node: Node, traits: DeviceTraits) -> str | None:
    others: tuple[Value | None, ...] = ()
    if node.op == NAME:
        others = (*node.tensors("extras"), node.optional_tensor("pages"))
    for value in node.inputs:
        if value in others:
            continue
        if value.type.dtype not in (DType.float32, DType.float16, DType.bfloat16, DType.bool):
            return f"no kernel for {value.type.dtype.name}"
    return None


def head_width_fits(width: Size, value_width: Size) -> bool:
    """Whether the attention kernels take heads of this width. A width that a call may change is
    specialized."""
    return all(
        w % 4 == 0 and 0 < w <= MAX_WIDTH
        for w in (_dims.specialize(width), _dims.specialize(value_width))
    )


def _result_order(node: Node, query: LayoutQuery) -> tuple[tuple[int, ...] | None]:
    """An output of the graph is row-major, as the host wants it."""
    return (None if node.result in query.outputs or node.bool("blocks") else HEADS_LAST,)


define(
    NAME,
    _attention_shape,
    Kernel(_attention_lower, layouts=_result_order, supports=supports_attention),
)


# -- scaled_dot_product_attention ----------------------------------------------------------------
@signature("q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False")
def _sdpa_shape(q: TensorType, k: TensorType, v: TensorType, enable_gqa: bool) -> TensorType:
    lead = q.dims[:-2] if enable_gqa else broadcast(q.dims[:-2], k.dims[:-2], v.dims[:-2])
    return q.with_dims((*lead, q.dims[-2], v.dims[-1]))


def _refuse_aten_sdpa(node: Node, traits: DeviceTraits) -> str | None:
    reason = _refuse_sdpa(node, traits)
    q, k, v = (node.tensor(name).type for name in "qkv")
    if reason is None and node.bool("enable_gqa"):
        if q.rank < 3 or not _groups_divide(q, k, v):
            return "no kernel for heads of keys that do not divide those of queries"
    return reason


def _refuse_sdpa(node: Node, traits: DeviceTraits) -> str | None:
    q, k, v = (node.tensor(name).type for name in "qkv")
    if not 2 <= q.rank == k.rank == v.rank:
        return f"no kernel for ranks {q.rank}, {k.rank} and {v.rank}"
    return None if q.dtype is DType.float64 else supports_attention(node, traits)


def _groups_divide(q: TensorType, *others: TensorType) -> bool:
    return all(q.dims[-3] % other.dims[-3] == 0 for other in others)


def default_scale(scale: float | None, width: Size) -> float:
    return 1.0 / math.sqrt(_dims.specialize(width)) if scale is None else scale


def _to_four(builder: Builder, value: Value, lead: tuple[Size, ...]) -> Value:
    """[..., S, D] as [B, H, S, D], the dims before S expanded to `lead`, where the heads may stay
    fewer."""
    rank = value.type.rank
    wanted = (*lead, *value.type.dims[-2:])
    if rank == 4:
        wanted = (wanted[0], value.type.dims[1], *wanted[2:])
    if value.type.dims != wanted:
        value = builder.aten.expand(value, wanted)
    if rank < 4:
        return builder.aten.view(value, (*(1,) * (4 - rank), *wanted))
    return (
        value
        if rank == 4
        else builder.aten.reshape(value, (_dims.product(wanted[:-3]), *wanted[-3:]))
    )


@rewrite_node(
    "aten.scaled_dot_product_attention.default",
    _sdpa_shape,
    supports=_refuse_aten_sdpa,
    random=lambda node: bool(node.float("dropout_p")),
)
def _expand_sdpa(builder: Builder, node: Node) -> Value:
    return _sdpa(
        builder,
        node.tensor("q"),
        node.tensor("k"),
        node.tensor("v"),
        node.optional_tensor("attn_mask"),
        node.bool("is_causal"),
        node.optional_float("scale"),
        node.bool("enable_gqa"),
        node.float("dropout_p"),
    )


def _sdpa(
    builder: Builder,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
    dropout: float = 0.0,
) -> Value:
    """Attention as torch defines it: any rank, and the dims before the last two broadcast."""
    scale = default_scale(scale, q.type.dims[-1])
    lead = broadcast(*(each.type.dims[:-3] for each in (q, k, v)))
    if q.type.rank > 2:
        heads = (
            q.type.dims[-3:-2] if gqa else broadcast(*(each.type.dims[-3:-2] for each in (q, k, v)))
        )
        lead = (*lead, *heads)
    if (gqa and q.type.rank != 4) or k.type.dims[:-2] != v.type.dims[:-2]:
        k, v = (repeated(builder, each, lead) for each in (k, v))
    if q.type.rank == 4 and q.type.dims[1] != lead[1]:
        q = builder.aten.expand(q, (*lead, *q.type.dims[2:]))
    dims = (*lead, q.type.dims[-2], v.type.dims[-1])
    q4, k4, v4 = (_to_four(builder, each, lead) for each in (q, k, v))
    if mask is not None and mask.type.rank > 4:
        mask = _to_four(builder, mask, lead)
    elif mask is not None and mask.type.rank == 3 and q.type.rank < 4:
        mask = builder.aten.unsqueeze(mask, dim=0)
    made = _attend(builder, q4, k4, v4, mask, scale, causal, dropout)
    return made if made.type.dims == dims else builder.aten.reshape(made, dims)


def repeated(builder: Builder, value: Value, lead: tuple[Size, ...]) -> Value:
    """Keys or values [..., H, S, D], with heads repeated up to the number of heads of the queries,
    the last of `lead`."""
    *_, heads, rows, width = value.type.dims
    if heads in (1, lead[-1]):
        return builder.aten.expand(value, (*lead, rows, width))
    each = builder.aten.unsqueeze(value, dim=-3)
    each = builder.aten.expand(each, (*lead[:-1], heads, lead[-1] // heads, rows, width))
    return builder.aten.reshape(each, (*lead, rows, width))


def _attend(
    builder: Builder,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None,
    scale: float,
    causal: bool,
    dropout: float = 0.0,
) -> Value:
    """Attention [B, H, S, D] of any width: one kernel, on padded heads where it needs them, or two
    matmuls, between which weights may be dropped."""
    width, value_width = q.type.dims[3], v.type.dims[3]
    wide = q.type.dtype is DType.float64 or bool(dropout)  # in two matmuls
    if not wide and head_width_fits(width, value_width):
        return builder.emit(NAME, q, k, v, mask, scale, causal, 0, None)
    if not wide and all(
        isinstance(size, int) and 0 < size <= MAX_WIDTH for size in (width, value_width)
    ):
        q, k, v = (
            builder.aten.constant_pad_nd(each, (0, -each.type.dims[3] % 4))
            if each.type.dims[3] % 4
            else each
            for each in (q, k, v)
        )
        made = builder.emit(NAME, q, k, v, mask, scale, causal, 0, None)
        return builder.aten.slice.Tensor(made, dim=3, start=0, end=value_width)
    heads, rows, keys = q.type.dims[1], q.type.dims[2], k.type.dims[2]
    if k.type.dims[1] != heads:
        k, v = (repeated(builder, each, q.type.dims[:2]) for each in (k, v))
    scores = builder.purevk.unrounded_matmul(q, builder.aten.permute(k, (0, 1, 3, 2)))
    scores = builder.aten.mul.Scalar(scores, scale)
    if causal:
        # Not of bool, which some devices do not store; the comparison joins what reads it.
        ones = builder.aten.full((rows, keys), fill_value=1.0, dtype=DType.float32)
        seen = builder.aten.gt.Scalar(builder.aten.tril(ones), 0)
        scores = builder.aten.where.ScalarOther(seen, scores, -math.inf)
    if mask is not None and mask.type.dtype is DType.bool:
        scores = builder.aten.where.ScalarOther(mask, scores, -math.inf)
    elif mask is not None:
        scores = builder.aten.add.Tensor(scores, mask)
    scores = builder.aten._to_copy(scores, q.type.dtype)
    weights = builder.purevk.softmax(scores, dim=-1, log=False, zero_rows=True, dtype=v.type.dtype)
    if dropout:
        weights = dropped(builder, weights, dropout)[0]
    return builder.aten.matmul(weights, v)


@signature("q, k, v, attn_mask=None, scale=None")
def _etvk_sdpa_shape(q: TensorType, v: TensorType) -> TensorType:
    return q.with_dims((*q.dims[:-1], v.dims[-1]))


@rewrite_node("et_vk.sdpa.default", _etvk_sdpa_shape, supports=_refuse_sdpa)
def _expand_etvk_sdpa(builder: Builder, node: Node) -> Value:
    q, k, v = (node.tensor(name) for name in "qkv")
    mask, scale = node.optional_tensor("attn_mask"), node.optional_float("scale")
    return _sdpa(builder, q, k, v, mask, False, scale, False)
