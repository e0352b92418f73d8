"""Pipes, devices, folders and files of 1 TB in place of the files that purevk reads: an error at once."""

from __future__ import annotations

import io
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from purevk.cli.inputs import _read
from purevk.errors import PurevkError
from purevk.frontends.files import open_file
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


READERS: dict[str, Callable[[Path], object]] = {
    "program": open_file,
    "data": lambda path: open_file(DATA / "linear_relu.pte", [path]),
    "state": lambda path: States(total=("float32", (3,))).load(path),
    "input.npy": lambda path: _read(str(path), "*"),
    "ETRecord": _etrecord,
}
HEADS = {
    "pte": b"\0\0\0\0ET12",
    "pvk": b"PUREVK\r\n",
    "zip": b"PK\x03\x04",
    "npy": b"\x93NUMPY\1\0",
}


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
    """A state file of 4 MB that holds 4 GB is refused before anything is unpacked."""
    import zipfile

    path = tmp_path / "state.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("total.npy", "w", force_zip64=True) as member,
    ):
        np.lib.format.write_array_header_1_0(
            member, {"descr": "<f4", "fortran_order": False, "shape": (1 << 26,)}
        )
        for _ in range(64):
            member.write(bytes(1 << 20))
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
