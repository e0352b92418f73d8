"""Pooling over two dims against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, aten, check, tensor, works

pytestmark = pytest.mark.device

POOLS = [  # input, kernel, stride, padding, dilation, ceil_mode
    ((2, 3, 9, 11), [3, 3], [2, 2], [1, 1], [1, 1], False),
    ((1, 4, 8, 8), [2, 2], [2, 2], [0, 0], [1, 1], False),
    ((1, 8, 7, 9), [3, 2], [1, 2], [1, 0], [1, 1], False),
    ((1, 3, 10, 10), [3, 3], [2, 2], [0, 0], [1, 1], True),
    ((2, 5, 7, 7), [3, 3], [2, 2], [1, 1], [1, 1], True),
    ((1, 3, 12, 12), [3, 3], [2, 2], [1, 1], [2, 2], False),
    ((1, 3, 12, 11), [3, 3], [3, 2], [1, 1], [2, 1], True),
    ((3, 9, 9), [3, 3], [2, 2], [1, 1], [1, 1], False),
    ((1, 2, 5, 5), [5, 5], [1, 1], [0, 0], [1, 1], False),
    ((1, 4, 6, 6), [2, 2], [], [0, 0], [1, 1], False),
    ((1, 4, 6, 6), [3], [2], [1], [1], False),
    ((1, 1, 5, 5), [2, 2], [3, 3], [1, 1], [1, 1], True),
    ((1, 16, 6, 6), [1, 1], [2, 2], [0, 0], [1, 1], False),
]


def test_max_pool():
    cases = []
    for dtype in (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8):
        for shape, *rest in POOLS:
            x = tensor(*shape, dtype=dtype, low=-100, high=-1 if dtype is not torch.uint8 else 100)
            if works(aten.max_pool2d.default, x, *rest) is not None:
                cases.append(Case(aten.max_pool2d.default, (x, *rest)))
            if works(aten.max_pool2d_with_indices.default, x, *rest) is not None:
                cases.append(Case(aten.max_pool2d_with_indices.default, (x, *rest)))
                values = lambda *a: aten.max_pool2d_with_indices.default(*a)[0] + 1  # noqa: E731
                cases.append(Case(values, (x, *rest), name="values"))
    # A window wholly in the padding, which dilation makes possible.
    beside = ([2, 1], [4, 2], [1, 0], [3, 3], True)
    for dtype in (torch.float32, torch.int32, torch.int16, torch.int8, torch.uint8):
        x = torch.ones(1, 4, 1, 9, dtype=dtype)
        cases.append(Case(aten.max_pool2d.default, (x, *beside)))
    ties = torch.zeros(1, 3, 6, 6)
    ties[0, 1] = float("nan")
    ties[0, 2] = -float("inf")
    args = (ties, [3, 3], [2, 2], [1, 1])
    cases.append(Case(aten.max_pool2d_with_indices.default, args, name="ties, NaN and -inf"))
    check(cases)


def test_avg_pool():
    cases = []
    for dtype in (torch.float32, torch.float16):
        for shape, kernel, stride, padding, _, ceil_mode in POOLS:
            for include, divisor in ((True, None), (False, None), (True, 7)):
                x = tensor(*shape, dtype=dtype)
                args = (x, kernel, stride, padding, ceil_mode, include, divisor)
                if works(aten.avg_pool2d.default, *args) is not None:
                    cases.append(Case(aten.avg_pool2d.default, args))
    check(cases)


def test_pools_read_layouts():
    x, nhwc = tensor(2, 8, 7, 9), tensor(2, 7, 9, 8)
    w = tensor(8, 8, 3, 3)
    cases = []
    for name, pool in {
        "max": lambda t: F.max_pool2d(t, 3, 2, 1),
        "avg": lambda t: F.avg_pool2d(t, 3, 2, 1),
    }.items():
        after = lambda t, k, p=pool: p(F.conv2d(t, k, padding=1).relu()) + 1  # noqa: E731
        expanded = lambda t, p=pool: p(t.expand(2, 8, 7, 9))  # noqa: E731
        cases += [
            Case(lambda t, p=pool: p(t.permute(0, 3, 1, 2)), (nhwc,), name=f"{name} NHWC"),
            Case(lambda t, p=pool: p(t[:, 1:, ::2]), (x,), name=f"{name} slice"),
            Case(after, (x, w), name=f"{name} of a convolution", atol=1e-4, rtol=1e-4),
            Case(lambda t, p=pool: p(p(t)).flatten(1), (x,), name=f"{name} twice"),
            Case(expanded, (x[:1].contiguous(),), name=f"{name} expanded"),
        ]
    check(cases)
