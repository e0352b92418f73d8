"""Data files (.ptd): named weights that were kept out of the program."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from purevk.errors import FileFormatError
from purevk.mapped import own
from purevk.pte.flatbuffer import Many, One, Reader, Schema, Text, i8, i32, numbers, u8, u32, u64
from purevk.pte.source import FileLike, Source

_HEADER = struct.Struct("<4sIQQQQ")
_HEADER_AT = 8  # after the root offset and the identifier
_NEWEST_VERSION = 0

_LAYOUT = Schema("TensorLayout", scalar_type=i8(), sizes=numbers(i32()), dim_order=numbers(u8()))
_SEGMENT = Schema("DataSegment", offset=u64(), size=u64())
_NAMED = Schema("NamedData", key=Text(), segment_index=u32(), tensor_layout=One(_LAYOUT))
_ROOT = Schema("FlatTensor", version=u32(), segments=Many(_SEGMENT), named_data=Many(_NAMED))


class TensorLayout(NamedTuple):
    """What tensor an entry holds: ExecuTorch's scalar type code, sizes, and dims from outermost to
    innermost."""

    scalar_type: int
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]


class DataEntry(NamedTuple):
    """One key of a data file: absolute `offset` and `size` in bytes; `layout` is None for a
    backend's blob."""

    offset: int
    size: int
    layout: TensorLayout | None


@dataclass(frozen=True)
class DataFile:
    """A parsed .ptd file."""

    entries: Mapping[str, DataEntry]
    source: Source = field(repr=False)
    table_size: int  # bytes of the table of contents

    @property
    def name(self) -> str:
        """The file's path."""
        return self.source.name

    @property
    def structure(self) -> list[tuple[int, int]]:
        """(first byte, bytes) of the table of contents, with which the file begins."""
        return [(0, self.table_size)]

    @property
    def tensor_ranges(self) -> list[tuple[int, int]]:
        """(first byte, bytes) of the tensors."""
        return sorted((entry.offset, entry.size) for entry in self.entries.values())

    def data(self, key: str) -> memoryview:
        """The bytes under `key`, which must be one of `entries`."""
        entry = self.entries[key]
        return self.source.slice(entry.offset, entry.size, f"data of {key!r}")


def read_data_file(file: FileLike) -> DataFile:
    """Read a .ptd file, given by its path or its bytes.

    Raises:
        FileFormatError: it is not a .ptd file, is cut short, or is newer than this reader.
    """
    source = Source(file, ".ptd")
    try:
        return _read(source)
    except FileFormatError:
        source.close()
        raise


def _read(source: Source) -> DataFile:
    head = own(source.view[: _HEADER_AT + _HEADER.size])
    if bytes(head[4:8]) != b"FT01" or len(head) < _HEADER_AT + _HEADER.size:
        raise FileFormatError(
            "this is not a .ptd file",
            where=source.name,
            why=f"bytes 4 to 8 of {source.size} are {bytes(head[4:8])!r}; b'FT01' and at least "
            f"{_HEADER_AT + _HEADER.size} bytes are accepted",
            next="give a .ptd file that ExecuTorch wrote beside the .pte file",
        )
    magic, length, table_offset, table_size, base, data_size = _HEADER.unpack_from(head, _HEADER_AT)
    if magic != b"FH01" or length < _HEADER.size:
        raise FileFormatError(
            "the header of the .ptd file is damaged",
            where=f"{source.name}, byte {_HEADER_AT}",
            why=f"magic {magic!r} and length {length}; b'FH01' and at least {_HEADER.size} are accepted",
            next="copy or export the file again",
        )
    table = source.slice(0, table_offset + table_size, "the table of contents")
    source.slice(base, data_size, "the data")
    root = Reader(table, source.name).root(_ROOT, b"FT01")
    if root["version"] > _NEWEST_VERSION:
        root.fail(
            f"version {root['version']}",
            f"versions up to {_NEWEST_VERSION} are accepted",
            "upgrade purevk, or export with an older ExecuTorch",
        )
    segments = []
    for number, row in enumerate(root["segments"]):
        offset, size = base + row["offset"], row["size"]
        source.slice(offset, size, f"segment {number}")
        segments.append((offset, size))
    entries: dict[str, DataEntry] = {}
    for row in root["named_data"]:
        index, layout = row["segment_index"], row["tensor_layout"]
        if index >= len(segments):
            row.fail(
                f"{row['key']!r} is in segment {index}", f"the file has {len(segments)} segments"
            )
        offset, size = segments[index]
        described = None
        if layout is not None:
            sizes = layout["sizes"]
            described = TensorLayout(
                layout["scalar_type"], sizes, layout["dim_order"] or tuple(range(len(sizes)))
            )
        entries.setdefault(row["key"], DataEntry(offset, size, described))
    return DataFile(entries, source, len(table))
