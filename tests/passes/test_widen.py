"""Devices that cannot store half precision: their results are those of devices that can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import purevk
from purevk import api
from purevk.graph.context import Context, default_context
from tests.ops import harness, test_rounding

pytestmark = pytest.mark.device
NARROW = test_rounding.NARROW


@pytest.fixture(scope="module")
def without_halves() -> Iterator[Context]:
    assert default_context().traits.has("storage_16bit")  # it is opened before the feature goes
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PUREVK_DISABLE", "storage_16bit")
        with Context(api.open_device()) as context:
            patch.setattr(harness, "context", lambda: context)
            yield context


@pytest.mark.usefixtures("without_halves")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(
    "check",
    [
        test_rounding.test_what_is_no_float_arithmetic_reads_rounded_numbers,
        test_rounding.test_kernels_and_wider_dtypes_read_rounded_numbers,
        test_rounding.test_numbers_are_rounded_where_they_are_compared,
        test_rounding.test_integers_are_rounded_before_floats_read_them,
    ],
    ids=lambda check: check.__name__.removeprefix("test_"),
)
def test_numbers_are_rounded_as_memory_would(check, dtype):
    check(dtype)


class Mixed(torch.nn.Module):
    """Kernels with programs on their results, branches, states and what only the CPU computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(24, 24).to(dtype)
        self.register_buffer("total", torch.zeros(4, 24, dtype=dtype))

    def forward(self, x: torch.Tensor, flag: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def large(x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).softmax(-1) * 3.1

        def small(x: torch.Tensor) -> torch.Tensor:
            return (x.cumsum(-1) * 0.3).floor() + self.linear.weight.sum()

        y = torch.cond(flag, large, small, (x,))
        self.total.add_(y)
        bits = y.view(torch.int16) & 0x7FF0
        z = torch.linalg.eigvals(y.float()[:, :4])
        ranks, many = self.total.sort(-1)[1], (self.linear(x) * 0.3).floor() == x.sum()
        return y, ranks, many, bits.view(y.dtype) > y, z.real.to(y.dtype), y.sum() == 70000


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_results_equal_those_of_stored_halves(without_halves, dtype):
    torch.manual_seed(1)
    module = Mixed(dtype).eval().requires_grad_(False)
    x = (torch.randn(4, 24) * 3).to(dtype)
    programs = [
        purevk.compile(module, (x, torch.tensor(True)), device=device)
        for device in (without_halves, None)
    ]
    for flag in (True, False, True):
        made, wanted = (program.forward(x, torch.tensor(flag)) for program in programs)
        for mine, theirs in zip(made, wanted, strict=True):
            assert mine.dtype is theirs.dtype
            assert torch.equal(mine, theirs)


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 0.3, x.view(100, 400).amax(1)


def test_tensors_are_bound_by_the_bytes_of_float32(monkeypatch):
    monkeypatch.setenv("PUREVK_DISABLE", "storage_16bit")
    x = torch.randn(40000).half()
    with Context(api.open_device()) as context:
        context.traits = replace(context.traits, max_storage_range=3 * x.nbytes // 2)
        with purevk.compile(Scaled(), (x,), device=context) as program:
            for mine, theirs in zip(program.forward(x), Scaled()(x), strict=True):
                assert torch.equal(mine, theirs)
