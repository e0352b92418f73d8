"""Matmuls of few rows take over what comes before and after them: a root mean square norm, a gated
activation, rotary embeddings with the writes to a cache. This saves dispatches, each of which waits
for the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Arg, Graph, Layout, Node, Size, Value
from purevk.lower.expression import Expression, ExpressionBuilder
from purevk.ops import registry
from purevk.ops.attention.rotary_cache import NAME as ROTATE_TO_CACHE
from purevk.ops.elementwise.pointwise import NAME as POINTWISE
from purevk.ops.matmul.few_rows import NAME as FEW_ROWS
from purevk.ops.matmul.few_rows import TO_CACHE, choose_few_rows, takes_caches
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.ops.movement.views import view_layout
from purevk.ops.quantized.few_rows import NAME as QUANTIZED_FEW_ROWS
from purevk.ops.quantized.few_rows import TO_CACHE as QUANTIZED_TO_CACHE
from purevk.ops.quantized.few_rows import choose_few_rows as choose_quantized
from purevk.ops.quantized.few_rows import matmul_of
from purevk.ops.quantized.matmul import NAME as QUANTIZED
from purevk.ops.reduce.normalization import NAME as NORM
from purevk.passes.fuse import MAX_EPILOGUE_CODE
from purevk.passes.matmul.merge_matmuls import is_transpose
from purevk.passes.rewrite import Rewriter, changing
from purevk.tuning import DeviceTraits

_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
# The operators that take over neighbours, and those that rotate to a cache, by the matmul.
_NAMES = {
    MATMUL: (FEW_ROWS, TO_CACHE),
    QUANTIZED: (QUANTIZED_FEW_ROWS, QUANTIZED_TO_CACHE),
}


class _Fused(NamedTuple):
    """A matmul with what it takes over.

    Attributes:
        norm: what normalizes its rows, or None.
        end: the node that alone reads it, and whose place it takes; None: that node stays.
        pair: columns from the first to the second that the end reads; 0: it reads no pairs.
        turned: the end names the second before the first.
        gone: the nodes that are not needed any more, but for the matmul.
    """

    matmul: Node
    norm: Node | None
    end: Node | None
    pair: int
    turned: bool
    gone: tuple[Node, ...]


def fuse_few_rows(graph: Graph, traits: DeviceTraits) -> Graph:
    """Has matmuls of few rows normalize these, and compute a gated activation or rotate to a cache
    what they make."""
    finder = _Finder(graph, traits)
    found = [fused for node in graph.nodes if (fused := finder.fused(node)) is not None]
    if not found:
        return graph
    ends = {fused.end or fused.matmul: fused for fused in found}
    gone = {node for fused in found for node in (fused.matmul, *fused.gone)}
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        fused = ends.get(node)
        if fused is not None:
            _emit(rewriter, fused)
        elif node not in gone:
            rewriter.keep(rewriter.current(node))
    return rewriter.finish()


def _emit(rewriter: Rewriter, fused: _Fused) -> None:
    matmul, norm, end = fused.matmul, fused.norm, fused.end
    rewriter.source = " + ".join(each.source for each in (norm, matmul, end) if each is not None)
    a, scale, eps = _rows(matmul), None, 0.0
    if norm is not None:
        wanted = a.type.dims
        a, scale = (rewriter.resolve(norm.tensor(name)) for name in ("x", "weight"))
        eps = norm.float("eps")
        if a.type.dims != wanted:
            a = rewriter.emit("aten.view.default", a, wanted)
    given = [rewriter.resolve(each) for each in _operands(matmul, a)]
    few_rows, to_cache = _NAMES[matmul.op]
    if end is None:
        epilogue, extras = (rewriter.resolve(matmul.arg(name)) for name in ("epilogue", "extras"))
        made = rewriter.emit(few_rows, *given, scale, eps, 0, epilogue, extras)
        rewriter.replace(matmul, made)
    elif end.op == ROTATE_TO_CACHE:
        names = ("cos", "sin", "start", "keys", "values", "dim", "index")
        others = [rewriter.resolve(end.arg(name)) for name in names]
        rewriter.replace(end, rewriter.emit(to_cache, *given, scale, eps, *others))
    else:
        program = _in_order(fused, end)
        made = rewriter.emit(few_rows, *given, scale, eps, fused.pair, program, ())
        rewriter.replace(end, rewriter.emit("aten.view.default", made, end.result.type.dims))


def _operands(matmul: Node, rows: Value) -> tuple[Arg, ...]:
    """The arguments of a matmul that the kernels of few rows take first, of other rows."""
    if matmul.op == MATMUL:
        return rows, matmul.tensor("b"), matmul.optional_tensor("bias")
    names = ("weight", "scales", "bias", "bits", "high_first", "group", "dtype")
    return rows, *(matmul.arg(name) for name in names)


def _rows(matmul: Node) -> Value:
    return matmul.tensor("a" if matmul.op == MATMUL else "x")


def _in_order(fused: _Fused, end: Node) -> Expression:
    """The program of a node over pairs of columns, whose input 0 is the first of a pair."""
    expression, inputs = end.attribute("expression", Expression), end.tensors("inputs")
    if not fused.turned:
        return expression
    builder = ExpressionBuilder()
    refs = [
        builder.input(value, dtype)
        for value, dtype in reversed([*zip(inputs, expression.inputs, strict=True)])
    ]
    return builder.build(builder.inline(expression, refs[::-1]))


class _Finder:
    """Looks at the neighbours of matmuls."""

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self._graph, self._traits = graph, traits
        self._made, self._users = graph.producers(), graph.users()
        self._outputs = graph.output_values()
        self._outputs |= {s.value for s in graph.symbols.values() if s.value is not None}
        self._written = changing(graph.nodes)

    def fused(self, matmul: Node) -> _Fused | None:
        """What a matmul can take over; None: nothing."""
        if matmul.op not in _NAMES or self._written & set(matmul.inputs):
            return None
        takes = self._takes if matmul.op == MATMUL else self._takes_quantized
        if not takes(matmul, False):
            return None
        norm, before = self._norm(_rows(matmul))
        end: Node | None = None
        pair, turned, after = 0, False, before[:0]
        if matmul.arg("epilogue") is None and takes(matmul, True):
            end, pair, turned, after = self._end(matmul)
        if norm is None and end is None:
            return None
        return _Fused(matmul, norm, end, pair, turned, (*before, *after))

    def _takes(self, matmul: Node, paired: bool) -> bool:
        """Whether the kernel of few rows is the one for a matmul."""
        a, b, bias = matmul.tensor("a"), matmul.tensor("b"), matmul.optional_tensor("bias")
        if a.type.rank != 2 or b.type.rank != 2 or not b.type.is_static:
            return False
        if a.type.dtype not in _FLOATS or b.type.dtype is not a.type.dtype:
            return False
        transposed = self._is_transposed(b)
        if (bias is not None and bias.type.rank != 1) or not (transposed or self._is_packed(b)):
            return False
        return choose_few_rows(self._traits, a.type, b.type, paired, transposed) is not None

    def _takes_quantized(self, matmul: Node, paired: bool) -> bool:
        """The same for a quantized weight."""
        x, weight, scales = (matmul.tensor(name) for name in ("x", "weight", "scales"))
        if any(matmul.arg(name) is not None for name in ("sums", "out")):
            return False
        if x.type.dtype not in _FLOATS or matmul.result.type.dtype not in _FLOATS:
            return False
        if not weight.type.is_static or weight.type.nbytes > self._traits.max_storage_range:
            return False
        bits, group = matmul.int("bits"), matmul.int("group")
        form = matmul_of(x.type, weight.type, scales.type, bits, group)
        return form is not None and choose_quantized(self._traits, form, paired) is not None

    def _is_packed(self, weight: Value) -> bool:
        """Whether a matrix is dense along its rows: one that purevk has packed at load."""
        node = self._made.get(weight)
        return node is not None and node.op in ("purevk.copy", "aten.cat.default")

    def _is_transposed(self, weight: Value) -> bool:
        """Whether a matrix is dense along its columns: a constant, or several of them together."""
        node = self._made.get(weight)
        if node is None or not is_transpose(node):
            return False
        columns = node.tensor("x")
        maker = self._made.get(columns)
        return columns in self._graph.constants or (
            maker is not None and maker.op == "aten.cat.default"
        )

    def _norm(self, a: Value) -> tuple[Node | None, tuple[Node, ...]]:
        """The norm of the rows of a matrix that nothing else reads, and the nodes that go with it."""
        gone: list[Node] = []
        value, width = a, a.type.dims[1]
        while True:
            node = self._made.get(value)
            if node is None or value in self._outputs or len(self._users[value]) != 1:
                return None, ()
            gone.append(node)
            if node.op != "aten.view.default":
                break
            value = node.tensor("x")
        if node.op != NORM or not node.bool("rms") or node.int("count") != 1:
            return None, ()
        x, scale = node.tensor("x"), node.optional_tensor("weight")
        if scale is None or node.optional_tensor("bias") is not None:
            return None, ()
        plain = node.arg("epilogue") is None and x.type.dims[-1] == width
        fits = x.type.dtype is a.type.dtype and scale.type.dtype in _FLOATS
        if not plain or not fits or scale.type.dims != (width,) or self._written & {x, scale}:
            return None, ()
        return node, tuple(gone)

    def _end(self, matmul: Node) -> tuple[Node | None, int, bool, tuple[Node, ...]]:
        """The node that alone reads pairs of columns of a matmul, their distance, whether it names the
        second first, and the views in between; None, 0, False and () if there is none."""
        reached = self._views(matmul.result)
        if reached is None:
            return None, 0, False, ()
        layouts, end = reached
        views = tuple(
            node for node in self._graph.nodes if node.results and node.results[0] in layouts
        )
        views = tuple(node for node in views if node is not matmul)
        pair, turned = 0, False
        if end.op == POINTWISE:
            for turned in (False, True):
                pair = self._gate(matmul, end, layouts, turned)
                if pair:
                    break
        elif end.op == ROTATE_TO_CACHE:
            pair = self._heads(matmul, end, layouts)
        return (end, pair, turned, views) if pair else (None, 0, False, ())

    def _views(self, value: Value) -> tuple[dict[Value, Layout], Node] | None:
        """The layouts of all views of a value in it, and the one node that reads them; None if there
        are several."""
        layouts = {value: Layout.dense(value.type.dims)}
        ends: set[Node] = set()
        waiting = [value]
        while waiting:
            source = waiting.pop()
            if source in self._outputs:
                return None
            for node in self._users.get(source, ()):
                definition = registry.find(node.op)
                form = None if definition is None else definition.form
                if definition is None or not isinstance(form, registry.View):
                    ends.add(node)
                    continue
                types = tuple(each.type for each in node.results)
                bound = tuple(definition.bind(node.args).values())
                seen = form.layout(layouts[source], source.type, types, *bound)
                if seen is None or node.inputs != (source,):
                    return None
                layouts.update(zip(node.results, seen))
                waiting += node.results
        return (layouts, ends.pop()) if len(ends) == 1 else None

    def _gate(self, matmul: Node, end: Node, layouts: Mapping[Value, Layout], turned: bool) -> int:
        """Half of the columns, if a pointwise program makes one column of one of the first and one
        of the second half, or the other way round; else 0."""
        if len(end.results) != 1 or end.sizes("scalars") or len(end.tensors("inputs")) != 2:
            return 0
        expression, inputs = end.attribute("expression", Expression), end.tensors("inputs")
        types = {*expression.dtypes, *expression.inputs, end.result.type.dtype}
        if expression.code_size > MAX_EPILOGUE_CODE or not types.issubset(_FLOATS):
            return 0
        m, n = matmul.result.type.dims
        if not isinstance(n, int) or n % 8 or end.result.type.dtype not in _FLOATS:
            return 0
        sizes = tuple(end.sizes("sizes"))
        for number, value in enumerate(reversed(inputs) if turned else inputs):
            wanted = view_layout(Layout(number * (n // 2), (n, 1)), (m, n // 2), sizes)
            if wanted is None or value.type.dims != sizes or value not in layouts:
                return 0
            if not _is_same(layouts[value], wanted, sizes):
                return 0
        return n // 2

    def _heads(self, matmul: Node, end: Node, layouts: Mapping[Value, Layout]) -> int:
        """Half of the width of a head, if queries, keys and values are the columns in this order;
        else 0."""
        q, k, v = (end.tensor(name) for name in "qkv")
        n, width = matmul.result.type.dims[1], q.type.dims[3]
        args = [end.arg(name) for name in ("cos", "sin", "start", "keys", "values")]
        if not takes_caches(q, *args) or not isinstance(n, int):  # type: ignore[arg-type]
            return 0
        inputs = {end.tensor(name) for name in ("cos", "sin", "index")}
        if self._written & inputs or inputs & layouts.keys():
            return 0
        first: Size = 0
        for value in (q, k, v):
            if value not in layouts or value.type.dtype is not matmul.result.type.dtype:
                return 0
            wanted = Layout(first, (0, n, width, 1))
            if not _is_same(layouts[value], wanted, value.type.dims):
                return 0
            first = first + value.type.dims[2] * width
        return width // 2 if first == n and isinstance(width, int) else 0


def _is_same(one: Layout, other: Layout, dims: Sequence[Size]) -> bool:
    """Whether two layouts are of the same elements."""
    return one.offset == other.offset and all(
        size == 1 or a == b for size, a, b in zip(dims, one.strides, other.strides)
    )
