"""Compares what a saved graph states of its values with what follows from its operators: sizes, dtypes,
and where views lie in the bytes of their input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from purevk.dtypes import DType
from purevk.errors import FileFormatError
from purevk.frontends.bounds import largest_sizes
from purevk.frontends.reading import NEXT, place_of
from purevk.frontends.result_types import equal_at
from purevk.ir import (
    Arg,
    Dim,
    Graph,
    GuardLog,
    Layout,
    Node,
    Size,
    Symbol,
    SymbolSource,
    TensorType,
    Value,
)
from purevk.ir import dims as _dims
from purevk.ir import guards as _guards
from purevk.ops import registry


def check_results(graph: Graph, where: str, examples: Mapping[str, int]) -> None:
    """Compares every result of a graph and its sub-graphs with the shape function of its operator, and
    every view with its storage.

    Args:
        where: the file and the method, for messages.
        examples: the sizes that the graph was traced with, by their symbols' names. The guards of the
            graph hold for these, and need not hold at the bounds of the sizes.

    Raises:
        FileFormatError: they differ.
        ShapeError, GraphError, TypeError, ...: an operator does not take its arguments.
    """
    traced = {
        symbol: max(examples[symbol.name], 1) for symbol in graph.symbols if symbol.name in examples
    }
    most = largest_sizes(graph.constraints)
    with GuardLog() as log:
        _check_inputs(graph, where)
        for inner in graph.nested():
            for node in inner.nodes:
                _check_node(inner, node, where, traced, most)
            _check_sources(inner, where)
            for value, constant in inner.constants.items():
                if constant.known and constant.nbytes != value.type.nbytes:
                    raise FileFormatError(
                        f"constant {value!r} is stated as {value.type}",
                        where=where,
                        why=f"it has {constant.nbytes} bytes, not {value.type.nbytes}",
                        next=NEXT,
                    )
    # Files state the decisions that their graphs were made under, or constraints that settle these. What
    # one does not state, calls check too. What does not hold for the traced sizes was not decided so.
    for guard in log.guards:
        if not guard.symbols <= traced.keys() or guard.holds(traced):
            _guards.note(guard)


# Parameters of pointwise operators that are texts although no default says so. Each chooses one of
# several expressions.
_CHOICES = ("approximate", "rounding_mode")
# Those that are lists.
_LISTS = ("dim_order", "memory_format")


def check_numbers(definition: registry.Operator, args: Sequence[Arg]) -> None:
    """Raises `ShapeError` if a pointwise operator is given a text or a list for a number:
    expressions of GLSL are made of its arguments."""
    if not isinstance(definition.form, registry.Pointwise):
        return
    for (name, parameter), arg in zip(definition.signature.parameters.items(), args):
        is_choice = name in _CHOICES or isinstance(parameter.default, str)
        if isinstance(arg, str) and not is_choice:
            raise registry.ShapeError(
                f"argument {name!r} of {definition.name} is the text {arg[:80]!r}",
                why="a tensor or a number is expected",
            )
        missing = arg is None and parameter.default is not None
        if missing or (isinstance(arg, DType) and "dtype" not in name):
            raise registry.ShapeError(
                f"argument {name!r} of {definition.name} is {arg}",
                why="a tensor or a number is expected",
            )
        if isinstance(arg, tuple) and name not in _LISTS:
            raise registry.ShapeError(
                f"argument {name!r} of {definition.name} is a list",
                why="a tensor or a number is expected",
            )


def _check_inputs(graph: Graph, where: str) -> None:
    """Every size of an input that is not fixed is a symbol that calls read, or a call compares it with
    that symbol."""
    equal = {
        difference.terms
        for guard in graph.constraints
        if guard.op == "==" and guard.answer
        for difference in (guard.left - guard.right, guard.right - guard.left)
        if isinstance(difference, Dim)
    }
    read = {source: Dim.of(symbol) for symbol, source in graph.symbols.items()}
    dynamic = {
        SymbolSource(value, dim): size
        for value in graph.inputs
        for dim, size in enumerate(value.type.dims if isinstance(value, Value) else ())
        if isinstance(value, Value) and isinstance(size, Dim)
    }
    for source, size in dynamic.items():
        symbol = read.get(source)
        if symbol is None:
            raise FileFormatError(
                f"input {source.value!r} has size {size} along dim {source.dim}",
                where=where,
                why="no symbol is read from that dim, so that no call would check it",
                next=NEXT,
            )
        difference = symbol - size
        if isinstance(difference, Dim) and difference.terms not in equal:
            _dims.assume(symbol, "==", size)


def _check_sources(graph: Graph, where: str) -> None:
    """Symbols are sizes of inputs or of what the CPU computes, or elements of values whose own sizes
    do not depend on them."""
    makers = {value: node for node in graph.nodes for value in node.results}
    for symbol, source in graph.symbols.items():
        if source.value is None:
            continue
        node = makers.get(source.value)
        of_itself = any(symbol in _dims.symbols(size) for size in source.value.type.dims)
        if source.dim is None:
            wrong = of_itself
        else:
            wrong = of_itself and node is not None and not _gives_sizes(node)
        if node is not None and not symbol.unbacked:
            raise FileFormatError(
                f"symbol {symbol} is read from {source.value!r}",
                where=where,
                why="it is stated as known before a call, and that is computed in the call",
                next=NEXT,
            )
        if wrong:
            raise FileFormatError(
                f"symbol {symbol} is read from {source.value!r}",
                where=where,
                why=f"the sizes of that depend on it: {source.value.type}",
                next=NEXT,
            )


def _gives_sizes(node: Node) -> bool:
    """Whether sizes of a node's results are known only when it has run."""
    definition = registry.find(node.op)
    if definition is None:
        return True  # the CPU runs it
    try:
        definition.infer(node.args)
    except registry.UnknownSizes:
        return True
    return False


def _check_node(
    graph: Graph, node: Node, where: str, traced: Mapping[Symbol, int], most: Mapping[Symbol, int]
) -> None:
    definition = registry.find(node.op)
    if definition is None:
        return  # the CPU runs it, and compares what it gives with the stated types
    for value in registry.mutated(node):
        if value in graph.inputs or value in graph.constants:
            _refuse(node, where, f"{node.op} writes {value!r}", "it is no state of the program")
    if node.op == "purevk.store":
        _check_type(node, where, 0, node.tensor("value").type, node.tensor("state").type, traced)
    check_numbers(definition, node.args)
    try:
        inferred = definition.infer(node.args)
    except registry.UnknownSizes as error:
        if error.types is not None:
            for number, (value, type) in enumerate(zip(node.results, error.types)):
                _check_data_dependent(node, where, number, value.type, type, traced)
        return
    imaginary = any(isinstance(arg, complex) for arg in node.args)
    if imaginary and not any(type.dtype.is_complex for type in inferred):
        _refuse(node, where, f"{node.op} is given a complex number", "its result is real")
    if len(inferred) != len(node.results):
        why = f"{len(node.results)} are stated"
        _refuse(node, where, f"{node.op} has {len(inferred)} results", why)
    for number, (value, type) in enumerate(zip(node.results, inferred)):
        _check_type(node, where, number, value.type, type, traced)
    if isinstance(definition.form, (registry.View, registry.Kernel)):
        for value, type in zip(node.results, inferred):
            if value.type.dtype is not type.dtype:
                why = f"its elements are {type.dtype}"
                _refuse(node, where, f"a result of {node.op} is stated as {value.type}", why)
    if isinstance(definition.form, registry.View):
        _check_view(node, where, definition, definition.form, most)


def _check_type(
    node: Node,
    where: str,
    number: int,
    stated: TensorType,
    computed: TensorType,
    traced: Mapping[Symbol, int],
) -> None:
    same = (
        stated.rank == computed.rank
        and all(_alike(a, b, traced) for a, b in zip(stated.dims, computed.dims))
        and _alike_dtypes(stated.dtype, computed.dtype)
    )
    if not same:
        _refuse(
            node,
            where,
            f"result {number} of {node.op} is stated as {stated}",
            f"from its arguments it is {computed}",
        )


def _check_data_dependent(
    node: Node,
    where: str,
    number: int,
    stated: TensorType,
    computed: TensorType | registry.DataDependentType,
    traced: Mapping[Symbol, int],
) -> None:
    same = stated.rank == len(computed.dims) and all(
        not isinstance(size, (int, Dim)) or _alike(stated_size, size, traced)
        for stated_size, size in zip(stated.dims, computed.dims)
    )
    if not same or not _alike_dtypes(stated.dtype, computed.dtype):
        why = f"from its arguments it is {computed}"
        _refuse(node, where, f"result {number} of {node.op} is stated as {stated}", why)


def _alike(stated: Size, computed: Size, traced: Mapping[Symbol, int]) -> bool:
    """Whether two sizes are the same expression, or agree at the bounds of their symbols or where they
    were traced."""
    if isinstance(stated, int) and isinstance(computed, int):
        return stated == computed
    if isinstance(stated, Dim) and isinstance(computed, Dim) and stated.terms == computed.terms:
        return True
    at_bounds = _dims.hint(stated) == _dims.hint(computed)
    return at_bounds or equal_at(stated, computed, traced) is True


def _alike_dtypes(stated: DType, computed: DType) -> bool:
    """Whether a file may state one dtype where the operator gives another: exporters narrow numbers
    (int64 to int32, float32 to float16), and have bytes for bools."""
    if stated is computed:
        return True
    return _class(stated) == _class(computed)


def _class(dtype: DType) -> str:
    return "float" if dtype.is_float else "complex" if dtype.is_complex else "int"


def _check_view(
    node: Node,
    where: str,
    definition: registry.Operator,
    form: registry.View,
    most: Mapping[Symbol, int],
) -> None:
    """Whether all elements of the results are elements of the input, if it is dense, at the largest
    sizes that a call can have."""
    source = node.inputs[0].type
    bound = tuple(definition.bind(node.args).values())
    types = tuple(value.type for value in node.results)
    layouts = form.layout(Layout.dense(source.dims), source, types, *bound)
    for value, layout in zip(node.results, layouts or ()):
        if not _lies_within(value, layout, source, most):
            why = f"{node.inputs[0]!r} has {source.numel} elements"
            _refuse(node, where, f"{node.op} reads beyond its input", why)


def _lies_within(
    value: Value, layout: Layout, source: TensorType, most: Mapping[Symbol, int]
) -> bool:
    """The layout is in elements of the value, which may be parts of the input's complex numbers."""
    numbers: Sequence[Size] = (layout.offset, *layout.strides, *value.type.dims, source.numel)
    symbols = set().union(*map(_dims.symbols, numbers))
    if any(symbol.unbacked or not symbol.is_size for symbol in symbols):
        return True  # positions are checked at the call

    def largest(size: Size) -> int:
        return _dims.hint(_dims.substitute(size, most) if most else size)

    sizes = list(map(largest, value.type.dims))
    if 0 in sizes:
        return True
    first = last = largest(layout.offset)
    for size, stride in zip(sizes, map(largest, layout.strides)):
        first += min(stride, 0) * (size - 1)
        last += max(stride, 0) * (size - 1)
    nbytes = largest(source.numel) * source.dtype.itemsize
    return first >= 0 and last < max(nbytes // value.type.dtype.itemsize, 1)


def _refuse(node: Node, where: str, what: str, why: str) -> None:
    raise FileFormatError(what, where=place_of(where, node), why=why, next=NEXT)
