"""Sizes of which the program holds only for multiples: views of them need no guard, and a saved
program takes every size that torch's own exported program takes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.export import Dim  # noqa: E402

import purevk  # noqa: E402
from purevk.errors import InputError  # noqa: E402

pytestmark = pytest.mark.device


class Views(nn.Module):
    """Views of x[n, c] for multiples of random numbers, and decisions by the size."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.by, self.of_both, self.at = (
            rng.choice([2, 3, 5]),
            rng.choice([4, 6]),
            rng.randint(2, 9),
        )

    def forward(self, x: Any, y: Any) -> tuple[Any, ...]:
        k, n = self.by, x.shape[0]
        return (
            x.view(k, -1).sum(1),
            x.unflatten(0, (k, -1)).flatten(0, 1) + x,
            x.view(k, n // k, x.shape[1]).transpose(0, 1).reshape(-1),
            x.flatten().view(-1, k * x.shape[1]) * 2,
            y.flatten().view(self.of_both, -1).cumsum(1),
            y.flatten().view(self.of_both, -1).flatten() + y.flatten(),
            torch.cond(n == self.at * k, lambda x: x + 1, lambda x: x * 2, (x,)),
            torch.cond(y.shape[0] % 3 == 0, lambda x: x - 1, lambda x: x * 3, (x,)),
            x * torch.sym_ite(y.shape[1] > self.at, n, y.shape[0]),
        )


class _Multiples(nn.Module):
    def forward(self, x: Any) -> tuple[Any, ...]:
        n = x.shape[0]
        return (
            x.reshape(2, -1, 3) + 1,
            x.view(3, n // 3, 4).flatten(0, 1) + x,
            x.unflatten(0, (3, -1)).sum(0),
        )


@pytest.mark.parametrize("seed", range(3))
def test_views_of_multiples(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    module, columns = Views(rng), rng.randint(2, 4)

    def call(rows: int, a: int, b: int) -> tuple[Any, Any]:
        return torch.randn(rows * module.by, columns), torch.randn(a, b)

    sizes = [(4, 12, 5), (module.at, 6, 2 * module.of_both), (3, module.of_both, 7), (40, 9, 12)]
    dynamic = ({0: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO})
    exported = torch.export.export(module, call(*sizes[0]), dynamic_shapes=dynamic, strict=False)
    with purevk.compile(exported) as program:
        program.save(tmp_path / "views.pvk")
    with purevk.load(tmp_path / "views.pvk") as program:
        for rows, a, b in sizes:
            x, y = call(rows, a, b)
            try:
                exported.module()(x, y)
            except AssertionError:
                with pytest.raises(InputError):
                    program(x, y)
                continue
            for have, want in zip(program(x, y), module(x, y), strict=True):
                torch.testing.assert_close(have, want)


def test_multiples_of_one_size_need_no_other_lowering() -> None:
    module = _Multiples()
    with purevk.compile(module, (torch.randn(15, 4),), ({0: Dim.AUTO},)) as program:
        for rows in (21, 9, 33, 63):
            x = torch.randn(rows, 4)
            for have, want in zip(program(x), module(x), strict=True):
                torch.testing.assert_close(have, want)
        assert len(program.methods["forward"].variants[0].specializations) == 1
