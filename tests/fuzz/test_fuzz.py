"""Changed files read, or raise an error of purevk. `scripts/fuzz.py` runs as many as one likes."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from tests.fuzz import archives, language
from tests.fuzz.mutations import _draw_item, _places, apply, description, draw_changes
from tests.fuzz.targets import Seed, check, parse, pick, run, seeds, with_archives


def outcomes(first: int, count: int, runs: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    for number in range(first, first + count):
        draw = random.Random(number)
        seed = pick(draw, seeds())
        changes = draw_changes(draw, seed.kind, seed.data)
        try:
            found[check(run if runs else parse, seed, apply(seed.data, changes))] += 1
        except Exception as error:
            pytest.fail(f"{seed.name} {changes}: {error!r}")
    return found


def test_seeds_are_sound() -> None:
    kinds = Counter(seed.kind for seed in seeds())
    assert set(kinds) == {
        *("pte", "ptn", "ptd", "pvk", "bundle", "entry", "state", "request"),
        *("array", "import", "override", "dump"),
        *("session", "gguf", "transformers", "tokenizer"),
    }
    for seed in seeds():
        assert check(parse, seed, seed.data) == "read", seed.name


def test_changed_files() -> None:
    found = outcomes(0, 150, runs=False)
    assert found["read"] > 10 and found["FileFormatError"] > 50


@pytest.mark.parametrize("kind", ["transformers", "tokenizer"])
def test_changed_models_of_transformers(kind: str) -> None:
    """A value of another type in config.json raised a TypeError or a KeyError."""
    among = [seed for seed in seeds() if seed.kind == kind]
    found: Counter[str] = Counter()
    for number in range(150):
        draw = random.Random(f"{kind} {number}")
        seed = draw.choice(among)
        changes = draw_changes(draw, kind, seed.data)
        try:
            found[check(parse, seed, apply(seed.data, changes))] += 1
        except Exception as error:
            pytest.fail(f"{changes}: {error!r}")
    assert found["read"] > 5 and found["FileFormatError"] > 50, found


@pytest.mark.slow
def test_changed_archives() -> None:
    """.pt2 files of three layouts, and an ETRecord."""
    pytest.importorskip("torch")
    among = [seed for seed in with_archives() if seed.kind in ("pt2", "etrecord")]
    assert len(among) == 4
    found: Counter[str] = Counter()
    for number in range(100):
        draw = random.Random(f"archive {number}")
        seed = among[number % 4 if number < 40 else 3]  # a .pt2 file takes 0.3 s
        changes = draw_changes(draw, seed.kind, seed.data)
        found[check(parse, seed, apply(seed.data, changes))] += 1
    assert found["read"] > 10 and found["FileFormatError"] > 10, found
    (record,) = (seed for seed in among if seed.kind == "etrecord")
    moved = apply(record.data, [["splice", 0, 8, "\0"]])  # so that a member begins before the file
    assert check(parse, record, moved) == "FileFormatError"


@pytest.mark.parametrize("architecture", [[1, 2], 3])
def test_an_architecture_that_is_no_text(architecture: object) -> None:
    pytest.importorskip("tokenizers")
    model = json.loads(language.MODEL)
    model["metadata"]["general.architecture"] = architecture
    data = json.dumps(model).encode()
    assert check(parse, Seed("", "gguf", data), data) == "FileFormatError"


def folder_with(name: str, node: str, kind: str) -> str:
    """What a folder of kernels comes to whose file is something else."""
    data = archives.kernel_folder()
    (member,) = (each for each in archives.members(data) if each.endswith(name))
    return check(parse, Seed("", kind, data), apply(data, [["become", member, node]]))


@pytest.mark.parametrize("node", ["link itself", "folder", "socket", "pipe", "link nowhere"])
def test_dump_over_other_nodes(node: str) -> None:
    """They raised plain OSErrors, or waited."""
    assert folder_with("00.front_end.txt", node, "dump") == "OutputError"


def test_override_by_a_file_of_1_tb() -> None:
    for name in (".comp", ".spv"):
        data = archives.kernel_folder("fuzz.0")
        (member,) = (each for each in archives.members(data) if each.endswith(name))
        changed = apply(data, [["become", member, "hole"]])
        assert check(parse, Seed("", "override", data), changed) == "InputError"


@pytest.mark.device
def test_changed_requests() -> None:
    """Wrong requests are refused, and never disturb those of others in their batch."""
    (seed,) = (seed for seed in seeds() if seed.kind == "request")
    found: Counter[str] = Counter()
    for number in range(400):
        draw = random.Random(f"request {number}")
        changes = draw_changes(draw, seed.kind, seed.data)
        try:
            found[check(run, seed, apply(seed.data, changes))] += 1
        except Exception as error:
            pytest.fail(f"{changes}: {error!r}")
    assert found["read"] > 30 and found["InputError"] > 150, found


_GRAPH = ["methods", "forward", "graph"]
# Changes that once ended in other errors than those of a damaged file, and what they do.
FOUND = {
    "symbol of a guard has no source": ("quantized.pvk", ["json", [*_GRAPH, "sources", 1], "delete", None, 6979]),
    "operand of a matmul is missing": ("branch.pvk", ["json", [*_GRAPH, "nodes", 0, 1, 4, 0], "nudge", None, 4]),
    "operand is missing": ("counter_portable.pvk", ["json", [*_GRAPH, "nodes", 0, 1, 0], "nudge", None, 6]),
    "output is a list": ("linear_portable.pvk", ["json", [*_GRAPH, "outputs", 0], "copy", [*_GRAPH, "nodes", 0, 2], 6]),
    "real result of a complex number": (
        "linear_portable.pvk",
        ["json", [*_GRAPH, "nodes", 1, 1, 4], "set", {"complex": [0, 1]}, 0],
    ),
    "size that a call computes is stated as known": (
        "counted.pvk",
        ["json", ["methods", "forward", "symbols", 1, 3], "delete", None, 7],
    ),
    "size read from a tensor of that size": (
        "counted.pvk",
        ["json", [*_GRAPH, "sources", 0, 2], "set", None, 7],
    ),
    "constant of another size": (
        "linear_relu.pvk",
        ["json", ["methods", "forward", "values", 1, 2, 0], "nudge", None, 1],
    ),
    "product of bytes and floats": ("linear_portable.pte", ["word", 1092, 0]),
    "bias of bytes": ("linear_relu_inline.pte", ["word", 944, 65536]),
    "factor of a sum is missing": ("branch.pte", ["nudge", 788, -1]),
}  # fmt: skip


@pytest.mark.device
@pytest.mark.parametrize("case", FOUND)
def test_found_before(case: str) -> None:
    name, change = FOUND[case]
    seed = next(seed for seed in seeds() if seed.name == name)
    assert check(run, seed, apply(seed.data, [change])) == "FileFormatError"


@pytest.mark.device
def test_an_overload_for_numbers_alone() -> None:
    """torch knows "aten::mul" without an overload's name, its dispatcher does not."""
    seed = next(seed for seed in seeds() if seed.name == "counter_portable.pte")
    assert check(run, seed, apply(seed.data, [["word", 388, 127]])) == "FallbackError"


@pytest.mark.device
def test_a_condition_that_is_stated_as_an_integer() -> None:
    """It becomes one. The shader with it did not compile."""
    seed = next(seed for seed in seeds() if seed.name == "counted.pvk")
    change = ["json", ["methods", "forward", "values", 5, 1], "set", "int64", 2]
    assert check(run, seed, apply(seed.data, [change])) == "read"


@pytest.mark.slow
def test_many_changed_files() -> None:
    found = outcomes(1000, 1000, runs=False)
    assert found["read"] > 75 and found["FileFormatError"] > 350


@pytest.mark.slow
@pytest.mark.device
def test_changed_files_on_the_device() -> None:
    assert outcomes(5000, 100, runs=True)["read"] > 4


@pytest.mark.slow
def test_changed_models() -> None:
    """What a saved model says of its graphs and of its tokenizer."""
    (seed,) = (seed for seed in seeds() if seed.name == "model.pvk")
    content = description(seed.data)
    places = [["about", *place] for place in _places(content["about"])]
    found: Counter[str] = Counter()
    for number in range(40):
        change = _draw_item(random.Random(f"model {number}"), places)
        found[check(parse, seed, apply(seed.data, [change]))] += 1
    assert found["read"] > 4 and found["FileFormatError"] > 4, found
