"""Programs whose sizes have no bound run on the device, also where these sizes, rounded up, would be of
a tensor that is larger than one binding spans."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.export import Dim  # noqa: E402

import purevk  # noqa: E402
import purevk.dynamo  # noqa: E402  registers the backend, also where purevk is not installed

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]

# The first operator is a view of the input, x [a, 3, c, d] with a, c and d that vary.
VIEWS: dict[str, Callable[[Any], Any]] = {
    "first": lambda x: x[0],
    "channel": lambda x: x[:, 0],
    "columns": lambda x: x[..., 1:],
    "chunk": lambda x: x.chunk(2, -1)[1],
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "last row": lambda x: x[:, :, -1],
    "all": lambda x: x,
}
READERS: dict[str, Callable[[Any], Any]] = {
    "mul": lambda x: x * 2,
    "amax": lambda x: x.amax(-1),
    "softmax": lambda x: x.softmax(-1),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "sum": lambda x: x.sum(0),
    "copy": lambda x: torch.cat([x, x], -1),
}


class Viewing(torch.nn.Module):
    def __init__(self, view: str, reader: str) -> None:
        super().__init__()
        self.view, self.reader = VIEWS[view], READERS[reader]

    def forward(self, x: Any) -> Any:
        return self.reader(self.view(x))


CASES = [("first", "mul"), *random.Random(0).sample([(v, r) for v in VIEWS for r in READERS], 7)]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_views_of_inputs_without_a_bound(case: tuple[str, str]) -> None:
    module, auto = Viewing(*case), Dim.AUTO
    shapes = [(2, 3, 512, 140), (3, 3, 90, 33), (5, 3, 530, 50), (2, 3, 512, 140)]
    x = torch.randn(shapes[0])
    with purevk.compile(module, (x,), dynamic_shapes=({0: auto, 2: auto, 3: auto},)) as program:
        for shape in shapes:
            x = torch.randn(shape)
            torch.testing.assert_close(program(x), module(x), rtol=1e-4, atol=1e-4)
        assert "on the CPU" not in repr(program)


def test_views_under_torch_compile() -> None:
    for view in ("first", "columns"):
        torch._dynamo.reset()
        run = torch.compile(
            Viewing(view, "mul"), backend="purevk", dynamic=True, options={"fallback": False}
        )
        for shape in ((2, 3, 512, 140), (5, 4, 530, 50)):
            x = torch.randn(shape)
            with torch.no_grad():
                torch.testing.assert_close(run(x), VIEWS[view](x) * 2)
