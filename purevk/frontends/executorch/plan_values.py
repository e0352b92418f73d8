"""What each value of a method's plan is in the graph: tensors, states, numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends import control, numbers
from purevk.frontends.executorch.control_flow import address_of
from purevk.frontends.executorch.plan_arguments import read_numbers
from purevk.frontends.importer import Importer, InputSizes
from purevk.ir import Label, TensorType, Value
from purevk.pte import types as P
from purevk.pte import values as V
from purevk.pte.program import Program as PteProgram


class PlanValues:
    """The values of a plan, while its instructions are walked.

    Attributes:
        importer: takes the nodes; that of a sub-graph inside of control flow.
        env: what each value of the plan is in the graph, by its number.
        states: values that stay on the device between calls.
        last_written: the value that was last written to each address in the arenas.
    """

    def __init__(
        self, program: PteProgram, plan: P.ExecutionPlan, sizes: InputSizes | None
    ) -> None:
        self.program, self.plan = program, plan
        self.where = f"{program.name}, method {plan.name}"
        self.importer = Importer(plan.name, self.where, sizes)
        self.env: dict[int, Any] = {}
        self.states: dict[int, Value] = {}
        self.last_written: dict[tuple[int, int], int] = {}
        self._read = read_numbers(plan)

    def set(self, number: int, value: Any) -> None:
        """Notes that a value is written."""
        self.env[number] = value
        address = address_of(self.plan.values[number])
        if address is not None:
            self.last_written[address] = number

    def arg(self, number: int) -> Any:
        """What a value is in the graph where an instruction reads it."""
        if number in self.env:
            return self.env[number]
        value = self.plan.values[number]
        if isinstance(value, P.Tensor):
            data = self.program.tensor_data(value) if value.is_constant else None
            if data is not None:
                return self.importer.constant(
                    data, TensorType(self.dtype(value), self._sizes(value))
                )
            if value.has_data or number in self.states:
                return self.state(number, value)
            alias = self._alias(number)
            if alias is not None:
                given = self.env[alias]
                return self.importer.emit(
                    "aten.view.default", (given, value.sizes), [], [], f"value {number}"
                )[0]
            if value.allocation is not None and value.dynamism is P.ShapeDynamism.STATIC:
                # A buffer without initial bytes. ExecuTorch leaves them undefined; here they are 0.
                return self.state(number, value)
            raise FileFormatError(f"value {number} is read before it is written", where=self.where)
        return self.plain(value)

    def input(self, number: int) -> Any:
        """What an input of the method is in the graph; a new input, mostly."""
        value = self.plan.values[number]
        if isinstance(value, P.Tensor):
            dtype = self.dtype(value)
            if value.has_data and value.allocation is not None:
                return self.state(number, value)
            return self.importer.input(
                dtype, value.sizes, value.dynamism is not P.ShapeDynamism.STATIC
            )
        if isinstance(value, V.Int) and number in self._read:
            return self.importer.integer_input(value.value)
        plain = self.plain(value)
        self.importer.fixed_input(plain)
        return plain

    def existing(self, number: int) -> Any:
        """What a value is before an instruction writes it; None if it is nothing yet."""
        value = self.plan.values[number]
        if (
            number not in self.env
            and isinstance(value, P.Tensor)
            and value.has_data
            and value.allocation is not None
        ):
            return self.state(number, value)
        if number in self.states:
            return self.states[number]
        return self.env.get(number)

    def plain(self, value: Any) -> Any:
        """A value that is no tensor: a number, a string, None or a list."""
        match value:
            case V.Null():
                return None
            case V.Int() | V.Bool() | V.Double() | V.String():
                return value.value
            case P.BoxedIntList() | P.TensorList():
                return tuple(self.arg(item) for item in value.items)
            case P.OptionalTensorList():
                return tuple(None if item < 0 else self.arg(item) for item in value.items)
            case V.DoubleList() | V.BoolList():
                return tuple(value.items)
        raise FileFormatError(
            f"a value of kind {type(value).__name__} is given for an argument",
            where=self.where,
        )

    def recorded(self, value: Any) -> TensorType:
        """The type of a result. Numbers are tensors without dims."""
        if isinstance(value, P.Tensor):
            return TensorType(self.dtype(value), value.sizes)
        kind = {V.Int: int, V.Bool: bool, V.Double: float}.get(type(value))
        if kind is None:
            raise FileFormatError(
                f"a value of kind {type(value).__name__} is given for a result",
                where=self.where,
            )
        return numbers.NUMBERS[kind]

    def nothing(self, number: int) -> Any:
        """What a value holds that only the other branch writes."""
        value = self.plan.values[number]
        if not isinstance(value, P.Tensor):
            return self.plain(value)
        return self.importer.emit(
            "aten.full.default",
            (value.sizes, 0, self.dtype(value)),
            [],
            [],
            f"value {number} before it is written",
        )[0]

    @contextlib.contextmanager
    def inside(self, region: control.Region, touched: Iterable[int]) -> Iterator[None]:
        """A context in which nodes go to a region. The values that its steps touch are taken from
        around it."""
        saved = self.importer, self.env, self.last_written
        env: dict[int, Any] = {}
        for number in touched:
            source = number if number in self.env else self._alias(number)
            if source is not None:
                env[source] = region.take(self.env[source])
        self.importer, self.env, self.last_written = region.importer, env, dict(self.last_written)
        try:
            yield
        finally:
            self.importer, self.env, self.last_written = saved

    def _alias(self, number: int) -> int | None:
        """The value that was written to the memory of `number`, which itself nobody writes. Views
        without a copy share the bytes of their base like this."""
        if number < 0 or number in self.env:
            return None
        tensor = self.plan.values[number]
        address = address_of(tensor)
        writer = None if address is None else self.last_written.get(address)
        if writer is None or writer not in self.env:
            return None
        value = self.plan.values[writer]
        if not isinstance(value, P.Tensor) or not isinstance(tensor, P.Tensor):
            return None
        same = (value.numel, value.scalar_type) == (tensor.numel, tensor.scalar_type)
        return writer if same else None

    def state(self, number: int, tensor: P.Tensor) -> Value:
        """A tensor that stays on the device between calls."""
        if number not in self.states:
            data = self.program.tensor_data(tensor)
            type = TensorType(self.dtype(tensor), self._sizes(tensor))
            self.states[number] = self.importer.state(data, type, self._label(number, tensor))
        self.set(number, self.states[number])
        return self.states[number]

    def _label(self, number: int, tensor: P.Tensor) -> Label:
        """The name of a state. Methods share the buffers in an arena above 1, by their address."""
        address = tensor.allocation
        if address is None or address.memory_id <= 1:
            return Label(tensor.name or f"buffer_{number}")
        arena, offset = address.memory_id, address.offset
        return Label(tensor.name or f"arena_{arena}.{offset}", f"arena {arena} at {offset}")

    def dtype(self, tensor: P.Tensor) -> DType:
        """The element type; refuses one that purevk does not have."""
        if tensor.dtype is None:
            self.refuse(f"dtype {tensor.dtype_name}", "purevk has no such element type")
        return tensor.dtype

    def _sizes(self, tensor: P.Tensor) -> tuple[int, ...]:
        if tuple(tensor.dim_order) != tuple(range(len(tensor.sizes))) and tensor.has_data:
            self.refuse("a constant with another dim order", f"order {tensor.dim_order}")
        return tensor.sizes

    def refuse(self, what: str, why: str, next: str = "") -> NoReturn:
        """Raises `UnsupportedProgramError` for something in the method."""
        raise UnsupportedProgramError(f"{what} cannot be run", where=self.where, why=why, next=next)
