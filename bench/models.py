"""Models of transformers with random weights, for `bench.gpu --models`: images, sound and text."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.networks import Sample, Work

_TEXT = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Build = Callable[[Any], nn.Module]


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    return transformers


class _Output(nn.Module):
    """A model of one input, and one of its outputs."""

    def __init__(self, model: nn.Module, argument: str, output: str, options: dict[str, Any]):
        super().__init__()
        self.model, self.argument, self.output, self.options = model, argument, output, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self.model(**{self.argument: x}, **self.options), self.output)


def _work(
    name: str,
    build: Build,
    argument: str,
    given: Callable[[int], torch.Tensor],
    output: str = "last_hidden_state",
    **options: Any,
) -> Work:
    def sample(batch: int) -> Sample:
        model = build(_transformers()).eval()
        return _Output(model, argument, output, options), (given(batch),)

    return Work(name, name.replace("_", " "), sample, True, argument == "pixel_values")


def _images(name: str, side: int, build: Build, output: str = "last_hidden_state") -> Work:
    def given(batch: int) -> torch.Tensor:
        return torch.randn(batch, 3, side, side)

    return _work(name, build, "pixel_values", given, output)


def _texts(name: str, length: int, build: Build, **options: Any) -> Work:
    def given(batch: int) -> torch.Tensor:
        return torch.randint(1000, (batch, length))

    return _work(name, build, "input_ids", given, **options)


def _plain(name: str, build: Build, given: Callable[[int], torch.Tensor]) -> Work:
    """A model that takes a tensor and gives one."""

    def sample(batch: int) -> Sample:
        return build(_transformers()).eval(), (given(batch),)

    return Work(name, name.replace("_", " "), sample, True, False)


def _video(batch: int) -> torch.Tensor:
    """16 frames."""
    return torch.randn(batch, 16, 3, 224, 224)


def _mel(batch: int) -> torch.Tensor:
    """6.4 s."""
    return torch.randn(batch, 400, 80)


def _codes(batch: int) -> torch.Tensor:
    """1.2 s at 44.1 kHz."""
    return torch.randn(batch, 1024, 100)


def _sound(batch: int) -> torch.Tensor:
    """5 s at 16 kHz."""
    return torch.randn(batch, 80000)


def _spectrum(batch: int) -> torch.Tensor:
    """30 s."""
    return torch.randn(batch, 80, 3000)


def _gpt2(hf: Any) -> nn.Module:
    return hf.GPT2Model(hf.GPT2Config(vocab_size=1000, bos_token_id=1, eos_token_id=2))


def _depth_anything(hf: Any) -> nn.Module:
    backbone = hf.Dinov2Config(
        hidden_size=384,
        num_attention_heads=6,
        image_size=518,
        patch_size=14,
        out_indices=[3, 6, 9, 12],
        reshape_hidden_states=False,
    )
    return hf.DepthAnythingForDepthEstimation(
        hf.DepthAnythingConfig(
            backbone_config=backbone,
            reassemble_hidden_size=384,
            neck_hidden_sizes=[48, 96, 192, 384],
            fusion_hidden_size=64,
        )
    )


def _whisper(hf: Any) -> nn.Module:
    config = hf.WhisperConfig(
        d_model=512,
        encoder_layers=6,
        encoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_attention_heads=8,
    )
    return hf.WhisperModel(config).encoder


def _t5(hf: Any) -> nn.Module:
    return hf.T5EncoderModel(
        hf.T5Config(vocab_size=1000, d_model=768, d_ff=3072, num_layers=12, num_heads=12)
    )


def _qwen3(hf: Any) -> nn.Module:
    return hf.Qwen3Model(
        hf.Qwen3Config(
            **_TEXT,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
        )
    )


def _gemma3(hf: Any) -> nn.Module:
    return hf.Gemma3TextModel(
        hf.Gemma3TextConfig(
            **_TEXT,
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=26,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
        )
    )


def _modernbert(hf: Any) -> nn.Module:
    return hf.ModernBertModel(hf.ModernBertConfig(**_TEXT, cls_token_id=1, sep_token_id=2))


def _detr(hf: Any) -> nn.Module:
    backbone = hf.ResNetConfig(out_features=["stage4"])
    return hf.DetrForObjectDetection(
        hf.DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=backbone)
    )


def _parakeet(hf: Any) -> nn.Module:
    return hf.ParakeetEncoder(
        hf.ParakeetEncoderConfig(
            hidden_size=512,
            num_attention_heads=8,
            intermediate_size=2048,
            num_hidden_layers=17,
        )
    )


def _deberta(hf: Any) -> nn.Module:
    return hf.DebertaV2Model(
        hf.DebertaV2Config(
            vocab_size=1000,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            relative_attention=True,
            position_buckets=256,
            pos_att_type="p2c|c2p",
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            max_relative_positions=-1,
            position_biased_input=False,
            type_vocab_size=0,
        )
    )


def _esm2(hf: Any) -> nn.Module:
    return hf.EsmModel(
        hf.EsmConfig(
            vocab_size=33,
            mask_token_id=32,
            pad_token_id=1,
            hidden_size=640,
            num_hidden_layers=30,
            num_attention_heads=20,
            intermediate_size=2560,
            position_embedding_type="rotary",
            token_dropout=True,
            emb_layer_norm_before=False,
        )
    )


class _WhisperDecoder(nn.Module):
    """The decoder over what the encoder makes of 30 s."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        config = hf.WhisperConfig(
            **_TEXT,
            decoder_start_token_id=1,
            d_model=512,
            encoder_layers=1,
            decoder_layers=6,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            decoder_ffn_dim=2048,
        )
        self.decoder = hf.WhisperModel(config).decoder
        self.register_buffer("sound", torch.randn(1, 1500, 512))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        sound = self.sound.expand(len(tokens), -1, -1)
        return self.decoder(tokens, encoder_hidden_states=sound, use_cache=False).last_hidden_state


def _patchtst(hf: Any) -> nn.Module:
    return hf.PatchTSTForPrediction(
        hf.PatchTSTConfig(
            num_input_channels=7,
            context_length=512,
            prediction_length=96,
            patch_length=16,
            patch_stride=8,
            d_model=128,
            num_attention_heads=16,
            ffn_dim=256,
        )
    )


def _lfm2(hf: Any) -> nn.Module:
    return hf.Lfm2Model(
        hf.Lfm2Config(
            **_TEXT,
            hidden_size=1024,
            intermediate_size=4608,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=8,
            full_attn_idxs=[2, 5, 8, 10, 12, 14],
        )
    )


def _qwen3_moe(hf: Any) -> nn.Module:
    return hf.Qwen3MoeModel(
        hf.Qwen3MoeConfig(
            **_TEXT,
            hidden_size=1024,
            intermediate_size=3072,
            moe_intermediate_size=384,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            num_experts=32,
            num_experts_per_tok=4,
        )
    )


def _mamba2(hf: Any) -> nn.Module:
    return hf.Mamba2Model(
        hf.Mamba2Config(
            **_TEXT,
            hidden_size=768,
            num_hidden_layers=24,
            num_heads=24,
            head_dim=64,
            n_groups=1,
            state_size=128,
        )
    )


def _tiny() -> list[Work]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16}
    return [_images("clip_vision", 32, lambda hf: hf.CLIPVisionModel(hf.CLIPVisionConfig(**sizes)))]


def models(tiny: bool = False) -> dict[str, Work]:
    """All of them by name; `tiny`: a small one, for a software device."""
    found = _tiny() if tiny else [
        _images("convnext_tiny", 224, lambda hf: hf.ConvNextModel(hf.ConvNextConfig())),
        _images("swin_tiny", 224, lambda hf: hf.SwinModel(hf.SwinConfig())),
        _images("mobilenet_v2", 224, lambda hf: hf.MobileNetV2Model(hf.MobileNetV2Config())),
        _images("regnet", 224, lambda hf: hf.RegNetModel(hf.RegNetConfig())),
        _images("mobilevit", 256, lambda hf: hf.MobileViTModel(hf.MobileViTConfig())),
        _images("segformer_b0", 512, lambda hf: hf.SegformerForSemanticSegmentation(hf.SegformerConfig()), "logits"),
        _images("dinov2_base", 224, lambda hf: hf.Dinov2Model(hf.Dinov2Config(image_size=224))),
        _images("clip_vision", 224, lambda hf: hf.CLIPVisionModel(hf.CLIPVisionConfig())),
        _images("depth_anything", 518, _depth_anything, "predicted_depth"),
        _images("detr_r50", 640, _detr, "pred_boxes"),
        _images("rt_detr", 640, lambda hf: hf.RTDetrForObjectDetection(hf.RTDetrConfig()), "pred_boxes"),
        _images("sam_vision", 1024, lambda hf: hf.SamVisionModel(hf.SamVisionConfig())),
        _images("swin2sr", 64, lambda hf: hf.Swin2SRForImageSuperResolution(hf.Swin2SRConfig()), "reconstruction"),
        _images("beit_base", 224, lambda hf: hf.BeitModel(hf.BeitConfig(use_relative_position_bias=True))),
        _work("videomae", lambda hf: hf.VideoMAEModel(hf.VideoMAEConfig()), "pixel_values", _video),
        _work("whisper_encoder", _whisper, "input_features", _spectrum),
        _work("wav2vec2_base", lambda hf: hf.Wav2Vec2Model(hf.Wav2Vec2Config()), "input_values", _sound),
        _work("parakeet", _parakeet, "input_features", lambda batch: torch.randn(batch, 1000, 80)),
        _plain("whisper_decoder", _WhisperDecoder, lambda batch: torch.randint(1000, (batch, 64))),
        _plain("hifigan", lambda hf: hf.SpeechT5HifiGan(hf.SpeechT5HifiGanConfig()), _mel),
        _plain("dac_decoder", lambda hf: hf.DacModel(hf.DacConfig()).decoder, _codes),
        _work("patchtst", _patchtst, "past_values", lambda batch: torch.randn(batch, 512, 7), "prediction_outputs"),
        _work("esm2_150m", _esm2, "input_ids", lambda batch: torch.randint(4, 24, (batch, 256))),
        _texts("deberta_v3_base", 256, _deberta),
        _texts("t5_encoder_base", 128, _t5),
        _texts("modernbert_base", 512, _modernbert),
        _texts("gpt2", 1024, _gpt2, use_cache=False),
        _texts("qwen3_0.6b", 512, _qwen3, use_cache=False),
        _texts("gemma3_1b", 512, _gemma3, use_cache=False),
        _texts("lfm2_350m", 512, _lfm2, use_cache=False),
        _texts("qwen3_moe", 512, _qwen3_moe, use_cache=False),
        _texts("mamba2_130m", 512, _mamba2, use_cache=False),
    ]  # fmt: skip
    return {work.name: work for work in found}
