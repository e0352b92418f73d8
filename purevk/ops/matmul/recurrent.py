"""Recurrent layers, step by step: one linear layer for the inputs of all steps, then one for the
state of each. On GPUs, all steps of a layer are one node (`recurrent_steps.py`), by one kernel
(`recurrent_layer`) where the weight fits into the registers of a workgroup, else by a kernel for each
step (`recurrent_step`), so that the number of steps may be known only at a call.

The projection of an LSTM is part of the weight of its state, and projects all outputs at once. Steps
whose number is static are unrolled for larger batches, and for wider layers of software devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Arg, Node, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.builder import Builder
from purevk.ops.matmul.recurrent_steps import FLOATS, can_run, emit_steps, last_steps
from purevk.ops.registry import ShapeError, Types, rewrite
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits

# Gets what the input adds to the gates, and the state before; returns the state after.
Step = Callable[[Builder, Value, tuple[Value, ...], "_Weights"], tuple[Value, ...]]


class _Weights:
    """The parameters of one direction of a layer."""

    def __init__(self, params: Sequence[Value], biases: bool, projected: bool) -> None:
        self.inner, self.outer = params[:2]
        self.inner_bias = params[2] if biases else None
        self.outer_bias = params[3] if biases else None
        self.projection = params[-1] if projected else None


def _gates(builder: Builder, x: Value, count: int) -> list[Value]:
    width = x.type.dims[-1] // count
    return [
        builder.aten.slice.Tensor(x, dim=1, start=n * width, end=(n + 1) * width)
        for n in range(count)
    ]


def _linear(builder: Builder, x: Value, weight: Value, bias: Value | None) -> Value:
    return builder.aten.linear(x, weight, bias)


def _add(builder: Builder, a: Value, b: Value) -> Value:
    return builder.aten.add.Tensor(a, b)


def _mul(builder: Builder, a: Value, b: Value) -> Value:
    return builder.aten.mul.Tensor(a, b)


def _lstm_step(
    builder: Builder, x: Value, state: tuple[Value, ...], weights: _Weights
) -> tuple[Value, ...]:
    h, c = state
    gates = _gates(
        builder, _add(builder, x, _linear(builder, h, weights.outer, weights.outer_bias)), 4
    )
    let_in, keep, show = (builder.aten.sigmoid(gates[n]) for n in (0, 1, 3))
    c = _add(
        builder,
        _mul(builder, keep, c),
        _mul(builder, let_in, builder.aten.tanh(gates[2])),
    )
    h = _mul(builder, show, builder.aten.tanh(c))
    return (h if weights.projection is None else _linear(builder, h, weights.projection, None)), c


def _gru_step(
    builder: Builder, x: Value, state: tuple[Value, ...], weights: _Weights
) -> tuple[Value, ...]:
    (h,) = state
    mine = _gates(builder, x, 3)
    theirs = _gates(builder, _linear(builder, h, weights.outer, weights.outer_bias), 3)
    reset, update = (builder.aten.sigmoid(_add(builder, mine[n], theirs[n])) for n in (0, 1))
    new = builder.aten.tanh(_add(builder, mine[2], _mul(builder, reset, theirs[2])))
    difference = builder.aten.sub.Tensor(h, new)
    return (_add(builder, new, _mul(builder, update, difference)),)


def _plain_step(function: str) -> Step:
    def step(
        builder: Builder, x: Value, state: tuple[Value, ...], weights: _Weights
    ) -> tuple[Value, ...]:
        return (
            builder.emit(
                function,
                _add(builder, x, _linear(builder, state[0], weights.outer, weights.outer_bias)),
            ),
        )

    return step


def _layer(
    builder: Builder,
    kind: str,
    x: Value,
    state: tuple[Value, ...],
    weights: Sequence[_Weights],
    step: Step,
    lengths: Value | None,
) -> tuple[Value, tuple[Value, ...]]:
    """A layer with the weights of each of its directions.

    Args:
        x: [steps, batch, features].
        state: each [directions, batch, hidden], before the first step.
        lengths: int32 [batch], the steps of each row if they are not the same.

    Returns:
        The outputs [steps, batch, directions * hidden], and the last state.
    """
    count = x.type.dims[0]
    if count != 0 and (made := _as_node(builder, kind, x, state, weights, lengths)) is not None:
        return made
    steps = range(_dims.specialize(count))
    outputs, finals = [], []
    for direction, each in enumerate(weights):
        gates = _linear(builder, x, each.inner, each.inner_bias)
        now = tuple(builder.aten.select.int(value, dim=0, index=direction) for value in state)
        found: list[Value] = []
        for t in reversed(steps) if direction else steps:
            now = step(builder, builder.aten.select.int(gates, dim=0, index=t), now, each)
            found.append(now[0])
        outputs.append(_stack(builder, found[::-1] if direction else found))
        finals.append(now)
    return _joined(builder, outputs, -1), tuple(_stack(builder, parts) for parts in zip(*finals))


def _as_node(
    builder: Builder,
    kind: str,
    x: Value,
    state: tuple[Value, ...],
    weights: Sequence[_Weights],
    lengths: Value | None,
) -> tuple[Value, tuple[Value, ...]] | None:
    """The same as one node, if the device should run it so."""
    outer = [
        value for each in weights for value in (each.inner, each.outer, each.outer_bias) if value
    ]
    gates = x.type.with_dims((*x.type.dims[:2], sum(each.outer.type.dims[0] for each in weights)))
    types = [each.type for each in (*state, x, *outer)]
    projections = [each.projection for each in weights if each.projection is not None]
    if projections:
        types = [state[1].type, *types]
    if not can_run(builder.traits, kind, gates, types, lengths is not None):
        return None
    hidden, cell = state[0], state[1] if len(state) > 1 else None
    if projections and cell is not None:
        added, weight = _projected_gates(builder, x, hidden, weights, projections, lengths)
        hidden = builder.aten.full_like(cell, fill_value=0)
    else:
        inner = _joined(builder, [each.inner for each in weights], 0)
        added = _linear(builder, x, inner, _joint_bias(builder, weights, "inner_bias"))
        weight = _joined(builder, [each.outer for each in weights], 0)
    bias = _joint_bias(builder, weights, "outer_bias")
    outputs, *last = emit_steps(builder, kind, added, hidden, cell, weight, bias, lengths)
    if projections:
        outputs = _projected(builder, outputs, projections)
    return outputs, (last_steps(builder, outputs, len(weights), lengths), *last)


def _projected_gates(
    builder: Builder,
    x: Value,
    state: Value,
    weights: Sequence[_Weights],
    projections: Sequence[Value],
    lengths: Value | None,
) -> tuple[Value, Value]:
    """What the inputs add to the gates of an LSTM with projections, and the weight of its state times
    that of the projection, so that all steps are projected at once. What the first state adds to the
    gates is added to those of the first step."""
    gates, outer = [], []
    for direction, (each, projection) in enumerate(zip(weights, projections)):
        made = _linear(builder, x, each.inner, each.inner_bias)
        first = builder.aten.select.int(state, dim=0, index=direction)
        first = builder.aten.unsqueeze(_linear(builder, first, each.outer, None), dim=0)
        if direction and lengths is not None:
            gates.append(_add(builder, made, _at_ends(builder, made, first, lengths)))
        else:
            count = made.type.dims[0]
            cut = count - 1 if direction else 1
            head = builder.aten.slice.Tensor(made, dim=0, start=0, end=cut)
            tail = builder.aten.slice.Tensor(made, dim=0, start=cut, end=count)
            pieces = (
                (head, _add(builder, tail, first))
                if direction
                else (_add(builder, head, first), tail)
            )
            gates.append(builder.aten.cat(pieces))
        outer.append(builder.aten.mm(each.outer, projection))
    return _joined(builder, gates, -1), _joined(builder, outer, 0)


def _projected(builder: Builder, outputs: Value, projections: Sequence[Value]) -> Value:
    """The projected outputs [steps, batch, directions * features] of each direction."""
    hidden = _dims.specialize(outputs.type.dims[-1]) // len(projections)
    projected = []
    for direction, projection in enumerate(projections):
        part = outputs
        if len(projections) > 1:
            ends = direction * hidden, (direction + 1) * hidden
            part = builder.aten.slice.Tensor(outputs, 2, *ends, 1)
        projected.append(_linear(builder, part, projection, None))
    return _joined(builder, projected, -1)


def _at_ends(builder: Builder, gates: Value, first: Value, lengths: Value) -> Value:
    """`first`, [1, batch, features], at the last step of each row of gates [steps, batch, features],
    and 0 elsewhere."""
    steps, batch, _ = gates.type.dims
    numbers = builder.aten.arange(steps, dtype=DType.int32)
    ends = builder.aten.add.Scalar(lengths, y=-1)
    is_end = builder.aten.eq.Tensor(
        builder.aten.view(numbers, (steps, 1, 1)), builder.aten.view(ends, (1, batch, 1))
    )
    return builder.aten.where.ScalarOther(is_end, first, 0)


def _joint_bias(builder: Builder, weights: Sequence[_Weights], name: str) -> Value | None:
    """A bias of all directions, if they have one."""
    values = [getattr(weight, name) for weight in weights]
    return None if values[0] is None else _joined(builder, values, 0)


def _joined(builder: Builder, values: Sequence[Value], dim: int) -> Value:
    return values[0] if len(values) == 1 else builder.aten.cat(tuple(values), dim)


def _run(
    builder: Builder,
    node: Node,
    kind: str,
    x: Value,
    first: Sequence[Value],
    params: Sequence[Value],
    step: Step,
    lengths: Value | None = None,
) -> tuple[Value, ...]:
    """All layers. `first` has for each part of the state [layers * directions, batch, features].
    Returns the outputs and the last states."""
    biases, layers = node.bool("has_biases"), node.int("num_layers")
    batch_first = lengths is None and node.bool("batch_first")
    unbatched = x.type.rank == 2
    if unbatched:
        x = builder.aten.unsqueeze(x, dim=1)
        first = [builder.aten.unsqueeze(value, dim=1) for value in first]
    elif batch_first:
        x = builder.aten.transpose.int(x, dim0=0, dim1=1)
    directions = 2 if node.bool("bidirectional") else 1
    projected = len(params) == layers * directions * (5 if biases else 3)
    each = (4 if biases else 2) + projected
    finals: list[tuple[Value, ...]] = []
    for layer in range(layers):
        rows = range(layer * directions, (layer + 1) * directions)
        weights = [_Weights(params[n * each : (n + 1) * each], biases, projected) for n in rows]
        state = tuple(
            builder.aten.slice.Tensor(value, dim=0, start=rows[0], end=rows[-1] + 1)
            for value in first
        )
        x, state = _layer(builder, kind, x, state, weights, step, lengths)
        finals.append(state)
    last = [_joined(builder, parts, 0) for parts in zip(*finals)]
    if unbatched:
        return builder.aten.squeeze.dims(x, (1,)), *(
            builder.aten.squeeze.dims(value, (1,)) for value in last
        )
    return (builder.aten.transpose.int(x, dim0=0, dim1=1) if batch_first else x), *last


def _stack(builder: Builder, values: Sequence[Value]) -> Value:
    return builder.aten.cat(
        tuple(builder.aten.unsqueeze(value, dim=0) for value in values),
    )


def _sizes(x: TensorType, hidden: TensorType, bidirectional: bool) -> TensorType:
    return x.with_dims((*x.dims[:-1], hidden.dims[-1] * (2 if bidirectional else 1)))


def _refuse(node: Node, traits: DeviceTraits) -> str | None:
    if node.float("dropout") and node.bool("train"):
        return "no kernel for dropout while training"
    return _refuse_dtype(node, traits)


def _refuse_dtype(node: Node, traits: DeviceTraits) -> str | None:
    dtype = node.tensor("x").type.dtype
    return None if dtype in FLOATS else f"no kernel for {dtype.name}"


@signature("x, hx, params, has_biases, num_layers: int, dropout, train, bidirectional, batch_first")
def _lstm_shape(
    x: TensorType, hx: Sequence[TensorType], bidirectional: bool
) -> tuple[TensorType, ...]:
    if len(hx) != 2:
        raise ShapeError("the state of an LSTM is two tensors")
    return _sizes(x, hx[0], bidirectional), hx[0], hx[1]


@signature("x, hx, params, has_biases, num_layers: int, dropout, train, bidirectional, batch_first")
def _rnn_shape(x: TensorType, hx: TensorType, bidirectional: bool) -> tuple[TensorType, TensorType]:
    return _sizes(x, hx, bidirectional), hx


# -- cells ---------------------------------------------------------------------------------------
def _cell(
    builder: Builder,
    x: Value,
    state: tuple[Value, ...],
    params: Sequence[Value | None],
    step: Step,
) -> tuple[Value, ...]:
    present = [value for value in params if value is not None]
    weights = _Weights(present, len(present) == 4, False)
    return step(builder, _linear(builder, x, weights.inner, weights.inner_bias), state, weights)


@signature("x, hx, w_ih, w_hh, b_ih=None, b_hh=None")
def _lstm_cell_shape(hx: Sequence[TensorType]) -> tuple[TensorType, ...]:
    return hx[0], hx[1]


@signature("x, hx, w_ih, w_hh, b_ih=None, b_hh=None")
def _cell_shape(hx: TensorType) -> TensorType:
    return hx


def _register(
    name: str,
    step: Step,
    shape: Callable[..., Types] = _rnn_shape,
    cell_shape: Callable[..., Types] = _cell_shape,
) -> None:
    """A layer and its cell. The state is one tensor, or several."""

    def parts(hx: Value | tuple[Value, ...]) -> tuple[Value, ...]:
        return (hx,) if isinstance(hx, Value) else hx

    def layer(
        builder: Builder,
        node: Node,
        x: Value,
        hx: Value | tuple[Value, ...],
        params: tuple[Value, ...],
        *_: Arg,
    ) -> tuple[Value, ...]:
        return _run(builder, node, name, x, parts(hx), params, step)

    def cell(
        builder: Builder,
        node: Node,
        x: Value,
        hx: Value | tuple[Value, ...],
        *params: Value | None,
    ) -> tuple[Value, ...]:
        return _cell(builder, x, parts(hx), params, step)

    @signature("x, lengths, hx, params, has_biases, num_layers: int, dropout, train, bidirectional")
    def shape_of_lengths(x: TensorType, hx: Any, bidirectional: bool) -> Types:
        return shape(x=x, hx=hx, bidirectional=bidirectional)

    def layer_of_lengths(
        builder: Builder,
        node: Node,
        x: Value,
        lengths: Value,
        hx: Value | tuple[Value, ...],
        params: tuple[Value, ...],
        *_: Arg,
    ) -> tuple[Value, ...]:
        count = builder.aten._to_copy(lengths, DType.int32)
        return _run(builder, node, name, x, parts(hx), params, step, count)

    rewrite(f"aten.{name}.input", shape, supports=_refuse)(layer)
    name_of_lengths = f"purevk_recurrent.{name}_of_lengths.default"
    rewrite(name_of_lengths, shape_of_lengths, supports=_refuse)(layer_of_lengths)
    rewrite(f"aten.{name}_cell.default", cell_shape, supports=_refuse_dtype)(cell)


_register("lstm", _lstm_step, _lstm_shape, _lstm_cell_shape)
_register("gru", _gru_step)
_register("rnn_tanh", _plain_step("aten.tanh.default"))
_register("rnn_relu", _plain_step("aten.relu.default"))
