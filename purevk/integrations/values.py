"""Values of requests as arrays. A value that a dtype does not have is refused by its index."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError


def request_dtype(dtype: str | None) -> np.dtype:
    """The numpy dtype of a tensor in requests and answers: float32 for bfloat16, which numpy lacks.

    Raises:
        InputError: requests cannot carry this dtype: a complex number or an 8-bit float.
    """
    kind = DType[dtype or "float32"]
    if kind is DType.bfloat16:
        return np.dtype(np.float32)
    if not kind.has_numpy or kind.is_complex:
        raise InputError(
            f"requests carry no tensor of {kind.name}",
            why="they have booleans, integers and real numbers",
            next="export a model that converts it",
        )
    return kind.numpy


def read_values(name: str, value: Any, dtype: np.dtype) -> np.ndarray:
    """The numbers of a request, such as nested lists from JSON, as an array.

    Args:
        name: of the input, for messages.
        dtype: of the array; a boolean, an integer or a float.

    Raises:
        InputError: the lists are ragged, or an element is no number of the dtype. The message has
            its index.
    """
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{name} is no tensor of {dtype}", why=str(error)) from None
    inexact = dtype.kind in "iu" and numbers.dtype.kind == "f" and (abs(numbers) >= 2**53).any()
    if numbers.dtype.kind not in "biuf" or inexact:
        return _read_elements(name, value, dtype)
    with np.errstate(all="ignore"):
        array = numbers.astype(dtype)
        if dtype.kind == "f":
            wrong = np.isinf(array) & np.isfinite(numbers)
        else:
            wrong = array != numbers
    if wrong.any():
        index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise _refused(name, tuple(map(int, index)), numbers[index].item(), dtype)
    return array


def _read_elements(name: str, value: Any, dtype: np.dtype) -> np.ndarray:
    """The same, element by element: a text, null, an object, or an integer beyond 64 bits is among
    them."""
    objects = np.asarray(value, dtype=object)
    array = np.empty(objects.shape, dtype)
    for index, element in np.ndenumerate(objects):
        if not isinstance(element, (int, float)):
            raise _refused(name, index, element, dtype)
        try:
            array[index] = read_values(name, _plain(element, dtype), dtype)
        except (InputError, OverflowError, ValueError):
            raise _refused(name, index, element, dtype) from None
    return array


def _plain(element: int | float, dtype: np.dtype) -> int | float:
    """A number as one that numpy reads exactly. Raises `OverflowError` or `ValueError` if the dtype
    cannot have it."""
    if dtype.kind == "f":
        return float(element)
    number = int(element)
    if number != element or not -(1 << 63) <= number < 1 << 64:
        raise ValueError("no integer of 64 bits")
    return number


def _refused(name: str, index: tuple[int, ...], element: Any, dtype: np.dtype) -> InputError:
    kind = {"b": "a boolean", "f": "a number"}.get(dtype.kind, "an integer")
    path = f"{name}{list(index) if index else ''}"
    return InputError(
        f"{name} is no tensor of {dtype}: {path} is {reprlib.repr(element)}",
        why=f"{kind} of {dtype} is expected",
    )


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Floats as bfloat16, rounded to the nearest; ties to even. The bits, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    """The values of bfloat16 bits, as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
