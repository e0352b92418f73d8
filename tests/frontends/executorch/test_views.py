"""Views at positions that lie outside of a tensor of other sizes. Files of executorch do not hold the
conditions of the export, and its runtime takes the nearest position."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import purevk  # noqa: E402
from purevk.errors import InputError  # noqa: E402
from tests.program.harness import file_of, tensor  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.export, pytest.mark.slow]

ROWS = {0: torch.export.Dim.AUTO}


class Model(torch.nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, y):
        return self.function(x, y)


def load(function: Callable, vulkan: bool) -> purevk.Program:
    inputs = (tensor(9, 4), tensor(6, 2))
    return purevk.load(file_of(Model(function), inputs, (ROWS, ROWS), vulkan))


SLICES = {
    "last": lambda x, y: x[-6:] * y.sum(),
    "last but two": lambda x, y: x[-6:-2] * y.sum(),
    "first of a size": lambda x, y: x[: y.shape[0]] * y.sum(),
    "from a size": lambda x, y: x[y.shape[0] :] * y.sum(),
    "last of a size": lambda x, y: x[-y.shape[0] :] * y.sum(),
}


@pytest.mark.parametrize(
    ("name", "vulkan"),
    [*((name, False) for name in SLICES), *((name, True) for name in [*SLICES][:-1])],
)
def test_slices(name: str, vulkan: bool) -> None:
    function = SLICES[name]
    with load(function, vulkan) as program:
        for rows, others in ((9, 6), (7, 4), (3, 6), (2, 2), (4, 5)):
            x, y = tensor(rows, 4), tensor(others, 2)
            torch.testing.assert_close(program.forward(x, y), function(x, y))


@pytest.mark.parametrize("index", [-6, 5])
def test_selections(index: int) -> None:
    with load(lambda x, y: x[index] * y.sum(), vulkan=True) as program:
        x, y = tensor(6, 4), tensor(6, 2)
        torch.testing.assert_close(program.forward(x, y), x[index] * y.sum())
        with pytest.raises(InputError, match="is outside of dim 0"):
            program.forward(tensor(5, 4), y)
