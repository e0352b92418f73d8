"""Images that stay NCHW on a GPU: pooling, matmuls and convolutions in groups without conversions
around them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from purevk.graph.context import default_context
from purevk.tuning import DEFAULT
from purevk.tuning.families.amd import AMD
from tests.ops.harness import Case, check, dispatches, program_of, tensor

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A GPU of one multiprocessor, so that small images give every invocation several outputs."""
    context = default_context()
    monkeypatch.setattr(
        context,
        "traits",
        dataclasses.replace(context.traits, profile=DEFAULT, cores=1, max_texels=0),
    )


def templates(case):
    with program_of(case.fn, case.args) as program:
        return dispatches(program)


def pooled(x, *args):
    return F.max_pool2d(x, *args, return_indices=True)


def test_pooling():
    x = tensor(2, 6, 33, 37)
    ties = torch.zeros(2, 8, 24, 26)
    ties[:, 1], ties[:, 2], ties[:, 3, ::3] = float("nan"), -float("inf"), float("nan")
    cases = []
    for kernel, stride, padding, dilation, ceil in [
        (2, 2, 0, 1, False),
        (3, 1, 1, 1, False),
        ((3, 2), (1, 2), (1, 0), 1, True),
        (3, 2, 1, 2, True),
        ((1, 5), (1, 3), (0, 2), 1, False),
        ((2, 3), 3, 1, (3, 1), False),
    ]:
        cases += [
            Case(pooled, (each, kernel, stride, padding, dilation, ceil)) for each in (x, ties)
        ]
        cases.append(
            Case(
                lambda t, *a: pooled(t.permute(0, 3, 1, 2), *a),
                (ties.permute(0, 2, 3, 1).contiguous(), kernel, stride, padding, dilation, ceil),
            )
        )
        if dilation == 1:
            cases += [
                Case(
                    lambda t, *a, i=include: F.avg_pool2d(t, *a, i),
                    (x, kernel, stride, padding, ceil),
                )
                for include in (True, False)
            ]
    cases += [
        Case(pooled, (x.half(), 3, 1, 1)),
        Case(F.avg_pool2d, (x.half(), 3, 2, 1, False, True, 7)),
        Case(F.max_pool2d, ((x * 9).int(), 3, 1, 1)),
        Case(pooled, (tensor(5, 20, 22, dtype=torch.int64, low=-9, high=9), 2, 2)),
        Case(lambda t: pooled(t[:, 1:, 2:, 3:], 3, 1, 1), (x,)),
        Case(F.max_pool2d, (x, 13, 1, 6)),
        Case(lambda t: F.max_pool2d(F.max_pool2d(t.relu(), 2).sigmoid(), 3, 1, 1) + 1, (x,)),
        Case(F.max_pool2d, (tensor(1, 3, 1, 2), 2, 1, 1)),
        Case(
            lambda t: F.avg_pool2d(t.permute(0, 3, 1, 2), 3, 2, 1, True, False),
            (tensor(2, 9, 11, 8),),
        ),
        Case(lambda t: F.max_pool2d(t.permute(0, 3, 1, 2), 6, 2, 3), (tensor(2, 9, 11, 8),)),
    ]
    check(cases)
    assert templates(Case(lambda t: F.max_pool2d(t, 3, 1, 1), (x,))) == ["image/pool_nchw.comp"]
    assert templates(Case(lambda t: pooled(t, 2), (x,))) == ["image/pool_nchw.comp"]


def convolved(x, weight, bias, stride, padding, dilation, groups):
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


GROUPS = [  # channels, out, kernel, stride, padding, dilation, groups
    (8, 8, (3, 3), 1, 1, 1, 8),
    (6, 12, (5, 3), (2, 1), (2, 0), 1, 6),
    (16, 32, (3, 3), 1, 1, 1, 2),
    (12, 12, (3, 2), (1, 3), 1, (2, 1), 3),
    (10, 4, (1, 1), 2, 0, 1, 2),
    (4, 4, (7, 7), 1, 3, 1, 4),
]
PRODUCTS = [(8, 12, (1, 1), 1, 0, 1, 1), (7, 5, (1, 1), 1, 0, 1, 1)]


def test_convolutions():
    cases = []
    for channels, out, kernel, stride, padding, dilation, groups in (*GROUPS, *PRODUCTS):
        x, w, b = (
            tensor(2, channels, 18, 20, low=-1, high=1),
            tensor(out, channels // groups, *kernel, low=-1, high=1, seed=1),
            tensor(out, seed=2),
        )
        for bias in (b, None):
            cases.append(
                Case(
                    convolved,
                    (x, w, bias, stride, padding, dilation, groups),
                    constants=(1, 2) if bias is not None else (1,),
                    atol=2e-5,
                )
            )
        r = convolved(x, w, b, stride, padding, dilation, groups)
        fn = lambda x, w, b, r, *a: F.hardswish(convolved(x, w, b, *a) * r) + b[:, None, None]  # noqa: E731
        cases.append(
            Case(fn, (x, w, b, r, stride, padding, dilation, groups), constants=(1,), atol=2e-5)
        )
        cases.append(
            Case(
                convolved,
                (x.half(), w.half(), b.half(), stride, padding, dilation, groups),
                atol=2e-2,
            )
        )
    x, w = tensor(2, 8, 13, 20, low=-1, high=1), tensor(4, 8, 1, 1, low=-1, high=1)
    cases += [
        Case(lambda t, w: F.conv2d(t[:, :, 1:, 4:], w), (x, w), atol=2e-5),
        Case(lambda t, w: F.conv2d(t.transpose(2, 3), w), (x, w), atol=2e-5),
        Case(
            F.conv1d,
            (tensor(2, 8, 24, low=-1, high=1), tensor(4, 8, 1, low=-1, high=1), tensor(4)),
            atol=2e-5,
        ),
        Case(F.conv2d, (x[0], w), atol=2e-5),
        Case(F.conv_transpose2d, (x, tensor(8, 6, 2, 2, low=-1, high=1), tensor(6), 2), atol=2e-5),
    ]
    check(cases)


def followed(*window):
    return lambda x, w, b, r: F.hardswish(convolved(x, w, b, *window) * r) + b[:, None, None]


def transposed(stride):
    return lambda x, w, b: F.relu(F.conv_transpose2d(x, w, b, stride))


TILES = [  # the same as GROUPS
    (9, 24, (3, 3), 1, 1, 1, 1),
    (12, 32, (3, 3), 2, 1, 1, 1),
    (16, 16, (1, 1), 1, 0, 1, 1),
    (32, 32, (3, 3), 1, 1, 1, 4),
    (16, 20, (3, 2), (1, 2), (0, 1), (2, 1), 2),
    (5, 8, (5, 5), 1, 2, 1, 1),
]


def tile_cases(chosen, sizes):
    for channels, out, kernel, stride, padding, dilation, groups in chosen:
        for size in sizes:
            x, w, b = (
                tensor(2, channels, *size, low=-1, high=1),
                tensor(out, channels // groups, *kernel, low=-1, high=1, seed=1),
                tensor(out, seed=2),
            )
            r = convolved(x, w, b, stride, padding, dilation, groups)
            yield Case(
                followed(stride, padding, dilation, groups), (x, w, b, r), constants=(1,), atol=1e-4
            )


def test_tiles():
    """Convolutions by NCHW tiles in shared memory: rows that are multiples of 4 and others, with
    epilogues."""
    w, b = tensor(8, 8, 2, 2, low=-1, high=1), tensor(8)
    cases = [*tile_cases(TILES[:1], ((31, 63),)), *tile_cases(TILES[2:3], ((32, 64),))]
    cases.append(
        Case(
            transposed((2, 2)),
            (tensor(2, 8, 16, 32, low=-1, high=1), w, b),
            constants=(1, 2),
            atol=5e-5,
        )
    )
    x, w, b = tensor(4, 8, 500, low=-1, high=1), tensor(12, 8, 3, low=-1, high=1), tensor(12)
    cases.append(Case(lambda x, w, b: F.conv1d(x, w, b, 1, 1), (x, w, b), atol=5e-5))
    check(cases)
    assert all(templates(case)[-1] == "conv/conv2d_nchw_tiled.comp" for case in cases)


def test_tiles_without_reads_ahead(monkeypatch):
    """As on AMD, where registers are few: windows, narrow groups and small windows."""
    context = default_context()
    traits = dataclasses.replace(context.traits, profile=AMD)
    monkeypatch.setattr(context, "traits", traits)
    x, w = tensor(4, 8, 500, low=-1, high=1), tensor(12, 8, 3, low=-1, high=1)
    cases = [
        *tile_cases((TILES[0], TILES[3]), ((32, 64),)),
        Case(lambda x, w: F.conv1d(x, w, None, 1, 1), (x, w), atol=5e-5),
    ]
    check(cases)
    assert all(templates(case)[-1] == "conv/conv2d_nchw_tiled.comp" for case in cases)


@pytest.mark.slow
def test_more_tiles():
    cases = [*tile_cases(TILES[1:], ((31, 63),)), *tile_cases((*TILES[:1], TILES[4]), ((32, 62),))]
    x, w = tensor(4, 16, 15, 15, low=-1, high=1), tensor(64, 16, 3, 3, low=-1, high=1)
    cases.append(Case(lambda x, w: F.conv2d(x, w, None, 1, 1), (x, w), constants=(1,), atol=5e-5))
    cases.append(
        Case(
            lambda x, w: F.conv2d(x, w),
            (tensor(2, 16, 32, 64).half(), tensor(16, 16, 1, 1).half()),
            atol=2e-2,
        )
    )
    for stride, width in (((2, 2), 28), ((1, 4), 32)):  # neighbours do not exchange what they store
        x, w = tensor(2, 8, 16, width, low=-1, high=1), tensor(8, 8, *stride, low=-1, high=1)
        cases.append(Case(transposed(stride), (x, w, tensor(8)), constants=(1, 2), atol=5e-5))
    x, w, b = tensor(4, 8, 500, low=-1, high=1), tensor(12, 8, 3, low=-1, high=1), tensor(12)
    cases += [
        Case(F.conv1d, (x, w, None, 2, 0, 3), atol=5e-5),
        Case(F.conv1d, (x[:, :, 1:], w, b), atol=5e-5),
    ]
    check(cases)


def test_no_conversions():
    x, w = tensor(2, 8, 32, 40), tensor(16, 8, 3, 3, seed=1)
    assert templates(Case(lambda t: F.conv2d(t, w, None, 1, 1).relu(), (x,))) == [
        "conv/conv2d_nchw_tiled.comp"
    ]
    x, grouped, pointwise = (
        tensor(2, 8, 18, 20),
        tensor(8, 4, 3, 3, seed=1),
        tensor(12, 8, 1, 1, seed=1),
    )
    weights = [tensor(8, 8, 7, 7, seed=seed) for seed in (1, 2)]  # windows too large for NCHW tiles
    conv = lambda t, k: F.conv2d(t, weights[k], None, 1, 3)  # noqa: E731
    assert templates(Case(lambda t: F.conv2d(t, grouped, None, 1, 1, 1, 2), (x,))) == [
        "conv/conv2d_nchw.comp"
    ]
    assert len(templates(Case(lambda t: F.conv2d(t, pointwise).relu(), (x,)))) == 1
    # Converted once, by the pooling, rather than before each of its readers.
    found = templates(
        Case(
            lambda t: conv(F.max_pool2d(t, 2), 0).relu() + conv(F.max_pool2d(t, 2), 1).relu(), (x,)
        )
    )
    assert (
        "image/pool_nchw.comp" not in found
        and sum(name in ("elementwise/pointwise.comp", "movement/transpose.comp") for name in found)
        == 1
    )
    # NHWC images stay NHWC.
    found = templates(Case(lambda t: conv(F.max_pool2d(conv(t, 0), 2), 1), (x,)))
    assert (
        set(found) - {"elementwise/pointwise.comp", "movement/transpose.comp"}
        == {"conv/conv2d_tiled.comp", "image/pool.comp"}
        and len(found) == 5
    )


def test_resizing():
    x, cases = tensor(2, 6, 17, 19), []
    for mode in ("bilinear", "bicubic"):
        for size, align in [
            ((34, 38), False),
            ((34, 38), True),
            ((51, 57), False),
            ((17, 33), False),
            ((40, 41), True),
            ((18, 31), False),
        ]:
            fn = lambda t, s, m=mode, a=align: F.interpolate(t, s, mode=m, align_corners=a)  # noqa: E731
            cases.append(Case(fn, (x, size), atol=2e-5))
        fn = lambda t, m=mode: F.interpolate(t, scale_factor=1.7, mode=m)  # noqa: E731
        cases += [
            Case(fn, (x,), atol=2e-5),
            Case(fn, (x[:, :5].contiguous().half(),)),
            Case(lambda t, f=fn: f(t[:, :, 1:]), (x[:1].contiguous(),), atol=2e-5),
        ]
        cases += [
            Case(lambda t, f=fn: f(t.permute(0, 3, 1, 2)), (x,), atol=2e-5),
            Case(lambda t, f=fn: f(t[:, :3]), (x,), atol=2e-5),
        ]
        even = tensor(2, 4, 16, 20)
        for size, align in [
            ((32, 40), False),
            ((32, 40), True),
            ((64, 160), False),
            ((24, 40), False),
            ((16, 80), False),
            ((32, 12), False),
        ]:
            cases.append(
                Case(
                    lambda t, s=size, m=mode, a=align: F.interpolate(t, s, mode=m, align_corners=a),
                    (even,),
                    atol=2e-5,
                )
            )
        cases.append(
            Case(
                lambda t, m=mode: torch.cat(
                    [t[:, :, :1, :4].repeat(1, 1, 32, 10), F.interpolate(t, (32, 40), mode=m)], 1
                ),
                (even,),
                atol=2e-5,
            )
        )
    check(cases)
    assert "int channel = i0 * 4" in str(
        program_macros(lambda t: F.interpolate(t, (34, 38), mode="bicubic"), x)
    )
    assert "R_PUT4" in str(
        program_macros(lambda t: F.interpolate(t, (32, 40), mode="bicubic"), even)
    )


def test_sampling():
    x, cases = tensor(2, 8, 17, 19), []
    grid = tensor(2, 24, 25, 2, low=-1.3, high=1.3, seed=1)
    for padding in ("zeros", "border", "reflection"):
        for align in (True, False):
            fn = lambda t, g, p=padding, a=align: F.grid_sample(t, g, "bilinear", p, a)  # noqa: E731
            cases += [
                Case(fn, (x, grid), atol=2e-5),
                Case(
                    lambda t, g, f=fn: f(t.permute(0, 3, 1, 2), g),
                    (tensor(2, 17, 19, 8), grid),
                    atol=2e-5,
                ),
            ]
    infinite = x.clone()
    infinite[:, :, 0, 0] = float("inf")
    cases += [
        Case(lambda t, g: F.grid_sample(t, g, align_corners=False), (each, grid), atol=2e-5)
        for each in (infinite, x[:, :6].contiguous())
    ]
    fn = lambda t, g: F.grid_sample(t, g, "bilinear", "zeros", False)  # noqa: E731
    cases.append(Case(fn, (x, grid[:, :16, :18].contiguous()), atol=2e-5))
    check(cases)
    assert templates(Case(fn, (x, grid))) == ["image/sample_staged.comp"] and templates(
        cases[-1]
    ) == ["elementwise/map.comp"]


def program_macros(fn, *tensors):
    """The macros of the kernels of a function."""
    with program_of(fn, tensors) as program:
        return [
            dispatch.kernel.macros
            for dispatch in program.method("forward").executable.plan.dispatches
        ]


def test_pixels_that_become_blocks():
    """Transposed convolutions whose kernel is their stride, on NCHW and NHWC images, with
    epilogues."""
    x, cases = tensor(2, 8, 6, 12, low=-1, high=1), []
    dense = tensor(8, 8, 3, 3, seed=3, low=-1, high=1)
    for out, stride, bias in [(8, (2, 2), True), (4, (3, 1), False), (6, (1, 2), True)]:
        w, b = (
            tensor(8, out, *stride, low=-1, high=1, seed=1),
            tensor(out, seed=2) if bias else None,
        )
        r = F.conv_transpose2d(x, w, b, stride)
        for name, before in (
            ("nchw", lambda t: t),
            ("last", lambda t: F.conv2d(t, dense.to(t.dtype), None, 1, 1)),
        ):
            fn = lambda t, w, b, before=before, s=stride: F.conv_transpose2d(before(t), w, b, s)  # noqa: E731
            cases.append(Case(fn, (x, w, b), constants=(1,), atol=5e-5, name=name))

            def after(t, w, r, b, fn=fn):
                return F.gelu(fn(t, w, b) * r) + (
                    r[:1, :, :1, :1] if b is None else b[:, None, None]
                )

            cases += [
                Case(after, (x, w, r, b), constants=(1,), atol=5e-5, name=f"{name} epilogue"),
                Case(
                    fn, (x.half(), w.half(), b.half() if bias else None), constants=(1,), atol=5e-2
                ),
            ]
    cases.append(
        Case(
            lambda t, w: F.conv_transpose2d(t[:, :, :, :7], w, None, 2),
            (x, tensor(8, 4, 2, 2)),
            atol=5e-5,
        )
    )
    check(cases)
    w = tensor(8, 4, 2, 2)
    assert len(templates(Case(lambda t: F.conv_transpose2d(t, w, None, 2).relu(), (x,)))) == 1


def test_few_channels():
    """The first convolution of an image reads NCHW."""
    cases = []
    for channels, out, kernel, stride, padding, dilation in [
        (3, 32, (3, 3), 2, 1, 1),
        (3, 12, (7, 7), 2, 3, 1),
        (1, 8, (5, 3), 1, (2, 1), 1),
        (4, 4, (3, 3), 1, 2, 2),
    ]:
        x, w, b = (
            tensor(2, channels, 30, 29, low=-1, high=1),
            tensor(out, channels, *kernel, low=-1, high=1, seed=1),
            tensor(out, seed=2),
        )
        window = (stride, padding, dilation, 1)
        r = convolved(x, w, b, *window)
        for bias in (b, None):
            cases.append(Case(convolved, (x, w, bias, *window), constants=(1,), atol=2e-5))
        fn = lambda x, w, b, r, *a: F.relu(convolved(x, w, b, *a) + r) * b[:, None, None]  # noqa: E731
        cases += [
            Case(fn, (x, w, b, r, *window), constants=(1, 2), atol=5e-5),
            Case(convolved, (x.half(), w.half(), b.half(), *window), atol=3e-2),
        ]
    cases += [
        Case(
            lambda t, k: F.conv1d(t, k, stride=5),
            (tensor(2, 1, 90, low=-1, high=1), tensor(8, 1, 10)),
            atol=2e-5,
        ),
        Case(
            lambda t, k: F.conv2d(t[:, 1:, 2:, 3:], k),
            (tensor(1, 4, 12, 13, low=-1, high=1), tensor(8, 3, 3, 3)),
            atol=2e-5,
        ),
    ]
    check(cases)
    w, v = tensor(8, 3, 3, 3, seed=1), tensor(8, 8, 3, 3, seed=2)
    assert "elementwise/pointwise.comp" not in templates(
        Case(lambda t: F.conv2d(F.conv2d(t, w).relu(), v).mean((2, 3)), (tensor(1, 3, 12, 12),))
    )
