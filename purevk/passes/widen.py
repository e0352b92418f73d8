"""Half precision on devices that cannot store it: values become float32."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Arg, Constant, Graph, Input, Node, TensorType, Value, map_values
from purevk.ops.movement.bits import VIEW_DTYPE
from purevk.tuning import DeviceTraits

_NARROW = (DType.float16, DType.bfloat16)


def widen_halves(graph: Graph, traits: DeviceTraits) -> Graph:
    """Gives every half-precision value between the inputs and the outputs the type float32.

    Inputs and outputs keep their types: the CPU converts them. Constants are converted on the host.
    """
    if not any(_is_narrow(value) for inner in graph.nested() for value in _values(inner)):
        return graph
    return _widen(graph, {}, outermost=True)


def _widen(graph: Graph, swapped: dict[Value, Value], outermost: bool) -> Graph:
    """`swapped` has constants and states of the graphs around a sub-graph, which share them; a
    sub-graph's inputs and outputs are values between."""

    def wide(value: Value) -> Value:
        if not _is_narrow(value):
            return value
        if value not in swapped:
            leaf = value in graph.constants or value in graph.states
            swapped[value] = (
                _wide_leaf(value)
                if leaf
                else Value(value.name, value.type.with_dtype(DType.float32))
            )
        return swapped[value]

    def given(value: Input) -> Input:
        return wide(value) if isinstance(value, Value) else value

    def argument(arg: Arg) -> Arg:
        if isinstance(arg, DType):
            return DType.float32 if arg in _NARROW else arg
        if isinstance(arg, tuple):
            return tuple(argument(item) for item in arg)
        if isinstance(arg, Graph):
            return _widen(arg, swapped, outermost=False)
        return map_values(arg, wide)

    nodes: list[Node] = []
    for value in graph.inputs:
        if outermost and isinstance(value, Value) and _is_narrow(value):
            inner = Value(f"{value.name}_wide", value.type.with_dtype(DType.float32))
            nodes.append(_cast(value, inner, "input"))
            swapped[value] = inner

    def visit(node: Node) -> list[Node]:
        if node.op == VIEW_DTYPE and any(map(_is_narrow, (*node.inputs, *node.results))):
            return _of_bits(node, wide)
        args = tuple(argument(arg) for arg in node.args)
        return [replace(node, args=args, results=tuple(map(wide, node.results)))]

    for node in graph.nodes:
        nodes += visit(node)
    outputs = []
    for number, output in enumerate(graph.outputs):
        if not outermost:
            output = argument(output)
        elif isinstance(output, Value) and _is_narrow(output):
            outer = Value(f"output_{number}_narrow", output.type)
            nodes.append(_cast(wide(output), outer, "output"))
            output = outer
        outputs.append(output)
    constants = {
        wide(value): _widened(value.type, constant) for value, constant in graph.constants.items()
    }
    states = {
        wide(value): None if constant is None else _widened(value.type, constant)
        for value, constant in graph.states.items()
    }
    symbols = {
        symbol: source
        if source.value is None or (outermost and source.value in graph.inputs)
        else replace(source, value=wide(source.value))
        for symbol, source in graph.symbols.items()
    }
    inputs = graph.inputs if outermost else tuple(map(given, graph.inputs))
    return replace(
        graph,
        inputs=inputs,
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        constants=constants,
        states=states,
        symbols=symbols,
        labels={wide(value): label for value, label in graph.labels.items()},
    )


_leaves: weakref.WeakKeyDictionary[Value, Value] = weakref.WeakKeyDictionary()


def _wide_leaf(value: Value) -> Value:
    """What takes the place of a constant or state: the same for all graphs that have it."""
    return _leaves.setdefault(value, Value(value.name, value.type.with_dtype(DType.float32)))


def _of_bits(node: Node, wide: Callable[[Value], Value]) -> list[Node]:
    """A view of a tensor's bytes, which those of float32 are not: the CPU makes it of the half
    precision."""
    (x, dtype), result = node.args, node.result
    before, after = [], []
    if isinstance(x, Value) and _is_narrow(x):
        x, given = Value(f"{result.name}_operand", x.type), wide(x)
        before.append(_cast(given, x))
    if _is_narrow(result):
        narrow = Value(f"{result.name}_bits", result.type)
        after.append(_cast(narrow, wide(result)))
        result = narrow
    return [*before, replace(node, args=(x, dtype), results=(result,)), *after]


def _cast(value: Value, result: Value, source: str = "") -> Node:
    args = (value, result.type.dtype, None, None, None, False, None)
    return Node("aten._to_copy.default", args, (result,), source)


def _is_narrow(value: object) -> bool:
    return isinstance(value, Value) and value.type.dtype in _NARROW


def _values(graph: Graph) -> list[Value]:
    inputs = [value for value in graph.inputs if isinstance(value, Value)]
    return [
        *inputs,
        *graph.constants,
        *graph.states,
        *(value for node in graph.nodes for value in node.results),
    ]


def _widened(type: TensorType, constant: Constant) -> Constant:
    if type.dtype not in _NARROW or not constant.known:
        return constant
    array = constant.array(type)
    if type.dtype is DType.bfloat16:
        return Constant.of((array.astype(np.uint32) << 16).view(np.float32))
    return Constant.of(array.astype(np.float32))
