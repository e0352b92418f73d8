"""Further image and video models of transformers, timm and torchvision, small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.models.gallery.model import Model, built, seeded
from tests.models.gallery.small import ids, image, model, noise
from tests.models.gallery.vision import from_timm, from_torchvision
from tests.models.zoo import Built


def _image(name: str, about: str, kind: str, size: int = 64, **options: Any) -> Model:
    return model(name, f"{about}, {size} pixels", kind, {"pixel_values": image(size)}, **options)


def _video(name: str, about: str, kind: str, frames: int = 4, **options: Any) -> Model:
    inputs = {"pixel_values": noise(1, frames, 3, 64, 64)}
    return model(name, f"{about}, {frames} frames of 64 pixels", kind, inputs, **options)


def _of_torchvision(name: str, *shapes: tuple[int, ...], **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import torch
        import torchvision

        models = torchvision.models
        generator = seeded()
        for room in (models, models.video, models.optical_flow):
            if hasattr(room, name):
                module = getattr(room, name)(weights=None, **options)
                break
        return built(module, *(torch.randn(1, *shape, generator=generator) for shape in shapes))

    return build


MODELS = (
    Model("alexnet_features", "torchvision", "its convolutions, 64 pixels", lambda: _alexnet()),
    Model("maxvit", "torchvision", "blocks and grids of attention, 64 pixels", lambda: _maxvit()),
    Model("mvit_v2", "torchvision", "video, pooled attention, 16 frames of 64 pixels", lambda: _mvit()),
    Model("mc3_18", "torchvision", "video, 4 frames of 40 pixels", _of_torchvision("mc3_18", (3, 4, 40, 40))),
    Model("raft_small", "torchvision", "optical flow, 128 pixels, 2 updates", lambda: _raft()),
    from_torchvision("efficientnet_v2_s", 64),
    _image("bit", "BiT: group norms, padded weights", "BitModel", hidden_sizes=[16, 32], depths=[1, 1], num_groups=8,
           embedding_size=16, out_features=["stage2"]),
    _image("data2vec_vision", "relative position bias", "Data2VecVisionModel", use_relative_position_bias=True),
    _image("dinov2_registers", "with registers", "Dinov2WithRegistersModel"),
    _image("dinov3", "rotary positions, registers", "DINOv3ViTModel", num_register_tokens=2),
    _image("dinov3_convnext", "image encoder", "DINOv3ConvNextModel", hidden_sizes=[16, 32], depths=[1, 1]),
    _image("efficientnet_hf", "image encoder", "EfficientNetModel", kernel_sizes=[3, 5], in_channels=[32, 16],
           out_channels=[16, 24], strides=[1, 2], num_block_repeats=[1, 1], expand_ratios=[1, 4], hidden_dim=1280,
           width_coefficient=1.0, depth_coefficient=1.0),
    _image("focalnet", "focal modulation", "FocalNetModel", embed_dim=16, hidden_sizes=[16, 32], depths=[1, 1],
           focal_levels=[2, 2], focal_windows=[3, 3], patch_size=4, out_features=["stage2"]),
    _image("hiera", "masked units", "HieraModel", image_size=[64, 64], embed_dim=16, depths=[1, 1, 1], num_heads=[1, 2,
        4],
           patch_size=[7, 7], num_query_pool=2, masked_unit_attention=[True, True, False], out_features=["stage3"],
           masked_unit_size=[4, 4]),
    _image("hgnet_v2", "image classifier", "HGNetV2ForImageClassification", embedding_size=16, stem_channels=[3, 8, 16],
           stage_in_channels=[16, 16, 32, 48], stage_mid_channels=[8, 8, 16, 16], stage_out_channels=[16, 32, 48, 64],
           stage_num_blocks=[1, 1, 1, 1], stage_numb_of_layers=[2, 2, 2, 2], hidden_sizes=[16, 32, 48, 64],
           depths=[1, 1, 1, 1], use_learnable_affine_block=True),
    _image("ijepa", "image encoder", "IJepaModel"),
    model("imagegpt", "pixels one after another", "ImageGPTModel", {"input_ids": ids(1, 17)}),
    _image("levit_hf", "attention with biases", "LevitModel", hidden_sizes=[16, 24, 32], num_attention_heads=[2, 2, 2],
           depths=[1, 1, 1], key_dim=[8, 8, 8]),
    _image("mobilenet_v1", "image encoder", "MobileNetV1Model", depth_multiplier=0.25),
    _image("poolformer_hf", "image encoder", "PoolFormerModel", hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 1, 1],
           patch_sizes=[7, 3, 3, 3], strides=[4, 2, 2, 2], patch_size=16),
    _image("pvt", "reduced keys", "PvtModel", hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 1, 1],
           num_attention_heads=[1, 2, 2, 2], mlp_ratios=[2, 2, 2, 2]),
    _image("regnet", "image encoder", "RegNetModel", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1],
           groups_width=8),
    _image("swiftformer", "additive attention", "SwiftFormerModel", depths=[1, 1, 1, 1], embed_dims=[16, 24, 32, 40]),
    _image("swinv2_hf", "windows of 4, cosine attention", "Swinv2Model", embed_dim=16, depths=[2, 2], num_heads=[2, 4],
           window_size=4, patch_size=4),
    _image("textnet", "text detection backbone", "TextNetModel", stem_out_channels=8, hidden_sizes=[8, 8, 16, 16, 24],
           image_size=[64, 64]),
    _image("aimv2", "RMS norms, gated", "Aimv2VisionModel"),
    _image("vit_pooled", "with a pooler", "ViTModel"),
    _image("vit_msn", "image encoder", "ViTMSNModel"),
    _image("vitdet", "windows, relative positions", "VitDetModel", use_relative_position_embeddings=True, window_size=3,
           window_block_indices=[0], pretrain_image_size=64),
    model("vit_mae", "masked autoencoder, given noise", "ViTMAEForPreTraining", {
        "pixel_values": image(64), "noise": lambda g: noise(1, 16)(g).sigmoid()}, decoder_hidden_size=32,
        decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=64),
    _video("timesformer", "divided attention", "TimesformerModel", num_frames=4),
    _video("videomae", "tubelets", "VideoMAEModel", num_frames=4),
    _video("vivit", "tubelets", "VivitModel", num_frames=4),
    model("vjepa2", "video, rotary in three dims, 4 frames of 64 pixels", "VJEPA2Model", {
        "pixel_values_videos": noise(1, 4, 3, 64, 64)}, crop_size=64, frames_per_clip=4, pred_hidden_size=48,
        pred_num_attention_heads=4, pred_num_hidden_layers=1),
    from_timm("botnet26t_256", 64, img_size=64),
    from_timm("cait_xxs24_224", 64, img_size=64, depth=2),
    from_timm("coat_tiny", 64, img_size=64),
    from_timm("convit_tiny", 64, img_size=64, depth=3, local_up_to_layer=2),
    from_timm("crossvit_tiny_240", 240, depth=[[1, 2, 0], [1, 2, 0], [1, 2, 0]]),
    from_timm("davit_tiny", 64, embed_dims=(24, 48, 72, 96), num_heads=(2, 2, 3, 4), depths=(1, 1, 1, 1),
              window_size=4),
    from_timm("dpn48b", 64),
    from_timm("efficientvit_b0", 64),
    from_timm("efficientvit_m0", 224),
    from_timm("eva02_tiny_patch14_224", 56, img_size=56, depth=2),
    from_timm("fasternet_t0", 64),
    from_timm("gcvit_xxtiny", 64, img_size=64),
    from_timm("gernet_s", 64),
    from_timm("inception_next_atto", 64),
    from_timm("lambda_resnet26t", 64),
    from_timm("mambaout_femto", 64),
    from_timm("mvitv2_tiny", 64, img_size=64),
    from_timm("pit_ti_224", 64, img_size=64),
    from_timm("regnetz_b16", 64),
    from_timm("repvit_m0_9", 64),
    from_timm("res2net50_14w_8s", 48),
    from_timm("resnest14d", 64),
    from_timm("rexnet_100", 64),
    from_timm("sequencer2d_s", 56, layers=(1, 1, 1, 1), embed_dims=(24, 32, 40, 48), hidden_sizes=(8, 8, 12, 12)),
    from_timm("shvit_s1", 64),
    from_timm("skresnet18", 64),
    from_timm("starnet_s1", 64),
    from_timm("tiny_vit_5m_224", 224),
    from_timm("tnt_s_legacy_patch16_224", 64, img_size=64, depth=2),
    from_timm("twins_pcpvt_small", 64, depths=(1, 1, 1, 1), embed_dims=(24, 32, 40, 48), num_heads=(1, 2, 2, 3)),
    from_timm("visformer_tiny", 64, img_size=64),
    from_timm("vit_relpos_small_patch16_224", 64, img_size=64, depth=2),
    from_timm("xception41", 64),
)  # fmt: skip


def _alexnet() -> Built:
    import torch
    import torchvision

    generator = seeded()
    module = torchvision.models.alexnet(weights=None).features
    return built(module, torch.randn(1, 3, 64, 64, generator=generator))


def _maxvit() -> Built:
    import torch
    import torchvision

    models = torchvision.models
    generator = seeded()
    module = models.MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=16,
        stochastic_depth_prob=0.0,
        num_classes=10,
    )
    return built(module, torch.randn(1, 3, 64, 64, generator=generator))


def _mvit() -> Built:
    import torch
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    generator = seeded()
    sizes = [(1, 16, 32, [], [1, 8, 8]), (2, 32, 32, [1, 2, 2], [1, 4, 4])]
    blocks = [
        MSBlockConfig(
            num_heads=heads,
            input_channels=inner,
            output_channels=outer,
            kernel_q=[3, 3, 3],
            kernel_kv=[3, 3, 3],
            stride_q=stride_q or [1, 1, 1],
            stride_kv=stride_kv,
        )
        for heads, inner, outer, stride_q, stride_kv in sizes
    ]
    module = MViT(
        spatial_size=(64, 64),
        temporal_size=16,
        block_setting=blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        num_classes=10,
    )
    return built(module, torch.randn(1, 3, 16, 64, 64, generator=generator))


def _raft() -> Built:
    import torch
    import torchvision

    flow = torchvision.models.optical_flow
    generator = seeded()
    raft = flow.raft_small(weights=None)

    class Flow(torch.nn.Module):
        """Two images to the flow after two updates."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = raft

        def forward(self, first: torch.Tensor, second: torch.Tensor) -> Any:
            return tuple(self.inner(first, second, num_flow_updates=2))

    images = [torch.rand(1, 3, 128, 128, generator=generator) * 2 - 1 for _ in range(2)]
    return built(Flow(), *images, calibrate=False)
