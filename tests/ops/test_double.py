"""Operators in double precision that kernels have for float alone: on the device, to the digits of
the type."""

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from purevk import knobs
from tests.ops.harness import Case, aten, check, context, host_nodes, program_of, tensor

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(
        "'float64' not in context().traits.features", reason="the device has no double precision"
    ),
]
D = torch.float64


def wide(*sizes: int, seed: int = 0) -> torch.Tensor:
    return tensor(*sizes, dtype=D, seed=seed) + tensor(*sizes, dtype=D, seed=seed + 1) * 2**-30


def odd(*sizes: int) -> torch.Tensor:
    """With NaN, infinities, zeros of both signs and equal elements."""
    made = wide(*sizes)
    flat = made.view(-1)
    flat[:7] = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1.0 + 2**-52, 1.0], dtype=D
    )
    return made


def run(*cases: Case) -> None:
    for case in cases:
        case.rtol = 1e-12 if case.rtol is None else case.rtol
        case.atol = 1e-13 if case.atol is None else case.atol
    check(list(cases))


x, y, image = wide(5, 13, 17), wide(17, 9), wide(2, 6, 9, 11)
near = wide(64).mul(2**-50).add(1.0)[torch.arange(200) % 64]  # float32 has them all equal
close = wide(64).mul(2**-30).add(1.0)


def test_lgamma():
    """Exactly 0 at 1 and 2; beside them, and where steps lead to them, to a few units in the last
    place."""
    close = torch.tensor([1e-12, 1e-9, 1e-4, 0.1, 0.25, 0.49], dtype=D)
    at_zero = torch.tensor([1.0, 2.0], dtype=D)
    numbers = torch.cat([1 + close, 1 - close, 2 + close, 2 - close, torch.linspace(2.5, 20, 99)])
    run(
        Case(torch.lgamma, (at_zero,), rtol=0.0, atol=0.0),
        Case(torch.lgamma, (numbers.to(D),), rtol=3e-15, atol=0.0),
    )


def test_integral_parts():
    """Ties, and fractions of numbers above 2^31."""
    ties = torch.arange(-9, 10, dtype=D) / 2
    large = torch.tensor([2**31 + 0.5, 2**33 + 1.5, 2**51 + 0.5, 2.0**52 - 0.5, 1e300], dtype=D)
    below = torch.tensor([0.5 - 2**-54, 5e-324, torch.inf, torch.nan, -0.0], dtype=D)
    numbers = torch.cat([ties, large, -large, below, -below])
    functions = (torch.round, torch.trunc, torch.frac, torch.floor, torch.ceil, torch.isfinite)
    run(
        *(Case(fn, (numbers,), atol=0.0) for fn in functions),
        *(Case(lambda t, fn=fn: torch.signbit(fn(t)), (numbers[:-2],)) for fn in functions[:2]),
        Case(torch.div, (large, ties[:5]), {"rounding_mode": "trunc"}),
        Case(torch.round, (ties / 10,), {"decimals": 1}),
    )


def test_quantization_per_token_rounds_ties_to_even():
    """Scales that are powers of two put numbers half way between two quantized values."""
    from torch.ao.quantization.fx import _decomposed  # noqa: F401

    operator = torch.ops.quantized_decomposed.quantize_per_token.default
    numbers = torch.arange(-128, 128).div(128).repeat(3, 1)
    scales, zeros = (
        torch.tensor([[2**-6], [2**-5], [2**-7]], dtype=D),
        torch.tensor([[10], [-3], [0]]),
    )
    run(Case(operator, (numbers, scales, zeros, -128, 127, torch.int8)))


def test_order():
    rows = odd(3, 200)
    cases = [
        Case(torch.sort, (t,), {"dim": d, "descending": f, "stable": True})
        for t in (odd(4, 9), rows, near[None])
        for d, f in ((-1, False), (0, True))
    ]
    cases += [
        Case(torch.argsort, (near,), {"stable": True}),
        Case(torch.msort, (x,)),
        Case(torch.topk, (wide(4, 300), 5)),
        Case(torch.topk, (close, 3)),
    ]
    cases += [Case(torch.kthvalue, (rows, 20, 1)), Case(torch.kthvalue, (close, 3))]
    cases += [
        Case(f, args)
        for f in (torch.median, torch.nanmedian)
        for args in ((rows, 1), (wide(4, 7), 0), (rows,), (wide(4, 6),))
    ]
    edges = torch.cat([near[:64].sort()[0], torch.tensor([2.0, torch.inf], dtype=D)])
    cases += [Case(torch.searchsorted, (edges, near), {"right": r}) for r in (False, True)] + [
        Case(torch.bucketize, (odd(4, 5), edges))
    ]
    cases += [
        Case(torch.isin, (near, near[:3])),
        Case(torch.unique, (near,)),
        Case(torch.unique, (odd(40),), {"return_inverse": True, "return_counts": True}),
    ]
    cases += [
        Case(torch.unique_consecutive, (near.sort()[0],)),
        Case(lambda t: torch.mode(t)[0], (near,)),
    ]
    run(*cases)


def test_indexing():
    index = torch.tensor([[0, 2, 2, 4, 1], [3, 3, 3, 0, -2 + 5]])
    big, some = odd(6, 5), wide(2, 5)
    chosen = torch.tensor([5, 0, 0, 3])
    cases = [
        Case(torch.scatter, (big, 0, index, some)),
        Case(torch.scatter, (big, 0, index, 0.1)),
        Case(torch.scatter_add, (big, 0, index, some)),
    ]
    cases += [
        Case(torch.scatter_reduce, (wide(6, 5), 0, index, some, how), {"include_self": own})
        for how in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    ]
    cases += [
        Case(torch.index_add, (big, 0, chosen, wide(4, 5)), {"alpha": 0.1}),
        Case(torch.index_fill, (big, 1, chosen[1:], 0.1)),
        Case(torch.index_copy, (big, 0, chosen[1:3], wide(2, 5))),
    ]
    cases += [
        Case(torch.index_reduce, (wide(6, 5), 0, chosen, wide(4, 5), how))
        for how in ("prod", "mean", "amax", "amin")
    ]
    cases += [
        Case(torch.index_put, (big, (chosen,), wide(4, 5)), {"accumulate": True}),
        Case(torch.index_put, (big, (chosen[1:],), wide(5))),
    ]
    cases += [
        Case(torch.index_put, (big, (chosen, torch.tensor([1, 1, 1, 2])), wide(4))),
        Case(torch.put, (big, chosen, wide(4)), {"accumulate": True}),
        Case(torch.masked_scatter, (big, big > 0, wide(40))),
    ]
    cases += [
        Case(torch.take, (big, chosen)),
        Case(torch.gather, (big, 0, index)),
        Case(torch.histc, (wide(500), 10, -2, 2)),
        Case(torch.histc, (close, 7)),
    ]
    cases += [
        Case(torch.scatter_add, (wide(4), 0, torch.randint(0, 4, (5000,)), wide(5000)), rtol=1e-11)
    ]
    run(*cases)


def test_norms_and_variances():
    weight, bias = wide(6), wide(6, seed=3)
    cases = [
        Case(torch.linalg.vector_norm, (t, p, d))
        for t in (x, odd(3, 9))
        for p in (2, 1, 0, torch.inf, -torch.inf)
        for d in (1, None)
    ]
    cases += [
        Case(f, (t,), {"dim": d, "correction": c, "keepdim": True})
        for f in (torch.var, torch.std, torch.var_mean)
        for t in (x, odd(3, 9))
        for d, c in ((1, 0), ((0, 1), 1))
    ]
    cases += [
        Case(torch.var, (x[:1, :, 0], 0)),
        Case(torch.var, (x[:0], 0)),
        Case(torch.dist, (x, x.flip(0))),
        Case(torch.cdist, (x, x.flip(0))),
        Case(torch.cdist, (x, x.flip(1), 1.0)),
        Case(torch.pdist, (x[0],)),
    ]
    cases += [
        Case(F.layer_norm, (x, (13, 17), wide(13, 17), wide(13, 17, seed=1))),
        Case(F.rms_norm, (x, (17,), wide(17))),
    ]
    cases += [
        Case(F.group_norm, (image, 3, weight, bias)),
        Case(F.instance_norm, (image,)),
        Case(F.batch_norm, (image, wide(6), wide(6).abs(), weight, bias)),
    ]
    cases += [
        Case(torch.native_layer_norm, (x, (17,), None, None, 1e-5)),
        Case(F.normalize, (x,)),
        Case(F.pairwise_distance, (x, x.flip(0))),
    ]
    run(*cases)


def test_exponentials():
    rows = odd(3, 9)
    empty = torch.full((2, 3), -torch.inf, dtype=D)
    cases = [
        Case(f, (t, d))
        for f in (F.softmax, F.log_softmax, torch.logsumexp, torch.logcumsumexp)
        for t in (x, rows, wide(2, 3000) * 100, empty)
        for d in (0, -1)
    ]
    cases += [
        Case(F.softmax, (tensor(3, 5), 1), {"dtype": D}),
        Case(torch.linalg.vector_norm, (x, 3.5, 1)),
        Case(torch.cdist, (x, x, 3.0)),
    ]
    heads = [wide(2, 3, 7, 8, seed=n) for n in range(3)]
    cases += [
        Case(F.scaled_dot_product_attention, heads),
        Case(F.scaled_dot_product_attention, heads, {"is_causal": True}),
        Case(F.scaled_dot_product_attention, (*heads, torch.ones(7, 7, dtype=torch.bool).tril())),
    ]
    cases += [
        Case(F.cross_entropy, (wide(5, 7), torch.tensor([0, 6, 3, 2, 1]))),
        Case(torch.special.logsumexp, (wide(0, 4), 1)),
    ]
    run(*cases)


def test_windows():
    line, volume = wide(2, 6, 20), wide(1, 4, 6, 7, 5)
    cases = [
        Case(F.max_pool2d, (t, 3, 2, 1), {"return_indices": i, "ceil_mode": True})
        for t in (image, odd(1, 2, 9, 9))
        for i in (False, True)
    ]
    cases += [
        Case(F.avg_pool2d, (image, 3, 2, 1), {"count_include_pad": c, "divisor_override": d})
        for c, d in ((True, None), (False, None), (True, 7))
    ]
    cases += [
        Case(F.max_pool1d, (line, 3)),
        Case(F.max_pool3d, (volume, 2)),
        Case(F.avg_pool1d, (line, 3)),
        Case(F.avg_pool3d, (volume, 2)),
    ]
    cases += [
        Case(F.adaptive_avg_pool1d, (line, 7)),
        Case(F.adaptive_avg_pool2d, (image, (4, 1))),
        Case(F.adaptive_avg_pool3d, (volume, 3)),
        Case(F.adaptive_max_pool2d, (image, (4, 3))),
    ]
    cases += [
        Case(
            lambda t: F.max_unpool2d(
                *F.max_pool2d(t, 2, return_indices=True), 2, output_size=t.shape[-2:]
            ),
            (image[..., :8, :8],),
        ),
        Case(F.pixel_shuffle, (wide(1, 8, 3, 3), 2)),
    ]
    cases += [
        Case(F.conv1d, (line, wide(4, 3, 3), wide(4)), {"groups": 2, "stride": 2, "padding": 2}),
        Case(F.conv2d, (image, wide(8, 6, 3, 2), wide(8)), {"dilation": 2, "padding": "same"}),
    ]
    cases += [
        Case(F.conv2d, (image, wide(6, 1, 3, 3)), {"groups": 6, "stride": (2, 1), "padding": 1}),
        Case(F.conv3d, (volume, wide(2, 4, 2, 3, 1), wide(2)), {"padding": 1}),
        Case(F.conv2d, (image, wide(5, 6, 1, 1))),
    ]
    cases += [
        Case(
            F.conv_transpose1d, (line, wide(6, 4, 3), wide(4)), {"stride": 2, "output_padding": 1}
        ),
        Case(
            F.conv_transpose2d, (image, wide(6, 2, 3, 3)), {"stride": 2, "padding": 1, "groups": 2}
        ),
        Case(F.conv_transpose2d, (image, wide(6, 4, 2, 2), wide(4)), {"stride": 2}),
    ]
    cases += [
        Case(F.conv_transpose3d, (volume, wide(4, 2, 2, 2, 2)), {"stride": 2}),
        Case(F.unfold, (image, 3)),
        Case(F.fold, (wide(2, 12, 20), (5, 6), 2)),
    ]
    run(*cases)


def test_resampling():
    grid, flat = wide(2, 5, 4, 2) * 0.5, wide(1, 3, 5, 6, 3) * 0.5
    cases = [
        Case(F.interpolate, (image,), {"mode": m, "size": (5, 20), "align_corners": a})
        for m in ("bilinear", "bicubic")
        for a in (False, True)
    ]
    cases += [
        Case(F.interpolate, (image,), {"mode": m, "scale_factor": 0.7})
        for m in ("nearest", "nearest-exact", "bilinear", "area")
    ]
    cases += [
        Case(F.interpolate, (image,), {"mode": m, "size": (4, 5), "antialias": True})
        for m in ("bilinear", "bicubic")
    ]
    cases += [
        Case(F.interpolate, (wide(2, 3, 9),), {"mode": "linear", "size": 7}),
        Case(F.interpolate, (wide(1, 2, 3, 4, 5),), {"mode": "trilinear", "size": (4, 5, 7)}),
    ]
    cases += [
        Case(F.grid_sample, (image, grid), {"mode": m, "padding_mode": p, "align_corners": a})
        for m, p, a in (
            ("bilinear", "zeros", False),
            ("bilinear", "reflection", True),
            ("nearest", "border", False),
            ("bicubic", "zeros", True),
        )
    ]
    cases += [
        Case(F.grid_sample, (wide(1, 2, 4, 5, 6), flat), {"align_corners": False}),
        Case(F.affine_grid, (wide(2, 2, 3), (2, 3, 4, 5)), {"align_corners": False}),
    ]
    run(*cases)


def test_factors():
    a, b = wide(3, 6, 6) + 3 * torch.eye(6, dtype=D), wide(3, 6, 2)
    positive = a @ a.mT
    lu, pivots, _ = torch.linalg.lu_factor_ex(a)
    cases = [
        Case(op, (a,))
        for op in (
            torch.linalg.det,
            torch.linalg.slogdet,
            aten.linalg_inv_ex.default,
            aten.linalg_lu_factor_ex.default,
            torch.linalg.lu,
            torch.linalg.qr,
        )
    ]
    cases += [
        Case(aten._linalg_solve_ex.default, (a, b)),
        Case(aten.linalg_lu_solve.default, (lu, pivots, b)),
        Case(aten.linalg_cholesky_ex.default, (positive,)),
    ]
    cases += [
        Case(torch.linalg.solve_triangular, (a, b), {"upper": True}),
        Case(torch.cholesky_solve, (b, torch.linalg.cholesky(positive))),
    ]
    cases += [
        Case(torch.linalg.householder_product, torch.geqrf(wide(7, 4))),
        Case(aten.lu_unpack.default, (lu, pivots)),
    ]
    cases += [Case(F.bilinear, (wide(3, 4), wide(3, 5), wide(2, 4, 5), wide(2)))]
    for case in cases:
        case.rtol, case.atol = 1e-11, 1e-12
    run(*cases)


def test_sizes_of_a_call():
    """One program at many sizes; tensors without elements."""

    def fn(t):
        return (
            F.softmax(t, 1),
            t.sort(0)[0],
            t.var(1),
            F.layer_norm(t, (12,)),
            F.max_pool1d(t, 2),
            torch.logcumsumexp(t, 0),
            t.median(-1)[0],
            t.logsumexp(1),
        )

    with program_of(fn, (wide(7, 5, 12),), dynamic=True) as program:
        assert not host_nodes(program) or knobs.DISABLE()
        for a, b in ((7, 5), (1, 2), (3, 4)):
            given = wide(a, b, 12, seed=a)
            for have, want in zip(program.forward(given), fn(given)):
                torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13)
    cases = [
        Case(f, (wide(0, 4), 1))
        for f in (F.softmax, torch.sort, torch.logcumsumexp, torch.logsumexp, torch.cumsum)
    ]
    run(
        *cases,
        Case(torch.logsumexp, (wide(3, 0), 1)),
        Case(F.layer_norm, (wide(0, 4), (4,))),
        Case(torch.std, (wide(3, 0), 1)),
    )


@pytest.mark.skipif(
    os.environ.get("PUREVK_TEST_TRAITS") == "gpu",
    reason="a software device with the traits of a GPU ends long loops",
)
def test_long_rows():
    row = wide(2, 70001)
    run(
        Case(torch.logcumsumexp, (row, 1)),
        Case(torch.median, (row, 1)),
        Case(torch.sort, (wide(1, 5000),)),
        Case(F.log_softmax, (row, 1)),
        Case(torch.var, (row, 1)),
    )
    run(Case(F.conv2d, (wide(1, 900, 9, 9), wide(2, 900, 9, 9)), rtol=1e-10, atol=1e-10))


def test_without_double_precision():
    """All of it is on the CPU, and right, where the device lacks it."""
    traits = context().traits
    lacking = replace(traits, features=traits.features - {"float64"})
    context().traits = lacking
    try:
        for fn in (
            lambda t: F.softmax(t, 1),
            torch.sort,
            lambda t: F.conv1d(t, t[:2, :, :3].contiguous()),
            torch.std,
        ):
            with program_of(fn, (x,)) as program:
                assert host_nodes(program)
                made = program.forward(x)
            for have, want in zip(
                made if isinstance(made, tuple) else (made,), pytree.tree_leaves(fn(x))
            ):
                torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-13)
    finally:
        context().traits = traits


def test_beside_float32():
    """What follows a kernel of float32 is no part of it; numbers that are made have all digits."""
    a, w, pixels = tensor(4, 16), tensor(8, 16), tensor(1, 4, 8, 8)
    cases = [
        Case(lambda a, w, b: (F.linear(a, w).double() * b).exp(), (a, w, wide(8))),
        Case(lambda a, w, b: (F.linear(a, w) * b).float(), (a, w, wide(8))),
    ]
    cases += [
        Case(lambda t, k: F.conv2d(t, k).double() + 0.1, (pixels, tensor(8, 4, 3, 3))),
        Case(lambda t: F.layer_norm(t, (16,)).double() * 0.1, (a,)),
        Case(lambda t: F.group_norm(t, 2).double() * 0.1, (pixels,)),
    ]
    for case in cases:
        case.rtol, case.atol = 1e-5, 1e-5
    cases += [
        Case(lambda t: torch.linspace(0, 1, 7, dtype=D) + t, (wide(7),)),
        Case(lambda t: torch.arange(0, 0.75, 0.1, dtype=D) + t, (wide(8),)),
        Case(lambda t: torch.full((7,), 0.1, dtype=D) + t, (wide(7),)),
    ]
    run(*cases)


def test_rare_functions():
    some = torch.cat(
        [
            torch.linspace(-40, 40, 201, dtype=D),
            torch.logspace(-300, 2.8, 100, dtype=D),
            torch.tensor([0.0, -0.0, torch.nan, -700, 29.999, 30], dtype=D),
        ]
    )
    shares = torch.cat(
        [
            torch.logspace(-300, -0.01, 200, dtype=D),
            1 - torch.logspace(-16, -1, 50, dtype=D),
            torch.tensor([0, 1, -1, 2, 0.5, torch.nan], dtype=D),
        ]
    )
    parts = torch.cat(
        [some, torch.tensor([torch.inf, -torch.inf, 5e-324, -2.2e-308, 3e-320, 1e308], dtype=D)]
    )
    run(
        *(
            Case(f, (some,), atol=1e-300)
            for f in (torch.special.i0, torch.special.i0e, torch.special.i1, torch.special.i1e)
        ),
        Case(torch.special.ndtri, (shares,)),
        Case(torch.frexp, (parts,)),
    )


@pytest.mark.parametrize("function", [torch.special.gammainc, torch.special.gammaincc])
def test_incomplete_gamma_functions(function):
    """Against exact ones: torch's are off by 1e-9."""
    mpmath = pytest.importorskip("mpmath")
    random = torch.Generator().manual_seed(1)
    a = torch.cat(
        [
            torch.rand(60, generator=random, dtype=D) * 30,
            10 ** (torch.rand(60, generator=random, dtype=D) * 8 - 4),
        ]
    )
    b = torch.cat(
        [
            a[:30] * (1 + 0.1 * torch.randn(30, generator=random, dtype=D)),
            torch.rand(60, generator=random, dtype=D) * 40,
            a[90:] * 1.05,
        ]
    )
    with mpmath.workdps(40):
        upper = function is torch.special.gammaincc
        wanted = [
            float(
                mpmath.gammainc(p, q if upper else 0, mpmath.inf if upper else q, regularized=True)
            )
            for p, q in zip(a.tolist(), b.tolist())
        ]
    run(Case(function, (a, b), rtol=2e-11, atol=1e-300, expected=[torch.tensor(wanted, dtype=D)]))
    odd = torch.tensor([0.0, 1, torch.inf, -1, 3], dtype=D)
    run(Case(function, torch.meshgrid(odd, odd, indexing="ij")))
