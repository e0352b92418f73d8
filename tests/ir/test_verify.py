"""Each rule of the grammar has a graph that breaks it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.ir import Constant, Dim, Graph, Node, Symbol, SymbolSource, TensorType, Value
from purevk.ir.printer import to_text
from purevk.ir.verify import verify

F = TensorType(DType.float32, (2, 3))


def _graph() -> Graph:
    x, w, y = Value("x", F), Value("w", F), Value("y", F)
    node = Node("aten.add.Tensor", (x, w, 1), (y,), "line 1")
    return Graph(
        "forward", (x,), (node,), (y,), constants={w: Constant.of(np.zeros((2, 3), np.float32))}
    )


def test_a_sound_graph_passes() -> None:
    verify(_graph())


def _breaks(graph: Graph, what: str) -> None:
    with pytest.raises(GraphError, match=what):
        verify(graph, "some_pass")


def test_read_before_defined() -> None:
    graph = _graph()
    _breaks(replace(graph, inputs=()), "read before it is defined")


def test_defined_twice() -> None:
    graph = _graph()
    _breaks(replace(graph, nodes=graph.nodes * 2), "defined twice")


def test_names_are_unique() -> None:
    graph = _graph()
    other = Value("y", F)
    _breaks(
        replace(
            graph, nodes=(*graph.nodes, Node("aten.relu.default", (graph.inputs[0],), (other,)))
        ),
        "named y",
    )


def test_outputs_are_defined() -> None:
    _breaks(replace(_graph(), outputs=(Value("z", F),)), "returned but never defined")


def test_sizes_are_not_negative() -> None:
    graph = _graph()
    _breaks(
        replace(graph, inputs=(graph.inputs[0], Value("n", TensorType(DType.float32, (-1,))))),
        "negative size",
    )


def test_symbols_are_known() -> None:
    graph = _graph()
    loose = Value("n", TensorType(DType.float32, (Dim.of(Symbol("s9", 8)),)))
    _breaks(replace(graph, inputs=(graph.inputs[0], loose)), "unknown symbols")


def test_constants_have_their_bytes() -> None:
    graph = _graph()
    (w,) = graph.constants
    _breaks(
        replace(graph, constants={w: Constant.of(np.zeros(3, np.float32))}),
        "does not have its bytes",
    )


def test_lists_of_arguments_are_tuples() -> None:
    graph = _graph()
    (node,) = graph.nodes
    _breaks(replace(graph, nodes=(replace(node, args=([node.args[0]],)),)), "is a list")


def test_the_printed_form_names_everything() -> None:
    symbol = Symbol("s0", 8)
    x = Value("x", TensorType(DType.int64, (1, Dim.of(symbol))))
    graph = replace(_graph(), inputs=(x, *_graph().inputs), symbols={symbol: SymbolSource(x, 1)})
    text = to_text(graph)
    for part in (
        "method forward",
        "symbol s0 <= 8 = %x.size(1)",
        "input %x: int64[1,s0]",
        "constant %w: float32[2,3]",
        "%y: float32[2,3] = aten.add.Tensor(%x, %w, 1)  # line 1",
        "output %y",
    ):
        assert part in text
