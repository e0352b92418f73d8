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


# Where a module has the tensor that its call reads.
HOLDERS: dict[str, tuple[Callable[[Any, Any], None], Callable[[Any], Any]]] = {
    "attribute": (lambda m, t: setattr(m, "kept", t), lambda m: m.kept),
    "list": (lambda m, t: setattr(m, "kept", [t, t + 1]), lambda m: m.kept[1]),
    "dict": (lambda m, t: setattr(m, "kept", {"a": t}), lambda m: m.kept["a"]),
    "changed dict": (lambda m, t: m.other.update(a=t), lambda m: m.other["a"]),
    "tuple in a dict": (
        lambda m, t: setattr(m, "kept", {"a": (t, t * 2)}),
        lambda m: m.kept["a"][1],
    ),
    "buffer": (lambda m, t: setattr(m, "rows", t), lambda m: m.rows),
    "parameter": (
        lambda m, t: setattr(m, "weight", torch.nn.Parameter(t, False)),
        lambda m: m.weight,
    ),
}
READERS: list[Callable[[Any, Any], Any]] = [
    lambda x, t: t[0] * x.sum(),
    lambda x, t: x[:1, :1] + t.transpose(0, 1),
    lambda x, t: (x[:, :2] @ t).relu(),
    lambda x, t: torch.cat([t, t * 2], 1).sum(0) - x.mean(),
    lambda x, t: t.sum() + x[: t.shape[1]],
]


@pytest.mark.parametrize("name", HOLDERS)
def test_tensors_of_modules_have_another_size_at_a_later_call(name: str) -> None:
    rng = random.Random(name)
    write, read = HOLDERS[name]
    reader = rng.choice(READERS)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other: dict[str, Any] = {}
            self.register_buffer("rows", torch.zeros(2, 2))

        def forward(self, x: Any) -> Any:
            return reader(x, read(self))

    torch._dynamo.reset()
    module = Model()
    run = torch.compile(module, backend="purevk", options={"fallback": False})
    with torch.no_grad():
        for width in (3, 5, 4, 6, 5):
            write(module, torch.randint(-4, 5, (2, width)).float())
            for rows in (6, 7):
                x = torch.randint(-4, 5, (rows, 3)).float()
                torch.testing.assert_close(run(x), module(x))
