"""How close a result must be to the expected one, and how far it is from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from purevk.dtypes import DType
from purevk.fallback import to_numpy, to_torch
from purevk.ir import TensorType

# Relative tolerance by dtype. For float32 it is that of the operators' own tests. For narrower types
# it is twice their rounding, since torch and purevk may round a sum to different sides. float64 has
# functions that neither rounds to the last bit.
_RELATIVE = {
    DType.float64: 1e-8,
    DType.complex128: 1e-8,
    DType.float32: 1e-5,
    DType.complex64: 1e-5,
    DType.float16: 2e-3,
    DType.bfloat16: 1.6e-2,
    DType.float8_e4m3fn: 0.13,
    DType.float8_e4m3fnuz: 0.13,
    DType.float8_e5m2: 0.26,
    DType.float8_e5m2fnuz: 0.26,
}
# Of the largest element, times the relative tolerance: elements that cancel out.
_CANCELLED = 0.1


@dataclass(frozen=True)
class Difference:
    """How a result differs.

    Attributes:
        result: its number among the results.
        text: says so, with numbers.
        largest: the largest absolute difference; infinite where sizes, or NaNs, differ.
        index: of that element; () where sizes differ.
    """

    result: int
    text: str
    largest: float
    index: tuple[int, ...] = ()


def numbers(array: np.ndarray, dtype: DType) -> np.ndarray:
    """The elements as numbers of numpy that hold them exactly."""
    if not dtype.has_numpy:
        return to_numpy(to_torch(array, dtype).double())
    return array


def largest(array: np.ndarray) -> float:
    """The largest magnitude of the finite elements."""
    if array.dtype.kind not in "fciu" or not array.size:
        return 1.0 if array.size else 0.0
    sizes = np.abs(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64))
    finite = sizes[np.isfinite(sizes)]
    return float(finite.max()) if finite.size else 0.0


def tolerance(expected: np.ndarray, dtype: DType, times: float = 1.0) -> np.ndarray:
    """How far each element may be off.

    Args:
        expected: as `numbers` gives them.
        times: a factor, for results of many operators.
    """
    rate = _RELATIVE.get(dtype, 0.0) * times
    if not rate:
        return np.zeros(expected.shape)
    sizes = np.abs(expected).astype(np.float64)
    sizes = np.where(np.isfinite(sizes), sizes, 0.0)
    return rate * (sizes + _CANCELLED * largest(expected))


def find_difference(
    number: int,
    got: np.ndarray,
    expected: np.ndarray,
    dtype: DType,
    allowed: np.ndarray | float | None = None,
) -> Difference | None:
    """How a result differs; None if it is close enough.

    Args:
        number: of the result.
        got, expected: elements of `dtype`, as purevk keeps them in numpy.
        allowed: how far each element may be off; None: by the tolerance of the dtype.
    """
    if got.shape != expected.shape:
        return Difference(
            number,
            f"result {number} has sizes {list(got.shape)}, not {list(expected.shape)}",
            float("inf"),
        )
    if not got.size:
        return None
    have, want = numbers(got, dtype), numbers(expected, dtype)
    limit = tolerance(want, dtype) if allowed is None else allowed
    with np.errstate(all="ignore"):
        if have.dtype.kind in "fc":
            distance = np.abs(have.astype(np.result_type(have, np.float64)) - want)
            same = (have == want) | (np.isnan(have) & np.isnan(want))
            distance = np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))
        elif have.dtype.kind == "b":
            distance = (have != want).astype(np.float64)
        else:
            distance = np.where(
                have == want,
                0.0,
                np.maximum(np.abs(have.astype(np.float64) - want.astype(np.float64)), 1.0),
            )
        beyond = np.where(distance > limit, distance, -1.0)
    flat = int(beyond.argmax())
    if beyond.reshape(-1)[flat] < 0:
        return None
    index = tuple(int(position) for position in np.unravel_index(flat, beyond.shape))
    worst, count = float(distance[index]), int((beyond >= 0).sum())
    bound = float(np.broadcast_to(limit, beyond.shape)[index])
    return Difference(
        number,
        f"result {number}: {count} of {got.size} elements differ; the largest difference is"
        f" {worst:.6g} at {list(index)} ({have[index]} in place of {want[index]}, tolerance"
        f" {bound:.3g})",
        worst,
        index,
    )


def find_differences(
    got: Sequence[np.ndarray | None],
    expected: Sequence[np.ndarray],
    types: Sequence[TensorType],
) -> list[Difference]:
    """The results that differ. A result of None is not compared."""
    differences = []
    for number, (have, want, type) in enumerate(zip(got, expected, types)):
        if have is not None:
            difference = find_difference(number, have, want, type.dtype)
            if difference is not None:
                differences.append(difference)
    return differences
