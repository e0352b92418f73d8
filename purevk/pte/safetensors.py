"""The tensors of a safetensors file: a JSON header, then their bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple, NoReturn

from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.mapped import own
from purevk.pte.values import MAX_RANK

_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 100_000_000  # bytes, as in the reference implementation
_DTYPES = {
    "F64": DType.float64, "F32": DType.float32, "F16": DType.float16, "BF16": DType.bfloat16,
    "I64": DType.int64, "I32": DType.int32, "I16": DType.int16, "I8": DType.int8, "U8": DType.uint8,
    "BOOL": DType.bool,
}  # fmt: skip
ITEMSIZES: Mapping[str, int] = {name: dtype.itemsize for name, dtype in _DTYPES.items()}


class StoredTensor(NamedTuple):
    """A tensor of a file; `type` is the format's name of its dtype, `data` a slice of the file."""

    type: str
    sizes: tuple[int, ...]
    data: memoryview

    @property
    def dtype(self) -> DType:
        return _DTYPES[self.type]


class Tensors(NamedTuple):
    """The tensors of a file by name, where their bytes begin, and the names and texts of its
    metadata."""

    by_name: Mapping[str, StoredTensor]
    start: int
    about: tuple[tuple[str, str], ...] = ()


def read_tensors(view: memoryview, where: str, types: Mapping[str, int] = ITEMSIZES) -> Tensors:
    """Reads the header of a safetensors file. No tensor is copied.

    Args:
        view: the file's bytes.
        where: its name, for messages.
        types: which are read, with the bytes of an element.

    Raises:
        FileFormatError: the file is damaged.
        UnsupportedProgramError: a tensor has another type.
    """

    def fail(what: str, why: str) -> NoReturn:
        raise FileFormatError(
            what, where=where, why=why, next="the file is damaged or was cut short: copy it again"
        )

    if len(view) < _LENGTH.size:
        fail("the header of the tensors is cut short", f"{len(view)} bytes")
    (length,) = _LENGTH.unpack(own(view[: _LENGTH.size]))
    start = _LENGTH.size + length
    if length > _MOST_HEADER:
        fail(f"the header of the tensors has {length} bytes", f"{_MOST_HEADER} are accepted")
    if start > len(view):
        fail("the header of the tensors lies outside the file", f"{length} bytes of {len(view)}")
    try:
        header = json.loads(
            bytes(own(view[_LENGTH.size : start])), object_pairs_hook=_without_repeats
        )
        about = {**header.get("__metadata__", {})}
        entries = {
            str(name): _entry(entry) for name, entry in header.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fail("the header of the tensors cannot be read", f"{type(error).__name__}: {error}")
    data, end = view[start:], 0
    tensors = {}
    for name, (dtype, sizes, first, last) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if dtype not in types:
            raise UnsupportedProgramError(
                f"the tensor {name!r} has the dtype {dtype!r}",
                where=where,
                why=f"{', '.join(types)} are read",
            )
        nbytes = prod(sizes) * types[dtype]
        if not end <= first <= last <= len(data) or last - first != nbytes:
            fail(
                f"the tensor {name!r} lies outside of its place",
                f"bytes {first} to {last} of {len(data)}, the one before ends at {end};"
                f" {dtype}{list(sizes)} needs {nbytes}",
            )
        end = last
        tensors[name] = StoredTensor(dtype, sizes, data[first:last])
    texts = ((name, text) for name, text in about.items() if isinstance(text, str))
    return Tensors(tensors, start, tuple(texts))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _entry(entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, sizes, first byte and end of a tensor."""
    first, last = map(_count, entry["data_offsets"])
    if len(entry["shape"]) > MAX_RANK:
        raise ValueError(f"{len(entry['shape'])} dims")
    return str(entry["dtype"]), tuple(map(_count, entry["shape"])), first, last


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 63:
        raise ValueError(f"{number!r} is no size")
    return number
