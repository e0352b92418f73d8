"""Caches of transformers with sliding windows, against eager transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import purevk  # noqa: E402
from purevk.errors import UnsupportedProgramError  # noqa: E402

pytestmark = pytest.mark.device

ROOM, WINDOW, VOCABULARY = 40, 8, 101
BOTH = ["sliding_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3": {"layer_types": BOTH},
    "Gemma2": {"layer_types": BOTH},
    "Mistral": {"num_hidden_layers": 1},
    "Cohere2": {"layer_types": BOTH},
    "Qwen2": {"layer_types": BOTH, "use_sliding_window": True, "head_dim": 8},
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def decoder(name: str, **other: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, kind)(**{**SIZES, **FAMILIES[name], **other})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def static_cache(model: Any, batch: int) -> Any:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=ROOM)
    assert any(type(layer).__name__ == "StaticSlidingWindowLayer" for layer in cache.layers)
    head = model.config.head_dim if hasattr(model.config, "head_dim") else 8
    cache.early_initialization(batch, 2, head, torch.float32, torch.device("cpu"))
    return cache


class Held(torch.nn.Module):
    """A decoder with its cache."""

    def __init__(self, model: Any, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, tokens: Any, mask: Any = None, positions: Any = None) -> Any:
        return self.model(
            tokens, attention_mask=mask, position_ids=positions, past_key_values=self.cache
        ).logits


class Given(torch.nn.Module):
    """A decoder that takes its cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Any, cache: Any) -> Any:
        return self.model(tokens, past_key_values=cache)


def check_static(model: Any, batch: int, lengths: list[int], *, masked: bool, before: int) -> None:
    """Compares the logits of chunks of tokens with eager's, both with a static cache that holds
    tokens before the export."""
    tokens = torch.randint(1, VOCABULARY, (batch, ROOM))
    mask = torch.ones(batch, ROOM, dtype=torch.long)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0  # padding on the left
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def arguments(at: int, length: int) -> tuple[Any, ...]:
        end = at + length
        if not masked:
            return (tokens[:, at:end],)
        seen = torch.where(torch.arange(ROOM) < end, mask, 0)
        return tokens[:, at:end], seen, positions[:, at:end]

    ours, theirs = (Held(model, static_cache(model, batch)) for _ in range(2))
    if before:
        torch.testing.assert_close(ours(*arguments(0, before)), theirs(*arguments(0, before)))
    layers = list(ours.cache.layers)
    methods = {f"of_{length}": (ours, arguments(0, length)) for length in set(lengths)}
    with purevk.compile(methods) as program:
        assert ours.cache.layers == layers  # the module is as it was
        at = before
        for length in lengths:
            have = program.method(f"of_{length}")(*arguments(at, length))
            want = theirs(*arguments(at, length))
            valid = mask[:, at : at + length].bool()
            torch.testing.assert_close(have[valid], want[valid], rtol=1e-5, atol=1e-5)
            at += length
    assert at > 2 * WINDOW


@pytest.mark.parametrize(
    "name",
    [
        name if name == "Mistral" else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_a_static_cache_beyond_its_window(name: str) -> None:
    check_static(decoder(name), 1, [7] + [1] * 16, masked=False, before=0)


def test_a_static_cache_with_padding_on_the_left() -> None:
    check_static(decoder("Gemma3"), 3, [3, 3, 1, 1, 3, 12, 1, 3], masked=True, before=0)


@pytest.mark.parametrize("before", [5, 13])
def test_a_static_cache_that_holds_tokens(before: int) -> None:
    """Also more of them than its window, and chunks longer than the window."""
    check_static(decoder("Mistral"), 1, [1, 12, 1, 1], masked=False, before=before)


def test_static_layers_of_other_kinds_are_refused() -> None:
    from transformers.cache_utils import StaticSlidingWindowLayer

    class Other(StaticSlidingWindowLayer):
        """Says nothing of how it works."""

    model = decoder("Mistral")
    cache = static_cache(model, 1)
    cache.layers = [Other(ROOM, WINDOW) for _ in cache.layers]
    with pytest.raises(UnsupportedProgramError, match="a layer of Other"):
        purevk.compile(Held(model, cache), (torch.ones(1, 3, dtype=torch.long),))


def same_caches(have: Any, want: Any) -> None:
    for ours, theirs in zip(have.layers, want.layers, strict=True):
        assert type(ours) is type(theirs)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(3) == theirs.get_mask_sizes(3)
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)


def test_a_dynamic_cache_with_windows_is_a_result() -> None:
    model = decoder("Gemma3")
    tokens = torch.randint(1, VOCABULARY, (1, 20))
    sizes = {"input_ids": {1: torch.export.Dim.AUTO}}
    with purevk.compile(model, (tokens,), dynamic_shapes=sizes) as program:
        for length in (20, 9, 5, 30, WINDOW, WINDOW - 1):
            tokens = torch.randint(1, VOCABULARY, (1, length))
            have, want = program(tokens), model(tokens)
            torch.testing.assert_close(have.logits, want.logits, rtol=1e-5, atol=1e-5)
            same_caches(have.past_key_values, want.past_key_values)
            # Eager goes on with it.
            more = torch.randint(1, VOCABULARY, (1, 3))
            after, expected = (model(more, past_key_values=m.past_key_values) for m in (have, want))
            torch.testing.assert_close(after.logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_a_dynamic_cache_with_windows_is_an_input() -> None:
    """Caches of full windows have the same sizes, whatever number of tokens they have seen."""
    from transformers import DynamicCache

    model = decoder("Mistral")
    module = Given(model)
    tokens = torch.randint(1, VOCABULARY, (1, 3))
    cache = DynamicCache(config=model.config)
    with purevk.compile(module, (tokens, copy.deepcopy(cache))) as program:
        have, want = program(tokens, copy.deepcopy(cache)), module(tokens, cache)
        torch.testing.assert_close(have.logits, want.logits, rtol=1e-5, atol=1e-5)
        same_caches(have.past_key_values, cache)
    for _ in range(3):
        module(tokens, cache)
    with purevk.compile(module, (tokens, copy.deepcopy(cache))) as program:
        for _ in range(3):
            have, want = program(tokens, copy.deepcopy(cache)), module(tokens, cache)
            torch.testing.assert_close(have.logits, want.logits, rtol=1e-5, atol=1e-5)
            same_caches(have.past_key_values, cache)


def test_a_cache_that_keeps_more_than_its_window_is_refused() -> None:
    from transformers import DynamicCache

    model = decoder("Mistral")
    tokens = torch.randint(1, VOCABULARY, (1, 3))
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.activate_past_recording()
    with pytest.raises(UnsupportedProgramError, match="more than its window"):
        purevk.compile(Given(model), (tokens, cache))
