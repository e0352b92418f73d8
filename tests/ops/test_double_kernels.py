"""Kernels that compute in double precision, to the digits of the type."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, check, context, tensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]


def test_double_precision_on_the_device():
    """Sums, extremes, matmuls and comparisons, to the digits of the type."""
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
