"""Convolutions of int8 images, bit for bit: integer sums from float64, then float32 steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from purevk.dtypes import DType  # noqa: E402
from purevk.errors import GraphError  # noqa: E402
from purevk.ir import TensorType  # noqa: E402
from tests.ops.harness import tensor  # noqa: E402
from tests.ops.quantized.harness import kernels_of, pad_last, quantize, run, run_with_templates  # noqa: E402

pytestmark = pytest.mark.device

X_SCALE, X_ZERO = 0.031, -7


@pytest.fixture(params=["cpu", "gpu", "plain"], autouse=True)
def device(request):
    with kernels_of(request.param):
        yield request.param


def int8(*shape: int, low: int = -128, high: int = 127, seed: int = 0) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int8, low=low, high=high, seed=seed)


def numbers_of(total: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> np.ndarray:
    """float32 numbers of integer sums [B, OC, H, W]."""
    shape = (1, -1, 1, 1)
    y = (
        total.numpy().astype(np.int64).astype(np.float32) * np.float32(X_SCALE)
    ) * scales.numpy().reshape(shape)
    return y if bias is None else y + bias.numpy().reshape(shape)


def check(
    name,
    x,
    packed,
    weight,
    scales,
    bias,
    window,
    groups,
    extra=(),
    activation="none",
    transposed=False,
):
    """`weight` is torch's; `window`: kernel, stride, padding, dilation; `extra`: output padding of
    a transposed one."""
    _, stride, padding, dilation = window
    centered = x.double() - X_ZERO
    if transposed:
        total = torch.nn.functional.conv_transpose2d(
            centered, weight.double(), None, stride, padding, extra, groups, dilation
        )
        sums = weight.reshape(groups, -1, *weight.shape[1:]).sum((1, 3, 4)).reshape(-1)
    else:
        total = torch.nn.functional.conv2d(
            centered, weight.double(), None, stride, padding, dilation, groups
        )
        sums = weight.sum((1, 2, 3))
    numbers = numbers_of(total, scales, bias)
    out = float(np.abs(numbers).max() / 100), 5
    if activation == "relu":
        numbers = np.maximum(numbers, 0)
    kernel, stride, padding, dilation = (list(each) for each in window)
    spread = [kernel, stride, padding, *([list(extra)] if transposed else []), dilation]
    given = scales if not (transposed and groups > 1) else scales[: len(scales) // groups]
    args = (
        x,
        X_SCALE,
        X_ZERO,
        packed,
        pad_last(sums.int(), 4),
        pad_last(given, 4),
        *out,
        None if bias is None else pad_last(bias, 4),
        *spread,
        groups,
        activation,
    )
    have, templates = run_with_templates(name, args, constants=(3, 4, 5, 8))
    assert have.dtype is torch.int8
    np.testing.assert_array_equal(have.numpy(), quantize(numbers, *out))
    return templates


def rows(weight: torch.Tensor) -> torch.Tensor:
    """[OC, KH * KW * IC] with the channels fastest, padded to a multiple of 4."""
    return pad_last(weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1).contiguous(), 4)


GENERAL = [  # batch, channels, height, width, out, kernel, stride, padding, dilation, groups
    (1, 3, 11, 9, 8, (3, 3), (2, 2), (1, 1), (1, 1), 1), (1, 8, 7, 6, 12, (3, 3), (1, 1), (2, 2), (2, 2), 2),
    (2, 16, 5, 7, 20, (1, 3), (1, 1), (0, 1), (1, 1), 1), (1, 5, 6, 5, 7, (2, 2), (1, 2), (0, 0), (1, 1), 1),
    (1, 32, 13, 11, 36, (3, 3), (1, 1), (1, 1), (1, 1), 1), (1, 6, 5, 5, 9, (3, 3), (1, 1), (1, 1), (1, 1), 3),
]  # fmt: skip


@pytest.mark.parametrize("case", GENERAL, ids=lambda case: "-".join(map(str, case[:5])))
def test_general(case):
    batch, channels, height, width, out, kernel, stride, padding, dilation, groups = case
    x, w = (
        int8(batch, channels, height, width),
        int8(out, channels // groups, *kernel, low=-127, seed=1),
    )
    scales, bias = tensor(out, low=0.001, high=0.02), tensor(out)
    window = (kernel, stride, padding, dilation)
    for activation, each in (("none", bias), ("relu", None)):
        check(
            "et_vk.q8ta_conv2d.default",
            x,
            rows(w),
            w,
            scales,
            each,
            window,
            groups,
            activation=activation,
        )


@pytest.mark.parametrize(
    "channels, out, height, width", [(16, 24, 7, 5), (4, 3, 3, 3), (37, 8, 1, 9)]
)
def test_pointwise(channels, out, height, width):
    x, w = int8(1, channels, height, width), int8(out, channels, 1, 1, seed=1)
    window = ((1, 1), (1, 1), (0, 0), (1, 1))
    check(
        "et_vk.q8ta_conv2d_pw.default",
        x,
        rows(w),
        w,
        tensor(out, low=0.001, high=0.02),
        tensor(out),
        window,
        1,
    )


@pytest.mark.parametrize("case", [
    (1, 16, 11, 9, (3, 3), (1, 1), (1, 1), (1, 1)), (2, 8, 7, 8, (5, 3), (2, 1), (2, 1), (1, 2)), (1, 12, 6, 5, (2, 2), (1, 1), (0, 0), (1, 1)),  # noqa: E501
    (1, 7, 6, 5, (3, 3), (1, 1), (1, 1), (1, 1)),
], ids=lambda case: "-".join(map(str, case[:4])))  # fmt: skip
def test_depthwise(case):
    batch, channels, height, width, kernel, stride, padding, dilation = case
    x, w = int8(batch, channels, height, width), int8(channels, 1, *kernel, seed=1)
    packed = w[:, 0].permute(1, 2, 0).contiguous()
    for name in ("et_vk.q8ta_conv2d_dw.default", "et_vk.conv2d_q8ta_q8csw_q8to_dw.default"):
        templates = check(
            name,
            x,
            packed,
            w,
            tensor(channels, low=0.001, high=0.02),
            tensor(channels),
            (kernel, stride, padding, dilation),
            channels,
            activation="none",
        )
        assert "quantized/qconv2d_dw.comp" in templates


@pytest.mark.parametrize("case", [
    (1, 8, 5, 7, 12, (4, 4), (2, 2), (1, 1), (0, 0), (1, 1), 1), (1, 4, 4, 3, 6, (3, 3), (2, 1), (0, 1), (1, 0), (1, 1), 1),  # noqa: E501
    (1, 8, 4, 4, 8, (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 2), (1, 3, 5, 4, 5, (2, 3), (1, 1), (0, 0), (0, 0), (2, 2), 1),  # noqa: E501
], ids=lambda case: "-".join(map(str, case[:5])))  # fmt: skip
def test_transposed(case):
    batch, channels, height, width, out, kernel, stride, padding, extra, dilation, groups = case
    x, w = int8(batch, channels, height, width), int8(channels, out // groups, *kernel, seed=1)
    packed = (
        w.reshape(groups, channels // groups, out // groups, *kernel)
        .permute(0, 2, 3, 4, 1)
        .reshape(out, -1)
        .contiguous()
    )
    scales = tensor(out // groups, low=0.001, high=0.02).repeat(groups)
    check(
        "et_vk.q8ta_conv2d_transposed.default",
        x,
        pad_last(packed, 4),
        w,
        scales,
        tensor(out),
        (kernel, stride, padding, dilation),
        groups,
        extra,
        transposed=True,
    )


def test_names_of_earlier_releases():
    x, w = int8(1, 8, 7, 6), int8(12, 8, 3, 3, seed=1)
    scales, bias = tensor(12, low=0.001, high=0.02), tensor(12)
    check(
        "et_vk.conv2d_q8ta_q8csw_q8to.default",
        x,
        rows(w),
        w,
        scales,
        bias,
        ((3, 3), (1, 1), (1, 1), (1, 1)),
        1,
    )
    numbers = tensor(1, 8, 7, 6)
    known = torch.from_numpy(quantize(numbers.numpy(), X_SCALE, X_ZERO))
    total = torch.nn.functional.conv2d(known.double() - X_ZERO, w.double(), None, 1, 1)
    args = (
        numbers,
        X_SCALE,
        X_ZERO,
        rows(w),
        w.sum((1, 2, 3)).float(),
        scales,
        bias,
        [3, 3],
        [1, 1],
        [1, 1],
        [1, 1],
        1,
    )
    have = run(
        "et_vk.conv2d_q8ta_q8csw.default",
        args,
        [TensorType(DType.float32, (1, 12, 7, 6))],
        constants=(3, 4, 5, 6),
    )
    np.testing.assert_array_equal(have.numpy(), numbers_of(total, scales, bias))


@pytest.mark.parametrize("sums, scales, bias", [(11, 12, 12), (12, 9, 12), (12, 12, 11)])
def test_parameters_for_too_few_channels_are_refused(sums, scales, bias):
    x, w = int8(1, 8, 7, 6), rows(int8(12, 4, 3, 3))
    parameters = torch.ones(sums, dtype=torch.int32), tensor(scales)
    window = [3, 3], [1, 1], [1, 1], [1, 1], 2
    args = (x, X_SCALE, X_ZERO, w, *parameters, 0.1, 0, tensor(bias), *window, "none")
    with pytest.raises(GraphError, match="scales, sums or biases for 12 rows"):
        run("et_vk.q8ta_conv2d.default", args)
    args = (tensor(1, 8, 7, 6), X_SCALE, X_ZERO, w, *parameters, tensor(bias), *window)
    with pytest.raises(GraphError, match="scales, sums or biases for 12 rows"):
        run("et_vk.conv2d_q8ta_q8csw.default", args)
    depthwise = int8(3, 3, 12)
    window = [3, 3], [1, 1], [1, 1], [1, 1], 12
    args = (int8(1, 12, 7, 6), X_SCALE, X_ZERO, depthwise, *parameters, 0.1, 0, tensor(bias))
    with pytest.raises(GraphError, match="scales, sums or biases for 12 rows"):
        run("et_vk.q8ta_conv2d_dw.default", (*args, *window, "none"))


def test_scales_for_less_than_a_group_are_refused():
    x, w = int8(1, 8, 4, 4), int8(12, 36)
    for scales in (5, 6):
        parameters = torch.ones(12, dtype=torch.int32), tensor(scales)
        window = [3, 3], [1, 1], [1, 1], [0, 0], [1, 1], 2
        args = (x, X_SCALE, X_ZERO, w, *parameters, 0.1, 0, tensor(12), *window, "none")
        if scales == 6:
            run("et_vk.q8ta_conv2d_transposed.default", args)
            continue
        with pytest.raises(GraphError, match="5 scales, sums or biases for 6 rows"):
            run("et_vk.q8ta_conv2d_transposed.default", args)


def real(q: torch.Tensor, scale: float, zero: int) -> np.ndarray:
    return (q.numpy().astype(np.float32) - np.float32(zero)) * np.float32(scale)


def test_elementwise():
    a, b = int8(2, 5, 7, 8), int8(2, 5, 7, 8, seed=1)
    for alpha in (1, 0.5):
        total = real(a, 0.03, 3) + np.float32(alpha) * real(b, 0.02, -9)
        for name in ("et_vk.q8ta_add.default", "et_vk.add_q8ta_q8ta_q8to.default"):
            have = run(name, (a, b, 0.03, 3, 0.02, -9, 0.05, -4, alpha))
            np.testing.assert_array_equal(have.numpy(), quantize(total, 0.05, -4))
    have = run("et_vk.q8ta_add.default", (a, b[:1, :, :1, :1], 0.03, 3, 0.02, -9, 0.05, -4, 1.0))
    np.testing.assert_array_equal(
        have.numpy(), quantize(real(a, 0.03, 3) + real(b[:1, :, :1, :1], 0.02, -9), 0.05, -4)
    )
    have = run("et_vk.q8ta_relu.default", (a, 0.03, 3, 0.02, -128))
    np.testing.assert_array_equal(
        have.numpy(), quantize(np.maximum(real(a, 0.03, 3), 0), 0.02, -128)
    )
    for x, inverse in itertools.product(
        (int8(1, 12, 5, 3), int8(2, 12, 5, 16)), (1 / 0.03, 1 / 0.05)
    ):
        have = run("et_vk.q8ta_pixel_shuffle.default", (x, 0.03, 3, inverse, -2, 2))
        want = torch.nn.functional.pixel_shuffle(
            torch.from_numpy(quantize(real(x, 0.03, 3), 1 / inverse, -2)), 2
        )
        torch.testing.assert_close(have, want, rtol=0, atol=0)


def test_decomposed_sums():
    a, b = int8(3, 8), int8(3, 8, seed=1)
    space = "quantized_decomposed"
    total = real(a, 0.03, 3) + real(b, 0.02, -9)
    args = (a, 0.03, 3, -128, 127, b, 0.02, -9, -128, 127, 0.05, -4, -128, 127)
    np.testing.assert_array_equal(
        run(f"{space}.add.default", args).numpy(), quantize(total, 0.05, -4)
    )
    np.testing.assert_array_equal(
        run(f"{space}.add_relu.default", args).numpy(), quantize(np.maximum(total, 0), 0.05, -4)
    )
    args = (a, 0.03, 3, -128, 127, torch.int8, 0.75, 0.05, -4, -128, 127, torch.int8)
    np.testing.assert_array_equal(
        run(f"{space}.add.scalar", args).numpy(),
        quantize(real(a, 0.03, 3) + np.float32(0.75), 0.05, -4),
    )
