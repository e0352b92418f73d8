"""Files of other programs: `.pt2` files load, all others are told what they are."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

import purevk
from purevk.errors import FileFormatError, InputError, SizeConstraintError
from purevk.frontends.files import open_file
from tests.harness import NO_TORCH, python


def _zip(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as made:
        for name in names:
            made.writestr(name, b"content")
    return data.getvalue()


def _safetensors() -> bytes:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def _npz() -> bytes:
    data = io.BytesIO()
    np.savez(data, x=np.ones(3))
    return data.getvalue()


FILES = {
    "ONNX": b"\x08\x0a\x12\x07pytorch\x1a\x052.1.0" + bytes(40),
    "safetensors": _safetensors(),
    "GGUF": b"GGUF\x03\x00\x00\x00" + bytes(40),
    "torch.save": _zip("model/data.pkl", "model/version", "model/data/0"),
    "pickled module": pickle.dumps({"weight": [1.0] * 20}, protocol=2),
    "TorchScript": _zip("m/data.pkl", "m/constants.pkl", "m/code/__torch__.py"),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(40),
    "TensorFlow Lite": struct.pack("<I", 24) + b"TFL3" + bytes(40),
    ".ptd": struct.pack("<I", 24) + b"FT01" + bytes(40),
    ".npz": _npz(),
    ".npy": b"\x93NUMPY\x01\x00v\x00" + bytes(40),
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "web page": b"<!DOCTYPE html><html><body>Not found</body></html>",
    "XML": b"<?xml version='1.0'?><net name='m'></net>",
}


@pytest.mark.parametrize("word", FILES)
def test_other_formats_are_named(word: str, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(FILES[word])
    for file in (path, FILES[word]):
        with pytest.raises(FileFormatError, match=word) as caught:
            open_file(file)
        assert ".pt2" in caught.value.why and caught.value.next


def test_what_is_no_known_file() -> None:
    for data in (b"x" * 60, _zip("a.txt"), b"PK\x03\x04 and no zip file at all" * 3):
        with pytest.raises(FileFormatError):
            open_file(data)
    for other in (None, 3, object()):
        with pytest.raises(InputError, match="cannot be loaded from"):
            open_file(other)
    with pytest.raises(InputError, match="cannot be loaded from BytesIO") as caught:
        open_file(io.BytesIO(b"ET12"))
    assert caught.value.next == "pass file.read()"


def test_a_graph_of_onnx_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x0a\x07pytorch" + bytes(60))
    with pytest.raises(FileFormatError, match="ONNX"):
        open_file(path)


def test_programs_with_a_name_of_onnx(tmp_path: Path) -> None:
    """The content tells the kind of a file."""
    source = Path(__file__).parent.parent / "data" / "pte" / "branch.pte"
    methods = list(open_file(source).methods)
    path = tmp_path / "m.onnx"
    path.write_bytes(source.read_bytes())
    assert list(open_file(path).methods) == methods


@pytest.mark.device
def test_a_saved_program_with_a_name_of_onnx(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path, x = tmp_path / "m.onnx", torch.ones(2, 3)
    with purevk.compile(torch.nn.ReLU(), (x,)) as program:
        program.save(path)
    with purevk.load(path) as loaded:
        torch.testing.assert_close(loaded(x), x)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    rows = torch.export.Dim("rows", min=2, max=16)
    program = torch.export.export(model, (torch.ones(5, 4),), dynamic_shapes=({0: rows},))
    torch.export.save(program, path)
    return path


@pytest.mark.device
def test_a_file_of_torch_export(exported: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    eager = torch.export.load(exported).module()
    for file in (exported, exported.read_bytes()):
        with purevk.load(file) as program, torch.no_grad():
            for rows in (5, 2, 16):
                x = torch.randn(rows, 4)
                torch.testing.assert_close(program(x), eager(x))
                np.testing.assert_allclose(program(x.numpy()), eager(x).numpy(), rtol=1e-5)
            with pytest.raises(SizeConstraintError):
                program(torch.ones(17, 4))
            program.save(tmp_path / "m.pvk")
    with purevk.load(exported) as program:
        again = pickle.loads(pickle.dumps(program))
    with again, purevk.load(tmp_path / "m.pvk") as saved:
        torch.testing.assert_close(again(x), saved(x))
    with pytest.raises(InputError, match="data files"):
        purevk.load(exported, [tmp_path / "m.pvk"])


@pytest.mark.slow
def test_a_damaged_file_of_torch_export(exported: Path) -> None:
    data = exported.read_bytes()
    with pytest.raises(FileFormatError):
        open_file(data[: len(data) // 2])
    with zipfile.ZipFile(exported) as opened:
        names = [name for name in opened.namelist() if name.endswith(".json")]
    with pytest.raises(FileFormatError, match="torch cannot load"):
        open_file(_zip(*names))


@pytest.mark.slow
def test_a_file_of_torch_export_without_torch(exported: Path) -> None:
    source = f"""{NO_TORCH}
import json
from purevk.errors import UnsupportedProgramError
from purevk.frontends.files import open_file
try:
    open_file(sys.argv[1])
except UnsupportedProgramError as error:
    print(json.dumps([error.what, error.next]))
"""
    what, then = python(source, exported)
    assert what == "torch is not installed" and "m.pvk" in then
