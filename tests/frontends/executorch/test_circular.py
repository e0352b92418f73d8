"""Convolutions with circular padding, in files that executorch writes. It exports the padding as an
empty tensor whose parts are written one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import purevk  # noqa: E402
from tests.models.export import trace_patterns_once  # noqa: E402
from tests.ops.harness import host_nodes  # noqa: E402

pytestmark = [pytest.mark.export, pytest.mark.device, pytest.mark.slow]
CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


@pytest.mark.parametrize("flow", ["vulkan", "portable"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_circular_padding(dims: int, flow: str, tmp_path: Path) -> None:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    trace_patterns_once()
    torch.manual_seed(dims)
    model = CONVOLUTIONS[dims - 1](2, 3, 3, padding=2, padding_mode="circular").eval()
    x = torch.randn(1, 2, *(5, 6, 7)[:dims])
    edge = to_edge_transform_and_lower(
        torch.export.export(model, (x,)),
        partitioner=[VulkanPartitioner()] if flow == "vulkan" else None,
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    path = tmp_path / "model.pte"
    path.write_bytes(edge.to_executorch().buffer)
    with purevk.load(path) as program, torch.no_grad():
        assert not host_nodes(program)
        torch.testing.assert_close(program.forward(x), model(x), rtol=1e-5, atol=1e-6)
