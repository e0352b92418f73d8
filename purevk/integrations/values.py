"""Values of requests as arrays. A value that a dtype does not have is refused by its index."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError

_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


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
        # As objects first: a long text among numbers would make each of them as long.
        objects = np.asarray(value) if isinstance(value, np.ndarray) else np.asarray(value, object)
        elements = objects.reshape(-1).tolist() if objects.dtype.kind == "O" else []
        if not all(issubclass(kind, _NUMBERS) for kind in set(map(type, elements))):
            return _read_elements(name, objects, dtype)
        numbers = np.asarray(elements).reshape(objects.shape) if elements else objects
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name} is no tensor of {dtype}", why=str(error)) from None
    if not numbers.size:
        return np.empty(numbers.shape, dtype)
    inexact = dtype.kind in "iu" and numbers.dtype.kind == "f" and (abs(numbers) >= 2**53).any()
    if numbers.dtype.kind not in "biuf" or inexact:
        return _read_elements(name, objects, dtype)
    with np.errstate(all="ignore"):
        array = numbers.astype(dtype)
        if dtype.kind == "f":
            wrong = np.isinf(array) & np.isfinite(numbers)
        else:
            wrong = array != numbers
    if wrong.any():
        at = int(np.argmax(wrong))
        raise _refused(name, _index(at, wrong.shape), numbers.reshape(-1)[at].item(), dtype)
    return array


def _read_elements(name: str, objects: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same of an array of objects, element by element: a text, null, an object, or an integer
    beyond 64 bits is among them."""
    low, high = (0, 1) if dtype.kind not in "iu" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    numbers: list[float] = []
    for at, element in enumerate(objects.reshape(-1).tolist()):
        try:
            if not isinstance(element, _NUMBERS):
                raise ValueError("no number")
            number = float(element) if dtype.kind == "f" else int(element)
            if dtype.kind != "f" and not (number == element and low <= number <= high):
                raise ValueError("no number of the dtype")
        except (OverflowError, ValueError):
            raise _refused(name, _index(at, objects.shape), element, dtype) from None
        numbers.append(number)
    array = np.array(numbers, np.float64 if dtype.kind == "f" else dtype).reshape(objects.shape)
    return read_values(name, array, dtype)


def _index(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of an element by its position. numpy has it for 32 dims at most."""
    index: list[int] = []
    for size in reversed(shape):
        at, last = divmod(at, size)
        index.insert(0, last)
    return tuple(index)


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
