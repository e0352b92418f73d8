"""Resizing of uint8 images: every element is that of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, check, program_of

pytestmark = pytest.mark.device

SIZES = [
    ((9, 13), (20, 31)),
    ((30, 41), (7, 11)),
    ((16, 16), (16, 31)),
    ((64, 50), (33, 50)),
    ((1, 1), (4, 5)),
    ((6, 8), (6, 8)),
]


def image(channels, size):
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randint(0, 256, (2, channels, *size), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_sizes(mode):
    cases = []
    for (size, out), align, smooth in itertools.product(SIZES, (False, True), (False, True)):
        for channels in (3, 5) if size == SIZES[0][0] else (3,):
            run = lambda x, out=out, align=align, smooth=smooth: F.interpolate(  # noqa: E731
                x, size=out, mode=mode, align_corners=align, antialias=smooth
            )
            cases.append(Case(run, (image(channels, size),), rtol=0, atol=0))
    check(cases)


@pytest.mark.parametrize("factor", [0.37, 1.7, (2.5, 0.3)], ids=str)
def test_factors(factor):
    cases = []
    for mode, smooth in itertools.product(("bilinear", "bicubic"), (False, True)):
        run = lambda x, mode=mode, smooth=smooth: F.interpolate(  # noqa: E731
            x, scale_factor=factor, mode=mode, antialias=smooth
        )
        cases.append(Case(run, (image(3, (23, 31)),), rtol=0, atol=0))
    cases += [
        Case(lambda x, m=m: F.interpolate(x, scale_factor=factor, mode=m), (image(3, (23, 31)),))
        for m in ("nearest", "nearest-exact")
    ]
    check(cases)


def test_sizes_of_the_call():
    run = lambda x: F.interpolate(x, size=(10, 12), mode="bicubic", antialias=True)  # noqa: E731
    with program_of(run, (image(3, (40, 40)),), dynamic=True) as program:
        for size in ((40, 40), (17, 33)):
            x = image(3, size)
            assert torch.equal(program.forward(x), run(x))
        assert program.report()["cpu_nodes"] == 0
