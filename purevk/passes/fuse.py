"""Pointwise fusion: chains of pointwise operators become one program, and a program on the result
of a kernel that takes epilogues becomes part of it."""

from __future__ import annotations

from typing import Any

from purevk.dtypes import DType
from purevk.ir import Dim, Graph, Node, Value, values_in
from purevk.lower.expression import Expression, ExpressionBuilder, literal
from purevk.ops import registry
from purevk.ops.elementwise.pointwise import NAME, expression_of
from purevk.passes.rewrite import Rewriter, changing, each_node
from purevk.passes.simplify import static_value

MAX_BUFFERS = 8  # of one fused kernel: within the limit of any device
MAX_STEPS = 64


def to_programs(graph: Graph) -> Graph:
    """Each pointwise operator as a program; constants of one element become literals."""
    known: dict[Value, tuple[Any, DType]] = {}

    def visit(rewriter: Rewriter, node: Node) -> Any:
        row = registry.find(node.op)
        if node.op == NAME:
            _note_literal(known, node)
            return None
        if row is None or not isinstance(row.form, registry.Pointwise):
            return None
        expression, inputs, scalars = expression_of(row, node.args, node.results)
        expression, inputs = _with_literals(graph, known, expression, inputs, scalars)
        made = Node(
            NAME, (expression, inputs, scalars, node.result.type.dims), node.results, node.source
        )
        rewriter.keep(made)
        _note_literal(known, made)
        return node.results

    return each_node(graph, visit)


def _note_literal(known: dict, node: Node) -> None:
    """Remembers results that are one number everywhere."""
    expression, inputs, scalars, _ = node.args
    if not inputs and not scalars and len(expression.steps) == 1 and expression.outputs == (0,):
        known[node.result] = (expression.steps[0].glsl, expression.steps[0].dtype)


def _with_literals(
    graph: Graph,
    known: dict,
    expression: Expression,
    inputs: tuple[Value, ...],
    scalars: tuple[Dim, ...],
) -> tuple[Expression, tuple[Value, ...]]:
    texts: dict[Value, str] = {}
    for value in inputs:
        number = static_value(graph.constants, value)
        if number is not None:
            texts[value] = literal(number, value.type.dtype)
        elif value in known and known[value][1].acc == value.type.dtype.acc:
            texts[value] = known[value][0]
    if not texts:
        return expression, inputs
    builder = ExpressionBuilder()
    refs = []
    for value in inputs:
        if value in texts:
            refs.append(builder.step(texts[value], [], value.type.dtype))
        else:
            refs.append(builder.input(value, value.type.dtype))
    refs += [builder.scalar(dim, dtype) for dim, dtype in zip(scalars, expression.scalars)]
    outputs = builder.inline(expression, refs)
    return builder.build(outputs), tuple(value for value in inputs if value not in texts)


def fuse_pointwise(graph: Graph) -> Graph:
    """Joins a pointwise program with those that make its inputs, where nobody else reads these."""
    nodes = list(graph.nodes)
    users = _user_counts(graph)
    producer = {value: node for node in nodes for value in node.results}
    written = changing(graph.nodes)
    for position in range(len(nodes)):
        node = nodes[position]
        if node.op != NAME:
            continue
        changed = True
        while changed:
            changed = False
            for value in node.args[1]:
                maker = producer.get(value)
                if (
                    maker is None
                    or maker.op != NAME
                    or users[value] != 1
                    or len(maker.results) != 1
                ):
                    continue
                if written & set(maker.args[1]):
                    continue
                joined = _join(node, value, maker)
                if joined is None:
                    continue
                users[value] = 0
                for shared in set(node.args[1]) & set(maker.args[1]):
                    users[shared] -= 1
                for result in node.results:
                    producer[result] = joined
                node, changed = joined, True
                break
        nodes[position] = node
    gone = {value for value, count in users.items() if count == 0}
    outputs = graph.output_values()
    kept = [
        node
        for node in nodes
        if not (node.op == NAME and all(v in gone and v not in outputs for v in node.results))
    ]
    return graph.with_nodes(kept)


def _user_counts(graph: Graph) -> dict[Value, int]:
    """How many nodes read each value; outputs and sources of symbols count as readers."""
    counts: dict[Value, int] = {}
    for node in graph.nodes:
        for value in set(node.inputs):
            counts[value] = counts.get(value, 0) + 1
    extra = [
        *values_in(graph.outputs),
        *(s.value for s in graph.symbols.values() if s.value is not None),
    ]
    for value in extra:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _join(node: Node, value: Value, maker: Node) -> Node | None:
    """`node` with the program of the node that makes one of its inputs put in, or None if it would
    grow too large."""
    outer, outer_inputs, outer_scalars, sizes = node.args
    inner, inner_inputs, inner_scalars, _ = maker.args
    builder = ExpressionBuilder()
    results = builder.inline(
        inner,
        [builder.input(v, t) for v, t in zip(inner_inputs, inner.inputs)]
        + [builder.scalar(d, t) for d, t in zip(inner_scalars, inner.scalars)],
    )
    refs = [
        results[0] if v is value else builder.input(v, t)
        for v, t in zip(outer_inputs, outer.inputs)
    ] + [builder.scalar(d, t) for d, t in zip(outer_scalars, outer.scalars)]
    outputs = builder.inline(outer, refs)
    joined = builder.build(outputs)
    if len(joined.inputs) + len(joined.outputs) > MAX_BUFFERS or len(joined.steps) > MAX_STEPS:
        return None
    return Node(
        NAME,
        (joined, tuple(builder.inputs), tuple(builder.scalars), sizes),
        node.results,
        node.source,
    )


def fuse_epilogues(graph: Graph) -> Graph:
    """Puts a pointwise program into the kernel that makes one of its inputs, if it alone reads
    this."""
    users = _user_counts(graph)
    written = changing(graph.nodes)
    producer = {value: node for node in graph.nodes for value in node.results}
    position = {node: at for at, node in enumerate(graph.nodes)}
    gone: set[Node] = set()
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != NAME or len(node.results) != 1 or not node.result.type.dtype.is_float:
            continue
        expression, inputs, scalars, sizes = node.args
        if DType.bfloat16 in (node.result.type.dtype, *expression.inputs):
            continue  # epilogues read and write elements as they are
        if DType.float64 in (node.result.type.dtype, *expression.dtypes):
            continue  # and kernels that take them are not made for double precision
        if scalars or len(inputs) + 3 > MAX_BUFFERS:
            continue
        candidates = sorted(inputs, key=lambda v: -position.get(producer.get(v), -1))
        for value in candidates:
            kernel = producer.get(value)
            if kernel is None or kernel in gone or not _takes(kernel, value, sizes, users, written):
                continue
            fused = _attach(kernel, node, value)
            gone.add(kernel)
            made[node] = fused
            producer[node.result] = fused
            position[fused] = position[node]
            break
    return graph.with_nodes([made.get(node, node) for node in graph.nodes if node not in gone])


def _takes(
    kernel: Node, value: Value, sizes: tuple, users: dict[Value, int], written: set[Value]
) -> bool:
    row = registry.find(kernel.op)
    if row is None or not isinstance(row.form, registry.Kernel) or not row.form.epilogue:
        return False
    if users[value] != 1 or len(kernel.results) != 1 or written & set(kernel.inputs):
        return False
    if kernel.args[row.parameters.index("epilogue")] is not None:
        return False
    return len(value.type.dims) == len(sizes) and all(
        a == b for a, b in zip(value.type.dims, sizes)
    )


def _attach(kernel: Node, node: Node, value: Value) -> Node:
    """The kernel with the program as its epilogue. Input 0 of the epilogue is the kernel's own
    result."""
    expression, inputs, _, _ = node.args
    builder = ExpressionBuilder()
    own = builder.input(value, value.type.dtype)
    refs = [own if v is value else builder.input(v, t) for v, t in zip(inputs, expression.inputs)]
    epilogue = builder.build(builder.inline(expression, refs))
    extras = tuple(v for v in builder.inputs if v is not value)
    row = registry.definition_of(kernel)
    args = list(kernel.args)
    args[row.parameters.index("epilogue")] = epilogue
    args[row.parameters.index("extras")] = extras
    return Node(kernel.op, tuple(args), node.results, f"{kernel.source} + {node.source}")
