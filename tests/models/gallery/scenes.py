"""Detection, segmentation, depth, pose and matching of transformers and torchvision, small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.models.gallery.model import Model, built, seeded
from tests.models.gallery.small import fixed, ids, image, model, noise, ones, part, parts
from tests.models.zoo import Built

_RESNET = part(
    "ResNetConfig",
    embedding_size=16,
    hidden_sizes=[16, 32, 48, 64],
    depths=[1, 1, 1, 1],
    layer_type="basic",
    out_features=["stage2", "stage3", "stage4"],
)
_DEEP = part(
    "ResNetConfig",
    embedding_size=16,
    hidden_sizes=[16, 32, 48, 64],
    depths=[1, 1, 1, 1],
    layer_type="basic",
    out_features=["stage4"],
)
_SWIN = part(
    "SwinConfig",
    embed_dim=16,
    depths=[1, 1, 1, 1],
    num_heads=[1, 2, 2, 4],
    patch_size=4,
    window_size=4,
    out_features=["stage1", "stage2", "stage3", "stage4"],
)
_VIT_STAGES = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "mlp_ratio": 2,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}


def _image(name: str, about: str, kind: str, size: int = 64, **options: Any) -> Model:
    return model(name, f"{about}, {size} pixels", kind, {"pixel_values": image(size)}, **options)


_HYBRID = {
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [32, 48, 64],
    "encode_proj_layers": [2],
    "decoder_in_channels": [32, 32, 32],
    "d_model": 32,
    "num_queries": 10,
    "num_labels": 7,
    "decoder_n_points": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


def _tv(name: str, about: str, build: Callable[[], Built]) -> Model:
    return Model(name, "torchvision", f"{about}, 96 pixels", build)


def _backbone() -> Any:
    """A ResNet-18 with a feature pyramid."""
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet18", weights=None, returned_layers=[2, 3, 4])


def _one_stage(kind: str) -> Callable[[], Built]:
    """A detector of one stage, up to the decoded boxes of all anchors."""

    def build() -> Built:
        import torch
        import torchvision

        detection = torchvision.models.detection
        generator = seeded()
        from torchvision.models.detection.image_list import ImageList

        if kind == "SSD":
            whole = detection.ssd300_vgg16(weights=None, weights_backbone=None, num_classes=7)
        else:
            sizes = {
                "FCOS": ((8,), (16,), (32,), (64,)),
                "RetinaNet": ((8, 12), (16, 24), (32, 48), (64, 96)),
            }
            ratios = {"FCOS": ((1.0,),) * 4, "RetinaNet": ((0.5, 1.0, 2.0),) * 4}
            anchors = detection.anchor_utils.AnchorGenerator(sizes[kind], ratios[kind])
            whole = getattr(detection, kind)(_backbone(), num_classes=7, anchor_generator=anchors)

        class Boxes(torch.nn.Module):
            """An image [1, 3, H, W] to boxes and scores of all anchors."""

            def __init__(self) -> None:
                super().__init__()
                self.inner = whole

            def forward(self, image: torch.Tensor) -> Any:
                found = list(self.inner.backbone(image).values())
                made = self.inner.head(found)
                images = ImageList(image, [(image.shape[2], image.shape[3])])
                anchors = self.inner.anchor_generator(images, found)[0]
                regression = made["bbox_regression"][0]
                if kind == "FCOS":
                    boxes = self.inner.box_coder.decode(regression, anchors)
                else:
                    boxes = self.inner.box_coder.decode_single(regression, anchors)
                scores = made["cls_logits"][0].sigmoid()
                best, order = scores.max(-1).values.topk(20)
                return boxes, scores, best, boxes[order]

        return built(Boxes(), torch.randn(1, 3, 96, 96, generator=generator))

    return build


def _prompted(name: str, about: str, kind: str, **options: Any) -> Model:
    inputs = {
        "pixel_values": image(64),
        "input_points": fixed([[[[20.0, 30.0], [40.0, 11.0]]]], "float32"),
        "input_labels": fixed([[[1, 0]]]),
    }
    return model(name, about, kind, inputs, **options)


_MASKS = parts(
    "SamMaskDecoderConfig",
    hidden_size=32,
    mlp_dim=64,
    num_attention_heads=4,
    iou_head_hidden_dim=32,
)

MODELS = (
    _image("conditional_detr", "detection", "ConditionalDetrForObjectDetection", 96, backbone_config=_DEEP,
           num_queries=10, num_labels=7, use_timm_backbone=False),
    _image("dab_detr", "detection, queries are boxes", "DabDetrForObjectDetection", 96, backbone_config=_DEEP,
           num_queries=10, num_labels=7),
    _image("deformable_detr", "detection, sampled attention", "DeformableDetrForObjectDetection", 96,
           backbone_config=_RESNET, num_queries=10, num_labels=7),
    _image("deformable_detr_two_stage", "the same, proposals refined", "DeformableDetrForObjectDetection", 96,
           backbone_config=_RESNET, num_queries=10, num_labels=7, two_stage=True, with_box_refine=True,
           two_stage_num_proposals=10),
    _image("table_transformer", "detection of tables", "TableTransformerForObjectDetection", 96,
           backbone_config=_DEEP, num_queries=10, num_labels=7),
    _image("rt_detr", "detection, hybrid encoder", "RTDetrForObjectDetection", 96, backbone_config=part(
        "RTDetrResNetConfig", embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
        layer_type="basic", out_features=["stage2", "stage3", "stage4"]), **_HYBRID),
    _image("rt_detr_v2", "the same, version 2", "RTDetrV2ForObjectDetection", 96, backbone_config=part(
        "RTDetrResNetConfig", embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
        layer_type="basic", out_features=["stage2", "stage3", "stage4"]), **_HYBRID),
    _image("d_fine", "detection, boxes as distributions", "DFineForObjectDetection", 96, backbone_config=part(
        "HGNetV2Config", embedding_size=16, stem_channels=[3, 8, 16], stage_in_channels=[16, 16, 32, 48],
        stage_mid_channels=[8, 8, 16, 16], stage_out_channels=[16, 32, 48, 64], stage_num_blocks=[1, 1, 1, 1],
        stage_numb_of_layers=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
        out_features=["stage2", "stage3", "stage4"]), **_HYBRID),
    _image("rf_detr", "detection, DINOv2 backbone", "RfDetrForObjectDetection", 64, backbone_config=part(
        "RfDetrDinov2Config", **_VIT_STAGES, num_windows=2), d_model=32, num_queries=10,
        num_labels=7, decoder_self_attention_heads=4, decoder_cross_attention_heads=4, decoder_ffn_dim=64,
        group_detr=1),
    _image("lw_detr", "detection, plain ViT", "LwDetrForObjectDetection", 64, backbone_config=part(
        "LwDetrViTConfig", num_hidden_layers=4, pretrain_image_size=64, num_windows=4,
        window_block_indices=[0, 2], out_indices=[2, 4]), projector_scale_factors=[1.0], projector_in_channels=[32],
        projector_out_channels=32, d_model=32, num_queries=10, num_labels=7, decoder_self_attention_heads=4,
        decoder_cross_attention_heads=4, decoder_ffn_dim=64, group_detr=1),
    model("owlvit", "detection by texts, 64 pixels", "OwlViTForObjectDetection", {
        "input_ids": ids(2, 8), "pixel_values": image(64), "attention_mask": ones(2, 8)},
        projection_dim=64, text_config=parts("OwlViTTextConfig"), vision_config=parts("OwlViTVisionConfig"),
        constants={"return_dict": True}),
    model("owlv2", "the same, version 2", "Owlv2ForObjectDetection", {
        "input_ids": ids(2, 8), "pixel_values": image(64), "attention_mask": ones(2, 8)},
        projection_dim=64, text_config=parts("Owlv2TextConfig"), vision_config=parts("Owlv2VisionConfig"),
        constants={"return_dict": True}),
    model("grounding_dino", "detection by words", "GroundingDinoForObjectDetection", {
        "pixel_values": image(96), "input_ids": fixed([[101, 7, 9, 11, 102]])}, backbone_config=_RESNET,
        text_config=part("BertConfig", vocab_size=110), num_queries=10, encoder_layers=1, max_text_len=16,
        num_feature_levels=4, query_dim=4),
    _tv("retinanet", "detection: boxes and scores of all anchors", _one_stage("RetinaNet")),
    _tv("fcos", "detection: boxes and scores of all pixels", _one_stage("FCOS")),
    _tv("ssd", "detection, VGG backbone: boxes and scores of all anchors", _one_stage("SSD")),
    _image("maskformer", "segmentation, Swin backbone", "MaskFormerForInstanceSegmentation", backbone_config=_SWIN,
           fpn_feature_size=32, mask_feature_size=32, decoder_config=parts("DetrConfig", num_queries=6,
           backbone_config=_DEEP)),
    _image("mask2former", "segmentation, Swin backbone", "Mask2FormerForUniversalSegmentation", backbone_config=_SWIN,
           feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=64, dim_feedforward=64,
           num_queries=6, decoder_layers=3),
    _image("upernet", "segmentation, Swin backbone", "UperNetForSemanticSegmentation", backbone_config=_SWIN,
           hidden_size=32, auxiliary_channels=16, auxiliary_in_channels=64, num_labels=7),
    _image("eomt", "segmentation, a ViT with queries", "EomtForUniversalSegmentation", num_hidden_layers=3,
           num_blocks=1, num_queries=6, num_upscale_blocks=1),
    _prompted("sam", "segmentation by points, 64 pixels", "SamModel", vision_config=parts(
        "SamVisionConfig", output_channels=32, window_size=3, global_attn_indexes=[1], num_pos_feats=16, mlp_dim=128,
        patch_size=8), prompt_encoder_config=parts("SamPromptEncoderConfig", hidden_size=32, patch_size=8,
        mask_input_channels=8, image_embedding_size=8), mask_decoder_config=_MASKS),
    model("clipseg", "segmentation by texts, 64 pixels", "CLIPSegForImageSegmentation", {
        "input_ids": ids(1, 8), "pixel_values": image(64), "attention_mask": ones(1, 8)},
        text_config=parts("CLIPSegTextConfig"), vision_config=parts("CLIPSegVisionConfig"), extract_layers=[0, 1],
        reduce_dim=32, decoder_intermediate_size=64),
    model("seggpt", "segmentation by examples, 32 pixels", "SegGptForImageSegmentation", {
        "pixel_values": image(32), "prompt_pixel_values": image(32), "prompt_masks": image(32)},
        image_size=[64, 32], patch_size=8, pretrain_image_size=32, mlp_dim=64, decoder_hidden_size=16, merge_index=0,
        intermediate_hidden_state_indices=[0, 1]),
    _image("mobilevit_deeplab", "segmentation", "MobileViTForSemanticSegmentation", patch_size=2,
           hidden_sizes=[32, 40, 48], neck_hidden_sizes=[8, 8, 16, 24, 32, 40, 48], aspp_out_channels=16, num_labels=7),
    _image("beit_upernet", "segmentation", "BeitForSemanticSegmentation", num_hidden_layers=4, out_indices=[1, 2, 3, 4],
           use_relative_position_bias=True, pool_scales=[1, 2], num_labels=7),
    _image("glpn", "depth", "GLPNForDepthEstimation", depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64],
           num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=16),
    _image("vitpose", "pose", "VitPoseForPoseEstimation", backbone_config=part(
        "VitPoseBackboneConfig", image_size=[64, 64], patch_size=[16, 16], part_features=16, num_experts=1,
        out_indices=[2]), num_labels=17),
    _image("superpoint", "key points", "SuperPointForKeypointDetection", encoder_hidden_sizes=[8, 8, 16, 16],
           decoder_hidden_size=32, descriptor_decoder_dim=32, keypoint_decoder_dim=65),
    model("lightglue", "matches of key points", "LightGlueForKeypointMatching", {"pixel_values": noise(1, 2, 3, 64,
        64)},
          keypoint_detector_config=part("SuperPointConfig", encoder_hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=32,
          descriptor_decoder_dim=32), descriptor_dim=32, depth_confidence=-1.0, width_confidence=-1.0),
    model("vitmatte", "matting, 64 pixels", "VitMatteForImageMatting", {"pixel_values": image(64, 4)},
        backbone_config=part(
        "VitDetConfig", num_channels=4, out_features=["stage2"], pretrain_image_size=64), hidden_size=64,
        convstream_hidden_sizes=[8, 16, 24], fusion_hidden_sizes=[32, 24, 16, 8]),
)  # fmt: skip
