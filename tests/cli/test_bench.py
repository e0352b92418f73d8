"""`purevk bench`: the arithmetic of its tables, where time is counted, cold and warm loading."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import api, fallback
from purevk.cache import Cache
from purevk.cli import bench
from purevk.cli.stopwatch import Stopwatch
from purevk.graph import limits
from purevk.graph.context import Context
from purevk.graph.limits import DeviceLimits, device_limits
from purevk.progress import Steps
from purevk.report import timings
from purevk.report.timings import Timing, table


@pytest.mark.parametrize("count, at", [(1, 0), (2, 1), (20, 18), (21, 19), (100, 94), (1000, 949)])
def test_the_95th_percentile(count: int, at: int) -> None:
    """Against numpy's definition of the same."""
    values = np.random.default_rng(count).permutation(count).astype(float).tolist()
    assert bench.percentile(values, 95) == at == np.percentile(values, 95, method="inverted_cdf")


def test_a_profile_against_the_limits() -> None:
    timings = [
        Timing("matmul @ a", "matmul/matmul.comp", 2e-3, 1_000_000, 4_000_000_000),
        Timing("add @ b", "elementwise/pointwise.comp", 1e-3, 50_000_000, 1_000),
        Timing("matmul @ c", "matmul/matmul.comp", 1e-3, 1_000_000, 1_000_000_000),
        Timing("copy @ d", "elementwise/pointwise.comp", 1e-3, 0, 0),
    ]
    known = DeviceLimits(bytes_per_second=1e11, flops_per_second=4e12)
    matmul, add, copy = table(timings, "operator", known)
    assert (matmul["label"], matmul["calls"], matmul["seconds"], matmul["share"]) == (
        "matmul",
        2,
        3e-3,
        pytest.approx(0.6),
    )
    assert (
        matmul["flops_per_second"] == pytest.approx(5e9 / 3e-3) and matmul["bound"] == "arithmetic"
    )
    assert matmul["limit_share"] == pytest.approx((1e-3 + 0.25e-3) / 3e-3)
    assert add["bytes_per_second"] == pytest.approx(5e10) and add["limit_share"] == pytest.approx(
        0.5
    )
    assert add["bound"] == "memory"
    assert (
        copy["limit_share"] is None and copy["bound"] is None and copy["bytes_per_second"] is None
    )
    assert [row["label"] for row in table(timings, "template", known)] == [
        "matmul/matmul.comp",
        "elementwise/pointwise.comp",
    ]
    assert [row["calls"] for row in table(timings, "dispatch", known)] == [1, 1, 1, 1]
    assert table([], "operator", known) == []


def test_the_stopwatch_tells_device_and_fallback_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def wait(self, timeout: float | None = None) -> None:
            time.sleep(0.02)

    class Queue:
        def submit(self, commands: object) -> Slow:
            return Slow()

    def slow_run(*args: object) -> None:
        time.sleep(0.01)

    monkeypatch.setattr(fallback, "run", slow_run)
    queue = Queue()
    with Stopwatch(SimpleNamespace(queue=queue)) as watch:
        submission = queue.submit(None)
        time.sleep(0.05)  # the host's own work, not the device's
        submission.wait()
        fallback.run("aten.x", (), {}, (), "")
        assert 0.02 <= watch.device < 0.05 and 0.01 <= watch.fallback < 0.04
        watch.reset()
        assert watch.device == watch.fallback == 0
    assert fallback.run is slow_run and "submit" not in vars(queue)


@pytest.mark.device
def test_limits_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Context(api.open_device()) as context:
        first = device_limits(context)
        assert 1e8 < first.bytes_per_second < 1e14 and 1e8 < first.flops_per_second < 1e16
        monkeypatch.setattr(limits, "_copy_rate", lambda context: first.bytes_per_second * 2)
        monkeypatch.setattr(limits, "_fma_rate", lambda context: first.flops_per_second / 2)
        assert device_limits(context) == first
        again = device_limits(context, again=True)  # what was faster counts
        assert (
            again
            == DeviceLimits(first.bytes_per_second * 2, first.flops_per_second)
            == device_limits(context)
        )
        context.cache.put_tuning(
            context.kernels.device_key, limits._NAME, {"bytes_per_second": "fast"}
        )
        assert device_limits(context).bytes_per_second == first.bytes_per_second * 2
        assert context.device.live_objects().keys() <= {"PipelineCache"}


@pytest.mark.device
def test_calls_and_profile(cli, data: Path, unregister_topk) -> None:
    pytest.importorskip("torch")
    ran = cli(
        "bench",
        data / "topk.pte",
        "--runs",
        "5",
        "--no-load",
        "--profile",
        "--by",
        "dispatch",
        "--json",
    )
    assert ran.code == 0
    calls, profile = ran.json["calls"], ran.json["profile"]
    assert calls["runs"] == 5 and 0 < calls["min"] <= calls["median"] <= calls["p95"]
    assert min(calls["device"], calls["fallback"], calls["host"]) > 0
    assert calls["device"] + calls["fallback"] + calls["host"] == pytest.approx(
        calls["median"], rel=0.5
    )
    assert len(profile["rows"]) == ran.json["dispatches"] == 2
    assert sum(row["share"] for row in profile["rows"]) == pytest.approx(1.0)
    assert "cold" not in ran.json
    text = cli("bench", data / "topk.pte", "--runs", "2", "--no-load", "--profile").out
    assert "2 calls" in text and "GFLOP/s" in text and "limits measured on this device" in text


@pytest.mark.device
def test_numbers_are_of_the_method(cli, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Decode(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.eigvals(x).abs() + torch.linalg.eigvals(x + 1).abs()

    x = (torch.eye(3),)
    path = tmp_path / "two.pvk"
    with purevk.compile({"prefill": (torch.nn.ReLU(), x), "decode": (Decode(), x)}) as program:
        program.save(path)
        whole = program.report()
    found = {}
    for name in ("prefill", "decode"):
        given = ("bench", path, "--method", name, "--no-load", "--runs", "1", "--json")
        found[name] = cli(*given, "--input", "ones").json
        assert cli("run", path, "--method", name, "--json").json["cpu_nodes"] == (
            0 if name == "prefill" else 2
        )
    assert (found["prefill"]["segments"], found["prefill"]["cpu_nodes"]) == (1, 0)
    assert found["decode"]["cpu_nodes"] == 2
    for key in ("dispatches", "segments", "cpu_nodes"):
        assert found["prefill"][key] + found["decode"][key] == whole[key]


@pytest.mark.device
def test_a_profile_needs_timestamps(cli, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_DISABLE", "timestamp")
    ran = cli("bench", data / "dynamic_views.pte", "--runs", "2", "--no-load", "--profile")
    assert ran.code == 0 and "has no timestamps" in ran.out


@pytest.mark.device
@pytest.mark.slow
def test_cold_and_warm_loading(cli, data: Path) -> None:
    ran = cli("bench", data / "dynamic_views.pte", "--runs", "2", "--size", "s0=4", "--json")
    cold, warm = ran.json["cold"], ran.json["warm"]
    assert cold["kernels"]["compiled"] > 0 and cold["kernels"]["cached"] == 0
    assert (
        warm["kernels"]["compiled"] == 0
        and warm["kernels"]["cached"] == cold["kernels"]["compiled"]
    )
    assert cold["phases"]["kernels"] > warm["phases"]["kernels"] > 0
    assert cold["process_seconds"] > cold["load_seconds"] + cold["first_call_seconds"]


@pytest.mark.device
def test_a_process_that_fails_says_why(foreign: Path) -> None:
    from purevk.errors import PurevkError

    args = argparse.Namespace(
        model=str(foreign), data=[], input=[], size=[], seed=0, method=None, device=None
    )
    with pytest.raises(PurevkError, match="CoreMLBackend"):
        bench._loads(args, Steps())


@pytest.mark.device
def test_what_kernels_reach_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = DeviceLimits(1e9, 1e9)
    monkeypatch.setattr(timings, "device_limits", lambda context, again=False: slow)
    small = timings.Timing("a", "a.comp", 1e-3, 4 << 20, 8_000_000)  # 4 GB/s, from caches
    large = timings.Timing("b", "b.comp", 1e-1, 300 << 20, 0)
    with Context(api.open_device(), Cache(tmp_path)) as context:
        found = timings.limits_for(context, [small, large])
        if context.device.kind == "cpu":
            assert found == DeviceLimits((300 << 20) / 1e-1, 8e9)
        else:
            assert found == slow


@pytest.mark.parametrize("kind", ["cpu", "discrete"])
def test_one_dispatch_that_caches_do_not_explain(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is faster than the limits allow, while its operator as a whole is not."""
    limits = {False: DeviceLimits(1e9, 1e9), True: DeviceLimits(4e9, 4e9)}
    monkeypatch.setattr(timings, "device_limits", lambda context, again=False: limits[again])
    context = SimpleNamespace(device=SimpleNamespace(kind=kind))
    slow = timings.Timing("a", "a.comp", 10.0, 1 << 30, 0)
    cached = timings.Timing("a", "a.comp", 1e-3, 4 << 20, 0)  # 4 GB/s
    large = timings.Timing("a", "a.comp", 0.5, 1 << 30, 0)  # 2 GB/s
    busy = timings.Timing("a", "a.comp", 1e-3, 4, 2_000_000)  # 2 GFLOP/s
    assert timings.limits_for(context, [slow, cached]) == limits[False]
    assert timings.limits_for(context, [slow, large]) == limits[True]
    assert timings.limits_for(context, [slow, busy]) == limits[kind == "cpu"]


@pytest.mark.device
def test_limits_of_a_busy_machine_are_measured_again(
    cli, data: Path, monkeypatch: pytest.MonkeyPatch, unregister_topk
) -> None:
    if api.open_device().kind != "cpu":
        pytest.skip("on a GPU, caches and matrix cores are faster than the limits")
    asked: list[bool] = []

    def measured(context: Context, again: bool = False) -> DeviceLimits:
        asked.append(again)
        return DeviceLimits(1e15, 1e15) if again else DeviceLimits(1.0, 1.0)

    monkeypatch.setattr(timings, "device_limits", measured)
    words = ("bench", data / "topk.pte", "--runs", "2", "--no-load", "--profile", "--json")
    rows = cli(*words).json["profile"]["rows"]
    assert asked == [False, True]
    assert all((row["limit_share"] or 0.0) <= 1.0 for row in rows)
