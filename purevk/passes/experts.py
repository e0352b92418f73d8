"""Matmuls with matrices that are selected by indices read them where they are.

In a mixture of experts, groups of rows are multiplied by different matrices. `purevk.grouped_matmul`
runs the templates of matmuls with the macro ROW_GROUPS. A buffer says where groups end, and each
workgroup counts the groups before its tile. The grid is that of the most tiles that there can be, and
workgroups without a tile end at once. So the host never reads the groups, and the matrices of empty
groups are not read. This pass lets a `bmm` read the matrices that indices select where they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Size, Value
from purevk.ops.matmul.grouped import emit_grouped, takes_rows
from purevk.ops.shapes import wrap
from purevk.passes.rewrite import Rewriter, changing, each_node
from purevk.tuning import DeviceTraits

_MATMULS = ("aten.bmm.default", "aten.matmul.default")
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
_INDICES = (DType.int32, DType.int64)


def select_matrices(graph: Graph, traits: DeviceTraits) -> Graph:
    """`bmm(x, w[indices])` of single rows x, as in a mixture of experts, becomes one matmul that
    reads the matrices of w. Nothing copies them."""
    producers = graph.producers()
    written = changing(graph.nodes)

    def visit(rewriter: Rewriter, node: Node) -> Value | None:
        if node.op not in _MATMULS:
            return None
        a, b = node.tensor("a"), node.tensor("b")
        if a.type.rank != 3 or b.type.rank != 3 or a.type.dims[0] != b.type.dims[0]:
            return None
        if a.type.dtype is not b.type.dtype or a.type.dtype not in _FLOATS:
            return None
        if _one(a.type.dims[1]):
            rows, selected, turned = a, b, False
        elif _one(b.type.dims[2]):
            rows, selected, turned = b, a, True
        else:
            return None
        source, transposed = _source(producers, selected)
        selection = _selection(source)
        if selection is None or not takes_rows(node.result.type.dims[0]):
            return None
        matrices, indices = selection
        if matrices in written:
            return None
        matrices = rewriter.resolve(matrices)
        if transposed is not turned:
            matrices = rewriter.aten.permute(matrices, (0, 2, 1))
        count, _, depth = a.type.dims
        flat = rewriter.aten.view(rewriter.resolve(rows), (count, depth))
        result = emit_grouped(rewriter, flat, matrices, rewriter.resolve(indices), sorted=False)
        return rewriter.aten.view(result, node.result.type.dims)

    return each_node(graph, visit)


def _one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def _source(producers: Mapping[Value, Node], value: Value) -> tuple[Node | None, bool]:
    """The node that makes matrices, behind transpositions, and whether they are transposed."""
    node, transposed = producers.get(value), False
    while node is not None:
        if node.op == "aten.permute.default":
            turned = tuple(wrap(dim, 3) for dim in node.ints("dims")) == (0, 2, 1)
        elif node.op == "aten.transpose.int":
            turned = {wrap(node.int(name), 3) for name in ("dim0", "dim1")} == {1, 2}
        else:
            break
        if not turned:
            return None, False
        transposed = not transposed
        node = producers.get(node.inputs[0])
    return node, transposed


def _selection(node: Node | None) -> tuple[Value, Value] | None:
    """Matrices, and the indices by which a node selects of them."""
    if node is None:
        return None
    if node.op == "aten.index.Tensor":
        matrices, (indices, *other_indices) = node.tensor("x"), node.optional_tensors("indices")
        if any(other_index is not None for other_index in other_indices) or indices is None:
            return None
    elif node.op == "aten.index_select.default" and wrap(node.int("dim"), 3) == 0:
        matrices, indices = node.tensor("x"), node.tensor("index")
    else:
        return None
    fits = matrices.type.rank == 3 and indices.type.rank == 1 and indices.type.dtype in _INDICES
    return (matrices, indices) if fits else None
