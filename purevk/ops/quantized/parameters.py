"""Operators that choose scales and zero points from the extremes of a tensor, its rows or its
blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.declarations import byte_features
from purevk.lower.expression import Term
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import bits_of, gcd4
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL, Program
from purevk.ops.quantized.blocks import Blocks
from purevk.ops.quantized.operands import INT8, has_dense_rows
from purevk.ops.quantized.quantize import FileDType, dtype_or
from purevk.ops.registry import Kernel, ShapeError, define, rewrite_node
from purevk.ops.shapes import is_empty

_SPACE = "quantized_decomposed"
_EPSILON = 1.1920928955078125e-07  # of float32
_SMALLEST = {
    DType.float32: 1.1754943508222875e-38,
    DType.float16: 6.103515625e-05,
}  # the smallest normal number


@dataclass(frozen=True)
class Rule:
    """How parameters follow from the extremes.

    Both are expressions over a (the smallest number), b (the largest), low and high (of the
    quantized values), eps (the smallest scale) and middle.

    Attributes:
        scale: the scale.
        zero: the zero point. It may also use s, the scale.
    """

    scale: str
    zero: str


_RULES = {
    "asymmetric": Rule("pv_scale(a, b, low, high, eps)", "pv_zero(a, s, low, high)"),
    "nearest": Rule("pv_scale(a, b, low, high, eps)", "pv_zero_nearest(a, b, s, low, high)"),
    "symmetric": Rule("pv_scale_symmetric(a, b, (high - low) * 0.5, eps)", "middle"),
    "unclipped": Rule("pv_scale_unclipped(a, b, low, high, eps)", "middle"),
    "magnitude": Rule("pv_divide(max(max(-a, b), eps), high)", "middle"),
}


class Choice(NamedTuple):
    """A rule and its numbers.

    Attributes:
        rule: a key of `_RULES`.
        low: the smallest quantized value.
        high: the largest quantized value.
        epsilon: the smallest scale.
        middle: the zero point of symmetric quantization.
    """

    rule: str
    low: float
    high: float
    epsilon: float
    middle: int = 0


# -- rows: one kernel ----------------------------------------------------------------------------
NAME = "purevk.row_parameters"


def _rows_shape(
    x: TensorType, choice: Choice, scale_dtype: DType, zero_dtype: DType
) -> tuple[TensorType, TensorType]:
    rows = (x.dims[0],)
    return TensorType(scale_dtype, rows), TensorType(zero_dtype, rows)


def _rows_lower(lowering: Lowering, node: Node) -> None:
    x, choice = lowering.operand(node.tensor("x")), node.attribute("choice", Choice)
    scale, zero = (lowering.operand(value) for value in node.results)
    if is_empty(x.type):
        return
    if not isinstance(x.offset, int) or not has_dense_rows(x):
        x = dense(lowering, x)
    rows, columns = x.dims
    rule = _RULES[choice.rule]
    subgroups = lowering.traits.has("subgroup_arithmetic", "subgroup_size_control")
    lanes = lowering.traits.subgroup_size if subgroups else 32
    profile = lowering.traits.profile
    wide = lanes
    if profile.has_fast_shared_memory:
        wide = min(max(lanes, 256), lowering.traits.max_invocations // lanes * lanes)
    vector = gcd4(columns, x.strides[0], x.offset)
    each = _dims.upper(columns) // (wide * (4 if vector else 1))
    macros: dict[str, int | str] = {
        "AHEAD": min(4, 1 << max(each, 1).bit_length() - 1) if profile.overlaps_loads else 1,
        "SCALE": rule.scale,
        "ZERO": rule.zero,
        "VEC4_A": int(vector),
        "LX": wide,
        "SUBGROUP": lanes if subgroups else 0,
    }
    macros |= byte_features(zero.dtype)
    if zero.dtype is DType.int64:
        macros["HAS_INT64"] = "1"
    params: dict[str, Size] = {
        "rows": rows,
        "K": columns,
        "stride": x.strides[0],
        "low_bits": bits_of(choice.low),
        "high_bits": bits_of(choice.high),
        "eps_bits": bits_of(choice.epsilon),
        "middle": choice.middle,
        "offset": x.offset,
    }
    lowering.dispatch(
        "quantized/qparams.comp",
        {"a": x, "scale": scale, "zero": zero},
        params,
        macros,
        grid=lowering.linear_grid(rows, 1),
        subgroup_size=lanes if subgroups else None,
    )


define(NAME, _rows_shape, Kernel(_rows_lower))


_KERNEL_FLOATS = (DType.float32, DType.float16)


def _choose(
    builder: Builder, node: Node, x: Value, dims: Sequence[int], choice: Choice
) -> tuple[Value, Value]:
    """The scales and zero points of a view of the node's tensor, reduced over `dims`."""
    scale, zero = (value.type for value in node.results)
    first = x.type.rank - len(dims)
    inner = _dims.product(x.type.dims[first:])
    are_last = bool(dims) and tuple(dims) == tuple(range(first, x.type.rank))
    if (
        are_last
        and x.type.dtype in _KERNEL_FLOATS
        and scale.dtype in (*_KERNEL_FLOATS, DType.float64)
        and not (first == 0 and _dims.upper(inner) > 65536)
    ):
        flat = builder.aten.view(x, (_dims.product(x.type.dims[:first]), inner))
        made = builder.emit_all(NAME, flat, choice, scale.dtype, zero.dtype)
    else:
        made = _choose_pointwise(builder, x, dims, choice, scale.dtype, zero.dtype)
    scales, zeros = (
        builder.aten.view(value, type.dims) for value, type in zip(made, (scale, zero))
    )
    return scales, zeros


def _choose_pointwise(
    builder: Builder,
    x: Value,
    dims: Sequence[int],
    choice: Choice,
    scale_dtype: DType,
    zero_dtype: DType,
) -> tuple[Value, ...]:
    """Scales and zero points from reductions and a pointwise program. The reduced dims have size
    1."""
    if x.type.dtype is not REAL:
        x = builder.aten._to_copy(x, REAL)
    least = most = x
    if dims:
        least = builder.aten.amin(x, tuple(dims), keepdim=True)
        most = builder.aten.amax(x, tuple(dims), keepdim=True)
    program = Program(
        builder, tuple(1 if d in dims else size for d, size in enumerate(x.type.dims))
    )
    known: dict[str, Term] = {
        "a": program.real(least),
        "b": program.real(most),
        "low": program.real(choice.low),
        "high": program.real(choice.high),
        "eps": program.real(choice.epsilon),
        "middle": program.real(choice.middle),
    }
    rule = _RULES[choice.rule]
    known["s"] = _step(program, rule.scale, known)
    zero = program.step("int($0)", _step(program, rule.zero, known), dtype=DType.int32)
    return program.emit_all((known["s"], scale_dtype), (zero, zero_dtype))


def _step(program: Program, text: str, known: Mapping[str, Term]) -> Term:
    """An expression over known names as one assignment."""
    order = [name for name in known if re.search(rf"\b{name}\b", text)]
    for number, name in enumerate(order):
        text = re.sub(rf"\b{name}\b", f"${number}", text)
    return program.step(f"float({text})", *(known[name] for name in order))


# -- of a tensor ---------------------------------------------------------------------------------
def _tensor_shape(
    x: TensorType, quant_min: int, quant_max: int, eps: float, target: FileDType = None
) -> tuple[TensorType, TensorType]:
    return TensorType(DType.float64, (1,)), TensorType(DType.int64, (1,))


_Expand: TypeAlias = Callable[[Builder, Node], tuple[Value, Value]]


def _expand_tensor(rule: str) -> _Expand:
    def expand(builder: Builder, node: Node) -> tuple[Value, Value]:
        x = node.tensor("x")
        flat = builder.aten.view(x, (x.type.numel,))
        unsigned = dtype_or(node.arg("target"), DType.int8) is DType.uint8
        choice = Choice(
            rule,
            node.int("quant_min"),
            node.int("quant_max"),
            node.float("eps"),
            middle=128 if unsigned else 0,
        )
        return _choose(builder, node, flat, (0,), choice)

    return expand


rewrite_node(f"{_SPACE}.choose_qparams.tensor", _tensor_shape)(_expand_tensor("asymmetric"))
rewrite_node(f"{_SPACE}.choose_qparams_symmetric.tensor", _tensor_shape)(
    _expand_tensor("symmetric")
)


# -- of rows -------------------------------------------------------------------------------------
def _token_shape(x: TensorType, target: FileDType = None) -> tuple[TensorType, TensorType]:
    sizes = (*x.dims[:-1], 1)
    return TensorType(DType.float64, sizes), TensorType(DType.int64, sizes)


def _token_float_shape(x: TensorType, target: FileDType = None) -> tuple[TensorType, TensorType]:
    sizes = (*x.dims[:-1], 1)
    return TensorType(REAL, sizes), TensorType(REAL, sizes)


def _expand_token(choice: Choice) -> _Expand:
    def expand(builder: Builder, node: Node) -> tuple[Value, Value]:
        x = node.tensor("x")
        return _choose(builder, node, x, (x.type.rank - 1,), choice)

    return expand


rewrite_node(
    f"{_SPACE}.choose_qparams_per_token_asymmetric.default",
    _token_shape,
    f"{_SPACE}._choose_qparams_per_token_asymmetric_impl.default",
)(_expand_token(Choice("nearest", *INT8, _EPSILON)))
rewrite_node(f"{_SPACE}.choose_qparams_per_token.default", _token_float_shape)(
    _expand_token(Choice("magnitude", *INT8, 1e-5))
)


# -- of blocks -----------------------------------------------------------------------------------
_MAPPINGS = {
    "ASYMMETRIC": "asymmetric",
    "SYMMETRIC": "symmetric",
    "SYMMETRIC_NO_CLIPPING_ERR": "unclipped",
}


def _affine_shape(
    x: TensorType,
    mapping_type: str,
    block_size: Sequence[Size],
    target_dtype: FileDType = None,
    quant_min: int | None = None,
    quant_max: int | None = None,
    eps: float | None = None,
    scale_dtype: FileDType = None,
    zero_point_dtype: FileDType = None,
    keepdim: bool = False,
) -> tuple[TensorType, TensorType]:
    if mapping_type not in _MAPPINGS:
        raise ShapeError(f"mapping_type {mapping_type!r} is none of {', '.join(_MAPPINGS)}")
    blocks = Blocks(x.dims, block_size)
    sizes = tuple(blocks.grid if keepdim else blocks.kept)
    scale = scale_dtype if isinstance(scale_dtype, DType) else x.dtype
    zero = (
        zero_point_dtype
        if isinstance(zero_point_dtype, DType)
        else DType.int32
        if mapping_type == "ASYMMETRIC"
        else scale
    )
    return TensorType(scale, sizes), TensorType(zero, sizes)


@rewrite_node("torchao.choose_qparams_affine.default", _affine_shape)
def _expand_affine(builder: Builder, node: Node) -> tuple[Value, Value]:
    x, mapping = node.tensor("x"), _MAPPINGS[node.str("mapping_type")]
    low, high = node.optional_int("quant_min"), node.optional_int("quant_max")
    low, high = INT8[0] if low is None else low, INT8[1] if high is None else high
    epsilon = node.optional_float("eps")
    if epsilon is None:
        epsilon = _SMALLEST.get(x.type.dtype, _EPSILON)
    choice = Choice(mapping, low, high, epsilon, middle=int((high + low + 1) / 2))
    blocks = Blocks(x.type.dims, node.sizes("block_size"))
    return _choose(builder, node, blocks.view(builder, x), blocks.reduced, choice)
