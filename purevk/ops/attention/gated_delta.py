"""The gated delta rule of linear attention: token by token in one dispatch (`gated_delta.comp`), or by
chunks of tokens in two (`gated_delta_chunks.comp`, `gated_delta_scan.comp`)."""

from __future__ import annotations

from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, dense_operand
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4
from purevk.ops.registry import Kernel, ShapeError, define
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits

NAME = "purevk.gated_delta"
_LOCAL, _MOST_LANES = 128, 8
_FEW_STEPS = 32  # up to this many, tokens one by one are as fast as chunks


class Chunks(NamedTuple):
    """How the kernels of chunks cut a head.

    Attributes:
        tokens: of a chunk.
        rows: of the state that a workgroup keeps.
        local: invocations of a workgroup.
        block: tokens that are solved in registers.
    """

    tokens: int
    rows: int
    local: int
    block: int = 16

    def shared_bytes(self, keys: int) -> int:
        """Of the larger one of the two kernels."""
        tokens, rows = self.tokens, self.rows
        tile = 16 * max(8 * tokens, 2 * tokens + 2 * keys)
        return max(4 * rows * (keys + tokens) + tile, 4 * tokens * (tokens + 37))


_CHUNKS = (Chunks(64, 16, 128), Chunks(32, 16, 128))  # the fastest of an H200 first


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


def choose_chunks(
    traits: DeviceTraits, steps: Size, heads: int, values: int, keys: int
) -> Chunks | None:
    """How to cut a prompt of up to so many steps; None: token by token."""
    if (
        not traits.profile.has_fast_shared_memory
        or _dims.upper(steps) <= _FEW_STEPS
        or keys % 16
        or values % 4
        or not values
        or 4 * (_dims.upper(steps) + 64) * heads * (values + keys) > traits.max_storage_range
    ):
        return None
    fits = (
        chunk
        for chunk in _CHUNKS
        if chunk.shared_bytes(keys) <= traits.max_shared_memory
        and chunk.local <= traits.max_invocations
    )
    return next(fits, None)


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
    heads, values = map(_dims.specialize, (heads, values))
    key_heads, keys = (_dims.specialize(size) for size in operands["q"].dims[1:])
    sizes = {
        **{"steps": steps, "values": values, "heads": heads, "key_heads": key_heads},
        "divisor": 1 if node.bool("is_tiled") else heads // key_heads,
    }
    chunks = choose_chunks(lowering.traits, steps, heads, values, keys)
    if chunks is not None and gcd4(*(each.offset for each in (others["state"], out, after))):
        _lower_chunks(lowering, chunks, {**operands, **others}, out, after, sizes)
        return
    traits, lanes = lowering.traits, 1
    if traits.has("subgroup_shuffle", "subgroup_basic", "subgroup_size_control"):
        while lanes < min(_MOST_LANES, traits.subgroup_size) and keys % (2 * lanes) == 0:
            lanes *= 2
    lowering.dispatch(
        "attention/gated_delta.comp",
        {**operands, **others, "out": out, "after": after},
        {**sizes, **_strides(operands)},
        {"K": keys, "LANES": lanes, "LOCAL": max(_LOCAL, traits.subgroup_size)},
        grid=(_dims.ceil_div(values * lanes, max(_LOCAL, traits.subgroup_size)), heads, 1),
        subgroup_size=traits.subgroup_size if lanes > 1 else None,
        flops=9 * steps * heads * values * keys,
    )


def _strides(operands: dict[str, Operand]) -> dict[str, Size]:
    return {
        f"{name}_{dim}": stride
        for name, operand in operands.items()
        for dim, stride in zip(("step", "head"), operand.strides)
    }


def _lower_chunks(
    lowering: Lowering,
    chunks: Chunks,
    tensors: dict[str, Operand],
    out: Operand,
    after: Operand,
    sizes: dict[str, Size],
) -> None:
    tokens, rows, local, block = chunks
    q, k, v = (tensors.pop(name) for name in "qkv")
    q, k = (
        each if gcd4(each.offset, *each.strides[:-1]) else dense(lowering, each) for each in (q, k)
    )
    state, keys = tensors.pop("state"), _dims.specialize(q.dims[-1])
    heads, values = sizes["heads"], sizes["values"]
    count = _dims.ceil_div(sizes["steps"], tokens)
    made = {
        name: lowering.temporary(TensorType(DType.float32, (count * heads, *inner)))
        for name, inner in (
            ("solved", (tokens, values + keys)),
            ("weights", (tokens, tokens)),
            ("factors", (2, tokens)),
        )
    }
    each = count * heads * tokens
    lowering.dispatch(
        "attention/gated_delta_chunks.comp",
        {"q": q, "k": k, "v": v, **tensors, **made},
        {**sizes, **_strides({"q": q, "k": k, "v": v})},
        {"K": keys, "CHUNK": tokens, "BLOCK": block, "LOCAL": local},
        grid=(count, heads, 1),
        flops=each * tokens * (5 * keys + values),
    )
    lowering.dispatch(
        "attention/gated_delta_scan.comp",
        {"q": q, "k": k, **made, "state": state, "out": out, "after": after},
        {**sizes, **_strides({"q": q, "k": k})},
        {"K": keys, "CHUNK": tokens, "SLICE": rows, "LOCAL": local},
        grid=(_dims.ceil_div(values, rows), heads, 1),
        flops=each * values * (6 * keys + 2 * tokens),
    )


define(NAME, _shape, Kernel(_lower))
