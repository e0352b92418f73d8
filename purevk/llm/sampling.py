"""How a token is chosen by its logits, on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.ir import Graph, TensorType, Value
from purevk.llm.arguments import refuse

if TYPE_CHECKING:
    from purevk.llm.graphs import GraphBuilder

MOST_LOGPROBS = 20
_PARAMETERS = 7


@dataclass(frozen=True)
class Sampling:
    """What a token is chosen by, see `Model.generate`.

    Raises:
        InputError: a number is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (self.temperature, 0.0, 1e4),
            "top_k": (self.top_k, 0, 1 << 24),
            "top_p": (self.top_p, 0.0, 1.0),
            "min_p": (self.min_p, 0.0, 1.0),
            "seed": (0 if self.seed is None else self.seed, 0, (1 << 64) - 1),
            "repetition_penalty": (self.repetition_penalty, 1e-2, 1e2),
            "presence_penalty": (self.presence_penalty, -1e2, 1e2),
            "logprobs": (self.logprobs or 0, 0, MOST_LOGPROBS),
        }
        for name, (number, least, most) in ranges.items():
            whole = name in ("top_k", "seed", "logprobs")
            fits = isinstance(number, int if whole else (int, float))
            if not fits or isinstance(number, bool) or not least <= number <= most:
                kind = "an integer" if whole else "a number"
                raise refuse(name, number, f"{kind} from {least} to {most}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed by what was generated before, or by biases."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or bool(self.logit_bias)

    def bias(self, vocab: int) -> np.ndarray:
        """The state "bias" of `sampling_graph`: float32 [vocab].

        Raises:
            InputError: a key of `logit_bias` is no token, or a value no number. Infinities are
                accepted.
        """
        bias = np.zeros(vocab, np.float32)
        for token, number in self.logit_bias.items():
            whole = isinstance(token, int) and not isinstance(token, bool)
            if not whole or not 0 <= token < vocab:
                raise InputError(
                    f"logit_bias has {token!r}", why=f"token ids are from 0 to {vocab - 1}"
                )
            if not isinstance(number, (int, float)) or number != number:
                raise refuse(f"logit_bias[{token}]", number, "a number")
            bias[token] = min(max(number, -3e38), 3e38)
        return bias

    def parameters(self, random: float) -> np.ndarray:
        """The input of `sampling_graph` for the next token, with a random number from 0 to 1."""
        top_k = 1 if self.greedy else self.top_k or 1 << 24
        temperature = 1.0 if self.greedy else max(self.temperature, 1e-4)
        penalties = self.repetition_penalty, self.presence_penalty
        numbers = (temperature, top_k, self.top_p, self.min_p, random, *penalties)
        return np.array(numbers, np.float32)


def sampling_graph(
    vocab: int, dtype: DType, adjusts: bool = False, constrained: bool = False
) -> Graph:
    """The method that chooses a token by the state "logits", stores and returns it.

    Its input is float32 [7]: temperature, top_k, top_p, min_p, a random number from 0 to 1, and the
    penalties of repetition and presence. The filters are applied in this order, as transformers
    does. Tokens are sorted by their probability, so that each filter keeps the first ones.

    Args:
        adjusts: first adds the state "bias", float32 [vocab]; then applies the penalties by the
            state "seen", float32 [2, vocab]: 1 for tokens of the prompt or the answer, and for those
            of the answer. Repetition is as transformers defines it (Keskar et al., CTRL), presence
            as OpenAI does.
        constrained: a second input, uint8 [bytes], has a bit for each token that may be chosen.
    """
    from purevk.llm.graphs import GraphBuilder  # it imports all operators

    net = GraphBuilder(sampling_name(adjusts, constrained))
    numbers = net.input(DType.float32, (_PARAMETERS,))
    temperature, top_k, top_p, min_p, random, repetition, presence = (
        net.op("slice.Tensor", numbers, 0, at, at + 1, 1) for at in range(_PARAMETERS)
    )
    logits = net.state(TensorType(dtype, (1, vocab)), name="logits")
    wide = net.op("_to_copy.default", net.op("view.default", logits, (vocab,)), DType.float32)
    ranks = net.constant(np.arange(vocab), DType.float32)
    if adjusts:
        bias = net.state(TensorType(DType.float32, (vocab,)), name="bias")
        seen = net.state(TensorType(DType.float32, (2, vocab)), name="seen")
        wide = _penalized(net, net.op("add.Tensor", wide, bias, 1), seen, repetition, presence)
    if constrained:
        allowed = _bits(net, net.input(DType.uint8, (-(-vocab // 32) * 4,)), vocab)
        wide = net.op("where.self", allowed, wide, net.constant(np.array(-np.inf), DType.float32))
    ordered, tokens = net.aten.sort.all(wide, dim=-1, descending=True)
    scaled = net.op("div.Tensor", ordered, temperature)
    likely = net.op("_softmax.default", scaled, -1, False)
    first = net.op("slice.Tensor", likely, 0, 0, 1, 1)

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
    token = net.op("index.Tensor", tokens, (number,))
    if adjusts:
        is_token = net.op("eq.Tensor", ranks, net.op("_to_copy.default", token, DType.float32))
        marked = net.op("_to_copy.default", is_token, DType.float32)
        net.store(seen, net.op("maximum.default", seen, marked))
    chosen = net.op("view.default", token, (1, 1))
    net.store(net.state(TensorType(DType.int64, (1, 1)), name="token"), chosen)
    return net.finish(chosen)


def sampling_name(adjusts: bool, constrained: bool) -> str:
    """The name of a method of `sampling_graph`."""
    return "sample" + "_adjusted" * adjusts + "_constrained" * constrained


def logprobs_graph(vocab: int, dtype: DType) -> Graph:
    """The method "logprobs": natural logarithms of the probabilities by the state "logits", before
    any filter. Returns that of the state "token", float32 [1], and the largest, float32 [N] and
    int64 [N]."""
    from purevk.llm.graphs import GraphBuilder

    net = GraphBuilder("logprobs")
    logits = net.state(TensorType(dtype, (1, vocab)), name="logits")
    token = net.op("view.default", net.state(TensorType(DType.int64, (1, 1)), name="token"), (1,))
    wide = net.op("_to_copy.default", net.op("view.default", logits, (vocab,)), DType.float32)
    likely = net.op("_log_softmax.default", wide, -1, False)
    own = net.op("index.Tensor", likely, (net.op("clamp.default", token, 0, vocab - 1),))
    largest, tokens = net.aten.topk.all(likely, min(MOST_LOGPROBS, vocab), -1, True, True)
    return net.finish(own, largest, tokens)


def _penalized(
    net: GraphBuilder, logits: Value, seen: Value, repetition: Value, presence: Value
) -> Value:
    """Logits [vocab] after both penalties. `seen` as for `sampling_graph`."""
    divided = net.op("div.Tensor", logits, repetition)
    multiplied = net.op("mul.Tensor", logits, repetition)
    is_negative = net.op("lt.Scalar", logits, 0)
    repeated = net.op("where.self", is_negative, multiplied, divided)
    anywhere, in_answer = (net.op("select.int", seen, 0, row) for row in (0, 1))
    logits = net.op("where.self", net.op("gt.Scalar", anywhere, 0), repeated, logits)
    return net.op("sub.Tensor", logits, net.op("mul.Tensor", in_answer, presence), 1)


def _bits(net: GraphBuilder, packed: Value, count: int) -> Value:
    """The first `count` bits of bytes, the low ones first: bool [count]."""
    masks = net.constant(1 << np.arange(8), DType.uint8)
    column = net.op("unsqueeze.default", packed, 1)
    bits = net.op("ne.Scalar", net.op("bitwise_and.Tensor", column, masks), 0)
    flat = net.op("view.default", bits, (int(packed.type.dims[0]) * 8,))
    return net.op("slice.Tensor", flat, 0, 0, count, 1)
