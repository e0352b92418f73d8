"""The gated delta rule of linear attention, all tokens in one dispatch (`gated_delta.comp`)."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, TensorType
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, dense_operand
from purevk.lower.lowering import Lowering
from purevk.ops.registry import Kernel, Operator, ShapeError, register
from purevk.ops.signatures import signature

NAME = "purevk.gated_delta"
_LOCAL, _MOST_LANES = 128, 8


@signature("q, k, v, decay, beta, state, is_tiled: bool")
def _shape(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    decay: TensorType,
    beta: TensorType,
    state: TensorType,
) -> tuple[TensorType, TensorType]:
    """q, k: [steps, key heads, K]. v: [steps, heads, V]. decay, beta: [steps, heads]. state: [heads, V,
    K]. is_tiled: head h reads the queries of head h modulo their number, not of consecutive ones."""
    types = (q, k, v, decay, beta, state)
    if any(each.dtype is not DType.float32 for each in types) or v.rank != 3 or q.rank != 3:
        raise ShapeError(f"no gated delta rule for {', '.join(map(str, types))}")
    (_, heads, rows), (_, key_heads, columns) = v.dims, q.dims
    if state.dims != (heads, rows, columns) or k.dims != q.dims or heads % key_heads != 0:
        raise ShapeError(f"no gated delta rule for {', '.join(map(str, types))}")
    return v, state


def _lower(lowering: Lowering, node: Node) -> None:
    operands = {}
    for name in ("q", "k", "v"):
        operand = lowering.operand(node.tensor(name))
        operands[name] = operand if operand.strides[-1] == 1 else dense(lowering, operand)
    others = {
        name: dense_operand(lowering, node.tensor(name)) for name in ("decay", "beta", "state")
    }
    out, after = (lowering.operand(result) for result in node.results)
    steps, heads, values = operands["v"].dims
    key_heads, keys = (_dims.specialize(size) for size in operands["q"].dims[1:])
    traits, lanes = lowering.traits, 1
    if traits.has("subgroup_shuffle", "subgroup_basic", "subgroup_size_control"):
        while lanes < min(_MOST_LANES, traits.subgroup_size) and keys % (2 * lanes) == 0:
            lanes *= 2
    lowering.dispatch(
        "attention/gated_delta.comp",
        {**operands, **others, "out": out, "after": after},
        {
            **{"steps": steps, "values": values, "heads": heads, "key_heads": key_heads},
            "divisor": 1 if node.bool("is_tiled") else heads // key_heads,
            **{f"{name}_step": operand.strides[0] for name, operand in operands.items()},
            **{f"{name}_head": operand.strides[1] for name, operand in operands.items()},
        },
        {"K": keys, "LANES": lanes, "LOCAL": max(_LOCAL, traits.subgroup_size)},
        grid=(_dims.ceil_div(values * lanes, max(_LOCAL, traits.subgroup_size)), heads, 1),
        subgroup_size=traits.subgroup_size if lanes > 1 else None,
        flops=9 * steps * heads * values * keys,
    )


register(Operator(NAME, _shape, Kernel(_lower)))
