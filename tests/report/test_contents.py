"""The data of pages, from lowered methods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from purevk.graph.report import call_buffers
from purevk.report.contents import MethodParts, contents, memory_picture
from purevk.report.timings import Timing
from purevk.schedule.plan import Plan
from tests.report.harness import NO_DEVICE, lowered

NAMES = ("branch", "dynamic_views", "gather", "linear_relu", "topk", "two_methods")


def nodes_of(drawing: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for segment in drawing["segments"]:
        for node in segment["nodes"]:
            yield segment["on"], node
            for inner in node["graphs"]:
                yield from nodes_of(inner)


def dispatches_of(plan: Plan) -> int:
    return sum(len(each.dispatches) + len(each.once) for each in plan.nested())


@pytest.mark.parametrize("name", NAMES)
def test_every_dispatch_is_there_once(name: str) -> None:
    parts = lowered(name)
    data = json.loads(json.dumps(contents(name, parts, NO_DEVICE, {}), allow_nan=False))
    assert [each["name"] for each in data["methods"]] == [each.name for each in parts]
    for method, part in zip(data["methods"], parts):
        found = [each for _, node in nodes_of(method["graph"]) for each in node["dispatches"]]
        assert len(found) == dispatches_of(part.plan) > 0
        steps = [
            each["step"]
            for segment in method["graph"]["segments"]
            if segment["on"] != "load"
            for node in segment["nodes"]
            for each in node["dispatches"]
        ]
        assert steps == list(range(len(part.plan.dispatches)))
        for each in found:
            kernel = data["kernels"][each["kernel"]]
            assert kernel["files"][0][0] == kernel["template"]
            assert all(key in data["files"] for _, key in kernel["files"])
    used = {
        each["kernel"]
        for method in data["methods"]
        for _, node in nodes_of(method["graph"])
        for each in node["dispatches"]
    }
    assert used == set(range(len(data["kernels"])))


def test_kernels_are_those_of_their_dispatches() -> None:
    (part,) = lowered("linear_relu")
    data = contents("linear_relu", [part], NO_DEVICE, {})
    (node,) = [each for on, each in nodes_of(data["methods"][0]["graph"]) if on == "gpu"]
    spec = part.plan.dispatches[0].kernel
    kernel = data["kernels"][node["dispatches"][0]["kernel"]]
    assert kernel["template"] == spec.template
    assert spec.template.startswith("matmul/")
    assert [tuple(pair) for pair in kernel["macros"]] == list(spec.macros)
    assert [(number, value) for number, _, value in kernel["constants"]] == list(spec.constants)
    assert all(name for _, name, _ in kernel["constants"])
    assert node["path"] == ["delegate 0"] and node["operators"] == ["matmul", "relu"]


def test_sizes_of_a_call_count() -> None:
    (part,) = lowered("dynamic_views")
    whole = contents("", [part], NO_DEVICE, {})["methods"][0]
    small = MethodParts(part.name, part.graph, part.plan, part.guards, {"s0": 2})
    data = contents("", [small], NO_DEVICE, {})["methods"][0]

    def moved(method: dict[str, Any]) -> int:
        return sum(node["bytes"] for _, node in nodes_of(method["graph"]))

    assert moved(data) * 8 == moved(whole)  # 2 of 16 rows
    assert data["sizes"]["s0"] == 2 and whole["sizes"]["s0"] == 16
    assert {"text": "s1 == 8", "words": "s1 is 8"} in data["guards"]
    assert data["symbols"]["s0"] == {"min": 1, "max": 16, "origin": "dim 1 of input_0"}


def test_times_stand_at_their_dispatches() -> None:
    (part,) = lowered("dynamic_views")
    timings = [
        Timing("", "", 0.5**n, 1, 1, dispatch=dispatch)
        for n, dispatch in enumerate(part.plan.dispatches)
    ]
    timed = MethodParts(part.name, part.graph, part.plan, part.guards, {}, timings, 3.0)
    method = contents("", [timed], NO_DEVICE, {})["methods"][0]
    found = [each for _, node in nodes_of(method["graph"]) for each in node["dispatches"]]
    assert [each["seconds"] for each in found] == [each.seconds for each in timings]
    assert method["timed"] and method["whole_call"] == 3.0


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("name", ["dynamic_views", "gather", "topk"])
def test_tensors_in_memory_do_not_overlap(name: str, unified: bool) -> None:
    (part,) = lowered(name)
    picture = memory_picture(part.plan, unified)
    blocks = picture["blocks"]
    assert {each["name"] for each in blocks} == {
        each.key.name for each in call_buffers(part.plan, unified).blocks
    }
    for at, one in enumerate(blocks):
        assert 0 <= one["first"] <= one["last"] <= picture["steps"]
        assert one["offset"] + one["bytes"] <= picture["arenas"][one["arena"]]
        for other in blocks[at + 1 :]:
            in_time = one["first"] <= other["last"] and other["first"] <= one["last"]
            in_space = (
                one["arena"] == other["arena"]
                and one["offset"] < other["offset"] + other["bytes"]
                and other["offset"] < one["offset"] + one["bytes"]
            )
            assert not (in_time and in_space), (one, other)
    assert sum(picture["arenas"]) == picture["planned"]


def test_files_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    from purevk.report.contents import _Kernels

    kernels = _Kernels({})
    assert [kernels._file("a", text) for text in ("1", "2", "1", "3")] == [
        "a",
        "a (2)",
        "a",
        "a (3)",
    ]
    assert kernels.files == {"a": "1", "a (2)": "2", "a (3)": "3"}
