"""complex32 as storage: computed in complex64, rounded when it is written. Complex numbers in
files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import purevk
from purevk.errors import InputError

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]
C32, C64 = torch.complex32, torch.complex64


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def numbers(*sizes: int, dtype: torch.dtype = C32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, dtype=C64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(C64) if tensor.dtype is C32 else tensor.float()


HALVES = torch.linspace(-2, 2, 48).half().view(6, 8)
# What torch computes too: results are equal bit by bit.
EXACT: dict[str, Callable[[torch.Tensor], Any]] = {
    "to complex64": lambda z: z.to(C64),
    "and back": lambda z: (z.to(C64) * 3).to(C32),
    "sum": lambda z: z + z,
    "product": lambda z: z * z,
    "with halves": lambda z: z * HALVES,
    "with a number": lambda z: z * 2 + 1j,
    "parts": lambda z: (z.real, z.imag, torch.view_as_real(z) * 2),
    "size": torch.abs,
    "transposed": lambda z: z.t().contiguous(),
    "joined": lambda z: torch.cat([z, z], 1)[1:3, ::2],
    "conjugate": lambda z: z.conj() * 2,
    "choice": lambda z: torch.where(z.real > 0, z, -z),
}
# What torch refuses: compared with complex64, up to a rounding.
ROUNDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "exp": torch.exp,
    "sum of rows": lambda z: z.sum(0),
    "matmul": lambda z: z @ z.t(),
    "fft": torch.fft.fft,
}


@pytest.mark.parametrize("name", EXACT)
def test_equals_torch(name: str) -> None:
    function, z = EXACT[name], numbers(6, 8)
    made = purevk.compile(Module(function), (z,))(z)
    wanted = function(z)
    for have, want in zip(
        *(each if isinstance(each, tuple) else (each,) for each in (made, wanted))
    ):
        assert have.dtype is want.dtype
        assert torch.equal(wide(have), wide(want))


@pytest.mark.parametrize("name", ROUNDED)
def test_what_torch_refuses(name: str) -> None:
    function, z = ROUNDED[name], numbers(6, 8)
    made = purevk.compile(Module(function), (z,))(z)
    assert made.dtype is C32
    torch.testing.assert_close(made.to(C64), function(z.to(C64)), rtol=2e-3, atol=2e-3)


def test_of_real_halves() -> None:
    def function(x: torch.Tensor) -> Any:
        return x * 1j, torch.view_as_complex(x.view(6, 4, 2))

    for have, want in zip(purevk.compile(Module(function), (HALVES,))(HALVES), function(HALVES)):
        assert have.dtype is want.dtype is C32
        assert torch.equal(wide(have), wide(want))


def test_states_weights_and_files(tmp_path: Path) -> None:
    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Buffer(numbers(4, seed=1))
            self.total = torch.nn.Buffer(torch.zeros(4, dtype=C32))

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            self.total.copy_(self.total + z * self.weight)
            return self.total * 2

    eager, z = Turned(), numbers(4)
    with purevk.compile(Turned(), (z,)) as program:
        program.save(tmp_path / "turned.pvk")
    with purevk.load(tmp_path / "turned.pvk") as program:
        for _ in range(3):
            assert torch.equal(wide(program(z)), wide(eager(z)))
        bits = z.view(torch.uint32).numpy()
        assert program.forward(bits).dtype == bits.dtype
        with pytest.raises(InputError):
            program.forward(z.to(C64))


class Spectrum(torch.nn.Module):
    """Complex numbers as an input, a weight, in between and as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = torch.nn.Parameter(numbers(8, dtype=C64, seed=2))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        turned = torch.view_as_complex(x) * self.turn
        return torch.view_as_real(turned), torch.fft.fft(turned) + z


@pytest.mark.parametrize("dtype", [C64, torch.complex128])
@pytest.mark.parametrize(
    "function",
    [lambda z: z.clone(), lambda z: z[0, 0], lambda z: (z, z[1:], z.t())],
    ids=["copy", "element", "views"],
)
def test_results_that_are_weights(
    function: Callable[[torch.Tensor], Any], dtype: torch.dtype
) -> None:
    """A copy of a weight is made of its pairs."""

    class Read(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", numbers(3, 5, dtype=dtype))

        def forward(self, z: torch.Tensor) -> Any:
            return function(self.weight), z

    z = numbers(2, dtype=dtype)
    with purevk.compile(Read(), (z,)) as program:
        torch.testing.assert_close(program.forward(z), Read()(z), rtol=0, atol=0)


def test_parts_in_a_saved_program(tmp_path: Path) -> None:
    module, args = Spectrum(), (torch.randn(3, 8, 2), numbers(3, 8, dtype=C64))
    with purevk.compile(module, args) as program:
        program.save(tmp_path / "spectrum.pvk")
    with purevk.load(tmp_path / "spectrum.pvk") as program, torch.no_grad():
        for have, want in zip(program(*args), module(*args), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.export
@pytest.mark.parametrize("vulkan", [False, True], ids=["portable", "vulkan"])
def test_complex_numbers_in_a_file_of_executorch(vulkan: bool) -> None:
    pytest.importorskip("executorch")
    from tests.program.harness import file_of

    module, args = Spectrum(), (torch.randn(3, 8, 2), numbers(3, 8, dtype=C64))
    with purevk.load(file_of(module, args, vulkan=vulkan)) as program, torch.no_grad():
        for have, want in zip(program(*args), module(*args), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_torch_compile() -> None:
    z = numbers(6, 8)
    options = {"fallback": False}
    made = torch.compile(Module(EXACT["product"]), backend="purevk", options=options)(z)
    assert torch.equal(wide(made), wide(z * z))
