"""Assertions of a model on its data: calls raise where eager torch raises, and leave states as they
were."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import purevk  # noqa: E402
import purevk.dynamo  # noqa: E402  registers the backend, also where purevk is not installed
from purevk.frontends.torch.fast_paths import with_checked_classes  # noqa: E402

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]

WIDTH = 3
DTYPES = ("float32", "float16", "float64", "bfloat16", "int64", "int32", "int8")
_COMPARED = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


class Assertion(NamedTuple):
    """An assertion on one row of x [rows, WIDTH], with rows for which it holds, and others."""

    text: str
    check: Callable[[Any], None]
    holds: list[Any]
    fails: list[Any]


def assertion(rng: random.Random, row: int) -> Assertion:
    """A random one that is neither always true nor always false."""
    while True:
        text, check = drawn(rng, row)
        found: dict[bool, list[Any]] = {True: [], False: []}
        for _ in range(60):
            x = torch.zeros(row + 1, WIDTH)
            x[row] = torch.tensor([rng.randint(-4, 4) for _ in range(WIDTH)])
            try:
                check(x)
            except RuntimeError:
                found[False].append(x[row])
            else:
                found[True].append(x[row])
        if found[True] and found[False]:
            return Assertion(text, check, found[True], found[False])


def drawn(rng: random.Random, row: int) -> tuple[str, Callable[[Any], None]]:
    dtype = getattr(torch, name := rng.choice(DTYPES))
    sign, bound = rng.choice([*_COMPARED]), rng.randint(-2, 2)
    compare = _COMPARED[sign]
    kind = rng.choice(("all", "any", "number", "plain", "item", "logic", "every", "two", "count"))
    text = f"{kind} of row {row} in {name} {sign} {bound}"

    def check(x: Any) -> None:
        data = x[row].to(dtype)
        if kind == "all":
            torch._assert_async(compare(data, bound).all(), text)
        elif kind == "any":
            torch._assert_async(compare(data, bound).any(), text)
        elif kind == "number":
            torch._assert_async(data.sum() - bound, text)
        elif kind == "plain":
            torch._assert_async(compare(data.sum(), bound))
        elif kind == "item":
            torch._check(compare(data.sum().item(), bound), lambda: text)
        elif kind == "logic":
            torch._check(compare(data.sum(), bound).item(), lambda: text)
        elif kind == "every":
            torch._check_tensor_all(compare(data, bound), lambda: text)
        elif kind == "two":
            torch._check(compare(data.sum().item(), 2 * data[0].item() + bound), lambda: text)
        else:
            torch._check(compare((data > 0).sum().item(), 1), lambda: text)

    return text, check


class Asserting(torch.nn.Module):
    """Doubles x, and counts its calls."""

    def __init__(self, seed: int, count: int = 5) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.assertions = [assertion(rng, row) for row in range(count)]
        self.checks = [each.check for each in self.assertions]
        self.after = rng.randrange(count)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        for number, check in enumerate(self.checks):
            if number == self.after:
                self.calls += 1
            check(x)
        return x * 2 + self.calls[0]

    def inputs(self, seed: int) -> list[tuple[Any, bool]]:
        """Inputs of which none, one or all break an assertion, and whether all assertions hold."""
        rng = random.Random(seed)
        rows = range(len(self.assertions))
        made = []
        for broken in ((), *([row] for row in rows), (), rows):
            x = torch.stack(
                [
                    rng.choice(each.fails if row in broken else each.holds)
                    for row, each in enumerate(self.assertions)
                ]
            )
            made.append((x, not broken))
        return [*made, made[0]]


def compare_calls(run: Callable[..., Any], module: Asserting, seed: int, state: Any = None) -> None:
    """Calls `run` with inputs for which assertions hold, and with others."""
    eager = copy.deepcopy(module)
    for x, holds in module.inputs(seed):
        if holds:
            torch.testing.assert_close(torch.as_tensor(run(x)), eager(x))
        else:
            with pytest.raises(RuntimeError):
                copy.deepcopy(eager)(x)
            with pytest.raises(purevk.InputError):
                run(x)
        if state is not None:
            assert state()["calls"].tolist() == eager.calls.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_calls_raise_where_eager_torch_raises(seed: int) -> None:
    module = Asserting(seed)
    with purevk.compile(copy.deepcopy(module), (module.inputs(0)[0][0],)) as program:
        compare_calls(program, module, seed, lambda: program.state)


def test_assertions_under_torch_compile() -> None:
    module = Asserting(20, 4)
    torch._dynamo.reset()
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(
            copy.deepcopy(module), backend="purevk", fullgraph=True, options={"fallback": False}
        )
        try:
            compare_calls(run, module, 20)
        except torch._dynamo.exc.Unsupported:
            pytest.skip("torch 2.11 leaves torch._check of a number to Python")


@pytest.mark.parametrize("suffix", ("pt2", "pvk"))
def test_files_assert(tmp_path: Path, suffix: str) -> None:
    module, path = Asserting(30, 3), tmp_path / f"model.{suffix}"
    x = module.inputs(0)[0][0]
    if suffix == "pt2":
        try:
            torch.export.save(torch.export.export(copy.deepcopy(module), (x,)), path)
        except Exception as error:
            if "cast_symbool_to_symint_guardless" not in str(error):
                raise
            pytest.skip("torch 2.11 does not save assertions of a truth value")
    else:
        purevk.compile(copy.deepcopy(module), (x,)).save(path)
    with purevk.load(path) as program:
        compare_calls(program, module, 30, lambda: program.state)


def test_classes_of_one_hot_under_torch_compile() -> None:
    for count, dtype in ((3, torch.int64), (7, torch.int32)):
        run = torch.compile(
            lambda x, count=count: torch.nn.functional.one_hot(x.long(), count), backend="purevk"
        )
        x = torch.tensor([count - 1, 0], dtype=dtype)
        assert run(x).tolist() == torch.nn.functional.one_hot(x.long(), count).tolist()
        for wrong in (x + 1, x - 1):
            with pytest.raises((RuntimeError, purevk.InputError)):
                run(wrong)
    # torch 2.11 traces its own one_hot without assertions.
    graph = torch.fx.symbolic_trace(lambda x: torch.nn.functional.one_hot(x, 3))
    with_checked_classes(graph)
    assert torch.nn.functional.one_hot not in {node.target for node in graph.graph.nodes}
    assert graph(torch.tensor([0, 2])).tolist() == [[1, 0, 0], [0, 0, 1]]
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        graph(torch.tensor([0, 3]))


REPEATS = {
    "with the sum": lambda x, r: x.repeat_interleave(r, dim=0, output_size=6),
    "with a size": lambda x, r: x.repeat_interleave(r, dim=0, output_size=x.shape[0]),
    "without": lambda x, r: x.repeat_interleave(r, dim=0)[:4],
    "of indices": lambda x, r: torch.repeat_interleave(r * 2 - r, output_size=6) + x.sum(),
}


@pytest.mark.parametrize("name", REPEATS)
def test_repetitions_add_up_to_the_size(name: str) -> None:
    do, rng = REPEATS[name], random.Random(name)

    class Model(torch.nn.Module):
        def forward(self, x: Any, repeats: Any) -> Any:
            return do(x, repeats)

    x, fits = torch.randn(6, 2), torch.tensor([2, 0, 1, 3, 0, 0])
    with purevk.compile(Model(), (x, fits)) as program:
        for _ in range(8):
            repeats = fits[torch.tensor(rng.sample(range(6), 6))].clone()
            repeats[rng.randrange(6)] += rng.choice((0, 0, 1, 2, -1))
            try:
                expected = do(x, repeats)
            except RuntimeError:
                with pytest.raises(purevk.InputError):
                    program(x, repeats)
            else:
                torch.testing.assert_close(program(x, repeats), expected)


def test_assertions_of_branches_and_of_constants() -> None:
    def asserted(x: Any) -> Any:
        torch._assert_async((x > 1).all(), "in the branch")
        return x.cumsum(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(3.0))

        def forward(self, x: Any) -> Any:
            torch._assert_async((self.weight.exp() > 0.5).all(), "of the weight")
            return torch.cond(x[0] > 0, asserted, lambda x: x * 2, (x,))

    module = Model()
    with purevk.compile(module, (torch.ones(3) * 2,)) as program, torch.no_grad():
        for x in (torch.tensor([2.0, 3, 4]), torch.tensor([-2.0, 0, 1])):
            torch.testing.assert_close(program(x), module(x))
        with pytest.raises(purevk.InputError, match="in the branch"):
            program(torch.tensor([2.0, 0, 1]))
        module.weight[0] = -1.0
        with pytest.raises(purevk.InputError, match="of the weight"):
            program(torch.tensor([2.0, 3, 4]))


def test_the_knob_of_indices_turns_off_no_assertion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what `repeat_interleave` and linear algebra check of their data."""
    monkeypatch.setenv("PUREVK_CHECK_INDICES", "0")

    class Model(torch.nn.Module):
        def forward(self, x: Any, repeats: Any) -> Any:
            torch._assert_async((x < 9).all(), "too large")
            torch._check(x.sum().item() < 16, lambda: "too much")
            spread = torch.repeat_interleave(x[0], repeats, output_size=3)
            return torch.linalg.inv(x) + spread.sum()

    x, repeats = torch.tensor([[2.0, 0], [0, 3]]), torch.tensor([1, 2])
    try:
        torch.export.export(Model(), (x, repeats))
    except AssertionError:
        pytest.skip("torch 2.11 does not export assertions of a float")
    with purevk.compile(Model(), (x, repeats)) as program:
        torch.testing.assert_close(program(x, repeats), Model()(x, repeats))
        for text, arguments in {
            "too large": (x * 4, repeats),
            r"zuf0 < 16\.0": (x + 3, repeats),  # the text that torch.export keeps
            "do not add up": (x, repeats + 1),
            "singular": (x * torch.tensor([1.0, 0]), repeats),
        }.items():
            with pytest.raises(RuntimeError):
                Model()(*arguments)
            with pytest.raises(purevk.InputError, match=text):
                program(*arguments)
