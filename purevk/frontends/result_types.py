"""The types of results: from shape functions, from a file, and with data-dependent sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.bounds import SizeBounds
from purevk.ir import Arg, Bound, Dim, Guard, Size, Symbol, SymbolSource, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ir.expected import Expected, expected
from purevk.ops import registry


@dataclass(frozen=True)
class OpenType:
    """The type of a result with data-dependent sizes, each a `Bound`."""

    dtype: DType
    dims: tuple[Size | Bound, ...]

    def __repr__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.dims))}]"


Recorded = TensorType | OpenType  # the type that a file states of a result


def _may_be(size: Size, stated: Size | Bound) -> bool:
    """Whether a size is the stated one at some call."""
    if isinstance(stated, Dim):
        return _dims.settled(stated, "==", size) is not False
    return size == stated


def equal_at(left: Size | Bound, right: Size | Bound, sizes: Mapping[Symbol, int]) -> bool | None:
    """Whether two expressions are equal for such sizes; None: one has other symbols, or is a bound."""
    if isinstance(left, Bound) or isinstance(right, Bound):
        return None
    if not _dims.symbols(left) | _dims.symbols(right) <= sizes.keys():
        return None
    return _dims.evaluate(left, sizes) == _dims.evaluate(right, sizes)


def fixed_sizes(types: Sequence[TensorType], recorded: Sequence[Recorded]) -> Iterator[Guard]:
    """That the recorded expressions of sizes are the numbers that shape functions give."""
    for type, stated in zip(types, recorded):
        for size, expression in zip(type.dims, stated.dims):
            if isinstance(size, int) and isinstance(expression, Dim):
                yield Guard(expression, "==", size, True)


class ResultTypes:
    """Gives the types of the results of nodes.

    Args:
        where: the file's name, for messages.
        specialized: the graph is read for the sizes of a call.
        symbols: of the graph. Symbols for data-dependent sizes are added.
        bounds: what is known of data-dependent sizes.

    Attributes:
        names: names for the data-dependent sizes of the next node, if they have names.
        traced_elsewhere: the model was traced on a device on which some operators give results of
            other sizes than on the CPU.
    """

    def __init__(
        self,
        where: str,
        specialized: bool,
        symbols: dict[Symbol, SymbolSource],
        bounds: SizeBounds,
    ) -> None:
        self.where, self.specialized = where, specialized
        self.names: list[str] = []
        self.traced_elsewhere = False
        self._symbols, self._bounds = symbols, bounds
        self._fresh: set[Symbol] = set()  # symbols of the next node

    def infer(
        self,
        definition: registry.Operator,
        full: tuple[Arg, ...],
        recorded: Sequence[Recorded],
        source: str,
        exact: bool,
    ) -> list[TensorType]:
        """The types that the shape function gives, in the recorded dtypes.

        Args:
            exact: the recorded sizes hold at every call, given the guards of the program. An
                expression of sizes can be a number by a guard.

        Raises:
            UnknownSizes: the results have data-dependent sizes.
            FileFormatError: the recorded sizes are not those of the shape function.
            UnsupportedProgramError: an argument is known only during a call.
        """
        try:
            inferred = definition.infer(full)
        except registry.UnknownSizes:
            raise
        except registry.ShapeError as error:
            raise FileFormatError(
                f"{definition.name} cannot take its arguments",
                where=f"{self.where}, {source}",
                why=str(error),
                next="the file is damaged, or its exporter and purevk disagree on this operator",
            ) from error
        except TypeError as error:  # a symbol or a tensor where a plain number is needed
            raise UnsupportedProgramError(
                f"{definition.name} cannot take its arguments",
                where=f"{self.where}, {source}",
                why=str(error),
                next="make the number a constant of the model",
            ) from error
        types = []
        for number, type in enumerate(inferred):
            if number < len(recorded):
                stated = recorded[number]
                of_trace = not self.specialized and not self.traced_elsewhere
                pairs = list(zip(type.dims, stated.dims)) if of_trace else []
                if (
                    type.rank != len(stated.dims)
                    or (
                        type.is_static
                        and not all(
                            _may_be(size, other) if exact else size == other
                            for size, other in pairs
                        )
                    )
                    or (
                        exact
                        and any(equal_at(*pair, self._bounds.hints) is False for pair in pairs)
                    )
                ):
                    raise FileFormatError(
                        f"result {number} of {definition.name} is recorded as {stated}",
                        where=f"{self.where}, {source}",
                        why=f"from its arguments it is {type}",
                        next="the file is damaged, or its exporter and purevk disagree on this operator",
                    )
                type = type.with_dtype(stated.dtype)
            types.append(type)
        return types

    def limit(
        self, types: Sequence[TensorType], recorded: Sequence[Recorded], dynamic: Sequence[bool]
    ) -> None:
        """Notes bounds of data-dependent sizes from the bounds that the file states of results."""
        for type, stated, moves in zip(types, recorded, dynamic):
            for size, bound in zip(type.dims, stated.dims):
                if (
                    moves
                    and isinstance(size, Dim)
                    and isinstance(bound, int)
                    and _dims.upper(size) > bound
                ):
                    self._bounds.limit(size, bound)

    def data_dependent(
        self,
        definition: registry.Operator,
        error: registry.UnknownSizes,
        recorded: Sequence[Recorded],
        exact: bool,
        source: str,
    ) -> list[TensorType]:
        """The types of results with data-dependent sizes. Each of these sizes is a symbol."""
        if error.types is None:
            if recorded:
                return [self.unknown(type, True, exact) for type in recorded]
            raise FileFormatError(
                f"{definition.name} gives a tensor of unknown sizes",
                where=f"{self.where}, {source}",
                why=str(error),
                next="export the model with bounds for its results",
            ) from error
        known: dict[int, Size] = {}
        types = []
        for number, type in enumerate(error.types):
            stated = recorded[number] if number < len(recorded) else None
            sizes: list[Size] = []
            for dim, size in enumerate(type.dims):
                if isinstance(size, registry.DataDependentSize):
                    if size.key not in known:
                        bound = (
                            None
                            if stated is None or (self.specialized and not exact)
                            else stated.dims[dim]
                        )
                        known[size.key] = self._data_dependent_size(size, bound, exact)
                    size = known[size.key]
                sizes.append(size)
            # Exporters of files narrow indices to int32. Torch 2.11 and older record those of `unique`
            # in the dtype of its values, which may be one that does not hold them.
            dtype = type.dtype
            if stated is not None and stated.dtype is not dtype:
                if exact and "unique" not in definition.name:
                    raise UnsupportedProgramError(
                        f"torch exports a result of {definition.name} as {stated.dtype.name}",
                        where=f"{self.where}, {source}",
                        why=f"it is {dtype.name}. Torch 2.11 and older give counts of bincount the dtype"
                        " of the values, and what follows would be computed in it",
                        next="update torch, or give bincount int64 values and no weights",
                    )
                if not exact and (dtype is not DType.int64 or stated.dtype is DType.int32):
                    dtype = stated.dtype
            types.append(TensorType(dtype, tuple(sizes)))
        return types

    def _data_dependent_size(
        self, size: registry.DataDependentSize, stated: Size | Bound | None, exact: bool
    ) -> Size:
        """A data-dependent size.

        Args:
            stated: the size or the bound that the file states.
        """
        if exact and isinstance(stated, (int, Dim)):
            return stated
        upper = None if size.upper is None else _dims.upper(size.upper)
        if stated is not None and (upper is None or not self.specialized):
            bound = stated.upper if isinstance(stated, Bound) else _dims.upper(stated)
            if size.misstated is not None and bound == _dims.upper(size.misstated):
                bound = None
            upper = bound if upper is None else upper if bound is None else min(bound, upper)
        if upper == 0:
            return 0
        symbol = self._fresh_symbol(upper, size.guess)
        if size.upper is not None:
            self._bounds.derived.add(symbol)
        if size.misstated is not None:
            self._bounds.misstated[symbol] = _dims.upper(size.misstated)
        return Dim.of(symbol)

    def unknown(self, type: Recorded, moves: bool, exact: bool) -> TensorType:
        """The type of a result of an operator without a shape function. Each size above 1 is a
        symbol of its own if it may change."""
        if isinstance(type, TensorType) and not exact and not moves and not self.specialized:
            return type
        sizes: list[Size] = []
        for size in type.dims:
            if isinstance(size, Bound):
                size = Dim.of(self._fresh_symbol(size.upper, 64))
            elif not exact and isinstance(size, int) and size > 1:
                size = Dim.of(self._fresh_symbol(size, size))
            sizes.append(size)
        return TensorType(type.dtype, tuple(sizes))

    def _fresh_symbol(self, upper: int | None, guess: int) -> Symbol:
        """A symbol for a data-dependent size of the next node.

        Args:
            upper: its bound; None: there is none.
            guess: what memory is planned for at first, if there is no bound.
        """
        name = self.names.pop(0) if self.names else f"u{len(self._symbols)}"
        bounds = expected(name)
        if bounds is None:
            bounds = Expected(guess, guess, open=True) if upper is None else Expected(upper, upper)
        symbol = Symbol(name, bounds.upper, unbacked=True, open=bounds.open)
        self._symbols[symbol] = SymbolSource(None)
        self._fresh.add(symbol)
        return symbol

    def define_symbols(self, results: Sequence[Value]) -> None:
        """Notes which sizes of a node's results the new symbols are."""
        for value in results:
            for dim, size in enumerate(value.type.dims):
                for symbol in _dims.symbols(size) & self._fresh:
                    self._symbols[symbol] = SymbolSource(value, dim)
                    self._fresh.discard(symbol)
