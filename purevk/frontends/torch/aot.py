"""A graph that AOTAutograd traced for `torch.compile`, as a graph of purevk. Imports torch.

Its placeholders are tensors and whole numbers. Those tensors that stay the same from call to call
(parameters) are taken in as constants; a whole number that is the size of a tensor is read from the
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from purevk.errors import UnsupportedProgramError
from purevk.frontends.importer import settled
from purevk.frontends.torch.exported import Reader, number_kind
from purevk.ir import Dim, Graph, Guard, Size, Symbol, SymbolSource
from purevk.ir import dims as _dims

_FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


class AotGraph:
    """The graph, and which arguments of a call its inputs are.

    Args:
        module: what a compiler of AOTAutograd is given; its placeholders are put into another
            order.
        name: names it in messages.

    Attributes:
        tensors: positions of tensor arguments.
        numbers: results that are Python numbers, and their types, except whole ones.
        memories: for each result, a number that it shares with the results that are views of the
            same memory.
        strided: for each result, its rank if it shares its memory, was traced with other strides
            than dense row-major ones, or does not start where its memory does; else None. The
            method's outputs are the results, then for each of these the strides and the offset.
    """

    def __init__(self, module: Any, name: str) -> None:
        import torch

        self.module, self.name = module, name
        self._nodes = list(module.graph.find_nodes(op="placeholder"))
        examples = [node.meta.get("val") for node in self._nodes]
        self.tensors = [
            at for at, example in enumerate(examples) if isinstance(example, torch.Tensor)
        ]
        numbers = [at for at, example in enumerate(examples) if isinstance(example, torch.SymInt)]
        sizes = [
            size
            for at in self.tensors
            for size in examples[at].shape
            if isinstance(size, torch.SymInt)
        ]
        named = {str(size.node.expr) for size in sizes if size.node.expr.is_Symbol}
        self._own = [at for at in numbers if str(examples[at].node.expr) not in named]
        # Numbers that no tensor tells come first, since sizes of tensors may be made of them; the
        # others are known at the end.
        rest = [at for at in range(len(examples)) if at not in numbers]
        for at in reversed([*self._own, *rest, *(at for at in numbers if at not in self._own)]):
            first = next(iter(module.graph.nodes))
            if self._nodes[at] is not first:
                first.prepend(self._nodes[at])
        (output,) = module.graph.find_nodes(op="output")
        self.results = [getattr(each, "meta", {}).get("val") for each in output.args[0]]
        self.numbers = [
            (number, kind)
            for number, each in enumerate(self.results)
            if (kind := number_kind(each)) in (float, bool)
        ]
        self.memories = [_memory(each, number) for number, each in enumerate(self.results)]
        self.strided = [
            _strided(each, self.memories.count(memory) > 1)
            for each, memory in zip(self.results, self.memories)
        ]
        self.largest: dict[int, int] = {}

    def arguments(self, constants: Mapping[int, Any]) -> list[int]:
        """Positions of the arguments that the method takes, in its order, where `constants` are
        none."""
        return [*self._own, *(at for at in self.tensors if at not in constants)]

    def make_room(self, args: Sequence[Any]) -> bool:
        """Notes whole numbers above those that memory was planned for; whether there was one."""
        grown = False
        for at in self._own:
            if at in self.largest and args[at] > self.largest[at]:
                self.largest[at], grown = 1 << int(args[at] - 1).bit_length(), True
        return grown

    def read(self, constants: Mapping[int, Any], sizes: Sequence[Any] | None) -> Graph:
        """The graph with tensors, by their position, as constants.

        Args:
            sizes: sizes of the method's tensors to specialize on; None: those of the trace.

        Raises:
            UnsupportedProgramError: something in the graph cannot be run.
        """
        return settled(lambda: _AotReader(self, constants, sizes).run())


class _AotReader(Reader):
    bounded = False

    def __init__(self, aot: AotGraph, constants: Mapping[int, Any], sizes: Any) -> None:
        kinds = {
            node.name: ("PARAMETER" if at in constants else "USER_INPUT", at)
            for at, node in enumerate(aot._nodes)
        }
        kind = SimpleNamespace(name="USER_OUTPUT")
        signature = SimpleNamespace(
            buffers_to_mutate={},
            input_specs=[
                SimpleNamespace(
                    arg=SimpleNamespace(name=name), kind=SimpleNamespace(name=kind), target=at
                )
                for name, (kind, at) in kinds.items()
            ],
            output_specs=[SimpleNamespace(kind=kind) for _ in aot.results],
        )
        program = SimpleNamespace(
            graph=aot.module.graph,
            graph_module=aot.module,
            graph_signature=signature,
            state_dict=constants,
            constants={},
            range_constraints=_ranges(aot._nodes),
        )
        super().__init__(program, sizes, aot.name)
        self.aot = aot
        self._numbers: dict[int, Dim] = {}  # integers that no tensor has as a size, by position

    def _finish(self, node: Any, signature: Any, states: Mapping[str, Any]) -> Graph:
        graph = super()._finish(node, signature, states)
        extra = [
            self._known(number)
            for example, rank in zip(self.aot.results, self.aot.strided)
            if rank is not None
            for number in (*example.stride(), example.storage_offset())
        ]
        return graph.with_nodes(graph.nodes, outputs=(*graph.outputs, *extra))

    def _decisions(self, users: Sequence[Any]) -> Iterator[Guard]:
        """None: dynamo checks its guards before it calls the graph."""
        return iter(())

    def _find_symbols(self, users: Sequence[Any]) -> None:
        inputs = []
        for node in users:
            example = node.meta.get("val")
            at = self.aot._nodes.index(node)
            if at in self.aot._own:
                self._numbers[at] = self._number(example.node, at)
                inputs.append(None)
            elif at in self.aot.tensors:
                inputs.append(node)
        super()._find_symbols(inputs)

    def _derive(self, position: int, dim: int, expression: Any, wanted: Any) -> None:
        if any(str(symbol) not in self.symbols for symbol in expression.free_symbols):
            super()._derive(position, dim, expression, wanted)

    def _input(self, node: Any) -> Any:
        import torch

        example = node.meta.get("val")
        if not isinstance(example, torch.SymInt):
            return super()._input(node) if isinstance(example, torch.Tensor) else example
        number = self._numbers.get(self.aot._nodes.index(node))
        if number is None:
            return self._size(example.node.expr)
        (symbol,) = _dims.symbols(number)
        self.importer.symbols[symbol] = SymbolSource(None, None, len(self.importer.inputs))
        self.importer.inputs.append(number)
        return number

    def _number(self, number: Any, at: int) -> Dim:
        """An integer that only a call brings."""
        if not number.expr.is_Symbol:
            raise UnsupportedProgramError(
                f"size {number.expr} cannot be followed",
                where=self.importer.where,
                why="it is an argument of the graph",
                next="compile with dynamic=False",
            )
        if self._sizes_depend_on(number.expr):
            lower = max(self._range(number.expr)[0] or 0, 0)
            hint = int(number.hint) if number.has_hint() else 64
            self.aot.largest.setdefault(at, max(64, 1 << max(hint - 1, 0).bit_length()))
            symbol = Symbol(str(number.expr), self.aot.largest[at], lower)
        else:
            symbol = Symbol(str(number.expr), is_size=False)
        made = self.symbols[str(number.expr)] = Dim.of(symbol)
        return made

    def _operator(self, node: Any, target: Any, given: Sequence[Any], examples: Any) -> Any:
        import torch

        name = f"{target.namespace}.{target._opname}.{target._overloadname}"
        if name == _FLASH:
            return self._attention(node, target, given, examples)
        if name == "aten.slice.Tensor" and any(
            isinstance(arg, torch.fx.Node) for arg in given[2:4]
        ):
            given = self._within(given, examples)
        return super()._operator(node, target, given, examples)

    def _within(self, given: Sequence[Any], result: Any) -> Sequence[Any]:
        """The arguments of a slice with bounds that only a call knows, counted from the start and
        within the tensor: tracing has found their signs and the result's size, under guards of its
        own."""
        import torch

        tensor, dim, start, _, *step = given
        size = tensor.meta["val"].shape[dim]
        first = self.arg(start) or 0
        number = start.meta["val"].node if isinstance(start, torch.fx.Node) else None
        if number is not None and number.has_hint() and number.hint < 0:
            first = first + self._known(size)
        return (
            tensor,
            dim,
            first,
            first + self._known(result.shape[dim]) * (step[0] if step else 1),
            *step,
        )

    def _known(self, size: Any) -> Size:
        return size if isinstance(size, int) else self._size(size.node.expr)

    def _attention(self, node: Any, target: Any, given: Sequence[Any], examples: Any) -> Any:
        """Tracing takes attention for the CPU's own operator, which has a second result that
        inference does not read."""
        args = dict(
            zip(
                (each.name for each in target._schema.arguments),
                self._schema_args(target, given, node.kwargs),
            )
        )
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        return (
            self._emit(
                node,
                "aten.scaled_dot_product_attention.default",
                [args[name] for name in names],
                examples[0],
            ),
            None,
        )


def _memory(example: Any, number: int) -> int:
    import torch

    return example.untyped_storage()._cdata if isinstance(example, torch.Tensor) else -1 - number


def _strided(example: Any, shares: bool) -> int | None:
    import torch

    if not isinstance(example, torch.Tensor):
        return None
    plain, step = not shares and _same(example.storage_offset(), 0), 1
    for size, stride in zip(reversed(example.shape), reversed(example.stride())):
        plain = plain and (_same(size, 1) or _same(stride, step))
        step = step * size
    return None if plain else example.dim()


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every call: a comparison of torch's would take what holds in
    the trace."""
    left, right = (number if isinstance(number, int) else number.node.expr for number in (a, b))
    return left == right or (
        not (isinstance(left, int) and isinstance(right, int)) and (left - right).expand() == 0
    )


def _ranges(nodes: Sequence[Any]) -> Mapping[Any, Any]:
    """The bounds of torch's symbols."""
    import torch

    for node in nodes:
        example = node.meta.get("val")
        for size in (
            (example,) if isinstance(example, torch.SymInt) else getattr(example, "shape", ())
        ):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env.var_to_range
    return {}
