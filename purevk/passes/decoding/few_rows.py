"""Matmuls of few rows take over what comes before and after them: a root mean square norm, a gated
activation, rotary embeddings with the writes to a cache. This saves dispatches, each of which waits
for the one before."""

from __future__ import annotations

from typing import NamedTuple

from purevk.ir import Graph, Node, Value
from purevk.ops.matmul.few_rows import choose_few_rows
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.ops.quantized.choice import choose_few_rows as choose_quantized
from purevk.ops.quantized.matmul import NAME as QUANTIZED
from purevk.ops.quantized.matmul import matmul_of
from purevk.ops.reduce.normalization import NAME as NORM
from purevk.passes.decoding.pairs import FLOATS, PairFinder, PairReader
from purevk.passes.matching import Matcher
from purevk.passes.matmul.merge_matmuls import is_transpose
from purevk.passes.rewrite import Rewriter, changing
from purevk.tuning import DeviceTraits

_CAT, _VIEW = "aten.cat.default", "aten.view.default"


class _Fused(NamedTuple):
    """A matmul with what it takes over.

    Attributes:
        norm: what normalizes its rows, or None.
        end: what reads pairs of its columns, and whose place it takes; None: that node stays.
        gone: the nodes that are not needed any more, but for the matmul.
    """

    matmul: Node
    norm: Node | None
    end: PairReader | None
    gone: tuple[Node, ...]


def fuse_few_rows(graph: Graph, traits: DeviceTraits) -> Graph:
    """Has matmuls of few rows normalize these, and compute a gated activation or rotate to a cache
    what they make."""
    finder = _Finder(graph, traits)
    fusions = [fused for node in graph.nodes if (fused := finder.fused(node)) is not None]
    if not fusions:
        return graph
    ends = {fused.end.node if fused.end else fused.matmul: fused for fused in fusions}
    gone = {node for fused in fusions for node in (fused.matmul, *fused.gone)}
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        fused = ends.get(node)
        if fused is not None:
            _emit(rewriter, fused)
        elif node not in gone:
            rewriter.keep(rewriter.current(node))
    return rewriter.finish()


def _emit(rewriter: Rewriter, fused: _Fused) -> None:
    matmul, norm = fused.matmul, fused.norm
    end = fused.end.node if fused.end else None
    rewriter.source = " + ".join(part.source for part in (norm, matmul, end) if part is not None)
    attributes = {} if fused.end is None else fused.end.attributes(rewriter)
    if norm is not None:
        a, weight = (rewriter.resolve(norm.tensor(name)) for name in ("x", "weight"))
        rows = matmul.tensor("a").type.dims
        a = a if a.type.dims == rows else rewriter.aten.view(a, rows)
        attributes |= {"a": a, "norm": weight, "eps": norm.float("eps")}
    current = rewriter.current(matmul.with_arguments(**attributes))
    result = rewriter.emit(current.op, *current.args)
    if fused.end is not None and fused.end.is_gate:
        result = rewriter.aten.view(result, fused.end.node.result.type.dims)
    rewriter.replace(end or matmul, result)


class _Finder(Matcher):
    """Looks at the neighbours of matmuls."""

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        super().__init__(graph)
        self._traits = traits
        self._written = changing(graph.nodes)
        self._pairs = PairFinder(graph)

    def fused(self, matmul: Node) -> _Fused | None:
        """What a matmul can take over; None: nothing."""
        if matmul.op not in (MATMUL, QUANTIZED) or self._written & set(matmul.inputs):
            return None
        takes = self._takes if matmul.op == MATMUL else self._takes_quantized
        if matmul.tensor("a").type.rank != 2:
            return None
        norm, before = self._norm(matmul.tensor("a"))
        saved, end = int(norm is not None), None
        if matmul.arg("epilogue") is None and takes(matmul, True, saved + 1):
            end = self._pairs.reader(matmul)
        if norm is None and end is None:
            return None
        if not takes(matmul, False, saved + int(end is not None)):
            return None
        return _Fused(matmul, norm, end, (*before, *(end.views if end else ())))

    def _takes(self, matmul: Node, paired: bool, saved: int) -> bool:
        """Whether the kernel of few rows is the one for a matmul, if it saves so many dispatches."""
        a, b, bias = matmul.tensor("a"), matmul.tensor("b"), matmul.optional_tensor("bias")
        if a.type.rank != 2 or b.type.rank != 2 or not b.type.is_static:
            return False
        if a.type.dtype not in FLOATS or b.type.dtype is not a.type.dtype:
            return False
        transposed = self._is_transposed(b)
        if (bias is not None and bias.type.rank != 1) or not (transposed or self._is_packed(b)):
            return False
        choice = choose_few_rows(self._traits, a.type, b.type, paired, transposed, saved)
        return choice is not None

    def _takes_quantized(self, matmul: Node, paired: bool, saved: int) -> bool:
        """The same for a quantized weight."""
        x, weight = matmul.tensor("a"), matmul.tensor("weight")
        if any(matmul.arg(name) is not None for name in ("sums", "out")):
            return False
        if x.type.dtype not in FLOATS or matmul.result.type.dtype not in FLOATS:
            return False
        if not weight.type.is_static or weight.type.nbytes > self._traits.max_storage_range:
            return False
        return (
            not weight.type.dims[1] % 4
            and choose_quantized(self._traits, matmul_of(matmul), paired) is not None
        )

    def _is_packed(self, weight: Value) -> bool:
        """Whether a matrix is dense along its rows: one that purevk has packed at load."""
        return self.producer(weight, "purevk.copy", _CAT) is not None

    def _is_transposed(self, weight: Value) -> bool:
        """Whether a matrix is dense along its columns: a constant, or several of them together."""
        node = self.producer(weight)
        if node is None or not is_transpose(node):
            return False
        columns = node.tensor("x")
        return columns in self.graph.constants or self.producer(columns, _CAT) is not None

    def _norm(self, a: Value) -> tuple[Node | None, tuple[Node, ...]]:
        """The norm of the rows of a matrix that nothing else reads, and the nodes that go with it."""
        width, (node, views) = a.type.dims[1], self.through(a, lambda node: node.op == _VIEW)
        if node is None or node.op != NORM or not node.bool("rms") or node.int("count") != 1:
            return None, ()
        x, scale = node.tensor("x"), node.optional_tensor("weight")
        if any(node.arg(name) is not None for name in ("bias", "epilogue", "cos")):
            return None, ()
        if scale is None or scale.type.dims != (width,) or scale.type.dtype not in FLOATS:
            return None, ()
        plain = x.type.dims[-1] == width and x.type.dtype is a.type.dtype
        return (node, (*views, node)) if plain and not self._written & {x, scale} else (None, ())
