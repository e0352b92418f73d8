"""Rows of quantized tables."""

from __future__ import annotations

from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import gcd4
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL
from purevk.ops.quantized.linear import by_rows
from purevk.ops.registry import Kernel, Operator, Rewrite, ShapeError, register

NAME = "purevk.quantized_embedding"
_PLACES = 2  # times 4 elements of an invocation of a GPU


def _shape(
    weight: TensorType,
    scales: TensorType,
    zeros: TensorType | None,
    indices: TensorType,
    bits: int = 8,
    high_first: bool = False,
    dtype: DType = REAL,
) -> TensorType:
    """weight [V, bytes], scales and zeros [V, groups]."""
    if weight.rank != 2 or scales.rank != 2:
        raise ShapeError(f"a table {weight} with scales {scales}")
    return TensorType(dtype, (*indices.dims, weight.dims[1] * 8 // bits))


def _lower(lowering: Lowering, node: Node) -> None:
    weight_value, scale_value, zero_value, index_value, bits, high_first, _ = node.args
    out = lowering.operand(node.result)
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    weight, index = lowering.operand(weight_value), lowering.operand(index_value)
    known = isinstance(weight.offset, int) and weight.offset % 4 == 0
    if not known or not (isinstance(weight.strides[1], int) and weight.strides[1] == 1):
        weight = dense(lowering, weight)
    count, width = _dims.product(index.dims), out.dims[-1]
    if not index.layout.is_contiguous(index.dims):
        index = dense(lowering, index)
    parameters = [
        dense(lowering, lowering.operand(v)) if _moved(lowering, v) else lowering.operand(v)
        for v in (scale_value, zero_value)
        if v is not None
    ]
    vector = gcd4(width, out.offset) and out.dtype in (DType.float32, DType.float16)
    rows, groups = weight.dims[0], parameters[0].dims[1]
    pitch, group = weight.strides[0], width // groups
    quads = (
        vector
        and gcd4(group)
        and all(_dims.gcd_of(each) % (bits // 2) == 0 for each in (pitch, weight.offset))
    )
    work = count * _dims.ceil_div(width, 4)
    places = lowering.items_per_thread(work, _PLACES) if quads else 1
    local = 64 if places == 1 else min(256, lowering.traits.max_invocations)
    macros: dict[str, Any] = {
        "INDEX_WORDS": index.dtype.itemsize // 4,
        "PLACES": places,
        "BITS": bits,
        "HIGH_FIRST": int(high_first),
        "QUADS": int(quads),
        "T_SCALE": parameters[0].dtype.glsl,
        "T_OUT": out.dtype.glsl,
        "ZEROS": int(zero_value is not None),
        "VEC4": int(vector),
    }
    if zero_value is not None:
        macros["T_ZERO"] = parameters[1].dtype.glsl
    if any(each.dtype.itemsize == 1 for each in parameters):
        macros["HAS_8BIT"] = "1"
    params: dict[str, Size] = {
        "count": count,
        "D": width,
        "rows": rows,
        "groups": groups,
        "group": group,
        "row_bytes": pitch,
        "index_step": 1,
        "offset_table": weight.offset,
        "offset_index": index.offset,
        "offset_out": out.offset,
    }
    read = (
        weight.dims[1]
        + groups * sum(each.dtype.itemsize for each in parameters)
        + index.dtype.itemsize
    )
    lowering.dispatch(
        "quantized/qembedding.comp",
        [(weight, "r"), *((each, "r") for each in parameters), (index, "r"), (out, "w")],
        macros=macros,
        params=params,
        specialize=lowering.fixed(params),
        constants={"local_size_x": local},
        grid=lowering.linear_grid(work, local * places),
        nbytes=count * (read + width * out.dtype.itemsize),
    )


def _moved(lowering: Lowering, value: Value) -> bool:
    operand = lowering.operand(value)
    return not (
        isinstance(operand.offset, int)
        and operand.offset == 0
        and operand.layout.is_contiguous(operand.dims)
    )


def supports(node: Node, traits: Any) -> str | None:
    """Indices are int32 or int64, scales float32 or float16."""
    for value in node.inputs:
        if value.type.dtype in (DType.float64, DType.int16):
            return f"no kernel for {value.type.dtype.name}"
    return None


register(Operator(NAME, _shape, Kernel(_lower, supports=supports)))


def emit_embedding(
    builder: Builder,
    weight: Value,
    scales: Value,
    zeros: Value | None,
    indices: Value,
    bits: int,
    high_first: bool,
    dtype: DType,
) -> Value:
    """Rows of a table as `dtype`; scales and zeros are [V] or [V, groups]."""
    rows, pitch = weight.type.dims
    scales = by_rows(builder, scales, rows)
    zeros = None if zeros is None else by_rows(builder, zeros, rows)
    most = (
        rows
        if not weight.type.is_static
        else max(builder.traits.max_storage_range // pitch // 64 * 64, 64)
    )
    if rows <= most:
        return builder.emit(NAME, weight, scales, zeros, indices, bits, high_first, dtype)
    # A table that one binding cannot span: each part gives its own rows, and a comparison picks
    # them.
    made, column = None, builder.emit("aten.unsqueeze.default", indices, -1)
    for start in range(0, rows, most):
        end = min(start + most, rows)
        parts = [
            None if v is None else builder.emit("aten.slice.Tensor", v, 0, start, end, 1)
            for v in (weight, scales, zeros)
        ]
        own = builder.emit("aten.sub.Tensor", indices, start, 1)
        found = builder.emit(NAME, *parts, own, bits, high_first, dtype)
        after = made and builder.emit("aten.ge.Tensor", column, start)
        made = found if made is None else builder.emit("aten.where.self", after, found, made)
    return made


def _table_shape(
    weight: TensorType, scales: TensorType, indices: TensorType, dtype: DType = REAL
) -> TensorType:
    return TensorType(dtype, (*indices.dims, weight.dims[1]))


def _expand_table(builder: Builder, node: Node) -> Value:
    weight, scales, indices, dtype = node.args
    return emit_embedding(builder, weight, scales, None, indices, 8, False, dtype)


# Rows of an int8 table with scales [V] or [V, groups].
register(Operator("purevk.quantized_table", _table_shape, Rewrite(_expand_table, supports)))


# -- et_vk ---------------------------------------------------------------------------------------
def _q4gsw_shape(
    weight: TensorType,
    weight_scales: TensorType,
    group_size: int,
    indices: TensorType,
    is_linear_weight: bool = False,
) -> TensorType:
    return TensorType(REAL, (*indices.dims, weight.dims[1] * 2))


def _expand_q4gsw(builder: Builder, node: Node) -> Value:
    weight, scales, _, indices, low_first = node.args
    return emit_embedding(
        builder, weight, scales, None, indices, 4, not low_first, node.result.type.dtype
    )


register(Operator("et_vk.embedding_q4gsw.default", _q4gsw_shape, Rewrite(_expand_q4gsw, supports)))


# -- quantized_decomposed ------------------------------------------------------------------------
def _register(name: str, bits: int) -> None:
    def shape(
        weight: TensorType,
        weight_scales: TensorType,
        weight_zero_points: TensorType | None,
        weight_quant_min: int,
        weight_quant_max: int,
        indices: TensorType,
        dtype: Any = None,
    ) -> TensorType:
        known = dtype if isinstance(dtype, DType) else weight_scales.dtype
        return TensorType(known, (*indices.dims, weight.dims[1] * 8 // bits))

    def expand(builder: Builder, node: Node) -> Value:
        weight, scales, zeros, _, _, indices, _ = node.args
        return emit_embedding(
            builder, weight, scales, zeros, indices, bits, True, node.result.type.dtype
        )

    full = f"quantized_decomposed.{name}"
    register(
        Operator(
            f"{full}.default", shape, Rewrite(expand, _signed_or_packed), names=(f"{full}.dtype",)
        )
    )


def _signed_or_packed(node: Node, traits: Any) -> str | None:
    weight = node.args[0].type.dtype
    if node.op.startswith("quantized_decomposed.embedding_byte") and weight is not DType.int8:
        return f"no kernel for a table of {weight.name}"
    return supports(node, traits)


_register("embedding_byte", 8)
_register("embedding_4bit", 4)
_register("embedding_2bit", 2)
