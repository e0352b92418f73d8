"""Matmul with a quantized weight: 8 or 4 bits, scales by row or by group, float or int8
activations.

All quantized linear layers become one operator, `purevk.quantized_matmul`. Its weight has one row
for each output channel, and its scales are [N, groups]. Constants are brought into this form once,
when the program is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, emit_copy, packed
from purevk.lower.declarations import byte_features
from purevk.lower.epilogue import Epilogue, matrix_epilogue
from purevk.lower.expression import Expression
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4, gcd8, gcd16
from purevk.lower.operands import slice_of
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL
from purevk.ops.matmul.choice import Batches, emit, may_overlap, stored_vectors
from purevk.ops.matmul.choice import choose as choose_matmul
from purevk.ops.matmul.fused import ToCache, fusion_of, is_fused, stored_type, takes_program
from purevk.ops.quantized.choice import (
    choose,
    choose_few_rows,
    is_dequantized,
    vectors_of_rows,
)
from purevk.ops.quantized.dequantize import emit_dequantized
from purevk.ops.quantized.kernels import Form, QuantizedMatmul
from purevk.ops.quantized.operands import (
    OutputQuantization,
    dense_rows,
    output_params,
    split_rows,
    supports,
    texels_of,
    whole,
    whole_or_none,
)
from purevk.ops.registry import Kernel, ShapeError, define

NAME = "purevk.quantized_matmul"
ALIGN_ROWS = "purevk.align_rows"
_WITH_KNOWN_SIZES = ("quantized/qdot", "quantized/qmatvec", "quantized/qmatmul_coopmat")


def _shape(
    a: TensorType,
    weight: TensorType,
    scales: TensorType,
    sums: TensorType | None = None,
    x_scale: float = 1.0,
    x_zero: int = 0,
    row_scales: TensorType | None = None,
    row_zeros: TensorType | None = None,
    bias: TensorType | None = None,
    bits: int = 8,
    high_first: bool = False,
    group: int = 0,
    dtype: DType = REAL,
    out: OutputQuantization | None = None,
    epilogue: Expression | ToCache | None = None,
    extras: tuple[TensorType, ...] = (),
    minimums: TensorType | None = None,
    norm: TensorType | None = None,
    eps: float = 0.0,
    pair: int = 0,
    caches: tuple[TensorType, ...] = (),
) -> TensorType:
    """a [M, K] float, or int8 with `sums`, the sums of the weight's rows or groups. The scale and
    the zero point of an int8 a are numbers, or one for each row. weight [N, bytes]; scales, sums and
    minimums [N, groups]; `group`: quantized values that share a scale, 0: all of a row. With
    minimums, for a float a, the weight is (quantized value + 2^(bits - 1)) * scale + minimum. The
    last four are those of `ops/matmul/fused.py`, for a float a."""
    if a.rank != 2 or weight.rank != 2 or scales.rank != 2:
        raise ShapeError(f"cannot multiply {a} by {weight} with scales {scales}")
    if isinstance(a.dims[1], int) and a.dims[1] * bits > weight.dims[1] * 8:
        raise ShapeError(
            f"a row of {weight} has {weight.dims[1] * 8 // bits} quantized values,"
            f" {a.dims[1]} are needed"
        )
    if bits not in (4, 8):
        raise ShapeError(f"a weight of {bits} bits")
    if minimums is not None and (minimums != scales or sums is not None or out is not None):
        raise ShapeError(f"minimums {minimums} with scales {scales}")
    if minimums is not None and group < 1:
        raise ShapeError(f"minimums of groups of {group} values")
    (m, k), n, groups = a.dims, weight.dims[0], scales.dims[1]
    check_groups(k, groups, group)
    for rows, parameters in ((n, (scales, sums, bias)), (m, (row_scales, row_zeros))):
        for parameter in parameters:
            if parameter is not None:
                check_rows(rows, parameter.dims[0] if parameter.rank else 1)
    if sums is not None and (sums.rank != 2 or sums.dims[1] != groups):
        raise ShapeError(f"sums {sums} with scales {scales}")
    product = TensorType(DType.int8 if out is not None else dtype, (m, n))
    return product if out is not None else stored_type(product, epilogue, pair, caches)


def check_groups(k: Size, groups: Size, group: int) -> None:
    """Raises ShapeError unless k values can have so many groups of `group` values; 0: one group."""
    if group < 0 or (not group and isinstance(groups, int) and groups > 1):
        raise ShapeError(f"a weight with {groups} groups of {group} values")
    if isinstance(groups, int) and isinstance(k, int) and groups * (group or k) < k:
        raise ShapeError(f"{groups} groups of {group} values for rows of {k}")


def check_rows(rows: Size, values: Size) -> None:
    """Raises ShapeError if there are fewer values than rows."""
    if isinstance(rows, int) and isinstance(values, int) and values < rows:
        raise ShapeError(f"{values} scales, sums or biases for {rows} rows")


def check_parameters(rows: Size, *parameters: TensorType | None) -> None:
    """Raises ShapeError unless parameters are [rows or more], or [rows or more, groups]."""
    for parameter in parameters:
        if parameter is not None:
            if parameter.rank not in (1, 2):
                raise ShapeError(f"scales, sums or biases {parameter}")
            check_rows(rows, parameter.dims[0])


def matmul_of(node: Node) -> QuantizedMatmul:
    """The matmul of a node whose operands are dense."""
    x, weight, scales = (node.tensor(name).type for name in ("a", "weight", "scales"))
    groups, minimums = scales.dims[1], node.arg("minimums") is not None
    grouped = minimums or not (isinstance(groups, int) and groups == 1)
    return QuantizedMatmul(
        *(x.dims[0], weight.dims[0], x.dims[1]),
        bits=node.int("bits"),
        words=weight.dims[1] // 4,
        first_word=0,
        group=node.int("group") if grouped else 0,
        integers=node.arg("sums") is not None,
        halves=x.dtype is DType.float16,
        groups=groups,
        minimums=minimums,
    )


def _lower(lowering: Lowering, node: Node) -> None:
    x = dense_rows(lowering, lowering.operand(node.tensor("a")))
    weight = dense_rows(lowering, lowering.operand(node.tensor("weight")))
    fused = is_fused(node)
    if fused and (weight.strides[0] != weight.dims[1] or weight.offset != 0):
        weight = dense(lowering, weight)
    scales, sums = whole(lowering, node.tensor("scales")), node.optional_tensor("sums")
    requantized = node.optional_attribute("out", OutputQuantization)
    matmul = replace(
        matmul_of(node),
        words=weight.strides[0] // 4,
        first_word=weight.offset // 4,
        wide=gcd16(x.dims[1], x.strides[0], x.offset),
    )
    if not fused and requantized is None and is_dequantized(lowering.traits, matmul):
        _lower_dequantized(lowering, node, matmul, x, weight, scales)
        return
    if fused:
        form = choose_few_rows(lowering.traits, matmul, node.int("pair") > 0)
    else:
        form = choose(lowering.traits, matmul)
    if form is None:  # the sizes are those that the pass has seen
        raise ShapeError(f"{node.op} of {x.type} and {weight.type}")
    tensors: dict[str, Operand | None] = {
        "minimum": whole_or_none(lowering, node.optional_tensor("minimums"))
    }
    macros: dict[str, int | str] = {"ACT": int(sums is not None)}
    if sums is not None:
        tensors["sum"] = whole(lowering, sums)
        row_scales = node.optional_tensor("row_scales")
        row_zeros = node.optional_tensor("row_zeros")
        if row_scales is not None and row_zeros is not None:
            zeros = whole(lowering, row_zeros)
            macros |= {"ROW_PARAMETERS": 1, "T_ZERO": zeros.dtype.glsl}
            macros |= byte_features(zeros.dtype)
            tensors |= {"row_scale": whole(lowering, row_scales), "row_zero": zeros}
        macros["DOT"] = int(lowering.traits.has("integer_dot_product"))
        macros["VEC4_A"] = int(gcd4(matmul.k))
    else:
        macros |= vectors_of_rows(form, x)
    tensors["bias"] = whole_or_none(lowering, node.optional_tensor("bias"))
    fusion = fusion_of(lowering, node)
    if fused:
        macros |= fusion.macros
    if not fusion.vector:
        macros |= byte_features(fusion.out.dtype)
    tensors |= {"a": x, "w": weight, "scale": scales, "out": fusion.out, "norm": fusion.norm}
    params = {
        "x_scale": bits_of(node.float("x_scale")),
        "x_zero": node.int("x_zero"),
        **fusion.params,
    }
    emit_form(
        lowering, node, form, tensors, params, macros, fusion.vector, fusion.epilogue, requantized
    )


def emit_form(
    lowering: Lowering,
    node: Node,
    form: Form,
    tensors: Mapping[str, Operand | None],
    params: Mapping[str, Size],
    macros: Mapping[str, int | str],
    vector: bool,
    epilogue: Epilogue,
    requantized: OutputQuantization | None = None,
) -> None:
    """Appends the dispatch of a matmul with a quantized weight, a node with the parameters `bits`,
    `high_first` and `group`.

    Args:
        tensors: at least a, w, scale and out.
        params, macros: those that do not follow from the tensors and the node.
        vector: the result is stored as vectors of 4.
        requantized: how the result is quantized, if it is.
    """
    x, weight, scales = (tensors[name] for name in ("a", "w", "scale"))
    assert x is not None and weight is not None and scales is not None
    (m, k), n, groups = x.dims, weight.dims[0], scales.dims[1]
    sizes = {"M": m, "N": n, "K": k, "lda": x.strides[0], "ldw": weight.strides[0] // 4}
    sizes |= {"groups": groups, "group": node.int("group") or k, "offset_w": weight.offset // 4}
    macros = {**macros, **form.macros}
    texels = texels_of(lowering, tensors, "rgba32ui") if _reads_texels(form, macros) else {}
    if texels:
        macros |= {"TEXELS": 1, "MINIMUM": int("minimum" in texels)}
    lowering.dispatch(
        form.template,
        {**tensors, **texels},
        {**sizes, **output_params(requantized), **params},
        {
            "BITS": node.int("bits"),
            "HIGH_FIRST": int(node.bool("high_first")),
            "GROUPED": int(
                tensors.get("minimum") is not None or not (isinstance(groups, int) and groups == 1)
            ),
            "VEC4_OUT": int(vector),
            "REQUANT": int(requantized is not None),
            **macros,
        },
        epilogue=epilogue,
        # On GPUs known sizes make the loops and indices of these kernels constant: one pipeline for
        # each shape.
        specialize=False if form.template.startswith(_WITH_KNOWN_SIZES) else (),
        never=("x_scale", "x_zero", "eps_bits", *output_params(None)),
        grid=form.grid,
        subgroup_size=form.subgroup_size,
        flops=2 * m * n * k,
    )


def _reads_texels(form: Form, macros: Mapping[str, int | str]) -> bool:
    """Whether a kernel can read its operands from texel buffers."""
    return (
        form.template == "quantized/qmatvec.comp"
        and macros["WORDS"] == 4
        and macros.get("VEC4_A") == 1
        and not (macros["ACT"] or macros["SHARE"] or macros["ANY_GROUP"])
    )


def _lower_dequantized(
    lowering: Lowering,
    node: Node,
    matmul: QuantizedMatmul,
    x: Operand,
    weight: Operand,
    scales: Operand,
) -> None:
    """Dequantizes the weight to the dtype of x, and multiplies by it."""
    m, n, k, pitch = matmul.m, matmul.n, matmul.k, x.strides[0]
    out = lowering.operand(node.result)
    elements = lowering.temporary(TensorType(x.dtype, (n, k)))
    form = (matmul.bits, node.bool("high_first"), matmul.group)
    minimums = whole_or_none(lowering, node.optional_tensor("minimums"))
    emit_dequantized(lowering, weight, scales, minimums, elements, (n, k), form)
    extras = node.tensors("extras")
    vectors = (gcd4(pitch, x.offset), True)
    aligned = gcd8(pitch, x.offset, n, out.offset) and may_overlap(lowering, out, extras)
    half = x.dtype is DType.float16
    choice = choose_matmul(lowering.traits, m, n, k, 1, half, True, vectors, aligned)
    vector_out = stored_vectors(choice, gcd4(n, out.offset))
    epilogue = matrix_epilogue(lowering, node, out, vector_out)
    emit(
        choice,
        lowering,
        a=x,
        b=elements,
        bias=packed(lowering, node.optional_tensor("bias")),
        out=out,
        epilogue=epilogue,
        sizes=(m, n, k),
        strides=(pitch, k, n),
        batches=Batches(),
        transposed=True,
        vectors=(*vectors, vector_out),
    )


define(
    NAME,
    _shape,
    Kernel(_lower, supports=supports, epilogue=takes_program, bfloat16=False),
    mutates=(20,),
)


def _align_shape(x: TensorType, multiple: int) -> TensorType:
    return x.with_dims((x.dims[0], _dims.align(x.dims[1], multiple)))


def _align_lower(lowering: Lowering, node: Node) -> None:
    source, target = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    emit_copy(lowering, source, slice_of(target, 1, 0, source.dims[1]))


# A copy of a matrix whose rows start at multiples of `multiple` elements.
define(ALIGN_ROWS, _align_shape, Kernel(_align_lower))


# -- nodes of this operator ----------------------------------------------------------------------
def by_rows(builder: Builder, parameters: Value, rows: Size, transposed: bool = False) -> Value:
    """Scales or sums as [rows, groups]: from [rows or more], or [rows or more, groups], or if
    `transposed` [groups, rows or more]."""
    if parameters.type.rank == 1:
        parameters = builder.aten.view(parameters, (parameters.type.dims[0], 1))
    elif transposed:
        parameters = builder.aten.permute(parameters, (1, 0))
    if parameters.type.dims[0] != rows:
        parameters = builder.aten.slice.Tensor(parameters, dim=0, start=0, end=rows)
    if parameters.type.dtype in (DType.float64, DType.bfloat16):
        parameters = builder.aten._to_copy(parameters, REAL)
    return builder.purevk.copy(parameters)


def emit_linear(
    builder: Builder,
    x: Value,
    weight: Value,
    scales: Value,
    *,
    bits: int = 8,
    high_first: bool = False,
    group: int = 0,
    bias: Value | None = None,
    sums: Value | None = None,
    x_scale: Value | float = 1.0,
    x_zero: Value | int = 0,
    dtype: DType = REAL,
    out: OutputQuantization | None = None,
    minimums: Value | None = None,
) -> Value:
    """x [..., K] times the weight: [..., N]. Scales, sums and minimums are [N, groups]. The scale and the
    zero point of an int8 x are two numbers, or two tensors with one element for each row of x."""
    k, rows = x.type.dims[-1], _dims.product(x.type.dims[:-1])
    scales = _needed_groups(builder, scales, k, group)
    sums = None if sums is None else _needed_groups(builder, sums, k, group)
    minimums = None if minimums is None else _needed_groups(builder, minimums, k, group)
    flat = builder.aten.view(x, (rows, k))
    row_scales = row_zeros = None
    if isinstance(x_scale, Value):
        row_scales = _row_parameter(builder, x_scale, rows, REAL, REAL)
        x_scale = 1.0
    if isinstance(x_zero, Value):
        row_zeros = _row_parameter(builder, x_zero, rows, DType.int32, DType.int8)
        x_zero = 0
    n, pitch = weight.type.dims
    if (
        weight in builder.graph.constants
        and pitch % 16
        and weight.type.nbytes <= builder.traits.max_storage_range
    ):
        weight = builder.emit(ALIGN_ROWS, weight, 16)

    def multiply(
        weight: Value,
        scales: Value | None,
        sums: Value | None,
        bias: Value | None,
        minimums: Value | None,
    ) -> Value:
        return builder.emit(
            NAME,
            flat,
            weight,
            scales,
            sums,
            x_scale,
            x_zero,
            row_scales,
            row_zeros,
            bias,
            bits,
            high_first,
            group,
            dtype,
            out,
            None,
            (),
            minimums,
        )

    ranges = split_rows(builder.traits, weight.type)
    if ranges is None:
        result = multiply(weight, scales, sums, bias, minimums)
    else:
        parts = []
        for start, end in ranges:
            part = builder.aten.slice.Tensor(weight, dim=0, start=start, end=end)
            others = (
                _copy_rows(builder, each, start, end) for each in (scales, sums, bias, minimums)
            )
            parts.append(multiply(part, *others))
        result = builder.aten.cat(tuple(parts), dim=1)
    return builder.aten.view(result, (*x.type.dims[:-1], n))


def _needed_groups(builder: Builder, parameters: Value, k: Size, group: int) -> Value:
    """Scales or sums [N, groups] without those of groups beyond k: what they contain must not
    matter, and kernels may multiply zeros by them or add them."""
    groups = parameters.type.dims[1]
    if not (group and isinstance(k, int) and isinstance(groups, int)):
        return parameters
    needed = max(-(-k // group), 1)
    if groups <= needed:
        return parameters
    parameters = builder.aten.slice.Tensor(parameters, dim=1, start=0, end=needed)
    return builder.purevk.copy(parameters)


def _copy_rows(builder: Builder, value: Value | None, start: int, end: int) -> Value | None:
    """A copy of some rows of a tensor. It is made once if the tensor is constant."""
    if value is None:
        return None
    return builder.purevk.copy(builder.aten.slice.Tensor(value, dim=0, start=start, end=end))


def _row_parameter(builder: Builder, value: Value, rows: Size, dtype: DType, other: DType) -> Value:
    """As a vector of `dtype`, or of the `other` that the kernels read too."""
    if value.type.dtype not in (dtype, other):
        value = builder.aten._to_copy(value, dtype)
    return builder.aten.view(value, (rows,))
