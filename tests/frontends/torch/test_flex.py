"""flex_attention under torch.compile and purevk.compile, against eager torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

import purevk  # noqa: E402
from purevk import dynamo  # noqa: E402
from tests.ops.harness import tensor  # noqa: E402

pytestmark = pytest.mark.device
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 37, 43, 16
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.tensor([0] * 10 + [1] * 20 + [2] * 13)
PREFIXES = torch.tensor([5, 11])
RELATIVE = tensor(HEADS, QUERIES + KEYS, seed=7)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def alibi(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + SLOPES[h] * (j - i)


def soft_cap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 2 * torch.tanh(score / 2)


CASES: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "alibi": (alibi, causal),
    "causal": (None, causal),
    "sliding window": (None, lambda b, h, i, j: (i >= j) & (i - j <= 7)),
    "soft cap": (soft_cap, causal),
    "documents": (None, lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j]),
    "prefix": (None, lambda b, h, i, j: (j <= PREFIXES[b]) | (i >= j)),
    "relative positions": (lambda s, b, h, i, j: s + RELATIVE[h, i - j + KEYS], None),
    "scores forbid": (lambda s, b, h, i, j: torch.where(i >= j, s - 1, -float("inf")), None),
    "a query that sees nothing": (None, lambda b, h, i, j: (i >= j) & (i != 3)),
    "scores are scaled": (lambda s, b, h, i, j: s * SLOPES[h], None),
    "neither": (None, None),
}
# Those whose scores are more than shifted or forbidden are written out.
WRITTEN_OUT = ("soft cap", "scores are scaled")


def attention(name: str, **options: Any) -> Callable[..., Any]:
    score_mod, mask_mod = CASES[name]
    mask = None
    if mask_mod is not None:
        batch = BATCH if name == "prefix" else None
        mask = create_block_mask(mask_mod, batch, None, QUERIES, KEYS, device="cpu", BLOCK_SIZE=16)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, **options)

    return attend


def operands(key_heads: int = HEADS) -> tuple[torch.Tensor, ...]:
    keys = (BATCH, key_heads, KEYS, WIDTH)
    return tensor(BATCH, HEADS, QUERIES, WIDTH), tensor(*keys, seed=1), tensor(*keys, seed=2)


def strict(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="purevk", options={"fallback": False}, **options)


def agree(have: Any, want: Any) -> None:
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def kernels(name: str, args: tuple[torch.Tensor, ...]) -> list[str]:
    """The kernels of a call that are not run once at load."""
    before = {each.program for each in dynamo._shared}
    function = attention(name, scale=0.3)
    compiled = strict(function)
    agree(compiled(*args), function(*args))
    (program,) = {each.program for each in dynamo._shared} - before
    assert program.report()["cpu_nodes"] == 0
    (method,) = program.methods.values()
    return [dispatch.label.split()[0] for dispatch in method.executable.plan.dispatches]


def test_a_causal_mask_is_one_kernel() -> None:
    assert kernels("causal", operands()) == ["purevk.attention"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "causal"])
def test_functions_of_scores_and_masks(name: str) -> None:
    made = kernels(name, operands())
    assert ("purevk.attention" in made) is (name not in WRITTEN_OUT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "a query that sees nothing", "soft cap"])
def test_logarithms_of_sums_with_fewer_heads_of_keys(name: str) -> None:
    function = attention(name, return_lse=True, enable_gqa=True)
    args = operands(key_heads=2)
    agree(strict(function)(*args), function(*args))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    function = attention("alibi")
    args = tuple(each.to(dtype) for each in operands())
    tolerance = 1e-9 if dtype is torch.float64 else 2e-2
    have, want = strict(function)(*args), function(*args)
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alibi", "soft cap"])
def test_exported(name: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return function(*args)

    function = attention(name, enable_gqa=True)
    args = operands(key_heads=2)
    with purevk.compile(Model(), args) as program:
        agree(program.forward(*args), function(*args))
        assert program.report()["cpu_nodes"] == 0


@pytest.mark.slow
def test_dynamic_sizes_and_captured_tensors_that_change() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> Any:
        return flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i) * (i >= j)
        )

    compiled = strict(attend, dynamic=True)
    for rows, keys in ((5, 9), (70, 33), (12, 130)):
        q, k = tensor(BATCH, HEADS, rows, WIDTH), tensor(BATCH, HEADS, keys, WIDTH, seed=1)
        for slopes in (SLOPES, SLOPES + 1):
            agree(compiled(q, k, k, slopes), attend(q, k, k, slopes))


@pytest.mark.slow
def test_a_block_mask_that_the_graph_makes() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: torch.Tensor) -> Any:
        mask = create_block_mask(
            lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j),
            None,
            None,
            QUERIES,
            KEYS,
            device="cpu",
            BLOCK_SIZE=16,
        )
        return flex_attention(q, k, v, block_mask=mask)

    compiled, args = strict(attend), operands()
    for documents in (DOCUMENTS, DOCUMENTS.flip(0)):
        agree(compiled(*args, documents), attend(*args, documents))
