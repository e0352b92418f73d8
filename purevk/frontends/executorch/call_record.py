"""The record of a method's calls in .pte files of `PurevkPartitioner`: names, nesting, bounds, and what
export decided from sizes. ExecuTorch's format has no field for it, so it is a compile spec of the
delegates. Other runtimes ignore it."""

from __future__ import annotations

import json
from typing import Any

from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.importer import Importer
from purevk.ir import Dim, Graph, Guard, Signature, Size, Symbol, Tree, Value
from purevk.ir import dims as _dims
from purevk.ir.serial import GraphReader, GraphWriter
from purevk.ir.signature import LEAF_TREE

KEY = "purevk.calls"


def write(graph: Graph) -> bytes:
    """The record of a graph, as read from an exported program."""
    writer = GraphWriter(lambda data: 0)
    symbols = {}
    for symbol, source in graph.symbols.items():
        if source.value is None:
            symbols[symbol.name] = [source.element, 0]
        elif source.value in graph.inputs and source.dim is not None:
            symbols[symbol.name] = [graph.inputs.index(source.value), source.dim]
    signature = None
    if graph.signature is not None:
        try:
            signature = writer.signature(graph.signature)
        except UnsupportedProgramError:
            pass  # the file is called with flat inputs then
    record = {
        "symbols": symbols,
        "constraints": [writer.guard(guard) for guard in graph.constraints],
        "ranges": [[symbol.name, *bounds] for symbol, bounds in graph.ranges.items()],
        "signature": signature,
    }
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode()


def find(plan: Any) -> bytes | None:
    """The record of a method, if a delegate has one."""
    for delegate in plan.delegates:
        for spec in delegate.compile_specs:
            if spec.key == KEY:
                record: bytes = spec.value
                return record
    return None


def apply(record: bytes, importer: Importer, outputs: int, where: str) -> None:
    """Applies a record to a graph in the making, which already has its inputs.

    Args:
        outputs: number of the method's outputs.

    Raises:
        FileFormatError: the record is damaged.
        SizeConstraintError: the sizes that the graph is read for break a constraint.
    """
    try:
        data = json.loads(record)
        names = {str(name): Symbol(str(name)) for name in data["symbols"]}
        reader = GraphReader(lambda number: memoryview(b""), names)
        now = {
            names[str(name)]: _size(importer, position, dim)
            for name, (position, dim) in data["symbols"].items()
        }
        guards = [reader.guard(guard) for guard in data["constraints"]]
        ranges = [
            (now[names[name]], int(lower), None if upper is None else int(upper))
            for name, lower, upper in data["ranges"]
        ]
        signature = None if data["signature"] is None else reader.signature(data["signature"])
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        ArithmeticError,
    ) as error:
        raise FileFormatError(
            "the record of the method's calls is damaged",
            where=where,
            why=f"compile spec {KEY}: {error!r}",
            next="export the model again",
        ) from error
    for guard in guards:
        importer.constrain(
            Guard(
                _dims.substitute(guard.left, now),
                guard.op,
                _dims.substitute(guard.right, now),
                guard.answer,
            )
        )
    for size, lower, upper in ranges:
        if isinstance(size, Dim) and len(size.terms) == 1:
            for symbol in _dims.symbols(size):
                importer.ranges[symbol] = (lower, upper)
    if signature is not None and len(signature.names) == len(importer.inputs):
        if signature.outputs.leaves != outputs:
            signature = Signature(
                signature.parameters, signature.order, signature.defaults, _flat(outputs)
            )
        importer.signature = signature


def _size(importer: Importer, position: int, dim: int) -> Size:
    value = importer.inputs[position]
    if isinstance(value, Value):
        size: Size = value.type.dims[dim]
        # Sizes with equal bounds are one size in the graph. Export may have told them apart.
        for symbol, source in importer.symbols.items():
            if source.value is value and source.dim == dim:
                return Dim.of(symbol)
        return size
    if isinstance(value, Dim):
        return value
    raise ValueError(f"input {position} has no size")


def _flat(count: int) -> Tree:
    return LEAF_TREE if count == 1 else Tree("tuple", items=(LEAF_TREE,) * count)
