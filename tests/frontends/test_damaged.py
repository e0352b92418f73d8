"""Files that are damaged, or lie: they read, or raise one of purevk's errors that says where. No device
is needed: these tests end where lowering begins."""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from purevk import knobs
from purevk.errors import FileFormatError, PurevkError, ShapeError
from purevk.frontends import saved
from purevk.frontends.bounds import UnsettledBounds, settled
from purevk.frontends.files import open_file
from purevk.frontends.reading import reading
from purevk.ir import Graph, Node, TensorType, Value
from purevk.ir.expected import Expected
from tests.frontends.saved_files import file_of, lower, method_of, program_of
from tests.harness import DATA

X = ["x", "float32", [64]]


def value(number: int) -> dict[str, int]:
    return {"value": number}


# -- files that state what is not so --------------------------------------------------------------
LIES = {
    "more elements": ([X, ["o", "float32", [640]]], [("aten.relu.default", [value(0)], [1])]),
    "another rank": ([X, ["o", "float32", [8, 8]]], [("aten.relu.default", [value(0)], [1])]),
    "another dtype": ([X, ["o", "int64", [64]]], [("aten.relu.default", [value(0)], [1])]),
    "the dtype of a kernel": (
        [X, ["o", "float16", [64]]],
        [("aten.cat.default", [[value(0)], 0], [1])],
    ),
    "too little room": (
        [X, ["o", "float32", [4]]],
        [("aten.cat.default", [[value(0), value(0)], 0], [1])],
    ),
    "a sum": (
        [X, ["o", "float32", [500]]],
        [("aten.sum.dim_IntList", [value(0), [0], False], [1])],
    ),
    "a view": ([X, ["o", "float32", [128]]], [("aten.view.default", [value(0), [128]], [1])]),
    "a view of another dtype": (
        [X, ["o", "float16", [64]]],
        [("aten.view.default", [value(0), [64]], [1])],
    ),
    "bytes behind the storage": (
        [X, ["o", "float32", [64]]],
        [("aten.as_strided.default", [value(0), [64], [1], 1], [1])],
    ),
    "bytes before the storage": (
        [X, ["o", "float32", [64]]],
        [("aten.as_strided.default", [value(0), [64], [-1], 0], [1])],
    ),
    "an index": ([X, ["o", "float32", []]], [("aten.select.int", [value(0), 0, 64], [1])]),
    "a missing result": ([X, ["o", "float32", [3]]], [("aten.topk.default", [value(0), 3], [1])]),
    "a write to an input": ([X], [("purevk.store", [value(0), value(0)], [])]),
    "a text for a number": (
        [X, ["o", "float32", [64]]],
        [("aten.clamp.default", [value(0), "min", None], [1])],
    ),
    "a dim": (
        [X, ["o", "float32", [64]]],
        [("aten.sum.dim_IntList", [value(0), ["0"], True], [1])],
    ),
    "a group size of 0": (
        [X, ["o", "float32", [64]]],
        [("aten.pixel_shuffle.default", [value(0), 0], [1])],
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_lies(name: str) -> None:
    values, nodes = LIES[name]
    data = program_of(values, nodes, [len(values) - 1])
    with pytest.raises(FileFormatError) as error, open_file(data) as file:
        file.graph("forward")
    assert f"line 1 ({nodes[0][0]})" in error.value.where


def test_the_truth() -> None:
    """What the files above have in common is no reason to refuse them."""
    nodes = [
        ("aten.relu.default", [value(0)], [1]),
        ("aten.cat.default", [[value(0), value(1)], 0], [2]),
        ("aten.as_strided.default", [value(2), [64], [2], 1], [3]),
        ("aten.select.int", [value(3), 0, -64], [4]),
    ]
    values = [X, ["a", "float32", [64]], ["b", "float32", [128]], ["c", "float32", [64]]]
    lower(program_of([*values, ["d", "float32", []]], nodes, [4]))


S = [[1, ["s"]]]  # a size of at most 64


@pytest.mark.parametrize("kept", [[S, "<", 9], [S, "<=", 8], [9, ">", S], [S, "==", 7]], ids=str)
def test_views_are_within_what_calls_keep(kept: list[Any]) -> None:
    """At the bound of the size the view is larger than its input. Calls stay below."""
    nodes = [
        ("aten.slice.Tensor", [value(0), 0, 0, 8], [1]),
        ("aten.view.default", [value(1), [{"size": S}]], [2]),
    ]
    values = [
        [name, "float32", [size]] for name, size in zip("xyz", (S, [[1, [["min", S, 8]]]], S))
    ]

    def read(constraint: list[Any]) -> None:
        method = method_of(
            values, nodes, [2], sources=[["s", value(0), 0, 0]], constraints=[[*constraint, True]]
        )
        method["symbols"] = [["s", 64, 2, True, False, False]]
        content = {"producer": "", "name": "", "tensors": [], "methods": {"forward": method}}
        with open_file(file_of(content)) as file:
            file.graph("forward")

    read(kept)
    with pytest.raises(FileFormatError, match="reads beyond its input"):
        read([S, "<=", 9])


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "update of no input": lambda graph: graph.update(updates=[7]),
    "more updates than outputs": lambda graph: graph.update(updates=[0, 0, 0]),
    "a symbol of no input": lambda graph: graph.update(sources=[["s", None, None, 4]]),
    "a symbol of no dim": lambda graph: graph.update(sources=[["s", {"value": 0}, 3, 0]]),
    "a value that is true": lambda graph: graph.update(outputs=[{"value": True}]),
    "a value from the end": lambda graph: graph.update(outputs=[{"value": -1}]),
    "an operator without a name": lambda graph: graph["nodes"][0].__setitem__(0, 5),
    "a source that is a list": lambda graph: graph["nodes"][0].__setitem__(3, []),
    "an input that is a number": lambda graph: graph.update(inputs=[5]),
    "a result that is a number": lambda graph: graph["nodes"][0].__setitem__(2, [1]),
    "no list of nodes": lambda graph: graph.update(nodes=None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_structure(name: str) -> None:
    method = method_of([X, ["o", "float32", [64]]], [("aten.relu.default", [value(0)], [1])], [1])
    method["symbols"] = [["s", 8, 0, True, False, False]]
    BROKEN[name](method["graph"])
    content = {"producer": "", "name": "", "tensors": [], "methods": {"forward": method}}
    with pytest.raises(FileFormatError):
        lower(file_of(content))


# -- limits ---------------------------------------------------------------------------------------
def nested(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made


def chain(count: int) -> bytes:
    nodes = [("aten.relu.default", [value(n)], [n + 1]) for n in range(count)]
    values = [[f"v{n}", "float32", [64]] for n in range(count + 1)]
    return program_of(values, nodes, [count])


def huge(bytes_of_result: int) -> bytes:
    sizes = [bytes_of_result // 4 // 64, 64]
    nodes = [("aten.expand.default", [value(0), sizes], [1])]
    return program_of([X, ["o", "float32", sizes]], nodes, [1])


def many_symbols(count: int) -> bytes:
    method = method_of([["x", "float32", [[[1, ["s0"]]]]]], [], [0])
    method["symbols"] = [[f"s{n}", 8, 0, True, False, False] for n in range(count)]
    method["graph"]["sources"] = [[f"s{n}", value(0), 0, 0] for n in range(count)]
    return file_of({"producer": "", "name": "", "tensors": [], "methods": {"forward": method}})


def deep(depth: int) -> bytes:
    nodes = [("aten.sum.dim_IntList", [value(0), nested(depth), False], [1])]
    return program_of([X, ["o", "float32", []]], nodes, [1])


LIMITS = {
    "nodes": (chain, 8),
    "tensor_bytes": (huge, 1 << 20),
    "symbols": (many_symbols, 5),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, limit = LIMITS[name]
    monkeypatch.setenv(knobs.LIMITS.name, f"{name}={limit}")
    lower(make(limit))
    with pytest.raises(FileFormatError, match=name.removeprefix("tensor_")) as error:
        lower(make(2 * limit))
    assert f"raise {name} in {knobs.LIMITS.name}" in error.value.next


@pytest.mark.parametrize("at", ["input", "result", "state"])
def test_dims(at: str) -> None:
    """numpy makes no arrays with more."""
    for rank in (64, 65):
        sizes = {"input": [64], "result": [64], "state": [64]} | {at: [1] * (rank - 1) + [64]}
        values = [[name, "float32", dims] for name, dims in sizes.items()]
        nodes = [("aten.view.default", [value(0), sizes["result"]], [1])]
        data = program_of(values, nodes, [1], states=[[2, None]], labels=[[2, "s", "s"]])
        if rank == 64:
            with open_file(data) as file:
                file.graph("forward")
        else:
            with pytest.raises(FileFormatError, match="has 65 dims"):
                lower(data)


def test_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.LIMITS.name, "depth=20")
    with pytest.raises(FileFormatError, match="levels of nesting"):
        lower(deep(20))
    monkeypatch.delenv(knobs.LIMITS.name)
    with pytest.raises(FileFormatError):
        lower(deep(900))
    text = program_of([X], [], [0])
    open_file(text).close()
    with pytest.raises(FileFormatError):
        open_file(file_of({"tensors": nested(900)}))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1" * 5000, "1e999", str(1 << 70)])
def test_numbers(number: str) -> None:
    text = json.dumps({"methods": {"forward": method_of([["x", "float32", ["HERE"]]], [], [0])}})
    content = text.replace('"HERE"', number).encode()
    head = saved._HEADER.pack(
        saved.MAGIC, saved.VERSION, 0, 64 + len(content), 64, len(content), zlib.crc32(content)
    )
    head += saved._CHECK.pack(zlib.crc32(head))
    with pytest.raises(FileFormatError):
        open_file(head.ljust(64, b"\0") + content)


# -- loops ----------------------------------------------------------------------------------------
def test_bounds_that_never_settle() -> None:
    reads = 0

    def read() -> Graph:
        nonlocal reads
        reads += 1
        raise UnsettledBounds({"u0": Expected(reads % 2, reads % 2)})

    with pytest.raises(FileFormatError, match="bounds of size u0 contradict"):
        settled(read)
    assert reads < 20


@pytest.mark.parametrize(("name", "at", "word"), [("counter", 1736, 8), ("topk", 904, 4)])
@pytest.mark.timeout(60)
def test_files_that_loaded_for_ever(name: str, at: int, word: int) -> None:
    data = bytearray((DATA / f"{name}.pte").read_bytes())
    struct.pack_into("<I", data, at, word)
    with pytest.raises(FileFormatError):
        lower(bytes(data))


# -- mutations ------------------------------------------------------------------------------------
OTHER = [
    None, True, -1, 0, 1 << 40, 1.5, 1e308, "", "float32", "aten.relu.default", [], [1], [[2, []]], {}, {"value": 0},
    {"value": 99}, {"size": [[1, ["s0"]]]}, {"dtype": "bool"}, {"float": "nan"}, {"graph": {}},
]  # fmt: skip


def paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each item."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from paths(item, (*path, key))


def changed(content: Any, path: tuple[Any, ...], how: str, other: Any) -> Any:
    made = copy.deepcopy(content)
    around = made
    for key in path[:-1]:
        around = around[key]
    if how == "delete":
        del around[path[-1]]
    elif how == "double" and isinstance(around, list):
        around.insert(path[-1], copy.deepcopy(around[path[-1]]))
    else:
        around[path[-1]] = other
    return made


def saved_file(name: str) -> tuple[dict[str, Any], bytes]:
    """The description and the tensors of a committed .pte file, saved."""
    tensors = bytearray()
    writer = saved.GraphWriter(lambda data: _append(tensors, table, bytes(data)))
    table: list[list[int]] = []
    with open_file(DATA / f"{name}.pte") as file:
        methods = {each: writer.method(file.graph(each), [], []) for each in file.methods}
    content = {"producer": "", "name": name, "tensors": table, "methods": methods}
    return json.loads(json.dumps(content)), bytes(tensors)


def _append(tensors: bytearray, table: list[list[int]], data: bytes) -> int:
    table.append([saved.ALIGNMENT + len(tensors), len(data), zlib.crc32(data)])
    tensors += data
    return len(table) - 1


NAMES = ["counter", "dynamic_views", "gather", "linear_relu", "topk"]


@pytest.mark.parametrize("name", NAMES)
def test_changed_descriptions(name: str) -> None:
    """Each file reads, or raises an error of purevk."""
    content, tensors = saved_file(name)
    lower(file_of(content, tensors))
    places = [path for path in paths(content) if path[0] == "methods"]
    draw = random.Random(name)
    refused = 0
    for _ in range(250):
        path = draw.choice(places)
        how = draw.choice(["delete", "double", "replace", "replace"])
        made = changed(content, path, how, draw.choice(OTHER))
        try:
            lower(file_of(made, tensors))
        except PurevkError:
            refused += 1
        except Exception as error:
            pytest.fail(f"{path} {how}: {error!r}")
    assert refused > 50


@pytest.mark.parametrize("name", NAMES)
def test_changed_words(name: str) -> None:
    original = (DATA / f"{name}.pte").read_bytes()
    draw = random.Random(name)
    refused = 0
    for _ in range(250):
        data = bytearray(original)
        at = 4 * draw.randrange(len(data) // 4)
        word = draw.choice([0, 1, 2, 3, 5, 8, 255, 1 << 16, 1 << 31, (1 << 32) - 1, (1 << 32) - 2])
        struct.pack_into("<I", data, at, word)
        try:
            lower(bytes(data))
        except PurevkError:
            refused += 1
        except Exception as error:
            pytest.fail(f"word {at} = {word}: {error!r}")
    assert refused > 20


# -- the boundary ---------------------------------------------------------------------------------
def test_the_boundary_names_the_node() -> None:
    x = Value("x", TensorType.__new__(TensorType))
    with pytest.raises(FileFormatError) as error, reading("model.pvk"):

        def lower_node(node: Node) -> None:
            raise IndexError("tuple index out of range")

        lower_node(Node("aten.relu.default", (x,), (), "line 3"))
    assert error.value.where == "model.pvk, line 3 (aten.relu.default)"
    assert error.value.why == "IndexError: tuple index out of range"


def test_the_boundary_lets_other_errors_pass() -> None:
    for kind in (OSError, KeyboardInterrupt):
        with pytest.raises(kind), reading("model.pvk"):
            raise kind
    with pytest.raises(FileFormatError), reading("model.pvk"):
        raise ShapeError("sizes")


def test_shape_errors_are_errors_of_purevk() -> None:
    assert issubclass(ShapeError, PurevkError) and issubclass(ShapeError, ValueError)
