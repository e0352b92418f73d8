"""Counts of values, whose number follows from the largest one, against torch."""

from __future__ import annotations

import random

import pytest
import torch

import purevk
from purevk.errors import InputError, UnsupportedProgramError

pytestmark = pytest.mark.device

_FORMS = {
    "counts": lambda x, w: torch.bincount(x),
    "least number": lambda x, w: torch.bincount(x, minlength=9) * 2,
    "as many as elements": lambda x, w: torch.bincount(x, minlength=x.shape[0]).float()[:, None],
    "weights": lambda x, w: torch.bincount(x, w),
    "weights in float64": lambda x, w: torch.bincount(x, w.double(), minlength=40),
    "integers as weights": lambda x, w: torch.bincount(x, (9 * w).long()),
}


class _Module(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return _FORMS[self.name](x, w)


@pytest.mark.parametrize("name", _FORMS)
def test_random_values(name: str) -> None:
    chance, generator = random.Random(name), torch.Generator().manual_seed(len(name))
    module, length = _Module(name), {0: torch.export.Dim("n", min=1, max=4096)}
    for dtype in chance.sample((torch.int64, torch.int32, torch.int16, torch.uint8), 2):
        example = torch.arange(50).to(dtype), torch.rand(50, generator=generator)
        with purevk.compile(module, example, dynamic_shapes=(length, length)) as program:
            assert program.report()["cpu_nodes"] == 0
            for count in (50, 1, chance.randint(2, 40), chance.randint(1000, 4096)):
                most = chance.choice((1, 30, 120))
                x = torch.randint(0, most, (count,), generator=generator).to(dtype)
                w = torch.rand(count, generator=generator)
                torch.testing.assert_close(program(x, w), module(x, w), rtol=1e-5, atol=1e-5)
            if dtype.is_signed:
                with pytest.raises(InputError, match="negative"):
                    program(x - most - 1, w)


def test_no_values() -> None:
    x = torch.zeros(0, dtype=torch.int64)
    with purevk.compile(_Module("least number"), (x, torch.rand(0))) as program:
        torch.testing.assert_close(program(x, torch.rand(0)), torch.zeros(9, dtype=torch.int64))


def test_sums_that_an_export_has_as_whole_numbers_are_refused() -> None:
    """As torch 2.11 and older export them."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return torch.bincount(x, weights) + 1

    exported = torch.export.export(Module(), (torch.arange(5), torch.rand(5)))
    (node,) = [node for node in exported.graph.nodes if "bincount" in str(node.target)]
    with node.meta["val"].fake_mode:
        node.meta["val"] = node.meta["val"].to(torch.int64)
    with pytest.raises(
        UnsupportedProgramError, match=r"(?s)bincount.* as int64.*float32.*update torch"
    ):
        purevk.compile(exported)
