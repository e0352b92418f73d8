"""Pipes, devices, folders and files of 1 TB in place of the files that purevk reads: an error at once."""

from __future__ import annotations

import argparse
import io
import math
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from purevk.cli.inputs import _read, make_inputs
from purevk.errors import FileFormatError, InputError, PurevkError
from purevk.frontends.files import FileSource, open_file
from purevk.frontends.saved import write_program
from purevk.llm.checkpoint import Folder
from purevk.llm.gguf import GgufFile
from purevk.llm.safetensors import read_tensors
from purevk.llm.session import Session
from purevk.llm.tokenizer.files import read_tokenizer
from purevk.pte.source import _data_bytes
from purevk.shaders.bundle import Bundle
from tests.harness import DATA
from tests.states import States

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="needs FIFOs of POSIX"),
    pytest.mark.timeout(60),
]


def _etrecord(path: Path) -> None:
    pytest.importorskip("torch")
    from purevk.report.etrecord import read_etrecord

    read_etrecord(path, "forward")


def _config(path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").symlink_to(path)
        Folder(folder)


READERS: dict[str, Callable[[Path], object]] = {
    "program": open_file,
    "data": lambda path: open_file(DATA / "linear_relu.pte", [path]),
    "state": lambda path: States(total=("float32", (3,))).load(path),
    "input.npy": lambda path: _read(str(path), "*", 1 << 30),
    "ETRecord": _etrecord,
    "GGUF": GgufFile,
    "safetensors": read_tensors,
    "config.json": _config,
    "tokenizer": read_tokenizer,
    "session": lambda path: Session(cast(Any, None), None, "error", {}).load(path),
    "bundle": lambda path: Bundle(path, trust=True),
}
HEADS = {
    "pte": b"\0\0\0\0ET12",
    "pvk": b"PUREVK\r\n",
    "zip": b"PK\x03\x04",
    "npy": b"\x93NUMPY\1\0",
}


def _packed_zeros(path: Path, name: str, shape: tuple[int, ...]) -> None:
    """Writes an .npz file with zeros of float32, of 1/1000 of their bytes."""
    import zipfile

    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open(f"{name}.npy", "w", force_zip64=True) as member,
    ):
        np.lib.format.write_array_header_1_0(
            member, {"descr": "<f4", "fortran_order": False, "shape": shape}
        )
        for _ in range(math.prod(shape) * 4 >> 20):
            member.write(bytes(1 << 20))


@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_inputs_that_are_larger_than_a_method_takes(kind: str, tmp_path: Path) -> None:
    """They are refused before they are read: by the file's size, or the size that the archive states."""
    path = tmp_path / f"input.{kind}"
    if kind == "npz":
        _packed_zeros(path, "x", (1 << 24,))
    else:
        with open(path, "wb") as file:
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 30,)}
            )
            file.truncate(1 << 32)
    for program in ("linear_relu.pte", "dynamic_views.pte"):
        with open_file(DATA / program) as opened:
            graph = opened.graph("forward")
        args = argparse.Namespace(input=[str(path)], size=[], seed=0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(InputError, match="arrays have") as caught:
            make_inputs(graph, args, "method")
        assert "at most" in caught.value.why and caught.value.next
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 14  # KiB


@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="the system knows no holes")
def test_sound_files_that_are_holes(tmp_path: Path) -> None:
    """A program whose weights would be 1 TB of nothing is refused, and one with bytes in them is not."""
    path = tmp_path / "model.pvk"
    with open_file(DATA / "linear_relu.pte") as opened:
        write_program(path, "name", {"forward": FileSource(opened, "forward")}, "test")
    content = path.read_bytes()
    data = _data_bytes_of(path, 1 << 40)
    assert data < 1 << 20
    with pytest.raises(FileFormatError, match="holes") as caught:
        open_file(path)
    assert "pass its bytes" in caught.value.next
    with open(path, "r+b") as file:
        file.truncate(1 << 30)
        file.seek(0)
        for start in range(0, 1 << 30, 1 << 24):  # a sixteenth of it is written
            file.seek(start)
            file.write(content if not start else bytes(5 << 18))
    with pytest.raises(FileFormatError, match="damaged"):  # it has another size
        open_file(path)


def _data_bytes_of(path: Path, size: int) -> int:
    """Makes a file larger by a hole. The bytes that it has."""
    os.truncate(path, size)
    with open(path, "rb") as file:
        return _data_bytes(file.fileno(), size)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("node", ["fifo", "zero", "folder", "sparse", *HEADS])
def test_no_reader_waits_or_takes_memory(reader: str, node: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if node == "fifo":
        os.mkfifo(path)
    elif node == "zero":
        path = Path("/dev/zero")
    elif node == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.write(HEADS.get(node, b""))
            file.truncate(1 << 40)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises((PurevkError, OSError)):
        READERS[reader](path)
    assert time.process_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_arrays_that_grow_when_they_are_unpacked(tmp_path: Path) -> None:
    """A state file of 64 KB that holds 64 MB is refused before anything is unpacked."""
    path = tmp_path / "state.npz"
    _packed_zeros(path, "total", (1 << 24,))
    with pytest.raises(PurevkError, match="not of this program") as caught:
        States(total=("float32", (3,))).load(path)
    assert "bytes there" in caught.value.why


@pytest.mark.parametrize("reader", ["state", "input.npy"])
@pytest.mark.parametrize("method", ["encrypted", 0, 8, 9, 12, 14, 99])
def test_archives_that_are_packed_in_an_unknown_way(
    reader: str, method: int | str, tmp_path: Path
) -> None:
    """Members with a password, and those that a method has packed and that are damaged."""
    import zipfile

    path, array = tmp_path / "file.npz", io.BytesIO()
    np.save(array, np.zeros(9, np.uint8))
    packing = int(method) if method in (8, 12, 14) else 0
    with zipfile.ZipFile(path, "w", packing) as file:
        file.writestr("total.npy", array.getvalue())
    data = bytearray(path.read_bytes())
    if method == "encrypted" or method in (9, 99):
        for start, magic in ((6, b"PK\3\4"), (8, b"PK\1\2")):
            at = data.index(magic) + start
            data[at] |= method == "encrypted"
            data[at + 2] = packing if method == "encrypted" else int(method)
    for at in range(60, 75):
        data[at] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(PurevkError, match="damaged|read"):
        READERS[reader](path)
