"""Tensors filled by continuous and discrete distributions."""

from __future__ import annotations

import math

from purevk.dtypes import DType
from purevk.errors import ShapeError
from purevk.ir import Arg, Node, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.creation.shapes import TENSOR, sized
from purevk.ops.map import mapped
from purevk.ops.random.generator import (
    TEMPLATE,
    element_number,
    next_number,
    random,
    rewrite,
    seed_of,
    uniform,
)
from purevk.ops.shapes import broadcast
from purevk.ops.signatures import signature


def _computed(dtype: DType) -> DType:
    """The dtype in which numbers of `dtype` are made."""
    return DType.float64 if dtype is DType.float64 else DType.float32


def _refuse(node: Node, holds: bool, rule: str) -> None:
    if not holds:
        raise ShapeError(f"{node.op} needs {rule}")


@rewrite(
    "aten.normal.Tensor_Tensor",
    lambda mean, std, generator=None: mean.with_dims(broadcast(mean.dims, std.dims)),
)
@rewrite("aten.normal.float_Tensor", lambda mean, std, generator=None: std)
@rewrite("aten.normal.Tensor_float", lambda mean, std=1.0, generator=None: mean)
def _normals(
    builder: Builder, node: Node, mean: Value | float, std: Value | float, generator: Arg
) -> Value:
    type = node.result.type
    if not isinstance(std, Value):
        _refuse(node, std >= 0, f"std >= 0, and std is {std}")
    made = random(builder, generator, "normal", type.dims, _computed(type.dtype))
    return builder.aten.add.Tensor(builder.aten.mul.Tensor(made, std), mean)


rewrite(
    "aten.normal_functional.default",
    lambda x, mean=0.0, std=1.0, generator=None: x,
    "aten.normal.default",
)(lambda builder, node, x, *rest: _normals(builder, node, *rest))
rewrite(
    "aten.normal.float_float",
    signature(f"mean, std, size, generator=None, {TENSOR}")(sized),
)(
    lambda builder, node, mean, std, size, generator, *_: _normals(
        builder, node, mean, std, generator
    )
)
rewrite("aten.log_normal.default", lambda x, mean=1.0, std=2.0, generator=None: x)(
    lambda builder, node, x, *rest: builder.aten.exp(_normals(builder, node, *rest))
)


@rewrite("aten.uniform.default", lambda x, low=0.0, high=1.0, generator=None: x)
def _between(
    builder: Builder, node: Node, x: Value, low: float, high: float, generator: Arg
) -> Value:
    """Rounding may give the upper end, which does not belong to the range: the lower one then."""
    _refuse(node, low <= high, f"from <= to, and they are {low} and {high}")
    type = node.result.type
    made = uniform(builder, generator, type.dims, type.dtype)
    made = builder.aten._to_copy(made, _computed(type.dtype))
    made = builder.aten.add.Tensor(builder.aten.mul.Tensor(made, high - low), low)
    made = builder.aten._to_copy(made, type.dtype)
    end = builder.aten.full((), high, type.dtype)
    beyond = builder.aten.ge.Tensor(made, end)
    start = builder.aten.full((), low, type.dtype)
    return builder.aten.where.self(beyond, start, made)


def exponential(builder: Builder, generator: Arg, type: TensorType) -> Value:
    """-log of numbers in (0, 1], as float32 or float64. Never 0."""
    dtype = _computed(type.dtype)
    made = random(builder, generator, "open", type.dims, dtype)
    made = builder.aten.neg(builder.aten.log(made))
    least = 2.0**-54 if dtype is DType.float64 else 2.0**-25
    return builder.aten.clamp_min(made, least)


@rewrite("aten.exponential.default", lambda x, lambd=1.0, generator=None: x)
def _exponentials(builder: Builder, node: Node, x: Value, rate: float, generator: Arg) -> Value:
    _refuse(node, rate > 0, f"lambd > 0, and lambd is {rate}")
    return builder.aten.div.Tensor(exponential(builder, generator, node.result.type), rate)


@rewrite("aten.cauchy.default", lambda x, median=0.0, sigma=1.0, generator=None: x)
def _cauchy(
    builder: Builder, node: Node, x: Value, median: float, sigma: float, generator: Arg
) -> Value:
    """The cotangent of an angle in (0, pi/2], with a random sign: small angles are exact, so that
    the tails are."""
    _refuse(node, sigma > 0, f"sigma > 0, and sigma is {sigma}")
    type = node.result.type
    dtype = _computed(type.dtype)
    angle = random(builder, generator, "open", type.dims, dtype)
    angle = builder.aten.mul.Tensor(angle, math.pi / 2)
    size = builder.aten.div.Tensor(
        builder.aten.cos(angle),
        builder.aten.sin(angle),
    )
    signs = random(builder, generator, "integers", type.dims, DType.int32, 0, 2)
    below = builder.aten.eq.Scalar(signs, y=0)
    size = builder.aten.where.self(below, builder.aten.neg(size), size)
    return builder.aten.add.Tensor(builder.aten.mul.Tensor(size, sigma), median)


@rewrite("aten.geometric.default", lambda x, p, generator=None: x)
def _geometric(builder: Builder, node: Node, x: Value, p: float, generator: Arg) -> Value:
    _refuse(node, 0 < p < 1, f"0 < p < 1, and p is {p}")
    type = node.result.type
    made = random(builder, generator, "open", type.dims, _computed(type.dtype))
    made = builder.aten.div.Tensor(builder.aten.log(made), math.log1p(-p))
    return builder.aten.clamp_min(builder.aten.ceil(made), y=1.0)


# -- by rejection --------------------------------------------------------------------------------
def _rejected(builder: Builder, generator: Arg, text: str, **inputs: Value) -> Value:
    """float32 numbers that GLSL of `random/distributions.glslh` makes from the elements of tensors
    of the same sizes, `{place}` standing for the element's stream."""
    first = next(iter(inputs.values()))
    rank = first.type.rank
    at = ", ".join(f"i{d}" for d in range(rank)) or "0"
    place = f"uint({element_number(rank)}), uint(number), uvec2(SEED(0), SEED(1))"
    given = {name: f"{name}({at})" for name in inputs}
    return mapped(
        builder,
        f"r = {text.format(place=place, **given)};",
        {"SEED": seed_of(builder, generator), **inputs},
        first.type.with_dtype(DType.float32),
        numbers={"number": next_number(builder)},
        template=TEMPLATE,
        pushed=("number",),
    )


def _narrow(builder: Builder, x: Value) -> Value:
    return x if x.type.dtype is DType.float32 else builder.aten._to_copy(x, DType.float32)


rewrite("aten.poisson.default", lambda x, generator=None: x)(
    lambda builder, node, x, generator: _rejected(
        builder, generator, "pv_poisson({place}, {X})", X=_narrow(builder, x)
    )
)
rewrite(
    "aten.binomial.default",
    lambda count, prob, generator=None: count.with_dims(broadcast(count.dims, prob.dims)),
)(
    lambda builder, node, count, prob, generator: _rejected(
        builder,
        generator,
        "pv_binomial({place}, {X}, {Y})",
        X=_expanded(builder, node, count),
        Y=_expanded(builder, node, prob),
    )
)


def _expanded(builder: Builder, node: Node, x: Value) -> Value:
    return builder.aten.expand(_narrow(builder, x), node.result.type.dims)


@rewrite("aten._standard_gamma.default", lambda x, generator=None: x)
def _gamma(builder: Builder, node: Node, x: Value, generator: Arg) -> Value:
    """Not below the least normal number, as torch has it: a logarithm may follow."""
    logs = _rejected(builder, generator, "pv_log_gamma({place}, {X})", X=_narrow(builder, x))
    made = builder.aten.exp(logs)
    least = 6.103515625e-05 if x.type.dtype is DType.float16 else 1.1754943508222875e-38
    return builder.aten.clamp_min(made, least)


@rewrite("aten._sample_dirichlet.default", lambda x, generator=None: x)
def _dirichlet(builder: Builder, node: Node, x: Value, generator: Arg) -> Value:
    """Gamma distributed numbers by their sum, from logarithms: with small parameters, all of them
    may be too small for float32."""
    logs = _rejected(builder, generator, "pv_log_gamma({place}, {X})", X=_narrow(builder, x))
    return builder.aten._softmax(logs, dim=-1)
