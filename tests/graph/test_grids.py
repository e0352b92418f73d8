"""Grids above the limits of a device, which are recorded in parts. Software devices run larger grids
than they state, so the limits are lowered here."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import re

import pytest

import purevk
from purevk.errors import DeviceError
from purevk.graph.compute_graph import ComputeGraph, parts_of_grid
from purevk.graph.kernels import GLSL_FOLDER
from tests.ops.harness import context
from tests.ops.quantized.harness import kernels_of

torch = pytest.importorskip("torch")
F = torch.nn.functional


def test_parts_have_each_workgroup_once() -> None:
    rng = random.Random(3)
    for _ in range(200):
        grid = tuple(rng.randint(0, 9) for _ in range(3))
        most = tuple(rng.randint(1, 5) for _ in range(3))
        workgroups = [
            tuple(map(sum, zip(base, workgroup)))
            for base, size in parts_of_grid(grid, most)
            if all(map(int.__le__, size, most))
            for workgroup in itertools.product(*map(range, size))
        ]
        assert sorted(workgroups) == list(itertools.product(*map(range, grid)))


# A part has a size of its own. Where x and y are one index, `linear_grid` keeps x within the limits,
# and y is within them as long as an index has 32 bits.
LINEAR = re.compile(
    r"(?:WORKGROUP|INVOCATION)_ID\.x \+ (?:WORKGROUP|INVOCATION)_ID\.y \* gl_NumWorkGroups\.x"
    r"|WORKGROUP_ID\.y \* gl_NumWorkGroups\.x \+ WORKGROUP_ID\.x"
    r"|#define WORKGROUPS int\(gl_NumWorkGroups\.x \* gl_NumWorkGroups\.y\)"
    r"|gl_NumWorkGroups\[0\] >> 31"
)
# Splits of keys, which only grids of few workgroups have; columns of a result, of which no matrix has
# as many as 65,535 heads.
SMALL = {"attention_decode.comp": 2, "attention_coopmat.comp": 1}


def test_templates_do_not_read_the_size_of_a_grid_that_may_be_a_part() -> None:
    for path in GLSL_FOLDER.rglob("*.*"):
        if path.name == "common.glslh" or path.name.startswith("measure_"):
            continue
        text = LINEAR.sub("", path.read_text(encoding="utf-8"))
        assert text.count("gl_NumWorkGroups") == SMALL.get(path.name, 0), path.name
        assert "gl_WorkGroupID" not in text and "gl_GlobalInvocationID" not in text, path.name


def numbers(*size):
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def attention(q, k):
    return F.scaled_dot_product_attention(q, k, k, is_causal=q.shape[2] > 1)


CASES = {
    "matmul": (torch.matmul, numbers(7, 130, 70), numbers(7, 70, 150)),
    "few rows": (torch.matmul, numbers(7, 3, 256), numbers(256, 500)),
    "pixels": (F.conv2d, numbers(5, 8, 40, 40), numbers(70, 8, 2, 2)),
    "depthwise": (lambda x, w: F.conv2d(x, w, groups=16), numbers(5, 16, 9, 30), numbers(16, 1, 3, 3)),
    "attention": (attention, numbers(3, 5, 90, 16), numbers(3, 5, 90, 16)),
    "decoding": (attention, numbers(70, 5, 1, 16), numbers(70, 5, 30, 16)),
    "transposed": (lambda x: x.transpose(1, 2).contiguous(), numbers(5, 70, 90)),
}  # fmt: skip


@pytest.mark.device
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("case", CASES)
def test_a_grid_above_the_limits(case: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, *args = CASES[case]
    parts_of, grids = ComputeGraph._parts, []

    def parts(graph, number, grid):
        grids.append(grid)
        return parts_of(graph, number, grid)

    with kernels_of(kind), monkeypatch.context() as patch:
        with purevk.compile(Call(function), tuple(args)) as program:
            expected = program(*args)
            dispatches = program.method("forward").executable.plan.dispatches
        x, y, z = max((dispatch.grid for dispatch in dispatches), key=math.prod)
        most = (x, -(-y // 2), -(-z // 2)) if y * z > 1 else (-(-x // 2), 1, 1)
        device, traits = context().device, context().traits
        limits = dataclasses.replace(device.limits, max_workgroup_count=most)
        patch.setattr(device, "limits", limits)
        patch.setattr(context(), "traits", dataclasses.replace(traits, max_workgroups=most))
        patch.setattr(ComputeGraph, "_parts", parts)
        with purevk.compile(Call(function), tuple(args)) as program:
            torch.testing.assert_close(program(*args), expected, rtol=0, atol=0)
    assert grids


@pytest.mark.device
def test_a_grid_above_limits_that_the_kernel_was_not_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part would be the first one, without an error."""
    function, *args = CASES["transposed"]
    device = context().device
    with purevk.compile(Call(function), tuple(args)) as program:
        limits = dataclasses.replace(device.limits, max_workgroup_count=(1, 1, 1))
        monkeypatch.setattr(device, "limits", limits)
        with pytest.raises(DeviceError, match="without LARGE_GRID"):
            program(*args)
