"""How a token is chosen by its logits, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.ir import Graph, TensorType, Value
from purevk.llm.graphs import GraphBuilder


@dataclass(frozen=True)
class Sampling:
    """What a token is chosen by, see `Model.generate`.

    Attributes:
        random: the random numbers, one for each token.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    random: np.random.Generator

    @classmethod
    def checked(
        cls, temperature: float, top_k: int, top_p: float, min_p: float, seed: int | None
    ) -> Sampling:
        """Raises InputError if a number is out of range."""
        ranges = {
            "temperature": (temperature, 0.0, 1e4),
            "top_k": (top_k, 0, 1 << 24),
            "top_p": (top_p, 0.0, 1.0),
            "min_p": (min_p, 0.0, 1.0),
            "seed": (0 if seed is None else seed, 0, (1 << 64) - 1),
        }
        for name, (number, least, most) in ranges.items():
            whole = name in ("top_k", "seed")
            fits = isinstance(number, int if whole else (int, float))
            if not fits or isinstance(number, bool) or not least <= number <= most:
                kind = "an integer" if whole else "a number"
                raise InputError(
                    f"{name}={number!r} is not accepted", why=f"{kind} from {least} to {most}"
                )
        return cls(temperature, top_k, top_p, min_p, np.random.default_rng(seed))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0 or self.top_k == 1

    def parameters(self) -> np.ndarray:
        """The input of `sampling_graph` for the next token."""
        top_k = self.top_k or 1 << 24
        least = max(self.temperature, 1e-4)
        numbers = (least, top_k, self.top_p, self.min_p, self.random.random())
        return np.array(numbers, np.float32)


def sampling_graph(vocab: int, dtype: DType) -> Graph:
    """The method "sample": temperature, top_k, top_p, min_p and a random number from 0 to 1, float32
    [5]; it chooses a token by the state "logits", stores and returns it.

    The filters are applied in this order, as transformers does. Tokens are sorted by their
    probability, so that each filter keeps the first ones.
    """
    net = GraphBuilder("sample")
    given = net.input(DType.float32, (5,))
    temperature, top_k, top_p, min_p, random = (
        net.op("slice.Tensor", given, 0, at, at + 1, 1) for at in range(5)
    )
    logits = net.state(TensorType(dtype, (1, vocab)), name="logits")
    wide = net.op("_to_copy.default", net.op("view.default", logits, (vocab,)), DType.float32)
    ordered, tokens = net.aten.sort.all(wide, dim=-1, descending=True)
    scaled = net.op("div.Tensor", ordered, temperature)
    likely = net.op("_softmax.default", scaled, -1, False)
    first = net.op("slice.Tensor", likely, 0, 0, 1, 1)
    ranks = net.constant(np.arange(vocab), DType.float32)

    def where(condition: Value, numbers: Value) -> Value:
        return net.op("mul.Tensor", numbers, net.op("_to_copy.default", condition, DType.float32))

    likely = where(net.op("lt.Tensor", ranks, top_k), likely)
    sums = net.op("cumsum.default", likely, 0)
    total = net.op("slice.Tensor", sums, 0, vocab - 1, vocab, 1)
    before = net.op("sub.Tensor", sums, likely, 1)
    likely = where(net.op("lt.Tensor", before, net.op("mul.Tensor", total, top_p)), likely)
    likely = where(net.op("ge.Tensor", likely, net.op("mul.Tensor", first, min_p)), likely)
    sums = net.op("cumsum.default", likely, 0)
    total = net.op("slice.Tensor", sums, 0, vocab - 1, vocab, 1)
    passed = net.op("le.Tensor", sums, net.op("mul.Tensor", total, random))
    last = net.op("sum.dim_IntList", net.op("gt.Scalar", likely, 0), (0,), True)
    number = net.op("sum.dim_IntList", passed, (0,), True)
    number = net.op("minimum.default", number, net.op("sub.Tensor", last, 1, 1))
    number = net.op("clamp.default", number, 0, vocab - 1)
    chosen = net.op("view.default", net.op("index.Tensor", tokens, (number,)), (1, 1))
    net.store(net.state(TensorType(DType.int64, (1, 1)), name="token"), chosen)
    return net.finish(chosen)
