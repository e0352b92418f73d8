"""Choosing scales and zero points from the extremes of a tensor, its rows or its blocks."""

from __future__ import annotations

from typing import Any, Sequence

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.ops.quantize import REAL, Blocks, Program
from purevk.ops.registry import Operator, Rewrite, ShapeError, register

_SPACE = "quantized_decomposed"
_EPSILON = 1.1920928955078125e-07  # of float32
_SMALLEST = 1.1754943508222875e-38  # the smallest normal float32


def _extremes(builder: Any, x: Value, dims: Sequence[int]) -> tuple[Value, Value]:
    """Least and largest number over `dims`, which are kept as dims of size 1."""
    if x.type.dtype is not REAL:
        x = builder.emit("aten._to_copy.default", x, REAL)
    if not dims:
        return x, x
    return tuple(builder.emit(f"aten.{name}.default", x, tuple(dims), True) for name in ("amin", "amax"))


def _choose(
    builder: Any, least: Value, most: Value, low: Any, high: Any, epsilon: float, types: Sequence[DType], how: str = "asymmetric",
    middle: int = 0,
) -> tuple[Value, Value]:  # fmt: skip
    """Scales and zero points.

    Args:
        how: "asymmetric", "nearest" (asymmetric, with the zero point from the end of smaller error), "symmetric" or
            "unclipped" (symmetric, with every number inside of the range).
        middle: zero point of the symmetric ones.
    """
    program = Program(builder, least.type.dims)
    a, b, lowest, highest, eps = (program.real(each) for each in (least, most, low, high, epsilon))
    if how == "symmetric":
        half = program.real((float(high) - float(low)) / 2)
        scale = program.step("pv_scale_symmetric($0, $1, $2, $3)", a, b, half, eps)
    elif how == "unclipped":
        scale = program.step("pv_scale_unclipped($0, $1, $2, $3, $4)", a, b, lowest, highest, eps)
    else:
        scale = program.step("pv_scale($0, $1, $2, $3, $4)", a, b, lowest, highest, eps)
    if how == "nearest":
        zero = program.step("pv_zero_nearest($0, $1, $2, $3, $4)", a, b, scale, lowest, highest, dtype=DType.int32)
    elif how == "asymmetric":
        zero = program.step("pv_zero($0, $1, $2, $3)", a, scale, lowest, highest, dtype=DType.int32)
    else:
        zero = program.step("int($0)", program.real(middle), dtype=DType.int32)
    return program.emit((scale, types[0]), (zero, types[1]))


def _shaped(builder: Any, node: Node, made: tuple[Value, Value]) -> tuple[Value, Value]:
    return tuple(builder.emit("aten.view.default", each, want.type.dims) for each, want in zip(made, node.results))


def _types(node: Node) -> tuple[DType, DType]:
    return tuple(value.type.dtype for value in node.results)


# -- of a tensor -------------------------------------------------------------------------------------------------------
def _tensor_shape(x: TensorType, quant_min: int, quant_max: int, eps: float, target: Any = None) -> tuple[TensorType, TensorType]:
    return TensorType(DType.float64, (1,)), TensorType(DType.int64, (1,))


def _expand_tensor(how: str) -> Any:
    def expand(builder: Any, node: Node) -> tuple[Value, Value]:
        x, low, high, epsilon, target = node.args
        flat = builder.emit("aten.view.default", x, (x.type.numel,))
        middle = 128 if target is DType.uint8 or target == 0 else 0
        least, most = _extremes(builder, flat, (0,))
        return _shaped(builder, node, _choose(builder, least, most, low, high, epsilon, _types(node), how, middle))

    return expand


register(Operator(f"{_SPACE}.choose_qparams.tensor", _tensor_shape, Rewrite(_expand_tensor("asymmetric"))))
register(Operator(f"{_SPACE}.choose_qparams_symmetric.tensor", _tensor_shape, Rewrite(_expand_tensor("symmetric"))))


# -- of rows -----------------------------------------------------------------------------------------------------------
def _token_shape(x: TensorType, target: Any = None) -> tuple[TensorType, TensorType]:
    sizes = (*x.dims[:-1], 1)
    return TensorType(DType.float64, sizes), TensorType(DType.int64, sizes)


def _token_float_shape(x: TensorType, target: Any = None) -> tuple[TensorType, TensorType]:
    sizes = (*x.dims[:-1], 1)
    return TensorType(REAL, sizes), TensorType(REAL, sizes)


def _expand_token_asymmetric(builder: Any, node: Node) -> tuple[Value, Value]:
    x = node.args[0]
    least, most = _extremes(builder, x, (x.type.rank - 1,))
    return _choose(builder, least, most, -128, 127, _EPSILON, _types(node), "nearest")


def _expand_token(builder: Any, node: Node) -> tuple[Value, Value]:
    """The largest magnitude, at least 1e-5, divided by 127."""
    x = node.args[0]
    least, most = _extremes(builder, x, (x.type.rank - 1,))
    program = Program(builder, least.type.dims)
    a, b, floor = program.real(least), program.real(most), program.real(1e-5)
    scale = program.step("pv_divide(max(max(-$0, $1), $2), 127.0)", a, b, floor)
    return program.emit((scale, _types(node)[0]), (program.real(0), _types(node)[1]))


register(
    Operator(
        f"{_SPACE}.choose_qparams_per_token_asymmetric.default", _token_shape, Rewrite(_expand_token_asymmetric),
        names=(f"{_SPACE}._choose_qparams_per_token_asymmetric_impl.default",),
    )
)  # fmt: skip
register(Operator(f"{_SPACE}.choose_qparams_per_token.default", _token_float_shape, Rewrite(_expand_token)))


# -- of blocks ---------------------------------------------------------------------------------------------------------
_HOW = {"ASYMMETRIC": "asymmetric", "SYMMETRIC": "symmetric", "SYMMETRIC_NO_CLIPPING_ERR": "unclipped"}


def _affine_shape(
    x: TensorType, mapping_type: str, block_size: tuple, target_dtype: Any = None, quant_min: Any = None,
    quant_max: Any = None, eps: float | None = None, scale_dtype: Any = None, zero_point_dtype: Any = None,
    keepdim: bool = False,
) -> tuple[TensorType, TensorType]:  # fmt: skip
    if mapping_type not in _HOW:
        raise ShapeError(f"mapping_type {mapping_type!r} is none of {', '.join(_HOW)}")
    blocks = Blocks(x.dims, block_size)
    sizes = tuple(blocks.grid if keepdim else blocks.kept)
    scale = scale_dtype if isinstance(scale_dtype, DType) else x.dtype
    zero = zero_point_dtype if isinstance(zero_point_dtype, DType) else DType.int32 if mapping_type == "ASYMMETRIC" else scale
    return TensorType(scale, sizes), TensorType(zero, sizes)


def _expand_affine(builder: Any, node: Node) -> tuple[Value, Value]:
    x, mapping, block, _, low, high, epsilon = node.args[:7]
    low, high = -128 if low is None else low, 127 if high is None else high
    epsilon = (_SMALLEST if x.type.dtype is REAL else 6.103515625e-05) if epsilon is None else epsilon
    blocks = Blocks(x.type.dims, block)
    least, most = _extremes(builder, blocks.view(builder, x), blocks.reduced)
    middle = int((high + low + 1) / 2)
    made = _choose(builder, least, most, low, high, epsilon, _types(node), _HOW[mapping], middle)
    return _shaped(builder, node, made)


register(Operator("torchao.choose_qparams_affine.default", _affine_shape, Rewrite(_expand_affine)))
