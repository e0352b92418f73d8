"""Kernels as files: PUREVK_DUMP and PUREVK_OVERRIDE."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import purevk
from purevk import api, knobs
from purevk.cache import Cache
from purevk.errors import InputError, ShaderCompilerError
from purevk.graph import kernel_files
from purevk.graph.context import Context
from purevk.paths import others_may_write
from purevk.shaders import shaderc

pytestmark = pytest.mark.device
X = torch.tensor([1.0, -2.0, 3.0])


class _Half(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def run(folder: Path) -> torch.Tensor:
    """The result of a program on a device of its own, with the cache in a folder."""
    with (
        Context(api.open_device(), Cache(folder)) as context,
        purevk.compile(_Half(), (X,), context=context) as program,
    ):
        made: torch.Tensor = program.forward(X)
        return made


@pytest.fixture
def dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The cache, and the files of a program whose only kernel is a pointwise one."""
    cache, folder = tmp_path / "cache", tmp_path / "dump"
    with monkeypatch.context() as patch:
        patch.setenv(knobs.DUMP.name, str(folder))
        assert torch.equal(run(cache), X / 2)
    (glsl,) = folder.glob("*.comp")
    assert glsl.with_suffix(".spv").is_file()
    monkeypatch.setenv(knobs.OVERRIDE.name, str(folder))
    return cache, glsl


def change(glsl: Path) -> None:
    text = glsl.read_text()
    assert "0.5" in text
    glsl.write_text(text.replace("0.5", "4.0"))


def test_files_that_were_not_changed_do_nothing(
    dumped: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "purevk"):
        assert torch.equal(run(dumped[0]), X / 2)
    assert not caplog.records


def test_changed_glsl_runs_and_is_not_cached(
    dumped: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, glsl = dumped
    change(glsl)
    with caplog.at_level(logging.WARNING, "purevk"):
        assert torch.equal(run(cache), X * 4)
    assert any(glsl.stem in record.getMessage() for record in caplog.records)
    monkeypatch.delenv(knobs.OVERRIDE.name)
    assert torch.equal(run(cache), X / 2)


def test_changed_spirv(dumped: tuple[Path, Path]) -> None:
    cache, glsl = dumped
    own = glsl.read_text()
    change(glsl)
    code = shaderc.load().compile(glsl.read_text(), name=glsl.name)
    glsl.with_suffix(".spv").write_bytes(code)
    with pytest.raises(InputError, match="both the GLSL and the SPIR-V"):
        run(cache)
    glsl.write_text(own)
    assert torch.equal(run(cache), X * 4)
    glsl.unlink()
    assert torch.equal(run(cache), X * 4)


def test_files_that_do_not_fit(dumped: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, glsl = dumped
    spirv = glsl.with_suffix(".spv")
    kept = spirv.read_bytes()
    spirv.write_bytes(b"no SPIR-V at all")
    with pytest.raises(InputError, match="no SPIR-V"):
        run(cache)
    spirv.write_bytes(kept)
    glsl.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="the GLSL cannot be read"):
        run(cache)
    glsl.write_text("#version 450\nvoid main() { none(); }\n")
    with pytest.raises(ShaderCompilerError, match="none"):
        run(cache)
    monkeypatch.setenv(knobs.OVERRIDE.name, str(cache / "nowhere"))
    with pytest.raises(InputError, match="names no folder"):
        run(cache)


@pytest.mark.skipif(os.name == "nt", reason="needs modes of POSIX")
def test_what_others_may_write_is_refused(dumped: tuple[Path, Path]) -> None:
    cache, glsl = dumped
    for path in (glsl.parent, glsl, glsl.with_suffix(".spv")):
        mode = path.stat().st_mode
        for shared in (0o020, 0o002):
            path.chmod(mode | shared)
            with pytest.raises(InputError, match="other users may write") as caught:
                run(cache)
            assert caught.value.where == str(path) and "chmod go-w" in caught.value.next
        path.chmod(mode)
    assert torch.equal(run(cache), X / 2)


@pytest.mark.skipif(os.name == "nt", reason="needs modes of POSIX")
def test_a_file_that_is_replaced_while_it_is_read(
    dumped: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may rename a folder above it puts another file there after its mode was looked at."""
    cache, glsl = dumped
    other = glsl.with_name("other")
    own = glsl.read_bytes()

    def replace(path: Path | int) -> str:
        why = others_may_write(path)
        if not isinstance(path, Path) or path != glsl.parent:
            other.write_bytes(b"void")
            other.chmod(0o666)
            other.replace(glsl)
        return why

    monkeypatch.setattr(kernel_files, "others_may_write", replace)
    assert torch.equal(run(cache), X / 2)
    assert glsl.read_bytes() != own


def test_kernels_that_do_not_compile_are_dumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to be looked at is there before it is compiled."""

    def refuse(*_: object, **__: object) -> None:
        raise ShaderCompilerError("refused")

    monkeypatch.setenv(knobs.DUMP.name, str(tmp_path / "dump"))
    monkeypatch.setattr("purevk.graph.kernels.load_or_compile", refuse)
    with pytest.raises(ShaderCompilerError, match="refused"):
        run(tmp_path / "cache")
    assert len(list((tmp_path / "dump").glob("*.comp"))) == 1


def test_files_of_no_kernel_are_named_in_the_end(
    dumped: tuple[Path, Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, glsl = dumped
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(kernel_files, "_used", {})
    monkeypatch.setattr(kernel_files, "_at_exit", at_exit.append)
    other = glsl.with_name("elementwise.pointwise.000000000000.comp")
    other.write_text(glsl.read_text())
    with caplog.at_level(logging.WARNING, "purevk"):
        assert torch.equal(run(cache), X / 2)
        monkeypatch.chdir(glsl.parent)
        monkeypatch.setenv(knobs.OVERRIDE.name, ".")  # the same folder
        assert torch.equal(run(cache), X / 2)
        assert not caplog.records
        (warn,) = at_exit
        warn()
    (record,) = caplog.records
    assert other.name in record.getMessage() and glsl.name not in record.getMessage()
