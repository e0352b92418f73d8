"""The ranges of integers that are known before a model runs: they hold for all elements, and are
narrow where indices are made."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from purevk.dtypes import DType  # noqa: E402
from purevk.ir import Dim, GuardLog, Symbol, TensorType, Value  # noqa: E402
from purevk.passes.value_ranges import Range, ValueRanges  # noqa: E402
from tests.ops.harness import Recorder, tensor  # noqa: E402
from tests.passes.harness import interpret, random_graph  # noqa: E402

aten = torch.ops.aten


def range_of(make: Any, *inputs: torch.Tensor) -> tuple[Any, Any] | None:
    recorder = Recorder()
    value = make(recorder, *(recorder.input(x) for x in inputs))
    found = ValueRanges(recorder.importer.finish([value])).of(value)
    return None if found is None else tuple(found)


X, INDEX = tensor(3, 7), torch.zeros(5, dtype=torch.int64)
CASES: dict[str, tuple[Any, tuple[int, int] | None]] = {
    "input": (lambda r, x, i: i, None),
    "arange": (lambda r, x, i: r.call(aten.arange.default, (9,), {}), (0, 8)),
    "arange down": (lambda r, x, i: r.call(aten.arange.start_step, (9, 2, -3), {}), (3, 9)),
    "argmax": (lambda r, x, i: r.call(aten.argmax.default, (x, 1), {}), (0, 6)),
    "argmax of all": (lambda r, x, i: r.call(aten.argmax.default, (x,), {}), (0, 20)),
    "topk": (lambda r, x, i: r.call(aten.topk.default, (x, 2), {})[1], (0, 6)),
    "sort of integers": (lambda r, x, i: r.call(aten.sort.default, (i,), {})[0], None),
    "clamp": (lambda r, x, i: r.call(aten.clamp.default, (i, 2, 5), {}), (2, 5)),
    "remainder": (lambda r, x, i: r.call(aten.remainder.Scalar, (i, 6), {}), (0, 5)),
    "remainder of less": (lambda r, x, i: r.call(aten.remainder.Scalar, (i, -6), {}), None),
    "comparison": (lambda r, x, i: r.call(aten.gt.Scalar, (x, 0), {}), (0, 1)),
}


def relative(r: Recorder, dtype: torch.dtype, size: int, scale: float) -> Value:
    """Distances between positions as floats, as segment-anything computes its indices."""
    rows = r.call(aten.arange.default, (size,), {"dtype": dtype})
    rows = r.call(aten.mul.Tensor, (rows, scale), {})
    columns = r.call(aten.unsqueeze.default, (rows, 1), {})
    apart = r.call(aten.sub.Tensor, (columns, rows), {})
    apart = r.call(aten.add.Tensor, (apart, (size - 1) * scale), {})
    return r.call(aten._to_copy.default, (apart,), {"dtype": torch.int64})


CASES |= {
    "whole floats": (lambda r, x, i: relative(r, torch.float32, 14, 1.0), (0, 26)),
    "whole halves": (lambda r, x, i: relative(r, torch.float16, 1000, 1.0), (0, 1998)),
    "halves that are rounded": (lambda r, x, i: relative(r, torch.float16, 3000, 1.0), None),
    "floats between": (lambda r, x, i: relative(r, torch.float32, 14, 0.5), None),
    "unknown floats": (
        lambda r, x, i: r.call(aten._to_copy.default, (x,), {"dtype": torch.int64}),
        None,
    ),
    "rounded floats": (
        lambda r, x, i: r.call(
            aten._to_copy.default,
            (r.call(aten.div.Tensor, (relative(r, torch.float32, 14, 1.0), 4), {}),),
            {"dtype": torch.int64},
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_known_ranges(name: str) -> None:
    make, expected = CASES[name]
    assert range_of(make, X, INDEX) == expected


def test_sums_that_may_wrap_are_unknown() -> None:
    def make(recorder: Recorder, i: Value) -> Value:
        big = recorder.call(aten.clamp.default, (i, 0, 2**31 - 1), {})
        return recorder.call(aten.add.Tensor, (big, 1), {})

    assert range_of(make, INDEX.int()) is None
    assert range_of(make, INDEX) == (1, 2**31)


def test_sizes_that_vary() -> None:
    rows = Dim.of(Symbol("s0", upper=64, lower=2))
    found = Range(0, rows - 1)
    with GuardLog() as log:
        assert found.within(-rows, rows) and found.within(0, 64)
        assert not found.within(0, 63) and not found.within(0, rows - 1)
        assert Range(-rows, 0).within(-rows, rows) and not Range(-rows, 0).within(1 - rows, rows)
    assert not log.guards


def test_numbers_that_are_no_sizes() -> None:
    """A position may be negative, whatever its symbol says."""
    position = Dim.of(Symbol("i0", upper=9, is_size=False))
    assert not Range(position, position).within(0, 10)
    assert not Range(0, 4).within(0, position + 5)
    assert Range(position - 1, position - 1).within(position - 1, position)

    def make(recorder: Recorder, i: Value) -> Value:
        line = recorder.call(aten.arange.start, (position, position + 3), {})
        return recorder.call(aten.clamp.default, (line, None, 5), {})

    assert range_of(make, INDEX) == (-(2**63), 5)


OPERATORS = (
    "add", "sub", "mul", "remainder", "floor_divide", "clamp", "clamp_min", "maximum", "minimum", "where", "cumsum",
    "cat", "select", "flip", "_to_copy", "full", "arange", "argsort", "max",
)  # fmt: skip


def random_integers(seed: int) -> tuple[Any, list[torch.Tensor]]:
    """A graph of integers of one shape."""
    rng = random.Random(seed)
    recorder = Recorder()
    x = torch.randint(-9, 9, (4, 4), generator=torch.Generator().manual_seed(seed))
    values = [recorder.call(aten.clamp.default, (recorder.input(x), -5, 6), {})]
    values.append(recorder.constant(torch.randint(-3, 4, (4, 4))))

    def number() -> int:
        return rng.randint(-4, 7)

    for _ in range(12):
        op, a, b = rng.choice(OPERATORS), rng.choice(values), rng.choice(values)
        second = rng.choice([b, number()])
        if op in ("add", "sub"):
            made = recorder.call(
                getattr(aten, op).Tensor, (a, second), {"alpha": rng.choice([1, 2, -3])}
            )
        elif op == "mul":
            made = recorder.call(aten.mul.Tensor, (a, second), {})
        elif op == "remainder":
            made = recorder.call(aten.remainder.Scalar, (a, rng.choice([1, 3, 5])), {})
        elif op == "floor_divide":
            made = recorder.call(aten.floor_divide.default, (a, rng.choice([1, 2, 3])), {})
        elif op == "clamp":
            made = recorder.call(
                aten.clamp.default, (a, *rng.choice([(0, 3), (None, 2), (4, 1)])), {}
            )
        elif op == "clamp_min":
            made = recorder.call(aten.clamp_min.default, (a, number()), {})
        elif op in ("maximum", "minimum"):
            made = recorder.call(getattr(aten, op).default, (a, b), {})
        elif op == "where":
            less = recorder.call(aten.lt.Scalar, (a, number()), {})
            made = recorder.call(aten.where.self, (less, a, b), {})
        elif op == "cumsum":
            made = recorder.call(aten.cumsum.default, (a, rng.randrange(2)), {})
        elif op == "cat":
            both = recorder.call(aten.cat.default, ([a, b], 0), {})
            made = recorder.call(aten.slice.Tensor, (both, 0, 2, 6, 1), {})
        elif op == "select":
            one = recorder.call(aten.select.int, (a, 0, rng.randrange(4)), {})
            made = recorder.call(aten.expand.default, (one, [4, 4]), {})
        elif op == "flip":
            made = recorder.call(aten.flip.default, (a, [0]), {})
        elif op == "_to_copy":
            narrow = rng.choice([torch.int32, torch.int8, torch.bool])
            cast = recorder.call(aten._to_copy.default, (a,), {"dtype": narrow})
            made = recorder.call(aten._to_copy.default, (cast,), {"dtype": torch.int64})
        elif op == "full":
            made = recorder.call(aten.full.default, ([4, 4], number()), {"dtype": torch.int64})
        elif op == "arange":
            line = recorder.call(aten.arange.start_step, (number(), number() + 20, 1), {})
            line = recorder.call(aten.slice.Tensor, (line, 0, 0, 4, 1), {})
            made = recorder.call(aten.expand.default, (line, [4, 4]), {})
        elif op == "argsort":
            made = recorder.call(aten.argsort.default, (a, rng.randrange(2)), {})
        else:
            both = recorder.call(aten.max.dim, (a, 1, True), {})
            made = recorder.call(aten.expand.default, (rng.choice(both), [4, 4]), {})
        assert made.type == TensorType(DType.int64, (4, 4))
        values.append(made)
    return recorder.importer.finish(values), [x]


@pytest.mark.parametrize("seed", range(40))
def test_ranges_hold(seed: int) -> None:
    for least, (graph, inputs) in ((4, random_integers(seed)), (0, random_graph(seed))):
        ranges, known = ValueRanges(graph), 0
        for value, array in zip(graph.outputs, interpret(graph, inputs)):
            assert isinstance(value, Value)
            found = ranges.of(value)
            if found is not None and array.numel():
                known += 1
                assert found.least <= int(array.min()) and int(array.max()) <= found.greatest
        assert known >= least
