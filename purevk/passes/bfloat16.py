"""bfloat16 for kernels that do not read it: their operands are converted to float32, and their
results back."""

from __future__ import annotations

from typing import Any

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Value, map_values
from purevk.ops import registry
from purevk.passes.rewrite import Rewriter, each_node

_CAST = "aten._to_copy.default"


def widen_bfloat16(graph: Graph) -> Graph:
    """Gives kernels float32 in place of bfloat16, except for those that take it. The sums are made
    in float32 either way."""

    def visit(rewriter: Rewriter, node: Node) -> Any:
        row = registry.find(node.op)
        if (
            row is None
            or not isinstance(row.form, registry.Kernel)
            or row.form.bfloat16
            or row.mutates
        ):
            return None
        if not any(_is_narrow(value) for value in (*node.inputs, *node.results)):
            return None
        args = tuple(_wide(rewriter, arg) for arg in node.args)
        types = tuple(
            value.type.with_dtype(DType.float32) if _is_narrow(value) else value.type
            for value in node.results
        )
        made = rewriter.emit(node.op, *args, results=types)
        made = made if isinstance(made, tuple) else (made,)
        return tuple(
            rewriter.emit(_CAST, new, old.type.dtype) if _is_narrow(old) else new
            for old, new in zip(node.results, made)
        )

    return each_node(graph, visit)


def _is_narrow(value: Value) -> bool:
    return value.type.dtype is DType.bfloat16


def _wide(rewriter: Rewriter, arg: Any) -> Any:
    if arg is DType.bfloat16:
        return DType.float32
    if isinstance(arg, tuple):
        return tuple(_wide(rewriter, item) for item in arg)
    return map_values(
        arg,
        lambda value: rewriter.emit(_CAST, value, DType.float32) if _is_narrow(value) else value,
    )
