"""Pointwise fusion: chains of pointwise operators become one program, and a program on the result
of a kernel that takes epilogues becomes part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Size, Value
from purevk.lower.expression import Expression, ExpressionBuilder, Step, literal
from purevk.ops import registry
from purevk.ops.elementwise.pointwise import NAME, expression_of
from purevk.passes.rewrite import Rewriter, changing, each_node, reader_counts
from purevk.passes.simplify import static_value

MAX_BUFFERS = 8  # of one fused kernel: within the limit of any device
MAX_STEPS = 64


def to_programs(graph: Graph) -> Graph:
    """Each pointwise operator as a program; constants of one element become literals."""
    known: dict[Value, Step] = {}

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        definition = registry.find(node.op)
        if node.op == NAME:
            _note_literal(known, node)
            return None
        if definition is None or not isinstance(definition.form, registry.Pointwise):
            return None
        expression, inputs, scalars = expression_of(definition, node.args, node.results)
        expression, inputs = _with_literals(graph, known, expression, inputs, scalars)
        made = Node(
            NAME, (expression, inputs, scalars, node.result.type.dims), node.results, node.source
        )
        rewriter.keep(made)
        _note_literal(known, made)
        return node.results

    return each_node(graph, visit)


def _note_literal(known: dict[Value, Step], node: Node) -> None:
    """Remembers results whose elements are all the same known number, with the step that is this
    number."""
    expression = node.attribute("expression", Expression)
    if node.tensors("inputs") or node.sizes("scalars"):
        return
    if len(expression.steps) == 1 and expression.outputs == (0,):
        known[node.result] = expression.steps[0]


def _with_literals(
    graph: Graph,
    known: dict[Value, Step],
    expression: Expression,
    inputs: tuple[Value, ...],
    scalars: tuple[Size, ...],
) -> tuple[Expression, tuple[Value, ...]]:
    texts: dict[Value, str] = {}
    for value in inputs:
        number = static_value(graph.constants, value)
        if number is not None:
            texts[value] = literal(number, value.type.dtype)
        elif value in known and known[value].dtype.acc == value.type.dtype.acc:
            texts[value] = known[value].glsl
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
    readers = reader_counts(graph)
    producer = graph.producers()
    written = changing(graph.nodes)
    for position in range(len(nodes)):
        node = nodes[position]
        if node.op != NAME:
            continue
        changed = True
        while changed:
            changed = False
            for value in node.tensors("inputs"):
                maker = producer.get(value)
                if (
                    maker is None
                    or maker.op != NAME
                    or readers[value] != 1
                    or len(maker.results) != 1
                ):
                    continue
                if written & set(maker.inputs):
                    continue
                joined = _join(node, value, maker)
                if joined is None:
                    continue
                readers[value] = 0
                for shared in set(node.inputs) & set(maker.inputs):
                    readers[shared] -= 1
                for result in node.results:
                    producer[result] = joined
                node, changed = joined, True
                break
        nodes[position] = node
    gone = {value for value, count in readers.items() if count == 0}
    outputs = graph.output_values()
    kept = [
        node
        for node in nodes
        if not (node.op == NAME and all(v in gone and v not in outputs for v in node.results))
    ]
    return graph.with_nodes(kept)


def _join(node: Node, value: Value, maker: Node) -> Node | None:
    """`node` with the program of the node that makes one of its inputs put in, or None if it would
    grow too large."""
    outer, inner = (each.attribute("expression", Expression) for each in (node, maker))
    builder = ExpressionBuilder()
    results = builder.inline(
        inner,
        [builder.input(v, t) for v, t in zip(maker.tensors("inputs"), inner.inputs)]
        + [builder.scalar(d, t) for d, t in zip(maker.sizes("scalars"), inner.scalars)],
    )
    refs = [
        results[0] if v is value else builder.input(v, t)
        for v, t in zip(node.tensors("inputs"), outer.inputs)
    ] + [builder.scalar(d, t) for d, t in zip(node.sizes("scalars"), outer.scalars)]
    outputs = builder.inline(outer, refs)
    joined = builder.build(outputs)
    if len(joined.inputs) + len(joined.outputs) > MAX_BUFFERS or len(joined.steps) > MAX_STEPS:
        return None
    return node.with_arguments(
        expression=joined, inputs=tuple(builder.inputs), scalars=tuple(builder.scalars)
    )


def fuse_epilogues(graph: Graph) -> Graph:
    """Puts a pointwise program into the kernel that makes one of its inputs, if it alone reads
    this."""
    readers = reader_counts(graph)
    written = changing(graph.nodes)
    producer = graph.producers()
    position = {node: at for at, node in enumerate(graph.nodes)}
    gone: set[Node] = set()
    made: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != NAME or len(node.results) != 1 or not node.result.type.dtype.is_float:
            continue
        expression, inputs = node.attribute("expression", Expression), node.tensors("inputs")
        if DType.bfloat16 in (node.result.type.dtype, *expression.inputs):
            continue  # epilogues read and write elements as they are
        if DType.float64 in (node.result.type.dtype, *expression.dtypes):
            continue  # and kernels that take them are not made for double precision
        if node.sizes("scalars") or len(inputs) + 3 > MAX_BUFFERS:
            continue
        makers = [(value, producer[value]) for value in inputs if value in producer]
        makers.sort(key=lambda maker: -position[maker[1]])  # the last one that runs comes first
        for value, kernel in makers:
            if kernel in gone or written & set(kernel.inputs) or readers[value] != 1:
                continue
            if not _takes_epilogue(kernel, node.sizes("sizes")):
                continue
            fused = _attach(kernel, node, value)
            gone.add(kernel)
            made[node] = fused
            producer[node.result] = fused
            position[fused] = position[node]
            break
    return graph.with_nodes([made.get(node, node) for node in graph.nodes if node not in gone])


def _takes_epilogue(kernel: Node, sizes: Sequence[Size]) -> bool:
    """Whether a node is a kernel that may compute a program over `sizes` on its result."""
    definition = registry.find(kernel.op)
    if definition is None or not isinstance(definition.form, registry.Kernel):
        return False
    if not definition.form.epilogue or len(kernel.results) != 1:
        return False
    if kernel.arg("epilogue") is not None:
        return False
    made = kernel.result.type.dims
    return len(made) == len(sizes) and all(a == b for a, b in zip(made, sizes))


def _attach(kernel: Node, node: Node, value: Value) -> Node:
    """The kernel with the program as its epilogue. Input 0 of the epilogue is the kernel's own
    result."""
    expression, inputs = node.attribute("expression", Expression), node.tensors("inputs")
    builder = ExpressionBuilder()
    own = builder.input(value, value.type.dtype)
    refs = [own if v is value else builder.input(v, t) for v, t in zip(inputs, expression.inputs)]
    epilogue = builder.build(builder.inline(expression, refs))
    extras = tuple(v for v in builder.inputs if v is not value)
    fused = kernel.with_arguments(epilogue=epilogue, extras=extras)
    return replace(fused, results=node.results, source=f"{kernel.source} + {node.source}", alias="")
