"""Writes through views that torch's functionalization writes through wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import purevk  # noqa: E402
from purevk.errors import UnsupportedProgramError  # noqa: E402
from tests.ops.harness import tensor  # noqa: E402

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Written(torch.nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        self.write(x)
        return x


INFINITE = torch.full((3, 4), -math.inf).triu(1)
CASES = {
    "infinite": (lambda x: x.expand(3, 4).fill_(2), INFINITE),
    "large": (lambda x: x.expand_as(x).fill_(1), tensor(3, 4) * 1e20),
    "bool": (lambda x: x.expand(3, -1).logical_not_(), tensor(3, 4) > 0),
    "dims in front": (lambda x: torch.broadcast_to(x, (1, 1, 3, 4))[..., 1:].mul_(2), INFINITE),
    "integers of a part": (lambda x: x.expand(2, 3, 4)[1].add_(2), torch.arange(12).reshape(3, 4)),
    "windows": (lambda x: x.unfold(1, 2, 2).add_(1), tensor(3, 5)),
    "windows with gaps": (lambda x: x.t().unfold(0, 1, 2)[0].add_(1), tensor(3, 4)),
    "one window": (lambda x: x.unfold(-1, 3, 1).add_(1), tensor(3, 3)),
    "a short last window": (lambda x: x.unfold(1, 2, 3).add_(1), tensor(3, 5)),
    "windows of bools": (lambda x: x.unfold(1, 2, 3).logical_not_(), tensor(3, 7) > 0),
    "by an argument": (lambda x: torch.relu_(x) + F.relu(x.expand(3, -1), True), INFINITE),
    "lists": (lambda x: torch._foreach_add_([x.expand(3, -1)], 1.0), INFINITE),
    "windows that are read": (lambda x: x.add_(x.unfold(1, 3, 1).sum()), tensor(3, 7)),
}


@pytest.mark.parametrize("name", CASES)
def test_writes_through_views(name: str) -> None:
    write, x = CASES[name]
    module = Written(write)
    with purevk.compile(module, (x,)) as program:
        torch.testing.assert_close(program(x), module(x))
    compiled = torch.compile(module, backend="purevk", options={"fallback": False})
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.expand(2, 3, 4)[0].mul_(2),
        lambda x: x.unfold(1, 3, 1)[:, 1].mul_(2),
    ],
)
def test_writes_into_elements_that_are_seen_several_times(write: Callable[..., object]) -> None:
    module, x = Written(write), tensor(3, 4)
    with pytest.raises(UnsupportedProgramError, match="a write goes into a part of"):
        purevk.compile(module, (x,))
    compiled = torch.compile(module, backend="purevk", options={"fallback": True})
    with pytest.warns(UserWarning, match="a write goes into a part of"):
        torch.testing.assert_close(compiled(x), module(x))


def test_a_short_last_window_of_a_part() -> None:
    write = Written(lambda x: x[:, 1:].unfold(1, 1, 2).add_(1))
    with pytest.raises(UnsupportedProgramError, match="a write goes into a part of unfold"):
        purevk.compile(write, (tensor(3, 4),))
