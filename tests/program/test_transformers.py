"""Decoders of transformers with their caches, against eager torch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import purevk  # noqa: E402
import purevk.dynamo  # noqa: E402  registers the backend
from purevk import compiled_graphs  # noqa: E402
from purevk.errors import InputError, UnsupportedProgramError  # noqa: E402

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
WINDOWS = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Phi3": {},
    "SmolLM3": {},
    "Gemma3": {"head_dim": 16, "sliding_window": 8, "layer_types": WINDOWS},
}


EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_hidden_layers": 1, "num_local_experts": 8, "num_experts_per_tok": 2},
    "GptOss": {"num_hidden_layers": 1, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "DeepseekV3": {
        "num_hidden_layers": 1, "num_key_value_heads": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 48, "first_k_dense_replace": 0, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def decoder(name: str) -> Any:
    """A small model with random weights."""
    import transformers

    torch.manual_seed(0)
    kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, kind)(**{**SIZES, **{**MODELS, **EXPERTS}[name]})
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


def static_cache(model: Any) -> Any:
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


def test_tensors_of_a_static_cache_may_be_buffers_of_the_module() -> None:
    """As those of transformers' `TorchExportableModuleWithStaticCache` are."""
    model, tokens = decoder("Llama"), prompts(1)["input_ids"]
    cache = static_cache(model)
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    step = Step(model, cache)
    for number, layer in enumerate(cache.layers):
        step.register_buffer(f"keys_{number}", layer.keys, persistent=False)
    with purevk.compile(step, (tokens,)) as program:
        assert {"keys_0", "cache_0_values"} <= {*program.state}
        first = program(tokens)
    want = model.generate(tokens, max_new_tokens=1, do_sample=False)
    assert torch.equal(torch.cat([tokens, first], 1), want)
    assert cache.layers[0].keys is step.keys_0


@pytest.mark.parametrize("name", [*MODELS, "Mixtral"])
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


def test_a_dynamic_cache_grows() -> None:
    class Given(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = decoder("Llama")

        def forward(self, tokens: torch.Tensor, cache: Any) -> Any:
            return self.model(tokens, past_key_values=cache)

    module, tokens = Given(), prompts(1)["input_ids"]
    want = module.model(tokens)
    ours, theirs = copy.deepcopy(want.past_key_values), want.past_key_values
    sizes = {"tokens": None, "cache": [{2: torch.export.Dim.AUTO}] * (2 * len(theirs.layers))}
    example = (tokens[:, :1], copy.deepcopy(ours))
    with purevk.compile(module, example, dynamic_shapes=sizes) as program:
        for at in range(3):
            have, want = (
                program(tokens[:, at : at + 1], ours),
                module(tokens[:, at : at + 1], theirs),
            )
            torch.testing.assert_close(have.logits, want.logits, rtol=1e-5, atol=1e-5)
            ours = have.past_key_values
            assert ours.get_seq_length() == theirs.get_seq_length() == tokens.shape[1] + at + 1


def test_encoder_and_decoder_with_static_caches() -> None:
    import transformers
    from transformers import EncoderDecoderCache, StaticCache

    class Next(torch.nn.Module):
        def __init__(self, cache: Any) -> None:
            super().__init__()
            self.model, self.cache = model, cache

        def forward(self, tokens: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
            result = self.model(
                decoder_input_ids=tokens, encoder_outputs=(sound,), past_key_values=self.cache
            )
            return result.logits[:, -1].argmax(-1, keepdim=True)

    class First(Next):
        def forward(self, tokens: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
            self.cache.is_updated = dict.fromkeys(range(2), False)
            for layer in self.cache.cross_attention_cache.layers:
                layer.cumulative_length.zero_()
            return super().forward(tokens, sound)

    torch.manual_seed(0)
    each = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in each.items()}
    lengths = {"max_source_positions": 20, "max_target_positions": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=64, **sides, **lengths, **tokens
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()

    def filled(length: int) -> Any:
        cache = StaticCache(config=config, max_cache_len=length)
        cache.early_initialization(1, 4, 16, torch.float32, torch.device("cpu"))
        return cache

    first = EncoderDecoderCache(filled(16), filled(20))
    later = EncoderDecoderCache(first.self_attention_cache, first.cross_attention_cache)
    later.is_updated = dict.fromkeys(range(2), True)
    start, sound = torch.tensor([[1]]), torch.randn(1, 20, 64)
    methods = {"first": (First(first), (start, sound)), "later": (Next(later), (start, sound))}
    with purevk.compile(methods) as program:
        assert "cache_cross_0_keys" in program.state
        for _ in range(2):  # a second sound
            sound = torch.randn(1, 20, 64)
            program.reset_state()
            have = [program.method("first")(start, sound)]
            while len(have) < 8:
                have.append(program.method("later")(have[-1], sound))
            cache, want = EncoderDecoderCache(filled(16), filled(20)), [start]
            while len(want) < 9:
                want.append(Next(cache)(want[-1], sound))
            assert torch.equal(torch.cat(have, 1), torch.cat(want[1:], 1))


def test_one_method_that_fills_the_cache_of_an_encoder_is_refused() -> None:
    import transformers
    from transformers import DynamicCache, EncoderDecoderCache

    class Next(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.cache = EncoderDecoderCache(static, DynamicCache(config=config))

        def forward(self, tokens: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return self.model(
                decoder_input_ids=tokens, encoder_outputs=(text,), past_key_values=self.cache
            ).logits

    heads = {"d_kv": 8, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}
    config = transformers.T5Config(vocab_size=50, d_model=16, d_ff=24, **heads)
    model = transformers.T5ForConditionalGeneration(config).eval()
    static = transformers.StaticCache(config=config, max_cache_len=8)
    static.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    with pytest.raises(UnsupportedProgramError, match="is_updated") as caught:
        purevk.compile(Next(), (torch.tensor([[1]]), torch.randn(1, 5, 16)))
    assert "docs/state.md" in caught.value.next


def test_a_static_cache_without_memory_is_refused() -> None:
    model, tokens = decoder("Llama"), prompts(1)["input_ids"]
    with pytest.raises(InputError, match="has no memory yet"):
        purevk.compile(Step(model, static_cache(model)), (tokens,))


# -- torch.compile, in the manner of the generation tests of transformers ------------------------
class Family:
    """A decoder, and its compiled forward."""

    def __init__(self, name: str) -> None:
        self.model = decoder(name)
        self.compiled = torch.compile(self.model.forward, backend="purevk")

    @contextlib.contextmanager
    def on_the_device(self) -> Iterator[Any]:
        self.model.forward = self.compiled
        try:
            yield self.model
        finally:
            del self.model.forward

    def both(self, run: Callable[[Any], Any]) -> tuple[Any, Any]:
        """What a function of the model gives with the backend, and in eager torch."""
        torch.manual_seed(5)
        want = run(self.model)
        torch.manual_seed(5)
        with self.on_the_device() as model:
            return run(model), want


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest, fresh: None) -> Family:
    return Family(request.param)


def generated(model: Any, given: dict[str, Any], steps: int = STEPS, **options: Any) -> Any:
    return model.generate(**given, max_new_tokens=steps, **{"do_sample": False, **options})


CACHES = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_generation(family: Family, batch: int, cache: str) -> None:
    have, want = family.both(lambda model: generated(model, prompts(batch), **CACHES[cache]))
    assert torch.equal(have, want)


@pytest.mark.parametrize("cache", CACHES)
def test_sampled_generation_and_beams(family: Family, cache: str) -> None:
    for options in (
        {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"num_beams": 2},
    ):
        have, want = family.both(
            lambda model, options=options: generated(
                model, prompts(3), 16, **options, **CACHES[cache]
            )
        )
        assert torch.equal(have, want)


def test_assisted_generation(family: Family) -> None:
    """Several tokens of the prompt are tried in one step."""
    have, want = family.both(
        lambda model: generated(model, prompts(1), 16, prompt_lookup_num_tokens=2)
    )
    assert torch.equal(have, want)


def test_padding_on_the_left_changes_no_logits(family: Family) -> None:
    tokens = prompts(1)["input_ids"]
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), tokens], 1)
    mask = (torch.arange(11) >= 4).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with family.on_the_device() as model:
        plain = model(tokens).logits[:, -1]
        same = model(padded, attention_mask=mask, position_ids=positions).logits[:, -1]
    torch.testing.assert_close(same, plain, rtol=1e-4, atol=1e-5)


def test_generation_goes_on_from_a_cache(family: Family) -> None:
    def in_two_parts(model: Any) -> torch.Tensor:
        first = generated(model, prompts(3), 6, return_dict_in_generate=True)
        grown = torch.cat([prompts(3)["attention_mask"], torch.ones(3, 6, dtype=torch.int64)], 1)
        given = {"input_ids": first.sequences, "attention_mask": grown}
        return generated(model, given, 6, past_key_values=first.past_key_values)

    have, want = family.both(in_two_parts)
    assert torch.equal(have, want)
    with family.on_the_device() as model:
        assert torch.equal(have, generated(model, prompts(3), 12))


def test_caches_of_two_kinds_share_a_forward(family: Family) -> None:
    """Sizes of one are constants to dynamo, and those of the next may change."""
    from transformers import DynamicCache, StaticCache

    config, tokens = family.model.config, prompts(1)["input_ids"]
    for make in (DynamicCache, StaticCache):
        options = {"max_cache_len": 16} if make is StaticCache else {}
        ours, theirs = make(config=config, **options), make(config=config, **options)
        for given in (tokens, tokens[:, :1], tokens[:, 1:2]):
            want = family.model(given, past_key_values=theirs).logits
            have = family.compiled(given, past_key_values=ours).logits
            torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def test_scores_attentions_and_hidden_states(family: Family) -> None:
    wanted = ("scores", "logits", "attentions", "hidden_states")
    family.model.set_attn_implementation("eager")  # the others give no attentions
    try:
        have, want = family.both(
            lambda model: generated(
                model,
                prompts(3),
                3,
                return_dict_in_generate=True,
                **{f"output_{name}": True for name in wanted},
            )
        )
    finally:
        family.model.set_attn_implementation("sdpa")
    assert torch.equal(have.sequences, want.sequences)
    for name in wanted:
        assert len(getattr(want, name)) == 3
        torch.testing.assert_close(getattr(have, name), getattr(want, name), rtol=1e-4, atol=1e-5)


def test_the_compile_config_of_transformers(fresh: None) -> None:
    from transformers import CompileConfig

    model, given = decoder("Llama"), prompts(1)
    want = generated(model, given)
    config = CompileConfig(backend="purevk")
    config._compile_all_devices = True  # else transformers compiles on CUDA and the like alone
    before = set(compiled_graphs.shared)
    have = generated(model, given, cache_implementation="static", compile_config=config)
    assert torch.equal(have, want)
    (made,) = set(compiled_graphs.shared) - before
    assert made.program.report()["cpu_nodes"] == 0


# -- experts ------------------------------------------------------------------------------------------
class Logits(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens, use_cache=False).logits


@pytest.mark.parametrize(
    "name, experts",
    [("Mixtral", "grouped_mm"), ("GptOss", "batched_mm"), ("DeepseekV3", "grouped_mm")],
)
def test_experts_run_on_the_device(name: str, experts: str) -> None:
    """One program for all numbers of tokens, in one segment."""
    model = decoder(name)
    model.set_experts_implementation(experts)
    module, count = Logits(model), torch.export.Dim("count", min=2, max=32)
    tokens = torch.randint(1, VOCABULARY, (1, 32))
    with purevk.compile(module, (tokens[:, :7],), ({1: count},)) as program:
        report = program.report()
        assert (report["cpu_nodes"], report["segments"]) == (0, 1)
        for length in (7, 2, 32):
            given = tokens[:, :length]
            torch.testing.assert_close(program.forward(given), module(given), rtol=1e-4, atol=1e-5)


def test_loops_over_experts_are_refused_by_torch() -> None:
    """Such a loop depends on the data: torch.export says so, and purevk passes it on."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    model = decoder("Mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(GuardOnDataDependentSymNode):
        purevk.compile(Logits(model), (prompts(1)["input_ids"],))
