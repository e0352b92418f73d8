"""What architectures of language models share: the sizes that a file states, and layers in order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.ir import Value
from purevk.llm.files import MOST_HEAD_WIDTH, ModelFile

if TYPE_CHECKING:
    from purevk.llm.network import Network

SLIDING = "sliding_attention"
_SCALINGS = ("none", "linear", "yarn", "longrope")


class Transformer:
    """The sizes of a model, and its graph: that of Llama. Architectures replace what differs.

    Attributes:
        layers, width, vocab: of the model.
        heads, kv_heads, head_width: of attention.
        eps: of norms.
        base, factor: of the rotation.
        trained: tokens of context that the model was trained with.
        window: tokens that each one sees in layers with a window; 0: there are none.
        is_recurrent: the cache cannot be cut at any token.
        score_cap, logit_cap: x becomes tanh(x / cap) * cap; 0: it does not.

    Raises:
        FileFormatError: a size is missing, or they do not go together.
        UnsupportedProgramError: the file has a variant of the architecture that is not known.
    """

    activation = "silu.default"
    norm_plus = 0.0
    base = 10000.0
    last_norm = "output_norm"
    mlp_norm = "ffn_norm"
    pattern: tuple[str, ...] = ()
    truncates_yarn = True
    is_recurrent = False
    score_cap = logit_cap = 0.0

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self.name = file.value("general.architecture", str)
        self.layers, self.width = self.integer("block_count"), self.integer("embedding_length")
        self.heads = self.integer("attention.head_count")
        self.kv_heads = self.largest("attention.head_count_kv", self.heads)
        self.head_width = self.integer("attention.key_length", self.width // max(self.heads, 1))
        self.eps = self.number("attention.layer_norm_rms_epsilon", 1e-5)
        self.trained = self.integer("context_length")
        self.window = self.integer("attention.sliding_window", 0)
        table = file.tensors.get("token_embd.weight")
        self.vocab = table.dims[0] if table else 0
        self.rotated = self.integer("rope.dimension_count", self.head_width)
        self.base = self.number("rope.freq_base", self.base)
        self.factor = self.number("rope.scaling.factor", 1.0)
        scaling = file.value(f"{self.name}.rope.scaling.type", str, "none")
        self.check(scaling in _SCALINGS, f"rotation scaling {scaling!r}")
        self.check(
            self.integer("attention.value_length", self.head_width) == self.head_width,
            "values of another width than keys",
        )
        if (
            not (self.heads and self.kv_heads and self.head_width)
            or self.heads % self.kv_heads
            or self.head_width % 2
            or self.rotated % 2
            or not 0 < self.rotated <= self.head_width <= MOST_HEAD_WIDTH
        ):
            raise FileFormatError(
                f"{self.heads} heads of width {self.head_width} with {self.kv_heads} of keys",
                where=file.name,
            )

    # -- sizes ------------------------------------------------------------------------------------
    def integer(self, key: str, default: int | None = None) -> int:
        number: int = self.file.value(f"{self.name}.{key}", int, default)
        if not 0 <= number < 1 << 24:
            raise FileFormatError(f"{self.name}.{key} is {number}", where=self.file.name)
        return number

    def largest(self, key: str, default: int) -> int:
        """The largest of the integers of all layers, if there is one for each; those without the
        part have 0."""
        stated = self.file.metadata.get(f"{self.name}.{key}")
        if isinstance(stated, (list, np.ndarray)) and len(stated):
            return int(max(stated))
        return self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        number = float(self.file.value(f"{self.name}.{key}", (int, float), default))
        if number != default and not 0 < number < math.inf:
            raise FileFormatError(f"{self.name}.{key} is {number}", where=self.file.name)
        return number

    def check(self, is_known: bool, what: str) -> None:
        """Raises UnsupportedProgramError for a variant that is not known."""
        if not is_known:
            raise UnsupportedProgramError(
                f"this model has {what}",
                where=self.file.name,
                next="load it with transformers, and compile it with purevk.compile",
            )

    def slides(self, layer: int) -> bool:
        """Whether a layer has a window."""
        types = self.file.metadata.get("layer_types") or self.pattern
        return bool(self.window) and (not types or types[layer % len(types)] == SLIDING)

    def frequencies(self, net: Network, layer: int) -> tuple[np.ndarray, float]:
        """Those of the rotation [rotated / 2], and a factor of its cosines and sines."""
        width = self.rotated
        frequencies = self.base ** (-np.arange(0, width, 2) / width)
        if net.has("rope_freqs.weight"):
            frequencies = frequencies / self.factors(net, "rope_freqs.weight", width)
        scaling = self.file.value(f"{self.name}.rope.scaling.type", str, "none")
        if scaling == "yarn":
            return self._yarn(frequencies, self.base, self.factor)
        return (frequencies / self.factor if scaling == "linear" else frequencies), 1.0

    def factors(self, net: Network, name: str, width: int) -> np.ndarray:
        """Factors of a rotation [width / 2]. Raises FileFormatError unless they are above 0."""
        factors = net.numbers(name, width // 2)
        if not (factors > 0).all():
            raise FileFormatError(f"{name} is not above 0", where=self.file.name)
        return factors

    def _yarn(
        self, frequencies: np.ndarray, base: float, factor: float
    ) -> tuple[np.ndarray, float]:
        """Frequencies of YaRN (Peng et al. 2023): slow ones are divided by the factor, fast ones are
        not, and those between are mixed."""
        original = self.integer("rope.scaling.original_context_length", self.trained)
        bounds = []
        for key, turns in (("yarn_beta_fast", 32.0), ("yarn_beta_slow", 1.0)):
            turns = self.number(f"rope.scaling.{key}", turns)
            period = original / (max(turns, 1e-6) * 2 * math.pi)
            bounds.append(self.rotated * math.log(max(period, 1e-6)) / (2 * math.log(base)))
        low, high = bounds
        if self.file.metadata.get("yarn_truncates", self.truncates_yarn):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotated - 1)
        steps = np.arange(self.rotated // 2)
        slow = np.clip((steps - low) / max(high - low, 1e-3), 0, 1)
        stated = self.file.value(f"{self.name}.rope.scaling.attn_factor", (int, float), 0.0)
        scale = float(stated) or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
        return frequencies * (1 - slow) + frequencies / factor * slow, scale

    # -- the graph --------------------------------------------------------------------------------
    def logits(self, net: Network) -> Value:
        """Logits of the last token, [1, vocab], of the tokens and positions of `net`."""
        x = self.embedding(net)
        for layer in range(self.layers):
            x = self.layer(net, layer, x)
        last = self.norm(net, net.op("select.int", x, 1, -1), self.last_norm)
        head = "output" if net.has("output.weight") else "token_embd"
        logits = net.linear(last, head, self.vocab)
        return net.capped(logits, self.number("final_logit_softcapping", self.logit_cap))

    def embedding(self, net: Network) -> Value:
        """The input of the first layer, [1, S, width]."""
        return net.embedding(net.tokens, "token_embd", self.vocab, self.width)

    def norm(self, net: Network, x: Value, name: str) -> Value:
        return net.rms_norm(x, name, self.eps, self.norm_plus if self.file.is_raw else 0.0)

    def layer(self, net: Network, layer: int, x: Value) -> Value:
        """A layer: [1, S, width] to the same."""
        h = self.norm(net, x, f"blk.{layer}.attn_norm")
        x = net.add(x, self.attention(net, layer, h))
        h = self.norm(net, x, f"blk.{layer}.{self.mlp_norm}")
        return net.add(x, self.mlp(net, layer, h))

    def attention(self, net: Network, layer: int, h: Value) -> Value:
        name = f"blk.{layer}"
        q, k, v, *gates = self.projections(net, layer, h)
        if net.has(f"{name}.attn_q_norm.weight"):
            q = self.norm(net, q, f"{name}.attn_q_norm")
            k = self.norm(net, k, f"{name}.attn_k_norm")
        if self.rotates(layer):
            angles = net.angles(*self.frequencies(net, layer))
            q, k = net.rotate(q, angles), net.rotate(k, angles)
        attended = net.attend(
            *(layer, q, k, v),
            window=self.window if self.slides(layer) else 0,
            scale=self.scale(layer),
            sinks=self.sinks(net, layer),
            softcap=self.number("attn_logit_softcapping", self.score_cap),
        )
        for gate in gates:
            attended = net.op("mul.Tensor", attended, net.op("sigmoid.default", net.joined(gate)))
        return net.linear(attended, f"{name}.attn_output", self.width)

    def projections(self, net: Network, layer: int, h: Value) -> list[Value]:
        """Queries, keys and values, each [1, heads, S, head_width]; and logits that gate the result,
        if there are any."""
        counts = self.heads, self.kv_heads, self.kv_heads
        if net.has(f"blk.{layer}.attn_qkv.weight"):
            sizes = [count * self.head_width for count in counts]
            joined = net.linear(h, f"blk.{layer}.attn_qkv", sum(sizes))
            return [
                net.heads(part, count) for part, count in zip(net.split(joined, *sizes), counts)
            ]
        return [
            net.heads(
                net.linear(
                    h,
                    f"blk.{layer}.attn_{part}",
                    count * self.head_width,
                    count if part != "v" and self.file.rotates_neighbours else 0,
                ),
                count,
            )
            for part, count in zip("qkv", counts)
        ]

    def rotates(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys."""
        return True

    def scale(self, layer: int) -> float | None:
        """Of the scores; None: 1 / sqrt(head_width)."""
        return None

    def sinks(self, net: Network, layer: int) -> Value | None:
        """Scores of a key that each query sees too, [1, heads, 1, 1]."""
        return None

    def mlp(self, net: Network, layer: int, h: Value) -> Value:
        return self.gated_mlp(net, f"blk.{layer}.ffn", h)

    def gated_mlp(self, net: Network, name: str, h: Value, kind: str = "") -> Value:
        """The MLP of the weights NAME_gateKIND, NAME_upKIND and NAME_downKIND; those of the first two
        may be joined in the second."""
        inner = net.dims(f"{name}_down{kind}.weight")[-1]
        if net.has(f"{name}_gate{kind}.weight"):
            gate, up = (net.linear(h, f"{name}_{part}{kind}", inner) for part in ("gate", "up"))
        else:
            gate, up = net.split(net.linear(h, f"{name}_up{kind}", 2 * inner), inner, inner)
        return net.linear(self.gated(net, gate, up), f"{name}_down{kind}", self.width)

    def gated(self, net: Network, gate: Value, up: Value) -> Value:
        """What an MLP makes of its two projections."""
        return net.op("mul.Tensor", self.activate(net, gate), up)

    def activate(self, net: Network, x: Value) -> Value:
        return net.op(self.activation, x)
