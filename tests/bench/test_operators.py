"""`bench/operators.py`: every case is an operator that runs, and the arithmetic of its figures."""

from __future__ import annotations

import json

import pytest

from bench import operators
from bench.operator_cases import Case, Tensor, f32, operator_cases
from bench.operators import build
from purevk.dtypes import DType
from purevk.graph.context import typical_traits
from purevk.graph.limits import DeviceLimits
from purevk.ir import GuardLog
from purevk.ops import registry
from purevk.passes.pipeline import optimize
from purevk.schedule.planning import make_plan


def test_every_case_has_a_kernel() -> None:
    cases = list(operator_cases(1 << 14))
    assert all(registry.find(case.op) is not None for case in cases)
    pointwise = {
        row.name for row in registry.definitions() if isinstance(row.form, registry.Pointwise)
    }
    assert pointwise <= {case.op for case in cases}
    assert len({(case.op, case.form) for case in cases}) == len(cases)


def test_every_case_is_lowered() -> None:
    traits = typical_traits()
    for case in operator_cases(1 << 14):
        with GuardLog():
            make_plan(optimize(build(case)[0], traits), traits)


@pytest.mark.parametrize("mib", [1 / 16, 64])
def test_main_tensors_have_the_size(mib: float) -> None:
    nbytes = int(mib * (1 << 20))
    for case in operator_cases(nbytes):
        if case.family in ("pointwise", "reductions", "scans and sorting"):
            assert max(arg.nbytes for arg in case.args if isinstance(arg, Tensor)) in (
                nbytes,
                nbytes // 2,
            ), case


def test_bytes_count_once() -> None:
    x = f32(8, 16)
    assert build(Case("", "aten.add.Tensor", (x, x)))[1] == 2 * 512
    assert build(Case("", "aten.add.Tensor", (x, f32(8, 16))))[1] == 3 * 512
    table, rows = f32(1000, 16, sparse=1), Tensor((3,), DType.int64, 1000)
    assert build(Case("", "aten.embedding.default", (table, rows)))[1] == 3 * 8 + 2 * 3 * 64
    alone = f32(1000, 16, sparse=8)
    assert build(Case("", "aten.take.default", (alone, rows)))[1] == 3 * 8 + 3 * 32 + 3 * 4


@pytest.mark.device
def test_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    limits = DeviceLimits(bytes_per_second=1e10, flops_per_second=1e10)
    monkeypatch.setattr("bench.operators.device_limits", lambda context, again: limits)
    assert operators.main(["aten.mm.*", "--mib", "0.015625", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["form"] for row in rows] == ["", "half"]
    n = 64
    assert (
        rows[0]["bytes"] == 3 * 4 * n * n
        and rows[0]["flops"] == 2 * n**3
        and rows[0]["bound"] == "arithmetic"
    )
    assert rows[0]["limit_share"] == pytest.approx(2 * n**3 / 1e10 / rows[0]["seconds"])
    assert operators.main(["mm.default", "--mib", "0.015625"]) == 0
    shown = capsys.readouterr().out
    assert "matmul" in shown and "16 KiB: time" in shown


@pytest.mark.device
def test_wrong_arguments(capsys: pytest.CaptureFixture) -> None:
    assert operators.main(["nothing_of_the_kind"]) == 1
    assert "no operator fits" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        operators.main(["--mib", "0"])
