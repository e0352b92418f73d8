"""What torch.export decides from the sizes of its example inputs holds at every call: a call gives
what eager torch gives, or raises a typed error."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
from purevk.errors import InputError, SizeConstraintError  # noqa: E402
from purevk.ir.signature import permutation_hint  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]
Dim = torch.export.Dim


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """torch.export logs what it specializes on."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


class Model(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Two(Model):
    def forward(self, x: Any, y: Any) -> Any:  # type: ignore[override]
        return self.function(x, y)


def rows(*counts: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        (torch.arange(3 * count).reshape(count, 3) % 7 + seed).float()
        for seed, count in enumerate(counts)
    )


def check(program: Any, model: Any, counts: tuple[int, ...], refused: bool = False) -> None:
    if refused:
        with pytest.raises(InputError):
            program(*rows(*counts))
        return
    got, wanted = program(*rows(*counts)), model(*rows(*counts))
    assert type(got) is type(wanted)
    torch.testing.assert_close(got, wanted)


def files(program: purevk.Program, folder: Path) -> purevk.Program:
    program.save(folder / "model.pvk")
    program.close()
    return purevk.load(folder / "model.pvk")


def above_4(x: Any) -> Any:
    return x + 1 if x.shape[0] > 4 else x - 1


def even(x: Any) -> Any:
    return x * 2 if x.shape[0] % 2 == 0 else x * 3


def up_to_16(x: Any) -> Any:
    return x + 1 if x.shape[0] <= 16 else x - 1


def one(x: Any) -> Any:
    return x + 1 if x.shape[0] == 1 else x - 1


def either(x: Any) -> Any:
    return x + 1 if x.shape[0] > 6 or x.shape[0] % 3 == 0 else x - 1


def equal(x: Any, y: Any) -> Any:
    return x + y if x.shape[0] == y.shape[0] else x.sum() + y


def product(x: Any, y: Any) -> Any:
    return x + 1 if x.shape[0] * y.shape[0] > 40 else x - 1


def larger(x: Any, y: Any) -> Any:
    return x + 1 if max(x.shape[0], y.shape[0]) > 8 else x - 1


CASES = [
    (above_4, (8,), [(5,), (2,), (20,), (0,)], [(5,), (20,)]),
    (even, (8,), [(6,), (7,), (1,)], [(6,)]),
    (up_to_16, (8,), [(16,), (20,), (100,)], [(16,)]),
    (one, (8,), [(1,), (2,)], [(2,)]),
    (either, (8,), [(3,), (4,), (7,), (9,), (70,)], [(7,), (9,), (70,)]),
    (equal, (8, 8), [(6, 6), (7, 6), (1, 3), (2, 2)], [(6, 6), (2, 2)]),
    (product, (8, 6), [(2, 3), (20, 3), (5, 8), (5, 9)], [(20, 3), (5, 9)]),
    (larger, (8, 6), [(9, 2), (2, 9), (3, 3), (8, 8)], [(3, 3), (8, 8)]),
    (lambda x: x.reshape(2, -1), (8,), [(6,), (10,)], [(6,), (10,)]),
]


@pytest.mark.parametrize("hint", [Dim.AUTO, Dim.DYNAMIC], ids=["auto", "dynamic"])
@pytest.mark.parametrize(("function", "example", "others", "same"), CASES)
def test_branches(
    hint: Any, function: Any, example: Any, others: Any, same: Any, tmp_path: Path
) -> None:
    model, shapes = (Model, Two)[len(example) - 1](function), tuple({0: hint} for _ in example)
    with purevk.compile(model, rows(*example), shapes) as program:
        for counts in (example, *others, example):
            check(program, model, counts)
    try:
        exported = torch.export.export(model, rows(*example), dynamic_shapes=shapes)
    except Exception:  # torch requires that DYNAMIC dims are not specialized
        assert hint is Dim.DYNAMIC
        return
    with purevk.compile(exported) as program:
        for counts in (example, *others):
            check(program, model, counts, counts not in (example, *same))
        with files(program, tmp_path) as loaded:
            for counts in (example, *others):
                check(loaded, model, counts, counts not in (example, *same))


def test_a_named_dim_has_its_bounds(tmp_path: Path) -> None:
    model = Model(above_4)
    program = purevk.compile(model, rows(8), ({0: Dim("batch", min=5, max=16)},))
    check(program, model, (5,))
    (spec,) = program.inputs
    assert str(spec) == "x: float32[batch, 3]"
    assert (spec.sizes[0].lower, spec.sizes[0].upper) == (5, 16)
    for counts in ((2,), (20,)):
        with pytest.raises(SizeConstraintError, match=rf"x.shape\[0\] is {counts[0]}"):
            program(*rows(*counts))
    with files(program, tmp_path) as loaded:
        check(loaded, model, (16,))
        assert [str(each) for each in loaded.inputs] == ["x: float32[batch, 3]"]
        with pytest.raises(SizeConstraintError, match=r"exported for 5 to 16"):
            loaded(*rows(20))


@pytest.mark.parametrize("way", ["module", "exported", "pvk"])
def test_dims_that_follow_from_others(way: str, tmp_path: Path) -> None:
    model = Two(lambda x, y: x.sum(0) + y)
    dim = Dim("rows", max=20)
    for second, example, good, bad in (
        (dim, (4, 4), (7, 7), (7, 6)),
        (2 * dim, (4, 8), (7, 14), (7, 13)),
        (dim + 1, (4, 5), (7, 8), (7, 7)),
    ):
        shapes = ({0: dim}, {0: second})
        if way == "module":
            program = purevk.compile(model, rows(*example), shapes)
        else:
            exported = torch.export.export(model, rows(*example), dynamic_shapes=shapes)
            program = purevk.compile(exported)
        program = files(program, tmp_path) if way == "pvk" else program
        with program:
            check(program, model, good)
            if way != "module":
                check(program, model, bad, refused=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (x.shape[0] * 0.5) - (x.shape[0] - 0.25),
        lambda x: x * (x.shape[0] / 3) + 1 / (x.shape[0] + 1),
        lambda x: x * x.shape[0] ** 0.5 + x.shape[0] ** 2,
        lambda x: x[: math.ceil(x.shape[0] / 3)] + math.floor(x.shape[0] / 2),
        lambda x: x[: round(x.shape[0] / 2)],
        lambda x: x + 1 if x.shape[0] / 2 > 3.5 else x - 1,
        lambda x: x + 1 if x.shape[0] / 10 > 0.7 else x - 1,
        lambda x: x.shape[0] / 4,
        lambda x: (x.shape[0] > 4) + 0,
    ],
)
def test_floats_made_of_sizes(function: Any, tmp_path: Path) -> None:
    model = Model(function)
    with purevk.compile(model, rows(8), ({0: Dim.AUTO},)) as program:
        for count in (8, 5, 9, 100):
            check(program, model, (count,))
        with files(program, tmp_path) as loaded:
            check(loaded, model, (8,))
            for count in (9, 100):
                try:
                    got = loaded(*rows(count))
                except InputError:
                    continue
                torch.testing.assert_close(got, model(*rows(count)))


@pytest.mark.parametrize("start", [-3, -5], ids=str)
def test_a_dim_that_export_fixes(start: int) -> None:
    """torch fixes or bounds a dim where a slice starts before its first element."""
    model = Model(lambda x: x[start:] * 2)
    exported = torch.export.export(model, rows(2), dynamic_shapes=({0: Dim.AUTO},))
    with purevk.compile(exported) as program:
        check(program, model, (2,))
        with pytest.raises(SizeConstraintError, match="5"):
            program(*rows(5))
    for first in (8, 2, 1):
        with purevk.compile(model, rows(first), ({0: Dim.AUTO},)) as program:
            for count in (8, 2, 3, 1, 6):
                check(program, model, (count,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.cat([x, y])[-y.shape[0]] * 2,
        lambda x, y: torch.cat([x, y])[y.shape[0] - x.shape[0]] * 2,
        lambda x, y: torch.cat([x, y])[y.shape[0] // 2].view(3, 1),
        lambda x, y: torch.cat([x, y]).select_scatter(x[0] + 1, 0, -y.shape[0]),
    ],
)
def test_indices_made_of_sizes(function: Any) -> None:
    """A negative one counts from the end."""

    class Both(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return function(x, y)

    def pair(first: int, second: int) -> tuple[Any, ...]:
        return torch.randn(first, 3), torch.randn(second, 3)

    dims = ({0: Dim.AUTO}, {0: Dim.AUTO})
    torch.manual_seed(1)
    with purevk.compile(Both(), pair(7, 4), dims) as program:
        for counts in ((7, 4), (4, 7), (1, 4), (4, 1), (1, 1), (5, 5), (3, 8)):
            given = pair(*counts)
            torch.testing.assert_close(program(*given), function(*given))


def test_integers_that_are_sizes() -> None:
    class Zeros(torch.nn.Module):
        def forward(self, x: Any, n: int) -> Any:
            return torch.cat([x, torch.zeros(n, 3) + n])

    with purevk.compile(Zeros(), (*rows(4), 5), (None, Dim.DYNAMIC)) as program:
        for count in (5, 3, 1, 0, 100):
            torch.testing.assert_close(program(*rows(4), count), Zeros()(*rows(4), count))
        with pytest.raises(InputError):
            program(*rows(4), -1)


def test_integers_of_calls_with_the_same_sizes() -> None:
    """A lowering for the sizes of one call is for its integers too. It serves no other integers."""

    class Both(torch.nn.Module):
        def forward(self, x: Any, y: Any, n: int) -> Any:
            return torch.cat([x, y])[y.shape[0] - x.shape[0]] + torch.zeros(n, 3) + n

    def arguments(first: int, second: int, n: int) -> tuple[Any, ...]:
        return torch.randn(first, 3), torch.randn(second, 3), n

    rng = random.Random(3)
    sizes = [(7, 4), *[(rng.choice((1, 2, 5, 8)), rng.choice((1, 3, 6))) for _ in range(4)]]
    dims = ({0: Dim.AUTO}, {0: Dim.AUTO}, Dim.DYNAMIC)
    torch.manual_seed(1)
    with purevk.compile(Both(), arguments(*sizes[0], 5), dims) as program:
        for first, second in sizes:
            for n in rng.sample(range(1, 9), 3):
                inputs = arguments(first, second, n)
                torch.testing.assert_close(program(*inputs), Both()(*inputs))


def test_a_number_of_more_than_32_bits_is_refused_for_int32() -> None:
    model = Model(lambda x: x.int() + x.shape[0] * x.shape[0] * 100_000)
    with (
        purevk.compile(model, rows(8), ({0: Dim.AUTO},)) as program,
        pytest.raises(InputError, match="32 bits"),
    ):
        program(*rows(400))


@pytest.mark.parametrize("batch", [Dim("batch", max=8), Dim.DYNAMIC], ids=["named", "dynamic"])
def test_an_example_of_one_along_a_dynamic_dim(batch: Any, tmp_path: Path) -> None:
    """torch.export itself would fix the size, and refuses that."""

    class Masked(torch.nn.Module):
        def forward(self, x: Any, *, mask: Any, more: Any) -> Any:
            return (x * mask[..., None]).sum(1).squeeze(0) + sum(each.sum(1) for each in more)

    def inputs(size: int, length: int) -> Any:
        more = [torch.rand(size, 4).transpose(0, 1).contiguous().t(), torch.rand(1, 2)]
        return (torch.rand(size, length, 1),), {"mask": torch.rand(size, length), "more": more}

    length = Dim("length", max=9) if isinstance(batch, Dim) else batch
    shapes = {"x": {0: batch, 1: length}, "mask": {0: batch, 1: length}, "more": [{0: batch}, None]}
    model, (args, kwargs) = Masked(), inputs(1, 1)
    with purevk.compile(model, args, shapes, kwargs=kwargs) as program:
        for sizes in ((1, 1), (3, 1), (1, 5), (3, 5), (8, 9)):
            args, kwargs = inputs(*sizes)
            torch.testing.assert_close(program(*args, **kwargs), model(*args, **kwargs))
        if isinstance(batch, Dim):
            args, kwargs = inputs(9, 5)
            with pytest.raises(SizeConstraintError, match="is 9"):
                program(*args, **kwargs)
        program.save(tmp_path / "m.pvk")
    with purevk.load(tmp_path / "m.pvk") as program:
        args, kwargs = inputs(3, 5)
        torch.testing.assert_close(program(*args, **kwargs), model(*args, **kwargs))


def test_undeclared_dims_stay_as_they_are() -> None:
    with (
        purevk.compile(Model(above_4), rows(8)) as program,
        pytest.raises(SizeConstraintError, match="has size 5 along dim 0"),
    ):
        program(*rows(5))


def test_channels_last_are_named(tmp_path: Path) -> None:
    model, image = torch.nn.Conv2d(3, 2, 3).eval(), torch.rand(1, 3, 8, 7)
    with purevk.compile(model, (image,)) as program:
        program.save(tmp_path / "conv.pvk")
        with pytest.raises(SizeConstraintError) as of_module:
            program(image.permute(0, 2, 3, 1))
    with purevk.load(tmp_path / "conv.pvk") as program:
        with pytest.raises(SizeConstraintError) as of_file:
            program(image.permute(0, 2, 3, 1))
        with pytest.raises(SizeConstraintError) as other:
            program(image[..., :5])
    for refused in (of_module, of_file):
        assert "x.permute(0, 3, 1, 2)" in refused.value.next
    assert "permute" not in other.value.next


@pytest.mark.parametrize(
    ("given", "wanted", "hint"),
    [
        ((1, 8, 7, 3), (1, 3, 8, 7), "x.permute(0, 3, 1, 2)"),
        ((1, 3, 8, 7), (1, 8, 7, 3), "x.permute(0, 2, 3, 1)"),
        ((2, 8, 7, 3), (None, 3, None, None), "x.permute(0, 3, 1, 2)"),
        ((8, 7, 3), (3, 8, 7), "x.permute(2, 0, 1)"),
        ((2, 9, 5), (2, 5, 9), "x.permute(0, 2, 1)"),
        ((2, 4, 8, 7, 3), (2, 3, 4, 8, 7), "x.permute(0, 4, 1, 2, 3)"),
    ],
)
def test_the_order_of_channels_is_found(
    given: tuple[int, ...], wanted: tuple[int | None, ...], hint: str
) -> None:
    assert hint in permutation_hint(given, wanted)


@pytest.mark.parametrize(
    ("given", "wanted"), [((1, 8, 7, 4), (1, 3, 8, 7)), ((5, 3), (3, 5)), ((3, 8, 7), (1, 3, 8, 7))]
)
def test_other_sizes_have_no_hint(given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert permutation_hint(given, wanted) == ""


def test_a_file_of_torch_keeps_its_guards(tmp_path: Path) -> None:
    for function, good, bad in ((above_4, 5, 2), (even, 6, 7), (either, 7, 4)):
        model = Model(function)
        exported = torch.export.export(model, rows(8), dynamic_shapes=({0: Dim.AUTO},))
        torch.export.save(exported, tmp_path / "m.pt2")
        with purevk.compile(torch.export.load(tmp_path / "m.pt2")) as program:
            torch.testing.assert_close(program(*rows(good)), model(*rows(good)))
            with pytest.raises(SizeConstraintError):
                program(*rows(bad))


def test_branches_under_torch_compile() -> None:
    torch._dynamo.reset()
    for function in (above_4, even):
        model = Model(function)
        compiled = torch.compile(model, backend="purevk", dynamic=True)
        for count in (8, 2, 7, 20):
            check(compiled, model, (count,))


def test_a_split_whose_parts_move() -> None:
    model = Model(lambda x: x.narrow(0, 1, x.shape[0] - 1).chunk(2)[0])
    with purevk.compile(model, rows(8), ({0: Dim.DYNAMIC},)) as program:
        for count in (8, 3, 5, 12, 6):
            torch.testing.assert_close(program(*rows(count)), model(*rows(count)))


def chunks(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(3)[:2]
    return first * second


def test_chunks_of_a_size_that_no_multiple_is_known_of() -> None:
    """Their sizes are expressions that are equal for some sizes alone, and their number depends on
    the size."""
    model, exported = Model(chunks), ({0: Dim.AUTO},)
    program = purevk.compile(model, rows(5), exported)
    for count in (5, 4, 7, 16, 2, 100, 6, 1000):  # a bound of 64 is outgrown twice
        check(program, model, (count,))
    fixed = purevk.compile(torch.export.export(model, rows(4), dynamic_shapes=exported))
    check(fixed, model, (4,))
    for count in (5, 2, 100):
        check(fixed, model, (count,), refused=True)
