"""Tensors of random numbers: uniform, normal, integers, permutations."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Arg, Node, Size, TensorType, Value
from purevk.ops.builder import Builder
from purevk.ops.creation.shapes import like, sized
from purevk.ops.random.generator import MANTISSA, random, rewrite, uniform, whole
from purevk.ops.signatures import signature
from purevk.ops.sort.sort import sort


@signature("size, generator: int | None, dtype=None, layout=None, device=None, pin_memory=None")
def _sized(size: Sequence[Size], dtype: DType | None) -> TensorType:
    return sized(size, dtype)


@signature(
    "x, generator: int | None, dtype=None, layout=None, device=None, pin_memory=None, "
    "memory_format=None"
)
def _like(x: TensorType, dtype: DType | None) -> TensorType:
    return like(x, dtype)


def _floats(builder: Builder, node: Node, *_: Arg) -> Value:
    type = node.result.type
    generator = node.arg("generator") if node.op.endswith("generator") else None
    if ".randn" not in node.op:
        return uniform(builder, generator, type.dims, type.dtype)
    made = type.dtype if type.dtype is DType.float64 else DType.float32
    return random(builder, generator, "normal", type.dims, made)


for _name in ("rand", "randn"):
    rewrite(f"aten.{_name}.default", sized)(_floats)
    rewrite(f"aten.{_name}.generator", _sized)(_floats)
    rewrite(f"aten.{_name}_like.default", like)(_floats)
    rewrite(f"aten.{_name}_like.generator", _like)(_floats)


# -- integers ------------------------------------------------------------------------------------
def _integers(size: Sequence[Size], dtype: DType | int | None) -> TensorType:
    """The schema's default dtype is a number."""
    known = dtype if isinstance(dtype, DType) else None
    return TensorType(known or DType.int64, tuple(size))


def _whole(builder: Builder, node: Node, low: Size, high: Size, generator: Arg = None) -> Value:
    type = node.result.type
    return whole(builder, generator, type.dims, type.dtype, low, high)


rewrite(
    "aten.randint.default",
    lambda high, size, dtype=None, layout=None, device=None, pin_memory=None: _integers(
        size, dtype
    ),
)(lambda builder, node, high, *_: _whole(builder, node, 0, high))
rewrite(
    "aten.randint.generator",
    lambda high, size, generator, dtype=None, layout=None, device=None, pin_memory=None: _integers(
        size, dtype
    ),
)(lambda builder, node, high, size, generator, *_: _whole(builder, node, 0, high, generator))
rewrite(
    "aten.randint.low",
    lambda low, high, size, dtype=None, layout=None, device=None, pin_memory=None: _integers(
        size, dtype
    ),
)(lambda builder, node, low, high, *_: _whole(builder, node, low, high))
rewrite(
    "aten.randint.low_generator",
    lambda low, high, size, generator, dtype=None, layout=None, device=None, pin_memory=None: (
        _integers(size, dtype)
    ),
)(lambda builder, node, low, high, size, generator, *_: _whole(builder, node, low, high, generator))
rewrite(
    "aten.randint_like.default",
    lambda x, high, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None: like(
        x, dtype
    ),
)(lambda builder, node, x, high, *_: _whole(builder, node, 0, high))
rewrite(
    "aten.randint_like.generator",
    lambda x, high, generator, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None: (
        like(x, dtype)
    ),
)(lambda builder, node, x, high, generator, *_: _whole(builder, node, 0, high, generator))
rewrite(
    "aten.randint_like.low_dtype",
    lambda x, low, high, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None: (
        like(x, dtype)
    ),
)(lambda builder, node, x, low, high, *_: _whole(builder, node, low, high))
rewrite(
    "aten.randint_like.low_generator_dtype",
    lambda x, low, high, generator, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None: (
        like(x, dtype)
    ),
)(lambda builder, node, x, low, high, generator, *_: _whole(builder, node, low, high, generator))


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
@rewrite(
    "aten.randperm.generator",
    lambda n, generator, dtype=None, layout=None, device=None, pin_memory=None: TensorType(
        dtype or DType.int64, (n,)
    ),
)
@rewrite(
    "aten.randperm.default",
    lambda n, dtype=None, layout=None, device=None, pin_memory=None: TensorType(
        dtype or DType.int64, (n,)
    ),
)
def _permutation(builder: Builder, node: Node, count: Size, *rest: Arg) -> Value:
    """The order of random numbers. Equal ones, of 2^32, keep their order."""
    generator = rest[0] if node.op.endswith("generator") else None
    return sort(builder, random(builder, generator, "bits", (count,), DType.int32), 0, False)[1]
