"""What programs show in a browser."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import api
from purevk.cache import Cache
from purevk.graph.context import Context
from purevk.graph.executable import Executable
from purevk.graph.unbacked import Replan
from purevk.passes import placement
from purevk.program import pages
from tests.harness import DATA
from tests.models.zoo import CASES

pytestmark = pytest.mark.device


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """A device with an empty cache of its own; everything on it must be gone when it is closed."""
    with Context(api.open_device(), Cache(tmp_path / "cache")) as made:
        yield made
    assert made.device.live_objects() == {}


def contents_of(text: str) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(data)


def test_a_page_of_a_program(context: Context) -> None:
    x = np.random.default_rng(3).standard_normal((2, 5), np.float32)
    with purevk.load(DATA / "linear_relu.pte", context=context) as program:
        (plain,) = contents_of(program.report_html())["methods"]
        found = contents_of(program.report_html(x))
    (timed,) = found["methods"]
    assert not plain["timed"] and timed["timed"] and timed["whole_call"] > 0
    assert found["device"]["name"] == context.device.name
    assert all(kernel["spirv"] for kernel in found["kernels"])
    assert timed["memory"]["weights"] == plain["memory"]["weights"] > 0


def test_nodes_on_the_cpu_have_times(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    refusal = placement.refusal

    def refuse(node: Any, traits: Any) -> str | None:
        return "by the test" if node.op.startswith("aten.topk") else refusal(node, traits)

    monkeypatch.setattr(placement, "refusal", refuse)

    class Best(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return (x * 2).topk(3).values + 1

    x = torch.rand(4, 50)
    with purevk.compile(Best(), (x,)) as program:
        found = contents_of(program.report_html(x))
        (plain,) = contents_of(program.report_html())["methods"]
    segments = [each for each in found["methods"][0]["graph"]["segments"] if each["on"] != "load"]
    times = {each["on"]: [node["seconds"] for node in each["nodes"]] for each in segments}
    assert times["gpu"] == [None] and 0 < times["cpu"][0] < found["methods"][0]["whole_call"]
    assert not any(node["seconds"] for each in plain["graph"]["segments"] for node in each["nodes"])


def test_memory_is_that_of_the_program(context: Context) -> None:
    for name in ("dynamic_views", "gather", "counter"):
        with purevk.load(DATA / f"{name}.pte", context=context) as program:
            (method,) = contents_of(program.report_html())["methods"]
            memory = {key: method["memory"][key] for key in vars(program.memory)}
            assert memory == vars(program.memory), name
            (own,) = program.method("forward").executable.call_memories
            offsets = {key.name: place for key, place in own.plan.offsets.items()}
            assert offsets == {
                each["name"]: (each["arena"], each["offset"]) for each in method["memory"]["blocks"]
            }


def test_memory_without_notes_of_indices(context: Context) -> None:
    """Kernels tell of wrong indices in a buffer of the host."""
    torch = pytest.importorskip("torch")

    class Taken(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any, index: Any) -> Any:
            return x[index + 1] * 2

    given = torch.randn(9, 4), torch.tensor([0, 5, 3])
    with purevk.compile(Taken(), given, context=context) as program:
        executable = program.method("forward").executable
        assert executable.plan.checks
        (method,) = contents_of(program.report_html())["methods"]
        memory = {key: method["memory"][key] for key in vars(program.memory)}
        assert memory == vars(program.memory)


def test_states_are_as_before(context: Context) -> None:
    with purevk.load(DATA / "counter.pte", context=context) as program:
        inputs = [np.ones([int(s) for s in each.sizes], each.dtype) for each in program.inputs]
        program(*inputs)
        before = {name: array.copy() for name, array in program.state.items()}
        assert any(array.any() for array in before.values())
        (method,) = contents_of(program.report_html(*inputs))["methods"]
        assert method["timed"]
        assert {name: array.tolist() for name, array in program.state.items()} == {
            name: array.tolist() for name, array in before.items()
        }


def test_generators_are_as_before() -> None:
    torch = pytest.importorskip("torch")

    class Noise(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + torch.rand_like(x)

    x = torch.zeros(8)
    with purevk.compile(Noise(), (x,)) as program:
        results = []
        for times in (False, True):
            torch.manual_seed(5)
            first = program(x)
            if times:
                program.report_html(x)
            results.append((first, program(x)))
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_tensors_are_named_as_in_the_model(context: Context) -> None:
    torch = pytest.importorskip("torch")
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()]
    module = torch.nn.Sequential(torch.nn.Sequential(*layers), torch.nn.Conv2d(8, 4, 1)).eval()
    with purevk.compile(module, (torch.rand(1, 3, 9, 9),), context=context) as program:
        (method,) = contents_of(program.report_html())["methods"]
    memory = method["memory"]
    weights = {each["label"] for each in memory["weight_tensors"]}
    assert {"1.weight", "1.bias", "0.0.weight, folded"} <= weights
    assert all(re.match(r"[01]\.", label) for label in weights), weights
    assert "0: conv2d + relu" in {each["label"] for each in memory["blocks"]}
    assert "input" in {each["label"] for each in memory["buffers"]}


def test_sub_graphs_have_times(context: Context) -> None:
    torch = pytest.importorskip("torch")

    class Branch(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cond(x.sum() > 0, lambda x: x.cumsum(0), lambda x: x.cumsum(1), (x,))

    module, x = Branch(), torch.ones(4, 4)
    with purevk.compile(module, (x,), context=context) as program:
        (method,) = contents_of(program.report_html(x))["methods"]
    nodes = [node for segment in method["graph"]["segments"] for node in segment["nodes"]]
    (branch,) = (node for node in nodes if node["graphs"])
    taken, other = (
        [
            (each["runs"], each["seconds"])
            for segment in graph["segments"]
            for node in segment["nodes"]
            for each in node["dispatches"]
        ]
        for graph in branch["graphs"]
    )
    assert taken and all(runs == 1 and seconds > 0 for runs, seconds in taken)
    assert other and all(runs == 0 and seconds is None for runs, seconds in other)


def test_a_call_that_needs_another_lowering_is_not_timed(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replan(*args: Any, **options: Any) -> None:
        raise Replan({}, False)

    monkeypatch.setattr(pages, "time_dispatches", replan)
    with purevk.load(DATA / "linear_relu.pte", context=context) as program:
        (method,) = contents_of(program.report_html(np.ones((2, 5), np.float32)))["methods"]
    assert not method["timed"] and "another lowering" in method["why_untimed"]


def test_a_page_of_a_planned_program() -> None:
    made = purevk.plan(DATA / "dynamic_views.pte", device="typical")
    (method,) = contents_of(made.report_html())["methods"]
    assert not method["timed"] and method["memory"]["planned"] == made.memory.planned
    assert "s1 is 8" in [each["words"] for each in method["guards"]]
    moved = [node["bytes"] for segment in method["graph"]["segments"] for node in segment["nodes"]]
    assert moved == [cost.nbytes for cost in made.costs()]


def test_sizes_of_the_call_are_those_of_the_page(context: Context) -> None:
    with purevk.load(DATA / "dynamic_views.pte", context=context) as program:
        found = contents_of(program.report_html(np.zeros((1, 3, 8), np.float32)))
    assert found["methods"][0]["sizes"] == {"s0": 3, "s1": 8}


def test_what_is_refused(context: Context) -> None:
    with purevk.load(DATA / "linear_relu.pte", context=context) as program:
        with pytest.raises(purevk.InputError, match="there is no method 'other'"):
            program.report_html(method="other")
        with pytest.raises(purevk.InputError):
            program.report_html(np.zeros(3, np.float32))
    with pytest.raises(purevk.PurevkError, match="closed"):
        program.report_html()


def framed_page(text: str) -> str:
    """The page in the frame of a notebook."""
    (source,) = re.findall("<iframe srcdoc='([^']*)'", text)
    return html.unescape(source)


def test_a_notebook_shows_the_page(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it's <img src=x>.pte"
    path.write_bytes((DATA / "linear_relu.pte").read_bytes())
    with purevk.load(path, context=context) as program:
        monkeypatch.setattr(pages, "limits_for", None)  # nothing is measured, and nothing runs
        monkeypatch.setattr(Executable, "run", None)
        text = program._repr_html_()
        page = program.report_html()
    assert contents_of(framed_page(text)) == contents_of(page)
    summary = text[: text.index("<iframe")]
    assert "float32[2, 5]" in summary and "<th>dispatches</th><td>1</td>" in summary
    assert "&lt;img src=x&gt;.pte" in summary and "<img" not in text
    assert len(summary) < 2000 and len(text) < len(page) + 5000
    assert "closed" in program._repr_html_() and "<iframe" not in program._repr_html_()


def test_a_page_that_is_too_large_for_a_notebook(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_MOST_IN_NOTEBOOK", 1 << 16)
    with purevk.load(DATA / "linear_relu.pte", context=context) as program:
        text = program._repr_html_()
    assert "<iframe" not in text and "float32[2, 5]" in text and len(text) < 2000
    assert "program.report_html()" in text and "KiB are too much for a notebook" in text


@pytest.mark.slow
@pytest.mark.export
def test_a_page_of_mobilenet_is_small() -> None:
    built = CASES["mobilenet_v2"].build()
    with purevk.compile(built.module, built.inputs) as program:
        text = program.report_html(*built.inputs)
        shown = program._repr_html_()
    assert max(len(each.encode()) for each in (text, shown)) < 2 << 20
    (method,) = contents_of(text)["methods"]
    paths = {
        tuple(node["path"])
        for segment in method["graph"]["segments"]
        if segment["on"] == "gpu"
        for node in segment["nodes"]
    }
    assert ("features", "3") in paths and ("features", "7", "conv", "1") in paths
