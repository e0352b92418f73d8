"""How a GPU moves elements: tiles where neighbours of the source are no neighbours of the result,
and several elements per invocation if no vectors fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from purevk.graph.context import default_context
from purevk.tuning import DEFAULT
from tests.ops.harness import Case, aten, check, dispatches, program_of, tensor

pytestmark = pytest.mark.device
TILED = "movement/transpose.comp"


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """The device of the tests taken for a GPU; `use(cores)` sets how many it has: with many, small
    tiles are chosen."""
    context = default_context()

    def use(cores):
        monkeypatch.setattr(
            context,
            "traits",
            dataclasses.replace(context.traits, profile=DEFAULT, cores=cores, max_texels=0),
        )

    use(1)
    return use


def dispatches_of(case):
    with program_of(case.fn, case.args) as program:
        return dispatches(program)


def of(dtype, *sizes):
    made = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    if dtype is torch.bool:
        return made % 3 == 0
    return (
        made % 125
        if dtype.itemsize == 1
        else (made * 37 % 30011 - 15000).to(dtype)
        if dtype is not torch.float16
        else (made % 2039 - 1000).half() / 8
    )


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_transposed(gpu, dtype):
    cases = []
    gpu(132 if dtype.itemsize == 2 else 1)
    for sizes in [(128, 256), (70, 133), (36, 100), (3, 2500)]:
        x = of(dtype, *sizes).to(dtype)
        cases += [Case(lambda x: x.t().contiguous(), (x,), name=f"t of {sizes}")]
    x = of(dtype, 3, 40, 72).to(dtype)
    cases += [
        Case(lambda x: x.permute(2, 1, 0).contiguous(), (x,)),
        Case(lambda x: x.permute(0, 2, 1).contiguous(), (x,)),
    ]
    cases += [Case(lambda x: x[1:, 1:, 3:].permute(0, 2, 1).contiguous(), (x,), name="of a part")]
    cases += [
        Case(lambda x: torch.rot90(x, 1, (1, 2)), (x,)),
        Case(lambda x: torch.rot90(x, -1, (1, 2)), (x,)),
    ]
    check(cases)
    assert TILED in dispatches_of(cases[0])


def test_small_tiles(gpu):
    gpu(132)
    check(
        [
            Case(lambda x: x.t().contiguous(), (tensor(*sizes),))
            for sizes in [(64, 64), (260, 34), (100, 136)]
        ]
    )


@pytest.mark.parametrize("dtype", DTYPES[:4] + DTYPES[6:], ids=lambda dtype: str(dtype)[6:])
def test_programs(dtype):
    x, y = of(dtype, 2, 68, 96).to(dtype), of(dtype, 2, 96, 68).to(dtype)
    odd, other = of(dtype, 67, 45).to(dtype), of(dtype, 45, 67).to(dtype)
    cases = [
        Case(lambda x, y: y + x.transpose(1, 2), (x, y)),
        Case(lambda x, y: y + x.t(), (odd, other)),
        Case(lambda x: x.t().float().contiguous(), (odd,)),
        Case(lambda x, y: (x.transpose(1, 2) == y).contiguous(), (x, y)),
        Case(lambda x, y: x.transpose(1, 2) + y[:, :1], (x, y)),
        Case(lambda x, y, z: z * (x.t() + y.t()), (odd, odd + 1, other)),
    ]
    check(cases)
    assert TILED in dispatches_of(cases[0])


def test_in_cat_and_products():
    x, w = tensor(3, 48, 100), tensor(100, 64, seed=1)
    check(
        [
            Case(lambda x: torch.cat([x.transpose(1, 2), x.transpose(1, 2) * 2], 2), (x,)),
            Case(lambda x, w: x.transpose(1, 2) @ (x[:, :, :64] @ w[:64, :]), (x, w), atol=1e-3),
            Case(lambda x: x.permute(2, 0, 1).reshape(100, 144).softmax(1), (x,)),
        ]
    )


def test_symbolic_sizes():
    def forward(x):
        return x.transpose(1, 2).contiguous(), x.permute(2, 1, 0).contiguous() + 1, x[:, :, 1:] * 2

    with program_of(forward, (tensor(3, 70, 90),), dynamic=True) as program:
        assert TILED in dispatches(program)
        for sizes in [(3, 70, 90), (1, 64, 64), (2, 33, 5), (3, 1, 90), (3, 70, 1)]:
            x = tensor(*sizes, seed=3)
            for have, want in zip(program.forward(x), forward(x)):
                torch.testing.assert_close(have, want)


def test_products_of_a_column():
    a, v, r = tensor(70, 132), tensor(132, seed=1), tensor(70, seed=2)
    batch, matrix = tensor(3, 70, 132, seed=4), tensor(132, 70, seed=3)
    cases = [
        Case(aten.mv.default, (a, v), atol=1e-4),
        Case(lambda a, v, r: torch.relu(a @ v * 2) + r, (a, v, r), atol=2e-4),
        Case(lambda a, v, r: torch.relu(a @ v[:, None] * 2) + r[:, None], (a, v, r), atol=2e-4),
        Case(lambda a, v: a @ v, (batch, v), atol=1e-4),
        Case(lambda a, v: a @ v + 1, (batch, tensor(3, 132, 1)), atol=1e-4),
        Case(lambda a, v: a.t() @ v, (matrix, v), atol=1e-4),
        Case(lambda a, v: a @ v[::2, None], (a[:, :66].contiguous(), v), atol=1e-4),
        Case(lambda a, v: a @ v, (a.half(), v.half()), atol=5e-2),
        Case(lambda a, v: a @ v, (a[:1], v), atol=1e-4),
    ]
    check(cases)
    assert dispatches_of(cases[0]) == ["matmul/matmul_vec.comp"]
    with program_of(lambda a, v: a @ v, (a, v), dynamic=True) as program:
        for m, k in [(70, 132), (1, 132), (33, 1), (5, 7)]:
            torch.testing.assert_close(
                program.forward(a[:m, :k], v[:k]), a[:m, :k] @ v[:k], rtol=1e-5, atol=1e-4
            )


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.int8, torch.int64, torch.bfloat16],
    ids=lambda dtype: str(dtype)[6:],
)
def test_no_vectors(dtype):
    x = of(dtype, 2, 3, 33, 33).to(dtype)
    check(
        [
            Case(aten.constant_pad_nd.default, (x, (1, 1, 1, 1), 2)),
            Case(aten.reflection_pad2d.default, (x, (1, 1, 2, 1))),
            Case(aten.replication_pad2d.default, (x, (1, 1, 1, 3))),
            Case(lambda x: x[..., 1:].contiguous() * 2, (x,)),
            Case(aten.flip.default, (x, (3,))),
            Case(aten.tril.default, (x,)),
            Case(aten.roll.default, (x, (3,), (3,))),
            Case(lambda x: x * x[:, :1], (x,)),
        ]
    )


def test_places():
    x, rows = tensor(37, 41), torch.linspace(-3, 3, 64)
    x[0, 0], x[0, 1], x[1, :5] = float("nan"), 5.0, rows[3:8]
    many = torch.sort(tensor(37, 19), -1).values
    check(
        [
            *(
                Case(
                    lambda x, rows, right=right, small=small: torch.bucketize(
                        x, rows, right=right, out_int32=small
                    ),
                    (x, rows[:n].clone()),
                )
                for right in (False, True)
                for small in (False, True)
                for n in (64, 63, 1, 5)
            ),
            Case(lambda rows, x: torch.searchsorted(rows, x), (many, x)),
            Case(lambda x: F.one_hot(x, 7), (torch.arange(21) % 7,)),
        ]
    )
    assert len(dispatches_of(Case(torch.bucketize, (x, rows)))) == 1


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.int32, torch.int64, torch.int8],
    ids=lambda dtype: str(dtype)[6:],
)
def test_gathered(dtype):
    x, odd = of(dtype, 40, 260).to(dtype), of(dtype, 3, 21, 133).to(dtype)
    index = torch.arange(40 * 300).reshape(40, 300) * 7919 % 260
    columns = torch.arange(257) * 31 % 133 - 60
    cases = [
        Case(aten.gather.default, (x, 1, index)),
        Case(aten.gather.default, (x, 1, index[:, :130].contiguous())),
        Case(aten.gather.default, (x, 0, index[:33, :200] % 40)),
        Case(aten.index_select.default, (odd, 2, columns.abs())),
        Case(lambda x, i: x[:, :, i], (odd, columns)),
        Case(lambda x, i: x[..., 5:].index_select(2, i), (odd, (columns.abs() % 128).int())),
        Case(aten.take.default, (x, index[:20] * 17)),
        Case(lambda x, i, j: x[i, j], (x, index[0] % 40, index[1])),
        Case(lambda x, i: x[i], (x, index[:, 0] % 40)),
        Case(lambda x, i: torch.gather(x.t(), 1, i), (x, index.t()[:250].contiguous() % 40)),
    ]
    check(cases)
    case = Case(lambda x, i: torch.gather(x, 1, i), (x, index))
    found = [name for name in dispatches_of(case) if name != "index/check.comp"]  # a GPU's indices
    assert found == ["index/gather_rows.comp" if dtype.itemsize == 4 else "index/gather.comp"]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.int8, torch.bool, torch.int64],
    ids=lambda dtype: str(dtype)[6:],
)
def test_interleaved(dtype):
    x, y = of(dtype, 33, 21).to(dtype), of(dtype, 33, 42).to(dtype)[:, ::2]
    pairs = of(dtype, 33, 21, 2).to(dtype)
    cases = [
        Case(lambda x, y: torch.stack([x, y], 2), (x, y)),
        Case(lambda x, y: torch.stack([x, y.t()[:21, :21], x], 1), (x[:21], y)),
        Case(lambda x, y, z: torch.cat([x[..., None], z, y[..., None]], 2), (x, y, pairs)),
        Case(lambda x, z: torch.cat([z, x[..., None]], -1), (x, pairs)),
    ]
    # Four neighbours at once: those of a dim behind that of the tensors.
    for last in (4, 8, 6):
        given = tuple(of(dtype, 3, 5, 7, last).to(dtype) for _ in range(3))
        cases += [
            Case(lambda a, b, c: torch.stack([a, b, c], -2).flatten(-2), given),
            Case(lambda a, b, c: torch.stack([a, b.mT.contiguous().mT, c], 2), given),
        ]
    check(cases)
    assert dispatches_of(cases[0]) == ["elementwise/map.comp"]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.uint8, torch.bool, torch.int64],
    ids=lambda dtype: str(dtype)[6:],
)
def test_rows_of_odd_length(dtype):
    """Four neighbouring elements are written together, where a row may end between them;
    dims that lie one after the other are one."""
    x, image = of(dtype, 44, 67).to(dtype), of(dtype, 4, 6, 16, 18).to(dtype)
    cases = [
        Case(lambda x: x[:, 1:-1].clone(), (x,)),
        Case(lambda x: x[1:-1, :66].clone(), (x,)),
        Case(lambda x: x[:, 1:].float() * 2, (x,)),
        Case(lambda x: x.view(4, 11, 67)[:, 1:9, 2:64].clone(), (x,)),
        Case(lambda x: x[:, 2:] == x[:1, :65], (x,)),
        Case(aten.flip.default, (image, (0,))),
        Case(aten.flip.default, (image[:, 1:], (2,))),
        Case(aten.roll.default, (image, (1, 5), (1, 3))),
        Case(F.channel_shuffle, (image, 2)),
        Case(aten.tril.default, (image[..., :17].contiguous(), 1)),
    ]
    for pads in [(1, 1, 1, 1), (2, 1, 0, 0), (0, 0, 3, 1)]:
        for t in (image, image.contiguous(memory_format=torch.channels_last), image[:, 1:5]):
            cases.append(Case(aten.constant_pad_nd.default, (t, pads)))
            if dtype.is_floating_point:
                cases += [
                    Case(F.pad, (t, pads, mode)) for mode in ("reflect", "replicate", "circular")
                ]
    check(cases)


def test_picked_in_parts(monkeypatch):
    """Single elements of what no cache holds are picked from one part after the other."""
    context = default_context()
    profile = dataclasses.replace(DEFAULT, cached_bytes=1 << 12)
    monkeypatch.setattr(context, "traits", dataclasses.replace(context.traits, profile=profile))
    for x in (
        of(torch.float32, 80, 61),
        of(torch.int64, 80, 40),
        of(torch.uint8, 300, 61).to(torch.uint8),
    ):
        generator = torch.Generator().manual_seed(0)
        flat = torch.randint(-x.numel(), x.numel(), (90, 97), generator=generator)
        row, column = (torch.randint(-n, n, (90, 97), generator=generator) for n in x.shape)
        check(
            [
                Case(aten.take.default, (x, flat)),
                Case(lambda x, i, j: x[i, j], (x, row, column)),
                Case(lambda x, i, j: x.t()[j, i], (x, row, column)),
            ]
        )
