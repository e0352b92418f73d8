"""torch.compile on functions that fill tensors with a number of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")


NUMBER = torch.tensor(2.75)
FILLS: dict[str, Callable[[Any, Any], Any]] = {
    "new_full": lambda x, t: x.new_full((3, 2), t),
    "new_full_by_name": lambda x, t: x.new_full(size=(3,), fill_value=t),
    "new_full_of_integers": lambda x, t: x.new_full((x.shape[0], 1), t, dtype=torch.int64),
    "new_full_of_a_number": lambda x, t: x.new_full((3, 2), 1.5),
    "full_like": torch.full_like,
    "full_like_of_integers": lambda x, t: torch.full_like(x, t, dtype=torch.int32),
    "full_like_of_a_number": lambda x, t: torch.full_like(x, 1.5),
}


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.device
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_fills_are_part_of_the_graph(fill: Callable[[Any, Any], Any]) -> None:
    def function(x: Any, t: Any) -> Any:
        return fill(x, t) + 1, x * 2

    compiled = torch.compile(
        function, backend="purevk", fullgraph=True, options={"fallback": False}
    )
    for x, t in ((torch.randn(4, 5), NUMBER), (torch.randn(7, 5), -NUMBER)):
        torch.testing.assert_close(compiled(x, t), function(x, t), rtol=0, atol=0)


@pytest.mark.device
def test_a_loop_over_modules_is_one_graph() -> None:
    class Scale(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = torch.tensor([scale])

        def forward(self, x: Any) -> Any:
            return x * x.new_full((x.shape[-1],), self.scale[0])

    module = torch.nn.Sequential(*(Scale(scale) for scale in (0.5, 2.0, -3.0)))

    class Loop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    loop, x = Loop(), torch.randn(3, 5)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    torch.testing.assert_close(torch.compile(loop, backend="purevk")(x), loop(x))
    assert graphs["unique_graphs"] == before + 1


def test_other_backends_trace_as_before() -> None:
    def function(x: Any, t: Any) -> Any:
        return x.new_full((2,), t), torch.full_like(x, t)

    counted: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        counted.append(module)
        return module.forward

    made = torch.compile(function, backend=backend)(torch.ones(3), NUMBER)
    torch.testing.assert_close(made, function(torch.ones(3), NUMBER))
    assert not any(
        node.target in ("fill_", torch.empty_like) for each in counted for node in each.graph.nodes
    )
