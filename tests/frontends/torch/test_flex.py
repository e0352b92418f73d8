"""flex_attention under torch.compile and purevk.compile, against eager torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

import purevk  # noqa: E402
import purevk.dynamo  # noqa: E402  registers the backend
from purevk import compiled_graphs  # noqa: E402
from tests.ops.harness import context, tensor  # noqa: E402

pytestmark = pytest.mark.device
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 4, 37, 43, 16
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.tensor([0] * 10 + [1] * 20 + [2] * 13)
PREFIXES = torch.tensor([5, 11])
RELATIVE = tensor(HEADS, QUERIES + KEYS, seed=7)
CAP = torch.tensor(1.5)
PAGES = torch.tensor([[0, page] for page in (3, 0, 7, 1, 2, 10, 4, 5, 6, 9, 8)])
SEEN = tensor(QUERIES, KEYS, seed=8) > 0
POSITIONS = torch.arange(KEYS) * 3 - 20
FAR = torch.tensor([2**31 - 1, 2**31 - 60, -(2**31), 0], dtype=torch.int32)
REACH = torch.tensor([3, 9, 30, 2**40])


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


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return DOCUMENTS[i] == DOCUMENTS[j]


def soft_cap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 2 * torch.tanh(score / 2)


CASES: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "alibi": (alibi, causal),
    "causal": (None, causal),
    "sliding window": (None, lambda b, h, i, j: (i >= j) & (i - j <= 7)),
    "soft cap": (soft_cap, causal),
    "documents": (None, documents),
    "prefix": (None, lambda b, h, i, j: (j <= PREFIXES[b]) | (i >= j)),
    "relative positions": (lambda s, b, h, i, j: s + RELATIVE[h, i - j + KEYS], None),
    "scores forbid": (lambda s, b, h, i, j: torch.where(i >= j, s - 1, -float("inf")), None),
    "a query that sees nothing": (None, lambda b, h, i, j: (i >= j) & (i != 3)),
    "scores are scaled": (lambda s, b, h, i, j: s * SLOPES[h], None),
    "rows of a table": (lambda s, b, h, i, j: s + RELATIVE[h][i - j + KEYS] * CAP, None),
    "a captured number": (lambda s, b, h, i, j: CAP * torch.tanh(s / CAP), causal),
    "chunks": (None, lambda b, h, i, j: (i // 8 == j // 8) | (j < 2)),
    "both sides": (None, lambda b, h, i, j: ((i - j).abs() < 5) & ~(j == 3)),
    "forbidden twice": (lambda s, b, h, i, j: torch.where(j > i, -float("inf"), s * 2), documents),
    "pages": (None, lambda b, h, i, j: PAGES[j // 4, 1] * 4 + j % 4 <= i),
    "a mask of positions": (None, lambda b, h, i, j: SEEN[i, j - 1] & (h != 2)),
    "int64 distances": (None, lambda b, h, i, j: (POSITIONS[i] - POSITIONS[j]).abs() <= REACH[h]),
    "products beyond int32": (None, lambda b, h, i, j: (i * 1664525000 + j * 1013904223) % 7 < 4),
    "sums beyond int32": (None, lambda b, h, i, j: i + j + FAR[h] > FAR[h]),
    "neither": (None, None),
}


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
    before = {each.program for each in compiled_graphs.shared}
    function = attention(name, scale=0.3)
    compiled = strict(function)
    agree(compiled(*args), function(*args))
    (program,) = {each.program for each in compiled_graphs.shared} - before
    assert program.report()["cpu_nodes"] == 0
    (method,) = program.methods.values()
    return [dispatch.label.split()[0] for dispatch in method.executable.plan.dispatches]


def test_a_causal_mask_is_one_kernel() -> None:
    assert kernels("causal", operands()) == ["purevk.attention"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "causal"])
def test_functions_of_scores_and_masks(name: str) -> None:
    assert kernels(name, operands()) == ["purevk.attention"]


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
    tolerance = {torch.float64: 1e-9, torch.float16: 2e-2, torch.bfloat16: 3e-2}[dtype]
    have, want = strict(function)(*args), function(*args)
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.bool], ids=str)
def test_dtypes_of_captured_tensors(dtype: torch.dtype) -> None:
    slopes = (SLOPES * 8).to(dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i))

    agree(strict(attend)(*operands()), attend(*operands()))


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


@pytest.mark.parametrize("queries", [1, 16])
def test_keys_that_no_query_sees_are_not_read(queries: int) -> None:
    mask = create_block_mask(
        lambda b, h, i, j: (i - j < 9) & (j - i < 9), None, None, queries, 300, device="cpu"
    )

    def attend(q: torch.Tensor, k: torch.Tensor) -> Any:
        return flex_attention(q, k, k, block_mask=mask)

    q, k = tensor(1, 2, queries, WIDTH), tensor(1, 2, 300, WIDTH, seed=1)
    want = attend(q, k)
    k[:, :, 160:] = float("nan")
    agree(strict(attend)(q, k), want)


def test_functions_of_whole_tensors_are_written_out() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> Any:
        return flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + slopes.exp()[h] * (j - i)
        )

    agree(strict(attend)(*operands(), SLOPES), attend(*operands(), SLOPES))


@pytest.mark.slow
def test_more_captured_tensors_than_a_kernel_reads() -> None:
    tables = [tensor(HEADS, seed=seed) for seed in range(4)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            for table in tables:
                s = s * 0.5 + table[h] * torch.where(i > j, i - j, 0)
            return torch.where(j == i + 1, -float("inf"), s)

        return flex_attention(q, k, v, score_mod=score, enable_gqa=True)

    args = operands(key_heads=2)
    agree(strict(attend)(*args), attend(*args))


@pytest.mark.slow
def test_a_device_without_int64(monkeypatch: pytest.MonkeyPatch) -> None:
    traits = context().traits
    lacking = replace(traits, features=traits.features - {"int64"})
    monkeypatch.setattr(context(), "traits", lacking)
    for name in ("documents", "alibi"):
        torch._dynamo.reset()
        before = {each.program for each in compiled_graphs.shared}
        function = attention(name)
        agree(strict(function)(*operands()), function(*operands()))
        (program,) = {each.program for each in compiled_graphs.shared} - before
        assert bool(program.report()["cpu_nodes"]) is (name == "documents")


@pytest.mark.slow
def test_indices_into_captured_tensors_are_checked() -> None:
    def by_head(q: torch.Tensor, slopes: torch.Tensor) -> Any:
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + slopes[h])

    compiled, q = strict(by_head), operands()[0]
    agree(compiled(q, SLOPES), by_head(q, SLOPES))
    with pytest.raises(purevk.InputError, match="an index of "):
        compiled(q, SLOPES[:3])

    def by_number(q: torch.Tensor, numbers: torch.Tensor) -> Any:
        return flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + SLOPES[numbers[j]])

    compiled = strict(by_number)
    numbers = torch.arange(QUERIES) % HEADS
    agree(compiled(q, numbers), by_number(q, numbers))
    numbers[-1] = HEADS
    with pytest.raises(purevk.InputError, match=f" is {HEADS}"):
        compiled(q, numbers)


def test_a_saved_program(tmp_path: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, *args: torch.Tensor) -> Any:
            return attention("alibi")(*args)

    args = operands()
    with purevk.compile(Model(), args) as program:
        program.save(tmp_path / "model.pvk")
    with purevk.load(tmp_path / "model.pvk") as program:
        agree(program.forward(*args), Model()(*args))


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
