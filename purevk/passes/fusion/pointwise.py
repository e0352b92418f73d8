"""Pointwise fusion: chains of pointwise operators become one program, and a program on the result
of a kernel that takes epilogues becomes part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Size, Value
from purevk.lower.expression import Expression, ExpressionBuilder, Step, Term, literal
from purevk.ops import registry
from purevk.ops.elementwise.pointwise import NAME, expression_of
from purevk.passes.rewrite import Rewriter, changing, constants_of, each_node, reader_counts
from purevk.passes.simplify import static_value
from purevk.tuning import DeviceTraits

MAX_BUFFERS = 8  # of one fused kernel: within the limit of any device
MAX_STEPS = 64
# Code sizes that compile within seconds also on software devices, whose compilers take more than
# linear time. A kernel unrolls its epilogue up to 32 times.
MAX_CODE = 2000
MAX_EPILOGUE_CODE = 500


def to_programs(graph: Graph, traits: DeviceTraits) -> Graph:
    """Each pointwise operator as a program; constants of one element become literals."""
    steps: dict[Value, Step] = {}

    def visit(rewriter: Rewriter, node: Node) -> tuple[Value, ...] | None:
        definition = registry.find(node.op)
        if node.op == NAME:
            _note_literal(steps, node)
            return None
        if definition is None or not isinstance(definition.form, registry.Pointwise):
            return None
        expression, inputs, scalars = expression_of(definition, node.args, node.results)
        expression, inputs = _with_literals(graph, steps, expression, inputs, scalars)
        pointwise = Node(
            NAME, (expression, inputs, scalars, node.result.type.dims), node.results, node.source
        )
        rewriter.keep(pointwise)
        _note_literal(steps, pointwise)
        return node.results

    return each_node(graph, visit)


def _note_literal(steps: dict[Value, Step], node: Node) -> None:
    """Remembers results whose elements are all the same known number, with the step that is this
    number."""
    expression = node.attribute("expression", Expression)
    if node.tensors("inputs") or node.sizes("scalars"):
        return
    if len(expression.steps) == 1 and expression.outputs == (0,):
        steps[node.result] = expression.steps[0]


def _with_literals(
    graph: Graph,
    steps: dict[Value, Step],
    expression: Expression,
    inputs: tuple[Value, ...],
    scalars: tuple[Size, ...],
) -> tuple[Expression, tuple[Value, ...]]:
    texts: dict[Value, str] = {}
    for value in inputs:
        number = static_value(graph.constants, value)
        if number is not None:
            texts[value] = literal(number, value.type.dtype)
        elif value in steps and steps[value].dtype.acc == value.type.dtype.acc:
            texts[value] = steps[value].glsl
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


class _Program:
    """A pointwise node, with a program that grows while the programs of its inputs are put in.

    Attributes:
        inputs: the tensors that it reads.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.inputs = node.inputs
        self._builder: ExpressionBuilder | None = None
        self._outputs: list[Term] = []
        self._refused: set[_Program] = set()  # too large to be put in, now and when this has grown

    @property
    def results(self) -> tuple[Value, ...]:
        return self._node.results

    def take(self, maker: _Program) -> bool:
        """Puts in the program that makes some of the inputs; False if this would grow too large.
        The maker must not be used any more: its program becomes the start of this one."""
        if maker in self._refused:
            return False
        expression, tensors, scalars = self._parts()
        builder, results = maker._open()
        mark = builder.mark()
        replacements = dict(zip(maker.results, map(builder.before_storing, results)))
        refs = [
            replacements[v] if v in replacements else builder.input(v, t)
            for v, t in zip(tensors, expression.inputs)
        ] + [builder.scalar(d, t) for d, t in zip(scalars, expression.scalars)]
        outputs = builder.inline(expression, refs)
        if len(builder.inputs) + len(outputs) > MAX_BUFFERS or not builder.needs_at_most(
            MAX_STEPS, MAX_CODE, outputs
        ):
            builder.return_to(mark)
            self._refused.add(maker)
            return False
        self._refused |= maker._refused
        self._builder, self._outputs = builder, outputs
        self.inputs = tuple(builder.inputs)
        return True

    def node(self) -> Node:
        """The node with the whole program."""
        if self._builder is None:
            return self._node
        expression, inputs, scalars = self._parts()
        return self._node.with_arguments(expression=expression, inputs=inputs, scalars=scalars)

    def _parts(self) -> tuple[Expression, tuple[Value, ...], tuple[Size, ...]]:
        builder, node = self._builder, self._node
        if builder is not None:
            parts = tuple(builder.inputs), tuple(builder.scalars)
            return builder.build(self._outputs), *parts
        expression = node.attribute("expression", Expression)
        return expression, tuple(node.tensors("inputs")), tuple(node.sizes("scalars"))

    def _open(self) -> tuple[ExpressionBuilder, list[Term]]:
        if self._builder is None:
            expression, tensors, scalars = self._parts()
            builder = self._builder = ExpressionBuilder()
            refs = [builder.input(v, t) for v, t in zip(tensors, expression.inputs)]
            refs += [builder.scalar(d, t) for d, t in zip(scalars, expression.scalars)]
            self._outputs = builder.inline(expression, refs)
        return self._builder, self._outputs


def fuse_pointwise(graph: Graph, traits: DeviceTraits) -> Graph:
    """Joins a pointwise program with those that make its inputs, where nobody else reads these.

    What is computed once, at load, stays a program of its own if its result needs no more memory
    than what it is made of.
    """
    readers = reader_counts(graph)
    written = changing(graph.nodes)
    constant = constants_of(graph)
    makers: dict[Value, _Program] = {}
    items: list[Node | _Program] = []
    for node in graph.nodes:
        if node.op != NAME:
            items.append(node)
            continue
        program = _Program(node)
        items.append(program)
        while _takes_one(program, makers, readers, written, constant):
            pass
        makers.update(dict.fromkeys(node.results, program))
    gone = {value for value, count in readers.items() if count == 0}.difference(
        graph.output_values()
    )
    return graph.with_nodes(
        item.node() if isinstance(item, _Program) else item
        for item in items
        if isinstance(item, Node) or not gone.issuperset(item.results)
    )


def _takes_one(
    program: _Program,
    makers: Mapping[Value, _Program],
    readers: dict[Value, int],
    written: set[Value],
    constant: set[Value],
) -> bool:
    """Puts one of the programs that make its inputs into a program; whether there was one."""
    for value in program.inputs:
        maker = makers.get(value)
        if maker is None:
            continue
        if any(readers.get(result, 0) != (result in program.inputs) for result in maker.results):
            continue  # another node reads one of its results
        if written.intersection(maker.inputs):
            continue
        if value in constant and not constant.issuperset(program.results) and _is_small(maker):
            continue
        shared = set(program.inputs).intersection(maker.inputs)
        if not program.take(maker):
            continue
        readers.update(dict.fromkeys(maker.results, 0))
        for operand in shared:
            readers[operand] -= 1
        return True
    return False


def _is_small(program: _Program) -> bool:
    """Whether the results of a program need no more memory than its inputs, at any size."""
    values = (*program.inputs, *program.results)
    return all(value.type.is_static for value in values) and sum(
        value.type.nbytes for value in program.results
    ) <= sum(value.type.nbytes for value in program.inputs)


def fuse_epilogues(graph: Graph, traits: DeviceTraits) -> Graph:
    """Puts a pointwise program into the kernel that makes one of its inputs, if it alone reads
    this."""
    readers = reader_counts(graph)
    written = changing(graph.nodes)
    producer = graph.producers()
    position = {node: at for at, node in enumerate(graph.nodes)}
    gone: set[Node] = set()
    kernels: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != NAME or len(node.results) != 1 or not node.result.type.dtype.is_float:
            continue
        expression, inputs = node.attribute("expression", Expression), node.tensors("inputs")
        if DType.float64 in (node.result.type.dtype, *expression.dtypes):
            continue  # and kernels that take them are not made for double precision
        if node.sizes("scalars") or len(inputs) + 3 > MAX_BUFFERS:
            continue
        if expression.code_size > MAX_EPILOGUE_CODE:
            continue
        dtypes = (node.result.type.dtype, *expression.inputs)
        makers = [(value, producer[value]) for value in inputs if value in producer]
        makers.sort(key=lambda maker: -position[maker[1]])  # the last one that runs comes first
        for value, kernel in makers:
            if kernel in gone or written & set(kernel.inputs) or readers[value] != 1:
                continue
            if not _takes_epilogue(kernel, node.sizes("sizes")):
                continue
            if DType.bfloat16 in dtypes and not _takes_bfloat16(kernel):
                continue
            fused = _attach(kernel, node, value)
            gone.add(kernel)
            kernels[node] = fused
            producer[node.result] = fused
            position[fused] = position[node]
            break
    return graph.with_nodes([kernels.get(node, node) for node in graph.nodes if node not in gone])


def _takes_epilogue(kernel: Node, sizes: Sequence[Size]) -> bool:
    """Whether a node is a kernel that may compute a program over `sizes` on its result."""
    definition = registry.find(kernel.op)
    if definition is None or not isinstance(definition.form, registry.Kernel):
        return False
    takes = definition.form.epilogue
    if len(kernel.results) != 1 or not (takes(kernel) if callable(takes) else takes):
        return False
    epilogue = kernel.optional_attribute("epilogue", Expression)
    if epilogue is not None and epilogue.steps:
        return False
    dims = kernel.result.type.dims
    return len(dims) == len(sizes) and all(a == b for a, b in zip(dims, sizes))


def _takes_bfloat16(kernel: Node) -> bool:
    """Whether a kernel, and so its epilogue, reads and writes bfloat16."""
    definition = registry.find(kernel.op)
    form = None if definition is None else definition.form
    return isinstance(form, registry.Kernel) and form.bfloat16


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
