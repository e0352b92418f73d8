"""A method of a .pte file as one graph: its delegates and the kernels between them, in order."""

from __future__ import annotations

from typing import Any, Sequence

from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.importer import NUMBERS, Importer, settled
from purevk.frontends.names import INTEGER_OPERATORS, OUT_ARGUMENTS, is_out_variant, plan_name
from purevk.frontends.vulkan import VulkanDelegate
from purevk.ir import Dim, Graph, TensorType, Value
from purevk.pte import program as P
from purevk.pte import values as V


def read_method(program: P.Program, method: str = "forward", sizes: Sequence[tuple[int, ...] | None] | None = None) -> Graph:
    """The graph of one method.

    Args:
        program: the parsed file.
        method: name of the method.
        sizes: the sizes of the tensors of a call, by position, to specialize on; None: the file's bounds.

    Raises:
        UnsupportedProgramError: a delegate of another backend, or control flow.
        FileFormatError: the file contradicts itself.
    """
    return settled(lambda: _Plan(program, program.method(method), sizes).run())


class _Plan:
    def __init__(self, program: P.Program, plan: P.ExecutionPlan, sizes: Any) -> None:
        self.program, self.plan = program, plan
        self.where = f"{program.name}, method {plan.name}"
        self.importer = Importer(plan.name, self.where, sizes)
        self.env: dict[int, Any] = {}
        self.delegate_states: dict[int, dict[int, Value]] = {}

    def run(self) -> Graph:
        for number in self.plan.inputs:
            self.env[number] = self._input(number)
        if len(self.plan.chains) != 1:
            self._refuse("control flow", f"{len(self.plan.chains)} chains of instructions; one is accepted")
        for position, instruction in enumerate(self.plan.chains[0].instructions):
            match instruction:
                case P.KernelCall():
                    operator = self.plan.operators[instruction.op_index]
                    self._kernel(operator, instruction.args, f"{self.plan.name}#{position} {operator}")
                case P.DelegateCall():
                    self._delegate(instruction.delegate_index, instruction.args)
                case P.MoveCall():
                    self.env[instruction.target] = self._arg(instruction.source)
                case P.Free():
                    pass
                case P.JumpFalse():
                    self._refuse("control flow", f"instruction {position} is a jump")
        return self.importer.finish([self._output(number) for number in self.plan.outputs])

    # -- values -------------------------------------------------------------------------------------------------------
    def _input(self, number: int) -> Any:
        value = self.plan.values[number]
        if isinstance(value, P.Tensor):
            dtype = self._dtype(value)
            if value.has_data and value.allocation is not None:
                return self._state(number, value)
            return self.importer.input(dtype, value.sizes, value.dynamism is not P.ShapeDynamism.STATIC)
        if isinstance(value, V.Int):
            return self.importer.integer_input(value.value)
        self.importer.other_input()
        return self._plain(value)

    def _arg(self, number: int) -> Any:
        if number in self.env:
            return self.env[number]
        value = self.plan.values[number]
        if isinstance(value, P.Tensor):
            if value.is_constant:
                data = self.program.tensor_data(value)
                return self.importer.constant(data, TensorType(self._dtype(value), self._sizes(value)))
            if value.has_data:
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
        raise FileFormatError(f"a value of kind {type(value).__name__} stands where an argument is read", where=self.where)

    def _state(self, number: int, tensor: P.Tensor) -> Value:
        data = self.program.tensor_data(tensor)
        self.env[number] = self.importer.state(data, TensorType(self._dtype(tensor), self._sizes(tensor)))
        return self.env[number]

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

    # -- instructions -------------------------------------------------------------------------------------------------
    def _kernel(self, operator: P.Operator, args: Sequence[int], source: str) -> None:
        space, _, name = operator.name.partition("::")
        if name.startswith("sym_size") or name == "sym_numel":
            tensor = self._arg(args[0])
            self.env[args[-1]] = tensor.type.numel if name == "sym_numel" else tensor.type.dims[self._arg(args[1])]
            return
        if space == "executorch_prim":
            self._prim(name, args, source)
            return
        if name in ("_local_scalar_dense", "item"):
            self.env[args[-1]] = self.importer.item(self._arg(args[0]), source)
            return
        full = plan_name(operator.name, operator.overload)
        outputs = self._outputs(operator, args)
        inputs: Any = [self._arg(number) for number in args[: len(args) - self._trailing(operator, args, outputs)]]
        known = OUT_ARGUMENTS.get(f"{space}.{name}.{operator.overload}")
        if known is not None:
            inputs = dict(zip(known, inputs))
        tensors = [self.plan.values[number] for number in outputs]
        recorded = [self._recorded(tensor) for tensor in tensors]
        dynamic = [isinstance(tensor, P.Tensor) and tensor.dynamism is not P.ShapeDynamism.STATIC for tensor in tensors]
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
                self.env[number] = value

    def _recorded(self, value: Any) -> TensorType:
        """The type of a result; numbers are tensors without dims."""
        if isinstance(value, P.Tensor):
            return TensorType(self._dtype(value), value.sizes)
        kind = {V.Int: int, V.Bool: bool, V.Double: float}.get(type(value))
        if kind is None:
            raise FileFormatError(f"a value of kind {type(value).__name__} stands where a result is written", where=self.where)
        return NUMBERS[kind]

    def _existing(self, number: int) -> Any:
        value = self.plan.values[number]
        if number not in self.env and isinstance(value, P.Tensor) and value.has_data and value.allocation is not None:
            return self._state(number, value)
        return self.env.get(number)

    def _store(self, target: int, inputs: Sequence[Any], source: str) -> None:
        state, new = self._existing(target), inputs[1]
        if not isinstance(state, Value) or state not in self.importer.states:
            self._refuse("a copy into a tensor that is no buffer", f"value {target} at {source}")
        if new.type.dims != state.type.dims:
            new = self.importer.emit("aten.expand.default", (new, state.type.dims), [], [], source)[0]
        self.importer.emit("purevk.store", (state, self.importer.cast(new, state.type.dtype, source)), [], [], source)

    def _outputs(self, operator: P.Operator, args: Sequence[int]) -> list[int]:
        """Indices of the tensors that a kernel writes: the out arguments; several are repeated as a list at the end."""
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
            while own < len(outputs) and args[len(args) - 2 - own] == outputs[len(outputs) - 1 - own]:
                own += 1
            # An out argument that is itself a list (split, unbind) stands twice.
            repeated = int(own == 0 and len(args) > 1 and args[-2] == args[-1])
            return 1 + own + repeated
        count = 1
        while out and len(args) > count and args[-1 - count] == args[-1]:
            count += 1
        return count

    def _prim(self, name: str, args: Sequence[int], source: str) -> None:
        if name == "et_view":
            self.env[args[-1]] = self.importer.emit(
                "aten.view.default", [self._arg(args[0]), self._arg(args[1])], [], [], source
            )[0]
        elif name in INTEGER_OPERATORS:
            self.env[args[-1]] = self.importer.arithmetic(INTEGER_OPERATORS[name], [self._arg(n) for n in args[:-1]], source)
        else:
            self._refuse(f"executorch_prim::{name}", f"at {source}")

    def _delegate(self, index: int, args: Sequence[int]) -> None:
        delegate = self.plan.delegates[index]
        if delegate.id != "VulkanBackend":
            self._refuse(
                f"a delegate of {delegate.id}", f"delegate {index}; only VulkanBackend is accepted",
                "export the model with executorch's VulkanPartitioner alone",
            )  # fmt: skip
        graph = self.program.vulkan_graph(delegate)
        inputs, outputs = self._split(index, graph, args)
        states = self.delegate_states.setdefault(index, {})
        inner = VulkanDelegate(self.importer, self.program, graph, f"delegate {index}", states)
        results = inner.run([self._arg(number) for number in inputs], len(outputs))
        for number, value in zip(outputs, results):
            expected = self.plan.values[number]
            if isinstance(expected, P.Tensor) and isinstance(value, Value):
                value = self.importer.cast(value, self._dtype(expected), f"delegate {index} output")
            elif isinstance(expected, P.Tensor) and isinstance(value, (int, Dim)):
                value = self.importer.emit(
                    "aten.full.default", ((1,) * len(expected.sizes), value, self._dtype(expected)), [], [],
                    f"delegate {index} output",
                )[0]  # fmt: skip
            self.env[number] = value

    def _split(self, index: int, graph: Any, args: Sequence[int]) -> tuple[list[int], list[int]]:
        """The arguments of a delegate call are its inputs, then its outputs. The graph may have dropped inputs that are still
        passed, or have outputs of its own (mutated buffers) that are not."""
        takes, gives = len(graph.input_ids), len(graph.output_ids)
        first = max(len(args) - gives, min(takes, len(args)))
        return list(args[:first]), list(args[first:])

    def _refuse(self, what: str, why: str, next: str = "") -> None:
        raise UnsupportedProgramError(f"{what} cannot be run", where=self.where, why=why, next=next)
