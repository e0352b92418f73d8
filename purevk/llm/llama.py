"""Llama, and what has its layers: Mistral, SmolLM2, Qwen2, Qwen3."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.ir import Value
from purevk.llm.gguf import GgufFile
from purevk.llm.network import Network

_MOST_HEAD_WIDTH = 4096
ROTATED_NEIGHBOURS = {"llama": True, "qwen2": False, "qwen3": False}
"""Whether files of an architecture have heads whose neighbours are rotated with one another, by its
name. Others rotate the first half of a head with the second."""


@dataclass(frozen=True)
class Llama:
    """The sizes of a model.

    Attributes:
        layers, width, inner, vocab: of the model.
        heads, kv_heads, head_width: of attention.
        eps: of norms.
        base, factor: of the rotation; positions are divided by the factor.
        trained: tokens of context that the model was trained with.
        neighbours: neighbours are rotated with one another, not halves.
    """

    layers: int
    width: int
    inner: int
    vocab: int
    heads: int
    kv_heads: int
    head_width: int
    eps: float
    base: float
    factor: float
    trained: int
    neighbours: bool

    @classmethod
    def read(cls, file: GgufFile) -> Llama:
        """The sizes of a file.

        Raises:
            FileFormatError: a size is missing, or they do not go together.
            UnsupportedProgramError: the file has a variant of Llama that is not known.
        """

        name = file.value("general.architecture", str)

        def integer(key: str, default: int | None = None) -> int:
            number: int = file.value(f"{name}.{key}", int, default)
            if not 0 <= number < 1 << 24:
                raise FileFormatError(f"{name}.{key} is {number}", where=file.name)
            return number

        def number(key: str, default: float) -> float:
            number = float(file.value(f"{name}.{key}", (int, float), default))
            if not 0 < number < math.inf:
                raise FileFormatError(f"{name}.{key} is {number}", where=file.name)
            return number

        width, heads = integer("embedding_length"), integer("attention.head_count")
        kv_heads = integer("attention.head_count_kv", heads)
        head_width = integer("attention.key_length", width // max(heads, 1))
        refused = {
            "experts": integer("expert_count", 0) > 0,
            "a rotation of parts of heads": integer("rope.dimension_count", head_width)
            != head_width,
            "values of another width": integer("attention.value_length", head_width) != head_width,
            "rotation scaling other than linear": file.value(
                f"{name}.rope.scaling.type", str, "none"
            )
            not in ("none", "linear"),
        }
        if any(refused.values()):
            raise UnsupportedProgramError(
                f"this model has {', '.join(name for name, there in refused.items() if there)}",
                where=file.name,
                next="load it with transformers, and compile it with purevk.compile",
            )
        fits = 0 < head_width <= _MOST_HEAD_WIDTH and head_width % 2 == 0
        if not (heads and kv_heads and fits) or heads % kv_heads:
            raise FileFormatError(
                f"{heads} heads of width {head_width} with {kv_heads} of keys", where=file.name
            )
        embedding = file.tensors.get("token_embd.weight")
        return cls(
            integer("block_count"),
            width,
            integer("feed_forward_length"),
            embedding.dims[0] if embedding else 0,
            heads,
            kv_heads,
            head_width,
            number("attention.layer_norm_rms_epsilon", 1e-5),
            number("rope.freq_base", 10000.0),
            number("rope.scaling.factor", 1.0),
            integer("context_length"),
            ROTATED_NEIGHBOURS[name],
        )

    def logits(self, net: Network, tokens: Value, positions: Value, mask: Value) -> Value:
        """Tokens int64 [1, S] at positions int64 [S] to logits of the last one, [1, vocab].

        Args:
            mask: bool [S, rows of the cache], the rows that each token attends to.
        """
        frequencies = self.base ** (-np.arange(0, self.head_width, 2) / self.head_width)
        if net.has("rope_freqs.weight"):
            factors = net.numbers("rope_freqs.weight", len(frequencies))
            if not (factors > 0).all():
                raise FileFormatError("rope_freqs.weight is not above 0", where=net.file.name)
            frequencies = frequencies / factors
        angles = net.angles(frequencies / self.factor, positions)
        x = net.embedding(tokens, "token_embd", self.vocab, self.width)
        for layer in range(self.layers):
            name = f"blk.{layer}"
            h = net.rms_norm(x, f"{name}.attn_norm", self.eps)
            q, k, v = (
                net.heads(
                    net.linear(h, f"{name}.attn_{part}", heads * self.head_width, order), heads
                )
                for part, heads, order in (
                    ("q", self.heads, self._order(self.heads)),
                    ("k", self.kv_heads, self._order(self.kv_heads)),
                    ("v", self.kv_heads, None),
                )
            )
            if net.has(f"{name}.attn_q_norm.weight"):
                q = net.rms_norm(q, f"{name}.attn_q_norm", self.eps)
                k = net.rms_norm(k, f"{name}.attn_k_norm", self.eps)
            q, k = net.rotate(q, angles), net.rotate(k, angles)
            attended = net.attend(layer, q, k, v, positions, mask)
            x = net.op("add.Tensor", x, net.linear(attended, f"{name}.attn_output", self.width), 1)
            h = net.rms_norm(x, f"{name}.ffn_norm", self.eps)
            gate = net.op("silu.default", net.linear(h, f"{name}.ffn_gate", self.inner))
            hidden = net.op("mul.Tensor", gate, net.linear(h, f"{name}.ffn_up", self.inner))
            x = net.op("add.Tensor", x, net.linear(hidden, f"{name}.ffn_down", self.width), 1)
        last = net.rms_norm(net.op("select.int", x, 1, -1), "output_norm", self.eps)
        head = "output" if net.has("output.weight") else "token_embd"
        return net.linear(last, head, self.vocab)

    def _order(self, heads: int) -> np.ndarray | None:
        """The rows of a file in the order that rotates halves; None: they are."""
        if not self.neighbours:
            return None
        rows = np.arange(heads * self.head_width).reshape(heads, self.head_width // 2, 2)
        order: np.ndarray = rows.swapaxes(1, 2).reshape(-1)
        return order
