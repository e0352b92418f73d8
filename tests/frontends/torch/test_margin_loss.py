"""multilabel_margin_loss, whose decomposition in torch is wrong, against the kernel of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from purevk.frontends.torch import fast_paths
from purevk.frontends.torch.decompose import decompose

LABELS = torch.tensor([[0, 1, -1, 2, 3], [3, -1, 0, 0, 0], [-1, 0, 1, 2, 4], [4, 3, 2, 1, 0]])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("rows", [(), 4], ids=["vector", "rows"])
def test_labels_end_before_the_first_minus_one(rows: Any, reduction: str) -> None:
    class Loss(torch.nn.Module):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.multilabel_margin_loss(x, labels, reduction=reduction)

    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    args = (x, LABELS) if rows else (x[0], LABELS[0])
    have = decompose(torch.export.export(Loss(), args)).module()(*args)
    torch.testing.assert_close(have, Loss()(*args))


def test_each_result_is_that_of_the_kernel() -> None:
    operator = torch.ops.aten.multilabel_margin_loss_forward.default
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    have = fast_paths.table()[operator](x, LABELS, 0)
    torch.testing.assert_close(have, operator(x, LABELS, 0))
