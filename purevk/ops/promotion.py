"""torch's type promotion (torch documentation, "Type promotion")."""

from __future__ import annotations

from collections.abc import Iterable

from purevk.dtypes import DType
from purevk.ir import Dim, TensorType
from purevk.ops.registry import ShapeError

_INTS = (DType.uint8, DType.int8, DType.int16, DType.int32, DType.int64)
_FLOATS = (DType.bfloat16, DType.float16, DType.float32, DType.float64)
_SIGNED_ABOVE_UINT8 = {DType.int8: DType.int16}


def category(dtype: DType) -> int:
    """0 for bool, 1 for integers, 2 for floating point, 3 for complex numbers."""
    real = dtype.is_float or dtype.is_float8
    return 3 if dtype.is_complex else 2 if real else 1 if dtype.is_int else 0


def promote_types(left: DType, right: DType) -> DType:
    """The smallest type that both convert to, as `torch.promote_types`."""
    if left is right:
        return left
    if left.is_float8 or right.is_float8:
        raise ShapeError(f"torch does not promote {left.name} and {right.name}")
    low, high = sorted((left, right), key=category)
    if high.is_complex:
        if not low.is_complex and not low.is_float:
            return high
        parts = promote_types(real_dtype(low), real_dtype(high))
        return parts.complex_dtype or DType.complex64
    if category(low) < category(high):
        return high
    if category(high) == 2:
        if {low, high} == {DType.bfloat16, DType.float16}:
            return DType.float32
        return max(low, high, key=_FLOATS.index)
    if DType.uint8 in (low, high):
        other = high if low is DType.uint8 else low
        return _SIGNED_ABOVE_UINT8.get(other, other)
    return max(low, high, key=_INTS.index)


def result_type(operands: Iterable[object]) -> DType:
    """The dtype of an operation on tensors (as `TensorType`) and Python numbers, as
    `torch.result_type`.

    Tensors with dims outrank 0-d tensors, which outrank numbers, unless those are of a higher
    category.
    """
    levels: list[DType | None] = [None, None, None]
    for operand in operands:
        if isinstance(operand, TensorType):
            level, dtype = (0 if operand.rank else 1), operand.dtype
        elif isinstance(operand, bool):
            level, dtype = 2, DType.bool
        elif isinstance(operand, (int, Dim)):
            level, dtype = 2, DType.int64
        elif isinstance(operand, float):
            level, dtype = 2, DType.float32
        elif isinstance(operand, complex):
            level, dtype = 2, DType.complex64
        else:
            continue
        present = levels[level]
        levels[level] = dtype if present is None else promote_types(present, dtype)
    result: DType | None = None
    for present in levels:
        if present is not None and (result is None or category(present) > category(result)):
            if present.is_complex and result is not None and result.is_float:
                # A complex number takes the precision of the real tensor that it meets.
                present = result.complex_dtype or DType.complex64
            result = present
    if result is None:
        raise ShapeError("no operand has a dtype")
    return result


def wide_type(dtype: DType) -> DType:
    """The dtype in which statistics of real numbers are computed."""
    return DType.float64 if dtype is DType.float64 else DType.float32


def float_type(dtype: DType) -> DType:
    """The dtype in which torch computes a function of real numbers on `dtype`."""
    return dtype if dtype.is_float or dtype.is_complex else DType.float32


def real_dtype(dtype: DType) -> DType:
    """The dtype of the parts of complex numbers; a real dtype itself."""
    return dtype.component if dtype.is_complex else dtype
