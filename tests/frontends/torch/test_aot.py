"""Graphs of torch.compile whose sizes vary: slices, splits and concatenations of dynamic dims agree with
eager torch at all sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import purevk.dynamo  # noqa: E402, F401  registers the backend, also where purevk is not installed

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]

Step = Callable[[Any], Any]
# Steps of x [a, b, c, d] that keep its sizes, along dim `d`.
STEPS: dict[str, Callable[[int], Step]] = {
    "rotate_half": lambda d: (
        lambda x: torch.cat(
            [
                -x.narrow(d, x.shape[d] // 2, x.shape[d] - x.shape[d] // 2),
                x.narrow(d, 0, x.shape[d] // 2),
            ],
            d,
        )
    ),
    "tensor_split": lambda d: lambda x: torch.cat(torch.tensor_split(x, 3, d)[::-1], d),
    "chunk": lambda d: lambda x: torch.cat([each * 2 for each in x.chunk(2, d)], d),
    "roll": lambda d: lambda x: x.roll(x.shape[d] // 3, d),
    "shift": lambda d: (
        lambda x: torch.cat([x.narrow(d, 0, 1), x.narrow(d, 0, x.shape[d] - 1)], d) + x
    ),
    "reverse": lambda d: lambda x: x.flip(d) - x,
    "interleave": lambda d: lambda x: torch.stack([x, x * 2], -1).flatten(-2)[..., : x.shape[3]],
    "mean": lambda d: lambda x: x - x.narrow(d, x.shape[d] // 2, 1),
    "last": lambda d: (
        lambda x: torch.cat([x, x.select(d, -1).unsqueeze(d)], d).narrow(d, 1, x.shape[d])
    ),
    "permute": lambda d: lambda x: x.transpose(d, 1).contiguous().relu().transpose(d, 1),
    "reshape": lambda d: lambda x: x.reshape(x.shape[0], -1, x.shape[3]).cumsum(1).reshape(x.shape),
}


@pytest.mark.parametrize("seed", range(6))
def test_slices_and_concatenations_at_several_sizes(seed: int) -> None:
    rng = random.Random(seed)
    chosen = [(name, rng.randrange(4)) for name in rng.sample([*STEPS], 2)]

    def forward(x: Any) -> Any:
        for name, d in chosen:
            x = STEPS[name](d)(x)
        return x

    torch._dynamo.reset()
    run = torch.compile(forward, backend="purevk", dynamic=True, options={"fallback": False})
    # Rounded up, these sizes would be more than one binding spans.
    sizes = [(2, 8, 200, 16), (3, 5, 7, 6), (2, 8, 201, 17), (2, 8, 200, 16)]
    for shape in sizes:
        x = torch.randint(-4, 5, shape).float()
        torch.testing.assert_close(
            run(x), forward(x), msg=lambda text: f"{chosen} at {shape}: {text}"
        )
