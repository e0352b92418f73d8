"""Tiny models on the device, against transformers on the same weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

import purevk.llm  # noqa: E402
from purevk.cache import Cache  # noqa: E402
from purevk.errors import InputError, UnsupportedProgramError  # noqa: E402
from purevk.llm import decoding, loading  # noqa: E402
from purevk.llm.decoding import ChunkSize, prompt_lengths  # noqa: E402
from purevk.llm.gguf import GgufFile  # noqa: E402
from purevk.program.plan_cache import cache, records  # noqa: E402
from purevk.pte.blocks import FORMS  # noqa: E402
from tests.llm.harness import write_llama  # noqa: E402

pytestmark = pytest.mark.device
PROMPT = [5, 17, 3, 88, 41, 9, 60]


def expected_logits(reference: Any, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0, -1].float().numpy()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[purevk.llm.Model, Any]]:
    """A model of 4 bits with a table of 8 bits, and the same in transformers."""
    path = tmp_path_factory.mktemp("llm") / "tiny.gguf"
    reference = write_llama(path, "Q4_1", table="Q8_0", vocabulary=True)
    with purevk.llm.load(path, context=32, dtype="float32") as model:
        yield model, reference


def greedy(reference: Any, tokens: list[int], count: int) -> list[int]:
    made = list(tokens)
    for _ in range(count):
        made.append(int(expected_logits(reference, made).argmax()))
    return made[len(tokens) :]


def prompt_logits(model: purevk.llm.Model, tokens: list[int]) -> np.ndarray:
    """Those after the prompt: no step follows the last token that is wanted."""
    model.position = 0
    model.generate(tokens, max_tokens=1).tokens()
    return model.logits


def test_logits_and_tokens_are_those_of_transformers(pair: tuple[purevk.llm.Model, Any]) -> None:
    model, reference = pair
    want = expected_logits(reference, PROMPT)
    have = prompt_logits(model, PROMPT)
    assert np.abs(have - want).max() <= 1e-4 * np.abs(want).max()
    model.program.method("decode")(np.array([len(PROMPT)]))
    want = expected_logits(reference, [*PROMPT, int(want.argmax())])
    assert np.abs(model.logits - want).max() <= 1e-4 * np.abs(want).max()
    assert model.generate(PROMPT, max_tokens=12).tokens() == greedy(reference, PROMPT, 12)


def test_weights_that_do_not_fit_are_on_the_host(
    pair: tuple[purevk.llm.Model, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = pair
    arguments = {"context": model.context, "dtype": "float32"}
    whole = purevk.llm.plan(model.file.name, **arguments, device=model.program.context)
    assert "workspace" in str(whole) and "MB free on the" in str(whole)
    heaps = {True: whole.total - whole.weights // 2, False: 10**9}
    memory = "purevk.program.devices.memory.free_bytes"
    monkeypatch.setattr(memory, lambda device, local=True: heaps[local])
    with pytest.raises(InputError, match="context=|spill=True"):
        purevk.llm.load(model.file.name, **arguments)
    with purevk.llm.load(model.file.name, **arguments, spill=True) as spilled:
        plan, buffers = spilled.plan, spilled.program.weights._buffers
        sizes = {
            kind: sum(each.nbytes for each in buffers if each.kind.name == kind)
            for kind in ("DEVICE", "HOST")
        }
        assert 0 < sizes["DEVICE"] <= plan.local_weights == plan.weights - plan.spilled
        assert sizes["HOST"] >= 0.8 * plan.spilled
        assert f"{plan.spilled / 1e6:.1f} MB of them on the host" in str(plan)
        assert spilled.generate(PROMPT, max_tokens=4).tokens() == greedy(reference, PROMPT, 4)
        assert plan.workspace == whole.workspace >= spilled.program.memory.planned > 0
    heaps[False] = 0
    with pytest.raises(InputError, match="MB are free"):
        purevk.llm.load(model.file.name, **arguments, spill=True)


def test_weights_are_packed(pair: tuple[purevk.llm.Model, Any]) -> None:
    model, reference = pair
    matrices = [each for each in reference.parameters() if each.ndim == 2]
    table = reference.model.embed_tokens.weight.numel()
    layers = sum(each.numel() for each in matrices) - table
    bits = 5 * layers + 8.5 * table  # 4 bits, and a scale and a minimum of 16 bits for each 32
    vectors = sum(each.numel() for each in reference.parameters() if each.ndim == 1)
    assert model.plan.weights - bits / 8 - 4 * vectors <= 2 * 4 * 32 * 16 + 8 * 32  # tables
    assert model.program.memory.weights <= 1.15 * model.plan.weights


def test_a_common_start_is_not_computed_again(pair: tuple[purevk.llm.Model, Any]) -> None:
    model, reference = pair
    model.position = 0
    first = model.generate(PROMPT, max_tokens=6)
    tokens = first.tokens()
    assert first.stats.reused_tokens == 0 and first.stats.why == "length"
    longer = [*PROMPT, *tokens[:3], 11]
    second = model.generate(longer, max_tokens=5)
    assert second.tokens() == greedy(reference, longer, 5)
    assert second.stats.reused_tokens == len(longer) - 1
    model.position = 4
    assert model.position == 4
    third = model.generate(PROMPT, max_tokens=6)
    assert third.tokens() == tokens and third.stats.reused_tokens == 4
    with pytest.raises(InputError, match="position"):
        model.position = 33


def test_the_cache_ends(pair: tuple[purevk.llm.Model, Any]) -> None:
    model, reference = pair
    made = model.generate(PROMPT)
    tokens = made.tokens()
    assert made.stats.why == "context" and len(PROMPT) + len(tokens) == model.context + 1
    assert tokens == greedy(reference, PROMPT, len(tokens))
    position = model.position
    with pytest.raises(InputError, match="the cache holds 32 tokens"):
        model.generate(list(range(33)))
    assert model.position == position
    for wrong in ([], [96000], [-1]):
        with pytest.raises(InputError):
            model.generate(wrong)


def test_another_generation_ends_the_one_before(pair: tuple[purevk.llm.Model, Any]) -> None:
    model, reference = pair
    first = model.generate(PROMPT)
    next(first), next(first)
    assert model.generate(PROMPT[:3], max_tokens=4).tokens() == greedy(reference, PROMPT[:3], 4)
    with pytest.raises(InputError, match="ended"):
        list(first)


def test_text(pair: tuple[purevk.llm.Model, Any]) -> None:
    model, reference = pair
    tokenizer = model.tokenizer
    prompt = "hello w12 <|im_start|>é漢🙂"
    ids = tokenizer.encode(prompt)
    assert tokenizer.decode(ids) == prompt.replace("<|im_start|>", "")
    assert len(tokenizer.encode("12")) == 2  # digits are single
    assert len(tokenizer.encode("hello w")) == 2
    made = model.generate(prompt, max_tokens=8)
    want = []
    for token in greedy(reference, ids, 8):
        if token in tokenizer.end_tokens:
            break
        want.append(token)
    assert made.text() == tokenizer.decode(want)


@pytest.mark.parametrize("seed", [0, 1])
def test_seeds(pair: tuple[purevk.llm.Model, Any], seed: int) -> None:
    model, _ = pair
    options = {"max_tokens": 8, "temperature": 1.5, "seed": seed}
    first = model.generate(PROMPT, **options).tokens()
    assert model.generate(PROMPT, **options).tokens() == first
    assert model.generate(PROMPT, max_tokens=8, temperature=0.0).tokens() != first


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": -1.0},
        {"top_k": 1.5},
        {"top_p": 2},
        {"seed": -1},
        {"max_tokens": 0},
        {"repetition_penalty": 0},
        {"presence_penalty": "1"},
        {"logprobs": 21},
        {"logit_bias": {96000: 1}},
    ],
    ids=str,
)
def test_options_are_checked(pair: tuple[purevk.llm.Model, Any], option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(option))):
        pair[0].generate(PROMPT, **option)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("F16", {"family": "Qwen2"}),
        ("Q8_0", {"family": "Qwen3"}),
        ("F32", {"rotation_factors": True}),
    ],
    ids=str,
)
def test_architectures(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = write_llama(tmp_path / "model.gguf", kind, **options)
    with purevk.llm.load(tmp_path / "model.gguf", context=32, dtype="float32") as model:
        want = expected_logits(reference, PROMPT)
        have = prompt_logits(model, PROMPT)
        assert np.abs(have - want).max() <= 1e-4 * np.abs(want).max()
        assert model.generate(PROMPT, max_tokens=5).tokens() == greedy(reference, PROMPT, 5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *FORMS])
def test_each_type(kind: str, tmp_path: Path) -> None:
    reference = write_llama(tmp_path / "model.gguf", kind, width=256)
    with purevk.llm.load(tmp_path / "model.gguf", context=32, dtype="float32") as model:
        want = expected_logits(reference, PROMPT)
        error = np.abs(prompt_logits(model, PROMPT) - want).max() / np.abs(want).max()
        # Scales that float16 rounds: 1e-3 for a product (test_blocks.py), more after 14 of them.
        assert error <= (5e-3 if kind.endswith(("_K", "_XS")) else 1e-4), error


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-2), ("bfloat16", 1e-1)])
def test_narrow_dtypes(dtype: str, tolerance: float, tmp_path: Path) -> None:
    reference = write_llama(tmp_path / "model.gguf", "Q8_0", table="Q4_0")
    with purevk.llm.load(tmp_path / "model.gguf", context=32, dtype=dtype) as model:
        want = expected_logits(reference, PROMPT)
        error = np.abs(prompt_logits(model, PROMPT) - want).max() / np.abs(want).max()
        assert error <= tolerance, error


def test_a_prompt_in_chunks(pair: tuple[purevk.llm.Model, Any]) -> None:
    model, reference = pair
    model.position = 0
    model.decoder.chunk.rows = 3
    assert model.generate(PROMPT, max_tokens=4).tokens() == greedy(reference, PROMPT, 4)
    model.decoder.chunk.rows = 32


@pytest.mark.parametrize("seconds", [0.0001, 0.004, 0.02, 0.4])
def test_chunks_stay_below_what_drivers_let_run(seconds: float) -> None:
    """On a simulated device that takes so many seconds for a token."""
    chunk, times = ChunkSize(512, True), []
    for _ in range(20):
        times.append(chunk.rows * seconds)
        chunk.took(times[-1], chunk.rows)
    assert max(times[8:]) <= 0.5 and chunk.rows == min(512, chunk.rows)
    assert chunk.rows == 512 or 2 * chunk.rows * seconds > 0.15
    assert ChunkSize(512, False).rows == 512


def test_a_plan_needs_no_device(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", "Q8_0")
    plans = [purevk.llm.plan(tmp_path / "model.gguf", context=rows) for rows in (60, 128)]
    assert plans[1].cache == 2 * plans[0].cache == 2 * (2 * 2 * 2 * 16 * 64 * 2)
    assert plans[1].largest_context(plans[1].total) == 128 and plans[1].workspace > 0
    assert plans[1].heaps == ()


def test_memory_is_linear_in_the_context(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", trained=1 << 17)
    rows = [1 << 12, 1 << 14, 1 << 17]
    plans = [purevk.llm.plan(tmp_path / "model.gguf", context=each) for each in rows]
    assert len({plan.cache / plan.context for plan in plans}) == 1
    assert len({plan.workspace for plan in plans}) == 1


def test_a_prompt_of_66000_tokens(tmp_path: Path) -> None:
    """More tokens than lavapipe runs iterations of a loop."""
    reference = write_llama(tmp_path / "model.gguf", trained=1 << 17)
    prompt = np.random.default_rng(0).integers(0, 96, 66_000).tolist()
    with purevk.llm.load(tmp_path / "model.gguf", context=1 << 17, dtype="float32") as model:
        want = expected_logits(reference, prompt)
        assert np.abs(prompt_logits(model, prompt) - want).max() <= 1e-4 * np.abs(want).max()


def test_unknown_architectures_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedProgramError, match="'mamba' is not known"):
        purevk.llm.load(tmp_path / "model.gguf")


def test_lowering_a_method_is_no_long_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "model.gguf", "Q8_0")
    with purevk.llm.load(tmp_path / "model.gguf", context=32) as model:
        now, taken = [0.0], []
        add_methods, decoder = model.program.add_methods, model.decoder

        def add_slowly(sources: Any) -> None:
            now[0] += 9.0
            add_methods(sources)

        monkeypatch.setattr(model.program, "add_methods", add_slowly)
        monkeypatch.setattr(decoding, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        monkeypatch.setattr(decoder.chunk, "took", lambda seconds, rows: taken.append(seconds))
        model.generate(PROMPT, max_tokens=1).tokens()
        assert now == [9.0] and taken == [0.0]


def test_prompts_of_gpus_have_methods_by_their_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prompt_lengths(2048, True) == {
        "prompt_32": (1, 32),
        "prompt_255": (33, 255),
        "prompt_1023": (256, 1023),
        "prompt_2048": (1024, 2048),
    }
    assert prompt_lengths(20, True) == {"prompt_20": (1, 20)}
    assert prompt_lengths(20, False) == {"prompt_15": (1, 15), "prompt_20": (16, 20)}
    monkeypatch.setattr(decoding, "PROMPT_ROWS", (1, 3, 6))
    monkeypatch.setattr(loading, "prompt_lengths", lambda most, _: prompt_lengths(most, True))
    reference = write_llama(tmp_path / "model.gguf", "Q8_0")
    with purevk.llm.load(tmp_path / "model.gguf", context=32) as model:
        assert set(model.program.methods) == {"decode"}  # the others when they are first needed
        for count in (2, 3, 5, 9):
            prompt = (PROMPT * 9)[:count]
            want = expected_logits(reference, prompt)
            np.testing.assert_allclose(prompt_logits(model, prompt), want, atol=1e-4 * want.std())
        assert set(model.program.methods) == {"prompt_2", "prompt_5", "prompt_32", "decode"}


Load = Callable[..., tuple[list[int], np.ndarray, bool]]


@pytest.fixture
def load(
    pair: tuple[purevk.llm.Model, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Load:
    """Loads a file of the folder with a cache of its own: the tokens after a prompt, the logits, and
    whether something was lowered."""
    monkeypatch.setenv("PUREVK_VERIFY", "0")
    monkeypatch.setattr(cache, "_is_extended", lambda: False)  # by other tests
    monkeypatch.setattr(pair[0].program.context, "cache", Cache(tmp_path / "cache"))
    write_llama(tmp_path / "tiny.gguf", "Q4_1", table="Q8_0")

    def load(name: str = "tiny.gguf", **options: Any) -> tuple[list[int], np.ndarray, bool]:
        options = {"context": 32, "dtype": "float32", **options}
        with purevk.llm.load(tmp_path / name, **options) as model:
            assert model.decoder.pages is not None
            tokens = model.generate(PROMPT, max_tokens=6).tokens()
            return tokens, model.logits, "lower" in model.program.seconds

    return load


def test_plans_are_in_the_cache(
    pair: tuple[purevk.llm.Model, Any], load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second load lowers nothing, also to know whether the model fits, and takes the weights of its
    own file. Tables of rotations, which are large for long contexts, are not in the entry."""
    monkeypatch.setattr(records, "MOST_BYTES", 1 << 10)
    monkeypatch.setattr(
        sys.modules["purevk.llm.plan"], "_AMPLE", 1 << 30
    )  # as if there were little memory
    first = load()
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_step_graph", lambda *_: pytest.fail("a graph is built"))
        again = load()
    assert first[2] and not again[2]
    assert first[0] == again[0] and np.array_equal(first[1], again[1])
    data = (tmp_path / "tiny.gguf").read_bytes()
    with GgufFile(tmp_path / "tiny.gguf") as file:
        weights = [bytes(file.tensors[f"blk.{n}.attn_output.weight"].data) for n in range(2)]
    (tmp_path / "other.gguf").write_bytes(data.replace(weights[0], weights[1]))
    other = load("other.gguf")
    monkeypatch.setattr(pair[0].program.context, "cache", Cache(tmp_path / "fresh"))
    want = load("other.gguf")
    assert want[2] and not other[2]
    np.testing.assert_array_equal(other[1], want[1])
    assert not np.array_equal(other[1], first[1])


@pytest.mark.slow
def test_other_models_have_other_plans(load: Load, tmp_path: Path) -> None:
    """By context, dtype, cache, sizes, and elements that become numbers of the graph."""
    assert load()[2]
    for options in ({"context": 33}, {"dtype": "float16"}, {"cache": "int8"}):
        assert load(**options)[2]
    write_llama(tmp_path / "wide.gguf", "Q4_1", table="Q8_0", width=96)
    write_llama(tmp_path / "factors.gguf", "Q4_1", table="Q8_0", rotation_factors=True)
    assert load("wide.gguf")[2] and load("factors.gguf")[2]
