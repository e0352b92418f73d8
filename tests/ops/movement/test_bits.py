"""`x.view(dtype)`: the bytes of tensors as elements of another dtype, on the device."""

from __future__ import annotations

import random

import pytest
import torch

import purevk
from purevk import api
from purevk.graph.context import Context

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    )
}
LAYOUTS = {
    "input": lambda x: x,
    "from an offset": lambda x: x[:, 1:],
    "transposed": lambda x: x.transpose(0, 1),
    "copied": lambda x: x.clone(),
    "joined": lambda x: torch.cat([x, x]),
    "strided": lambda x: x[:, ::2],
}


def elements(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    """Random bytes: any bits of numbers, NaN among them. complex32 moves as pairs of float32, which
    keep numbers, so it has those."""
    if dtype is torch.complex32:
        return torch.randn(*sizes, dtype=torch.complex64).to(dtype)
    count = dtype.itemsize * torch.Size(sizes).numel()
    most = 2 if dtype is torch.bool else 256
    return torch.randint(0, most, (count,), dtype=torch.uint8).view(dtype).reshape(sizes)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes; of bools, which are true."""
    found = tensor.contiguous().reshape(-1).view(torch.uint8)
    return found != 0 if tensor.dtype is torch.bool else found


class Views(torch.nn.Module):
    """A tensor in one layout each, viewed as each of some dtypes."""

    def __init__(self, views: list[tuple[str, torch.dtype]]) -> None:
        super().__init__()
        self.views = views

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [LAYOUTS[layout](x).view(dtype) for layout, dtype in self.views]


def takes(layout: str, dtype: torch.dtype, x: torch.Tensor) -> bool:
    try:
        LAYOUTS[layout](x).view(dtype)
    except RuntimeError:
        return False
    return True


def check(views: Views, program: purevk.Program, x: torch.Tensor) -> None:
    assert program.report()["cpu_nodes"] == 0
    for (layout, dtype), mine, theirs in zip(
        views.views, program.forward(x), views(x), strict=True
    ):
        assert mine.dtype is theirs.dtype and mine.shape == theirs.shape, (layout, dtype)
        assert torch.equal(bits(mine), bits(theirs)), (layout, dtype)


@pytest.mark.parametrize("name", DTYPES)
def test_pairs_of_dtypes(name):
    draw, x = random.Random(name), elements(DTYPES[name], 3, 4, 32)
    pairs = ((draw.choice(list(LAYOUTS)), dtype) for dtype in DTYPES.values())
    views = Views([pair for pair in pairs if takes(*pair, x)])
    assert len(views.views) > 6
    check(views, purevk.compile(views, (x,)), x)


def test_tensors_without_dims():
    x = elements(torch.float32)
    views = Views([("input", torch.int32), ("copied", torch.int32)])
    check(views, purevk.compile(views, (x,)), x)
    x = elements(torch.complex64)
    views = Views([("input", torch.int64), ("copied", torch.float64)])
    check(views, purevk.compile(views, (x,)), x)


@pytest.mark.parametrize("name", ["float16", "int64", "complex64"])
def test_dynamic_sizes(name):
    rows, columns = torch.export.Dim("rows", max=9), torch.export.Dim("columns", max=16)
    views = Views(
        [("input", torch.int8), ("copied", torch.float64), ("from an offset", torch.int32)]
    )
    x = elements(DTYPES[name], 3, 4, 32)
    program = purevk.compile(views, (x,), dynamic_shapes=({0: rows, 2: 8 * columns},))
    for sizes in ((3, 4, 32), (9, 4, 8), (1, 4, 128)):
        check(views, program, elements(DTYPES[name], *sizes))


class Writes(torch.nn.Module):
    """Clears the signs of a tensor through a view as integers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.view(torch.int32).bitwise_and_(0x7FFFFFFF)
        return y + 1


def test_a_view_is_written():
    x = torch.randn(4, 6)
    assert torch.equal(purevk.compile(Writes(), (x,)).forward(x), x.abs() + 1)
    assert torch.equal(torch.compile(Writes(), backend="purevk")(x), x.abs() + 1)


class Halves(torch.nn.Module):
    """Views of half precision between operators, where float32 may take its place."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        bits = y.view(torch.int32)
        return bits, (bits ^ 1).view(x.dtype) + 1, y.view(torch.bfloat16)


def test_devices_without_half_precision(monkeypatch):
    x = torch.randn(4, 6).half()
    monkeypatch.setenv("PUREVK_DISABLE", "storage_16bit")
    with Context(api.open_device(validation=True)) as context:
        with purevk.compile(Halves(), (x,), device=context) as program:
            assert program.report()["cpu_nodes"] > 0
            for mine, theirs in zip(program.forward(x), Halves()(x), strict=True):
                assert torch.equal(mine, theirs)
