"""Constant weights of software devices in panels of columns.

With few rows, such as the tokens of a language model, a matmul takes as long as reading its weight. In
rows of all columns, a tile reads a short piece of each row, which is a page of memory for each term.
An embedding whose table is such a weight too reads the panels, so that the table is there once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Value
from purevk.lower.expression import Expression, Step
from purevk.ops.elementwise.pointwise import NAME as POINTWISE
from purevk.ops.index.gather import NAME as GATHER
from purevk.ops.index.gather import GatherDims
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.ops.matmul.matmul import PANEL, panels_type
from purevk.passes.rewrite import Rewriter, changing, constants_of, each_node
from purevk.tuning import DeviceTraits

_SHIFT = PANEL.bit_length() - 1


def pack_panels(graph: Graph, traits: DeviceTraits) -> Graph:
    """Has matmuls read constant weights in panels of columns. The rows do not matter, since methods for
    prompts and for tokens share weights."""
    if traits.profile.has_fast_shared_memory:
        return graph
    constant = constants_of(graph) - changing(graph.nodes)
    chosen = {node.result for node in graph.nodes if _takes(node, constant)}
    if not chosen:
        return graph
    producers = graph.producers()
    rights = [node.tensor("b") for node in graph.nodes if not chosen.isdisjoint(node.results)]
    tables = {table: b for b in rights if (table := _table(b, producers)) is not None}
    weights: dict[Value, Value] = {}

    def read_panels(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op == GATHER and node.tensor("x") in tables and _reads_rows(node, traits):
            table = node.tensor("x")
            b = tables[table]
            if b not in weights:
                weights[b] = _packed(rewriter, rewriter.aten.permute(table, (1, 0)))
            return _gathered(rewriter, node, weights[b])
        if chosen.isdisjoint(node.results):
            return None
        b = node.tensor("b")
        if b not in weights:
            weights[b] = _packed(rewriter, _source(b, producers))
        arguments = node.with_arguments(b=weights[b], panels=True).args
        return rewriter.emit(MATMUL, *arguments, results=(node.result.type,))

    return each_node(graph, read_panels)


def _takes(node: Node, constant: set[Value]) -> bool:
    if node.op != MATMUL or node.tensor("b") not in constant:
        return False
    type = node.tensor("b").type
    if type.rank != 2 or not type.is_static:
        return False
    terms, columns = type.dims
    return terms % 4 == 0 and columns % PANEL == 0


def _source(b: Value, producers: Mapping[Value, Node]) -> Value:
    """What a copy in rows is made of."""
    copy = producers.get(b)
    return copy.tensor("x") if copy is not None and copy.op == "purevk.copy" else b


def _table(b: Value, producers: Mapping[Value, Node]) -> Value | None:
    """The table [columns, terms] whose transpose a right operand is."""
    transpose = producers.get(_source(b, producers))
    if transpose is None or transpose.op != "aten.permute.default" or b.type.rank != 2:
        return None
    return transpose.tensor("x") if transpose.ints("dims") == (1, 0) else None


def _packed(rewriter: Rewriter, b: Value) -> Value:
    """A right operand in panels."""
    panels, terms, columns = panels_type(b.type).dims
    parts = rewriter.aten.view(b, (terms, panels, columns))
    return rewriter.purevk.copy(rewriter.aten.permute(parts, (1, 0, 2)))


def _reads_rows(node: Node, traits: DeviceTraits) -> bool:
    """Whether a gather reads whole rows by numbers that the device can divide."""
    dims, numbers = node.attribute("dims", GatherDims), node.tensors("indices")
    kind = numbers[0].type.dtype
    computes = kind is DType.int32 or (kind is DType.int64 and traits.has("int64"))
    return dims.selected == (0,) and computes


def _gathered(rewriter: Rewriter, node: Node, panels: Value) -> Value:
    """The rows of a table that a gather reads, from its panels. Numbers below 0 count from the end:
    row -1 is the last one of panel -1."""
    (rows,), dims = node.tensors("indices"), node.attribute("dims", GatherDims)

    def part(glsl: str) -> Value:
        steps = (Step(f"int({glsl})", (0,), DType.int32),)
        program = Expression((rows.type.dtype,), (), steps, (1,))
        return rewriter.emit(POINTWISE, program, (rows,), (), rows.type.dims)

    x = rewriter.aten.permute(panels, (0, 2, 1))
    numbers = (part(f"$0 >> {_SHIFT}"), part(f"$0 & {PANEL - 1}"))
    axes = replace(dims, x=tuple(axis and axis + 1 for axis in dims.x), selected=(0, 1))
    return rewriter.emit(GATHER, x, numbers, node.sizes("sizes"), axes)
