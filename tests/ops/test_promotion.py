"""Type promotion against torch's, for every pair and triple of types. No device."""

from __future__ import annotations

import itertools

import pytest
import torch

from purevk.dtypes import DType
from purevk.errors import ShapeError
from purevk.ir import TensorType
from purevk.lower.expression import convert, literal
from purevk.ops.promotion import float_type, promote_types, result_type

TYPES = [dtype for dtype in DType if not dtype.is_float8]
NUMBERS = [True, 3, 2.5, 1j]


@pytest.mark.parametrize("left", TYPES, ids=repr)
def test_promote_types(left):
    for right in TYPES:
        assert promote_types(left, right).to_torch() is torch.promote_types(
            left.to_torch(), right.to_torch()
        ), (left, right)


def operands(dtype):
    """As purevk and torch see them: with dims and without."""
    return [
        (TensorType(dtype, (2,)), torch.empty(2, dtype=dtype.to_torch())),
        (TensorType(dtype, ()), torch.empty((), dtype=dtype.to_torch())),
    ]


@pytest.mark.parametrize("left", TYPES, ids=repr)
def test_result_type(left):
    """Tensors with dims, 0-d tensors and numbers, in all pairs."""
    others = [pair for dtype in TYPES for pair in operands(dtype)] + [
        (number, number) for number in NUMBERS
    ]
    for (mine, theirs), (other, their_other) in itertools.product(operands(left), others):
        assert result_type((mine, other)).to_torch() is torch.result_type(theirs, their_other), (
            mine,
            other,
        )
        assert result_type((other, mine)).to_torch() is torch.result_type(their_other, theirs), (
            other,
            mine,
        )


@pytest.mark.parametrize("dtype", [each for each in DType if each.is_float8], ids=repr)
def test_floats_of_8_bits(dtype):
    """They meet numbers and their own kind alone."""
    mine, theirs = operands(dtype)[0]
    assert promote_types(dtype, dtype) is dtype
    for number in NUMBERS[:3]:
        assert result_type((mine, number)).to_torch() is torch.result_type(theirs, number)
    for other in TYPES:
        with pytest.raises(RuntimeError):
            torch.promote_types(dtype.to_torch(), other.to_torch())
        with pytest.raises(ShapeError, match="does not promote"):
            promote_types(dtype, other)


def test_functions_of_real_numbers():
    for dtype in TYPES:
        if dtype is DType.complex32:
            continue  # torch has no sine of it on the CPU
        assert (
            float_type(dtype).to_torch() is torch.sin(torch.zeros(1, dtype=dtype.to_torch())).dtype
        )


def test_literals():
    """Numbers that GLSL reads back as the same number."""
    assert literal(True, DType.bool) == "true" and literal(0, DType.bool) == "false"
    assert (
        literal(-3, DType.uint8) == "(253)"
        and literal(200, DType.int8) == "(-56)"
        and literal(-(2**31), DType.int32) == "(-2147483647 - 1)"
    )
    assert literal(2**31, DType.int32) == "(-2147483647 - 1)"
    assert "uintBitsToFloat(0x7f800000u)" in literal(
        float("inf"), DType.float32
    ) and "0xff800000u" in literal(-1e300, DType.float16)
    for number in (0.1, 1e-30, 123456789.0, -2.5, 3e38):
        assert float(literal(number, DType.float32).strip("()")) == number
    for number in (2**40 + 5, -(2**40) - 5, 2**63 - 1, -(2**63)):
        high, low = (
            literal(number, DType.int64)
            .replace("((int64_t(", "")
            .replace(") << 32)", "")
            .replace("int64_t(", "")
            .replace("u))", "")
            .split(" | ")
        )
        assert (int(high) << 32 | int(low)) == number


def test_conversions_that_lose_nothing_cost_nothing():
    assert convert("x", DType.float16, DType.float32) == "x"
    assert convert("x", DType.float32, DType.float32) == "x"
    assert convert("x", DType.int8, DType.int32) == "x"
    assert convert("x", DType.int32, DType.int8) != "x"
    assert convert("x", DType.bool, DType.float32) != "x"
