"""What memory is planned for, of sizes without a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
import purevk.dynamo  # noqa: E402  registers the backend
from purevk import compiled_graphs  # noqa: E402

pytestmark = pytest.mark.device
_SIZES = ((300, 900), (500, 900), (3, 60))


class Module(torch.nn.Module):
    """Views of an input, and sums over it."""

    def forward(self, x: torch.Tensor) -> Any:
        return x[0] * 2, x[:, 1:].sum(-1), (x[-1] + x[0]).amax(0)


@pytest.mark.export
def test_inputs_are_planned_for_little_more_than_the_first_call(tmp_path: Path) -> None:
    random, module = np.random.default_rng(3), Module()
    dynamic = (
        {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.AUTO},
    )
    sizes = [[int(each) for each in random.integers(least, most, 2)] for least, most in _SIZES]
    calls = [torch.randn(int(random.integers(2, 5)), *each) for each in sizes]
    compiled = torch.compile(module, backend="purevk", dynamic=True, options={"fallback": False})
    before = set(compiled_graphs.shared)
    with torch.no_grad(), purevk.compile(module, (calls[0],), dynamic_shapes=dynamic) as program:
        program.save(tmp_path / "x.pvk")
        with purevk.load(tmp_path / "x.pvk") as loaded:
            for number, x in enumerate(calls):
                for run in (program.forward, loaded.forward, compiled):
                    for made, wanted in zip(run(x), module(x)):
                        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)
                if number:
                    continue
                (shared,) = set(compiled_graphs.shared) - before
                for each in (program, loaded, shared.program):
                    (method,) = each.methods.values()
                    (value,) = [v for v in method.graph.inputs if hasattr(v, "type")]
                    assert value.type.nbytes <= max(2 * x.nbytes, 2**20)
                    assert each.memory.inputs <= max(2 * x.nbytes, 2**20) + 4096
            assert len(loaded.method("forward").specializations) <= len(calls)
