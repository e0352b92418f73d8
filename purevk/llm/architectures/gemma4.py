"""Gemma 4: heads of another width in layers without a window, caches that layers share, and an input
of each layer by the token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from purevk.ir import Value
from purevk.llm.architectures.experts import Experts
from purevk.llm.architectures.gemma import Gemma3
from purevk.llm.files import ModelFile

if TYPE_CHECKING:
    from purevk.llm.network import Network


class Gemma4(Gemma3):
    """Widths and counts of heads follow from the weights of a layer.

    Attributes:
        cached: layers with a cache; those after them read the one of the last layer of their kind.
        own_width: of the inputs that layers have by the token; 0: they have none.
    """

    norm_plus = 0.0

    def __init__(self, file: ModelFile) -> None:
        super().__init__(file)
        self.cached = self.layers - self.integer("attention.shared_kv_layers", 0)
        self.own_width = self.integer("embedding_length_per_layer_input", 0)
        self.experts = self.integer("expert_count", 0)
        self.used = self.integer("expert_used_count", 0)
        self.own_inputs: Value | None = None  # of the graph that is being built

    def slides(self, layer: int) -> bool:
        flags = self.file.metadata.get(f"{self.name}.attention.sliding_window_pattern")
        if flags is None:
            return super().slides(layer)
        return bool(self.window) and bool(flags[layer])

    def embedding(self, net: Network) -> Value:
        x = super().embedding(net)
        width, total = self.own_width, self.layers * self.own_width
        if not width:
            return x
        own = net.embedding(net.tokens, "per_layer_token_embd", self.vocab, total)
        own, mixed = (
            net.op("view.default", each, (1, x.type.dims[1], self.layers, width))
            for each in (own, net.linear(x, "per_layer_model_proj", total))
        )
        mixed = net.op("mul.Scalar", mixed, self.width**-0.5)
        mixed = self.norm(net, mixed, "per_layer_proj_norm")
        own = net.op("mul.Scalar", own, math.sqrt(width))
        self.own_inputs = net.op("mul.Scalar", net.add(mixed, own), 2**-0.5)
        return x

    def layer(self, net: Network, layer: int, x: Value) -> Value:
        name = f"blk.{layer}"
        x = super().layer(net, layer, x)
        if self.own_width:
            own = net.op("select.int", self.own_inputs, 2, layer)
            gate = self.activate(net, net.linear(x, f"{name}.inp_gate", self.own_width))
            h = net.linear(net.op("mul.Tensor", gate, own), f"{name}.proj", self.width)
            x = net.add(x, self.norm(net, h, f"{name}.post_norm"))
        if net.has(f"{name}.layer_output_scale.weight"):
            x = net.op("mul.Tensor", x, net.vector(f"{name}.layer_output_scale.weight", 1))
        return x

    def attention(self, net: Network, layer: int, h: Value) -> Value:
        name = f"blk.{layer}.attn"
        width = net.dims(f"{name}_q_norm.weight")[-1]
        angles = net.angles(self._frequencies(net, layer, width))

        def heads(part: str, rows: int) -> Value:
            return net.heads(net.linear(h, f"{name}_{part}", rows), rows // width)

        q = self.norm(net, heads("q", self.heads * width), f"{name}_q_norm")
        source, k, v = layer, None, None
        if layer < self.cached:
            rows = net.dims(f"{name}_k.weight")[0]
            k = heads("k", rows)
            v = heads("v", rows) if net.has(f"{name}_v.weight") else k
            v = net.op("rms_norm.default", v, (width,), None, self.eps)
            k = net.rotate(self.norm(net, k, f"{name}_k_norm"), angles)
        else:  # a file without such a layer is damaged: ValueError
            source = max(n for n in range(self.cached) if self.slides(n) == self.slides(layer))
        window = self.window if self.slides(layer) else 0
        attended = net.attend(source, net.rotate(q, angles), k, v, window=window, scale=1.0)
        return net.linear(attended, f"{name}_output", self.width)

    def _frequencies(self, net: Network, layer: int, width: int) -> np.ndarray:
        slides = self.slides(layer)
        base = self.local_base if slides else self.base
        frequencies: np.ndarray = base ** (-np.arange(0, width, 2) / width)
        if not slides and net.has("rope_freqs.weight"):
            frequencies /= self.factors(net, "rope_freqs.weight", width)
        elif not slides:
            frequencies[int(self.file.value("rotated_part", float, 1.0) * width // 2) :] = 0
            frequencies /= self.factor
        return frequencies

    def feed_forward(self, net: Network, layer: int, x: Value) -> Value:
        name = f"blk.{layer}"
        h = super().feed_forward(net, layer, x)
        if not net.has(f"{name}.ffn_gate_inp.weight"):
            return h
        scale = net.vector(f"{name}.ffn_gate_inp.scale", self.width)
        scores = net.op("rms_norm.default", x, (self.width,), scale, self.eps)
        scores = net.op("mul.Scalar", scores, self.width**-0.5)
        scores = net.wide(net.linear(scores, f"{name}.ffn_gate_inp", self.experts))
        largest, chosen = net.aten.topk.all(scores, self.used, -1, True, True)
        factors = net.wide(net.vector(f"{name}.ffn_down_exps.scale", self.experts))
        weights = net.op("_softmax.default", largest, -1, False)
        weights = net.op("mul.Tensor", weights, net.op("index.Tensor", factors, (chosen,)))
        rows = self.norm(net, x, f"{name}.pre_ffw_norm_2")
        experts = Experts(net, rows, chosen, self.experts)
        y = experts.mlp(f"{name}.ffn", weights, self.width, self.gated)
        h = self.norm(net, h, f"{name}.post_ffw_norm_1")
        return net.add(h, self.norm(net, y, f"{name}.post_ffw_norm_2"))
