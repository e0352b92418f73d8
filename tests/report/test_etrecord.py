"""Modules, lines and parameters of the nodes of a .pte file, from its ETRecord."""

from __future__ import annotations

import io
import itertools
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import purevk
from purevk.cli import main
from purevk.dtypes import DType
from purevk.report.etdump import Place
from purevk.report.etrecord import (
    EtRecord,
    Origin,
    Parameter,
    _content,
    lines_of,
    parameters_of,
    read_etrecord,
)
from tests.pickles import packed, pickles

HERE = Path(__file__).name


class Block(nn.Module):
    """The batch norm becomes part of the convolution in the file."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        for tensor in (self.norm.running_mean, self.norm.weight, self.norm.bias):
            nn.init.normal_(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Model(nn.Module):
    """topk has no Vulkan kernel in executorch, so that there are two delegates."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 4), Block(4, 5))
        self.inner = nn.Linear(5, 8)
        self.again = nn.Linear(8, 8)
        self.one, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.other.load_state_dict(self.one.state_dict())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.inner(self.blocks(x).mean((2, 3)))
        y = self.again(torch.sin(self.again(y)))
        values, indices = torch.topk(y * 2 + 1, 3)
        return torch.sigmoid(values), indices, self.one(y), self.other(y)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import to_edge_transform_and_lower

    folder = tmp_path_factory.mktemp("etrecord")
    torch.manual_seed(0)
    program = torch.export.export(Model().eval(), (torch.randn(1, 3, 6, 6),))
    made = to_edge_transform_and_lower(
        program, partitioner=[VulkanPartitioner()], generate_etrecord=True
    ).to_executorch()
    (folder / "model.pte").write_bytes(made.buffer)
    made.get_etrecord().save(str(folder / "model.etrecord"))
    return folder / "model.pte", folder / "model.etrecord"


def rows_of(
    exported: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    model, record = exported
    assert main(["inspect", str(model), "--no-device", "--etrecord", str(record), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["methods"][0]["node_table"]
    return [row for row in rows if row["on"] != "load"]


def _line(text: str) -> str:
    """The first line of this file that has a text, as purevk writes it."""
    path = os.path.relpath(__file__)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(at for at, each in enumerate(lines, 1) if text in each)
    return f"{HERE if path.startswith(os.pardir) else path}:{number}, in forward"


@pytest.mark.export
@pytest.mark.slow
def test_nodes_that_read_parameters(
    exported: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(exported, capsys)
    first, second = [row for row in rows if row["operator"] == "purevk.conv2d"]
    line = _line("return torch.relu")
    assert first["line"] == f"blocks.0.conv, {line}; blocks.0.norm, {line}"
    assert first["parameters"] == [
        "blocks.0.conv.weight, with batch norm",
        "blocks.0.norm.bias, with batch norm",
    ]
    assert second["parameters"][0] == "blocks.1.conv.weight, with batch norm"
    linear = [row for row in rows if row["operator"] == "purevk.matmul"]
    assert linear[0]["line"] == f"inner, {_line('y = self.inner')}"
    assert linear[0]["parameters"] == ["inner.weight", "inner.bias"]
    for row in linear[1:3]:  # one module, called twice
        assert row["line"] == f"again, {_line('y = self.again')}"
        assert row["parameters"] == ["again.weight", "again.bias"]
    for row in linear[3:]:  # two modules with the same weight
        assert row["parameters"] == [] and ";" in row["line"]


@pytest.mark.export
@pytest.mark.slow
def test_nodes_without_parameters(
    exported: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is outside of delegates has its own line; other nodes have those of the delegate."""
    lines = {row["operator"]: row["line"] for row in rows_of(exported, capsys)}
    assert lines["purevk.sort"] == _line("torch.topk(y")
    last = _line("return torch.sigmoid")
    assert lines["purevk.pointwise"] == f"{last}; one, {last}; other, {last}"


@pytest.mark.export
@pytest.mark.slow
def test_pickles_in_each_member(exported: tuple[Path, Path], tmp_path: Path) -> None:
    """None runs; the record is read without that member, or refused."""
    mark = str(tmp_path / "ran")
    with zipfile.ZipFile(exported[1]) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    path = tmp_path / "model.etrecord"
    refused = 0
    for name, payload in itertools.product((*contents, "more"), pickles(mark)):
        path.write_bytes(packed({**contents, name: payload}))
        try:
            read_etrecord(path, "forward")
        except purevk.FileFormatError:
            refused += 1
        assert not Path(mark).exists()
    assert refused == 3 * 4  # the graph, its weights and constants, and the debug handles


@pytest.mark.export
@pytest.mark.slow
def test_what_is_no_etrecord(tmp_path: Path) -> None:
    path = tmp_path / "model.etrecord"
    path.write_bytes(b"no record")
    with pytest.raises(purevk.FileFormatError, match="no ETRecord"):
        read_etrecord(path, "forward")
    with pytest.raises(OSError):
        read_etrecord(tmp_path / "none", "forward")


def _record(**tensors: Any) -> dict[str, bytes]:
    """The members of a small record, whose parameter is "w"."""
    spec = {"parameter": {"arg": {"name": "p"}, "parameter_name": "w"}}
    graph = {"graph": {"nodes": []}, "signature": {"input_specs": [spec]}}
    contents = {"debug_handle_map": b"{}"}
    contents["edge_dialect_exported_program"] = json.dumps({"graph_module": graph}).encode()
    for kind, saved in (("constants", {}), ("state_dict", tensors)):
        data = io.BytesIO()
        torch.save(saved, data)
        contents[f"edge_dialect_exported_program_{kind}"] = data.getvalue()
    return contents


def test_pickles_in_each_member_of_a_small_record(tmp_path: Path) -> None:
    mark, path = str(tmp_path / "ran"), tmp_path / "model.etrecord"
    contents = _record(w=torch.randn(4))
    path.write_bytes(packed(contents))
    assert len(read_etrecord(path, "forward").parameters) == 1
    for name, payload in itertools.product(contents, pickles(mark)):
        path.write_bytes(packed({**contents, name: payload}))
        with pytest.raises(purevk.FileFormatError):
            read_etrecord(path, "forward")
        assert not Path(mark).exists()


def test_tensors_that_would_be_copied_into_more_memory(tmp_path: Path) -> None:
    """A record of 2 KB with a tensor of 64 GB is read without it, as are sparse ones, and nested ones
    where torch reads these: 2.15 does not."""
    path = tmp_path / "model.etrecord"
    nested = torch.nested.as_nested_tensor([torch.ones(4)])
    for tensor in (torch.ones(1).expand(1 << 34), torch.ones(4).to_sparse(), nested):
        path.write_bytes(packed(_record(w=tensor)))
        try:
            assert read_etrecord(path, "forward").parameters == {}
        except purevk.FileFormatError as error:
            assert tensor is nested and "no plain tensor" in str(error)


def test_a_node_is_known_better_than_its_delegate() -> None:
    calls = {0: 3}
    origins = [Origin(f"m{n}", f"a.py:{n}, in forward") for n in range(6)]
    record = EtRecord({3: origins}, {})
    known = {Place(3, 4): (Parameter("m2.weight", (origins[2],)),)}
    source = "delegate 0#4 aten.linear.default + delegate 0#5 aten.relu.default"
    assert lines_of(source, calls, record, known) == "m2, a.py:2, in forward"
    assert parameters_of(source, calls, known) == ["m2.weight"]
    other = "delegate 0#5 aten.relu.default"
    assert lines_of(other, calls, record, known).endswith("m3, a.py:3, in forward; 2 more")
    assert parameters_of(other, calls, known) == []
    assert lines_of("", calls, record, known) == lines_of(source, {}, record, known) == ""


def test_contents_that_tell_nothing() -> None:
    def content(dtype: DType, *values: float) -> bytes | None:
        return _content(
            dtype, memoryview(torch.tensor(values, dtype=dtype.to_torch()).numpy().tobytes())
        )

    assert content(DType.float32, 0, 0, 0) is content(DType.float32, 3) is None
    assert content(DType.int64, 0, 1, 2) is content(DType.bool, 0, 1) is None
    assert content(DType.float32, 1, 2) not in (None, content(DType.float32, 2, 1))
    assert content(DType.int8, 1, 2) not in (None, content(DType.uint8, 1, 2))
