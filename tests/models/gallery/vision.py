"""Image and video models of torchvision and timm, at small image sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.models.gallery.model import Model, built, first_of, seeded
from tests.models.zoo import Built


def _image(size: int, generator: Any) -> Any:
    import torch

    return torch.randn(1, 3, size, size, generator=generator)


def _torchvision(name: str, size: int, *keys: Any, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import torchvision

        models = torchvision.models
        generator = seeded()
        for room in (models, models.segmentation, models.video):
            if hasattr(room, name):
                module = getattr(room, name)(weights=None, **options)
                break
        return built(first_of(module, *keys) if keys else module, _image(size, generator))

    return build


def _timm(name: str, size: int, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        import timm

        generator = seeded()
        return built(timm.create_model(name, pretrained=False, **options), _image(size, generator))

    return build


def _mixer(block: str, **options: Any) -> Callable[[], Built]:
    def build() -> Built:
        from timm.models import mlp_mixer

        generator = seeded()
        module = mlp_mixer.MlpMixer(
            num_classes=10,
            img_size=64,
            num_blocks=3,
            embed_dim=96,
            block_layer=getattr(mlp_mixer, block),
            **options,
        )
        return built(module, _image(64, generator))

    return build


def _volo() -> Built:
    from timm.models.volo import VOLO

    generator = seeded()
    module = VOLO(
        layers=(1, 1, 1, 1),
        embed_dims=(32, 48, 48, 48),
        num_heads=(2, 4, 4, 4),
        mlp_ratio=2,
        img_size=64,
        num_classes=10,
    )
    return built(module, _image(64, generator))


def _vgg() -> Built:
    import torch
    import torchvision
    from torch import nn

    vgg = torchvision.models.vgg
    generator = seeded()
    features = vgg.make_layers(vgg.cfgs["A"], batch_norm=True)
    head = nn.Sequential(nn.Linear(512 * 49, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 10))
    module = nn.Sequential(features, nn.AdaptiveAvgPool2d(7), nn.Flatten(), head)
    return built(module, torch.randn(1, 3, 64, 64, generator=generator))


def _swin(version: int) -> Callable[[], Built]:
    def build() -> Built:
        import torchvision

        swin = torchvision.models.swin_transformer
        generator = seeded()
        block, merging = (
            (swin.SwinTransformerBlock, swin.PatchMerging)
            if version == 1
            else (swin.SwinTransformerBlockV2, swin.PatchMergingV2)
        )
        module = swin.SwinTransformer(
            patch_size=[4, 4],
            embed_dim=48,
            depths=[2, 2, 2],
            num_heads=[2, 4, 8],
            window_size=[7, 7],
            num_classes=10,
            block=block,
            downsample_layer=merging,
        )
        return built(module, _image(80, generator))

    return build


def _vit() -> Built:
    import torchvision

    models = torchvision.models
    generator = seeded()
    module = models.VisionTransformer(
        image_size=64,
        patch_size=8,
        num_layers=3,
        num_heads=4,
        hidden_dim=96,
        mlp_dim=192,
        num_classes=10,
    )
    return built(module, _image(64, generator))


def _ssd_features() -> Built:
    from functools import partial

    from torch import nn
    from torchvision.models import mobilenet_v3_large
    from torchvision.models.detection.ssdlite import SSDLiteHead, _mobilenet_extractor

    generator = seeded()
    norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.03)
    backbone = _mobilenet_extractor(
        mobilenet_v3_large(weights=None, norm_layer=norm, reduced_tail=True), 6, norm
    )

    class Boxes(nn.Module):
        """An image to the box offsets and class scores of all anchors."""

        def __init__(self) -> None:
            super().__init__()
            self.backbone = backbone
            self.head = SSDLiteHead([672, 480, 512, 256, 256, 128], [6] * 6, 91, norm)

        def forward(self, x: Any) -> Any:
            made = self.head(list(self.backbone(x).values()))
            return made["bbox_regression"], made["cls_logits"].softmax(-1)

    return built(Boxes(), _image(96, generator))


def _video(name: str) -> Callable[[], Built]:
    def build() -> Built:
        import torch
        import torchvision

        models = torchvision.models
        generator = seeded()
        return built(
            getattr(models.video, name)(weights=None),
            torch.randn(1, 3, 4, 40, 40, generator=generator),
        )

    return build


def _swin3d() -> Built:
    import torch
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    generator = seeded()
    module = SwinTransformer3d(
        patch_size=[2, 4, 4],
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[2, 4, 4],
        num_classes=10,
    )
    return built(module, torch.randn(1, 3, 4, 32, 32, generator=generator))


def from_torchvision(name: str, size: int, about: str = "", **options: Any) -> Model:
    return Model(
        name,
        "torchvision",
        f"{about or 'image classifier'}, {size} pixels",
        _torchvision(name, size, **options),
    )


def from_timm(name: str, size: int, about: str = "", **options: Any) -> Model:
    return Model(
        name, "timm", f"{about or 'image classifier'}, {size} pixels", _timm(name, size, **options)
    )


MODELS = (
    from_torchvision("squeezenet1_1", 96),
    from_torchvision("shufflenet_v2_x0_5", 96),
    from_torchvision("mobilenet_v2", 96),
    from_torchvision("mobilenet_v3_small", 96),
    from_torchvision("mnasnet0_5", 96),
    from_torchvision("efficientnet_b0", 96),
    from_torchvision("regnet_y_400mf", 64),
    from_torchvision("resnet18", 64),
    from_torchvision("resnext50_32x4d", 64),
    from_torchvision("densenet121", 64),
    Model("vgg11_bn", "torchvision", "its features, a smaller head, 64 pixels", _vgg),
    from_torchvision("googlenet", 64, init_weights=False, aux_logits=False),
    from_torchvision("inception_v3", 80, init_weights=False, aux_logits=False),
    Model("swin", "torchvision", "3 stages, shifted windows of 7, 80 pixels", _swin(1)),
    Model("swin_v2", "torchvision", "the same, version 2", _swin(2)),
    Model("vit", "torchvision", "3 layers, patch 8, 64 pixels", _vit),
    Model(
        "deeplabv3",
        "torchvision",
        "segmentation, MobileNet v3 large, 64 pixels",
        _torchvision("deeplabv3_mobilenet_v3_large", 64, "out", weights_backbone=None),
    ),
    Model(
        "lraspp",
        "torchvision",
        "segmentation, MobileNet v3 large, 64 pixels",
        _torchvision("lraspp_mobilenet_v3_large", 64, "out", weights_backbone=None),
    ),
    Model(
        "fcn_resnet50",
        "torchvision",
        "segmentation, 48 pixels",
        _torchvision("fcn_resnet50", 48, "out", weights_backbone=None),
        2e-4,  # 50 layers of random weights add up their rounding
    ),
    Model(
        "ssdlite",
        "torchvision",
        "detection: boxes and scores of all anchors, 96 pixels",
        _ssd_features,
    ),
    Model("r3d_18", "torchvision", "video, 4 frames of 40 pixels", _video("r3d_18")),
    Model("r2plus1d_18", "torchvision", "video, 4 frames of 40 pixels", _video("r2plus1d_18")),
    Model("swin3d", "torchvision", "video, 2 stages, 4 frames of 32 pixels", _swin3d),
    from_timm("convnext_atto", 64),
    from_timm("convnextv2_atto", 64),
    from_timm("mobilevit_xxs", 64),
    from_timm("mobilevitv2_050", 64),
    from_timm("efficientnet_lite0", 64),
    from_timm("mobilenetv4_conv_small", 64),
    from_timm("deit_tiny_patch16_224", 64, img_size=64, depth=4),
    Model("mlp_mixer", "timm", "3 blocks, 64 pixels", _mixer("MixerBlock")),
    Model("resmlp", "timm", "3 blocks, 64 pixels", _mixer("ResBlock", mlp_ratio=4)),
    from_timm("ghostnet_050", 64),
    from_timm("repvgg_a0", 64),
    from_timm("edgenext_xx_small", 64),
    from_timm("poolformer_s12", 64),
    from_timm("pvt_v2_b0", 64),
    from_timm("levit_128s", 224),
    from_timm("coatnet_pico_rw_224", 64, img_size=64),
    from_timm("maxvit_rmlp_pico_rw_256", 64, img_size=64),
    from_timm("xcit_nano_12_p16_224", 64),
    from_timm("efficientformerv2_s0", 224),
    from_timm("fastvit_t8", 64),
    from_timm("hrnet_w18_small", 64),
    from_timm("dla34", 64),
    from_timm("nfnet_l0", 64),
    Model("volo", "timm", "outlook attention, 64 pixels", _volo),
)
