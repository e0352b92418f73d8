"""The export side: what lets executorch hand a whole model to the Vulkan delegate. Needs torch and
executorch.

from executorch.exir import to_edge_transform_and_lower
from purevk.export import PurevkPartitioner

partitioner = PurevkPartitioner({"force_fp16": True})
edge = to_edge_transform_and_lower(torch.export.export(model, inputs), partitioner=[partitioner])
print(*partitioner.refused, sep="\\n")
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from executorch.backends.vulkan import op_registry as etvk_registry
from executorch.backends.vulkan.partitioner import vulkan_partitioner as etvk
from executorch.backends.vulkan.serialization.vulkan_graph_builder import VkGraphBuilder
from executorch.backends.vulkan.serialization.vulkan_graph_schema import VkDataType
from executorch.backends.vulkan.utils import is_mutable_buffer_node
from executorch.backends.vulkan.vulkan_preprocess import VulkanBackend
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data, tag_mutated_buffer
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from purevk.dtypes import DType
from purevk.errors import FileFormatError, GraphError, PurevkError, UnsupportedProgramError
from purevk.frontends.executorch import call_record, delegate_buffers
from purevk.frontends.executorch.delegate_calls import LISTS_ALL
from purevk.frontends.executorch.names import INTEGER_OPERATORS
from purevk.frontends.importer import Importer
from purevk.frontends.torch.exported import read_inputs
from purevk.graph.context import typical_traits
from purevk.ir import TensorType
from purevk.ops import registry
from purevk.passes.placement import refusal

# What the delegate's file can name. Layouts and memory objects mean nothing to purevk, and integers
# keep their 64 bits.
_DEFAULTS = {
    "skip_tag_memory_metadata": True,
    "skip_memory_planning": True,
    "downcast_64_bit": False,
}
_DTYPES = frozenset(
    DType[name.lower()] for name in VkDataType.__members__ if name.lower() in DType.__members__
)

# Operators that ET-VK's own partitioner takes, and that its runtime aborts on ("Missing operator").
_MISSING_IN_ETVK = frozenset({
    "aten.logical_not.default", "aten.t_copy.default", "torchao.quantize_affine.default",
    "torchao.dequantize_affine.default", *(
        f"quantized_decomposed.{name}" for name in (
            "choose_qparams.tensor", "choose_qparams_per_token_asymmetric.default", "quantize_per_channel.default",
            "dequantize_per_channel.default", "quantize_per_token.default", "dequantize_per_token.default",
            "quantize_per_tensor.tensor", "dequantize_per_tensor.tensor", "embedding_4bit.dtype",
        )
    ),
})  # fmt: skip
_QUANTIZED = "quantized_decomposed."
_SYMBOLIC_IN_ETVK = frozenset({"add", "sub", "mul", "floordiv"})


# -- executorch's delegate writer ----------------------------------------------------------------
# It raises errors of Python for some operators that ET-VK lacks: it asks whether they take constants
# by themselves, and looks for quantized patterns in them. Here the answer is no.
#
# It leaves out inputs that no operator reads, and lists an output once that the caller takes several
# times, such as a tensor and its `detach()`. The call still passes all of them, and the file does
# not say which ones are meant. Here they are all written.
#
# It does not say which buffers the first outputs go to. A string that nothing takes says so here.
def _handles_own_prepacking(target: Any) -> bool:
    return bool(etvk_registry.has_impl(target) and etvk_registry.handles_own_prepacking(target))


def _careful(detect: Callable[[torch.fx.Node], Any]) -> Callable[[torch.fx.Node], Any]:
    """A detector of quantized patterns that finds none where the weight has one scale, or where the
    replacement takes neither its rank, nor its scales, nor their number."""

    @functools.wraps(detect)
    def detected(node: torch.fx.Node) -> Any:
        try:
            match = detect(node)
        except AssertionError:
            return None
        if match is not None and "convolution" in _name(node.target):
            quantized = getattr(match, "weight_scales_node", None) is not None
            return None if quantized and _rank(match.weight_node) != 4 else match
        if match is not None and _name(node.target) == "quantized_decomposed.embedding_4bit.dtype":
            return None if _rank(match.scales_node) != 2 else match
        dequantize = getattr(match, "dequantize_weight_node", None)
        if dequantize is not None and _pads_scales(match, dequantize):
            return None
        return match

    return detected


def _pads_scales(match: Any, dequantize: torch.fx.Node) -> bool:
    """Whether a linear layer has a weight of 4 bits with a number of outputs that is no multiple of
    4. The replacement pads its scales, which the shape function of its operator does not take."""
    overload = _overload(dequantize.target)
    if overload is None or match.weight_node.meta["val"].shape[-2] % 4 == 0:
        return False
    names = [each.name for each in overload._schema.arguments]
    arguments = dict(zip(names, _arguments(dequantize, overload)))
    largest = arguments.get("quant_max")
    return match.is_weight_pergroup_quantized() and (largest is None or largest <= 7)


def _rank(node: torch.fx.Node) -> int:
    rank: int = node.meta["val"].dim()
    return rank


def _all_inputs(write: Callable[[Any, torch.fx.Node], Any]) -> Callable[[Any, torch.fx.Node], None]:
    @functools.wraps(write)
    def process_placeholder_node(self: Any, node: torch.fx.Node) -> None:
        write(self, node)
        if not node.users and node.name in self.program.graph_signature.user_inputs:
            number = self.create_node_value(node)
            self.input_ids += [number] if isinstance(number, int) else number

    return process_placeholder_node


def _all_outputs(
    write: Callable[[Any, torch.fx.Node], Any],
) -> Callable[[Any, torch.fx.Node], None]:
    @functools.wraps(write)
    def process_output_node(self: Any, node: torch.fx.Node) -> None:
        write(self, node)
        # The delegate writes these buffers in place, so they are no outputs.
        aliased = getattr(self, "buffer_mutation_inputs", ())
        made: Any = node.args[0]
        listed = [
            (self.node_to_value_ids[each], spec)
            for each, spec in zip(made, self.program.graph_signature.output_specs, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
            or not (each.name in aliased or is_mutable_buffer_node(each, self.program))
        ]
        self.output_ids[:] = [number for number, _ in listed]
        buffers = [spec.target for _, spec in listed if spec.kind is OutputKind.BUFFER_MUTATION]
        if buffers:
            signature = self.program.graph_signature
            nodes = {each.name: each for each in node.graph.find_nodes(op="placeholder")}
            numbers = {
                target: self.node_to_value_ids.get(nodes.get(name))
                for name, target in signature.inputs_to_buffers.items()
            }
            record = delegate_buffers.write([numbers.get(target) for target in buffers])
            self.create_string_value(record)

    return process_output_node


_prepacking: Any = importlib.import_module(
    "executorch.backends.vulkan._passes.insert_prepack_nodes"
)
if hasattr(_prepacking, "handles_own_prepacking"):
    _prepacking.handles_own_prepacking = _handles_own_prepacking
for _entry in etvk.vk_patterns.fusable_patterns.values():
    if getattr(_entry, "detector_fn", None) is not None:
        _entry.detector_fn = _careful(_entry.detector_fn)
    # It traces the graphs of its patterns anew for each delegate: seconds each.
    if _entry.get_graphs_fn is not None and not hasattr(_entry.get_graphs_fn, "cache_info"):
        _entry.get_graphs_fn = functools.cache(_entry.get_graphs_fn)
VkGraphBuilder.process_placeholder_node = _all_inputs(VkGraphBuilder.process_placeholder_node)
VkGraphBuilder.process_output_node = _all_outputs(VkGraphBuilder.process_output_node)


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


_Check = Callable[[torch.fx.Node], "str | None"]  # a reason against a node, or None


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
        self._blocked = {_name(each) for each in operator_blocklist or ()}
        self._allowed = (
            None if operator_allowlist is None else {_name(each) for each in operator_allowlist}
        )
        self._blocked_modules = set(nn_module_blocklist or ())
        self._allowed_modules = None if nn_module_allowlist is None else set(nn_module_allowlist)

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
        checks: list[_Check] = [_Lists(self)]
        checks.append(
            _Etvk(self.options, module) if self.portable_to_etvk else _Kernels(self.options)
        )
        support = _Support(checks, refused)
        partitions = CapabilityBasedPartitioner(
            module, support, allows_single_node_partition=True
        ).propose_partitions()
        self.refused = [
            Refusal(node.name, _name(node.target), refused[node])
            for node in module.graph.nodes
            if node in refused
        ]
        if any(each.operator.startswith(_QUANTIZED) for each in self.refused):
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
        tags = {each.meta.get("delegation_tag") for each in others}
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


def _name(target: Any) -> str:
    """The operator "namespace.op.overload" of an ATen overload, an edge one, or a Python function
    of sizes."""
    overload = _overload(target)
    return str(overload) if overload is not None else getattr(target, "__name__", str(target))


def _overload(target: Any) -> torch._ops.OpOverload | None:
    """The ATen overload that a node calls; an edge operator holds one."""
    if not isinstance(target, torch._ops.OpOverload):
        target = getattr(target, "_op", None)
    return target if isinstance(target, torch._ops.OpOverload) else None


class _Support(OperatorSupportBase):
    """Asks checks, each a function of a node that gives a reason against it or None, and notes the
    first reason."""

    def __init__(
        self,
        checks: Sequence[_Check],
        refused: dict[torch.fx.Node, str],
    ) -> None:
        super().__init__()
        self.checks, self.refused = checks, refused
        self._known: dict[torch.fx.Node, bool] = {}

    def is_node_supported(
        self, submodules: Mapping[str, torch.nn.Module], node: torch.fx.Node
    ) -> bool:
        if node.op != "call_function":
            return False
        if node.target is operator.getitem:
            source = node.args[0]
            return isinstance(source, torch.fx.Node) and self.is_node_supported(submodules, source)
        if node not in self._known:
            reason = next(
                (reason for check in self.checks if (reason := check(node)) is not None), None
            )
            self._known[node] = reason is None
            if reason is not None:
                self.refused[node] = reason
        return self._known[node]


class _Lists:
    """What the caller allows and blocks."""

    def __init__(self, settings: PurevkPartitioner) -> None:
        self.settings = settings

    def __call__(self, node: torch.fx.Node) -> str | None:
        settings, name = self.settings, _name(node.target)
        if name in settings._blocked:
            return "in operator_blocklist"
        if (
            settings._allowed is not None
            and name not in settings._allowed
            and not _is_symbolic(node)
        ):
            return "not in operator_allowlist"
        comes_from = etvk.utils.node_comes_from_any_nn_module_in_set
        if settings._blocked_modules and comes_from(node, settings._blocked_modules):
            return "its module is in nn_module_blocklist"
        if settings._allowed_modules is not None and not comes_from(
            node, settings._allowed_modules
        ):
            return "its module is not in nn_module_allowlist"
        if settings.options.get("skip_bool_tensors") and etvk.utils.is_tensor_node(node):
            return "bool tensors are skipped" if etvk.utils.op_contains_bool_tensor(node) else None
        return None


def _is_symbolic(node: torch.fx.Node) -> bool:
    """Whether a node computes sizes."""
    return isinstance(
        node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat, int, bool)
    )


class _Kernels:
    """What purevk has kernels for, by its own rows: as it would import the node, and choose where
    it runs."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.traits = typical_traits()
        # Scales are float64 here. executorch folds them away, with a quantize and its dequantize,
        # when it writes a delegate. The few that stay run on the CPU if a device has no float64.
        self.quantized_traits = replace(self.traits, features=self.traits.features | {"float64"})
        self.dtypes = _DTYPES

    def __call__(self, node: torch.fx.Node) -> str | None:
        name = _name(node.target)
        if _is_symbolic(node) or name in (
            "aten._assert_scalar.default",
            "aten.sym_constrain_range_for_size.default",
        ):
            known = name in INTEGER_OPERATORS or name.startswith(
                ("aten.sym_", "aten._assert_scalar", "aten._local")
            )
            return None if known else "no such arithmetic on sizes"
        row = registry.find(name)
        overload = _overload(node.target)
        if row is None or row.form is None or overload is None:
            return "no kernel"
        if any(
            isinstance(leaf, torch.fx.Node) and leaf.op == "get_attr"
            for leaf in node.all_input_nodes
        ):
            return "it takes a graph as an argument"
        results = [
            value for value in _flat(node.meta.get("val")) if isinstance(value, torch.Tensor)
        ]
        if any(free for value in results for free in map(_unbacked, value.shape)):
            return "its sizes are known only during a call"
        importer = Importer("node", name)
        try:
            args = [self._arg(importer, arg) for arg in _arguments(node, overload)]
            importer.emit(
                name,
                tuple(args),
                [_type(value) for value in results],
                [True] * len(results),
                node.name,
            )
            made = importer.nodes[-1]
        except (FileFormatError, GraphError, registry.ShapeError) as error:
            return getattr(error, "why", "") or str(error)
        except _Refused as error:
            return str(error)
        for value in (*made.inputs, *made.results):
            if value.type.dtype not in self.dtypes:
                return f"the delegate's file has no {value.type.dtype.name}"
        quantized = name.startswith(_QUANTIZED)
        return refusal(made, self.quantized_traits if quantized else self.traits)

    def _arg(self, importer: Importer, arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(importer, item) for item in arg)
        if isinstance(arg, torch.fx.Node):
            arg = arg.meta["val"]
        if isinstance(arg, torch.Tensor):
            return importer.input(_dtype(arg.dtype), [_bound(size) for size in arg.shape], False)
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _bound(arg)
        if isinstance(arg, torch.dtype):
            return _dtype(arg)
        return None if isinstance(arg, (torch.layout, torch.device, torch.memory_format)) else arg


def _arguments(node: torch.fx.Node, overload: torch._ops.OpOverload) -> list[Any]:
    """The arguments in the schema's order, defaults filled in."""
    full = []
    for at, argument in enumerate(overload._schema.arguments):
        if at < len(node.args) and not argument.kwarg_only:
            full.append(node.args[at])
        else:
            full.append(node.kwargs.get(argument.name, argument.default_value))
    return full


class _Refused(PurevkError):
    """An argument that the delegate's file cannot hold."""


def _flat(value: Any) -> list[Any]:
    return (
        [each for item in value for each in _flat(item)]
        if isinstance(value, (list, tuple))
        else [value]
    )


def _dtype(dtype: torch.dtype) -> DType:
    found = DType.from_torch(dtype)
    if found is None:
        raise _Refused(f"purevk has no {str(dtype).removeprefix('torch.')}")
    return found


def _type(value: torch.Tensor) -> TensorType:
    return TensorType(_dtype(value.dtype), tuple(_bound(size) for size in value.shape))


def _unbacked(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


def _bound(size: Any) -> Any:
    """An upper bound of a size, as the file records it: what it was when the model was exported, if
    it has none."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    if not size.node.has_hint():
        raise _Refused("a number that is known only during a call")
    if isinstance(size, torch.SymInt):
        upper = size.node.shape_env.bound_sympy(size.node.expr).upper
        if upper.is_finite and math.isfinite(float(upper)) and int(upper) < 2**31:
            return int(upper)
    return size.node.hint


class _Etvk:
    """What ET-VK's partitioner takes and its runtime has."""

    def __init__(self, options: Mapping[str, Any], module: torch.fx.GraphModule) -> None:
        utils = etvk.utils
        limits = (
            utils.SMALL_TEXTURE_LIMITS
            if options.get("small_texture_limits")
            else utils.DEFAULT_TEXTURE_LIMITS
        )
        self.reason: str | None = None
        self.support = etvk.VulkanSupportedOperators(
            options.get("texture_limits", limits),
            options.get("buffer_limit", utils.DEFAULT_BUFFER_LIMIT),
            require_dynamic_shape=options.get("require_dynamic_shapes", False),
            fusable_subgraphs=etvk.vk_patterns.get_all_fusable_subgraphs(module),
        )
        self.support.log_skip = self._note  # it says why only to its log

    def _note(self, node: torch.fx.Node, reason: str) -> None:
        self.reason = reason

    def __call__(self, node: torch.fx.Node) -> str | None:
        name = _name(node.target)
        if name in _MISSING_IN_ETVK or (
            _is_symbolic(node) and name in INTEGER_OPERATORS and name not in _SYMBOLIC_IN_ETVK
        ):
            return "ET-VK's runtime has no such operator"
        self.reason = None
        if self.support._is_node_supported(node):
            return None
        return self.reason or "ET-VK's partitioner refuses it"
