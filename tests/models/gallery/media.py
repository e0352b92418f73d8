"""Speech, vision and vision-language models of transformers, small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.models.gallery.language import VOCABULARY, from_config, library, tokens
from tests.models.gallery.model import Model, built, first_of, seeded
from tests.models.zoo import Built


def _of(
    model: str, config: str, shape: tuple[int, ...], *keys: Any, **options: Any
) -> Callable[[], Built]:
    """A model with one input of noise."""

    def build() -> Built:
        import torch

        generator = seeded()
        module = from_config(model, config, **options)
        return built(first_of(module, *keys), torch.randn(*shape, generator=generator))

    return build


_WHISPER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": VOCABULARY, "max_source_positions": 60,
    "max_target_positions": 32, "num_mel_bins": 80, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip


def _whisper(part: str) -> Callable[[], Built]:
    def build() -> Built:
        import torch

        generator = seeded()
        model = from_config("WhisperModel", "WhisperConfig", **_WHISPER)
        if part == "encoder":
            return built(
                first_of(model.encoder, "last_hidden_state"),
                torch.randn(1, 80, 120, generator=generator),
            )

        class Decoder(torch.nn.Module):
            """Token ids [1, T] and the encoder's states [1, S, d] to the decoder's states."""

            def __init__(self) -> None:
                super().__init__()
                self.decoder = model.decoder

            def forward(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
                return self.decoder(
                    input_ids=ids, encoder_hidden_states=states, use_cache=False
                ).last_hidden_state

        return built(Decoder(), tokens(7, generator), torch.randn(1, 60, 64, generator=generator))

    return build


_SPEECH = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": VOCABULARY,
}  # fmt: skip
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def _clip() -> Built:
    import torch

    generator = seeded()
    T = library()
    text = {**_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2}
    vision = {**_SIZES, "image_size": 64, "patch_size": 16}
    inner = T.CLIPModel(T.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))

    class Both(torch.nn.Module):
        """Token ids [1, T] and an image to the similarity and both embeddings."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, ids: torch.Tensor, image: torch.Tensor) -> Any:
            made = self.inner(input_ids=ids, pixel_values=image)
            return made.logits_per_image, made.text_embeds, made.image_embeds

    return built(Both(), tokens(9, generator), torch.randn(1, 3, 64, 64, generator=generator))


def _siglip() -> Built:
    import torch

    generator = seeded()
    module = from_config(
        "SiglipVisionModel", "SiglipVisionConfig", image_size=64, patch_size=16, **_SIZES
    )
    inputs = torch.randn(1, 3, 64, 64, generator=generator)
    return built(first_of(module, "last_hidden_state", "pooler_output"), inputs)


def _detr() -> Built:
    import torch

    generator = seeded()
    T = library()
    backbone = T.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )
    config = T.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_queries=10,
        num_labels=9,
    )
    module = first_of(T.DetrForObjectDetection(config), "logits", "pred_boxes")
    return built(module, torch.randn(1, 3, 96, 96, generator=generator))


def _segformer() -> Built:
    import torch

    generator = seeded()
    module = from_config(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 32, 48, 64],
        decoder_hidden_size=32,
        num_attention_heads=[1, 2, 3, 4],
        num_labels=7,
    )
    return built(first_of(module, "logits"), torch.randn(1, 3, 64, 64, generator=generator))


def _sam() -> Built:
    import torch

    generator = seeded()
    module = from_config(
        "SamVisionModel",
        "SamVisionConfig",
        image_size=96,
        patch_size=8,
        output_channels=32,
        window_size=5,
        global_attn_indexes=[1],
        num_pos_feats=16,
        mlp_dim=128,
        initializer_range=0.05,
        **{key: value for key, value in _SIZES.items() if key != "intermediate_size"},
    )
    return built(
        first_of(module, "last_hidden_state"), torch.randn(1, 3, 96, 96, generator=generator)
    )


def _depth() -> Built:
    import torch

    generator = seeded()
    T = library()
    backbone = T.Dinov2Config(
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        mlp_ratio=2,
        image_size=56,
        patch_size=14,
        out_features=["stage1", "stage2", "stage3", "stage4"],
        reshape_hidden_states=False,
    )
    config = T.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=48,
        neck_hidden_sizes=[16, 24, 32, 48],
        fusion_hidden_size=24,
    )
    module = first_of(T.DepthAnythingForDepthEstimation(config), "predicted_depth")
    return built(module, torch.randn(1, 3, 56, 56, generator=generator))


def _encodec() -> Built:
    import torch

    generator = seeded()
    model = from_config(
        "EncodecModel", "EncodecConfig", num_filters=8, hidden_size=32, codebook_size=64
    )
    for layer in model.modules():
        if type(layer).__name__ == "EncodecConv1d":
            # Numbers in buffers are no numbers to torch.export, which would not know the padding.
            layer.padding_total = int(layer._buffers.pop("padding_total"))
            layer._get_extra_padding_for_conv1d = lambda wave: (
                0
            )  # every length here is a multiple of the stride

    class Both(torch.nn.Module):
        """A mono wave [1, 1, samples] to what the decoder makes of the encoder's features."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = model.encoder, model.decoder

        def forward(self, wave: torch.Tensor) -> Any:
            features = self.encoder(wave)
            return features, self.decoder(features)

    return built(Both(), torch.randn(1, 1, 1280, generator=generator))


def _vocoder() -> Built:
    import torch

    generator = seeded()
    module = from_config(
        "SpeechT5HifiGan", "SpeechT5HifiGanConfig", upsample_initial_channel=32, model_in_dim=20
    )
    return built(module, torch.randn(1, 6, 20, generator=generator))


def _patch_times() -> Built:
    import torch

    generator = seeded()
    module = from_config(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        num_input_channels=3,
        context_length=48,
        patch_length=8,
        patch_stride=8,
        prediction_length=12,
        d_model=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        use_cls_token=False,
    )
    return built(
        first_of(module, "prediction_outputs"),
        torch.randn(1, 48, 3, generator=generator),
        calibrate=False,
    )


def _hf(name: str, about: str, build: Callable[[], Built]) -> Model:
    return Model(name, "transformers", about, build)


MODELS = (
    _hf("whisper_encoder", "2 layers, 120 frames of 80 bins", _whisper("encoder")),
    _hf("whisper_decoder", "2 layers, 7 tokens, 60 states", _whisper("decoder")),
    _hf(
        "wav2vec2",
        "2 layers, 1600 samples",
        _of("Wav2Vec2Model", "Wav2Vec2Config", (1, 1600), "last_hidden_state", **_SPEECH),
    ),
    _hf(
        "hubert",
        "2 layers, 1600 samples",
        _of("HubertModel", "HubertConfig", (1, 1600), "last_hidden_state", **_SPEECH),
    ),
    _hf(
        "wavlm",
        "2 layers, 1600 samples",
        _of("WavLMModel", "WavLMConfig", (1, 1600), "last_hidden_state", **_SPEECH),
    ),
    _hf(
        "conformer",
        "wav2vec 2 with Conformer blocks, relative positions, 1600 samples",
        _of(
            "Wav2Vec2ConformerModel",
            "Wav2Vec2ConformerConfig",
            (1, 1600),
            "last_hidden_state",
            **_SPEECH,
        ),
    ),
    _hf(
        "conformer_rotary",
        "the same, rotary positions",
        _of(
            "Wav2Vec2ConformerModel",
            "Wav2Vec2ConformerConfig",
            (1, 1600),
            "last_hidden_state",
            position_embeddings_type="rotary",
            **_SPEECH,
        ),
    ),
    _hf(
        "spectrogram",
        "Audio Spectrogram Transformer, 64 frames",
        _of(
            "ASTModel",
            "ASTConfig",
            (1, 64, 32),
            "last_hidden_state",
            max_length=64,
            num_mel_bins=32,
            **_SIZES,
        ),
    ),
    _hf("encodec", "encoder and decoder, 1-D convolutions and an LSTM, 1280 samples", _encodec),
    _hf("hifigan", "vocoder, transposed 1-D convolutions, 6 frames", _vocoder),
    _hf("clip", "text and image, similarity", _clip),
    _hf("siglip", "image encoder, 64 pixels", _siglip),
    _hf("detr", "detection, ResNet backbone, 96 pixels", _detr),
    _hf(
        "yolos",
        "detection by a ViT, 64 pixels",
        _of(
            "YolosForObjectDetection",
            "YolosConfig",
            (1, 3, 64, 64),
            "logits",
            "pred_boxes",
            image_size=[64, 64],
            patch_size=16,
            num_detection_tokens=8,
            **_SIZES,
        ),
    ),
    _hf("segformer", "segmentation, 64 pixels", _segformer),
    _hf("sam_encoder", "window and global attention, relative positions, 96 pixels", _sam),
    _hf(
        "dinov2",
        "image encoder, 56 pixels",
        _of(
            "Dinov2Model",
            "Dinov2Config",
            (1, 3, 56, 56),
            "last_hidden_state",
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            mlp_ratio=2,
            image_size=56,
        ),
    ),
    _hf("depth_anything", "depth, DINOv2 backbone, 56 pixels", _depth),
    _hf(
        "beit",
        "relative position bias, 64 pixels",
        _of(
            "BeitModel",
            "BeitConfig",
            (1, 3, 64, 64),
            "last_hidden_state",
            image_size=64,
            use_relative_position_bias=True,
            **_SIZES,
        ),
    ),
    _hf(
        "cvt",
        "convolutional projections, 64 pixels",
        _of(
            "CvtModel",
            "CvtConfig",
            (1, 3, 64, 64),
            "last_hidden_state",
            embed_dim=[16, 32, 48],
            depth=[1, 2, 3],
            num_heads=[1, 2, 3],
            cls_token=[False, False, True],
        ),
    ),
    _hf(
        "swin2sr",
        "super-resolution by 2, 32 pixels",
        _of(
            "Swin2SRForImageSuperResolution",
            "Swin2SRConfig",
            (1, 3, 32, 32),
            "reconstruction",
            embed_dim=24,
            depths=[2],
            num_heads=[2],
            window_size=8,
            image_size=32,
        ),
    ),
    _hf("patchtst", "time series", _patch_times),
)
