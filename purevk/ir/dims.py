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
from typing import Any, Protocol

from purevk.errors import ShapeError
from purevk.ir import intervals as _intervals
from purevk.ir import polynomials
from purevk.ir.expected import expected
from purevk.ir.intervals import Range
from purevk.ir.symbols import UNBOUNDED as UNBOUNDED
from purevk.ir.symbols import Symbol

COMPARE: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class _Function:
    """An atom that is no polynomial: a function of two sizes; see `apply`. Two are equal if they are
    written alike: comparing their sizes would take decisions, and arithmetic takes none."""

    kind: str
    left: Size
    right: Size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and self._form() == other._form()

    def _form(self) -> tuple[object, ...]:
        return self.kind, _terms(self.left), _terms(self.right)

    @property
    def parts(self) -> int:
        return 1 + sum(side.parts for side in (self.left, self.right) if isinstance(side, Dim))

    def __repr__(self) -> str:
        if self.kind.isalpha():
            return f"{self.kind}({self.left}, {self.right})"
        bare = _is_atom(self.left) if self.kind == "**" else not _is_sum(self.left)
        left = f"{self.left}" if bare else f"({self.left})"
        right = f"{self.right}" if _is_atom(self.right) else f"({self.right})"
        return f"({left} {self.kind} {right})"


_Atom = Symbol | _Function


class Dim:
    """An integer expression over at least one symbol. Made by arithmetic on
    `Dim.of(Symbol(...))`. Raises `ShapeError` if it is larger than `polynomials.MOST_PARTS`."""

    __slots__ = ("_hash", "_range", "_terms", "parts")

    def __init__(self, terms: tuple[tuple[tuple[_Atom, ...], int], ...]) -> None:
        self._terms = terms
        self.parts = polynomials.parts(terms)
        self._hash = hash(terms)
        self._range: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Dim, (self._terms,)  # a hash of names is another one in each process

    @staticmethod
    def of(symbol: Symbol) -> Dim:
        return Dim((((symbol,), 1),))

    # -- arithmetic -------------------------------------------------------------------------------
    def __add__(self, other: Size) -> Size:
        return _build(polynomials.add(self._terms, _terms(other)))

    __radd__ = __add__

    def __neg__(self) -> Size:
        return _build({atoms: -factor for atoms, factor in self._terms})

    def __sub__(self, other: Size) -> Size:
        return self + (-other)

    def __rsub__(self, other: Size) -> Size:
        return -self + other

    def __mul__(self, other: Size) -> Size:
        return _build(polynomials.multiply(self._terms, _terms(other)))

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
        return decide(self, "==", other)

    def __ne__(self, other: object) -> bool:
        answer = self.__eq__(other)
        return answer if answer is NotImplemented else not answer

    def __lt__(self, other: Size) -> bool:
        return decide(self, "<", other)

    def __le__(self, other: Size) -> bool:
        return decide(self, "<=", other)

    def __gt__(self, other: Size) -> bool:
        return decide(self, ">", other)

    def __ge__(self, other: Size) -> bool:
        return decide(self, ">=", other)

    def __bool__(self) -> bool:
        return not decide(self, "==", 0)

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


def _terms(value: Size) -> tuple[tuple[tuple[_Atom, ...], int], ...]:
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
            return _build(whole) + _build(rest) // right
    if isinstance(left, Dim) and isinstance(right, Dim):
        if left._terms == right._terms:
            return 1
        quotient = polynomials.divide(left._terms, right._terms)
        if quotient is not None:
            return _build(quotient)
    is_positive = lambda atom: _range_of_atom(atom, {})[0] > 0  # noqa: E731
    reduced = polynomials.reduced(_terms(left), _terms(right), is_positive)
    return _floordiv(*map(_build, reduced)) if reduced else _atom("//", left, right)


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


def _range_of_atom(atom: _Atom, ranges: dict[_Atom, Range]) -> Range:
    if atom not in ranges:
        if isinstance(atom, Symbol):
            ranges[atom] = atom.range
        else:
            sides = _range(atom.left, ranges), _range(atom.right, ranges)
            ranges[atom] = _intervals.FUNCTIONS[atom.kind].range_of(*sides)
    return ranges[atom]


def range_of(size: Size) -> Range:
    """Smallest and largest value that the symbols' bounds allow (conservative)."""
    if not isinstance(size, Dim):
        return size, size
    if size._range is None:
        size._range = _range(size, {})
    return size._range


def range_within(size: Size, ranges: Mapping[Symbol, Range]) -> Range:
    """As `range_of`, some symbols having other bounds than their own."""
    return _range(size, dict(ranges.items()))


def _range(size: Size, ranges: dict[_Atom, Range]) -> Range:
    """Notes the ranges of atoms in `ranges`: a function may be there many times."""
    if not isinstance(size, Dim):
        return size, size
    return _intervals.of_sum(size._terms, lambda atom: _range_of_atom(atom, ranges), _quotient)


def _quotient(atom: _Atom) -> tuple[Iterable[polynomials.Term], int] | None:
    """Dividend and divisor of a floor division by a positive number."""
    if isinstance(atom, _Function) and atom.kind == "//" and isinstance(atom.right, int):
        return (_terms(atom.left), atom.right) if atom.right > 0 else None
    return None


def upper(size: Size) -> int:
    """The largest value that `size` can take."""
    return range_of(size)[1]


def hint(size: Size) -> int:
    """The value at the symbols' upper bounds, from which open comparisons are answered."""
    try:
        return evaluate(size, _Hints())
    except ShapeError:  # a power of a number without a bound
        return upper(size)


def specialize(size: Size) -> int:
    """The hint of `size`, with a guard that a call must bring this very number: for what cannot be
    an expression, such as how many results a node has."""
    number = hint(size)
    if isinstance(size, Dim):
        decide(size, "==", number)
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
    return polynomials.bounded(total)


def _evaluate_function(atom: _Function, env: Mapping[Symbol, int]) -> int:
    return _intervals.FUNCTIONS[atom.kind].of_integers(
        evaluate(atom.left, env), evaluate(atom.right, env)
    )


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


class Notes(Protocol):
    """What takes notes of comparisons; see `purevk.ir.guards.GuardLog`."""

    def note(self, left: Size, op: str, right: Size, answer: bool) -> None: ...


notes: contextvars.ContextVar[Notes | None] = contextvars.ContextVar("notes", default=None)


def _note(left: Size, op: str, right: Size, answer: bool) -> None:
    log = notes.get()
    if log is not None:
        log.note(left, op, right, answer)


def decide(left: Size, op: str, right: Size) -> bool:
    """The answer to a comparison; one for the hint is noted."""
    known = settled(left, op, right)
    if known is not None:
        return known
    answer = COMPARE[op](hint(left - right), 0)
    _note(left, op, right, answer)
    return answer


def settled(left: Size, op: str, right: Size) -> bool | None:
    """The answer to a comparison, where the bounds settle it."""
    difference = left - right if isinstance(left, Dim) else -(right - left)
    low, high = range_of(difference)
    at_low, at_high = COMPARE[op](low, 0), COMPARE[op](high, 0)
    if op in ("<", "<=", ">", ">="):
        return at_low if at_low == at_high else None
    if low == high:
        return at_low
    apart = isinstance(difference, Dim) and _differs_unless_special(difference)
    return op == "!=" if low > 0 or high < 0 or apart else None


def same(left: Size, right: Size) -> bool:
    """Whether two sizes are equal, for those to whom that is a chance and who are right without it:
    sizes that differ for the hint are taken to differ, and no call has to repeat that."""
    known = settled(left, "==", right)
    if known is None:
        return hint(left - right) == 0 and decide(left, "==", right)
    return known


def assume(left: Size, op: str, right: Size) -> bool:
    """Whether a comparison holds. If the bounds leave it open, it is taken to hold, with a guard."""
    answer = settled(left, op, right)
    if answer is None:
        _note(left, op, right, True)
    return answer is not False


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
    return _OF_SIZES[kind](left, right)


def _differs_unless_special(difference: Dim) -> bool:
    """Whether a difference is 0 only where a symbol that no input has as a size is 0 or 1. Such
    sizes are treated as any other, which gives the same results (torch.export traces its programs
    under the same rule). Several numbers that can be negative are no sizes: they may cancel."""
    candidates = [symbol for symbol in symbols(difference) if symbol.unbacked or not symbol.is_size]
    if not candidates or sum(symbol.lower < 0 for symbol in candidates) > 1:
        return False
    bounds = {symbol: (2, max(symbol.upper, 2)) for symbol in candidates}
    low, high = range_within(difference, bounds)
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
    return (left + (right - 1)) // right


def align(size: Size, multiple: int) -> Size:
    """`size` rounded up to a multiple."""
    return ceil_div(size, multiple) * multiple


def minimum(left: Size, right: Size) -> Size:
    """The smaller of two sizes, as an expression where the bounds leave it open."""
    (a, b), (c, d) = range_of(left), range_of(right)
    if b <= c:
        return left
    return right if d <= a else _atom("min", left, right)


def maximum(left: Size, right: Size) -> Size:
    """The larger of two sizes, as an expression where the bounds leave it open."""
    (a, b), (c, d) = range_of(left), range_of(right)
    if a >= d:
        return left
    return right if c >= b else _atom("max", left, right)


def power(base: Size, exponent: Size) -> Size:
    """`base ** exponent`, where the exponent is at least 0."""
    if isinstance(exponent, Dim):
        return _atom("**", base, exponent)
    if not isinstance(base, Dim):
        return _intervals.power(base, exponent)
    root = power(base, exponent // 2) if exponent > 1 else 1
    return root * root * (base if exponent % 2 else 1)


def bitwise_and(left: Size, right: Size) -> Size:
    """`left & right`."""
    return _bits("&", left, right)


def bitwise_or(left: Size, right: Size) -> Size:
    """`left | right`."""
    return _bits("|", left, right)


def _bits(kind: str, left: Size, right: Size) -> Size:
    if isinstance(left, int) and isinstance(right, int):
        return _intervals.FUNCTIONS[kind].of_integers(left, right)
    return _atom(kind, *sorted((left, right), key=repr))


_OF_SIZES: dict[str, Callable[[Size, Size], Size]] = {
    "//": operator.floordiv, "%": operator.mod, "min": minimum, "max": maximum, "**": power,
    "&": bitwise_and, "|": bitwise_or,
}  # fmt: skip


def gcd_of(size: Size) -> int:
    """A number that divides `size` whatever the symbols are."""
    return math.gcd(*(factor for _, factor in _terms(size)))
