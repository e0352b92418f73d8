"""Modules of transformers with random weights, from configurations of real models, some with fewer
layers or tokens. `hf` is the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

TEXT = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(hf: Any) -> nn.Module:
    return hf.GPT2Model(hf.GPT2Config(vocab_size=1000, bos_token_id=1, eos_token_id=2))


def depth_anything(hf: Any) -> nn.Module:
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


def whisper(hf: Any) -> nn.Module:
    config = hf.WhisperConfig(
        d_model=512,
        encoder_layers=6,
        encoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_attention_heads=8,
    )
    return hf.WhisperModel(config).encoder


def t5(hf: Any) -> nn.Module:
    return hf.T5EncoderModel(
        hf.T5Config(vocab_size=1000, d_model=768, d_ff=3072, num_layers=12, num_heads=12)
    )


def qwen3(hf: Any) -> nn.Module:
    return hf.Qwen3Model(
        hf.Qwen3Config(
            **TEXT,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
        )
    )


def gemma3(hf: Any) -> nn.Module:
    return hf.Gemma3TextModel(
        hf.Gemma3TextConfig(
            **TEXT,
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=26,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
        )
    )


def modernbert(hf: Any) -> nn.Module:
    return hf.ModernBertModel(hf.ModernBertConfig(**TEXT, cls_token_id=1, sep_token_id=2))


def detr(hf: Any) -> nn.Module:
    backbone = hf.ResNetConfig(out_features=["stage4"])
    return hf.DetrForObjectDetection(
        hf.DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=backbone)
    )


def parakeet(hf: Any) -> nn.Module:
    return hf.ParakeetEncoder(
        hf.ParakeetEncoderConfig(
            hidden_size=512,
            num_attention_heads=8,
            intermediate_size=2048,
            num_hidden_layers=17,
        )
    )


def deberta(hf: Any) -> nn.Module:
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


def esm2(hf: Any) -> nn.Module:
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


class WhisperDecoder(nn.Module):
    """The decoder over what the encoder makes of 30 s."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        config = hf.WhisperConfig(
            **TEXT,
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


def patchtst(hf: Any) -> nn.Module:
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


def lfm2(hf: Any) -> nn.Module:
    return hf.Lfm2Model(
        hf.Lfm2Config(
            **TEXT,
            hidden_size=1024,
            intermediate_size=4608,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=8,
            full_attn_idxs=[2, 5, 8, 10, 12, 14],
        )
    )


def qwen3_moe(hf: Any) -> nn.Module:
    return hf.Qwen3MoeModel(
        hf.Qwen3MoeConfig(
            **TEXT,
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


def mamba2(hf: Any) -> nn.Module:
    return hf.Mamba2Model(
        hf.Mamba2Config(
            **TEXT,
            hidden_size=768,
            num_hidden_layers=24,
            num_heads=24,
            head_dim=64,
            n_groups=1,
            state_size=128,
        )
    )


class QwenVision(nn.Module):
    """The encoder of images of Qwen2.5-VL, half as deep, for an image of 448 x 448."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl as configuration
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

        config = configuration.Qwen2_5_VLVisionConfig(
            depth=16,
            hidden_size=1280,
            intermediate_size=3420,
            num_heads=16,
            out_hidden_size=2048,
            fullatt_block_indexes=[3, 7, 11, 15],
        )
        config._attn_implementation = "sdpa"
        self.model = qwen.Qwen2_5_VisionTransformerPretrainedModel(config)
        self.register_buffer("grid", torch.tensor([[1, 32, 32]]))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.model(patches, self.grid).last_hidden_state


def siglip(hf: Any) -> nn.Module:
    return hf.SiglipVisionModel(
        hf.SiglipVisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            image_size=384,
            patch_size=14,
        )
    )


def deformable_detr(hf: Any) -> nn.Module:
    backbone = hf.ResNetConfig(out_features=["stage2", "stage3", "stage4"])
    return hf.DeformableDetrForObjectDetection(
        hf.DeformableDetrConfig(
            use_pretrained_backbone=False, use_timm_backbone=False, backbone_config=backbone
        )
    )


def vjepa2(hf: Any) -> nn.Module:
    return hf.VJEPA2Model(
        hf.VJEPA2Config(
            frames_per_clip=16,
            crop_size=256,
            hidden_size=768,
            num_attention_heads=12,
            num_hidden_layers=12,
        )
    )


def gpt_oss(hf: Any) -> nn.Module:
    return hf.GptOssModel(
        hf.GptOssConfig(
            **TEXT,
            hidden_size=1024,
            intermediate_size=1024,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            num_local_experts=16,
            num_experts_per_tok=4,
            sliding_window=128,
        )
    )


def deepseek_v3(hf: Any) -> nn.Module:
    return hf.DeepseekV3Model(
        hf.DeepseekV3Config(
            **TEXT,
            hidden_size=1024,
            intermediate_size=4096,
            moe_intermediate_size=384,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=16,
            n_routed_experts=32,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            q_lora_rank=512,
            kv_lora_rank=256,
            n_shared_experts=1,
        )
    )


def falcon_h1(hf: Any) -> nn.Module:
    return hf.FalconH1Model(
        hf.FalconH1Config(
            **TEXT,
            hidden_size=1024,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=8,
            num_key_value_heads=2,
            mamba_d_ssm=1536,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=128,
        )
    )


def phi3(hf: Any) -> nn.Module:
    return hf.Phi3Model(
        hf.Phi3Config(
            **TEXT,
            hidden_size=1536,
            intermediate_size=4096,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=16,
        )
    )


def olmo2(hf: Any) -> nn.Module:
    return hf.Olmo2Model(
        hf.Olmo2Config(
            **TEXT,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=16,
            num_attention_heads=16,
        )
    )


def wav2vec2_bert(hf: Any) -> nn.Module:
    return hf.Wav2Vec2BertModel(hf.Wav2Vec2BertConfig(vocab_size=100, num_hidden_layers=12))


def moonshine(hf: Any) -> nn.Module:
    return hf.MoonshineModel(hf.MoonshineConfig(vocab_size=1000)).encoder


def vits_decoder(hf: Any) -> nn.Module:
    return hf.VitsModel(hf.VitsConfig(vocab_size=100)).decoder
