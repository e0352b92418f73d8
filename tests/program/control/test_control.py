"""Control flow of modules, against the modules themselves."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch._higher_order_ops import while_loop  # noqa: E402
from torch._higher_order_ops.map import map as torch_map  # noqa: E402

import purevk  # noqa: E402
from purevk import cli  # noqa: E402
from purevk.errors import UnsupportedProgramError  # noqa: E402
from tests.program.control.models import (  # noqa: E402
    BATCH,
    FALSE,
    TRUE,
    Cache,
    Nested,
    Recurrence,
    Returned,
    Sizes,
    Small,
)
from tests.program.harness import tensor  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.export, pytest.mark.slow]


def check(module, calls, dynamic_shapes=None, control=None) -> None:
    """Calls a module and what is compiled of it in turn; `control` is the number of nodes that the
    host runs."""
    reference = copy.deepcopy(module)
    with torch.no_grad(), purevk.compile(module, calls[0], dynamic_shapes) as program:
        for call in calls:
            torch.testing.assert_close(program(*call), reference(*call), rtol=1e-4, atol=1e-5)
        if control is not None:
            assert program.report()["control_flow"] == control


class Large(torch.nn.Module):
    """Too large for both branches to be computed."""

    def __init__(self, width=300):
        super().__init__()
        self.one, self.two = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x, choice):
        y = x * 2
        return (
            torch.cond(
                choice, lambda y: (self.one(y).relu(), y - 1), lambda y: (self.two(y), y + 1), (y,)
            )[0]
            + y
        )


def test_small_branches_are_both_computed():
    torch.manual_seed(1)
    calls = [(tensor(size, 4), choice) for size in (3, 5, 16) for choice in (TRUE, FALSE)]
    check(Small(), calls, {"x": BATCH, "choice": None}, control=0)


def test_large_branches_run_alone():
    torch.manual_seed(2)
    calls = [(tensor(size, 300), choice) for size in (9, 16, 2) for choice in (TRUE, FALSE)]
    check(Large(), calls, {"x": BATCH, "choice": None}, control=1)


def test_a_choice_by_size():
    check(Sizes(), [(tensor(size, 4),) for size in (3, 9, 4, 5, 16)], {"x": BATCH}, control=1)


def test_nested_choices():
    calls = [(tensor(3, 4), a, b.clone()) for a in (TRUE, FALSE) for b in (TRUE, FALSE)]
    check(Nested(), calls)


class Position(torch.nn.Module):
    def forward(self, x, position):
        at = position.item()
        return torch.cond(at > 2, lambda x: x.cumsum(0), lambda x: x.cumsum(1), (x,))


def test_a_choice_by_a_number_in_a_tensor():
    check(Position(), [(tensor(3, 4), torch.tensor(at)) for at in (5, 0, 2, 3)], control=1)


class Total(torch.nn.Module):
    """The number is of a float tensor, so it stays on the device."""

    def forward(self, x):
        return torch.cond(x.sum().item() > 0, lambda x: x.sort(0)[0], lambda x: x.cumsum(0), (x,))


def test_a_choice_by_a_fractional_number():
    x = tensor(3, 4)
    check(Total(), [(x.abs(),), (-x.abs(),), (x,)], control=1)


# -- loops ---------------------------------------------------------------------------------------
class Doubling(torch.nn.Module):
    def forward(self, x, limit):
        return while_loop(lambda i, x: i < limit, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))


class Collatz(torch.nn.Module):
    """A choice in a loop; the count is a number, not a tensor."""

    def forward(self, x):
        def step(i, x):
            return i + 1, torch.cond(x.sum() > 10, lambda x: x - 1, lambda x: x.cumsum(0) + 1, (x,))

        return while_loop(lambda i, x: i < 5, step, (0, x))


def test_loops_with_a_condition():
    check(Doubling(), [(tensor(3, 4), torch.tensor(limit)) for limit in (3, 0, 5)], control=1)
    check(Collatz(), [(tensor(3, 4),), (tensor(3, 4).abs() + 5,)], control=2)


class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, y):
        return torch_map(lambda row, y: (self.linear(row) + y, row.sum()), x, y)


def test_maps():
    torch.manual_seed(3)
    module = Rows()
    check(module, [(tensor(3, 4), tensor(4, seed=1))], control=0)  # written out
    calls = [(tensor(size, 4), tensor(4, seed=1)) for size in (3, 9, 16)]
    check(module, calls, {"x": BATCH, "y": None}, control=1)


def test_scans():
    torch.manual_seed(4)
    module = Recurrence()
    check(module, [(tensor(4), tensor(5, 4, seed=1))], control=0)
    check(
        module,
        [(tensor(4), tensor(size, 4, seed=1)) for size in (5, 12)],
        {"first": None, "x": BATCH},
        control=1,
    )


class Running(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        def step(i, x):
            self.total.add_(x)
            return i + 1, x + self.total

        return while_loop(lambda i, x: i < 3, step, (torch.tensor(0), x))


@pytest.mark.parametrize("kind", [Cache, Returned])
def test_a_cache_that_one_branch_writes(kind):
    check(
        kind(),
        [(tensor(1, 4, seed=at), torch.tensor([at]), TRUE if at % 2 else FALSE) for at in range(6)],
    )


def test_a_buffer_that_a_loop_writes():
    check(Running(), [(tensor(4, seed=seed),) for seed in range(3)])


def test_reset_saving_and_other_sizes(tmp_path: Path, capsys):
    torch.manual_seed(5)
    module = Large(260)
    calls = [(tensor(size, 260), choice) for size in (3, 40) for choice in (TRUE, FALSE)]
    with (
        torch.no_grad(),
        purevk.compile(module, calls[0], {"x": BATCH, "choice": None}, bounds="grow") as program,
    ):
        program.save(tmp_path / "large.pvk")
        assert (
            cli.main(
                ["inspect", str(tmp_path / "large.pvk"), "--no-device", "--node-table", "--graph"]
            )
            == 0
        )
        shown = capsys.readouterr().out
        assert "1 step of control flow" in shown and "\n  graph forward.cond_0.true\n" in shown
        assert "    forward.cond_0.true" in shown and "      purevk.matmul" in shown
        with purevk.load(tmp_path / "large.pvk", bounds="grow") as loaded:
            for call in calls:  # 40 rows are above the bound: both are lowered again
                torch.testing.assert_close(loaded(*call), module(*call), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(program(*call), module(*call), rtol=1e-4, atol=1e-4)
    with torch.no_grad(), purevk.compile(Running(), (tensor(4),)) as program:
        first = program(tensor(4))
        program(tensor(4))
        program.reset_state()
        torch.testing.assert_close(program(tensor(4)), first)


class Unequal(torch.nn.Module):
    def forward(self, x, choice):
        return torch.cond(choice, lambda x: x[:2].clone(), lambda x: x[:3].clone(), (x,))


def test_branches_of_different_sizes_are_named():
    with pytest.raises(UnsupportedProgramError, match="branches differ") as error, torch.no_grad():
        purevk.compile(Unequal(), (tensor(5, 4), TRUE))
    assert "float32[2,4]" in error.value.why and "float32[3,4]" in error.value.why


def test_weights_are_on_the_device_once():
    torch.manual_seed(6)
    linear = torch.nn.Linear(256, 256)

    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x, choice):
            return torch.cond(
                choice, lambda x: self.linear(x), lambda x: self.linear(x).relu(), (x,)
            ) + self.linear(x)

    with torch.no_grad(), purevk.compile(Shared(), (tensor(300, 256), TRUE)) as program:
        assert program.report()["control_flow"] == 1
        assert program.memory.weights < 1.5 * 4 * 256 * 257
        torch.testing.assert_close(
            program(tensor(300, 256), FALSE),
            Shared()(tensor(300, 256), FALSE),
            rtol=1e-4,
            atol=1e-4,
        )
