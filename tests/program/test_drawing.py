"""The graph of a program as JSON, text and a Mermaid diagram."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import purevk
from purevk.graph.drawing import GraphDrawing, _escaped
from tests.harness import DATA

pytestmark = pytest.mark.device

# The lines of a flowchart that we write, after Mermaid's grammar: quoted labels hold no quote, ids
# are words.
_LABEL = r'"[^"<>]*(?:<br/>[^"<>]*)*"'
_LINES = (
    r"flowchart (TD|LR)",
    rf"subgraph \w+\[{_LABEL}\]",
    "end",
    rf"\w+(\[|\[\[|\(\[|\[\(){_LABEL}(\]|\]\]|\]\)|\)\])(:::\w+)?",
    rf"\w+ -->\|{_LABEL}\| \w+",
    r"\w+ -\.- \w+",
    r"classDef \w+ [\w:#,-]+",
)


def check_mermaid(text: str) -> None:
    """Each line is one of the grammar's, boxes close, and edges join nodes that there are."""
    open_boxes, nodes, ends = 0, set(), set()
    for line in map(str.strip, text.splitlines()):
        assert any(re.fullmatch(form, line) for form in _LINES), line
        open_boxes += line.startswith("subgraph") - (line == "end")
        assert open_boxes >= 0
        edge = re.fullmatch(r"(\w+) (?:-->\|.*\||-\.-) (\w+)", line)
        found = re.match(r"(?:subgraph )?(\w+)[\[(]", line)
        if edge:
            ends |= set(edge.groups())
        elif found:
            assert found[1] not in nodes, found[1]
            nodes.add(found[1])
    assert open_boxes == 0 and ends <= nodes


def _nodes(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [node for segment in data["segments"] for node in segment["nodes"]]


@pytest.mark.parametrize("path", sorted(DATA.glob("*.pte")), ids=lambda path: path.stem)
def test_every_program_can_be_drawn(path: Path) -> None:
    try:
        program = purevk.load(path)
    except purevk.PurevkError as error:
        pytest.skip(f"{path.name} cannot be loaded: {error.what}")
    with program:
        for name, method in program.methods.items():
            drawing = program.graph(name)
            data = json.loads(drawing.to_json())
            check_mermaid(drawing.to_mermaid())
            known = {
                each["id"]
                for each in (*data["inputs"], *data["outputs"], *data["states"], *_nodes(data))
            }
            assert all({edge["from"], edge["to"]} <= known for edge in data["edges"])
            calls = [
                node
                for segment in data["segments"]
                if segment["on"] == "gpu"
                for node in segment["nodes"]
            ]
            assert sum(len(node["kernels"]) for node in calls) == len(
                method.executable.plan.dispatches
            )
            assert drawing.to_text().startswith(f"method {name}")


def test_chains_and_segments_have_names(topk_on_the_cpu: Path) -> None:
    with purevk.load(topk_on_the_cpu) as program:
        data = program.graph().data()
        assert [segment["on"] for segment in data["segments"]] == ["gpu", "cpu", "gpu"]
        labels = {node["label"]: node for node in _nodes(data)}
        assert {"topk", "sigmoid"} < set(labels) and labels["topk"]["why"] == "refused by the test"
        (chain,) = set(labels) - {"topk", "sigmoid"}
        assert (
            chain == " + ".join(labels[chain]["operators"]) and len(labels[chain]["operators"]) > 1
        )
        text = program.graph().to_mermaid("LR")
        assert (
            text.startswith("flowchart LR")
            and "refused by the test" in text
            and "segment 2: on the CPU" in text
        )


def test_an_epilogue_is_part_of_its_kernel() -> None:
    with purevk.load(DATA / "linear_relu.pte") as program:
        data = program.graph().data()
    (node,) = [node for node in _nodes(data) if "relu" in node["operators"]]
    assert node["operators"][-1] == "relu" and len(node["operators"]) > 1
    assert node["flops"] and node["bytes"] and node["results"][0]["type"] == "float32[2,3]"


def test_a_prompt_shows_nodes_on_the_cpu(topk_on_the_cpu: Path) -> None:
    with purevk.load(topk_on_the_cpu) as program:
        assert repr(program).endswith(": forward; nodes on the CPU: 1>")
    assert repr(program).endswith(": forward; closed>")
    with purevk.load(DATA / "linear_relu.pte") as program:
        assert repr(program).endswith(": forward>")


def test_a_prompt_shows_what_it_is() -> None:
    with purevk.load(DATA / "linear_relu.pte") as program:
        shown = repr(program.graph())
    assert re.fullmatch(r"<graph of forward, \d+ nodes; print\(\) shows it>", shown)


def test_states_are_written() -> None:
    with purevk.load(DATA / "counter_portable.pte") as program:
        data = program.graph().data()
    (state,) = data["states"]
    assert any(edge["to"] == state["id"] and edge["type"] == "written" for edge in data["edges"])
    assert any(edge["from"] == state["id"] for edge in data["edges"])


@pytest.mark.slow
def test_control_flow_is_a_box_in_a_box() -> None:
    torch = pytest.importorskip("torch")

    class Loop(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            grown = torch._higher_order_ops.while_loop(
                lambda t: t.sum() < 100, lambda t: (t * 2 + 1,), (x,)
            )
            return grown[0].relu()

    with purevk.compile(Loop(), (torch.rand(3),)) as program:
        drawing: GraphDrawing = program.graph()
        (node,) = [node for node in _nodes(drawing.data()) if node["graphs"]]
        assert [graph["name"] for graph in node["graphs"]] and all(
            _nodes(graph) for graph in node["graphs"]
        )
        check_mermaid(drawing.to_mermaid())


def test_labels_are_escaped() -> None:
    assert _escaped('a"b<c>#`|\n&') == "a#34;b#60;c#62;#35;#96;#124; #38;"
