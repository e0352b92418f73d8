"""gpt-oss: experts with biases and a clamped gate, and a sink in each head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from purevk.ir import Value
from purevk.llm.architectures.qwen3moe import Qwen3Moe
from purevk.llm.architectures.transformer import SLIDING

if TYPE_CHECKING:
    from purevk.llm.network import Network

_LIMIT, _SLOPE = 7.0, 1.702


class GptOss(Qwen3Moe):
    """Every other layer has a window. The router's softmax is over the chosen experts."""

    pattern = (SLIDING, "full_attention")
    truncates_yarn = False
    mlp_norm = "post_attention_norm"

    def sinks(self, net: Network, layer: int) -> Value:
        sinks = net.vector(f"blk.{layer}.attn_sinks.weight", self.heads)
        return net.op("view.default", sinks, (1, self.heads, 1, 1))

    def routes(self, net: Network, scores: Value) -> tuple[Value, Value]:
        largest, chosen = net.aten.topk.all(scores, self.used, -1, True, True)
        return net.op("_softmax.default", largest, -1, False), chosen

    def gated(self, net: Network, gate: Value, up: Value) -> Value:
        gate = net.op("clamp.default", gate, None, _LIMIT)
        up = net.op("clamp.default", up, -_LIMIT, _LIMIT)
        slope = net.op("sigmoid.default", net.op("mul.Scalar", gate, _SLOPE))
        return net.op(
            "mul.Tensor", net.op("add.Scalar", up, 1, 1), net.op("mul.Tensor", gate, slope)
        )
