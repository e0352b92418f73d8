"""Flips, rolls, padding, triangles, diagonals and patches against torch."""

from __future__ import annotations

import pytest
import torch

from tests.ops.harness import TYPES, Case, aten, check, program_of, tensor

pytestmark = pytest.mark.device


def test_flip_and_roll():
    x = tensor(3, 5, 7, 4)
    cases = [Case(aten.flip.default, (tensor(3, 5, dtype=dtype), (1,))) for dtype in TYPES]
    cases += [
        Case(aten.flip.default, (x, dims)) for dims in [(0,), (1, 3), (-1,), (0, 1, 2, 3), ()]
    ]
    cases += [
        Case(aten.roll.default, (x, shifts, dims))
        for shifts, dims in [((2,), (1,)), ((-3, 9), (2, 0)), ((5,), ()), ((1, 1), (3, 3))]
    ]
    cases += [Case(torch.rot90, (tensor(3, 5, 2), k, (0, 2))) for k in (0, 1, 2, 3, -1)]
    cases += [
        Case(aten.flip.default, (x.permute(3, 1, 0, 2)[:, 1:], (0, 2))),
        Case(aten.flip.default, (torch.tensor(2.0), ())),
    ]
    cases += [
        Case(aten.flip.default, (torch.zeros(0, 3), (1,))),
        Case(aten.roll.default, (torch.zeros(0, 3), (1,), (0,))),
    ]
    check(cases)


def test_padding():
    cases = []
    for dtype in TYPES:
        cases.append(
            Case(aten.constant_pad_nd.default, (tensor(3, 5, dtype=dtype), (1, 2, 0, 3), 1))
        )
    x = tensor(2, 3, 5, 7)
    for pads in [
        (1, 2),
        (-1, 3),
        (0, 0),
        (2, 0, 1, 1),
        (-2, -1, 0, 4),
        (1, 1, 1, 1, 1, 1, 1, 1),
        (-3, -4),
    ]:
        cases.append(Case(aten.constant_pad_nd.default, (x, pads, -1.5)))
    cases += [Case(aten.constant_pad_nd.default, (torch.zeros(0, 3), (1, 2, 2, 1), 4.0))]
    for mode in ("reflect", "replicate", "circular"):
        cases += [
            Case(torch.nn.functional.pad, (tensor(2, 3, 7), pads, mode))
            for pads in [(2, 3), (0, 4), (-1, 2)]
        ]
        cases += [
            Case(torch.nn.functional.pad, (tensor(1, 2, 3, 5, 7), pads, mode))
            for pads in [(2, 3, 1, 4, 2, 1), (0, 1, 2, 0, 0, 0)]
        ]
        cases += [
            Case(
                torch.nn.functional.pad,
                (
                    tensor(2, 3, 5, 8).contiguous(memory_format=torch.channels_last),
                    (0, 0, 2, 1),
                    mode,
                ),
            )
        ]
    check(cases)


def test_triangles_and_diagonals():
    cases = [
        Case(fn, (tensor(3, 5, 7, dtype=dtype), k))
        for fn in (torch.tril, torch.triu)
        for k in (-2, 0, 3)
        for dtype in (torch.float32, torch.bool, torch.int64)
    ]
    cases += [
        Case(torch.diag_embed, (tensor(3, 5), k, a, b))
        for k, a, b in [(0, -2, -1), (2, 0, 2), (-1, 1, 0), (-3, 2, 1)]
    ]
    check(cases)


def test_patches():
    x = tensor(2, 18, 5, 7)
    cases = [
        Case(torch.pixel_shuffle, (x, 3)),
        Case(torch.pixel_shuffle, (tensor(8, 3, 5), 2)),
        Case(torch.pixel_unshuffle, (tensor(2, 3, 6, 8), 2)),
        Case(torch.channel_shuffle, (x, 6)),
    ]
    for kernel, dilation, padding, stride in [
        ((2, 3), (1, 1), (0, 0), (1, 1)),
        ((3, 2), (2, 1), (1, 2), (2, 3)),
        ((1, 1), (1, 1), (0, 0), (2, 2)),
    ]:
        cases.append(
            Case(
                torch.nn.functional.unfold, (tensor(2, 3, 7, 11), kernel, dilation, padding, stride)
            )
        )
        cases.append(
            Case(aten.im2col.default, (tensor(3, 7, 11), kernel, dilation, padding, stride))
        )
        columns = torch.nn.functional.unfold(tensor(2, 3, 7, 11), kernel, dilation, padding, stride)
        cases.append(
            Case(torch.nn.functional.fold, (columns, (7, 11), kernel, dilation, padding, stride))
        )
        cases.append(
            Case(aten.col2im.default, (columns[0], (7, 11), kernel, dilation, padding, stride))
        )
    check(cases)


def test_repetition():
    x = tensor(3, 5, 2, dtype=torch.int32)
    check(
        [Case(torch.repeat_interleave, (x, 3, d)) for d in (0, 1, -1, None)]
        + [Case(torch.tile, (x, n)) for n in [(2,), (3, 1, 2), (2, 1, 3, 1)]]
        + [
            Case(aten.copy.default, (tensor(3, 5), tensor(5, dtype=torch.int32))),
            Case(aten.copy.default, (tensor(3, 5, dtype=torch.float16), tensor(3, 1))),
        ]
    )


def test_dynamic_sizes():
    def run(x):
        return (
            x.flip(0),
            torch.roll(x, 3, 1),
            torch.nn.functional.pad(x, (2, 1, 0, 3)),
            torch.tril(x),
            x.repeat_interleave(2, 0),
            torch.nn.functional.pad(x[None], (2, 3), "reflect"),
        )

    with program_of(run, (tensor(11, 13),), dynamic=True) as program:
        for size in [(11, 13), (5, 7), (4, 13), (1, 4)]:
            x = tensor(*size)
            for have, want in zip(program.forward(x), run(x)):
                torch.testing.assert_close(have, want)
