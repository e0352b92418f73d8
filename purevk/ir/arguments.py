"""What the arguments of a node can be, and how code reads them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeAlias, TypeVar, Union

from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.ir import schema
from purevk.ir.dims import Dim, Size
from purevk.ir.types import Value

if TYPE_CHECKING:
    from purevk.ir.graph import Graph


class Attribute(Protocol):
    """A frozen dataclass of an operator's own among the arguments of a node: a pointwise program,
    the choice of a kernel. Only purevk's own operators have such arguments."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


# A number in an operator's schema (`Scalar` in torch). An integer may be known only at a call.
Scalar = bool | int | float | complex | Dim

# What an argument of a node can be. Sizes and integers known only at a call are `Dim`s.
Arg = Union[Value, "Graph", Scalar, str, DType, Attribute, "tuple[Arg, ...]", None]

T = TypeVar("T")

# Inside `Arguments` the builtin types are hidden by methods of their names.
bool_: TypeAlias = bool
float_: TypeAlias = float
int_: TypeAlias = int
str_: TypeAlias = str


class Arguments:
    """Reads the arguments of a node by the names of its operator's parameters:
    `node.tensor("weight")`, `node.ints("stride")`.

    An argument that the node does not have has its default. All methods raise `GraphError` if the
    operator has no such parameter, or if the argument is of another kind. As in torch, a bool is
    no integer, and an integer is a real number.
    """

    op: str
    args: tuple[Arg, ...]
    source: str

    # -- tensors ----------------------------------------------------------------------------------
    def tensor(self, name: str_) -> Value:
        """A tensor."""
        return self._read(name, _tensor, "a tensor")

    def optional_tensor(self, name: str_) -> Value | None:
        """A tensor or None."""
        return self._optional(name, _tensor, "a tensor")

    def tensors(self, name: str_) -> tuple[Value, ...]:
        """A list of tensors."""
        return self._list(name, _tensor, "tensors")

    def optional_tensors(self, name: str_) -> tuple[Value | None, ...]:
        """A list of tensors and None, such as the indices of `aten.index.Tensor`."""
        return self._list(name, _tensor_or_none, "tensors and None")

    def tensor_or_scalar(self, name: str_) -> Value | Scalar:
        """A tensor or a number: an operand that broadcasts."""
        return self._read(name, _tensor_or_scalar, "a tensor or a number")

    # -- numbers ----------------------------------------------------------------------------------
    def int(self, name: str_) -> int_:
        """An integer that is known at load."""
        return self._read(name, _int, "an integer")

    def optional_int(self, name: str_) -> int_ | None:
        """An integer that is known at load, or None."""
        return self._optional(name, _int, "an integer")

    def ints(self, name: str_, count: int_ | None = None) -> tuple[int_, ...]:
        """A list of integers that are known at load. One integer is a list too.

        Args:
            name: the parameter.
            count: how many there have to be. A single one stands for all of them, as in torch.
        """
        return self._list(name, _int, "integers", count)

    def optional_ints(self, name: str_, count: int_ | None = None) -> tuple[int_, ...] | None:
        """A list of integers that are known at load, or None; `count` as for `ints`."""
        return None if self.arg(name) is None else self.ints(name, count)

    def size(self, name: str_) -> Size:
        """An integer that may be known only at a call."""
        return self._read(name, _size, "a size")

    def optional_size(self, name: str_) -> Size | None:
        """An integer that may be known only at a call, or None."""
        return self._optional(name, _size, "a size")

    def sizes(self, name: str_, count: int_ | None = None) -> tuple[Size, ...]:
        """A list of integers that may be known only at a call; `count` as for `ints`."""
        return self._list(name, _size, "sizes", count)

    def float(self, name: str_) -> float_:
        """A real number."""
        return self._read(name, _float, "a real number")

    def optional_float(self, name: str_) -> float_ | None:
        """A real number or None."""
        return self._optional(name, _float, "a real number")

    def floats(self, name: str_, count: int_ | None = None) -> tuple[float_, ...]:
        """A list of real numbers; `count` as for `ints`."""
        return self._list(name, _float, "real numbers", count)

    def scalar(self, name: str_) -> Scalar:
        """A number of any type. An integer may be known only at a call."""
        return self._read(name, _scalar, "a number")

    def scalars(self, name: str_) -> tuple[Scalar, ...]:
        """A list of numbers of any type."""
        return self._list(name, _scalar, "numbers")

    def bool(self, name: str_) -> bool_:
        """True or False."""
        return self._read(name, _bool, "a bool")

    def optional_bool(self, name: str_) -> bool_ | None:
        """True, False or None."""
        return self._optional(name, _bool, "a bool")

    def bools(self, name: str_) -> tuple[bool_, ...]:
        """A list of bools."""
        return self._list(name, _bool, "bools")

    # -- the rest ---------------------------------------------------------------------------------
    def str(self, name: str_) -> str_:
        """A string."""
        return self._read(name, _str, "a string")

    def dtype(self, name: str_) -> DType:
        """An element type."""
        return self._read(name, _dtype, "a dtype")

    def optional_dtype(self, name: str_) -> DType | None:
        """An element type or None."""
        return self._optional(name, _dtype, "a dtype")

    def attribute(self, name: str_, kind: type[T]) -> T:
        """An object of a class of the operator's own: `node.attribute("choice", Reduction)`."""
        return self._read(name, _instance(kind), kind.__name__)

    def optional_attribute(self, name: str_, kind: type[T]) -> T | None:
        """An object of a class of the operator's own, or None."""
        return self._optional(name, _instance(kind), kind.__name__)

    def arg_list(self, name: str_) -> tuple[Arg, ...]:
        """A list of arguments of any kind, such as the operands of a sub-graph."""
        return self._list(name, _anything, "arguments")

    def arg(self, name: str_) -> Arg:
        """An argument of any kind."""
        known = schema.find(self.op)
        position = None if known is None else known.positions.get(name)
        if position is None or position >= len(self.args):
            return self._default(name)
        return self.args[position]

    def position(self, name: str_) -> int_:
        """The position of a parameter."""
        known = self._schema()
        position = known.positions.get(name)
        if position is None:
            raise GraphError(
                f"{self.op} has no argument {name!r}",
                where=self.source,
                why=f"its arguments are {', '.join(known.positions) or 'none'}",
            )
        return position

    def _schema(self) -> schema.Schema:
        known = schema.find(self.op)
        if known is None:
            raise GraphError(f"no operator {self.op}", where=self.source)
        return known

    def _default(self, name: str_) -> Arg:
        """The default of a parameter; raises `GraphError` if there is none."""
        self.position(name)
        known = self._schema()
        if name not in known.defaults:
            raise GraphError(
                f"{self.op} lacks its argument {name!r}",
                where=self.source,
                why=f"{len(self.args)} of {len(known.positions)} are given; this one has no default",
            )
        default: Arg = known.defaults[name]
        return default

    def _read(self, name: str_, kind: Callable[[Arg], T], expected: str_) -> T:
        arg = self.arg(name)
        try:
            return kind(arg)
        except _OtherKind:
            self._refuse(name, expected, arg)

    def _optional(self, name: str_, kind: Callable[[Arg], T], expected: str_) -> T | None:
        if self.arg(name) is None:
            return None
        return self._read(name, kind, f"{expected} or None")

    def _list(
        self, name: str_, kind: Callable[[Arg], T], expected: str_, count: int_ | None = None
    ) -> tuple[T, ...]:
        wanted = f"a list of {expected}" if count is None else f"a list of {count} {expected}"
        arg = self.arg(name)
        items = arg if isinstance(arg, tuple) else (arg,)
        try:
            found = tuple([kind(item) for item in items])
        except _OtherKind:
            self._refuse(name, wanted, arg)
        if count is None or len(found) == count:
            return found
        if len(found) != 1:
            self._refuse(name, wanted, arg)
        return found * count

    def _refuse(self, name: str_, expected: str_, arg: Arg) -> NoReturn:
        raise GraphError(
            f"argument {name!r} of {self.op} is {_kind_of(arg)}",
            where=self.source,
            why=f"{expected} is expected, and {_shown(arg)} was given",
        )


class _OtherKind(TypeError):
    """An argument is of another kind than the one that is read."""


def _instance(kind: type[T]) -> Callable[[Arg], T]:
    def read(arg: Arg) -> T:
        if isinstance(arg, kind):
            return arg
        raise _OtherKind

    return read


_tensor = _instance(Value)
_bool = _instance(bool)
_str = _instance(str)
_dtype = _instance(DType)


def _tensor_or_none(arg: Arg) -> Value | None:
    return None if arg is None else _tensor(arg)


def _int(arg: Arg) -> int:
    if isinstance(arg, int) and not isinstance(arg, bool):
        return arg
    raise _OtherKind


def _size(arg: Arg) -> Size:
    return arg if isinstance(arg, Dim) else _int(arg)


def _float(arg: Arg) -> float:
    return arg if isinstance(arg, float) else float(_int(arg))


def _scalar(arg: Arg) -> Scalar:
    if isinstance(arg, (bool, int, float, complex, Dim)):
        return arg
    raise _OtherKind


def _tensor_or_scalar(arg: Arg) -> Value | Scalar:
    return arg if isinstance(arg, Value) else _scalar(arg)


def _anything(arg: Arg) -> Arg:
    return arg


_KINDS: tuple[tuple[type, str], ...] = (
    (Value, "a tensor"),
    (bool, "a bool"),
    (int, "an integer"),
    (Dim, "a size known only at a call"),
    (float, "a real number"),
    (complex, "a complex number"),
    (str, "a string"),
    (DType, "a dtype"),
)


def _kind_of(arg: Arg) -> str:
    if arg is None:
        return "None"
    if isinstance(arg, tuple):
        kinds = dict.fromkeys(map(_kind_of, arg))
        return f"a list of {' and '.join(kinds)}" if kinds else "an empty list"
    return next((text for kind, text in _KINDS if isinstance(arg, kind)), type(arg).__name__)


def _shown(arg: Arg) -> str:
    text = f"{arg!r}: {arg.type}" if isinstance(arg, Value) else repr(arg)
    return text if len(text) <= 80 else f"{text[:77]}..."
