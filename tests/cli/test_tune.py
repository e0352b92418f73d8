"""`purevk tune`: what was measured to be the fastest runs from then on, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import purevk
from purevk import api, knobs
from purevk.cli import tune
from purevk.errors import FileFormatError, PurevkError
from purevk.graph.context import Context
from purevk.graph.tuned import entry_name
from purevk.lower.gpu_kernels import Problem, TileBounds, Vector
from purevk.report import timings, words
from purevk.tuning import question

pytestmark = pytest.mark.device


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(33, 70), torch.nn.Linear(70, 12)

    def forward(self, x):
        return self.second(self.first(x).relu())


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(41, 33, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def path(model: Model, x: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tune") / "model.pvk"
    with purevk.compile(model, (x,)) as program:
        program.save(path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: None) -> None:
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "cache"))


def kernels(path: Path) -> list[tuple[Any, ...]]:
    """The templates and macros that the model runs in a new context."""
    with Context(api.open_device(None)) as context, purevk.load(path, context=context) as program:
        plan = program.method("forward").executable.plan
        return [(each.kernel.template, each.kernel.macros) for each in plan.dispatches]


def result(path: Path, x: torch.Tensor) -> torch.Tensor:
    with Context(api.open_device(None)) as context, purevk.load(path, context=context) as program:
        return program.forward(x)


@pytest.fixture
def others_are_faster(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Times of dispatches are replaced: the default kernels take a second, all others 0.1."""
    default = kernels(path)

    def timed(executable: Any, *args: Any) -> list[timings.Timing]:
        made = [(each.kernel.template, each.kernel.macros) for each in executable.plan.dispatches]
        seconds = [1.0 if one == two else 0.1 for one, two in zip(made, default, strict=True)]
        return [
            timings.Timing("", template, s, 0, 0, node=node)
            for (template, _), s, node in zip(made, seconds, executable.plan.nodes_of)
        ]

    monkeypatch.setattr(tune, "time_dispatches", timed)


def test_the_times_are_those_of_the_device(cli, path: Path, model: Model, x: torch.Tensor) -> None:
    found = cli("tune", path, "--candidates", "2", "--json").json
    assert len(found["problems"]) == 2 and found["not_measured"] == []
    for row in found["problems"]:
        assert row["candidates"] == 2
        assert 0 < row["best_seconds"] <= row["default_seconds"] < 1
    assert found["before_seconds"] > 0 and found["after_seconds"] > 0
    torch.testing.assert_close(result(path, x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("others_are_faster")
def test_what_is_faster_runs_from_then_on(
    cli, path: Path, model: Model, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = kernels(path)
    found = cli("tune", path, "--candidates", "3", "--json").json
    assert found["kept"] == 2 and found["why"] == ""
    assert (found["before_seconds"], found["after_seconds"]) == (2.0, pytest.approx(0.2))
    tuned = kernels(path)
    assert len(tuned) == len(default) and all(a != b for a, b in zip(tuned, default))
    torch.testing.assert_close(result(path, x), model(x), rtol=1e-4, atol=1e-5)
    monkeypatch.setenv(knobs.TUNED.name, "0")
    assert kernels(path) == default
    monkeypatch.delenv(knobs.TUNED.name)
    assert kernels(path) == tuned
    text = cli("tune", path, "--candidates", "2").out
    assert "2 kernels kept in the cache" in text and "Registers" in text


@pytest.mark.usefixtures("others_are_faster")
def test_what_is_slower_again_is_forgotten(
    cli, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = kernels(path)
    assert cli("tune", path, "--candidates", "2", "--json").json["kept"] == 2
    monkeypatch.setattr(
        tune,
        "time_dispatches",
        lambda executable, *args: [
            timings.Timing("", "", 1.0, 0, 0, node=node) for node in executable.plan.nodes_of
        ],
    )
    assert cli("tune", path, "--candidates", "2", "--json").json["kept"] == 0
    assert kernels(path) == default


@pytest.mark.usefixtures("others_are_faster")
@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_other_results_are_not_kept(
    cli, path: Path, monkeypatch: pytest.MonkeyPatch, error: float
) -> None:
    default = kernels(path)
    monkeypatch.setattr(tune, "_error", lambda got, expected: error)
    found = cli("tune", path, "--candidates", "2", "--json").json
    assert found["kept"] == 0 and "result 0 differs" in found["why"]
    assert kernels(path) == default


@pytest.mark.usefixtures("others_are_faster")
def test_a_candidate_that_fails_is_left_out(
    cli, path: Path, model: Model, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rounds = tune._run, []

    def failing(*args: Any) -> tune.Round:
        rounds.append(1)
        if len(rounds) == 2:
            raise PurevkError("no pipeline")
        return run(*args)

    monkeypatch.setattr(tune, "_run", failing)
    found = cli("tune", path, "--candidates", "3", "--json").json
    assert found["failed"] == ["PurevkError: no pipeline"] and found["kept"] == 2
    torch.testing.assert_close(result(path, x), model(x), rtol=1e-4, atol=1e-5)
    rounds[:] = [1]
    assert "no pipeline" in cli("tune", path).err  # the default kernels fail


@pytest.mark.parametrize("answer", ["Registers()", 7, None, ["x"]], ids=str)
def test_a_damaged_entry_changes_nothing(cli, path: Path, answer: Any) -> None:
    default = kernels(path)
    problems = [
        row["problem"] for row in cli("tune", path, "--candidates", "1", "--json").json["problems"]
    ]
    for value in (dict.fromkeys(problems, answer), [problems], "text"):
        with Context(api.open_device(None)) as context:
            context.cache.put_tuning(context.kernels.device_key, entry_name(), value)
        assert kernels(path) == default


@pytest.mark.usefixtures("others_are_faster")
def test_an_answer_is_for_one_version_and_driver(
    cli, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = kernels(path)
    assert cli("tune", path, "--candidates", "2", "--json").json["kept"] == 2
    assert kernels(path) != default
    with monkeypatch.context() as patch:
        patch.setattr(purevk, "__version__", "0.0.0")
        assert kernels(path) == default
    store = "purevk.graph.kernels.KernelStore.device_key"
    monkeypatch.setattr(store, property(lambda self: "another driver"))
    assert kernels(path) == default


@pytest.mark.usefixtures("others_are_faster")
def test_a_bundle_holds_the_answers(
    cli, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("tune", path, "--candidates", "2", "--json").json["kept"] == 2
    tuned = kernels(path)
    bundle = tmp_path / "kernels.zip"
    assert cli("warmup", path, "--bundle", bundle).code == 0
    monkeypatch.setenv(knobs.SHADERC.name, "/nonexistent")
    for number, attach in enumerate((False, True)):
        monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / f"other{number}"))
        if not attach:
            assert cli("warmup", "--from-bundle", bundle, "--trust").code == 0
            assert kernels(path) == tuned
            continue
        with Context(api.open_device(None)) as context:
            context.cache.attach_bundle(bundle, trust=True)
            with purevk.load(path, context=context) as program:
                plan = program.method("forward").executable.plan
                made = [(each.kernel.template, each.kernel.macros) for each in plan.dispatches]
                assert made == tuned


def test_damaged_answers_in_a_bundle_are_ignored(cli, path: Path, tmp_path: Path) -> None:
    import zipfile

    from purevk.cache import Cache
    from purevk.shaders.cache_entry import pack
    from purevk.shaders.source import text_hash

    digest, meta = text_hash(json.dumps(["a", "b"])), {"device": "a", "name": "b"}
    bundle = tmp_path / "kernels.zip"
    assert cli("warmup", path, "--bundle", bundle).code == 0
    contents = (
        b"no entry",
        pack(digest, b"{", meta),
        pack(digest, b"[" * 100_000, meta),
        pack(digest, b"1", {"device": "a", "name": "c"}),
    )
    for number, content in enumerate(contents):
        damaged = tmp_path / f"damaged{number}.zip"
        with zipfile.ZipFile(bundle) as source, zipfile.ZipFile(damaged, "w") as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
            target.writestr(f"tuning/{digest}.pvk", content)
        cache = Cache(None)
        with pytest.raises(FileFormatError, match="damaged entry"):
            cache.import_bundle(damaged, trust=True)
        assert cache.attach_bundle(damaged, trust=True) > 0
        assert cache.get_tuning("a", "b") is None


def test_what_people_read() -> None:
    asked = question("matmul", Problem(196, 1024, 256, half=True, tiles=TileBounds(196, 1024, 256)))
    assert words.problem_line(asked) == "matmul 196 x 1024 x 256, half"
    asked = question("matmul", Problem(196, 64, 576, 2, window=True))
    assert words.problem_line(asked) == "convolution 2 of 196 x 64 x 576"
    assert words.problem_line("depthwise: (8, 7, 7)") == "depthwise: (8, 7, 7)"
    assert words.problem_line("nchw: NchwProblem(width=8)") == "nchw: (width=8)"
    assert words.kernel_line(str(Vector(1, 8, 16))) == "Vector(1, 8, 16, 1, 2)"
