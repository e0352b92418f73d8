"""The estimate of how much code an expression becomes."""

from __future__ import annotations

import pytest

from purevk.shaders.code_size import _FunctionSizes, code_size


def test_operations_and_calls_count() -> None:
    assert code_size("x") == 0
    assert code_size("(x * y + z)") == 2
    assert code_size("max(x, sqrt(y))") == 2


@pytest.mark.parametrize(
    "small, large",
    [
        ("x * x", "pv_exp(x)"),
        ("pv_exp(x)", "pv_gelu(x)"),
        ("pv_gelu(x)", "pv_lgamma(x)"),
        ("pv_lgamma(x)", "fn_igamma(a, x)"),
        ("pv_exp(x)", "bf_j0(x)"),
    ],
)
def test_what_a_function_calls_counts(small: str, large: str) -> None:
    """The functions of the includes, and what these call, are part of the size."""
    assert code_size(small) < code_size(large)
    assert code_size(f"{large} + {large}") == 2 * code_size(large) + 1


def test_double_precision_counts_its_own_functions() -> None:
    assert code_size("pv_exp(x)", double=True) > code_size("pv_exp(x)")


def test_the_order_of_questions_does_not_matter() -> None:
    names = ["pv_gelu(x)", "pv_lgamma(x)", "fn_igamma(a, x)", "pv_pow(x, y)", "bf_airy(x)"]
    forward, backward = _FunctionSizes(False), _FunctionSizes(False)
    made = [forward.count(name) for name in names]
    assert made == [backward.count(name) for name in reversed(names)][::-1]


def test_integers_call_overloads_for_integers() -> None:
    """They are smaller. A function without such an overload counts in whole."""
    assert (
        0
        < 4 * code_size("pv_floor_divide(x, y)", integers=True)
        < code_size("pv_floor_divide(x, y)")
    )
    assert code_size("pv_exp(x)", integers=True) == code_size("pv_exp(x)")
