"""The inputs and outputs of a method, described: names, dtypes, sizes and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from purevk.ir import Dim, FixedInput, Graph, Size, Value
from purevk.ir import dims as _dims
from purevk.plain_text import printable


@dataclass(frozen=True)
class DimSpec:
    """A size that may differ from call to call.

    Attributes:
        name: of the dim, such as "batch", or an expression over other dims, such as "2*batch".
        lower, upper: bounds, both included. None: there is no upper bound.
    """

    name: str
    lower: int
    upper: int | None

    def __str__(self) -> str:
        return printable(self.name)


@dataclass(frozen=True)
class ArgumentSpec:
    """An input or an output.

    Attributes:
        name: "x", "caches.0", "batch.mask", "output".
        kind: "tensor"; "integer"; "fixed": a Python value that the export made part of the graph;
            "unused".
        dtype: of a tensor, such as "float32".
        sizes: of a tensor.
        value: of a fixed argument.
        bounds: of an integer.
    """

    name: str
    kind: str
    dtype: str | None = None
    sizes: tuple[int | DimSpec, ...] = ()
    value: Any = None
    bounds: tuple[int, int | None] | None = None

    def __str__(self) -> str:
        about = repr(self.value) if self.kind == "fixed" else self.kind
        if self.kind == "tensor":
            about = f"{self.dtype}[{', '.join(map(str, self.sizes))}]"
        return printable(f"{self.name}: {about}")


def input_specs(graph: Graph) -> list[ArgumentSpec]:
    """The inputs of a graph, in order."""
    names = () if graph.signature is None else graph.signature.names
    return [
        _spec(graph, names[at] if at < len(names) else f"input_{at}", value)
        for at, value in enumerate(graph.inputs)
    ]


def output_specs(graph: Graph) -> list[ArgumentSpec]:
    """The outputs of a graph, in order, without those that are new elements of inputs."""
    names = () if graph.signature is None else graph.signature.output_names
    values = graph.outputs[: len(graph.outputs) - len(graph.updates)]
    return [
        _spec(graph, names[at] if at < len(names) else f"output_{at}", value)
        for at, value in enumerate(values)
    ]


def _spec(graph: Graph, name: str, value: Any) -> ArgumentSpec:
    if isinstance(value, Value):
        sizes = tuple(size_spec(graph, size) for size in value.type.dims)
        return ArgumentSpec(name, "tensor", value.type.dtype.name, sizes)
    if isinstance(value, Dim):
        (symbol, *_) = sorted(_dims.symbols(value), key=lambda symbol_: symbol_.name)
        return ArgumentSpec(name, "integer", bounds=graph.ranges.get(symbol))
    if isinstance(value, FixedInput):
        return ArgumentSpec(name, "fixed", value=value.value)
    return ArgumentSpec(name, "unused" if value is None else "fixed", value=value)


def size_spec(graph: Graph, size: Size) -> int | DimSpec:
    """A size, with the bounds that the exporter stated if it may differ from call to call."""
    if not isinstance(size, Dim):
        return size
    (symbol, *others) = sorted(_dims.symbols(size), key=lambda symbol_: symbol_.name)
    if not others and size.terms == Dim.of(symbol).terms and symbol in graph.ranges:
        return DimSpec(symbol.name, *graph.ranges[symbol])
    lower, upper = _dims.range_of(size)
    return DimSpec(str(size), lower, None if upper >= _dims.UNBOUNDED else upper)
