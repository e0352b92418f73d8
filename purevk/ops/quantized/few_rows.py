"""Matmuls of few rows with a quantized weight, with what comes before and after them in the same
dispatch, as in `ops/matmul/few_rows.py`. They run `qdot.comp`, `qdot_coopmat.comp` and
`qmatvec.comp`."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, dense_operand
from purevk.lower.epilogue import Epilogue
from purevk.lower.expression import Expression
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4
from purevk.ops.matmul.few_rows import epilogue_of, joined_pairs, queries_of, store_to_cache
from purevk.ops.quantized.choice import (
    FEW_ROWS,
    FUSED_ROWS,
    Form,
    QuantizedMatmul,
    choose,
    vectors_of_rows,
)
from purevk.ops.quantized.matmul import check_groups, check_rows, emit_form
from purevk.ops.quantized.operands import dense_rows, whole, whole_or_none
from purevk.ops.registry import Kernel, Operator, ShapeError, register
from purevk.tuning import DeviceTraits

NAME = "purevk.quantized_matmul_few_rows"
TO_CACHE = "purevk.quantized_matmul_to_cache"
_PAIRS = 4  # of columns, for each invocation: two vec4s


def choose_few_rows(traits: DeviceTraits, matmul: QuantizedMatmul, paired: bool) -> Form | None:
    """How one of the kernels of few rows runs; None if another template is faster, or its form lacks
    these parts.

    Args:
        paired: a team computes pairs of columns.
    """
    if matmul.max_m > FEW_ROWS or _dims.gcd_of(matmul.k) % 4:
        return None
    if paired and matmul.max_n % 8:
        return None
    form = choose(traits, matmul)
    macros = form.macros
    if form.template == "quantized/qdot_coopmat.comp" and macros["ROWS"] > FUSED_ROWS:
        return None
    columns = {"quantized/qdot.comp": 4, "quantized/qdot_coopmat.comp": 16}.get(form.template)
    if columns:
        grid = (_dims.ceil_div(matmul.n, columns * (1 + paired)), *form.grid[1:])
        return Form(form.template, grid, macros, form.subgroup_size)
    if form.template != "quantized/qmatvec.comp" or not macros["SHARE"] or macros["ANY_GROUP"]:
        return None
    if not paired:
        return form
    columns = 2 * _PAIRS
    grid = (_dims.ceil_div(matmul.n, columns * macros["TEAMS"]), *form.grid[1:])
    return Form(form.template, grid, {**macros, "COLS": columns}, form.subgroup_size)


def matmul_of(
    x: TensorType,
    weight: TensorType,
    scales: TensorType,
    bits: int,
    group: int,
    minimums: bool = False,
) -> QuantizedMatmul | None:
    """The matmul of dense operands; None if rows of the weight are no whole words."""
    nbytes = weight.dims[1]
    if not isinstance(nbytes, int) or nbytes % 4:
        return None
    grouped = minimums or not (isinstance(scales.dims[1], int) and scales.dims[1] == 1)
    (m, k), n = x.dims, weight.dims[0]
    halves = x.dtype is DType.float16
    return QuantizedMatmul(
        m,
        n,
        k,
        bits,
        nbytes // 4,
        0,
        group if grouped else 0,
        False,
        minimums=minimums,
        halves=halves,
        groups=scales.dims[1],
    )


def _product(
    x: TensorType, weight: TensorType, scales: TensorType, bits: int, group: int, dtype: DType
) -> TensorType:
    if x.rank != 2 or weight.rank != 2 or scales.rank != 2:
        raise ShapeError(f"cannot multiply {x} by {weight} with scales {scales}")
    check_groups(x.dims[1], scales.dims[1], group)
    check_rows(weight.dims[0], scales.dims[0])
    return TensorType(dtype, (x.dims[0], weight.dims[0]))


def _shape(
    x: TensorType,
    weight: TensorType,
    scales: TensorType,
    bias: TensorType | None,
    bits: int,
    high_first: bool,
    group: int,
    dtype: DType,
    minimums: TensorType | None = None,
    factors: TensorType | None = None,
    eps: float = 0.0,
    pair: int = 0,
    epilogue: Expression | None = None,
    extras: tuple[TensorType, ...] = (),
) -> TensorType:
    """As `purevk.quantized_matmul` and `purevk.matmul_few_rows`; `factors`: the scale of a norm."""
    return joined_pairs(_product(x, weight, scales, bits, group, dtype), pair, epilogue)


def _lower(lowering: Lowering, node: Node) -> None:
    _emit(lowering, node, *epilogue_of(lowering, node))


def _emit(
    lowering: Lowering, node: Node, out: Operand, pair: int, epilogue: Epilogue, vector: bool
) -> None:
    x = dense_rows(lowering, lowering.operand(node.tensor("x")))
    weight = dense_rows(lowering, lowering.operand(node.tensor("weight")))
    if weight.strides[0] != weight.dims[1] or weight.offset != 0:
        weight = dense(lowering, weight)
    scales, bias = whole(lowering, node.tensor("scales")), node.optional_tensor("bias")
    bits, group = node.int("bits"), node.int("group")
    minimums = node.optional_tensor("minimums")
    matmul = matmul_of(x.type, weight.type, scales.type, bits, group, minimums is not None)
    form = matmul and choose_few_rows(lowering.traits, matmul, pair > 0)
    if not form:  # the sizes are those that the pass has seen
        raise ShapeError(f"{node.op} of {x.type} and {weight.type}")
    tensors: dict[str, Operand | None] = {"a": x, "w": weight, "scale": scales, "out": out}
    tensors["minimum"] = whole_or_none(lowering, minimums)
    tensors["bias"] = whole_or_none(lowering, bias)
    params: dict[str, Size] = {"ldo": out.strides[0], "x_scale": bits_of(1.0), "x_zero": 0}
    if pair:
        params["pair"] = pair
    factors = node.optional_tensor("factors")
    if factors is not None:
        operand = dense_operand(lowering, factors)
        tensors["factors"] = operand if gcd4(operand.offset) else dense(lowering, operand)
        params["eps_bits"] = bits_of(node.float("eps"))
    macros = {"NORM": int(factors is not None), "PAIRED": int(pair > 0), "ACT": 0}
    macros |= vectors_of_rows(form, x)
    emit_form(lowering, node, form, tensors, params, macros, vector, epilogue)


register(Operator(NAME, _shape, Kernel(_lower, epilogue=True, bfloat16=False)))


# -- with a cache --------------------------------------------------------------------------------
def _to_cache_shape(
    x: TensorType,
    weight: TensorType,
    scales: TensorType,
    bias: TensorType | None,
    bits: int,
    high_first: bool,
    group: int,
    dtype: DType,
    minimums: TensorType | None,
    factors: TensorType | None,
    eps: float,
    cos: TensorType,
    sin: TensorType,
    start: int,
    keys: TensorType,
    values: TensorType,
    dim: int,
    index: TensorType,
) -> TensorType:
    """As `purevk.matmul_to_cache`."""
    return queries_of(_product(x, weight, scales, bits, group, dtype), keys, values, dim)


def _to_cache_lower(lowering: Lowering, node: Node) -> None:
    out, store, pair = store_to_cache(lowering, node)
    _emit(lowering, node, out, pair, store, True)


register(
    Operator(TO_CACHE, _to_cache_shape, Kernel(_to_cache_lower, bfloat16=False), mutates=(14, 15))
)
