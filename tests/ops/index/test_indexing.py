"""Writing at positions, and into parts of a tensor, against torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from purevk.dtypes import DType
from purevk.frontends.importer import Importer
from purevk.graph.context import default_context
from purevk.ir import TensorType
from purevk.program import Program
from purevk.tuning import DEFAULT
from tests.ops.harness import TYPES, Case, aten, check, context, dispatches, program_of, tensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def gpu(monkeypatch):
    """A software device that is taken for a GPU."""
    shared = default_context()
    monkeypatch.setattr(
        shared,
        "traits",
        dataclasses.replace(shared.traits, profile=DEFAULT, cores=1, max_shared_memory=16384),
    )


def random_indices(*shape, below, seed=0, dtype=torch.int64, unique=False):
    """Indices, some counted from the end where torch allows it; without repetition along dim 0 if
    `unique`."""
    generator = torch.Generator().manual_seed(seed)
    if unique:
        return (
            torch.stack(
                [
                    torch.randperm(below, generator=generator)[: shape[0]]
                    for _ in range(shape[1] if len(shape) > 1 else 1)
                ],
                1,
            )
            .reshape(shape)
            .to(dtype)
        )
    return torch.randint(0, below, shape, generator=generator).to(dtype)


def test_scatter():
    cases = []
    for dtype in TYPES:
        cases.append(
            Case(
                aten.scatter.src,
                (
                    tensor(7, 5, dtype=dtype),
                    0,
                    random_indices(3, 5, below=7, unique=True),
                    tensor(3, 5, dtype=dtype, seed=1),
                ),
            )
        )
        cases.append(
            Case(
                aten.scatter.value, (tensor(7, 5, dtype=dtype), 1, random_indices(4, 2, below=5), 1)
            )
        )
        if dtype is not torch.bool:
            cases.append(
                Case(
                    aten.scatter_add.default,
                    (
                        tensor(7, 5, dtype=dtype),
                        1,
                        random_indices(6, 9, below=5),
                        tensor(7, 9, dtype=dtype, seed=1),
                    ),
                )
            )
    x = tensor(4, 5, 6)
    cases += [
        Case(
            aten.scatter_add.default,
            (x, dim, random_indices(3, 4, 5, below=4), tensor(4, 4, 5, seed=2)),
        )
        for dim in (0, 1, 2, -1)
    ]
    cases += [
        Case(
            aten.scatter.reduce,
            (x, 1, random_indices(3, 4, 5, below=5), tensor(3, 4, 5)),
            {"reduce": how},
        )
        for how in ("add", "multiply")
    ]
    cases += [
        Case(
            aten.scatter.value_reduce,
            (x, 1, random_indices(3, 4, 5, below=5), 1.5),
            {"reduce": how},
        )
        for how in ("add", "multiply")
    ]
    cases += [
        Case(aten.scatter.value, (torch.tensor(2.0), 0, torch.tensor(0), 5.0)),
        Case(aten.scatter_add.default, (x, 0, torch.zeros(0, 5, 6, dtype=torch.int64), x)),
    ]
    check(cases)


def test_scatter_reduce():
    cases = []
    for how in ("sum", "prod", "mean", "amax", "amin"):
        for include in (True, False):
            for dtype in (torch.float32, torch.int32, torch.float16, torch.int64):
                args = (
                    tensor(3, 7, dtype=dtype),
                    1,
                    random_indices(3, 9, below=7),
                    tensor(3, 9, dtype=dtype, seed=4),
                    how,
                )
                cases.append(
                    Case(
                        aten.scatter_reduce.two,
                        args,
                        {"include_self": include},
                        rtol=1e-2 if dtype is torch.float16 else None,
                    )
                )
    check(cases)


def test_index_put():
    x = tensor(5, 6, 7, 3)
    a, b = random_indices(4, below=5), random_indices(4, below=6, seed=1)
    cases = []
    for accumulate in (False, True):
        u, v = (a, b) if accumulate else (torch.tensor([0, 4, 2, -2]), torch.tensor([1, 2, -1, 0]))
        cases += [
            Case(aten.index_put.default, (x, [u], tensor(4, 6, 7, 3, seed=1), accumulate)),
            Case(aten.index_put.default, (x, [u, v], tensor(4, 7, 3, seed=1), accumulate)),
            Case(aten.index_put.default, (x, [None, v], tensor(5, 4, 7, 3, seed=1), accumulate)),
            Case(
                aten.index_put.default, (x, [None, None, u], tensor(5, 6, 4, 3, seed=1), accumulate)
            ),
            Case(aten.index_put.default, (x, [u, None, v], tensor(4, 6, 3, seed=1), accumulate)),
            Case(aten.index_put.default, (x, [u[:, None], v], tensor(1, 3, seed=1), accumulate)),
            Case(
                aten.index_put.default,
                (x, [u, v, v, torch.tensor(1)], tensor(4, seed=1), accumulate),
            ),
            Case(aten.index_put.default, (x, [u], torch.tensor(2.5), accumulate)),
            Case(aten.index_put.default, (x, [u.int()], tensor(6, 1, 3), accumulate)),
            Case(aten.index_put.default, (x, [x[..., 0] > 0], torch.tensor(1.5), accumulate)),
            Case(aten.index_put.default, (x, [x[..., 0] > 0], tensor(3), accumulate)),
            Case(
                aten.index_put.default, (x, [x > 0], tensor(int((x > 0).sum()), seed=3), accumulate)
            ),
            Case(
                aten.index_put.default,
                (x, [x[..., 0] > 0], tensor(int((x[..., 0] > 0).sum()), 3, seed=3), accumulate),
            ),
        ]
    for dtype in TYPES:
        cases.append(
            Case(
                aten.index_put.default,
                (
                    tensor(9, 4, dtype=dtype),
                    [torch.tensor([3, 0, 8])],
                    tensor(3, 4, dtype=dtype, seed=1),
                ),
            )
        )
    check(cases)


def test_many_entries_for_few_rows():
    """Atomic operations, or a search for the last entry of each element."""
    count = 5000
    cases = []
    for dtype in (torch.float32, torch.int32, torch.int64, torch.float16):
        source = tensor(2, count, dtype=dtype, low=-2, high=2)
        if dtype is torch.int64:
            source = source * (2**33 + 12345)
        # Sums of 450 numbers and more, in any order; torch rounds each sum of halves to half.
        loose = {torch.float32: 1e-4, torch.float16: 0.6}.get(dtype)
        cases.append(
            Case(
                aten.scatter_add.default,
                (tensor(2, 7, dtype=dtype), 1, random_indices(2, count, below=7), source),
                rtol=loose,
                atol=loose,
            )
        )
        cases.append(
            Case(
                aten.index_add.default,
                (tensor(11, dtype=dtype), 0, random_indices(count, below=11), source[0]),
                rtol=loose,
                atol=loose,
            )
        )
        cases.append(
            Case(
                aten.scatter.src,
                (tensor(2, 7, dtype=dtype), 1, random_indices(2, count, below=7), source),
            )
        )
    x, rows, columns, values = (
        tensor(13, 11),
        random_indices(count, below=13),
        random_indices(count, below=11, seed=1),
        tensor(count),
    )
    last = x.clone()
    for row, column, value in zip(rows.tolist(), columns.tolist(), values):
        last[row, column] = value
    cases += [Case(aten.index_put.default, (x, [rows, columns], values), expected=last)]
    cases += [
        Case(
            aten.scatter_reduce.two,
            (tensor(3), 0, random_indices(70001, below=3), tensor(70001), "amax"),
        )
    ]
    for how, dtype in [("amin", torch.float32), ("amax", torch.int32), ("prod", torch.int32)]:
        source = tensor(5000, dtype=dtype)
        cases.append(
            Case(
                aten.scatter_reduce.two,
                (tensor(5, dtype=dtype), 0, random_indices(5000, below=5), source, how),
            )
        )
    check(cases)


def test_one_index_along_a_dim():
    x = tensor(5, 6, 7)
    index = torch.tensor([4, 0, 2])
    cases = [
        Case(
            aten.index_add.default,
            (x, dim, index, tensor(*[3 if d == dim else n for d, n in enumerate(x.shape)])),
            {"alpha": alpha},
        )
        for dim, alpha in [(0, 1), (1, 2.5)]
    ]
    cases += [
        Case(aten.index_add.default, (x, -1, index, tensor(5, 6, 3))),
        Case(aten.index_copy.default, (x, 1, index, tensor(5, 3, 7, seed=1))),
    ]
    cases += [
        Case(aten.index_fill.int_Scalar, (x, 2, index, -1.5)),
        Case(aten.index_fill.int_Tensor, (x, 0, index, torch.tensor(3.0))),
    ]
    cases += [
        Case(
            aten.index_reduce.default,
            (x, 0, torch.tensor([4, 0, 4]), tensor(3, 6, 7), how),
            {"include_self": include},
        )
        for how in ("prod", "mean", "amax", "amin")
        for include in (True, False)
    ]
    cases += [
        Case(torch.put, (x, torch.tensor([[0, -1], [17, 100]]), tensor(2, 2))),
        Case(torch.take, (x, torch.tensor([[0, -1], [17, 100]]))),
    ]
    cases += [
        Case(F.one_hot, (random_indices(3, 4, below=5), 6)),
        Case(aten.index_add.default, (torch.tensor(1.0), 0, torch.tensor([0]), torch.tensor(2.0))),
    ]
    check(cases)


def test_parts():
    x = tensor(5, 6, 7)
    cases = [Case(torch.select_scatter, (x, tensor(5, 7), 1, n)) for n in (0, -2)]
    cases += [
        Case(torch.slice_scatter, (x, tensor(5, 2, 7), 1, 1, 5, 2)),
        Case(torch.slice_scatter, (x, tensor(2, 6, 7), 0, -2, None)),
        Case(torch.slice_scatter, (x, tensor(5, 0, 7), 1, 3, 2)),
    ]
    cases += [
        Case(torch.diagonal_scatter, (x, tensor(7, 5), 0, 0, 1)),
        Case(torch.diagonal_scatter, (x, tensor(6, 4), -1, 0, 2)),
    ]
    cases += [
        Case(torch.select_scatter, (tensor(3, 4, dtype=dtype), tensor(3, dtype=dtype), 1, 2))
        for dtype in TYPES
    ]
    cases += [
        Case(aten.as_strided.default, (x, (3, 4), (7, 2), 5)),
        Case(aten.as_strided.default, (tensor(30), (2, 3, 2), (1, 0, 4))),
    ]
    cases += [
        Case(aten.unfold.default, (x, dim, 3, step)) for dim, step in [(0, 1), (1, 2), (-1, 4)]
    ] + [Case(aten.unfold_copy.default, (x.transpose(0, 2), 1, 2, 2))]
    check(cases)


def test_bags_of_embeddings():
    table = tensor(11, 6)
    index = random_indices(13, below=11)
    starts, ends = torch.tensor([0, 3, 3, 9]), torch.tensor([0, 3, 3, 9, 13])
    cases = [
        Case(
            aten._embedding_bag.default,
            (table, index, ends if last else starts, False, mode, False, None, last, padding),
        )
        for mode in (0, 1, 2)
        for last in (False, True)
        for padding in (-1, 4)
    ]
    cases += [
        Case(
            aten._embedding_bag.default,
            (table, index, starts, False, 0, False, tensor(13, low=0.1, high=2)),
        )
    ]
    # Only the bags themselves: what else the operator gives is for its gradient.
    check([Case(lambda *args, fn=case.fn: fn(*args)[0], case.args) for case in cases])
    check(
        [
            Case(F.embedding_bag, (index, table, starts), {"mode": mode})
            for mode in ("sum", "mean", "max")
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("padding", [-1, 2])
def test_the_last_bag_takes_the_rest(dtype, padding):
    """Torch ends sums and means without padding at the last offset, but in float64 and wherever it
    counts entries, it does not."""
    table = tensor(11, 6, dtype=dtype)
    index = random_indices(13, below=11)
    table[index[5]] = float("nan")  # torch's maximum keeps it if it is the first of a bag
    weights = tensor(13, dtype=dtype)
    cases = [
        Case(
            lambda *args: aten._embedding_bag(*args)[:1],
            (table, index, torch.tensor(offsets), False, mode, False, each, True, padding),
            name=f"mode {mode}",
        )
        for offsets in [(0, 4), (0, 3, 3, 9), (0, 13, 13), (0, 0, 0, 13)]
        for mode in (0, 1, 2)
        for each in ((None, weights) if mode == 0 else (None,))
    ]
    check(cases)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_lengths_of_bags(mode):
    """What `_embedding_bag` gives beside the bags."""
    table, index = tensor(11, 6), random_indices(13, below=11)
    args = (table, index, torch.tensor([0, 3, 3, 9]), False, mode, False, None, True, 4)
    check(Case(lambda *args: aten._embedding_bag(*args)[1:], args))


def test_bags_that_are_rows():
    table, index = tensor(11, 6), random_indices(3, 5, below=11)
    check(
        [
            Case(lambda i, w, m=mode: F.embedding_bag(i, w, mode=m, padding_idx=4), (index, table))
            for mode in ("sum", "mean", "max")
        ]
    )


def masked_cases():
    x, mask = tensor(3, 5, 7), tensor(5, 7) > 0
    cases = [
        Case(torch.masked_scatter, (x, mask, tensor(120, seed=1))),
        Case(torch.masked_scatter, (tensor(7), mask, tensor(6, 7, seed=1))),
    ]
    for shape, dtype in [
        ((40, 512), torch.float32),
        ((9001,), torch.float16),
        ((5, 4096), torch.int64),
        ((4100,), torch.uint8),
    ]:
        for density in (-1.0, 0.9, 3.0):
            args = (
                tensor(*shape).mul(50).to(dtype),
                tensor(*shape, seed=1) > density,
                tensor(*shape, seed=2).mul(50).to(dtype),
            )
            cases.append(Case(torch.masked_scatter, args))
    return cases


def test_masked_scatter():
    check(masked_cases())


def test_masked_scatter_in_blocks(gpu):
    check(masked_cases())
    with program_of(torch.masked_scatter, masked_cases()[2].args) as program:
        assert dispatches(program) == ["index/masked.comp", "index/masked.comp"]


def test_dynamic_sizes():
    def run(x):
        index = torch.zeros_like(x, dtype=torch.int64)
        return (
            x.scatter_add(1, index, x),
            torch.slice_scatter(x, x[:, 1:], 1, 0, x.shape[1] - 1),
            x.index_put([index[0]], x[0]),
        )

    with program_of(run, (tensor(7, 13),), dynamic=True) as program:
        for size in [(7, 13), (5, 4), (2, 13)]:
            x = tensor(*size)
            for have, want in zip(program.forward(x), run(x)):
                torch.testing.assert_close(have, want)


def test_kernels_of_scatter():
    """What the choice between one invocation a row and one an entry rests on."""
    with program_of(
        lambda x, i: x.index_add(0, i, x[i]), (tensor(64, 8), random_indices(64, below=64))
    ) as program:
        made = dispatches(program)
        assert (
            made.count("elementwise/map.comp") == 1
            if not context().traits.profile.has_fast_shared_memory
            else "index/scatter.comp" in made
        )


def test_scatter_in_one_dispatch(gpu):
    x, wide = tensor(3, 2100, 5), tensor(70, 512)
    cases = []
    for dim, dtype in [
        (1, torch.float32),
        (2, torch.int32),
        (0, torch.float32),
        (1, torch.float16),
    ]:
        index, source = (
            random_indices(3, 2100, 5, below=x.shape[dim]),
            tensor(3, 2100, 5, seed=1).mul(100).to(dtype),
        )
        base = x.mul(100).to(dtype)
        cases.append(
            Case(
                aten.scatter.src,
                (base, dim, index, source),
                expected=last_of(base, dim, index, source),
            )
        )
        if dtype.itemsize == 4:
            cases.append(
                Case(aten.scatter_add.default, (base, dim, index, source), rtol=1e-4, atol=1e-3)
            )
            cases.append(Case(aten.scatter_reduce.two, (base, dim, index, source, "amax")))
    cases.append(Case(aten.scatter.value, (x, 1, random_indices(3, 7, 5, below=2100), 2.5)))
    rows = torch.tensor([3, -1, 3, 69, 0, 3])
    for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8):
        base, source = wide.mul(50).to(dtype), tensor(6, 512, seed=2).mul(50).to(dtype)
        cases.append(
            Case(
                aten.index_put.default,
                (base, [rows], source),
                expected=last_of(base, 0, (rows % 70)[:, None].expand(6, 512), source),
            )
        )
        if dtype.itemsize >= 4:
            cases.append(Case(aten.index_add.default, (base, 0, rows % 70, source)))
    many = random_indices(3000, below=70)
    cases.append(
        Case(aten.index_add.default, (wide, 0, many, tensor(3000, 512)), rtol=1e-4, atol=1e-3)
    )
    cases.append(
        Case(
            aten.index_add.default,
            (tensor(300, 64), 0, random_indices(3000, below=300), tensor(3000, 64)),
            rtol=1e-4,
            atol=1e-3,
        )
    )
    cases.append(
        Case(
            aten.index_add.default,
            (tensor(2, 70, 8, 33), 1, many[:900], tensor(2, 900, 8, 33)),
            rtol=1e-4,
            atol=1e-3,
        )
    )
    cases.append(
        Case(
            aten.index_put.default,
            (tensor(2, 3, 40, 16), [None, None, torch.tensor([7])], tensor(2, 3, 1, 16, seed=1)),
        )
    )
    cases.append(Case(aten.index_reduce.default, (wide, 0, rows % 70, tensor(6, 512), "amin")))
    cases.append(Case(aten.index_fill.int_Scalar, (wide, 1, torch.tensor([5, 500]), -1.0)))
    # More indices than one: atomic additions of floats, where the device has them.
    pairs = [random_indices(3000, below=70), random_indices(3000, below=5, seed=1)]
    cases.append(
        Case(
            aten.index_put.default,
            (tensor(70, 5, 16), pairs, tensor(3000, 16), True),
            rtol=1e-4,
            atol=1e-3,
        )
    )
    check(cases)
    for run in (
        lambda x, i: x.scatter_add(0, i, x),
        lambda x, i: x.scatter(1, i % 12, x),
        lambda x, i: x.index_copy(0, i[0], x),
    ):
        with program_of(run, (tensor(12, 12), random_indices(12, 12, below=12))) as program:
            others = ("elementwise/pointwise.comp", "index/check.comp")
            made = [name for name in dispatches(program) if name not in others]
            assert made == ["index/scatter.comp"]


def test_scatter_of_long_columns(gpu):
    """Columns that shared memory cannot hold are joined in groups, long ones in parts."""
    for n, m, dtype in [
        (1100, 700, torch.float32),
        (3000, 5003, torch.float32),
        (1500, 1500, torch.int32),
    ]:
        x, source = (
            tensor(2, size, 10, seed=seed).mul(30).to(dtype) for seed, size in enumerate((n, m))
        )
        index = random_indices(2, m, 10, below=n)
        cases = [Case(aten.scatter_add.default, (x, 1, index, source), rtol=1e-4, atol=1e-3)]
        cases += [
            Case(aten.scatter_reduce.two, (x, 1, index, source, how), rtol=1e-4)
            for how in ("amax", "amin")
        ]
        # Of few large factors, so that no product is infinite.
        near = (1 + source / 500).to(dtype)
        cases.append(Case(aten.scatter_reduce.two, (x, 1, index, near, "prod"), rtol=1e-4))
        parts = (x[..., 2:], index[..., 2:], source[..., 2:])
        cases.append(Case(lambda x, i, s: x.scatter_add(1, i, s), parts, rtol=1e-4, atol=1e-3))
        check(cases)
    with program_of(lambda x, i, s: x.scatter_add(1, i, s), (x, index, source)) as program:
        found = [name for name in dispatches(program) if name != "index/check.comp"]
        assert found == ["index/scatter_columns.comp"]


def last_of(x, dim, index, source):
    """What torch leaves open: of several entries for an element the last holds."""
    x = x.clone()
    for n in range(index.shape[dim]):
        x.scatter_(dim, index.narrow(dim, n, 1), source.narrow(dim, n, 1))
    return x


def test_reading_with_many_indices():
    x = tensor(3, 4, 5, 2, 3, 2)
    a, b = torch.tensor([2, 0, -1]), torch.tensor([1, -2, 3])
    indices = [
        [a, None, b],
        [None, a, None, None, a],
        [a, b, b, torch.tensor([0, 1, 1]), a, torch.tensor(1)],
        [a[:, None], b],
        [None, None, None, None, a],
        [a, None, None, torch.tensor([[1], [0]])],
    ]
    cases = [
        Case(aten.index.Tensor, (x.transpose(0, 4) if n % 2 else x, chosen))
        for n, chosen in enumerate(indices)
    ]
    cases += [
        Case(
            torch.gather,
            (tensor(2, 3, 2, 3, 2, 2, 2, 3), 4, random_indices(2, 3, 2, 3, 3, 2, 2, 3, below=2)),
        )
    ]
    cases += [
        Case(torch.gather, (torch.tensor(2.0), 0, torch.tensor([0, 0]))),
        Case(torch.gather, (tensor(3), 0, torch.tensor(2))),
    ]
    check(cases)


def test_reading_with_a_mask_is_left_to_the_cpu():
    """How many elements a mask picks is known only at a call; the file has a bound."""

    def source(sizes):
        importer = Importer("forward", "test", sizes)
        x = importer.input(DType.float32, (5, 7), False)
        (mask,) = importer.emit(
            "aten.gt.Tensor", (x, 0.0), [TensorType(DType.bool, (5, 7))], [False], "mask"
        )
        (picked,) = importer.emit(
            "aten.index.Tensor", (x, (mask,)), [TensorType(DType.float32, (35,))], [True], "index"
        )
        (twice,) = importer.emit("aten.mul.Tensor", (picked, 2.0), [picked.type], [True], "twice")
        return importer.finish([twice])

    with Program("test", {"forward": source}, context()) as program:
        for seed in range(3):
            x = tensor(5, 7, seed=seed)
            torch.testing.assert_close(program.forward(x), x[x > 0] * 2)
