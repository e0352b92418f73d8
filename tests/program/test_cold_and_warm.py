"""What a load takes: the compiler when cold, the cache when warm; and caches that are damaged,
shared or not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import purevk
from purevk import api
from purevk.cache import Cache
from purevk.errors import ShaderCompilerError
from purevk.graph.context import Context
from tests.harness import DATA, finish, python, start

pytestmark = [pytest.mark.device, pytest.mark.slow]
LINEAR = DATA / "linear_relu.pte"
LOAD = """
import json, sys, numpy as np, purevk
program = purevk.load(sys.argv[1])
y = program.forward(np.load(sys.argv[2]))
try:
    libraries = open("/proc/self/maps").read()
except OSError:
    libraries = ""
print(json.dumps({"y": y.tolist(), "shaderc": "shaderc" in libraries.lower(), **program.report()["kernels"]}))
"""


@pytest.fixture
def saved_input(tmp_path: Path, linear_input: np.ndarray) -> Path:
    np.save(tmp_path / "x.npy", linear_input)
    return tmp_path / "x.npy"


def test_a_warm_start_loads_no_compiler(
    tmp_path: Path, saved_input: Path, linear_output: np.ndarray
) -> None:
    folder = str(tmp_path / "cache")
    cold = python(LOAD, LINEAR, saved_input, PUREVK_CACHE=folder)
    assert cold["compiled"] > 0 and cold["cached"] == 0 and cold["shaderc"]
    warm = python(LOAD, LINEAR, saved_input, PUREVK_CACHE=folder, PUREVK_SHADERC="/nonexistent")
    assert warm["compiled"] == 0 and warm["cached"] == cold["compiled"] and not warm["shaderc"]
    np.testing.assert_allclose(warm["y"], linear_output, rtol=0, atol=1e-6)
    assert warm["y"] == cold["y"]


def test_cold_and_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_SHADERC", "/nonexistent/libshaderc.so")
    with Context(api.open_device(), Cache(tmp_path)) as context:
        with pytest.raises(ShaderCompilerError) as caught:
            purevk.load(LINEAR, context=context)
        text = str(caught.value)
        assert "/nonexistent/libshaderc.so" in text and "PUREVK_SHADERC" in caught.value.next
        monkeypatch.delenv("PUREVK_SHADERC")
        purevk.load(LINEAR, context=context)  # nothing is left of the failure


@pytest.mark.parametrize("variable", [{"PUREVK_CACHE": "0"}, {"PUREVK_CACHE": "/dev/null/cache"}])
def test_without_a_cache_everything_is_compiled(
    variable: dict[str, str], saved_input: Path, linear_output: np.ndarray
) -> None:
    for _ in range(2):
        said = python(LOAD, LINEAR, saved_input, **variable)
        assert said["compiled"] > 0 and said["cached"] == 0
        np.testing.assert_allclose(said["y"], linear_output, rtol=0, atol=1e-6)


def test_two_processes_fill_one_cache(
    tmp_path: Path, saved_input: Path, linear_output: np.ndarray
) -> None:
    folder = str(tmp_path / "cache")
    running = [start(LOAD, LINEAR, saved_input, PUREVK_CACHE=folder) for _ in range(3)]
    for process in running:
        np.testing.assert_allclose(finish(process)["y"], linear_output, rtol=0, atol=1e-6)
    assert python(LOAD, LINEAR, saved_input, PUREVK_CACHE=folder)["compiled"] == 0


def entries(folder: Path, kind: str) -> list[Path]:
    return sorted(path for path in (folder / kind).rglob("*") if path.is_file())


def damage(files: list[Path], kind: str) -> None:
    """Spoils cache entries."""
    contents = [path.read_bytes() for path in files]
    for number, (path, data) in enumerate(zip(files, contents)):
        if kind == "empty":
            path.write_bytes(b"")
        elif kind == "half":
            path.write_bytes(data[: len(data) // 2])
        elif kind == "bit":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
        elif kind == "other":  # the sound entry of another key
            path.write_bytes(contents[number - 1])
        elif kind == "noise":
            path.write_bytes(np.random.default_rng(8).bytes(len(data)))
        elif kind == "folder":
            path.unlink()
            path.mkdir()


@pytest.mark.parametrize("kind", ["empty", "half", "bit", "other", "noise", "folder"])
def test_wrong_entries_are_misses(
    kind: str, tmp_path: Path, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    model = DATA / "topk.pte"  # two kernels and more
    x = np.random.default_rng(4).standard_normal((2, 7), np.float32)
    with (
        Context(api.open_device(), Cache(tmp_path)) as context,
        purevk.load(model, context=context) as program,
    ):
        compiled = program.report()["kernels"]["compiled"]
        expected = program.forward(x)
    assert compiled > 1
    spirv, driver = entries(tmp_path, "spirv"), entries(tmp_path, "pipeline")
    assert len(spirv) == compiled and len(driver) <= 1
    damage([*spirv, *driver] if kind != "other" else spirv, kind)
    with (
        Context(api.open_device(), Cache(tmp_path)) as context,
        purevk.load(model, context=context) as program,
    ):
        assert program.report()["kernels"]["compiled"] == compiled
        for one, two in zip(program.forward(x), expected):
            np.testing.assert_array_equal(one, two)
    with (
        Context(api.open_device(), Cache(tmp_path)) as context,
        purevk.load(model, context=context) as program,
    ):
        assert (program.report()["kernels"]["compiled"] == 0) == (kind != "folder")


def test_the_cache_may_vanish_while_a_program_runs(
    tmp_path: Path, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    with Context(api.open_device(), Cache(tmp_path / "cache")) as context:
        with purevk.load(LINEAR, context=context) as program:
            shutil.rmtree(tmp_path / "cache")
            np.testing.assert_allclose(
                program.forward(linear_input), linear_output, rtol=0, atol=1e-6
            )
        with purevk.load(DATA / "topk.pte", context=context) as program:
            assert program.report()["kernels"]["compiled"] > 0


def test_spirv_that_the_driver_refuses_is_compiled_again(
    tmp_path: Path, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    """An entry with a right checksum and without the entry point, as a broken compiler wrote it."""
    with Context(api.open_device(), Cache(tmp_path)) as context:
        purevk.load(LINEAR, context=context)
    broken = Cache(tmp_path)
    keys = broken._stored_keys()
    for key in keys:
        spirv = broken.get_spirv(key)
        assert spirv is not None and b"main\0" in spirv
        broken.put_spirv(key, spirv.replace(b"main\0", b"mian\0"))
    with Context(api.open_device(), Cache(tmp_path)) as context:
        program = purevk.load(LINEAR, context=context)
        np.testing.assert_allclose(program.forward(linear_input), linear_output, rtol=0, atol=1e-6)
        assert context.kernels.report.compiled == len(keys)
    with Context(api.open_device(), Cache(tmp_path)) as context:
        purevk.load(LINEAR, context=context)
        assert context.kernels.report.compiled == 0
