"""How tokens are chosen on the device, against the filters of transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
process = pytest.importorskip("transformers.generation.logits_process")

from purevk.dtypes import DType  # noqa: E402
from purevk.errors import InputError  # noqa: E402
from purevk.graph.devices import choose_context  # noqa: E402
from purevk.ir import Graph  # noqa: E402
from purevk.llm.sampling import Sampling, logprobs_graph, sampling_graph  # noqa: E402
from purevk.llm.sources import BuiltGraph  # noqa: E402
from purevk.program import Program  # noqa: E402

pytestmark = pytest.mark.device
VOCAB = 211


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    graphs = {
        "sample": sampling_graph(VOCAB, DType.float32),
        "sample_adjusted_constrained": sampling_graph(VOCAB, DType.float32, True, True),
        "logprobs": logprobs_graph(VOCAB, DType.float32),
    }
    sources = {name: BuiltGraph(functools.partial(pick, graphs, name), name) for name in graphs}
    with Program("sampling", sources, choose_context(None, None)) as program:
        yield program


def pick(graphs: dict[str, Graph], name: str) -> Graph:
    return graphs[name]


def probabilities(logits: np.ndarray, options: dict[str, float]) -> torch.Tensor:
    """What transformers samples from, in float64 [vocab]."""
    scores = torch.from_numpy(logits)[None].double()
    warpers = [process.TemperatureLogitsWarper(float(options["temperature"]))]
    if options.get("top_k"):
        warpers.append(process.TopKLogitsWarper(options["top_k"]))
    if options.get("top_p", 1.0) < 1:
        warpers.append(process.TopPLogitsWarper(options["top_p"]))
    if options.get("min_p"):
        warpers.append(process.MinPLogitsWarper(options["min_p"]))
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 17},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.5, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 300},
    ],
    ids=str,
)
def test_tokens_have_the_probabilities_of_transformers(
    program: Program, options: dict[str, float]
) -> None:
    logits = np.random.default_rng(1).normal(0, 2, VOCAB).astype(np.float32)
    program.state["logits"] = logits[None]
    wanted = probabilities(logits, options)
    order = wanted.argsort(descending=True, stable=True)
    sums = wanted[order].cumsum(0)
    sampling, random = Sampling(**options), np.random.default_rng(0)
    for _ in range(60):
        parameters = sampling.parameters(random.random())
        token = int(program.method("sample")(parameters).item())
        assert wanted[token] > 0
        # The random number lies in the part of the sum that the token has, but for rounding.
        rank = int((order == token).nonzero())
        low, high = (sums[rank] - wanted[token]).item(), sums[rank].item()
        assert low - 1e-5 <= float(parameters[4]) <= high + 1e-5
        assert int(program.state["token"].item()) == token


def test_extremes(program: Program) -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 7] = 100.0
    program.state["logits"] = logits
    sample = program.method("sample")
    for numbers in ((1e-4, 1 << 24, 1.0, 0.0), (1.0, 5, 0.0, 0.0), (1.0, 1, 1.0, 1.0)):
        for random in (0.0, 1.0):
            assert int(sample(np.array([*numbers, random, 1, 0], np.float32)).item()) == 7
    logits[:] = 0.0
    program.state["logits"] = logits
    tokens = {
        int(sample(np.array([1, 1 << 24, 1, 0, u, 1, 0], np.float32)).item()) for u in (0.0, 1.0)
    }
    assert len(tokens) == 2 and all(0 <= each < VOCAB for each in tokens)


@pytest.mark.parametrize("repetition, presence", [(1.3, 0.0), (0.7, 0.0), (1.0, 1.5), (1.2, -0.5)])
def test_penalties_and_biases(program: Program, repetition: float, presence: float) -> None:
    """Greedy, so that the largest of what transformers computes is the token."""
    generator = np.random.default_rng(2)
    logits = generator.normal(0, 1, VOCAB).astype(np.float32)
    prompt, bias = [3, 5, 9], {7: 1.5, 11: -float("inf"), 12: 2.0}
    options = Sampling(repetition_penalty=repetition, presence_penalty=presence, logit_bias=bias)
    seen = np.zeros((2, VOCAB), np.float32)
    seen[0, prompt] = 1
    program.state["seen"], program.state["bias"] = seen, options.bias(VOCAB)
    program.state["logits"] = logits[None]
    penalty = process.RepetitionPenaltyLogitsProcessor(repetition)
    allowed = np.ones(VOCAB, bool)
    allowed[int(logits.argmax())] = False
    bits = np.packbits(np.pad(allowed, (0, 224 - VOCAB)), bitorder="little")
    answer: list[int] = []
    for _ in range(6):
        scores = torch.from_numpy(logits)[None] + torch.from_numpy(options.bias(VOCAB))
        scores = penalty(torch.tensor([prompt + answer]), scores)[0]
        scores[answer] -= presence
        scores[~torch.from_numpy(allowed)] = -torch.inf
        method = program.method("sample_adjusted_constrained")
        token = int(method(options.parameters(0.5), bits).item())
        assert token == int(scores.argmax()) and allowed[token] and token != 11
        answer.append(token)


def test_logprobs_are_those_of_torch(program: Program) -> None:
    logits = np.random.default_rng(3).normal(0, 3, VOCAB).astype(np.float32)
    program.state["logits"] = logits[None]
    program.state["token"] = np.array([[17]])
    own, largest, tokens = program.method("logprobs")()
    likely = torch.from_numpy(logits).double().log_softmax(-1)
    values, order = likely.topk(20)
    assert tokens.tolist() == order.tolist()
    assert np.abs(largest - values.numpy()).max() <= 1e-5
    assert abs(float(own[0]) - float(likely[17])) <= 1e-5


@pytest.mark.parametrize(
    "bias, match",
    [({VOCAB: 1.0}, "logit_bias has 211"), ({True: 1.0}, "True"), ({3: float("nan")}, "nan")],
    ids=str,
)
def test_biases_are_checked(bias: dict[int, float], match: str) -> None:
    with pytest.raises(InputError, match=match):
        Sampling(logit_bias=bias).bias(VOCAB)
