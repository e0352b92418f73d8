"""Which nodes the partitioner delegates: what the caller allows, what purevk has kernels for, and what
ET-VK's runtime has."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from executorch.backends.vulkan.partitioner import vulkan_partitioner as etvk
from executorch.backends.vulkan.serialization.vulkan_graph_schema import VkDataType
from torch.fx.passes.operator_support import OperatorSupportBase

from purevk.dtypes import DType
from purevk.errors import FileFormatError, GraphError, PurevkError
from purevk.export.operators import arguments_of, name_of, overload_of
from purevk.frontends.executorch.names import INTEGER_OPERATORS
from purevk.frontends.importer import Importer
from purevk.graph.context import typical_traits
from purevk.ir import TensorType
from purevk.ops import registry
from purevk.passes.placement import refusal

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
QUANTIZED = "quantized_decomposed."
_SYMBOLIC_IN_ETVK = frozenset({"add", "sub", "mul", "floordiv"})
Check = Callable[[torch.fx.Node], "str | None"]  # a reason against a node, or None


class Support(OperatorSupportBase):
    """Asks checks, each a function of a node that gives a reason against it or None, and notes the
    first reason."""

    def __init__(
        self,
        checks: Sequence[Check],
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


@dataclass(frozen=True)
class Lists:
    """What the caller allows and blocks. See `PurevkPartitioner`; None: all.

    Attributes:
        blocked, allowed: names of operators.
        blocked_modules, allowed_modules: parts of the names of module classes.
        skip_bools: whether tensors of bool stay outside.
    """

    blocked: Collection[str]
    allowed: Collection[str] | None
    blocked_modules: set[str]
    allowed_modules: set[str] | None
    skip_bools: bool

    def __call__(self, node: torch.fx.Node) -> str | None:
        name = name_of(node.target)
        if name in self.blocked:
            return "in operator_blocklist"
        if self.allowed is not None and name not in self.allowed and not _is_symbolic(node):
            return "not in operator_allowlist"
        comes_from = etvk.utils.node_comes_from_any_nn_module_in_set
        if self.blocked_modules and comes_from(node, self.blocked_modules):
            return "its module is in nn_module_blocklist"
        if self.allowed_modules is not None and not comes_from(node, self.allowed_modules):
            return "its module is not in nn_module_allowlist"
        if self.skip_bools and etvk.utils.is_tensor_node(node):
            return "bool tensors are skipped" if etvk.utils.op_contains_bool_tensor(node) else None
        return None


def _is_symbolic(node: torch.fx.Node) -> bool:
    """Whether a node computes sizes."""
    return isinstance(
        node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat, int, bool)
    )


def _is_assertion(node: torch.fx.Node) -> bool:
    """Whether a node states something about sizes."""
    return name_of(node.target) in (
        "aten._assert_scalar.default",
        "aten.sym_constrain_range_for_size.default",
    )


class Kernels:
    """What purevk has kernels for, by its own rows: as it would import the node, and choose where
    it runs."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.traits = typical_traits()
        # Scales are float64 here. executorch folds them away, with a quantize and its dequantize,
        # when it writes a delegate. The few that stay run on the CPU if a device has no float64.
        self.quantized_traits = replace(self.traits, features=self.traits.features | {"float64"})
        self.dtypes = _DTYPES

    def __call__(self, node: torch.fx.Node) -> str | None:
        name = name_of(node.target)
        if _is_symbolic(node) or _is_assertion(node):
            known = name in INTEGER_OPERATORS or name.startswith(
                ("aten.sym_", "aten._assert_scalar", "aten._local")
            )
            if known and self._is_read_outside(node):
                return "a number that is known only during a call is read outside of the delegate"
            return None if known else "no such arithmetic on sizes"
        row = registry.find(name)
        overload = overload_of(node.target)
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
            args = [self._arg(importer, arg) for arg in arguments_of(node, overload)]
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
        quantized = name.startswith(QUANTIZED)
        return refusal(made, self.quantized_traits if quantized else self.traits)

    def _is_read_outside(self, node: torch.fx.Node) -> bool:
        """Whether a node of a number that only a call knows belongs to numbers that some node outside
        of delegates takes. A delegate of executorch gives tensors alone to what follows it."""
        numbers, todo = {node}, [node]
        while todo:
            current = todo.pop()
            near = {*current.users, *current.all_input_nodes} - numbers
            found = {each for each in near if _is_symbolic(each) and _is_unknown(each.meta["val"])}
            numbers |= found
            todo += found
        return any(
            not _is_symbolic(user) and not _is_assertion(user) and self(user) is not None
            for number in numbers
            if _is_symbolic(number) and _is_unknown(number.meta["val"])
            for user in number.users
        )

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


def _is_unknown(number: Any) -> bool:
    """Whether only a call knows a number."""
    known = not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return not known and not number.node.has_hint()


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


class Etvk:
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
        name = name_of(node.target)
        if name in _MISSING_IN_ETVK or (
            _is_symbolic(node) and name in INTEGER_OPERATORS and name not in _SYMBOLIC_IN_ETVK
        ):
            return "ET-VK's runtime has no such operator"
        self.reason = None
        if self.support._is_node_supported(node):
            return None
        return self.reason or "ET-VK's partitioner refuses it"
