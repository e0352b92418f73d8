"""Choosing scales and zero points from the extremes of a tensor, its rows or its blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import bits_of, gcd4
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL, Program
from purevk.ops.quantized.quantize import Blocks
from purevk.ops.registry import Kernel, Operator, Rewrite, ShapeError, register

_SPACE = "quantized_decomposed"
_EPSILON = 1.1920928955078125e-07  # of float32
_SMALLEST = {
    DType.float32: 1.1754943508222875e-38,
    DType.float16: 6.103515625e-05,
}  # the smallest normal number


@dataclass(frozen=True)
class Rule:
    """How parameters follow from the extremes: expressions over a (least), b (largest number), low
    and high (of the codes), eps (the least scale) and middle; the zero point's also over s, the
    scale."""

    scale: str
    zero: str


_RULES = {
    "asymmetric": Rule("pv_scale(a, b, low, high, eps)", "pv_zero(a, s, low, high)"),
    "nearest": Rule("pv_scale(a, b, low, high, eps)", "pv_zero_nearest(a, b, s, low, high)"),
    "symmetric": Rule("pv_scale_symmetric(a, b, (high - low) * 0.5, eps)", "middle"),
    "unclipped": Rule("pv_scale_unclipped(a, b, low, high, eps)", "middle"),
    "magnitude": Rule("pv_divide(max(max(-a, b), eps), high)", "middle"),
}


@dataclass(frozen=True)
class Choice:
    """A rule with its numbers."""

    rule: str
    low: float
    high: float
    epsilon: float
    middle: int = 0


# -- rows: one kernel ----------------------------------------------------------------------------
NAME = "purevk.row_parameters"


def _rows_shape(
    x: TensorType, choice: Choice, dtypes: tuple[DType, DType]
) -> tuple[TensorType, TensorType]:
    return TensorType(dtypes[0], (x.dims[0],)), TensorType(dtypes[1], (x.dims[0],))


def _rows_lower(lowering: Lowering, node: Node) -> None:
    x_value, choice, _ = node.args
    x, (scale, zero) = (
        lowering.operand(x_value),
        (lowering.operand(value) for value in node.results),
    )
    if any(isinstance(size, int) and size == 0 for size in x.dims):
        return
    if not isinstance(x.offset, int) or not (isinstance(x.strides[1], int) and x.strides[1] == 1):
        x = dense(lowering, x)
    rows, columns = x.dims
    rule, subgroups = (
        _RULES[choice.rule],
        lowering.traits.has("subgroup_arithmetic", "subgroup_size_control"),
    )
    lanes = lowering.traits.subgroup_size if subgroups else 32
    wide = (
        min(max(lanes, 256), lowering.traits.max_invocations // lanes * lanes)
        if lowering.traits.profile.has_fast_shared_memory
        else lanes
    )
    vector = gcd4(columns, x.strides[0], x.offset)
    each = _dims.upper(columns) // (wide * (4 if vector else 1))
    macros: dict[str, Any] = {
        "AHEAD": 1
        if not lowering.traits.profile.overlaps_loads or each < 2
        else 2
        if each < 4
        else 4,
        "T_A": x.dtype.glsl,
        "T_SCALE": scale.dtype.glsl,
        "T_ZERO": zero.dtype.glsl,
        "SCALE": rule.scale,
        "ZERO": rule.zero,
        "VEC4_A": int(vector),
        "LX": wide,
        "SUBGROUP": lanes if subgroups else 0,
    }
    if zero.dtype.itemsize == 1:
        macros["HAS_8BIT"] = "1"
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
        [(x, "r"), (scale, "w"), (zero, "w")],
        macros=macros,
        params=params,
        specialize=lowering.fixed(params),
        grid=lowering.linear_grid(rows, 1),
        subgroup_size=lanes if subgroups else None,
    )


register(Operator(NAME, _rows_shape, Kernel(_rows_lower)))


def _choose(
    builder: Builder, x: Value, dims: Sequence[int], choice: Choice, dtypes: tuple[DType, DType]
) -> tuple[Value, Value]:
    """Scales and zero points of x reduced over `dims`, which are kept as dims of size 1."""
    sizes = tuple(1 if d in dims else size for d, size in enumerate(x.type.dims))
    first = x.type.rank - len(dims)
    whole = tuple(dims) == tuple(range(first, x.type.rank)) and dims
    inner = _dims.product(x.type.dims[first:])
    simple = x.type.dtype in (DType.float32, DType.float16) and dtypes[0] in (
        DType.float32,
        DType.float16,
        DType.float64,
    )
    if whole and simple and not (first == 0 and _dims.upper(inner) > 65536):
        flat = builder.emit("aten.view.default", x, (_dims.product(x.type.dims[:first]), inner))
        made = builder.emit_all(NAME, flat, choice, dtypes)
        return tuple(builder.emit("aten.view.default", each, sizes) for each in made)
    if x.type.dtype is not REAL:
        x = builder.emit("aten._to_copy.default", x, REAL)
    extremes = (
        (x, x)
        if not dims
        else (
            builder.emit(f"aten.{name}.default", x, tuple(dims), True) for name in ("amin", "amax")
        )
    )
    program = Program(builder, sizes)
    known = dict(zip(("a", "b"), map(program.real, extremes)))
    known |= {
        "low": program.real(choice.low),
        "high": program.real(choice.high),
        "eps": program.real(choice.epsilon),
    }
    known["middle"] = program.real(choice.middle)
    rule = _RULES[choice.rule]
    known["s"] = _step(program, rule.scale, known, REAL)
    zero = program.step("int($0)", _step(program, rule.zero, known, REAL), dtype=DType.int32)
    return program.emit_all((known["s"], dtypes[0]), (zero, dtypes[1]))


def _step(program: Program, text: str, known: dict[str, tuple], dtype: DType) -> tuple:
    """An expression over known names as one assignment."""
    order = [name for name in known if re.search(rf"\b{name}\b", text)]
    for number, name in enumerate(order):
        text = re.sub(rf"\b{name}\b", f"${number}", text)
    return program.step(f"float({text})", *(known[name] for name in order), dtype=dtype)


def _shaped(builder: Builder, node: Node, made: tuple[Value, Value]) -> tuple[Value, Value]:
    return tuple(
        builder.emit("aten.view.default", each, want.type.dims)
        for each, want in zip(made, node.results)
    )


def _types(node: Node) -> tuple[DType, DType]:
    return tuple(value.type.dtype for value in node.results)


# -- of a tensor ---------------------------------------------------------------------------------
def _tensor_shape(
    x: TensorType, quant_min: int, quant_max: int, eps: float, target: Any = None
) -> tuple[TensorType, TensorType]:
    return TensorType(DType.float64, (1,)), TensorType(DType.int64, (1,))


def _expand_tensor(rule: str) -> Any:
    def expand(builder: Builder, node: Node) -> tuple[Value, Value]:
        x, low, high, epsilon, target = node.args
        flat = builder.emit("aten.view.default", x, (x.type.numel,))
        middle = 128 if target is DType.uint8 or target == 0 else 0
        made = _choose(builder, flat, (0,), Choice(rule, low, high, epsilon, middle), _types(node))
        return _shaped(builder, node, made)

    return expand


register(
    Operator(
        f"{_SPACE}.choose_qparams.tensor", _tensor_shape, Rewrite(_expand_tensor("asymmetric"))
    )
)
register(
    Operator(
        f"{_SPACE}.choose_qparams_symmetric.tensor",
        _tensor_shape,
        Rewrite(_expand_tensor("symmetric")),
    )
)


# -- of rows -------------------------------------------------------------------------------------
def _token_shape(x: TensorType, target: Any = None) -> tuple[TensorType, TensorType]:
    sizes = (*x.dims[:-1], 1)
    return TensorType(DType.float64, sizes), TensorType(DType.int64, sizes)


def _token_float_shape(x: TensorType, target: Any = None) -> tuple[TensorType, TensorType]:
    sizes = (*x.dims[:-1], 1)
    return TensorType(REAL, sizes), TensorType(REAL, sizes)


def _expand_token(choice: Choice) -> Any:
    return lambda builder, node: _choose(
        builder, node.args[0], (node.args[0].type.rank - 1,), choice, _types(node)
    )


register(
    Operator(
        f"{_SPACE}.choose_qparams_per_token_asymmetric.default",
        _token_shape,
        Rewrite(_expand_token(Choice("nearest", -128, 127, _EPSILON))),
        names=(f"{_SPACE}._choose_qparams_per_token_asymmetric_impl.default",),
    )
)
register(
    Operator(
        f"{_SPACE}.choose_qparams_per_token.default",
        _token_float_shape,
        Rewrite(_expand_token(Choice("magnitude", -128, 127, 1e-5))),
    )
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
    block_size: tuple,
    target_dtype: Any = None,
    quant_min: Any = None,
    quant_max: Any = None,
    eps: float | None = None,
    scale_dtype: Any = None,
    zero_point_dtype: Any = None,
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


def _expand_affine(builder: Builder, node: Node) -> tuple[Value, Value]:
    x, mapping, block, _, low, high, epsilon = node.args[:7]
    low, high = -128 if low is None else low, 127 if high is None else high
    epsilon = _SMALLEST.get(x.type.dtype, _EPSILON) if epsilon is None else epsilon
    blocks = Blocks(x.type.dims, block)
    choice = Choice(_MAPPINGS[mapping], low, high, epsilon, int((high + low + 1) / 2))
    return _shaped(
        builder,
        node,
        _choose(builder, blocks.view(builder, x), blocks.reduced, choice, _types(node)),
    )


register(Operator("torchao.choose_qparams_affine.default", _affine_shape, Rewrite(_expand_affine)))
