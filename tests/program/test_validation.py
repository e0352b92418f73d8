"""Whole programs under the Khronos validation layer, synchronization validation included: not one
message."""

from __future__ import annotations

import numpy as np
import pytest

import purevk
from purevk import api
from purevk.cache import Cache, default_cache
from purevk.errors import ValidationError
from purevk.graph.compute_graph import ComputeGraph
from purevk.graph.context import Context
from tests.harness import DATA, python
from tests.models.harness import distance, exported, outputs, parameters, samples_of

pytestmark = pytest.mark.device


@pytest.mark.export
@pytest.mark.parametrize(
    ("name", "variant"),
    parameters(("mobilenet_v2", "encoder2", "decoder", "fallback_cumsum"), ("fp32",))
    + parameters(
        ("resnet18", "minilm_sdpa_dyn", "minilm_eager_dyn", "deit_tiny", "decoder_dyn"), ("fp16",)
    ),
)
def test_a_model_runs_without_a_message(name: str, variant: str) -> None:
    """Loading, several calls, a reset and closing; each message would raise ValidationError."""
    path = exported(name, variant)
    with Context(api.open_device(validation=True), default_cache()) as context:
        with purevk.load(path, context=context) as program:
            for inputs, expected in samples_of(path)[:4]:
                for one, two in zip(outputs(program.forward(*inputs)), expected):
                    assert distance(one, two).error < 0.05
            program.reset_state()
            program.forward(*samples_of(path)[0][0])
            context.device.check()


def test_the_variable_switches_it_on() -> None:
    source = """
import json, sys, numpy as np, purevk
with purevk.load(sys.argv[1]) as program:
    program.forward(np.ones((2, 5), np.float32))
    on = program.device.instance.validation
    program.device.check()
print(json.dumps(on))
"""
    assert python(source, DATA / "linear_relu.pte", PUREVK_VALIDATION="1") is True
    assert python(source, DATA / "linear_relu.pte", PUREVK_VALIDATION="0") is False


def test_a_missing_barrier_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The silence above means something: without the barriers between dispatches, synchronization
    validation speaks up."""
    monkeypatch.setattr(ComputeGraph, "_hazards", lambda self: [False] * len(self.dispatches))
    with pytest.raises(ValidationError, match="SYNC-HAZARD"):
        with Context(api.open_device(validation=True), Cache(None)) as context:
            with purevk.load(exported("encoder2"), context=context) as program:
                program.forward(np.ones((1, 128, 256), np.float32))
