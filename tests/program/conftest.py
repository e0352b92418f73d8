"""Fixtures for whole programs: the small committed ones, what eager torch makes of them, and
devices of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from purevk import api
from purevk.cache import Cache
from purevk.graph.context import Context
from purevk.ir import Node
from purevk.passes import placement
from purevk.tuning import DeviceTraits
from tests.harness import DATA


@pytest.fixture(scope="session")
def linear_input() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((2, 5), np.float32)


@pytest.fixture(scope="session")
def linear_output(linear_input: np.ndarray) -> np.ndarray:
    """What eager torch gives for the model of `linear_relu.pte` and its variants, built as
    `tests/data/make_pte.py` does."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(7)
    linear = torch.nn.Linear(5, 3)
    with torch.no_grad():
        return torch.relu(linear(torch.from_numpy(linear_input))).numpy()


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """A device with an empty cache of its own; everything on it must be gone when it is closed."""
    with Context(api.open_device(), Cache(tmp_path / "cache")) as made:
        yield made
    assert made.device.live_objects() == {}


@pytest.fixture
def topk_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program with a node that goes to the CPU, whatever kernels there are: `topk.pte`, its
    `topk` refused."""
    refusal = placement.refusal

    def refuse(node: Node, traits: DeviceTraits) -> str | None:
        return "refused by the test" if node.op.startswith("aten.topk") else refusal(node, traits)

    monkeypatch.setattr(placement, "refusal", refuse)
    return DATA / "topk.pte"
