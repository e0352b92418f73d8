"""Phi-3 and Phi-4: joined projections, and a rotation by factors for long contexts (LongRoPE)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from purevk.llm.architectures.transformer import Transformer

if TYPE_CHECKING:
    from purevk.llm.network import Network


class Phi3(Transformer):
    """Which factors are used depends on the context that the model is loaded with: transformers
    chooses them by the length of a prompt, llama.cpp by the context too."""

    def frequencies(self, net: Network, layer: int) -> tuple[np.ndarray, float]:
        original = self.integer("rope.scaling.original_context_length", self.trained)
        which = "long" if net.rows > original else "short"
        frequencies, scale = super().frequencies(net, layer)
        if net.has(f"rope_factors_{which}.weight"):
            frequencies = frequencies / self.factors(
                net, f"rope_factors_{which}.weight", self.rotated
            )
            factor = self.trained / max(original, 1)
            growth = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            scale = self.number("rope.scaling.attn_factor", growth)
        return frequencies, scale
