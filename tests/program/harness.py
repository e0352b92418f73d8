"""Modules as `.pte` files, against the modules themselves; and the files of all releases of
executorch."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch

import purevk
from purevk import pte
from tests.models.export import trace_patterns_once
from tests.models.messages import quiet

RELEASES = Path(__file__).parents[1] / "data" / "releases"
FILES = sorted(
    {str(path.relative_to(RELEASES).with_suffix("")) for path in RELEASES.glob("*/*.pte")}
)


def tensor(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def file_of(module, inputs, dynamic_shapes=None, vulkan=False, **options) -> bytes:
    """The bytes of a `.pte` file."""
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import (
        EdgeCompileConfig,
        ExecutorchBackendConfig,
        to_edge_transform_and_lower,
    )

    trace_patterns_once()
    with quiet(), torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
        edge = to_edge_transform_and_lower(
            program,
            partitioner=[VulkanPartitioner({})] if vulkan else None,
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        return edge.to_executorch(ExecutorchBackendConfig(**options)).buffer


def check_file(
    module, calls, dynamic_shapes=None, vulkan=False, delegates=None, control=None
) -> None:
    """Calls a module and its `.pte` file in turn; `control` is the number of nodes that the host
    runs."""
    reference = copy.deepcopy(module)
    data = file_of(module, calls[0], dynamic_shapes, vulkan)
    if delegates is not None:
        with pte.read_program(data) as program:
            assert bool(program.method().delegates) == delegates
    with torch.no_grad(), purevk.load(data, bounds="grow") as program:
        for call in calls:
            torch.testing.assert_close(program(*call), reference(*call), rtol=1e-4, atol=1e-5)
        if control is not None:
            assert program.report()["control_flow"] == control


def samples_of(file: str) -> dict[str, list[tuple[list[np.ndarray], list[np.ndarray]]]]:
    """(inputs, eager results) of each recorded call, in order, by method."""
    own, found = RELEASES / f"{file}.npz", {}
    with np.load(own if own.exists() else RELEASES / "eager" / f"{Path(file).name}.npz") as arrays:
        for key in arrays.files:
            method, _, array = key.rpartition(".")
            kind = "in" if array.startswith("in") else "out"
            calls, number = (
                found.setdefault(method or "forward", []),
                int(array.removeprefix(kind).split("_")[0]),
            )
            if number == len(calls):
                calls.append(([], []))
            calls[number][kind == "out"].append(arrays[key])
    return found


def data_files(file: str) -> list[Path]:
    return sorted((RELEASES / file).glob("*.ptd"))
