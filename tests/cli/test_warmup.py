"""`purevk warmup`: nothing is compiled twice, and a bundle serves where there is no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import purevk
from purevk import api, knobs
from purevk.cache import Cache, default_cache
from purevk.frontends.files import open_file
from purevk.graph.context import Context, typical_traits
from purevk.program.variants import coverage
from purevk.report import lowered

pytestmark = pytest.mark.device


def test_the_second_time_all_is_there(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path))
    cold = cli("warmup", data / "topk.pte", data / "dynamic_views.pte", "--json").json
    first, second = cold["models"]
    assert (
        first["compiled"] == first["modules"] > 0
        and first["cached"] == 0
        and first["pipelines"] > 0
    )
    warm = cli("warmup", data / "topk.pte", data / "dynamic_views.pte", "--json").json
    assert [(m["compiled"], m["cached"]) for m in warm["models"]] == [
        (0, first["modules"]),
        (0, second["modules"]),
    ]
    text = cli("warmup", data / "topk.pte").out
    assert "topk.pte" in text and str(tmp_path) in text
    monkeypatch.setenv("COLUMNS", "80")
    rows = cli("warmup", data / "dynamic_views.pte").out.splitlines()
    assert any(row.startswith("  dynamic_views.pte  ") for row in rows)
    # What it made ready is all that loading needs.
    monkeypatch.setenv(knobs.SHADERC.name, "/nonexistent")
    ran = cli("run", data / "dynamic_views.pte")
    assert ran.code == 0, ran.err


def test_a_bundle_serves_where_there_is_no_compiler(
    cli, data: Path, tmp_path: Path, monkeypatch
) -> None:
    bundle = tmp_path / "kernels.zip"
    made = cli(
        "warmup", data / "dynamic_views.pte", data / "topk.pte", "--bundle", bundle, "--json"
    ).json
    entries, modules = made["bundle"]["entries"], sum(m["modules"] for m in made["models"])
    assert (
        0 < entries <= modules + 1  # and what tuning has found
        and made["bundle"]["bytes"] == bundle.stat().st_size
    )
    digest = made["bundle"]["sha256"]
    assert (tmp_path / "kernels.zip.sha256").read_text() == f"{digest}  kernels.zip\n"
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "other"))
    monkeypatch.setenv(knobs.SHADERC.name, "/nonexistent")
    ran = cli("run", data / "dynamic_views.pte")
    assert ran.code == 1 and "PUREVK_SHADERC" in ran.err
    ran = cli("warmup", "--from-bundle", bundle)
    assert ran.code == 1 and "--sha256" in ran.err
    ran = cli("warmup", "--from-bundle", bundle, "--sha256", digest[::-1])
    assert ran.code == 1 and "not the one that the SHA-256 names" in ran.err
    ran = cli("warmup", "--from-bundle", bundle, "--sha256", digest)
    assert ran.code == 0 and f"{entries} entries copied from" in ran.out
    assert cli("run", data / "dynamic_views.pte").code == 0
    arguments = ("--from-bundle", bundle, "--trust", "--json")
    (model,) = cli("warmup", data / "topk.pte", *arguments).json["models"]
    assert model["compiled"] == 0


def test_without_a_cache_on_disk(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.CACHE.name, "0")
    ran = cli("warmup", data / "dynamic_views.pte")
    assert ran.code == 0 and "nothing was kept on disk" in ran.out
    assert cli("warmup", data / "dynamic_views.pte", "--bundle", tmp_path / "b.zip").code == 0


def test_a_folder_that_cannot_be_written(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    model, bundle = data / "linear_relu.pte", tmp_path / "b.zip"
    monkeypatch.setenv(knobs.CACHE.name, str(file / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot write its cache"):
        ran = cli("warmup", model, "--bundle", bundle, "--json")
    assert ran.code == 0 and ran.json["persistent"] is False and ran.json["bundle"]["entries"] > 0
    for folder, arguments in (("a", [model]), ("b", ["--from-bundle", bundle, "--trust"])):
        monkeypatch.setenv(knobs.CACHE.name, str(file / folder))
        with pytest.warns(RuntimeWarning, match="cannot write its cache"):
            ran = cli("warmup", *arguments, "--json")
        error = ran.json["error"]
        assert ran.code == 1 and error["what"] == "the warmup is not kept on disk"
        assert error["where"] == str(file / folder) and knobs.CACHE.name in error["next"]


def test_a_user_without_a_folder(cli, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.CACHE.name, "~nobody-of-this-name/cache")
    with pytest.warns(RuntimeWarning, match="no home folder"):
        ran = cli("warmup", data / "linear_relu.pte")
    assert ran.code == 1 and knobs.CACHE.name in ran.err and not ran.out


def test_a_read_only_folder_that_has_all_is_fine(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path))
    given, kept = api.PipelineCache.get_data, list[bytes]()

    def first(cache: api.PipelineCache) -> bytes:
        kept.append(given(cache))
        return kept[0]

    monkeypatch.setattr(api.PipelineCache, "get_data", first)
    assert cli("warmup", data / "linear_relu.pte").code == 0

    def read_only(*args: object, **options: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("purevk.cache._caches", {})
    monkeypatch.setattr("purevk.shaders.cache_folder._write_file", read_only)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert cli("warmup", data / "linear_relu.pte").code == 0
    monkeypatch.setattr(api.PipelineCache, "get_data", lambda _: kept[0] + b"more")
    monkeypatch.setattr("purevk.cache._caches", {})
    with pytest.warns(RuntimeWarning, match="cannot write its cache"):
        assert cli("warmup", data / "linear_relu.pte").code == 0


@pytest.mark.parametrize(
    "arguments, what",
    [
        ([], "name a MODEL"),
        (["--bundle", "b.zip"], "--bundle needs the MODELs"),
        (["--from-bundle", "b.zip", "--sha256", "0", "--sha256", "1"], "takes one --sha256"),
        (["--from-bundle", "b.zip", "--sha256", "0", "--trust"], "not allowed with argument"),
        (["x.pte", "--max-specializations", "-1"], "'-1' is not an integer above 0"),
    ],
)
def test_a_wrong_command_line(cli, arguments: list[str], what: str) -> None:
    ran = cli("warmup", *arguments)
    assert ran.code == 2 and what in ran.err


def test_a_server_may_assert_that_all_is_cached(
    cli, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.CACHE.name, text := f"{tmp_path},only=1")
    assert "KernelNotCachedError" in cli("run", data / "linear_relu.pte").err
    (model,) = cli("warmup", data / "linear_relu.pte", "--json").json["models"]
    assert model["compiled"] == model["modules"] > 0
    assert os.environ[knobs.CACHE.name] == text
    assert cli("run", data / "linear_relu.pte").code == 0


def test_a_bundle_that_is_not_there(cli, tmp_path: Path) -> None:
    ran = cli("warmup", "--from-bundle", tmp_path / "none.zip", "--trust")
    assert ran.code == 1 and "No such file or directory" in ran.err
    assert str(tmp_path / "none.zip") in ran.err


def test_a_bundle_that_cannot_be_written(cli, data: Path, tmp_path: Path) -> None:
    ran = cli("warmup", data / "dynamic_views.pte", "--bundle", tmp_path / "none" / "b.zip")
    assert ran.code == 1 and "the bundle cannot be written" in ran.err


class _Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(x), -1).cumsum(0) + y.sum(0)


def _rows() -> torch.nn.Module:
    torch.manual_seed(0)
    return _Rows().eval()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two dynamic sizes."""
    dims = [{0: torch.export.Dim(name, min=1, max=top)} for name, top in (("n", 7), ("m", 11))]
    path = tmp_path_factory.mktemp("rows") / "rows.pvk"
    inputs = torch.ones(2, 5), torch.ones(3, 3)
    with purevk.compile(_rows(), inputs, dims) as program:
        program.save(path)
    return path


def test_all_sizes_within_the_bounds_are_prepared(cli, rows: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(knobs.CACHE.name, str(folder))
        (model,) = cli("warmup", rows, "--json").json["models"]
    # The exported bounds, 1 row of x with any rows of y, the other way round, and 1 row of both.
    assert model["specializations"] == 4
    assert model["left_out"] == 0 and model["all_sizes"]
    assert model["dispatched"] == model["pipelines"] > 0
    with Context(api.open_device(), Cache(folder)) as context:
        program = purevk.load(rows, context=context)
        for n, m in ((1, 1), (1, 4), (7, 1), (2, 3), (7, 11)):
            x, y = torch.rand(n, 5), torch.rand(m, 3)
            program.forward(x, y)
        assert context.kernels.report.compiled == 0


def test_what_is_left_out_is_said(cli, rows: Path) -> None:
    (model,) = cli("warmup", rows, "--max-specializations", 2, "--json").json["models"]
    assert model["specializations"] == 2 and 0 < model["left_out"] < 17
    wanted = f"calls of {model['left_out']} further sizes"
    assert wanted in cli("warmup", rows, "--max-specializations", 2).out


def test_the_sizes_to_prepare(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_file(rows) as program:
        first = lowered.lower(program, "forward", typical_traits())
    found = coverage.uncovered_sizes(first.graph, first.guards)
    (n, m) = found.sizes[0]
    sizes = {(env[n], env[m]) for env in found.sizes}
    assert found.complete and {(1, 4), (1, 1), (3, 1)} <= sizes and (3, 4) not in sizes
    assert coverage.input_sizes(first.graph, found.sizes[0])[0] == (found.sizes[0][n], 5)
    monkeypatch.setattr(coverage, "MAX_COMBINATIONS", 16)
    sampled = coverage.uncovered_sizes(first.graph, first.guards)
    assert not sampled.complete and sampled.sizes[0] in found.sizes


def test_lowerings_that_serve_more_than_one_size(rows: Path) -> None:
    with open_file(rows) as program:
        first = lowered.lower(program, "forward", typical_traits())
        (n, m) = coverage.uncovered_sizes(first.graph, first.guards).sizes[0]
        for given in ({n: 1, m: 4}, {n: 3, m: 1}):
            wider = coverage.wider_sizes(first.graph, coverage.input_sizes(first.graph, given))
            made = lowered.lower(program, "forward", typical_traits(), wider)
            kept = (n if given[n] == 1 else m), (m if given[n] == 1 else n)
            assert coverage.serves(made.graph, made.guards, {kept[0]: 1, kept[1]: 6})
            assert not coverage.serves(made.graph, made.guards, {kept[0]: 2, kept[1]: 6})
        for sizes in ({n: 1, m: 1}, {n: 2, m: 3}):
            exact = coverage.input_sizes(first.graph, sizes)
            assert coverage.wider_sizes(first.graph, exact) is None


def test_calls_of_one_row_are_lowered_once(rows: Path) -> None:
    module = _rows()
    with torch.no_grad(), purevk.load(rows) as program:
        (variant,) = program.methods["forward"].variants
        for n, m, count in ((1, 2, 2), (1, 5, 2), (1, 11, 2), (1, 1, 3), (4, 1, 4), (2, 1, 4)):
            x, y = torch.rand(n, 5), torch.rand(m, 3)
            torch.testing.assert_close(program.forward(x, y), module(x, y))
            assert len(variant.specializations) == count


def _driver_files(folder: Path) -> set[Path]:
    return {path for path in (folder / knobs.DRIVER_FOLDER).rglob("*") if path.is_file()}


def test_the_driver_compiles_nothing_after_a_warmup(rows: Path, tmp_path: Path) -> None:
    """In processes of their own, without a home folder: the driver reads its variables once."""
    environment = {
        name: text
        for name, text in os.environ.items()
        if name not in ("HOME", "XDG_CACHE_HOME", knobs.MESA_SHADER_CACHE_DIR.name)
    }
    environment[knobs.CACHE.name] = str(tmp_path)

    def run(*arguments: object) -> str:
        command = [sys.executable, "-m", "purevk", *map(str, arguments)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout

    made = json.loads(run("warmup", rows, "--json"))
    if "llvmpipe" not in made["device"]["name"]:
        pytest.skip("other drivers keep their shaders in another form")
    files = _driver_files(tmp_path)
    assert len(files) > made["models"][0]["dispatched"] // 2
    # the driver may write its last files as the process ends
    assert 0 < made["cache"]["driver_bytes"] <= sum(path.stat().st_size for path in files)
    for sizes in (("n=7", "m=11"), ("n=1", "m=3")):
        run("run", rows, *(f"--size={size}" for size in sizes))
    assert _driver_files(tmp_path) == files


def test_who_decides_where_drivers_keep_shaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = knobs.MESA_SHADER_CACHE_DIR.name
    monkeypatch.setenv("_PUREVK_MESA_SHADER_CACHE_DIR", "")
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "a"))
    monkeypatch.setenv(name, "/of/the/user")
    knobs.set_driver_cache()
    assert os.environ[name] == "/of/the/user"
    monkeypatch.delenv(name)
    knobs.set_driver_cache()
    assert os.environ[name] == str(tmp_path / "a" / knobs.DRIVER_FOLDER)
    # A process that this one starts has another cache: the variable follows.
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "b"))
    knobs.set_driver_cache()
    assert os.environ[name] == str(tmp_path / "b" / knobs.DRIVER_FOLDER)
    monkeypatch.setenv(knobs.CACHE.name, "0")
    knobs.set_driver_cache()
    assert name not in os.environ
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path / "b"))
    monkeypatch.setenv(knobs.MESA_SHADER_CACHE_DISABLE.name, "1")
    knobs.set_driver_cache()
    assert name not in os.environ


def test_drivers_keep_no_shaders_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mesa's drivers would end the process with SIGBUS."""
    folder, disable = knobs.MESA_SHADER_CACHE_DIR.name, knobs.MESA_SHADER_CACHE_DISABLE.name
    for name in (folder, f"_PUREVK_{folder}", f"_PUREVK_{disable}", disable):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    knobs.set_driver_cache()
    assert os.environ[disable] == "1" and folder not in os.environ
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 30))
    knobs.set_driver_cache()  # also in a process that this one starts
    assert disable not in os.environ and os.environ[folder].startswith(str(tmp_path))
    monkeypatch.setenv(disable, "true")  # of the user: it stays
    knobs.set_driver_cache()
    assert os.environ[disable] == "true"


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.CACHE.name, "~nobody-of-this-name/cache")
    with pytest.warns(RuntimeWarning, match="no home folder"):
        assert knobs.cache_folder() == ""

    def no_home(*args: object, **options: object) -> str:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv(knobs.CACHE.name)
    monkeypatch.setattr("platformdirs.user_cache_dir", no_home)
    with pytest.warns(RuntimeWarning, match="no home folder"):
        assert default_cache().folder is None
