"""LFM2: layers of short convolutions, and some of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from purevk.ir import Value
from purevk.llm.architectures.transformer import Transformer
from purevk.llm.files import ModelFile

if TYPE_CHECKING:
    from purevk.llm.network import Network


class Lfm2(Transformer):
    """A convolution keeps its last inputs in a state, so that the cache cannot be cut."""

    is_recurrent = True
    last_norm = "token_embd_norm"

    def __init__(self, file: ModelFile) -> None:
        super().__init__(file)
        self.taps = self.integer("shortconv.l_cache")

    def attention(self, net: Network, layer: int, h: Value) -> Value:
        if not net.has(f"blk.{layer}.shortconv.conv.weight"):
            return super().attention(net, layer, h)
        name = f"blk.{layer}.shortconv"
        joined = net.linear(h, f"{name}.in_proj", 3 * self.width)
        before, after, x = net.split(joined, *(self.width,) * 3)
        x = net.op("mul.Tensor", before, x)
        x = net.short_convolution(x, f"{name}.conv", self.taps)
        return net.linear(net.op("mul.Tensor", after, x), f"{name}.out_proj", self.width)
