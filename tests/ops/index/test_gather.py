"""Elements and rows read by indices, against torch."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, aten, check, tensor, works

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
                args = tensor(11, width, dtype=dtype), indices(*shape, below=11, dtype=index_type)
                if works(aten.embedding.default, *args) is not None:
                    constants = (0,) if width == 8 else ()
                    cases.append(Case(aten.embedding.default, args, constants=constants))
    twice = lambda w, i: F.embedding(i, w) * 2 + F.embedding(i + 1, w)  # noqa: E731
    cases.append(Case(twice, (tensor(12, 8), indices(3, 4, below=11)), name="twice"))
    cases.append(Case(lambda w, i: w[i], (tensor(12, 8), indices(3, 4, below=12)), name="index"))
    check(cases)


def test_index_select():
    cases = []
    for dtype, index_type in itertools.product(DATA, INDEX):
        x, of = tensor(3, 5, 8, dtype=dtype), functools.partial(indices, dtype=index_type)
        for dim in (0, 1, 2, -1):
            cases.append(Case(aten.index_select.default, (x, dim, of(4, below=x.shape[dim]))))
        cases.append(Case(aten.index_select.default, (x, 0, of(below=3))))
        vector = tensor(6, dtype=dtype)
        cases.append(Case(aten.index_select.default, (vector, 0, of(9, below=6))))
    x = tensor(4, 6, 8)
    for name, layout in {
        "permuted": lambda t: t.permute(2, 0, 1),
        "slice": lambda t: t[1:, ::2],
        "expanded": lambda t: t[:, :1].expand(4, 3, 8),
    }.items():
        select = lambda t, i, view=layout: torch.index_select(view(t), 1, i) + 1  # noqa: E731
        strided = lambda t, i, view=layout: torch.index_select(view(t), 0, i[::2])  # noqa: E731
        cases.append(Case(select, (x, indices(5, below=3)), name=name))
        cases.append(Case(strided, (x, indices(7, below=3)), name=f"{name}, strided index"))
    check(cases)


def test_gather():
    cases = []
    for dtype in DATA:
        x = tensor(3, 5, 8, dtype=dtype)
        for dim in (0, 1, 2, -1):
            cases.append(Case(aten.gather.default, (x, dim, indices(3, 5, 8, below=x.shape[dim]))))
            cases.append(Case(aten.gather.default, (x, dim, indices(2, 4, 3, below=x.shape[dim]))))
        cases.append(Case(aten.gather.default, (tensor(7, dtype=dtype), 0, indices(9, below=7))))
    transposed = lambda t, i: torch.gather(t.transpose(0, 2), 1, i.transpose(0, 2))  # noqa: E731
    cases.append(Case(transposed, (tensor(3, 5, 8), indices(3, 2, 8, below=5)), name="transposed"))
    check(cases)


def test_index():
    """One to four index tensors, for any dims, with gaps, broadcast against each other, negative."""
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
            shapes = [None if t is None else list(t.shape) for t in index]
            cases.append(Case(aten.index.Tensor, (x, index), name=f"index {shapes}"))
        vector = tensor(7, dtype=dtype)
        index = [indices(3, 2, below=7, dtype=index_type)]
        cases.append(Case(aten.index.Tensor, (vector, index)))
        cases.append(Case(aten.index.Tensor, (x, [torch.tensor(1, dtype=index_type)]), name="0-d"))
    x, i = tensor(4, 6, 8), indices(3, below=4)
    cases.append(Case(lambda t, n: t[n, 1:, ::2] + 1, (x, i), name="of a slice"))
    cases.append(Case(lambda t, n: t[:, torch.arange(3), n] * 2, (x, i), name="with arange"))
    cases.append(Case(lambda t, n: t.transpose(0, 2)[n], (x, i), name="of a permutation"))
    cases.append(Case(lambda t, n: t[n + 1 - 1].relu(), (x, i), name="of made indices"))
    cases.append(Case(lambda t, a, b: t[a, b], (x, i, i.int()), name="two types of index"))
    check(cases)
