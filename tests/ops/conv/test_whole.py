"""Convolutions of integers, with sums that wrap around."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, aten, check

pytestmark = pytest.mark.device


def whole(*shape, bits=63, dtype=torch.int64):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(2**bits), 2**bits - 1, shape, generator=generator).to(dtype)


CALLS = {
    "1 dim": (F.conv1d, (2, 4, 17), (6, 2, 3), dict(stride=2, padding=2, dilation=2, groups=2)),
    "1 dim, no batch": (F.conv1d, (4, 17), (6, 4, 3), dict(padding="same")),
    "2 dims": (
        F.conv2d,
        (2, 6, 9, 11),
        (9, 2, 3, 2),
        dict(stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=3),
    ),
    "2 dims, same": (F.conv2d, (6, 9, 11), (3, 6, 4, 2), dict(padding="same")),
    "3 dims": (F.conv3d, (1, 2, 5, 6, 7), (4, 2, 2, 3, 2), dict(stride=2, padding=1)),
    "1 dim back": (
        F.conv_transpose1d,
        (2, 4, 7),
        (4, 3, 4),
        dict(stride=3, padding=1, output_padding=2, groups=2, dilation=2),
    ),
    "2 dims back": (
        F.conv_transpose2d,
        (1, 3, 5, 4),
        (3, 2, 3, 2),
        dict(stride=(2, 1), padding=(1, 0)),
    ),
    "3 dims back": (F.conv_transpose3d, (2, 3, 4, 5), (2, 3, 2, 2, 3), dict(stride=2)),
}


@pytest.mark.parametrize("bits", [63, 20])
def test_convolutions(bits):
    """Also those whose products do not fit."""
    cases = []
    for name, (function, sizes, kernel, options) in CALLS.items():
        x, weight = whole(*sizes, bits=bits), whole(*kernel, bits=bits)
        channels = kernel[1] * options.get("groups", 1) if "back" in name else kernel[0]
        bias = whole(channels, bits=bits)
        run = lambda *args, function=function, options=options: function(*args, **options)  # noqa: E731
        cases += [
            Case(run, args, rtol=0, atol=0, name=name) for args in ((x, weight), (x, weight, bias))
        ]
    check(cases)


def test_int_mm():
    a, b = (whole(*shape, bits=7, dtype=torch.int8) for shape in ((37, 128), (128, 24)))
    check(Case(aten._int_mm.default, (a, b), rtol=0, atol=0))


def test_int_mm_of_unsigned_bytes():
    """torchao adds 128 to activations of int8."""
    a = whole(37, 128, bits=7, dtype=torch.int8).int().add(128).to(torch.uint8)
    b = whole(128, 24, bits=7, dtype=torch.int8)
    check(Case(aten._int_mm.default, (a, b), rtol=0, atol=0))
