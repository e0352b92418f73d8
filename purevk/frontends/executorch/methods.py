"""A method of a .pte file as one graph: its delegates and the kernels between them, in order."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from purevk.frontends import control, numbers
from purevk.frontends.bounds import settled
from purevk.frontends.executorch import call_record
from purevk.frontends.executorch.control_flow import (
    Choice,
    Loop,
    Step,
    Uses,
    instructions_of,
    structure,
)
from purevk.frontends.executorch.delegate_calls import DelegateCalls
from purevk.frontends.executorch.delegates import VulkanDelegate
from purevk.frontends.executorch.names import (
    INTEGER_OPERATORS,
    OUT_ARGUMENTS,
    plan_name,
)
from purevk.frontends.executorch.plan_arguments import kernel_inputs, kernel_outputs
from purevk.frontends.executorch.plan_values import PlanValues
from purevk.frontends.importer import Importer, InputSizes
from purevk.frontends.reading import check_nodes
from purevk.ir import Arg, Dim, Graph, Relation, Value
from purevk.ir.relations import indicator
from purevk.pte import types as P
from purevk.pte import values as V
from purevk.pte.program import Program as PteProgram


def read_method(
    program: PteProgram,
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


_LISTS = (P.BoxedIntList, P.TensorList, P.OptionalTensorList, V.DoubleList, V.BoolList)
_MOST_ITEMS = 1 << 22  # of lists that instructions read


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
        values: what the values of the plan are in the graph.
        delegate_states: the values of each delegate that stay on the device between calls.
    """

    def __init__(
        self, program: PteProgram, plan: P.ExecutionPlan, sizes: InputSizes | None
    ) -> None:
        self.program, self.plan = program, plan
        self.values = PlanValues(program, plan, sizes)
        self.where = self.values.where
        self.delegate_states: dict[int, dict[int, Value]] = {}

    @property
    def importer(self) -> Importer:
        """What takes the nodes; that of a sub-graph inside of control flow."""
        return self.values.importer

    def run(self) -> Graph:
        for number in self.plan.inputs:
            self.values.set(number, self.values.input(number))
        record = call_record.find(self.plan)
        if record is not None:
            call_record.apply(record, self.importer, len(self.plan.outputs), self.where)
        if len(self.plan.chains) != 1:
            self.values.refuse(
                "control flow", f"{len(self.plan.chains)} chains of instructions; one is accepted"
            )
        self._check_lists()
        self._steps(structure(self.plan, self.where))
        return self.importer.finish([self.values.arg(n) for n in self.plan.outputs])

    def _check_lists(self) -> None:
        """Raises if instructions read lists over and over: a list of some bytes per instruction."""
        lists = {
            number: len(value.items)
            for number, value in enumerate(self.plan.values)
            if isinstance(value, _LISTS)
        }
        count = sum(
            lists.get(number, 0)
            for instruction in self.plan.chains[0].instructions
            if isinstance(instruction, (P.KernelCall, P.DelegateCall))
            for number in instruction.args
        )
        if count > _MOST_ITEMS:
            self.values.refuse(
                "a program", f"it reads {count} items of lists; at most {_MOST_ITEMS}"
            )

    # -- control flow -----------------------------------------------------------------------------
    def _steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Choice):
                self._choice(step)
            elif isinstance(step, Loop):
                self._loop(step)
            else:
                self._instruction(step)
            check_nodes(len(self.importer.nodes), self.where)

    def _instruction(self, position: int) -> None:
        match self.plan.chains[0].instructions[position]:
            case P.KernelCall(op_index, args):
                operator = self.plan.operators[op_index]
                self._kernel(operator, args, f"{self.plan.name}#{position} {operator}")
            case P.DelegateCall() as call:
                self._delegate(call)
            case P.MoveCall(source, target):
                self.values.set(target, self.values.arg(source))

    @functools.cached_property
    def delegate_calls(self) -> DelegateCalls:
        return DelegateCalls(self.program, self.plan)

    @functools.cached_property
    def uses(self) -> Uses:
        return Uses(self.plan, self.delegate_calls.writes)

    def _touched(self, steps: Sequence[Step]) -> Iterable[int]:
        """The values that instructions inside of steps read or write."""
        return self.uses.touched_by(list(instructions_of(steps)))

    def _choice(self, step: Choice) -> None:
        condition = self.values.arg(step.condition)
        if isinstance(condition, bool):
            self._steps(step.true if condition else step.false)
            return
        parts = (step.true, step.false)
        written = self.uses.written_by([at for part in parts for at in instructions_of(part)])
        outputs = [
            n
            for n in self.uses.wanted_outside(sorted(written), step.first, step.last)
            if n not in self.values.states
        ]

        def walk(part: Sequence[Step]) -> control.Walk:
            def run(region: control.Region, _: tuple[Arg, ...]) -> list[Arg]:
                with self.values.inside(region, self._touched(part)):
                    self._steps(part)
                    for number in outputs:
                        if number not in self.values.env:
                            self.values.env[number] = (
                                region.take(around[number])
                                if number in around
                                else self.values.nothing(number)
                            )
                    return [self.values.env[number] for number in outputs]

            return run

        around = self.values.env
        source = f"{self.plan.name}#{step.first} choice"
        results = control.cond(self.importer, condition, [walk(part) for part in parts], (), source)
        for number, value in zip(outputs, results):
            self.values.set(
                number,
                self.importer.element(value, 0)
                if isinstance(self.plan.values[number], V.Int)
                else value,
            )

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
            if (
                name == "aten::select_copy"
                and self.values.arg(args[1]) == 0
                and args[2] == step.counter
            ):
                rows[at] = _ScannedRow(args[0], args[-1])
            elif name == "executorch_prim::et_copy_index" and args[2] == step.counter:
                stacked.append(args[0])
            else:
                self.values.refuse("a loop", f"instruction {at} uses its counter")
        if not rows:
            self.values.refuse(
                "a loop", f"instructions {step.first} to {step.last} walk over no tensor"
            )
        written = self.uses.written_by(inside)
        carried = [
            n
            for n in sorted(written)
            if n in self.values.env and n not in self.values.states and n not in stacked
        ]
        plain = tuple(inner_step for inner_step in step.steps if inner_step not in rows)

        def walk(region: control.Region, args: tuple[Arg, ...]) -> list[Arg]:
            with self.values.inside(region, self._touched(plain)):
                inputs = (*carried, *(scanned.row for scanned in rows.values()))
                for number, value in zip(inputs, args):
                    self.values.set(number, value)
                self._steps(plain)
                return [self.values.env[number] for number in (*carried, *stacked)]

        tensors = [self.values.arg(scanned.tensor) for scanned in rows.values()]
        source = f"{self.plan.name}#{step.first} loop"
        results = control.scan(
            self.importer,
            walk,
            [self.values.env[number] for number in carried],
            tensors,
            (),
            source,
        )
        for number, value in zip((*carried, *stacked), results):
            self.values.set(number, value)

    # -- instructions -----------------------------------------------------------------------------
    def _kernel(self, operator: P.Operator, args: Sequence[int], source: str) -> None:
        space, _, name = operator.name.partition("::")
        if name.startswith("sym_size") or name == "sym_numel":
            tensor = self.values.arg(args[0])
            self.values.env[args[-1]] = (
                tensor.type.numel
                if name == "sym_numel"
                else tensor.type.dims[self.values.arg(args[1])]
            )
            return
        if space == "executorch_prim":
            self._prim(name, args, source)
            return
        if name in ("_local_scalar_dense", "item"):
            self.values.env[args[-1]] = numbers.item(
                self.importer, self.values.arg(args[0]), source
            )
            return
        full = plan_name(operator.name, operator.overload)
        outputs = kernel_outputs(self.plan, args)
        inputs: Any = [
            self.values.arg(number) for number in kernel_inputs(self.plan, operator, args)
        ]
        out_arguments = OUT_ARGUMENTS.get(f"{space}.{name}.{operator.overload}")
        if out_arguments is not None:
            inputs = dict(zip(out_arguments, inputs))
        tensors = [self.plan.values[number] for number in outputs]
        recorded = [self.values.recorded(tensor) for tensor in tensors]
        dynamic = [
            isinstance(tensor, P.Tensor) and tensor.dynamism is not P.ShapeDynamism.STATIC
            for tensor in tensors
        ]
        if name == "copy_" and not self._is_buffer(outputs[0]):
            self.values.set(outputs[0], self.importer.cast(inputs[1], recorded[0].dtype, source))
            return
        if name == "copy_" or (
            name == "copy" and isinstance(self.values.existing(outputs[0]), Value)
        ):
            self._store(outputs[0], inputs, source)
            return
        results = self.importer.emit(full, inputs, recorded, dynamic, source)
        for number, value in zip(outputs, results):
            present = self.values.existing(number)
            if isinstance(present, Value) and present in self.importer.states:
                self.importer.emit("purevk.store", (present, value), [], [], source)
            elif isinstance(self.plan.values[number], V.Int):
                self.values.env[number] = self.importer.element(value, 0)
            else:
                if not isinstance(self.plan.values[number], P.Tensor):
                    self.importer.numbers.add(value)
                self.values.set(number, value)

    def _is_buffer(self, number: int) -> bool:
        """Whether a tensor that is copied into is a state. It is one if it was read as a state, if it
        has initial bytes, or if nobody reads the copy."""
        value = self.plan.values[number]
        if number in self.values.states or (isinstance(value, P.Tensor) and value.has_data):
            return True
        if (
            number in self.values.env
            or not isinstance(value, P.Tensor)
            or number in self.plan.outputs
        ):
            return False
        touching = [at for at, touched in enumerate(self.uses.touched) if number in touched]
        if len(touching) > 1:
            return False
        self.values.state(number, value)
        return True

    def _store(self, target: int, inputs: Sequence[Any], source: str) -> None:
        state, new = self.values.existing(target), inputs[1]
        if not isinstance(state, Value) or state not in self.importer.states:
            self.values.refuse(
                "a copy into a tensor that is no buffer", f"value {target} at {source}"
            )
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

    def _prim(self, name: str, args: Sequence[int], source: str) -> None:
        if name == "et_view":
            view = self.importer.emit(
                "aten.view.default",
                [self.values.arg(args[0]), self.values.arg(args[1])],
                [],
                [],
                source,
            )[0]
            self.values.set(args[-1], view)
        elif name == "et_copy_index":
            # The loop stacks the values of its iterations.
            self.values.env[args[0]] = self.values.arg(args[1])
        elif name in INTEGER_OPERATORS:
            op, operands = INTEGER_OPERATORS[name], [self.values.arg(n) for n in args[:-1]]
            number = numbers.arithmetic(self.importer, op, operands, source)
            self.values.env[args[-1]] = (
                indicator(*number.sides) if isinstance(number, Relation) else number
            )
        else:
            self.values.refuse(f"executorch_prim::{name}", f"at {source}")

    def _delegate(self, call: P.DelegateCall) -> None:
        index = call.delegate_index
        delegate = self.plan.delegates[index]
        if delegate.id != "VulkanBackend":
            self.values.refuse(
                f"a delegate of {delegate.id}",
                f"delegate {index}; only VulkanBackend is accepted",
                "export the model with executorch's VulkanPartitioner alone",
            )
        graph, args = self.delegate_calls.graphs[index], self.delegate_calls.arguments(call)
        states = self.delegate_states.setdefault(index, {})
        inner = VulkanDelegate(self.importer, self.program, graph, f"delegate {index}", states)
        results = inner.run([self.values.arg(number) for number in args.inputs], args.buffers)
        for number, output in args.outputs:
            value = results[output]
            expected = self.plan.values[number]
            if isinstance(expected, P.Tensor) and isinstance(value, Value):
                value = self.importer.cast(
                    value, self.values.dtype(expected), f"delegate {index} output"
                )
            elif isinstance(expected, P.Tensor) and isinstance(value, (int, Dim)):
                value = self.importer.emit(
                    "aten.full.default",
                    ((1,) * len(expected.sizes), value, self.values.dtype(expected)),
                    [],
                    [],
                    f"delegate {index} output",
                )[0]
            self.values.set(number, value)
