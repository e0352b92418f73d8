"""A method of a .ptn file as one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends import control, numbers
from purevk.frontends.bounds import settled
from purevk.frontends.executorch.names import INTEGER_OPERATORS
from purevk.frontends.executorch.packed import PackedWeight, emit_packed, packed_weight
from purevk.frontends.executorch.shared_memory import SharedMemory
from purevk.frontends.importer import Importer, InputSizes
from purevk.ir import Arg, Dim, Graph, Label, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ir.expected import ROUNDED
from purevk.ops import registry
from purevk.pte.native import (
    BUFFER_MUTATION,
    INPUT_MUTATION,
    Argument,
    Binding,
    NativeGraph,
    NativeNode,
    NativeProgram,
    Ref,
    TensorMeta,
    argument_names,
    read_native,
)
from purevk.pte.source import Source


class NativeFile:
    """The program of a .ptn file.

    Args:
        check: compare the tensors with their checksum.

    Attributes:
        source: the bytes of the file.
        methods: their names.
        structure: (first byte, bytes) of all but the tensors. tensor_ranges: the same of the tensors.

    Raises:
        FileFormatError: the file is damaged, of another version, or holds something else.
        UnsupportedProgramError: a constant is packed in a way that purevk does not read.
    """

    kind = "ptn"

    def __init__(self, source: Source, check: bool = True) -> None:
        self.source, self._program = source, read_native(source, check)
        self.methods = tuple(self._program.methods)
        self.structure = self._program.structure
        self.tensor_ranges = self._program.tensor_ranges

    def graph(self, method: str, sizes: InputSizes | None = None) -> Graph:
        """The graph of a method, for the file's bounds or for the sizes of a call.

        Raises:
            UnsupportedProgramError: an operator that purevk cannot run.
            FileFormatError: the file contradicts itself.
        """
        return settled(lambda: _Method(self._program, method, self.source.name, sizes).run())

    def close(self) -> None:
        """Closes the file once nobody uses its data."""
        self.source.close()


class _Method:
    """Walks the nodes of a method.

    Attributes:
        importer: takes the nodes; that of a sub-graph inside of control flow.
        env: what each value is in the graph, by its name. memory: which of them share memory.
    """

    def __init__(
        self, program: NativeProgram, name: str, file: str, sizes: InputSizes | None
    ) -> None:
        self.method, self.where = program.methods[name], f"{file}, method {name}"
        self.importer = Importer(name, self.where, sizes)
        self.env: dict[str, Any] = {}
        self.memory = SharedMemory(self.method.graph)
        self.states: dict[str, Value] = {}  # by the key of the buffer
        self.state_values: set[Value] = set()

    def run(self) -> Graph:
        graph = self.method.graph
        for name in graph.inputs:
            self.env[name] = self._input(graph.types.get(name), name)
        for name, binding in self.method.bindings.items():
            self.env[name] = self._bound(binding)
        for name in self.env:
            self.memory.add(name)
        self._nodes(graph)
        outputs: list[Arg] = []
        updates: dict[int, Arg] = {}
        for name, (kind, target) in zip(graph.outputs, self.method.outputs):
            value = self._value(name)
            if kind == BUFFER_MUTATION:
                state = self.states.get(target)
                if state is None:
                    self._fail(f"an output is written to the buffer {target!r}, which is not there")
                if value is not state:
                    source = f"mutation of {target}"
                    value = self.importer.cast(value, state.type.dtype, source)
                    self.importer.emit("purevk.store", (state, value), [], [], source)
            elif kind == INPUT_MUTATION:
                if target not in graph.inputs:
                    self._fail(f"an output is written to the input {target!r}, which is not there")
                updates[graph.inputs.index(target)] = value
            else:
                outputs.append(value)
        return self.importer.finish([*outputs, *updates.values()], tuple(updates))

    def _fail(self, what: str, why: str = "") -> NoReturn:
        raise FileFormatError(
            what, where=self.where, why=why, next="the file is damaged: copy or export it again"
        )

    def _input(self, meta: TensorMeta | None, name: str) -> Value:
        if meta is None:
            self._fail(f"the input {name!r} has no type")
        dynamic = [most is None or least < most for least, most in meta.sizes]
        # Without a bound, memory is planned for a guess. A larger call is lowered again.
        bounds = [max(least, ROUNDED) if most is None else most for least, most in meta.sizes]
        value = self.importer.input(meta.dtype, bounds, dynamic)
        for size, (least, most) in zip(value.type.dims, meta.sizes):
            if isinstance(size, Dim):
                for symbol in _dims.symbols(size):
                    self.importer.ranges.setdefault(symbol, (least, most))
        return value

    def _bound(self, binding: Binding) -> Value | PackedWeight:
        if binding.packing is not None:
            return packed_weight(self.importer, binding)
        type = TensorType(binding.type.dtype, tuple(least for least, _ in binding.type.sizes))
        if not binding.mutated and binding.initial is not None:
            return self.importer.constant(binding.initial.data, type, binding.key)
        if binding.key not in self.states:
            data = None if binding.initial is None else binding.initial.data
            state = self.importer.state(data, type, Label(binding.key, binding.key))
            self.states[binding.key] = state
            self.state_values.add(state)
        return self.states[binding.key]

    # -- values -----------------------------------------------------------------------------------
    def _value(self, name: str) -> Any:
        if name not in self.env:
            self._fail(f"the value {name!r} is read before it is there")
        value = self.env[name]
        if isinstance(value, PackedWeight):
            raise UnsupportedProgramError(
                f"the quantized constant {value.name!r} is returned, or part of a list or a choice",
                where=self.where,
                why="operators read quantized constants as arguments of their own",
                next="export the model without quantization of this constant",
            )
        return value

    def _operand(self, arg: Any) -> Any:
        """An argument of an operator: as `_arg`, or a quantized constant."""
        value = self.env.get(arg.name) if isinstance(arg, Ref) else None
        return value if isinstance(value, PackedWeight) else self._arg(arg)

    def _arg(self, arg: Any) -> Any:
        if isinstance(arg, Ref):
            return self._value(arg.name)
        return tuple(map(self._arg, arg)) if type(arg) is tuple else arg

    # -- nodes ------------------------------------------------------------------------------------
    def _nodes(self, graph: NativeGraph) -> None:
        for at, node in enumerate(graph.nodes):
            if any(argument.mutated for argument in node.arguments):
                self._check_write(node, at)
            source = f"{node.name} = {node.target}"
            if node.target.endswith(("higher_order.cond", "torch.cond")):
                self._cond(node, source)
            elif not self._number(node, source):
                self._operator(node, graph.types, source)

    def _number(self, node: NativeNode, source: str) -> bool:
        """Whether a node is arithmetic on sizes, which is done then."""
        *space, name = node.target.split(".")
        args = [self._operand(argument.value) for argument in node.arguments]
        if space[-1:] == ["sym_size"] or name == "sym_size":
            found = args[0].type.dims[args[1]]
        elif "sym_numel" in (*space[-1:], name):
            found = args[0].type.numel
        elif "_local_scalar_dense" in space or name == "item":
            found = numbers.item(self.importer, args[0], source)
        elif space[:1] not in (["_operator"], ["math"], ["torch"], ["builtins"], []):
            return False
        elif name in INTEGER_OPERATORS:
            found = numbers.arithmetic(self.importer, INTEGER_OPERATORS[name], args, source)
        else:
            return False
        self._define(node, [found])
        return True

    def _operator(self, node: NativeNode, types: Mapping[str, TensorMeta], source: str) -> None:
        names = [name for result in node.results for name in result.names]
        metas = [types.get(name) for name in names]
        recorded, dynamic = [], []
        # A type without an upper bound says less than the operator's shape function.
        if all(meta and all(most is not None for _, most in meta.sizes) for meta in metas):
            for meta in filter(None, metas):
                sizes = tuple(most for _, most in meta.sizes if most is not None)
                recorded.append(TensorType(meta.dtype, sizes))
                dynamic.append(any(least != most for least, most in meta.sizes))
        op, written = _functional(node)
        args: Any = [self._operand(argument.value) for argument in node.arguments]
        if any(isinstance(arg, PackedWeight) for arg in args):
            dtype = next((meta.dtype for meta in metas if meta), None)
            made = emit_packed(self.importer, op, args, dtype, recorded, dynamic, source)
        else:
            made = self.importer.emit(op, args, recorded, dynamic, source)
        if len(made) != len(names):
            self._fail(f"{node.name!r} has {len(names)} results", f"{op} gives {len(made)}")
        self._define(node, made)
        for argument in written:
            self._write(argument, made[0], source)

    def _define(self, node: NativeNode, values: Sequence[Any]) -> None:
        names = [name for result in node.results for name in result.names]
        if len(names) != len(values):
            self._fail(f"{node.name!r} has {len(names)} results", f"{len(values)} are given")
        for result in node.results:
            if result.alias_of and result.alias_of not in self.env:
                self._fail(f"{node.name!r} shares memory with a value that is not there yet")
            for name in result.names:
                self.memory.add(name, result.alias_of)
        for name, value in zip(names, values):
            if name in self.env:
                self._fail(f"the value {name!r} is there twice")
            self.env[name] = value

    # -- writes -----------------------------------------------------------------------------------
    def _check_write(self, node: NativeNode, at: int) -> None:
        """Raises if a node writes memory that is read later by a name that does not show it: here each
        name is a tensor of its own."""
        for argument in node.arguments:
            for name in argument_names(argument.value) if argument.mutated else ():
                hidden = {name}
                value = self.env.get(name)
                if isinstance(value, Value) and value in self.state_values:
                    hidden.add(self.memory.owner(name))
                if read := self.memory.read_after(name, at, hidden):
                    raise UnsupportedProgramError(
                        f"{node.target} writes memory that is read by other names",
                        where=f"{self.where}, {node.name}",
                        why=f"{', '.join(read)} are read later",
                        next="write to a clone of the tensor",
                    )

    def _write(self, argument: Argument, value: Value, source: str) -> None:
        """Has later nodes read what an operator wrote."""
        for name in argument_names(argument.value):
            present = self.env[name]
            if present in self.importer.states:
                self.importer.emit("purevk.store", (present, value), [], [], source)
            else:
                self.env[name] = value

    # -- control flow -----------------------------------------------------------------------------
    def _cond(self, node: NativeNode, source: str) -> None:
        values = [argument.value for argument in node.arguments]
        if len(values) < 3 or not all(isinstance(value, NativeGraph) for value in values[1:3]):
            self._fail(f"{node.name!r} is a choice without two graphs")
        operands = [each for value in values[3:] for each in _flat(self._arg(value))]

        def walk(graph: NativeGraph) -> control.Walk:
            def run(region: control.Region, args: tuple[Any, ...]) -> list[Arg]:
                outer = self.importer, self.env, self.memory
                if len(args) != len(graph.inputs):
                    self._fail(f"a graph of {node.name!r} takes {len(graph.inputs)} values")
                self.importer, self.env = region.importer, dict(zip(graph.inputs, args))
                self.memory = SharedMemory(graph)
                for name in graph.inputs:
                    self.memory.add(name)
                try:
                    self._nodes(graph)
                    return [self._value(name) for name in graph.outputs]
                finally:
                    self.importer, self.env, self.memory = outer

            return run

        predicate = self._arg(values[0])
        made = control.cond(
            self.importer, predicate, [walk(graph) for graph in values[1:3]], operands, source
        )
        self._define(node, made)


def _functional(node: NativeNode) -> tuple[str, list[Argument]]:
    """The operator that gives what a node writes, and the arguments that it writes."""
    written = [argument for argument in node.arguments if argument.mutated]
    space, _, rest = node.target.partition(".")
    name, _, overload = rest.partition(".")
    if not written:
        return node.target, []
    op = f"{space}.{name.removesuffix('_')}.{overload}"
    if len(written) > 1 or len(node.results) != 1 or registry.find(op) is None:
        raise UnsupportedProgramError(
            f"{node.target} cannot be run",
            where=node.name,
            why="it writes its arguments, and purevk has no operator that gives what it writes",
        )
    return op, written


def _flat(value: Any) -> list[Any]:
    return [each for item in value for each in _flat(item)] if type(value) is tuple else [value]
