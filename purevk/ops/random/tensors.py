"""Tensors of random numbers: uniform, normal, integers, permutations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Arg, Node, Size, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.creation.shapes import LIKE, TENSOR, like, sized
from purevk.ops.random.generator import MANTISSA, random, rewrite, uniform, whole
from purevk.ops.signatures import signature
from purevk.ops.sort.sort import sort


def _floats(builder: Builder, node: Node, *_: Arg) -> Value:
    type = node.result.type
    generator = node.arg("generator") if node.op.endswith("generator") else None
    if ".randn" not in node.op:
        return uniform(builder, generator, type.dims, type.dtype)
    made = type.dtype if type.dtype is DType.float64 else DType.float32
    return random(builder, generator, "normal", type.dims, made)


for _name in ("rand", "randn"):
    rewrite(f"aten.{_name}.default", sized)(_floats)
    rewrite(f"aten.{_name}.generator", signature(f"size, generator: int | None, {TENSOR}")(sized))(
        _floats
    )
    rewrite(f"aten.{_name}_like.default", like)(_floats)
    rewrite(f"aten.{_name}_like.generator", signature(f"x, generator: int | None, {LIKE}")(like))(
        _floats
    )


# -- integers ------------------------------------------------------------------------------------
def _integers(size: Sequence[Size], dtype: DType | int | None) -> TensorType:
    """The schema's default dtype is a number."""
    known = dtype if isinstance(dtype, DType) else None
    return TensorType(known or DType.int64, tuple(size))


def _whole(builder: Builder, node: Node, low: Size, high: Size, generator: Arg = None) -> Value:
    type = node.result.type
    return whole(builder, generator, type.dims, type.dtype, low, high)


def _randint(name: str, shape: Callable[..., TensorType], numbers: str, rest: str) -> None:
    names = numbers.split(", ")

    def expand(builder: Builder, node: Node, *args: Any) -> Value:
        values = dict(zip(names, args))
        low, generator = values.get("low", 0), values.get("generator")
        return _whole(builder, node, low, values["high"], generator)

    rewrite(f"aten.{name}", signature(f"{numbers}, {rest}")(shape))(expand)


_randint("randint.default", _integers, "high, size", TENSOR)
_randint("randint.generator", _integers, "high, size, generator", TENSOR)
_randint("randint.low", _integers, "low, high, size", TENSOR)
_randint("randint.low_generator", _integers, "low, high, size, generator", TENSOR)
_randint("randint_like.default", like, "x, high", LIKE)
_randint("randint_like.generator", like, "x, high, generator", LIKE)
_randint("randint_like.low_dtype", like, "x, low, high", LIKE)
_randint("randint_like.low_generator_dtype", like, "x, low, high, generator", LIKE)


# What follows the last integer that random_() gives without bounds.
_ENDS = {
    **{dtype: end + 1 for dtype, end in MANTISSA.items()},
    DType.bool: 2, DType.uint8: 1 << 8, DType.int8: 1 << 7, DType.int16: 1 << 15, DType.int32: 1 << 31,
    DType.int64: 1 << 63,
}  # fmt: skip


def _fill(builder: Builder, node: Node, low: int, high: int | None, generator: Arg) -> Value:
    end = _ENDS[node.result.type.dtype] if high is None else high
    return _whole(builder, node, low, end, generator)


rewrite("aten.random.default", lambda x, generator=None: x)(
    lambda builder, node, x, generator: _fill(builder, node, 0, None, generator)
)
rewrite("aten.random.to", lambda x, high, generator=None: x)(
    lambda builder, node, x, high, generator: _fill(builder, node, 0, high, generator)
)
rewrite("aten.random.from", lambda x, low, high, generator=None: x)(
    lambda builder, node, x, low, high, generator: _fill(builder, node, low, high, generator)
)


# -- permutations --------------------------------------------------------------------------------
def _permutation_shape(n: Size, dtype: DType | None) -> TensorType:
    return TensorType(dtype or DType.int64, (n,))


@rewrite("aten.randperm.generator", signature(f"n, generator, {TENSOR}")(_permutation_shape))
@rewrite("aten.randperm.default", signature(f"n, {TENSOR}")(_permutation_shape))
def _permutation(builder: Builder, node: Node, count: Size, *rest: Arg) -> Value:
    """The order of random numbers. Equal ones, of 2^32, keep their order."""
    generator = rest[0] if node.op.endswith("generator") else None
    return sort(builder, random(builder, generator, "bits", (count,), DType.int32), 0, False)[1]
