"""Moves reshapes past pointwise programs, so that a program has the shape of the kernel that makes
its input."""

from __future__ import annotations

from purevk.ir import Graph, Node, Size, Value
from purevk.ops.elementwise.pointwise import NAME
from purevk.passes.rewrite import Rewriter, each_node, reader_counts
from purevk.tuning import DeviceTraits

_VIEW = "aten.view.default"


def move_views(graph: Graph, traits: DeviceTraits) -> Graph:
    """`program(view(x), ...)` becomes `view(program(x, ...))` where the other inputs allow it and
    `x` is not read otherwise.

    A kernel's result is often reshaped before a bias, an activation or a residual is added; with
    the view behind, these fuse into the kernel.
    """
    counts = reader_counts(graph)
    producers: dict[Value, Node] = {}

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        takes = node.op == NAME and len(node.results) == 1
        moved = _move(rewriter, node, producers, counts) if takes else None
        if moved is None:
            producers.update(dict.fromkeys(node.results, node))
        else:
            counts[moved] = counts.get(node.result, 0)
        return moved

    return each_node(graph, visit)


def _move(
    rewriter: Rewriter, node: Node, producers: dict[Value, Node], counts: dict[Value, int]
) -> Value | None:
    inputs, sizes = node.tensors("inputs"), node.sizes("sizes")
    for value in inputs:
        maker = producers.get(value)
        if maker is None or maker.op != _VIEW or counts.get(value, 0) != 1:
            continue
        source = maker.tensor("x")
        before = producers.get(source)
        if before is None or counts.get(source, 0) != 1 or not _equal(value.type.dims, sizes):
            continue
        if before.op in (_VIEW, "aten.permute.default", "aten.expand.default", "aten.slice.Tensor"):
            continue
        targets = [_reshaped(operand, value, source) for operand in inputs]
        if any(target is None for target in targets):
            continue
        final = []
        for operand, target in zip(inputs, targets):
            if operand is value:
                final.append(source)
            elif target == tuple(operand.type.dims):
                final.append(operand)
            else:
                final.append(rewriter.emit(_VIEW, operand, target))
                producers[final[-1]] = rewriter.nodes[-1]
                counts[final[-1]] = 1
        # The type is the node's, not the expression's: a conversion may have no step of its own.
        type = node.result.type.with_dims(source.type.dims)
        inner = rewriter.emit(
            NAME,
            node.arg("expression"),
            tuple(final),
            node.arg("scalars"),
            source.type.dims,
            results=(type,),
        )
        producers[inner] = rewriter.nodes[-1]
        counts[inner] = 1
        result = rewriter.emit(_VIEW, inner, sizes)
        producers[result] = rewriter.nodes[-1]
        return result
    return None


def _equal(a: tuple[Size, ...], b: tuple[Size, ...]) -> bool:
    return len(a) == len(b) and all(type(x) is type(y) and x == y for x, y in zip(a, b))


def _reshaped(value: Value, like: Value, source: Value) -> tuple[Size, ...] | None:
    """The sizes that an input of a program over `like` has in one over `source`, or None if no
    reshape gives it."""
    if _equal(value.type.dims, like.type.dims):
        return tuple(source.type.dims)
    sizes = tuple(value.type.dims)
    while sizes and isinstance(sizes[0], int) and sizes[0] == 1:
        sizes = sizes[1:]
    if not sizes:
        return ()
    # Along the last dims only, which the reshape leaves as they are.
    tail = source.type.dims[-len(sizes) :]
    if len(sizes) <= source.type.rank and _equal(tuple(like.type.dims[-len(sizes) :]), tuple(tail)):
        if all(
            (isinstance(a, int) and a == 1) or (type(a) is type(b) and a == b)
            for a, b in zip(sizes, tail)
        ):
            return sizes
    return None
