"""Pooling over one, two and three dims, fixed and adaptive, against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, aten, check, program_of, tensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]

IMAGES = {1: (2, 3, 11), 2: (2, 3, 7, 11), 3: (1, 2, 5, 7, 9)}
AVERAGE = {1: F.avg_pool1d, 3: F.avg_pool3d}
MAXIMUM = {1: F.max_pool1d_with_indices, 3: F.max_pool3d_with_indices}


@pytest.mark.parametrize("count", [1, 3])
def test_fixed_windows(count):
    x = tensor(*IMAGES[count])
    cases = []
    for kernel, stride, padding, ceil in [
        (2, None, 0, False),
        (3, 2, 1, False),
        (3, 2, 1, True),
        (2, 3, 0, True),
        (1, 1, 0, False),
    ]:
        for include in (False, True):
            cases.append(Case(AVERAGE[count], (x, kernel, stride, padding, ceil, include)))
        for dilation in (1, 2):
            cases.append(Case(MAXIMUM[count], (x, kernel, stride, padding, dilation, ceil)))
    cases += [Case(AVERAGE[count], (x[0], 3, 1)), Case(MAXIMUM[count], (x[0], 3, 1))]
    for dtype in (torch.float16, torch.bfloat16):
        half = tensor(*IMAGES[count], dtype=dtype)  # torch has no avg_pool3d of halves
        overload = aten.avg_pool1d.default if count == 1 else aten.avg_pool3d.default
        cases.append(
            Case(overload, (half, [2] * count), expected=AVERAGE[count](half.float(), 2).to(dtype))
        )
    if count == 3:
        cases += [
            Case(F.avg_pool3d, (x, (3, 1, 2), (1, 2, 2), (1, 0, 0), False, True, 5)),
            Case(MAXIMUM[3], (x, (2, 3, 1), (2, 1, 3), (1, 1, 0))),
        ]
    holes = x.clone()
    holes.view(-1)[::5] = float("nan")
    cases += [
        Case(MAXIMUM[count], (holes, 3, 2, 1)),
        Case(MAXIMUM[count], (torch.full_like(x, -torch.inf), 3, 2, 1)),
    ]
    check(cases)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_adaptive_windows(count):
    average = [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d][count - 1]
    maximum = [F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d][count - 1]
    x = tensor(*IMAGES[count])
    cases = [Case(average, (x, n)) for n in (1, 3, 4, 13)] + [
        Case(maximum, (x, n, True)) for n in (1, 3, 4, 13)
    ]
    cases += [
        Case(average, (x[0], 2)),
        Case(average, (tensor(*IMAGES[count], dtype=torch.float16), 2)),
    ]
    if count == 2:
        cases += [
            Case(average, (x, (None, 3))),
            Case(
                aten._adaptive_avg_pool2d.default,
                (tensor(2, 8, 9, 7).contiguous(memory_format=torch.channels_last), (4, 2)),
            ),
        ]
    check(cases)


def test_unpooling():
    x = tensor(2, 3, 8, 6)
    values, indices = F.max_pool2d_with_indices(x, 2)
    volume, places = F.max_pool3d_with_indices(tensor(1, 2, 4, 4, 6), 2)
    check(
        Case(aten.max_unpool2d.default, (values, indices, (8, 6))),
        Case(aten.max_unpool3d.default, (volume, places, (4, 4, 6), (2, 2, 2), (0, 0, 0))),
    )


def test_dynamic_sizes():
    def run(x):
        return (
            F.adaptive_avg_pool2d(x, 3),
            F.avg_pool3d(x[None], 2),
            F.max_pool1d(x[0], 3, 2),
            F.adaptive_avg_pool2d(x, (x.shape[2] // 2, 1)),
        )

    with program_of(run, (tensor(1, 3, 14, 10),), dynamic=True) as program:
        for size in [(14, 10), (6, 4), (5, 10)]:
            x = torch.cat([tensor(1, 1, *size, seed=n) for n in range(3)], 1)
            for have, want in zip(program.forward(x), run(x)):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
