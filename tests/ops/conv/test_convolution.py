"""Convolutions of volumes, transposed ones, and weights that are not constant, against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, check, program_of, tensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]

TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
IMAGES = {1: (11,), 2: (5, 7), 3: (3, 5, 4)}


def case(fn, x, weight, bias=None, **kwargs):
    # Sums of up to some hundred numbers in another order.
    return Case(fn, (x, weight, bias), kwargs, atol=2e-5 if x.dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_transposed(count):
    fn, cases = TRANSPOSED[count], []
    x = tensor(2, 6, *IMAGES[count])
    for kernel, stride, padding, extra, dilation, groups in [
        (3, 1, 0, 0, 1, 1),
        (3, 1, 1, 0, 1, 1),
        (3, 2, 1, 1, 1, 1),
        (4, 2, 1, 0, 1, 1),
        (2, 2, 0, 0, 1, 1),
        (3, 2, 1, 0, 1, 2),
        (1, 3, 0, 2, 1, 1),
        (5, 3, 2, 1, 1, 3),
        (3, 2, 2, 1, 2, 2),
        (3, 1, 4, 0, 3, 1),
        (1, 1, 0, 0, 1, 1),
        (2, 1, 2, 0, 1, 1),
        (3, 3, 0, 2, 1, 6),
    ]:
        weight = tensor(6, 4, *[kernel] * count, low=-1, high=1)
        bias = tensor(4 * groups) if kernel != 4 else None
        try:
            fn(x, weight, bias, stride, padding, extra, groups, dilation)
        except RuntimeError:
            continue  # no output is left
        cases.append(
            case(
                fn,
                x,
                weight,
                bias,
                stride=stride,
                padding=padding,
                output_padding=extra,
                dilation=dilation,
                groups=groups,
            )
        )
    cases += [
        case(fn, x[0], tensor(6, 3, *[3] * count), stride=2),
        case(fn, x.half(), tensor(6, 3, *[3] * count).half(), stride=2),
    ]
    assert len(cases) >= 12
    check(cases)


def test_uneven_windows():
    x = tensor(2, 3, 5, 7)
    cases = [
        case(
            F.conv_transpose2d,
            x,
            tensor(3, 4, 3, 2),
            tensor(4),
            stride=(2, 1),
            padding=(0, 1),
            output_padding=(1, 0),
            dilation=(1, 2),
        )
    ]
    cases += [
        case(
            F.conv3d,
            tensor(2, 3, 5, 6, 7),
            tensor(4, 3, 3, 1, 2),
            tensor(4),
            stride=(2, 1, 3),
            padding=(1, 0, 2),
            dilation=(1, 2, 1),
        )
    ]
    check(cases)


def test_volumes():
    x, cases = tensor(2, 6, 5, 6, 7), []
    for kernel, stride, padding, dilation, groups in [
        (3, 1, 1, 1, 1),
        (2, 2, 0, 1, 2),
        (3, 2, 2, 2, 1),
        (1, 1, 0, 1, 1),
        (3, 1, 1, 1, 6),
    ]:
        weight = tensor(12, 6 // groups, kernel, kernel, kernel, low=-1, high=1)
        cases.append(
            case(
                F.conv3d,
                x,
                weight,
                tensor(12),
                stride=stride,
                padding=padding,
                dilation=dilation,
                groups=groups,
            )
        )
    cases += [
        case(F.conv3d, x[0], tensor(4, 6, 3, 3, 3)),
        # Windows that follow one another, with a rest behind them: patches of videos.
        case(F.conv3d, x, tensor(4, 6, 2, 2, 2), tensor(4), stride=2),
        case(F.conv3d, x.half(), tensor(8, 6, 1, 3, 2).half(), None, stride=(1, 3, 2)),
        case(F.conv3d, x, tensor(4, 6, *x.shape[2:]), tensor(4), stride=tuple(x.shape[2:])),
        case(F.conv3d, x.half(), tensor(4, 6, 3, 3, 3, low=-0.3, high=0.3).half()),
    ]
    check(cases)


def test_padding_by_name():
    cases = [
        case(F.conv2d, tensor(2, 3, 7, 9), tensor(4, 3, kernel, 3), padding=name, dilation=2)
        for kernel in (2, 3)
        for name in ("same", "valid")
    ]
    cases += [
        case(F.conv1d, tensor(2, 3, 9), tensor(4, 3, 4), padding="same"),
        case(F.conv1d, tensor(3, 9), tensor(4, 3, 3)),
    ]
    check(cases)


def test_constant_weights_are_made_ready_once():
    weight = tensor(6, 4, 4, 4)
    check(
        Case(
            F.conv_transpose2d,
            (tensor(1, 6, 5, 5), weight, tensor(4), 2, 1),
            constants=(1,),
            atol=2e-5,
        )
    )


def test_dynamic_sizes():
    def run(x, w, v):
        return F.conv_transpose2d(x, w, stride=2, padding=1), F.conv3d(
            x[:, None].expand(1, 2, 3, x.shape[2], x.shape[3]), v, padding=1
        )

    w, v = tensor(3, 4, 4, 4), tensor(5, 2, 3, 3, 3)

    def of(x):
        return run(x, w, v)

    with program_of(of, (tensor(1, 3, 14, 10),), dynamic=True) as program:
        for size in [(14, 10), (6, 4), (5, 10)]:
            x = torch.cat([tensor(1, 1, *size, seed=n) for n in range(3)], 1)
            for have, want in zip(program.forward(x), of(x)):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=5e-5)
