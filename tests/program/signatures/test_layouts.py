"""How an input lies in memory changes no result, unless the module asks: then it is told apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk.errors import InputError, SignatureError, UnsupportedProgramError  # noqa: E402
from purevk.ir.signature import memory_layout  # noqa: E402
from tests.program.signatures.harness import module  # noqa: E402


def numbers(*sizes: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)


# The same sizes in memory of every kind, made anew for each call.
INPUTS: dict[str, Callable[[], Any]] = {
    "contiguous": lambda: numbers(3, 4),
    "part": lambda: numbers(5, 3, 4)[2],
    "transposed": lambda: numbers(4, 3).T,
    "columns": lambda: numbers(3, 8)[:, ::2],
    "rows": lambda: numbers(6, 4)[::2],
    "part of a transposed one": lambda: numbers(8, 3).T[:, 1:5],
}
EXPANDED = {
    "expanded": lambda: numbers(3, 1).expand(3, 4),
    "overlapping": lambda: numbers(6).as_strided((3, 4), (1, 1)),
}


def branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_contiguous() else x * 3


def strides(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * x.stride(0) + x.stride()[1]


def by_strides(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((2, 3), (1, 2), 1)


def view_or_copy(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.reshape(-1).add_(1)
    return x * 2


def transposed_or_copy(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.t().contiguous()
    y[0].mul_(3)
    return x + y.t()


def contiguous_or_copy(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.contiguous()
    y.mul_(3)
    return x + y


def written(self: Any, x: torch.Tensor) -> torch.Tensor:
    x[1].add_(1)
    x[:, 2] = 7.0
    return x.T @ x


def test_the_text_of_a_layout() -> None:
    assert memory_layout((3, 4), (4, 1)) == memory_layout((3, 1), (1, 1)) == "contiguous"
    assert memory_layout((0, 4), (7, 7)) == "contiguous"
    assert memory_layout((3, 4), (1, 3)) == "1, 0"
    assert memory_layout((2, 3, 4, 5), (60, 1, 15, 3)) == "0, 2, 3, 1"
    assert memory_layout((3, 4), (8, 2)) == "strides 8, 2"
    assert memory_layout((3, 4), (0, 1)) == "strides 0, 1"


@pytest.mark.device
@pytest.mark.parametrize(
    "function",
    [written]
    + [
        pytest.param(f, marks=pytest.mark.slow)
        for f in (view_or_copy, branch, strides, contiguous_or_copy, transposed_or_copy)
    ],
)
def test_a_module_computes_by_the_layout_of_the_call(function: Any, tmp_path: Path) -> None:
    model, writes = module(function), function not in (branch, strides)
    with purevk.compile(model, (numbers(3, 4),)) as program, torch.no_grad():
        for name, make in {**INPUTS, **({} if writes else EXPANDED)}.items():
            ours, theirs = make(), make()
            torch.testing.assert_close(program(ours), model(theirs), msg=name)
            torch.testing.assert_close(ours, theirs, msg=name)
        count = len(program.method("forward").variants)
        assert count == 1 if function is written else count > 1
        got = program.submit(numbers(4, 3).T).result()
        torch.testing.assert_close(got, model(numbers(4, 3).T))
        program.save(tmp_path / "m.pvk")
    with purevk.load(tmp_path / "m.pvk") as program:
        torch.testing.assert_close(program(numbers(3, 4)), model(numbers(3, 4)))
        if function is written:
            torch.testing.assert_close(program(numbers(4, 3).T), model(numbers(4, 3).T))
        else:
            with pytest.raises(SignatureError, match="x lie in memory as: 1, 0"):
                program(numbers(4, 3).T)
        with pytest.raises(InputError) if writes else pytest.raises(SignatureError):
            program(numbers(3, 1).expand(3, 4))


@pytest.mark.device
@pytest.mark.slow
def test_layouts_of_other_sizes() -> None:
    model = module(branch)
    shapes = ({0: torch.export.Dim.AUTO},)
    with purevk.compile(model, (numbers(8, 4),), shapes) as program, torch.no_grad():
        for rows in (8, 5, 1, 0, 7):
            for x in (numbers(rows, 4), numbers(4, rows).T):
                torch.testing.assert_close(program(x), model(x))
        # Two exports for more than one row, and those of a single one and of none.
        assert len(program.method("forward").variants) <= 5


def branch_by_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = branch(self, x)
    return y + 1 if x.shape[0] > 4 else y - 1


@pytest.mark.device
def test_layouts_and_branches_of_sizes() -> None:
    model = module(branch_by_rows)
    shapes = ({0: torch.export.Dim.AUTO},)
    with purevk.compile(model, (numbers(8, 4),), shapes) as program, torch.no_grad():
        for rows in (8, 3, 6):
            for x in (numbers(4, rows).T, numbers(rows, 8)[:, ::2], numbers(rows, 4)):
                torch.testing.assert_close(program(x), model(x))


@pytest.mark.device
def test_elements_by_strides() -> None:
    model = module(by_strides)
    for made in (
        purevk.compile(model, (numbers(3, 4),)),
        purevk.compile(torch.export.export(model, (numbers(3, 4),))),
    ):
        with made as program:
            for name in ("contiguous", "part"):
                x = INPUTS[name]()
                wanted = model(x.clone())
                torch.testing.assert_close(program(x), wanted)
            with pytest.raises((SignatureError, UnsupportedProgramError)):
                program(numbers(4, 3).T)
    for function in (
        lambda self, x: (x * 2)[1:].as_strided((2, 3), (1, 2)),
        lambda self, x: (x[0] * 2).expand(3, 4).as_strided((2, 3), (0, 1)),
        lambda self, x: torch.as_strided_scatter((x * 2).T, x[0], (4,), (1,)),
    ):
        with pytest.raises(UnsupportedProgramError, match="by the strides of a view"):
            purevk.compile(module(function), (numbers(3, 4),))


@pytest.mark.device
@pytest.mark.parametrize("written", [True, False], ids=["written", "read"])
@pytest.mark.parametrize("name", ["as_strided", "as_strided_copy", "as_strided_scatter"])
def test_elements_by_strides_of_any_input(name: str, written: bool) -> None:
    """What is written has other strides after functionalization. Right, or refused."""
    take = getattr(torch, name)
    start = (numbers(5),) if name == "as_strided_scatter" else ()

    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        return take(x.add_(1) if written else x, *start, (5,), (2,)) * 1

    model, count = module(function), 0
    for make in INPUTS.values():
        with contextlib.suppress(UnsupportedProgramError):
            with purevk.compile(model, (make(),)) as program:
                for other in INPUTS.values():
                    with contextlib.suppress(SignatureError, UnsupportedProgramError):
                        torch.testing.assert_close(program(other()), model(other()))
                        count += 1
    assert count


@pytest.mark.device
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (2, 1, 0)], ids=str)
def test_views_are_read_in_the_order_of_memory(order: tuple[int, ...]) -> None:
    """As Longformer's windows, which overlap."""
    function = lambda self, x: (x * 2).permute(order).as_strided((4, 3, 2), (4, 2, 3), 1)  # noqa: E731
    model = module(function)
    with purevk.compile(model, (numbers(2, 3, 4),)) as program:
        torch.testing.assert_close(program(numbers(2, 3, 4)), model(numbers(2, 3, 4)))


@pytest.mark.device
def test_memory_that_nobody_asks_about() -> None:
    model = module(lambda self, x: (x.reshape(2, 6) * 2, x.T.contiguous().flatten(), x.sum(0)))
    with purevk.compile(model, (numbers(3, 4),)) as program, torch.no_grad():
        for name, make in {**INPUTS, **EXPANDED}.items():
            torch.testing.assert_close(program(make()), model(make()), msg=name)
        assert len(program.method("forward").variants) == 1
        array = np.arange(12, dtype=np.float32).reshape(3, 4)
        array.flags.writeable = False
        for given in (array, array[::-1], np.asfortranarray(array), array[:, ::-1]):
            wanted = model(torch.from_numpy(given.copy()))
            for one, two in zip(program(given), wanted):
                np.testing.assert_array_equal(one, two.numpy())
        for given in (array.astype(">f4"), array.astype(np.float64)):
            with pytest.raises(InputError, match="has dtype"):
                program(given)
