"""Quantized export to run: 4-bit weights from torchao, through ExecuTorch's `.pte`, to the device.

    python examples/quantized_export.py --folder exported

The script trains a small network on real scans of digits for a few seconds, writes it as a float file
and as files with 8-bit and 4-bit weights, loads each, and counts how many unseen digits are right.
Needs torch, executorch (with torchao) and scikit-learn.
"""

from __future__ import annotations

import argparse
import copy
import logging
from pathlib import Path

import checkout  # noqa: F401  # hides warnings of torch and torchao
import torch
from executorch.exir import to_edge_transform_and_lower
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torchao.quantization import quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.quant_api import IntxWeightOnlyConfig

import purevk
from purevk.export import PurevkPartitioner

TRAIN, MOST = 1200, 600
KINDS = {
    "float32": None,
    "8 bits per row": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0)),
    "4 bits per 32": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
}


def trained(images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """A network of linear layers, trained with torch."""
    model = nn.Sequential(
        *(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(12):
        for batch in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def is_hidden(module: nn.Module, name: str) -> bool:
    """Not the last layer: executorch 1.5 cannot pack 4-bit weights of 10 rows, and it is small."""
    return isinstance(module, nn.Linear) and module.out_features > 10


def export(model: nn.Module, example: torch.Tensor, path: Path) -> None:
    """Writes a `.pte` file with one delegate for the whole model, for any batch size."""
    batch = torch.export.Dim("batch", min=1, max=MOST)
    program = torch.export.export(model, (example,), dynamic_shapes=[{0: batch}])
    partitioner = PurevkPartitioner()
    edge = to_edge_transform_and_lower(program, partitioner=[partitioner])
    assert not partitioner.refused, partitioner.refused
    path.write_bytes(edge.to_executorch().buffer)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("exported"))
    options = parser.parse_args()
    logging.getLogger().setLevel(logging.WARNING)
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images))
    images, labels = images[order], labels[order]
    model = trained(images[:TRAIN], labels[:TRAIN])
    unseen, truth = images[TRAIN:], labels[TRAIN:]

    table = Table(title="Digits that the training did not see")
    for column in ("weights", "file", "on the CPU", "right", "largest difference from eager torch"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for kind, config in KINDS.items():
        eager = copy.deepcopy(model)
        if config is not None:
            quantize_(eager, config, is_hidden)
        path = options.folder / f"digits_{kind.split(' per')[0].replace(' ', '_')}.pte"
        export(eager, unseen[:8], path)
        with purevk.load(path) as program, torch.no_grad():
            logits, expected = program.forward(unseen), eager(unseen)
            if isinstance(logits, (list, tuple)):
                logits = logits[0]
            nodes = program.report()["cpu_nodes"]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        right = int((logits.argmax(-1) == truth).sum())
        size = path.stat().st_size / 1024
        difference = float((logits - expected).abs().max())
        table.add_row(
            kind, f"{size:.0f} KiB", str(nodes), f"{right} of {len(truth)}", f"{difference:.0e}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
