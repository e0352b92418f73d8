"""bfloat16 in operators whose kernels are made for float32 and float16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, check, tensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]


def bf16(*shape, seed=0):
    return tensor(*shape, dtype=torch.bfloat16, seed=seed)


def test_bfloat16():
    x, image = bf16(4, 7, 8), bf16(2, 8, 9, 7)
    cases = [
        Case(torch.softmax, (x, 1)),
        Case(torch.log_softmax, (x, -1)),
        Case(F.layer_norm, (x, (8,), bf16(8), bf16(8, seed=1))),
        Case(F.rms_norm, (x, (8,), bf16(8), 1e-5)),
        Case(F.rms_norm, (x, (8,))),
        Case(torch.matmul, (x, bf16(8, 5))),
        Case(torch.bmm, (x, bf16(4, 8, 3))),
        Case(F.linear, (x, bf16(6, 8), bf16(6))),
        Case(F.conv2d, (image, bf16(4, 8, 3, 3), bf16(4), 2, 1)),
        Case(F.max_pool2d, (image, 3, 2, 1)),
        Case(F.avg_pool2d, (image, 2)),
        Case(
            F.scaled_dot_product_attention,
            (bf16(2, 3, 5, 8), bf16(2, 3, 9, 8), bf16(2, 3, 9, 8, seed=1)),
        ),
        Case(torch.sum, (x, (1,))),
        Case(torch.mean, (x, (0, 2), True)),
        Case(torch.amax, (x, 1)),
        Case(torch.prod, (x, 1)),
        Case(torch.embedding, (bf16(11, 6), torch.tensor([[1, 3], [10, 0]]))),
        Case(torch.cat, ([x, bf16(4, 2, 8)], 1)),
        Case(F.batch_norm, (image, bf16(8), bf16(8).abs() + 0.5, bf16(8, seed=2), bf16(8, seed=3))),
        Case(lambda a, b: torch.relu(a @ b + 1), (x, bf16(8, 5))),
        Case(F.group_norm, (image, 4, bf16(8), bf16(8))),
    ]
    for case in cases:
        # Half a unit in the last place of sums up to 100, or twice that where torch rounds in
        # between.
        case.rtol, case.atol = 3e-2, 6e-2
    check(cases)


def test_constant_weights_of_bfloat16():
    check(Case(F.linear, (bf16(3, 8), bf16(6, 8), bf16(6)), constants=(1, 2), rtol=3e-2, atol=6e-2))
