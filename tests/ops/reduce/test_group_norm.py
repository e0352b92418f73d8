"""Group, instance and batch norm against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import purevk
from purevk.ops.reduce import group_norm
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


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "batch, channels, groups, sides",
    [(1, 8, 2, (33, 40)), (2, 40, 4, (19, 28)), (1, 6, 2, (50, 7)), (3, 64, 16, (40, 36)),
     (1, 1280, 32, (16, 12)), (1, 128, 32, (64, 48)), (2, 12, 1, (8, 12, 10))],
)  # fmt: skip
def test_groups_in_slices(monkeypatch, last, batch, channels, groups, sides):
    """Several workgroups share a group, also one that has pixels left, or channels that are no
    multiple of 4, whether channels come first or last."""
    for name, value in (("_SECOND", float("-inf")), ("_LEAST_EACH", 1), ("_WORKGROUPS", 500)):
        monkeypatch.setattr(f"purevk.ops.reduce.group_slices.{name}", value)
    forms, form_of = [], group_norm.form_of

    def recorded(*args):
        forms.append(form_of(*args))
        return forms[-1]

    monkeypatch.setattr(group_norm, "form_of", recorded)
    ones = [1] * len(sides)
    x, w, b = tensor(batch, channels, *sides), tensor(channels), tensor(channels, seed=1)
    mask, scale = tensor(channels, *ones) > 0, tensor(batch, channels, *ones)
    to_last = (0, *range(2, x.ndim), 1)
    to_first = (0, x.ndim - 1, *range(1, x.ndim - 1))

    def norm(x, w, b):
        return F.group_norm(x.permute(to_first) if last else x, groups, w, b)

    def more(x, w, mask, scale):
        x = x.permute(to_first) if last else x
        return F.silu(torch.where(mask, F.group_norm(x, groups, w), 0.5)) * (1 + scale) + x

    def stored(x):
        return x.permute(to_last).contiguous() if last else x

    # torch takes the difference of large sums where channels come last.
    wide = F.group_norm((x + 1000).double(), groups, w.double(), b.double())
    cases = [Case(norm, (stored(x + 1000), w, b), atol=2e-3, expected=wide.float())]
    for dtype, atol in ((torch.float32, 2e-5), (torch.float16, 2e-2), (torch.bfloat16, 2e-1)):
        args = (stored(x).to(dtype), w.to(dtype), mask, scale.to(dtype))
        cases.append(Case(more, args, atol=atol, rtol=1e-5 if atol < 1e-3 else 5e-2))
    with kernels_of("gpu"):
        check(cases)
    assert forms and all(form is not None and form.nhwc == last for form in forms)


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


def test_groups_in_slices_of_sizes_that_calls_have(monkeypatch):
    """Slices are shares of the pixels that a call has, also where some have none."""
    for name, value in (("_SECOND", float("-inf")), ("_LEAST_EACH", 1), ("_WORKGROUPS", 500)):
        monkeypatch.setattr(f"purevk.ops.reduce.group_slices.{name}", value)
    norm = torch.nn.GroupNorm(4, 24).requires_grad_(False)
    norm.weight.copy_(tensor(24))

    class Last(torch.nn.Module):
        def forward(self, x):
            return norm(x.permute(0, 3, 1, 2))

    batch, height, width = (torch.export.Dim(name, min=1, max=40) for name in "bhw")
    for module, shape, dynamic in (
        (norm, (2, 24, 9, 12), {0: batch, 2: height, 3: 4 * width}),
        (Last(), (2, 9, 12, 24), {0: batch, 1: height, 2: width}),
    ):
        with kernels_of("gpu"):
            program = purevk.compile(module, (tensor(*shape),), dynamic_shapes=({**dynamic},))
            assert "reduce/group_apply.comp" in dispatches(program)
            for b, h, w in ((2, 9, 12), (1, 1, 4), (5, 40, 32), (3, 2, 8)):
                x = tensor(*((b, 24, h, w) if module is norm else (b, h, w, 24)))
                made = torch.from_numpy(program.forward(x.numpy()).copy())
                torch.testing.assert_close(made, module(x), atol=2e-5, rtol=1e-5)
            program.close()
