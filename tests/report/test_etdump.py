"""Times of a .pte file's nodes for executorch's Inspector."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import purevk
from purevk.cli import main
from purevk.report.etdump import Place, places_of


class Model(torch.nn.Module):
    """topk has no Vulkan kernel in executorch, so that there are two delegates."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.inner(x))
        values, indices = torch.topk(y * 2 + 1, 3)
        return torch.sigmoid(values), indices


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import to_edge_transform_and_lower

    folder = tmp_path_factory.mktemp("etdump")
    program = torch.export.export(Model().eval(), (torch.randn(2, 8),))
    edge = to_edge_transform_and_lower(
        program, partitioner=[VulkanPartitioner()], generate_etrecord=True
    )
    made = edge.to_executorch()
    (folder / "model.pte").write_bytes(made.buffer)
    made.get_etrecord().save(str(folder / "model.etrecord"))
    return folder / "model.pte", folder / "model.etrecord"


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> Any:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.export
@pytest.mark.slow
@pytest.mark.device
def test_the_inspector_reads_the_times(
    exported: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from executorch.devtools import Inspector

    model, record = exported
    dump = tmp_path / "model.etdump"
    data = run(capsys, "profile", model, "--etdump", dump)
    assert data["etdump"] == str(dump)
    inspector = Inspector(etdump_path=str(dump), etrecord=str(record))
    (block,) = inspector.event_blocks
    whole, *events = block.events
    assert (block.name, whole.name) == ("forward", "Method::execute")
    assert whole.perf_data.raw[0] == pytest.approx(1e3 * data["call_seconds"], rel=1e-4)
    total = sum(each.perf_data.raw[0] for each in events)
    assert total == pytest.approx(1e3 * data["profile"]["measured"], rel=1e-3)
    assert [each.is_delegated_op for each in events] == [True, False, True]
    (kernel,) = [each for each in events if not each.is_delegated_op]
    assert kernel.op_types == ["aten.topk.default"]
    named = {
        row["source"]
        for row in run(capsys, "inspect", model, "--node-table")["methods"][0]["node_table"]
    }
    for each in events[::2]:  # the Inspector names delegated nodes by their number
        assert any(f"#{each.name} " in source for source in named)


@pytest.mark.device
def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with purevk.compile(torch.nn.ReLU(), (torch.randn(3),)) as program:
        program.save(tmp_path / "model.pvk")
    words = ["profile", str(tmp_path / "model.pvk"), "--etdump", str(tmp_path / "dump")]
    assert main(words) == 1
    assert "those of a .pte file" in capsys.readouterr().err
    assert not (tmp_path / "dump").exists()


def test_places_in_a_file() -> None:
    calls = {0: 3, 1: 7}
    assert places_of("forward#5 aten::topk.values", calls) == [Place(5, None)]
    source = "delegate 0#4 aten.linear.default + delegate 1#9 aten.relu.default"
    assert places_of(source, calls) == [Place(3, 4), Place(7, 9)]
    assert places_of("delegate 2#1 aten.add.Tensor", calls) == []
    assert places_of("", calls) == places_of("layers.0.fc", calls) == []
