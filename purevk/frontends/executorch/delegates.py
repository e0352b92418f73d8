"""A Vulkan delegate's graph, inlined into the graph of the method that calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends import numbers
from purevk.frontends.executorch import delegate_buffers
from purevk.frontends.executorch.names import INTEGER_OPERATORS, vulkan_name
from purevk.frontends.importer import Importer
from purevk.ir import Arg, Dim, Label, Relation, TensorType, Value
from purevk.ir.index_range import DELEGATE_INPUT
from purevk.ir.relations import indicator
from purevk.ops import registry
from purevk.pte import values as V
from purevk.pte import vkgraph as vk
from purevk.pte.program import Program


class VulkanDelegate:
    """Inlines one call of a delegate.

    Args:
        importer: takes the nodes.
        program: the file, for the constants.
        graph: the delegate's graph.
        label: names the delegate in messages, such as "delegate 3".
        states: the states that earlier calls of the delegate made from its mutable constants, by
            value number.
    """

    def __init__(
        self,
        importer: Importer,
        program: Program,
        graph: vk.VkGraph,
        label: str,
        states: dict[int, Value],
    ) -> None:
        self.importer, self.program, self.graph, self.label, self.states = (
            importer,
            program,
            graph,
            label,
            states,
        )
        self.env: dict[int, Any] = {}
        self.sources: dict[int, Value] = {}  # inputs as the caller passed them, before any cast

    def run(self, inputs: Sequence[Arg], buffers: int) -> list[Arg]:
        """Inlines the graph; returns its outputs.

        Args:
            inputs: what the caller passes, one for each input of the graph.
            buffers: so many outputs, the first ones, are new contents of buffers. They go back
                into the constants of the same type that they came from.
        """
        graph = self.graph
        for number, arg in zip(graph.input_ids, inputs, strict=True):
            self._bind(number, arg)
        states = self._buffers_of(graph.output_ids[:buffers])
        for call in graph.chain:
            self._call(call.name, call.args, f"{self.label}#{call.node_id} {call.name}")
        outputs: list[Arg] = [self._arg(number) for number in graph.output_ids]
        stored = {
            state: at
            for at, (state, content) in enumerate(zip(states, outputs))
            if state is not None and content is not state  # else it was written in place
        }
        # What a buffer held before goes out, or into another buffer.
        earlier = {value for value in outputs if isinstance(value, Value) and value in stored}
        copies = {value: self._copy(value) for value in sorted(earlier, key=stored.__getitem__)}
        outputs = [copies.get(value, value) for value in outputs]  # type: ignore[arg-type]
        for state, at in stored.items():
            self.importer.emit("purevk.store", (state, outputs[at]), [], [], f"{self.label} buffer")
        return outputs

    def _copy(self, state: Value) -> Value:
        args, types = (state, None), [state.type]
        return self.importer.emit("aten.clone.default", args, types, [False], self.label)[0]

    # -- inputs -----------------------------------------------------------------------------------
    def _bind(self, number: int, arg: Arg) -> None:
        value = self.graph.values[number]
        if isinstance(value, vk.VkTensor):
            if not isinstance(arg, Value):
                raise FileFormatError(
                    f"input %{number} of {self.label} is a tensor", why=f"the caller passes {arg!r}"
                )
            self.sources[number] = arg
            if value.dtype is not None:
                arg = self.importer.cast(arg, value.dtype, f"{self.label} input", DELEGATE_INPUT)
            self.env[number] = arg
        elif isinstance(arg, Value):
            self.env[number] = numbers.item(self.importer, arg, self.label)
        else:
            self.env[number] = arg

    # -- values -----------------------------------------------------------------------------------
    def _arg(self, number: int, written: bool = False) -> Any:
        """An argument. A constant that the operator writes is a state."""
        if number in self.env:
            return self.env[number]
        value = self.graph.values[number]
        match value:
            case V.Null():
                return None
            case V.Int() | V.Bool() | V.Double() | V.String():
                return value.value
            case V.IntList() | V.BoolList() | V.DoubleList():
                return tuple(value.items)
            case vk.ValueList():
                return tuple(self._integer(item) for item in value.items)
            case vk.SymInt():
                return value.value
            case vk.VkTensor() if value.is_constant:
                return self._state(number) if written else self._constant(number, value)
        raise FileFormatError(
            f"value %{number} of {self.label} is read before it is written",
            where=self.importer.where,
            next="the file is damaged: copy or export it again",
        )

    def _integer(self, number: int) -> Any:
        """An integer argument. Exporters keep one value for 3 and 3.0, whichever came first."""
        arg = self._arg(number)
        return int(arg) if isinstance(arg, float) and arg.is_integer() else arg

    def _constant(self, number: int, tensor: vk.VkTensor) -> Value:
        """A constant; the state if it has become one."""
        if number in self.states:
            return self.states[number]
        data = self.program.vulkan_constant(self.graph, tensor.constant_id)
        return self.importer.constant(data, _type(tensor))

    def _state(self, number: int) -> Value:
        """The state whose initial bytes are those of a constant."""
        if number not in self.states:
            tensor = self._vk_tensor(number)
            data = self.program.vulkan_constant(self.graph, tensor.constant_id)
            label = Label(f"{self.label.replace(' ', '_')}.{number}")
            state = self.importer.state(data, _type(tensor), label)
            self.states[number] = self.env[number] = state
        return self.states[number]

    def _vk_tensor(self, number: int) -> vk.VkTensor:
        value = self.graph.values[number]
        if not isinstance(value, vk.VkTensor):
            raise FileFormatError(
                f"value %{number} of {self.label} is no tensor",
                where=self.importer.where,
                next="the file is damaged: copy or export it again",
            )
        return value

    def _buffers_of(self, numbers: Sequence[int]) -> list[Value | None]:
        """The states of mutated buffers, for the outputs that are their new contents. None: nothing
        in the graph reads the buffer.

        Files of `PurevkPartitioner` say which constants these are. In other files, the state of an
        output is a constant of the same type that the output is computed from. If there are several
        such constants, those of other outputs are left out. If there are as many outputs as
        constants, their order decides.
        """
        recorded = delegate_buffers.find(self.graph)
        if recorded is not None and len(recorded) == len(numbers):
            return [None if number is None else self._state(number) for number in recorded]
        candidates_of = {number: self._candidates(number) for number in numbers}
        if len(candidates_of) < len(numbers):
            raise UnsupportedProgramError(
                f"{self.label} gives two buffers the same content",
                where=self.importer.where,
                why="the file does not say which buffers",
                next="write x.clone() + 0 to one of them, or export with alias_buffer_mutations=True",
            )
        candidates_of = {
            number: candidates for number, candidates in candidates_of.items() if candidates
        }
        chosen: dict[int, int] = {}
        while len(chosen) < len(candidates_of):
            open_ = {
                number: [c for c in candidates if c not in chosen.values()]
                for number, candidates in candidates_of.items()
                if number not in chosen
            }
            single = {
                number: candidates[0]
                for number, candidates in open_.items()
                if len(candidates) == 1
            }
            if single:
                number, constant = next(iter(single.items()))
                chosen[number] = constant
                continue
            number, candidates = next(iter(open_.items()))
            alike = [
                peer
                for peer, peer_candidates in open_.items()
                if set(peer_candidates) & set(candidates)
            ]
            constants = sorted({c for peer in alike for c in open_[peer]})
            if len(constants) != len(alike) or any(
                c not in open_[peer] for peer, c in zip(alike, constants)
            ):
                raise UnsupportedProgramError(
                    f"{self.label} returns a mutated buffer that cannot be told apart",
                    where=self.importer.where,
                    why=f"{len(self._candidates(number))} constants have the type of output %{number}",
                    next="export with purevk.export, or with alias_buffer_mutations=True",
                )
            chosen.update(zip(alike, constants))
        return [self._state(chosen[number]) if number in chosen else None for number in numbers]

    def _candidates(self, number: int) -> list[int]:
        """The constants that may be the buffer whose new content an output is."""
        tensor = self.graph.values[number]
        if isinstance(tensor, vk.VkTensor) and tensor.is_constant:
            return [number]  # the buffer itself
        reached = self._reached(number)
        alike = [
            index
            for index, value in enumerate(self.graph.values)
            if isinstance(value, vk.VkTensor)
            and value.is_constant
            and isinstance(tensor, vk.VkTensor)
            and value.dims == tensor.dims
            and value.datatype == tensor.datatype
        ]
        return [index for index in alike if index in reached] or alike

    def _reached(self, number: int) -> set[int]:
        """The values that a value is computed from."""
        inputs_of = {
            output: call.args[:-1]
            for call in self.graph.chain
            for output in self._outputs(call.args[-1])
        }
        sources: set[int] = set()
        stack = [number]
        while stack:
            for source in inputs_of.get(stack.pop(), ()):
                value = self.graph.values[source]
                for item in value.items if isinstance(value, vk.ValueList) else (source,):
                    if item not in sources:
                        sources.add(item)
                        stack.append(item)
        return sources

    # -- operators --------------------------------------------------------------------------------
    def _call(self, name: str, args: Sequence[int], source: str) -> None:
        *inputs, output = args
        name = vulkan_name(name)
        base = name.split(".")[0]
        if name == "et_vk.prepack.default":
            self.env[output] = self._arg(inputs[0], self._is_written(output))
            return
        if name in ("sym_size.int", "aten.sym_size.int"):
            tensor, dim = self._arg(inputs[0]), self._integer(inputs[1])
            self.env[output] = tensor.type.dims[dim]
            return
        if name == "et_vk.select_as_symint.default":
            tensor = self.sources.get(inputs[0]) or self._arg(inputs[0])
            self.env[output] = self._element(
                tensor, self._integer(inputs[1]), self._integer(inputs[2])
            )
            return
        if base in INTEGER_OPERATORS and not name.startswith("aten."):
            sizes = [self._integer(number) for number in inputs]
            size = numbers.of_sizes(INTEGER_OPERATORS[base], *sizes)
            self.env[output] = indicator(*size.sides) if isinstance(size, Relation) else size
            return
        definition = registry.find(name)
        mutated = definition.mutates if definition else ()
        full = [self._arg(number, at in mutated) for at, number in enumerate(inputs)]
        outputs = self._outputs(output)
        recorded = [_type(self._vk_tensor(number)) for number in outputs]
        results = self.importer.emit(name, full, recorded, [False] * len(recorded), source)
        for number, value in zip(outputs, results):
            present = self.env.get(number)
            if isinstance(present, Value) and present in self.importer.states:
                self.importer.emit("purevk.store", (present, value), [], [], source)
            else:
                self.env[number] = value

    def _is_written(self, number: int) -> bool:
        """Whether an operator after its prepacking writes the value again (a buffer mutated in
        place)."""
        writes = 0
        for call in self.graph.chain:
            definition = registry.find(vulkan_name(call.name))
            for at in definition.mutates if definition else ():
                writes += call.args[at] == number
            writes += number in self._outputs(call.args[-1])
        return writes > 1

    def _element(self, tensor: Value, dim: int, index: int) -> Dim | int:
        if any(
            size != 1
            for d, size in enumerate(tensor.type.dims)
            if d != dim % max(tensor.type.rank, 1)
        ):
            raise UnsupportedProgramError(
                f"{self.label} takes a number out of a tensor {tensor.type}",
                where=self.importer.where,
                why="all dims but the selected one must be of size 1",
            )
        return self.importer.element(tensor, index)

    def _outputs(self, output: int) -> tuple[int, ...]:
        value = self.graph.values[output]
        return value.items if isinstance(value, vk.ValueList) else (output,)


def _type(tensor: vk.VkTensor) -> TensorType:
    return TensorType(tensor.dtype or DType.float32, tuple(tensor.dims))
