"""A graph that AOTAutograd traced for `torch.compile`, as a graph of purevk. Imports torch.

Its placeholders are tensors and integers. Tensors that stay the same from call to call (parameters)
become constants. An integer that is the size of a tensor is read from the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from purevk.errors import PurevkError, UnsupportedProgramError
from purevk.frontends.bounds import settled
from purevk.frontends.importer import Importer, InputSizes
from purevk.frontends.numbers import kind_of
from purevk.frontends.torch.conditions import conditions
from purevk.frontends.torch.decompose import name_of
from purevk.frontends.torch.exported import Reader
from purevk.frontends.torch.sizes import Sizes, bytes_of, symbolic_sizes
from purevk.ir import Dim, Graph, Guard, Size, Symbol, SymbolSource, Value
from purevk.ir import dims as _dims
from purevk.ir.expected import ROUNDED, planned_sizes
from purevk.ir.relations import indicator

# What tracing makes of scaled_dot_product_attention, on the CPU and with CUDA.
_ATTENTION = frozenset(
    f"aten._scaled_dot_product_{kind}_attention{where}.default"
    for kind, where in (
        ("flash", "_for_cpu"),
        ("flash", ""),
        ("efficient", ""),
        ("cudnn", ""),
    )
)


class AotGraph:
    """A graph, and which arguments of a call its inputs are.

    Args:
        module: the module that AOTAutograd gives to a compiler. Its placeholders are reordered.
        name: of the graph, for messages.

    Attributes:
        tensors: positions of tensor arguments.
        numbers: positions of results that are floats or bools of Python, with their types.
        memories: for each result, a number that views of the same memory share.
        strided: for each result, its rank if it needs strides and an offset, else None. It needs
            them if it shares its memory, was not traced as dense and row-major, or does not start
            at the start of its memory. The method's outputs are the results, then the strides and
            the offset of each of these.
        largest: for each integer argument that sizes depend on, the value that memory is planned
            for.
        room: sizes without a bound are planned for this at least, and for the next power of two; 0:
            for the traced sizes.
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
        # Tracing has found what the other integers are: a constant, or an expression over sizes.
        self._own = [
            at
            for at in numbers
            if not {str(symbol) for symbol in examples[at].node.expr.free_symbols} <= named
        ]
        # Integers that are no size of a tensor come first, since sizes may depend on them. The
        # others come last: by then the tensors have told them.
        tensors = [at for at in range(len(examples)) if at not in numbers]
        for at in reversed([*self._own, *tensors, *(at for at in numbers if at not in self._own)]):
            first = next(iter(module.graph.nodes))
            if self._nodes[at] is not first:
                first.prepend(self._nodes[at])
        (output,) = module.graph.find_nodes(op="output")
        self.results = [getattr(result, "meta", {}).get("val") for result in output.args[0]]
        self.numbers = [
            (number, kind)
            for number, result in enumerate(self.results)
            if (kind := kind_of(result)) in (float, bool)
        ]
        self.memories = [_memory(result, number) for number, result in enumerate(self.results)]
        self.strided = [
            _strided(result, self.memories.count(memory) > 1)
            for result, memory in zip(self.results, self.memories)
        ]
        self.largest: dict[int, int] = {}
        self.room = ROUNDED

    def tighten(self) -> bool:
        """Has memory planned for smaller sizes. Returns whether there are any."""
        self.largest.clear()
        self.room, before = (1 if self.room > 1 else 0), self.room
        return before > 0

    def varies(self, at: int) -> bool:
        """Whether a size of the tensor argument at a position is another one from call to call."""
        return any(not isinstance(size, int) for size in self._nodes[at].meta["val"].shape)

    def arguments(self, constants: Mapping[int, Any]) -> list[int]:
        """Positions of the arguments that the method takes, in its order: those that are not among
        the constants."""
        return [*self._own, *(at for at in self.tensors if at not in constants)]

    def make_room(self, args: Sequence[Any]) -> bool:
        """Raises the integers that memory is planned for to those of a call. Returns whether one
        was larger."""
        grown = False
        for at in self._own:
            if at in self.largest and args[at] > self.largest[at]:
                self.largest[at], grown = 1 << int(args[at] - 1).bit_length(), True
        return grown

    def read(self, constants: Mapping[int, Any], sizes: InputSizes | None) -> Graph:
        """The graph.

        Args:
            constants: tensors that become constants, by position.
            sizes: sizes of the method's tensors to specialize on; None: those of the trace.

        Raises:
            UnsupportedProgramError: something in the graph cannot be run.
        """
        return settled(lambda: _AotReader(self, constants, sizes).run())


class _AotSizes(Sizes):
    """Sizes of a graph for which dynamo checks its own guards.

    Attributes:
        numbers: integer arguments that are no size of a tensor, by position. They are numbers if the
            graph is read for these.
    """

    def __init__(self, aot: AotGraph, program: Any, importer: Importer) -> None:
        super().__init__(program, importer, bounded=False)
        self.aot = aot
        self.numbers: dict[int, Size] = {}
        self._tight = False  # bounds above the traced sizes break guards, or take too much
        self._plan(aot._nodes)

    def _plan(self, users: Sequence[Any]) -> None:
        """Finds what memory is planned for, for each symbol of torch: the traced size, rounded up.

        Lowering decides by these numbers what torch decided by the traced sizes, such as whether two
        sizes are equal. So they are rounded less, or not at all, if they break one of torch's guards.
        """
        import sympy

        traced: dict[Any, int] = {}
        examples = [node.meta.get("val") for node in users]
        for example in examples:
            for size in symbolic_sizes(example):
                number = getattr(size, "node", None)
                if number is not None and number.expr.is_Symbol and number.has_hint():
                    traced[number.expr] = int(number.hint)
        self.conditions = conditions(self.program, users)
        guards = [guard for guard in self.conditions if guard.free_symbols <= traced.keys()]
        nbytes = functools.partial(bytes_of, examples)
        self._tight = self.aot.room < ROUNDED
        for uppers in planned_sizes(traced, nbytes, self.aot.room):
            for symbol, size in uppers.items():
                uppers[symbol] = min(size, self.range(symbol)[1] or _dims.UNBOUNDED)
            # torch 2.9's functions take no int of Python.
            values = {symbol: sympy.Integer(size) for symbol, size in uppers.items()}
            if all(guard.xreplace(values) == True for guard in guards):  # noqa: E712
                break
            self._tight = True
        self._planned = uppers

    def decided(self, symbol: Any, upper: int) -> bool:
        return self._tight or super().decided(symbol, upper)

    def decisions(self) -> Iterator[Guard]:
        """No guards: dynamo checks its own before it calls the graph."""
        return iter(())

    def find_symbols(self, users: Sequence[Any]) -> None:
        inputs: list[Any] = []
        for node in users:
            example = node.meta.get("val")
            at = self.aot._nodes.index(node)
            if at in self.aot._own:
                self.numbers[at] = self._number(example.node, at, self.wanted(len(inputs), 0))
                inputs.append(None)
            elif at in self.aot.tensors:
                inputs.append(node)
        super().find_symbols(inputs)

    def derive(self, position: int, dim: int, expression: Any) -> None:
        if any(str(symbol) not in self.symbols for symbol in expression.free_symbols):
            super().derive(position, dim, expression)

    def _number(self, number: Any, at: int, expected: Any) -> Size:
        """The symbol of an integer argument, or the number that it is `expected` for."""
        if not number.expr.is_Symbol:
            raise UnsupportedProgramError(
                f"size {number.expr} cannot be followed",
                where=self.importer.where,
                why="it is an argument of the graph",
                next="compile with dynamic=False",
            )
        if isinstance(expected, int):
            self.symbols[str(number.expr)] = expected
            return expected
        if self.sizes_depend_on(number.expr):
            lower = max(self.range(number.expr)[0] or 0, 0)
            self.aot.largest.setdefault(at, self.rounded(number.expr))
            symbol = Symbol(str(number.expr), self.aot.largest[at], lower)
        else:
            symbol = self.integer(number.expr, str(number.expr))
        size = self.symbols[str(number.expr)] = Dim.of(symbol)
        return size


class _AotReader(Reader):
    """Reads the graph of AOTAutograd as if it were an exported program."""

    sizes: _AotSizes

    def __init__(
        self, aot: AotGraph, constants: Mapping[int, Any], sizes: InputSizes | None
    ) -> None:
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
        importer = Importer(aot.name, f"exported program {aot.name}", sizes)
        importer.trusted = True
        super().__init__(program, importer, _AotSizes(aot, program, importer))
        self.aot = aot

    def node(self, node: Any) -> None:
        try:
            super().node(node)
        except PurevkError as error:
            line = _line_of(node)
            if not line or line in error.where:
                raise
            raise type(error)(
                error.what, where=f"{error.where}, {line}", why=error.why, next=error.next
            ) from error

    def _finish(self, node: Any, signature: Any, states: Mapping[str, Any]) -> Graph:
        graph = super()._finish(node, signature, states)
        extra = [
            self.known(number)
            for example, rank in zip(self.aot.results, self.aot.strided)
            if example is not None and rank is not None
            for number in (*example.stride(), example.storage_offset())
        ]
        return graph.with_nodes(graph.nodes, outputs=(*graph.outputs, *extra))

    def _input(self, node: Any) -> Any:
        import torch

        example = node.meta.get("val")
        if not isinstance(example, torch.SymInt):
            return super()._input(node) if isinstance(example, torch.Tensor) else example
        number = self.sizes.numbers.get(self.aot._nodes.index(node))
        if number is None:
            return self.sizes.size(example.node.expr)
        if isinstance(number, int):
            self.importer.fixed_input(number)
            return number
        (symbol,) = _dims.symbols(number)
        self.importer.symbols[symbol] = SymbolSource(None, None, len(self.importer.inputs))
        self.importer.inputs.append(number)
        return number

    def _operator(self, node: Any, target: Any, operands: Sequence[Any], examples: Any) -> Any:
        import torch

        name = name_of(target)
        if name in _ATTENTION:
            return self._attention(node, target, operands, examples)
        if name == "aten.slice.Tensor":
            bounds = [
                arg.meta["val"].node for arg in operands[2:4] if isinstance(arg, torch.fx.Node)
            ]
            has_hints = bool(bounds) and all(bound.has_hint() for bound in bounds)
            if has_hints or (not bounds and self._counts_from_the_end(operands)):
                operands = self._within(operands, examples)
        return super()._operator(node, target, operands, examples)

    def _within(self, operands: Sequence[Any], result: Any) -> Sequence[Any]:
        """The arguments of a slice with symbolic bounds, with bounds that count from the start and
        are within the tensor. Tracing has found their signs and the result's size, under guards of
        dynamo."""
        import torch

        tensor, dim, start, _, *step = (*operands, None)[: max(len(operands), 4)]
        size = tensor.meta["val"].shape[dim]
        first = self.arg(start) or 0
        if isinstance(start, int) and start < 0:
            hint = size if isinstance(size, int) else size.node.hint
            first = self.known(size) + start if hint + start >= 0 else 0
        number = start.meta["val"].node if isinstance(start, torch.fx.Node) else None
        if number is not None and number.has_hint() and number.hint < 0:
            first = _dims.maximum(first + self.known(size), 0)
        return (
            tensor,
            dim,
            first,
            first + self.known(result.shape[dim]) * (step[0] if step else 1),
            *step,
        )

    def _counts_from_the_end(self, operands: Sequence[Any]) -> bool:
        """Whether a slice of a dynamic dim starts at a number from its end. Where that is before the
        first element depends on the size."""
        import torch

        tensor, dim, start, *_ = (*operands, 0, None)[: max(len(operands), 3)]
        size = tensor.meta["val"].shape[dim]
        negative = isinstance(start, int) and start < 0
        return negative and isinstance(size, torch.SymInt) and size.node.has_hint()

    def _attention(self, node: Any, target: Any, operands: Sequence[Any], examples: Any) -> Any:
        """Attention. Tracing gives an operator of the device that the tensors are on, with further
        results that inference does not read. It has no `enable_gqa`: fewer heads of keys mean
        groups."""
        args = dict(
            zip(
                (argument.name for argument in target._schema.arguments),
                self.schema_args(target, operands, node.kwargs),
            )
        )
        args.setdefault("attn_mask", args.get("attn_bias"))
        args.setdefault("scale", None)
        args["key"], args["value"] = self._of_one_length(node, args["key"], args["value"])
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        heads, groups = (args[name].type.dims[-3] for name in ("query", "key"))
        return (
            self.emit(
                node,
                "aten.scaled_dot_product_attention.default",
                [*(args[name] for name in names), heads != groups],
                examples[0],
            ),
            None,
        )

    def _of_one_length(self, node: Any, keys: Value, values: Value) -> tuple[Value, ...]:
        """Keys and values [..., T, D] of attention. Tracing does not compare their lengths: it may
        learn one from a mask, and leave the other open. Then every call has to bring equal ones."""
        lengths = keys.type.dims[-2], values.type.dims[-2]
        if indicator(lengths[0], "==", lengths[1]) is True:
            return keys, values
        self.importer.constrain(Guard(lengths[0], "==", lengths[1], True))
        length = min(lengths, key=_dims.upper)
        return tuple(
            operand if operand.type.dims[-2] is length else self._first_rows(node, operand, length)
            for operand in (keys, values)
        )

    def _first_rows(self, node: Any, value: Value, count: Size) -> Value:
        dims = (*value.type.dims[:-2], count, value.type.dims[-1])
        (attended,) = self.importer.emit(
            "aten.slice.Tensor",
            (value, -2, 0, count, 1),
            [value.type.with_dims(dims)],
            [False],
            node.name,
        )
        return attended


def _line_of(node: Any) -> str:
    """The line of the user's code that a node is from."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    return next((line.strip() for line in reversed(lines) if line.lstrip().startswith("File")), "")


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
    """Whether two sizes are equal at every call. A comparison by torch would only say whether they
    are equal in the trace."""
    left, right = (number if isinstance(number, int) else number.node.expr for number in (a, b))
    if left == right:
        return True
    difference = left - right
    return not isinstance(difference, int) and bool(difference.expand() == 0)


def _ranges(nodes: Sequence[Any]) -> Mapping[Any, Any]:
    """The bounds of torch's symbols."""
    import torch

    for node in nodes:
        example = node.meta.get("val")
        for size in (
            (example,) if isinstance(example, torch.SymInt) else getattr(example, "shape", ())
        ):
            if isinstance(size, torch.SymInt):
                ranges: Mapping[Any, Any] = size.node.shape_env.var_to_range
                return ranges
    return {}
