"""Entry of the reader: a .pte file, by its path or its bytes, to a Program."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from purevk.errors import FileFormatError
from purevk.pte.flatbuffer import Blob, Many, One, Reader, Schema, Table, Text, numbers, u32, u64
from purevk.pte.plan import PLAN, read_plan
from purevk.pte.program import Program
from purevk.pte.ptd import DataFile, read_data_file
from purevk.pte.source import FileLike, Source
from purevk.pte.types import Segment, Subsegments

_IDENTIFIER = b"ET12"
_EXTENDED = struct.Struct("<4sIQQ")
_EXTENDED_AT = 8  # after the root offset and the identifier
_DATA_SIZE = struct.Struct("<Q")  # follows _EXTENDED in headers of 32 bytes and more

_BUFFER = Schema("Buffer", storage=Blob())
_INLINE = Schema("BackendDelegateInlineData", data=Blob())
_SEGMENT = Schema("DataSegment", offset=u64(), size=u64())
_SUBSEGMENTS = Schema("SubsegmentOffsets", segment_index=u32(), offsets=numbers(u64()))
_NAMED = Schema("NamedData", key=Text(), segment_index=u32())
_PROGRAM = Schema(
    "Program",
    version=u32(),
    execution_plan=Many(PLAN),
    constant_buffer=Many(_BUFFER),
    backend_delegate_data=Many(_INLINE),
    segments=Many(_SEGMENT),
    constant_segment=One(_SUBSEGMENTS),
    mutable_data_segments=Many(_SUBSEGMENTS),
    named_data=Many(_NAMED),
)


def read_program(file: FileLike | Source, data_files: Iterable[FileLike] = ()) -> Program:
    """Read an ExecuTorch program.

    Args:
        file: path of a .pte file, which is mapped and not copied, or its bytes. Of an open file, the
            program becomes the owner.
        data_files: the .ptd files that hold weights kept out of the program, by path or bytes; the
            first one that has a key is used.

    Returns:
        The program. It holds the files open until `close()`.

    Raises:
        FileFormatError: a file is not what it should be, is cut short, or refers outside of itself.
        OSError: a path cannot be opened.
    """
    source = Source.of(file, ".pte")
    opened: list[DataFile] = []
    try:
        for data_file in data_files:
            opened.append(read_data_file(data_file))
        return _read(source, tuple(opened))
    except BaseException:
        for item in (source, *(data_file.source for data_file in opened)):
            item.close()
        raise


def _read(source: Source, data_files: tuple[DataFile, ...]) -> Program:
    table_size, base = _layout(source)
    root = Reader(source.view[:table_size], source.name).root(_PROGRAM, _IDENTIFIER)
    segments = _segments(source, root, base)
    inline = tuple(row["data"] for row in root["backend_delegate_data"])
    constants = root["constant_segment"]
    named: dict[str, int] = {}
    for row in root["named_data"]:
        _check_segment(row, segments)
        named.setdefault(row["key"], row["segment_index"])
    return Program(
        table_size=table_size,
        version=root["version"],
        plans=tuple(read_plan(row, len(segments), len(inline)) for row in root["execution_plan"]),
        segments=segments,
        constants=_subsegments(constants, segments)
        if constants is not None and constants["offsets"]
        else None,
        mutable_data=tuple(_subsegments(row, segments) for row in root["mutable_data_segments"]),
        named=named,
        source=source,
        data_files=data_files,
        inline_constants=tuple(row["storage"] for row in root["constant_buffer"]),
        inline_delegates=inline,
    )


def _layout(source: Source) -> tuple[int, int]:
    """Size of the flatbuffer and offset of the first segment (0: no segments)."""
    head = source.head
    if head[4:8] != _IDENTIFIER:
        raise FileFormatError(
            "this is not a .pte file",
            where=source.name,
            why=f"bytes 4 to 8 of {source.size} are {head[4:8]!r}; {_IDENTIFIER!r} is accepted."
            " purevk.load takes .pvk and .pt2 files too, which begin in other ways",
            next=_advice(head),
        )
    end = _EXTENDED_AT + _EXTENDED.size
    if len(head) < end or head[_EXTENDED_AT : _EXTENDED_AT + 4] != b"eh00":
        return source.size, 0  # no header: the whole file is the flatbuffer
    _, length, table_size, base = _EXTENDED.unpack_from(head, _EXTENDED_AT)
    if length < _EXTENDED.size:
        raise FileFormatError(
            f"the header of the .pte file has {length} bytes",
            where=f"{source.name}, byte {_EXTENDED_AT}",
            why=f"at least {_EXTENDED.size} are needed",
            next="the file is damaged: copy or export it again",
        )
    source.slice(0, table_size, "the program's flatbuffer")
    data_size = 0
    if length >= _EXTENDED.size + _DATA_SIZE.size:
        if len(head) < end + _DATA_SIZE.size:
            source.slice(end, _DATA_SIZE.size, "the header")
        data_size = _DATA_SIZE.unpack_from(head, end)[0]
    if base:
        source.slice(base, data_size, "the data after the program's flatbuffer")
    return table_size, base


def _advice(head: bytes) -> str:
    """What to do with a file that is something else."""
    if head[4:8] == b"FT01":
        return "this is a .ptd file: give it in data_files, and the .pte file first"
    if head[4:8] == b"BP08":
        return "this is a bundled program: give the .pte file that it was made from"
    if head[:2] == b"PK":
        return (
            "this is a zip archive, but no whole .pt2 file of torch.export: copy it again if it should be"
            " one; a TorchScript file has to be exported with torch.export"
        )
    if head[4:6] == b"ET":
        return "this .pte file is of another generation: export it with ExecuTorch 0.7 or later"
    return (
        "export the model with PurevkPartitioner or ExecuTorch's VulkanPartitioner (.pte), or save it"
        " with Program.save (.pvk) or torch.export.save (.pt2); a file of these may be damaged"
    )


def _segments(source: Source, root: Table, base: int) -> tuple[Segment, ...]:
    segments = []
    for number, row in enumerate(root["segments"]):
        segment = Segment(base + row["offset"], row["size"])
        if (
            segment.size and not base
        ):  # a program without data lists an empty segment and has no header
            row.fail(
                f"segment {number} of {segment.size} bytes",
                "the header of the file gives no offset of segments",
            )
        source.slice(segment.offset, segment.size, f"segment {number}")
        segments.append(segment)
    return tuple(segments)


def _check_segment(row: Table, segments: tuple[Segment, ...]) -> None:
    if row["segment_index"] >= len(segments):
        row.fail(f"segment_index {row['segment_index']}", f"the file has {len(segments)} segments")


def _subsegments(row: Table, segments: tuple[Segment, ...]) -> Subsegments:
    _check_segment(row, segments)
    offsets, size = row["offsets"], segments[row["segment_index"]].size
    for number, offset in enumerate(offsets):
        if offset > size:
            row.fail(
                f"item {number} is at offset {offset}",
                f"segment {row['segment_index']} has {size} bytes",
            )
    return Subsegments(row["segment_index"], offsets)
