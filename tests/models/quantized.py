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

from tests.models.export import trace_patterns_once
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


def _convolutions_in_one_dim() -> tuple[Any, tuple]:
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    net = nn.Sequential(
        nn.Conv1d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv1d(16, 16, 3, groups=16),
        nn.Flatten(1),
        nn.Linear(16 * 17, 12),
    )
    return net.eval(), (torch.randn(1, 8, 19),)


def _classifier() -> tuple[Any, tuple]:
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 1),
        nn.Hardtanh(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Linear(24, 10),
        nn.Softmax(-1),
    )
    return net.eval(), (torch.randn(1, 3, 16, 14),)


def _attention() -> tuple[Any, tuple]:
    import torch
    from torch import nn

    torch.manual_seed(SEED)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.out = nn.Linear(64, 64, bias=False)
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(x)
            q, k, v = (head(h).view(1, 7, 4, 16).transpose(1, 2) for head in self.heads)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(1, 7, 64))
            return x + self.down(nn.functional.gelu(self.up(x)))

    return Block().eval(), (torch.randn(1, 7, 64),)


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


def _torchao_config(name: str) -> Callable[[], Any]:
    def config() -> Any:
        import torchao.quantization

        return getattr(torchao.quantization, name)()

    return config


def _token_quantizer(module: Any, inputs: tuple) -> Any:
    """8da4w as torchao did it first, by operators of torch that quantize per token."""
    from torchao.quantization.linear_quant_modules import Int8DynActInt4WeightQuantizer

    return Int8DynActInt4WeightQuantizer(groupsize=32).quantize(module)


def _embedding_handler(bits: int, group: int | None) -> Callable[[Any, tuple], Any]:
    """What executorch's export of language models does with `--embedding-quantize`."""

    def quantize(module: Any, inputs: tuple) -> Any:
        from executorch.examples.models.llama.source_transformation.quantize import (
            EmbeddingQuantHandler,
        )

        return EmbeddingQuantHandler(
            module, bitwidth=bits, group_size=group, packed=bits < 8, quantize_with_hqq=False
        ).quantized_model()

    return quantize


def _embedding_quantizer() -> Any:
    from torchao.quantization.pt2e.quantizer.embedding_quantizer import EmbeddingQuantizer

    return EmbeddingQuantizer()


def _quantizer(make: Callable[[], Any]) -> Callable[[Any, tuple], Any]:
    def quantize(module: Any, inputs: tuple) -> Any:
        import torch
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        exported = torch.export.export(module, inputs, strict=True).module()
        prepared = prepare_pt2e(exported, make())
        for _ in range(3):
            prepared(*(torch.randn_like(x) if x.is_floating_point() else x for x in inputs))
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


# Ways of which only the export is tested. Here executorch's partitioner may leave operators outside.
EXPORTS = {
    flow.name: flow
    for flow in (
        Flow(name, build, quantize, (), tolerance)
        for name, build, quantize, tolerance in (
            ("torchao_int4_axis", _grouped_linears, _torchao(_weight_only(4, None)), 0.2),
            ("torchao_8da4w_axis", _grouped_linears, _torchao(_dynamic_activation(4, None)), 0.2),
            ("torchao_8da4w_attention", _attention, _torchao(_dynamic_activation(4, 32)), 0.2),
            ("torchao_int8", _linears, _torchao(_torchao_config("Int8WeightOnlyConfig")), 0.02),
            (
                "torchao_int8_dynamic",
                _linears,
                _torchao(_torchao_config("Int8DynamicActivationInt8WeightConfig")),
                0.05,
            ),
            ("torchao_embedding8", _embedding, _torchao(_weight_only(8, None), _is_embedding), 0.1),
            ("8da4w_per_token", _grouped_linears, _token_quantizer, 0.2),
            ("embedding_byte", _embedding, _embedding_handler(8, None), 0.1),
            ("embedding_byte_group", _embedding, _embedding_handler(8, 32), 0.1),
            ("embedding_4bit", _embedding, _embedding_handler(4, 32), 0.3),
            ("embedding_4bit_axis", _embedding, _embedding_handler(4, None), 0.3),
            ("embedding_2bit", _embedding, _embedding_handler(2, 32), 0.9),
            ("pt2e_embedding", _embedding, _quantizer(_embedding_quantizer), 0.1),
            ("vulkan_w8_attention", _attention, _vulkan_quantizer(False, 8), 0.02),
            ("xnnpack_static_tensor", _linears, _xnnpack_quantizer(False, False), 0.1),
            ("xnnpack_dynamic_tensor", _linears, _xnnpack_quantizer(True, False), 0.05),
            ("xnnpack_static_conv_tensor", _convolutions, _xnnpack_quantizer(False, False), 0.15),
            ("xnnpack_static_conv1d", _convolutions_in_one_dim, _xnnpack_quantizer(False), 0.15),
            ("xnnpack_static_classifier", _classifier, _xnnpack_quantizer(False), 0.15),
            ("xnnpack_static_attention", _attention, _xnnpack_quantizer(False), 0.1),
            ("xnnpack_dynamic_attention", _attention, _xnnpack_quantizer(True), 0.05),
        )
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


def export(name: str, partitioner: Any = None, whole: bool = True) -> Exported:
    """Quantizes the model of a flow and exports it.

    Args:
        name: a key of `FLOWS` or `EXPORTS`.
        partitioner: None: executorch's VulkanPartitioner.
        whole: by `to_edge_transform_and_lower`, which keeps the operators whole that the
            partitioner names; else by `to_edge(...).to_backend(...)`.

    Raises:
        KeyError: no such flow.
        ModuleNotFoundError: torch, torchao or executorch is not installed.
    """
    import torch
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower

    flow = {**FLOWS, **EXPORTS}[name]
    partitioner = partitioner or VulkanPartitioner({})
    config = EdgeCompileConfig(_check_ir_validity=False)
    trace_patterns_once()
    with quiet(), torch.no_grad():
        module, inputs = flow.build()
        float_result = module(*inputs)
        quantized = flow.quantize(module, inputs)
        exported = torch.export.export(quantized, inputs, strict=False)
        if whole:
            edge = to_edge_transform_and_lower(
                exported, partitioner=[partitioner], compile_config=config
            )
        else:
            edge = to_edge(exported, compile_config=config).to_backend(partitioner)
        return Exported(edge.to_executorch().buffer, inputs, float_result, quantized(*inputs))
