"""Norms of heads, and their rotation by halves, in one dispatch."""

from __future__ import annotations

from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.lower.copies import dense_operand
from purevk.lower.lowering import Lowering, Operand
from purevk.ops.attention.rotary import require_angles
from purevk.ops.attention.rotary_cache import heads_last
from purevk.ops.reduce.normalization import lower_norm
from purevk.ops.reduce.turn import Rows, Turn
from purevk.ops.registry import Kernel, Operator, ShapeError, register

NAME = "purevk.rotate_norm"
TO_CACHE = "purevk.rotate_norm_to_cache"


def _shape(
    x: TensorType,
    weight: TensorType | None,
    bias: TensorType | None,
    eps: float,
    rms: bool,
    cos: TensorType,
    sin: TensorType,
    start: Size,
) -> TensorType:
    """`purevk.rotate_halves` of `purevk.norm` of the last dim: x [B, S, H, D], angles [rows, D] from
    row `start` on."""
    if x.rank != 4 or cos.rank != 2 or cos.dims[1] != x.dims[3] or x.dims[3] % 2 or cos != sin:
        raise ShapeError(f"cannot rotate {x} by angles {cos} and {sin}")
    return x


def _lower(lowering: Lowering, node: Node) -> None:
    lower_norm(lowering, node, 1, lowering.operand(node.result), turn=_turn(lowering, node))


def _turn(lowering: Lowering, node: Node, rows: Rows | None = None) -> Turn:
    """How a node rotates its x [B, S, H, D], and where it stores the result."""
    _, positions, heads, width = node.tensor("x").type.dims
    require_angles(lowering, node, positions)

    def angles(table: Value) -> Operand:
        whole = dense_operand(lowering, table)
        layout = Layout(whole.offset + node.size("start") * width, (width, 1))
        return Operand(whole.storage, layout, TensorType(whole.dtype, (positions, width)))

    return Turn(angles(node.tensor("cos")), angles(node.tensor("sin")), heads, rows)


register(Operator(NAME, _shape, Kernel(_lower)))


# -- with a cache ---------------------------------------------------------------------------------
def _to_cache_shape(
    x: TensorType,
    weight: TensorType | None,
    bias: TensorType | None,
    eps: float,
    rms: bool,
    cos: TensorType,
    sin: TensorType,
    start: Size,
    state: TensorType,
    dim: int,
    index: TensorType,
) -> None:
    """No result: position s of what `purevk.rotate_norm` makes becomes position `index[s]` of a cache
    [B, T, H, D] (`dim` 1) or [B, H, T, D] (`dim` 2). No two of these are equal."""
    _shape(x, weight, bias, eps, rms, cos, sin, start)
    batch, positions, heads, width = x.dims
    others = [state.dims[d] for d in range(state.rank) if d != dim]
    if others != [batch, heads, width] or dim not in (1, 2) or index.dims != (positions,):
        raise ShapeError(f"cannot write {x} to rows {index} of {state}")


def _to_cache_lower(lowering: Lowering, node: Node) -> None:
    cache = lowering.operand(node.tensor("state"))
    cache = cache if node.int("dim") == 1 else heads_last(cache)
    turn = _turn(lowering, node, Rows(cache, dense_operand(lowering, node.tensor("index"))))
    lower_norm(lowering, node, 1, cache, turn=turn)


register(Operator(TO_CACHE, _to_cache_shape, Kernel(_to_cache_lower), mutates=(8,)))
