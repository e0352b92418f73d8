"""Linear layers with quantized weights, against float64 results with dequantized weights; int8
results bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from purevk.dtypes import DType  # noqa: E402
from purevk.errors import GraphError  # noqa: E402
from purevk.ir import TensorType  # noqa: E402
from purevk.ir.dims import Dim  # noqa: E402
from purevk.ir.symbols import Symbol  # noqa: E402
from purevk.ops.quantized import kernels as quantized_kernels  # noqa: E402
from purevk.ops.quantized import matmul as quantized_matmul  # noqa: E402
from purevk.ops.quantized.choice import choose, is_dequantized  # noqa: E402
from purevk.ops.quantized.kernels import QuantizedMatmul, integer_tile  # noqa: E402
from purevk.program import Program  # noqa: E402
from purevk.tuning import DEFAULT, SOFTWARE, DeviceTraits  # noqa: E402
from tests.ops.harness import Recorder, context, dispatches, tensor  # noqa: E402
from tests.ops.quantized.harness import (  # noqa: E402
    kernels_of,
    pack_high_first,
    pack_low_first,
    pad_last,
    quantize,
    run,
    run_with_templates,
)

pytestmark = pytest.mark.device

# float32 sums of K terms in another order: K roundings of the largest partial sum.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
HALF = {"rtol": 2e-3, "atol": 4e-3}


@pytest.fixture(params=["cpu", "gpu", "plain"], autouse=True)
def device(request):
    with kernels_of(request.param):
        yield request.param


def quantized_weight(n: int, k: int, bits: int = 8) -> torch.Tensor:
    top = 2 ** (bits - 1)
    return tensor(n, k, dtype=torch.int8, low=-top, high=top - 1, seed=n + k)


def close(have: torch.Tensor, want: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert have.dtype is dtype
    torch.testing.assert_close(have.double(), want, **(HALF if dtype is torch.float16 else CLOSE))


def grouped(values: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """The weight in float64; scales [N, groups]."""
    return values.double() * scales.double().repeat_interleave(group, 1)[:, : values.shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows, n, k", [(1, 37, 64), (7, 36, 132), (13, 5, 33), (130, 67, 96)])
def test_int8_weight(rows, n, k, dtype):
    x, w, s = (
        tensor(rows, k).to(dtype),
        quantized_weight(n, k),
        tensor(n, low=0.001, high=0.02).to(dtype),
    )
    want = x.double() @ (w.double() * s.double()[:, None]).T
    close(run("aten._weight_int8pack_mm.default", (x, w, s), constants=(1, 2)), want, dtype)


@pytest.mark.parametrize("rows, n, k", [(1, 37, 64), (7, 36, 132), (5, 11, 31), (70, 67, 96)])
def test_int4_weight_by_channel(rows, n, k):
    x, w, s = tensor(rows, k), quantized_weight(n, k, 4), tensor(n, low=0.01, high=0.2)
    want = x.double() @ (w.double() * s.double()[:, None]).T
    close(run("et_vk.linear_qcs4w.default", (x, pack_high_first(w), s), constants=(1, 2)), want)


GROUPS = [
    (1, 36, 64, 32),
    (3, 24, 256, 32),
    (7, 20, 128, 128),
    (2, 5, 96, 12),
    (9, 8, 60, 10),
    (4, 6, 40, 8),
    (65, 68, 64, 16),
    (1, 9, 63, 7),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows, n, k, group", GROUPS)
def test_int4_weight_by_group(rows, n, k, group, dtype):
    x, w = tensor(rows, k).to(dtype), quantized_weight(n, k, 4)
    s = tensor(n, k // group, low=0.01, high=0.2).to(dtype)
    for bias in (None, tensor(n).to(dtype)):
        want = x.double() @ grouped(w, s, group).T + (0 if bias is None else bias.double())
        packed = pad_last(s.T, 4).contiguous()
        args = (x, pack_low_first(w), packed, group, None if bias is None else pad_last(bias, 4))
        close(run("et_vk.linear_q4gsw.default", args, constants=(1, 2, 4)), want, dtype)


@pytest.mark.parametrize(
    "rows, n, k, group, bits, half",
    [
        (1, 36, 64, 32, 4, False),
        (1, 12, 512, 16, 8, True),
        (3, 5, 96, 12, 8, False),
        (9, 8, 64, 64, 4, True),
        (70, 68, 96, 32, 4, False),
    ],
)
def test_minimums_of_groups(rows, n, k, group, bits, half):
    dtype = torch.float16 if half else torch.float32
    x, w = tensor(rows, k).to(dtype), quantized_weight(n, k, bits)
    scales, minimums = (
        tensor(n, k // group, low=low, high=0.05, seed=seed).to(dtype)
        for low, seed in ((0.001, 1), (-0.5, 2))
    )
    stored = w.double() + 2 ** (bits - 1)
    want = x.double() @ (grouped(stored, scales, group) + grouped(w * 0 + 1, minimums, group)).T
    packed = pack_low_first(w) if bits == 4 else w
    args = (x, packed, scales, group, None, bits, minimums)
    close(run("purevk.quantized_linear", args, constants=(1, 2, 6)) / bits, want / bits, dtype)


@pytest.mark.parametrize("group", [-32, -1, 0, 16])
def test_groups_that_do_not_cover_a_row_are_refused(group):
    x, w, s = tensor(3, 64), quantized_weight(16, 64, 4), tensor(2, 16)
    with pytest.raises(GraphError, match="2 groups"):
        run("et_vk.linear_q4gsw.default", (x, pack_low_first(w), s, group, None))
    scale, zero = torch.ones(3), torch.zeros(3, dtype=torch.int8)
    with pytest.raises(GraphError, match="2 groups"):
        run(
            "et_vk.linear_dq8ca_q4gsw.default",
            (x, scale, zero, pack_low_first(w), s, s, group, None),
        )


def test_parameters_for_too_few_rows_are_refused():
    x, w, s = tensor(3, 64), quantized_weight(16, 64, 4), tensor(2, 16)
    args = (x, pack_low_first(w), s, 32, tensor(12))
    with pytest.raises(GraphError, match="12 scales, sums or biases for 16 rows"):
        run("et_vk.linear_q4gsw.default", args)


def test_parameters_of_int8_layers_for_too_few_rows_are_refused():
    x, w, s = tensor(3, 64), quantized_weight(16, 64, 8), tensor(12)
    given, sums = x.to(torch.int8), w.sum(1).int()
    for name, args in (
        ("aten._weight_int8pack_mm.default", (x, w, s)),
        ("et_vk.linear_qcs4w.default", (x, pack_high_first(w.clamp(-8, 7)), s)),
        ("et_vk.linear_q8ta_q8csw.default", (x, 0.1, 0, w, sums, s, None)),
        ("et_vk.q8ta_linear.default", (given, 0.1, 0, w, sums, s, 0.1, 0, None, "none")),
        ("et_vk.q8ta_linear.default", (given, 0.1, 0, w, sums[:12], tensor(16), 0.1, 0, None)),
        ("et_vk.q8ta_linear.default", (given, 0.1, 0, w, sums, tensor(16), 0.1, 0, s)),
        ("quantized_decomposed.mixed_linear.default", (x, w, s, None, None)),
    ):
        with pytest.raises(GraphError, match="12 scales, sums or biases for 16 rows"):
            run(name, args)


def test_more_dims_and_weights_of_a_call():
    x, w, s = tensor(2, 3, 64), quantized_weight(12, 64, 4), tensor(12, 2, low=0.01, high=0.2)
    want = x.double() @ grouped(w, s, 32).T
    close(
        run("et_vk.linear_q4gsw.default", (x, pack_low_first(w), s.T.contiguous(), 32, None)), want
    )
    close(
        run("et_vk.linear_q4gsw.default", (x[0, 0], pack_low_first(w), s.T.contiguous(), 32, None)),
        want[0, 0],
    )


@pytest.mark.parametrize("rows, n, k, group", GROUPS)
def test_dynamic_activation_int4_weight(rows, n, k, group):
    x, w, s = tensor(rows, k), quantized_weight(n, k, 4), tensor(n, k // group, low=0.01, high=0.2)
    scale, zero = (
        tensor(rows, low=0.01, high=0.05),
        tensor(rows, dtype=torch.int8, low=-20, high=20),
    )
    sums = torch.stack([part.sum(1) for part in w.int().split(group, 1)]).int()
    bias = tensor(n)
    values = torch.clamp(
        torch.round(x * (1.0 / scale)[:, None]) + zero[:, None], -128, 127
    ).double()
    want = (
        scale.double()[:, None] * ((values - zero.double()[:, None]) @ grouped(w, s, group).T)
        + bias.double()
    )
    args = (
        x,
        scale,
        zero,
        pack_low_first(w),
        pad_last(sums, 8),
        pad_last(s.T, 4).contiguous(),
        group,
        pad_last(bias, 4),
    )
    close(run("et_vk.linear_dq8ca_q4gsw.default", args, constants=(3, 4, 5, 7)), want)


SHAPES = [(1, 37, 64), (7, 36, 132), (3, 5, 31), (70, 67, 96), (9, 64, 1024)]


def q8ta_parts(rows: int, n: int, k: int):
    x, w = tensor(rows, k, dtype=torch.int8, low=-128, high=127), quantized_weight(n, k)
    s, bias = tensor(n, low=0.001, high=0.02), tensor(n)
    packed = [pad_last(w.int().sum(1).int(), 4), pad_last(s, 4)]
    return x, w, s, bias, packed


def q8ta_reference(x, w, s, bias, x_scale: float, x_zero: int) -> np.ndarray:
    """float32 numbers, each step rounded."""
    total = (x.numpy().astype(np.int64) - x_zero) @ w.numpy().astype(np.int64).T
    y = (total.astype(np.float32) * np.float32(x_scale)) * s.numpy()
    return y if bias is None else y + bias.numpy()


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("rows, n, k", SHAPES)
def test_static_int8(rows, n, k, activation):
    x, w, s, bias, (sums, scales) = q8ta_parts(rows, n, k)
    for each in (None, bias):
        numbers = q8ta_reference(x, w, s, each, 0.031, -7)
        out = float(np.abs(numbers).max() / 100), 5
        if activation == "relu":
            numbers = np.maximum(numbers, 0)
        args = (
            x,
            0.031,
            -7,
            w,
            sums,
            scales,
            *out,
            None if each is None else pad_last(each, 4),
            activation,
        )
        name = "et_vk.q8ta_linear_gemv.default" if rows == 1 else "et_vk.q8ta_linear.default"
        have = run(name, args, constants=(3, 4, 5, 8))
        np.testing.assert_array_equal(have.numpy(), quantize(numbers, *out))


@pytest.mark.parametrize("rows, n, k", SHAPES)
def test_static_int8_to_float(rows, n, k):
    values, w, s, bias, (sums, scales) = q8ta_parts(rows, n, k)
    x = tensor(rows, k)
    for given in (values, x):
        known = values if given is values else torch.from_numpy(quantize(x.numpy(), 0.031, -7))
        want = torch.from_numpy(q8ta_reference(known, w, s, bias, 0.031, -7))
        args = (given, 0.031, -7, w, sums, scales, pad_last(bias, 4))
        have = run(
            "et_vk.linear_q8ta_q8csw.default",
            args,
            [TensorType(DType.float32, (rows, n))],
            constants=(3, 4, 5, 6),
        )
        torch.testing.assert_close(have, want, rtol=0, atol=0)


@pytest.mark.parametrize("device", ["amd"], indirect=True)
def test_chunks_that_are_not_unrolled(device):
    assert integer_tile(context().traits, 64, 64)["UNROLL_CHUNKS"] == 0
    test_static_int8(70, 67, 96, "relu")
    test_dynamic_activation_int4_weight(65, 68, 64, 16)


def test_mixed_linear():
    x, w = tensor(5, 48), quantized_weight(20, 48)
    by_row, by_group = tensor(20, low=0.01, high=0.1), tensor(20, 3, low=0.01, high=0.1)
    name = "quantized_decomposed.mixed_linear.default"
    close(
        run(name, (x, w, by_row, None), constants=(1, 2)),
        x.double() @ (w.double() * by_row.double()[:, None]).T,
    )
    close(
        run(name, (x, w, by_group, None), constants=(1, 2)), x.double() @ grouped(w, by_group, 16).T
    )
    of_inputs = tensor(48, low=0.01, high=0.1)
    want = x.double() @ (w.double().T * of_inputs.double()[:, None])
    close(
        run(
            "quantized_decomposed.mixed_mm.default",
            (x, w.T.contiguous(), of_inputs, None),
            constants=(1, 2),
        ),
        want,
    )


DEQUANTIZED = ["quantized/qdequantize.comp", "matmul/matmul.comp"]


@pytest.mark.parametrize("rows, float_template, integer_template", [
    (3, "quantized/qmatvec.comp", "quantized/qmatvec.comp"),
    (70, "quantized/qmatmul.comp", "quantized/qmatmul_int.comp"),
])  # fmt: skip
def test_templates(rows, float_template, integer_template, device):
    """Few rows read the weight once, many go by tiles, where the device is a GPU."""
    if device == "cpu" and not context().traits.profile.has_fast_shared_memory:
        float_template = integer_template = "quantized/qmatvec.comp"
    if device != "plain" and context().traits.has("cooperative_matrix"):
        float_template, integer_template = (
            "quantized/qmatmul_coopmat.comp",
            "quantized/qmatvec.comp" if rows <= 4 else "quantized/qmatmul_coopmat.comp",
        )
    x, w, s = tensor(rows, 64), quantized_weight(12, 64), tensor(12)
    _, templates = run_with_templates(
        "aten._weight_int8pack_mm.default", (x, w, s), constants=(1, 2)
    )
    is_software = not context().traits.profile.has_fast_shared_memory and device == "cpu"
    assert templates == (DEQUANTIZED if is_software and rows > 16 else [float_template])
    values, w, s, bias, (sums, scales) = q8ta_parts(rows, 12, 64)
    args = (values, 0.03, 1, w, sums, scales, 0.5, 0, bias, "none")
    _, templates = run_with_templates("et_vk.q8ta_linear.default", args, constants=(3, 4, 5, 8))
    assert templates == [integer_template]


@pytest.mark.purevk("int8", "storage_8bit")
def test_epilogue(device):
    """A residual and a relu after the linear layer, in its dispatch. Software devices dequantize the
    weight of many rows before."""
    for rows, n in ((5, 36), (5, 37), (40, 36)):
        x, w, s, other = (
            tensor(rows, 64),
            quantized_weight(n, 64, 4),
            tensor(n, 2, low=0.01, high=0.2),
            tensor(rows, n, seed=3),
        )
        recorder = Recorder()
        given = [recorder.input(x), recorder.input(other)]
        parts = [
            recorder.constant(each) for each in (pack_low_first(w), pad_last(s.T, 4).contiguous())
        ]
        linear = recorder.importer.emit(
            "et_vk.linear_q4gsw.default", (given[0], *parts, 32, None), [], [], "test"
        )
        added = recorder.importer.emit("aten.add.Tensor", (*linear, given[1]), [], [], "test")
        final = recorder.importer.emit("aten.relu.default", added, [], [], "test")
        graph = recorder.importer.finish(final)
        with Program("test", {"forward": lambda sizes: graph}, context()) as program:
            have, templates = program.forward(x, other), dispatches(program)
        assert len([name for name in templates if "qdequantize" not in name]) == 1, templates
        close(have, torch.relu(x.double() @ grouped(w, s, 32).T + other.double()))


@pytest.mark.purevk("int8", "storage_8bit")
@pytest.mark.parametrize("shape", [(36,), (1,), (5, 36)], ids=str)
def test_biases_beside_weights_that_stay_quantized(shape):
    """torch broadcasts them."""
    x, w, s, bias = tensor(5, 64), quantized_weight(36, 64), tensor(36, low=0.001), tensor(*shape)
    recorder = Recorder()
    given = [recorder.input(x), recorder.input(bias)]
    parts = [recorder.constant(each) for each in (w, s, torch.zeros(36, dtype=torch.int64))]
    name = "quantized_decomposed.dequantize_per_channel.default"
    (weight,) = recorder.importer.emit(
        name, (*parts, 0, -128, 127, DType.int8, DType.float32), [], [], "test"
    )
    args = (given[0], weight, given[1])
    graph = recorder.importer.finish(
        recorder.importer.emit("aten.linear.default", args, [], [], "test")
    )
    with Program("test", {"forward": lambda sizes: graph}, context()) as program:
        have = program.forward(x, bias)
    want = x.double() @ (w.double() * s.double()[:, None]).T + bias.double()
    torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-3)  # sums of up to 1e4


@pytest.mark.purevk("int8", "storage_8bit")
def test_rows_that_vary(device):
    """One program for a prompt of many tokens and for single tokens."""
    w, s = quantized_weight(36, 64, 4), tensor(36, 2, low=0.01, high=0.2)
    sums = torch.stack([part.sum(1) for part in w.int().split(32, 1)]).int()

    def source(sizes):
        recorder = Recorder(sizes)
        x = recorder.input(torch.zeros(1, 48, 64), dynamic=True)
        parts = [
            recorder.constant(each)
            for each in (pack_low_first(w), pad_last(sums, 8), s.T.contiguous())
        ]
        chosen = recorder.importer.emit(
            "torchao.choose_qparams_affine.default",
            (x, "ASYMMETRIC", (1, 1, 64), DType.int8, -128, 127, None, DType.float32, DType.int8),
            [],
            [],
            "test",
        )
        linear = recorder.importer.emit(
            "et_vk.linear_dq8ca_q4gsw.default", (x, *chosen, *parts, 32, None), [], [], "test"
        )
        return recorder.importer.finish(linear)

    with Program("test", {"forward": source}, context()) as program:
        for rows in (48, 1, 17, 1, 9, 5):
            x = tensor(1, rows, 64, seed=rows)
            low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
            scale = (high - low) / 255
            zero = -128 - torch.round(low / scale)
            values = torch.clamp(
                torch.round(x * (1 / scale)[..., None]) + zero[..., None], -128, 127
            )
            numbers = (values - zero[..., None]).double() * scale[..., None].double()
            close(program.forward(x), numbers @ grouped(w, s, 32).T)


def test_weight_larger_than_a_binding():
    """200 rows of 32 bytes in parts of 64."""
    x, w, s, bias = (
        tensor(1, 64),
        quantized_weight(200, 64, 4),
        tensor(200, 2, low=0.01, high=0.2),
        tensor(200),
    )
    with kernels_of("small"):
        args = (x, pack_low_first(w), s.T.contiguous(), 32, bias)
        have, templates = run_with_templates(
            "et_vk.linear_q4gsw.default", args, constants=(1, 2, 4)
        )
    assert templates.count("quantized/qmatvec.comp") == 4, templates
    close(have, x.double() @ grouped(w, s, 32).T + bias.double())


@pytest.mark.parametrize("n, k, group", [(36, 64, 32), (24, 256, 8), (37, 64, 0)])
def test_weight_in_halves(monkeypatch, device, n, k, group):
    """Many rows: the weight becomes halves, for a matmul of halves."""
    monkeypatch.setattr(quantized_matmul, "is_dequantized", lambda traits, matmul: matmul.halves)
    x, bias, w = tensor(70, k).half(), tensor(n).half(), quantized_weight(n, k, 4)
    if group:
        s = tensor(n, k // group, low=0.01, high=0.2).half()
        name, constants = "et_vk.linear_q4gsw.default", (1, 2, 4)
        scales = pad_last(s.T, 4).contiguous()
        args = (x, pack_low_first(w), scales, group, pad_last(bias, 4))
        weight = grouped(w, s, group)
    else:
        w, s = quantized_weight(n, k), tensor(n, low=0.001, high=0.02).half()
        name, args, constants = "aten._weight_int8pack_mm.default", (x, w, s), (1, 2)
        weight, bias = w.double() * s.double()[:, None], torch.zeros(n)
    have, templates = run_with_templates(name, args, constants=constants)
    assert templates[0] == "quantized/qdequantize.comp" and len(templates) == 2
    close(have, x.double() @ weight.half().double().T + bias.double(), torch.float16)


@pytest.mark.parametrize("bits", [4, 8])
def test_weight_with_minimums_in_halves(monkeypatch, device, bits):
    monkeypatch.setattr(quantized_matmul, "is_dequantized", lambda traits, matmul: matmul.halves)
    x, w = tensor(70, 64).half(), quantized_weight(36, 64, bits)
    scales, minimums = (tensor(36, 2, low=0.01, high=0.2, seed=seed).half() for seed in (1, 2))
    weight = grouped(w.double() + 2 ** (bits - 1), scales, 32) + grouped(w * 0 + 1, minimums, 32)
    args = (x, pack_low_first(w) if bits == 4 else w, scales, 32, None, bits, minimums)
    have, templates = run_with_templates("purevk.quantized_linear", args, constants=(1, 2, 6))
    assert templates[0] == "quantized/qdequantize.comp" and len(templates) == 2
    close(have / bits, x.double() @ weight.half().double().T / bits, torch.float16)


@pytest.mark.parametrize("has_minimums", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_software_devices_dequantize_for_many_rows(bits, has_minimums):
    x, w = tensor(17, 64), quantized_weight(36, 64, bits)
    scales, minimums = (tensor(36, 2, low=0.01, high=0.2, seed=seed).half() for seed in (1, 2))
    weight = grouped(w, scales, 32)
    if has_minimums:
        weight = grouped(w.double() + 2 ** (bits - 1), scales, 32)
        weight += grouped(w * 0 + 1, minimums, 32)
    args = (x, pack_low_first(w) if bits == 4 else w, scales, 32, None, bits)
    args, constants = ((*args, minimums), (1, 2, 6)) if has_minimums else (args, (1, 2))
    have, templates = run_with_templates("purevk.quantized_linear", args, constants=constants)
    if not context().traits.profile.has_fast_shared_memory:
        assert templates == DEQUANTIZED
    close(have / bits, x.double() @ weight.T / bits)


def test_when_the_weight_becomes_halves():
    traits = replace(GPU, coopmat_shape=(16, 16, 16))
    matmul = QuantizedMatmul(512, 2048, 2048, 4, 256, 0, 32, False, True)
    assert is_dequantized(traits, matmul)
    assert is_dequantized(traits, replace(matmul, m=64, minimums=True))
    for other in (
        replace(matmul, m=32, minimums=True),
        replace(matmul, m=Dim.of(Symbol("s", 512, lower=1))),
        replace(matmul, m=64),
        replace(matmul, n=128000),
        replace(matmul, integers=True),
        replace(matmul, halves=False),
        replace(matmul, group=4),
    ):
        assert not is_dequantized(traits, other)
    assert not is_dequantized(replace(traits, coopmat_shape=None), matmul)
    software = DeviceTraits(frozenset(), profile=SOFTWARE)
    assert is_dequantized(software, replace(matmul, m=16, halves=False))
    for other in (matmul, replace(matmul, m=8, halves=False)):
        assert not is_dequantized(software, other)


def stepwise(choosing, traits, matmul):
    """What a function chooses for a GPU with matrix cores, in scalar arithmetic and with small
    workgroups."""
    gpu = replace(
        traits,
        features=traits.features | {"subgroup_shuffle", "subgroup_arithmetic"},
        profile=DEFAULT,
        cores=1,
        max_shared_memory=49152,
        coopmat_columns=(8,),
        fragment_order=lambda dtype, columns: True,
    )
    form = choosing(gpu, matmul)
    macros = {**form.macros, "COOPMAT": 0}
    if form.template == "quantized/qdot_coopmat.comp":
        return replace(form, macros=macros, subgroup_size=None)
    macros |= {"TILES": 1, "SUBS_N": 1, "SUBS_K": 1}
    grid = (form.grid[0], -(-matmul.n // 16), 1)
    return replace(form, macros=macros, grid=grid, subgroup_size=None)


@pytest.mark.parametrize("groups", [4, 5, 8])
@pytest.mark.parametrize("name", ["DotCoopmat", "MatmulCoopmat"])
def test_more_scales_than_a_row_needs(name, groups, monkeypatch, device):
    if device != "cpu":
        pytest.skip("it is the same on every device; tested with device='cpu' alone")
    choosing = partial(stepwise, getattr(quantized_kernels, name)().form)
    monkeypatch.setattr(quantized_matmul, "choose", choosing)
    x, w = tensor(3, 128).half(), quantized_weight(72, 128, 4)
    s = tensor(72, groups, low=0.01, high=0.2).half()
    s[:, 4:] = float("nan")
    args = (x, pack_low_first(w), s.T.contiguous(), 32, None)
    have, templates = run_with_templates("et_vk.linear_q4gsw.default", args, constants=(1, 2))
    kernel = "qdot_coopmat" if name == "DotCoopmat" else "qmatmul_coopmat"
    assert templates == [f"quantized/{kernel}.comp"]
    close(have, x.double() @ grouped(w, s[:, :4].contiguous(), 32).T, torch.float16)


@pytest.mark.parametrize("group", [12, 32])
def test_groups_that_no_row_needs_do_not_matter(group):
    """Neither numbers in place of their sums nor NaN in place of their scales."""
    k, n = 3 * group, 20
    x, w, s = tensor(5, k), quantized_weight(n, k, 4), tensor(n, 3, low=0.01, high=0.2)
    scales = torch.nn.functional.pad(s.T, (0, 0, 0, 2), value=float("nan"))
    name = "et_vk.linear_q4gsw.default"
    have = run(name, (x, pack_low_first(w), scales, group, None), constants=(1, 2))
    close(have, x.double() @ grouped(w, s, group).T)
    scale, zero = torch.full((5,), 0.03), torch.full((5,), -7, dtype=torch.int8)
    values = torch.clamp(torch.round(x * (1.0 / scale)[:, None]) - 7, -128, 127).double() + 7
    sums = torch.stack([part.sum(1) for part in w.int().split(group, 1)]).int()
    sums = torch.nn.functional.pad(sums, (0, 0, 0, 2), value=5)
    for other in (0.5, float("nan")):
        scales = torch.nn.functional.pad(s.T, (0, 0, 0, 2), value=other)
        args = (x, scale, zero, pack_low_first(w), sums, scales, group, None)
        have = run("et_vk.linear_dq8ca_q4gsw.default", args, constants=(3, 4, 5))
        close(have, scale[0].double() * (values @ grouped(w, s, group).T))


@pytest.mark.slow
def test_coopmat(monkeypatch, device):
    """The kernel on matrix cores as lowering sets it up, in scalar arithmetic and with small
    workgroups."""
    if device != "cpu":
        pytest.skip("it is the same on every device; tested with device='cpu' alone")

    monkeypatch.setattr(quantized_matmul, "choose", partial(stepwise, choose))
    for rows, dtype in ((7, torch.float16), (3, torch.float32)):
        x, w, s = (
            tensor(rows, 128).to(dtype),
            quantized_weight(70, 128, 4),
            tensor(70, 4, low=0.01, high=0.2).to(dtype),
        )
        args = (x, pack_low_first(w), pad_last(s.T, 4).contiguous(), 32, None)
        have, templates = run_with_templates("et_vk.linear_q4gsw.default", args, constants=(1, 2))
        assert templates == ["quantized/qmatmul_coopmat.comp"]
        close(have, x.double() @ grouped(w, s, 32).T, dtype)
    x, w, s, bias, (sums, scales) = q8ta_parts(5, 21, 160)
    numbers = q8ta_reference(x, w, s, bias, 0.031, -7)
    args = (x, 0.031, -7, w, sums, scales, 0.5, 5, pad_last(bias, 4), "none")
    have, templates = run_with_templates("et_vk.q8ta_linear.default", args, constants=(3, 4, 5, 8))
    assert templates == ["quantized/qmatmul_coopmat.comp"]
    np.testing.assert_array_equal(have.numpy(), quantize(numbers, 0.5, 5))


GPU = DeviceTraits(
    frozenset({"subgroup_arithmetic", "subgroup_shuffle", "subgroup_size_control"}),
    cores=132,
    max_shared_memory=49152,
    max_invocations=1024,
    coopmat_columns=(8,),
    fragment_order=lambda dtype, columns: True,
)


def test_forms():
    """Every form keeps the conditions of its template and the limits of the device. The kernel on
    matrix cores needs a known order of fragments."""
    count = dots = fragment_dots = 0
    for m, n, bits, group, integers, halves, words in itertools.product(
        (1, 2, 3, 8, 24, 300),
        (40, 4096, 16384),
        (4, 8),
        (0, 16, 32, 64, 96, 128, 40),
        (False, True),
        (False, True),
        (512, 510, 511),
    ):
        for traits in (
            GPU,
            replace(GPU, fragment_order=lambda dtype, columns: False),
            replace(GPU, max_shared_memory=16384, max_invocations=128),
        ):
            k = words * 32 // bits
            groups = -(-k // group) if group else 1
            matmul = QuantizedMatmul(
                m, n, k, bits, words, 0, group, integers, halves, groups=groups
            )
            form = choose(traits, matmul)
            own = form.macros
            if form.template == "quantized/qmatvec.comp":
                values = own["WORDS"] * 32 // bits
                assert own["ROWS"] >= min(m, 8) and (
                    own["ANY_GROUP"] or (words % own["WORDS"] == 0 and group % values == 0)
                )
                grid = (-(-n // (own["COLS"] * own["TEAMS"])), -(-m // own["ROWS"]), 1)
                assert own["LX"] * own["TEAMS"] <= traits.max_invocations and form.grid == grid
                assert (
                    not own["SHARE"]
                    or 16 * own["ROWS"] * own["LX"] * (values // 4 + 1) <= traits.max_shared_memory
                )
            elif form.template == "quantized/qdot.comp":
                dots += 1
                values = own["WORDS"] * 32 // bits
                assert m == 1 and words % own["WORDS"] == 0 and group % values == 0
                assert own["LX"] <= traits.max_invocations and own["LX"] % own["SG"] == 0
                assert own["LX"] * values <= k and form.grid == (-(-n // 4), 1, 1)
            elif form.template == "quantized/qdot_coopmat.comp":
                fragment_dots += 1
                assert m <= own["ROWS"] and halves and not integers and bits == 4
                assert m > 1 or n >= 64 * traits.processors
                assert words % 4 == 0 and group % 32 == 0 and traits.fragment_order(None, 8)
                assert own["SCALES4"] == (group == 32 and groups % 4 == 0)
                sums = 132 if own["ROWS"] <= 4 else 64
                shared = own["ROWS"] * own["SUBS"] * (256 * own["SEGMENTS"] + sums)
                assert shared <= traits.max_shared_memory
                assert 32 * own["SUBS"] <= traits.max_invocations
                assert form.grid == (-(-n // 16), 1, 1)
            elif form.template == "quantized/qmatmul_coopmat.comp":
                count += 1
                subs, segment = own["SUBS_N"] * own["SUBS_K"], 512 // bits
                assert (
                    own["SPLIT"] == (not halves and not integers)
                    and words % 4 == 0
                    and group * bits % 128 == 0
                )
                assert (
                    own["SCALES"] == (-(-segment // group) if group else 1)
                    and segment % own["SCALES"] == 0
                )
                assert own["SCALES"] == 1 or (
                    segment == own["SCALES"] * group
                    and own["SCALES4"] == (own["SCALES"] == 4 and groups % 4 == 0)
                )
                fragments = max(own["ROWS"] * (1 + own["SPLIT"]) // 8, 1)
                shared = (
                    own["SUBS_K"] * (own["BLOCKS"] * fragments * 16384 // bits + 8 * own["ROWS"])
                    + 512 * subs
                )
                assert shared <= traits.max_shared_memory
                assert (
                    traits.fragment_order(DType.float16, 8) and 32 * subs <= traits.max_invocations
                )
                assert form.grid == (
                    -(-m // own["ROWS"]),
                    -(-n // (16 * own["TILES"] * own["SUBS_N"])),
                    1,
                )
            else:
                assert m > 8
    assert count > 20 and dots > 20 and fragment_dots > 5
