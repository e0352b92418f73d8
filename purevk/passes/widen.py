"""Half precision on devices that cannot store it: values become float32, rounded as memory would."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Arg, Constant, Graph, Input, Node, Value, map_values, values_in
from purevk.ir.host import HOST
from purevk.lower.expression import Expression, ExpressionBuilder
from purevk.ops import registry
from purevk.ops.elementwise.pointwise import NAME as PROGRAM
from purevk.ops.facts import Moves
from purevk.ops.movement.bits import VIEW_DTYPE
from purevk.tuning import DeviceTraits

_NEEDS = {DType.float16: ("storage_16bit",), DType.bfloat16: ("storage_16bit", "int16")}
_CAST = "aten._to_copy.default"


def with_room_to_widen(graph: Graph, traits: DeviceTraits) -> DeviceTraits:
    """The traits with which the passes decide about sizes before `widen_halves` doubles these."""
    if not _widened_values(graph, traits):
        return traits
    return replace(traits, max_storage_range=traits.max_storage_range // 2)


def widen_halves(graph: Graph, traits: DeviceTraits) -> Graph:
    """Gives every value of a half precision that the device cannot store the type float32.

    Programs and kernels round their results to numbers of the half precision, so that all operators
    see those. Inputs and outputs of the graph keep their types: the CPU converts them, and what it runs
    itself. Constants are converted on the host. The passes widen sub-graphs when they come to these.
    """
    swapped = _widened_values(graph, traits)
    return _Widening(graph, swapped, traits).run() if swapped else graph


def _widened_values(graph: Graph, traits: DeviceTraits) -> dict[Value, Value]:
    """float32 values for those of a half precision that the device cannot store."""
    narrow = [dtype for dtype in _NEEDS if _missing(dtype, traits)]
    if not narrow:
        return {}
    leaves = {**graph.constants, **graph.states}
    return {
        value: _wide_leaf(value) if value in leaves else _wide(value)
        for value in _values(graph)
        if value.type.dtype in narrow
    }


def _missing(dtype: DType, traits: DeviceTraits) -> list[str]:
    return [feature for feature in _NEEDS[dtype] if not traits.has(feature)]


class _Widening:
    """`swapped` maps the values of half precision to those of float32, `halves` these to values of
    half precision with the same numbers."""

    def __init__(self, graph: Graph, swapped: dict[Value, Value], traits: DeviceTraits) -> None:
        self._graph = graph
        self._swapped = swapped
        self._dtypes = {value.type.dtype for value in swapped}
        self._reasons = {
            dtype: f"{dtype.name} needs the device feature {', '.join(_missing(dtype, traits))}"
            for dtype in self._dtypes
        }
        self._halves: dict[Value, Value] = {}
        self._nodes: list[Node] = []

    def run(self) -> Graph:
        graph, wide = self._graph, self._wide
        for value in graph.inputs:
            if isinstance(value, Value) and value in self._swapped:
                self._widen_on_cpu(value, "input")
        for node in graph.nodes:
            self._visit(node)
        outputs = tuple(map_values(output, self._half) for output in graph.outputs)
        return replace(
            graph,
            nodes=tuple(self._nodes),
            outputs=outputs,
            constants={wide(v): self._converted(v, c) for v, c in graph.constants.items()},
            states={
                wide(value): None if constant is None else self._converted(value, constant)
                for value, constant in graph.states.items()
            },
            symbols={
                symbol: source
                if source.value is None or source.value in graph.inputs
                else replace(source, value=wide(source.value))
                for symbol, source in graph.symbols.items()
            },
            labels={wide(value): label for value, label in graph.labels.items()},
        )

    def _wide(self, value: Value) -> Value:
        return self._swapped.get(value, value)

    def _converted(self, value: Value, constant: Constant) -> Constant:
        if value not in self._swapped or not constant.known:
            return constant
        array = constant.array(value.type)
        if value.type.dtype is DType.bfloat16:
            return Constant.of((array.astype(np.uint32) << 16).view(np.float32))
        return Constant.of(array.astype(np.float32))

    def _visit(self, node: Node) -> None:
        if not any(value in self._swapped for value in (*node.inputs, *node.results)):
            args = tuple(map(self._argument, node.args)) if node.graphs else node.args
            self._nodes.append(replace(node, args=args))
        elif node.op == HOST:
            args = tuple(map_values(arg, self._half) for arg in node.args)
            self._nodes.append(replace(node, args=args))
            self._widen_results(node)
        elif node.op == VIEW_DTYPE:  # the bits of float32 are others
            args = tuple(map_values(arg, self._half) for arg in node.args)
            self._on_cpu(node.op, args, node.results, node.source)
            self._widen_results(node)
        elif node.op == PROGRAM:
            self._nodes.append(self._program(node))
        else:
            self._kernel(node)

    def _program(self, node: Node) -> Node:
        """A program that rounds its results. Its operands hold numbers of half precision, so their
        dtypes in the program stay."""
        expression = node.attribute("expression", Expression)
        inputs, scalars = map(self._wide, node.tensors("inputs")), node.sizes("scalars")
        builder = ExpressionBuilder()
        terms = [builder.input(value, dtype) for value, dtype in zip(inputs, expression.inputs)]
        terms += [builder.scalar(size, dtype) for size, dtype in zip(scalars, expression.scalars)]
        outputs = [
            builder.stored(term, value.type.dtype) if value in self._swapped else term
            for term, value in zip(builder.inline(expression, terms), node.results)
        ]
        program = node.with_arguments(
            expression=builder.build(outputs),
            inputs=tuple(builder.inputs),
            scalars=tuple(builder.scalars),
        )
        return replace(program, results=tuple(map(self._wide, node.results)))

    def _kernel(self, node: Node) -> None:
        """A kernel or a view of float32, and programs that round what the kernel computes."""
        computes = (
            registry.movement(node) is Moves.NO
            and not registry.is_control(node)
            and not registry.mutated(node)
        )
        results, rounding = [], []
        for value in node.results:
            result = self._wide(value)
            if computes and value in self._swapped:
                unrounded = Value(f"{value.name}_unrounded", result.type)
                rounding.append(_rounding(unrounded, value.type.dtype, result, node.source))
                result = unrounded
            results.append(result)
        args = tuple(map(self._argument, node.args))
        self._nodes += [replace(node, args=args, results=tuple(results)), *rounding]

    def _dtype(self, dtype: DType) -> DType:
        return DType.float32 if dtype in self._dtypes else dtype

    def _argument(self, arg: Arg) -> Arg:
        if isinstance(arg, DType):
            return self._dtype(arg)
        if isinstance(arg, tuple):
            return tuple(map(self._argument, arg))
        if isinstance(arg, Graph):
            return _with_wide_ends(arg, self._dtypes)
        if isinstance(arg, Expression):
            return replace(arg, inputs=tuple(self._dtype(dtype) for dtype in arg.inputs))
        return map_values(arg, self._wide)

    def _half(self, value: Value) -> Value:
        """A value of half precision for the CPU."""
        if value not in self._swapped:
            return value
        wide = self._swapped[value]
        if wide not in self._halves:
            half = Value(f"{value.name}_half", value.type)
            self._on_cpu(_CAST, _cast(wide, half).args, (half,), "output")
            self._halves[wide] = half
        return self._halves[wide]

    def _widen_results(self, node: Node) -> None:
        for value in node.results:
            if value in self._swapped:
                self._widen_on_cpu(value, node.source)

    def _widen_on_cpu(self, value: Value, source: str) -> None:
        wide = self._swapped[value]
        self._halves[wide] = value
        self._on_cpu(_CAST, _cast(value, wide).args, (wide,), source)

    def _on_cpu(
        self, op: str, args: tuple[Arg, ...], results: tuple[Value, ...], source: str
    ) -> None:
        values = (*values_in(args), *results)
        reason = next(
            self._reasons[value.type.dtype] for value in values if value.type.dtype in self._reasons
        )
        self._nodes.append(Node(HOST, (op, reason, args), results, source))


def _with_wide_ends(graph: Graph, dtypes: set[DType]) -> Graph:
    """A sub-graph that takes and returns float32, and converts it on the device, where the passes
    widen the rest of it."""
    nodes: list[Node] = []
    inputs: list[Input] = []
    for value in graph.inputs:
        if isinstance(value, Value) and value.type.dtype in dtypes:
            nodes.append(_cast(wide := _wide(value, "input"), value))
            value = wide
        inputs.append(value)
    nodes += graph.nodes
    outputs: list[Arg] = []
    for number, output in enumerate(graph.outputs):
        if isinstance(output, Value) and output.type.dtype in dtypes:
            nodes.append(_cast(output, wide := _wide(output, f"output_{number}")))
            output = wide
        outputs.append(output)
    return graph.with_nodes(nodes, inputs=tuple(inputs), outputs=tuple(outputs))


def _cast(value: Value, result: Value) -> Node:
    args = (value, result.type.dtype, None, None, None, False, None)
    return Node(_CAST, args, (result,))


def _rounding(x: Value, dtype: DType, result: Value, source: str) -> Node:
    builder = ExpressionBuilder()
    rounded = builder.rounded(builder.input(x, DType.float32), dtype)
    expression = builder.build([builder.stored(rounded, dtype)])
    args = (expression, (x,), (), result.type.dims)
    return Node(PROGRAM, args, (result,), source)


def _wide(value: Value, suffix: str = "wide") -> Value:
    return Value(f"{value.name}_{suffix}", value.type.with_dtype(DType.float32))


_leaves: weakref.WeakKeyDictionary[Value, Value] = weakref.WeakKeyDictionary()


def _wide_leaf(value: Value) -> Value:
    """What takes the place of a constant or state: the same for all graphs that have it."""
    return _leaves.setdefault(value, Value(value.name, value.type.with_dtype(DType.float32)))


def _values(graph: Graph) -> Iterable[Value]:
    yield from (value for value in graph.inputs if isinstance(value, Value))
    yield from graph.constants
    yield from graph.states
    for node in graph.nodes:
        yield from node.results
