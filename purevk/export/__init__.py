"""The export side: what lets executorch hand a whole model to the Vulkan delegate. Needs torch and
executorch.

from executorch.exir import to_edge_transform_and_lower
from purevk.export import PurevkPartitioner

partitioner = PurevkPartitioner({"force_fp16": True})
edge = to_edge_transform_and_lower(torch.export.export(model, inputs), partitioner=[partitioner])
print(*partitioner.refused, sep="\\n")
"""

from __future__ import annotations

from purevk.export import writer  # noqa: F401  it changes executorch's writer
from purevk.export.partitioner import PurevkPartitioner, Refusal

__all__ = ["PurevkPartitioner", "Refusal"]
