"""Matmuls of integers, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.ops.harness import Case, check, tensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_integer_matmul(dtype):
    low = 0 if dtype is torch.uint8 else -100
    a, b = (
        tensor(5, 7, dtype=dtype, low=low, high=100),
        tensor(7, 3, dtype=dtype, low=low, high=100),
    )
    cases = [
        Case(torch.mm, (a, b)),
        Case(torch.matmul, (tensor(2, 1, 5, 7, dtype=dtype), tensor(3, 7, 4, dtype=dtype))),
        Case(torch.mv, (a, b[:, 0])),
    ]
    cases += [
        Case(torch.bmm, (tensor(4, 5, 7, dtype=dtype), tensor(4, 7, 3, dtype=dtype))),
        Case(torch.addmm, (tensor(5, 3, dtype=dtype), a, b), {"alpha": 2}),
    ]
    if dtype is torch.int64:
        cases.append(Case(torch.mm, (a * 2**33, b)))
    check(cases)
