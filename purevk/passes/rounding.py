"""Rounding after every operator, as eager torch does on the CPU: the option `round="eager"`.

The pass puts `purevk.rounded` after each operator of the program before these are expanded. Passes that
join operators do not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Value
from purevk.lower.expression import ROUND
from purevk.lower.numbers import rounded
from purevk.ops import registry
from purevk.ops.elementwise.pointwise import NAME as PROGRAM
from purevk.ops.elementwise.special import DIVIDED, ROOT, ROUNDED
from purevk.passes.rewrite import Rewriter, each_node
from purevk.tuning import DeviceTraits

# Passes that have one kernel compute what several operators of the program compute, without rounding
# between them.
JOINING = (
    "find_attention",
    "find_rms_norm",
    "find_rotary",
    "fold_batch_norm",
    "fuse_few_rows",
    "keep_weights_quantized",
    "rotate_norms",
    "rotate_to_caches",
)


def round_results(graph: Graph, traits: DeviceTraits) -> Graph:
    """Rounds the results of the program's operators that other operators may be joined with."""

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        definition = registry.find(node.op)
        form = None if definition is None else definition.form
        if not isinstance(form, (registry.Pointwise, registry.Rewrite)) or _is_copy(form):
            return None
        if not any(value.type.dtype in ROUND for value in node.results):
            return None
        if node.op in _FORMULAS:
            result = _FORMULAS[node.op](rewriter, node)
            if result is not None:
                return (_round(rewriter, result),)
        node = replace(node, op=_EXACT.get(node.op, node.op))
        rewriter.keep(_with_rounded_numbers(node) if isinstance(form, registry.Pointwise) else node)
        return tuple(_round(rewriter, value) for value in node.results)

    return each_node(graph, visit)


def drop_rounding(graph: Graph, traits: DeviceTraits) -> Graph:
    """Removes rounding of what a kernel writes: memory rounds it."""
    producers = graph.producers()

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op != ROUNDED:
            return None
        source = producers.get(node.inputs[0])
        while source is not None and registry.is_view(source):
            source = producers.get(source.inputs[0])
        definition = None if source is None else registry.find(source.op)
        pointwise = definition is not None and isinstance(definition.form, registry.Pointwise)
        joined = pointwise or (source is not None and source.op == PROGRAM)
        return None if joined else node.inputs[0]

    return each_node(graph, visit)


def _is_copy(form: registry.Form) -> bool:
    return isinstance(form, registry.Pointwise) and form.glsl == "x"


def _round(rewriter: Rewriter, value: Value) -> Value:
    return rewriter.emit(ROUNDED, value) if value.type.dtype in ROUND else value


def _with_rounded_numbers(node: Node) -> Node:
    """torch rounds most numbers that are operands, and alpha of sums. It rounds the product with alpha
    only among the last elements of a tensor, which its vectors do not fill."""
    if node.op in _IN_FLOAT32:
        return node
    arguments = registry.definition_of(node).bind(node.args)
    for name in ("x", "y", "alpha") if node.op in _SUMS else ("x", "y"):
        number = arguments.get(name)
        if isinstance(number, (int, float)):
            arguments[name] = rounded(number, node.result.type.dtype)
    return replace(node, args=tuple(arguments.values()))


def _cube(rewriter: Rewriter, node: Node) -> Value | None:
    x, dtype = node.args[0], node.result.type.dtype
    if not isinstance(x, Value) or node.args[1] != 3 or dtype is not DType.bfloat16:
        return None
    square = _round(rewriter, rewriter.aten.mul.Tensor(x, x))
    return rewriter.aten.mul.Tensor(square, x)


def _gelu(rewriter: Rewriter, node: Node) -> Value:
    """The formula of torch, with what it loses where it subtracts from 1."""

    def times(x: Value, y: Value | float) -> Value:
        return rewriter.aten.mul.Tensor(x, y)

    def plus(x: Value, y: Value | float) -> Value:
        return rewriter.aten.add.Tensor(x, y)

    x = rewriter.aten._to_copy(node.tensor("x"), DType.float32)
    if node.str("approximate") == "tanh":
        cube = times(times(x, x), x)
        inner = times(plus(x, times(cube, 0.044715)), math.sqrt(2 / math.pi))
        curve = rewriter.aten.tanh(inner)
    else:
        curve = rewriter.aten.erf(times(x, math.sqrt(0.5)))
    result = times(times(x, 0.5), plus(curve, 1.0))
    return rewriter.aten._to_copy(result, node.result.type.dtype)


# Formulas of which eager torch rounds, or loses, other digits than the definitions.
_FORMULAS: dict[str, Callable[[Rewriter, Node], Value | None]] = {
    "aten.gelu.default": _gelu,
    "aten.pow.Tensor_Tensor": _cube,
}
# What devices compute with errors of some units in the last place, and processors without: the nearest
# float16 may be another one.
_EXACT = {"aten.div.Tensor": DIVIDED, "aten.sqrt.default": ROOT}
# Operators that take numbers as they are.
_IN_FLOAT32 = (
    "aten.mul.Tensor",
    DIVIDED,
    "aten.div.Tensor_mode",
    "aten.floor_divide.default",
)
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Scalar")
