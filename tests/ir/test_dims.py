"""Sizes that only a call knows: their arithmetic agrees with integers, and guards say what was
taken for granted."""

from __future__ import annotations

import operator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from purevk.ir import Dim, Guard, GuardLog, Relation, Symbol, dims

SYMBOLS = [Symbol("s0", 128, 2), Symbol("s1", 17), Symbol("s2", 64, 1), Symbol("s3", 64, 2)]
_BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    dims.minimum,
    dims.maximum,
    dims.bitwise_and,
    dims.bitwise_or,
    dims.power,
]
_ON_INTEGERS = {
    dims.minimum: min,
    dims.maximum: max,
    dims.bitwise_and: operator.and_,
    dims.bitwise_or: operator.or_,
    dims.power: operator.pow,
}
_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _operand(op: object, right: object) -> int | None:
    """What replaces a divisor that may be 0 or negative, and an exponent that may be so or large."""
    low, high = dims.range_of(_build(right))
    if op in (operator.floordiv, operator.mod) and low <= 0:
        return 3
    return 2 if op is dims.power and not 0 <= low <= high <= 6 else None


def _trees(depth: int = 3) -> st.SearchStrategy:
    leaf = st.one_of(st.integers(-6, 40), st.sampled_from(SYMBOLS))
    if not depth:
        return leaf
    return st.one_of(
        leaf, st.tuples(st.sampled_from(_BINARY), _trees(depth - 1), _trees(depth - 1))
    )


def _build(tree: object) -> dims.Size:
    if isinstance(tree, Symbol):
        return Dim.of(tree)
    if isinstance(tree, tuple):
        op, left, right = tree
        other = _operand(op, right)
        return op(_build(left), _build(right) if other is None else other)
    return tree


def _number(tree: object, env: dict[Symbol, int]) -> int:
    if isinstance(tree, Symbol):
        return env[tree]
    if isinstance(tree, tuple):
        op, left, right = tree
        other = _operand(op, right)
        other = _number(right, env) if other is None else other
        return _ON_INTEGERS.get(op, op)(_number(left, env), other)
    return tree


ENVS = st.fixed_dictionaries(
    {symbol: st.integers(symbol.lower, symbol.upper) for symbol in SYMBOLS}
)


@given(_trees(), ENVS)
def test_arithmetic_agrees_with_integers(tree: object, env: dict[Symbol, int]) -> None:
    with GuardLog() as log:
        size = _build(tree)
    assert dims.evaluate(size, env) == _number(tree, env) and not log.guards


def test_arithmetic_takes_no_decisions() -> None:
    """Also where two functions have the same value for the hint."""
    left, right = (Dim.of(Symbol(name, 64, 2)) + 1 for name in ("s0", "s1"))
    halves = left // 2, right // 2
    with GuardLog() as log:
        quotient, rest = halves[0] // halves[1], halves[0] % halves[1]
        product = halves[0] * halves[1] // halves[1]
    assert not log.guards
    assert repr(product) == repr(halves[0])
    env = dict.fromkeys(dims.symbols(quotient), 9) | dict.fromkeys(dims.symbols(right), 2)
    assert (dims.evaluate(quotient, env), dims.evaluate(rest, env)) == (5, 0)


def test_quotients_are_reduced() -> None:
    batch, length = Dim.of(Symbol("batch", 64, 1)), Dim.of(Symbol("length", 99))
    padded = length + (8 - length % 8) % 8
    assert repr(padded * batch * 32 // (batch * 256)) == repr(padded // 8)
    assert repr((length * 6 + 4) // 10) == repr((length * 3 + 2) // 5)
    assert repr(length * batch // length) == repr(batch)  # an exact quotient, also of 0
    assert repr((length * batch + length) // (length * 2)) != repr((batch + 1) // 2)


@given(_trees(), ENVS)
def test_the_range_holds_every_value(tree: object, env: dict[Symbol, int]) -> None:
    low, high = dims.range_of(_build(tree))
    assert low <= _number(tree, env) <= high


@given(_trees(2), ENVS)
def test_the_common_divisor_divides(tree: object, env: dict[Symbol, int]) -> None:
    size = _build(tree)
    divisor = dims.gcd_of(size)
    value = _number(tree, env)
    assert value == 0 if divisor == 0 else value % divisor == 0


@given(_trees(2), _trees(2), st.sampled_from(list(_COMPARE)), ENVS)
def test_a_relation_is_computed_without_a_guard(
    left: object, right: object, op: str, env: dict[Symbol, int]
) -> None:
    with GuardLog() as log:
        relation = Relation(_build(left), op, _build(right))
        truth, opposite, settled = relation.truth, (~relation).truth, relation.settled
    assert not log.guards
    answer = _COMPARE[op](_number(left, env), _number(right, env))
    assert dims.evaluate(truth, env) == answer == 1 - dims.evaluate(opposite, env)
    assert settled is relation or settled is answer
    with pytest.raises(TypeError, match="only at a call"):
        bool(relation)


@given(_trees(2), _trees(2), st.sampled_from(list(_COMPARE.values())), ENVS)
def test_an_answer_is_right_wherever_its_guards_hold(
    left: object, right: object, compare: object, env: dict[Symbol, int]
) -> None:
    a, b = _build(left), _build(right)
    assume(isinstance(a, Dim) or isinstance(b, Dim))
    with GuardLog() as log:
        answer = bool(compare(a, b))
    if all(guard.holds(env) for guard in log.guards):
        assert compare(_number(left, env), _number(right, env)) == answer


@given(_trees(2), _trees(2))
def test_sums_have_one_form(left: object, right: object) -> None:
    a, b = _build(left), _build(right)
    assert repr(a + b) == repr(b + a) and repr(a * b) == repr(b * a)
    assert repr((a + b) - b) == repr(a)


@given(_trees(2), st.integers(1, 9), ENVS)
def test_ceil_div_and_align(tree: object, divisor: int, env: dict[Symbol, int]) -> None:
    value = _number(tree, env)
    assume(dims.range_of(_build(tree))[0] >= 0)
    assert dims.evaluate(dims.ceil_div(_build(tree), divisor), env) == -(-value // divisor)
    assert dims.evaluate(dims.align(_build(tree), divisor), env) == -(-value // divisor) * divisor


@given(_trees(), ENVS)
def test_the_text_means_the_same(tree: object, env: dict[Symbol, int]) -> None:
    """Python computes from the text what purevk computes from the expression."""
    made = _build(tree)
    assume("**" not in str(made) or dims.evaluate(made, env) < 2**63)
    names = {"min": min, "max": max, **{symbol.name: value for symbol, value in env.items()}}
    assert eval(str(made), names) == dims.evaluate(made, env)


def test_an_exact_division_leaves_no_division() -> None:
    s = Dim.of(SYMBOLS[0])
    assert repr((384 * s) // 12) == "32*s0"
    assert repr((384 * s) // (384 * s)) == "1"
    assert repr((s * 4 + 3) // 4) == "s0"
    t = Dim.of(SYMBOLS[1])
    patches = (s // 8) * (t // 8) + 1
    assert (96 * s * patches) // (3 * s * patches) == 32
    assert repr((s * patches * (t + 2)) // patches) == repr(s * (t + 2))
    assert repr((s * s - t * t) // (s + t)) == repr(s - t)
    assert isinstance((32 * patches) % (4 * patches), int)
    assert "//" in repr((s * patches) // (s + 1))
    assert (6 * s) % 3 == 0 and isinstance((6 * s) % 3, int)


def test_bounds_settle_comparisons_without_a_guard() -> None:
    s = Dim.of(SYMBOLS[0])
    with GuardLog() as log:
        assert s != 1 and s > 1 and s < 129 and not s == 200 and s + 1 != s
    assert not log.guards


def test_a_hint_leaves_a_guard() -> None:
    s = Dim.of(SYMBOLS[0])
    with GuardLog() as log:
        assert s == 128
    (guard,) = log.guards
    assert guard.holds({SYMBOLS[0]: 128}) and not guard.holds({SYMBOLS[0]: 5})


def test_a_size_known_only_at_a_call_is_no_integer() -> None:
    with pytest.raises(TypeError, match="known only at a call"):
        range(Dim.of(SYMBOLS[0]))


def test_symbols_are_found_inside_functions() -> None:
    size = dims.maximum(Dim.of(SYMBOLS[0]) // Dim.of(SYMBOLS[1]), 3) * 2
    assert dims.symbols(size) == set(SYMBOLS[:2])


def test_a_broken_guard_is_explained() -> None:
    rows, count = Symbol("s0", 64), Symbol("u0", 64, unbacked=True)
    guard = Guard(0, "<=", Dim.of(rows) * 2 - Dim.of(count), True)
    env = {rows: 3, count: 9}
    assert not guard.holds(env)
    text = guard.explain(env)
    assert str(guard) in text and "0 and -3" in text and text.endswith("with s0 = 3, u0 = 9")
    assert Guard(0, "<", 0, True).explain({}).endswith("0 and 0")


def test_the_range_of_parts_of_a_size() -> None:
    """Parts that halve a size until it fits end: the size cancels in the last part."""
    n = Dim.of(Symbol("n", 1 << 20))
    assert dims.range_of(n - n // 2) == (0, 1 << 19)
    assert dims.upper(n * 2 // 3 - n // 3) <= -(-(1 << 20) // 3)
    assert dims.range_of(dims.align(n, 8) - n) == (0, 7)
    assert dims.range_of(n - n // 2 - n // 2) == (0, 1)
