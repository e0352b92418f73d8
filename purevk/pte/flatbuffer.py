"""Checked reads of a flatbuffer, from schemas written as plain Python rows.

A schema names the fields of a table in file order, each with its kind; `table["field"]` then gives
a Python value. No byte is believed: every offset, length and string is checked against the buffer
before it is used, so a damaged file raises FileFormatError and nothing else. Offsets inside a
flatbuffer only point forward, so reading ends; a budget on the bytes visited keeps tables that are
shared many times from multiplying. A reader of a schema that nests in itself counts its depth.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
from flatbuffers import number_types

from purevk.errors import FileFormatError
from purevk.mapped import is_mapped, own, read_into


class NumberType(Protocol):
    """A number type of the flatbuffers package."""

    py_type: Callable[[Any], Any]
    packer_type: struct.Struct
    bytewidth: int


_U16 = number_types.Uint16Flags.packer_type
_U32 = number_types.Uint32Flags.packer_type
_I32 = number_types.Int32Flags.packer_type
_MAX_FIELDS = 16  # slots of a vtable that are kept; no schema here has more fields
_COPIED_AT_ONCE = 1 << 20  # bytes of a flatbuffer of a mapped file
_PAGE = 1 << 16
_NEXT_DAMAGED = "the file is damaged or was cut short: copy or export it again"


class Reader:
    """The bytes of one flatbuffer and the counters that keep reading them safe.

    Args:
        data: the flatbuffer, from its root offset to its end. Fields of bytes become slices of it.
        where: name of the file (and part of it) for error messages.
    """

    __slots__ = ("_left", "_missing", "_slots", "_strings", "blobs", "data", "size", "where")

    def __init__(self, data: memoryview, where: str) -> None:
        self.blobs = data
        self.size = len(data)
        # A large one holds the bytes of tensors, which only `blobs` needs: of these, no page is copied.
        self._missing: set[int] = set()
        if self.size > _COPIED_AT_ONCE and is_mapped(data):
            self.data = np.empty(self.size, np.uint8).data
            self._missing.update(range(-(-self.size // _PAGE)))
        else:
            self.data = own(data)
        self.where = where
        self._left = 4 * self.size + 65536
        self._slots: dict[int, tuple[int, ...]] = {}
        self._strings: dict[int, str] = {}

    def fail(self, what: str, pos: int, why: str = "", next: str = _NEXT_DAMAGED) -> NoReturn:
        """Raise FileFormatError for something wrong at byte `pos`."""
        raise FileFormatError(what, where=f"{self.where}, byte {pos}", why=why, next=next)

    def need(self, pos: int, size: int, name: str) -> None:
        """Check that `size` bytes at `pos` lie inside the buffer, and count them as visited. `data` has
        them from then on."""
        if pos < 0 or pos + size > self.size:
            self.fail(
                f"{name} lies outside the flatbuffer", pos, f"{size} bytes at {pos} of {self.size}"
            )
        self._left -= size
        if self._left < 0:
            self.fail(
                f"{name}: the tables overlap too often",
                pos,
                f"more than 4 visits to each of {self.size} bytes",
            )
        if self._missing:
            for page in range(pos // _PAGE, -(-(pos + size) // _PAGE)):
                if page in self._missing:
                    part = slice(page * _PAGE, (page + 1) * _PAGE)
                    read_into(self.data[part], self.blobs[part])
                    self._missing.remove(page)

    def target(self, pos: int, name: str) -> int:
        """The position that the offset stored at `pos` points to."""
        self.need(pos, 4, name)
        offset: int = _U32.unpack_from(self.data, pos)[0]
        return pos + offset

    def vector(self, pos: int, width: int, name: str) -> tuple[int, int]:
        """First item and number of items of the vector whose offset is stored at `pos`; all items
        are inside."""
        start = self.target(pos, name)
        self.need(start, 4, name)
        count = _U32.unpack_from(self.data, start)[0]
        if start + 4 + count * width > self.size:
            self.fail(
                f"{name} has {count} items, more than the flatbuffer holds",
                start,
                f"{count} x {width} bytes at {start + 4} of {self.size}",
            )
        return start + 4, count

    def table(self, schema: Schema, pos: int, name: str) -> Table:
        """The table at `pos`, with its vtable checked."""
        self.need(pos, 4, name)
        vtable = pos - _I32.unpack_from(self.data, pos)[0]
        slots = self._slots.get(vtable)
        if slots is None:
            self.need(vtable, 4, f"field list of {name}")
            size = _U16.unpack_from(self.data, vtable)[0]
            if size < 4 or size % 2:
                self.fail(
                    f"field list of {name} has {size} bytes",
                    vtable,
                    "an even number of at least 4 is needed",
                )
            count = min((size - 4) // 2, _MAX_FIELDS)
            self.need(vtable + 4, 2 * count, f"field list of {name}")
            slots = struct.unpack_from(f"<{count}H", self.data, vtable + 4)
            self._slots[vtable] = slots
        return Table(self, schema, pos, slots)

    def root(self, schema: Schema, identifier: bytes) -> Table:
        """The root table of a buffer that carries the 4-byte `identifier`."""
        self.need(0, 8, "the identifier")
        found = bytes(self.data[4:8])
        if found != identifier:
            self.fail(
                f"the flatbuffer is marked {found!r}",
                4,
                f"{identifier!r} is accepted",
                "write the file with a release of ExecuTorch that is supported",
            )
        return self.table(schema, self.target(0, schema.name), schema.name)

    def string(self, pos: int, name: str) -> str:
        """The UTF-8 string whose offset is stored at `pos`. One position is decoded once."""
        start = self.target(pos, name)
        text = self._strings.get(start)
        if text is None:
            first, count = self.vector(pos, 1, name)
            self.need(first, count, name)
            try:
                text = str(self.data[first : first + count], "utf-8")
            except UnicodeDecodeError as error:
                self.fail(
                    f"{name} is not UTF-8 text",
                    first + error.start,
                    f"{error.reason} at byte {error.start}",
                )
            self._strings[start] = text
        return text


class Kind:
    """How one field is stored: `read` gives its value, `default` is its value when the field is
    absent."""

    __slots__ = ("default",)
    slots = 1  # vtable slots that the field takes

    def __init__(self, default: Any = None) -> None:
        self.default = default

    def read(self, reader: Reader, pos: int, name: str) -> Any:
        raise NotImplementedError


class Scalar(Kind):
    """A number or a bool of one of the flatbuffers number types."""

    __slots__ = ("flags", "packer", "width")

    def __init__(self, flags: NumberType, default: Any = 0) -> None:
        super().__init__(flags.py_type(default))
        self.flags, self.packer, self.width = flags, flags.packer_type, flags.bytewidth

    def read(self, reader: Reader, pos: int, name: str) -> Any:
        reader.need(pos, self.width, name)
        return self.packer.unpack_from(reader.data, pos)[0]


class Numbers(Kind):
    """A vector of numbers, as a tuple; absent is empty."""

    __slots__ = ("code", "width")

    def __init__(self, flags: NumberType) -> None:
        super().__init__(())
        self.code, self.width = flags.packer_type.format.lstrip("<"), flags.bytewidth

    def read(self, reader: Reader, pos: int, name: str) -> tuple[Any, ...]:
        first, count = reader.vector(pos, self.width, name)
        reader.need(first, count * self.width, name)
        return struct.unpack_from(f"<{count}{self.code}", reader.data, first)


class Text(Kind):
    """A string; absent is the empty string."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("")

    def read(self, reader: Reader, pos: int, name: str) -> str:
        return reader.string(pos, name)


class Texts(Kind):
    """A vector of strings, as a tuple; absent is empty."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(())

    def read(self, reader: Reader, pos: int, name: str) -> tuple[str, ...]:
        first, count = reader.vector(pos, 4, name)
        return tuple(reader.string(at, name) for at in range(first, first + 4 * count, 4))


class Blob(Kind):
    """A vector of bytes, as a slice of the buffer that copies nothing; absent is an empty slice."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(memoryview(b""))

    def read(self, reader: Reader, pos: int, name: str) -> memoryview:
        first, count = reader.vector(pos, 1, name)
        return reader.blobs[first : first + count]


class One(Kind):
    """A table; absent is None."""

    __slots__ = ("schema",)

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        self.schema = schema

    def read(self, reader: Reader, pos: int, name: str) -> Table:
        return reader.table(self.schema, reader.target(pos, name), name)


class Many(Kind):
    """A vector of tables; absent is empty."""

    __slots__ = ("schema",)

    def __init__(self, schema: Schema) -> None:
        super().__init__(())
        self.schema = schema

    def read(self, reader: Reader, pos: int, name: str) -> list[Table]:
        first, count = reader.vector(pos, 4, name)
        target, table, schema = reader.target, reader.table, self.schema
        return [table(schema, target(at, name), name) for at in range(first, first + 4 * count, 4)]


class Union(Kind):
    """One of several tables, chosen by a tag byte (1 is the first). Always read with
    `Table.union`."""

    __slots__ = ("schemas",)
    slots = 2

    def __init__(self, *schemas: Schema) -> None:
        super().__init__()
        self.schemas = schemas


class Schema:
    """The name of a table and its fields in file order. A new release may append fields; more are
    ignored. `make` is called with all fields for `Table.record`."""

    __slots__ = ("fields", "make", "name")

    def __init__(
        self, name: str, make: Callable[..., Any] | None = None, /, **fields: Kind
    ) -> None:
        self.name, self.make = name, make
        self.fields: dict[str, tuple[int, Kind, str]] = {}
        self.define(**fields)

    def define(self, /, **fields: Kind) -> None:
        """Names the fields. Of a table that nests in itself, they follow the schemas that they need."""
        slot = 0
        for field, kind in fields.items():
            self.fields[field] = (slot, kind, f"{self.name}.{field}")
            slot += kind.slots

    def __repr__(self) -> str:
        return f"Schema({self.name})"


class Table:
    """One table of a buffer; `table["field"]` reads a field by its name in the schema."""

    __slots__ = ("_slots", "pos", "reader", "schema")

    def __init__(self, reader: Reader, schema: Schema, pos: int, slots: Sequence[int]) -> None:
        self.reader, self.schema, self.pos, self._slots = reader, schema, pos, slots

    def __getitem__(self, field: str) -> Any:
        slot, kind, name = self.schema.fields[field]
        slots = self._slots
        offset = slots[slot] if slot < len(slots) else 0
        if not offset:
            return kind.default
        return kind.read(self.reader, self.pos + offset, name)

    def union(self, field: str) -> Table:
        """The table of a union field. Its `schema` says which member it is.

        Raises:
            FileFormatError: the tag is missing or unknown, or a member with fields has no table.
        """
        slot, kind, name = self.schema.fields[field]
        assert isinstance(kind, Union)
        reader, slots = self.reader, self._slots
        offset = slots[slot] if slot < len(slots) else 0
        tag = _TAG.read(reader, self.pos + offset, name) if offset else 0
        if not 1 <= tag <= len(kind.schemas):
            reader.fail(
                f"{name} has the unknown tag {tag}",
                self.pos,
                f"tags 1 to {len(kind.schemas)} are accepted ({', '.join(s.name for s in kind.schemas)})",
                "the file is damaged, or newer than this release of purevk: upgrade purevk",
            )
        schema = kind.schemas[tag - 1]
        offset = slots[slot + 1] if slot + 1 < len(slots) else 0
        if offset:
            return reader.table(schema, reader.target(self.pos + offset, name), name)
        if schema.fields:
            reader.fail(f"{name} says {schema.name} but holds nothing", self.pos)
        return Table(reader, schema, self.pos, ())

    def record(self) -> Any:
        """What `make` of the schema gives for the fields."""
        assert self.schema.make is not None
        return self.schema.make(*map(self.__getitem__, self.schema.fields))

    def check_indices(self, what: str, indices: Iterable[int], count: int) -> None:
        """Raise FileFormatError if an index is out of range."""
        for index in indices:
            if not 0 <= index < count:
                self.fail(f"{what} refers to number {index}", f"there are {count}")

    def fail(self, what: str, why: str = "", next: str = _NEXT_DAMAGED) -> NoReturn:
        """Raise FileFormatError about this table."""
        self.reader.fail(f"{self.schema.name}: {what}", self.pos, why, next)


_TAG = Scalar(number_types.Uint8Flags)


def i8(default: int = 0) -> Scalar:
    """A signed byte."""
    return Scalar(number_types.Int8Flags, default)


def u8(default: int = 0) -> Scalar:
    """An unsigned byte."""
    return Scalar(number_types.Uint8Flags, default)


def flag() -> Scalar:
    """A bool, stored in a byte; default False."""
    return Scalar(number_types.BoolFlags)


def i32() -> Scalar:
    """A signed 32-bit integer, default 0."""
    return Scalar(number_types.Int32Flags)


def u32() -> Scalar:
    """An unsigned 32-bit integer, default 0."""
    return Scalar(number_types.Uint32Flags)


def i64() -> Scalar:
    """A signed 64-bit integer, default 0."""
    return Scalar(number_types.Int64Flags)


def u64() -> Scalar:
    """An unsigned 64-bit integer, default 0."""
    return Scalar(number_types.Uint64Flags)


def f64() -> Scalar:
    """A double, default 0."""
    return Scalar(number_types.Float64Flags)


def numbers(scalar: Scalar) -> Numbers:
    """A vector of what `scalar` reads."""
    return Numbers(scalar.flags)
