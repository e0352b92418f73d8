"""Comparisons with tolerances per dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from purevk.testing import TOLERANCES, assert_close, assert_same_as_eager, tolerance_of

DTYPES = [getattr(torch, name) for name in TOLERANCES]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_tolerance_of_a_dtype_is_the_limit(dtype: torch.dtype) -> None:
    rtol, atol = tolerance_of(dtype)
    assert (rtol, atol) == TOLERANCES[str(dtype).partition(".")[2]]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.tensor([1.0, -2.0, 1000.0], dtype=dtype)
    near = (expected.to(wide) * (1 + 0.6 * rtol)).to(dtype)
    far = (expected.to(wide) * (1 + 3 * rtol) + 3 * atol).to(dtype)
    assert_close(near, expected)
    with pytest.raises(AssertionError, match="3 of 3 elements"):
        assert_close(far, expected)
    assert_close(far, expected, scale=10)


def test_what_differs_is_said() -> None:
    expected = {"y": [torch.zeros(2, 3), torch.tensor([1, 2])]}
    actual = {"y": [torch.zeros(2, 3), torch.tensor([1, 3])]}
    actual["y"][0][1, 2] = 0.5
    with pytest.raises(AssertionError) as caught:
        assert_close(actual, expected)
    assert str(caught.value) == (
        "result['y'][0], float32[2, 3]: 1 of 6 elements differ by more than 1e-06 + 1e-05 *"
        " |expected|; most at [1, 2]: 0.5 in place of 0.0"
    )
    actual["y"][0][1, 2] = 0
    with pytest.raises(AssertionError, match="most at \\[1\\]: 3 in place of 2"):
        assert_close(actual, expected)


INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        (torch.tensor([NAN, INFINITY, -INFINITY]), torch.tensor([NAN, INFINITY, -INFINITY]), True),
        (torch.tensor([NAN]), torch.tensor([0.0]), False),
        (torch.tensor([0.0]), torch.tensor([NAN]), False),
        (torch.tensor([1e30]), torch.tensor([INFINITY]), False),
        (torch.tensor([-INFINITY]), torch.tensor([INFINITY]), False),
        (np.zeros(2, np.float32), torch.zeros(2), True),
        (torch.zeros(2), np.zeros(2, np.float32), True),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float16), False),
        (torch.zeros(2), torch.zeros(2, 1), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.tensor(True), torch.tensor(False), False),
        (torch.ones(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8), True),
        (np.array([0x3F80], np.uint16), torch.ones(1, dtype=torch.bfloat16), True),
        (np.array([0x3F90], np.uint16), torch.ones(1, dtype=torch.bfloat16), False),
        (1.0000001, 1.0, True),
        (2, 2, True),
        (2, 3, False),
        (2, 2.0, False),
        (True, 1, False),
        ("a", "a", True),
        (None, None, True),
        (None, torch.zeros(1), False),
        ([1], (1,), True),
        ([1], [1, 2], False),
        ({"a": 1}, {"b": 1}, False),
        (torch.complex(torch.tensor(1.0), torch.tensor(2.0)), torch.tensor(1 + 2j), True),
        (torch.complex(torch.tensor(1.0), torch.tensor(2.1)), torch.tensor(1 + 2j), False),
    ],
)
def test_special_values_and_kinds(actual: Any, expected: Any, same: bool) -> None:
    if same:
        assert_close(actual, expected)
    else:
        with pytest.raises(AssertionError):
            assert_close(actual, expected)


class Adds(torch.nn.Module):
    def __init__(self, wrong: float = 0.0) -> None:
        super().__init__()
        self.wrong = wrong
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        y.mul_(2)
        extra = 0.0 if torch.compiler.is_exporting() else self.wrong
        return {"sum": x + y + self.calls + extra}


@pytest.mark.device
def test_a_module_is_compared_with_eager_torch() -> None:
    rows = torch.export.Dim("rows", max=8)
    inputs = [(torch.randn(count, 3), torch.randn(3)) for count in (4, 2, 8)]
    kept = [(x.clone(), y.clone()) for x, y in inputs]
    module = Adds()
    shapes = ({0: rows}, None)
    assert_same_as_eager(module, inputs[0], further=inputs[1:], dynamic_shapes=shapes)
    assert int(module.calls) == 0
    for (x, y), (one, other) in zip(inputs, kept):
        assert torch.equal(x, one) and torch.equal(y, other)
    with pytest.raises(AssertionError, match=r"call 0: result\['sum'\], float32\[4, 3\]: 12 of 12"):
        assert_same_as_eager(Adds(wrong=0.5), inputs[0], further=inputs[1:], dynamic_shapes=shapes)
