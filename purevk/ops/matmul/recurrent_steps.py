"""All steps of one direction of a recurrent layer as one node, for GPUs: a dispatch for each step
(`recurrent_step.comp`), with the matmul of the state and all that follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4, power_of_two
from purevk.ops.builder import Builder
from purevk.ops.registry import Kernel, Operator, ShapeError, Types, register
from purevk.tuning import DeviceTraits

NAME = "purevk.recurrent"
_KINDS = {"rnn_tanh": 0, "rnn_relu": 1, "gru": 2, "lstm": 3}
_GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
_LOCAL = 128
_ROWS = 4  # of the batch in one invocation, at most: 8 and 2 are slower on an NVIDIA H200
_MOST_ROWS = 64  # of the batch, up to which reading the weight again for each _ROWS is cheaper


def can_run(traits: DeviceTraits, gates: TensorType, others: Sequence[TensorType]) -> bool:
    """Whether the steps of `gates` [steps, batch, gates * hidden] should run as one node; `others`
    are the state, [batch, hidden], and the weights."""
    hidden = others[0].dims[-1]
    return (
        traits.profile.has_fast_shared_memory
        and traits.subgroup_size in (8, 16, 32, 64)
        and traits.has("subgroup_shuffle", "subgroup_basic", "subgroup_size_control")
        and gates.dtype in _FLOATS
        and all(each.dtype is gates.dtype for each in others)
        and _dims.upper(gates.dims[1]) <= _MOST_ROWS
        and isinstance(hidden, int)
        and hidden > 0
    )


def emit_steps(
    builder: Builder,
    kind: str,
    gates: Value,
    state: tuple[Value, ...],
    weight: Value,
    bias: Value | None,
    backwards: bool,
) -> tuple[Value, tuple[Value, ...]]:
    """The outputs [steps, batch, hidden] of all steps, and the last state.

    Args:
        kind: "rnn_tanh", "rnn_relu", "gru" or "lstm".
        gates: [steps, batch, gates * hidden], what the inputs add to the gates.
        state: [batch, hidden] before the first step; of an LSTM, then its cell.
        weight, bias: [gates * hidden, hidden] and [gates * hidden] of the state.
        backwards: the last step comes first.
    """
    cell = state[1] if kind == "lstm" else None
    outputs, *last = builder.emit_all(
        NAME, gates, state[0], cell, weight, bias, kind, bool(backwards)
    )
    end = 0 if backwards else _dims.specialize(gates.type.dims[0]) - 1
    return outputs, (builder.emit("aten.select.int", outputs, 0, end), *last)


def _shape(
    gates: TensorType,
    state: TensorType,
    cell: TensorType | None,
    weight: TensorType,
    bias: TensorType | None,
    kind: str,
    backwards: bool,
) -> Types:
    hidden = state.dims[-1]
    given = [each for each in (state, cell, weight, bias) if each is not None]
    wanted: list[tuple[Size, ...]] = [(gates.dims[1], hidden)] * (1 + (cell is not None))
    wanted += [(_GATES[kind] * hidden, hidden), (_GATES[kind] * hidden,)]
    if gates.rank != 3 or any(
        each.dtype is not gates.dtype or _differ(each.dims, dims)
        for each, dims in zip(given, wanted)
    ):
        raise ShapeError(f"cannot run steps of {kind} for {gates} with {given}")
    outputs = gates.with_dims((*gates.dims[:2], hidden))
    return (outputs, state) if cell is not None else outputs


def _differ(dims: tuple[Size, ...], wanted: tuple[Size, ...]) -> bool:
    pairs = zip(dims, wanted)
    return len(dims) != len(wanted) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs
    )


def _lower(lowering: Lowering, node: Node) -> None:
    traits = lowering.traits
    kind = node.str("kind")
    gates = _rows(lowering, lowering.operand(node.tensor("gates")))
    state = _rows(lowering, lowering.operand(node.tensor("state")))
    weight = _rows(lowering, lowering.operand(node.tensor("weight")))
    bias, first = packed(lowering, node.optional_tensor("bias")), node.optional_tensor("cell")
    cell = None if first is None else _rows(lowering, lowering.operand(first))
    out, *cells = (lowering.operand(result) for result in node.results)
    count, batches, hidden = out.dims
    steps = range(_dims.specialize(count))
    lanes = traits.subgroup_size
    while lanes > 8 and 4 * lanes > _dims.upper(hidden):
        lanes //= 2
    rows = min(power_of_two(_dims.upper(batches)), _ROWS)
    macros: dict[str, str | int] = {
        "T": out.dtype.glsl,
        "KIND": _KINDS[kind],
        "LOCAL": max(_LOCAL, traits.subgroup_size),
        "LANES": lanes,
        "ROWS": rows,
        "BIAS": int(bias is not None),
    }
    buffers: dict[str, tuple[Operand, str]] = {"gates": (gates, "r"), "weight": (weight, "r")}
    params: dict[str, Size] = {
        "batches": batches,
        "H": hidden,
        "gates_row": gates.strides[1],
        "offset_weight": weight.offset,
        "weight_row": weight.strides[0],
        "out_row": out.strides[1],
    }
    if bias is not None:
        buffers["bias"] = (bias, "r")
        params["offset_bias"] = bias.offset
    for t in reversed(steps) if node.bool("backwards") else steps:
        step: dict[str, Size] = {
            "offset_gates": gates.offset + t * gates.strides[0],
            "offset_state": state.offset,
            "state_row": state.strides[-2],
            "offset_out": out.offset + t * out.strides[0],
        }
        bound = {**buffers, "state": (state, "r"), "out": (out, "w")}
        if cell is not None:
            step |= {"offset_before": cell.offset, "before_row": cell.strides[0]}
            step |= {"offset_cell": cells[0].offset, "cell_row": cells[0].strides[0]}
            bound |= {"before": (cell, "r"), "cell": (cells[0], "w")}
        vector = gcd4(
            hidden,
            weight.offset,
            weight.strides[0],
            step["offset_state"],
            step["state_row"],
        )
        fixed = params | {name: step[name] for name in step if not name.startswith("offset")}
        lowering.dispatch(
            "matmul/recurrent_step.comp",
            bound,
            macros={**macros, "VEC4": int(vector)},
            params={**params, **step},
            specialize=lowering.fixed(fixed),
            grid=(
                _dims.ceil_div(hidden * lanes, int(macros["LOCAL"])),
                _dims.ceil_div(batches, rows),
                1,
            ),
            subgroup_size=traits.subgroup_size,
            flops=2 * batches * hidden * hidden * _GATES[kind],
        )
        # The next step reads what this one stored.
        layout = Layout(step["offset_out"], out.strides[1:])
        state = Operand(out.storage, layout, out.type.with_dims(out.dims[1:]))
        cell = cells[0] if cells else None


def _rows(lowering: Lowering, x: Operand) -> Operand:
    """The tensor with rows whose elements are dense."""
    return x if isinstance(x.strides[-1], int) and x.strides[-1] == 1 else dense(lowering, x)


register(Operator(NAME, _shape, Kernel(_lower)))
