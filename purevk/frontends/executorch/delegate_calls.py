"""Which of the arguments of a delegate call are inputs of its graph, and which are outputs.

A call lists inputs, then outputs, and does not say where the outputs begin. Nor does it list the
same ones as the graph always does. The exporter drops inputs that no operator of the graph reads,
and lists an output once that the caller takes several times (a tensor and its `detach()`). The new
contents of buffers are the first outputs of the graph, and a call does not list them. What is left
open is decided by types, and by what other instructions read and write.

`PurevkPartitioner` changes the exporter: its graphs list all inputs and outputs. The compile spec
`LISTS_ALL` of a delegate says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.executorch.plan_arguments import kernel_writes
from purevk.pte import types as P
from purevk.pte import vkgraph as vk
from purevk.pte.program import Program as PteProgram

LISTS_ALL = "purevk.lists_all"
_ALIASED = "alias_buffer_mutations"  # the graph writes buffers in place
_WORK = 1_000_000  # comparisons of types; 100 outputs, of which 10 are taken twice, need 100,000


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a delegate call.

    Attributes:
        inputs: the value of the plan for each input of the graph.
        outputs: values of the plan, each with the number of the graph's output that it takes.
        buffers: so many outputs of the graph, the first ones, are new contents of buffers.
    """

    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    buffers: int = 0

    @property
    def written(self) -> list[int]:
        """The values that the call writes."""
        return [number for number, _ in self.outputs]


class DelegateCalls:
    """The calls of Vulkan delegates in a plan.

    Raises:
        FileFormatError: the arguments of a call do not fit its graph.
        UnsupportedProgramError: they fit in several ways.
    """

    def __init__(self, program: PteProgram, plan: P.ExecutionPlan) -> None:
        self.plan = plan
        self.where = f"{program.name}, method {plan.name}"
        self.graphs: dict[int, vk.VkGraph] = {}
        self._calls: dict[P.DelegateCall, CallArguments] = {}
        by_others = {
            number
            for chain in plan.chains
            for instruction in chain.instructions
            for number in kernel_writes(plan, instruction)
        }
        defined = set(plan.inputs)
        defined |= {
            number
            for number, value in enumerate(plan.values)
            if isinstance(value, P.Tensor) and value.is_constant
        }
        for chain in plan.chains:
            for instruction in chain.instructions:
                defined |= set(kernel_writes(plan, instruction))
                if not isinstance(instruction, P.DelegateCall):
                    continue
                index = instruction.delegate_index
                if plan.delegates[index].id != P.VULKAN_BACKEND:
                    continue
                if index not in self.graphs:
                    self.graphs[index] = program.vulkan_graph(plan.delegates[index])
                if instruction not in self._calls:
                    self._calls[instruction] = self._split(instruction, defined, by_others)
                defined |= set(self._calls[instruction].written)

    def arguments(self, call: P.DelegateCall) -> CallArguments:
        """The arguments of a call."""
        return self._calls[call]

    def writes(self, instruction: P.Instruction) -> Sequence[int]:
        """The values that an instruction writes."""
        if isinstance(instruction, P.DelegateCall):
            arguments = self._calls.get(instruction)
            return arguments.written if arguments is not None else ()
        return kernel_writes(self.plan, instruction)

    # -- one call ---------------------------------------------------------------------------------
    def _split(
        self, call: P.DelegateCall, defined: Collection[int], by_others: Collection[int]
    ) -> CallArguments:
        graph, args = self.graphs[call.delegate_index], call.args
        takes, gives = len(graph.input_ids), len(graph.output_ids)
        if len(args) < takes:
            raise FileFormatError(
                f"delegate {call.delegate_index} takes {takes} inputs",
                where=self.where,
                why=f"its caller passes {len(args)} arguments",
                next="export the model again",
            )
        missing = max(0, takes + gives - len(args))
        specs = self.plan.delegates[call.delegate_index].compile_specs
        aliased = any(spec.key == _ALIASED and any(spec.value) for spec in specs)
        most = _written_twice(graph) if aliased else _most_buffers(graph)
        if len(args) <= takes + gives and (
            most <= missing or any(spec.key == LISTS_ALL for spec in specs)
        ):
            return CallArguments(
                args[:takes],
                tuple((number, missing + at) for at, number in enumerate(args[takes:])),
                missing,
            )
        # An output is new, and only delegates write it. An input is there before.
        first = 1 + max((at for at, number in enumerate(args) if number in defined), default=-1)
        last = min(
            (
                at
                for at, number in enumerate(args)
                if at >= first and self._is_result(number) and number not in by_others
            ),
            default=len(args),
        )
        first = max(first, takes)
        most = max(most, missing)
        again = 1 + len(args) - takes - gives + most
        work = (last + 1 - first) * (len(args) - takes) * again * gives * (most + 1 - missing)
        counts: dict[CallArguments, int] = {}
        if work < _WORK:
            for buffers in range(missing, most + 1):
                for at in range(first, last + 1):
                    for inputs in self._inputs(graph, args[:at]):
                        for outputs in self._outputs(graph, args[at:], buffers):
                            candidate = CallArguments(inputs, tuple(zip(args[at:], outputs)))
                            # The exporter refuses to return a buffer, but for copies of it. So
                            # `return weight + x` is no new content.
                            counts.setdefault(candidate, buffers)
        if len(counts) == 1:
            ((arguments, buffers),) = counts.items()
            return replace(arguments, buffers=0 if aliased else buffers)
        label = f"delegate {call.delegate_index} takes {takes} inputs and gives {gives} outputs"
        if not counts and work < _WORK:
            raise FileFormatError(
                label,
                where=self.where,
                why=f"its caller passes {len(args)} arguments, which do not match them by type",
                next="export the model again",
            )
        raise UnsupportedProgramError(
            label,
            where=self.where,
            why=f"its caller passes {len(args)} arguments, several of one type, and the file does"
            " not say which ones are meant",
            next="export the model with purevk.export, or with alias_buffer_mutations=True. Or remove"
            " what it computes and does not use, and results that are one tensor, such as x and"
            " x.detach(), or a buffer and its copy",
        )

    def _is_result(self, number: int) -> bool:
        """Whether nothing gives the value before the method runs."""
        value = self.plan.values[number]
        return isinstance(value, P.Tensor) and not value.has_data

    def _inputs(self, graph: vk.VkGraph, args: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Two of the ways to drop arguments, if there are several."""
        first = self._first_match(graph, graph.input_ids, args)
        last = self._first_match(graph, graph.input_ids[::-1], args[::-1])
        if first is not None and last is not None:
            yield from {first, last[::-1]}

    def _first_match(
        self, graph: vk.VkGraph, inputs: Sequence[int], args: Sequence[int]
    ) -> tuple[int, ...] | None:
        """For each input of the graph, the first argument of its type behind that of the input
        before; None: an input has no such argument."""
        chosen: list[int] = []
        remaining = iter(args)
        for value in inputs:
            for number in remaining:
                if self._fits(graph.values[value], self.plan.values[number]):
                    chosen.append(number)
                    break
        return tuple(chosen) if len(chosen) == len(inputs) else None

    def _outputs(
        self, graph: vk.VkGraph, args: Sequence[int], buffers: int
    ) -> Iterator[tuple[int, ...]]:
        """Two of the ways to take outputs several times, if there are several. The first time each
        output is taken, it comes behind those before it, and buffers have taken the first ones."""
        gives = len(graph.output_ids)
        again = len(args) + buffers - gives  # arguments that take what was taken before
        if again < 0:
            return

        def choices(at: int, used: int) -> list[int]:
            """The outputs that an argument can take, if those before it have taken some."""
            value = self.plan.values[args[at]]
            return [
                output
                for output in range(min(used + 1, gives))
                if self._fits(graph.values[graph.output_ids[output]], value)
            ]

        # Whether the arguments from one on can be given outputs, by how many are used before it.
        open_: list[set[int]] = [set() for _ in args] + [{gives}]
        for at in reversed(range(len(args))):
            for used in range(buffers + max(0, at - again), min(buffers + at, gives) + 1):
                if any(used + (output == used) in open_[at + 1] for output in choices(at, used)):
                    open_[at].add(used)

        ways: list[tuple[tuple[int, ...], int]] = [((), buffers)] if buffers in open_[0] else []
        for at in range(len(args)):
            ways = [
                ((*way, output), used + (output == used))
                for way, used in ways
                for output in choices(at, used)
                if used + (output == used) in open_[at + 1]
            ][:2]
        yield from (way for way, _ in ways)

    @staticmethod
    def _fits(value: vk.VkValue, plan_value: P.EValue) -> bool:
        if isinstance(value, vk.VkTensor):
            return (
                isinstance(plan_value, P.Tensor)
                and plan_value.sizes == value.dims
                and (
                    value.dtype is None
                    or plan_value.dtype is None
                    or value.dtype.is_float == plan_value.dtype.is_float
                )
            )
        return not isinstance(plan_value, P.Tensor) or plan_value.numel == 1


def _most_buffers(graph: vk.VkGraph) -> int:
    """How many of the first outputs may be new contents of buffers: each needs a constant of its own
    that has its type. Exporters list buffers after all parameters, and weights of layers are
    parameters."""
    weights = max((n for call in graph.chain for n in _weights(graph, call)), default=-1)
    constants = Counter(
        (value.dims, value.datatype)
        for value in graph.values[weights + 1 :]
        if isinstance(value, vk.VkTensor) and value.is_constant
    )
    for at, number in enumerate(graph.output_ids):
        value = graph.values[number]
        kind = (value.dims, value.datatype) if isinstance(value, vk.VkTensor) else None
        if kind is None or not constants[kind]:
            return at
        constants[kind] -= 1
    return len(graph.output_ids)


# The operators with float weights, and the arguments that these are.
_LAYERS = {
    "aten.linear.default": (1, 2),
    "aten.convolution.default": (1, 2),
    "et_vk.conv_with_clamp.default": (1, 2),
    "aten.native_layer_norm.default": (2, 3),
    "aten.embedding.default": (0,),
}


def _weights(graph: vk.VkGraph, call: vk.OperatorCall) -> Iterator[int]:
    """The constants that are weights of a layer."""
    for at in _LAYERS.get(call.name, ()):
        number = call.args[at] if at < len(call.args) else -1
        value = graph.values[number] if 0 <= number < len(graph.values) else None
        if isinstance(value, vk.VkTensor) and value.is_constant:
            yield number


def _written_twice(graph: vk.VkGraph) -> int:
    """How many of the first outputs are buffers that the graph writes in place."""
    written = Counter(call.args[-1] for call in graph.chain)
    outputs = graph.output_ids
    return next((at for at, output in enumerate(outputs) if written[output] < 2), len(outputs))
