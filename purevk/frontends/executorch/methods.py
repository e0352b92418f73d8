"""A method of a .pte file as one graph: its delegates and the kernels between them, in order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends import control, numbers
from purevk.frontends.bounds import settled
from purevk.frontends.executorch import call_record
from purevk.frontends.executorch.control_flow import (
    Choice,
    Loop,
    Step,
    Uses,
    address_of,
    instructions_of,
    structure,
)
from purevk.frontends.executorch.delegates import VulkanDelegate
from purevk.frontends.executorch.names import (
    INTEGER_OPERATORS,
    OUT_ARGUMENTS,
    is_out_variant,
    plan_name,
)
from purevk.frontends.importer import Importer, InputSizes
from purevk.ir import Arg, Dim, Graph, Label, TensorType, Value
from purevk.ir import dims as _dims
from purevk.pte import program as P
from purevk.pte import values as V


def read_method(
    program: P.Program,
    method: str = "forward",
    sizes: InputSizes | None = None,
) -> Graph:
    """The graph of one method.

    Args:
        program: the parsed file.
        method: name of the method.
        sizes: the sizes of the tensors of a call, by position, to specialize on; None: the file's
            bounds.

    Raises:
        UnsupportedProgramError: a delegate of another backend, or jumps that no exporter writes.
        FileFormatError: the file contradicts itself.
    """
    return settled(lambda: _Plan(program, program.method(method), sizes).run())


class _ScannedRow(NamedTuple):
    """An instruction of a loop that takes the row of a tensor at the loop's index.

    Attributes:
        tensor: the value that the row is taken from.
        row: the value that holds the row.
    """

    tensor: int
    row: int


class _Plan:
    """Walks the instructions of a method.

    Attributes:
        env: what each value of the plan is in the graph, by its number.
        states: values that stay on the device between calls.
        delegate_states: the same, of each delegate.
        last_written: the value that was last written to each address in the arenas.
    """

    def __init__(self, program: P.Program, plan: P.ExecutionPlan, sizes: InputSizes | None) -> None:
        self.program, self.plan = program, plan
        self.where = f"{program.name}, method {plan.name}"
        self.importer = Importer(plan.name, self.where, sizes)
        self.env: dict[int, Any] = {}
        self.delegate_states: dict[int, dict[int, Value]] = {}
        self.states: dict[int, Value] = {}
        self.last_written: dict[tuple[int, int], int] = {}

    def run(self) -> Graph:
        for number in self.plan.inputs:
            self._set(number, self._input(number))
        record = call_record.find(self.plan)
        if record is not None:
            call_record.apply(record, self.importer, len(self.plan.outputs), self.where)
        if len(self.plan.chains) != 1:
            self._refuse(
                "control flow", f"{len(self.plan.chains)} chains of instructions; one is accepted"
            )
        self._steps(structure(self.plan, self.where))
        return self.importer.finish([self._output(number) for number in self.plan.outputs])

    # -- control flow -----------------------------------------------------------------------------
    def _steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Choice):
                self._choice(step)
            elif isinstance(step, Loop):
                self._loop(step)
            else:
                self._instruction(step)

    def _instruction(self, position: int) -> None:
        match self.plan.chains[0].instructions[position]:
            case P.KernelCall(op_index, args):
                operator = self.plan.operators[op_index]
                self._kernel(operator, args, f"{self.plan.name}#{position} {operator}")
            case P.DelegateCall(index, args):
                self._delegate(index, args)
            case P.MoveCall(source, target):
                self._set(target, self._arg(source))

    @functools.cached_property
    def uses(self) -> Uses:
        return Uses(self.plan, self._written)

    def _written(self, instruction: P.Instruction) -> Sequence[int]:
        """The values that an instruction writes."""
        match instruction:
            case P.KernelCall(op_index, args):
                operator = self.plan.operators[op_index]
                if operator.name == "executorch_prim::et_copy_index":
                    return args[:1]
                return self._outputs(operator, args)
            case P.DelegateCall(index, args):
                if self.plan.delegates[index].id != P.VULKAN_BACKEND:
                    return ()
                return self._split(
                    index, self.program.vulkan_graph(self.plan.delegates[index]), args
                )[1]
            case P.MoveCall(_, target):
                return (target,)
        return ()

    @contextlib.contextmanager
    def _inside(self, region: control.Region, steps: Sequence[Step]) -> Iterator[None]:
        """A context in which nodes go to a region. The values that its steps touch are taken from
        around it."""
        kept = self.importer, self.env, self.last_written
        env: dict[int, Any] = {}
        for number in self.uses.touched_by(list(instructions_of(steps))):
            source = number if number in self.env else self._alias(number)
            if source is not None:
                env[source] = region.take(self.env[source])
        self.importer, self.env, self.last_written = region.importer, env, dict(self.last_written)
        try:
            yield
        finally:
            self.importer, self.env, self.last_written = kept

    def _choice(self, step: Choice) -> None:
        condition = self._arg(step.condition)
        if isinstance(condition, bool):
            self._steps(step.true if condition else step.false)
            return
        parts = (step.true, step.false)
        written = self.uses.written_by([at for part in parts for at in instructions_of(part)])
        wanted = [
            n
            for n in sorted(written & self.uses.wanted_outside(step.first, step.last))
            if n not in self.states
        ]

        def walk(part: Sequence[Step]) -> control.Walk:
            def run(region: control.Region, _: tuple[Arg, ...]) -> list[Arg]:
                with self._inside(region, part):
                    self._steps(part)
                    for number in wanted:
                        if number not in self.env:
                            self.env[number] = (
                                region.take(around[number])
                                if number in around
                                else self._nothing(number)
                            )
                    return [self.env[number] for number in wanted]

            return run

        around = self.env
        source = f"{self.plan.name}#{step.first} choice"
        made = control.cond(self.importer, condition, [walk(part) for part in parts], (), source)
        for number, value in zip(wanted, made):
            self._set(
                number,
                self.importer.element(value, 0)
                if isinstance(self.plan.values[number], V.Int)
                else value,
            )

    def _nothing(self, number: int) -> Any:
        """What a value holds that only the other branch writes."""
        value = self.plan.values[number]
        if not isinstance(value, P.Tensor):
            return self._plain(value)
        return self.importer.emit(
            "aten.full.default",
            (value.sizes, 0, self._dtype(value)),
            [],
            [],
            f"value {number} before it is written",
        )[0]

    def _loop(self, step: Loop) -> None:
        inside = list(instructions_of(step.steps))
        rows: dict[int, _ScannedRow] = {}  # by instruction
        stacked: list[int] = []
        for at in inside:
            if step.counter not in self.uses.touched[at]:
                continue
            call = self.plan.chains[0].instructions[at]
            name = ""
            args: tuple[int, ...] = ()
            if isinstance(call, P.KernelCall):
                name, args = self.plan.operators[call.op_index].name, call.args
            if name == "aten::select_copy" and self._arg(args[1]) == 0 and args[2] == step.counter:
                rows[at] = _ScannedRow(args[0], args[-1])
            elif name == "executorch_prim::et_copy_index" and args[2] == step.counter:
                stacked.append(args[0])
            else:
                self._refuse("a loop", f"instruction {at} uses its counter")
        if not rows:
            self._refuse("a loop", f"instructions {step.first} to {step.last} walk over no tensor")
        written = self.uses.written_by(inside)
        carried = [
            n
            for n in sorted(written)
            if n in self.env and n not in self.states and n not in stacked
        ]
        plain = tuple(each for each in step.steps if each not in rows)

        def walk(region: control.Region, args: tuple[Arg, ...]) -> list[Arg]:
            with self._inside(region, plain):
                inputs = (*carried, *(scanned.row for scanned in rows.values()))
                for number, value in zip(inputs, args):
                    self._set(number, value)
                self._steps(plain)
                return [self.env[number] for number in (*carried, *stacked)]

        tensors = [self._arg(scanned.tensor) for scanned in rows.values()]
        source = f"{self.plan.name}#{step.first} loop"
        made = control.scan(
            self.importer, walk, [self.env[number] for number in carried], tensors, (), source
        )
        for number, value in zip((*carried, *stacked), made):
            self._set(number, value)

    # -- values -----------------------------------------------------------------------------------
    def _set(self, number: int, value: Any) -> None:
        """Notes that a value is written."""
        self.env[number] = value
        address = address_of(self.plan.values[number])
        if address is not None:
            self.last_written[address] = number

    def _alias(self, number: int) -> int | None:
        """The value that was written to the memory of `number`, which itself nobody writes. Views
        without a copy share the bytes of their base like this."""
        if number < 0 or number in self.env:
            return None
        tensor = self.plan.values[number]
        address = address_of(tensor)
        other = None if address is None else self.last_written.get(address)
        if other is None or other not in self.env:
            return None
        found = self.plan.values[other]
        if not isinstance(found, P.Tensor) or not isinstance(tensor, P.Tensor):
            return None
        same = (found.numel, found.scalar_type) == (tensor.numel, tensor.scalar_type)
        return other if same else None

    @functools.cached_property
    def _read_numbers(self) -> set[int]:
        """The values that something reads. The exporter made an integer input part of the graph if
        nothing reads it."""
        found = set(self.plan.outputs)
        for chain in self.plan.chains:
            for call in chain.instructions:
                match call:
                    case P.KernelCall(_, args) | P.DelegateCall(_, args):
                        found |= set(args)
                    case P.MoveCall(source, _):
                        found.add(source)
                    case P.JumpFalse(condition, _):
                        found.add(condition)
        for value in self.plan.values:
            if isinstance(value, P.BoxedIntList):
                found |= set(value.items)
        return found

    def _input(self, number: int) -> Any:
        value = self.plan.values[number]
        if isinstance(value, P.Tensor):
            dtype = self._dtype(value)
            if value.has_data and value.allocation is not None:
                return self._state(number, value)
            return self.importer.input(
                dtype, value.sizes, value.dynamism is not P.ShapeDynamism.STATIC
            )
        if isinstance(value, V.Int) and number in self._read_numbers:
            return self.importer.integer_input(value.value)
        plain = self._plain(value)
        self.importer.fixed_input(plain)
        return plain

    def _arg(self, number: int) -> Any:
        if number in self.env:
            return self.env[number]
        value = self.plan.values[number]
        if isinstance(value, P.Tensor):
            data = self.program.tensor_data(value) if value.is_constant else None
            if data is not None:
                return self.importer.constant(
                    data, TensorType(self._dtype(value), self._sizes(value))
                )
            if value.has_data or number in self.states:
                return self._state(number, value)
            other = self._alias(number)
            if other is not None:
                given = self.env[other]
                return self.importer.emit(
                    "aten.view.default", (given, value.sizes), [], [], f"value {number}"
                )[0]
            if value.allocation is not None and value.dynamism is P.ShapeDynamism.STATIC:
                # A buffer without initial bytes. ExecuTorch leaves them undefined; here they are 0.
                return self._state(number, value)
            raise FileFormatError(f"value {number} is read before it is written", where=self.where)
        return self._plain(value)

    def _plain(self, value: Any) -> Any:
        match value:
            case V.Null():
                return None
            case V.Int() | V.Bool() | V.Double() | V.String():
                return value.value
            case P.BoxedIntList() | P.TensorList():
                return tuple(self._arg(item) for item in value.items)
            case P.OptionalTensorList():
                return tuple(None if item < 0 else self._arg(item) for item in value.items)
            case V.DoubleList() | V.BoolList():
                return tuple(value.items)
        raise FileFormatError(
            f"a value of kind {type(value).__name__} is given for an argument",
            where=self.where,
        )

    def _state(self, number: int, tensor: P.Tensor) -> Value:
        if number not in self.states:
            data = self.program.tensor_data(tensor)
            type = TensorType(self._dtype(tensor), self._sizes(tensor))
            self.states[number] = self.importer.state(data, type, self._label(number, tensor))
        self._set(number, self.states[number])
        return self.states[number]

    def _label(self, number: int, tensor: P.Tensor) -> Label:
        """The name of a state. Methods share the buffers in an arena above 1, by their address."""
        address = tensor.allocation
        if address is None or address.memory_id <= 1:
            return Label(tensor.name or f"buffer_{number}")
        arena, offset = address.memory_id, address.offset
        return Label(tensor.name or f"arena_{arena}.{offset}", f"arena {arena} at {offset}")

    def _dtype(self, tensor: P.Tensor) -> DType:
        if tensor.dtype is None:
            self._refuse(f"dtype {tensor.dtype_name}", "purevk has no such element type")
        return tensor.dtype

    def _sizes(self, tensor: P.Tensor) -> tuple[int, ...]:
        if tuple(tensor.dim_order) != tuple(range(len(tensor.sizes))) and tensor.has_data:
            self._refuse("a constant with another dim order", f"order {tensor.dim_order}")
        return tensor.sizes

    def _output(self, number: int) -> Any:
        return self._arg(number)

    # -- instructions -----------------------------------------------------------------------------
    def _kernel(self, operator: P.Operator, args: Sequence[int], source: str) -> None:
        space, _, name = operator.name.partition("::")
        if name.startswith("sym_size") or name == "sym_numel":
            tensor = self._arg(args[0])
            self.env[args[-1]] = (
                tensor.type.numel if name == "sym_numel" else tensor.type.dims[self._arg(args[1])]
            )
            return
        if space == "executorch_prim":
            self._prim(name, args, source)
            return
        if name in ("_local_scalar_dense", "item"):
            self.env[args[-1]] = numbers.item(self.importer, self._arg(args[0]), source)
            return
        full = plan_name(operator.name, operator.overload)
        outputs = self._outputs(operator, args)
        inputs: Any = [
            self._arg(number)
            for number in args[: len(args) - self._trailing(operator, args, outputs)]
        ]
        known = OUT_ARGUMENTS.get(f"{space}.{name}.{operator.overload}")
        if known is not None:
            inputs = dict(zip(known, inputs))
        tensors = [self.plan.values[number] for number in outputs]
        recorded = [self._recorded(tensor) for tensor in tensors]
        dynamic = [
            isinstance(tensor, P.Tensor) and tensor.dynamism is not P.ShapeDynamism.STATIC
            for tensor in tensors
        ]
        if name == "copy_" and not self._is_buffer(outputs[0]):
            self._set(outputs[0], self.importer.cast(inputs[1], recorded[0].dtype, source))
            return
        if name == "copy_" or (name == "copy" and isinstance(self._existing(outputs[0]), Value)):
            self._store(outputs[0], inputs, source)
            return
        results = self.importer.emit(full, inputs, recorded, dynamic, source)
        for number, value in zip(outputs, results):
            present = self._existing(number)
            if isinstance(present, Value) and present in self.importer.states:
                self.importer.emit("purevk.store", (present, value), [], [], source)
            elif isinstance(self.plan.values[number], V.Int):
                self.env[number] = self.importer.element(value, 0)
            else:
                if not isinstance(self.plan.values[number], P.Tensor):
                    self.importer.numbers.add(value)
                self._set(number, value)

    def _recorded(self, value: Any) -> TensorType:
        """The type of a result. Numbers are tensors without dims."""
        if isinstance(value, P.Tensor):
            return TensorType(self._dtype(value), value.sizes)
        kind = {V.Int: int, V.Bool: bool, V.Double: float}.get(type(value))
        if kind is None:
            raise FileFormatError(
                f"a value of kind {type(value).__name__} is given for a result",
                where=self.where,
            )
        return numbers.NUMBERS[kind]

    def _existing(self, number: int) -> Any:
        value = self.plan.values[number]
        if (
            number not in self.env
            and isinstance(value, P.Tensor)
            and value.has_data
            and value.allocation is not None
        ):
            return self._state(number, value)
        if number in self.states:
            return self.states[number]
        return self.env.get(number)

    def _is_buffer(self, number: int) -> bool:
        """Whether a tensor that is copied into is a state. It is one if it was read as a state, if it
        has initial bytes, or if nobody reads the copy."""
        value = self.plan.values[number]
        if number in self.states or (isinstance(value, P.Tensor) and value.has_data):
            return True
        if number in self.env or not isinstance(value, P.Tensor) or number in self.plan.outputs:
            return False
        touching = [at for at, touched in enumerate(self.uses.touched) if number in touched]
        if len(touching) > 1:
            return False
        self._state(number, value)
        return True

    def _store(self, target: int, inputs: Sequence[Any], source: str) -> None:
        state, new = self._existing(target), inputs[1]
        if not isinstance(state, Value) or state not in self.importer.states:
            self._refuse("a copy into a tensor that is no buffer", f"value {target} at {source}")
        if new.type.dims != state.type.dims:
            new = self.importer.emit("aten.expand.default", (new, state.type.dims), [], [], source)[
                0
            ]
        self.importer.emit(
            "purevk.store",
            (state, self.importer.cast(new, state.type.dtype, source)),
            [],
            [],
            source,
        )

    def _outputs(self, operator: P.Operator, args: Sequence[int]) -> list[int]:
        """The values that a kernel writes: its out arguments. If there are several, the plan repeats
        them as a list at the end."""
        last = self.plan.values[args[-1]]
        if isinstance(last, P.TensorList):
            return list(last.items)
        return [args[-1]]

    def _trailing(self, operator: P.Operator, args: Sequence[int], outputs: Sequence[int]) -> int:
        """How many arguments at the end are not inputs."""
        last = self.plan.values[args[-1]]
        out = is_out_variant(operator.name, operator.overload)
        if isinstance(last, P.TensorList):
            own = 0
            while (
                own < len(outputs) and args[len(args) - 2 - own] == outputs[len(outputs) - 1 - own]
            ):
                own += 1
            # An out argument that is itself a list (split, unbind) is given twice.
            repeated = int(own == 0 and len(args) > 1 and args[-2] == args[-1])
            return 1 + own + repeated
        count = 1
        while out and len(args) > count and args[-1 - count] == args[-1]:
            count += 1
        return count

    def _prim(self, name: str, args: Sequence[int], source: str) -> None:
        if name == "et_view":
            view = self.importer.emit(
                "aten.view.default", [self._arg(args[0]), self._arg(args[1])], [], [], source
            )[0]
            self._set(args[-1], view)
        elif name == "et_copy_index":
            self.env[args[0]] = self._arg(args[1])  # the loop stacks the values of its iterations
        elif name in INTEGER_OPERATORS:
            op, given = INTEGER_OPERATORS[name], [self._arg(n) for n in args[:-1]]
            if op in numbers.RELATIONS and not any(isinstance(number, Value) for number in given):
                self.env[args[-1]] = _dims.indicator(given[0], op, given[1])
            else:
                self.env[args[-1]] = numbers.arithmetic(self.importer, op, given, source)
        else:
            self._refuse(f"executorch_prim::{name}", f"at {source}")

    def _delegate(self, index: int, args: Sequence[int]) -> None:
        delegate = self.plan.delegates[index]
        if delegate.id != "VulkanBackend":
            self._refuse(
                f"a delegate of {delegate.id}",
                f"delegate {index}; only VulkanBackend is accepted",
                "export the model with executorch's VulkanPartitioner alone",
            )
        graph = self.program.vulkan_graph(delegate)
        inputs, outputs = self._split(index, graph, args)
        states = self.delegate_states.setdefault(index, {})
        inner = VulkanDelegate(self.importer, self.program, graph, f"delegate {index}", states)
        given = [self.plan.values[number] for number in inputs]
        declared = [value.sizes if isinstance(value, P.Tensor) else None for value in given]
        results = inner.run([self._arg(number) for number in inputs], len(outputs), declared)
        for number, value in zip(outputs, results):
            expected = self.plan.values[number]
            if isinstance(expected, P.Tensor) and isinstance(value, Value):
                value = self.importer.cast(value, self._dtype(expected), f"delegate {index} output")
            elif isinstance(expected, P.Tensor) and isinstance(value, (int, Dim)):
                value = self.importer.emit(
                    "aten.full.default",
                    ((1,) * len(expected.sizes), value, self._dtype(expected)),
                    [],
                    [],
                    f"delegate {index} output",
                )[0]
            self._set(number, value)

    def _split(self, index: int, graph: Any, args: Sequence[int]) -> tuple[list[int], list[int]]:
        """The inputs and the outputs among the arguments of a delegate call. The call may pass inputs
        that the graph has dropped, and may lack outputs for mutated buffers."""
        takes, gives = len(graph.input_ids), len(graph.output_ids)
        first = max(len(args) - gives, min(takes, len(args)))
        return list(args[:first]), list(args[first:])

    def _refuse(self, what: str, why: str, next: str = "") -> NoReturn:
        raise UnsupportedProgramError(f"{what} cannot be run", where=self.where, why=why, next=next)
