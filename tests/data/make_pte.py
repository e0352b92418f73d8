"""Writes the small programs of `tests/data/pte`: `python tests/data/make_pte.py [folder] [name
...]`.

Needs executorch 1.5. The tests of the reader use the committed files; those marked `export` build
them anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
from executorch.exir import ExecutorchBackendConfig, to_edge, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
from torch import nn
from torch.export import Dim, export

BUILDERS: dict[str, Callable[[], Any]] = {}


def _program(build: Callable[[], Any]) -> Callable[[], Any]:
    BUILDERS[build.__name__] = build
    return build


def _vulkan(
    model: nn.Module,
    inputs: tuple,
    dynamic: dict | None = None,
    config: ExecutorchBackendConfig | None = None,
    options: dict | None = None,
) -> Any:
    exported = export(model.eval(), inputs, dynamic_shapes=dynamic, strict=True)
    edge = to_edge_transform_and_lower(exported, partitioner=[VulkanPartitioner(options or {})])
    return edge.to_executorch(config or ExecutorchBackendConfig())


class LinearRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class TopK(nn.Module):
    """topk has no Vulkan kernel, so it stays between two delegates."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(x * 2.0 + 1.0, 2)
        return torch.sigmoid(values), indices


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(1, x.shape[1], 2, 4) + 1.0
        return torch.cat([y, y * y], dim=-1)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(8, dtype=torch.float32).reshape(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.add_(x)
        return self.cache * 2.0


class Branch(nn.Module):
    def forward(self, flag: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(flag, lambda x: x + 1.0, lambda x: x * 3.0, [x])


class Counted(nn.Module):
    """Sizes that come about during a call: a mask, nonzero, and a number read off a tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        count = x[0, 0].abs().int().item()
        torch._check(count >= 0)
        torch._check(count <= x.shape[0])
        return x[x[:, 0] > 0.5] * 2, (x > 0).nonzero()[:, 1] + 1, x[:count] + 1


class Gather(nn.Module):
    """Lists of optional tensors and of ints, several dtypes and a channels-last input."""

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        picked = torch.ops.aten.index.Tensor(x, [None, index])
        return picked.sum([2, 3]), torch.cat([index, index], 0)


@_program
def linear_relu() -> Any:
    return _vulkan(LinearRelu(), (torch.randn(2, 5),))


@_program
def linear_relu_half() -> Any:
    return _vulkan(LinearRelu(), (torch.randn(2, 5),), options={"force_fp16": True})


@_program
def linear_relu_inline() -> Any:
    config = ExecutorchBackendConfig(extract_delegate_segments=False)
    return _vulkan(LinearRelu(), (torch.randn(2, 5),), config=config)


@_program
def linear_relu_external() -> Any:
    return _vulkan(
        LinearRelu(), (torch.randn(2, 5),), options={"external_constants_max_data_bytes": 1 << 20}
    )


@_program
def topk() -> Any:
    return _vulkan(TopK(), (torch.randn(2, 7),))


@_program
def dynamic_views() -> Any:
    length = Dim("length", min=1, max=16)
    return _vulkan(
        Views(), (torch.randn(1, 5, 8),), ({1: length},), options={"require_dynamic_shapes": True}
    )


@_program
def counter() -> Any:
    return _vulkan(Counter(), (torch.randn(2, 4),))


@_program
def counter_portable() -> Any:
    config = ExecutorchBackendConfig(
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
        passes=[InitializedMutableBufferPass(["cache"])],
    )
    return to_edge(export(Counter(), (torch.randn(2, 4),), strict=True)).to_executorch(config)


@_program
def linear_portable() -> Any:
    return to_edge(export(LinearRelu(), (torch.randn(2, 5),), strict=True)).to_executorch()


@_program
def linear_portable_external() -> Any:
    config = ExecutorchBackendConfig(external_constants=True)
    return to_edge(export(LinearRelu(), (torch.randn(2, 5),), strict=True)).to_executorch(config)


@_program
def branch() -> Any:
    return to_edge(
        export(Branch(), (torch.tensor(True), torch.randn(3)), strict=True)
    ).to_executorch()


@_program
def gather() -> Any:
    x = torch.randn(1, 5, 3, 2).to(memory_format=torch.channels_last)
    return to_edge(export(Gather(), (x, torch.tensor([4, 0, 2])), strict=True)).to_executorch()


@_program
def counted() -> Any:
    return _vulkan(Counted(), (torch.randn(5, 4),))


@_program
def two_methods() -> Any:
    model = LinearRelu().eval()
    programs = {
        "forward": export(model, (torch.randn(2, 5),), strict=True),
        "step": export(model, (torch.randn(1, 5),), strict=True),
    }
    partitioners = {name: [VulkanPartitioner()] for name in programs}
    return to_edge_transform_and_lower(programs, partitioner=partitioners).to_executorch()


def write(name: str, folder: Path) -> Path:
    """Build program `name` into `folder`: `name.pte`, and beside it `name/*.ptd` if it has data
    files."""
    torch.manual_seed(7)
    program = BUILDERS[name]()
    path = folder / f"{name}.pte"
    path.write_bytes(program.buffer)
    data = folder / name
    data.mkdir(exist_ok=True)
    program.write_tensor_data_to_file(str(data))
    if not any(data.iterdir()):
        data.rmdir()
    return path


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else Path(__file__).parent / "pte"
    for name in arguments[1:] or BUILDERS:
        path = write(name, folder)
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
