"""Views (no data moves), copies, concatenation and casts over tensors that lie in memory in every
way."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.ops.harness import Case, aten, check, dispatches, failures, program_of, tensor

pytestmark = pytest.mark.device

VIEWS = {
    "view": [
        (aten.view.default, (2, 3, 8), ([6, 8],)),
        (aten.view.default, (6, 8), ([2, 3, -1],)),
        (aten.view.default, (2, 3, 8), ([48],)),
        (aten.view.default, (1, 5), ([5, 1, 1],)),
        (aten.view.default, (1,), ([],)),
        (aten.view.default, (), ([1, 1],)),
        (aten.reshape.default, (4, 6), ([3, 8],)),
        (aten._unsafe_view.default, (4, 6), ([24],)),
        (aten.view_copy.default, (4, 6), ([2, 12],)),
        (aten.view.default, (0, 3), ([3, 0],)),
        (aten.flatten.using_ints, (2, 3, 4), (1, -1)),
        (aten.flatten.using_ints, (), ()),
    ],
    "squeeze": [
        (aten.squeeze.default, (1, 3, 1, 5), ()),
        (aten.squeeze.dim, (1, 3, 1, 5), (2,)),
        (aten.squeeze.dim, (1, 3), (1,)),
        (aten.squeeze.dims, (1, 3, 1), ([0, -1],)),
        (aten.squeeze.dims, (1, 3, 1), ([1],)),
        (aten.squeeze_copy.dims, (1, 1), ([0, 1],)),
        (aten.squeeze.default, (), ()),
        (aten.squeeze.dim, (), (0,)),
        (aten.squeeze.dims, (1, 1, 3), ([],)),
        (aten.unsqueeze.default, (3, 5), (0,)),
        (aten.unsqueeze.default, (3, 5), (-1,)),
        (aten.unsqueeze.default, (3, 5), (1,)),
        (aten.unsqueeze_copy.default, (), (0,)),
    ],
    "permute": [
        (aten.permute.default, (3, 5, 7), ([2, 0, 1],)),
        (aten.permute.default, (3, 5, 7), ([-1, 1, 0],)),
        (aten.permute.default, (), ([],)),
        (aten.permute_copy.default, (2, 3, 4, 5), ([0, 2, 3, 1],)),
        (aten.transpose.int, (3, 5, 7), (0, -1)),
        (aten.transpose.int, (4, 8), (0, 1)),
        (aten.transpose.int, (), (0, -1)),
        (aten.t.default, (3, 5), ()),
        (aten.t.default, (3,), ()),
        (aten.t.default, (), ()),
        (aten.permute.default, (1, 5, 1, 7), ([2, 1, 0, 3],)),
        (aten.permute.default, (2, 0, 3), ([2, 1, 0],)),
    ],
    "expand": [
        (aten.expand.default, (3, 1), ([3, 4],)),
        (aten.expand.default, (5,), ([2, 3, 5],)),
        (aten.expand.default, (3, 1, 5), ([-1, 2, -1],)),
        (aten.expand.default, (), ([2, 3],)),
        (aten.expand_copy.default, (1, 8), ([4, 8],)),
        (aten.expand.default, (1,), ([0],)),
        (aten.expand.default, (3, 5), ([3, 5],)),
        (aten.expand.default, (1,), ([1, 1],)),
    ],
    "slice": [
        (aten.slice.Tensor, (7, 5), (0, 1, 4)),
        (aten.slice.Tensor, (7, 5), (1, -3, -1)),
        (aten.slice.Tensor, (7, 5), (0, None, None, 2)),
        (aten.slice.Tensor, (7, 5), (0, 1, 2**63 - 1, 3)),
        (aten.slice.Tensor, (7, 5), (0, 5, 2)),
        (aten.slice.Tensor, (7, 5), (0, -100, 100)),
        (aten.slice.Tensor, (7, 5), (1, 4, 9)),
        (aten.slice_copy.Tensor, (7, 8), (1, 4, 8)),
        (aten.slice.Tensor, (8, 8), (0, 0, 8, 8)),
        (aten.slice.Tensor, (7, 5), (-1, 2, None, 2)),
        (aten.slice.Tensor, (7, 5), (0, 9, 12)),
    ],
    "select": [
        (aten.select.int, (3, 5), (0, 1)),
        (aten.select.int, (3, 5), (1, -1)),
        (aten.select.int, (7,), (0, 3)),
        (aten.select_copy.int, (2, 3, 4), (-1, 0)),
        (aten.select.int, (2, 3, 4), (1, -3)),
    ],
    "split": [
        (aten.split.Tensor, (7, 5), (3,)),
        (aten.split.Tensor, (7, 5), (2, 1)),
        (aten.split.Tensor, (7, 5), (9,)),
        (aten.split_copy.Tensor, (8, 4), (4, -1)),
        (aten.split_with_sizes.default, (7, 5), ([2, 0, 5],)),
        (aten.split_with_sizes_copy.default, (7, 5), ([1, 4], 1)),
        (aten.split.sizes, (7,), ([3, 4],)),
        (aten.unbind.int, (3, 5), ()),
        (aten.unbind.int, (3, 5), (-1,)),
        (aten.unbind_copy.int, (2, 1, 3), (1,)),
    ],
    "diagonal": [
        (aten.diagonal.default, (5, 5), ()),
        (aten.diagonal.default, (3, 7), (2,)),
        (aten.diagonal.default, (7, 3), (-2,)),
        (aten.diagonal.default, (3, 7), (9,)),
        (aten.diagonal.default, (2, 3, 4), (0, 1, 2)),
        (aten.diagonal.default, (2, 3, 4), (1, -1, 0)),
        (aten.diagonal_copy.default, (4, 4), (-1,)),
    ],
}


def listed(made):
    return list(made) if isinstance(made, (list, tuple)) else [made]


@pytest.mark.parametrize("family", VIEWS)
def test_view_then_pointwise(family):
    """The view itself as an output, read by a pointwise program, and of a value that a program
    made."""
    cases = []
    for number, (overload, shape, args) in enumerate(VIEWS[family]):
        for dtype in (torch.float32, torch.float16, torch.int64, torch.bool)[
            : 4 if number % 3 == 0 else 2
        ]:
            x = tensor(*shape, dtype=dtype, seed=number)
            label = f"{overload} {dtype} {args}"
            cases.append(Case(lambda t, o=overload, a=args: o(t, *a), (x,), name=label))
            if dtype is not torch.bool:
                cases.append(
                    Case(
                        lambda t, o=overload, a=args: [v * 2 + 1 for v in listed(o(t, *a))],
                        (x,),
                        name=label + " *2+1",
                    )
                )
                cases.append(
                    Case(
                        lambda t, o=overload, a=args: [v - 1 for v in listed(o(t.neg(), *a))],
                        (x,),
                        name="neg " + label,
                    )
                )
    check(cases)


LAYOUTS = {
    "dense": lambda x: x,
    "permuted": lambda x: x.permute(2, 0, 1),
    "NHWC": lambda x: x.permute(0, 2, 1),
    "slice": lambda x: x[:, 1:5],
    "odd slice": lambda x: x[:, :, 1:8],
    "step": lambda x: x[:, ::2, ::3],
    "expanded": lambda x: x[:, :1].expand(4, 5, 12),
    "row": lambda x: x[2],
    "column": lambda x: x[:, :, 3],
    "reversed twice": lambda x: x.transpose(0, 2).transpose(0, 1)[1:],
    "diagonal": lambda x: torch.diagonal(x, 1, 1, 2),
}
USES = {
    "copy": lambda v: v.clone(),
    "arithmetic": lambda v: v * 3 - 1,
    "contiguous view": lambda v: v.reshape(-1) + 1,
    "another view": lambda v: v.unsqueeze(0).transpose(-1, -2) * 2,
    "sum": lambda v: v.sum(-1),
    "first sum": lambda v: v.sum(0),
    "softmax": lambda v: torch.softmax(v, -1),
    "cat": lambda v: torch.cat([v, v * 2], -1),
    "broadcast": lambda v: v + v.select(0, 0),
    "gather": lambda v: torch.index_select(v, 0, torch.tensor([1, 0], dtype=torch.int64)),
    "matmul": lambda v: v.reshape(v.shape[0], -1) @ v.reshape(v.shape[0], -1).t(),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_uses_of_layouts(use):
    """Every kernel family reads every layout."""
    cases = []
    for name, layout in LAYOUTS.items():
        for dtype in (
            (torch.float32, torch.float16)
            if use in ("copy", "arithmetic", "softmax")
            else (torch.float32,)
        ):
            x = tensor(4, 6, 12, dtype=dtype)
            cases.append(
                Case(
                    lambda t, view=layout: USES[use](view(t)),
                    (x,),
                    name=f"{use} of {name}",
                    atol=1e-5 if dtype is torch.float32 else None,
                )
            )
    check(cases)


def test_random_chains_of_views():
    """Views of views, in random order, with a pointwise step at a random position."""
    import random

    random.seed(5)
    cases = []
    for number in range(40):
        x = tensor(
            *[random.choice([1, 2, 3, 4, 6]) for _ in range(random.randint(1, 4))], seed=number
        )
        steps = []

        def chain(t, steps=None, rng=None):
            return t

        plan = [
            (random.randrange(7), random.random(), random.random())
            for _ in range(random.randint(2, 5))
        ]

        def apply(t, plan=plan):
            for kind, a, b in plan:
                if kind == 0 and t.dim() >= 2:
                    t = t.transpose(int(a * t.dim()), int(b * t.dim()))
                elif kind == 1 and t.dim():
                    d = int(a * t.dim())
                    start = int(b * t.shape[d])
                    t = t.narrow(d, start, t.shape[d] - start)
                elif kind == 2 and t.dim() < 4:
                    t = t.unsqueeze(int(a * (t.dim() + 1)))
                elif kind == 3:
                    t = t.reshape(-1)
                elif kind == 4:
                    t = t.expand(2, *t.shape) if t.dim() < 4 else t
                elif kind == 5:
                    t = t * 2 + 1
                elif t.dim() and t.shape[0] > 1:
                    t = t[::2]
            return t + 1, t

        cases.append(Case(apply, (x,), name=f"chain {number} {plan}"))
        del steps, chain
    check(cases)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat(dim):
    cases = []
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool, torch.uint8):
        x = tensor(3, 4, 5, dtype=dtype)
        parts = [x, x.narrow(dim, 1, 2), x.narrow(dim, 0, 0), x.narrow(dim, 2, 1)]
        cases.append(
            Case(
                lambda *t: torch.cat(t, dim),
                tuple(p.contiguous() for p in parts),
                name=f"cat {dtype}",
            )
        )
    x, y = tensor(4, 8, 4), tensor(4, 8, 4, seed=1)
    cases.append(Case(lambda a, b: torch.cat([a, b], dim), (x, y), name="vectors"))
    cases.append(
        Case(
            lambda a, b: torch.cat([a * 2, b.transpose(0, 2).contiguous().transpose(0, 2), a], dim),
            (x, y),
            name="made and permuted",
        )
    )
    cases.append(Case(lambda a: torch.cat([a, a], dim), (x,), name="twice the same"))
    cases.append(
        Case(
            lambda a, b: torch.cat([a, b], dim),
            (x, tensor(4, 8, 4, dtype=torch.int32)),
            name="promotion",
        )
    )
    cases.append(
        Case(lambda a, b: torch.cat([a, b], dim), (x, torch.zeros(0)), name="legacy empty")
    )
    check(cases)


def test_repeat():
    check(
        [
            Case(aten.repeat.default, (tensor(*shape, dtype=dtype), repeats))
            for dtype in (torch.float32, torch.int64)
            for shape, repeats in (
                ((3, 5), [2, 3]),
                ((5,), [2, 3, 1]),
                ((3, 4), [1, 1]),
                ((1, 4), [4, 1]),
                ((), [3]),
                ((3, 5), [0, 2]),
                ((2, 3, 4), [1, 2, 2]),
            )
        ]
    )


def test_zero_sized():
    """No element: nothing is dispatched, and shapes are right."""
    x, y = tensor(0, 5), tensor(3, 0)
    cases = [
        Case(lambda t: t + 1, (x,)),
        Case(lambda t: t.sum(0), (x,), name="sum of nothing"),
        Case(lambda t: t.sum(), (x,)),
        Case(lambda t: torch.softmax(t, 0), (x,)),
        Case(lambda t: t.mean(1), (x,)),
        Case(lambda a: torch.cat([a, a]), (x,)),
        Case(lambda a, b: a @ b, (tensor(3, 5), tensor(5, 0))),
        Case(lambda a, b: a @ b, (x, tensor(5, 4))),
        Case(lambda a, b: a @ b, (y, tensor(0, 4)), name="sum over nothing"),
        Case(lambda a: a.reshape(0), (x,)),
        Case(lambda t: t.prod(0), (x,)),
        Case(lambda t: t.any(0), (x,)),
        Case(lambda t: t.all(), (x,)),
        Case(lambda a, i: a[i], (tensor(4, 5), torch.zeros(0, dtype=torch.int64))),
    ]
    check(cases)


def test_views_cost_nothing():
    """Views between kernels add no dispatch; one whose bytes have to move adds one."""
    with program_of(
        lambda x: (x * 2).reshape(4, 6).t()[1:].unsqueeze(0) + 1, (tensor(2, 3, 4),)
    ) as program:
        assert len(dispatches(program)) <= 2, dispatches(program)
    with program_of(lambda x: x.t().unsqueeze(0).squeeze(0).t() + 1, (tensor(3, 4),)) as program:
        assert len(dispatches(program)) == 1


def test_failures_are_found():
    """The harness itself: a wrong result, a wrong type and an exception are all failures."""
    wrong = Case(aten.add.Tensor, (tensor(3), tensor(3)), expected=tensor(3))
    typed = Case(aten.add.Tensor, (tensor(3), tensor(3)), expected=(tensor(3) + tensor(3)).double())
    raises = Case(aten.view.default, (tensor(3), [5]), expected=tensor(3))
    right = Case(aten.neg.default, (tensor(3),))
    found = failures([wrong, typed, raises, right])
    assert len(found) == 3, found
    assert (
        "elements differ" in found[0]
        and "float32[3], not torch.float64[3]" in found[1]
        and "Error" in found[2]
    )
    assert list(itertools.chain(failures([right]))) == []
