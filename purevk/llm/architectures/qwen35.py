"""Qwen3.5 and 3.6: layers of linear attention (gated delta net), and some of gated attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from purevk.dtypes import DType
from purevk.errors import FileFormatError
from purevk.ir import TensorType, Value
from purevk.llm.architectures.qwen3moe import Qwen3Moe
from purevk.llm.architectures.transformer import Transformer
from purevk.llm.files import ModelFile

if TYPE_CHECKING:
    from purevk.llm.network import Network


class Qwen35(Transformer):
    """Linear attention keeps a matrix for each head in a state, so that the cache cannot be cut."""

    is_recurrent = True
    norm_plus = 1.0
    mlp_norm = "post_attention_norm"

    def __init__(self, file: ModelFile) -> None:
        super().__init__(file)
        self.layers -= self.integer("nextn_predict_layers", 0)  # those draft further tokens
        self.taps, self.key_width = self.integer("ssm.conv_kernel"), self.integer("ssm.state_size")
        self.key_heads = self.integer("ssm.group_count")
        self.value_heads = self.integer("ssm.time_step_rank")
        inner = self.integer("ssm.inner_size", self.value_heads * self.integer("ssm.value_size", 0))
        self.value_width = inner // max(self.value_heads, 1)
        sizes = (self.taps, self.key_width, self.key_heads, self.value_width)
        if not all(sizes) or self.value_heads % self.key_heads:
            raise FileFormatError(
                f"{self.value_heads} heads of linear attention with {list(sizes)}", where=file.name
            )

    def projections(self, net: Network, layer: int, h: Value) -> list[Value]:
        """Queries and their gates are in one weight, head by head."""
        width, name = self.head_width, f"blk.{layer}.attn"
        joined = net.heads(net.linear(h, f"{name}_q", 2 * self.heads * width), self.heads)
        q, gate = net.split(joined, width, width)
        k, v = (
            net.heads(net.linear(h, f"{name}_{part}", self.kv_heads * width), self.kv_heads)
            for part in "kv"
        )
        return [q, k, v, gate]

    def attention(self, net: Network, layer: int, h: Value) -> Value:
        name = f"blk.{layer}"
        if not net.has(f"{name}.ssm_out.weight"):
            return super().attention(net, layer, h)
        length, heads = h.type.dims[1], self.value_heads
        keys, values = self.key_heads * self.key_width, heads * self.value_width
        mixed = net.linear(h, f"{name}.attn_qkv", 2 * keys + values)
        mixed = net.short_convolution(mixed, f"{name}.ssm_conv1d", self.taps)
        parts = net.split(net.wide(net.op("silu.default", mixed)), keys, keys, values)
        counts = self.key_heads, self.key_heads, heads
        q, k, v = (
            net.op("view.default", part, (length, count, int(part.type.dims[-1]) // count))
            for part, count in zip(parts, counts)
        )
        beta = net.wide(net.op("sigmoid.default", net.linear(h, f"{name}.ssm_beta", heads)))
        first = TensorType(DType.float32, (heads, self.value_width, self.key_width))
        state = net.state(first, name=f"{name}.ssm_state")
        out, after = net.purevk.gated_delta.all(
            *(self._unit(net, q, 1 / self.key_width), self._unit(net, k, self.key_width**-0.5), v),
            *(self._decay(net, name, h), net.op("view.default", beta, (length, heads))),
            *(state, not self.file.is_raw),
        )
        net.store(state, after)
        normed = net.rms_norm(net.narrow(out), f"{name}.ssm_norm", self.eps)
        gate = net.op("silu.default", net.linear(h, f"{name}.attn_gate", values))
        rows = net.op("view.default", normed, (1, length, values))
        return net.linear(net.op("mul.Tensor", rows, gate), f"{name}.ssm_out", self.width)

    def _unit(self, net: Network, x: Value, factor: float) -> Value:
        """Rows of one length: root of their width, times a factor."""
        return net.op(
            "mul.Scalar",
            net.op("rms_norm.default", x, (self.key_width,), None, 1e-6 / self.key_width),
            factor,
        )

    def _decay(self, net: Network, name: str, h: Value) -> Value:
        """What is left of the state at each token, [S, heads]; nothing at the first of a sequence."""
        heads, length = self.value_heads, h.type.dims[1]
        bias, rate = (
            net.vector(f"{name}.{part}", heads, wide=True) for part in ("ssm_dt.bias", "ssm_a")
        )
        steps = net.add(net.wide(net.linear(h, f"{name}.ssm_alpha", heads)), bias)
        steps = net.op("softplus.default", steps, 1, math.inf)
        decay = net.op("exp.default", net.op("mul.Tensor", steps, rate))
        goes_on = net.op("gt.Scalar", net.op("unsqueeze.default", net.positions, 1), 0)
        goes_on = net.op("_to_copy.default", goes_on, DType.float32)
        rows = net.op("view.default", decay, (length, heads))
        return net.op("mul.Tensor", rows, goes_on)


class Qwen35Moe(Qwen35, Qwen3Moe):
    """With experts, and one that all tokens pass."""

    def mlp(self, net: Network, layer: int, h: Value) -> Value:
        name = f"blk.{layer}.ffn"
        gate = net.op("sigmoid.default", net.linear(h, f"{name}_gate_inp_shexp", 1))
        shared = net.op("mul.Tensor", self.gated_mlp(net, name, h, "_shexp"), gate)
        return net.add(super().mlp(net, layer, h), shared)
