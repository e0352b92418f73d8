"""Tensors filled with a value, and ranges, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.ops.harness import Case, aten, check, tensor, works

pytestmark = pytest.mark.device
DTYPES = (torch.float32, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8)


def test_creation():
    """As outputs, and inside programs that read them."""
    x = tensor(3, 5)
    cases = []
    for dtype in (*DTYPES, None):
        kwargs = {} if dtype is None else {"dtype": dtype}
        for overload, args in (
            (aten.full.default, ([3, 5], 2)),
            (aten.full.default, ([3, 5], 1.5)),
            (aten.full.default, ([], 3)),
            (aten.zeros.default, ([3, 5],)),
            (aten.ones.default, ([4],)),
            (aten.arange.default, (7,)),
            (aten.arange.start, (2, 9)),
            (aten.arange.start_step, (1, 10, 3)),
            (aten.arange.start_step, (9, 0, -2)),
            (aten.arange.start_step, (0.5, 3.0, 0.25)),
            (aten.arange.default, (4.5,)),
            (aten.scalar_tensor.default, (2.5,)),
            (aten.arange.start, (5, 5)),
        ):
            if works(overload, *args, **kwargs) is not None:
                cases.append(Case(overload, args, kwargs))
        for overload, args in (
            (aten.full_like.default, (x, 3)),
            (aten.zeros_like.default, (x,)),
            (aten.ones_like.default, (x,)),
        ):
            cases.append(Case(overload, args, kwargs))
    programs = {
        "arange": lambda t: t + torch.arange(5) * torch.ones(3, 1),
        "mask": lambda t: torch.where(torch.arange(5) < 3, t, torch.full((3, 5), -1.0)),
        "sums of constants": lambda t: torch.zeros_like(t).sum() + torch.ones(3, 5).sum(0),
        "views of arange": lambda t: torch.arange(12).reshape(3, 4).t()[1:] + torch.zeros(()),
        "reversed": lambda t: t[torch.arange(2, -1, -1)],
        "inf times 0": lambda t: torch.full((3, 5), float("inf")) * 0,
        "inf, NaN": lambda t: (torch.full((2,), -torch.inf), torch.full((2,), torch.nan)),
    }
    cases += [Case(program, (x,), name=name) for name, program in programs.items()]
    check(cases)
