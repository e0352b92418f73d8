"""Reductions over every set of dims, softmax and norms."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random

import pytest
import torch
import torch.nn.functional as F

from purevk.dtypes import DType
from purevk.graph.context import typical_traits
from purevk.ir import GuardLog
from purevk.llm.graphs import GraphBuilder
from purevk.passes.pipeline import optimize
from purevk.schedule.planning import make_plan
from tests.ops.harness import (
    Case,
    aten,
    check,
    context,
    dispatches,
    flushed,
    program_of,
    tensor,
    works,
)
from tests.ops.quantized.harness import kernels_of

pytestmark = pytest.mark.device

DTYPES = (
    torch.float32,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
    torch.bool,
)
SHAPES = ((3, 5, 7), (4, 8), (2, 3, 4, 5), (17,), (2, 1, 130))
OVER_DIMS = {
    "sum": aten.sum.dim_IntList, "mean": aten.mean.dim, "amax": aten.amax.default, "amin": aten.amin.default,
    "any": aten.any.dims, "all": aten.all.dims,
}  # fmt: skip


def dim_sets(rank):
    for count in range(1, rank + 1):
        yield from (list(dims) for dims in itertools.combinations(range(rank), count))


@pytest.mark.parametrize("name", OVER_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_over_dims(name, dtype):
    overload = OVER_DIMS[name]
    cases = []
    for shape in SHAPES:
        x = tensor(*shape, dtype=dtype)
        if name == "any":
            x = x * (tensor(*shape, dtype=torch.uint8, seed=7) == 2).to(dtype)
        if works(overload, x, [0]) is None:
            continue
        for number, dims in enumerate(dim_sets(len(shape))):
            cases.append(Case(overload, (x, dims, bool(number % 2))))
        cases.append(Case(overload, (x, [-1], True)))
    if not cases:
        pytest.skip("torch does not reduce this dtype so")
    check(cases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_tensors_and_single_dims(dtype):
    cases = []
    for shape in ((3, 5, 7), (13,), (), (2, 64), (1, 1)):
        x = tensor(*shape, dtype=dtype, low=-2, high=2)
        for overload in (
            aten.sum.default,
            aten.mean.default,
            aten.prod.default,
            aten.max.default,
            aten.min.default,
            aten.any.default,
            aten.all.default,
        ):
            if works(overload, x) is not None:
                # The mean or sum of everything may be near 0; its error is that of the terms.
                cases.append(
                    Case(
                        overload,
                        (x,),
                        rtol=2e-5
                        if overload is aten.prod.default and dtype is torch.float32
                        else None,
                        atol=1e-5 if dtype is torch.float32 else None,
                    )
                )
        for overload in (aten.prod.dim_int, aten.any.dim, aten.all.dim):
            for dim in (0, -1):
                if works(overload, x, dim) is not None:
                    cases.append(Case(overload, (x, dim)))
                    cases.append(Case(overload, (x, dim, True)))
        for overload in (aten.sum.dim_IntList, aten.mean.dim):
            for dims in ([], None, [0]):
                if works(overload, x, dims) is not None:
                    cases.append(
                        Case(
                            overload,
                            (x, dims, False),
                            atol=1e-5 if dtype is torch.float32 else None,
                        )
                    )
    check(cases)


def test_dtype_argument():
    """The sum is taken in the wanted type: in float32 of many halves, as int64 of many bytes."""
    half = torch.full((300, 300), 1.5, dtype=torch.float16)
    bytes_ = torch.full((4, 1000), 255, dtype=torch.uint8)
    cases = [
        Case(aten.sum.dim_IntList, (half, [0, 1]), {"dtype": torch.float32}),
        Case(aten.sum.default, (half,), {"dtype": torch.float32}),
        Case(aten.sum.dim_IntList, (bytes_, [1])),
        Case(aten.sum.default, (bytes_,)),
        Case(aten.sum.dim_IntList, (bytes_, [1]), {"dtype": torch.int32}),
        Case(aten.mean.dim, (bytes_, [1]), {"dtype": torch.float32}),
        Case(aten.mean.dim, (half, [0])),
        Case(aten.sum.default, (half > 0,)),
        Case(aten.mean.default, (tensor(5, 7, dtype=torch.int64),), {"dtype": torch.float32}),
        Case(aten.prod.dim_int, (tensor(3, 5, dtype=torch.int8), 1)),
        Case(
            aten.sum.dim_IntList, (tensor(5, 7, dtype=torch.float32), [1]), {"dtype": torch.float16}
        ),
        Case(aten.sum.dim_IntList, (tensor(5, 7), [1]), {"dtype": torch.int64}),
    ]
    check(cases)


def test_long_rows_keep_their_digits():
    """Sums of 100 thousand numbers: within float32 rounding of a pairwise sum."""
    x = torch.rand(3, 100003, generator=torch.Generator().manual_seed(1))
    wanted = x.double()
    y = torch.rand(3, 1_000_003, generator=torch.Generator().manual_seed(2))
    check(
        [
            Case(aten.sum.default, (y,), rtol=1e-5, expected=y.double().sum().float()),
            Case(aten.amin.default, (y, [0, 1])),
            Case(
                aten.sum.dim_IntList,
                (y.t().contiguous(), [0]),
                rtol=1e-5,
                expected=y.double().sum(1).float(),
            ),
            Case(aten.sum.dim_IntList, (x, [1]), rtol=2e-6, expected=wanted.sum(1).float()),
            Case(aten.mean.dim, (x, [1]), rtol=2e-6, expected=wanted.mean(1).float()),
            Case(aten.sum.default, (x,), rtol=2e-6, expected=wanted.sum().float()),
            Case(
                aten.sum.dim_IntList,
                (x.t().contiguous(), [0]),
                rtol=2e-5,
                expected=wanted.sum(1).float(),
            ),
            Case(aten.amax.default, (x, [1])),
            Case(aten.sum.dim_IntList, ((x * 1000).long(), [1])),
        ]
    )


def test_extremes():
    """NaN and infinity in reductions, and integers at the ends of their range."""
    x = torch.tensor(
        [
            [1.0, math.nan, 2.0],
            [math.inf, -math.inf, 0.0],
            [-math.inf, -1.0, -2.0],
            [math.inf, 1.0, 5.0],
        ]
    )
    cases = [
        Case(overload, (t, [1]))
        for overload in (aten.amax.default, aten.amin.default, aten.sum.dim_IntList, aten.mean.dim)
        for t in (x, x.half())
    ]
    for dtype in (torch.int32, torch.int64, torch.int8):
        info = torch.iinfo(dtype)
        y = torch.tensor(
            [
                [info.min, info.max, -1],
                [info.min, info.min, info.min],
                [info.max, info.max, info.max],
            ],
            dtype=dtype,
        )
        cases += [
            Case(overload, (y, [1]))
            for overload in (aten.amax.default, aten.amin.default, aten.sum.dim_IntList)
        ]
    cases += [
        Case(aten.any.dim, (x, 1)),
        Case(aten.all.dim, (x, 1)),
        Case(aten.any.dim, (torch.tensor([[0.0, -0.0], [math.nan, 0.0], [1e-30, 0.0]]), 1)),
    ]
    check(cases)


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
def test_softmax(log):
    overload = aten._log_softmax.default if log else aten._softmax.default
    cases = []
    for dtype in (torch.float32, torch.float16):
        for shape in ((3, 5, 7), (2, 3, 4, 8), (129,), (5, 257), (2, 2, 2, 2, 3), (4, 1), ()):
            for dim in range(-1, max(len(shape), 1)):
                cases.append(
                    Case(overload, (tensor(*shape, dtype=dtype, low=-10, high=10), dim, False))
                )
        large = torch.tensor(
            [
                [1e4, -1e4, 0.0],
                [-math.inf, 0.0, 1.0],
                [math.inf, 0.0, 1.0],
                [math.nan, 0.0, 1.0],
                [-math.inf, -math.inf, -math.inf],
                [80.0, 81.0, 82.0],
            ]
        )
        cases.append(Case(overload, (large.to(dtype), -1, False)))
    public = torch.log_softmax if log else torch.softmax
    cases.append(
        Case(
            lambda x: public(x, -1, dtype=torch.float32),
            (tensor(3, 9, dtype=torch.float16),),
            name="float32 of halves",
        )
    )
    cases.append(
        Case(lambda x: public(x.transpose(0, 2), 1), (tensor(3, 9, 4),), name="transposed")
    )
    cases.append(Case(lambda x: public(x[:, 1:, ::2], 1) * 2, (tensor(3, 9, 4),), name="sliced"))
    check(cases)


def test_layer_norm():
    cases = []
    for dtype in (torch.float32, torch.float16):
        for shape, count in (
            ((2, 5, 16), 1),
            ((3, 7), 1),
            ((2, 3, 5, 4), 2),
            ((11,), 1),
            ((2, 130), 1),
            ((4, 257), 1),
            ((2, 3, 4), 3),
        ):
            x, normalized = tensor(*shape, dtype=dtype), list(shape[-count:])
            weight, bias = (
                tensor(*normalized, dtype=dtype, seed=2),
                tensor(*normalized, dtype=dtype, seed=3),
            )
            for w, b in ((weight, bias), (weight, None), (None, None)):
                # Norms divide by a spread that has the rounding of a sum of squares.
                cases.append(
                    Case(
                        aten.layer_norm.default,
                        (x, normalized, w, b, 1e-5),
                        atol=1e-5 if dtype is torch.float32 else 4e-3,
                    )
                )
            cases.append(
                Case(
                    lambda *a: aten.native_layer_norm.default(*a)[0],
                    (x, normalized, weight, bias, 1e-5),
                    name="native",
                    atol=1e-5 if dtype is torch.float32 else 4e-3,
                )
            )
    cases.append(
        Case(
            aten.native_layer_norm.default, (tensor(3, 5, 8), [8], tensor(8), None, 1e-5), atol=1e-5
        )
    )
    x = (
        tensor(2, 9) * 1e-3 + 1000
    )  # the spread is far below the mean; torch itself is 8e-3 from the truth
    cases.append(Case(aten.layer_norm.default, (x, [9], None, None, 1e-5), atol=6e-2))
    cases.append(
        Case(
            lambda x, w: F.layer_norm(x.transpose(0, 1), (8,), w) + 1,
            (tensor(3, 5, 8), tensor(8)),
            name="transposed",
            atol=1e-5,
        )
    )
    cases.append(
        Case(
            lambda x, r, w, b: F.layer_norm(x + r, (8,), w, b),
            (tensor(3, 8), tensor(3, 8, seed=1), tensor(8), tensor(8)),
            name="of a sum",
            atol=1e-5,
        )
    )
    check(cases)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rms_norm_of_small_values_without_eps(dtype):
    """torch takes the epsilon of float32, in which it computes."""
    x, weight = (0.01 * tensor(3, 32)).to(dtype), tensor(32, seed=1).to(dtype)
    tolerance = (
        {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 2e-3, "atol": 2e-3}
    )
    check(
        Case(aten.rms_norm.default, (x, [32], weight), **tolerance),
        Case(aten.rms_norm.default, (x, [32]), **tolerance),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape, dims", [((1 << 15,), [0]), ((1 << 13, 3), [0]), ((3, 1 << 14), [1])]
)
def test_parts_of_rows(shape, dims, dtype):
    """Long rows are reduced in parts, which are float32 or as wide."""
    x, tolerance = tensor(*shape).to(dtype), {"rtol": 1e-2, "atol": 1e-2}
    check(
        Case(aten.sum.dim_IntList, (0.01 * x, dims), **tolerance),
        Case(aten.mean.dim, (x, dims), **tolerance),
        Case(aten.amax.default, (x, dims), **tolerance),
        Case(torch.linalg.vector_norm, (x, 2, dims), **tolerance),
        Case(aten.any.dims, (x > 3, dims)),
        Case(torch.logsumexp, (x, dims), **tolerance),
    )


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_negative_zeros_are_false(dtype):
    x = torch.tensor([[1, -0.0, 2], [0.0, -0.0, 0.0], [1, math.nan, 2]]).to(dtype)
    long = torch.full((1 << 15,), -0.0, dtype=dtype)
    check(
        *(
            Case(fn, (each, dims))
            for fn in (aten.all.dims, aten.any.dims)
            for each, dims in ((x, [1]), (x, [0]), (x, [0, 1]), (long, [0]))
        )
    )


def test_rms_norm():
    cases = []
    for dtype in (torch.float32, torch.float16):
        for shape, count in (((2, 5, 16), 1), ((3, 7), 1), ((2, 3, 5, 4), 2), ((4, 257), 1)):
            x, normalized = tensor(*shape, dtype=dtype), list(shape[-count:])
            for weight in (tensor(*normalized, dtype=dtype, seed=2), None):
                for eps in (None, 1e-3):
                    cases.append(
                        Case(
                            aten.rms_norm.default,
                            (x, normalized, weight, eps),
                            atol=1e-5 if dtype is torch.float32 else 4e-3,
                        )
                    )
    check(cases)


def test_batch_norm():
    cases = []
    for dtype in (torch.float32, torch.float16):
        for shape in ((2, 5, 6, 7), (3, 8), (1, 4, 9)):
            c = shape[1]
            stats = tensor(c, seed=3), tensor(c, low=0.2, high=2.0, seed=4)
            weight, bias = tensor(c, seed=5), tensor(c, seed=6)
            for w, b in ((weight, bias), (None, None), (weight, None)):
                for fixed in (False, True):
                    args = (
                        tensor(*shape, dtype=dtype),
                        *[None if t is None else t.to(dtype) for t in (w, b, *stats)],
                        0.1,
                        1e-3,
                    )
                    constants = (
                        tuple(n for n, a in enumerate(args) if n and isinstance(a, torch.Tensor))
                        if fixed
                        else ()
                    )
                    cases.append(
                        Case(
                            lambda *a: aten._native_batch_norm_legit_no_training.default(*a)[0],
                            args,
                            constants=constants,
                            name=f"batch norm {dtype}{shape}",
                            atol=1e-5 if dtype is torch.float32 else 4e-3,
                        )
                    )
    check(cases)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_few_long_rows_are_cut(device):
    """Rows, columns and whole tensors too few to keep a device busy are reduced in parts, whatever
    their lengths."""
    rows, columns, flat = tensor(3, 70001), tensor(70001, 3), tensor(1 << 18)
    near = {"rtol": 1e-5, "atol": 1e-3}  # of sums around 0 of 10^5 numbers
    cases = [
        Case(aten.sum.dim_IntList, (x, dims), **near)
        for x in (rows, columns)
        for dims in ([0], [1], [0, 1])
    ]
    cases += [
        *[Case(aten.mean.dim, (x, [n]), **near) for n, x in enumerate((columns, rows))],
        Case(aten.sum.default, (flat,), **near),
        Case(aten.amax.default, (columns, [0])),
        Case(aten.max.default, (flat.half(),)),
        Case(aten.any.default, (flat > 9,)),
        Case(aten.all.default, (flat > -9,)),
        Case(aten.sum.default, ((flat * 9).int(),)),
        Case(aten.sum.dim_IntList, ((columns * 9).to(torch.int64), [0])),
        Case(aten.prod.dim_int, (1 + columns * 1e-6, 0), rtol=5e-3),  # 70001 roundings
    ]
    with kernels_of(device):
        shared = context()
        shared.traits = dataclasses.replace(
            shared.traits, cores=4
        )  # kernels_of puts the traits back
        check(cases)
        with program_of(lambda x: x.sum(0), (columns,)) as program:
            assert dispatches(program) == ["reduce/reduce.comp", "reduce/reduce.comp"]


@pytest.mark.parametrize("device", ["gpu", "plain"])
def test_columns(device):
    """Workgroups that share neighbouring columns: whole ones, ends, several outer dims, and numbers
    that are none."""
    odd = tensor(600, 64)
    odd[3, 5], odd[:, 7], odd[9, 8], odd[599, 9], odd[5, 10] = (
        math.nan,
        -math.inf,
        math.inf,
        math.nan,
        -math.inf,
    )
    cases = [
        Case(f, (odd, [0]))
        for f in (aten.logsumexp.default, aten.amax.default, aten.var.correction)
    ]
    cases += [
        Case(aten.max.dim, (odd, 0)),
        Case(aten._softmax.default, (odd, 0, False)),
        Case(aten._softmax.default, (odd.repeat(20, 1), 0, False)),
    ]
    for x, dim in (
        (tensor(1031, 96), 0),
        (tensor(1031, 95), 0),
        (tensor(2, 515, 64), 1),
        (tensor(3, 200, 7, 12), 1),
        (tensor(40, 4096), 0),
    ):
        cases += [
            Case(aten.sum.dim_IntList, (x, [dim]), atol=1e-3),
            Case(aten.var.correction, (x, [dim])),
            Case(aten.max.dim, (x, dim)),
        ]
        cases += [
            Case(aten.logsumexp.default, (x * 30, [dim])),
            Case(aten.argmin.default, ((x * 9).long(), dim)),
        ]
        cases += [
            Case(aten._softmax.default, (x * 9, dim, False)),
            Case(aten._log_softmax.default, (x.half() * 9, dim, False)),
        ]
    cases += [
        Case(aten.var.correction, (tensor(5001, 8) * 1e-2 + 1000, [0]), rtol=1e-3)
    ]  # the spread is far below the mean
    with kernels_of(device):
        check(cases)
        with program_of(
            lambda x: (x.sum(0), x.var(0), x.logsumexp(0), x.softmax(0)), (tensor(1031, 96),)
        ) as program:
            kernels = [
                dispatch.kernel
                for dispatch in program.methods["forward"].executable.plan.dispatches
            ]
            assert len(kernels) == 4 and all("WIDTH" in dict(kernel.macros) for kernel in kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_many_short_rows(dtype):
    """On a GPU, an invocation takes a row of few elements."""
    near = {"rtol": 2e-3, "atol": 2e-3} if dtype is torch.float16 else {}
    cases = []
    for length in (2, 8, 16, 31, 32):
        x = tensor(40, 70, length).to(dtype)
        cases += [
            Case(aten.sum.dim_IntList, (x, [-1]), **near),
            Case(aten.var.correction, (x, [-1]), **near),
            Case(aten.amax.default, (x, [-1])),
            Case(aten.argmax.default, (x, -1)),
            Case(aten.logsumexp.default, (x, [-1]), **near),
            Case(aten._softmax.default, (x, -1, False), **near),
            Case(aten._log_softmax.default, (x, -1, False), **near),
        ]
    with kernels_of("gpu"):
        check(cases)


@pytest.mark.parametrize("device", ["gpu", "plain", "cpu"])
def test_spreads_of_numbers_whose_squares_are_no_floats(device):
    """Large and small numbers, constant rows, NaN and infinity, beside one another."""
    pick, cases = random.Random(device), []
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        rows, columns = pick.choice([(3, 37), (6, 516), (600, 64)]), pick.randint(1, 9)
        x = tensor(*rows, seed=columns).double()
        scales = 10.0 ** torch.tensor([pick.uniform(-30, 37) for _ in range(rows[0])]).double()
        scales[0], scales[1] = 1e37, 1e-30
        x = (x * scales[:, None]).to(dtype)
        x[2] = pick.choice([0.0, 1e12, 3e38])
        for number, columns in ((math.nan, 3), (math.inf, 5)):
            x[2, columns] = number if pick.random() < 0.5 else -number
        near = {"rtol": 1e-2 if dtype is torch.bfloat16 else 3e-6, "atol": flushed()}
        for dim in (0, 1):
            cases += [Case(f, (x[:3], dim), **near) for f in (torch.var, torch.std)]
            cases += [Case(f, (x, dim), **near) for f in (torch.var, torch.std)]
            if rows[0] > 5:
                cases.append(Case(torch.std, (x[3:].t().contiguous(), dim), **near))
    with contextlib.nullcontext() if device == "cpu" else kernels_of(device):
        check(cases)


@pytest.mark.parametrize("rows", [1, 3, 4000])
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("sum.dim_IntList", ((-1,), False)),
        ("mean.dim", ((-1,), False)),
        ("amax.default", ((-1,), False)),
        ("argmax.default", (-1, False)),
        ("var.correction", ((-1,),)),
        ("_softmax.default", (-1, False)),
        ("cumsum.default", (-1,)),
    ],
)
def test_rows_of_any_length_have_one_lowering(name: str, arguments: tuple, rows: int) -> None:
    """Where a few rows are cut into parts, a length that was a multiple of 4 had to remain one: each
    other length was lowered by itself."""
    traits = typical_traits()
    builder = GraphBuilder("rows")
    x = builder.input(DType.float32, (rows, 1), most=100_000)
    graph = builder.finish(builder.op(name, x, *arguments))
    with GuardLog() as log:
        make_plan(optimize(graph, traits), traits)
    assert all(guard.right == 1 for guard in log.guards)  # a length of 1 may have its own
