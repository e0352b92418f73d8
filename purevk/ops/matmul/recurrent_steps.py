"""All steps of a recurrent layer as one node: in one dispatch if the weight fits into the registers of
a workgroup of a GPU (`recurrent_layer.comp`), else in one that is repeated for each step
(`recurrent_step.comp`), with the matmul of the state and all that follows from it. Both directions
run at a time. How many steps there are may be known only at a call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4, power_of_two
from purevk.ops.builder import Builder
from purevk.ops.registry import Kernel, ShapeError, Types, define
from purevk.tuning import DeviceTraits

NAME = "purevk.recurrent"
_KINDS = {"rnn_tanh": 0, "rnn_relu": 1, "gru": 2, "lstm": 3}
_GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "lstm": 4}
FLOATS = (DType.float32, DType.float16, DType.bfloat16, DType.float64)
_LOCAL = 128
_ROWS = 4  # of the batch in one invocation, at most: 8 and 2 are slower on an NVIDIA H200
_MOST_ROWS = 64  # of the batch, up to which reading the weight again for each _ROWS is cheaper
# Units and rows up to which a dispatch for each step is faster on lavapipe than the operators of a step,
# which also take ten times as long to compile.
_SMALL, _SMALL_ROWS = 64, 16
# All steps in one dispatch, measured on an NVIDIA H200: bytes of a weight; invocations that a
# multiprocessor runs without slowing down; and how many workgroups after each other are faster than
# matmuls of all rows at once.
_WEIGHT_BYTES, _BUSY, _MOST_ROUNDS = 2**18, 512, 8


class _Form(NamedTuple):
    """How all steps run in one dispatch: the macros of `recurrent_layer.comp`."""

    lanes: int
    local: int
    rows: int


def can_run(
    traits: DeviceTraits,
    kind: str,
    gates: TensorType,
    others: Sequence[TensorType],
    whole: bool = False,
) -> bool:
    """Whether a layer should run as one node. `gates` is [steps, batch, directions * gates * hidden],
    `others` are the state, [directions, batch, hidden], and the weights. `whole`: there is no other
    way."""
    hidden = others[0].dims[-1]
    if not (
        gates.dtype in FLOATS
        and all(other.dtype is gates.dtype for other in others)
        and isinstance(hidden, int)
        and hidden > 0
    ):
        return False
    if whole or not isinstance(gates.dims[0], int):
        return True
    if not _has_subgroups(traits):
        return False
    if not traits.profile.has_fast_shared_memory:
        return hidden <= _SMALL and _dims.upper(gates.dims[1]) <= _SMALL_ROWS
    directions, batches = _dims.specialize(others[0].dims[0]), _dims.upper(gates.dims[1])
    return batches <= _MOST_ROWS or bool(
        _form(traits, _GATES[kind], hidden, gates.dtype, directions, batches)
    )


def _has_subgroups(traits: DeviceTraits) -> bool:
    return traits.subgroup_size in (8, 16, 32, 64) and traits.has(
        "subgroup_shuffle", "subgroup_basic", "subgroup_size_control"
    )


def _form(
    traits: DeviceTraits, gates: int, hidden: int, dtype: DType, directions: int, batches: int
) -> _Form | None:
    """Lanes and rows with which a workgroup keeps the weight in registers; None if it cannot, or if
    there are too many rows."""
    if (
        dtype is DType.float64
        or gates * hidden * hidden * dtype.itemsize > _WEIGHT_BYTES
        or not (traits.profile.has_fast_shared_memory and _has_subgroups(traits))
    ):
        return None
    quads, lanes = -(-hidden // 4), 2 if hidden > 4 else 1
    while 4 * gates * -(-quads // lanes) > traits.profile.recurrent_elements[dtype.itemsize == 2]:
        lanes *= 2
    local = -(-hidden * lanes // traits.subgroup_size) * traits.subgroup_size
    slots = traits.processors * max(_BUSY // local, 1)
    rows = 1
    while rows < min(lanes, _ROWS) and -(-batches // rows) * directions > slots:
        rows *= 2
    shared = 2 * rows * -(-quads // lanes) * lanes * 16
    if (
        lanes > traits.subgroup_size
        or local > traits.max_invocations
        or shared > traits.max_shared_memory
        or -(-batches // rows) * directions > _MOST_ROUNDS * slots
    ):
        return None
    return _Form(lanes, local, rows)


def emit_steps(
    builder: Builder,
    kind: str,
    gates: Value,
    state: Value,
    cell: Value | None,
    weight: Value,
    bias: Value | None,
    lengths: Value | None,
) -> list[Value]:
    """The outputs [steps, batch, directions * hidden] of all steps; for an LSTM also the last cell.

    Args:
        kind: "rnn_tanh", "rnn_relu", "gru" or "lstm".
        gates: [steps, batch, directions * gates * hidden], what the inputs add to the gates.
        state, cell: [directions, batch, hidden] before the first step; the cell of an LSTM. The
            second direction begins at the last step.
        weight, bias: [directions * gates * hidden, hidden] and [directions * gates * hidden] of the
            state.
        lengths: int32 [batch], the steps of each row if they are not the same. Outputs after them are
            0.
    """
    return list(builder.emit_all(NAME, gates, state, cell, weight, bias, lengths, kind))


def last_steps(
    builder: Builder, outputs: Value, directions: int, lengths: Value | None = None
) -> Value:
    """The last state [directions, batch, width] of outputs [steps, batch, directions * width]."""
    width = _dims.specialize(outputs.type.dims[2]) // directions
    ends = []
    for direction in range(directions):
        made = outputs
        if directions > 1:
            first = direction * width
            made = builder.aten.slice.Tensor(made, dim=2, start=first, end=first + width)
        if lengths is not None and not direction:
            batch = outputs.type.dims[1]
            index = builder.aten.add.Scalar(lengths, y=-1)
            index = builder.aten._to_copy(index, DType.int64)
            index = builder.aten.view(index, (1, batch, 1))
            index = builder.aten.expand(index, (1, batch, width))
            made = builder.aten.gather(made, dim=0, index=index)
        else:
            end = 0 if direction else outputs.type.dims[0] - 1
            made = builder.aten.slice.Tensor(made, dim=0, start=end, end=end + 1)
        ends.append(made)
    return ends[0] if directions == 1 else builder.aten.cat(tuple(ends))


def _shape(
    gates: TensorType,
    state: TensorType,
    cell: TensorType | None,
    weight: TensorType,
    bias: TensorType | None,
    lengths: TensorType | None,
    kind: str,
) -> Types:
    if gates.rank != 3 or state.rank != 3:
        raise ShapeError(f"cannot run steps of {kind} for {gates} with {state}")
    directions, hidden = state.dims[0], state.dims[-1]
    width = directions * _GATES[kind] * hidden
    given = [each for each in (state, cell, weight, bias) if each is not None]
    wanted: list[tuple[Size, ...]] = [(directions, gates.dims[1], hidden)]
    wanted += [*(wanted if cell is not None else ()), (width, hidden), (width,)]
    if _differ(gates.dims[2:], (width,)) or any(
        each.dtype is not gates.dtype or _differ(each.dims, dims)
        for each, dims in zip(given, wanted)
    ):
        raise ShapeError(f"cannot run steps of {kind} for {gates} with {given}")
    outputs = gates.with_dims((*gates.dims[:2], directions * hidden))
    return (outputs, state) if cell is not None else outputs


def _differ(dims: tuple[Size, ...], wanted: tuple[Size, ...]) -> bool:
    pairs = zip(dims, wanted)
    return len(dims) != len(wanted) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs
    )


class _Layer:
    """The operands of a layer, and what both ways to run it have in common."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        self.lowering = lowering
        self.kind = node.str("kind")
        self.gates = _rows(lowering, lowering.operand(node.tensor("gates")))
        self.state = _rows(lowering, lowering.operand(node.tensor("state")))
        self.weight = _rows(lowering, lowering.operand(node.tensor("weight")))
        self.bias = packed(lowering, node.optional_tensor("bias"))
        first = node.optional_tensor("cell")
        self.before = None if first is None else _rows(lowering, lowering.operand(first))
        self.out, *cells = (lowering.operand(result) for result in node.results)
        self.cell = cells[0] if cells else None
        self.steps = self.out.dims[0]
        self.directions, self.batches, self.hidden = self.state.dims
        lengths = packed(lowering, node.optional_tensor("lengths"))
        self.macros: dict[str, str | int] = {"T": self.out.dtype.glsl, "KIND": _KINDS[self.kind]}
        self.tensors = {
            "gates": self.gates,
            "weight": self.weight,
            "state": self.state,
            "bias": self.bias,
            "lengths": lengths,
            "out": self.out,
        }
        self.params: dict[str, Size] = {
            "steps": self.steps,
            "batches": self.batches,
            "gates_step": self.gates.strides[0],
            "gates_row": self.gates.strides[1],
            "weight_row": self.weight.strides[0],
            "state_direction": self.state.strides[0],
            "state_row": self.state.strides[1],
            "out_step": self.out.strides[0],
            "out_row": self.out.strides[1],
        }
        if self.before is not None and self.cell is not None:
            self.tensors |= {"before": self.before, "cell": self.cell}
            for name, operand in (("before", self.before), ("cell", self.cell)):
                self.params[f"{name}_direction"], self.params[f"{name}_row"] = operand.strides[:2]

    @property
    def flops(self) -> Size:
        """Of a step in all directions."""
        gates = self.directions * _GATES[self.kind]
        return 2 * self.batches * self.hidden * self.hidden * gates

    def run(self, form: _Form) -> None:
        """All steps in one dispatch, or in several if the device ends loops that are so long."""
        lowering, weight = self.lowering, self.weight
        limit = lowering.traits.max_iterations // 2
        whole = _dims.upper(self.steps) <= limit
        most = self.steps if whole else limit
        lowering.dispatch(
            "matmul/recurrent_layer.comp",
            self.tensors,
            {**self.params, "most": most, "iteration": 0},
            {
                **self.macros,
                "H": _dims.specialize(self.hidden),
                "LANES": form.lanes,
                "LOCAL": form.local,
                "ROWS": form.rows,
                "VEC4": int(gcd4(self.hidden, weight.offset, weight.strides[0])),
            },
            never=() if whole else ("most", "iteration"),
            grid=(_dims.ceil_div(self.batches, form.rows), self.directions, 1),
            subgroup_size=lowering.traits.subgroup_size,
            flops=self.flops * self.steps,
            repeat=1 if whole else _dims.ceil_div(self.steps, most),
        )

    def run_steps(self) -> None:
        """A dispatch that is repeated for each step."""
        lowering, out, weight = self.lowering, self.out, self.weight
        hidden, state = self.hidden, self.state
        size, lanes, rows = lowering.traits.subgroup_size, 1, 1
        wide = out.dtype is DType.float64
        if _has_subgroups(lowering.traits) and not wide:
            lanes = size
            while lanes > 8 and 4 * lanes > _dims.upper(hidden):
                lanes //= 2
            rows = min(power_of_two(_dims.upper(self.batches)), _ROWS)
        local = max(_LOCAL, size)
        vector = gcd4(
            *(hidden, weight.offset, weight.strides[0]),
            *(state.offset, *state.strides[:2], out.offset, *out.strides[:2]),
        )
        lowering.dispatch(
            "matmul/recurrent_step.comp",
            {**self.tensors, "made": out},
            {**self.params, "H": hidden, "iteration": 0},
            {
                **self.macros,
                **({"ACC": "double", "HAS_FLOAT64": 1} if wide else {}),
                "LOCAL": local,
                "LANES": lanes,
                "ROWS": rows,
                "VEC4": int(vector and not wide),
            },
            never=("iteration",),
            grid=(
                _dims.ceil_div(hidden * lanes, local),
                _dims.ceil_div(self.batches, rows),
                self.directions,
            ),
            subgroup_size=size if lanes > 1 else None,
            flops=self.flops * self.steps,
            repeat=self.steps,
        )


def _lower(lowering: Lowering, node: Node) -> None:
    layer = _Layer(lowering, node)
    form = _form(
        lowering.traits,
        _GATES[layer.kind],
        _dims.specialize(layer.hidden),
        layer.out.dtype,
        _dims.specialize(layer.directions),
        _dims.upper(layer.batches),
    )
    if form is not None:
        layer.run(form)
    else:
        layer.run_steps()


def _rows(lowering: Lowering, x: Operand) -> Operand:
    """The tensor with rows whose elements are dense."""
    return x if isinstance(x.strides[-1], int) and x.strides[-1] == 1 else dense(lowering, x)


define(NAME, _shape, Kernel(_lower))
