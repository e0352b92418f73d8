"""The benchmarks run from start to end on this machine and believe only right outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import python
from tests.models.harness import FOLDER, exported

pytestmark = [pytest.mark.export, pytest.mark.device, pytest.mark.slow]


def test_compare(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from bench.compare import main

    exported("encoder2")
    out = tmp_path / "out.json"
    assert (
        main(
            [
                "encoder2",
                "--peers",
                "purevk,torch-1",
                "--rounds",
                "2",
                "--repeat",
                "2",
                "--json",
                str(out),
            ]
        )
        == 0
    )
    rows = {row["peer"]: row for row in json.loads(out.read_text())["results"]}
    for row in rows.values():
        assert (
            not row["why"]
            and not row["wrong"]
            and len(row["times_ms"]) == 4
            and row["median_ms"] > 0
        )
        assert row["error"] < 1e-5
    shown = capfd.readouterr().out
    assert "encoder2 fp32" in shown and "purevk (base)" in shown


def test_calls(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a CUDA device torch's columns are left out, with the reason, and purevk's are
    there."""
    torch = pytest.importorskip("torch")
    from bench.calls import main

    exported("encoder2")
    out = tmp_path / "out.json"
    options = [
        "--models",
        str(FOLDER),
        "--variant",
        "fp32",
        "--seconds",
        "0.2",
        "--loads",
        "1",
        "--out",
        str(out),
    ]
    assert main(["encoder2", *options]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["source"] == "encoder2.pte" and row["errors"]["purevk"] < 1e-5
    assert 0 < row["least"] <= row["forward"] and 0 < row["device"] and 0 < row["host_us"] < 1e5
    assert row["compiled"] > 0 and row["cold"][1] > row["warm"][1] > 0 and "load" not in row["why"]
    assert ("eager" in row["why"]) == (not torch.cuda.is_available())
    assert "encoder2 fp32" in capfd.readouterr().out


def test_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    from bench.gpu import LIMIT, main

    out = tmp_path / "out.json"
    names = ["attention_96_causal", "vit_b_16"]
    options = ["--batch", "2", "--seconds", "0", "--settle", "0", "--no-compile"]
    assert main([*names, "--tiny", *options, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["variant"] for row in rows] == ["fp16", "fp16", "fp32"]
    theirs = "graph" if torch.cuda.is_available() else "torch on the CPU"
    for row in rows:
        assert not row["why"] and set(row["times"]) >= {"purevk", theirs}
        assert all(ms > 0 for ms in row["times"].values())
        assert all(error < LIMIT[row["variant"]] for error in row["errors"].values())
    assert "| ViT, batch 2 | float32 |" in capfd.readouterr().out


@pytest.mark.parametrize(
    "works, library",
    [("--layers", "torch"), ("--models", "transformers"), ("--diffusion", "diffusers")],
)
def test_layers_and_models(works: str, library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    from bench.gpu import LIMIT, main

    out = tmp_path / "out.json"
    options = ["--batch", "2", "--seconds", "0", "--settle", "0", "--no-compile"]
    assert main([works, "--tiny", "--variant", "fp32", *options, "--out", str(out)]) == 0
    for row in json.loads(out.read_text())["rows"]:
        assert not row["why"] and row["errors"]["purevk"] < LIMIT["fp32"]


def test_gpu_leaves_out_what_does_not_fit_its_budget(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from bench.gpu import main

    assert main(["matmul_128", "--tiny", "--variant", "fp32", "--budget", "0"]) == 0
    assert "not measured: all: no time was left" in capfd.readouterr().out


def test_devices(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from bench.devices import main

    out = tmp_path / "out.json"
    given = ["vit_b_16", "--tiny", "--variant", "fp32", "--batch", "2", "3"]
    short = ["--seconds", "0", "--settle", "0", "--models", str(tmp_path), "--out", str(out)]
    assert main([*given, "--prepare", *short]) == 0 and not out.exists()
    assert main([*given, *short]) == 0
    figures = json.loads(out.read_text())
    assert len(figures["machine"]["devices"]) >= 2
    for row in figures["rows"]:
        assert not row["why"] and row["differences"].keys() == {"one", "batch", "layers"}
        assert len(row["rates"]) == 6 and all(rate > 0 for rate in row["rates"].values())
        assert set(row["host"]) == {"alone", "part", "copy", "fresh"}
        assert max(row["errors"].values()) < 1e-5
    assert "| ViT | 3 | layers | submit |" in capfd.readouterr().out


def test_the_jobs_of_spread(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from bench.spread import MODELS, model_file, one_process

    file = model_file(tmp_path, "convolutions", 2)
    done, seconds = one_process(file, MODELS["convolutions"].side, 2, 0.1)
    assert done >= 2 and seconds >= 0.1


def test_signatures() -> None:
    torch = pytest.importorskip("torch")
    import purevk
    from bench.signatures import Chain, measure

    length = torch.export.Dim("length", min=3, max=128)
    with purevk.compile(
        Chain(2), (torch.randn(1, 24, 16),), dynamic_shapes=({1: length},)
    ) as program:
        row = measure("chain", program, 3)
    assert row["recorded again"] == 0 and row["specializations"] == 1
    assert 0 < row["record"] < row["new"] and min(row["known"], row["alternate"]) > 0


def test_experts(tmp_path: Path) -> None:
    from bench.experts import main

    out = tmp_path / "out.json"
    given = ["--models", "small", "--tokens", "1,16", "--dtypes", "float32", "--seconds", "0"]
    assert main([*given, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["used"] for row in rows] == [2, 14]
    assert all(row["error"] < 1e-5 and row["purevk"] > 0 for row in rows)


def test_decode(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from bench.decode import LIMIT, main

    out = tmp_path / "out.json"
    given = ["--tiny", "--variant", "fp16", "--variant", "q4", "--seconds", "0", "--settle", "0"]
    assert main([*given, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 6
    for row in rows:
        assert row["errors"]["purevk"] < LIMIT[row["variant"]] and row["dispatches"] > 0
        assert row["turns"]["purevk"] > 0
        assert ("llama.cpp" in row["turns"]) != ("llama.cpp" in row["why"])


SOAK = """
import runpy, sys
sys.argv = ["soak.py", "--calls", "2000"]
runpy.run_path("scripts/soak.py", run_name="__main__")
"""


def test_soak() -> None:
    """In a process of its own, which holds only what purevk holds. The script fails if memory grows."""
    found = python(SOAK)
    assert found["calls"] >= 2000 and found["programs"] > 100
    assert found["growth"].keys() == {"resident", "device", "objects"}
    assert found["left"].keys() <= {"PipelineCache"}
