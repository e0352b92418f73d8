"""Shape functions that many operators which create tensors share."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Size, TensorType
from purevk.ops.signatures import signature

TENSOR = "dtype=None, layout=None, device=None, pin_memory=None"
"""The parameters of all operators which create tensors."""
LIKE = f"{TENSOR}, memory_format=None"


@signature(f"size, {TENSOR}")
def sized(size: Sequence[Size], dtype: DType | None) -> TensorType:
    """A tensor of given sizes, such as `aten.zeros.default`."""
    return TensorType(dtype or DType.float32, tuple(size))


@signature(f"x, {LIKE}")
def like(x: TensorType, dtype: DType | None) -> TensorType:
    """A tensor with the sizes of another, such as `aten.zeros_like.default`."""
    return x.with_dtype(dtype or x.dtype)
