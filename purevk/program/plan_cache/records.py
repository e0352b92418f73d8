"""Graphs and plans as flat records: plain data, tables of numbers, and bytes.

A payload has, in this order:

- two numbers of 32 bits: the bytes of the header, and how many numbers the tables have;
- the header, JSON: `head`, what is read first; `scalars`, the numbers and texts; `groups`, pairs of a
  kind and how many objects of it follow;
- the tables, numbers of 32 bits. A group has a column for each field of its kind. A number is the
  position of an object: scalars come first, then the objects of the groups before;
- bytes of tensors.

Objects that are one stay one, and equal ones become one where they are compared by value. Reading
makes nothing but objects of purevk's own classes, whose fields have the types that are declared."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from purevk.dtypes import DType, dtype_named
from purevk.errors import FileFormatError
from purevk.ir import Arg, BorrowedConstant, Constant, Dim, Node, Sealed, Size, Value
from purevk.ir.dims import _Function
from purevk.ir.symbols import Symbol
from purevk.mapped import address_of
from purevk.program.plan_cache.schema import Check, Unreadable, check_of, field_checks

MOST_BYTES = 8 << 20
"""Bytes of tensors that are not in the file, in an entry."""
Span: TypeAlias = tuple[int, int, int]
"""Where bytes are in the files of a program: the number of the file, the first byte, how many."""
_CLASS = re.compile(r"(purevk\.(?:ir|lower|ops|schedule)(?:\.\w+)+):(\w+)", re.ASCII)
_SCALARS = (type(None), bool, int, float, str)
_SIZES = struct.Struct("<II")

DAMAGED = (
    *(Unreadable, ArithmeticError, AttributeError, ImportError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError, struct.error),
)
"""What wrong bytes raise while they are read."""


class NotCacheable(Exception):
    """Why a plan has no entry."""


class _HasTensors(Exception):
    """There are tensors in what has to be plain."""


class Attribute(Sealed):
    """An argument of a class of the operators, as a payload. It is made when it is read: then only
    are the operators imported."""

    def __init__(self, payload: bytes | memoryview) -> None:
        self.payload = payload

    def open(self) -> Arg:
        """The argument.

        Raises:
            FileFormatError: the entry is damaged, though its checksum is right.
        """
        try:
            root: Arg = Reader(self.payload).root()
            _ARGUMENT([root])
        except DAMAGED as error:
            raise FileFormatError(
                "an argument in a plan of the cache cannot be read",
                why=str(error),
                next="purevk cache clear; or PUREVK_CACHE=plans=0, to lower the program anew",
            ) from error
        return root


# -- writing -------------------------------------------------------------------------------------
class Writer:
    """Makes a payload.

    Args:
        span_of: where in the files bytes are; None if they are in no file.
        leaves: what each value that methods share is: name, dtype, sizes, name of a state or None,
            bytes or their name or None.
        plain: there are no tensors.
        borrowed: whether borrowed constants go by their names.

    Attributes:
        ranges: where the tensors are that are in the files.
    """

    def __init__(
        self,
        span_of: Callable[[memoryview], Span | None] = lambda _: None,
        leaves: Mapping[Value, tuple[Any, ...]] | None = None,
        plain: bool = False,
        borrowed: bool = False,
    ) -> None:
        self._span_of, self._leaves, self._plain = span_of, leaves or {}, plain
        self._borrowed = borrowed
        self.ranges: list[Span] = []
        self._rows: list[tuple[int, str, tuple[int, ...], Any]] = []  # level, kind, fields, scalar
        self._known: dict[Any, int] = {}
        self._blob = bytearray()
        self._alive: list[Any] = []  # ids of objects are keys

    def payload(self, root: Any, head: Any) -> bytes:
        """The payload of an object.

        Args:
            head: plain data, from what was written of `root`.

        Raises:
            NotCacheable: something in it has no record.
        """
        self._add(root)
        order = sorted(range(len(self._rows)), key=lambda row: (*self._rows[row][:2], row))
        position = {row: at for at, row in enumerate(order)}
        groups: list[list[Any]] = []
        columns: list[int] = []
        scalars: list[Any] = []
        members: dict[tuple[int, str], list[tuple[int, ...]]] = {}
        for row in order:
            level, kind, fields, scalar = self._rows[row]
            if level:
                members.setdefault((level, kind), []).append(fields)
            else:
                scalars.append(scalar)
        for (_, kind), rows in members.items():
            groups.append([kind, len(rows)])
            for column in zip(*rows):
                columns += [position[row] for row in column]
        header = json.dumps(
            {"head": head() if callable(head) else head, "scalars": scalars, "groups": groups},
            separators=(",", ":"),
        ).encode()
        return b"".join(
            (
                _SIZES.pack(len(header), len(columns)),
                header,
                np.array(columns, "<u4").tobytes(),
                self._blob,
            )
        )

    def _row(self, kind: str, fields: tuple[int, ...], key: Any = None) -> int:
        """The row of an object; one for all with the same key."""
        key = (kind, fields) if key is None else key
        number = self._known.get(key)
        if number is None:
            level = 1 + max((self._rows[field][0] for field in fields), default=0)
            number = self._known[key] = len(self._rows)
            self._rows.append((level, kind, fields, None))
        return number

    def _add(self, obj: Any) -> int:
        kind = type(obj)
        if kind in _SCALARS:
            key = (kind, repr(obj))
            if key not in self._known:
                self._known[key] = len(self._rows)
                self._rows.append((0, "", (), obj))
            return self._known[key]
        number = self._known.get(id(obj))
        if number is None:
            number = self._known[id(obj)] = self._object(obj, kind)
            self._alive.append(obj)
        return number

    def _all(self, items: Any) -> tuple[int, ...]:
        return tuple([self._add(item) for item in items])

    def _object(self, obj: Any, kind: type) -> int:
        if self._plain and kind in (Value, memoryview):
            raise _HasTensors
        if kind is tuple:
            return self._row(f"tuple {len(obj)}", self._all(obj))
        if kind is dict:
            pairs = (self._add(tuple(obj)), self._add(tuple(obj.values())))
            return self._row("dict", pairs, key=("dict", id(obj)))
        if kind is frozenset:
            return self._row("frozenset", self._all([tuple(sorted(obj, key=repr))]))
        if kind is DType:
            return self._row("dtype", self._all([obj.name]))
        if kind is Dim:
            return self._row("dim", self._all([obj.terms]))
        if kind is complex:
            return self._row("complex", self._all([obj.real, obj.imag]))
        if kind is memoryview:
            return self._bytes(obj)
        if kind is BorrowedConstant and self._borrowed and obj.name:
            return self._row("borrowed", self._all([obj.name]))
        if kind is Value and obj in self._leaves:
            return self._row("leaf", self._all(self._leaves[obj]), key=("leaf", id(obj)))
        if kind is Attribute:
            return self._row("attribute", (self._inline(obj.payload),))
        if kind is Node and not obj.graphs:
            args = tuple(_sealed(arg) if _of_operators(arg) else arg for arg in obj.args)
            self._alive.append(args)
            if any(type(arg) is Attribute for arg in args):
                parts = (obj.op, args, obj.results, obj.source, obj.alias, obj.inputs)
                return self._row("node", self._all(parts), key=("node", id(obj)))
        name = f"{kind.__module__}:{kind.__qualname__}"
        try:
            names = class_kind(name).names
        except DAMAGED as error:
            raise NotCacheable(f"{name} is no part of a plan: {error}") from None
        fields = self._all([getattr(obj, name) for name in names])
        by_value = "__eq__" in kind.__dict__ and kind.__hash__ is not None
        return self._row(name, fields, key=None if by_value else (name, id(obj)))

    def _bytes(self, data: memoryview) -> int:
        span = self._span_of(data) if len(data) else None
        if span is not None:
            self.ranges.append(span)
            return self._row("span", self._all(span), key=("span", span, address_of(data)))
        return self._inline(data)

    def _inline(self, data: Any) -> int:
        number = self._known.get(bytes(data))
        if number is not None:
            return number
        first = len(self._blob)
        self._blob += data
        if len(self._blob) > MOST_BYTES:
            raise NotCacheable(f"more than {MOST_BYTES} bytes of its tensors are not in the file")
        row = self._known[bytes(data)] = self._row("bytes", self._all([first, len(data)]))
        return row


def _of_operators(arg: Any) -> bool:
    return type(arg).__module__.startswith("purevk.ops.")


def _sealed(arg: Any) -> Any:
    """The argument as a payload; or itself if there are tensors in it."""
    try:
        payload = Writer(plain=True).payload(arg, None)
    except _HasTensors:
        return arg
    Reader(payload).root()  # what cannot be read is not kept
    return Attribute(payload)


# -- reading -------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Kind:
    """Objects of one form: the names of their fields, the checks of the columns, and what makes
    the objects of columns."""

    names: Sequence[str]
    checks: Sequence[Check]
    make: Callable[[list[Any]], list[Any]]


@functools.cache
def class_kind(name: str) -> Kind:
    """That of a class of purevk's graphs and plans.

    Raises:
        Unreadable: there is no such class.
    """
    match = _CLASS.fullmatch(name)
    cls = None if match is None else getattr(importlib.import_module(match[1]), match[2], None)
    if match is None or not isinstance(cls, type) or cls.__module__ != match[1]:
        raise Unreadable(f"{name[:100]} is no class of a plan")
    names, checks = zip(*field_checks(cls))
    new = object.__new__

    def make(columns: list[Any]) -> list[Any]:
        objects: list[Any] = [new(cls) for _ in columns[0]]
        for obj, row in zip(objects, zip(*columns)):
            obj.__dict__.update(zip(names, row))
        return objects

    if issubclass(cls, tuple) or hasattr(cls, "__post_init__") or hasattr(cls, "__slots__"):
        return Kind(names, checks, lambda columns: list(map(cls, *columns)))
    return Kind(names, checks, make)


def _kind(make: Callable[..., Any], *hints: Any) -> Kind:
    checks = [check_of(hint) for hint in hints]
    return Kind([""] * len(hints), checks, lambda columns: list(map(make, *columns)))


def _any(values: Collection[Any]) -> None:
    """Takes all values: the fields that hold the tuple check them."""


@functools.cache
def _kind_of(name: str) -> Kind:
    """The kind of a name, but for those that need the files."""
    if name.startswith("tuple "):
        width = int(name[6:])
        if width == 0:
            return Kind([], [], lambda _: [()])
        return Kind([""] * width, [_any] * width, lambda columns: list(zip(*columns)))
    if ":" in name:
        return class_kind(name)
    return {
        "dict": lambda: _kind(
            lambda keys, values: dict(zip(keys, values, strict=True)), tuple, tuple
        ),
        "frozenset": lambda: _kind(frozenset, tuple),
        "dtype": lambda: _kind(dtype_named, str),
        "complex": lambda: _kind(complex, float, float),
        "dim": lambda: _kind(Dim, tuple[tuple[tuple[Symbol | _Function, ...], int], ...]),
        "attribute": lambda: _kind(Attribute, memoryview),
        "node": lambda: _kind(
            Node.sealed,
            *(str, tuple[Arg | Attribute, ...], tuple[Value, ...], str, str, tuple[Value, ...]),
        ),
    }[name]()


class Reader:
    """Reads a payload.

    Args:
        files: the bytes of the files of the program.
        leaf: makes a value that methods share, of its name, dtype, sizes, the name of a state or
            None, and its bytes or their name or None.
        borrowed: gives a borrowed constant by its name.

    Attributes:
        head: see `Writer.payload`.

    Raises:
        DAMAGED: it is none that `Writer` made.
    """

    def __init__(
        self,
        payload: bytes | memoryview,
        files: Sequence[memoryview] = (),
        leaf: Callable[..., Value] | None = None,
        borrowed: Callable[[str], Constant] | None = None,
    ) -> None:
        payload = memoryview(payload)
        size, self._count = _SIZES.unpack_from(payload)
        first = _SIZES.size + size
        header = json.loads(bytes(payload[_SIZES.size : first]))
        self.head = header["head"]
        self._scalars, self._groups = header["scalars"], header["groups"]
        self._table, self._blob = payload[first:], payload[first + 4 * self._count :]
        self._files = files
        self._own = {
            "span": _kind(self._span, int, int, int),
            "bytes": _kind(self._inline, int, int),
            "borrowed": _kind(borrowed or {}.__getitem__, str),
        }
        if leaf is not None:
            state = str | tuple[str, str] | None
            hints = (str, DType, tuple[Size, ...], state, memoryview | str | None)
            self._own["leaf"] = _kind(leaf, *hints)

    def root(self) -> Any:
        """The object: the last one."""
        _SCALARS_CHECK(self._scalars)
        table = np.frombuffer(self._table, "<u4", self._count)
        kinds = [(self._own.get(name) or _kind_of(name), count) for name, count in self._groups]
        if any(type(count) is not int or count < 1 for _, count in kinds):
            raise Unreadable("a group has no objects")
        if sum(len(kind.names) * count for kind, count in kinds) != self._count:
            raise Unreadable(f"the groups have other fields than {self._count} numbers")
        if any(not kind.names and count > 1 for kind, count in kinds):
            raise Unreadable("an object without fields is there twice")
        known, at = len(self._scalars), 0
        objects = np.empty(known + sum(count for _, count in kinds), object)
        objects[:known] = self._scalars
        for kind, count in kinds:
            end = at + len(kind.names) * count
            numbers = table[at:end]
            if at < end and numbers.max() >= known:
                raise Unreadable("an object has a part that follows it")
            fields = objects[numbers].tolist()
            columns = [fields[first : first + count] for first in range(0, end - at, count)]
            for check, column in zip(kind.checks, columns):
                check(column)
            objects[known : known + count] = np.fromiter(kind.make(columns), object, count)
            known, at = known + count, end
        return objects[-1]

    def _span(self, number: int, first: int, size: int) -> memoryview:
        if number < 0:
            raise Unreadable(f"file {number}")
        return self._part(self._files[number], first, size)

    def _inline(self, first: int, size: int) -> memoryview:
        return memoryview(bytes(self._part(self._blob, first, size)))

    @staticmethod
    def _part(data: memoryview, first: int, size: int) -> memoryview:
        if first < 0 or size < 0 or first + size > len(data):
            raise Unreadable(f"bytes {first} to {first + size} of {len(data)}")
        return data[first : first + size]


_ARGUMENT = check_of(Arg)
_SCALARS_CHECK = check_of(bool | int | float | str | None)
