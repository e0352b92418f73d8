"""Resizing and sampling of images against torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import purevk
from tests.ops.harness import Case, aten, check, program_of, tensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]

IMAGES = {1: (2, 3, 11), 2: (2, 3, 7, 11), 3: (1, 2, 5, 7, 3)}
SIZES = {
    1: [(11,), (17,), (5,), (1,)],
    2: [(7, 11), (13, 17), (4, 5), (1, 30), (14, 22)],
    3: [(5, 7, 3), (7, 11, 5), (3, 2, 1)],
}


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest(mode):
    cases = [
        Case(F.interpolate, (tensor(*IMAGES[n]),), {"size": size, "mode": mode})
        for n in (1, 2, 3)
        for size in SIZES[n]
    ]
    cases += [
        Case(F.interpolate, (tensor(*IMAGES[2]),), {"scale_factor": factor, "mode": mode})
        for factor in (2, 1.7, 0.6, (3.0, 0.5))
    ]
    cases += [
        Case(F.interpolate, (tensor(1, 3, 5, 4, dtype=dtype),), {"scale_factor": 2, "mode": mode})
        for dtype in (torch.float16, torch.bfloat16, torch.uint8)
    ]
    cases += [
        Case(
            F.interpolate,
            (tensor(2, 8, 5, 4).contiguous(memory_format=torch.channels_last),),
            {"scale_factor": 2, "mode": mode},
        )
    ]
    check(cases)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "nearest"},
        {"mode": "nearest-exact"},
        {"mode": "linear"},
        {"mode": "bicubic"},
        {"mode": "linear", "antialias": True},
        {"mode": "bicubic", "antialias": True},
    ],
    ids=str,
)
def test_factors_that_torch_ignores(options):
    """A factor that keeps a size, or doubles it, is ignored by some modes of torch."""
    smooth = {1: "linear", 2: "bilinear", 3: "trilinear"}
    cases = []
    for n in (1, 2, 3):
        if n != 2 and ("antialias" in options or options["mode"] == "bicubic"):
            continue
        mode = smooth[n] if options["mode"] == "linear" else options["mode"]
        for sizes, factors in (((3, 2, 2), (1.3, 2.2, 2.4)), ((5, 3, 2), (1.1, 2.2, 1.3))):
            given = {**options, "mode": mode, "scale_factor": factors[-n:]}
            cases.append(Case(F.interpolate, (tensor(1, 2, *sizes[-n:]),), given))
    check(cases)


@pytest.mark.parametrize("align", [False, True])
def test_linear(align):
    modes = {1: "linear", 2: "bilinear", 3: "trilinear"}
    cases = [
        Case(
            F.interpolate,
            (tensor(*IMAGES[n]),),
            {"size": size, "mode": modes[n], "align_corners": align},
        )
        for n in (1, 2, 3)
        for size in SIZES[n]
    ]
    more = [({"scale_factor": f}, ()) for f in (2, 1.7, 0.6)] + [
        ({"scale_factor": 1.7, "recompute_scale_factor": True}, ())
    ]
    cases += [
        Case(F.interpolate, (tensor(*IMAGES[2]),), {**extra, "mode": mode, "align_corners": align})
        for (extra, _), mode in itertools.product(more, ("bilinear", "bicubic"))
    ]
    cases += [
        Case(
            F.interpolate,
            (tensor(*IMAGES[2]),),
            {"size": size, "mode": "bicubic", "align_corners": align},
        )
        for size in SIZES[2]
    ]
    cases += [
        Case(
            F.interpolate,
            (tensor(1, 3, 5, 4, dtype=dtype),),
            {"scale_factor": 2, "mode": mode, "align_corners": align},
        )
        for dtype in (torch.float16, torch.bfloat16)
        for mode in ("bilinear", "bicubic")
    ]
    cases += [
        Case(
            F.interpolate,
            (tensor(2, 8, 5, 4).permute(0, 1, 3, 2),),
            {"scale_factor": 2, "mode": "bilinear", "align_corners": align},
        )
    ]
    # Sums of up to 16 numbers in another order.
    for case in cases:
        case.atol = None if case.args[0].dtype is not torch.float32 else 1e-5
    check(cases)


def test_smooth():
    cases = [
        Case(
            F.interpolate,
            (tensor(2, 3, 17, 23),),
            {"size": size, "mode": mode, "antialias": True, "align_corners": align},
            atol=1e-5,
        )
        for size in [(5, 7), (8, 40), (17, 23), (1, 1)]
        for mode in ("bilinear", "bicubic")
        for align in (False, True)
    ]
    cases += [
        Case(
            F.interpolate,
            (tensor(2, 3, 17, 23),),
            {"scale_factor": 0.37, "mode": mode, "antialias": True},
            atol=1e-5,
        )
        for mode in ("bilinear", "bicubic")
    ]
    check(cases)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample(padding):
    x, grid = tensor(2, 3, 7, 5), tensor(2, 4, 6, 2, low=-1.6, high=1.6, seed=1)
    edges = (
        torch.tensor([-1.0, 1.0, 0.0, -3.5, 2.25, 1e6])
        .reshape(1, 1, 6, 1)
        .expand(2, 1, 6, 2)
        .contiguous()
    )
    nowhere = torch.tensor([[[[torch.nan, 0.0], [0.2, torch.inf], [0.3, -0.5]]]])
    cases = []
    for mode, align in itertools.product(("bilinear", "nearest", "bicubic"), (False, True)):
        kwargs = {"mode": mode, "padding_mode": padding, "align_corners": align}
        cases += [
            Case(F.grid_sample, (x, grid), kwargs, atol=1e-5),
            Case(F.grid_sample, (tensor(1, 3, 1, 1), nowhere), kwargs, atol=1e-5),
            Case(F.grid_sample, (x, edges[:, :, :5]), kwargs, atol=1e-5),
        ]
        cases.append(
            Case(
                F.grid_sample,
                (tensor(2, 8, 7, 5).contiguous(memory_format=torch.channels_last), grid),
                kwargs,
                atol=1e-5,
            )
        )
        if mode != "bicubic":
            cases.append(
                Case(
                    F.grid_sample,
                    (tensor(2, 3, 5, 4, 7), tensor(2, 3, 4, 5, 3, low=-1.6, high=1.6)),
                    kwargs,
                    atol=1e-5,
                )
            )
    cases.append(
        Case(
            F.grid_sample,
            (x.half(), grid.half()),
            {"padding_mode": padding, "align_corners": True},
            atol=2e-2,
        )
    )
    check(cases)


def test_affine_grid():
    cases = [Case(F.affine_grid, (tensor(2, 2, 3), (2, 3, 5, 7), align)) for align in (False, True)]
    cases += [
        Case(F.affine_grid, (tensor(2, 3, 4), (2, 3, 5, 1, 7), align)) for align in (False, True)
    ]
    check(cases)


def test_dynamic_sizes():
    def run(x):
        up = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return (
            up,
            F.interpolate(x, size=(x.shape[2] * 2, 9), mode="bilinear"),
            F.interpolate(x, scale_factor=1.5, mode="bicubic"),
        )

    with program_of(run, (tensor(1, 2, 14, 10),), dynamic=True) as program:
        for size in [(14, 10), (6, 4), (3, 10)]:
            x = tensor(1, 2, *size)
            for have, want in zip(program.forward(x), run(x)):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    assert aten


class Interpolated(torch.nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(x, **self.options)


@pytest.mark.parametrize(
    "options",
    [
        {"scale_factor": (1.7, 0.6), "mode": "nearest"},
        {"scale_factor": (1.7, 2.4), "mode": "bilinear"},
        {"scale_factor": (1.3, 1.2), "mode": "bilinear"},
        {"scale_factor": (2.2, 1.3), "mode": "nearest"},
        {"scale_factor": 1.3, "mode": "area"},
        {"scale_factor": 1.3, "mode": "bicubic", "recompute_scale_factor": True},
    ],
    ids=lambda options: f"{options['mode']} {options['scale_factor']}",
)
def test_sizes_of_a_call_times_a_factor(options):
    module = Interpolated(**options)
    sides = torch.export.Dim("h", min=3, max=60), torch.export.Dim("w", min=4, max=60)
    x = tensor(1, 2, 10, 12)
    exported = torch.export.export(module, (x,), dynamic_shapes=({2: sides[0], 3: sides[1]},))
    with purevk.compile(exported) as program:
        for height, width in ((3, 4), (4, 5), (10, 50), (60, 33), (23, 60)):
            x = tensor(1, 2, height, width)
            torch.testing.assert_close(program.forward(x), module(x), atol=1e-4, rtol=1e-4)


def test_a_factor_that_doubles_lose():
    """int(90 * 0.7) is 62, and int(80 * 0.7) is 56."""
    side = torch.export.Dim("h", min=4, max=100)
    module, x = Interpolated(scale_factor=0.7, mode="nearest"), tensor(1, 2, 10, 10)
    exported = torch.export.export(module, (x,), dynamic_shapes=({2: side},))
    program = purevk.compile(exported)
    for height in (10, 4, 79, 80, 90, 100):
        x = tensor(1, 2, height, 10)
        assert torch.equal(program.forward(x), module(x))


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grids_with_nan_and_infinity(mode: str, dtype: torch.dtype) -> None:
    at = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 0.3, -0.9, 1.0, -1.2, 5.0], dtype=dtype)
    grid = torch.stack(torch.meshgrid(at, at, indexing="ij"), -1)[None]
    x = tensor(1, 2, 5, 4, dtype=dtype)
    check(
        [
            Case(
                F.grid_sample,
                (x, grid),
                {"mode": mode, "padding_mode": padding, "align_corners": aligned},
            )
            for padding in ("zeros", "border", "reflection")
            for aligned in (False, True)
        ]
    )


def test_antialiased_windows_of_many_elements() -> None:
    """More elements than one invocation of a software device may visit."""
    x = tensor(1, 2, 250, 301)
    options = {"antialias": True, "align_corners": False}
    check(
        [
            Case(F.interpolate, (x,), {"size": size, "mode": mode, **options}, rtol=1e-4, atol=1e-5)
            for size, mode in (((1, 2), "bilinear"), ((2, 3), "bicubic"))
        ]
    )


@pytest.mark.parametrize("scales", [(0.3, 0.4), (1.7, 0.9), (2.0, 3.0)])
def test_antialiased_results_beyond_the_image(scales: tuple[float, float]) -> None:
    """Scales that do not belong to the sizes: what covers no element of the image is 0."""
    x = tensor(1, 2, 5, 7)
    cases = [
        Case(resize, (x, size, False, *scales))
        for resize in (aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default)
        for size in ([9, 13], [3, 2], [12, 3])
    ]
    for case in cases:
        case.expected = torch.nan_to_num(case.fn(*case.args))  # torch reads beyond the image there
    check(cases)
