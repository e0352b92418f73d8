"""The quantized ones of the small models, one for each way that leads to other operators in the
file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import MODELS, Model, normal
from torch import nn
from torch.nn import functional as F


class Linears(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32, bias=bias), nn.Linear(32, 16, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


def _torchao(
    config: Callable[[Any], Any], only: type | None = None
) -> Callable[[nn.Module, tuple], nn.Module]:
    def quantize(module: nn.Module, inputs: tuple) -> nn.Module:
        from torchao.quantization import granularity, quantize_
        from torchao.utils import unwrap_tensor_subclass

        quantize_(
            module,
            config(granularity),
            None if only is None else lambda part, name: isinstance(part, only),
        )
        unwrap_tensor_subclass(module)
        return module

    return quantize


def _weight_only(bits: int) -> Callable[[Any], Any]:
    def config(granularity: Any) -> Any:
        from torchao.quantization import IntxWeightOnlyConfig

        kind = granularity.PerGroup(32) if bits == 4 else granularity.PerAxis(0)
        return IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=kind)

    return config


def _dynamic_activations(bits: int) -> Callable[[Any], Any]:
    def config(granularity: Any) -> Any:
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig

        kind = granularity.PerGroup(32) if bits == 4 else granularity.PerAxis(0)
        return Int8DynamicActivationIntxWeightConfig(
            weight_dtype=getattr(torch, f"int{bits}"), weight_granularity=kind
        )

    return config


def _calibrated(make: Callable[[], Any]) -> Callable[[nn.Module, tuple], nn.Module]:
    def quantize(module: nn.Module, inputs: tuple) -> nn.Module:
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        prepared = prepare_pt2e(torch.export.export(module, inputs, strict=True).module(), make())
        for _ in range(3):
            prepared(*(torch.randn_like(x) for x in inputs))
        prepared(*inputs)
        return convert_pt2e(prepared)

    return quantize


def _vulkan(dynamic: bool, bits: int) -> Callable[[nn.Module, tuple], nn.Module]:
    def make() -> Any:
        from executorch.backends.vulkan.quantizer import vulkan_quantizer as q

        return q.VulkanQuantizer().set_global(
            q.get_symmetric_quantization_config(is_dynamic=dynamic, weight_bits=bits)
        )

    return _calibrated(make)


def _xnnpack(dynamic: bool) -> Callable[[nn.Module, tuple], nn.Module]:
    def make() -> Any:
        from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as q

        return q.XNNPACKQuantizer().set_global(
            q.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
        )

    return _calibrated(make)


class QuantizedConvs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.depthwise, self.pointwise = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        return self.last(x + F.relu(self.pointwise(F.relu(self.depthwise(x)))))


def _table() -> nn.Module:
    return nn.Sequential(nn.Embedding(21, 32), nn.LayerNorm(32))


for _name, _quantize in (
    ("int4_weight", _torchao(_weight_only(4))),
    ("int8_weight", _torchao(_weight_only(8))),
    ("int8_dynamic_int4_weight", _torchao(_dynamic_activations(4))),
    ("int8_dynamic_int8_weight", _torchao(_dynamic_activations(8))),
    ("vulkan_w8", _vulkan(False, 8)),
    ("vulkan_w4", _vulkan(False, 4)),
    ("vulkan_dynamic", _vulkan(True, 8)),
    ("int8_static_linear", _xnnpack(False)),
    ("int8_xnnpack_dynamic", _xnnpack(True)),
):
    MODELS[_name] = lambda quantize=_quantize: Model(
        Linears(), normal((5, 32), samples=1), quantize=quantize
    )

# Releases 1.0 and 1.1 fuse quantized products only without bias, and convolutions only without
# groups.
for _name, _quantize in (
    ("int4_weight_bare", _torchao(_weight_only(4))),
    ("int8_static_linear_bare", _xnnpack(False)),
    ("int8_dynamic_int4_weight_bare", _torchao(_dynamic_activations(4))),
    ("int8_dynamic_int8_weight_bare", _torchao(_dynamic_activations(8))),
    ("vulkan_dynamic_bare", _vulkan(True, 8)),
):
    MODELS[_name] = lambda quantize=_quantize: Model(
        Linears(False), normal((5, 32), samples=1), quantize=quantize
    )

MODELS["int8_static_row"] = lambda: Model(
    Linears(), normal((1, 32), samples=1), quantize=_xnnpack(False)
)
MODELS["int8_static_conv"] = lambda: Model(
    QuantizedConvs(), normal((1, 3, 11, 9), samples=1), quantize=_xnnpack(False)
)
MODELS["int8_static_conv_bare"] = lambda: Model(
    nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 4, 1)),
    normal((1, 3, 8, 7), samples=1),
    quantize=_xnnpack(False),
)
MODELS["int4_embedding"] = lambda: Model(
    _table(), ((torch.randint(0, 21, (2, 3)),),), quantize=_torchao(_weight_only(4), nn.Embedding)
)
