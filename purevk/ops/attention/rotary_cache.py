"""Rotates queries and keys, and writes keys and values to a cache, in one dispatch."""

from __future__ import annotations

from purevk.ir import Node, TensorType
from purevk.lower.lowering import Lowering
from purevk.lower.map import MapSpec, emit_map
from purevk.ops.reduce.turn import heads_last
from purevk.ops.registry import Kernel, ShapeError, define
from purevk.ops.signatures import signature

NAME = "purevk.rotate_to_cache"


@signature("q, k, v, cos, sin, start: Size, keys, values, dim: int, index")
def _shape(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    cos: TensorType,
    keys: TensorType,
    values: TensorType,
    dim: int,
) -> TensorType:
    """Queries [B, S, H, D], keys and values [B, S, G, D], angles [rows, D] from row `start` on, the
    caches [B, T, G, D] (`dim` 1) or [B, G, T, D] (`dim` 2), and S positions, no two of them equal.
    The result is the rotated queries."""
    if any(x.rank != 4 for x in (q, k, v, keys, values)) or k.dims != v.dims or dim not in (1, 2):
        raise ShapeError(f"cannot rotate {q}, {k} and {v} to caches {keys} and {values}")
    if q.dims[:2] != k.dims[:2] or q.dims[3] != k.dims[3] or cos.dims[1] != q.dims[3]:
        raise ShapeError(f"cannot rotate {q} and {k} by angles {cos}")
    return q


def _lower(lowering: Lowering, node: Node) -> None:
    q, k, v, cos, sin, index = (
        lowering.operand(node.tensor(name)) for name in ("q", "k", "v", "cos", "sin", "index")
    )
    by_rows = node.int("dim") == 1
    caches = [lowering.operand(node.tensor(name)) for name in ("keys", "values")]
    caches = [cache if by_rows else heads_last(cache) for cache in caches]
    batch, rows, heads, width = q.dims
    spec = MapSpec(
        "",
        ("Q", "K", "V", "COS", "SIN", "INDEX"),
        ("half_width", "start"),
        template="attention/rotate_to_cache.comp",
        stores=False,
        flops=6,
    )
    emit_map(
        lowering,
        spec,
        [q, k, v, cos, sin, index],
        {"half_width": width // 2, "start": node.size("start")},
        [lowering.operand(node.result), *caches],
        (batch, rows, heads + 2 * k.dims[2], width // 2),
    )


define(NAME, _shape, Kernel(_lower), mutates=(6, 7))
