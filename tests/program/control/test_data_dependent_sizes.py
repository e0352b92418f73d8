"""Data-dependent sizes: how many elements a mask takes, how many values differ,
numbers read off tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch._subclasses import fake_impls  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import purevk  # noqa: E402
from purevk.dtypes import DType  # noqa: E402
from purevk.errors import InputError, UnsupportedProgramError  # noqa: E402
from purevk.frontends import control  # noqa: E402
from purevk.frontends.importer import Importer  # noqa: E402
from purevk.frontends.saved import write_program  # noqa: E402
from purevk.program import Program  # noqa: E402
from tests.harness import DATA  # noqa: E402
from tests.ops.harness import context, host_nodes, tensor  # noqa: E402

pytestmark = pytest.mark.device


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def compiled(
    function: Callable[..., Any], *args: torch.Tensor, dynamic: Any = None, bounds: str = "grow"
) -> Program:
    shapes = None if dynamic is None else {"args": dynamic}
    exported = torch.export.export(Module(function), args, dynamic_shapes=shapes, strict=False)
    return purevk.compile(exported, bounds=bounds)


def agrees(program: Program, function: Callable[..., Any], *args: torch.Tensor) -> None:
    made, wanted = pytree.tree_leaves(program.forward(*args)), pytree.tree_leaves(function(*args))
    assert len(made) == len(wanted)
    for have, want in zip(made, wanted):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def masks(x: torch.Tensor) -> tuple[Any, ...]:
    """What takes the elements of x[n, 3, 4] that are above 0."""
    mask = x > 0
    return (
        mask.nonzero(),
        torch.where(x),
        x[mask],
        x[mask[:, 0, 0]] * 2,
        x[mask[:, :, 1]],
        x[:, mask[0, :, 0]],
        torch.masked_select(x, mask[:, :1]),
        (x[:, 0][mask[:, 0]] + 1).sum(),
        torch.argwhere(x[:, 0] < 1).float() @ torch.ones(2, 2),
        torch.softmax(x[mask[:, 1, 1]], 0).mean((1, 2)),
    )


@pytest.fixture(scope="module")
def of_masks() -> Any:
    with compiled(
        masks, tensor(5, 3, 4), dynamic=({0: torch.export.Dim("n", min=2, max=16)},)
    ) as program:
        yield program


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    count=st.integers(2, 16),
    share=st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]),
    seed=st.integers(0, 99),
)
def test_masks(of_masks: Program, count: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 3, 4, generator=generator) + share - 1
    agrees(of_masks, masks, torch.where(x == 0, 0.5, x))
    assert not host_nodes(of_masks) and len(of_masks.method("forward").specializations) == 1


def test_masks_above_the_bounds_of_the_inputs() -> None:
    def function(x: torch.Tensor) -> Any:
        return x[x > 0] * 2, x.nonzero()

    with compiled(
        function, tensor(4, 6), dynamic=({0: torch.export.Dim("n", min=2, max=8)},)
    ) as program:
        for count in (8, 3, 40, 8, 33):
            agrees(program, function, tensor(count, 6, seed=count))
        assert len(program.method("forward").specializations) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64, torch.bool])
def test_unique(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> Any:
        return (
            torch.unique(x, return_inverse=True, return_counts=True),
            torch.unique(x[0], dim=0),
            torch.unique_consecutive(x, return_inverse=True, return_counts=True),
            torch.unique_consecutive(x[0], dim=0, return_counts=True),
        )

    x = tensor(6, 40, dtype=dtype)
    with compiled(function, x) as program:
        assert not host_nodes(program)
        others = [x, torch.zeros_like(x), tensor(6, 40, dtype=dtype, seed=1).sort(1)[0]]
        for each in others:
            agrees(program, function, each)


def test_indices_are_integers_whatever_torch_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 and older records the indices and counts of `unique` in the dtype of its values."""
    known: dict[Any, Any] = fake_impls.op_implementations_dict  # type: ignore[attr-defined]
    operator = torch.ops.aten._unique2.default
    of_torch = known[operator]

    def older(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        values, *others = of_torch(*args, **kwargs)
        return values, *(values.new_empty(each.shape) for each in others)

    def function(x: torch.Tensor) -> Any:
        return torch.unique(x, return_inverse=True, return_counts=True)

    monkeypatch.setitem(known, operator, older)
    examples = tensor(40), tensor(40, dtype=torch.int32), torch.zeros(400, dtype=torch.int8)
    for x in (*examples, tensor(40) > 0):
        with compiled(function, x) as program:
            agrees(program, function, x)


def test_no_number_that_is_none_equals_another() -> None:
    def function(x: torch.Tensor) -> Any:
        return torch.unique(x), torch.unique_consecutive(x, return_counts=True)

    x = tensor(200).round()
    with compiled(function, x) as program:
        for each in (x, x.sqrt(), torch.full((200,), float("nan"))):
            agrees(program, function, each)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.float16], ids=str)
def test_unique_slices(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> Any:
        found = [torch.unique(x, dim=d, return_inverse=True, return_counts=True) for d in (0, 1, 2)]
        runs = torch.unique_consecutive(x, dim=0, return_inverse=True, return_counts=True)
        return found, runs, torch.unique(x, dim=0).logical_not()

    x = tensor(13, 3, 2, dtype=torch.int64, low=-1, high=1).abs().to(dtype)
    with compiled(function, x) as program:
        assert not host_nodes(program)
        for each in (x, torch.zeros_like(x), tensor(13, 3, 2, dtype=dtype)):
            agrees(program, function, each)


def test_unique_slices_without_numbers() -> None:
    def function(x: torch.Tensor) -> Any:
        values, counts = torch.unique(x, dim=0, return_counts=True)
        return values * 2, counts

    with compiled(
        function, tensor(6, 2), dynamic=({0: torch.export.Dim("n", min=2, max=16)},)
    ) as program:
        for count in (6, 2, 16):
            agrees(program, function, (tensor(count, 2, seed=count) / 3).round())
        agrees(
            program,
            function,
            torch.tensor(
                [[0.0, -0.0], [-0.0, 0.0], [1, torch.nan], [torch.inf, 0], [1, torch.nan]]
            ),
        )


def test_long_masks() -> None:
    """Counts over more than one part of a scan."""

    def function(x: torch.Tensor) -> Any:
        return x[x > 1], (x > 2.9).nonzero(), torch.unique((x * 9).int())

    with compiled(function, tensor(60000)) as program:
        agrees(program, function, tensor(60000, seed=3))


# -- numbers out of tensors ----------------------------------------------------------------------
def parts(x: torch.Tensor, n: torch.Tensor) -> Any:
    count = (n + 1).item()
    torch._check(count >= 0)
    torch._check(count <= x.shape[0])
    return (
        x[:count] * 2,
        x.narrow(0, 0, count).sum(0),
        torch.arange(count),
        torch.ones(count, 2).cumsum(0),
    )


def test_sizes_read_off_tensors() -> None:
    with compiled(parts, tensor(9, 4), torch.tensor(3)) as program:
        for n in (3, 8, -1, 0, 5):
            agrees(program, parts, tensor(9, 4, seed=n), torch.tensor(n))
        for n in (9, -2):
            with pytest.raises(InputError, match="Runtime assertion failed"):
                program.forward(tensor(9, 4), torch.tensor(n))
        agrees(program, parts, tensor(9, 4), torch.tensor(4))


def test_numbers_read_off_views_of_results() -> None:
    """A view has no kernel of its own: the number is known once its storage is made."""

    def numbers(x: torch.Tensor) -> Any:
        last = x.sum(0, keepdim=True).view(()).item()
        product, image = x @ x, x.view(3, 1) * x
        return (
            torch.full((2,), last),
            torch.full((2,), product.remainder(97).item()) + x.take(product % 3),
            torch.full((2,), image.reshape(9)[8].item()),
        )

    with compiled(numbers, torch.tensor([3, 4, 5])) as program:
        for rise in range(3):
            agrees(program, numbers, torch.tensor([3, 4, 5]) + rise)


class _Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        number = self.count.view(()).item()
        self.count.add_(1)
        return x + number


def test_numbers_read_off_views_of_states() -> None:
    x, eager = torch.tensor([1, 1]), _Counter()
    with purevk.compile(_Counter(), (x,)) as program:
        for _ in range(3):
            assert torch.equal(program.forward(x), eager(x))


def test_the_last_rows_of_a_selection() -> None:
    """Those of a mask that selects fewer rows are all of them."""

    def function(x: torch.Tensor) -> Any:
        chosen = x[x[:, 0] > 0]
        return chosen[-3:] * 2, chosen[:-3].sum(0)

    with compiled(function, tensor(9, 4)) as program:
        for seed in range(3):
            agrees(program, function, tensor(9, 4, seed=seed))
        for count in (0, 1, 2, 3, 9):
            x = -tensor(9, 4).abs()
            x[:count] *= -1
            agrees(program, function, x)


def test_checks_against_sizes_of_inputs() -> None:
    with compiled(
        parts,
        tensor(9, 4),
        torch.tensor(3),
        dynamic=({0: torch.export.Dim("n", min=4, max=12)}, None),
    ) as program:
        for size, n in ((9, 3), (12, 11), (6, 2)):
            agrees(program, parts, tensor(size, 4), torch.tensor(n))
        with pytest.raises(InputError, match="past the tensor|Runtime assertion failed"):
            program.forward(tensor(6, 4), torch.tensor(6))


def test_numbers_that_a_condition_selects() -> None:
    def select(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch._check((n < 100).all().item())
        above = (n.sum() > 3).item()
        return x * torch.sym_ite(above, 2, 5), x + torch.sym_ite(x.shape[0] > 4, 3, 7)

    rows = {0: torch.export.Dim("rows", min=2, max=40)}
    with compiled(
        select, tensor(3, 4), torch.tensor([3, 4]), dynamic=(rows, None), bounds="exported"
    ) as program:
        for count in (3, 4, 5):
            for number in (0, 4):
                agrees(program, select, tensor(count, 4), torch.tensor([1, number]))


def test_parts_of_a_split_add_up_to_the_whole() -> None:
    """Rows by expert, as layers with mixtures of experts sort them."""

    def by_expert(x: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones = torch.ones_like(experts)
        counts = torch.zeros(3, dtype=torch.int64).scatter_add(0, experts, ones).tolist()
        order = experts.argsort(stable=True)
        first, second, third = x[order].split(counts)
        joined = torch.cat([first * 2, second + 1, third.exp()])
        return torch.zeros_like(x).index_add(0, order, joined * x), second.sum(0), third.sum(0)

    rows = {0: torch.export.Dim("rows", min=2, max=40)}
    for dynamic in (None, (rows, rows)):
        x, experts = tensor(7, 4), torch.tensor([0, 2, 1, 0, 1, 2, 0])
        with compiled(by_expert, x, experts, dynamic=dynamic, bounds="exported") as program:
            for each in (experts, torch.zeros_like(experts), torch.full_like(experts, 2)):
                agrees(program, by_expert, x, each)
            for last in (1, 2) if dynamic else ():  # parts of one row
                each = torch.tensor([0] * 16 + [last])
                agrees(program, by_expert, tensor(17, 4), each)


def test_parts_of_a_split_that_do_not_add_up() -> None:
    def split(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.cat(x.split(counts.tolist())[::-1]) + x

    with compiled(split, tensor(7, 4), torch.tensor([2, 4, 1])) as program:
        for counts in ([2, 4, 1], [0, 7, 0], [1, 1, 5]):
            agrees(program, split, tensor(7, 4), torch.tensor(counts))
        for counts in ([2, 4, 2], [2, 4, 0]):
            with pytest.raises(InputError, match="u0 \\+ u1 \\+ u2"):
                program.forward(tensor(7, 4), torch.tensor(counts))


def test_one_row_that_is_left_of_a_dynamic_size() -> None:
    """Whether a rest is one row is known only during the call, and depends on an input's size."""

    def rest(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        first = start.item()
        torch._check(first >= 0)
        torch._check(first <= x.shape[0])
        y = x[first:]
        return y * torch.ones_like(y) + torch.relu(y).sum(0)

    rows = torch.export.Dim("rows", min=2, max=40)
    with compiled(
        rest, tensor(7, 4), torch.tensor(2), dynamic=({0: rows}, None), bounds="exported"
    ) as program:
        for count in (7, 12, 7):
            for first in (count - 1, 2, count, count - 1):
                agrees(program, rest, tensor(count, 4), torch.tensor(first))


def test_an_input_that_is_a_size() -> None:
    def function(n: torch.Tensor) -> Any:
        count = n.item()
        torch._check(count >= 0)
        return torch.arange(count) * 2

    with compiled(function, torch.tensor(3)) as program:
        for n in (3, 64, 0, 100, 7):
            agrees(program, function, torch.tensor(n))


def test_numbers_out_of_float_tensors_stay_on_the_device() -> None:
    def function(x: torch.Tensor) -> Any:
        total = x.sum().item()
        return x * total + 1, x / (total * 2 + 1), torch.full((3,), total)

    with compiled(function, tensor(5, 4)) as program:
        assert len(program.method("forward").executable.plan.steps) == 1
        agrees(program, function, tensor(5, 4, seed=2))


def test_sizes_without_a_bound_grow(caplog: pytest.LogCaptureFixture) -> None:
    def function(x: torch.Tensor, counts: torch.Tensor) -> Any:
        return torch.repeat_interleave(x, counts, dim=0) + 1

    x = tensor(4, 3)
    with (
        compiled(function, x, torch.tensor([1, 2, 3, 4])) as program,
        caplog.at_level(logging.WARNING, "purevk"),
    ):
        assert not host_nodes(program)
        for counts in (
            [1, 2, 3, 4],
            [0, 0, 0, 0],
            [30, 0, 30, 4],
            [90, 1, 0, 9],
            [3, 3, 3, 3],
            [0, 100, 0, 0],
        ):
            agrees(program, function, x, torch.tensor(counts))
        assert len(program.method("forward").specializations) == 2
        assert caplog.text.count("above what was planned for") == 1
    with pytest.raises(UnsupportedProgramError, match=r"torch\._check\(n <= N\)"):
        compiled(function, x, torch.tensor([1, 2, 3, 4]), bounds="strict")


@pytest.mark.parametrize("first", [4, 0])
def test_inputs_without_elements(first: int) -> None:
    def function(x: torch.Tensor, counts: torch.Tensor) -> Any:
        rows = torch.repeat_interleave(x, counts, dim=0) + 1
        return rows, torch.repeat_interleave(counts), x[counts > 1].sum(0), counts.unique() * 2

    def inputs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tensor(count, 3, seed=count), tensor(count, low=0, high=4).int()

    dims = {0: torch.export.Dim.AUTO}
    with purevk.compile(Module(function), inputs(first), ((dims, dims),)) as program:
        for count in (first, 0, 1, int(np.random.default_rng(5).integers(2, 30)), 0):
            agrees(program, function, *inputs(count))


def test_sizes_that_fall_while_a_number_grows(tmp_path: Path) -> None:
    """No bound of the number from below, or one that is too far, is one of memory."""
    random = np.random.default_rng(7)
    most = [int(each) for each in random.integers(10, 2**30, 2)]
    factors = [int(each) for each in random.integers(1, 4, 2)]

    def function(x: torch.Tensor, *numbers: torch.Tensor) -> Any:
        made = []
        for number, end, factor in zip(numbers, most, factors):
            k = number.item()
            torch._check(end - factor * k >= 0)
            made.append(torch.ones(end - factor * k, 2))
        k, count = numbers[-1].item(), torch.nonzero(x > 0).shape[0]
        torch._check(x.shape[0] - k >= 0)
        torch._check(count - k >= 0)
        return *made, torch.arange(x.shape[0] - k) * count, x.new_ones(count - k)

    def arguments(largest: int) -> Any:
        sizes = [int(each) for each in random.integers(0, largest, 2)]
        numbers = [(end - size) // factor for end, size, factor in zip(most, sizes, factors)]
        return torch.ones(int(random.integers(2, 60))), *map(torch.tensor, [*numbers, -sizes[0]])

    dynamic = ({0: torch.export.Dim.DYNAMIC}, None, None, None)
    with compiled(function, *arguments(9), dynamic=dynamic) as program:
        program.save(tmp_path / "falls.pvk")
        with purevk.load(tmp_path / "falls.pvk") as loaded:
            for largest in (9, 3000, 300):
                given = arguments(largest)
                agrees(program, function, *given)
                agrees(loaded, function, *given)
            assert len(loaded.method("forward").specializations) < 6


def test_an_index_by_the_sign_of_an_argument() -> None:
    """A module is exported for either sign, and not lowered for each pair of numbers."""

    class Taken(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return torch.cat([x, x])[n - x.shape[0]]

    size = torch.export.Dim("n", min=3, max=50)
    dynamic, random = ({0: size}, torch.export.Dim.DYNAMIC), np.random.default_rng(1)
    with purevk.compile(Taken(), (tensor(5), 3), dynamic_shapes=dynamic) as program:
        for size in map(int, random.integers(3, 50, 12)):
            x, n = tensor(size), int(random.integers(-size, 3 * size))
            assert program.forward(x, n) == Taken()(x, n), (size, n)
        lowered = [len(each.specializations) for each in program.method("forward").variants]
        assert sum(lowered) < 6, lowered


# -- another plan in the middle of a call --------------------------------------------------------
def test_a_state_is_written_once_when_a_call_needs_another_plan() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1, dtype=torch.int64))

        def forward(self, n: torch.Tensor) -> Any:
            before = self.total.item()
            self.total.add_(n)
            count = n.sum().item()
            torch._check(count >= 0)
            return torch.arange(count), before + 0, self.total * 1

    with purevk.compile(Counter(), (torch.tensor([3]),)) as program:
        total = 0
        for n in (3, 5, 200, 7):
            made = program.forward(torch.tensor([n]))
            assert (len(made[0]), made[1], made[2].tolist()) == (n, total, [total + n])
            total += n


def test_a_broken_guard_lowers_again() -> None:
    """As many results as there are elements: a guard on a count that only the call knows."""

    def source(sizes: Any) -> Any:
        importer = Importer("forward", "test", sizes)
        x = importer.input(purevk.dtypes.DType.float32, (6,), False)
        (found,) = importer.emit("aten.nonzero.default", (x,), [], [], "count")
        rows = importer.emit("aten.unbind.int", (found, 0), [], [], "rows")
        return importer.finish(
            list(importer.emit("aten.cat.default", (tuple(reversed(rows)),), [], [], "join"))
        )

    with Program("test", {"forward": source}, context()) as program:
        for x in ([1, 2, 3, 4, 5, 6], [0, 1, 0, 2, 0, 3], [0, 0, 0, 0, 7, 7], [1, 0, 0, 1, 0, 1]):
            made = program.forward(np.array(x, np.float32))
            assert made.tolist() == np.flatnonzero(x)[::-1].tolist()
        assert len(program.method("forward").specializations) == 3


def test_positions_that_follow_from_constants() -> None:
    """What reads constants at such a position waits for the call."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Buffer(tensor(8, 4))
            self.counts = torch.nn.Buffer(torch.tensor([1, 5, 3]))

        def forward(self, x: torch.Tensor) -> Any:
            at = self.counts.sum().item() - 4
            return x + self.table[at] * 2, x + self.table[:at].sum(0)

    model, x = Model(), tensor(4, seed=1)
    with purevk.compile(model, (x,)) as program:
        for have, want in zip(program(x), model(x)):
            torch.testing.assert_close(have, want)


# -- files ---------------------------------------------------------------------------------------
def test_a_file_of_executorch() -> None:
    def function(x: torch.Tensor) -> Any:
        count = x[0, 0].abs().int().item()
        return x[x[:, 0] > 0.5] * 2, (x > 0).nonzero()[:, 1] + 1, x[:count] + 1

    with purevk.load(DATA / "counted.pte") as program:
        assert not host_nodes(program)
        for x in (tensor(5, 4), -torch.ones(5, 4), torch.full((5, 4), 5.0), torch.zeros(5, 4)):
            agrees(program, function, x)
        with pytest.raises(InputError, match="memory was planned for 0 to 5"):
            program.forward(torch.full((5, 4), 6.0))  # x[:6]: the file lacks torch's assertion


def test_positions_of_a_saved_program_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a file that does not ask for it."""
    with monkeypatch.context() as patch:
        patch.setattr("purevk.frontends.importer.position_limits", lambda *_: [])
        importer = Importer("forward", "test")
        x = importer.input(DType.float32, (5, 4), False)
        at = importer.element(importer.input(DType.int64, (1,), False), 0, lower=-9, upper=9)
        (row,) = importer.emit("aten.select.int", (x, 0, at), [], [], "row")
        (rows,) = importer.emit("aten.slice.Tensor", (x, 0, 0, at, 1), [], [], "rows")
        graph = importer.finish([row, rows])
    assert not graph.checks
    path = tmp_path / "positions.pvk"
    write_program(path, "positions", {"forward": lambda sizes: graph}, "a test")
    with purevk.load(path) as program:
        given = tensor(5, 4)
        row, rows = program.forward(given, torch.tensor([4]))
        assert torch.equal(row, given[4]) and torch.equal(rows, given[:4])
        for wrong in (5, 6, 9, -1):
            with pytest.raises(InputError, match="lies (past|before) the tensor"):
                program.forward(given, torch.tensor([wrong]))


@pytest.mark.parametrize("stated", [False, True], ids=["not stated", "stated"])
def test_positions_inside_of_a_choice_are_checked_if_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: bool
) -> None:
    """The position is known outside of the branch."""

    def row(region: control.Region, args: Any) -> Any:
        return region.importer.emit("aten.select.int", (args[0], 0, at), [], [], "row")

    def sums(region: control.Region, args: Any) -> Any:
        return region.importer.emit("aten.sum.dim_IntList", (args[0], (0,)), [], [], "sums")

    with monkeypatch.context() as patch:
        if not stated:
            patch.setattr("purevk.frontends.importer.position_limits", lambda *_: [])
        importer = Importer("forward", "test")
        x = importer.input(DType.float32, (5, 4), False)
        at = importer.element(importer.input(DType.int64, (1,), False), 0, lower=-9, upper=9)
        chosen = importer.input(DType.bool, (1,), False)
        made = control.cond(importer, chosen, (row, sums), (x,), "choice")
        graph = importer.finish(made)
    assert not graph.checks
    assert [len(inner.checks) for inner in graph.nodes[-1].graphs] == [2 * stated, 0]
    path, again = tmp_path / "positions.pvk", tmp_path / "again.pvk"
    write_program(path, "positions", {"forward": lambda sizes: graph}, "a test")
    with purevk.load(path) as program:
        program.save(again)
    given, yes, no = tensor(5, 4), torch.tensor([True]), torch.tensor([False])
    for name in (path, again):
        with purevk.load(name) as program:
            assert torch.equal(program.forward(given, torch.tensor([4]), yes), given[4])
            for wrong in (5, 9, -1):
                other = program.forward(given, torch.tensor([wrong]), no)
                torch.testing.assert_close(other, given.sum(0))
                with pytest.raises(InputError, match="lies (past|before) the tensor"):
                    program.forward(given, torch.tensor([wrong]), yes)


def test_a_saved_program(tmp_path: Path) -> None:
    def function(x: torch.Tensor, counts: torch.Tensor) -> Any:
        return x[x > 0], torch.repeat_interleave(x, counts, dim=0), x.nonzero() + 1

    dynamic = ({0: torch.export.Dim("n", min=2, max=8)}, {0: torch.export.Dim("n", min=2, max=8)})
    with compiled(function, tensor(4, 3), torch.tensor([1, 2, 3, 4]), dynamic=dynamic) as program:
        program.save(tmp_path / "counted.pvk")
    with purevk.load(tmp_path / "counted.pvk", bounds="grow") as program:
        for count, many in ((4, 2), (7, 0), (4, 90), (20, 3)):
            agrees(program, function, tensor(count, 3, seed=many), torch.full((count,), many))


@pytest.mark.export
def test_a_mask_that_broadcasts_what_it_takes_from():
    """torch.export takes the elements before the broadcast for the most that there can be."""
    x, mask = tensor(10, 1), tensor(10, 7, seed=1) > -2
    with compiled(lambda x, mask: torch.masked_select(x, mask) * 2, x, mask) as program:
        torch.testing.assert_close(program.forward(x, mask), torch.masked_select(x, mask) * 2)


@pytest.mark.export
def test_bags_that_end_with_the_last_offset():
    table, index, offsets = tensor(7, 3), torch.tensor([0, 2, 6, 1, 1]), torch.tensor([0, 2, 5])
    for mode in ("sum", "mean", "max"):
        bag = torch.nn.EmbeddingBag(7, 3, mode=mode, include_last_offset=True, _weight=table).eval()
        with torch.no_grad(), purevk.compile(bag, (index, offsets)) as program:
            torch.testing.assert_close(program.forward(index, offsets), bag(index, offsets))
