"""What purevk changes in executorch's delegate writer, when it is imported.

It raises errors of Python for some operators that ET-VK lacks: it asks whether they take constants by
themselves, and looks for quantized patterns in them. Here the answer is no.

It leaves out inputs that no operator reads, and lists an output once that the caller takes several
times, such as a tensor and its `detach()`. The call still passes all of them, and the file does not
say which ones are meant. Here they are all written.

It keeps one value for 1 and 1.0, and for 0.0 and -0.0, whichever comes first. Here these are apart.

It does not say which buffers the first outputs go to. A string that nothing takes says so here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from executorch.backends.vulkan import op_registry as etvk_registry
from executorch.backends.vulkan.partitioner import vulkan_partitioner as etvk
from executorch.backends.vulkan.serialization.vulkan_graph_builder import VkGraphBuilder
from executorch.backends.vulkan.utils import is_mutable_buffer_node
from torch.export.graph_signature import OutputKind

from purevk.export.operators import arguments_of, name_of, overload_of
from purevk.frontends.executorch import delegate_buffers


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
        if match is not None and "convolution" in name_of(node.target):
            quantized = getattr(match, "weight_scales_node", None) is not None
            return None if quantized and _rank(match.weight_node) != 4 else match
        if (
            match is not None
            and name_of(node.target) == "quantized_decomposed.embedding_4bit.dtype"
        ):
            return None if _rank(match.scales_node) != 2 else match
        dequantize = getattr(match, "dequantize_weight_node", None)
        if dequantize is not None and _pads_scales(match, dequantize):
            return None
        return match

    return detected


def _pads_scales(match: Any, dequantize: torch.fx.Node) -> bool:
    """Whether a linear layer has a weight of 4 bits with a number of outputs that is no multiple of
    4. The replacement pads its scales, which the shape function of its operator does not take."""
    overload = overload_of(dequantize.target)
    if overload is None or match.weight_node.meta["val"].shape[-2] % 4 == 0:
        return False
    names = [argument.name for argument in overload._schema.arguments]
    arguments = dict(zip(names, arguments_of(dequantize, overload)))
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


def _numbers_apart(write: Callable[[Any, Any], int]) -> Callable[[Any, Any], int]:
    @functools.wraps(write)
    def get_or_create_scalar_value(self: Any, scalar: Any) -> int:
        known: dict[tuple[type, str], int] = vars(self).setdefault("_purevk_numbers", {})
        key = (type(scalar), str(scalar))
        if key not in known:
            self.const_scalar_to_value_ids.pop(scalar, None)
            known[key] = write(self, scalar)
        return known[key]

    return get_or_create_scalar_value


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
VkGraphBuilder.get_or_create_scalar_value = _numbers_apart(
    VkGraphBuilder.get_or_create_scalar_value
)
