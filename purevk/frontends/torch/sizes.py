"""The sizes of an exported program: torch's sympy expressions as sizes of a graph.

Imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from purevk.errors import UnsupportedProgramError
from purevk.frontends.importer import Importer
from purevk.frontends.numbers import of_sizes
from purevk.frontends.torch.conditions import conditions, environments, relations
from purevk.frontends.torch.ratios import Ratios, is_rounded
from purevk.ir import Dim, Guard, Relation, Size, Symbol
from purevk.ir import dims as _dims
from purevk.ir.expected import ROUNDED, planned_sizes

_DIVISIONS = ("Mod", "PythonMod", "FloorDiv", "CleanDiv")
# Functions of sizes in torch's sympy, as steps of arithmetic.
_STEPS = {
    "BitwiseFn_bitwise_and": "&", "BitwiseFn_bitwise_or": "|", "BitwiseFn_bitwise_xor": "^",
    "LShift": "<<", "RShift": ">>", "PowByNatural": "**",
}  # fmt: skip
_MOST_TESTED = 256  # values of a size of which the conditions are tried


class Sizes:
    """The symbols of torch and what they are in the graph.

    Args:
        program: the exported program.
        importer: takes the constraints and the ranges of symbols.
        dim_names: the user's names of dynamic dims, by input and dim.
        exact: the graph serves only the sizes that torch traced for.
        bounded: the program says for which sizes it holds.

    Attributes:
        symbols: what each symbol of torch is, by its name.
        sources: the symbols of the inputs' sizes, by input and dim.
        derived: sizes of inputs that equal an expression over other sizes, by input and dim.
        conditions: on the sizes, under which the program was traced, in sympy.
    """

    def __init__(
        self,
        program: Any,
        importer: Importer,
        dim_names: Mapping[tuple[int, int], str] | None = None,
        exact: bool = False,
        bounded: bool = True,
    ) -> None:
        self.program, self.importer = program, importer
        self.dim_names, self.exact, self.bounded = dim_names or {}, exact, bounded
        self.symbols: dict[str, Size] = {}
        self.sources: dict[tuple[int, int], Symbol] = {}
        self.derived: dict[tuple[int, int], Size] = {}
        self._plain: dict[str, Size] = {}
        self._planned: dict[Any, int] | None = None
        self.conditions: list[Any] | None = None

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """A context for the symbols of a sub-graph. They are forgotten after it."""
        saved = self.symbols
        self.symbols = dict(saved)
        try:
            yield
        finally:
            self.symbols = saved

    def wanted(self, position: int, dim: int) -> Any:
        """The size, or the `Bound`, that the graph is read for; None: that of the program."""
        sizes = self.importer.sizes[position] if self.importer.sizes is not None else None
        return None if sizes is None else sizes[dim]

    # -- inputs ----------------------------------------------------------------------------------
    def find_symbols(self, users: Sequence[Any]) -> None:
        """Makes the symbols of the inputs' sizes, so that a size can use those of later inputs.

        A symbol of torch belongs to the first dim, or integer input, whose size it is. Every other
        dim with an expression gets a symbol of its own and the constraint that it equals the
        expression.

        Args:
            users: the placeholders that are inputs of the graph, in order; None: one without sizes.
        """
        import torch

        if self.conditions is None:
            self.conditions = conditions(self.program, users)
        if self._planned is None:
            self._plan(users)
        compound: list[tuple[int, int, Any]] = []
        related = self._related() if self.bounded else {}
        for position, node in enumerate(users):
            example = None if node is None else node.meta.get("val")
            for dim, size in enumerate(symbolic_sizes(example)):
                if isinstance(size, int) or size.node.expr.is_Integer:
                    continue
                expression = related.get(size.node.expr, size.node.expr)
                if not expression.is_Symbol or str(expression) in self.symbols:
                    compound.append((position, dim, expression))
                    continue
                size_ = self.wanted(position, dim)
                if isinstance(size_, int):
                    self.symbols[str(expression)] = size_
                    continue
                symbol = self._symbol(
                    expression,
                    None if size_ is None else size_.upper,
                    self.dim_names.get((position, dim)),
                    isinstance(example, torch.Tensor) or self.sizes_depend_on(expression),
                )
                self._plain[str(expression)] = Dim.of(symbol)
                self.symbols[str(expression)] = self._as_multiple(expression, Dim.of(symbol))
                self.sources[position, dim] = symbol
        for position, dim, expression in compound:
            self.derive(position, dim, expression)
        for (position, dim), symbol in self.sources.items():
            number = symbolic_sizes(users[position].meta["val"])[dim].node
            if number.has_hint():
                self.importer.bounds.hints[symbol] = int(number.hint)
        for name, expression in related.items():
            size, upper = self.size(expression), self.range(name)[1]
            self.symbols[str(name)] = size
            if upper is not None:
                self.importer.constrain(Guard(size, "<=", upper, True))

    def _related(self) -> dict[Any, Any]:
        """Symbols that a condition says to equal an expression over others, so that sizes that are
        equal are so whatever the bounds are."""
        import sympy

        found: dict[Any, Any] = {}
        used: set[Any] = set()
        for condition in self.conditions or ():
            if not isinstance(condition, sympy.Eq):
                continue
            for name, other in (condition.args, condition.args[::-1]):
                free = other.free_symbols
                if (
                    name.is_Symbol
                    and not (other.is_Symbol or other.is_Integer)
                    and not free & {name, *found}
                    and name not in used | found.keys()
                ):
                    found[name] = other
                    used |= free
        return found

    def derive(self, position: int, dim: int, expression: Any) -> None:
        """A size of an input that is an expression over symbols, such as twice another one."""
        size_ = self.wanted(position, dim)
        unknown = [s for s in expression.free_symbols if str(s) not in self.symbols]
        if isinstance(size_, int):
            number: Size = size_
        else:
            if unknown:
                upper = self._bound_of(expression, unknown)
            else:
                upper = _dims.upper(self.size(expression))
            name = self.dim_names.get((position, dim)) or f"size_{position}_{dim}"
            upper = max(upper, 1, 0 if size_ is None else size_.upper or 0)
            symbol = self.sources[position, dim] = Symbol(name, upper)
            number = Dim.of(symbol)
            if self.bounded and any(self.range(s)[1] is None for s in expression.free_symbols):
                self.importer.ranges[symbol] = (0, None)
        if unknown:
            self._solve(expression, unknown, number)
        self.derived[position, dim] = number
        self.importer.constrain(Guard(number, "==", self.size(expression), True))
        # If a size is an expression, torch decides more from the traced sizes, without a guard.
        compound = () if expression.is_Symbol else expression.free_symbols
        for compound_size in sorted(compound, key=str):
            traced = self._traced_from(compound_size)
            if traced > 0:
                self.importer.constrain(Guard(self.size(compound_size), ">=", traced, True))

    def decisions(self) -> Iterator[Guard]:
        """What torch decided from sizes of the example inputs, as guards over the symbols."""
        plain = {**self.symbols, **self._plain}
        for condition in self.conditions or ():
            try:
                with self.scope():
                    self.symbols = plain
                    guards = tuple(relations(condition, self.size))
                yield from guards
            except UnsupportedProgramError:
                # A decision that has no form here. Only the example's sizes are known to keep it.
                for symbol in sorted(condition.free_symbols, key=str):
                    if str(symbol) in self.symbols:
                        yield Guard(self.symbols[str(symbol)], "==", self.hint(symbol), True)

    def _as_multiple(self, expression: Any, size: Dim) -> Size:
        """A size of which the conditions leave the values a, a + k, a + 2k, ..., written as
        `(size - a) // k * k + a`, so that what torch decided from them needs no guard."""
        import sympy

        tests = [
            condition
            for condition in self.conditions or ()
            if condition.free_symbols == {expression}
            and not condition.atoms(sympy.Rel) - condition.atoms(sympy.Eq)
        ]
        divisors = [
            atom.args[1]
            for test in tests
            for atom in test.atoms(sympy.Function)
            if type(atom).__name__ in _DIVISIONS
        ]
        period = math.lcm(*(int(divisor) for divisor in divisors if divisor.is_Integer))
        if not 1 < period <= _MOST_TESTED:
            return size
        # A condition that repeats says which remainders are left; another one is no such condition.
        windows = [range(period * start, period * (start + 1)) for start in (64, 1000)]
        left = set(range(period))
        for test in tests:
            solutions = [
                {value % period for value in window if test.subs(expression, value) == True}  # noqa: E712
                for window in windows
            ]
            if solutions[0] == solutions[1]:
                left &= solutions[0]
        first, step = min(left, default=0), period // max(len(left), 1)
        if step == 1 or left != set(range(first, period, step)):
            return size
        return (size - first) // step * step + first

    def _bound_of(self, expression: Any, unknown: Sequence[Any]) -> int:
        largest = {s: self.range(s)[1] or max(64, self.hint(s)) for s in unknown}
        uppers = {s: _dims.upper(self.size(s)) for s in expression.free_symbols - set(unknown)}
        return int(expression.subs({**largest, **uppers}))

    def _solve(self, expression: Any, unknown: Sequence[Any], number: Size) -> None:
        """Finds the symbol of an affine expression from the value of the expression."""
        import sympy

        symbol = unknown[0]
        plain = expression.is_polynomial(symbol) and sympy.degree(expression, symbol) == 1
        if len(unknown) > 1 or not plain:
            raise UnsupportedProgramError(
                f"size {expression} cannot be followed",
                where=self.importer.where,
                why=f"no input has {unknown[0]} as a size of its own",
            )
        factor = self.size(expression.coeff(symbol, 1))
        constant = self.size(expression.coeff(symbol, 0))
        solved_size = self.symbols[str(symbol)] = (number - constant) // factor
        lower, upper = self.range(symbol)
        if lower is not None and lower > 0:
            self.importer.constrain(Guard(solved_size, ">=", lower, True))
        if upper is not None:
            self.importer.constrain(Guard(solved_size, "<=", upper, True))

    def input_size(self, position: int, dim: int, size: Any) -> Size:
        """A size of an input, as an expression over the symbols of other sizes if it has one."""
        number = self.derived.get((position, dim))
        expression = self.size(size.node.expr)
        if number is None or _dims.symbols(expression) - _dims.symbols(number):
            return expression
        return number

    def _symbol(
        self, expression: Any, wider: int | None, name: str | None = None, is_size: bool = True
    ) -> Symbol:
        lower, upper = self.range(expression)
        label = name or str(expression)
        if not is_size:
            symbol = self.integer(expression, label)
        else:
            # Without a bound, memory is planned for the example's size, rounded up. A larger call
            # is lowered again.
            rounded = self.rounded(expression)
            if upper is None:
                planned = rounded
            else:
                planned = min(upper, rounded) if self.decided(expression, upper) else upper
            # torch traces for sizes of 2 and more. A smaller one within the bounds gets a lowering
            # of its own.
            traced = max(lower or 0, self._traced_from(expression))
            symbol = Symbol(label, max(planned, wider or 0), min(traced, planned))
            if self.exact and traced > (lower or 0):
                self.importer.constrain(Guard(Dim.of(symbol), ">=", traced, True))
        if self.bounded:
            # For an integer that is no size, torch states 0 if it knows no bound. Kernels take 32
            # bits.
            least = lower or 0 if is_size or lower else -_dims.UNBOUNDED
            most = _dims.UNBOUNDED if upper is None and not is_size else upper
            self.importer.ranges[symbol] = (least, most)
        return symbol

    def _traced_from(self, expression: Any) -> int:
        """The smallest size that torch traced for. A program that `torch.export.load` has read does
        not say it any more, but torch takes 0 and 1 for constants."""
        if self.bounded and self.hint(expression) < 2:
            return 0
        for environment in environments(self.program.graph.find_nodes(op="placeholder")):
            bounds = environment.var_to_range.get(expression)
            if bounds is not None and bounds.lower.is_Integer:
                return max(int(bounds.lower), 2 if self.bounded else 0)
        return 0

    def integer(self, expression: Any, label: str) -> Symbol:
        """The symbol of an integer of a call that is no size. torch states 0 as its lower bound if it
        knows none."""
        lower = self.range(expression)[0] or -_dims.UNBOUNDED
        if lower < 0 and any(
            condition.free_symbols == {expression} and condition.subs(expression, -1) == False  # noqa: E712
            for condition in self.conditions or ()
        ):
            lower = 0
        return Symbol(label, lower=lower, is_size=False)

    def _plan(self, users: Sequence[Any]) -> None:
        """Finds what memory is planned for, for sizes without a bound."""
        examples = [None if node is None else node.meta.get("val") for node in users]
        symbols = {
            size.node.expr
            for example in examples
            for size in symbolic_sizes(example)
            if not isinstance(size, int) and size.node.expr.is_Symbol
        }
        hints = {symbol: self.hint(symbol) for symbol in symbols}
        self._planned = next(planned_sizes(hints, functools.partial(bytes_of, examples)))

    def rounded(self, symbol: Any) -> int:
        """What memory is planned for, for a size without a bound."""
        return (self._planned or {}).get(symbol, ROUNDED)

    def decided(self, symbol: Any, upper: int) -> bool:
        """Whether a bound follows from what the module decided, such as `x.numel() < 2**31`, and not
        from a declaration. Calls do not come near such a bound."""
        import sympy

        return any(
            sympy.simplify(guard.expr.xreplace({symbol: sympy.Integer(upper + 1)})) == sympy.false
            for environment in environments(self.program.graph.find_nodes(op="placeholder"))
            for guard in environment.guards
            if guard.expr.free_symbols == {symbol}
        )

    def sizes_depend_on(self, symbol: Any) -> bool:
        """Whether the sizes of a tensor depend on a symbol."""
        for node in self.program.graph.nodes:
            examples = node.meta.get("val")
            for example in examples if isinstance(examples, (list, tuple)) else (examples,):
                for size in getattr(example, "shape", ()):
                    if not isinstance(size, int) and symbol in size.node.expr.free_symbols:
                        return True
        return False

    def hint(self, expression: Any) -> int:
        for node in self.program.graph.nodes:
            value = node.meta.get("val")
            for size in getattr(value, "shape", ()):
                if (
                    not isinstance(size, int)
                    and size.node.expr == expression
                    and size.node.has_hint()
                ):
                    return int(size.node.hint)
        return 64

    def size(self, expression: Any) -> Size:
        """A sympy expression as a size."""
        size: Size = self.importer.equalities.rewritten(self._read(expression))
        return size

    def _read(self, expression: Any) -> Size:
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            if str(expression) not in self.symbols:
                raise UnsupportedProgramError(
                    f"size {expression} is known only from data",
                    where=self.importer.where,
                    why="no input has it as a size of its own",
                )
            return self.symbols[str(expression)]
        if is_rounded(expression):
            if str(expression) in self.symbols:
                return self.symbols[str(expression)]
            ratios = Ratios(self.size)
            rounded_size = ratios.rounded(expression)
            for guard in ratios.limits:
                if not all(symbol.is_size and not symbol.unbacked for symbol in guard.symbols):
                    raise UnsupportedProgramError(
                        f"size {expression} cannot be followed",
                        where=self.importer.where,
                        why=f"integers give the same only for {guard}, which follows from data",
                    )
                self.importer.constrain(guard)
            return rounded_size
        kind = type(expression).__name__
        if kind == "Piecewise":
            rounded_size = 0
            for value, condition in reversed(expression.args):
                rounded_size = rounded_size + self._truth(condition) * (
                    self.size(value) - rounded_size
                )
            return rounded_size
        args = [self.size(arg) for arg in expression.args]
        if kind in ("Add", "Mul"):
            total = args[0]
            for arg in args[1:]:
                total = total + arg if kind == "Add" else total * arg
            return total
        if kind in ("FloorDiv", "CleanDiv"):
            return args[0] // args[1]
        if kind in ("Mod", "PythonMod"):
            return args[0] % args[1]
        if kind in ("Max", "Min"):
            return functools.reduce(_dims.maximum if kind == "Max" else _dims.minimum, args)
        if kind == "Abs":
            return _dims.maximum(args[0], -args[0])
        if kind == "Pow" and isinstance(args[1], int):
            return _dims.product([args[0]] * args[1])
        if kind in _STEPS:
            size: Size = of_sizes(_STEPS[kind], *args)
            return size
        raise UnsupportedProgramError(
            f"size {expression} cannot be followed", where=self.importer.where
        )

    def _truth(self, condition: Any) -> Size:
        """A condition in sympy as 1 or 0."""
        import sympy

        if isinstance(condition, sympy.Rel):
            sides = self.size(condition.lhs), self.size(condition.rhs)
            return Relation(sides[0], condition.rel_op, sides[1]).truth
        parts = [self._truth(arg) for arg in condition.args]
        if isinstance(condition, sympy.Not):
            return 1 - parts[0]
        if isinstance(condition, sympy.And):
            return functools.reduce(_dims.minimum, parts)
        if isinstance(condition, sympy.Or):
            return functools.reduce(_dims.maximum, parts)
        if condition in (sympy.true, sympy.false):
            return int(bool(condition))
        raise UnsupportedProgramError(
            f"the condition {condition} cannot be followed", where=self.importer.where
        )

    def range(self, expression: Any) -> tuple[int | None, int | None]:
        """The bounds of a symbol, from `torch._check` or from how it was made."""
        bounds = self.program.range_constraints.get(expression)
        positions: list[int | None] = []
        for name in ("lower", "upper"):
            try:
                number = int(getattr(bounds, name))
            except (TypeError, ValueError, OverflowError, AttributeError):
                number = None
            positions.append(None if number is None or abs(number) >= _dims.UNBOUNDED else number)
        return positions[0], positions[1]


def symbolic_sizes(example: Any) -> Sequence[Any]:
    """The sizes of an example input. A symbolic integer counts as a size."""
    import torch

    if isinstance(example, torch.Tensor):
        return tuple(example.shape)
    return (example,) if isinstance(example, torch.SymInt) else ()


def bytes_of(examples: Sequence[Any], sizes: Mapping[Any, int]) -> list[int]:
    """The bytes of example inputs, where torch's symbols have other values than in the example."""
    import torch

    def number(size: Any) -> int:
        found = size if isinstance(size, int) else size.node.expr.subs(sizes)
        return int(found) if isinstance(found, int) or found.is_Integer else 1

    return [
        example.element_size() * math.prod(map(number, example.shape))
        for example in examples
        if isinstance(example, torch.Tensor)
    ]


def solved(left: Size, right: Size, symbols: Sequence[Symbol]) -> dict[Symbol, Size] | None:
    """The last of the symbols that follow from data, as an expression over the others, where two
    sizes are equal. None: no such symbol stands alone, or the expression has wider bounds."""
    difference = left - right
    terms = difference.terms if isinstance(difference, Dim) else ()
    for symbol in reversed(symbols):
        factor = dict(terms).get((symbol,), 0)
        if (symbol.unbacked or not symbol.is_size) and abs(factor) == 1:
            remainder = difference - factor * Dim.of(symbol)
            solution = -factor * remainder
            if symbol not in _dims.symbols(solution) and _dims.upper(solution) <= symbol.upper:
                return {symbol: solution}
    return None
