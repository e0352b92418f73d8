"""Memory of calls on devices whose allocations may not be large."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import purevk
from purevk import api
from purevk.graph.context import default_context

pytestmark = pytest.mark.device


class Sums(torch.nn.Module):
    """Adds inputs to states, and gives inputs back: scaled, or written to a state before."""

    def __init__(self, sizes: list[int], scales: list[float]) -> None:
        super().__init__()
        self.scales = scales
        for number, size in enumerate(sizes):
            self.register_buffer(f"state_{number}", torch.zeros(size))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for (_, state), x in zip(self.named_buffers(), inputs):
            state.add_(x.sum())
        scaled = [x * scale for x in inputs for scale in self.scales]
        return (*scaled, sum(x.sum() for x in inputs), *(state + 1 for state in self.buffers()))


@pytest.mark.parametrize("seed", range(3))
def test_no_allocation_is_above_the_limit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, made = random.Random(seed), []
    sizes = [rng.choice([1, 63, 64, 65, rng.randint(1, 3000)]) for _ in range(rng.randint(5, 17))]
    largest = 4 * max(sizes) + 256 - 4 * max(sizes) % 256
    limit = rng.randint(largest, 2 * largest)

    class Recorded(api.Buffer):
        def __init__(self, device: api.Device, nbytes: int, *args: Any, **options: Any) -> None:
            super().__init__(device, nbytes, *args, **options)
            made.append(nbytes)

    device = default_context().device
    monkeypatch.setattr(api, "Buffer", Recorded)
    monkeypatch.setattr(device, "limits", replace(device.limits, max_allocation=limit))
    module = Sums(rng.choices(sizes, k=4), [2.0, -0.5][: rng.randint(1, 2)])
    inputs = [torch.randint(-9, 9, (size,)).float() for size in sizes]
    with purevk.compile(module, tuple(inputs)) as program:
        for scale in (1.0, -2.0):
            call = [x * scale for x in inputs]
            for ours, theirs in zip(program(*call), module(*call), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert max(made) <= limit and sum(made) > 3 * limit
