"""Decoders of transformers with their caches, against eager torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import purevk  # noqa: E402
from purevk.errors import InputError, UnsupportedProgramError  # noqa: E402
from tests.models.zoo import import_torchvision  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.slow]
STEPS, VOCABULARY = 64, 101
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MODELS = {"Llama": {}, "Qwen3": {"head_dim": 16}, "Phi3": {}, "SmolLM3": {}}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def decoder(name: str, **more: Any) -> torch.nn.Module:
    """A small model with random weights."""
    import_torchvision()  # transformers imports it
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name], **more)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def prompts(batch: int) -> dict[str, torch.Tensor]:
    """Token ids, all but the first padded on the left."""
    torch.manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (batch, 7))
    mask = torch.ones_like(tokens)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


class Step(torch.nn.Module):
    """The most likely next token."""

    def __init__(self, model: torch.nn.Module, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens, past_key_values=self.cache).logits
        return logits[:, -1].argmax(-1, keepdim=True)


def static_cache(model: torch.nn.Module) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=7 + STEPS)


def test_a_dynamic_cache_is_a_result() -> None:
    from transformers import DynamicCache

    model, tokens = decoder("Llama"), prompts(1)["input_ids"]
    assert purevk.plan(model, (tokens,)).report()["cpu_nodes"] == {}
    have, want = purevk.compile(model, (tokens,))(tokens), model(tokens)
    torch.testing.assert_close(have.logits, want.logits, rtol=1e-5, atol=1e-5)
    assert isinstance(have.past_key_values, DynamicCache)
    assert have.past_key_values.get_seq_length() == tokens.shape[1]
    for ours, theirs in zip(have.past_key_values.layers, want.past_key_values.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)


def test_a_dynamic_cache_with_windows_is_refused() -> None:
    import_torchvision()
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=8, layer_types=layers)
    with pytest.raises(UnsupportedProgramError, match="DynamicSlidingWindowLayer"):
        purevk.plan(Gemma3ForCausalLM(config).eval(), (prompts(1)["input_ids"],))


@pytest.mark.parametrize("name", MODELS)
def test_prefill_and_decode_share_a_static_cache(name: str) -> None:
    model, tokens = decoder(name), prompts(1)["input_ids"]
    cache = static_cache(model)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    step = Step(model, cache)
    before = dict(step.named_buffers())
    methods = {"prefill": (step, (tokens,)), "decode": (step, (tokens[:, :1],))}
    with purevk.compile(methods) as program:
        assert dict(step.named_buffers()).keys() == before.keys()  # the module is as it was
        made = [program.method("prefill")(tokens)]
        while len(made) < STEPS:
            made.append(program.method("decode")(made[-1]))
    want = model.generate(tokens, max_new_tokens=STEPS, do_sample=False)
    assert torch.equal(torch.cat([tokens, *made], 1), want)


def test_a_static_cache_without_memory_is_refused() -> None:
    model, tokens = decoder("Llama"), prompts(1)["input_ids"]
    with pytest.raises(InputError, match="has no memory yet"):
        purevk.compile(Step(model, static_cache(model)), (tokens,))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
def test_generation(name: str, cache: str, batch: int) -> None:
    model, given = decoder(name), prompts(batch)
    options: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    want = model.generate(**given, **options)
    model.forward = torch.compile(model.forward, backend="purevk")
    assert torch.equal(model.generate(**given, **options), want)
