"""Tensors made from numbers, and stacks, against torch."""

from __future__ import annotations

import pytest
import torch

from tests.ops.harness import TYPES, Case, aten, check, program_of, tensor

pytestmark = pytest.mark.device


def test_new_tensors():
    x = tensor(2, 3, dtype=torch.float16)
    cases = [
        Case(
            lambda x: (
                x.new_zeros(4),
                x.new_ones(2, 2),
                x.new_full((3,), 2.5),
                x.new_ones(2, dtype=torch.int64),
            ),
            (x,),
        )
    ]
    cases += [Case(aten.fill.Scalar, (tensor(3, 5, dtype=dtype), 2)) for dtype in TYPES]
    cases += [Case(aten.fill.Tensor, (x, torch.tensor(2.5))), Case(aten.zero.default, (x,))]
    check(cases)


def test_empty_tensors_have_their_sizes():
    def run(x):
        return (
            torch.empty(2, 3),
            torch.empty_like(x, dtype=torch.int32),
            x.new_empty(4, 1),
            torch.empty_strided((2, 2), (1, 2)),
        )

    x = tensor(2, 3)
    with program_of(run, (x,)) as program:
        for have, want in zip(program.forward(x), run(x)):
            assert have.shape == want.shape and have.dtype is want.dtype


def test_patterns():
    cases = [
        Case(
            lambda x, dtype=dtype: (torch.eye(5, dtype=dtype), torch.eye(3, 7, dtype=dtype), x),
            (tensor(1),),
        )
        for dtype in TYPES
    ]
    for args in [(0.0, 1.0, 11), (-3.0, 2.5, 8), (5.0, -1.0, 1), (2.0, 3.0, 2)]:
        cases.append(
            Case(
                lambda x, args=args: (
                    torch.linspace(*args),
                    torch.linspace(*args, dtype=torch.float16),
                    x,
                ),
                (tensor(1),),
            )
        )
    # torch cuts the ends off first, and then goes towards the middle from both.
    for args in [(4.3, -3.7, 50), (0, 7, 50), (-3.0, 2.5, 8), (5.9, -1.0, 1)]:
        cases.append(
            Case(
                lambda x, args=args: (
                    torch.linspace(*args, dtype=torch.int64),
                    torch.linspace(*args, dtype=torch.int32) + x,
                ),
                (tensor(1),),
            )
        )
    cases += [
        Case(
            lambda x, k=k: (torch.tril_indices(5, 4, k), torch.triu_indices(3, 5, k), x),
            (tensor(1),),
        )
        for k in (-1, 0, 2)
    ]
    check(cases)


def test_stacks():
    x, y = tensor(3, 5), tensor(3, 5, seed=1)
    check(
        [Case(torch.stack, ([x, y], dim)) for dim in (0, 1, -1)]
        + [
            Case(torch.stack, ([x, y.half()], 0)),
            Case(torch.stack, ([torch.tensor(1.0), torch.tensor(2.0)],)),
        ]
    )
