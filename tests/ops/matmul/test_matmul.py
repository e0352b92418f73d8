"""Matrix products, linear layers and convolutions, of all shapes and layouts, with epilogues."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, aten, check, dispatches, program_of, tensor

pytestmark = pytest.mark.device

HALF = 1e-2  # absolute: sums of up to 70 products of numbers below 1, rounded once to float16
SINGLE = 2e-5  # absolute: the order of the sum differs from torch's


def unit(*shape, dtype=torch.float32, seed=0):
    return tensor(*shape, dtype=dtype, seed=seed, low=-1, high=1)


def case(fn, *args, dtype=torch.float32, name="", constants=()):
    return Case(
        fn,
        args,
        constants=constants,
        name=name,
        rtol=1e-5 if dtype is torch.float32 else 4e-3,
        atol=SINGLE if dtype is torch.float32 else HALF,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_mm_shapes(dtype):
    """Prime sizes, multiples of the tiles, and one more or less than these."""
    shapes = [
        (1, 1, 1),
        (3, 5, 7),
        (13, 17, 19),
        (64, 64, 64),
        (65, 33, 63),
        (8, 32, 8),
        (1, 67, 31),
        (37, 61, 1),
        (4, 4, 128),
        (128, 16, 4),
        (31, 1, 29),
        (2, 128, 66),
    ]
    check(
        [
            case(
                aten.mm.default,
                unit(m, k, dtype=dtype),
                unit(k, n, dtype=dtype, seed=1),
                dtype=dtype,
                name=f"{m}x{k}x{n} {dtype}",
            )
            for m, k, n in shapes
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_transposed_and_strided_operands(dtype):
    """Either operand transposed, a slice, an expansion, a column of a larger matrix, or made by
    another program."""
    a, b = unit(12, 20, dtype=dtype), unit(20, 28, dtype=dtype, seed=1)
    at, bt = unit(20, 12, dtype=dtype), unit(28, 20, dtype=dtype, seed=1)
    wide = unit(16, 64, dtype=dtype, seed=2)
    forms = {
        "at": (lambda x, y: x.t() @ y, at, b),
        "bt": (lambda x, y: x @ y.t(), a, bt),
        "both": (lambda x, y: x.t() @ y.t(), at, bt),
        "slices": (lambda x: x[:12, 3:23] @ x[:, 40:60].t(), wide),
        "steps": (lambda x: x[:, ::2] @ x[:, 1::2].t(), wide),
        "expanded": (lambda x, y: x[:1].expand(12, 20) @ y, a, b),
        "made": (lambda x, y: (x * 2) @ (y + 1).relu(), a, b),
        "rows": (lambda x, y: x[3:4] @ y, a, b),
        "columns": (lambda x, y: x @ y[:, 5:6], a, b),
        "offset": (lambda x, y: x[5:] @ y[:, 1:], a, b),
        "self": (lambda x: x @ x.t(), a),
        "twice": (lambda x, y: (x @ y) @ y.t(), a, b),
    }
    # The results of "self" and "made" are larger than those of the rest.
    check(
        [
            Case(
                fn,
                args,
                name=f"{name} {dtype}",
                rtol=1e-5 if dtype is torch.float32 else 4e-3,
                atol=1e-4 if dtype is torch.float32 else 4e-2,
            )
            for name, (fn, *args) in forms.items()
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_batches(dtype):
    cases = []
    for left, right in [
        ((3, 5, 7), (3, 7, 11)),
        ((2, 3, 5, 7), (2, 3, 7, 4)),
        ((2, 1, 5, 7), (1, 3, 7, 4)),
        ((2, 3, 5, 7), (7, 4)),
        ((5, 7), (3, 7, 4)),
        ((2, 3, 5, 8), (3, 8, 4)),
        ((4, 1, 2, 3, 5), (1, 3, 1, 5, 2)),
        ((2, 3, 2, 4, 8), (2, 1, 2, 8, 4)),
        ((1, 5, 7), (1, 7, 3)),
        ((3, 1, 7), (3, 7, 1)),
        ((7,), (7,)),
        ((7,), (7, 3)),
        ((3, 7), (7,)),
        ((2, 3, 7), (7,)),
        ((7,), (2, 7, 3)),
        ((2, 64, 16), (2, 16, 64)),
        ((2, 2, 1, 16), (2, 2, 16, 24)),
    ]:
        cases.append(
            case(
                aten.matmul.default,
                unit(*left, dtype=dtype),
                unit(*right, dtype=dtype, seed=1),
                dtype=dtype,
                name=f"{left} @ {right} {dtype}",
            )
        )
    for b, m, k, n in [(3, 5, 7, 11), (1, 8, 8, 8), (6, 1, 16, 4), (2, 33, 65, 17)]:
        cases.append(
            case(
                aten.bmm.default,
                unit(b, m, k, dtype=dtype),
                unit(b, k, n, dtype=dtype, seed=1),
                dtype=dtype,
                name=f"bmm {b} {m}x{k}x{n}",
            )
        )
    x = unit(2, 10, 3, 8, dtype=dtype)
    cases.append(
        case(lambda t: t.transpose(1, 2) @ t.permute(0, 2, 3, 1), x, dtype=dtype, name="heads")
    )
    cases.append(
        case(
            lambda t, y: t.permute(2, 0, 1) @ y,
            unit(5, 7, 3, dtype=dtype),
            unit(3, 7, 4, dtype=dtype),
            dtype=dtype,
            name="permuted batch",
        )
    )
    cases.append(
        case(
            lambda t, y: t.expand(4, 5, 7) @ y,
            unit(1, 5, 7, dtype=dtype),
            unit(4, 7, 4, dtype=dtype),
            dtype=dtype,
            name="expanded batch",
        )
    )
    check(cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_linear_and_addmm(dtype):
    cases = []
    for (shape, n), bias, fixed in itertools.product(
        [((5, 7), 11), ((2, 3, 16), 32), ((8,), 4), ((1, 64), 64), ((2, 2, 3, 5), 1)],
        (True, False),
        (True, False),
    ):
        args = [unit(*shape, dtype=dtype), unit(n, shape[-1], dtype=dtype, seed=1)] + (
            [unit(n, dtype=dtype, seed=2)] if bias else []
        )
        cases.append(
            case(
                aten.linear.default,
                *args,
                dtype=dtype,
                constants=tuple(range(1, len(args))) if fixed else (),
                name=f"linear {shape} {n} {bias} {fixed}",
            )
        )
    a, b = unit(5, 7, dtype=dtype), unit(7, 12, dtype=dtype, seed=1)
    for bias in (
        unit(12, dtype=dtype),
        unit(5, 12, dtype=dtype),
        unit(5, 1, dtype=dtype),
        unit(1, 12, dtype=dtype),
        unit(dtype=dtype),
        unit(1, dtype=dtype),
    ):
        for kwargs in ({}, {"beta": 0.5, "alpha": 2}, {"beta": 2, "alpha": 1}, {"alpha": -1}):
            c = case(
                aten.addmm.default,
                bias,
                a,
                b,
                dtype=dtype,
                name=f"addmm {list(bias.shape)} {kwargs}",
            )
            c.kwargs.update(kwargs)
            cases.append(c)
    cases.append(
        case(
            lambda x, w, b: torch.addmm(b, x, w.t()),
            a,
            unit(12, 7, dtype=dtype, seed=1),
            unit(12, dtype=dtype),
            dtype=dtype,
            name="addmm t",
            constants=(1, 2),
        )
    )
    check(cases)


def test_large_sum():
    """4096 products: the rounding of a float32 sum, whatever the type of the operands."""
    a, b = unit(3, 4099), unit(4099, 5, seed=1)
    exact = (a.double() @ b.double()).float()
    ah, bh = a.half(), b.half()
    check(
        Case(aten.mm.default, (a, b), expected=exact, rtol=1e-5, atol=5e-5),
        Case(
            aten.mm.default,
            (ah, bh),
            expected=(ah.double() @ bh.double()).half(),
            rtol=1e-3,
            atol=1e-3,
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_epilogues_of_products(dtype):
    """What follows a product is part of it, whatever the shapes of the other operands."""
    x, w, b, r = (
        unit(6, 20, dtype=dtype),
        unit(12, 20, dtype=dtype, seed=1),
        unit(12, dtype=dtype, seed=2),
        unit(6, 12, dtype=dtype, seed=3),
    )
    forms = {
        "gelu": lambda x, w, b, r: F.gelu(F.linear(x, w, b)),
        "residual": lambda x, w, b, r: F.linear(x, w, b) + r,
        "gelu + residual": lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r,
        "column": lambda x, w, b, r: F.linear(x, w) * r[:, :1],
        "row": lambda x, w, b, r: F.linear(x, w) * r[:1] + b,
        "number": lambda x, w, b, r: F.linear(x, w) * 0.5 + 1,
        "relu": lambda x, w, b, r: (x @ w.t()).relu(),
        "scalar tensor": lambda x, w, b, r: F.linear(x, w, b) * r[0, 0],
        "transposed": lambda x, w, b, r: F.linear(x, w, b) + r.reshape(12, 6).t(),
        "silu gate": lambda x, w, b, r: F.silu(F.linear(x, w)) * r,
        "cast": lambda x, w, b, r: F.linear(x, w, b).float() + 1,
        "mask": lambda x, w, b, r: torch.where(r > 0, F.linear(x, w), 0.0),
        "integers": lambda x, w, b, r: F.linear(x, w) + (r * 5).to(torch.int64),
        "long": lambda x, w, b, r: F.linear(x, w) + torch.where(r > 0, 3, -2),
        "bool": lambda x, w, b, r: F.linear(x, w) * (r > 0),
        "compare": lambda x, w, b, r: F.linear(x, w, b) > r,
        "used twice": lambda x, w, b, r: (lambda y: (y.relu(), y + r))(F.linear(x, w, b)),
        "bytes": lambda x, w, b, r: F.linear(x, w) + (r > 0).to(torch.uint8) * 3,
        "viewed": lambda x, w, b, r: (
            F.linear(x.reshape(2, 3, 20), w, b).relu() + r.reshape(2, 3, 12)
        ),
        "same": lambda x, w, b, r: (lambda y: y * torch.sigmoid(y))(F.linear(x, w, b)),
        "sum and product": lambda x, w, b, r: (F.linear(x, w, b) + r) * F.linear(x, w, b).detach(),
    }
    cases = []
    for fixed in ((1, 2), ()):
        cases += [
            case(fn, x, w, b, r, dtype=dtype, constants=fixed, name=f"{name} {dtype}")
            for name, fn in forms.items()
            if name != "compare"
        ]
    odd = [
        unit(5, 7, dtype=dtype),
        unit(11, 7, dtype=dtype, seed=1),
        unit(11, dtype=dtype, seed=2),
        unit(5, 11, dtype=dtype, seed=3),
    ]
    cases += [
        case(forms[name], *odd, dtype=dtype, name=f"odd {name} {dtype}")
        for name in (
            "gelu + residual",
            "column",
            "row",
            "silu gate",
            "integers",
            "bool",
            "bytes",
            "mask",
            "cast",
            "scalar tensor",
        )
    ]
    longs = tensor(6, 12, dtype=torch.int64)
    cases += [
        case(
            lambda x, w, b, n: F.linear(x, w, b) + n,
            x,
            w,
            b,
            n,
            dtype=dtype,
            name=f"int64 {list(n.shape)}",
        )
        for n in (longs, longs[0], longs[:, :1].contiguous(), longs[0, 0])
    ]
    batched = [
        unit(3, 5, 7, dtype=dtype),
        unit(3, 7, 8, dtype=dtype, seed=1),
        unit(8, dtype=dtype),
        unit(3, 5, 8, dtype=dtype),
        unit(3, 1, 1, dtype=dtype),
        unit(5, 1, dtype=dtype),
    ]
    cases += [
        case(
            lambda a, b, c, d, e, f: torch.tanh((a @ b) * e + f) + c * d,
            *batched,
            dtype=dtype,
            name="batched",
        )
    ]
    cases += [
        case(
            lambda a, b, c, d, e, f: (a @ b) / 3 + d.transpose(0, 1).contiguous().transpose(0, 1),
            *batched,
            dtype=dtype,
            name="batched permuted",
        )
    ]
    check(cases)


def test_biases_and_scales_that_are_views():
    """Expanded, stepped over, columns of a matrix: where a kernel takes a vector it takes any."""
    x, w, m, image, kernel = unit(6, 8), unit(8, 8), unit(8, 16), unit(2, 8, 5, 5), unit(8, 8, 3, 3)
    vectors = {
        "steps": lambda m: m[0, ::2],
        "column": lambda m: m[:, 3],
        "expanded": lambda m: m[0, :1].expand(8),
        "slice": lambda m: m[0, 5:13],
        "made": lambda m: m[:, 2] * 2,
    }
    cases = []
    for name, v in vectors.items():
        cases += [
            case(lambda x, w, m, v=v: F.linear(x, w, v(m)), x, w, m, name=f"linear {name}"),
            case(lambda x, w, m, v=v: torch.addmm(v(m), x, w), x, w, m, name=f"addmm {name}"),
            case(
                lambda x, k, m, v=v: F.conv2d(x, k, v(m)), image, kernel, m, name=f"conv2d {name}"
            ),
            case(
                lambda x, k, m, v=v: F.conv2d(x, k[:, :1], v(m), groups=8),
                image,
                kernel,
                m,
                name=f"depthwise {name}",
            ),
            case(
                lambda x, k, m, v=v: F.conv2d(x, k[:, :, :1, 1:2], v(m)),
                image,
                kernel,
                m,
                name=f"pointwise {name}",
            ),
            case(
                lambda x, m, v=v: F.layer_norm(x, (8,), v(m), v(m.flip(0))),
                x,
                m,
                name=f"layer norm {name}",
            ),
            case(lambda x, m, v=v: F.layer_norm(x, (8,), v(m)), x, m, name=f"scale {name}"),
            case(lambda x, m, v=v: F.rms_norm(x, (8,), v(m)), x, m, name=f"rms norm {name}"),
            case(
                lambda x, m, v=v: F.batch_norm(x, v(m), v(m).abs() + 1, v(m), v(m)),
                image,
                m,
                name=f"batch norm {name}",
            ),
            case(
                lambda x, m, v=v: F.group_norm(x, 2, v(m), v(m)),
                image,
                m,
                name=f"group norm {name}",
            ),
            case(
                lambda x, k, m, v=v: F.conv_transpose2d(x, k, v(m), stride=2),
                image,
                kernel,
                m,
                name=f"transposed {name}",
            ),
        ]
    check(cases)


def test_one_dispatch():
    """linear + bias + gelu + residual is one kernel; so are a product, its scale and its mask."""
    x, w, b, r = unit(6, 20), unit(12, 20), unit(12), unit(6, 12)
    for fn, args in (
        (lambda x, w, b, r: F.gelu(F.linear(x, w, b)) + r, (x, w, b, r)),
        (lambda x, w, b, r: (F.linear(x, w, b) * 2).sigmoid() * r, (x, w, b, r)),
        (
            lambda q, k, m: q @ k.transpose(-1, -2) * 0.125 + m,
            (unit(2, 3, 5, 8), unit(2, 3, 5, 8), unit(5)),
        ),
        (
            lambda x, w, b, r: F.linear(x.reshape(2, 3, 20), w, b).relu() + r.reshape(2, 3, 12),
            (x, w, b, r),
        ),
    ):
        with program_of(fn, args) as program:
            assert len(dispatches(program)) == 1, dispatches(program)
            torch.testing.assert_close(program.forward(*args), fn(*args), rtol=1e-5, atol=SINGLE)


CONVOLUTIONS = {  # input, weight, stride, padding, dilation, groups
    "3x3": ((1, 3, 9, 11), (5, 3, 3, 3), [1, 1], [1, 1], [1, 1], 1),
    "stride": ((2, 4, 9, 11), (8, 4, 3, 3), [2, 2], [1, 1], [1, 1], 1),
    "uneven": ((1, 4, 10, 13), (6, 4, 5, 3), [2, 3], [2, 0], [1, 2], 1),
    "pointwise": ((2, 8, 5, 7), (12, 8, 1, 1), [1, 1], [0, 0], [1, 1], 1),
    "pointwise odd": ((2, 5, 5, 7), (7, 5, 1, 1), [1, 1], [0, 0], [1, 1], 1),
    "pointwise stride": ((1, 8, 6, 7), (4, 8, 1, 1), [2, 2], [0, 0], [1, 1], 1),
    "groups": ((2, 6, 7, 8), (9, 2, 3, 3), [1, 1], [1, 1], [1, 1], 3),
    "groups of 4": ((1, 8, 7, 8), (8, 4, 3, 3), [1, 2], [1, 1], [1, 1], 2),
    "depthwise": ((2, 8, 9, 10), (8, 1, 3, 3), [1, 1], [1, 1], [1, 1], 8),
    "depthwise odd": ((1, 5, 9, 10), (5, 1, 5, 5), [2, 2], [2, 2], [1, 1], 5),
    "depthwise dilated": ((1, 4, 12, 12), (4, 1, 3, 3), [1, 1], [2, 2], [2, 2], 4),
    "multiplier": ((1, 4, 8, 8), (8, 1, 3, 3), [1, 1], [1, 1], [1, 1], 4),
    "dilated": ((1, 3, 12, 12), (4, 3, 3, 3), [1, 1], [2, 2], [2, 2], 1),
    "patches": ((1, 3, 16, 16), (8, 3, 4, 4), [4, 4], [0, 0], [1, 1], 1),
    "whole": ((1, 4, 5, 5), (6, 4, 5, 5), [1, 1], [0, 0], [1, 1], 1),
    "one channel": ((2, 1, 8, 8), (1, 1, 3, 3), [1, 1], [1, 1], [1, 1], 1),
    "wide padding": ((1, 3, 4, 4), (4, 3, 3, 3), [1, 1], [3, 3], [1, 1], 1),
    "1-D": ((2, 6, 17), (8, 6, 3), [1], [1], [1], 1),
    "1-D stride": ((1, 5, 20), (4, 5, 5), [3], [2], [2], 1),
    "1-D depthwise": ((2, 8, 16), (8, 1, 4), [1], [3], [1], 8),
    "1-D pointwise": ((2, 6, 9), (8, 6, 1), [1], [0], [1], 1),
    "many": ((3, 32, 14, 14), (48, 32, 3, 3), [1, 1], [1, 1], [1, 1], 1),
    "prime": ((1, 13, 17, 19), (11, 13, 3, 5), [1, 1], [1, 2], [1, 1], 1),
    "1 x 7": ((1, 4, 6, 20), (4, 4, 1, 7), [1, 1], [0, 3], [1, 1], 1),
    "pointwise padded": ((1, 4, 5, 5), (4, 4, 1, 1), [1, 1], [1, 1], [1, 1], 1),
}


def convolution(x, w, b, stride, padding, dilation, groups):
    return aten.convolution.default(
        x, w, b, stride, padding, dilation, False, [0] * (w.dim() - 2), groups
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("fixed", [True, False], ids=["constants", "inputs"])
def test_convolutions(dtype, fixed):
    cases = []
    for name, (shape, weight, *rest) in CONVOLUTIONS.items():
        for bias in (True, False):
            args = (
                unit(*shape, dtype=dtype),
                unit(*weight, dtype=dtype, seed=1),
                unit(weight[0], dtype=dtype, seed=2) if bias else None,
                *rest,
            )
            cases.append(
                case(
                    convolution,
                    *args,
                    dtype=dtype,
                    name=f"{name} {dtype} bias {bias}",
                    constants=((1, 2) if bias else (1,)) if fixed else (),
                )
            )
    check(cases)


def test_convolutions_read_layouts():
    """Inputs that lie in memory channels last, as slices, or as the results of other convolutions
    and views."""
    w, w1, wd = unit(8, 8, 3, 3), unit(8, 8, 1, 1), unit(8, 1, 3, 3)
    x, last = unit(2, 8, 7, 9), unit(2, 7, 9, 8)
    cases = []
    for name, weight, groups in (("3x3", w, 1), ("1x1", w1, 1), ("depthwise", wd, 8)):
        pad = 0 if name == "1x1" else 1
        conv = lambda t, k, g=groups, p=pad: F.conv2d(t, k, padding=p, groups=g)  # noqa: E731
        cases += [
            case(
                lambda t, k, c=conv: c(t.permute(0, 3, 1, 2), k),
                last,
                weight,
                name=f"{name} channels last",
            ),
            case(lambda t, k, c=conv: c(t[:, :, 1:, 2:], k), x, weight, name=f"{name} slice"),
            case(lambda t, k, c=conv: c(t[:, :, ::2, ::3], k), x, weight, name=f"{name} steps"),
            case(
                lambda t, k, c=conv: c(c(t, k).relu(), k).permute(0, 2, 3, 1).contiguous(),
                x,
                weight,
                name=f"{name} twice",
            ),
            case(
                lambda t, k, c=conv: c(c(t, k)[:, :, 1:], k).flatten(1),
                x,
                weight,
                name=f"{name} slice of result",
            ),
            case(
                lambda t, k, c=conv: c(t, k).reshape(2, 8, -1).transpose(1, 2) * 2,
                x,
                weight,
                name=f"{name} tokens",
            ),
            case(lambda t, k, c=conv: c(t[:, :, :1, :1], k), x, weight, name=f"{name} one pixel"),
            case(
                lambda t, k, c=conv: c(t.expand(3, 8, 7, 9), k),
                x[:1].contiguous(),
                weight,
                name=f"{name} expanded",
            ),
            case(
                lambda t, k, c=conv: torch.cat([c(t, k), t], 1) + 1, x, weight, name=f"{name} cat"
            ),
            case(lambda t, k, c=conv: c(t, k).mean((2, 3)), x, weight, name=f"{name} mean"),
            case(
                lambda t, k, c=conv: torch.softmax(c(t, k), 1),
                x,
                weight,
                name=f"{name} softmax of channels",
            ),
            case(
                lambda t, k, c=conv: c(t.transpose(2, 3), k), x, weight, name=f"{name} transposed"
            ),
        ]
    check(cases)


@pytest.mark.slow
def test_epilogues_of_convolutions():
    """Activations, residuals and batch norms become part of the convolution."""
    cases = []
    stats = (unit(8, seed=4), tensor(8, low=0.5, high=2, seed=5), unit(8, seed=6), unit(8, seed=7))
    for name, weight, groups in (
        ("3x3", unit(8, 8, 3, 3), 1),
        ("1x1", unit(8, 8, 1, 1), 1),
        ("depthwise", unit(8, 1, 3, 3), 8),
        ("odd", unit(7, 8, 3, 3), 1),
    ):
        pad, out = 0 if name == "1x1" else 1, weight.shape[0]
        x, r, b = unit(2, 8, 6, 5), unit(2, out, 6, 5, seed=1), unit(out, seed=2)
        conv = lambda t, w, b, g=groups, p=pad: F.conv2d(t, w, b, padding=p, groups=g)  # noqa: E731
        forms = {
            "relu": lambda t, w, b, r, c=conv: c(t, w, b).relu(),
            "hardswish": lambda t, w, b, r, c=conv: F.hardswish(c(t, w, b)),
            "residual": lambda t, w, b, r, c=conv: (c(t, w, b) + r).relu(),
            "gate": lambda t, w, b, r, c=conv: (
                c(t, w, b) * torch.sigmoid(r.mean((2, 3), keepdim=True))
            ),
            "channel": lambda t, w, b, r, c=conv: c(t, w, None) * b[:, None, None] + 1,
            "silu": lambda t, w, b, r, c=conv: F.silu(c(t, w, b)),
            "clamp": lambda t, w, b, r, c=conv: c(t, w, b).clamp(-0.5, 0.5) - r,
            "one": lambda t, w, b, r, c=conv: c(t, w, b) * r[:, :, :1, :1],
            "last": lambda t, w, b, r, c=conv: (
                c(t, w, b) + r.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
            ),
            "image": lambda t, w, b, r, c=conv: c(t, w, b) + r[:1],
            "map": lambda t, w, b, r, c=conv: c(t, w, b) * r[:, :1],
        }
        for label, fn in forms.items():
            cases.append(case(fn, x, weight, b, r, constants=(1, 2), name=f"{name} {label}"))
            if name in ("3x3", "depthwise"):
                cases.append(
                    case(
                        fn,
                        x.half(),
                        weight.half(),
                        b.half(),
                        r.half(),
                        constants=(1, 2),
                        name=f"{name} {label} half",
                        dtype=torch.float16,
                    )
                )
        if out == 8:
            norm = lambda t, w, b, r, *s, c=conv: (F.batch_norm(c(t, w, b), *s) + r).relu()  # noqa: E731
            cases.append(
                case(
                    norm,
                    x,
                    weight,
                    b,
                    r,
                    *stats,
                    constants=(1, 2, 4, 5, 6, 7),
                    name=f"{name} batch norm",
                )
            )
            cases.append(case(norm, x, weight, b, r, *stats, name=f"{name} batch norm of inputs"))
    check(cases)


def test_convolution_batch_norm_relu_add_is_one_dispatch():
    """Once the images lie channels last, as they do between convolutions."""
    x, r = unit(2, 6, 5, 8), unit(2, 6, 5, 8, seed=1)

    class Block(torch.nn.Module):
        def __init__(self, groups):
            super().__init__()
            self.conv = torch.nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False)
            self.norm = torch.nn.BatchNorm2d(8).eval()
            self.norm.running_mean.uniform_(-1, 1)
            self.norm.running_var.uniform_(0.5, 2)

        def forward(self, x, r):
            x, r = x.permute(0, 3, 1, 2), r.permute(0, 3, 1, 2)
            return (self.norm(self.conv(x)) + r).relu().permute(0, 2, 3, 1)

    torch.manual_seed(0)
    for groups in (1, 8):
        block = Block(groups).eval()
        with torch.no_grad(), program_of(lambda x, r: block(x, r), (x, r)) as program:
            assert len(dispatches(program)) == 1, dispatches(program)
            torch.testing.assert_close(program.forward(x, r), block(x, r), rtol=1e-5, atol=SINGLE)
