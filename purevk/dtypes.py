"""Element types: one row each, with their names in torch, numpy, ExecuTorch's files and GLSL."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Row:
    torch: str  # attribute of the torch module
    itemsize: int  # bytes
    numpy: type | None  # None: numpy has no such type; the bits travel as integers
    glsl: str  # type of one element in a storage buffer
    acc: str  # type that arithmetic is done in
    pte: int  # executorch ScalarType
    vk: int | None  # VkDataType of the ET-VK delegate


class DType(enum.Enum):
    """An element type.

    Attributes:
        itemsize: bytes per element.
        numpy: the numpy type whose bytes are the same (uint16 for bfloat16, uint8 for 8-bit floats,
            uint32 for complex32).
        glsl: GLSL type of one element in a storage buffer.
        acc: GLSL type that arithmetic on elements is done in.
    """

    bool = _Row("bool", 1, np.bool_, "uint8_t", "bool", 11, 0)
    uint8 = _Row("uint8", 1, np.uint8, "uint8_t", "int", 0, 1)
    int8 = _Row("int8", 1, np.int8, "int8_t", "int", 1, 2)
    int16 = _Row("int16", 2, np.int16, "int16_t", "int", 2, None)
    int32 = _Row("int32", 4, np.int32, "int", "int", 3, 3)
    int64 = _Row("int64", 8, np.int64, "int64_t", "int64_t", 4, 7)
    float16 = _Row("float16", 2, np.float16, "float16_t", "float", 5, 4)
    float32 = _Row("float32", 4, np.float32, "float", "float", 6, 5)
    float64 = _Row("float64", 8, np.float64, "double", "double", 7, 6)
    bfloat16 = _Row("bfloat16", 2, None, "uint16_t", "float", 15, None)
    # Kernels see their bytes, see `passes/float8.py`.
    float8_e4m3fn = _Row("float8_e4m3fn", 1, None, "uint8_t", "int", 24, None)
    float8_e5m2 = _Row("float8_e5m2", 1, None, "uint8_t", "int", 23, None)
    float8_e4m3fnuz = _Row("float8_e4m3fnuz", 1, None, "uint8_t", "int", 26, None)
    float8_e5m2fnuz = _Row("float8_e5m2fnuz", 1, None, "uint8_t", "int", 25, None)
    # Kernels see them as pairs of floats. numpy has no complex32.
    complex32 = _Row("complex32", 4, None, "", "", 8, None)
    complex64 = _Row("complex64", 8, np.complex64, "", "", 9, None)
    complex128 = _Row("complex128", 16, np.complex128, "", "", 10, None)

    __hash__ = object.__hash__  # there is one of each; that of Enum is written in Python

    def __init__(self, row: _Row) -> None:
        self.itemsize = row.itemsize
        self.numpy: np.dtype = np.dtype(row.numpy or f"u{row.itemsize}")
        self.glsl, self.acc = row.glsl, row.acc

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return dtype_named, (self.name,)

    @property
    def is_float(self) -> bool_:
        return self in (DType.float16, DType.float32, DType.float64, DType.bfloat16)

    @property
    def is_float8(self) -> bool_:
        return self.name.startswith("float8")

    @property
    def has_numpy(self) -> bool_:
        """Whether numpy has this type, rather than just one of the same size."""
        return self.value.numpy is not None

    @property
    def is_complex(self) -> bool_:
        return self in _COMPONENTS

    @property
    def component(self) -> DType:
        """The dtype of the real and the imaginary part of complex numbers."""
        return _COMPONENTS[self]

    @property
    def complex_dtype(self) -> DType | None:
        """The dtype of complex numbers with parts of this dtype, if there is one."""
        return next((each for each, part in _COMPONENTS.items() if part is self), None)

    @property
    def is_int(self) -> bool_:
        return self in (DType.uint8, DType.int8, DType.int16, DType.int32, DType.int64)

    def __repr__(self) -> str:
        return self.name

    @classmethod
    def from_pte(cls, code: int) -> DType | None:
        """The type of an ExecuTorch `ScalarType` code, or None if purevk has no such type."""
        return _FROM_PTE.get(code)

    @classmethod
    def from_vk(cls, code: int) -> DType | None:
        """The type of an ET-VK `VkDataType` code, or None if purevk has no such type."""
        return _FROM_VK.get(code)

    @classmethod
    def from_numpy(cls, dtype: np.dtype) -> DType | None:
        """The type of a numpy dtype, or None if purevk has no such type."""
        return _FROM_NUMPY.get(np.dtype(dtype))

    @classmethod
    def from_torch(cls, dtype: object) -> DType | None:
        """The type of a `torch.dtype`, without importing torch; None if purevk has no such type."""
        if dtype not in _FROM_TORCH:
            _FROM_TORCH[dtype] = cls.__members__.get(str(dtype).removeprefix("torch."))
        return _FROM_TORCH[dtype]

    def bits_in_torch(self) -> torch.dtype:
        """The `torch.dtype` of unsigned integers of this size. Imports torch."""
        import torch

        found: torch.dtype = getattr(torch, f"uint{8 * self.itemsize}")
        return found

    def to_torch(self) -> torch.dtype:
        """The `torch.dtype`. Imports torch."""
        import torch

        found: torch.dtype = getattr(torch, self.value.torch)
        return found


bool_ = bool
_COMPONENTS = {
    DType.complex32: DType.float16,
    DType.complex64: DType.float32,
    DType.complex128: DType.float64,
}
_FROM_PTE = {member.value.pte: member for member in DType}
_FROM_VK = {member.value.vk: member for member in DType if member.value.vk is not None}
_FROM_TORCH: dict[object, DType | None] = {}  # filled when they are asked for
_FROM_NUMPY = {
    np.dtype(member.value.numpy): member for member in DType if member.value.numpy is not None
}


def dtype_named(name: str) -> DType:
    """The dtype of a name of torch, such as "float32"."""
    return DType[name]


class _Export:
    """A tensor as numpy asks for it. torch's own `__dlpack__` takes three times as long."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        from torch.utils import dlpack

        export: Any = dlpack
        return export.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def elements(tensor: Any, writable: bool = False) -> np.ndarray:
    """An array over the memory of a tensor on the CPU (of a dtype that numpy lacks: its bits).
    `Tensor.numpy` would make the storage one that cannot be resized, for good. It can still be, so
    no such array may outlive the call that makes it.

    Args:
        writable: else it is read-only, which takes less time. numpy before 2.1 makes no other.

    Raises:
        RuntimeError, TypeError, BufferError: the tensor has no elements in memory: it is sparse,
            quantized, conjugated or negated lazily, or stands for others.
    """
    if not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        raise RuntimeError("the elements are not in memory as they are")
    dtype = DType.from_torch(tensor.dtype)
    if dtype is not None and not dtype.has_numpy:
        tensor = tensor.view(dtype.bits_in_torch())
    given: Any = tensor.detach() if writable else _Export(tensor)
    array: np.ndarray = np.from_dlpack(given)
    return array if dtype is None or array.dtype == dtype.numpy else array.view(dtype.numpy)
