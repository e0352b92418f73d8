"""The operators of LLMs that keep a KV cache."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.lower.copies import emit_copy
from purevk.lower.lowering import Lowering
from purevk.lower.map import MapSpec, coordinates, emit_map
from purevk.lower.operands import slice_of
from purevk.ops.attention.attention import (
    NAME,
    default_scale,
    head_width_fits,
    supports_attention,
)
from purevk.ops.builder import Builder
from purevk.ops.registry import Kernel, ShapeError, define, rewrite_node
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits

WRITE_ROWS = "purevk.write_rows"


def _write_shape(state: TensorType, value: TensorType, dim: int, start: Size) -> None:
    """No result: `state` is written."""


def _write_lower(lowering: Lowering, node: Node) -> None:
    target = lowering.operand(node.tensor("state"))
    source = lowering.operand(node.tensor("value"))
    dim, start = node.int("dim"), node.size("start")
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


define("purevk.write", _write_shape, Kernel(_write_lower), mutates=(0,))


# -- rows at positions --------------------------------------------------------------------------
def _write_rows_shape(state: TensorType, value: TensorType, dim: int, index: TensorType) -> None:
    """No result: row `index[n]` of `state` along `dim` becomes row n of `value`. No two positions
    are equal."""
    others = [d for d in range(state.rank) if d != dim]
    if (
        value.rank != state.rank
        or index.rank != 1
        or value.dims[dim] != index.dims[0]
        or any(value.dims[d] != state.dims[d] for d in others)
    ):
        raise ShapeError(f"cannot write {value} to rows {index} of {state}")


def _write_rows_lower(lowering: Lowering, node: Node) -> None:
    target, source = (lowering.operand(node.tensor(name)) for name in ("state", "value"))
    dim = node.int("dim")
    at = {f"d{dim}": f"pv_index(INDEX(i{dim}), r_size_{dim})"}
    rank = len(target.dims)
    body = f"R_PUT({coordinates(rank, **at)}, X({coordinates(rank)}));"
    spec = MapSpec(body, ("X", "INDEX"), stores=False)
    inputs = [source, lowering.operand(node.tensor("index"))]
    emit_map(lowering, spec, inputs, {}, [target], source.dims)


define(WRITE_ROWS, _write_rows_shape, Kernel(_write_rows_lower), mutates=(0,))


# -- pages --------------------------------------------------------------------------------------
def _page_rows_shape(pages: TensorType, positions: TensorType, page: int) -> TensorType:
    """The rows of the keys at some positions, int32 [S], for `pages` int32 [P] of `page` keys each,
    see `purevk.attention`."""
    if pages.rank != 1 or pages.dtype is not DType.int32 or positions.rank != 1 or page < 1:
        raise ShapeError(f"cannot take rows {positions} of pages {pages} of {page} keys")
    return positions.with_dtype(DType.int32)


def _page_rows_lower(lowering: Lowering, node: Node) -> None:
    pages, positions = (lowering.operand(node.tensor(name)) for name in ("pages", "positions"))
    page = node.int("page")
    number = f"clamp(position / {page}, 0, x_size_0 - 1)"
    body = f"int position = int(POSITION(i0)); R_PUT(i0, X({number}) + position % {page});"
    spec = MapSpec(body, ("X", "POSITION"), stores=False)
    out = lowering.operand(node.result)
    emit_map(lowering, spec, [pages, positions], {}, [out], out.dims)


define("purevk.page_rows", _page_rows_shape, Kernel(_page_rows_lower))


@signature(
    "query, key, value, key_cache, value_cache, start_pos: Size, seq_len: Size, "
    "attn_mask=None, dropout_p=0.0, is_causal=False, scale=None"
)
def _sdpa_with_kv_cache_shape(
    query: TensorType, key: TensorType, key_cache: TensorType
) -> TensorType:
    if not query.rank == key.rank == key_cache.rank == 4:
        raise ShapeError(f"attention of {query} with a cache {key_cache}")
    return query


def _attend_cache(builder: Builder, node: Node, keys: Value, values: Value) -> Value:
    """Attention of queries [B, S, H, D] over the first start + S rows of caches [B, T, H, D]."""
    query, start = node.tensor("query"), node.size("start_pos")
    mask, causal = node.optional_tensor("attn_mask"), node.bool("is_causal")
    scale = node.optional_float("scale")
    first = [builder.aten.permute(each, (0, 2, 1, 3)) for each in (query, keys, values)]
    length = start + query.type.dims[1]
    factor = default_scale(scale, query.type.dims[3])
    made = builder.emit(NAME, *first, mask, factor, causal, start, length)
    return builder.aten.permute(made, (0, 2, 1, 3))


def _refuse_cache(node: Node, traits: DeviceTraits) -> str | None:
    width = node.tensor("query").type.dims[3]
    if not head_width_fits(width, node.tensor("value").type.dims[3]):
        return f"no kernel for heads of width {width}"
    return supports_attention(node, traits)


@rewrite_node(
    "llama.sdpa_with_kv_cache.default",
    _sdpa_with_kv_cache_shape,
    supports=_refuse_cache,
    mutates=(3, 4),
)
def _expand_sdpa_with_kv_cache(builder: Builder, node: Node) -> Value:
    key_cache, value_cache = node.tensor("key_cache"), node.tensor("value_cache")
    start = node.size("start_pos")
    builder.purevk.write.all(key_cache, node.tensor("key"), dim=1, start=start)
    builder.purevk.write.all(value_cache, node.tensor("value"), dim=1, start=start)
    return _attend_cache(builder, node, key_cache, value_cache)


@signature(
    "query, key, value, start_pos: Size, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None"
)
def _custom_sdpa_shape(query: TensorType) -> TensorType:
    return query


@rewrite_node("llama.custom_sdpa.default", _custom_sdpa_shape, supports=_refuse_cache)
def _expand_custom_sdpa(builder: Builder, node: Node) -> Value:
    return _attend_cache(builder, node, node.tensor("key"), node.tensor("value"))


def _update_cache_shape(value: TensorType, cache: TensorType, start_pos: Size) -> TensorType:
    return TensorType(value.dtype, (1,))


@rewrite_node("llama.update_cache.default", _update_cache_shape, mutates=(1,))
def _expand_update_cache(builder: Builder, node: Node) -> Value:
    value = node.tensor("value")
    builder.purevk.write.all(node.tensor("cache"), value, dim=1, start=node.size("start_pos"))
    return builder.aten.full((1,), fill_value=0.0, dtype=value.type.dtype)
