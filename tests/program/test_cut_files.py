"""Files that are cut short while their program lives: an error where their bytes are needed, and never
the signal SIGBUS."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.errors import FileFormatError
from purevk.frontends.files import FileSource, open_file
from purevk.frontends.saved import write_program
from purevk.llm.checkpoint import Folder
from purevk.llm.files import ModelFile
from purevk.llm.gguf import GgufFile
from purevk.mapped import own
from purevk.pte import source
from tests.harness import DATA

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not hasattr(os, "preadv"), reason="the system cuts no file that is mapped"),
]


@pytest.mark.parametrize("suffix", ["pte", "pvk"])
def test_calls_go_on_and_save_raises(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    x = np.ones((2, 5), np.float32)
    with purevk.load(DATA / "linear_relu.pte") as program:
        expected = program.forward(x)
        if suffix == "pvk":
            program.save(path)
    if suffix == "pte":
        shutil.copy(DATA / "linear_relu.pte", path)
    with purevk.load(path) as program:
        os.truncate(path, 1)
        np.testing.assert_array_equal(program.forward(x), expected)
        saved = tmp_path / "again.pvk"
        with pytest.raises(FileFormatError, match="cut short"):
            program.save(saved)
        program.reset_state()
        assert not saved.exists() and [each.name for each in tmp_path.iterdir()] == [path.name]


def test_sizes_that_need_another_lowering(tmp_path: Path) -> None:
    path = tmp_path / "model.pte"
    shutil.copy(DATA / "dynamic_views.pte", path)
    with purevk.load(path) as program:
        os.truncate(path, 1)
        program.forward(np.zeros((1, 3, 8), np.float32))
        with pytest.raises(FileFormatError, match="cut short"):
            program.forward(np.zeros((1, 1, 8), np.float32))


def test_constants_that_the_host_reads(tmp_path: Path) -> None:
    """Constants of nodes on the CPU, and results that are constants."""
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4096.0).reshape(64, 64))

        def forward(self, x):
            return torch.linalg.matrix_exp(x) @ self.table, self.table

    path = tmp_path / "model.pvk"
    x = np.eye(64, dtype=np.float32)
    with purevk.compile(Model(), (torch.eye(64),)) as program:
        program.save(path)
        expected = program.forward(x)
    with purevk.load(path) as program:
        before = program.forward(x)
        os.truncate(path, 1)
        after = program.forward(x)
        for one, two, three in zip(expected, before, after, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_array_equal(two, three)  # of the file as it was


LANGUAGE_MODELS: dict[str, Callable[[Path], ModelFile]] = {
    "gguf": GgufFile,
    "safetensors": lambda path: Folder(path.parent),
}


def _write_language_model(path: Path) -> None:
    if path.suffix == ".gguf":
        writer = pytest.importorskip("gguf").GGUFWriter(path, "llama")
        writer.add_tensor("output_norm.weight", np.zeros((40, 40), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return
    about = {"dtype": "F32", "shape": [40, 40], "data_offsets": [0, 6400]}
    header = json.dumps({"model.norm.weight": about}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(6400))
    config = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 1, "hidden_size": 40}
    (path.parent / "config.json").write_text(json.dumps(config))


def _in_a_child(work: Callable[[], None]) -> int:
    """The end of a process that does something: 0, or the negative number of a signal."""
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded, and forks
@pytest.mark.parametrize("kind", [
    "pte", "inline.pte", "ptn", "pvk", "pt2", "ptd", "gguf", "safetensors",
])  # fmt: skip
def test_files_that_are_cut_while_they_are_opened(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step that opens one, with nothing or a page left of it."""
    path, data = tmp_path / f"model.{kind.split('.')[-1]}", []
    if kind == "inline.pte":
        monkeypatch.setattr("purevk.pte.flatbuffer._COPIED_AT_ONCE", 0)
        monkeypatch.setattr("purevk.pte.flatbuffer._PAGE", 1024)
    if kind == "pt2":
        torch = pytest.importorskip("torch")
        monkeypatch.setattr("purevk.frontends.torch.module.ProgramSource", lambda *_, **__: None)
        torch.export.save(torch.export.export(torch.nn.Linear(40, 40), (torch.ones(1, 40),)), path)
    elif kind == "pvk":
        with open_file(DATA / "topk.pte") as opened:
            sources = {name: FileSource(opened, name) for name in opened.methods}
            write_program(path, "name", sources, "test")
    elif kind == "ptn":
        shutil.copy(DATA.parent / "ptn/cached.ptn", path)
    elif kind in LANGUAGE_MODELS:
        _write_language_model(path)
    elif kind == "ptd":
        shutil.copy(next((DATA / "linear_relu_external").glob("*.ptd")), path)
        data = [path]
    else:
        shutil.copy(DATA / ("linear_relu_inline.pte" if "inline" in kind else "topk.pte"), path)
    program = DATA / "linear_relu_external.pte" if data else path

    def read(error: bool) -> None:
        if kind in LANGUAGE_MODELS:
            with contextlib.closing(LANGUAGE_MODELS[kind](path)) as model:
                for tensor in model.tensors.values():
                    tensor.floats()
            if error:
                raise ValueError("nothing was missing")
            return
        with open_file(program, data) as opened, contextlib.suppress(FileFormatError):
            for name in opened.methods if kind != "pt2" else ():  # torch has copies
                graph = opened.graph(name)
                for constant in graph.constants.values():
                    bytes(own(constant.data))
            if error:
                raise ValueError("nothing was missing")

    read(error=False)
    content = path.read_bytes()
    for owner, name in ((source, "map_file"), (source.Source, "__init__")):
        for length in {0, min(len(content) - 1, 4096)}:
            path.write_bytes(content)

            do = getattr(owner, name)

            def cut(*args: object, do: Any = do, length: int = length) -> object:
                made = do(*args)
                os.truncate(path, length)
                return made

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, cut)

                def open_and_read() -> None:
                    with contextlib.suppress(FileFormatError):
                        read(error=True)

                assert _in_a_child(open_and_read) == 0, (name, length)
