"""Entries of kept plans: pickles that are read with the classes of purevk's own graphs and plans alone.
They run no code of others, whatever their bytes are."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from purevk.ir import Arg, Node, Sealed, Value
from purevk.mapped import address_of

MOST_BYTES = 8 << 20
"""Bytes of tensors that are not in the file, in an entry."""
Span: TypeAlias = tuple[int, int, int]
"""Where bytes are in the files of a program: the number of the file, the first byte, how many."""
_MODULES = ("purevk.ir.", "purevk.lower.", "purevk.ops.", "purevk.schedule.")
_FUNCTIONS = {("purevk.dtypes", "dtype_named"), ("purevk.ir.dims", "Dim")}

UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What wrong bytes raise while they are read."""


class NotKept(Exception):
    """Why a plan has no entry."""


class Head(NamedTuple):
    """What comes before the plan in an entry.

    Attributes:
        digest: of all bytes of the files that are not skipped.
        skipped: for each file, (first byte, bytes) of what the plan does not depend on, sorted.
        leaves: name, dtype, sizes and key of the constants and states.
    """

    digest: str
    skipped: list[list[tuple[int, int]]]
    leaves: list[tuple[Any, ...]]


class Writer(pickle.Pickler):
    """Writes graphs and plans. Values that methods share are numbers, and tensors in the files
    are ranges of these.

    Args:
        span_of: where in the files bytes are; None if they are in no file.
        leaves: the number of each value that methods share.

    Attributes:
        ranges: where the tensors are that are in the files.
        spans: where tensors are, or their bytes, by address and length.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        span_of: Callable[[memoryview], Span | None],
        leaves: Mapping[Value, int],
    ) -> None:
        super().__init__(stream, protocol=5)
        self._span_of, self._leaves = span_of, leaves
        self._inline = 0
        self.ranges: list[Span] = []
        self.spans: dict[tuple[int, int], Any] = {}

    def reducer_override(self, each: Any) -> Any:
        """Nodes with arguments whose classes come with all operators are read without these."""
        if type(each) is not Node or each.graphs:
            return NotImplemented
        args = tuple(_seal(arg) if _of_operators(arg) else arg for arg in each.args)
        if all(one is two for one, two in zip(args, each.args)):
            return NotImplemented
        return _node, (each.op, args, each.results, each.source, each.alias, each.inputs)

    def persistent_id(self, each: Any) -> Any:
        kind = type(each)
        if kind is Value:
            return self._leaves.get(each)
        return self._span(each) if kind is memoryview else None

    def _span(self, data: memoryview) -> Any:
        span: Any = self._span_of(data) if len(data) else None
        if span is not None:
            self.ranges.append(span)
        else:
            self._inline += len(data)
            if self._inline > MOST_BYTES:
                raise NotKept(f"more than {MOST_BYTES} bytes of its tensors are not in the file")
            span = bytes(data)
        self.spans[address_of(data), len(data)] = span
        return (span,)


class _Attribute(Sealed):
    """An argument of a class of the operators, as it was pickled."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        return _Attribute, (self.data,)

    def open(self) -> Arg:
        made: Arg = _PlainReader(io.BytesIO(self.data)).load()
        return made


def _node(*parts: Any) -> Node:
    return Node.sealed(*parts)


def _of_operators(arg: Any) -> bool:
    return type(arg).__module__.startswith("purevk.ops.")


def _seal(arg: Any) -> Any:
    """The argument, sealed; or itself if there are tensors in it."""
    stream = io.BytesIO()
    try:
        _PlainWriter(stream, protocol=5).dump(arg)
    except NotKept:
        return arg
    _PlainReader(io.BytesIO(stream.getvalue())).load()  # what cannot be read is not kept
    return _Attribute(stream.getvalue())


class _PlainWriter(pickle.Pickler):
    """Writes what has no tensors."""

    def persistent_id(self, each: Any) -> Any:
        if isinstance(each, (Value, memoryview)):
            raise NotKept("a tensor")
        return None


class _PlainReader(pickle.Unpickler):
    """Reads objects of the classes that arguments have, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _FUNCTIONS:
            return super().find_class(module, name)
        if "." not in name and f"{module}.".startswith(_MODULES):
            found = super().find_class(module, name)
            if (
                isinstance(found, type)
                and found.__module__ == module
                and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))
            ):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plan")


class Reader(_PlainReader):
    """Reads what `Writer` wrote.

    Args:
        bytes_of: the bytes of a tensor, given where they are in the files, or themselves.
        leaves: the values that methods share, by number.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        bytes_of: Callable[[Span | bytes], memoryview],
        leaves: Sequence[Value] = (),
    ) -> None:
        super().__init__(stream)
        self._bytes_of, self._leaves = bytes_of, leaves

    def persistent_load(self, number: Any) -> Any:
        if isinstance(number, int):
            return self._leaves[number]
        return self._bytes_of(number[0])

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            own = {"Head": Head, "_Attribute": _Attribute, "_node": _node}
            if name in own:
                return own[name]
        return super().find_class(module, name)
