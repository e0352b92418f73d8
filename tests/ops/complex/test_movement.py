"""Operators that move and create complex numbers, beside torch's."""

import pytest
import torch

from tests.ops.complex.harness import numbers
from tests.ops.harness import Case, check, tensor

aten = torch.ops.aten
pytestmark = pytest.mark.device


def test_views():
    x = numbers(4, 6, 5)
    check(
        Case(aten.view.default, (x, [2, 2, 30])),
        Case(aten.permute.default, (x, [2, 0, -2])),
        Case(aten.transpose.int, (x, -1, 0)),
        Case(aten.t.default, (x[0],)),
        Case(aten.unsqueeze.default, (x, -1)),
        Case(aten.squeeze.dims, (x[:1], [0])),
        Case(aten.expand.default, (x[:1], [3, -1, 6, 5])),
        Case(aten.slice.Tensor, (x, 1, 1, 5, 2)),
        Case(aten.slice.Tensor, (x, -1, -3)),
        Case(aten.select.int, (x, -2, 3)),
        Case(aten.split.Tensor, (x, 2, 1)),
        Case(aten.unbind.int, (x, -3)),
        Case(aten.diagonal.default, (x, 1, 0, 2)),
        Case(aten.unfold.default, (x, 1, 3, 2)),
        Case(aten.as_strided.default, (x, [3, 2], [7, 2], 5)),
        Case(aten.real.default, (x,)),
    )


@pytest.mark.slow
def test_moves():
    x, y, real = numbers(4, 6, 5), numbers(4, 6, 5, seed=1), tensor(4, 6, 5)
    rows = torch.tensor([3, 0, 3])
    at = tensor(4, 6, 5, dtype=torch.int64, low=0, high=3)
    mask = tensor(4, 6, 5, dtype=torch.bool)
    check(
        Case(aten.cat.default, ([x, y, real], -1)),
        Case(aten.stack.default, ([x, y], 1)),
        Case(aten.flip.default, (x, [0, -1])),
        Case(aten.roll.default, (x, [1, -2], [0, -1])),
        Case(aten.roll.default, (x, [3])),
        Case(aten.repeat.default, (x, [2, 1, 1, 2])),
        Case(aten.constant_pad_nd.default, (x, [1, 2, 0, 3], 1.5)),
        Case(aten.constant_pad_nd.default, (x, [-1, 2], 2 - 1j)),
        Case(aten.reflection_pad1d.default, (x, [2, 1])),
        Case(aten.index_select.default, (x, -1, rows)),
        Case(aten.index.Tensor, (x, [None, rows])),
        Case(aten.index.Tensor, (x, [rows, None, rows])),
        Case(aten.index.Tensor, (x, [rows, rows])),
        Case(aten.gather.default, (x, 0, at)),
        Case(aten.scatter.src, (x, 0, at[:1], y)),
        Case(aten.scatter_add.default, (x, 1, at, y)),
        Case(aten.index_put.default, (x, [rows[:2]], y[:2])),
        Case(aten.index_add.default, (x, 0, rows, y[:3])),
        Case(aten.masked_scatter.default, (x, mask, y)),
        Case(aten.select_scatter.default, (x, y[0], 0, 2)),
        Case(aten.triu.default, (x, 1)),
        Case(aten.tril.default, (x, -1)),
        Case(aten.diag_embed.default, (x[0],)),
        Case(aten.pixel_shuffle.default, (numbers(1, 8, 3, 2), 2)),
    )


@pytest.mark.slow
def test_creation():
    x = numbers(3, 4)
    dtype = {"dtype": torch.complex64}
    check(
        Case(aten.zeros.default, ([2, 3],), dtype),
        Case(aten.ones.default, ([2, 3],), {"dtype": torch.complex128}),
        Case(aten.full.default, ([2], 1 + 2j), dtype),
        Case(aten.full.default, ([2], 3), dtype),
        Case(aten.full_like.default, (x, -2j)),
        Case(aten.zeros_like.default, (x,)),
        Case(aten.ones_like.default, (x,), {"dtype": torch.float32}),
        Case(aten.new_zeros.default, (x, [2, 2])),
        Case(aten.scalar_tensor.default, (2 - 1j,), dtype),
        Case(aten.eye.default, (3,), dtype),
        Case(aten.fill.Scalar, (x, 1 - 1j)),
        Case(aten.copy.default, (x, numbers(4, seed=1))),
    )
