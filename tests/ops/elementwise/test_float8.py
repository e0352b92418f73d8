"""8-bit floats: casts, storage, and what torch computes with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import purevk
from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.ops.elementwise.float8 import decode, encode
from tests.ops.harness import tensor

pytestmark = pytest.mark.device

DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


class Function(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def compiled(function, *args):
    program = purevk.compile(Function(function), args)
    assert program.report()["cpu_nodes"] == 0
    return program


def codes():
    """All numbers of the formats."""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8)


def same(made, wanted):
    assert made.dtype is wanted.dtype and made.shape == wanted.shape
    if wanted.element_size() == 1:
        nan = wanted.float().isnan()
        assert torch.equal(made.float().isnan(), nan)
        made, wanted = made.view(torch.uint8)[~nan], wanted.view(torch.uint8)[~nan]
    assert torch.equal(torch.nan_to_num(made.float(), 77.0), torch.nan_to_num(wanted.float(), 77.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts(dtype):
    """All numbers of float16, many of float32, and all codes back; also to other dtypes."""
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    bits = torch.randint(-(2**31), 2**31 - 1, (30000,), generator=torch.Generator().manual_seed(0))
    floats = torch.cat([halves.float(), bits.to(torch.int32).view(torch.float32)])
    stored, whole = codes().view(dtype), torch.arange(-300, 300)

    def run(x, h, c, i):
        narrow = x.to(dtype)
        return (
            narrow,
            narrow.to(torch.float32),
            h.to(dtype),
            c.to(torch.float32),
            c.to(torch.bfloat16),
            c.to(torch.float8_e5m2),
            i.to(dtype),
            i.to(torch.float64).to(dtype),
            c.to(torch.bool),
        )

    args = floats, halves, stored, whole
    with compiled(run, *args) as program:
        for made, wanted in zip(program.forward(*args), run(*args)):
            same(made, wanted)
    some = [*floats[::97].tolist(), float("inf"), -0.0]
    kind = DType.from_torch(dtype)
    wanted = torch.tensor(some).to(dtype).view(torch.uint8).tolist()
    for number, code in zip(some, wanted):
        assert encode(number, kind) == code or number != number
    numbers = [decode(code, kind) for code in range(256)]
    torch.testing.assert_close(
        torch.tensor(numbers), stored.float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_storage_and_arithmetic(dtype):
    x, y = (tensor(6, 8, seed=n).to(dtype) for n in range(2))
    at = torch.tensor([3, 1])

    class Stored(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", tensor(5, 8, seed=3).to(dtype))
            self.register_buffer("last", torch.zeros(6, 8, dtype=dtype))

        def forward(self, x, y, at):
            before = self.last.clone()
            self.last.copy_(x)
            return (
                torch.cat([x, y, self.weight]),
                x.t().contiguous(),
                x[at],
                torch.where(x.float() > 0, x, y),
                F.pad(x, (1, 2), value=1.5),
                F.embedding(at, self.weight),
                x.reshape(4, 12)[1:, ::2].roll(1),
                torch.full((2, 3), 0.3, dtype=dtype),
                torch.zeros_like(x),
                torch.full_like(x, -7.3),
                x.new_ones(3),
                x * y,
                x.abs(),
                x == y,
                x == 0.3,
                x != y[:1, :1],
                x.isnan(),
                before,
                F.linear(x.float(), self.weight.float()),
            )

    module, eager = Stored(), Stored()
    with purevk.compile(module, (x, y, at)) as program:
        assert program.report()["cpu_nodes"] == 0
        for given in ((x, y, at), (y, x, at)):
            made, wanted = program.forward(*given), eager(*given)
            for a, b in zip(made[:-1], wanted):
                same(a, b)
            torch.testing.assert_close(made[-1], wanted[-1])


def test_arrays_and_files(tmp_path: Path):
    """numpy has no such dtype: arrays have the bytes."""
    x = tensor(4, 6).to(torch.float8_e4m3fn)
    run = lambda x: (x.float() * 2).to(torch.float8_e4m3fn)  # noqa: E731
    with compiled(run, x) as program:
        program.save(tmp_path / "eight.pvk")
    with purevk.load(tmp_path / "eight.pvk") as program:
        same(program.forward(x), run(x))
        made = program.forward(x.view(torch.uint8).numpy())
        assert made.dtype == np.uint8
        assert np.array_equal(made, run(x).view(torch.uint8).numpy())
        out = torch.zeros(4, 6, dtype=torch.float8_e4m3fn)
        program.forward(x, out=out)
        same(out, run(x))
        with pytest.raises(InputError, match="float8_e4m3fn"):
            program.forward(x.to(torch.float8_e5m2))


def test_other_operators_run_on_the_cpu():
    x = tensor(4, 4).to(torch.float8_e4m3fn)
    run = lambda x: torch.mm(x, x).float() + 1  # noqa: E731
    with purevk.compile(Function(run), (x,)) as program:
        assert program.report()["cpu_nodes"] == 1
        same(program.forward(x), run(x))


@pytest.mark.parametrize("rows", [False, True], ids=["tensor", "rows"])
def test_scaled_mm(rows):
    a = tensor(32, 48).to(torch.float8_e4m3fn)
    b = tensor(64, 48, seed=1).to(torch.float8_e4m3fn).t()
    if rows:
        scales = tensor(32, 1, low=0.1, high=2.0), tensor(1, 64, low=0.1, high=2.0)
    else:
        scales = torch.tensor(0.7), torch.tensor(3.0)
    bias = tensor(64).to(torch.bfloat16)

    def run(a, b, p, q, bias):
        return (
            torch._scaled_mm(a, b, p, q, out_dtype=torch.float32),
            torch._scaled_mm(a, b, p, q, bias=bias, out_dtype=torch.bfloat16),
        )

    args = a, b, *scales, bias
    with compiled(run, *args) as program:
        made = program.forward(*args)
    wanted = a.double() @ b.double() * scales[0] * scales[1]
    torch.testing.assert_close(made[0], wanted.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made[1], run(*args)[1], rtol=1e-2, atol=1e-2)
