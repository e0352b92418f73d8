"""`purevk run` against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from purevk import knobs

pytestmark = pytest.mark.device


def test_outputs_are_right_and_written(cli, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    x = np.random.default_rng(5).standard_normal((2, 7)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    ran = cli(
        "run",
        data / "topk.pte",
        "--input",
        tmp_path / "x.npy",
        "--output",
        tmp_path / "out.npz",
        "--json",
    )
    assert ran.code == 0
    order = np.argsort(-x, axis=1)[:, :2]
    values = 1 / (1 + np.exp(-(np.take_along_axis(x, order, 1) * 2 + 1)))
    with np.load(tmp_path / "out.npz") as made:
        np.testing.assert_allclose(made["output_0"], values, rtol=1e-5)
        np.testing.assert_array_equal(made["output_1"], order)
    first, second = ran.json["outputs"]
    assert (first["dtype"], first["shape"], second["dtype"]) == ("float32", [2, 2], "int64")
    assert first["max"] == pytest.approx(values.max(), rel=1e-5) and first["mean"] == pytest.approx(
        values.mean(), rel=1e-5
    )
    assert second["min"] == order.min() and first["not_finite"] == 0


def test_a_dynamic_size(cli, data: Path) -> None:
    ran = cli("run", data / "dynamic_views.pte", "--size", "s0=3", "--input", "2")
    assert ran.code == 0 and "[1, 3, 2, 8]" in ran.out
    (output,) = cli(
        "run", data / "dynamic_views.pte", "--size", "s0=3", "--input", "2", "--json"
    ).json["outputs"]
    assert (output["min"], output["max"]) == (3.0, 9.0)  # x + 1 and its square


def test_infinities_are_counted_not_averaged(cli, data: Path) -> None:
    ran = cli("run", data / "dynamic_views.pte", "--input", "inf", "--json")
    (output,) = ran.json["outputs"]
    assert output["not_finite"] == np.prod(output["shape"]) and output["mean"] is None
    assert "infinite" in cli("run", data / "dynamic_views.pte", "--input", "inf").out


def test_the_method_must_be_named(cli, data: Path) -> None:
    assert cli("run", data / "two_methods.pte", "--json").json["method"] == "forward"
    assert cli("run", data / "two_methods.pte", "--method", "step", "--json").json["inputs"][0][
        "shape"
    ] == [1, 5]
    assert cli("run", data / "two_methods.pte", "--method", "other").code == 1


def test_an_input_of_the_wrong_size(cli, data: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 8), np.float32))
    ran = cli("run", data / "topk.pte", "--input", tmp_path / "x.npy")
    assert ran.code == 1 and "input 0 has size 8 along dim 1" in ran.err
    ran = cli("run", data / "topk.pte", "--device", "no such device")
    assert ran.code == 1 and "No Vulkan device fits 'no such device'" in ran.err


def test_an_output_that_cannot_be_written(cli, data: Path, tmp_path: Path) -> None:
    ran = cli("run", data / "dynamic_views.pte", "--output", tmp_path / "none" / "out.npz")
    assert ran.code == 1 and "the outputs cannot be written" in ran.err


def test_a_folder_for_graphs_and_kernels(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PUREVK_DUMP: the graph after each pass, and each kernel as GLSL and SPIR-V."""
    from purevk.shaders import shaderc

    monkeypatch.setenv(knobs.DUMP.name, str(tmp_path / "dump"))
    assert cli("run", data / "topk.pte").code == 0
    files = {path.name: path for path in (tmp_path / "dump").iterdir()}
    assert "forward.00.front_end.txt" in files
    sources = [path for path in files.values() if path.suffix == ".comp"]
    assert any(path.name.startswith("elementwise.pointwise.") for path in sources)
    assert len([path for path in files.values() if path.suffix == ".spv"]) == len(sources)
    compiler = shaderc.load()
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert "#include" not in text
        spirv = path.with_suffix(".spv").read_bytes()
        assert spirv[:4] == b"\x03\x02\x23\x07"
        assert compiler.compile(text, name=path.name)[:4] == spirv[:4]
