"""Norms of rows that lie apart, such as the heads of a query beside those of its key, take no copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import purevk
from tests.ops.harness import Case, check, dispatches, program_of, tensor
from tests.ops.quantized.harness import kernels_of

pytestmark = pytest.mark.device

NORM = "reduce/norm.comp"
COPY = "elementwise/pointwise.comp"


def heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x[..., 16:64].unflatten(-1, (3, 16)), (16,), w)


def unaligned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x[..., 3:51].unflatten(-1, (3, 16)), (16,), w)


def columns(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x[..., 32:48], (16,), w)


def two_dims(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x[:, 1:4].unflatten(-1, (6, 12)), (6, 12))


def rows_swapped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x[..., :16].transpose(0, 1), (16,), w)


def one_row_for_many(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x[:, :1, :16].expand(-1, 5, -1), (16,), w)


def with_a_program_behind(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(heads(x, w)) * 2 + w


def two_lots_of_heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x[:, :, :48].unflatten(-1, (3, 16)).transpose(1, 2), (16,), w)


def strided(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x[..., ::4][..., :16], (16,), w)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "function, copies",
    [
        (heads, 0),
        (unaligned, 0),
        (columns, 0),
        (two_dims, 0),
        (rows_swapped, 0),
        (one_row_for_many, 0),
        (with_a_program_behind, 0),
        (two_lots_of_heads, 1),  # three steps: the batch, the heads and the tokens
        (strided, 1),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_norms_of_parts(device: str, function: Callable[..., torch.Tensor], copies: int) -> None:
    x, w = tensor(2, 5, 72), tensor(16)
    half = Case(function, (x.half(), w.half()), rtol=2e-3, atol=2e-3)
    with kernels_of(device):
        check([Case(function, (x, w), atol=1e-5), half])
        with program_of(function, (x, w)) as program:
            assert dispatches(program) == [COPY] * copies + [NORM]


class Heads(torch.nn.Module):
    """Norms of heads as models write them, of queries and keys out of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(24, 80)
        self.weights = torch.nn.ParameterList([torch.rand(16), torch.rand(16)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.linear(x).split([48, 32], -1)
        return tuple(
            torch.nn.functional.rms_norm(part.unflatten(-1, (-1, 16)), (16,), weight, 1e-6)
            for part, weight in zip(parts, self.weights)
        )


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_sizes_that_change(device: str) -> None:
    module = Heads().eval()
    tokens = torch.export.Dim("tokens", max=40)
    with kernels_of(device):
        program = purevk.compile(module, (torch.rand(2, 6, 24),), dynamic_shapes=({1: tokens},))
        for count in (6, 1, 40, 17):
            x = torch.rand(2, count, 24)
            for found, wanted in zip(program.forward(x), module(x)):
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert dispatches(program)[-2:] == [NORM] * 2 and len(dispatches(program)) == 3
