"""bfloat16 for kernels that do not read it: their operands are converted to float32, and their
results back."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Arg, Graph, Node, Value, map_values
from purevk.ops import registry
from purevk.passes.rewrite import Rewriter, each_node
from purevk.tuning import DeviceTraits

_CAST = "aten._to_copy.default"


def widen_bfloat16(graph: Graph, traits: DeviceTraits) -> Graph:
    """Gives kernels float32 in place of bfloat16, except for those that take it. The sums are made
    in float32 either way."""

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        definition = registry.find(node.op)
        if (
            definition is None
            or not isinstance(definition.form, registry.Kernel)
            or definition.form.bfloat16
            or registry.mutated(node)
        ):
            return None
        if not any(_is_narrow(value) for value in (*node.inputs, *node.results)):
            return None
        args = tuple(_wide(rewriter, arg) for arg in node.args)
        types = tuple(
            value.type.with_dtype(DType.float32) if _is_narrow(value) else value.type
            for value in node.results
        )
        results = rewriter.emit_all(node.op, *args, results=types)
        return tuple(
            rewriter.emit(_CAST, new, old.type.dtype) if _is_narrow(old) else new
            for old, new in zip(node.results, results)
        )

    return each_node(graph, visit)


def _is_narrow(value: Value) -> bool:
    return value.type.dtype is DType.bfloat16


def _wide(rewriter: Rewriter, arg: Arg) -> Arg:
    if arg is DType.bfloat16:
        return DType.float32
    if isinstance(arg, tuple):
        return tuple(_wide(rewriter, item) for item in arg)
    return map_values(
        arg,
        lambda value: rewriter.emit(_CAST, value, DType.float32) if _is_narrow(value) else value,
    )
