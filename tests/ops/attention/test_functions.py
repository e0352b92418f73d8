"""Functions of scores and masks: what is refused, where int32 suffices, and what bounds a mask."""

from __future__ import annotations

import time

import pytest

from purevk.dtypes import DType
from purevk.errors import ShapeError
from purevk.ir import Arg, TensorType
from purevk.ops.attention.functions import Functions, read_functions
from purevk.ops.attention.narrow import narrowed
from purevk.ops.attention.score_program import score_program

TABLE = TensorType(DType.float32, (4, 9))
DOCUMENTS = TensorType(DType.int64, (64,))
BEHIND = ("aten.sub.Tensor", DType.int64, ("$3", "$4", 1))  # $5: how far a key is behind a query


def read(*steps: Arg, score: str | None = None, mask: str | None = None) -> Functions:
    return read_functions(steps, score, mask, (TABLE, DOCUMENTS))


@pytest.mark.parametrize(
    "step",
    [
        ("aten.softmax.int", DType.float32, ("$0", 0, None)),  # no pointwise operator
        ("no.such.operator", DType.float32, ("$0",)),
        ("aten.tanh.default", DType.float32, ("$5",)),  # itself
        ("aten.tanh.default", DType.float32, ("$0", 1)),  # one argument too many
        ("aten.tanh.default", DType.float64, ("$0",)),
        ("aten.gelu.default", DType.float32, ("$0", "x; } void f() {")),
        ("aten.add.Tensor", DType.float32, ("$0", "while (true);", 1)),
        ("gather", DType.float32, (2, "$2")),  # no such buffer
        ("gather", DType.float32, (0, "$2")),  # an index too few
        ("gather", DType.float32, (0, "$2", "$0")),  # a score as an index
        ("gather", DType.int32, (1, "$2")),  # another dtype than that of the buffer
        ("full", DType.float32, ("1.0",)),
        ("full", DType.float32, ()),
        (["aten.tanh.default"], DType.float32, ("$0",)),
        ("aten.tanh.default", DType.float32),
        "aten.tanh.default",
    ],
    ids=str,
)
def test_steps_that_are_refused(step: Arg) -> None:
    with pytest.raises(ShapeError):
        read(step, score="$5")


def test_results_that_are_no_steps() -> None:
    for result in ("$6", "score", 5):
        with pytest.raises(ShapeError):
            read_functions((BEHIND,), result, None, ())


def test_more_steps_than_a_kernel_takes() -> None:
    with pytest.raises(ShapeError):
        read(*[BEHIND] * 65)


@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        (BEHIND, DType.int32),
        (("aten.mul.Tensor", DType.int64, ("$3", 2**20)), DType.int32),
        (("aten.mul.Tensor", DType.int64, ("$3", 2**21)), DType.int64),
        (("aten.mul.Tensor", DType.int64, ("$3", -(2**20))), DType.int32),
        (("aten.remainder.Tensor", DType.int64, ("$3", 7)), DType.int32),
        (("aten.floor_divide.default", DType.int64, ("$3", 16)), DType.int32),
        (("full", DType.int64, (2**31,)), DType.int64),
        (("gather", DType.int64, (1, "$4")), DType.int64),
        (("aten.bitwise_and.Tensor", DType.int64, ("$3", "$4")), DType.int32),
        (("aten.bitwise_left_shift.Tensor", DType.int64, ("$3", 30)), DType.int64),
    ],
    ids=str,
)
def test_int64_becomes_int32_where_it_fits(step: Arg, dtype: DType) -> None:
    found = narrowed(read(step, mask="$5"), (1, 1, 2047, 2047))
    assert found.mask is not None
    assert found.dtype(found.mask) is dtype


def test_a_product_that_does_not_fit_is_computed_in_int64() -> None:
    """Its operands are converted before, not its result after."""
    product = ("aten.mul.Tensor", DType.int64, ("$3", "$4"))
    found = narrowed(read(product, mask="$5"), (0, 0, 2**20, 2**20))
    assert [step.dtype for step in found.steps] == [DType.int64] * 3
    assert [step.op for step in found.steps[:2]] == ["aten._to_copy.default"] * 2


def bounds_of(*steps: Arg) -> tuple[bool, bool]:
    """Whether ranges of positions bound a mask, the last step, and whether exactly."""
    functions = narrowed(read(*steps, mask=f"${4 + len(steps)}"), (1, 3, 63, 63))
    program, _ = score_program(functions)
    return program.bounds is not None, program.exact


def test_what_bounds_a_mask() -> None:
    near = ("aten.lt.Tensor", DType.bool, ("$5", 8))
    document = ("gather", DType.int64, (1, "$3"))
    other = ("gather", DType.int64, (1, "$4"))
    same = ("aten.eq.Tensor", DType.bool, ("$5", "$6"))
    assert bounds_of(BEHIND, near) == (True, True)
    assert bounds_of(document, other, same) == (False, False)
    causal = ("aten.ge.Tensor", DType.bool, ("$3", "$4"))
    both = ("aten.bitwise_and.Tensor", DType.bool, ("$7", "$8"))
    assert bounds_of(document, other, same, causal, both) == (True, False)
    either = ("aten.bitwise_or.Tensor", DType.bool, ("$7", "$8"))
    assert bounds_of(document, other, same, causal, either) == (False, False)
    # A captured number of each head, and a length.
    length = ("gather", DType.int64, (1, "$2"))
    assert bounds_of(length, ("aten.lt.Tensor", DType.bool, ("$4", "$5"))) == (True, True)


@pytest.mark.parametrize("name", ["aten.logical_and.default", "aten.add.Tensor"])
def test_steps_that_read_one_step_twice_take_no_time(name: str) -> None:
    """A mask that doubles 60 times is followed once per step."""
    begin = time.perf_counter()
    first, dtype, more = ("aten.ge.Tensor", DType.bool, ())
    if name == "aten.add.Tensor":
        first, dtype, more = ("aten.add.Tensor", DType.int64, (1,))
    doubled = [(name, dtype, (f"${at}", f"${at}", *more)) for at in range(5, 65)]
    functions = read((first, dtype, ("$3", "$4", *more)), *doubled, mask="$65")
    score_program(narrowed(functions, (1, 1, 63, 63)))
    assert time.perf_counter() - begin < 5


@pytest.mark.device
@pytest.mark.parametrize("count, kernel", [(3, True), (60, False)])
def test_functions_of_much_code_are_no_part_of_a_kernel(count: int, kernel: bool) -> None:
    torch = pytest.importorskip("torch")

    from purevk.program import Program
    from tests.ops.harness import Recorder, context, dispatches, tensor

    q, k, v = tensor(1, 2, 5, 8), tensor(1, 2, 7, 8, seed=1), tensor(1, 2, 7, 8, seed=2)
    steps = tuple(
        ("aten.tanh.default", DType.float32, (f"${0 if at == 0 else 4 + at}",))
        for at in range(count)
    )
    recorder = Recorder()
    args = *(recorder.input(each) for each in (q, k, v)), (), steps, f"${4 + count}", None, 0.25
    graph = recorder.importer.finish(
        recorder.importer.emit("purevk.flex_attention", args, [], [], "flex")
    )
    scores = q @ k.mT * 0.25
    for _ in range(count):
        scores = scores.tanh()
    begin = time.perf_counter()
    with Program("test", {"forward": lambda sizes: graph}, context()) as program:
        torch.testing.assert_close(program.forward(q, k, v), scores.softmax(-1) @ v)
        templates = dispatches(program)
    assert any(each.startswith("attention/") for each in templates) == kernel
    assert time.perf_counter() - begin < 20
