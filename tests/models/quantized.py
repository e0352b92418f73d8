"""Small quantized models, one for each way in which executorch and torchao quantize for the Vulkan
delegate.

`export(name)` gives the `.pte` bytes, an input, and the operators of the exported program's graph.
The file's arithmetic is not that of the eager quantized model where the exporter folds the
quantization of activations away; tests hold a result against the float model only loosely, and each
operator against its own reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.models.messages import quiet

SEED = 20262


@dataclass(frozen=True)
class Flow:
    """One way to quantize.

    Attributes:
        name: what it is called here.
        build: makes the float module and an example input.
        quantize: float module and inputs to what `torch.export` takes, or an exported module
            already converted.
        operators: names that the Vulkan graph has to contain, so that a test notices an exporter
            that does otherwise.
        tolerance: the largest error, as a share of the largest output, against the float model.
    """

    name: str
    build: Callable[[], tuple[Any, tuple]]
    quantize: Callable[[Any, tuple], Any]
    operators: tuple[str, ...]
    tolerance: float


# -- models --------------------------------------------------------------------------------------
def _linears(
    rows: int = 7, width: int = 64, hidden: int = 132, out: int = 37, bias: bool = True
) -> tuple[Any, tuple]:
    import torch
    from torch import nn

    torch.manual_seed(SEED)

    class Linears(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(width, hidden, bias=bias)
            self.second = nn.Linear(hidden, out, bias=bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.nn.functional.relu(self.first(x)))

    return Linears().eval(), (torch.randn(rows, width),)


def _grouped_linears(rows: int = 7) -> tuple[Any, tuple]:
    return _linears(rows, 64, 128, 36)  # the exporter takes these for multiples of 4 only


def _one_row() -> tuple[Any, tuple]:
    return _linears(1, 64, 128, 36)


def _embedding() -> tuple[Any, tuple]:
    import torch
    from torch import nn

    torch.manual_seed(SEED)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(53, 64)
            self.norm = nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.table(x))

    return Table().eval(), (torch.randint(0, 53, (2, 5)),)


def _convolutions() -> tuple[Any, tuple]:
    import torch
    from torch import nn

    torch.manual_seed(SEED)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
            self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
            self.pointwise = nn.Conv2d(16, 16, 1)
            self.grouped = nn.Conv2d(16, 24, 3, padding=2, dilation=2, groups=2)
            self.last = nn.Conv2d(24, 8, 3, bias=False)
            self.head = nn.Linear(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            relu = torch.nn.functional.relu
            x = relu(self.stem(x))
            x = x + relu(self.pointwise(relu(self.depthwise(x))))
            x = self.last(relu(self.grouped(x)))
            return self.head(x.mean(dim=(2, 3)))

    return Net().eval(), (torch.randn(1, 3, 21, 18),)


def _upscale() -> tuple[Any, tuple]:
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    net = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.PixelShuffle(2),
        nn.ConvTranspose2d(4, 8, 4, stride=2, padding=1),
    )
    return net.eval(), (torch.randn(1, 8, 9, 7),)


# -- ways to quantize ----------------------------------------------------------------------------
def _torchao(
    config: Callable[[], Any], filter_fn: Callable | None = None
) -> Callable[[Any, tuple], Any]:
    def quantize(module: Any, inputs: tuple) -> Any:
        from torchao.quantization import quantize_

        quantize_(module, config(), filter_fn)
        return module

    return quantize


def _weight_only(bits: int, group: int | None) -> Callable[[], Any]:
    def config() -> Any:
        import torch
        from torchao.quantization import IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerAxis, PerGroup

        return IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{bits}"),
            granularity=PerAxis(0) if group is None else PerGroup(group),
        )

    return config


def _dynamic_activation(bits: int, group: int | None) -> Callable[[], Any]:
    def config() -> Any:
        import torch
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig
        from torchao.quantization.granularity import PerAxis, PerGroup

        return Int8DynamicActivationIntxWeightConfig(
            weight_dtype=getattr(torch, f"int{bits}"),
            weight_granularity=PerAxis(0) if group is None else PerGroup(group),
        )

    return config


def _is_embedding(module: Any, name: str) -> bool:
    from torch import nn

    return isinstance(module, nn.Embedding)


def _quantizer(make: Callable[[], Any]) -> Callable[[Any, tuple], Any]:
    def quantize(module: Any, inputs: tuple) -> Any:
        import torch
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        exported = torch.export.export(module, inputs, strict=True).module()
        prepared = prepare_pt2e(exported, make())
        for _ in range(3):
            prepared(*(torch.randn_like(x) for x in inputs))
        prepared(*inputs)
        return convert_pt2e(prepared)

    return quantize


def _vulkan_quantizer(dynamic: bool, bits: int) -> Callable[[Any, tuple], Any]:
    def make() -> Any:
        from executorch.backends.vulkan.quantizer.vulkan_quantizer import (
            VulkanQuantizer,
            get_symmetric_quantization_config,
        )

        return VulkanQuantizer().set_global(
            get_symmetric_quantization_config(is_dynamic=dynamic, weight_bits=bits)
        )

    return _quantizer(make)


def _xnnpack_quantizer(dynamic: bool, channel: bool = True) -> Callable[[Any, tuple], Any]:
    def make() -> Any:
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )

        return XNNPACKQuantizer().set_global(
            get_symmetric_quantization_config(is_per_channel=channel, is_dynamic=dynamic)
        )

    return _quantizer(make)


FLOWS = {
    flow.name: flow
    for flow in (
        Flow(
            "torchao_int4_group",
            _grouped_linears,
            _torchao(_weight_only(4, 32)),
            ("et_vk.linear_q4gsw.default",),
            0.2,
        ),
        Flow(
            "torchao_8da4w",
            _grouped_linears,
            _torchao(_dynamic_activation(4, 32)),
            ("torchao.choose_qparams_affine.default", "et_vk.linear_dq8ca_q4gsw.default"),
            0.2,
        ),
        Flow(
            "torchao_8da4w_one_row",
            _one_row,
            _torchao(_dynamic_activation(4, 32)),
            ("et_vk.linear_dq8ca_q4gsw.default",),
            0.2,
        ),
        Flow(
            "torchao_int8_axis",
            _linears,
            _torchao(_weight_only(8, None)),
            ("torchao.dequantize_affine.default", "aten.linear.default"),
            0.02,
        ),
        Flow(
            "torchao_8da8w",
            _linears,
            _torchao(_dynamic_activation(8, None)),
            ("torchao.dequantize_affine.default",),
            0.03,
        ),
        Flow(
            "torchao_embedding4",
            _embedding,
            _torchao(_weight_only(4, 32), _is_embedding),
            ("et_vk.embedding_q4gsw.default",),
            0.3,
        ),
        Flow(
            "vulkan_w8",
            _linears,
            _vulkan_quantizer(False, 8),
            ("aten._weight_int8pack_mm.default",),
            0.02,
        ),
        Flow(
            "vulkan_w4", _linears, _vulkan_quantizer(False, 4), ("et_vk.linear_qcs4w.default",), 0.3
        ),
        Flow(
            "vulkan_dynamic8",
            _linears,
            _vulkan_quantizer(True, 8),
            ("quantized_decomposed.dequantize_per_channel.default",),
            0.03,
        ),
        Flow(
            "vulkan_dynamic4",
            _linears,
            _vulkan_quantizer(True, 4),
            ("quantized_decomposed.dequantize_per_channel.default",),
            0.3,
        ),
        Flow(
            "xnnpack_static_conv",
            _convolutions,
            _xnnpack_quantizer(False),
            (
                "et_vk.q8ta_conv2d.default",
                "et_vk.q8ta_conv2d_pw.default",
                "et_vk.q8ta_conv2d_dw.default",
                "et_vk.q8ta_add.default",
            ),
            0.15,
        ),
        Flow(
            "xnnpack_static_upscale",
            _upscale,
            _xnnpack_quantizer(False),
            ("et_vk.q8ta_conv2d.default",),
            0.15,
        ),
        Flow(
            "xnnpack_static_linear",
            _linears,
            _xnnpack_quantizer(False),
            ("et_vk.q8ta_linear.default",),
            0.1,
        ),
        Flow(
            "xnnpack_static_linear_one_row",
            _one_row,
            _xnnpack_quantizer(False),
            ("et_vk.q8ta_linear_gemv.default",),
            0.1,
        ),
        Flow(
            "xnnpack_dynamic_linear",
            _linears,
            _xnnpack_quantizer(True),
            ("quantized_decomposed.dequantize_per_channel.default",),
            0.05,
        ),
    )
}


@dataclass(frozen=True)
class Exported:
    """A quantized model in a file.

    Attributes:
        blob: the `.pte` bytes.
        inputs: of one call.
        float_result: what the float model gives for them.
        eager_result: what the quantized model gives for them in eager torch.
    """

    blob: bytes
    inputs: tuple
    float_result: Any
    eager_result: Any


def export(name: str, partitioner: Any = None) -> Exported:
    """Quantizes the model of a flow and exports it, with executorch's VulkanPartitioner if no other
    partitioner is given.

    Raises:
        KeyError: no such flow.
        ModuleNotFoundError: torch, torchao or executorch is not installed.
    """
    import torch
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    flow = FLOWS[name]
    with quiet(), torch.no_grad():
        module, inputs = flow.build()
        float_result = module(*inputs)
        quantized = flow.quantize(module, inputs)
        edge = to_edge_transform_and_lower(
            torch.export.export(quantized, inputs, strict=False),
            partitioner=[partitioner or VulkanPartitioner({})],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        return Exported(edge.to_executorch().buffer, inputs, float_result, quantized(*inputs))
