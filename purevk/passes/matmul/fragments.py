"""Matmuls read both operands in the order of the fragments of matrix cores, where what makes their rows
can write it: a norm, attention, or another such matmul. Constant weights are brought into this order
when a model is loaded. Other operands are copied, where the matmul is so large that this pays.

Methods for prompts and for tokens share weights, and two copies of them would fill the memory. So
where methods may share a weight, its order depends on the weight alone (`BlockWeights`): kernels of
few rows read the order of fragments as well, and rows that nothing writes in this order are copied.
"""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Value
from purevk.ir import dims as _dims
from purevk.lower.matrix_core_kernels import LEAST_ROWS
from purevk.ops.attention.attention import HEADS_LAST, writes_blocks
from purevk.ops.attention.attention import NAME as ATTENTION
from purevk.ops.matmul.fragments import BLOCK, COLUMNS, ROWS, blocks_type, tile_of
from purevk.ops.matmul.fragments import NAME as FRAGMENTS
from purevk.ops.matmul.fused import is_fused
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.ops.quantized.choice import is_dequantized
from purevk.ops.quantized.dequantize import BLOCKS as WEIGHT_BLOCKS
from purevk.ops.quantized.matmul import NAME as QUANTIZED
from purevk.ops.quantized.matmul import matmul_of
from purevk.ops.reduce.normalization import NAME as NORM
from purevk.passes.decoding.pairs import PairFinder, PairReader
from purevk.passes.matmul.block_weights import BlockWeights, are_shared
from purevk.passes.rewrite import Rewriter, changing, constants_of
from purevk.tuning import DeviceTraits

_VIEW, _PERMUTE = "aten.view.default", "aten.permute.default"
# Matmuls, with more of which a graph is a network, and rows, of which so many were measured there.
_FEW, _MANY_ROWS = 8, 768


def order_for_fragments(graph: Graph, traits: DeviceTraits) -> Graph:
    """Has norms, attention and matmuls write the order of fragments, for matmuls that read it."""
    finder = _Finder(graph, traits)
    for node in graph.nodes:
        finder.look_at(node)
    return _Emitter(graph, finder).graph() if finder.sources or finder.few else graph


class _Finder:
    """Chooses matmuls.

    Attributes:
        sources: for each chosen matmul, what makes its rows in the order of fragments: the result of a
            norm, attention, a matmul or its gate. None: they are copied.
        readers: for each such result, the matmuls that read this order.
        gates: what makes one column of two of a chosen matmul, or writes pairs to a cache.
        few: the matmuls of few rows whose weight is in this order.
    """

    def __init__(self, graph: Graph, traits: DeviceTraits) -> None:
        self._traits = traits
        self._made, self._users = graph.producers(), graph.users()
        self._outputs = graph.output_values()
        self._written = changing(graph.nodes)
        self._shared = BlockWeights(graph, traits)
        # Of all nodes, since other readers of a value are looked at before their turn.
        self._constant = constants_of(graph)
        self._pairs = PairFinder(graph)
        self._matmuls: dict[Value, Node] = {}  # by the results of their gates
        self._is_shared = are_shared(graph)
        self._alone = sum(map(_is_matmul, graph.nodes)) <= _FEW
        self.sources: dict[Node, Value | None] = {}
        self.readers: dict[Value, set[Node]] = {}
        self.gates: dict[Node, PairReader] = {}
        self.few: set[Node] = set()

    def look_at(self, node: Node) -> None:
        """Looks at a node after all that it reads."""
        if node.op == MATMUL and self._is_few(node):
            self.few.add(node)
        elif _is_matmul(node) and self._takes(node):
            source = self._source(node.tensor("a"))
            if source is None and not self._always(node) and not self._takes(node, copies=True):
                return
            self.sources[node] = source
            if source is not None:
                self.readers.setdefault(source, set()).add(node)
            gate = self._gate(node)
            if gate is not None:
                self.gates[node] = gate
            if gate is not None and gate.is_gate:
                self._matmuls[gate.node.result] = node

    def result(self, node: Node) -> Value:
        """What a matmul makes, or its gate."""
        return self.gates[node].node.result if node in self.gates else node.result

    def needs_rows(self, node: Node) -> bool:
        """Whether anything reads a node's result as it was."""
        waiting, consumers = [node.result], self.readers.get(node.result, set())
        while waiting:
            value = waiting.pop()
            if value in self._outputs:
                return True
            for user in self._users.get(value, ()):
                if user.op in (_VIEW, _PERMUTE):
                    waiting.append(user.result)
                elif (
                    user not in consumers
                    or value is not user.tensor("a")
                    or _count(user, value) > 1
                ):
                    return True
        return False

    def _always(self, node: Node) -> bool:
        """Whether a matmul takes part even if its rows have to be copied."""
        if node.op == QUANTIZED:
            return self._is_shared
        return self._shared.takes(node.tensor("b"))

    def _source(self, rows: Value) -> Value | None:
        """What can be made in the order of fragments, and is these rows; None if nothing can."""
        if rows.type.rank != 2:
            return None
        value, heads = self._origin(rows)
        node = self._made.get(value)
        if node is None or value in self._written or value.type.dtype is not rows.type.dtype:
            return None
        if heads:
            return value if self._attends(node, rows) else None
        if value.type.dims[-1] != rows.type.dims[-1]:
            return None
        if node.op == NORM and _gives_blocks(node):
            return value
        is_source = node in self.sources or value in self._matmuls
        return value if is_source and self._is_read_alike(value, rows) else None

    def _origin(self, rows: Value) -> tuple[Value, bool]:
        """What a matrix is a view of, and whether the heads of that come to lie side by side."""
        value = rows
        while (node := self._made.get(value)) is not None and node.op == _VIEW:
            value = node.tensor("x")
        if node is not None and node.op == _PERMUTE and tuple(node.ints("dims")) == HEADS_LAST:
            return node.tensor("x"), True
        return value, False

    def _attends(self, node: Node, rows: Value) -> bool:
        """Whether attention can write a matrix, with the heads of a row side by side, that matmuls
        alone read."""
        if node.op != ATTENTION or node.result.type.dtype is not node.tensor("q").type.dtype:
            return False
        batches, heads, queries, width = node.result.type.dims
        return (
            rows.type.dims == (batches * queries, heads * width)
            and writes_blocks(self._traits, node)
            and self._is_read_alike(node.result, rows)
        )

    def _is_read_alike(self, product: Value, rows: Value) -> bool:
        """Whether matmuls that read the order of fragments alone read a value, all of them as the
        matrix `rows`. Its kernel writes one order."""
        waiting, origin = [product], self._origin(rows)
        while waiting:
            value = waiting.pop()
            if value in self._outputs:
                return False
            for user in self._users.get(value, ()):
                if user.op in (_VIEW, _PERMUTE):
                    waiting.append(user.result)
                elif (
                    not _is_matmul(user)
                    or value is not user.tensor("a")
                    or value.type.dims != rows.type.dims
                    or self._origin(value) != origin
                    or _count(user, value) > 1
                    or (user.op == MATMUL and self._is_few(user))
                    or not self._takes(user)
                ):
                    return False
        return True

    def _gate(self, node: Node) -> PairReader | None:
        """What makes one column of two of a matmul, or rotates pairs to a cache, if the kernel does
        that."""
        if node.arg("epilogue") is not None:
            return None
        reader = self._pairs.reader(node)
        if reader is None or reader.pair % BLOCK:
            return None
        dtype = node.tensor("a").type.dtype
        if reader.node.result.type.dtype not in (dtype, DType.float32):
            return None
        (rows, columns), terms = node.result.type.dims, node.tensor("a").type.dims[1]
        sizes = (rows, _dims.specialize(columns), terms)
        paired = tile_of(self._traits, dtype, *sizes, paired=True, always=True)
        return None if paired is None else reader

    def _is_few(self, node: Node) -> bool:
        """Whether a matmul has few rows, and a weight in the order of fragments."""
        a, b = node.tensor("a"), node.tensor("b")
        few = a.type.rank == 2 and _dims.upper(a.type.dims[0]) < LEAST_ROWS
        few = few and a.type.dtype is b.type.dtype and self._fits(node)
        return self._shared.takes(b) and (few or is_fused(node))

    def _takes(self, node: Node, copies: bool = False) -> bool:
        """Whether the kernel that reads fragments is the one for a matmul; with `copies` even if the
        rows have to be copied into this order. A right operand that is no constant has to be."""
        rows = node.tensor("a")
        if rows.type.rank != 2:
            return False
        (count, terms), always = rows.type.dims, False
        copied = _dims.upper(_dims.product(rows.type.dims)) if copies else 0
        if node.op == QUANTIZED:
            weight = node.tensor("weight")
            columns = _dims.specialize(weight.type.dims[0])
            if weight not in self._constant or not weight.type.is_static:
                return False
            if not self._makes_halves(node):
                return False
        else:
            weight, b = node.tensor("b"), node.tensor("b").type
            if b.rank != 2 or not b.is_static or rows.type.dtype is not b.dtype:
                return False
            columns, always = _dims.specialize(b.dims[1]), self._shared.takes(weight)
            if weight not in self._constant:
                if not rows.type.is_static:
                    return False  # the copy costs as much for few rows
                copied += _dims.upper(b.numel)
            elif self._is_shared and not always:
                return False  # other methods may read it in rows
        if columns % BLOCK or _dims.specialize(terms) % BLOCK or not self._fits(node):
            return False
        sizes = (count, columns, terms)
        tile = tile_of(
            self._traits,
            rows.type.dtype,
            *sizes,
            always=always,
            copied=copied,
            alone=self._alone or _dims.upper(count) < _MANY_ROWS,
        )
        return tile is not None

    def _fits(self, node: Node) -> bool:
        """Whether nothing that a matmul reads is written to, its bias is one of columns, and its result
        of a dtype that is stored."""
        bias = node.optional_tensor("bias")
        return (
            not self._written & set(node.inputs)
            and (bias is None or bias.type.rank == 1)
            and node.result.type.dtype in (node.tensor("a").type.dtype, DType.float32)
        )

    def _makes_halves(self, node: Node) -> bool:
        """Whether a quantized weight is made into halves, for all rows there may be."""
        if any(node.arg(name) is not None for name in ("sums", "out")):
            return False
        if node.tensor("weight").type.dims[1] % 4:
            return False
        form = matmul_of(node)
        return form.halves and is_dequantized(self._traits, form)


def _is_matmul(node: Node) -> bool:
    """Whether a node is a matmul, of any number of rows."""
    return node.op in (MATMUL, QUANTIZED) and not is_fused(node)


def _gives_blocks(norm: Node) -> bool:
    """Whether a norm can write the order of fragments."""
    return norm.int("count") == 1 and norm.result.type.rank > 1 and norm.arg("cos") is None


def _count(node: Node, value: Value) -> int:
    return sum(operand is value for operand in node.inputs)


class _Emitter:
    """Makes the new graph."""

    def __init__(self, graph: Graph, finder: _Finder) -> None:
        self._graph, self._finder, self._rewriter = graph, finder, Rewriter(graph)
        self._blocks: dict[Value, Value] = {}  # by what was made in rows before
        self._copied: dict[Value, Value] = {}  # rows in the order of fragments
        self._weights: dict[Value, Value] = {}
        # Values in rows that nothing makes any more, and views of them.
        self._gone: set[Value] = set()

    def graph(self) -> Graph:
        """The graph with matmuls that read the order of fragments."""
        finder, rewriter = self._finder, self._rewriter
        replaced = {node for gate in finder.gates.values() for node in (gate.node, *gate.views)}
        caches = {gate.node: node for node, gate in finder.gates.items() if not gate.is_gate}
        later = set(caches.values())
        for node in self._graph.nodes:
            rewriter.source = node.source
            if node in caches:
                self._matmul(caches[node], rewriter.current(caches[node]))
            if node in replaced or node in later:
                continue
            current = rewriter.current(node)
            if node in finder.sources:
                self._matmul(node, current)
            elif node in finder.few:
                self._few_rows(node, current)
            elif node.results and node.op == NORM and node.result in finder.readers:
                self._norm(node, current)
            elif node.results and node.result in finder.readers:
                self._attention(node, current)
            elif node.op in (_VIEW, _PERMUTE) and node.tensor("x") in self._gone:
                self._gone.add(node.result)
            else:
                rewriter.keep(current)
            for value in (*node.results, *([finder.result(node)] if node in finder.gates else [])):
                if value in self._blocks and value not in rewriter.replaced:
                    self._gone.add(value)
        return rewriter.finish()

    def _weight(self, weight: Value) -> Value:
        """A weight in the order of fragments."""
        if weight not in self._weights:
            self._weights[weight] = self._rewriter.emit(COLUMNS, weight)
        return self._weights[weight]

    def _rows(self, rows: Value) -> Value:
        """A copy of rows in the order of fragments."""
        if rows not in self._copied:
            self._copied[rows] = self._rewriter.emit(ROWS, rows)
        return self._copied[rows]

    def _operands(self, node: Node, current: Node) -> tuple[Value, Value]:
        """Both operands of a matmul in the order of fragments."""
        rewriter, source = self._rewriter, self._finder.sources[node]
        a = self._rows(current.tensor("a")) if source is None else self._blocks[source]
        if node.op == QUANTIZED:
            names = ("weight", "scales", "bits", "high_first", "group")
            weight, scales, *form = (current.arg(name) for name in names)
            terms = _dims.specialize(current.tensor("a").type.dims[1])
            minimums = current.optional_tensor("minimums")
            b = rewriter.emit(WEIGHT_BLOCKS, weight, scales, terms, *form, minimums)
        else:
            b = self._weight(current.tensor("b"))
        return a, b

    def _matmul(self, node: Node, current: Node) -> None:
        finder, rewriter = self._finder, self._rewriter
        gate, value = finder.gates.get(node), finder.result(node)
        onward, result = value in finder.readers, value.type
        count, columns = node.result.type.dims
        attributes = {name: current.arg(name) for name in ("epilogue", "extras")}
        if gate is not None:
            attributes = gate.attributes(rewriter)
            columns = _dims.specialize(columns) // 2
            if not gate.is_gate:
                rewriter.source = f"{node.source} + {gate.node.source}"
        a, b = self._operands(node, current)
        # An epilogue that only converts has no step that says so.
        if onward:
            result = blocks_type(result.dtype, count, columns)
        elif gate is None or gate.is_gate:
            result = result.with_dims((count, columns))
        made = rewriter.emit(
            FRAGMENTS, a, b, count, current.arg("bias"), onward, results=(result,), **attributes
        )
        if onward:
            self._blocks[value] = made
        elif gate is None:
            rewriter.replace(node, made)
        elif gate.is_gate:
            rewriter.replace(gate.node, rewriter.aten.view(made, value.type.dims))
        else:
            rewriter.replace(gate.node, made)

    def _few_rows(self, node: Node, current: Node) -> None:
        names = ("a", "bias", "epilogue", "extras", "norm", "eps", "pair", "caches")
        result = self._rewriter.emit(
            FRAGMENTS,
            b=self._weight(current.tensor("b")),
            rows=node.tensor("a").type.dims[0],
            **{name: current.arg(name) for name in names},
            results=(node.result.type,),
        )
        self._rewriter.replace(node, result)

    def _attention(self, node: Node, current: Node) -> None:
        args = current.with_arguments(blocks=True).args
        self._blocks[node.result] = self._rewriter.emit(ATTENTION, *args)

    def _norm(self, node: Node, current: Node) -> None:
        plain, result = self._finder.needs_rows(node), node.result.type
        blocks = blocks_type(result.dtype, _dims.product(result.dims[:-1]), result.dims[-1])
        args = current.with_arguments(plain=plain, blocks=True).args
        types = (blocks, result) if plain else (blocks,)
        results = self._rewriter.emit_all(NORM, *args, results=types)
        self._blocks[node.result] = results[0]
        if plain:
            self._rewriter.replace(node, results[1])
