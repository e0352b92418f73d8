"""An exported program of torch (`torch.export`) as a graph. Imports torch, but not executorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from purevk.errors import UnsupportedProgramError
from purevk.frontends import numbers
from purevk.frontends.bounds import settled
from purevk.frontends.importer import Importer, InputSizes
from purevk.frontends.torch.nodes import NodeReader, is_dense
from purevk.frontends.torch.signatures import signature_of
from purevk.frontends.torch.sizes import Sizes
from purevk.ir import Arg, Dim, Graph, Label, Signature, Size, SymbolSource, TensorType, Value
from purevk.ir import dims as _dims


class WrittenBuffers:
    """The buffers that methods of a program write. A buffer that several methods have, under any
    names, is one; it stays the same one when it moves in memory, and others may get its address.

    Attributes:
        keys: what tells the buffers apart, by the addresses that they have now.
    """

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self._by_name: dict[tuple[str, str], str] = {}

    def add(self, method: str, program: Any) -> None:
        """Adds the buffers that the exported program of a method writes."""
        for name in program.graph_signature.buffers_to_mutate.values():
            tensors = program.state_dict if name in program.state_dict else program.constants
            address = address_of(tensors[name])
            if not address:
                continue
            key = self._by_name.get((method, name)) or self.keys.get(address)
            if key is None:
                key = address
                while key in self._by_name.values():  # of a buffer that was there before
                    key += "'"
            self.keys[address] = self._by_name[method, name] = key

    def follow(self, programs: Iterable[tuple[str, Any]]) -> None:
        """Takes over where the buffers of methods and their programs are now."""
        self.keys.clear()
        for method, program in programs:
            self.add(method, program)


def address_of(tensor: Any) -> str:
    import torch

    real = tensor.device.type == "cpu" and not isinstance(tensor, torch._subclasses.FakeTensor)
    return f"{tensor.data_ptr():x}" if real and is_dense(tensor) and tensor.numel() else ""


def read_exported(
    program: Any,
    sizes: InputSizes | None = None,
    name: str = "forward",
    mutable: Mapping[str, str] = MappingProxyType({}),
    planned_only: bool = False,
    signature: Signature | None = None,
    dim_names: Mapping[tuple[int, int], str] | None = None,
    exact: bool = False,
    trusted: bool = True,
) -> Graph:
    """The graph of an exported program.

    Args:
        program: a `torch.export.ExportedProgram`, decomposed by `decompose`.
        sizes: the sizes of the tensors of a call to specialize on; None: the program's own.
        name: the method's name.
        mutable: the buffers that methods write, see `WrittenBuffers.keys`.
        planned_only: the graph is not run. A weight may be on the meta device.
        signature: how the method is called; None: as the program says.
        dim_names: the user's names of dynamic dims, by input and dim.
        exact: the graph serves only the sizes that torch traced for. Those are not 0 and 1, which
            torch treats as constants.
        trusted: the program is one of this process, see `Graph`.

    Raises:
        UnsupportedProgramError: an input that is no tensor and no number, or control flow beyond
            docs/control_flow.md.
    """
    signature = signature or signature_of(program)

    def read() -> Graph:
        importer = _importer(name, sizes, signature)
        importer.trusted = trusted
        expressions = Sizes(program, importer, dim_names, exact)
        return Reader(program, importer, expressions, mutable, planned_only).run()

    return settled(read)


def read_inputs(program: Any) -> Graph:
    """A graph with only the inputs of a program: symbols, ranges, constraints and the signature.

    Raises:
        UnsupportedProgramError: an input that is no tensor and no number.
    """
    importer = _importer("forward", None, signature_of(program))
    Reader(program, importer, Sizes(program, importer)).inputs()
    return importer.finish(())


def _importer(name: str, sizes: InputSizes | None, signature: Signature | None) -> Importer:
    importer = Importer(name, f"exported program {name}", sizes)
    importer.signature, importer.trusted = signature, True
    return importer


def _is_of_cpu(graph: Any) -> bool:
    """Whether a graph was traced with tensors on the CPU."""
    import torch

    values = (node.meta.get("val") for node in graph.nodes)
    return all(value.is_cpu for value in values if isinstance(value, torch.Tensor))


class Reader(NodeReader):
    """Reads an exported program: its inputs, states and outputs, and the nodes between them.

    Args:
        program: the exported program.
        importer: takes the nodes.
        sizes: gives sizes for torch's expressions.
        mutable: the buffers that methods write, see `WrittenBuffers.keys`.
        planned_only: the graph is not run. A weight may be on the meta device.
    """

    def __init__(
        self,
        program: Any,
        importer: Importer,
        sizes: Sizes,
        mutable: Mapping[str, str] = MappingProxyType({}),
        planned_only: bool = False,
    ) -> None:
        super().__init__(program, importer, sizes, planned_only)
        importer.types.traced_elsewhere = not _is_of_cpu(program.graph)
        self.mutable = mutable

    def run(self) -> Graph:
        signature = self.program.graph_signature
        mutated = set(signature.buffers_to_mutate.values())
        states: dict[str, Value] = {}
        specs = {spec.arg.name: spec for spec in signature.input_specs}
        self.inputs()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                spec = specs[node.name]
                if spec.kind.name == "USER_INPUT":
                    continue
                if spec.kind.name == "TOKEN":
                    self.env[node] = None
                else:
                    data = self._tensor(spec)
                    if spec.kind.name == "CUSTOM_OBJ":
                        self.env[node] = self.arg(data)
                        continue
                    address = address_of(data)
                    state = spec.target in mutated or address in self.mutable
                    key = self.mutable.get(address, address)
                    label = Label(spec.target, key) if state else None
                    path = spec.target if isinstance(spec.target, str) else ""
                    value = self.leaf(data, label, path)
                    states[spec.target] = value
                    if state:
                        self.targets[value] = spec.target
                    self.env[node] = value
            elif node.op == "output":
                return self._finish(node, signature, states)
            else:
                self.node(node)
        raise UnsupportedProgramError("the exported program has no output")

    # -- inputs ----------------------------------------------------------------------------------
    def inputs(self) -> None:
        """Reads the user's inputs."""
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        nodes = self.program.graph.find_nodes(op="placeholder")
        users = [node for node in nodes if specs[node.name].kind.name == "USER_INPUT"]
        self.sizes.find_symbols(users)
        for guard in self.sizes.decisions():
            self.importer.constrain(guard)
        for node in users:
            self.env[node] = self._input(node)

    def _input(self, node: Any) -> Any:
        import torch

        example = node.meta.get("val")
        position = len(self.importer.inputs)
        if isinstance(example, torch.Tensor):
            return self._tensor_input(example)
        if isinstance(example, torch.SymInt):
            size = self.sizes.size(example.node.expr)
            if isinstance(size, int):
                self.importer.fixed_input(size)
                return size
            if (position, 0) not in self.sizes.sources:
                self.importer.fixed_input(int(example.node.hint))
                return int(example.node.hint)
            (symbol,) = _dims.symbols(size)
            self.importer.symbols[symbol] = SymbolSource(None, None, position)
            self.importer.inputs.append(Dim.of(symbol))
            return Dim.of(symbol)
        self.importer.fixed_input(example)
        return example

    def _tensor_input(self, example: Any) -> Value:
        position = len(self.importer.inputs)
        sizes: list[Size] = []
        for dim, size in enumerate(example.shape):
            wanted = self.sizes.wanted(position, dim)
            if isinstance(size, int):
                sizes.append(size)
            elif isinstance(wanted, int):
                sizes.append(wanted)
            else:
                sizes.append(self.sizes.input_size(position, dim, size))
        value = Value(f"input_{position}", TensorType(self.dtype(example.dtype), tuple(sizes)))
        for dim in range(len(sizes)):
            symbol = self.sizes.sources.get((position, dim))
            if symbol is not None:
                self.importer.symbols[symbol] = SymbolSource(value, dim)
        self.importer.inputs.append(value)
        return value

    def _tensor(self, spec: Any) -> Any:
        program = self.program
        if spec.target in program.state_dict:
            return program.state_dict[spec.target]
        return program.constants[spec.target]

    # -- outputs ----------------------------------------------------------------------------------
    def _finish(self, node: Any, signature: Any, states: Mapping[str, Value]) -> Graph:
        outputs: list[Arg] = []
        kinds: list[tuple[int, str]] = []
        updates: dict[int, Arg] = {}
        copied: dict[Any, Value] = {}  # what torch's module returns where such a node is a result
        names = [spec.arg.name for spec in signature.input_specs if spec.kind.name == "USER_INPUT"]
        for arg, spec in zip(node.args[0], signature.output_specs):
            value = self.arg(arg)
            if spec.kind.name == "BUFFER_MUTATION":
                state = states[spec.target]
                if value is state:
                    continue  # written in place by control flow
                if _is_converted(state, value):
                    (value,) = self.importer.emit(
                        "aten.copy.default", (state, value), [], [], f"mutation of {spec.target}"
                    )
                    copied[arg] = value
                self.importer.emit(
                    "purevk.store", (state, value), [], [], f"mutation of {spec.target}"
                )
            elif spec.kind.name == "USER_INPUT_MUTATION":
                updates[names.index(spec.target)] = value
            elif spec.kind.name == "USER_OUTPUT":
                kind = numbers.kind_of(getattr(arg, "meta", {}).get("val"))
                if kind in (float, bool):
                    kinds.append((len(outputs), kind.__name__))
                outputs.append(copied.get(arg, value) if copied else value)
            elif spec.kind.name != "TOKEN":
                raise UnsupportedProgramError(
                    f"an output of kind {spec.kind.name} cannot be run",
                    where=self.importer.where,
                    why="user outputs, mutated inputs and mutated buffers are accepted",
                )
        if kinds and self.importer.signature is not None:
            self.importer.signature = replace(self.importer.signature, numbers=tuple(kinds))
        graph = self.importer.finish([*outputs, *updates.values()], tuple(updates))
        return replace(graph, lines=self.lines)


def _is_converted(state: Value, value: Arg) -> bool:
    """Whether the new value of a buffer has another dtype, or sizes that broadcast: torch removes
    copies into buffers from programs that it decomposes."""
    if not isinstance(value, Value):
        return False
    dims = (*state.type.dims, *value.type.dims)
    return value.type.dtype is not state.type.dtype or (
        all(isinstance(size, int) for size in dims) and value.type.dims != state.type.dims
    )
