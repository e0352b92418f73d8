"""Gathers, pooling, and tensors made from numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.ops.elementwise.test_pointwise import works
from tests.ops.harness import Case, aten, check, tensor

pytestmark = pytest.mark.device

INDEX = (torch.int64, torch.int32)
DATA = (torch.float32, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8)


def indices(*shape, below, dtype=torch.int64, negative=False, seed=0):
    found = torch.randint(
        -below if negative else 0, below, shape, generator=torch.Generator().manual_seed(seed)
    )
    return found.to(dtype)


def test_embedding():
    cases = []
    for dtype, index_type in itertools.product(DATA, INDEX):
        for shape in ((5,), (2, 3), (2, 2, 2), (1,), ()):
            for width in (7, 8, 1):
                weight = tensor(11, width, dtype=dtype)
                if (
                    works(
                        aten.embedding.default, weight, indices(*shape, below=11, dtype=index_type)
                    )
                    is not None
                ):
                    cases.append(
                        Case(
                            aten.embedding.default,
                            (weight, indices(*shape, below=11, dtype=index_type)),
                            constants=(0,) if width == 8 else (),
                        )
                    )
    cases.append(
        Case(
            lambda w, i: F.embedding(i, w) * 2 + F.embedding(i + 1, w),
            (tensor(12, 8), indices(3, 4, below=11)),
            name="twice",
        )
    )
    cases.append(Case(lambda w, i: w[i], (tensor(12, 8), indices(3, 4, below=12)), name="index"))
    check(cases)


def test_index_select():
    cases = []
    for dtype, index_type in itertools.product(DATA, INDEX):
        x = tensor(3, 5, 8, dtype=dtype)
        for dim in (0, 1, 2, -1):
            cases.append(
                Case(
                    aten.index_select.default,
                    (x, dim, indices(4, below=x.shape[dim], dtype=index_type)),
                )
            )
        cases.append(Case(aten.index_select.default, (x, 0, indices(below=3, dtype=index_type))))
        cases.append(
            Case(
                aten.index_select.default,
                (tensor(6, dtype=dtype), 0, indices(9, below=6, dtype=index_type)),
            )
        )
    x = tensor(4, 6, 8)
    for name, layout in {
        "permuted": lambda t: t.permute(2, 0, 1),
        "slice": lambda t: t[1:, ::2],
        "expanded": lambda t: t[:, :1].expand(4, 3, 8),
    }.items():
        cases.append(
            Case(
                lambda t, i, view=layout: torch.index_select(view(t), 1, i) + 1,
                (x, indices(5, below=3)),
                name=name,
            )
        )
        cases.append(
            Case(
                lambda t, i, view=layout: torch.index_select(view(t), 0, i[::2]),
                (x, indices(7, below=3)),
                name=f"{name}, strided index",
            )
        )
    check(cases)


def test_gather():
    cases = []
    for dtype in DATA:
        x = tensor(3, 5, 8, dtype=dtype)
        for dim in (0, 1, 2, -1):
            cases.append(Case(aten.gather.default, (x, dim, indices(3, 5, 8, below=x.shape[dim]))))
            cases.append(Case(aten.gather.default, (x, dim, indices(2, 4, 3, below=x.shape[dim]))))
        cases.append(Case(aten.gather.default, (tensor(7, dtype=dtype), 0, indices(9, below=7))))
    cases.append(
        Case(
            lambda t, i: torch.gather(t.transpose(0, 2), 1, i.transpose(0, 2)),
            (tensor(3, 5, 8), indices(3, 2, 8, below=5)),
            name="transposed",
        )
    )
    check(cases)


def test_index():
    """One to four index tensors, at any place, with gaps, broadcast against each other,
    negative."""
    cases = []
    for dtype, index_type in itertools.product(
        (torch.float32, torch.float16, torch.int64, torch.bool), INDEX
    ):
        x = tensor(3, 5, 8, dtype=dtype)
        i, j, k = (indices(4, below=n, dtype=index_type, negative=True, seed=n) for n in (3, 5, 8))
        wide = indices(2, 4, below=3, dtype=index_type, negative=True)
        for index in (
            [i],
            [None, j],
            [None, None, k],
            [i, j],
            [None, j, k],
            [i, None, k],
            [i, j, k],
            [wide],
            [None, wide],
            [i[:1], j],
            [wide, j],
            [i[:, None], j],
            [i, None, k[:1]],
        ):
            cases.append(
                Case(
                    aten.index.Tensor,
                    (x, index),
                    name=f"{[None if t is None else list(t.shape) for t in index]} {dtype} {index_type}",
                )
            )
        cases.append(
            Case(
                aten.index.Tensor,
                (tensor(7, dtype=dtype), [indices(3, 2, below=7, dtype=index_type)]),
            )
        )
        cases.append(Case(aten.index.Tensor, (x, [torch.tensor(1, dtype=index_type)]), name="0-d"))
    x, i = tensor(4, 6, 8), indices(3, below=4)
    cases.append(Case(lambda t, n: t[n, 1:, ::2] + 1, (x, i), name="of a slice"))
    cases.append(Case(lambda t, n: t[:, torch.arange(3), n] * 2, (x, i), name="with arange"))
    cases.append(Case(lambda t, n: t.transpose(0, 2)[n], (x, i), name="of a permutation"))
    cases.append(Case(lambda t, n: t[n + 1 - 1].relu(), (x, i), name="of made indices"))
    cases.append(Case(lambda t, a, b: t[a, b], (x, i, i.int()), name="two types of index"))
    check(cases)


POOLS = [  # input, kernel, stride, padding, dilation, ceil_mode
    ((2, 3, 9, 11), [3, 3], [2, 2], [1, 1], [1, 1], False),
    ((1, 4, 8, 8), [2, 2], [2, 2], [0, 0], [1, 1], False),
    ((1, 8, 7, 9), [3, 2], [1, 2], [1, 0], [1, 1], False),
    ((1, 3, 10, 10), [3, 3], [2, 2], [0, 0], [1, 1], True),
    ((2, 5, 7, 7), [3, 3], [2, 2], [1, 1], [1, 1], True),
    ((1, 3, 12, 12), [3, 3], [2, 2], [1, 1], [2, 2], False),
    ((1, 3, 12, 11), [3, 3], [3, 2], [1, 1], [2, 1], True),
    ((3, 9, 9), [3, 3], [2, 2], [1, 1], [1, 1], False),
    ((1, 2, 5, 5), [5, 5], [1, 1], [0, 0], [1, 1], False),
    ((1, 4, 6, 6), [2, 2], [], [0, 0], [1, 1], False),
    ((1, 4, 6, 6), [3], [2], [1], [1], False),
    ((1, 1, 5, 5), [2, 2], [3, 3], [1, 1], [1, 1], True),
    ((1, 16, 6, 6), [1, 1], [2, 2], [0, 0], [1, 1], False),
]


def test_max_pool():
    cases = []
    for dtype in (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.int8):
        for shape, *rest in POOLS:
            x = tensor(*shape, dtype=dtype, low=-100, high=-1 if dtype is not torch.uint8 else 100)
            if works(aten.max_pool2d.default, x, *rest) is not None:
                cases.append(Case(aten.max_pool2d.default, (x, *rest)))
            if works(aten.max_pool2d_with_indices.default, x, *rest) is not None:
                cases.append(Case(aten.max_pool2d_with_indices.default, (x, *rest)))
                cases.append(
                    Case(
                        lambda *a: aten.max_pool2d_with_indices.default(*a)[0] + 1,
                        (x, *rest),
                        name=f"values {dtype} {shape} {rest}",
                    )
                )
    ties = torch.zeros(1, 3, 6, 6)
    ties[0, 1] = float("nan")
    ties[0, 2] = -float("inf")
    cases.append(
        Case(
            aten.max_pool2d_with_indices.default,
            (ties, [3, 3], [2, 2], [1, 1]),
            name="ties, NaN and -inf",
        )
    )
    check(cases)


def test_avg_pool():
    cases = []
    for dtype in (torch.float32, torch.float16):
        for shape, kernel, stride, padding, _, ceil_mode in POOLS:
            for include, divisor in ((True, None), (False, None), (True, 7)):
                args = (
                    tensor(*shape, dtype=dtype),
                    kernel,
                    stride,
                    padding,
                    ceil_mode,
                    include,
                    divisor,
                )
                if works(aten.avg_pool2d.default, *args) is not None:
                    cases.append(Case(aten.avg_pool2d.default, args))
    check(cases)


def test_pools_read_layouts():
    x, last = tensor(2, 8, 7, 9), tensor(2, 7, 9, 8)
    w = tensor(8, 8, 3, 3)
    cases = []
    for name, pool in {
        "max": lambda t: F.max_pool2d(t, 3, 2, 1),
        "avg": lambda t: F.avg_pool2d(t, 3, 2, 1),
    }.items():
        cases += [
            Case(lambda t, p=pool: p(t.permute(0, 3, 1, 2)), (last,), name=f"{name} channels last"),
            Case(lambda t, p=pool: p(t[:, 1:, ::2]), (x,), name=f"{name} slice"),
            Case(
                lambda t, k, p=pool: p(F.conv2d(t, k, padding=1).relu()) + 1,
                (x, w),
                name=f"{name} of a convolution",
                atol=1e-4,
                rtol=1e-4,
            ),
            Case(lambda t, p=pool: p(p(t)).flatten(1), (x,), name=f"{name} twice"),
            Case(
                lambda t, p=pool: p(t.expand(2, 8, 7, 9)),
                (x[:1].contiguous(),),
                name=f"{name} expanded",
            ),
        ]
    check(cases)


def test_creation():
    """As outputs, and inside programs that read them."""
    x = tensor(3, 5)
    cases = []
    for dtype in (
        torch.float32,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.bool,
        torch.uint8,
        None,
    ):
        kwargs = {} if dtype is None else {"dtype": dtype}
        for overload, args in (
            (aten.full.default, ([3, 5], 2)),
            (aten.full.default, ([3, 5], 1.5)),
            (aten.full.default, ([], 3)),
            (aten.zeros.default, ([3, 5],)),
            (aten.ones.default, ([4],)),
            (aten.arange.default, (7,)),
            (aten.arange.start, (2, 9)),
            (aten.arange.start_step, (1, 10, 3)),
            (aten.arange.start_step, (9, 0, -2)),
            (aten.arange.start_step, (0.5, 3.0, 0.25)),
            (aten.arange.default, (4.5,)),
            (aten.scalar_tensor.default, (2.5,)),
            (aten.arange.start, (5, 5)),
        ):
            if works(overload, *args, **kwargs) is not None:
                cases.append(Case(overload, args, kwargs))
        for overload, args in (
            (aten.full_like.default, (x, 3)),
            (aten.zeros_like.default, (x,)),
            (aten.ones_like.default, (x,)),
        ):
            cases.append(Case(overload, args, kwargs))
    cases.append(
        Case(lambda t: t + torch.arange(5) * torch.ones(3, 1), (x,), name="arange in a program")
    )
    cases.append(
        Case(
            lambda t: torch.where(torch.arange(5) < 3, t, torch.full((3, 5), -1.0)),
            (x,),
            name="mask",
        )
    )
    cases.append(
        Case(
            lambda t: torch.zeros_like(t).sum() + torch.ones(3, 5).sum(0),
            (x,),
            name="sums of constants",
        )
    )
    cases.append(
        Case(
            lambda t: torch.arange(12).reshape(3, 4).t()[1:] + torch.zeros(()),
            (x,),
            name="views of arange",
        )
    )
    cases.append(Case(lambda t: t[torch.arange(2, -1, -1)], (x,), name="reversed"))
    cases.append(
        Case(
            lambda t: (
                torch.full((3, 5), float("inf")) * 0,
                torch.full((2,), float("-inf")),
                torch.full((2,), float("nan")),
            ),
            (x,),
            name="inf, NaN",
        )
    )
    check(cases)
