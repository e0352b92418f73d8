"""Text models of transformers, small: encoders, encoder-decoders, decoders with and without a
static KV cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.models.gallery.model import Model, built, first_of, lively, seeded
from tests.models.zoo import Built

VOCABULARY = 120
_BERT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "max_position_embeddings": 64}


def library() -> Any:
    """transformers, kept from asking a hub."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    return transformers


def tokens(length: int, generator: Any) -> Any:
    """Random token ids, int64 [1, length]."""
    import torch

    return torch.randint(3, VOCABULARY, (1, length), generator=generator)


def from_config(model: str, config: str, **options: Any) -> Any:
    """A model of transformers with random weights."""
    found = library()
    return getattr(found, model)(getattr(found, config)(**options))


def _text(
    model: str, config: str, *keys: Any, mask: bool = False, **options: Any
) -> Callable[[], Built]:
    def build() -> Built:
        import torch

        generator = seeded()
        module = from_config(model, config, vocab_size=VOCABULARY, **options)
        inputs = [tokens(17, generator)]
        if mask:
            inputs.append(
                torch.cat(
                    [torch.ones(1, 12, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.int64)], 1
                )
            )
        return built(first_of(module, *keys), *inputs)

    return build


def _head(family: str) -> str:
    return "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"


def _causal(family: str, config: str = "", **options: Any) -> Callable[[], Built]:
    return _text(_head(family), config or f"{family}Config", "logits", use_cache=False, **options)


def _cached(family: str, **options: Any) -> Callable[[], Built]:
    """A decoder with a static KV cache: a prompt of 6 tokens, then single ones; one program for
    both."""

    def build() -> Built:
        import torch

        seeded_here = seeded()
        model = from_config(
            _head(family), f"{family}Config", vocab_size=VOCABULARY, use_cache=True, **options
        )
        model.generation_config.use_cache = True
        model.generation_config.cache_implementation = "static"
        from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

        lively(model)
        inner = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=32)

        class Step(torch.nn.Module):
            """Token ids and their positions, int64 [1, T] and [T], to logits; keys and values stay
            in the cache."""

            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
                for number, layer in enumerate(self.inner.static_cache.layers):
                    # The buffers, which torch.export replaces; the cache still refers to the first
                    # ones.
                    layer.keys = getattr(self.inner, f"key_cache_{number}")
                    layer.values = getattr(self.inner, f"value_cache_{number}")
                    layer.cumulative_length = positions[
                        0
                    ].clone()  # set from the positions at every call: no state
                return self.inner(input_ids=ids, cache_position=positions)

        steps, position = [], 0
        for length in (6, 1, 1, 3, 1):
            steps.append((tokens(length, seeded_here), torch.arange(position, position + length)))
            position += length
        length = torch.export.Dim("length", min=1, max=16)
        return Built(
            Step().eval(),
            steps[0],
            tuple(steps),
            {"ids": {1: length}, "positions": {0: length}},
            stateful=True,
        )

    return build


def _pair(model: str, config: str, *keys: Any, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import torch

        generator = seeded()
        inner = from_config(model, config, vocab_size=VOCABULARY, **options)

        class Both(torch.nn.Module):
            """Token ids for the encoder and for the decoder, int64 [1, T], to the results."""

            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, ids: torch.Tensor, decoder_ids: torch.Tensor) -> Any:
                made = self.inner(input_ids=ids, decoder_input_ids=decoder_ids, use_cache=False)
                return tuple(getattr(made, key) for key in keys)

        return built(Both(), tokens(17, generator), tokens(5, generator))

    return build


_T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
}  # fmt: skip
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4}


def _hf(name: str, about: str, build: Callable[[], Built]) -> Model:
    return Model(name, "transformers", about, build)


MODELS = (
    _hf(
        "bert",
        "2 layers, with a mask",
        _text("BertModel", "BertConfig", "last_hidden_state", mask=True, **_BERT),
    ),
    _hf(
        "distilbert",
        "2 layers",
        _text(
            "DistilBertModel",
            "DistilBertConfig",
            "last_hidden_state",
            mask=True,
            dim=64,
            n_layers=2,
            n_heads=4,
            hidden_dim=128,
        ),
    ),
    _hf(
        "roberta", "2 layers", _text("RobertaModel", "RobertaConfig", "last_hidden_state", **_BERT)
    ),
    _hf(
        "albert",
        "2 layers of one set of weights",
        _text("AlbertModel", "AlbertConfig", "last_hidden_state", embedding_size=32, **_BERT),
    ),
    _hf(
        "electra",
        "2 layers",
        _text("ElectraModel", "ElectraConfig", "last_hidden_state", embedding_size=32, **_BERT),
    ),
    _hf(
        "deberta_v2",
        "2 layers, relative positions",
        _text(
            "DebertaV2Model",
            "DebertaV2Config",
            "last_hidden_state",
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            max_relative_positions=16,
            **_BERT,
        ),
    ),
    _hf(
        "mpnet",
        "2 layers, relative buckets",
        _text("MPNetModel", "MPNetConfig", "last_hidden_state", **_BERT),
    ),
    _hf(
        "convbert",
        "2 layers, dynamic convolutions",
        _text("ConvBertModel", "ConvBertConfig", "last_hidden_state", embedding_size=64, **_BERT),
    ),
    _hf(
        "modernbert",
        "2 layers, rotary, local attention",
        _text(
            "ModernBertModel",
            "ModernBertConfig",
            "last_hidden_state",
            global_attn_every_n_layers=2,
            local_attention=8,
            pad_token_id=0,
            **_BERT,
        ),
    ),
    _hf("t5_encoder", "2 layers", _text("T5EncoderModel", "T5Config", "last_hidden_state", **_T5)),
    _hf(
        "t5",
        "encoder and decoder",
        _pair("T5ForConditionalGeneration", "T5Config", "logits", **_T5),
    ),
    _hf(
        "bart",
        "encoder and decoder",
        _pair("BartModel", "BartConfig", "last_hidden_state", **_BART),
    ),
    _hf(
        "pegasus",
        "encoder and decoder",
        _pair("PegasusModel", "PegasusConfig", "last_hidden_state", **_BART),
    ),
    _hf("gpt2", "2 layers", _causal("GPT2", **_GPT2)),
    _hf("gpt_neox", "2 layers, partial rotation", _causal("GPTNeoX", **_BERT)),
    _hf(
        "opt",
        "2 layers",
        _causal(
            "OPT",
            hidden_size=64,
            num_hidden_layers=2,
            ffn_dim=128,
            num_attention_heads=4,
            word_embed_proj_dim=64,
            max_position_embeddings=64,
        ),
    ),
    _hf("bloom", "2 layers, ALiBi", _causal("Bloom", hidden_size=64, n_layer=2, n_head=4)),
    _hf(
        "falcon",
        "2 layers, one head of keys",
        _causal("Falcon", hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    ),
    _hf("llama", "2 layers, 2 heads of keys", _causal("Llama", **_LLAMA)),
    _hf("qwen2", "2 layers", _causal("Qwen2", **_LLAMA)),
    _hf("qwen3", "2 layers, norms of queries and keys", _causal("Qwen3", head_dim=16, **_LLAMA)),
    _hf("mistral", "2 layers, a window of 8", _causal("Mistral", sliding_window=8, **_LLAMA)),
    _hf("gemma", "2 layers", _causal("Gemma", head_dim=16, **_LLAMA)),
    _hf(
        "gemma2",
        "2 layers, softcaps, a window of 8",
        _causal("Gemma2", head_dim=16, sliding_window=8, query_pre_attn_scalar=16, **_LLAMA),
    ),
    _hf(
        "gemma3",
        "2 layers",
        _causal(
            "Gemma3",
            "Gemma3TextConfig",
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=16,
            **_LLAMA,
        ),
    ),
    _hf("phi", "2 layers, partial rotation", _causal("Phi", **_LLAMA)),
    _hf("phi3", "2 layers, joint projections", _causal("Phi3", pad_token_id=0, **_LLAMA)),
    _hf("olmo2", "2 layers", _causal("Olmo2", **_LLAMA)),
    _hf("smollm3", "2 layers", _causal("SmolLM3", pad_token_id=0, **_LLAMA)),
    _hf(
        "mamba",
        "2 layers, the scan written out",
        _causal("Mamba", hidden_size=32, num_hidden_layers=2, state_size=8),
    ),
    _hf(
        "rwkv",
        "2 layers",
        _causal(
            "Rwkv", hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, rescale_every=0
        ),
    ),
    _hf("llama_cached", "prompt and single tokens, static KV cache", _cached("Llama", **_LLAMA)),
    _hf("qwen2_cached", "prompt and single tokens, static KV cache", _cached("Qwen2", **_LLAMA)),
    _hf(
        "qwen3_cached",
        "prompt and single tokens, static KV cache",
        _cached("Qwen3", head_dim=16, **_LLAMA),
    ),
    _hf(
        "gemma2_cached",
        "prompt and single tokens, static KV cache",
        _cached("Gemma2", head_dim=16, sliding_window=8, query_pre_attn_scalar=16, **_LLAMA),
    ),
    _hf("gpt2_cached", "prompt and single tokens, static KV cache", _cached("GPT2", **_GPT2)),
)
