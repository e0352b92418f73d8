"""Runs the graph of a quantized `.pte` with torch alone: the reference of what a device computes.

Each operator does what its documentation and its packing say. Products of quantized values are
summed exactly, in float64. What follows is float32, rounded after each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.ao.quantization.fx._decomposed

from purevk.ir import Graph, Value

F = torch.nn.functional


def quantize(
    numbers: torch.Tensor, inverse: Any, zero: Any, low: int = -128, high: int = 127
) -> torch.Tensor:
    return torch.clamp(torch.round(numbers * inverse) + zero, low, high).to(torch.int8)


def inverse_of(scale: float) -> torch.Tensor:
    return torch.tensor(1.0 / scale, dtype=torch.float32)


def real(values: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    return (values.float() - zero) * torch.tensor(scale, dtype=torch.float32)


def unpack(packed: torch.Tensor, low_first: bool) -> torch.Tensor:
    low, high = (packed & 15).to(torch.int8) - 8, (packed >> 4).to(torch.int8) - 8
    pair = (low, high) if low_first else (high, low)
    return torch.stack(pair, -1).reshape(packed.shape[0], -1)


def by_group(values: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """The weight in float64 from scales [groups, N or more]."""
    return (
        values.double()
        * scales.T[: values.shape[0]].double().repeat_interleave(group, 1)[:, : values.shape[1]]
    )


def linear_q4gsw(x, weight, scales, group, bias):
    made = x.double() @ by_group(unpack(weight, True)[:, : x.shape[-1]], scales, group).T
    return (made if bias is None else made + bias[: weight.shape[0]].double()).float()


def linear_dq8ca(x, scale, zero, weight, sums, scales, group, bias):
    values = quantize(x, (1.0 / scale)[..., None], zero[..., None].float())
    centered = (values.double() - zero.double()[..., None]) * scale.double()[..., None]
    return linear_q4gsw(centered, weight, scales, group, bias)


def q8ta_linear(x, x_scale, x_zero, weight, sums, scales, scale, zero, bias, activation):
    total = (x.double() - x_zero) @ weight.double().T
    return q8ta_end(total, x_scale, scales, bias, scale, zero, activation, weight.shape[0], (-1,))


def q8ta_end(total, x_scale, scales, bias, scale, zero, activation, channels, shape):
    y = (total.to(torch.float32) * torch.tensor(x_scale, dtype=torch.float32)) * scales[
        :channels
    ].reshape(shape)
    y = y if bias is None else y + bias[:channels].reshape(shape)
    return quantize(torch.relu(y) if activation == "relu" else y, inverse_of(scale), zero)


def q8ta_conv2d(
    x,
    x_scale,
    x_zero,
    weight,
    sums,
    scales,
    scale,
    zero,
    bias,
    kernel,
    stride,
    padding,
    dilation,
    groups,
    activation,
):
    centered = x.double() - x_zero
    if weight.dim() == 3:
        channels, weight = weight.shape[2], weight.permute(2, 0, 1)[:, None]
    else:
        channels, depth = weight.shape[0], kernel[0] * kernel[1] * (x.shape[1] // groups)
        weight = weight[:, :depth].reshape(channels, *kernel, -1).permute(0, 3, 1, 2)
    total = F.conv2d(centered, weight.double(), None, stride, padding, dilation, groups)
    return q8ta_end(total, x_scale, scales, bias, scale, zero, activation, channels, (1, -1, 1, 1))


def q8ta_transposed(
    x,
    x_scale,
    x_zero,
    weight,
    sums,
    scales,
    scale,
    zero,
    bias,
    kernel,
    stride,
    padding,
    extra,
    dilation,
    groups,
    activation,
):
    assert groups == 1
    channels = weight.shape[0]
    unpacked = weight.reshape(channels, *kernel, x.shape[1]).permute(3, 0, 1, 2)
    total = F.conv_transpose2d(
        x.double() - x_zero, unpacked.double(), None, stride, padding, extra, groups, dilation
    )
    return q8ta_end(total, x_scale, scales, bias, scale, zero, activation, channels, (1, -1, 1, 1))


def q8ta_add(a, b, a_scale, a_zero, b_scale, b_zero, scale, zero, alpha):
    return quantize(
        real(a, a_scale, a_zero) + alpha * real(b, b_scale, b_zero), inverse_of(scale), zero
    )


def q8ta_shuffle(x, x_scale, x_zero, inverse, zero, factor):
    return F.pixel_shuffle(
        quantize(real(x, x_scale, x_zero), inverse_of(1 / inverse), zero), factor
    )


def choose_affine(x, mapping, block, target, low, high, *rest):
    assert mapping == "ASYMMETRIC" and block[-1] == x.shape[-1]
    least, most = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale = torch.clamp(
        (most - least) / (high - low), min=torch.finfo(torch.float32).smallest_normal
    )
    return scale, torch.clamp(low - torch.round(least / scale), low, high).to(torch.int8)


def dequantize_affine(x, block, scale, zero, *rest):
    grid = tuple(a // b for a, b in zip(x.shape, block))
    spread = lambda t: t.reshape(grid).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)  # noqa: E731
    return (x.float() - spread(zero).float()) * spread(scale)


def embedding_q4gsw(weight, scales, group, indices, low_first):
    return (unpack(weight, low_first).float() * scales.repeat_interleave(group, 1))[indices.long()]


def layer_norm(x, shape, weight, bias, eps):
    return torch.ops.aten.native_layer_norm.default(x, shape, weight, bias, eps)


REFERENCES: dict[str, Callable[..., Any]] = {
    "et_vk.linear_q4gsw.default": linear_q4gsw,
    "et_vk.linear_dq8ca_q4gsw.default": linear_dq8ca,
    "et_vk.linear_qcs4w.default": lambda x, w, s: (
        x.double() @ (unpack(w, False).double() * s.double()[:, None]).T
    ).float(),
    "aten._weight_int8pack_mm.default": lambda x, w, s: (
        x.double() @ (w.double() * s.double()[:, None]).T
    ).float(),
    "et_vk.q8ta_linear.default": q8ta_linear,
    "et_vk.q8ta_conv2d.default": q8ta_conv2d,
    "et_vk.q8ta_conv2d_transposed.default": q8ta_transposed,
    "et_vk.q8ta_add.default": q8ta_add,
    "et_vk.q8ta_pixel_shuffle.default": q8ta_shuffle,
    "et_vk.embedding_q4gsw.default": embedding_q4gsw,
    "torchao.choose_qparams_affine.default": choose_affine,
    "torchao.dequantize_affine.default": dequantize_affine,
    "quantized_decomposed.quantize_per_tensor.default": lambda x, s, z, a, b, d: quantize(
        x, inverse_of(s), z, a, b
    ),
    "quantized_decomposed.dequantize_per_tensor.default": lambda q, s, z, *rest: real(q, s, z),
    "quantized_decomposed.dequantize_per_channel.default": lambda q, s, z, axis, *rest: (
        torch.ops.quantized_decomposed.dequantize_per_channel(q, s, z, axis, -128, 127, torch.int8)
    ),
    "aten._to_copy.default": lambda x, dtype, *rest: x.to(getattr(torch, dtype.name)),
    "aten.relu.default": torch.relu,
    "aten.add.Tensor": lambda a, b, alpha: a + alpha * b,
    "aten.linear.default": lambda x, w, b: (x.double() @ w.double().T + b.double()).float(),
    "aten.mean.dim": lambda x, dims, keep, dtype: x.mean(dims, keep),
    "aten.native_layer_norm.default": layer_norm,
}


def run_graph(graph: Graph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a graph whose every operator has a reference."""
    env: dict[Value, Any] = dict(zip(graph.inputs, inputs))
    for value, constant in graph.constants.items():
        env[value] = torch.from_numpy(np.array(constant.array(value.type)))

    def read(arg: Any) -> Any:
        if isinstance(arg, Value):
            return env[arg]
        return tuple(read(item) for item in arg) if isinstance(arg, tuple) else arg

    for node in graph.nodes:
        made = REFERENCES[node.op](*(read(arg) for arg in node.args))
        made = made if isinstance(made, tuple) else (made,)
        env.update(zip(node.results, made))
    return [env[output] for output in graph.outputs]
