"""The partitioner that gives executorch's Vulkan delegate what purevk has kernels for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from executorch.backends.vulkan.partitioner import vulkan_partitioner as etvk
from executorch.backends.vulkan.vulkan_preprocess import VulkanBackend
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data, tag_mutated_buffer
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

from purevk.errors import PurevkError, UnsupportedProgramError
from purevk.export.checks import QUANTIZED, Check, Etvk, Kernels, Lists, Support
from purevk.export.operators import name_of
from purevk.frontends.executorch import call_record
from purevk.frontends.executorch.delegate_calls import LISTS_ALL
from purevk.frontends.torch.exported import read_inputs

# What the delegate's file can name. Layouts and memory objects mean nothing to purevk, and integers
# keep their 64 bits.
_DEFAULTS = {
    "skip_tag_memory_metadata": True,
    "skip_memory_planning": True,
    "downcast_64_bit": False,
}


@dataclass(frozen=True)
class Refusal:
    """A node that stays outside of the delegate.

    Attributes:
        node: its name in the graph.
        operator: such as "aten.linalg_inv_ex.default".
        reason: why.
    """

    node: str
    operator: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node}: {self.operator}: {self.reason}"


class PurevkPartitioner(Partitioner):
    """Gives executorch's Vulkan delegate everything that purevk has a kernel for.

    The delegate is written by executorch's own `VulkanBackend`, so the file is an ordinary `.pte`.

    Args:
        compile_options: those of executorch's `VulkanPartitioner`, such as "force_fp16",
            "require_dynamic_shapes" (purevk follows dynamic shapes in every operator, so it refuses
            nothing more), "skip_bool_tensors" and "external_constants_max_data_bytes". By default
            integers keep 64 bits ("downcast_64_bit": False) and no layouts are written.
        operator_blocklist, operator_allowlist: operators (edge or ATen overloads) that are never,
            or alone, delegated.
        nn_module_blocklist, nn_module_allowlist: parts of the names of module classes, likewise.
        portable_to_etvk: delegates only what ET-VK's runtime can run too, with the layouts that it
            needs, as its `VulkanPartitioner` does, and without the operators that this takes and
            the runtime lacks.
        share_buffers: leaves the module's buffers outside of delegates. So the methods of a file
            share those that one of them writes, if it is written with
            `MemoryPlanningPass(share_mutable_buffers=True)`. A delegate has buffers of its own.

    Attributes:
        refused: after partitioning, a `Refusal` for each operator that stays outside, with the
            reason.
    """

    def __init__(
        self,
        compile_options: Mapping[str, Any] | None = None,
        operator_blocklist: Sequence[Any] | None = None,
        operator_allowlist: Sequence[Any] | None = None,
        nn_module_blocklist: Sequence[str] | None = None,
        nn_module_allowlist: Sequence[str] | None = None,
        portable_to_etvk: bool = False,
        share_buffers: bool = False,
    ) -> None:
        self.options = {**({} if portable_to_etvk else _DEFAULTS), **(compile_options or {})}
        self.portable_to_etvk, self.share_buffers = portable_to_etvk, share_buffers
        self.delegation_spec = DelegationSpec(
            VulkanBackend.__name__, etvk.parse_compile_options(self.options)
        )
        self.refused: list[Refusal] = []
        self._lists = Lists(
            {name_of(each) for each in operator_blocklist or ()},
            None if operator_allowlist is None else {name_of(each) for each in operator_allowlist},
            set(nn_module_blocklist or ()),
            None if nn_module_allowlist is None else set(nn_module_allowlist),
            bool(self.options.get("skip_bool_tensors")),
        )

    def ops_to_not_decompose(
        self, ep: ExportedProgram
    ) -> tuple[list[torch._ops.OpOverload], Callable[[torch.fx.Node], bool] | None]:
        """Operators that stay whole, because they have kernels of their own."""
        kept = list(etvk.ops_not_to_decompose)
        return (kept if self.portable_to_etvk else [*kept, *_WHOLE]), lambda node: True

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Tags the nodes that go into delegates, as few as their dependencies allow.

        Raises:
            UnsupportedProgramError: a buffer would get another dtype, or other sizes.
        """
        _check_buffers(exported_program)
        module = exported_program.graph_module
        refused: dict[torch.fx.Node, str] = {}
        checks: list[Check] = [self._lists]
        checks.append(
            Etvk(self.options, module) if self.portable_to_etvk else Kernels(self.options)
        )
        support = Support(checks, refused)
        partitions = CapabilityBasedPartitioner(
            module, support, allows_single_node_partition=True
        ).propose_partitions()
        self.refused = [
            Refusal(node.name, name_of(node.target), refused[node])
            for node in module.graph.nodes
            if node in refused
        ]
        if any(each.operator.startswith(QUANTIZED) for each in self.refused):
            # Their out-variants, without which executorch writes no file.
            import executorch.kernels.quantized  # noqa: F401
        for partition in partitions:
            for node in partition.nodes:
                node.meta["delegation_tag"] = f"tag{partition.id}"
        tag_constant_data(exported_program)
        tag_mutated_buffer(exported_program)
        _keep_shared_buffers(exported_program, self.share_buffers)
        spec = DelegationSpec(
            self.delegation_spec.backend_id,
            [
                *self.delegation_spec.compile_specs,
                *_calls(exported_program),
                CompileSpec(LISTS_ALL, b""),
            ],
        )
        tags = {f"tag{partition.id}": spec for partition in partitions}
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


def _keep_shared_buffers(program: ExportedProgram, all_of_them: bool) -> None:
    """Leaves a buffer that is written outside of delegates if not one of them alone reads and writes
    it. Executorch would give each delegate a copy of its own, and one of them the new content.

    Args:
        all_of_them: leaves all buffers of the module, also those that other methods write.
    """
    signature = program.graph_signature
    (output,) = program.graph.find_nodes(op="output")
    for node in program.graph.find_nodes(op="placeholder"):
        buffer = signature.inputs_to_buffers.get(node.name)
        if buffer is None or buffer.startswith("_lifted_tensor_constant"):
            continue
        makers = [
            made
            for made, spec in zip(output.args[0], signature.output_specs, strict=True)
            if spec.kind is OutputKind.BUFFER_MUTATION and spec.target == buffer
        ]
        others = [*(user for user in node.users if user is not output), *makers]
        tags = {other.meta.get("delegation_tag") for other in others}
        if all_of_them or (makers and len(tags) > 1):
            node.meta.pop("delegation_tag", None)
        if makers and "delegation_tag" not in node.meta:
            node.meta["et_init_buffer"] = True  # its content goes into the file


def _check_buffers(program: ExportedProgram) -> None:
    """`run_decompositions` of torch takes `source` in place of `buffer.copy_(source)`, also where that
    has another dtype or sizes that broadcast; the file would keep it so."""
    tensors: Mapping[str, Any] = {**program.state_dict, **program.constants}
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    for spec in program.graph_signature.output_specs:
        buffer, value = tensors.get(spec.target or ""), values.get(getattr(spec.arg, "name", ""))
        if spec.kind is not OutputKind.BUFFER_MUTATION or buffer is None or value is None:
            continue
        known = all(isinstance(size, int) for size in value.shape)
        if buffer.dtype != value.dtype or (known and buffer.shape != value.shape):
            raise UnsupportedProgramError(
                f"the buffer {spec.target} is {buffer.dtype} of sizes {tuple(buffer.shape)}, and "
                f"would become {value.dtype} of sizes {tuple(value.shape)}",
                why="torch drops copies into buffers from programs that it decomposes, with the "
                "conversion that they are",
                next="convert what is copied: buffer.copy_(x.to(buffer.dtype).expand_as(buffer))",
            )


def _calls(program: ExportedProgram) -> list[CompileSpec]:
    """What the file says of the calls that it takes; see `purevk.frontends.executorch.call_record`."""
    try:
        graph = read_inputs(program)
    except PurevkError:
        return []  # an input that purevk has no form for: ExecuTorch says more of it
    return [CompileSpec(call_record.KEY, call_record.write(graph))]


_WHOLE = [
    torch.ops.aten.silu.default, torch.ops.aten.hardsigmoid.default, torch.ops.aten.rms_norm.default,
    torch.ops.aten.upsample_bilinear2d.vec,
]  # fmt: skip
