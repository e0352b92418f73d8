"""Models of transformers with random weights, for `bench.gpu --models`: images, sound and text."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench import builders
from bench.networks import Sample, Work

_QUERIES = "transformer_decoder_last_hidden_state"
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


def _series(batch: int) -> torch.Tensor:
    """7 series of 512 values."""
    return torch.randn(batch, 512, 7)


def _features(batch: int) -> torch.Tensor:
    """10 s, two frames of 80 in one."""
    return torch.randn(batch, 500, 160)


def _latent(batch: int) -> torch.Tensor:
    """1.6 s at 16 kHz."""
    return torch.randn(batch, 192, 100)


def _spectrum(batch: int) -> torch.Tensor:
    """30 s."""
    return torch.randn(batch, 80, 3000)


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
        _images("depth_anything", 518, builders.depth_anything, "predicted_depth"),
        _images("detr_r50", 640, builders.detr, "pred_boxes"),
        _images("rt_detr", 640, lambda hf: hf.RTDetrForObjectDetection(hf.RTDetrConfig()), "pred_boxes"),
        _images("sam_vision", 1024, lambda hf: hf.SamVisionModel(hf.SamVisionConfig())),
        _images("swin2sr", 64, lambda hf: hf.Swin2SRForImageSuperResolution(hf.Swin2SRConfig()), "reconstruction"),
        _images("beit_base", 224, lambda hf: hf.BeitModel(hf.BeitConfig(use_relative_position_bias=True))),
        _work("videomae", lambda hf: hf.VideoMAEModel(hf.VideoMAEConfig()), "pixel_values", _video),
        _work("whisper_encoder", builders.whisper, "input_features", _spectrum),
        _work("wav2vec2_base", lambda hf: hf.Wav2Vec2Model(hf.Wav2Vec2Config()), "input_values", _sound),
        _work("parakeet", builders.parakeet, "input_features", lambda batch: torch.randn(batch, 1000, 80)),
        _plain("whisper_decoder", builders.WhisperDecoder, lambda batch: torch.randint(1000, (batch, 64))),
        _plain("hifigan", lambda hf: hf.SpeechT5HifiGan(hf.SpeechT5HifiGanConfig()), _mel),
        _plain("dac_decoder", lambda hf: hf.DacModel(hf.DacConfig()).decoder, _codes),
        _work("patchtst", builders.patchtst, "past_values", _series, "prediction_outputs"),
        _work("esm2_150m", builders.esm2, "input_ids", lambda batch: torch.randint(4, 24, (batch, 256))),
        _texts("deberta_v3_base", 256, builders.deberta),
        _texts("t5_encoder_base", 128, builders.t5),
        _texts("modernbert_base", 512, builders.modernbert),
        _texts("gpt2", 1024, builders.gpt2, use_cache=False),
        _texts("qwen3_0.6b", 512, builders.qwen3, use_cache=False),
        _texts("gemma3_1b", 512, builders.gemma3, use_cache=False),
        _texts("lfm2_350m", 512, builders.lfm2, use_cache=False),
        _texts("qwen3_moe", 512, builders.qwen3_moe, use_cache=False),
        _texts("mamba2_130m", 512, builders.mamba2, use_cache=False),
        _plain("qwen25_vl_vision", builders.QwenVision, lambda batch: torch.randn(1024, 1176)),
        _images("siglip_so400m", 384, builders.siglip),
        _images("sam2_encoder", 1024, lambda hf: hf.Sam2VisionModel(hf.Sam2VisionConfig())),
        _images("mask2former", 384, lambda hf: hf.Mask2FormerModel(hf.Mask2FormerConfig()), _QUERIES),
        _images("deformable_detr", 640, builders.deformable_detr, "pred_boxes"),
        _images("convnextv2_tiny", 224, lambda hf: hf.ConvNextV2Model(hf.ConvNextV2Config())),
        _images("dinov3_small", 512, lambda hf: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(image_size=512))),
        _images("hiera", 224, lambda hf: hf.HieraModel(hf.HieraConfig())),
        _images("pvt_v2", 224, lambda hf: hf.PvtV2Model(hf.PvtV2Config())),
        _images("levit", 224, lambda hf: hf.LevitModel(hf.LevitConfig())),
        _images("swinv2_tiny", 256, lambda hf: hf.Swinv2Model(hf.Swinv2Config(image_size=256, window_size=8))),
        _images("owlv2", 768, lambda hf: hf.Owlv2VisionModel(hf.Owlv2VisionConfig())),
        _work("vjepa2", builders.vjepa2, "pixel_values_videos", lambda batch: torch.randn(batch, 16, 3, 256, 256)),
        _work("wav2vec2_bert", builders.wav2vec2_bert, "input_features", _features),
        _work("moonshine", builders.moonshine, "input_values", _sound),
        _plain("vits_decoder", builders.vits_decoder, _latent),
        _texts("gpt_oss", 512, builders.gpt_oss, use_cache=False),
        _texts("deepseek_v3", 512, builders.deepseek_v3, use_cache=False),
        _texts("falcon_h1", 512, builders.falcon_h1, use_cache=False),
        _texts("phi3", 512, builders.phi3, use_cache=False),
        _texts("olmo2", 512, builders.olmo2, use_cache=False),
        _texts("bigbird", 2048, lambda hf: hf.BigBirdModel(hf.BigBirdConfig(**builders.TEXT))),
        _texts("xlnet", 256, lambda hf: hf.XLNetModel(hf.XLNetConfig(vocab_size=1000))),
    ]  # fmt: skip
    return {work.name: work for work in found}
