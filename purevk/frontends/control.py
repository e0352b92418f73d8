"""Control flow: sub-graphs, while a front end reads a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from purevk.errors import UnsupportedProgramError
from purevk.frontends.importer import Importer
from purevk.ir import Arg, Dim, Graph, Relation, Value, values_in
from purevk.ops import registry
from purevk.ops.control import output_type

# Walks a sub-graph: gets the region and the arguments inside of it, returns the outputs.
Walk = Callable[["Region", tuple[Any, ...]], Sequence[Arg]]


class Region:
    """A sub-graph in the making.

    It uses constants, states, numbers and sizes of the graph around it. Other tensors become
    inputs.

    Attributes:
        importer: takes the nodes.
        operands: the values outside whose inputs `take` made.
    """

    def __init__(self, outer: Importer, name: str) -> None:
        self.outer = outer
        self.importer = outer.sub_graph(name)
        self.operands: list[Value] = []
        self._inside: dict[Value, Value] = {}

    def take(self, arg: Any) -> Any:
        """The value inside for an argument from outside."""
        if isinstance(arg, tuple):
            return tuple(self.take(item) for item in arg)
        if not isinstance(arg, Value) or arg in self.outer.constants or arg in self.outer.states:
            return arg
        if arg not in self._inside:
            self._inside[arg] = self.importer.sub_input(arg.type)
            self.operands.append(arg)
            if arg in self.outer.numbers:
                self.importer.numbers.add(self._inside[arg])
        return self._inside[arg]

    def carried(self, arg: Arg) -> Arg:
        """An input that changes from one iteration of a loop to the next."""
        if isinstance(arg, (int, Dim)) and not isinstance(arg, bool):
            return self.importer.integer_input(0)
        return self.importer.sub_input(output_type(arg))

    def finish(self, outputs: Sequence[Arg]) -> Graph:
        return self.importer.finish_sub_graph(outputs)


def cond(
    importer: Importer,
    predicate: Arg | Relation,
    branches: Sequence[Walk],
    operands: Sequence[Any],
    source: str,
) -> tuple[Value, ...]:
    """A choice between two sub-graphs. The first one runs if the predicate is true.

    Raises:
        UnsupportedProgramError: the branches give tensors of different sizes or dtypes.
    """
    name = importer.fresh_name("purevk.cond")
    regions, graphs = [], []
    for walk, label in zip(branches, ("true", "false")):
        region = Region(importer, f"{name}.{label}")
        graphs.append(
            region.finish(walk(region, tuple(region.take(operand) for operand in operands)))
        )
        regions.append(region)
    inside = [tuple(region.operands) for region in regions]
    predicate = predicate.truth if isinstance(predicate, Relation) else predicate
    return _emit(importer, "purevk.cond", (predicate, *graphs, *inside), graphs, source)


def while_loop(
    importer: Importer,
    condition: Walk,
    body: Walk,
    carried: Sequence[Arg],
    operands: Sequence[Any],
    source: str,
) -> tuple[Value, ...]:
    """A loop that runs while the output of the condition is true."""
    name = importer.fresh_name("purevk.while")
    graphs, inside = [], []
    for walk, label in ((condition, "condition"), (body, "body")):
        region = Region(importer, f"{name}.{label}")
        inputs = tuple(region.carried(arg) for arg in carried)
        graphs.append(
            region.finish(walk(region, (*inputs, *(region.take(operand) for operand in operands))))
        )
        inside.append(tuple(region.operands))
    return _emit(importer, "purevk.while", (*graphs, tuple(carried), *inside), graphs, source)


def scan(
    importer: Importer,
    body: Walk,
    carried: Sequence[Arg],
    scanned: Sequence[Value],
    operands: Sequence[Any],
    source: str,
) -> tuple[Value, ...]:
    """A loop over dim 0 of tensors.

    The body takes the carried values, the tensors at one index along dim 0, and the operands. It
    gives the carried values for the next iteration, and the results at this index.
    """
    region = Region(importer, f"{importer.fresh_name('purevk.for')}.body")
    inputs = tuple(region.carried(arg) for arg in carried)
    rows = tuple(
        region.importer.sub_input(value.type.with_dims(value.type.dims[1:])) for value in scanned
    )
    graph = region.finish(
        body(region, (*inputs, *rows, *(region.take(operand) for operand in operands)))
    )
    length = scanned[0].type.dims[0]
    args = (graph, length, tuple(carried), tuple(scanned), tuple(region.operands))
    return _emit(importer, "purevk.for", args, [graph], source)


def _emit(
    importer: Importer, op: str, args: tuple[Arg, ...], graphs: Iterable[Graph], source: str
) -> tuple[Value, ...]:
    states = [value for graph in graphs for value in _touched(graph) if value in importer.states]
    writes = {value for graph in graphs for node in graph.nodes for value in registry.mutated(node)}
    reads = tuple(dict.fromkeys(value for value in states if value not in writes))
    written = tuple(dict.fromkeys(value for value in states if value in writes))
    definition = registry.find(op)
    try:
        if definition is not None:
            definition.infer((*args, reads, written))
    except registry.ShapeError as error:
        raise UnsupportedProgramError(
            f"{op.removeprefix('purevk.')} cannot be run",
            where=f"{importer.where}, {source}",
            why=str(error),
            next="have its sub-graphs return tensors of one size and dtype",
        ) from error
    return importer.emit(op, (*args, reads, written), [], [], source)


def _touched(graph: Graph) -> list[Value]:
    return [*(value for node in graph.nodes for value in node.inputs), *values_in(graph.outputs)]
