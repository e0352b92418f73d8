"""Group, instance and batch norm against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, aten, check, dispatches, program_of, tensor
from tests.ops.quantized.harness import kernels_of

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]


def test_group_norm():
    cases = []
    for shape, groups in [
        ((2, 6, 5, 7), 3),
        ((2, 6, 5, 7), 1),
        ((3, 4, 9), 4),
        ((2, 8, 3, 2, 5), 2),
        ((4, 6), 2),
    ]:
        x, w, b = tensor(*shape), tensor(shape[1]), tensor(shape[1], seed=1)
        cases += [
            Case(F.group_norm, (x, groups, w, b), atol=1e-5),
            Case(F.group_norm, (x, groups), atol=1e-5),
            Case(F.group_norm, (x, groups, None, b), atol=1e-5),
        ]
    x = tensor(2, 8, 6, 4)
    cases += [
        Case(
            aten.native_group_norm.default, (x, tensor(8), tensor(8), 2, 8, 24, 4, 1e-5), atol=1e-5
        )
    ]
    cases += [
        Case(
            F.group_norm, (x.contiguous(memory_format=torch.channels_last), 4, tensor(8)), atol=1e-5
        )
    ]
    cases += [
        Case(F.group_norm, (x.half(), 4, tensor(8).half(), tensor(8).half()), atol=5e-3),
        Case(F.group_norm, ((x + 100), 2), rtol=1e-4, atol=1e-4),
    ]
    check(cases)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_group_norm_and_what_follows(device):
    """Long groups, and a program behind the norm, whether channels come first or last."""
    x, w, b, k = tensor(2, 8, 6, 10), tensor(8), tensor(8, seed=1), tensor(8, 8, 3, 3) * 0.2

    def last(x, k, w, b, s):
        return F.silu(F.group_norm(F.conv2d(x, k, padding=1), 2, w, b)) * s

    def first(x, w, b, s):
        return F.silu(F.group_norm(x, 2, w, b)) * (1 + s) + x

    scales = (tensor(1, 8, 1, 1), tensor(2, 8, 1, 1))
    cases = [
        case
        for s in scales
        for case in (Case(last, (x, k, w, b, s), atol=1e-5), Case(first, (x, w, b, s), atol=1e-5))
    ]
    cases += [
        Case(F.group_norm, (tensor(n, 8, h, 100), 2, w, b), atol=2e-5)
        for n, h in ((16, 96), (1, 96), (1, 24), (20, 7))
    ]
    cases += [Case(F.group_norm, (tensor(20, 8, 7, 7), 2, w, b), atol=1e-5)]
    with kernels_of(device):
        check(cases)
        with program_of(first, (x, w, b, scales[0])) as program:
            assert dispatches(program) == ["reduce/norm.comp"]


def test_batch_norm():
    cases = []
    for shape in [(3, 4, 5, 7), (3, 4), (3, 4, 6)]:
        x, stats = (
            tensor(*shape),
            [tensor(4), tensor(4, seed=1), tensor(4, seed=2), tensor(4, low=0.5, high=2)],
        )
        args = (x, *stats, False, 0.1, 1e-5)
        cases += [
            Case(aten._native_batch_norm_legit.default, args, atol=1e-5),
            Case(F.batch_norm, (x, stats[2], stats[3], stats[0], stats[1]), atol=1e-5),
        ]
        cases += [
            Case(
                aten._native_batch_norm_legit.no_stats,
                (x, stats[0], stats[1], True, 0.1, 1e-5),
                atol=1e-5,
            )
        ]
        cases += [
            Case(
                aten._native_batch_norm_legit_functional.default,
                (*args[:5], True, 0.1, 1e-5),
                atol=1e-5,
            )
        ]
        cases += [Case(aten._native_batch_norm_legit_functional.default, args, atol=1e-5)]
        cases += [Case(F.batch_norm, (x, None, None), {"training": True}, atol=1e-5)]
    check(cases)


def test_instance_norm():
    cases = [
        Case(F.instance_norm, (tensor(2, 3, 5, 7), None, None, w, b), atol=1e-5)
        for w, b in [(None, None), (tensor(3), tensor(3, seed=1))]
    ]
    cases += [
        Case(
            F.instance_norm,
            (tensor(2, 3, 5), tensor(3), tensor(3, low=0.5, high=2), None, None, False),
            atol=1e-5,
        )
    ]
    check(cases)


def test_dynamic_sizes():
    def run(x):
        return F.group_norm(x, 2), F.instance_norm(x), F.batch_norm(x, None, None, training=True)

    with program_of(run, (tensor(1, 4, 14, 10),), dynamic=True) as program:
        for size in [(14, 10), (6, 3), (5, 10)]:
            x = tensor(1, 4, *size)
            for have, want in zip(program.forward(x), run(x)):
                torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
