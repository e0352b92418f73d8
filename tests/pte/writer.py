"""Writes flatbuffers from a schema and plain dicts, with the flatbuffers package's own builder.

A field that a dict leaves out is not written. A union field is `(schema, dict)`; `(number, None)`
writes the tag alone.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import flatbuffers
from flatbuffers import number_types

from purevk.pte import flatbuffer as fb
from purevk.pte import ptd


def write(schema: fb.Schema, values: Mapping[str, Any], identifier: bytes) -> bytes:
    """The finished flatbuffer with `values` as its root table."""
    builder = flatbuffers.Builder(256)
    builder.Finish(_table(builder, schema, values), file_identifier=identifier)
    return bytes(builder.Output())


def _table(builder: flatbuffers.Builder, schema: fb.Schema, values: Mapping[str, Any]) -> int:
    unknown = set(values) - set(schema.fields)
    assert not unknown, f"{schema} has no {unknown}"
    rows = [(*schema.fields[name][:2], value) for name, value in values.items()]
    stored = [(slot, kind, _child(builder, kind, value)) for slot, kind, value in rows]
    builder.StartObject(sum(kind.slots for _, kind, _ in schema.fields.values()))
    for slot, kind, value in stored:
        if isinstance(kind, fb.Scalar):
            builder.Prepend(kind.flags, value)
            builder.Slot(slot)
        elif isinstance(kind, fb.Union):
            tag, table = value
            builder.PrependUint8(tag)
            builder.Slot(slot)
            if table is not None:
                builder.PrependUOffsetTRelative(table)
                builder.Slot(slot + 1)
        else:
            builder.PrependUOffsetTRelative(value)
            builder.Slot(slot)
    return builder.EndObject()


def _child(builder: flatbuffers.Builder, kind: fb.Kind, value: Any) -> Any:
    if isinstance(kind, fb.Text):
        return builder.CreateString(value)
    if isinstance(kind, fb.Blob):
        return builder.CreateByteVector(bytes(value))
    if isinstance(kind, fb.Numbers):
        return _vector(builder, kind, value)
    if isinstance(kind, fb.One):
        return _table(builder, kind.schema, value)
    if isinstance(kind, fb.Many):
        tables = [_table(builder, kind.schema, row) for row in value]
        builder.StartVector(4, len(tables), 4)
        for table in reversed(tables):
            builder.PrependUOffsetTRelative(table)
        return builder.EndVector()
    if isinstance(kind, fb.Union):
        member, fields = value
        if isinstance(member, int):
            return member, None
        return kind.schemas.index(member) + 1, _table(builder, member, fields)
    return value


def _vector(builder: flatbuffers.Builder, kind: fb.Numbers, items: Any) -> int:
    by_code = {
        "?": number_types.BoolFlags,
        "B": number_types.Uint8Flags,
        "i": number_types.Int32Flags,
    }
    by_code |= {
        "I": number_types.Uint32Flags,
        "q": number_types.Int64Flags,
        "Q": number_types.Uint64Flags,
    }
    by_code |= {"d": number_types.Float64Flags}
    flags = by_code[kind.code]
    builder.StartVector(kind.width, len(items), kind.width)
    for item in reversed(items):
        builder.Prepend(flags, item)
    return builder.EndVector()


def with_header(table: bytes, segments: bytes = b"", length: int = 32, fill: int = 0xEE) -> bytes:
    """A .pte file: the flatbuffer with an extended header of `length` bytes inserted, then the
    segments at a multiple of 64. What a header has beyond 32 bytes is filled with `fill`."""
    padded = -(-length // 16) * 16
    size = len(table) + padded
    base = -(-size // 64) * 64 if segments else 0
    header = struct.pack("<4sIQQQ", b"eh00", length, size, base, len(segments)).ljust(
        padded, bytes([fill])
    )[:length]
    root = struct.unpack_from("<I", table)[0] + padded
    head = struct.pack("<I", root) + table[4:8] + header.ljust(padded, b"\0") + table[8:]
    return head.ljust(base or size, b"\0") + segments


def vulkan_blob(graph: bytes, region: bytes = b"", declare: bool = True) -> bytes:
    """The blob of a Vulkan delegate. Without `declare` the header says that the region is empty."""
    start = 32 + -(-len(graph) // 16) * 16
    header = struct.pack(
        "<4x4sHIIIQ", b"VH00", 30, 32, len(graph), start, len(region) if declare else 0
    )
    return header.ljust(32, b"\0") + graph.ljust(start - 32, b"\0") + region


def data_file(rows: list[dict], content: bytes) -> bytes:
    """A .ptd file with one segment, `content`, and the named data `rows`."""
    table = write(ptd._ROOT, {"segments": [{"size": len(content)}], "named_data": rows}, b"FT01")
    header = struct.pack(
        "<4sIQQQQ", b"FH01", 40, 48, len(table), len(table) + 48, len(content)
    ).ljust(48, b"\0")
    root = struct.unpack_from("<I", table)[0] + 48
    return struct.pack("<I", root) + table[4:8] + header + table[8:] + content
