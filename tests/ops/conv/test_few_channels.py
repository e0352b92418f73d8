"""`conv2d_nchw.comp` with several outputs for each invocation, along a row or a column."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from purevk.graph.context import default_context
from purevk.ops.conv import nchw
from purevk.tuning import DEFAULT
from tests.ops.harness import Case, check, dispatches, program_of, tensor

pytestmark = pytest.mark.device
TEMPLATE = "conv/conv2d_nchw.comp"


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    shared = default_context()
    traits = dataclasses.replace(shared.traits, profile=DEFAULT, cores=1)
    monkeypatch.setattr(shared, "traits", traits)


def conv(x, weight, bias, stride, padding, dilation, groups):
    name = f"conv{x.ndim - 2}d"
    return getattr(torch.nn.functional, name)(x, weight, bias, stride, padding, dilation, groups)


def inputs(rank, channels, out, size, kernel, groups, dtype):
    x, weight = tensor(2, channels, *size), tensor(out, channels // groups, *kernel, seed=1)
    return [each.to(dtype) for each in (x, weight, tensor(out, seed=2))]


# channels, outputs, size, kernel, stride, padding, dilation, groups
ROWS = [
    (6, 6, (37,), (5,), 1, 2, 1, 6),
    (6, 12, (41,), (7,), 2, 3, 1, 6),
    (8, 8, (50,), (3,), 1, 0, 4, 8),
    (1, 8, (63,), (10,), 5, 0, 1, 1),
    (2, 16, (29,), (4,), 3, 5, 2, 1),
    (6, 6, (4, 23), (1, 5), (1, 2), (0, 2), (1, 3), 6),
]
COLUMNS = [
    (6, 6, (21, 9), (5, 3), 1, 2, 1, 6),
    (3, 8, (17, 19), (3, 3), 2, 1, 1, 1),
    (4, 8, (14, 7), (3, 1), 1, 3, 2, 2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("along_x, outputs", [(True, 2), (True, 4), (False, 2), (False, 8)])
def test_several_outputs(monkeypatch, along_x, outputs, dtype):
    asked = []

    def chosen(*args):
        asked.append(args)
        return along_x, outputs

    monkeypatch.setattr(nchw, "_outputs", chosen)
    monkeypatch.setattr(nchw, "tiles_of", lambda *args: None)
    cases = []
    for channels, out, size, kernel, *options, groups in ROWS if along_x else COLUMNS:
        given = inputs(len(size), channels, out, size, kernel, groups, dtype)
        atol = 1e-4 if dtype is torch.float32 else 2e-2
        cases.append(Case(conv, (*given, *options, groups), atol=atol))
    check(cases)
    assert len(asked) >= len(cases), "another kernel was taken"


def test_windows_that_are_long_along_x():
    x, weight = tensor(2, 64, 200), tensor(64, 1, 31)
    with program_of(lambda x: conv(x, weight, None, 1, 15, 1, 64), (x,)) as program:
        assert TEMPLATE in dispatches(program)
        (found,) = (
            dict(each.kernel.macros)
            for each in program.method("forward").executable.plan.dispatches
            if each.kernel.template == TEMPLATE
        )
        assert found["ALONG_X"] == "1" and int(found["OUTPUTS"]) > 1
        want = conv(x, weight, None, 1, 15, 1, 64)
        torch.testing.assert_close(program.forward(x), want, atol=1e-4, rtol=1e-4)
