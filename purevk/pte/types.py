"""What a .pte file says, as plain frozen data: values, instructions, methods."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.plain_text import printable
from purevk.pte.values import Bool, BoolList, Double, DoubleList, Int, Null, String

VULKAN_BACKEND = "VulkanBackend"


# ExecuTorch's ScalarType codes: name and bytes per element. purevk computes with fewer (DType).
SCALAR_TYPES: Mapping[int, tuple[str, int]] = {
    0: ("uint8", 1),
    1: ("int8", 1),
    2: ("int16", 2),
    3: ("int32", 4),
    4: ("int64", 8),
    5: ("float16", 2),
    6: ("float32", 4),
    7: ("float64", 8),
    8: ("complex32", 4),
    9: ("complex64", 8),
    10: ("complex128", 16),
    11: ("bool", 1),
    12: ("qint8", 1),
    13: ("quint8", 1),
    14: ("qint32", 4),
    15: ("bfloat16", 2),
    16: ("quint4x2", 1),
    17: ("quint2x4", 1),
    22: ("bits16", 2),
    23: ("float8_e5m2", 1),
    24: ("float8_e4m3fn", 1),
    25: ("float8_e5m2fnuz", 1),
    26: ("float8_e4m3fnuz", 1),
    27: ("uint16", 2),
    28: ("uint32", 4),
    29: ("uint64", 8),
}


class ShapeDynamism(enum.IntEnum):
    """Whether a tensor's sizes may change: never, up to the stored sizes, or without a bound."""

    STATIC = 0
    BOUNDED = 1
    UNBOUNDED = 2


class DataLocation(enum.IntEnum):
    """Where a delegate's blob is: inside the flatbuffer, or in a segment of the file."""

    INLINE = 0
    SEGMENT = 1


class Allocation(NamedTuple):
    """The address of a tensor: `offset` bytes into arena `memory_id` (1 is the first)."""

    memory_id: int
    offset: int


class Tensor(NamedTuple):
    """A tensor of a plan.

    `sizes` are upper bounds if `dynamism` is BOUNDED. `dim_order` lists the dims from the outermost
    in memory to the innermost. `data_index` is the number of its bytes in the program (0: none).
    With `external`, the bytes are in a data file under the key `name`.
    """

    scalar_type: int
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...]
    dynamism: ShapeDynamism
    data_index: int
    allocation: Allocation | None
    requires_grad: bool = False
    layout: int = 0
    mutable_segment: int = 0
    name: str = ""
    external: bool = False
    device_type: int = 0
    device_index: int = 0

    @property
    def dtype(self) -> DType | None:
        """The element type, or None if purevk does not compute with it."""
        return DType.from_pte(self.scalar_type)

    @property
    def dtype_name(self) -> str:
        """Name of the element type, also of those that `dtype` does not have."""
        return SCALAR_TYPES[self.scalar_type][0]

    @property
    def numel(self) -> int:
        """Elements at the stored sizes."""
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes at the stored sizes."""
        return self.numel * SCALAR_TYPES[self.scalar_type][1]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements, from `sizes` and `dim_order`."""
        strides, step = [0] * len(self.sizes), 1
        for dim in reversed(self.dim_order):
            strides[dim] = step
            step *= max(self.sizes[dim], 1)
        return tuple(strides)

    @property
    def has_data(self) -> bool:
        """The file (or a data file) holds bytes for it: a constant, or a first value."""
        return self.external or self.data_index > 0

    @property
    def is_constant(self) -> bool:
        """The bytes never change. With data and an allocation it is a mutable tensor with a first
        value."""
        return self.has_data and self.allocation is None


class BoxedIntList(NamedTuple):
    """Integers of a plan, each given as the index of the value that holds it at run time."""

    items: tuple[int, ...]


class TensorList(NamedTuple):
    """Tensors, each given as the index of its value."""

    items: tuple[int, ...]


class OptionalTensorList(NamedTuple):
    """Tensors or None, each given as the index of its value; -1 is None."""

    items: tuple[int, ...]


EValue = (
    Null
    | Int
    | Bool
    | Double
    | Tensor
    | String
    | BoxedIntList
    | DoubleList
    | BoolList
    | TensorList
    | OptionalTensorList
)


class Operator(NamedTuple):
    """An operator of the plan, such as `aten::add` with overload `out`."""

    name: str
    overload: str

    def __str__(self) -> str:
        return printable(f"{self.name}.{self.overload}" if self.overload else self.name)


class KernelCall(NamedTuple):
    """Run operator `op_index` on the values `args`; the last args are its outputs."""

    op_index: int
    args: tuple[int, ...]


class DelegateCall(NamedTuple):
    """Run delegate `delegate_index`; `args` are its inputs in its own order, then its outputs."""

    delegate_index: int
    args: tuple[int, ...]


class MoveCall(NamedTuple):
    """Value `target` becomes value `source`."""

    source: int
    target: int


class JumpFalse(NamedTuple):
    """Go to instruction `destination` of the same chain if value `condition` is false (for a
    tensor: any element)."""

    condition: int
    destination: int


class Free(NamedTuple):
    """The tensor `value` is not needed any more."""

    value: int


Instruction = KernelCall | DelegateCall | MoveCall | JumpFalse | Free


class Frame(NamedTuple):
    """One line of the stack trace of an instruction."""

    filename: str
    lineno: int
    name: str
    context: str


class Chain(NamedTuple):
    """Instructions that run in order. `inputs` and `outputs` are empty in practice: see the
    plan's."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    stacktrace: tuple[tuple[Frame, ...], ...] = ()


class CompileSpec(NamedTuple):
    """An option that a delegate was compiled with; what `value` means depends on `key`."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Delegate:
    """A compiled part of a method, for backend `id`. `Program.delegate_data` gives its blob."""

    id: str
    location: DataLocation
    index: int
    compile_specs: tuple[CompileSpec, ...] = ()


class ArenaDevice(NamedTuple):
    """The device that an arena is meant for; arenas without a row are the CPU's."""

    arena: int
    device_type: int
    device_index: int


class ExecutionPlan(NamedTuple):
    """One method. All indices refer to `values`, `operators`, `delegates` of the same plan and are
    in range.

    `arena_sizes[k]` is the size in bytes of the arena with memory_id k; slot 0 is not used.
    `input_structure` and `output_structure` are the encoded pytree specs of the method's arguments
    and result.
    """

    name: str
    values: tuple[EValue, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    chains: tuple[Chain, ...]
    operators: tuple[Operator, ...]
    delegates: tuple[Delegate, ...]
    arena_sizes: tuple[int, ...]
    arena_devices: tuple[ArenaDevice, ...] = ()
    input_structure: str = ""
    output_structure: str = ""


class Segment(NamedTuple):
    """A part of the file after the flatbuffer: absolute `offset` and `size` in bytes, inside the
    file."""

    offset: int
    size: int


class Subsegments(NamedTuple):
    """Data items in one segment: `offsets[i]` is where item i starts. Item 0 is reserved; sizes are
    not stored."""

    segment_index: int
    offsets: tuple[int, ...]
