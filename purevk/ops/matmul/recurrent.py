"""Recurrent layers, step by step: a product for the inputs of all steps, then one for the state of
each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from purevk.ir import Node, Size, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.matmul.matmul import supports_float
from purevk.ops.registry import ShapeError, rewrite

Step = Callable[[Any, Value, tuple[Value, ...], "_Weights"], tuple[Value, ...]]


class _Weights:
    """The parameters of one direction of a layer."""

    def __init__(self, params: Sequence[Value], biases: bool, projected: bool) -> None:
        self.inner, self.outer = params[:2]
        self.inner_bias, self.outer_bias = params[2:4] if biases else (None, None)
        self.projection = params[-1] if projected else None


def _gates(builder: Builder, x: Value, count: int) -> list[Value]:
    width = x.type.dims[-1] // count
    return [
        builder.emit("aten.slice.Tensor", x, 1, n * width, (n + 1) * width, 1) for n in range(count)
    ]


def _linear(builder: Builder, x: Value, weight: Value, bias: Value | None) -> Value:
    return builder.emit("aten.linear.default", x, weight, bias)


def _add(builder: Builder, a: Value, b: Value) -> Value:
    return builder.emit("aten.add.Tensor", a, b, 1)


def _mul(builder: Builder, a: Value, b: Value) -> Value:
    return builder.emit("aten.mul.Tensor", a, b)


def _lstm_step(
    builder: Builder, x: Value, state: tuple[Value, ...], weights: _Weights
) -> tuple[Value, ...]:
    """`x`: what the input adds to the gates."""
    h, c = state
    gates = _gates(
        builder, _add(builder, x, _linear(builder, h, weights.outer, weights.outer_bias)), 4
    )
    let_in, keep, show = (builder.emit("aten.sigmoid.default", gates[n]) for n in (0, 1, 3))
    c = _add(
        builder,
        _mul(builder, keep, c),
        _mul(builder, let_in, builder.emit("aten.tanh.default", gates[2])),
    )
    h = _mul(builder, show, builder.emit("aten.tanh.default", c))
    return (h if weights.projection is None else _linear(builder, h, weights.projection, None)), c


def _gru_step(
    builder: Builder, x: Value, state: tuple[Value, ...], weights: _Weights
) -> tuple[Value, ...]:
    (h,) = state
    mine = _gates(builder, x, 3)
    theirs = _gates(builder, _linear(builder, h, weights.outer, weights.outer_bias), 3)
    reset, update = (
        builder.emit("aten.sigmoid.default", _add(builder, mine[n], theirs[n])) for n in (0, 1)
    )
    new = builder.emit("aten.tanh.default", _add(builder, mine[2], _mul(builder, reset, theirs[2])))
    difference = builder.emit("aten.sub.Tensor", h, new, 1)
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
    x: Value,
    state: tuple[Value, ...],
    weights: _Weights,
    step: Step,
    backwards: bool,
) -> tuple[list[Value], tuple[Value, ...]]:
    """The outputs of all steps of `x` [steps, batch, features], and the last state."""
    gates = _linear(builder, x, weights.inner, weights.inner_bias)
    count = x.type.dims[0]
    outputs: list[Any] = [None] * count
    for t in reversed(range(count)) if backwards else range(count):
        state = step(builder, builder.emit("aten.select.int", gates, 0, t), state, weights)
        outputs[t] = state[0]
    return outputs, state


def _run(
    builder: Builder,
    x: Value,
    first: Sequence[Value],
    params: Sequence[Value],
    biases: bool,
    layers: int,
    both_ways: bool,
    batch_first: bool,
    step: Step,
) -> tuple[Value, ...]:
    """`first`: for each part of the state, [layers * directions, batch, features]. Returns the
    outputs and the last states."""
    unbatched = x.type.rank == 2
    if unbatched:
        x = builder.emit("aten.unsqueeze.default", x, 1)
        first = [builder.emit("aten.unsqueeze.default", value, 1) for value in first]
    elif batch_first:
        x = builder.emit("aten.transpose.int", x, 0, 1)
    directions = 2 if both_ways else 1
    projected = len(params) == layers * directions * (5 if biases else 3)
    each = (4 if biases else 2) + projected
    finals: list[tuple[Value, ...]] = []
    for layer in range(layers):
        outputs = []
        for way in range(directions):
            n = layer * directions + way
            weights = _Weights(params[n * each : (n + 1) * each], biases, projected)
            state = tuple(builder.emit("aten.select.int", value, 0, n) for value in first)
            made, state = _layer(builder, x, state, weights, step, way == 1)
            finals.append(state)
            outputs.append(made)
        rows = [
            made[0] if len(made) == 1 else builder.emit("aten.cat.default", made, -1)
            for made in zip(*outputs)
        ]
        x = _stack(builder, rows)
    last = [_stack(builder, [state[k] for state in finals]) for k in range(len(first))]
    if unbatched:
        return builder.emit("aten.squeeze.dims", x, (1,)), *(
            builder.emit("aten.squeeze.dims", value, (1,)) for value in last
        )
    return (builder.emit("aten.transpose.int", x, 0, 1) if batch_first else x), *last


def _stack(builder: Builder, values: Sequence[Value]) -> Value:
    return builder.emit(
        "aten.cat.default",
        tuple(builder.emit("aten.unsqueeze.default", value, 0) for value in values),
        0,
    )


def _sizes(x: TensorType, hidden: TensorType, both_ways: bool) -> TensorType:
    return x.with_dims((*x.dims[:-1], hidden.dims[-1] * (2 if both_ways else 1)))


def _refuse(node: Node, traits: Any) -> str | None:
    x, batch_first = node.args[0].type, bool(node.args[-1])
    steps: Size = x.dims[1 if batch_first and x.rank == 3 else 0]
    if not isinstance(steps, int):
        return "no kernel for a sequence whose length is known only at a call"
    if node.args[5] and node.args[6]:
        return "no kernel for dropout while training"
    return supports_float(node, traits)


def _lstm_shape(
    x: TensorType,
    hx: Sequence[TensorType],
    params: Sequence[TensorType],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[TensorType, ...]:
    if len(hx) != 2:
        raise ShapeError("the state of an LSTM is two tensors")
    return _sizes(x, hx[0], bidirectional), hx[0], hx[1]


rewrite(
    "aten.lstm.input",
    _lstm_shape,
    lambda builder, node, x, hx, params, biases, layers, dropout, train, both, batch_first: _run(
        builder, x, hx, params, biases, layers, both, batch_first, _lstm_step
    ),
    supports=_refuse,
)


def _rnn_shape(
    x: TensorType,
    hx: TensorType,
    params: Sequence[TensorType],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[TensorType, TensorType]:
    return _sizes(x, hx, bidirectional), hx


for _name, _step in {
    "gru": _gru_step, "rnn_tanh": _plain_step("aten.tanh.default"), "rnn_relu": _plain_step("aten.relu.default"),
}.items():  # fmt: skip
    rewrite(
        f"aten.{_name}.input",
        _rnn_shape,
        lambda builder, node, x, hx, params, biases, layers, dropout, train, both, batch_first, step=_step: (
            _run(builder, x, (hx,), params, biases, layers, both, batch_first, step)
        ),
        supports=_refuse,
    )


# -- cells ---------------------------------------------------------------------------------------
def _cell(
    builder: Builder, x: Value, state: tuple[Value, ...], params: Sequence[Any], step: Step
) -> tuple[Value, ...]:
    present = [value for value in params if value is not None]
    weights = _Weights(present, len(present) == 4, False)
    return step(builder, _linear(builder, x, weights.inner, weights.inner_bias), state, weights)


rewrite(
    "aten.lstm_cell.default",
    lambda x, hx, w_ih, w_hh, b_ih=None, b_hh=None: (hx[0], hx[1]),
    lambda builder, node, x, hx, *params: _cell(builder, x, tuple(hx), params, _lstm_step),
    supports=supports_float,
)
for _name, _step in {
    "gru_cell": _gru_step, "rnn_tanh_cell": _plain_step("aten.tanh.default"), "rnn_relu_cell": _plain_step("aten.relu.default"),  # noqa: E501
}.items():  # fmt: skip
    rewrite(
        f"aten.{_name}.default",
        lambda x, hx, w_ih, w_hh, b_ih=None, b_hh=None: hx,
        lambda builder, node, x, hx, *params, step=_step: _cell(builder, x, (hx,), params, step),
        supports=supports_float,
    )
