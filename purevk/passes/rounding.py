"""Rounding after every operator, as eager torch does: the option `round="eager"`."""

from __future__ import annotations

from purevk.ir import Graph, Node, Value
from purevk.lower.expression import ROUND
from purevk.ops import registry
from purevk.ops.elementwise.special import ROUNDED
from purevk.passes.rewrite import Rewriter, each_node

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


def round_results(graph: Graph) -> Graph:
    """Rounds the results of the program's operators that other operators may be joined with."""

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        definition = registry.find(node.op)
        form = None if definition is None else definition.form
        if not isinstance(form, (registry.Pointwise, registry.Rewrite)) or _is_copy(form):
            return None
        if not any(value.type.dtype in ROUND for value in node.results):
            return None
        rewriter.keep(node)
        return tuple(
            rewriter.emit(ROUNDED, value) if value.type.dtype in ROUND else value
            for value in node.results
        )

    return each_node(graph, visit)


def drop_rounding(graph: Graph) -> Graph:
    """Removes rounding of what a kernel writes: memory rounds it."""
    made = graph.producers()

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op != ROUNDED:
            return None
        source = made.get(node.inputs[0])
        while source is not None and registry.is_view(source):
            source = made.get(source.inputs[0])
        definition = None if source is None else registry.find(source.op)
        computed = definition is not None and isinstance(definition.form, registry.Pointwise)
        return None if computed else node.inputs[0]

    return each_node(graph, visit)


def _is_copy(form: registry.Form) -> bool:
    return isinstance(form, registry.Pointwise) and form.glsl == "x"
