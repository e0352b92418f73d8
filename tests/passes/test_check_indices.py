"""Checks of indices: calls raise where torch raises, and give what torch gives elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.errors import InputError
from purevk.graph.context import default_context
from purevk.ops import registry
from purevk.passes.check_indices import CHECK, OPERATORS, check_indices, ranges_of_inputs
from purevk.tuning import DEFAULT

torch = pytest.importorskip("torch")
import purevk.dynamo  # noqa: E402  registers the backend, also where purevk is not installed
from tests.ops.harness import Recorder  # noqa: E402

aten = torch.ops.aten

pytestmark = pytest.mark.device

X = torch.arange(20, dtype=torch.float32).reshape(5, 4)
CASES: dict[str, tuple[Callable[..., Any], int, bool]] = {
    # what runs, the size that indices are below, and whether they count from the end
    "embedding": (lambda i: torch.nn.functional.embedding(i, X), 5, False),
    "gather": (lambda i: X.gather(1, i.reshape(1, -1)), 4, False),
    "index_select": (lambda i: X.index_select(0, i), 5, False),
    "index": (lambda i: X[:, i], 4, True),
    "two indices": (lambda i: X[i, i], 4, True),
    "index_put": (lambda i: X.index_put((i,), torch.tensor(7.0)), 5, True),
    "scatter": (lambda i: X.scatter(0, i.reshape(1, -1), 3.0), 5, False),
    "index_add": (lambda i: X.index_add(0, i, torch.ones(i.shape[0], 4)), 5, False),
    "index_fill": (lambda i: X.index_fill(1, i, 2.0), 4, True),
    "take": (lambda i: X.take(i), 20, True),
}


class Model(torch.nn.Module):
    def __init__(self, do: Callable[..., Any]) -> None:
        super().__init__()
        self.do = do

    def forward(self, *args: Any) -> Any:
        return self.do(*args)


class Indexes(torch.nn.Module):
    def __init__(self, do: Callable[..., Any], computed: bool = False) -> None:
        super().__init__()
        self.do, self.computed = do, computed

    def forward(self, index: Any) -> Any:
        return self.do(index - 1 + 1 if self.computed else index)


def test_an_index_of_several_layers_is_compared_once() -> None:
    def layers(i: Any) -> Any:
        return X.index_select(0, i) + X.sin().index_select(0, i) + X.index_select(1, i)[:, :1].sum()

    with purevk.compile(Model(layers), (torch.tensor([0, 1]),)) as program:
        graph = program.method("forward").specializations[0].imported
        (ranges,) = ranges_of_inputs(graph).values()
        assert [one.below for one in ranges] == [5, 4]
        with pytest.raises(InputError, match="index 4"):
            program(torch.tensor([0, 4]))


@pytest.mark.parametrize("name", CASES)
def test_indices_that_a_call_brings_are_checked(name: str) -> None:
    do, size, from_end = CASES[name]
    with purevk.compile(Indexes(do), (torch.tensor([0, 1]),)) as program:
        for pair in ([0, size - 1], [-size, 1], [-1, 1], [2, size], [-size - 1, 0], [1 << 40, 0]):
            for index in (torch.tensor(pair), np.array(pair)):
                if min(pair) >= (-size if from_end else 0) and max(pair) < size:
                    torch.testing.assert_close(
                        torch.as_tensor(program(index)), do(torch.tensor(pair))
                    )
                    continue
                with pytest.raises((IndexError, RuntimeError)):
                    do(torch.tensor(pair))
                wrong = max(pair) if max(pair) >= size else min(pair)
                with pytest.raises(InputError, match=f"index has the index {wrong}\\n") as caught:
                    program(index)
                below = (
                    5 if name == "two indices" and not -5 <= wrong < 5 else size
                )  # the first one
                lowest = -below if from_end else 0
                assert f"takes indices from {lowest} to {below - 1}" in caught.value.why


def test_indices_in_another_shape_or_dtype_are_checked() -> None:
    table = torch.nn.Embedding(9, 4)
    cases: list[tuple[Callable[..., Any], torch.dtype]] = [
        (lambda i: table(i.long().unsqueeze(0).permute(1, 0)), torch.int32),
        (lambda i: table(i.reshape(-1, 2)), torch.int64),
    ]
    for do, dtype in cases:
        with purevk.compile(Indexes(do), (torch.zeros(4, dtype=dtype),)) as program:
            index = torch.tensor([3, 8, 0, 1], dtype=dtype)
            torch.testing.assert_close(program(index), do(index).detach())
            with pytest.raises(InputError, match="index has the index 9"):
                program(index + 1)


def test_large_numbers_wrap_as_in_the_model() -> None:
    do: Callable[..., Any] = lambda i: X.index_select(0, i.int())  # noqa: E731
    with purevk.compile(Indexes(do), (torch.tensor([0, 1]),)) as program:
        index = torch.tensor([(1 << 32) + 3, 2])
        torch.testing.assert_close(program(index), do(index))
        with pytest.raises(InputError, match="index has the index 5"):
            program(torch.tensor([(1 << 32) + 5, 2]))


def test_indices_that_may_not_be_used_are_not_checked() -> None:
    for do in (
        lambda i: X.index_select(0, i[:1]),
        lambda i: X.index_select(0, i.clamp(0, 4)),
        lambda i: torch.cond(
            i.sum() > 100, lambda i: X.index_select(0, i).cumsum(0), lambda i: X[:2].cumsum(1), (i,)
        ),
    ):
        with purevk.compile(Indexes(do), (torch.tensor([0, 1]),)) as program:
            index = torch.tensor([2, 9])
            torch.testing.assert_close(program(index), do(index))


VARYING: dict[str, tuple[Callable[..., Any], bool]] = {
    "gather": (lambda x, i: x.gather(0, i.reshape(-1, 1)), False),
    "index_select": (lambda x, i: x.index_select(0, i), False),
    "index": (lambda x, i: x[i], True),
    "all but one": (lambda x, i: x[:-1][i], True),
    "index_put": (lambda x, i: x.index_put((i,), torch.tensor(7.0)), True),
    "scatter": (lambda x, i: x.scatter(0, i.reshape(-1, 1), 3.0), False),
    "index_add": (lambda x, i: x.index_add(0, i, torch.ones(i.shape[0], 4)), False),
    "take": (lambda x, i: x.take(i), True),
}


@pytest.mark.parametrize("name", VARYING)
def test_indices_along_sizes_that_vary(name: str) -> None:
    do, from_end = VARYING[name]

    class Model(torch.nn.Module):
        def forward(self, x: Any, index: Any) -> Any:
            return do(x, index)

    rows, count = torch.export.Dim("rows", min=4, max=64), torch.export.Dim("count", max=8)
    args = (torch.randn(8, 4), torch.tensor([0, 1]))
    with purevk.compile(Model(), args, ({0: rows}, {0: count})) as program:
        for length in (4, 9, 64):
            x = torch.arange(length * 4, dtype=torch.float32).reshape(length, 4)
            size = {"take": 4 * length, "all but one": length - 1}.get(name, length)
            torch.testing.assert_close(
                program(x, torch.tensor([0, size - 1])), do(x, torch.tensor([0, size - 1]))
            )
            for wrong in (size, -size - 1, -1):
                index = torch.tensor([0, wrong, 1])
                if from_end and wrong == -1:
                    torch.testing.assert_close(program(x, index), do(x, index))
                    continue
                with pytest.raises((IndexError, RuntimeError)):
                    do(x, index)
                with pytest.raises(InputError, match=f"index has the index {wrong}\\n") as caught:
                    program(x, index)
                lowest = -size if from_end else 0
                assert f"takes indices from {lowest} to {size - 1}" in caught.value.why


def test_sizes_that_an_export_decides() -> None:
    """The first export takes 8 rows and more. A call with fewer is another export."""

    class Model(torch.nn.Module):
        def forward(self, x: Any, index: Any) -> Any:
            return x[:8][index]

    args = (torch.randn(16, 4), torch.tensor([0, 1]))
    with purevk.compile(Model(), args, ({0: torch.export.Dim.AUTO}, None)) as program:
        for length, size in ((16, 8), (5, 5), (64, 8), (5, 5)):
            x = torch.randn(length, 4)
            good = torch.tensor([0, size - 1])
            torch.testing.assert_close(program(x, good), x[:8][good])
            with pytest.raises(InputError, match=f"has the index {size}\\n"):
                program(x, torch.tensor([0, size]))


def test_a_submitted_call_raises() -> None:
    with purevk.compile(Indexes(lambda i: X[i]), (torch.tensor([0, 1]),)) as program:
        with pytest.raises(InputError, match="index has the index 5"):
            program.submit(torch.tensor([0, 5])).result()
        index = torch.tensor([0, 4])
        torch.testing.assert_close(program.submit(index).result(), X[index])


# -- indices that the model computes ---------------------------------------------------------------
def checks(program: Any) -> list[str]:
    """The operators whose indices a kernel checks."""
    executable = program.method("forward").executable
    return [check.op for each in executable.nested() for check in each.plan.checks.values()]


def raises_as_torch(program: Any, do: Callable[..., Any], *args: Any) -> InputError | None:
    """Compares a call with eager torch. Where that raises, gives what purevk raises."""
    try:
        expected = do(*args)
    except (IndexError, RuntimeError):
        with pytest.raises(InputError, match="an index of ") as caught:
            program(*args)
        return caught.value
    torch.testing.assert_close(program(*args), expected)
    return None


@pytest.mark.parametrize("name", CASES)
def test_indices_that_the_model_computes_are_checked(name: str) -> None:
    do, size, from_end = CASES[name]
    with purevk.compile(Indexes(do, True), (torch.tensor([0, 1]),)) as program:
        for pair in ([0, size - 1], [-size, 1], [-1, 1], [2, size], [-size - 1, 0], [1 << 40, 0]):
            good = min(pair) >= (-size if from_end else 0) and max(pair) < size
            error = raises_as_torch(program, do, torch.tensor(pair))
            assert (error is None) is good
            if error is None:
                continue
            below = size
            if name == "two indices" and not -5 <= (max(pair) if max(pair) > 4 else min(pair)) < 5:
                below = 5  # the first one
            wrong = next(i for i in pair if not (-below if from_end else 0) <= i < below)
            assert f" is {min(wrong, 2**31 - 1)}" in error.what and "aten." in error.what
            assert f"from {-below if from_end else 0} to {below - 1}" in error.why
            assert "test_check_indices.py:" in error.where


F = torch.nn.functional
OTHERS: dict[str, Callable[..., Any]] = {
    "int32": lambda i: X[i.int()],
    "one_hot": lambda i: F.one_hot(i, 5),
    "cross_entropy": lambda i: F.cross_entropy(X[:2], i),
    "embedding_bag": lambda i: F.embedding_bag(i.reshape(1, -1), X),
    "index_reduce": lambda i: X.index_reduce(0, i, torch.ones(2, 4), "amax"),
    "scatter_add": lambda i: X.scatter_add(0, i.reshape(1, -1), torch.ones(1, 2)),
    "scatter_reduce": lambda i: X.scatter_reduce(0, i.reshape(1, -1), torch.ones(1, 2), "amin"),
    "index_put, added": lambda i: X.index_put((i,), torch.tensor(7.0), accumulate=True),
    "put": lambda i: X.put(i, torch.ones(2)),
    "max_unpool": lambda i: F.max_unpool2d(X[None, :1, :2, None], i.reshape(1, 1, 2, 1), 2, 2),
    "one of two": lambda i: X[i, torch.arange(2)],
    "an expanded view": lambda i: X[i[None, :, None, None, None, None].expand(2, -1, 2, 2, 2, 2)],
    "a strided view": lambda i: X[i.repeat_interleave(2).reshape(2, 2).T[0:1]],
    "an index of an index": lambda i: X[torch.tensor([1, 4, 2])[i]],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operators(name: str) -> None:
    do = OTHERS[name]
    computed: Callable[..., Any] = lambda i: do(i * 1)  # noqa: E731
    raised = 0
    with purevk.compile(Indexes(computed), (torch.tensor([0, 1]),)) as program:
        for pair in ([0, 1], [1, 0], [3, 20], [-21, 1], [2, 5], [-6, 0], [0, 1]):
            raised += raises_as_torch(program, computed, torch.tensor(pair)) is not None
    assert raised >= 2


MASKED: dict[str, Callable[..., Any]] = {
    "masked_scatter": lambda x, m, v: x.masked_scatter(m[:, None], v.flatten()),
    "masked_scatter of a wide mask": lambda x, m, v: x.masked_scatter((m[:, None] & (x > -9)), v),
    "index_put": lambda x, m, v: x.index_put((m,), v),
    "index_put, added": lambda x, m, v: x.index_put((m,), v, accumulate=True),
    "index_put of numbers": lambda x, m, v: x[:, 0].index_put((m,), v[:, 0]),
    "one value": lambda x, m, v: x.index_put((m,), v[:1]),
}


@pytest.mark.parametrize("name", MASKED)
def test_values_for_the_true_elements_of_a_mask(name: str) -> None:
    do, pick = MASKED[name], random.Random(name)
    dtype = pick.choice([torch.float32, torch.int64, torch.float16, torch.uint8])
    rows, most = pick.randint(5, 40), pick.randint(2, 4)
    x, values = torch.zeros(rows, 3).to(dtype), torch.arange(most * 3).reshape(most, 3).to(dtype)
    raised = 0
    with purevk.compile(Model(do), (x, x[:, 0] > 0, values)) as program:
        for count in (0, most - 1, most, most + 1, rows, most):
            mask = torch.zeros(rows, dtype=torch.bool)
            mask[pick.sample(range(rows), count)] = True
            try:
                expected = do(x, mask, values)
            except RuntimeError:
                raised += 1
                with pytest.raises(InputError, match="the mask has"):
                    program(x, mask, values)
                continue
            assert torch.equal(program(x, mask, values), expected), count
    assert bool(raised) is (name != "one value")


def test_offsets_of_bags() -> None:
    table, indices = torch.randn(6, 4), torch.tensor([1, 5, 2, 4, 0])
    do: Callable[..., Any] = lambda i, o: F.embedding_bag(i, table, o, mode="mean")  # noqa: E731
    with purevk.compile(Model(do), (indices, torch.tensor([0, 1, 2]))) as program:
        for offsets in (
            [0, 2, 4],
            [0, 0, 5],
            [0, 2, 6],
            [1, 2, 3],
            [0, -1, 3],
            [-1, 2, 3],
            [0, 5, 5],
        ):
            try:
                expected = do(indices, torch.tensor(offsets))
            except (RuntimeError, IndexError):
                with pytest.raises(InputError, match="offset is not"):
                    program(indices, torch.tensor(offsets))
                continue
            torch.testing.assert_close(program(indices, torch.tensor(offsets)), expected)


def test_no_operator_is_forgotten() -> None:
    named = {
        definition.name
        for definition in registry.definitions()
        if not {"index", "indices"}.isdisjoint(definition.parameters)
        and not definition.name.startswith("purevk.")
    }
    others = {
        "aten._unsafe_index_put.default",  # torch makes it where indices are in range
        "aten.max_pool2d_with_indices_backward.default",  # torch does not check them
        "aten.segment_reduce.default",  # torch takes no indices
        "aten.select.int",  # numbers, not tensors
        "aten.select_scatter.default",
    }
    assert named - others <= OPERATORS


@pytest.mark.parametrize("kind", ["byte", "4bit", "2bit"])
def test_quantized_embeddings(kind: str) -> None:
    per_byte = {"byte": 1, "4bit": 2, "2bit": 4}[kind]
    recorder = Recorder()
    index = recorder.call(aten.mul.Tensor, (recorder.input(torch.tensor([0, 1])), 2), {})
    dtype = torch.int8 if per_byte == 1 else torch.uint8
    table = recorder.constant(torch.zeros(9, 8 // per_byte, dtype=dtype))
    args = (table, recorder.constant(torch.ones(9)), None, -128, 127, index)
    name = f"quantized_decomposed.embedding_{kind}.default"
    made = recorder.importer.emit(name, args, [], [], name)
    graph = check_indices(recorder.importer.finish([made[0]]), default_context().traits)
    (check,) = (node for node in graph.nodes if node.op == CHECK)
    assert check.args[:4] == (index, 0, 9, name)


@pytest.mark.parametrize("name", ["embedding", "gather", "two indices", "scatter", "index_add"])
def test_kernels_of_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """int64 is read as two words."""
    shared = default_context()
    monkeypatch.setattr(shared, "traits", replace(shared.traits, profile=DEFAULT, cores=1))
    do, size, from_end = CASES[name]
    with purevk.compile(Indexes(do, True), (torch.tensor([0, 1]),)) as program:
        for pair in ([0, size - 1], [-size, 1], [0, size], [1 << 32, 0], [0, -(1 << 32)]):
            good = min(pair) >= (-size if from_end else 0) and max(pair) < size
            assert (raises_as_torch(program, do, torch.tensor(pair)) is None) is good


def test_many_indices_and_dims_that_vary() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any, index: Any) -> Any:
            return x[index * 2, (index + 0).T.reshape(index.shape)]

    rows, count = torch.export.Dim("rows", min=4, max=64), torch.export.Dim("count", min=4, max=512)
    args = (torch.randn(8, 4), torch.zeros(8, 3, dtype=torch.long))
    module = Model()
    with purevk.compile(module, args, ({0: rows}, {0: count})) as program:
        for length, many in ((4, 5), (60, 512), (9, 64)):
            x = torch.randn(length, 4)
            index = torch.randint(0, 2, (many, 3))
            assert raises_as_torch(program, module, x, index) is None
            for row, wrong in ((0, length), (many - 1, -length), (many // 2, 4)):
                changed = index.clone()
                changed[row, 2] = wrong
                assert raises_as_torch(program, module, x, changed) is not None
            assert raises_as_torch(program, module, x, index) is None


def test_what_is_known_to_be_in_range_is_not_checked() -> None:
    table = torch.nn.Embedding(40, 4).requires_grad_(False)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("order", torch.tensor([3, 0, -1]))

        def forward(self, x: Any) -> Any:
            rows = x.shape[0]
            positions = table(torch.arange(rows)) + table.weight[torch.arange(rows).flip(0) % 7]
            best = x.gather(1, x.topk(2).indices) + x.gather(1, x.argsort(-1))[:, :2]
            return (
                positions,
                best,
                x[x.argmax(0)],
                x[:, self.order],
                table((x[:, 0] * 9).long().clamp(0, 39)),
                x.flatten()[torch.nonzero(x.flatten() > 0)[:, 0]],
                F.one_hot((x > 0).long(), 2),
            )

    rows = torch.export.Dim("rows", min=2, max=32)
    with purevk.compile(Model(), (torch.randn(8, 4),), ({0: rows},)) as program:
        assert not checks(program)
        for count in (2, 32):
            x = torch.randn(count, 4)
            for have, want in zip(program(x), Model()(x)):
                torch.testing.assert_close(have, want)


def test_constants_that_are_out_of_range() -> None:
    do: Callable[..., Any] = lambda i: (X + i.sum())[torch.tensor([0, 5])]  # noqa: E731
    computed: Callable[..., Any] = lambda i: X[torch.full((2,), 2) * 2 + 1] + i[:1]  # noqa: E731
    for each in (do, computed):
        with purevk.compile(Indexes(each), (torch.tensor([0, 1]),)) as program:
            for _ in range(2):
                assert raises_as_torch(program, each, torch.tensor([0, 1])) is not None


def test_equal_checks_are_made_once() -> None:
    def do(i: Any) -> Any:
        i = i + 1
        return X[i] + X.index_select(0, i) * 2 + X.flip(0)[i]

    with purevk.compile(Indexes(do), (torch.tensor([0, 1]),)) as program:
        assert checks(program) == ["aten.index.Tensor", "aten.index_select.default"]


class Cache(torch.nn.Module):
    """The position is a buffer, which each call raises."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))
        self.register_buffer("rows", torch.zeros(3, 4))

    def forward(self, x: Any) -> Any:
        self.rows.index_copy_(0, self.position, x)
        self.position.add_(1)
        return self.rows.sum(0)


def test_states() -> None:
    """The position after the last row. `reset_state` starts anew."""
    with purevk.compile(Cache(), (torch.ones(1, 4),)) as program:
        for _ in range(2):
            eager = Cache()
            for step in range(5):
                error = raises_as_torch(program, eager, torch.full((1, 4), step + 1.0))
                assert (error is not None) is (step >= 3)
            program.reset_state()


def test_branches_and_loops() -> None:
    """A branch that does not run takes no indices."""

    def branch(i: Any) -> Any:
        wide = i * 2
        return torch.cond(
            i[0] > 1, lambda i: X[i].cumsum(0), lambda i: X[i - 1].cumsum(1) + 1, (wide,)
        )

    def loop(i: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return i + 1, x + X[i]

        return torch.while_loop(
            lambda i, x: x[0, 0] < 20, body, (i, torch.zeros(2, 4) + i.sum() * 0)
        )[1]

    for do in (branch, loop):
        with purevk.compile(Indexes(do), (torch.tensor([0, 1]),)) as program:
            seen = {
                raises_as_torch(program, do, torch.tensor(pair)) is None
                for pair in ([0, 1], [2, 2], [0, 4], [2, 3], [1, 2], [-9, 0], [0, 1])
            }
            assert seen == {True, False}


def test_sizes_that_depend_on_the_data() -> None:
    def do(i: Any) -> Any:
        some = i[i > 0]
        return X[:, :1][some * 2 - 2].sum() + some.shape[0]

    with purevk.compile(Indexes(do), (torch.tensor([0, 1, 2, 3]),)) as program:
        for given in ([0, 1, 2, 3], [1, 1, 1, 1], [0, 0, 0, 0], [3, 0, 0, 4], [-9, 2, -9, 3]):
            raises_as_torch(program, do, torch.tensor(given))
        assert raises_as_torch(program, do, torch.tensor([3, 0, 0, 4])) is not None


def test_a_submitted_call_with_a_computed_index_raises() -> None:
    with purevk.compile(Indexes(lambda i: X[i], True), (torch.tensor([0, 1]),)) as program:
        calls = [program.submit(torch.tensor(pair)) for pair in ([0, 1], [0, 5], [3, 4])]
        torch.testing.assert_close(calls[0].result(), X[[0, 1]])
        with pytest.raises(InputError, match="an index of aten.index.Tensor is 5"):
            calls[1].result()
        torch.testing.assert_close(calls[2].result(), X[[3, 4]])


def test_torch_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda i: X[i * 2], backend="purevk", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.tensor([0, 2])), X[[0, 4]])
        with pytest.raises(InputError, match="is 6"):
            compiled(torch.tensor([0, 3]))
    torch._dynamo.reset()


def test_a_saved_program(tmp_path: Path) -> None:
    do: Callable[..., Any] = lambda i: X[i * 2]  # noqa: E731
    with purevk.compile(Indexes(do), (torch.tensor([0, 1]),)) as program:
        program.save(tmp_path / "model.pvk")
    with purevk.load(tmp_path / "model.pvk") as program:
        assert raises_as_torch(program, do, torch.tensor([0, 2])) is None
        assert raises_as_torch(program, do, torch.tensor([0, 3])) is not None


def test_with_a_check_of_each_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PUREVK_CHECK", "1")
    monkeypatch.setenv("PUREVK_CACHE", str(tmp_path))
    do: Callable[..., Any] = lambda i: X[i * 2]  # noqa: E731
    with purevk.compile(Indexes(do), (torch.tensor([0, 1]),)) as program:
        assert raises_as_torch(program, do, torch.tensor([0, 2])) is None


def test_no_indices() -> None:
    count = torch.export.Dim("count", min=0, max=8)
    model = Indexes(lambda i: X.index_select(0, i), True)
    with purevk.compile(model, (torch.tensor([0, 1, 2]),), ({0: count},)) as program:
        for pair in ([0, 4, 2], [], [3]):
            index = torch.tensor(pair, dtype=torch.int64)
            torch.testing.assert_close(program(index), X.index_select(0, index))


def test_the_knob_turns_checks_of_computed_indices_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_CHECK_INDICES", "0")
    with purevk.compile(Indexes(lambda i: X[i], True), (torch.tensor([0, 1]),)) as program:
        assert not checks(program)
        torch.testing.assert_close(program(torch.tensor([9, 0])), X[[4, 0]])
