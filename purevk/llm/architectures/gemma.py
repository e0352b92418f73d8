"""Gemma 2 and 3: norms before and after each part, and layers with windows between those without."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from purevk.ir import Value
from purevk.llm.architectures.transformer import SLIDING, Transformer
from purevk.llm.files import ModelFile

if TYPE_CHECKING:
    from purevk.llm.network import Network


class Gemma3(Transformer):
    """Layers with a window rotate by another base, and are not scaled.

    Attributes:
        most_layers: those of the model of 27 B, whose scores have another scale.
    """

    norm_plus = 1.0
    pattern: tuple[str, ...] = (*(SLIDING,) * 5, "full_attention")
    base = 1e6
    most_layers = 62

    def __init__(self, file: ModelFile) -> None:
        super().__init__(file)
        self.local_base = self.number("rope.freq_base_swa", 10000.0)

    def frequencies(self, net: Network, layer: int) -> tuple[np.ndarray, float]:
        if self.slides(layer):
            return self.local_base ** (-np.arange(0, self.rotated, 2) / self.rotated), 1.0
        return super().frequencies(net, layer)

    def scale(self, layer: int) -> float:
        of_scores = self.width // self.heads if self.layers == self.most_layers else self.head_width
        return 1 / math.sqrt(self.number("attention.scale_width", float(of_scores)))

    def embedding(self, net: Network) -> Value:
        return net.op("mul.Scalar", super().embedding(net), math.sqrt(self.width))

    def layer(self, net: Network, layer: int, x: Value) -> Value:
        name = f"blk.{layer}"
        h = self.norm(net, x, f"{name}.attn_norm")
        h = self.attention(net, layer, h)
        x = net.add(x, self.norm(net, h, f"{name}.post_attention_norm"))
        h = self.feed_forward(net, layer, x)
        return net.add(x, self.norm(net, h, f"{name}.post_ffw_norm"))

    def feed_forward(self, net: Network, layer: int, x: Value) -> Value:
        """What is normed and added to x [1, S, width] after attention."""
        return self.mlp(net, layer, self.norm(net, x, f"blk.{layer}.ffn_norm"))

    def activate(self, net: Network, x: Value) -> Value:
        return net.op("gelu.default", x, "tanh")


class Gemma2(Gemma3):
    """Scores and logits are capped. All layers rotate alike."""

    pattern = (SLIDING, "full_attention")
    base = 10000.0
    most_layers = 46
    score_cap, logit_cap = 50.0, 30.0

    def __init__(self, file: ModelFile) -> None:
        super().__init__(file)
        self.local_base = self.base
