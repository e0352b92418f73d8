"""Sorting and what follows from it against torch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import purevk
from purevk.graph.context import default_context
from purevk.tuning import DEFAULT
from tests.ops.harness import Case, aten, check, dispatches, program_of, tensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
SPECIAL = torch.tensor([[1.0, math.nan, -math.inf, 3.0, math.nan, math.inf, 0.0, -0.0, 2.0, 2.0]])


class Sorted(torch.nn.Module):
    def forward(self, x):
        return x.sort(stable=True)


def distinct(*shape, dtype=torch.float32):
    count = math.prod(shape)
    return (
        torch.randperm(count, generator=torch.Generator().manual_seed(count)).reshape(shape)
        - count // 2
    ).to(dtype)


@pytest.mark.parametrize("descending", [False, True])
def test_sort(descending):
    cases = [Case(aten.sort.default, (distinct(5, 13, 3), dim, descending)) for dim in (0, 1, -1)]
    cases += [
        Case(
            aten.sort.stable,
            (tensor(5, 13, dtype=dtype),),
            {"stable": True, "dim": 1, "descending": descending},
        )
        for dtype in (*FLOATS, *INTS, torch.bool)
    ]
    cases += [
        Case(aten.sort.stable, (SPECIAL,), {"stable": True, "dim": 1, "descending": descending})
    ]
    cases += [
        Case(aten.sort.default, (torch.tensor(2.0), 0, descending)),
        Case(aten.sort.default, (torch.zeros(0, 3), 0, descending)),
        Case(aten.sort.default, (torch.zeros(3, 1), 1, descending)),
    ]
    # Longer than a block of shared memory, and not a power of 2.
    cases += [
        Case(
            aten.sort.stable,
            (tensor(n, dtype=dtype, low=-100, high=100),),
            {"stable": True, "dim": 0, "descending": descending},
        )
        for n, dtype in [
            (129, torch.float32),
            (1024, torch.int32),
            (1025, torch.float16),
            (2999, torch.int64),
            (9001, torch.float32),
            (5000, torch.uint8),
            (3001, torch.bfloat16),
        ]
    ]
    cases += [
        Case(
            aten.sort.stable,
            (tensor(3, 1501, 2, 2, 3).permute(3, 0, 1, 4, 2),),
            {"stable": True, "dim": 2, "descending": descending},
        )
    ]
    cases += [
        Case(
            aten.sort.stable,
            (torch.cat([SPECIAL[0]] * 200),),
            {"stable": True, "dim": 0, "descending": descending},
        )
    ]
    cases += [
        Case(torch.argsort, (distinct(3, 200),), {"dim": 1, "descending": descending}),
        Case(torch.msort, (tensor(9, 4),)),
    ]
    check(cases)


def test_topk():
    cases = [
        Case(aten.topk.default, (distinct(5, 13, 3), k, dim, largest))
        for k, dim in [(1, 0), (4, 1), (3, -1), (13, 1)]
        for largest in (False, True)
    ]
    cases += [
        Case(aten.topk.default, (distinct(2, 5001), k, -1, largest))
        for k in (1, 40, 512, 700, 5001)
        for largest in (False, True)
    ]
    cases += [
        Case(aten.topk.default, (distinct(150000), 50)),
        Case(aten.topk.default, (distinct(300, 7), 11, 0)),
    ]
    cases += [
        Case(aten.topk.default, (distinct(9, 12, dtype=dtype), 5))
        for dtype in (torch.float16, torch.int64, torch.int16, torch.int8)
    ]
    cases += [
        Case(aten.topk.default, (torch.tensor(2.0), 1, 0)),
        Case(aten.topk.default, (distinct(3, 4), 0)),
    ]
    check(cases)


def test_medians():
    cases = []
    for fn in (torch.median, torch.nanmedian):
        cases += [
            Case(fn, (distinct(5, 12, 3), dim, keep))
            for dim in (0, 1, -1)
            for keep in (False, True)
        ]
        cases += [Case(fn, (SPECIAL[:, :n], 1)) for n in (1, 2, 3, 4)] + [
            Case(fn, (distinct(4, 301),)),
            Case(fn, (SPECIAL,)),
            Case(fn, (torch.tensor(1.0),)),
        ]
        cases += [
            Case(fn, (distinct(9, dtype=dtype),))
            for dtype in (torch.float16, torch.int32, torch.int64)
        ]
    cases += [
        Case(torch.kthvalue, (distinct(5, 12, 3), k, 1, keep))
        for k in (1, 5, 12)
        for keep in (False, True)
    ]
    check(cases)


def rows_of(kind, length, dtype):
    """Rows that are hard to select from."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(3, length, generator=generator)
    if kind == "few values":
        x = x.round()
    elif kind == "equal":
        x = torch.ones(3, length)
    elif kind == "masked":
        x = torch.where(x < 0, -math.inf, x)
        x[1, ::3] = math.nan
    elif kind == "wide":
        x = torch.exp(20 * x) * torch.where(
            torch.rand(3, length, generator=generator) < 0.5, -1.0, 1.0
        )
        x[:, ::5], x[:, 1::5] = 0.0, -0.0
    elif kind == "narrow":
        x = 5 + 1e-6 * x
    return (
        x.to(dtype)
        if dtype.is_floating_point
        else x.nan_to_num(0, 3, -3).clamp(-100, 100).to(dtype)
    )


ROWS = ("few values", "equal", "masked", "wide", "narrow")


@pytest.mark.purevk("int64", "int16")
@pytest.mark.parametrize("kind", ROWS)
def test_selection_agrees_with_sorting(kind):
    """Which of equal elements are taken, too: those of the lowest indices."""
    cases = []
    for length, count, dtype in [
        (130, 3, torch.float32),
        (4100, 1000, torch.int32),
        (300, 20, torch.int64),
        (2049, 64, torch.bfloat16),
    ]:
        x = rows_of(kind, length, dtype)
        if dtype is torch.int64:
            x = x * (2**40 + 1)
        values, order = x.sort(dim=1, stable=True)
        largest = count % 20 != 0
        first = tuple(each[:, :count] for each in x.sort(dim=1, stable=True, descending=largest))
        cases.append(Case(aten.topk.default, (x, count, 1, largest), expected=first))
        cases.append(
            Case(aten.topk.default, (x.T.contiguous().T, count, 1, largest), expected=first)
        )
        if not dtype.is_floating_point:
            cases.append(
                Case(
                    aten.kthvalue.default,
                    (x, length - 7, 1),
                    expected=(values[:, length - 8], order[:, length - 8]),
                )
            )
            continue
        numbers = length - x.isnan().sum(1, keepdim=True)
        at = torch.where(numbers < length, numbers, (length - 1) // 2)
        cases.append(
            Case(
                aten.median.dim, (x, 1, True), expected=(values.gather(1, at), order.gather(1, at))
            )
        )
        at = (numbers - 1).clamp(min=0) // 2
        cases.append(
            Case(
                aten.nanmedian.dim,
                (x, 1, True),
                expected=(values.gather(1, at), order.gather(1, at)),
            )
        )
    check(cases)


@pytest.mark.purevk("int64")
def test_selection_reads_rows_once():
    for run in (lambda x: x.topk(8), lambda x: x.median(1), lambda x: x.kthvalue(100, 1)):
        with program_of(run, (tensor(4, 4096),)) as program:
            assert dispatches(program) == ["sort/select.comp"]


def gpu(monkeypatch):
    """The choices of a GPU."""
    shared = default_context()
    monkeypatch.setattr(
        shared,
        "traits",
        dataclasses.replace(shared.traits, profile=DEFAULT, cores=1, max_shared_memory=32768),
    )


def sort_along(dim, descending):
    return lambda x: x.sort(dim=dim, stable=True, descending=descending)


@pytest.mark.purevk("int64")
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    ],
    ids=lambda dtype: str(dtype)[6:],
)
def test_a_few_rows_are_ranked(monkeypatch, descending, dtype):
    """Each element is compared with all others; equal ones and special ones keep their order."""
    shared = default_context()
    traits = dataclasses.replace(shared.traits, profile=DEFAULT, cores=132, max_shared_memory=32768)
    monkeypatch.setattr(shared, "traits", traits)
    for shape, dim in (((2048,), 0), ((3, 700), 1), ((2, 129, 3), 1), ((200, 2, 2), 0)):
        x = tensor(*shape, low=0, high=200)
        if dtype.is_floating_point:
            x.view(-1)[:60] = SPECIAL[0].repeat(60)[:60]
        x = x.to(dtype) * (1 << 33) if dtype is torch.int64 else x.to(dtype)
        wanted = x.sort(dim=dim, stable=True, descending=descending)
        with program_of(sort_along(dim, descending), (x,)) as program:
            assert dispatches(program) == ["sort/rank.comp"]
            values, order = program.forward(x)
            assert torch.equal(order, wanted.indices)
            torch.testing.assert_close(values, wanted.values, rtol=0, atol=0, equal_nan=True)
            if dtype.is_floating_point:
                signs = ((each.signbit() & ~each.isnan()) for each in (values, wanted.values))
                assert torch.equal(*signs)


@pytest.mark.purevk("int64")
@pytest.mark.parametrize(
    "descending, dtype", [(False, torch.float32), (True, torch.float32), (True, torch.int32)]
)
def test_rows_are_sorted_in_shared_memory(monkeypatch, descending, dtype):
    """By bins of numbers, of keys, or by a network."""
    gpu(monkeypatch)
    x = torch.cat(
        [
            torch.cat([SPECIAL[0]] * 120)[None, :1100].to(dtype),
            distinct(1, 1100, dtype=dtype),
            *(rows_of(kind, 1100, dtype) for kind in ROWS),
        ]
    )
    with program_of(lambda x: x.sort(dim=1, stable=True, descending=descending), (x,)) as program:
        assert dispatches(program) == ["sort/sort_rows.comp"]
        values, order = x.sort(dim=1, stable=True, descending=descending)
        have = program.forward(x)
        assert torch.equal(have[1], order) and torch.equal(
            have[0].view(torch.int32), values.view(torch.int32)
        )


@pytest.mark.purevk("int64")
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("descending, dtype", [(False, torch.float32), (True, torch.int32)])
@pytest.mark.parametrize("length", [2049, 4096, 9000])
def test_runs_are_merged(monkeypatch, on_gpu, descending, dtype, length):
    """Also where all elements of one run come before those of the other, and where many are equal."""
    if on_gpu:
        gpu(monkeypatch)
    rising = torch.arange(length).to(dtype)[None]
    x = torch.cat(
        [
            torch.cat([SPECIAL[0]] * length)[None, :length].to(dtype),
            distinct(1, length, dtype=dtype),
            rising,
            rising.flip(1),
            rising.flip(1) // 1000,
            *(rows_of(kind, length, dtype) for kind in ROWS),
        ]
    )
    with program_of(lambda x: x.sort(dim=1, stable=True, descending=descending), (x,)) as program:
        traits = default_context().traits
        on_gpu = traits.profile.has_fast_shared_memory
        block = (4096 if traits.max_shared_memory >= 49152 else 2048) if on_gpu else 1024
        merges = (-(-length // block) - 1).bit_length()
        first = "sort/sort_rows.comp" if on_gpu else "sort/sort.comp"
        assert dispatches(program) == [first, *["sort/merge.comp"] * merges]
        values, order = x.sort(dim=1, stable=True, descending=descending)
        have = program.forward(x)
        assert torch.equal(have[1], order) and torch.equal(
            have[0].view(torch.int32), values.view(torch.int32)
        )


def test_sorted_rows_of_a_size_that_is_known_at_the_call():
    length = torch.export.Dim("length", min=2, max=9000)
    program = torch.export.export(
        Sorted(), (torch.randn(3, 5000),), dynamic_shapes={"x": {1: length}}
    )
    with purevk.compile(program) as compiled:
        for count in (2, 1024, 1025, 2500, 4096, 9000):
            x = torch.randint(-50, 50, (3, count)).float()
            values, order = compiled.forward(x)
            assert torch.equal(order, x.sort(stable=True)[1]), count
            assert torch.equal(values, x.sort()[0]), count


@pytest.mark.purevk("int64")
@pytest.mark.parametrize("largest", [False, True])
def test_few_elements_are_bounded_first(monkeypatch, largest):
    gpu(monkeypatch)
    x = torch.cat([distinct(1, 700), *(rows_of(kind, 700, torch.float32) for kind in ROWS)])
    with program_of(lambda x: x.topk(5, 1, largest), (x,)) as program:
        values, order = (each[:, :5] for each in x.sort(dim=1, stable=True, descending=largest))
        have = program.forward(x)
        assert torch.equal(have[1], order) and torch.equal(
            have[0].view(torch.int32), values.contiguous().view(torch.int32)
        )


def test_places_in_sorted_rows():
    edges = torch.tensor([-2.0, -1.0, 0.0, 0.0, 0.5, 2.0])
    x = torch.cat([tensor(20), edges, torch.tensor([math.nan, math.inf])])
    cases = [
        Case(torch.bucketize, (x, edges), {"right": right, "out_int32": short})
        for right in (False, True)
        for short in (False, True)
    ]
    cases += [
        Case(torch.bucketize, (tensor(4, 5, dtype=torch.int64), torch.tensor([-1, 0, 2]))),
        Case(torch.bucketize, (0.25, edges)),
    ]
    rows = tensor(3, 7).sort(1).values
    cases += [
        Case(torch.searchsorted, (rows, tensor(3, 4, seed=1)), {"right": right})
        for right in (False, True)
    ]
    shuffled = tensor(3, 7)
    cases += [
        Case(
            torch.searchsorted,
            (shuffled, tensor(3, 4)),
            {"sorter": shuffled.argsort(1), "side": "right"},
        ),
        Case(torch.searchsorted, (edges, tensor(2, 3))),
    ]
    cases += [
        Case(torch.isin, (tensor(3, 5, dtype=torch.int64), torch.tensor([1, -2])), {"invert": flag})
        for flag in (False, True)
    ]
    check(cases)


def test_dynamic_sizes():
    def run(x):
        return *x.sort(dim=1, stable=True), *x.topk(3, 0), x.median(1).values

    with program_of(run, (tensor(11, 2500),), dynamic=True) as program:
        for size in [(11, 2500), (5, 130), (3, 1000), (4, 7)]:
            x = distinct(*size)
            for have, want in zip(program.forward(x), run(x)):
                torch.testing.assert_close(have, want)


@pytest.mark.purevk("int64", "subgroup_basic", "subgroup_arithmetic")
@pytest.mark.parametrize("dynamic", (False, True))
def test_ranks_of_rows_of_open_length_use_no_subgroups(dynamic):
    """Such a kernel never ends on a driver of NVIDIA."""
    with program_of(lambda x: x.median(1).values, (tensor(11, 2500),), dynamic=dynamic) as program:
        (dispatch,) = program.methods["forward"].executable.plan.dispatches
        expected = "0" if dynamic or default_context().traits.subgroup_size < 2 else "1"
        assert dict(dispatch.kernel.macros)["SUBGROUP"] == expected
