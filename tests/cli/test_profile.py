"""`purevk profile`, and the traces that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import purevk
from purevk.cli import main
from purevk.cli.profile import next_steps, trace
from purevk.cli.stopwatch import Span
from purevk.report.lowered import user_operators
from purevk.report.timings import Timing

DATA = Path(__file__).parents[1] / "data" / "pte"


def events(made: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    return [
        each
        for each in made["traceEvents"]
        if each["ph"] == "X" and all(each[name] == value for name, value in wanted.items())
    ]


def disjoint(spans: list[dict[str, Any]]) -> bool:
    ends = 0.0
    for each in sorted(spans, key=lambda each: each["ts"]):
        if each["ts"] < ends - 1e-6:
            return False
        ends = each["ts"] + each["dur"]
    return True


def test_kernels_follow_one_another_from_their_submission_on() -> None:
    call = Span("call", 10.0, 10.9)
    spans = [
        Span("submit", 10.1, 10.2),
        Span("wait", 10.2, 10.4),
        Span("CPU operator", 10.4, 10.5),
        Span("submit", 10.5, 10.6),
        Span("wait", 10.6, 10.8),
    ]
    timings = [Timing("a", "a.comp", 0.1, 8, 1, 0), Timing("b", "b.comp", 0.05, 8, 1, 0)]
    timings += [Timing("c", "c.comp", 0.125, 8, 1, 2)]
    made = trace("GPU", "model: forward", call, spans, timings, [0, 2])
    kernels = events(made, pid=2, tid=2)
    assert [(each["name"], round(each["ts"]), round(each["dur"])) for each in kernels] == [
        ("a", 200_000, 100_000),
        ("b", 300_000, 50_000),
        ("c", 600_000, 125_000),
    ]
    queue = events(made, pid=2, tid=1)
    assert [(each["name"], round(each["dur"])) for each in queue] == [
        ("segment 0", 150_000),
        ("segment 2", 125_000),
    ]
    host = events(made, pid=1)
    assert host[0]["name"] == "model: forward" and round(host[0]["dur"]) == 900_000
    assert [each["name"] for each in host[1:]] == [span.name for span in spans]


@pytest.mark.device
@pytest.mark.parametrize("name", ["linear_relu.pte", "dynamic_views.pte", "branch.pte"])
def test_a_trace_has_the_kernels_of_the_profile(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    assert main(["profile", str(DATA / name), "--trace", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    made = json.loads(path.read_text(encoding="utf-8"))
    kernels, queue = events(made, pid=2, tid=2), events(made, pid=2, tid=1)
    whole = sum(each["dur"] for each in kernels) / 1e6
    assert whole == pytest.approx(data["profile"]["measured"], rel=0.02)
    assert whole == pytest.approx(sum(each["dur"] for each in queue) / 1e6)
    assert len(kernels) == sum(row["calls"] for row in data["profile"]["rows"])
    assert disjoint(kernels) and disjoint(queue)
    (call, *parts) = events(made, pid=1)
    assert {each["name"] for each in parts} >= {"submit", "wait"}
    assert all(each["ts"] >= 0 and each["ts"] + each["dur"] <= call["dur"] for each in parts)
    threads = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in made["traceEvents"]
        if each["name"] == "thread_name"
    }
    assert threads == {(1, 1): "call", (2, 1): "queue", (2, 2): "kernels"}


def loop_of_five(path: Path) -> None:
    """Saves a model with a loop that runs five times, and a softmax behind it."""
    torch = pytest.importorskip("torch")
    from torch._higher_order_ops.while_loop import while_loop

    import purevk

    class Loop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            _, found = while_loop(
                lambda n, y: n < 5,
                lambda n, y: (n + 1, self.linear(y)),
                (torch.tensor(0), x),
            )
            return found.softmax(-1)

    with purevk.compile(Loop().eval(), (torch.rand(4, 16),)) as program:
        program.save(path)


@pytest.mark.device
def test_kernels_in_a_loop_count_as_often_as_they_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, path = tmp_path / "loop.pvk", tmp_path / "trace.json"
    loop_of_five(file)
    assert main(["profile", str(file), "--trace", str(path), "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)["profile"]
    calls = {row["label"]: row["calls"] for row in profile["rows"]}
    assert calls["purevk.matmul"] == 5 and calls["purevk.softmax"] == 1
    assert calls["purevk.pointwise"] == 6 + 5  # the condition, and the counter in the body
    made = json.loads(path.read_text(encoding="utf-8"))
    kernels = events(made, pid=2, tid=2)
    names = [each["name"].partition(" ")[0] for each in kernels]
    assert names.count("purevk.matmul") == 5 and names[-1] == "purevk.softmax"
    assert sum(each["dur"] for each in kernels) / 1e6 == pytest.approx(profile["measured"])
    assert disjoint(kernels)


@pytest.mark.device
def test_operators_on_the_cpu_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")

    class Roots(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.eigvals(x + x).abs() + 1

    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Roots(), (torch.rand(4, 4),)), path)
    assert main(["profile", str(path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["profile"]["on_cpu"]
    assert row["label"].startswith("aten.linalg_eig")
    assert row["calls"] == 1 and row["seconds"] > 0
    assert main(["profile", str(path)]) == 0
    assert "on the CPU" in capsys.readouterr().out


@pytest.mark.device
def test_next_steps_fit_what_takes_the_time() -> None:
    row = {"bound": "memory", "seconds": 0.8}
    profile = {"error": None, "measured": 1.0, "roofline": 0.9, "rows": [row], "on_cpu": []}
    memory, more = next_steps(profile, 1.1, "m.pvk")
    assert memory.startswith("80% of the kernels' time is memory-bound")
    assert more.startswith("docs/help/performance.md")
    row["bound"], profile["roofline"] = "arithmetic", 0.3
    assert next_steps(profile, 1.1, "m.pvk")[0].startswith("`purevk tune m.pvk`")
    profile["roofline"] = 0.9
    assert "program.submit" in next_steps(profile, 5.0, "m.pvk")[0]
    profile["on_cpu"] = [{"calls": 2, "seconds": 4.0}]
    (cpu, _) = next_steps(profile, 5.0, "m.pvk")
    assert cpu.startswith("2 operators on the CPU, 4.00 s") and "purevk inspect m.pvk" in cpu
    profile["error"] = {"what": "no timestamps"}
    assert next_steps(profile, 5.0, "m.pvk") == []


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(DATA / "linear_relu.pte"), "--by", "dispatch"]) == 0
    shown = capsys.readouterr().out
    assert "profile, each dispatch alone" in shown and "of limit" in shown
    assert "docs/help/performance.md has more" in shown


@pytest.mark.device
@pytest.mark.parametrize("command", ["profile", "bench --runs 1 --profile", "tune --candidates 2"])
def test_inputs_that_numpy_has_no_dtype_for(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("PUREVK_CACHE", str(tmp_path / "cache"))
    path, module = tmp_path / "model.pt2", torch.nn.Linear(8, 8).bfloat16()
    torch.export.save(torch.export.export(module, (torch.rand(2, 8).bfloat16(),)), path)
    name, *options = command.split()
    assert main([name, str(path), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.device
def test_a_trace_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no folder" / "trace.json"
    assert main(["profile", str(DATA / "linear_relu.pte"), "--trace", str(path)]) == 1
    shown = capsys.readouterr().err
    assert "the trace cannot be written" in shown and "trace.json" in shown


@pytest.mark.parametrize(
    ("label", "operators"),
    [
        ("purevk.map @ blocks.0.roll_1", ["roll"]),
        ("purevk.pointwise @ gelu + sigmoid_2 + sigmoid_3", ["gelu", "sigmoid"]),
        (
            "purevk.matmul @ delegate 0#7 aten.linear.default + delegate 0#8 aten.relu.default",
            ["linear", "relu"],
        ),
        ("purevk.copy", []),
    ],
)
def test_operators_of_the_user_in_a_label(label: str, operators: list[str]) -> None:
    assert user_operators(label) == operators


@pytest.mark.device
def test_a_profile_names_operators_and_lines_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")

    class Rolled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.flip(torch.roll(x, 1, 0).cumsum(1), [0])

    path = str(tmp_path / "rolled.pvk")
    with purevk.compile(Rolled(), (torch.rand(3, 5),)) as program:
        program.save(path)
    assert main(["profile", path]) == 0
    shown = capsys.readouterr().out
    assert "cumsum (purevk.scan)" in shown and "(purevk.map)" in shown and "roll" in shown
    assert main(["profile", path, "--by", "dispatch", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["profile"]["rows"]
    assert all("test_profile.py:" in row["line"] for row in rows)
