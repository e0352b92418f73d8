"""Matmuls whose rows are multiplied by different matrices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import purevk
from purevk.graph.report import node_costs
from purevk.ops.matmul.grouped import NAME
from tests.ops.harness import Case, aten, check, dispatches, program_of, unit
from tests.ops.quantized.harness import kernels_of, run, run_with_templates

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Sums of up to 70 products of numbers in [-1, 1], rounded once to the dtype.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.float16: {"rtol": 4e-3, "atol": 1e-2},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 2e-2},
}
pytestmark = pytest.mark.device


def ends(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """What eager torch gives, with 0 for the rows behind all groups, which torch leaves as they
    are."""
    made = torch.zeros(a.shape[0], b.shape[2], dtype=a.dtype)
    start = 0
    for matrix, end in zip(b, offs.tolist(), strict=True):
        made[start:end] = (a[start:end].float() @ matrix.float()).to(a.dtype)
        start = end
    return made


@pytest.mark.parametrize("kernels", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_in_groups(dtype, kernels):
    """Empty groups, one group with all rows, fewer rows than groups, rows of no group, groups
    larger than a tile."""
    sizes = [
        (16, 32, 24, (3, 3, 9, 12)),
        (5, 7, 3, (1, 1, 5)),
        (130, 36, 68, (64, 65, 65, 130)),
        (3, 8, 16, (0,) * 20 + (1,) + (2,) * 10 + (3,) * 33),
        (8, 8, 8, (0, 0)),
    ]
    cases = []
    for m, k, n, numbers in sizes:
        a, offs = unit(m, k, dtype=dtype), ends(*numbers)
        b = unit(len(numbers), k, n, dtype=dtype, seed=1)
        turned = unit(len(numbers), n, k, dtype=dtype, seed=2)
        options = {"name": str((m, k, n)), **TOLERANCE[dtype]}
        expected = grouped(a, b, offs)
        cases.append(Case(aten._grouped_mm.default, (a, b, offs), expected=expected, **options))
        cases.append(
            Case(
                lambda a, b, offs: aten._grouped_mm(a, b.transpose(1, 2), offs),
                (a, turned, offs),
                expected=grouped(a, turned.transpose(1, 2), offs),
                **options,
            )
        )
    with kernels_of(kernels):
        if dtype is not torch.bfloat16:  # torch traces no other dtype
            cases = cases[::2]
        else:  # and no rows that are not multiples of 16 bytes
            cases = [case for case in cases if case.args[1].shape[-1] % 8 == 0]
        check(cases)


def test_the_definition_is_that_of_torch():
    """The reference of these tests gives what eager torch gives."""
    a, b, offs = unit(16, 32), unit(4, 32, 24), ends(3, 3, 9, 16)
    torch.testing.assert_close(F.grouped_mm(a, b, offs=offs), grouped(a, b, offs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_and_depths_in_groups(dtype):
    """The forms with two dims for B, and matmuls without groups."""
    offs, options = ends(8, 8, 24, 32), TOLERANCE[dtype]
    wide = unit(24, 32, dtype=dtype)
    shapes = [
        (unit(4, 16, 24, dtype=dtype), unit(24, 32, dtype=dtype), offs),
        (wide, unit(32, 8, dtype=dtype), offs),
        (unit(4, 8, 16, dtype=dtype), unit(4, 16, 8, dtype=dtype), None),
    ]
    check([Case(aten._grouped_mm.default, args, **options) for args in shapes])
    if dtype is torch.bfloat16:  # as a backward pass has it
        turned = lambda a, b, offs: aten._grouped_mm(a.t(), b, offs)  # noqa: E731
        check(Case(turned, (wide.t().contiguous(), shapes[1][1], offs), **options))


@pytest.mark.parametrize("offsets", [torch.int32, torch.int64], ids=str)
def test_numbers_that_are_no_groups_stay_within_the_buffers(offsets):
    """Results are unspecified, but the rows of right groups are right."""
    a, b = unit(8, 16), unit(3, 16, 8)
    for numbers in ((4, 2**30, 2**30), (4, -7, 2), (4, 100, 1)):
        offs = torch.tensor(numbers, dtype=offsets)
        made = run("aten._grouped_mm.default", (a, b, offs, None, None))
        if list(numbers) == sorted(numbers):  # else a later group may have these rows too
            torch.testing.assert_close(made[:2], a[:2] @ b[0], **TOLERANCE[torch.float32])


@pytest.mark.parametrize("kernels", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selected_matrices_are_not_copied(dtype, kernels):
    """bmm with w[indices]: one matmul. Negative indices count from the end, as torch has it."""
    x, w, turned = unit(5, 36, dtype=dtype), unit(4, 36, 24, dtype=dtype), unit(4, 24, 36)
    turned, indices = turned.to(dtype), torch.tensor([2, 0, -1, 2, 1])
    forms = {
        "rows": (lambda x, w, i: torch.bmm(x[:, None], w[i]), w),
        "columns": (lambda x, w, i: torch.bmm(w[i], x[..., None]), turned),
        "transposed": (lambda x, w, i: torch.bmm(x[:, None], w[i].transpose(1, 2)), turned),
        "before": (lambda x, w, i: torch.bmm(w.permute(0, 2, 1)[i], x[..., None]), w),
        "select": (lambda x, w, i: x[:, None] @ w.index_select(0, i % 4), w),
    }
    cases = [
        Case(fn, (x, matrices, indices), name=name, **TOLERANCE[dtype])
        for name, (fn, matrices) in forms.items()
    ]
    with kernels_of(kernels):
        check(cases)
        for case in cases:
            templates = dispatches(program_of(case.fn, case.args))
            assert sum("matmul" in each for each in templates) == 1
            assert not any("gather" in each for each in templates)


def test_a_matmul_of_more_rows_keeps_its_copy():
    x, w, indices = unit(5, 3, 36), unit(4, 36, 24), torch.tensor([2, 0, 3, 2, 1])
    check(Case(lambda x, w, i: torch.bmm(x, w[i]), (x, w, indices), rtol=1e-5, atol=2e-5))


def test_a_pointwise_program_follows_in_the_same_kernel():
    def fn(a, b, offs, row, column):
        made = torch.ops.aten._grouped_mm(a, b, offs).float()
        return torch.relu(made + row) * column

    a, b = unit(16, 32, dtype=torch.bfloat16), unit(4, 32, 24, dtype=torch.bfloat16)
    args = (a, b, ends(3, 3, 9, 16), unit(24), unit(16, 1))
    check(Case(fn, args, **TOLERANCE[torch.bfloat16]))


@pytest.mark.parametrize("constants", [(), (1,)], ids=["input", "constant"])
def test_matrices_larger_than_one_binding(constants):
    """Each dispatch has those that a binding spans."""
    a, b, offs = unit(6, 24), unit(7, 24, 16), ends(2, 3, 3, 4, 4, 5, 5)
    with kernels_of("small"):
        args = (a, b, offs, None, None)
        made, templates = run_with_templates("aten._grouped_mm.default", args, (), constants)
    assert sum("matmul" in template for template in templates) == 7
    torch.testing.assert_close(made, grouped(a, b, offs), **TOLERANCE[torch.float32])


class Experts(torch.nn.Module):
    """The rows of x, sorted by group."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(unit(groups, 64, 48, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._grouped_mm(x, self.weight, offs)


def test_bytes_follow_the_groups_in_use():
    """A call with two rows reads at most two of 32 matrices, as they are: bfloat16."""
    module, rows = Experts(32), torch.export.Dim("rows", min=2, max=128)
    x = unit(128, 64, dtype=torch.bfloat16)
    offs = ends(*range(4, 129, 4))
    matrix = 2 * 64 * 48
    with purevk.compile(module, (x, offs), ({0: rows}, None)) as program:
        few = ends(*[0] * 9, *[1] * 8, *[2] * 15)
        for given, groups in ((x, offs), (x[:2].contiguous(), few)):
            want = grouped(given, module.weight, groups)
            torch.testing.assert_close(
                program.forward(given, groups), want, **TOLERANCE[torch.bfloat16]
            )
        plan = program.methods["forward"].executable.plan
        (symbol,) = plan.graph.symbols
        costs = [node_costs(plan, sizes={symbol.name: count}) for count in (2, 128)]
    few_bytes, all_bytes = (
        next(cost.nbytes for cost in each if cost.operator == NAME) for each in costs
    )
    assert 2 * matrix <= few_bytes < 3 * matrix
    assert 32 * matrix <= all_bytes < 33 * matrix + 4 * 128 * (64 + 48)


def test_a_grid_has_a_workgroup_for_each_row_if_those_are_few():
    """Few rows in many groups do not make a workgroup for each group."""
    a, b = unit(2, 8, dtype=torch.bfloat16), unit(100, 8, 8, dtype=torch.bfloat16)
    offs = ends(*[0] * 50, *[1] * 30, *[2] * 20)
    program = program_of(lambda a, b, o: aten._grouped_mm(a, b, o), (a, b, offs))
    plan = program.methods["forward"].executable.plan
    (made,) = [each for each in plan.dispatches if "matmul" in each.kernel.template]
    assert made.grid[1] == 2
