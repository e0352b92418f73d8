"""How tokens are chosen on the device, against the filters of transformers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
process = pytest.importorskip("transformers.generation.logits_process")

from purevk.dtypes import DType  # noqa: E402
from purevk.graph.devices import choose_context  # noqa: E402
from purevk.llm.graphs import source_of  # noqa: E402
from purevk.llm.sampling import Sampling, sampling_graph  # noqa: E402
from purevk.program import Program  # noqa: E402

pytestmark = pytest.mark.device
VOCAB = 211


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    source = source_of(lambda: sampling_graph(VOCAB, DType.float32))
    with Program("sampling", {"sample": source}, choose_context(None, None)) as program:
        yield program


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
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, **options}
    sampling = Sampling.checked(**full)
    for _ in range(60):
        parameters = sampling.parameters()
        token = int(program.method("sample")(parameters).item())
        assert wanted[token] > 0
        # The random number lies in the part of the sum that the token has, but for rounding.
        rank = int((order == token).nonzero())
        low, high = (sums[rank] - wanted[token]).item(), sums[rank].item()
        assert low - 1e-5 <= float(parameters[-1]) <= high + 1e-5
        assert int(program.state["token"].item()) == token


def test_extremes(program: Program) -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 7] = 100.0
    program.state["logits"] = logits
    sample = program.method("sample")
    for numbers in ((1e-4, 1 << 24, 1.0, 0.0), (1.0, 5, 0.0, 0.0), (1.0, 1, 1.0, 1.0)):
        for random in (0.0, 1.0):
            assert int(sample(np.array([*numbers, random], np.float32)).item()) == 7
    logits[:] = 0.0
    program.state["logits"] = logits
    tokens = {int(sample(np.array([1, 1 << 24, 1, 0, u], np.float32)).item()) for u in (0.0, 1.0)}
    assert len(tokens) == 2 and all(0 <= each < VOCAB for each in tokens)
