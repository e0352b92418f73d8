"""What the kernels of quantized tensors expect of their operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, emit_copy
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4
from purevk.ops.registry import ShapeError
from purevk.tuning import DeviceTraits

INT8 = (-128, 127)  # the smallest and the largest quantized value


@dataclass(frozen=True)
class OutputQuantization:
    """How a kernel quantizes its result to int8.

    Attributes:
        scale: of the result.
        zero_point: of the result.
        low: the smallest quantized value that the result has.
    """

    scale: float
    zero_point: int
    low: int

    @classmethod
    def after(cls, activation: str, scale: float, zero_point: int) -> OutputQuantization:
        """The quantization of what an activation returns: "none", or "relu", after which no
        quantized value is below that of 0."""
        if activation not in ("none", "relu"):
            raise ShapeError(f"activation {activation!r} is neither 'none' nor 'relu'")
        low, _ = INT8
        return cls(scale, zero_point, max(zero_point, low) if activation == "relu" else low)


def output_params(out: OutputQuantization | None) -> dict[str, Size]:
    """The quantization of a result as the templates declare it; None: the result is no int8."""
    out = out or OutputQuantization(1.0, 0, INT8[0])
    return {
        "out_inverse": bits_of(inverse_scale(out.scale)),
        "out_zero": out.zero_point,
        "out_low": out.low,
    }


def inverse_scale(scale: float) -> float:
    """1 / scale as quantization multiplies by it: in double precision, then rounded to float32."""
    return float(np.float32(1.0 / scale))


# -- dtypes --------------------------------------------------------------------------------------
def refuse_dtypes(node: Node, *dtypes: DType) -> str | None:
    """The reason not to run a node that reads one of these dtypes; None if it reads none."""
    for value in node.inputs:
        if value.type.dtype in dtypes:
            return f"no kernel for {value.type.dtype.name}"
    return None


def supports(node: Node, traits: DeviceTraits) -> str | None:
    """Kernels take float32 and float16 beside quantized values."""
    return refuse_dtypes(node, DType.float64, DType.bfloat16)


# -- layouts -------------------------------------------------------------------------------------
def whole(lowering: Lowering, value: Value) -> Operand:
    """A dense operand at offset 0, for kernels without an offset parameter for it. A view is
    copied."""
    operand = lowering.operand(value)
    at_start = isinstance(operand.offset, int) and operand.offset == 0
    if at_start and operand.layout.is_contiguous(operand.dims):
        return operand
    return dense(lowering, operand)


def whole_or_none(lowering: Lowering, value: Value | None) -> Operand | None:
    """`whole` of an optional tensor."""
    return None if value is None else whole(lowering, value)


def has_dense_rows(operand: Operand) -> bool:
    """Whether the elements of a row of a matrix follow one another."""
    stride = operand.strides[1]
    return isinstance(stride, int) and stride == 1


def dense_rows(lowering: Lowering, operand: Operand) -> Operand:
    """A matrix with dense rows. Rows of bytes, such as quantized values, start at multiples of 4
    bytes."""
    rows, columns = operand.dims
    row_is_dense = has_dense_rows(operand) or (isinstance(columns, int) and columns == 1)
    one_row = isinstance(rows, int) and rows == 1
    known = isinstance(operand.offset, int)
    if operand.dtype.itemsize != 1:
        return operand if row_is_dense and known else dense(lowering, operand)
    pitch = columns if one_row else operand.strides[0]
    if row_is_dense and known and gcd4(operand.offset, pitch) and (not one_row or gcd4(columns)):
        return Operand(operand.storage, Layout(operand.offset, (pitch, 1)), operand.type)
    return aligned_rows(lowering, operand, 4)


def aligned_rows(lowering: Lowering, operand: Operand, multiple: int) -> Operand:
    """A copy of a matrix whose rows start at multiples of `multiple` elements. The elements between
    rows are undefined."""
    rows, columns = operand.dims
    pitch = _dims.align(columns, multiple)
    scratch = lowering.temporary(TensorType(operand.dtype, (rows, pitch)))
    copy = Operand(scratch.storage, Layout(0, (pitch, 1)), operand.type)
    emit_copy(lowering, operand, copy, label="layout")
    return copy


def split_rows(traits: DeviceTraits, matrix: TensorType) -> list[tuple[int, int]] | None:
    """The parts of a matrix of bytes, as first and last (exclusive) rows, if one binding cannot
    span all of it; None if one part does. Matrices with symbolic sizes are not split."""
    rows, pitch = matrix.dims
    if not isinstance(rows, int) or not isinstance(pitch, int):
        return None
    most = max(traits.max_storage_range // pitch // 64 * 64, 64)
    if rows <= most:
        return None
    return [(start, min(start + most, rows)) for start in range(0, rows, most)]


def texels_of(
    lowering: Lowering, tensors: Mapping[str, Operand | None], words: str
) -> dict[str, tuple[Operand, str]]:
    """Texel buffers in place of the operands of a kernel, where the device reads these faster; else
    none.

    Args:
        tensors: w, and what there is of a, scale and minimum. a is read as vectors of 4.
        words: the format of the words of w: "r32ui" or "rgba32ui".
    """
    texels: dict[str, tuple[Operand, str]] = {}
    for name in ("a", "scale", "minimum"):
        operand = tensors.get(name)
        if operand is not None:
            mode = lowering.texel(operand, name == "a")
            if not mode:
                return {}
            texels[name] = operand, f"r{mode}"
    weight = tensors["w"]
    assert weight is not None
    count = _dims.upper(weight.storage.type.nbytes) // (16 if words == "rgba32ui" else 4)
    return {**texels, "w": (weight, f"r:{words}")} if count <= lowering.traits.max_texels else {}
