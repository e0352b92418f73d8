"""Embeddings in quantized tables."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.declarations import byte_features
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import gcd4
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL
from purevk.ops.quantized.matmul import by_rows, check_parameters
from purevk.ops.quantized.operands import has_dense_rows, refuse_dtypes, split_rows, whole
from purevk.ops.quantized.quantize import FileDType
from purevk.ops.registry import Kernel, ShapeError, define, rewrite_node
from purevk.ops.shapes import is_empty
from purevk.tuning import DeviceTraits

NAME = "purevk.quantized_embedding"
_ITEMS = 2  # vectors of 4 elements that an invocation of a GPU computes


def _shape(
    weight: TensorType,
    scales: TensorType,
    zeros: TensorType | None,
    indices: TensorType,
    bits: int = 8,
    high_first: bool = False,
    dtype: DType = REAL,
    minimums: TensorType | None = None,
) -> TensorType:
    """weight [V, bytes], scales and zeros or minimums [V, groups]."""
    if minimums is not None and (minimums != scales or zeros is not None):
        raise ShapeError(f"minimums {minimums} with scales {scales}")
    if scales.rank != 2:
        raise ShapeError(f"cannot look up rows of {weight} with scales {scales}")
    if zeros is not None and zeros.dims != scales.dims:
        raise ShapeError(f"zero points {zeros} with scales {scales}")
    return _rows(weight, scales, zeros, indices, bits, dtype)


def _rows(
    weight: TensorType,
    scales: TensorType,
    zeros: TensorType | None,
    indices: TensorType,
    bits: int,
    dtype: DType,
) -> TensorType:
    """Scales and zeros are [V or more], or [V or more, groups]."""
    if weight.rank != 2:
        raise ShapeError(f"cannot look up rows of {weight}")
    check_parameters(weight.dims[0], scales, zeros)
    width = weight.dims[1] * 8 // bits
    groups = {each.dims[1] if each.rank == 2 else 1 for each in (scales, zeros) if each is not None}
    for each in groups:
        if isinstance(width, int) and isinstance(each, int) and (each < 1 or width % each):
            raise ShapeError(f"{each} groups in rows of {width}")
    if len(groups) > 1:
        raise ShapeError(f"zero points {zeros} with scales {scales}")
    return TensorType(dtype, (*indices.dims, width))


def _lower(lowering: Lowering, node: Node) -> None:
    out = lowering.operand(node.result)
    if is_empty(out.type):
        return
    bits, zeros = node.int("bits"), node.optional_tensor("zeros")
    weight = lowering.operand(node.tensor("weight"))
    index = lowering.operand(node.tensor("indices"))
    known = isinstance(weight.offset, int) and weight.offset % 4 == 0
    if not known or not has_dense_rows(weight):
        weight = dense(lowering, weight)
    count, width = _dims.product(index.dims), out.dims[-1]
    if not index.layout.is_contiguous(index.dims):
        index = dense(lowering, index)
    names = {"scale": "scales", "zero": "zeros", "minimum": "minimums"}
    parameters = {
        name: whole(lowering, value)
        for name, argument in names.items()
        if (value := node.optional_tensor(argument)) is not None
    }
    scales = parameters["scale"]
    vector = gcd4(width, out.offset) and out.dtype in (DType.float32, DType.float16)
    rows, groups = weight.dims[0], scales.dims[1]
    pitch, group = weight.strides[0], width // groups
    quads = (
        vector
        and gcd4(group)
        and all(_dims.gcd_of(each) % (bits // 2) == 0 for each in (pitch, weight.offset))
    )
    work = count * _dims.ceil_div(width, 4)
    items = lowering.items_per_thread(work, _ITEMS) if quads else 1
    local = 64 if items == 1 else min(256, lowering.traits.max_invocations)
    macros: dict[str, int | str] = {
        "INDEX_WORDS": index.dtype.itemsize // 4,
        "ITEMS": items,
        "BITS": bits,
        "HIGH_FIRST": int(node.bool("high_first")),
        "QUADS": int(quads),
        "ZEROS": int(zeros is not None),
        "MINIMUM": int("minimum" in parameters),
        "VEC4": int(vector),
        **byte_features(*(parameter.dtype for parameter in parameters.values())),
    }
    params: dict[str, Size] = {"count": count, "D": width, "rows": rows, "groups": groups}
    params |= {"group": group, "row_bytes": pitch, "index_step": 1}
    read = (
        weight.dims[1]
        + groups * sum(parameter.dtype.itemsize for parameter in parameters.values())
        + index.dtype.itemsize
    )
    lowering.dispatch(
        "quantized/qembedding.comp",
        {
            "table": weight,
            **parameters,
            "index": index,
            "out": out,
        },
        params,
        macros,
        local=local,
        grid=lowering.linear_grid(work, local * items),
        nbytes=count * (read + width * out.dtype.itemsize),
    )


def supports(node: Node, traits: DeviceTraits) -> str | None:
    """Indices are int32 or int64, scales float32 or float16."""
    return refuse_dtypes(node, DType.float64, DType.int16)


define(NAME, _shape, Kernel(_lower, supports=supports, bfloat16=False))


def emit_embedding(
    builder: Builder,
    weight: Value,
    scales: Value,
    zeros: Value | None,
    indices: Value,
    bits: int,
    high_first: bool,
    dtype: DType,
    minimums: Value | None = None,
) -> Value:
    """Rows of a table as `dtype`; scales, zeros and minimums are [V] or [V, groups]."""
    count = weight.type.dims[0]
    scales = by_rows(builder, scales, count)
    zeros = None if zeros is None else by_rows(builder, zeros, count)
    minimums = None if minimums is None else by_rows(builder, minimums, count)
    parts = split_rows(builder.traits, weight.type)
    if parts is None:
        form = (bits, high_first, dtype)
        return builder.emit(NAME, weight, scales, zeros, indices, *form, minimums)
    # One binding cannot span the table. Each part gives its own rows, and a comparison selects
    # them.

    def rows_of_part(start: int, end: int) -> Value:
        table = [
            None if each is None else builder.aten.slice.Tensor(each, dim=0, start=start, end=end)
            for each in (weight, scales, zeros, minimums)
        ]
        local = builder.aten.sub.Tensor(indices, start)
        return builder.emit(NAME, *table[:3], local, bits, high_first, dtype, table[3])

    column = builder.aten.unsqueeze(indices, dim=-1)
    first, *others = parts
    result = rows_of_part(*first)
    for start, end in others:
        rows = rows_of_part(start, end)
        is_later = builder.aten.ge.Tensor(column, start)
        result = builder.aten.where.self(is_later, rows, result)
    return result


def _table_shape(
    weight: TensorType,
    scales: TensorType,
    indices: TensorType,
    dtype: DType = REAL,
    bits: int = 8,
    minimums: TensorType | None = None,
) -> TensorType:
    return _rows(weight, scales, minimums, indices, bits, dtype)


# Rows of a table of int8, or of 4 bits as in `purevk.quantized_linear`, with scales and minimums
# [V] or [V, groups].
@rewrite_node("purevk.quantized_table", _table_shape, supports=supports)
def _expand_table(builder: Builder, node: Node) -> Value:
    return emit_embedding(
        builder,
        node.tensor("weight"),
        node.tensor("scales"),
        None,
        node.tensor("indices"),
        node.int("bits"),
        False,
        node.dtype("dtype"),
        node.optional_tensor("minimums"),
    )


# -- et_vk ---------------------------------------------------------------------------------------
def _q4gsw_shape(
    weight: TensorType,
    weight_scales: TensorType,
    group_size: int,
    indices: TensorType,
    is_linear_weight: bool = False,
) -> TensorType:
    result = _rows(weight, weight_scales, None, indices, 4, REAL)
    groups = weight_scales.dims[1] if weight_scales.rank == 2 else 1
    if group_size * groups != result.dims[-1]:
        raise ShapeError(f"{groups} groups of {group_size} values for rows of {result.dims[-1]}")
    return result


@rewrite_node("et_vk.embedding_q4gsw.default", _q4gsw_shape, supports=supports)
def _expand_q4gsw(builder: Builder, node: Node) -> Value:
    return emit_embedding(
        builder,
        node.tensor("weight"),
        node.tensor("weight_scales"),
        None,
        node.tensor("indices"),
        4,
        not node.bool("is_linear_weight"),
        node.result.type.dtype,
    )


# -- quantized_decomposed ------------------------------------------------------------------------
def _register(name: str, bits: int) -> None:
    def shape(
        weight: TensorType,
        weight_scales: TensorType,
        weight_zero_points: TensorType | None,
        weight_quant_min: int,
        weight_quant_max: int,
        indices: TensorType,
        dtype: FileDType = None,
    ) -> TensorType:
        known = dtype if isinstance(dtype, DType) else weight_scales.dtype
        return _rows(weight, weight_scales, weight_zero_points, indices, bits, known)

    def expand(builder: Builder, node: Node) -> Value:
        return emit_embedding(
            builder,
            node.tensor("weight"),
            node.tensor("weight_scales"),
            node.optional_tensor("weight_zero_points"),
            node.tensor("indices"),
            bits,
            True,
            node.result.type.dtype,
        )

    full = f"quantized_decomposed.{name}"
    rewrite_node(f"{full}.default", shape, f"{full}.dtype", supports=_signed_or_packed)(expand)


def _signed_or_packed(node: Node, traits: DeviceTraits) -> str | None:
    weight = node.tensor("weight").type.dtype
    if node.op.startswith("quantized_decomposed.embedding_byte") and weight is not DType.int8:
        return f"no kernel for a table of {weight.name}"
    return supports(node, traits)


_register("embedding_byte", 8)
_register("embedding_4bit", 4)
_register("embedding_2bit", 2)
