"""Control flow, buffers and several methods of `.pte` files, against eager torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

from tests.program.control.models import (  # noqa: E402
    BATCH,
    FALSE,
    TRUE,
    Nested,
    Recurrence,
    Returned,
    Sizes,
    Small,
)
from tests.program.harness import check_file, tensor  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.export, pytest.mark.slow]


class Between(torch.nn.Module):
    """A choice between parts that are delegated."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, choice):
        y = self.linear(x).relu()
        z = torch.cond(choice, lambda y: y.cumsum(0), lambda y: y.cumsum(1), (y,))
        return self.linear(z) * 2


class RowsOfOne(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, y):
        from torch._higher_order_ops.map import map as torch_map

        return torch_map(lambda row, y: self.linear(row) + y, x, y)


class ChoiceInMap(torch.nn.Module):
    def forward(self, x, choice):
        from torch._higher_order_ops.map import map as torch_map

        return torch_map(
            lambda row, c: torch.cond(c, lambda r: r.cumsum(0), lambda r: r * 2, (row,)), x, choice
        )


def test_choices():
    torch.manual_seed(1)
    calls = [(tensor(size, 4), choice) for size in (3, 16) for choice in (TRUE, FALSE)]
    check_file(Small(), calls, {"x": BATCH, "choice": None}, control=0)


@pytest.mark.parametrize("vulkan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_choice_between_delegates(vulkan):
    torch.manual_seed(2)
    check_file(
        Between(),
        [(tensor(5, 4), choice) for choice in (TRUE, FALSE)],
        None,
        vulkan,
        delegates=vulkan,
        control=1,
    )


@pytest.mark.slow
def test_nested_choices_and_choices_by_size():
    check_file(
        Nested(), [(tensor(3, 4), a, b.clone()) for a in (TRUE, FALSE) for b in (TRUE, FALSE)]
    )
    check_file(Sizes(), [(tensor(size, 4),) for size in (3, 9, 4, 16)], {"x": BATCH}, control=1)


@pytest.mark.slow
def test_maps_and_scans():
    torch.manual_seed(2)
    check_file(
        RowsOfOne(),
        [(tensor(n, 4), tensor(4, seed=1)) for n in (3, 7)],
        {"x": BATCH, "y": None},
        control=1,
    )
    check_file(
        Recurrence(),
        [(tensor(4), tensor(n, 4, seed=1)) for n in (5, 9)],
        {"first": None, "x": BATCH},
        control=1,
    )
    check_file(ChoiceInMap(), [(tensor(3, 4), TRUE), (tensor(3, 4), FALSE)])


@pytest.mark.slow
def test_a_cache_that_one_branch_changes():
    calls = [
        (tensor(1, 4, seed=at), torch.tensor([at]), TRUE if at % 2 else FALSE) for at in range(6)
    ]
    check_file(Returned(), calls, None, vulkan=True, delegates=True)
