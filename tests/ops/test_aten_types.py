"""bfloat16 and whole numbers in operators whose kernels are made for float32 and float16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, check, context, tensor

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


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_products_of_whole_numbers(dtype):
    low = 0 if dtype is torch.uint8 else -100
    a, b = (
        tensor(5, 7, dtype=dtype, low=low, high=100),
        tensor(7, 3, dtype=dtype, low=low, high=100),
    )
    cases = [
        Case(torch.mm, (a, b)),
        Case(torch.matmul, (tensor(2, 1, 5, 7, dtype=dtype), tensor(3, 7, 4, dtype=dtype))),
        Case(torch.mv, (a, b[:, 0])),
    ]
    cases += [
        Case(torch.bmm, (tensor(4, 5, 7, dtype=dtype), tensor(4, 7, 3, dtype=dtype))),
        Case(torch.addmm, (tensor(5, 3, dtype=dtype), a, b), {"alpha": 2}),
    ]
    if dtype is torch.int64:
        cases.append(Case(torch.mm, (a * 2**33, b)))
    check(cases)


def test_double_precision_on_the_device():
    """Sums, extremes, products and comparisons, to the digits of the type."""
    d = torch.float64
    x, y, long = tensor(5, 13, 17, dtype=d), tensor(17, 9, dtype=d), tensor(3, 70000, dtype=d)
    odd = x.clone()
    odd[0, 0, 0], odd[1, 0, 0] = torch.nan, torch.inf
    cases = [
        Case(f, (t, dim))
        for f in (torch.sum, torch.mean, torch.amax, torch.amin)
        for t in (x, odd)
        for dim in (1, -1, (0, 2))
    ]
    cases += [
        Case(torch.sum, (long, 1)),
        Case(torch.amax, (long, 1)),
        Case(torch.sum, (long.t().contiguous(), 0)),
        Case(torch.prod, (x, 1)),
    ]
    cases += [
        Case(torch.argmax, (odd, 1)),
        Case(torch.argmin, (x,)),
        Case(torch.max, (x, 1)),
        Case(torch.any, (odd > 2, 1)),
        Case(torch.all, (odd, 2)),
    ]
    cases += [
        Case(torch.matmul, (x, y)),
        Case(torch.mm, (y.t(), y)),
        Case(torch.addmm, (y[0], x[0], y)),
        Case(F.linear, (x, y.t(), y[0])),
    ]
    cases += [
        Case(torch.dot, (x[0, 0], y[:, 0])),
        Case(torch.mv, (x[0], y[:, 0])),
        Case(torch.outer, (y[0], y[1])),
        Case(torch.trace, (x[0],)),
    ]
    cases += [
        Case(torch.einsum, ("abc,cd->abd", x, y)),
        Case(torch.linalg.cross, (x[:, :, :3], x[:, :, 3:6])),
        Case(torch.nansum, (odd, 1)),
    ]
    cases += [
        Case(torch.isnan, (odd,)),
        Case(torch.maximum, (odd, x)),
        Case(torch.clamp, (odd, -0.5, 0.5)),
        Case(F.relu6, (x,)),
        Case(torch.argwhere, (x[0],)),
    ]
    cases += [
        Case(torch.sum, (tensor(4, dtype=torch.int32),), {"dtype": d}),
        Case(torch.masked_select, (x, x > 0)),
    ]
    cases += [
        Case(f, (t, dim))
        for f in (torch.cumsum, torch.cumprod, torch.cummax)
        for t in (x, odd)
        for dim in (0, 2)
    ] + [Case(torch.cumsum, (long, 1))]
    for case in cases:
        case.rtol, case.atol = 1e-12, 1e-13
    if "float64" in context().traits.features:
        check(cases)


def test_double_precision_has_its_digits():
    """Also where an operator is made of several, or a function of others."""
    x, y = tensor(3, 8, dtype=torch.float64), tensor(3, 8, dtype=torch.float64, seed=1)
    cases = [
        Case(torch.isclose, (x, x + 1e-9)),
        Case(torch.logsumexp, (x, 1)),
        Case(torch.nansum, (x, 1)),
        Case(F.glu, (x,)),
        Case(torch.frexp, (x,)),
        Case(F.avg_pool2d, (x[None, None], 2)),
        Case(F.softmax, (x, 1)),
        Case(torch.addcmul, (x, x, y)),
        Case(F.rms_norm, (x, (8,))),
        Case(torch.var, (x, 1)),
        Case(F.gelu, (x,)),
    ]
    for case in cases:
        case.host, case.rtol, case.atol = "float64" not in context().traits.features, 1e-12, 1e-12
    check(cases)
