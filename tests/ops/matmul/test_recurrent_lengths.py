"""Recurrent layers whose number of steps is known only at a call, against eager torch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import purevk
from purevk.graph.context import default_context
from purevk.ops.matmul import recurrent_steps
from purevk.tuning import DEFAULT

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-12}


class Layers(torch.nn.Module):
    """Random layers that read the same input, or its transpose, and one that reads all of theirs."""

    def __init__(self, draw: random.Random, features: int, batch: int) -> None:
        super().__init__()
        self.layers, self.states, width = torch.nn.ModuleList(), [], 0
        for _ in range(2):
            kind = draw.choice(["LSTM", "GRU", "RNN"])
            options: dict[str, object] = {
                "num_layers": draw.choice([1, 1, 2]),
                "bidirectional": draw.random() < 0.5,
                "batch_first": draw.random() < 0.5,
                "bias": draw.random() < 0.7,
            }
            hidden = draw.choice([1, 3, 8, 12, 20, 33])
            if kind == "LSTM" and hidden > 2 and draw.random() < 0.5:
                options["proj_size"] = draw.randint(1, hidden - 1)
            if kind == "RNN":
                options["nonlinearity"] = draw.choice(["tanh", "relu"])
            layer = getattr(torch.nn, kind)(features, hidden, **options)
            directions = 1 + layer.bidirectional
            out = layer.proj_size or hidden
            sizes = [(directions * layer.num_layers, batch, each) for each in (out, hidden)]
            state = [torch.rand(each) - 0.5 for each in sizes[: 1 + (kind == "LSTM")]]
            self.states.append(state if draw.random() < 0.5 else None)
            self.layers.append(layer)
            width += directions * out
        self.last = torch.nn.GRU(width, 5, bidirectional=True)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results, outputs = [], []
        for layer, state in zip(self.layers, self.states):
            given = None if state is None else [each.to(x.dtype) for each in state]
            first = None if given is None else tuple(given) if len(given) > 1 else given[0]
            made, last = layer(x.transpose(0, 1) if layer.batch_first else x, first)
            outputs.append(made.transpose(0, 1) if layer.batch_first else made)
            results += [made, *(last if isinstance(last, tuple) else [last])]
        return [*results, *self.last(torch.cat(outputs, -1))]


def _agree(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor], atol: float) -> None:
    for made, expected in zip(have, want, strict=True):
        torch.testing.assert_close(made, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_any_length(seed, monkeypatch):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    shared = default_context()
    if seed % 2:  # as on GPUs: layers whose weights are in registers
        # A limit that cuts long sequences into several dispatches.
        profile = dataclasses.replace(DEFAULT, max_iterations=100)
        monkeypatch.setattr(shared, "traits", dataclasses.replace(shared.traits, profile=profile))
    dtype = draw.choice(list(_TOLERANCE)) if seed > 1 else torch.float32
    features, batch = draw.choice([(1, 2), (4, 3), (7, 1)])
    module = Layers(draw, features, batch).to(dtype).eval()
    steps = Dim("steps", min=1, max=300)
    # oneDNN has no LSTM of bfloat16 on some processors.
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        x = torch.randn(6, batch, features).to(dtype)
        with purevk.compile(module, (x,), ({0: steps},)) as program:
            for length in (6, 61, draw.randint(2, 130), 1):
                x = torch.randn(length, batch, features).to(dtype)
                variants = len(program.methods["forward"].variants)
                _agree(program(x), module(x), _TOLERANCE[dtype])
            assert variants == 1  # before that of length 1


class Packed(torch.nn.Module):
    """A random layer on packed sequences."""

    def __init__(self, draw: random.Random, projected: bool) -> None:
        super().__init__()
        kind = "LSTM" if projected else draw.choice(["LSTM", "GRU", "RNN"])
        hidden = draw.choice([3, 8, 20])
        options = {"proj_size": draw.randint(1, hidden - 1)} if projected else {}
        self.layer = getattr(torch.nn, kind)(
            *(4, hidden),
            **options,
            num_layers=draw.choice([1, 2]),
            bidirectional=draw.random() < 0.7,
            bias=draw.random() < 0.7,
        )
        self.first, self.sorted = draw.random() < 0.5, draw.random() < 0.3
        self.padding, self.whole = draw.choice([0.0, -1.0]), draw.random() < 0.5
        self.scaled = draw.random() < 0.3

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, state: torch.Tensor) -> list[Any]:
        given = x.transpose(0, 1) if self.first else x
        packed = pack_padded_sequence(given, lengths, self.first, enforce_sorted=self.sorted)
        if self.scaled:
            packed = PackedSequence(packed.data * 0.5, *packed[1:])
        first = state[..., : self.layer.proj_size or self.layer.hidden_size]
        hx = (first, state * 2) if isinstance(self.layer, torch.nn.LSTM) else first
        made, last = self.layer(packed, hx)
        total = x.shape[0] if self.whole else None
        padded, counts = pad_packed_sequence(made, self.first, self.padding, total)
        return [padded, counts, *(last if isinstance(last, tuple) else [last])]


@pytest.mark.parametrize("seed", range(7))
def test_packed_sequences(seed, monkeypatch):
    """The sequences of a batch have different lengths, all of them known only at a call."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    if seed % 2:
        shared = default_context()
        profile = dataclasses.replace(DEFAULT, max_iterations=60)
        monkeypatch.setattr(shared, "traits", dataclasses.replace(shared.traits, profile=profile))
    module = Packed(draw, projected=seed > 3).eval()
    dtype = torch.float64 if seed in (2, 6) else torch.float32
    module.to(dtype)
    layer, steps = module.layer, Dim("steps", min=2, max=100)

    def inputs(count: int) -> tuple[torch.Tensor, ...]:
        lengths = sorted([draw.randint(1, count) for _ in range(3)], reverse=True)
        if not module.sorted:
            draw.shuffle(lengths)
        if module.whole and draw.random() < 0.5:
            lengths[0] = count
        sizes = (1 + layer.bidirectional) * layer.num_layers, 3, layer.hidden_size
        x, state = torch.randn(count, 3, 4, dtype=dtype), torch.rand(sizes, dtype=dtype)
        return x, torch.tensor(lengths), state - 0.5

    with torch.no_grad(), purevk.compile(module, inputs(9), ({0: steps}, {}, {})) as program:
        assert "CPU" not in repr(program)
        for count in (9, 4, draw.randint(40, 90)):
            given = inputs(count)
            _agree(program(*given), module(*given), _TOLERANCE[dtype])
        for lengths in ([4, 2, 0], [5, 1, -1], [6, 4, 2]):
            with pytest.raises(purevk.InputError):
                program(torch.randn(5, 3, 4, dtype=dtype), torch.tensor(lengths), given[2])


def test_devices_without_shuffles(monkeypatch):
    monkeypatch.setattr(recurrent_steps, "_has_subgroups", lambda traits: False)
    layer = torch.nn.LSTM(4, 9, bidirectional=True).eval().requires_grad_(False)
    with purevk.compile(layer, (torch.randn(6, 5, 4),), ({0: Dim("steps", max=50)},)) as program:
        for length in (6, 19):
            x = torch.randn(length, 5, 4)
            (made, state), (want, last) = program(x), layer(x)
            _agree((made, *state), (want, *last), 1e-5)


@pytest.mark.parametrize("steps", [Dim.DYNAMIC, Dim("steps", max=50)], ids=["open", "bounded"])
def test_files(steps, tmp_path):
    layer = torch.nn.GRU(4, 6).eval().requires_grad_(False)
    with purevk.compile(layer, (torch.randn(6, 2, 4),), ({0: steps},)) as program:
        program.save(tmp_path / "layer.pvk")
    with purevk.load(tmp_path / "layer.pvk") as program:
        for length in (6, 31):
            x = torch.randn(length, 2, 4)
            _agree(program(x), layer(x), 1e-5)


class _Encoder(torch.nn.Module):
    """A layer whose results attention reads: torch views them by their strides, and traces the program
    twice."""

    def __init__(self, kind: str, batch_first: bool) -> None:
        super().__init__()
        self.layer = getattr(torch.nn, kind)(8, 4, bidirectional=True, batch_first=batch_first)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.layer(x)[0]
        rows = made.transpose(0, 1) if self.layer.batch_first else made
        return self.attention(made, made, made)[0], rows.view(rows.shape[0], -1, 4)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_results_that_attention_reads(kind, batch_first, tmp_path):
    model = _Encoder(kind, batch_first).eval().requires_grad_(False)
    dim = 1 if batch_first else 0
    shapes = ({dim: Dim("steps", min=2, max=50)},)
    example = torch.randn(2, 5, 8) if batch_first else torch.randn(5, 2, 8)
    with purevk.compile(model, (example,), shapes) as program:
        program.save(tmp_path / "encoder.pvk")
    with purevk.load(tmp_path / "encoder.pvk") as program:  # has one graph, for all lengths
        for length in (5, 2, 33):
            x = torch.randn(2, length, 8) if batch_first else torch.randn(length, 2, 8)
            _agree(program(x), model(x), 1e-5)
