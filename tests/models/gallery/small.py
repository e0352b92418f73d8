"""Small models of transformers from one table of sizes.

`model` makes a line of the gallery. A configuration gets the sizes of `SIZES` for the fields that
it has; an option of the line goes before them. An option may be `part(...)`: a configuration inside
another one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tests.models.gallery.language import VOCABULARY, library
from tests.models.gallery.model import Model, lively, seeded
from tests.models.zoo import Built

_STACK = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "num_key_value_heads": 2, "head_dim": 16, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 128, "emb_dim": 64,
    "n_layers": 2, "n_heads": 4, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4,
        "ffn_dim": 128,
}  # fmt: skip
_PAIR = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "decoder_start_token_id": 1, "max_target_positions": 64, "max_source_positions": 60,
}  # fmt: skip
_EXPERTS = {
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_shared_experts": 1, "n_shared_experts": 1,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_SCAN = {
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "mamba_chunk_size": 8, "chunk_size": 8, "state_size": 8, "ssm_state_size": 8, "attention_hidden_size": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_DATA = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "n_positions": 64, "sliding_window": 8,
    "attention_window": 8, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "embedding_size": 32, "query_pre_attn_scalar": 16, "projection_dim": 32, "image_size": 64, "patch_size": 16,
    "num_channels": 3, "num_mel_bins": 80,
}  # fmt: skip
SIZES: Mapping[str, Any] = {**_STACK, **_PAIR, **_EXPERTS, **_LATENT, **_SCAN, **_DATA}


def _fields(kind: Any) -> set[str]:
    """The names that a configuration takes."""
    names = set(inspect.signature(kind.__init__).parameters)
    return names | {field.name for field in dataclasses.fields(kind)}


def small(config: Any, **options: Any) -> Any:
    """A configuration, given by its class or name, with the sizes of `SIZES` and the options."""
    kind = getattr(library(), config) if isinstance(config, str) else config
    have = _fields(kind)
    made = {name: value for name, value in SIZES.items() if name in have}
    for name, value in options.items():
        made[name] = value() if callable(value) else value
    return kind(**made)


def part(config: str, **options: Any) -> Callable[[], Any]:
    """A configuration inside another one."""
    return functools.partial(small, config, **options)


def parts(config: str, **options: Any) -> Callable[[], Any]:
    """The same as a dict, for configurations that take no other."""
    return lambda: small(config, **options).to_dict()


def ids(*shape: int) -> Callable[[Any], Any]:
    """Token ids."""

    def make(generator: Any) -> Any:
        import torch

        return torch.randint(3, VOCABULARY, shape, generator=generator)

    return make


def noise(*shape: int) -> Callable[[Any], Any]:
    """Numbers of a normal distribution."""

    def make(generator: Any) -> Any:
        import torch

        return torch.randn(*shape, generator=generator)

    return make


def boxes(count: int, limit: int = 60) -> Callable[[Any], Any]:
    """Boxes of words on a page, int64 [1, count, 4]."""

    def make(generator: Any) -> Any:
        import torch

        corners = torch.randint(0, limit, (1, count, 2, 2), generator=generator)
        return corners.sort(2).values.flatten(2)

    return make


def fixed(value: Any, dtype: str = "int64") -> Callable[[Any], Any]:
    """A tensor of given numbers."""

    def make(generator: Any) -> Any:
        import torch

        return torch.tensor(value, dtype=getattr(torch, dtype))

    return make


def ones(*shape: int, dtype: str = "int64") -> Callable[[Any], Any]:
    """A mask that hides nothing."""

    def make(generator: Any) -> Any:
        import torch

        return torch.ones(shape, dtype=getattr(torch, dtype))

    return make


def image(size: int = 64, channels: int = 3) -> Callable[[Any], Any]:
    """An image [1, channels, size, size]."""
    return noise(1, channels, size, size)


def tensors(results: Any) -> tuple[Any, ...]:
    """All tensors among nested results, in order. Caches are left out."""
    import torch

    if isinstance(results, torch.Tensor):
        return (results,)
    if isinstance(results, Mapping):
        results = list(results.values())
    if isinstance(results, (list, tuple)):
        return tuple(tensor for each in results for tensor in tensors(each))
    return ()


def named(module: Any, names: tuple[str, ...], constants: Mapping[str, Any]) -> Any:
    """A module that passes its inputs by name, and gives all tensors of the result."""
    import torch

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *inputs: Any) -> Any:
            return tensors(self.inner(**dict(zip(names, inputs)), **constants))

    return Named().eval()


def ready(module: Any, inputs: Mapping[str, Any], **constants: Any) -> Built:
    """A module with random weights, and one sample of its inputs by name."""
    generator = seeded()
    made = tuple(make(generator) for make in inputs.values())
    return Built(named(lively(module), tuple(inputs), constants), made, (made,))


def model(
    name: str,
    about: str,
    kind: str,
    inputs: Mapping[str, Any],
    *,
    within: Callable[[Any], Any] | None = None,
    constants: Mapping[str, Any] | None = None,
    tolerance: float = 1e-4,
    **options: Any,
) -> Model:
    """A model of transformers.

    Args:
        kind: the class.
        inputs: the arguments by name, each a function of a generator.
        within: takes the part of the model that is run.
        constants: further arguments, which are no inputs.
        options: of the configuration.
    """

    def build() -> Built:
        seeded()
        found = getattr(library(), kind)
        module = found(small(found.config_class, **options))
        return ready(within(module) if within else module, inputs, **(constants or {}))

    return Model(name, "transformers", about, build, tolerance)
