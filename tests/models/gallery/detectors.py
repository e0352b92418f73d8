"""Whole detectors of torchvision, small, with their loops over images and levels.

Where torchvision has no compiled operators, functions in Python stand for them: `nms` runs on the
CPU, and `roi_align` and `deform_conv2d` are made of operators of torch.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from tests.models.gallery.model import Model, lively, seeded
from tests.models.zoo import Built

_SIZES = ((64, 96), (96, 64), (80, 80))
_SCALE = {"min_size": 64, "max_size": 96}


def _nms(boxes: Any, scores: Any, iou_threshold: float) -> Any:
    """Indices of boxes that overlap no better one, the best first."""
    import torch

    order = scores.sort(descending=True, stable=True).indices
    sides = boxes[:, 2:] - boxes[:, :2]
    areas = sides.prod(1)
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    common = (high - low).clamp(min=0).prod(2)
    overlaps = common / (areas[:, None] + areas[None] - common) > iou_threshold
    kept: list[int] = []
    for box in order.tolist():
        if not overlaps[box, kept].any():
            kept.append(box)
    return torch.tensor(kept, dtype=torch.int64)


def _deform_conv2d(
    x: Any,
    weight: Any,
    offset: Any,
    mask: Any,
    bias: Any,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    groups: int,
    offset_groups: int,
    use_mask: bool,
) -> Any:
    """A convolution that reads each tap at an offset: samples of the input, and a matmul."""
    import torch
    from torch.nn import functional

    batch, channels, height, width = x.shape
    filters, _, rows, columns = weight.shape
    out_h, out_w = offset.shape[2:]
    taps = rows * columns
    offset = offset.view(batch, offset_groups, taps, 2, out_h, out_w)
    tap_y = torch.arange(rows).repeat_interleave(columns).view(taps, 1, 1) * dilation_h
    tap_x = torch.arange(columns).repeat(rows).view(taps, 1, 1) * dilation_w
    y = offset[:, :, :, 0] + (torch.arange(out_h).view(-1, 1) * stride_h - pad_h) + tap_y
    x_ = offset[:, :, :, 1] + (torch.arange(out_w) * stride_w - pad_w) + tap_x
    grid = torch.stack(((2 * x_ + 1) / width - 1, (2 * y + 1) / height - 1), -1)
    samples = functional.grid_sample(
        x.reshape(batch * offset_groups, channels // offset_groups, height, width),
        grid.view(batch * offset_groups, taps * out_h, out_w, 2),
        align_corners=False,
    ).view(batch, offset_groups, channels // offset_groups, taps, out_h, out_w)
    if use_mask:
        samples = samples * mask.view(batch, offset_groups, 1, taps, out_h, out_w)
    columns_ = samples.reshape(batch, groups, channels // groups * taps, out_h * out_w)
    made = weight.view(groups, filters // groups, -1) @ columns_
    return made.view(batch, filters, out_h, out_w) + bias.view(-1, 1, 1)


@functools.cache
def _supply_operators() -> Any:
    """Registers the operators that torchvision lacks, and has torchvision call them."""
    import torch
    import torchvision
    from torchvision.ops import boxes, deform_conv

    if torchvision.extension._has_ops():
        return None
    align = vars(importlib.import_module("torchvision.ops.roi_align"))  # not the function
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.impl("nms", _nms, "CPU")
    align["_roi_align"] = align["_roi_align"].__wrapped__
    deform_conv._assert_has_ops = boxes._assert_has_ops = lambda: None
    library.define(
        "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias,"
        " SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h,"
        " SymInt dilation_w, SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor"
    )
    library.impl("deform_conv2d", _deform_conv2d, "CompositeImplicitAutograd")
    return library


def _backbone() -> Any:
    from torchvision.models.detection.backbone_utils import BackboneWithFPN
    from torchvision.models.resnet import BasicBlock, ResNet

    body = ResNet(BasicBlock, [1, 1, 1, 1], width_per_group=64)
    layers = {"layer2": "0", "layer3": "1", "layer4": "2"}
    return BackboneWithFPN(body, layers, [128, 256, 512], 64)


def _anchors(ratios: tuple[float, ...] = (0.5, 1.0, 2.0)) -> Any:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    return AnchorGenerator(((16,), (32,), (64,), (96,)), (ratios,) * 4)


def _regions(kind: str, **heads: Callable[[], Any]) -> Any:
    """A two-stage detector: proposals, then what is in them."""
    from torchvision.models import detection
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.ops import MultiScaleRoIAlign

    return getattr(detection, kind)(
        _backbone(),
        **_SCALE,
        rpn_anchor_generator=_anchors(),
        rpn_pre_nms_top_n_test=50,
        rpn_post_nms_top_n_test=20,
        box_roi_pool=MultiScaleRoIAlign(["0", "1", "2"], 5, 2),
        box_head=TwoMLPHead(64 * 25, 48),
        box_predictor=FastRCNNPredictor(48, 4),
        box_score_thresh=0.1,
        box_detections_per_img=7,
        **{name: make() for name, make in heads.items()},
    )


def _mask_heads() -> dict[str, Callable[[], Any]]:
    from torchvision.models.detection import mask_rcnn
    from torchvision.ops import MultiScaleRoIAlign

    return {
        "mask_roi_pool": lambda: MultiScaleRoIAlign(["0", "1", "2"], 7, 2),
        "mask_head": lambda: mask_rcnn.MaskRCNNHeads(64, (24,), 1),
        "mask_predictor": lambda: mask_rcnn.MaskRCNNPredictor(24, 16, 4),
    }


def _keypoint_heads() -> dict[str, Callable[[], Any]]:
    from torchvision.models.detection import keypoint_rcnn
    from torchvision.ops import MultiScaleRoIAlign

    return {
        "keypoint_roi_pool": lambda: MultiScaleRoIAlign(["0", "1", "2"], 7, 2),
        "keypoint_head": lambda: keypoint_rcnn.KeypointRCNNHeads(64, (24,)),
        "keypoint_predictor": lambda: keypoint_rcnn.KeypointRCNNPredictor(24, 5),
    }


def _one_stage(kind: str, **options: Any) -> Any:
    from torchvision.models import detection

    return getattr(detection, kind)(
        _backbone(),
        num_classes=4,
        **_SCALE,
        score_thresh=0.01,
        topk_candidates=50,
        detections_per_img=7,
        **options,
    )


def _ssd() -> Any:
    import torchvision
    from torch import nn
    from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
    from torchvision.models.detection.ssd import SSD

    class Maps(nn.Module):
        """Feature maps of two levels."""

        out_channels = (24, 32)

        def __init__(self) -> None:
            super().__init__()
            layer = torchvision.ops.Conv2dNormActivation
            self.first = nn.Sequential(layer(3, 16, stride=4), layer(16, 24, stride=4))
            self.second = layer(24, 32, stride=2)

        def forward(self, x: Any) -> dict[str, Any]:
            first = self.first(x)
            return {"0": first, "1": self.second(first)}

    return SSD(
        Maps(),
        DefaultBoxGenerator([[2], [2, 3]]),
        (96, 96),
        4,
        score_thresh=0.1,
        topk_candidates=50,
        detections_per_img=7,
    )


def _deformable() -> Any:
    from torch import nn
    from torchvision.ops import DeformConv2d

    class Deformable(nn.Module):
        """Two convolutions that sample at offsets, one with a mask."""

        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Conv2d(3, 2 * 9, 3, padding=1)
            self.first = DeformConv2d(3, 12, 3, padding=1)
            self.shift = nn.Conv2d(12, 2 * 2 * 9, 3, stride=2, padding=2, dilation=2)
            self.mask = nn.Conv2d(12, 2 * 9, 3, stride=2, padding=2, dilation=2)
            self.second = DeformConv2d(12, 8, 3, stride=2, padding=2, dilation=2, groups=2)

        def forward(self, x: Any) -> Any:
            x = self.first(x, self.offset(x)).relu()
            return self.second(x, self.shift(x), self.mask(x).sigmoid())

    return Deformable()


def _detector(make: Callable[[], Any]) -> Callable[[], Built]:
    def build() -> Built:
        import torch

        generator = seeded()
        _supply_operators()
        module = lively(make()).requires_grad_(False)
        for name, parameter in module.named_parameters():  # scores that differ from box to box
            if name.endswith(("cls_logits.weight", "cls_score.weight")):
                parameter.mul_(8)
        samples = tuple(([torch.rand(3, *size, generator=generator)],) for size in _SIZES)
        return Built(module, samples[0], samples)

    return build


def _filters() -> Built:
    import torch

    generator = seeded()
    _supply_operators()
    samples = tuple((torch.randn(2, 3, *size, generator=generator),) for size in _SIZES)
    height, width = (torch.export.Dim(name, min=8, max=200) for name in ("height", "width"))
    return Built(
        lively(_deformable()), samples[0], samples, dynamic_shapes=({2: height, 3: width},)
    )


_IMAGES = "64 x 96, 96 x 64 and 80 x 80 pixels"
MODELS = (
    Model("faster_rcnn", "torchvision", f"detection, {_IMAGES}", _detector(lambda: _regions("FasterRCNN"))),
    Model(
        "mask_rcnn", "torchvision", f"the same with masks, {_IMAGES}",
        _detector(lambda: _regions("MaskRCNN", **_mask_heads())),
    ),
    Model(
        "keypoint_rcnn", "torchvision", f"the same with keypoints, {_IMAGES}",
        _detector(lambda: _regions("KeypointRCNN", **_keypoint_heads())),
    ),
    Model(
        "retinanet_whole", "torchvision", f"detection, {_IMAGES}",
        _detector(lambda: _one_stage("RetinaNet", anchor_generator=_anchors())),
    ),
    Model("fcos_whole", "torchvision", f"detection, {_IMAGES}", _detector(lambda: _one_stage(
        "FCOS", anchor_generator=_anchors((1.0,)),
    ))),
    Model("ssd_whole", "torchvision", f"detection, {_IMAGES}", _detector(_ssd)),
    Model("deformable_convolutions", "torchvision", f"with and without a mask, {_IMAGES}", _filters),
)  # fmt: skip
