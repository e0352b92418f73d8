"""Hidden layers whose widths fill no blocks of 16 terms get columns of zeros, where that is right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import purevk
from purevk.dtypes import DType
from purevk.passes import pipeline
from purevk.passes.matmul import hidden

pytestmark = pytest.mark.device


class Layer(nn.Module):
    """f(x a, x b) c."""

    def __init__(self, function, width=300, bias=True, read=False):
        super().__init__()
        self.gate, self.up = (nn.Linear(32, width, bias=bias) for _ in range(2))
        self.down = nn.Linear(width, 32)
        self.function, self.read = function, read

    def forward(self, x):
        made = self.function(self.gate(x), self.up(x))
        return (self.down(made), made.amax()) if self.read else self.down(made)


def gated(gate, up):
    return F.silu(gate) * up


@pytest.fixture
def padded(monkeypatch):
    """How many tensors were padded; on a device that takes halves in blocks."""
    counts: list[int] = []

    def pad(graph, traits):
        result = hidden.pad_hidden(graph, traits)
        counts.append(sum(node.op == "aten.cat.default" for node in result.nodes))
        return result

    monkeypatch.setattr(hidden, "has_fragments", lambda traits, dtype: dtype is DType.float16)
    monkeypatch.setattr(pipeline, "pad_hidden", pad)
    return counts


def run(model, x):
    model, x = model.half().eval(), x.half()
    with purevk.compile(model, (x,)) as program, torch.no_grad():
        torch.testing.assert_close(program(x), model(x), rtol=4e-3, atol=4e-3, equal_nan=True)


@pytest.mark.parametrize("x", [torch.randn(7, 32), torch.randn(2, 5, 32)], ids=["rows", "batch"])
@pytest.mark.parametrize("function, bias, tensors", [
    (gated, True, 5),
    (gated, False, 3),
    (lambda gate, up: gate * torch.sigmoid(1.702 * gate) + up, True, 5),
    (lambda gate, up: F.gelu(gate.float()).half() * up.clamp(-3, 3), True, 5),
])  # fmt: skip
def test_hidden_layers_are_padded(padded, x, function, bias, tensors):
    run(Layer(function, bias=bias), x)
    assert padded == [tensors]


REFUSED = {
    "whole blocks": Layer(gated, 304),
    "few columns": Layer(gated, 40),
    "read by others": Layer(gated, read=True),
    "not finite of zeros": Layer(lambda gate, up: torch.log(gate.abs()) * up),
    "a sum with another tensor": Layer(lambda gate, up: gated(gate, up) + torch.ones(300).half()),
    "bounded": Layer(lambda gate, up: torch.tanh(gate) * up.sigmoid()),
    "a softmax": Layer(lambda gate, up: gate.softmax(-1) * up),
    "an infinite factor": Layer(lambda gate, up: gated(gate, up).clamp(0.1) * float("inf")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_stay(padded, name):
    run(REFUSED[name], torch.randn(6, 32))
    assert padded == [0]


def test_hidden_layers_that_follow_one_another(padded):
    layers = [nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 32)]
    run(nn.Sequential(*layers), torch.randn(7, 32))
    assert padded == [6]


def test_infinite_inputs_of_bounded_layers(padded):
    x = torch.randn(3, 32)
    x[1, 2] = float("inf")
    run(nn.Sequential(nn.Linear(32, 300), nn.Sigmoid(), nn.Linear(300, 32)), x)
    assert padded == [0]
