"""Operators that take two sizes to be equal, in saved programs that state nothing of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import purevk
from purevk.errors import FileFormatError, PurevkError
from tests.frontends.saved_files import file_of, method_of

pytestmark = pytest.mark.device

M, N = [[1, ["m"]]], [[1, ["n"]]]
X, Y = {"value": 0}, {"value": 1}


class Case(NamedTuple):
    """An operator of x and y, the shapes of both and of the result, and what it computes."""

    op: str
    args: list[Any]
    x: list[Any]
    y: list[Any]
    result: list[Any]
    compute: Any


CASES = {
    "sum": Case("aten.add.Tensor", [X, Y], [M], [N], [M], np.add),
    "columns": Case("aten.mul.Tensor", [X, Y], [3, M], [N], [3, M], np.multiply),
    "comparison": Case("aten.where.self", [X, Y, Y], [M], [N], [M], lambda x, y: np.where(x, y, y)),
    "rows": Case("aten.cat.default", [[X, Y], 1], [M, 3], [N, 2], [M, 5], lambda *xs: np.concatenate(xs, 1)),
    "stack": Case("aten.stack.default", [[X, Y], 0], [M], [N], [2, M], lambda *xs: np.stack(xs)),
    "terms": Case("aten.mm.default", [X, Y], [3, M], [N, 4], [3, 4], np.matmul),
    "batches": Case("aten.bmm.default", [X, Y], [M, 3, 2], [N, 2, 4], [M, 3, 4], np.matmul),
    "linear": Case("aten.linear.default", [X, Y], [3, M], [4, N], [3, 4], lambda x, y: x @ y.T),
    "dot": Case("aten.dot.default", [X, Y], [M], [N], [], np.dot),
}  # fmt: skip


def load(case: Case, most: tuple[int, int], sources: bool = True) -> purevk.Program:
    """A saved program whose inputs have sizes m and n, up to `most`, and whose file has no guards.

    Args:
        sources: whether calls read both sizes; else n is m, and y has a size of that.
    """
    values = [
        [name, "bool" if (case.op, name) == ("aten.where.self", "x") else "float32", dims]
        for name, dims in (("x", case.x), ("y", case.y), ("z", case.result))
    ]
    method = method_of(values, [(case.op, case.args, [2])], [2], inputs=[X, Y])
    method["symbols"] = [[name, bound, 0, True, False, False] for name, bound in zip("mn", most)]
    read = [("m", X, case.x), ("n", Y, case.y)]
    method["graph"]["sources"] = [
        [name, value, next(dim for dim, size in enumerate(dims) if isinstance(size, list)), 0]
        for name, value, dims in read[: 1 + sources]
    ]
    content = {"producer": "", "name": "", "tensors": [], "methods": {"forward": method}}
    return purevk.load(file_of(content))


def array(dims: list[Any], size: int, dtype: str = "float32") -> np.ndarray:
    shape = [dim if isinstance(dim, int) else size for dim in dims]
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("most", [(64, 48), (64, 64)])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sizes_that_no_file_makes_equal(case: Case, most: tuple[int, int]) -> None:
    dtype = "bool" if case.op == "aten.where.self" else "float32"
    with load(case, most) as program:
        for m, n in ((5, 7), (6, 6), (7, 5), (1, 4)):
            x, y = array(case.x, m, dtype), array(case.y, n)
            try:
                result = program(x, y)
            except PurevkError:
                assert m != n
            else:
                np.testing.assert_allclose(result, case.compute(x, y), rtol=1e-5, atol=1e-6)


UNREAD = {
    "same": Case("aten.add.Tensor", [X, Y], [M], [M], [M], np.add),
    "twice": Case("aten.cat.default", [[X, Y]], [M], [[[2, ["m"]]]], [[[3, ["m"]]]], None),
    "square": Case("aten.add.Tensor", [X, X], [M, M], [3], [M, M], None),
}


@pytest.mark.parametrize("case", UNREAD.values(), ids=UNREAD)
def test_a_size_that_no_call_would_check(case: Case) -> None:
    with pytest.raises(FileFormatError, match="no call would check it"):
        load(case, (64, 64), sources=False)


def test_a_result_of_the_other_size() -> None:
    """Right where m and n are equal, and the file does not say that they are."""
    case = CASES["sum"]._replace(result=[N])
    with load(case, (64, 64)) as program, pytest.raises(PurevkError):
        program(array(case.x, 5), array(case.y, 7))
    with pytest.raises(FileFormatError, match="from its arguments it is"):
        load(case, (64, 48))
