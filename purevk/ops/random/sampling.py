"""Random choices: Bernoulli, multinomial, dropout, random leaky ReLU."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.errors import ShapeError
from purevk.ir import Arg, Node, Size, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.random.distributions import exponential
from purevk.ops.random.generator import random, rewrite, uniform
from purevk.ops.sort.sort import sort


# -- Bernoulli -----------------------------------------------------------------------------------
def chance(builder: Builder, generator: Arg, sizes: Sequence[Size], p: Value | float) -> Value:
    """True with probability p."""
    wide = isinstance(p, Value) and p.type.dtype is DType.float64
    dtype = DType.float64 if wide else DType.float32
    return builder.aten.lt.Tensor(random(builder, generator, "uniform", sizes, dtype), p)


@rewrite("aten.bernoulli.default", lambda x, generator=None: x)
def _bernoulli(builder: Builder, node: Node, p: Value | float, generator: Arg) -> Value:
    if not isinstance(p, Value) and not 0 <= p <= 1:
        raise ShapeError(f"{node.op} needs 0 <= p <= 1, and p is {p}")
    sizes = node.result.type.dims
    if isinstance(p, Value) and p.type.dims != sizes:
        p = builder.aten.expand(p, sizes)
    return chance(builder, generator, sizes, p)


for _name in ("aten.bernoulli.p", "aten.bernoulli.Tensor"):
    rewrite(_name, lambda x, p, generator=None: x)(
        lambda builder, node, x, p, generator: _bernoulli(builder, node, p, generator)
    )
# torch has it in place only.
rewrite("aten.bernoulli.float", lambda x, p=0.5, generator=None: x)(
    lambda builder, node, x, p, generator: _bernoulli(builder, node, p, generator)
)


# -- multinomial ---------------------------------------------------------------------------------
def _multinomial_shape(
    x: TensorType, num_samples: Size, replacement: bool = False, generator: int | None = None
) -> TensorType:
    if not 1 <= x.rank <= 2 or not x.dtype.is_float:
        raise ShapeError(f"weights {x} of multinomial: 1 or 2 dims of floats are expected")
    if not replacement and not num_samples <= x.dims[-1]:
        raise ShapeError(f"{num_samples} samples of {x.dims[-1]} without replacement")
    return TensorType(DType.int64, (*x.dims[:-1], num_samples))


@rewrite("aten.multinomial.default", _multinomial_shape)
def _multinomial(
    builder: Builder, node: Node, x: Value, samples: Size, replacement: bool, generator: Arg
) -> Value:
    dtype = DType.float64 if x.type.dtype is DType.float64 else DType.float32
    if x.type.dtype is not dtype:
        x = builder.aten._to_copy(x, dtype)
    if replacement and samples != 1:
        return _with_replacement(builder, x, samples, generator)
    # The first of exponentially distributed arrivals, whose rates are the weights. It is never one
    # of weight 0.
    ranks = builder.aten.div.Tensor(x, exponential(builder, generator, x.type))
    if samples == 1:
        return builder.aten.argmax(ranks, dim=-1, keepdim=True)
    return sort(builder, ranks, -1, True, samples)[1]


def _with_replacement(builder: Builder, x: Value, samples: Size, generator: Arg) -> Value:
    """The first category whose cumulative weight is above a uniform number. A category of weight 0
    repeats the cumulative weight before it, so that it is never the first."""
    total = builder.aten.cumsum(x, dim=-1)
    none = builder.aten.eq.Scalar(x, y=0)
    zero = builder.aten.full((), fill_value=0.0, dtype=x.type.dtype)
    total = builder.aten.where.self(none, zero, total)
    total = builder.aten.cummax.all(total, dim=-1)[0]
    last = builder.aten.slice.Tensor(total, dim=-1, start=-1)
    drawn = uniform(builder, generator, (*x.type.dims[:-1], samples), x.type.dtype)
    # Below the total also after rounding.
    below = 1 - 2.0 ** (-51 if x.type.dtype is DType.float64 else -22)
    drawn = builder.aten.mul.Tensor(drawn, below)
    drawn = builder.aten.mul.Tensor(drawn, last)
    return builder.aten.searchsorted.Tensor(total, drawn, out_int32=False, right=True)


# -- dropout -------------------------------------------------------------------------------------
def dropped(builder: Builder, x: Value, p: float) -> tuple[Value, Value]:
    """The elements, 0 with probability p and scaled otherwise, and which are kept."""
    if not 0 <= p <= 1:
        raise ShapeError(f"dropout needs 0 <= p <= 1, and p is {p}")
    kept = chance(builder, None, x.type.dims, 1.0 - float(p))
    scale = 0.0 if p == 1 else 1.0 / (1.0 - float(p))
    return builder.aten.mul.Tensor(builder.aten.mul.Tensor(x, kept), scale), kept


@rewrite(
    "aten.native_dropout.default",
    lambda x, p, train=None: (x, x.with_dtype(DType.bool)),
    random=lambda node: node.optional_bool("train") is not False and bool(node.float("p")),
)
def _native(
    builder: Builder, node: Node, x: Value, p: float, train: bool | None
) -> tuple[Value, Value]:
    if train is not False and p:
        return dropped(builder, x, p)
    kept = builder.aten.full(x.type.dims, fill_value=True, dtype=DType.bool)
    return builder.aten.alias(x), kept


@rewrite(
    "aten.dropout.default",
    lambda x, p=0.5, train=False: x,
    random=lambda node: node.bool("train") and bool(node.float("p")),
)
def _plain(builder: Builder, node: Node, x: Value, p: float, train: bool) -> Value:
    return dropped(builder, x, p)[0] if train and p else builder.aten.alias(x)


# -- random leaky ReLU ---------------------------------------------------------------------------
def _trains(node: Node) -> bool:
    return node.bool("training")


def _rrelu(
    builder: Builder, node: Node, x: Value, low: float, high: float, train: bool, generator: Arg
) -> tuple[Value, Value | None]:
    """The result, and the slope of each element: 1 where it is positive. Without training, the
    slope is the mean of the bounds."""
    if not train:
        return builder.aten.leaky_relu(x, (low + high) / 2), None
    slope = uniform(builder, generator, x.type.dims, x.type.dtype)
    slope = builder.aten.add.Tensor(builder.aten.mul.Tensor(slope, high - low), low)
    below = builder.aten.le.Scalar(x, y=0)
    one = builder.aten.full((), fill_value=1.0, dtype=x.type.dtype)
    slope = builder.aten.where.self(below, slope, one)
    return builder.aten.mul.Tensor(x, slope), slope


rewrite(
    "aten.rrelu.default",
    lambda x, lower=1 / 8, upper=1 / 3, training=False, generator=None: x,
    random=_trains,
)(lambda builder, node, *args: _rrelu(builder, node, *args)[0])
rewrite(
    "aten.rrelu_with_noise.default",
    lambda x, noise, lower=1 / 8, upper=1 / 3, training=False, generator=None: x,
    random=_trains,
)(lambda builder, node, x, noise, *args: _rrelu(builder, node, x, *args)[0])


@rewrite(
    "aten.rrelu_with_noise_functional.default",
    lambda x, noise, lower=1 / 8, upper=1 / 3, training=False, generator=None: (x, noise),
    random=_trains,
)
def _rrelu_functional(
    builder: Builder,
    node: Node,
    x: Value,
    noise: Value,
    low: float,
    high: float,
    train: bool,
    generator: Arg,
) -> tuple[Value, Value]:
    made, slope = _rrelu(builder, node, x, low, high, train, generator)
    return made, noise if slope is None else slope
