"""Files of a few kilobytes whose sizes would take all time and memory to compute."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from purevk.dtypes import DType
from purevk.errors import FileFormatError, ShapeError, UnsupportedOperatorError
from purevk.frontends import numbers
from purevk.frontends.executorch.native import _Method
from purevk.frontends.files import open_file
from purevk.frontends.reading import reading
from purevk.ir import Dim, Symbol, dims, polynomials
from purevk.lower import lowering
from purevk.ops import builder
from purevk.pte.native import (
    Argument,
    NativeGraph,
    NativeMethod,
    NativeNode,
    NativeProgram,
    Ref,
    Result,
    TensorMeta,
)
from tests.frontends.saved_files import file_of, lower, method_of, program_of
from tests.harness import DATA

SYMBOLS = [f"s{n}" for n in range(20)]
ALL = [[1, [name]] for name in SYMBOLS]


@pytest.fixture(autouse=True)
def seconds() -> Iterator[None]:
    """A test takes no more than a second or two of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 3


def nested(kind: str, innermost: Any, other: Any, depth: int, times: int = 1) -> Any:
    size = innermost
    for _ in range(depth):
        size = [[1, [[kind, size, other]] * times]]
    return size


# Sizes as a .pvk file has them.
SIZES: dict[str, Any] = {
    "product of sums": [[1, [["//", ALL, 1]] * 6]],
    "sum to a power": [[1, [["**", ALL, 64]]]],
    "power": [[1, [["**", [[1, ["s0"]]], 10**10]]]],
    "powers of powers": nested("**", [[1, ["s0"]]], 64, 6),
    "powers of powers of numbers": [*nested("**", 3, 64, 20), [1, ["s0"]]],
    "products of minima": nested("max", [[1, ["s0"]]], [[1, ["s1"]]], 9, 2),
    "many digits": [[10**4200, ["s0"]]],
}


def lower_size(size: Any) -> None:
    method = method_of([["x", "float32", [size]], ["y", "float32", [4]]], [], [0])
    method["symbols"] = [[name, 2**31 - 2, 0, True, False, False] for name in SYMBOLS]
    method["graph"]["sources"] = [[name, {"value": 0}, 0, 0] for name in SYMBOLS]
    content = {"producer": "", "name": "", "tensors": [], "methods": {"forward": method}}
    with open_file(file_of(content)) as file:
        file.graph("forward")


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_saved_programs(name: str) -> None:
    with pytest.raises(FileFormatError):
        lower_size(SIZES[name])


FEW = [[1, [name]] for name in SYMBOLS[:3]]
TENTH = [[1, [["**", [*FEW, [1, []]], 10]]]]  # 286 terms
PAIRS = [[1, [a, b]] for a, b in itertools.combinations(SYMBOLS, 2)]
# Sizes within all limits, of which 1 MB took minutes, and how many take about 300,000 parts.
MANY: dict[str, tuple[Any, int]] = {
    "long sum": (PAIRS, 6),
    "power": (TENTH, 7),
    "square": ([[1, [["**", ALL, 2]]]], 60),
    "division": ([[1, [["//", TENTH, FEW]]]], 1),
    "remainder": ([[1, [["%", TENTH, [*FEW[:1], [7, []]]]]]], 4),
}


@pytest.mark.parametrize("name", MANY)
def test_many_sizes_of_a_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within the limits. All of a file have one, whatever methods they are of."""
    size, count = MANY[name]
    monkeypatch.setattr(polynomials, "MOST_WORK", 1 << 19)
    values = [["x", "float32", [4]], *(["y", "float32", [size]] for _ in range(count))]
    method = method_of(values, [], [0])
    method["symbols"] = [[name, 9, 2, True, False, False] for name in SYMBOLS]
    method["graph"]["sources"] = [[name, {"value": 0}, 0, 0] for name in SYMBOLS]
    methods = {f"m{n}": method for n in range(6)}
    content = {"producer": "", "name": "", "tensors": [], "methods": methods}
    with open_file(file_of(content)) as file:
        file.graph("m0")
        with pytest.raises(FileFormatError, match="too long to compute"):
            for name in file.methods:
                file.graph(name)


def test_work_that_is_done_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polynomials, "MOST_WORK", 25)
    total = Dim.of(Symbol("a")) + Dim.of(Symbol("b"))
    work = polynomials.Work()
    for _ in range(9):
        with work.counting("read"):
            total + total  # two products of a symbol: 4 parts
    for task in range(4):
        with work.counting(task):
            total + total
    with work.counting("read"):
        pass
    with work.counting("another"), pytest.raises(ShapeError, match="too long to compute"):
        for _ in range(2):
            total = total + total
    assert len((total + total).terms) == 2


def test_a_division_with_a_quotient_of_many_terms() -> None:
    """x ** 20 // (x - a - b - ...) has a quotient with millions of terms, and a remainder."""
    *others, x = (Dim.of(Symbol(name)) for name in "abcdefghx")
    divisor: Any = x - sum(others[1:], others[0])
    assert "//" in str(dims.power(x, 20) // divisor)


def test_functions_within_functions() -> None:
    """The range of each was computed twice for the range of the next."""
    for unbacked in (False, True):
        a, b = (Dim.of(Symbol(name, is_size=not unbacked, unbacked=unbacked)) for name in "ab")
        size: Any = a
        for _ in range(60):
            size = (size + b) // 2
        assert dims.settled(size, "==", 3) is None


def test_sums_of_many_symbols() -> None:
    """What models have: the inputs of a concatenation, and its square."""
    total: Any = 0
    for n in range(80):
        total = total + Dim.of(Symbol(f"n{n}"))
    assert len((total * total).terms) == 80 * 81 // 2
    assert (total * total) // total == total
    with pytest.raises(ShapeError, match=f"at most {polynomials.MOST_PARTS}"):
        total * total * total


def test_powers_are_exact_or_refused() -> None:
    """A large power may be within a remainder, so that no other number stands for it."""
    assert dims.power(3, 65) == 3**65 and dims.power(-1, 1001) == -1
    assert [dims.power(base, 10**9) for base in (-1, 0, 1)] == [1, 0, 1] and dims.power(0, 0) == 1
    for base, exponent in ((2, 10**9), (-3, 10**9 + 1), (3, 10**4)):
        with pytest.raises(ShapeError, match="bits"):
            dims.power(base, exponent)
    n = Dim.of(Symbol("n"))
    last_digit = dims.power(3, n) % 10
    assert dims.evaluate(last_digit, {Symbol("n"): 1001}) == 3**1001 % 10
    assert dims.range_of(last_digit) == (0, 9) and 0 <= dims.hint(last_digit) <= 9
    with pytest.raises(ShapeError, match="bits"):
        dims.evaluate(last_digit, {Symbol("n"): 10**6})
    assert dims.evaluate(dims.power(n, 5), {Symbol("n"): 3}) == 3**5
    assert dims.power(n, 0) == 1 and dims.power(n, 1) == n


# -- steps of arithmetic --------------------------------------------------------------------------
def native(steps: list[tuple[str, str, Any, Any]], inputs: int = 1) -> None:
    """Reads a .ptn program that computes with the sizes `s0`, `s1` ... of its inputs."""
    types = {f"x{n}": TensorMeta(DType.float32, ((1, 64 + n), (4, 4))) for n in range(inputs)}
    sizes = [(f"s{n}", "aten.sym_size.int", Ref(f"x{n}"), 0) for n in range(inputs)]
    nodes = [
        NativeNode(
            name,
            target,
            (Argument("a", left, False), Argument("b", right, False)),
            (Result((name,), False, ""),),
        )
        for name, target, left, right in [*sizes, *steps]
    ]
    graph = NativeGraph(tuple(nodes), tuple(types), ("x0",), types)
    program = NativeProgram({"forward": NativeMethod(graph, {}, ((0, ""),))}, [], [])
    with reading("a.ptn"):
        _Method(program, "forward", "a.ptn", None).run()


def squares(first: Any, count: int) -> list[tuple[str, str, Any, Any]]:
    steps = [("q0", "_operator.mul", first, first)]
    for n in range(1, count):
        steps.append((f"q{n}", "_operator.mul", Ref(f"q{n - 1}"), Ref(f"q{n - 1}")))
    return steps


def chains(kind: str, count: int) -> list[tuple[str, str, Any, Any]]:
    """Functions whose both operands have the last one in them: trees that double in size."""
    steps: list[tuple[str, str, Any, Any]] = [("q0", "_operator.add", Ref("s0"), 1)]
    for n in range(1, count):
        steps.append((f"t{n}", "_operator.add", Ref(f"q{n - 1}"), Ref("s0")))
        steps.append((f"q{n}", f"_operator.{kind}", Ref(f"q{n - 1}"), Ref(f"t{n}")))
    return steps


STEPS: dict[str, Callable[[], None]] = {
    "squares of a number": lambda: native(squares(3, 60)),
    "squares of a size": lambda: native(squares(Ref("s0"), 60)),
    "functions of themselves": lambda: native(chains("floordiv", 40)),
    "remainders of themselves": lambda: native(chains("mod", 40)),
    "list that is repeated": lambda: native([("p", "_operator.mul", (1, 2), 10**10)]),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_arithmetic(name: str) -> None:
    with pytest.raises(FileFormatError):
        STEPS[name]()


def test_powers_of_numbers() -> None:
    n = Dim.of(Symbol("n"))
    for base in (n, n + 1):
        with pytest.raises(ShapeError):
            numbers.of_sizes("**", numbers.of_sizes("**", base, 1 << 40), 1 << 40)
    assert numbers.of_sizes("**", 2.5, 2) == 6.25 and numbers.of_sizes("**", 2, -1) == 0.5
    with pytest.raises(ArithmeticError):
        numbers.of_sizes("**", 7.5, 10**10)


def test_no_memory_and_no_stack() -> None:
    for error in (MemoryError, RecursionError):
        with pytest.raises(FileFormatError), reading("a.pvk"):
            raise error


# -- operators that have something for each of a size ---------------------------------------------
BYTES = ["x", "uint8", [1 << 36]]
IMAGE = ["x", "uint8", [1, 1, 4, 4]]
OPERATORS: dict[str, tuple[list[Any], str, list[Any], list[Any]]] = {
    "unbind": (BYTES, "aten.unbind.int", [0], ["y", "uint8", []]),
    "split": (BYTES, "aten.split.Tensor", [1, 0], ["y", "uint8", [1]]),
    "resized bytes": (
        IMAGE,
        "aten._upsample_bilinear2d_aa.default",
        [[1 << 28, 4], False, None, None],
        ["y", "uint8", [1, 1, 1 << 28, 4]],
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_pieces_of_a_long_dim(name: str) -> None:
    x, op, args, y = OPERATORS[name]
    with pytest.raises(FileFormatError, match="at most"):
        lower(program_of([x, y], [(op, [{"value": 0}, *args], [1])], [1]))


@pytest.mark.parametrize("op", ["aten.tril_indices.default", "aten.triu_indices.default"])
def test_triangles(op: str) -> None:
    x, y = ["x", "float32", [4]], ["y", "int64", [2, 1]]
    with pytest.raises(FileFormatError, match=str((1 << 59) * ((1 << 60) - 1))[:17]):
        lower(program_of([x, y], [(op, [1 << 60, 1 << 60, [-1, 1]["u" in op]], [1])], [1]))


def test_nodes_and_dispatches_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (DATA / "linear_portable.pte").read_bytes()
    lower(data)
    for module, name in ((builder, "_MOST_NODES"), (lowering, "_MOST_DISPATCHES")):
        with (
            monkeypatch.context() as patch,
            pytest.raises(UnsupportedOperatorError, match=name[6:].lower()),
        ):
            patch.setattr(module, name, 0)
            lower(data)
