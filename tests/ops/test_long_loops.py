"""Loops of more steps than an old software device takes (it ends them without a word): in parts or
by bisection."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, check

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        os.environ.get("PUREVK_TEST_TRAITS") == "gpu",
        reason="a software device with the traits of a GPU ends long loops",
    ),
]
N = 70000


def test_on_the_device():
    numbers, wide = torch.arange(N), torch.ones(2, N, dtype=torch.float64)
    cases = [
        Case(torch.mm, (wide, wide.t())),
        Case(torch.mm, (wide.long(), wide.t().long())),
        Case(torch.isin, (torch.tensor([N - 1, 3, N + 1]), numbers)),
    ]
    cases += [
        Case(torch.isin, (torch.tensor([0.5, -0.0, torch.nan]), numbers / 2), {"invert": True}),
        Case(lambda t: torch.mode(t)[0], (torch.cat([numbers, torch.full((30,), N - 1)]),)),
    ]
    cases += [
        Case(
            torch.isin,
            (
                torch.arange(300, dtype=torch.uint8 if f else torch.int64) % 100,
                torch.arange(200) % 90,
            ),
            {"invert": f},
        )
        for f in (False, True)
    ]
    check(cases)


def test_windows_and_distances():
    line, image = torch.arange(float(N + 1))[None, None], torch.arange(90000.0).view(1, 1, 300, 300)
    rows = torch.ones(2, N) * torch.tensor([[0.0], [1.0]])
    cases = [
        Case(F.max_pool1d, (line, N)),
        Case(F.max_pool2d, (image, 300)),
    ]
    averages = [
        (F.avg_pool1d, (line, N)),
        (F.avg_pool2d, (image, 300)),
        (F.adaptive_avg_pool2d, (image.repeat(1, 1, 1, 2), (1, 2))),
    ]
    for pool, (x, size) in averages:  # torch's sums of as many floats are off by 1.2e-5
        cases.append(Case(pool, (x, size), expected=pool(x.double(), size).float(), rtol=2e-5))
    cases += [
        Case(torch.cdist, (rows, rows), {"p": 1.0}),
        Case(F.pdist, (rows, 1.0)),
        Case(
            lambda x, n: torch.segment_reduce(x, "sum", lengths=n),
            (torch.ones(N), torch.tensor([N])),
        ),
    ]
    check(cases)
