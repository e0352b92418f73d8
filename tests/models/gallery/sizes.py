"""Models of diffusers and transformers at three sizes, with dynamic dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.models.gallery.language import library
from tests.models.gallery.model import Model, lively, seeded
from tests.models.gallery.small import fixed, ids, named, noise, part, parts, small
from tests.models.zoo import Built


def _sized(
    make: Callable[[], Any],
    inputs: Callable[[int], dict[str, Callable[[Any], Any]]],
    sizes: Sequence[int],
    **constants: Any,
) -> Callable[[], Built]:
    """A model with a sample for each size. Dims that differ between the samples are dynamic."""

    def build() -> Built:
        from torch.export import Dim

        generator = seeded()
        module = lively(make())
        samples = tuple(tuple(part(generator) for part in inputs(size).values()) for size in sizes)
        shapes = tuple(
            {dim: Dim.AUTO for dim, lengths in enumerate(zip(*dims)) if len(set(lengths)) > 1}
            for dims in zip(*([part.shape for part in sample] for sample in samples))
        )
        whole = named(module, tuple(inputs(sizes[0])), constants)
        return Built(whole, samples[0], samples, dynamic_shapes=(shapes,))

    return build


def _of_diffusers(kind: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import diffusers

        return getattr(diffusers, kind)(**options)

    return make


def _of_transformers(kind: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        found = getattr(library(), kind)
        return found(small(found.config_class, **options))

    return make


_VQ = _of_diffusers(
    "VQModel",
    block_out_channels=(8, 16),
    norm_num_groups=4,
    latent_channels=4,
    num_vq_embeddings=32,
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
)
_RADIO = _of_transformers("RadioModel")
_TIPS = _of_transformers("Tipsv2VisionModel", image_size=64, patch_size=16, mlp_ratio=2)
_SPARSE = _of_transformers(
    "DeepseekV32ForCausalLM",
    num_key_value_heads=4,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=64,
)
_IMAGE = 110  # the token that stands for four patches
_SMOL = _of_transformers(
    "SmolVLMForConditionalGeneration",
    image_token_id=_IMAGE,
    vision_config=parts("SmolVLMVisionConfig", image_size=128, patch_size=16),
    text_config=part("LlamaConfig", vocab_size=120),
)


def _prompt_and_image(size: int) -> dict[str, Callable[[Any], Any]]:
    return {
        "input_ids": fixed([[3, *[_IMAGE] * (size // 32) ** 2, 5]]),
        "pixel_values": noise(1, 1, 3, size, size),
    }


_DEEPSEEK = _of_transformers(
    "DeepseekV4ForCausalLM",
    num_key_value_heads=1,
    hc_mult=2,
    hc_sinkhorn_iters=3,
    o_groups=2,
    o_lora_rank=16,
    index_n_heads=2,
    index_head_dim=16,
    index_topk=4,
)

MODELS = (
    Model(
        "vq_model",
        "diffusers",
        "codebook, attention of pixels, 16 x 32, 32 x 48 and 48 x 64 pixels",
        _sized(_VQ, lambda size: {"sample": noise(1, 3, size, size + 16)}, (16, 32, 48)),
    ),
    Model(
        "radio",
        "transformers",
        "image encoder, 64 x 96, 96 x 128 and 128 x 160 pixels",
        _sized(_RADIO, lambda size: {"pixel_values": noise(1, 3, size, size + 32)}, (64, 96, 128)),
    ),
    Model(
        "tipsv2",
        "transformers",
        "image encoder, 48 x 80, 64 x 96 and 96 x 128 pixels",
        _sized(_TIPS, lambda size: {"pixel_values": noise(1, 3, size, size + 32)}, (48, 64, 96)),
    ),
    Model(
        "deepseek_v32",
        "transformers",
        "experts, attention to chosen tokens (all are), 9, 17 and 31 tokens",
        _sized(_SPARSE, lambda size: {"input_ids": ids(2, size)}, (9, 17, 31), use_cache=False),
    ),
    Model(
        "smolvlm_sizes",
        "transformers",
        "SigLIP, shuffled patches, Llama, 64, 96 and 128 pixels",
        _sized(_SMOL, _prompt_and_image, (64, 96, 128), use_cache=False),
    ),
    Model(
        "deepseek_v4",
        "transformers",
        "experts, hyper-connections, compressed attention, 9, 17 and 31 tokens",
        _sized(_DEEPSEEK, lambda size: {"input_ids": ids(2, size)}, (9, 17, 31), use_cache=False),
    ),
)
