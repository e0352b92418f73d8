"""Where the nodes of a graph stand in the user's code."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import purevk
from purevk.frontends.source_lines import line_of

HERE = Path(__file__).name


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y = torch.cumsum(y, 1)
        return y.relu() + 1


def line(function: Any, text: str) -> str:
    """The line of a function's source that has a text, as purevk writes it."""
    lines, first = inspect.getsourcelines(function)
    (at,) = [number for number, each in enumerate(lines, first) if text in each]
    return f"{HERE}:{at}, in {function.__name__}"


def nodes(program: purevk.Program) -> list[dict[str, Any]]:
    found = program.graph().data()["segments"]
    return [node for segment in found for node in segment["nodes"]]


@pytest.mark.device
def test_nodes_know_their_lines(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    path = tmp_path / "model.pvk"
    with purevk.compile(Model(), (x,)) as program:
        made = nodes(program)
        program.save(path)
    assert all(node["line"] for node in made)
    lines = {node["source"]: node["line"] for node in made}
    assert lines["cumsum"].endswith(line(Model.forward, "cumsum"))
    assert lines["inner.linear"].endswith(line(Model.forward, "self.inner(x)"))
    with purevk.load(path) as program:
        assert [node["line"] for node in nodes(program)] == [node["line"] for node in made]


@pytest.mark.device
def test_errors_name_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from purevk.frontends.torch import nodes as module

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise purevk.UnsupportedProgramError("no", where="the graph")

    monkeypatch.setattr(module.NodeReader, "emit", refuse)
    with pytest.raises(purevk.UnsupportedProgramError) as caught:
        purevk.compile(Model(), (torch.randn(2, 3),))
    assert caught.value.where.startswith("the graph, inner.")
    assert line(Model.forward, "self.inner(x)") in caught.value.where
    assert str(caught.value).count(HERE) == 1


@pytest.mark.device
def test_errors_of_passes_name_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from purevk.passes import pipeline

    def refuse(graph: Any, *_: Any, **__: Any) -> Any:
        node = next(node for node in graph.nodes if "cumsum" in node.op)
        raise purevk.GraphError("no", where=node.source)

    monkeypatch.setattr(pipeline, "optimize", refuse)
    with pytest.raises(purevk.GraphError) as caught:
        purevk.compile(Model(), (torch.randn(2, 3),))
    assert caught.value.where.startswith("cumsum (")
    assert line(Model.forward, "cumsum") in caught.value.where


@pytest.mark.parametrize(
    ("trace", "wanted"),
    [
        ("", ""),
        ("no frames", ""),
        ('  File "/a/b/model.py", line 3, in forward\n    return x', "model.py:3, in forward"),
        (
            '  File "/a/model.py", line 3, in forward\n'
            '  File "/v/site-packages/torch/nn/modules/linear.py", line 134, in forward',
            "model.py:3, in forward",
        ),
        (
            '  File "/v/site-packages/transformers/models/bert.py", line 7, in forward',
            "transformers/models/bert.py:7, in forward",
        ),
        (
            '  File "/v/site-packages/torch/nn/linear.py", line 1, in f',
            "torch/nn/linear.py:1, in f",
        ),
        ('  File "<stdin>", line 4, in forward', "<stdin>:4, in forward"),
    ],
)
def test_the_line_of_a_trace(trace: str, wanted: str) -> None:
    assert line_of(trace) == wanted


def test_torch_in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/opt/t/torch/__init__.py")
    frames = ('/a/b/own.py", line 3, in forward', '/opt/t/torch/nn/linear.py", line 1, in forward')
    assert line_of("\n".join(f'  File "{frame}' for frame in frames)) == "own.py:3, in forward"
