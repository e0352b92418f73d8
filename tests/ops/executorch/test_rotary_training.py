"""Rotary embeddings, anchor points, training operators and operators of earlier releases, against
executorch's functions."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch.backends.vulkan.custom_ops_lib")

from purevk.dtypes import DType  # noqa: E402
from purevk.ir import TensorType  # noqa: E402
from purevk.program import Program  # noqa: E402
from tests.ops.harness import Recorder, context, host_nodes, tensor  # noqa: E402
from tests.ops.quantized.harness import pack_low_first, run  # noqa: E402

pytestmark = pytest.mark.device

et_vk = torch.ops.et_vk
ROUNDING = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width, rotary", [(32, 32), (32, 24), (16, 4), (20, 10)])
def test_rotary_halves(width, rotary, dtype):
    tolerance = ROUNDING if dtype is torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    for batch, rows, start in ((1, 5, 0), (2, 3, 4), (1, 1, 8)):
        q, k = (
            tensor(batch, rows, 4, width).to(dtype),
            tensor(batch, rows, 2, width, seed=1).to(dtype),
        )
        cos, sin = tensor(9, rotary, seed=2), tensor(9, rotary, seed=3)
        want = et_vk.apply_rotary_emb_hf(q, k, cos, sin, start)
        have = run("et_vk.apply_rotary_emb_hf.default", (q, k, cos, sin, start), constants=(2, 3))
        for made, expected in zip(have, want):
            torch.testing.assert_close(made, expected, **tolerance)


def test_rotary_halves_heads_first():
    """transformers' layout (Phi): heads before rows, angles with a batch dim of their own, which
    may be 1."""
    for batch, of_angles in ((1, 1), (2, 2), (2, 1)):
        q, k = tensor(batch, 4, 5, 16), tensor(batch, 2, 5, 16, seed=1)
        cos, sin = tensor(of_angles, 5, 8, seed=2), tensor(of_angles, 5, 8, seed=3)
        have = run("et_vk.apply_rotary_emb_hf.default", (q, k, cos, sin, 0))
        for made, expected in zip(have, et_vk.apply_rotary_emb_hf(q, k, cos, sin, 0)):
            torch.testing.assert_close(made, expected, **ROUNDING)


def test_rotary_halves_at_a_position_of_the_call():
    """The position moves between calls of one recording; one beyond the table is refused."""
    cos, sin = tensor(9, 16, seed=2), tensor(9, 16, seed=3)
    recorder = Recorder()
    q, k = recorder.input(torch.zeros(1, 2, 4, 16)), recorder.input(torch.zeros(1, 2, 2, 16))
    start = recorder.importer.integer_input(0)
    tables = recorder.constant(cos), recorder.constant(sin)
    graph = recorder.importer.finish(
        recorder.importer.emit(
            "et_vk.apply_rotary_emb_hf.default", (q, k, *tables, start), [], [], "test"
        )
    )
    with Program("test", {"forward": lambda sizes: graph}, context()) as program:
        assert not host_nodes(program)
        for at in (0, 5, 7, 2):
            q, k = tensor(1, 2, 4, 16, seed=at), tensor(1, 2, 2, 16, seed=at + 1)
            for made, expected in zip(
                program.forward(q, k, at), et_vk.apply_rotary_emb_hf(q, k, cos, sin, at)
            ):
                torch.testing.assert_close(made, expected, **ROUNDING)
        with pytest.raises(Exception, match="outside its table of angles"):
            program.forward(q, k, 8)


def test_rotary_interleaved():
    for shape in ((2, 5, 12), (1, 7, 32)):
        x = tensor(*shape)
        for angles in (tensor(*shape[1:], seed=1), tensor(1, shape[1], shape[2] // 2, 2, seed=1)):
            have = run("et_vk.apply_rotary_emb_interleaved.default", (x, angles))
            torch.testing.assert_close(
                have, et_vk.apply_rotary_emb_interleaved(x, angles), **ROUNDING
            )


@pytest.mark.parametrize(
    "shape, stride, offset", [((1, 3, 5, 7), 8, 0.5), ((2, 4), 16, 0.0), ((1, 1, 1, 1), 3, 0.25)]
)
def test_anchor_points(shape, stride, offset):
    x = tensor(*shape)
    have = run("et_vk.grid_priors.default", (x, stride, offset))
    torch.testing.assert_close(have, et_vk.grid_priors(x, stride, offset).float(), rtol=0, atol=0)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_cross_entropy(index):
    for rows, classes in ((5, 37), (8, 64), (3, 1000)):
        logits, labels = (
            tensor(rows, classes, low=-9, high=9),
            tensor(rows, dtype=index, low=0, high=classes - 1),
        )
        labels[1] = -1
        want = et_vk.fused_ce(logits, labels, float(rows - 1))
        have = run("et_vk.fused_ce.default", (logits, labels, float(rows - 1)))
        for made, expected in zip(have, want):
            torch.testing.assert_close(made, expected, rtol=2e-5, atol=1e-6)


def test_adamw():
    """Three steps on tensors that live on the device."""
    first = [tensor(5, 7), tensor(5, 7, seed=1), tensor(5, 7, seed=2, low=0, high=2)]
    numbers = (1e-2, 0.9, 0.99, 1e-6, 0.1, 0.3, 0.2)
    recorder = Recorder()
    slope = recorder.input(torch.zeros(5, 7))
    types = TensorType(DType.float32, (5, 7))
    states = [recorder.importer.state(memoryview(each.numpy().tobytes()), types) for each in first]
    made = recorder.importer.emit(
        "et_vk.adamw_step.default", (*states, slope, *numbers), [], [], "test"
    )
    graph = recorder.importer.finish(made)
    with Program("test", {"forward": lambda sizes: graph}, context()) as program:
        assert not host_nodes(program)
        kept = [each.clone() for each in first]
        for step in range(3):
            gradient = tensor(5, 7, seed=10 + step)
            want = et_vk.adamw_step(*kept, gradient, *numbers)
            for have, expected in zip(program.forward(gradient), want):
                torch.testing.assert_close(have, expected, rtol=1e-5, atol=1e-6)


def test_gradient_of_a_weight():
    for d_out, x in ((tensor(7, 5), tensor(7, 12)), (tensor(2, 3, 36), tensor(2, 3, 8))):
        have = run("et_vk.linear_dW.default", (d_out, x))
        torch.testing.assert_close(have, et_vk.linear_dW(d_out, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "rows, n, k, group", [(1, 12, 64, 32), (7, 36, 128, 128), (40, 8, 96, 8), (5, 4, 40, 20)]
)
def test_gradient_of_an_input(rows, n, k, group):
    values, scales = (
        tensor(n, k, dtype=torch.int8, low=-8, high=7),
        tensor(k // group, n, low=0.01, high=0.2),
    )
    slopes = tensor(rows, n)
    packed = pack_low_first(values)
    have = run(
        "et_vk.linear_q4gsw_backward.default", (slopes, packed, scales, group), constants=(1, 2)
    )
    weight = values.double() * scales.T.double().repeat_interleave(group, 1)
    torch.testing.assert_close(have.double(), slopes.double() @ weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        have, et_vk.linear_q4gsw_backward(slopes, packed, scales, group), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("n, k, group", [(5, 64, 32), (7, 30, 10), (4, 33, 11), (3, 9, 4)])
def test_quantize_again(n, k, group):
    latent, scales = tensor(n, k), tensor(-(-k // group), n, low=0.1, high=0.5)
    scales[0, 1] = 0
    latent[0] = scales[0, 0] * (
        tensor(k, low=-20, high=20).round() / 2
    )  # often halfway between two quantized values
    have = run("et_vk.q4gsw_requant.default", (latent, scales, group))
    torch.testing.assert_close(have, et_vk.q4gsw_requant(latent, scales, group), rtol=0, atol=0)


def test_operators_of_earlier_releases():
    a, b = tensor(3, 5, 8), tensor(5, 8, seed=1) + 4
    largest = 1.7976931348623157e308
    for kind, fn in (
        ("add", torch.add),
        ("sub", torch.sub),
        ("mul", torch.mul),
        ("div", torch.div),
    ):
        have = run(f"et_vk.binary_{kind}_with_clamp.default", (a, b, 0.0, largest))
        torch.testing.assert_close(have, fn(a, b).clamp(min=0), **ROUNDING)
        have = run(f"et_vk.binary_{kind}_with_clamp.default", (a, b, -0.5, 0.5))
        torch.testing.assert_close(have, fn(a, b).clamp(-0.5, 0.5), **ROUNDING)
        have = run(f"et_vk.clamp_with_binary_{kind}.default", (a, None, 1.0, b))
        torch.testing.assert_close(have, fn(a.clamp(max=1), b), **ROUNDING)
        x, w, bias = tensor(1, 4, 6, 5), tensor(8, 4, 3, 3, seed=2), tensor(8)
        made = torch.nn.functional.conv2d(x, w, bias, 1, 1)
        other = tensor(1, 8, 6, 5, seed=4) + 4
        args = (x, w, bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, other)
        have = run(f"et_vk.conv_with_binary_{kind}.default", args, constants=(1, 2))
        torch.testing.assert_close(have, fn(made, other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "lead, n, k, group", [((7,), 16, 64, 32), ((2, 3), 32, 128, 64), ((1,), 16, 32, 32)], ids=str
)
def test_four_bits_with_zero_points(lead, n, k, group):
    x, values = tensor(*lead, k), tensor(n, k, dtype=torch.int32, low=0, high=15)
    parameters = tensor(k // group, n, 2, low=-0.1, high=0.2, seed=2)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 2)
    want = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x.view(-1, k), packed, group, parameters
    ).view(*lead, n)
    weight = (values[:, ::2] << 4 | values[:, 1::2]).to(torch.uint8)
    have = run(
        "et_vk.linear_weight_int4.default", (x, weight, group, parameters, 8), constants=(1, 3)
    )
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
