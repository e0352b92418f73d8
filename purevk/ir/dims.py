"""Sizes that may be known only at a call: integers, or expressions over symbols with an upper
bound.

A size is an `int` wherever it is known; otherwise a `Dim`, an integer polynomial over atoms
(symbols, floor divisions, remainders, minima and maxima) in a normal form, so that equal
expressions are equal objects of Python too.

A comparison that the bounds cannot settle is answered for the *hint* (the value at the symbols'
upper bounds), and the answer is kept as a `Guard` by the innermost `GuardLog`. Whoever built
something under such answers checks the guards against the sizes of a call, and builds anew for
sizes that break one.
"""

from __future__ import annotations

import contextvars
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from purevk.ir import intervals as _intervals
from purevk.ir.expected import expected
from purevk.ir.intervals import Range
from purevk.plain_text import printable

UNBOUNDED = 2**31 - 1
_INT64 = 2**63 - 1

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """A size that stays dynamic, with an upper bound of its own (None: there is none)."""

    upper: int | None


@dataclass(frozen=True)
class Symbol:
    """A name for an integer that a call brings, within [lower, upper].

    Attributes:
        is_size: False for values such as a position.
        unbacked: its value is known only during a call, such as how many elements of a mask are true.
        open: `upper` is a guess that a call may exceed; the method is then lowered again for more.
        open_below: `lower` is such a guess.
    """

    name: str
    upper: int = UNBOUNDED
    lower: int = 0
    is_size: bool = True
    unbacked: bool = False
    open: bool = False
    open_below: bool = False

    @property
    def hint(self) -> int:
        """The value that open comparisons are answered for."""
        return (self.lower + self.upper) // 2 if self.open_below else self.upper

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and largest value. A number without a bound may have 64 bits."""
        if self.is_size:
            return self.lower, self.upper
        lower = -_INT64 if self.lower == -UNBOUNDED else self.lower
        return lower, _INT64 if self.upper == UNBOUNDED else self.upper

    def __hash__(self) -> int:
        return hash(self.name)  # a call looks values up by symbols

    def __repr__(self) -> str:
        return printable(self.name)


@dataclass(frozen=True)
class _Function:
    """An atom that is no polynomial: a function of two sizes; see `apply`."""

    kind: str
    left: Size
    right: Size

    def __repr__(self) -> str:
        if self.kind.isalpha():
            return f"{self.kind}({self.left}, {self.right})"
        bare = _is_atom(self.left) if self.kind == "**" else not _is_sum(self.left)
        left = f"{self.left}" if bare else f"({self.left})"
        right = f"{self.right}" if _is_atom(self.right) else f"({self.right})"
        return f"({left} {self.kind} {right})"


_Atom = Symbol | _Function


@dataclass(frozen=True)
class Guard:
    """The answer given to a comparison that sizes at a call must repeat."""

    left: Size
    op: str
    right: Size
    answer: bool

    @property
    def symbols(self) -> set[Symbol]:
        """The symbols that the answer depends on."""
        return symbols(self.left) | symbols(self.right)

    def holds(self, env: Mapping[Symbol, int]) -> bool:
        return _COMPARE[self.op](evaluate(self.left, env), evaluate(self.right, env)) == self.answer

    def explain(self, env: Mapping[Symbol, int]) -> str:
        """What sizes have to fulfil, and what they are, as text."""
        values = ", ".join(f"{symbol} = {env[symbol]}" for symbol in sorted(self.symbols, key=str))
        sides = f"{evaluate(self.left, env)} and {evaluate(self.right, env)}"
        return f"{self} is expected; in this call the sides are {sides}" + (
            f", with {values}" if values else ""
        )

    def __str__(self) -> str:
        return (
            f"{self.left} {self.op} {self.right}"
            if self.answer
            else f"not ({self.left} {self.op} {self.right})"
        )


_log: contextvars.ContextVar[GuardLog | None] = contextvars.ContextVar("guards", default=None)


class GuardLog:
    """Collects, while entered, the guards of every comparison answered from hints."""

    def __init__(self) -> None:
        self.guards: dict[Guard, None] = {}

    def __enter__(self) -> GuardLog:
        self._token = _log.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _log.reset(self._token)


class Dim:
    """An integer expression over at least one symbol. Made by arithmetic on
    `Dim.of(Symbol(...))`."""

    __slots__ = ("_hash", "_range", "_terms")

    def __init__(self, terms: tuple[tuple[tuple[_Atom, ...], int], ...]) -> None:
        self._terms = terms
        self._hash = hash(terms)
        self._range: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Dim, (self._terms,)  # a hash of names is another one in each process

    @staticmethod
    def of(symbol: Symbol) -> Dim:
        return Dim((((symbol,), 1),))

    # -- arithmetic -------------------------------------------------------------------------------
    def __add__(self, other: Size) -> Size:
        terms = dict(self._terms)
        for atoms, factor in _terms(other):
            terms[atoms] = terms.get(atoms, 0) + factor
        return _build(terms)

    __radd__ = __add__

    def __neg__(self) -> Size:
        return _build({atoms: -factor for atoms, factor in self._terms})

    def __sub__(self, other: Size) -> Size:
        return self + (-other)

    def __rsub__(self, other: Size) -> Size:
        return -self + other

    def __mul__(self, other: Size) -> Size:
        terms: dict[tuple[_Atom, ...], int] = {}
        for left, a in self._terms:
            for right, b in _terms(other):
                key = tuple(sorted(left + right, key=repr))
                terms[key] = terms.get(key, 0) + a * b
        return _build(terms)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        return _floordiv(self, other)

    def __rfloordiv__(self, other: Size) -> Size:
        return _floordiv(other, self)

    def __mod__(self, other: Size) -> Size:
        return _mod(self, other)

    def __rmod__(self, other: Size) -> Size:
        return _mod(other, self)

    # -- comparison -------------------------------------------------------------------------------
    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Dim) and other._terms == self._terms:
            return True
        if not isinstance(other, (int, Dim)):
            return NotImplemented
        return _decide(self, "==", other)

    def __ne__(self, other: object) -> bool:
        answer = self.__eq__(other)
        return answer if answer is NotImplemented else not answer

    def __lt__(self, other: Size) -> bool:
        return _decide(self, "<", other)

    def __le__(self, other: Size) -> bool:
        return _decide(self, "<=", other)

    def __gt__(self, other: Size) -> bool:
        return _decide(self, ">", other)

    def __ge__(self, other: Size) -> bool:
        return _decide(self, ">=", other)

    def __bool__(self) -> bool:
        return not _decide(self, "==", 0)

    def __index__(self) -> int:
        raise TypeError(f"size {self} is known only at a call; use dims.upper() or dims.evaluate()")

    __int__ = __index__

    # -- reading ----------------------------------------------------------------------------------
    @property
    def terms(self) -> tuple[tuple[tuple[_Atom, ...], int], ...]:
        """The sum's products: (atoms, factor). An atom is a `Symbol`, or has a `kind` (see
        `apply`), `left` and `right`."""
        return self._terms

    def __repr__(self) -> str:
        parts = []
        for atoms, factor in self._terms:
            body = "*".join(map(repr, atoms))
            if not atoms:
                parts.append(str(factor))
            elif factor == 1:
                parts.append(body)
            else:
                parts.append(f"{factor}*{body}")
        return " + ".join(parts).replace("+ -", "- ")


Size = int | Dim


def _is_sum(value: Size) -> bool:
    return isinstance(value, Dim) and len(value.terms) > 1


def _is_atom(value: Size) -> bool:
    if not isinstance(value, Dim):
        return value >= 0
    ((atoms, factor), *others) = value.terms
    return not others and factor == 1 and len(atoms) == 1


def _terms(value: Size) -> Iterable[tuple[tuple[_Atom, ...], int]]:
    return value._terms if isinstance(value, Dim) else (((), operator.index(value)),)


def _build(terms: dict[tuple[_Atom, ...], int]) -> Size:
    nonzero = {atoms: factor for atoms, factor in terms.items() if factor}
    if not nonzero:
        return 0
    if len(nonzero) == 1 and () in nonzero:
        return nonzero[()]
    return Dim(tuple(sorted(nonzero.items(), key=lambda item: (not item[0], repr(item[0])))))


def _atom(kind: str, left: Size, right: Size) -> Dim:
    return Dim((((_Function(kind, left, right),), 1),))


def _floordiv(left: Size, right: Size) -> Size:
    if isinstance(left, int) and isinstance(right, int):
        return left // right
    if isinstance(right, int):
        if right == 1:
            return left
        # a*k*x + rest divides exactly in its multiples of k: floor((k*p + r) / k) = p + floor(r /
        # k).
        whole = {atoms: factor // right for atoms, factor in _terms(left) if factor % right == 0}
        rest = {atoms: factor for atoms, factor in _terms(left) if factor % right}
        if whole:
            remainder = _build(rest)
            return _build(whole) + (
                _floordiv(remainder, right)
                if not isinstance(remainder, int)
                else remainder // right
            )
    if isinstance(left, Dim) and isinstance(right, Dim):
        if left._terms == right._terms:
            return 1
        quotient = _divide_exactly(left, right)
        if quotient is not None:
            return quotient
    return _atom("//", left, right)


def _divide_exactly(left: Dim, right: Dim) -> Size | None:
    """left / right where right, taken as a polynomial in its atoms, divides left."""
    leading = max(right._terms, key=_degree)
    result: dict[tuple[_Atom, ...], int] = {}
    remainder: Size = left
    while isinstance(remainder, Dim) or remainder:
        atoms, factor = max(_terms(remainder), key=_degree)
        remaining = list(atoms)
        if factor % leading[1]:
            return None
        for atom in leading[0]:
            if atom not in remaining:
                return None
            remaining.remove(atom)
        part = tuple(remaining), factor // leading[1]
        result[part[0]] = part[1]
        remainder = remainder - right * Dim((part,)) if part[0] else remainder - right * part[1]
    return _build(result)


def _degree(term: tuple[tuple[_Atom, ...], int]) -> tuple[int, list[str]]:
    """The order of a polynomial's terms: by degree, then by names. Products keep it."""
    return len(term[0]), [repr(atom) for atom in term[0]]


def _mod(left: Size, right: Size) -> Size:
    if isinstance(left, int) and isinstance(right, int):
        return left % right
    quotient = _floordiv(left, right)
    atoms = {atom for atoms, _ in _terms(left) for atom in atoms}
    if any(
        isinstance(atom, _Function) and atom.kind == "//" and atom not in atoms
        for product, _ in _terms(quotient)
        for atom in product
    ):
        return _atom("%", left, right)
    return left - quotient * right


Ranges = Mapping[Symbol, Range]


def _range_of_atom(atom: _Atom, ranges: Ranges) -> tuple[int, int]:
    if isinstance(atom, Symbol):
        return ranges.get(atom) or atom.range
    sides = range_within(atom.left, ranges), range_within(atom.right, ranges)
    return _FUNCTIONS[atom.kind].range_of(*sides)


def range_of(size: Size) -> tuple[int, int]:
    """Smallest and largest value that the symbols' bounds allow (conservative)."""
    if not isinstance(size, Dim):
        return size, size
    if size._range is None:
        size._range = range_within(size, {})
    return size._range


def range_within(size: Size, ranges: Ranges) -> tuple[int, int]:
    """As `range_of`, some symbols having other bounds than their own."""
    if not isinstance(size, Dim):
        return size, size
    if not ranges and size._range is not None:
        return size._range
    low = high = 0
    for atoms, factor in size._terms:
        a, b = factor, factor
        for atom in atoms:
            c, d = _range_of_atom(atom, ranges)
            corners = (a * c, a * d, b * c, b * d)
            a, b = min(corners), max(corners)
        low, high = low + a, high + b
    return low, high


def upper(size: Size) -> int:
    """The largest value that `size` can take."""
    return range_of(size)[1]


def hint(size: Size) -> int:
    """The value at the symbols' upper bounds, from which open comparisons are answered."""
    return evaluate(size, _Hints())


def specialize(size: Size) -> int:
    """The hint of `size`, with a guard that a call must bring this very number: for what cannot be
    an expression, such as how many results a node has."""
    number = hint(size)
    if isinstance(size, Dim):
        _decide(size, "==", number)
    return number


class _Hints(dict[Symbol, int]):
    def __missing__(self, symbol: Symbol) -> int:
        bounds = expected(symbol.name)
        return symbol.hint if bounds is None else bounds.hint


def evaluate(size: Size, env: Mapping[Symbol, int]) -> int:
    """The value of `size` where each symbol has the value that `env` gives it."""
    if not isinstance(size, Dim):
        return size
    total = 0
    for atoms, factor in size._terms:
        for atom in atoms:
            factor *= env[atom] if isinstance(atom, Symbol) else _evaluate_function(atom, env)
        total += factor
    return total


def _evaluate_function(atom: _Function, env: Mapping[Symbol, int]) -> int:
    return _FUNCTIONS[atom.kind].of_integers(evaluate(atom.left, env), evaluate(atom.right, env))


def symbols(size: Size) -> set[Symbol]:
    """The symbols that `size` depends on."""
    if not isinstance(size, Dim):
        return set()
    symbols_: set[Symbol] = set()
    for atoms, _ in size._terms:
        for atom in atoms:
            if isinstance(atom, Symbol):
                symbols_.add(atom)
            else:
                symbols_ |= symbols(atom.left) | symbols(atom.right)
    return symbols_


def _decide(left: Size, op: str, right: Size) -> bool:
    known = settled(left, op, right)
    if known is not None:
        return known
    answer = _COMPARE[op](hint(left - right), 0)
    note(Guard(left, op, right, answer))
    return answer


def settled(left: Size, op: str, right: Size) -> bool | None:
    """The answer to a comparison, where the bounds settle it."""
    difference = left - right if isinstance(left, Dim) else -(right - left)
    low, high = range_of(difference)
    at_low, at_high = _COMPARE[op](low, 0), _COMPARE[op](high, 0)
    if op in ("<", "<=", ">", ">="):
        return at_low if at_low == at_high else None
    if low == high:
        return at_low
    apart = isinstance(difference, Dim) and _differs_unless_special(difference)
    return op == "!=" if low > 0 or high < 0 or apart else None


def decided_symbols() -> set[Symbol]:
    """The symbols of the guards that the innermost `GuardLog` has collected."""
    log = _log.get()
    return set() if log is None else set().union(*(guard.symbols for guard in log.guards))


def note(guard: Guard) -> None:
    """Has the innermost `GuardLog` collect a guard."""
    log = _log.get()
    if log is not None:
        log.guards[guard] = None


def assume(left: Size, op: str, right: Size) -> bool:
    """Whether a comparison holds. If the bounds leave it open, it is taken to hold, with a guard."""
    answer = settled(left, op, right)
    if answer is None:
        note(Guard(left, op, right, True))
    return answer is not False


def ask(guard: Guard) -> bool:
    """Makes a guard's comparison again, so that it is noted, and says whether the answer is still
    the same."""
    return _decide(guard.left, guard.op, guard.right) == guard.answer


def substitute(size: Size, mapping: Mapping[Symbol, Size]) -> Size:
    """`size` with symbols replaced by sizes; those that `mapping` lacks stay."""
    total: Size = 0
    for atoms, factor in _terms(size):
        part: Size = factor
        for atom in atoms:
            if isinstance(atom, Symbol):
                part = part * mapping.get(atom, Dim.of(atom))
            else:
                part = part * apply(
                    atom.kind, substitute(atom.left, mapping), substitute(atom.right, mapping)
                )
        total = total + part
    return total


def apply(kind: str, left: Size, right: Size) -> Size:
    """`//`, `%`, `min`, `max`, `**`, `&` or `|` of two sizes."""
    return _FUNCTIONS[kind].of_sizes(left, right)


def _differs_unless_special(difference: Dim) -> bool:
    """Whether a difference is 0 only where a symbol that no input has as a size is 0 or 1. Such
    sizes are treated as any other, which gives the same results (torch.export traces its programs
    under the same rule)."""
    candidates = [symbol for symbol in symbols(difference) if symbol.unbacked or not symbol.is_size]
    if not candidates:
        return False
    low, high = range_within(
        difference, {symbol: (2, max(symbol.upper, 2)) for symbol in candidates}
    )
    return low > 0 or high < 0


def is_static(size: Size) -> bool:
    return not isinstance(size, Dim)


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def ceil_div(left: Size, right: Size) -> Size:
    """left / right rounded up. Both are positive."""
    return (
        -((-left) // right)
        if isinstance(left, int) and isinstance(right, int)
        else (left + (right - 1)) // right
    )


def align(size: Size, multiple: int) -> Size:
    """`size` rounded up to a multiple."""
    return ceil_div(size, multiple) * multiple


def minimum(left: Size, right: Size) -> Size:
    """The smaller of two sizes, as an expression where the bounds leave it open."""
    if isinstance(left, int) and isinstance(right, int):
        return min(left, right)
    (a, b), (c, d) = range_of(left), range_of(right)
    if b <= c:
        return left
    if d <= a:
        return right
    return _atom("min", left, right)


def maximum(left: Size, right: Size) -> Size:
    """The larger of two sizes, as an expression where the bounds leave it open."""
    if isinstance(left, int) and isinstance(right, int):
        return max(left, right)
    (a, b), (c, d) = range_of(left), range_of(right)
    if a >= d:
        return left
    if c >= b:
        return right
    return _atom("max", left, right)


def power(base: Size, exponent: Size) -> Size:
    """`base ** exponent`, where the exponent is at least 0."""
    if isinstance(exponent, int):
        return (
            product([base] * exponent)
            if isinstance(base, Dim)
            else _intervals.power(base, exponent)
        )
    return _atom("**", base, exponent)


def bitwise_and(left: Size, right: Size) -> Size:
    """`left & right`."""
    return (
        left & right
        if isinstance(left, int) and isinstance(right, int)
        else _bits("&", left, right)
    )


def bitwise_or(left: Size, right: Size) -> Size:
    """`left | right`."""
    return (
        left | right
        if isinstance(left, int) and isinstance(right, int)
        else _bits("|", left, right)
    )


def _bits(kind: str, left: Size, right: Size) -> Size:
    return _atom(kind, *sorted((left, right), key=repr))


class _Kind(NamedTuple):
    """A function of two sizes: on integers, on sizes, and its range from those of its operands."""

    of_integers: Callable[[int, int], int]
    of_sizes: Callable[[Size, Size], Size]
    range_of: Callable[[Range, Range], Range]


_FUNCTIONS = {
    "//": _Kind(operator.floordiv, operator.floordiv, _intervals.of_quotient),
    "%": _Kind(operator.mod, operator.mod, _intervals.of_remainder),
    "min": _Kind(
        min, minimum, lambda left, right: (min(left[0], right[0]), min(left[1], right[1]))
    ),
    "max": _Kind(
        max, maximum, lambda left, right: (max(left[0], right[0]), max(left[1], right[1]))
    ),
    "**": _Kind(_intervals.power, power, _intervals.of_power),
    "&": _Kind(operator.and_, bitwise_and, _intervals.of_bits),
    "|": _Kind(operator.or_, bitwise_or, _intervals.of_bits),
}


def gcd_of(size: Size) -> int:
    """A number that divides `size` whatever the symbols are."""
    return math.gcd(*(factor for _, factor in _terms(size)))
