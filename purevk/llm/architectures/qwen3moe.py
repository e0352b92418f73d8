"""Qwen3 with experts: a router chooses the few MLPs that a token passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from purevk.errors import FileFormatError
from purevk.ir import Value
from purevk.llm.architectures.experts import Experts
from purevk.llm.architectures.transformer import Transformer
from purevk.llm.files import ModelFile

if TYPE_CHECKING:
    from purevk.llm.network import Network


class Qwen3Moe(Transformer):
    """Weights of experts are [experts, rows, columns]."""

    def __init__(self, file: ModelFile) -> None:
        super().__init__(file)
        self.experts, self.used = self.integer("expert_count"), self.integer("expert_used_count")
        self.normalizes = file.metadata.get("normalizes_routes", True)
        if not 0 < self.used <= self.experts:
            raise FileFormatError(
                f"{self.used} of {self.experts} experts are used", where=file.name
            )

    def mlp(self, net: Network, layer: int, h: Value) -> Value:
        name = f"blk.{layer}.ffn"
        if not net.has(f"{name}_gate_inp.weight"):
            return super().mlp(net, layer, h)
        scores = net.wide(net.linear(h, f"{name}_gate_inp", self.experts))
        weights, chosen = self.routes(net, scores)
        experts = Experts(net, h, chosen, self.experts)
        return experts.mlp(name, weights, self.width, self.gated)

    def routes(self, net: Network, scores: Value) -> tuple[Value, Value]:
        """Weights and numbers of the experts of each token, [1, S, used], by scores [1, S, experts]."""
        likely = net.op("_softmax.default", scores, -1, False)
        weights, chosen = net.aten.topk.all(likely, self.used, -1, True, True)
        if self.normalizes:
            total = net.op("sum.dim_IntList", weights, (-1,), True)
            weights = net.op("div.Tensor", weights, total)
        return weights, chosen
