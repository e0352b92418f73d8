"""Concatenations of programs: the results are torch's, and nothing copies."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

import purevk


def _labels(program: purevk.Program) -> list[str]:
    executable = program.method("forward").executable
    return [dispatch.label for dispatch in executable.plan.dispatches]


class _Halves(nn.Module):
    """Halves of x times cosines and sines of half the width (gpt-oss)."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


class _Pairs(nn.Module):
    """Neighbours (FLUX): the angles of both are given."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack((-imaginary, real), -1).flatten(3)
        return (x.float() * cos + turned.float() * sin).to(x.dtype)


class _Slices(nn.Module):
    """Neighbours as slices, and a part that does not turn (Moonshine)."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        turning, rest = x[..., :width], x[..., width:]
        turned = torch.stack((-turning[..., 1::2], turning[..., 0::2]), -1).flatten(-2)
        return torch.cat((turning * cos + turned * sin, rest), -1)


class _Sorted(nn.Module):
    """Neighbours in, halves out (DeepSeek), behind a part that does not turn."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rest, turning = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), -1)
        one, two = turning[..., 0::2], turning[..., 1::2]
        made = torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
        return torch.cat((rest, made), -1)


class _Prefix(nn.Module):
    """The first rows do not turn (DINOv3)."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, rows = x[:, :, :3], x[:, :, 3:]
        one, two = rows.chunk(2, -1)
        made = rows * cos + torch.cat((-two, one), -1) * sin
        return torch.cat((first, made), 2)


CASES: list[tuple[type[nn.Module], int, int, int]] = [
    # the module, width of x, width of the angles, rows without angles
    (_Halves, 16, 8, 0),
    (_Pairs, 16, 16, 0),
    (_Slices, 20, 16, 0),
    (_Sorted, 24, 8, 0),
    (_Prefix, 16, 16, 3),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_rotations(case: tuple[type[nn.Module], int, int, int], dtype: torch.dtype) -> None:
    make, width, angles, before = case
    x = torch.randn(2, 3, 11, width).to(dtype)
    cos, sin = (torch.randn(1, 1, 11 - before, angles).to(dtype) for _ in range(2))
    module = make()
    program = purevk.compile(module, (x, cos, sin))
    wanted = module(x.double(), cos.double(), sin.double())
    error = (program(x, cos, sin).double() - wanted).abs().max()
    assert error <= {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    labels = _labels(program)
    if make in (_Slices, _Sorted) and os.environ.get("PUREVK_TEST_TRAITS") == "gpu":
        return  # parts of a few bytes are written together there
    assert not any(label.startswith("aten.cat") for label in labels)
    assert len(labels) <= (4 if make is _Halves else 2)


@pytest.mark.parametrize("make", [_Pairs, _Halves])
def test_rows_of_an_open_number(make: type[nn.Module]) -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    width = 16 if make is _Pairs else 8
    given = (torch.randn(2, 3, 11, 16), torch.randn(1, 1, 11, width), torch.randn(1, 1, 11, width))
    module = make()
    program = purevk.compile(module, given, dynamic_shapes=({2: rows}, {2: rows}, {2: rows}))
    for count in (11, 2, 40):
        each = (torch.randn(2, 3, count, 16), *(torch.randn(1, 1, count, width) for _ in "ab"))
        torch.testing.assert_close(program(*each), module(*each))
    assert make is _Halves or len(_labels(program)) == 1


FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "two programs": lambda x, y: torch.cat((x.sin(), x.cos()), -1),
    "and a copy": lambda x, y: torch.cat((x.sin(), y, x.exp()), 1),
    "of other sizes": lambda x, y: torch.cat((x.sin(), y[:, :2].cos()), 1),
    "broadcast": lambda x, y: torch.cat((x[:, :1] + y, x * 2), 1) * y[:, :1],
    "nested": lambda x, y: torch.cat((torch.cat((x.sin(), y), 1), torch.cat((y, -x), 1)), 2),
    "then a program": lambda x, y: torch.cat((x.sin(), y.cos()), 1).exp() + torch.cat((y, x), 1),
    "of which two are read": lambda x, y: (
        torch.cat((s := x.sin(), y), 1).sum() + torch.cat((s, x), 2)
    ),
    "stacked first": lambda x, y: torch.stack((x.sin(), y.cos()), 0).flatten(0, 1),
    "stacked inside": lambda x, y: torch.stack((x.sin(), y.cos(), x + y), 2).flatten(2),
    "one twice": lambda x, y: torch.cat((s := x.sin(), s), -1),
    "read before": lambda x, y: torch.cat(((s := x.sin()) + 1, s), -1) * 2 + s.repeat(1, 1, 2),
    "steps of steps": lambda x, y: torch.stack((x[..., ::2].sin(), y[..., 1::2]), -1).flatten(-2)[
        ..., 1::2
    ],
    "negative steps": lambda x, y: torch.stack((x.flip(-1).sin(), -y), -1).flatten(-2),
    "three of a kind": lambda x, y: torch.stack((x.sin(), -y, x * y), -1).flatten(-2) + 1,
    "many": lambda x, y: torch.cat([x * n for n in range(9)], 0),
    "eight": lambda x, y: torch.cat([x * n + y for n in range(8)], 0).relu(),
    "integers": lambda x, y: torch.cat((x.int() + 1, -y.int()), 0) * 2,
    "two dtypes": lambda x, y: torch.cat((x.half().sin(), y.cos()), 0),
    "nothing": lambda x, y: torch.cat((x[:, :0].sin(), y.cos()), 1),
    "images": lambda x, y: torch.cat((x[..., None].sin(), y[..., None].cos()), 1)[..., 0],
    "imaginary parts": lambda x, y: torch.polar(s := torch.stack((x.sin(), y), -1), s).imag.flatten(
        -2
    ),
    "columns of another": lambda x, y: torch.cat((x.mT.sin(), y.mT.cos()), -1) + y.mT[:, :, :1],
}


def _written(*parts: tuple[slice, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]):
    """Writes parts of a tensor of 6 columns one after the other."""

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = x.clone()
        for where, function in parts:
            made[..., where] = function(x, y)[..., where]
        return made

    return run


def _twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = x.new_empty(x.shape)
    made[..., :4] = x[..., :4].sin()
    kept = made[..., :4].sum(-1, True)
    made[..., 4:] = y[..., 4:]
    return made + kept


FORMS |= {
    "both halves": _written(
        (slice(0, 2), lambda x, y: y.sin()), (slice(2, None), lambda x, y: x * y)
    ),
    "one half": _written((slice(0, 2), lambda x, y: y.sin())),
    "the middle": _written((slice(1, 3), lambda x, y: y.sin())),
    "three": _written(*((slice(n, n + 2), lambda x, y: y * x) for n in (4, 0, 2))),
    "over one another": _written(
        (slice(0, 4), lambda x, y: y.sin()), (slice(2, 6), lambda x, y: -y)
    ),
    "all": _written((slice(0, 4), lambda x, y: y.sin()), (slice(None), lambda x, y: -y)),
    "from the end": _written(
        (slice(-2, None), lambda x, y: y.sin()), (slice(0, -2), lambda x, y: -y)
    ),
    "by steps": _written(
        (slice(0, None, 2), lambda x, y: y.sin()), (slice(1, None, 2), lambda x, y: -y)
    ),
    "none": _written((slice(3, 3), lambda x, y: y.sin()), (slice(3, 6), lambda x, y: -y)),
    "read between": _twice,
}


JOINED = ("two programs", "nested", "then a program", "eight", "both halves")


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return FORMS[form](x, y)

    x, y = torch.randn(3, 4, 6), torch.randn(3, 4, 6)
    module = Module()
    program = purevk.compile(module, (x, y))
    torch.testing.assert_close(program(x, y), module(x, y))
    if form in JOINED and os.environ.get("PUREVK_TEST_TRAITS") != "gpu":
        assert any(label.startswith("purevk.pieces") for label in _labels(program))


def test_halves_that_are_overwritten_are_written_once() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            made = x.new_empty(3, 4, 12)
            made[..., :6], made[..., 6:] = x.sin(), y
            return made

    x, y = torch.randn(3, 4, 6), torch.randn(3, 4, 6)
    module = Module()
    program = purevk.compile(module, (x, y))
    torch.testing.assert_close(program(x, y), module(x, y))
    if os.environ.get("PUREVK_TEST_TRAITS") != "gpu":
        assert [label.split(" @")[0] for label in _labels(program)] == ["purevk.pieces"]
