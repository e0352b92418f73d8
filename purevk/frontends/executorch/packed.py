"""Quantized constants of .ptn files, in the form that the kernels of quantized weights read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from purevk.dtypes import DType
from purevk.errors import UnsupportedProgramError
from purevk.frontends.importer import Importer
from purevk.frontends.result_types import Recorded
from purevk.ir import TensorType, Value
from purevk.ir.graph import BorrowedConstant
from purevk.mapped import address_of, own
from purevk.pte import blocks
from purevk.pte.blocks import BlockType
from purevk.pte.native import Affine, Binding
from purevk.pte.safetensors import StoredTensor

_FLOATS = (DType.float32, DType.float16)  # what kernels of quantized weights compute with


class PackedWeight(NamedTuple):
    """A quantized constant: values of `bits` bits [rows, bytes], as `purevk.quantized_linear` reads
    them; scales and minimums [rows, groups]. `sizes` are those of what it stands for."""

    name: str
    values: Value
    scales: Value
    minimums: Value | None
    bits: int
    group: int
    sizes: tuple[int, ...]


def packed_weight(importer: Importer, binding: Binding) -> PackedWeight:
    """The values of a quantized constant of a file."""
    sizes, stored = tuple(least for least, _ in binding.type.sizes), binding.initial
    assert stored is not None
    rows = prod(sizes[:-1])
    if isinstance(binding.packing, Affine):
        parts = _affine(importer, binding.key, binding.packing, stored, rows)
        return PackedWeight(binding.key, *parts, binding.packing.bits, binding.packing.group, sizes)
    assert binding.packing is not None
    form = blocks.FORMS[binding.packing.name]
    parts = _blocks(importer, binding.key, binding.packing, stored, rows)
    return PackedWeight(binding.key, *parts, form.bits, form.group, sizes)


def _affine(
    importer: Importer, key: str, packing: Affine, stored: StoredTensor, rows: int
) -> tuple[Value, Value, Value | None]:
    def emit(op: str, *args: Any) -> Value:
        return importer.emit(f"aten.{op}", args, [], [], key)[0]

    def parameters(tensor: StoredTensor, name: str) -> Value:
        type = TensorType(tensor.dtype, (rows, prod(tensor.sizes) // rows))
        return importer.constant(tensor.data, type, f"{key}.{name}")

    type = TensorType(DType.uint8, (rows, len(stored.data) // rows))
    values, scales = importer.constant(stored.data, type, key), parameters(packing.scales, "scale")
    if packing.bits == 8:
        wide = importer.cast(values, DType.int32, key)
        values = importer.cast(emit("sub.Scalar", wide, 128), DType.int8, key)
    if packing.zeros is None and packing.least == -(1 << packing.bits - 1):
        return values, scales, None
    scales = importer.cast(scales, DType.float32, key)
    if packing.zeros is None:
        return values, scales, emit("mul.Scalar", scales, packing.least)
    zeros = importer.cast(parameters(packing.zeros, "zero_point"), DType.float32, key)
    return values, scales, emit("mul.Tensor", emit("rsub.Scalar", zeros, packing.least), scales)


def _blocks(
    importer: Importer, key: str, kind: BlockType, stored: StoredTensor, rows: int
) -> tuple[Value, Value, Value | None]:
    """Blocks are repacked when a device needs them."""
    form = blocks.FORMS[kind.name]

    def unpacked() -> np.ndarray:
        return np.frombuffer(own(stored.data), np.uint8).reshape(-1, kind.nbytes)

    def constant(name: str, dtype: DType, read: Callable[[], np.ndarray]) -> Value:
        count = len(stored.data) // kind.nbytes * kind.elements // rows
        width = count * form.bits // 8 if name == "values" else count // form.group
        type = TensorType(dtype, (rows, width))
        data = BorrowedConstant(
            (address_of(stored.data), name),
            type.nbytes,
            lambda: np.ascontiguousarray(read()).reshape(-1).view(np.uint8).data,
        )
        return importer.constant(data, type, f"{key}.{name}")

    none = np.zeros((0, kind.nbytes), np.uint8)
    parts = {
        name: constant(
            name,
            DType.float16 if array.dtype == np.float16 else DType.float32,
            functools.partial(lambda name: blocks.scales(kind.name, unpacked(), True)[name], name),
        )
        for name, array in blocks.scales(kind.name, none, True).items()
    }
    dtype = DType.uint8 if form.bits == 4 else DType.int8
    values = constant("values", dtype, lambda: blocks.weight(kind.name, unpacked()))
    return values, parts["scales"], parts.get("minimums")


def emit_packed(
    importer: Importer,
    op: str,
    args: Sequence[Any],
    dtype: DType | None,
    recorded: Sequence[Recorded],
    dynamic: Sequence[bool],
    source: str,
) -> tuple[Value, ...]:
    """Appends a node that reads quantized constants: linear layers and embeddings as they are, other
    operators in `dtype`, that of the result."""

    def emit(op: str, *args: Any) -> tuple[Value, ...]:
        return importer.emit(op, args, recorded, dynamic, source)

    first, second, third = (*args, None, None, None)[:3]
    if op == "aten.embedding.default" and _is_matrix(first) and dtype in _FLOATS:
        parts = (first.scales, second, dtype, first.bits, first.minimums)
        return emit("purevk.quantized_table", first.values, *parts)
    if op == "aten.linear.default" and isinstance(first, Value) and _is_matrix(second):
        rows = second.values.type.dims[:1]
        has_rows = third is None or (isinstance(third, Value) and third.type.dims == rows)
        if has_rows and first.type.dtype in _FLOATS:
            parts = (second.scales, second.group, third, second.bits, second.minimums)
            return emit("purevk.quantized_linear", first, second.values, *parts)
    return emit(op, *[_dense(importer, arg, dtype, source) for arg in args])


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, PackedWeight) and len(weight.sizes) == 2


def _dense(importer: Importer, weight: Any, dtype: DType | None, source: str) -> Any:
    """What a quantized constant stands for; other arguments as they are."""
    if not isinstance(weight, PackedWeight):
        return weight
    if dtype not in (*_FLOATS, DType.bfloat16):
        raise UnsupportedProgramError(
            f"{source} reads the quantized constant {weight.name!r}",
            where=importer.where,
            why="its result has no dtype that the constant could have",
            next="export the model without quantization of this constant",
        )
    count = weight.values.type.dims[0]
    rows = importer.emit("aten.arange.default", (count,), [], [], source)[0]
    table_dtype = dtype if dtype in _FLOATS else DType.float32
    parts = (weight.scales, rows, table_dtype, weight.bits, weight.minimums)
    table = importer.emit("purevk.quantized_table", (weight.values, *parts), [], [], source)[0]
    table = importer.cast(table, dtype, source)
    return importer.emit("aten.view.default", (table, weight.sizes), [], [], source)[0]
