"""`purevk bisect` names exactly the defect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import purevk
from purevk import knobs
from purevk.checking.bisect import smallest
from purevk.cli import main
from purevk.errors import PurevkError
from purevk.graph.context import default_context
from purevk.ops import registry
from purevk.ops.registry import Pointwise, Rewrite
from purevk.passes import pipeline
from tests.checking.harness import breaking, redefined
from tests.harness import DATA

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.device


class Chain(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        z = torch.tanh(x) * y
        z = torch.relu(z - y)
        return torch.abs(z).sum(1) - torch.exp(x).amax(1)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bisect") / "chain.pvk"
    x = torch.randn(4, 5)
    purevk.compile(Chain(), (x, x)).save(path)
    return path


@pytest.fixture
def bisect(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main(["bisect", *map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("name", ["branch", "counter", "dynamic_views", "topk"])
def test_files_that_are_right(bisect: Any, name: str) -> None:
    code, made = bisect(DATA / f"{name}.pte")
    assert code == 0 and made["kind"] == "none" and not made["unchecked"]
    assert [trial["difference"] for trial in made["trials"]] == ["", ""]


def test_a_wrong_operator(bisect: Any, chain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with redefined("aten.tanh.default", Pointwise("x * 0.9")):
        code, made = bisect(chain)
        assert code == 1 and made["kind"] == "node"
        assert len(made["nodes"]) == 1 and "aten.tanh.default" in made["nodes"][0]
        assert not made["passes"] and not made["features"]
        assert main(["bisect", str(chain)]) == 1
    shown = capsys.readouterr().out
    assert "The culprit is an operator" in shown and "aten.tanh.default" in shown


def test_a_wrong_pass(bisect: Any, chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass breaks a subtraction that a ReLU follows: the smallest run of nodes is these two."""
    broken = breaking(pipeline.share_cats, "aten.sub.Tensor", "aten.relu.default")
    monkeypatch.setattr(pipeline, "share_cats", broken)
    code, made = bisect(chain)
    assert code == 1 and made["kind"] == "pass" and made["passes"] == ["share_cats"]
    operators = [text.split(" = ")[1].partition("(")[0] for text in made["nodes"]]
    assert operators == ["aten.sub.Tensor", "aten.relu.default"] and made["first"] == 2
    assert made["trials"][0]["difference"] == "" != made["trials"][1]["difference"]


def test_a_device_feature(bisect: Any, chain: Path) -> None:
    """An operator that is wrong where the device has a feature."""
    feature = "storage_8bit"
    assert default_context().traits.has(feature)
    good = registry.find("aten.exp.default")
    assert good is not None

    def expand(builder: Any, node: Any) -> Any:
        x = node.args[0]
        if builder.traits.has(feature):
            x = builder.emit("aten.abs.default", x)
        return builder.emit(
            "aten.exp2.default", builder.emit("aten.mul.Tensor", x, 1.4426950408889634)
        )

    with redefined("aten.exp.default", Rewrite(expand)):
        code, made = bisect(chain)
    assert code == 1 and made["kind"] == "node" and "aten.exp.default" in made["nodes"][0]
    assert made["features"] == [feature]


def test_the_smallest_set() -> None:
    names = [f"n{number}" for number in range(20)]
    for culprits in ({"n0"}, {"n19"}, {"n3", "n4"}, {"n0", "n11", "n19"}, set(names)):
        found = smallest(names, lambda tried: culprits <= set(tried))
        assert set(found) == culprits
    assert smallest(names, lambda tried: False) == ()
    assert smallest([], lambda tried: True) == ()


# -- passes that may be left out -------------------------------------------------------------------
def test_unknown_passes_are_refused(monkeypatch: pytest.MonkeyPatch, chain: Path) -> None:
    monkeypatch.setenv(knobs.SKIP_PASSES.name, "share_cats,expand")
    with pytest.raises(PurevkError, match="expand"):
        purevk.load(chain)


def test_optional_passes_are_those_of_the_pipeline() -> None:
    names = {each.__name__ for each in pipeline.passes(default_context().traits)}
    assert set(pipeline.OPTIONAL) <= names


@pytest.mark.parametrize(
    "names",
    [pipeline.OPTIONAL, *((name,) for name in pipeline.OPTIONAL)],
    ids=lambda names: names[0] if len(names) == 1 else "all",
)
def test_programs_run_without_optional_passes(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    from tests.ops.harness import context
    from tests.passes.harness import random_graph

    for seed in range(3 if len(names) == 1 else 12):
        graph, inputs = random_graph(seed)
        results = []
        for skipped in ((), names):
            monkeypatch.setenv(knobs.SKIP_PASSES.name, ",".join(skipped))
            with purevk.Program("test", {"forward": lambda sizes: graph}, context()) as program:
                results.append(program.forward(*inputs))
        for one, two in zip(*results):
            torch.testing.assert_close(one, two)
