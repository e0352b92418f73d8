"""What export decided from sizes, in files of `PurevkPartitioner`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import purevk
from purevk.errors import SizeConstraintError

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")
pytestmark = pytest.mark.device


class Model(torch.nn.Module):
    def __init__(self, takes_the_first: Callable[[Any, Any], bool]) -> None:
        super().__init__()
        self.takes_the_first = takes_the_first

    def forward(self, x: Any, y: Any) -> Any:
        return x.sum() + (y.sum() if self.takes_the_first(x, y) else y.sum() * 100)


@pytest.mark.parametrize(
    ("decides", "bounds"),
    [
        (lambda x, y: y.shape[0] > 3, ((2, 9), (4, 9))),
        (lambda x, y: x.shape[0] > 3, ((4, 9), (2, 9))),
        (lambda x, y: x.shape[0] != y.shape[0], ((2, 9), (2, 9))),
    ],
    ids=["second", "first", "both"],
)
def test_sizes_with_one_upper_bound(decides: Any, bounds: Any) -> None:
    """They are one size in the graph, and are told apart where export did so."""
    from executorch.exir import to_edge_transform_and_lower

    from purevk.export import PurevkPartitioner

    model = Model(decides)
    shapes = tuple(
        {0: torch.export.Dim(name, min=low, max=high)}
        for name, (low, high) in zip("ab", bounds, strict=True)
    )
    exported = torch.export.export(
        model, (torch.ones(5, 2), torch.ones(7, 2)), dynamic_shapes=shapes
    )
    edge = to_edge_transform_and_lower(exported, partitioner=[PurevkPartitioner()])
    with purevk.load(edge.to_executorch().buffer) as program:
        for rows in ((5, 7), (7, 7), (3, 7), (7, 3), (1, 7), (7, 1), (8, 4), (4, 8)):
            x, y = (torch.ones(count, 2) * n for n, count in enumerate(rows, 1))
            inside = all(low <= n <= high for n, (low, high) in zip(rows, bounds, strict=True))
            if inside and decides(x, y):
                torch.testing.assert_close(program(x, y), model(x, y))
            else:
                with pytest.raises(SizeConstraintError):
                    program(x, y)
