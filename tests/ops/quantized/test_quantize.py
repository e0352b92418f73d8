"""Quantization, dequantization and the choice of their parameters, against torch's and torchao's
own functions: every bit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.ao.quantization.fx._decomposed  # noqa: E402, F811

from purevk.program import Program  # noqa: E402
from tests.ops.harness import Case, Recorder, check, context, dispatches, program_of, tensor  # noqa: E402
from tests.ops.quantized.harness import kernels_of  # noqa: E402

pytestmark = pytest.mark.device

qd = torch.ops.quantized_decomposed
RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255), torch.int16: (-(2**15), 2**15 - 1)}


def exactly(fn, *args, **kwargs) -> Case:
    return Case(fn, args, kwargs, rtol=0.0, atol=0.0)


def ties(*shape: int) -> torch.Tensor:
    """Multiples of 1 / 8, many of them halfway between two quantized values of scale 1 / 4."""
    return (tensor(*shape, low=-40, high=40) * 8).round() / 8


@pytest.mark.parametrize("dtype", RANGES, ids=str)
def test_per_tensor(dtype):
    low, high = RANGES[dtype]
    cases = []
    for scale, zero in ((0.0371, 3), (0.25, -1 if low else 7), (1e-3, 0)):
        for x in (
            tensor(5, 13),
            ties(3, 32),
            tensor(7, 8).half(),
            torch.tensor(1.75),
            tensor(2, 3, 4, 8).bfloat16(),
        ):
            cases.append(exactly(qd.quantize_per_tensor.default, x, scale, zero, low, high, dtype))
        cases.append(
            exactly(
                qd.quantize_per_tensor.default,
                torch.tensor([1e9, -1e9, torch.inf, -torch.inf]),
                scale,
                zero,
                low,
                high,
                dtype,
            )
        )
        for q in (
            tensor(5, 13, dtype=dtype, low=-120, high=120),
            tensor(4, 8, dtype=dtype, low=-120, high=120),
        ):
            cases.append(
                exactly(qd.dequantize_per_tensor.default, q, scale, zero, low, high, dtype)
            )
            cases.append(
                Case(
                    qd.dequantize_per_tensor.default,
                    (q, scale, zero, low, high, dtype),
                    {"out_dtype": torch.float16},
                )
            )
    check(cases)


def test_per_tensor_with_tensors_for_parameters():
    cases = []
    for x in (tensor(5, 13), ties(3, 32)):
        for scale in (
            torch.tensor([0.25]),
            torch.tensor(0.037),
            torch.tensor([0.037], dtype=torch.float64),
        ):
            for zero in (torch.tensor([3]), torch.tensor(-5, dtype=torch.int32)):
                cases.append(
                    exactly(qd.quantize_per_tensor.tensor, x, scale, zero, -128, 127, torch.int8)
                )
                q = tensor(5, 13, dtype=torch.int8, low=-120, high=120)
                cases.append(
                    exactly(qd.dequantize_per_tensor.tensor, q, scale, zero, -128, 127, torch.int8)
                )
                bounds = torch.tensor(-100), torch.tensor(99)
                cases.append(
                    exactly(qd.quantize_per_tensor.tensor2, x, scale, zero, *bounds, torch.int8)
                )
                cases.append(
                    exactly(qd.dequantize_per_tensor.tensor2, q, scale, zero, *bounds, torch.int8)
                )
    check(cases)


def test_conversion():
    check(
        [
            exactly(qd.convert_element_type.no_fuse, tensor(5, 8), dtype)
            for dtype in (torch.float16, torch.int32)
        ]
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_per_channel(axis):
    cases = []
    for shape in ((5, 7, 8), (8, 4, 3)):
        count = shape[axis]
        scales = tensor(count, low=0.01, high=0.3, seed=axis)
        zeros = tensor(count, dtype=torch.int32, low=-9, high=9)
        for x in (tensor(*shape), ties(*shape), tensor(*shape).half()):
            cases.append(
                exactly(
                    qd.quantize_per_channel.default, x, scales, zeros, axis, -127, 127, torch.int8
                )
            )
        cases.append(
            exactly(
                qd.fake_quant_per_channel.default, tensor(*shape), scales, zeros, axis, -127, 127
            )
        )
        q = tensor(*shape, dtype=torch.int8, low=-120, high=120)
        cases.append(
            exactly(
                qd.dequantize_per_channel.default, q, scales, zeros, axis, -127, 127, torch.int8
            )
        )
        cases.append(
            exactly(qd.dequantize_per_channel.default, q, scales, None, axis, -127, 127, torch.int8)
        )
        wide = tensor(*shape, dtype=torch.int32, low=-(2**20), high=2**20)
        cases.append(
            exactly(
                qd.dequantize_per_channel.default,
                wide,
                scales,
                None,
                axis,
                -(2**31),
                2**31 - 1,
                torch.int32,
            )
        )
    check(cases)


@pytest.mark.parametrize("double", [False, True])
def test_per_token(double):
    cases = []
    for shape in ((5, 13), (2, 3, 32)):
        scales = tensor(*shape[:-1], 1, low=0.02, high=0.3)
        zeros = tensor(*shape[:-1], 1, dtype=torch.int64 if double else torch.int32, low=-9, high=9)
        if double:
            scales = scales.double()
        for x in (tensor(*shape), ties(*shape)):
            cases.append(
                exactly(qd.quantize_per_token.default, x, scales, zeros, -128, 127, torch.int8)
            )
        q = tensor(*shape, dtype=torch.int8, low=-120, high=120)
        cases.append(
            exactly(
                qd.dequantize_per_token.default,
                q,
                scales,
                zeros,
                -128,
                127,
                torch.int8,
                torch.float32,
            )
        )
    check(cases)


@pytest.mark.parametrize("group", [4, 7, 28, 64])
def test_per_group(group):
    shape = (6, 28)
    count = 6 * max(28 // group, 1)
    scales, zeros = (
        tensor(count, low=0.02, high=0.3),
        tensor(count, dtype=torch.int32, low=-2, high=2),
    )
    if group > 28:
        scales, zeros = scales[:, None], zeros[:, None]
    x, q = tensor(*shape), tensor(*shape, dtype=torch.int8, low=-8, high=7)
    check(
        exactly(qd.quantize_per_channel_group.default, x, scales, zeros, -8, 7, torch.int8, group),
        exactly(
            qd.dequantize_per_channel_group.default,
            q,
            scales,
            zeros,
            -8,
            7,
            torch.int8,
            group,
            torch.float32,
        ),
        exactly(
            qd.dequantize_per_channel_group.default,
            q,
            scales,
            None,
            -8,
            7,
            torch.int8,
            group,
            torch.float32,
        ),
    )


INPUTS = [
    tensor(5, 64),
    tensor(3, 7, 24, low=0.5, high=9),
    tensor(3, 24, low=-9, high=-0.25),
    torch.zeros(4, 8),
    tensor(1, 37) * 1e-9,
    tensor(2, 5) * 1e20,
]


def test_parameters_of_a_tensor():
    cases = []
    for x in INPUTS:
        for target, (low, high) in list(RANGES.items())[:2]:
            for epsilon in (1e-7, 2.0**-12):
                cases.append(exactly(qd.choose_qparams.tensor, x, low, high, epsilon, target))
                cases.append(
                    exactly(qd.choose_qparams_symmetric.tensor, x, low, high, epsilon, target)
                )
    check(cases)


def test_parameters_of_tokens():
    cases = []
    for x in INPUTS:
        cases.append(exactly(qd.choose_qparams_per_token_asymmetric.default, x, torch.int8))
        cases.append(exactly(qd.choose_qparams_per_token.default, x, torch.int8))
    check(cases)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_parameters_of_long_tokens_take_one_kernel(device):
    with kernels_of(device):
        check(
            [
                exactly(qd.choose_qparams_per_token_asymmetric.default, x, torch.int8)
                for x in (tensor(9, 4096), tensor(5, 2051))
            ]
        )
        with program_of(
            lambda x: qd.choose_qparams_per_token_asymmetric.default(x, torch.int8),
            (tensor(9, 4096),),
        ) as program:
            assert dispatches(program) == ["quantized/qparams.comp"]


BLOCKS = [(1, 64), (1, 32), (1, 1), (4, 16), (4, 1), (8, 64), (2, 64)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_torchao_blocks(block):
    pytest.importorskip("torchao")
    import torchao.quantization  # noqa: F401

    ao = torch.ops.torchao
    x, q = tensor(8, 64), tensor(8, 64, dtype=torch.int8, low=-120, high=120)
    grid = (8 // block[0], 64 // block[1])
    scale, zero = (
        tensor(*grid, low=0.02, high=0.3),
        tensor(*grid, dtype=torch.int32, low=-9, high=9),
    )
    cases = [
        exactly(ao.quantize_affine.default, x, block, scale, zero, torch.int8, -128, 127),
        exactly(ao.quantize_affine.default, ties(8, 64), block, scale, zero, torch.int8),
        exactly(ao.dequantize_affine.default, q, block, scale, zero, torch.int8, -128, 127),
        exactly(ao.dequantize_affine.default, q, block, scale, zero.to(torch.int8), torch.int8),
        exactly(ao.dequantize_affine.default, q, block, scale, None, torch.int8),
    ]
    # torchao takes the extremes of the whole tensor for blocks of one element.
    for keep in (False, True) if block != (1, 1) else ():
        for mapping, bounds in (
            ("ASYMMETRIC", (-128, 127)),
            ("SYMMETRIC", (-8, 7)),
            ("SYMMETRIC_NO_CLIPPING_ERR", (-8, 7)),
            ("SYMMETRIC", (-127, 127)),
        ):
            for given in (x, torch.zeros(8, 64), x.abs()):
                cases.append(
                    exactly(
                        ao.choose_qparams_affine.default,
                        given,
                        mapping,
                        block,
                        torch.int8,
                        *bounds,
                        1e-6,
                        torch.float32,
                        torch.int8,
                        keep,
                    )
                )
    check(cases)


def test_int8_around_a_convolution():
    """`quantize_q8ta_for_conv2d` and `dequantize_q8to_from_conv2d` are the operators per tensor,
    for int8."""
    x, recorder = ties(2, 5, 6, 7), Recorder()
    quantized = recorder.importer.emit(
        "et_vk.quantize_q8ta_for_conv2d.default", (recorder.input(x), 0.25, 3), [], [], "test"
    )[0]
    back = recorder.importer.emit(
        "et_vk.dequantize_q8to_from_conv2d.default", (quantized, 0.25, 3), [], [], "test"
    )[0]
    graph = recorder.importer.finish([quantized, back])
    wanted = qd.quantize_per_tensor.default(x, 0.25, 3, -128, 127, torch.int8)
    with Program("test", {"forward": lambda sizes: graph}, context()) as program:
        made = program.forward(x)
    assert torch.equal(made[0], wanted)
    assert torch.equal(
        made[1], qd.dequantize_per_tensor.default(wanted, 0.25, 3, -128, 127, torch.int8)
    )


@pytest.mark.parametrize("shape", [(64, 1024), (4, 16, 1040), (65600,)], ids=str)
def test_sixteen_values_per_invocation(shape):
    """An invocation of a GPU computes 16 bytes if there are enough of them."""
    x, y = (tensor(*shape, dtype=torch.int8, low=-128, high=127, seed=seed) for seed in (1, 2))
    scales, zeros = (
        tensor(shape[0], low=0.01, high=0.3),
        tensor(shape[0], dtype=torch.int64, low=-9, high=9),
    )
    flags = x > 3

    def choose(x, y, flags):
        return torch.where(flags, x, y)

    def moved(x):
        number = qd.dequantize_per_tensor.default(x, 0.04, 3, -128, 127, torch.int8)
        return qd.quantize_per_tensor.default(number.relu(), 0.07, -5, -128, 127, torch.int8)

    cases = [
        exactly(torch.maximum, x, y),
        exactly(torch.bitwise_not, x),
        exactly(torch.logical_and, flags, y > 3),
        exactly(choose, x, y, flags),
        exactly(lambda x: x[..., :1] + x, x),
        exactly(torch.add, x.view(torch.uint8), y.view(torch.uint8)),
        exactly(torch.gt, x, y),
        exactly(
            qd.quantize_per_channel.default,
            tensor(*shape, low=-30, high=30),
            scales,
            zeros,
            0,
            -128,
            127,
            torch.int8,
        ),
        exactly(qd.quantize_per_tensor.default, ties(*shape), 0.25, 3, -128, 127, torch.int8),
        exactly(moved, x),
    ]
    check(cases)
