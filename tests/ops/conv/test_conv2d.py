"""2-D convolutions of all shapes and layouts, with epilogues."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import purevk
from purevk.errors import GraphError
from tests.ops.harness import (
    SINGLE,
    aten,
    check,
    dispatches,
    program_of,
    sum_case,
    tensor,
    unit,
)
from tests.ops.quantized.harness import kernels_of, run

pytestmark = pytest.mark.device

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
    of, cases = functools.partial(unit, dtype=dtype), []
    for name, (shape, weight, *rest) in CONVOLUTIONS.items():
        for bias in (True, False):
            b = of(weight[0], seed=2) if bias else None
            constants = ((1, 2) if bias else (1,)) if fixed else ()
            args = (of(*shape), of(*weight, seed=1), b, *rest)
            cases.append(sum_case(convolution, *args, name=name, constants=constants))
    check(cases)


def test_convolutions_read_layouts():
    """Inputs in NHWC, slices, and results of other convolutions and views."""
    w, w1, wd = unit(8, 8, 3, 3), unit(8, 8, 1, 1), unit(8, 1, 3, 3)
    x, nhwc = unit(2, 8, 7, 9), unit(2, 7, 9, 8)
    cases = []
    for name, weight, groups in (("3x3", w, 1), ("1x1", w1, 1), ("depthwise", wd, 8)):
        pad = 0 if name == "1x1" else 1
        conv = lambda t, k, g=groups, p=pad: F.conv2d(t, k, padding=p, groups=g)  # noqa: E731
        forms = {
            "nhwc": lambda t, k, c=conv: c(t.permute(0, 3, 1, 2), k),
            "slice": lambda t, k, c=conv: c(t[:, :, 1:, 2:], k),
            "steps": lambda t, k, c=conv: c(t[:, :, ::2, ::3], k),
            "twice": lambda t, k, c=conv: c(c(t, k).relu(), k).permute(0, 2, 3, 1).contiguous(),
            "slice of result": lambda t, k, c=conv: c(c(t, k)[:, :, 1:], k).flatten(1),
            "tokens": lambda t, k, c=conv: c(t, k).reshape(2, 8, -1).transpose(1, 2) * 2,
            "one pixel": lambda t, k, c=conv: c(t[:, :, :1, :1], k),
            "expanded": lambda t, k, c=conv: c(t.expand(3, 8, 7, 9), k),
            "cat": lambda t, k, c=conv: torch.cat([c(t, k), t], 1) + 1,
            "mean": lambda t, k, c=conv: c(t, k).mean((2, 3)),
            "softmax of channels": lambda t, k, c=conv: torch.softmax(c(t, k), 1),
            "transposed": lambda t, k, c=conv: c(t.transpose(2, 3), k),
        }
        inputs = {"nhwc": nhwc, "expanded": x[:1].contiguous()}
        cases += [
            sum_case(fn, inputs.get(form, x), weight, name=f"{name} {form}")
            for form, fn in forms.items()
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
            cases.append(sum_case(fn, x, weight, b, r, constants=(1, 2), name=f"{name} {label}"))
            if name in ("3x3", "depthwise"):
                halves = (each.half() for each in (x, weight, b, r))
                cases.append(sum_case(fn, *halves, constants=(1, 2), name=f"{name} {label} half"))
        if out == 8:
            norm = lambda t, w, b, r, *s, c=conv: (F.batch_norm(c(t, w, b), *s) + r).relu()  # noqa: E731
            args = (x, weight, b, r, *stats)
            constants = (1, 2, 4, 5, 6, 7)
            cases.append(sum_case(norm, *args, constants=constants, name=f"{name} batch norm"))
            cases.append(sum_case(norm, *args, name=f"{name} batch norm of inputs"))
    check(cases)


def test_convolution_batch_norm_relu_add_is_one_dispatch():
    """Once the images are in NHWC, as they are between convolutions."""
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


@pytest.mark.parametrize("dims", [1, 2])
def test_a_norm_after_a_convolution_without_a_batch(dims):
    """It takes the channels for the batch, and what follows them for the channels."""
    torch.manual_seed(0)
    convolution = torch.nn.Conv1d(3, 8, 3) if dims == 1 else torch.nn.Conv2d(3, 8, 3)
    norm = torch.nn.BatchNorm1d(8)
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    model, x = torch.nn.Sequential(convolution, norm).eval(), unit(*(3, 10, 10)[: dims + 1])
    with purevk.compile(model, (x,)) as program, torch.no_grad():
        torch.testing.assert_close(program.forward(x), model(x), rtol=1e-5, atol=SINGLE)


@pytest.mark.parametrize("transposed", [False, True])
def test_biases_for_too_few_channels_are_refused(transposed):
    """Kernels would read what is behind them."""
    args = (unit(1, 8, 5, 5), unit(8, 8, 3, 3, seed=1), unit(3))
    with pytest.raises(GraphError, match="3 numbers for 8 channels"):
        run(
            "aten.convolution.default",
            (*args, [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1),
        )


@pytest.mark.parametrize(
    ("size", "stride", "rolled"), [(3, 1, "1"), (3, 2, "1"), (5, 1, "2"), (7, 1, "2")]
)
def test_windows_stay_loops_where_registers_are_few(size, stride, rolled):
    """Of depthwise convolutions, on GPUs of phones."""
    x, weight, points = tensor(1, 32, 21, 21), tensor(32, 1, size, size), tensor(32, 32, 1, 1)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(F.conv2d(x, points), weight, None, stride, size // 2, 1, 32)
        return F.conv2d(x.relu(), points)

    with kernels_of("mobile"), program_of(run, (x,)) as program:
        torch.testing.assert_close(program.forward(x), run(x), atol=1e-3, rtol=1e-4)
        (kernel,) = (
            each.kernel
            for each in program.method("forward").executable.plan.dispatches
            if each.kernel.template == "conv/conv2d_dw.comp"
        )
    assert dict(kernel.macros).get("ROLLED") == rolled
