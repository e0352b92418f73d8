"""Quantization and dequantization: of tensors, channels, tokens, groups and blocks.

All of these are pointwise programs over a view of the tensor in which scales and zero points
broadcast. Numbers given in the file travel as parameters of the kernel, not in its text, so that
layers with different scales share one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Dim, Node, Size, TensorType, Value, dims
from purevk.lower.expression import convert
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL, Program
from purevk.ops.registry import Operator, Rewrite, ShapeError, register
from purevk.ops.shapes import wrap


def inverse_of(program: Program, scale: Value | float) -> tuple:
    """1 / scale: of a number in double precision and then rounded, of a tensor in float32, as torch
    does."""
    if isinstance(scale, Value):
        return program.step("pv_inverse($0)", program.real(scale))
    return program.real(1.0 / float(scale) if scale else float("inf"))


def emit_quantize(
    builder: Builder,
    x: Value,
    scale: Value | float,
    zero: Value | int | None,
    low: Any,
    high: Any,
    dtype: DType,
    moved: bool = False,
) -> Value:
    """clamp(round(x / scale) + zero, low, high); `moved`: the zero point is added before the
    rounding."""
    program = Program(builder, x.type.dims)
    if isinstance(scale, Value) and scale.type.dtype is DType.float64:
        return _quantize_double(program, x, scale, zero, low, high, dtype, moved)
    return program.emit(
        (
            quantized_value(
                program, program.real(x), inverse_of(program, scale), zero, low, high, dtype, moved
            ),
            dtype,
        )
    )


_FAR = 2**20


def quantized_value(
    program: Program,
    number: tuple,
    inverse: tuple,
    zero: Value | int | None,
    low: Any,
    high: Any,
    dtype: DType,
    moved: bool = False,
) -> tuple:
    """The code of a number, as int32; see `emit_quantize`."""
    known = [
        each for each in (0 if zero is None else zero, low, high) if not isinstance(each, Value)
    ]
    byte = dtype.itemsize == 1 and all(abs(each) < _FAR and each == int(each) for each in known)
    byte = byte and not any(isinstance(each, Value) for each in (low, high))
    byte = byte and not (isinstance(zero, Value) and zero.type.dtype.is_float)
    move = program.real(0 if zero is None else zero)
    if byte and isinstance(zero, Value) and zero.type.dtype.itemsize > 1:
        move = program.step(f"clamp($0, {-_FAR}.0, {_FAR}.0)", move)
    name = f"pv_code{'_byte' if byte else ''}{'_moved' if moved else ''}"
    numbers = (number, inverse, move, program.real(low), program.real(high))
    return program.step(f"{name}($0, $1, $2, $3, $4)", *numbers, dtype=DType.int32)


def _quantize_double(
    program: Program,
    x: Value,
    scale: Value,
    zero: Any,
    low: Any,
    high: Any,
    dtype: DType,
    moved: bool,
) -> Value:
    """Scales of double precision make torch compute in it."""
    steps = program._steps

    def wide(ref, source):
        return steps.step(convert("$0", source, DType.float64), [ref], DType.float64)

    v, s = (wide(steps.input(each, each.type.dtype), each.type.dtype) for each in (x, scale))
    z = wide(program.real(0 if zero is None else zero), REAL)
    text = "roundEven($0 * (1.0lf / $1) + $2)" if moved else "roundEven($0 * (1.0lf / $1)) + $2"
    code = steps.step(text, [v, s, z], DType.float64)
    bounds = [wide(program.real(each), REAL) for each in (low, high)]
    return program.emit((steps.step("int(clamp($0, $1, $2))", [code, *bounds], DType.int32), dtype))


def emit_dequantize(
    builder: Builder, q: Value, scale: Value | float, zero: Value | int | None, dtype: DType
) -> Value:
    """(q - zero) * scale."""
    program = Program(builder, q.type.dims)
    zero = 0 if zero is None else zero
    numbers = [program.real(q), program.real(zero), program.real(scale)]
    return program.emit((program.step("pv_real($0, $1, $2)", *numbers), dtype))


# -- shapes --------------------------------------------------------------------------------------
def _dtype(given: Any, otherwise: DType) -> DType:
    """A dtype that may be left out, or stand as ExecuTorch's number for it."""
    if isinstance(given, DType):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return DType.from_pte(given) or otherwise
    return otherwise


def _along(builder: Builder, value: Value | None, rank: int, axis: int) -> Value | None:
    """A vector of parameters as a tensor that broadcasts along `axis`."""
    if value is None:
        return None
    return builder.emit(
        "aten.view.default", value, tuple(value.type.numel if d == axis else 1 for d in range(rank))
    )


def _one(builder: Builder, value: Any) -> Any:
    """A tensor of one element without dims; a number as it is."""
    if isinstance(value, Value) and value.type.rank:
        return builder.emit("aten.view.default", value, ())
    return value


class Blocks:
    """A tensor seen as blocks that share parameters: `sizes` of the view, `of_parameters` of theirs
    in it.

    Args:
        dims: the tensor's.
        block: sizes of a block; a dim of which a block takes all need not be split.
    """

    def __init__(self, dims: Sequence[Size], block: Sequence[Size]) -> None:
        if len(block) != len(dims):
            raise ShapeError(f"blocks of {list(block)} in a tensor of {list(dims)}")
        self.sizes: list[Size] = []
        self.of_parameters: list[Size] = []
        self.reduced: list[int] = []
        self.kept: list[Size] = []
        for size, length in zip(dims, block):
            if isinstance(length, int) and length == 1:
                self._dim(size, size)
            elif _covers(length, size):
                self.reduced.append(len(self.sizes))
                self._dim(size, 1)
            elif size % length == 0:
                self._dim(size // length, size // length)
                self.reduced.append(len(self.sizes))
                self._dim(length, 1)
            else:
                raise ShapeError(f"blocks of {list(block)} do not divide {list(dims)}")
        self.kept = [size for d, size in enumerate(self.of_parameters) if d not in self.reduced]
        self.grid = [
            size if isinstance(b, int) and b == 1 else 1 if _covers(b, size) else size // b
            for size, b in zip(dims, block)
        ]

    def _dim(self, size: Size, of_parameters: Size) -> None:
        self.sizes.append(size)
        self.of_parameters.append(of_parameters)

    def view(self, builder: Builder, value: Value) -> Value:
        return builder.emit("aten.view.default", value, tuple(self.sizes))

    def parameters(self, builder: Builder, value: Value | None) -> Value | None:
        return (
            None
            if value is None
            else builder.emit("aten.view.default", value, tuple(self.of_parameters))
        )


def _covers(length: Size, size: Size) -> bool:
    """Whether a block takes the whole of a dim. A block is recorded at the upper bound of a size
    that varies."""
    if isinstance(size, Dim):
        return isinstance(length, Dim) or length == _upper(size)
    return length == size


def _upper(size: Size) -> int:
    return dims.upper(size)


# -- per tensor ----------------------------------------------------------------------------------
def _quantize_shape(
    x: TensorType, scale: Any, zero_point: Any, quant_min: Any, quant_max: Any, dtype: Any = None
) -> TensorType:
    return x.with_dtype(_dtype(dtype, DType.int8))


def _dequantize_shape(
    x: TensorType,
    scale: Any,
    zero_point: Any,
    quant_min: Any,
    quant_max: Any,
    input_dtype: Any = None,
    out_dtype: Any = None,
) -> TensorType:
    return x.with_dtype(_dtype(out_dtype, REAL))


def _expand_quantize(builder: Builder, node: Node) -> Value:
    x, *parameters = node.args[:5]
    return emit_quantize(
        builder, x, *(_one(builder, each) for each in parameters), node.result.type.dtype
    )


def _expand_dequantize(builder: Builder, node: Node) -> Value:
    x, scale, zero = node.args[:3]
    return emit_dequantize(
        builder, x, _one(builder, scale), _one(builder, zero), node.result.type.dtype
    )


_SPACE = "quantized_decomposed"
for _overload in ("default", "tensor", "tensor2"):
    register(
        Operator(
            f"{_SPACE}.quantize_per_tensor.{_overload}", _quantize_shape, Rewrite(_expand_quantize)
        )
    )
    register(
        Operator(
            f"{_SPACE}.dequantize_per_tensor.{_overload}",
            _dequantize_shape,
            Rewrite(_expand_dequantize),
        )
    )


# The same for int8, as files made from ExecuTorch's sources in the autumn of 2025 have them around
# convolutions.
register(
    Operator(
        "et_vk.quantize_q8ta_for_conv2d.default",
        lambda x, scale, zero_point: x.with_dtype(DType.int8),
        Rewrite(
            lambda builder, node: emit_quantize(
                builder,
                node.args[0],
                *(_one(builder, each) for each in node.args[1:]),
                -128,
                127,
                DType.int8,
            )
        ),
    )
)
register(
    Operator(
        "et_vk.dequantize_q8to_from_conv2d.default",
        lambda x, scale, zero_point: x.with_dtype(REAL),
        Rewrite(_expand_dequantize),
    )
)


register(
    Operator(
        f"{_SPACE}.convert_element_type.no_fuse",
        lambda x, dtype: x.with_dtype(_dtype(dtype, x.dtype)),
        Rewrite(
            lambda builder, node: builder.emit(
                "aten._to_copy.default", node.args[0], node.result.type.dtype
            )
        ),
        names=("prims.convert_element_type.default",),
    )
)


# -- per channel ---------------------------------------------------------------------------------
def _quantize_channel_shape(
    x: TensorType,
    scales: TensorType,
    zero_points: TensorType | None,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: Any = None,
) -> TensorType:
    wrap(axis, x.rank)
    return x.with_dtype(_dtype(dtype, DType.int8))


def _dequantize_channel_shape(
    x: TensorType,
    scales: TensorType,
    zero_points: TensorType | None,
    axis: int,
    quant_min: int,
    quant_max: int,
    input_dtype: Any = None,
    out_dtype: Any = None,
) -> TensorType:
    wrap(axis, x.rank)
    return x.with_dtype(_dtype(out_dtype, REAL))


def _channel(builder: Builder, node: Node) -> tuple[Value, Value, Value | None]:
    x, scales, zeros, axis = node.args[:4]
    axis = wrap(axis, x.type.rank)
    return x, _along(builder, scales, x.type.rank, axis), _along(builder, zeros, x.type.rank, axis)


def _expand_quantize_channel(builder: Builder, node: Node) -> Value:
    return emit_quantize(builder, *_channel(builder, node), *node.args[4:6], node.result.type.dtype)


def _expand_dequantize_channel(builder: Builder, node: Node) -> Value:
    return emit_dequantize(builder, *_channel(builder, node), node.result.type.dtype)


def _fake_channel_shape(
    x: TensorType,
    scales: TensorType,
    zero_points: TensorType,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> TensorType:
    return x


def _expand_fake_channel(builder: Builder, node: Node) -> Value:
    x, scales, zeros = _channel(builder, node)
    codes = emit_quantize(builder, x, scales, zeros, *node.args[4:6], DType.int32)
    return emit_dequantize(builder, codes, scales, zeros, x.type.dtype)


register(
    Operator(
        f"{_SPACE}.quantize_per_channel.default",
        _quantize_channel_shape,
        Rewrite(_expand_quantize_channel),
    )
)
register(
    Operator(
        f"{_SPACE}.dequantize_per_channel.default",
        _dequantize_channel_shape,
        Rewrite(_expand_dequantize_channel),
    )
)
register(
    Operator(
        f"{_SPACE}.fake_quant_per_channel.default",
        _fake_channel_shape,
        Rewrite(_expand_fake_channel),
    )
)


# -- per token -----------------------------------------------------------------------------------
def _dequantize_token_shape(
    x: TensorType,
    scales: TensorType,
    zero_points: TensorType,
    quant_min: int,
    quant_max: int,
    input_dtype: Any = None,
    output_dtype: Any = None,
) -> TensorType:
    return x.with_dtype(_dtype(output_dtype, REAL))


def _token(builder: Builder, x: Value, value: Value) -> Value:
    return builder.emit("aten.view.default", value, (*x.type.dims[:-1], 1))


def _expand_quantize_token(builder: Builder, node: Node) -> Value:
    x, scales, zeros, low, high = node.args[:5]
    scales, zeros = _token(builder, x, scales), _token(builder, x, zeros)
    return emit_quantize(builder, x, scales, zeros, low, high, node.result.type.dtype, moved=True)


def _expand_dequantize_token(builder: Builder, node: Node) -> Value:
    x, scales, zeros = node.args[:3]
    return emit_dequantize(
        builder, x, _token(builder, x, scales), _token(builder, x, zeros), node.result.type.dtype
    )


register(
    Operator(
        f"{_SPACE}.quantize_per_token.default", _quantize_shape, Rewrite(_expand_quantize_token)
    )
)
register(
    Operator(
        f"{_SPACE}.dequantize_per_token.default",
        _dequantize_token_shape,
        Rewrite(_expand_dequantize_token),
    )
)


# -- per group of a row --------------------------------------------------------------------------
def _quantize_group_shape(
    x: TensorType,
    scales: TensorType,
    zero_points: TensorType,
    quant_min: int,
    quant_max: int,
    dtype: Any = None,
    group_size: int = 128,
) -> TensorType:
    return x.with_dtype(_dtype(dtype, DType.int8))


def _dequantize_group_shape(
    x: TensorType,
    scales: TensorType,
    zero_points: TensorType | None,
    quant_min: int,
    quant_max: int,
    input_dtype: Any = None,
    group_size: int = 128,
    output_dtype: Any = None,
) -> TensorType:
    return x.with_dtype(_dtype(output_dtype, REAL))


def _groups(x: Value, group: int) -> Blocks:
    """Rows in groups; a longer group than a row is the row."""
    return Blocks(x.type.dims, (1, min(group, x.type.dims[1])))


def _expand_quantize_group(builder: Builder, node: Node) -> Value:
    x, scales, zeros, low, high, _, group = node.args
    blocks = _groups(x, group)
    scales, zeros = blocks.parameters(builder, scales), blocks.parameters(builder, zeros)
    codes = emit_quantize(
        builder,
        blocks.view(builder, x),
        scales,
        zeros,
        low,
        high,
        node.result.type.dtype,
        moved=True,
    )
    return builder.emit("aten.view.default", codes, x.type.dims)


def _expand_dequantize_group(builder: Builder, node: Node) -> Value:
    x, scales, zeros = node.args[:3]
    blocks = _groups(x, node.args[6])
    scales, zeros = blocks.parameters(builder, scales), blocks.parameters(builder, zeros)
    made = emit_dequantize(builder, blocks.view(builder, x), scales, zeros, node.result.type.dtype)
    return builder.emit("aten.view.default", made, x.type.dims)


register(
    Operator(
        f"{_SPACE}.quantize_per_channel_group.default",
        _quantize_group_shape,
        Rewrite(_expand_quantize_group),
    )
)
register(
    Operator(
        f"{_SPACE}.dequantize_per_channel_group.default",
        _dequantize_group_shape,
        Rewrite(_expand_dequantize_group),
    )
)


# -- torchao: blocks of any shape ----------------------------------------------------------------
_RANGES = {
    DType.int8: (-128, 127),
    DType.uint8: (0, 255),
    DType.int16: (-(2**15), 2**15 - 1),
    DType.int32: (-(2**31), 2**31 - 1),
}


def _quantize_affine_shape(
    x: TensorType,
    block_size: tuple,
    scale: TensorType,
    zero_point: TensorType | None,
    dtype: Any = None,
    quant_min: Any = None,
    quant_max: Any = None,
) -> TensorType:
    Blocks(x.dims, block_size)
    return x.with_dtype(_dtype(dtype, DType.int8))


def _dequantize_affine_shape(
    x: TensorType,
    block_size: tuple,
    scale: TensorType,
    zero_point: TensorType | None,
    input_dtype: Any = None,
    quant_min: Any = None,
    quant_max: Any = None,
    output_dtype: Any = None,
) -> TensorType:
    Blocks(x.dims, block_size)
    return x.with_dtype(_dtype(output_dtype, REAL))


def _expand_quantize_affine(builder: Builder, node: Node) -> Value:
    x, block, scale, zero, _, low, high = node.args
    dtype = node.result.type.dtype
    low, high = (
        given if given is not None else known for given, known in zip((low, high), _RANGES[dtype])
    )
    blocks = Blocks(x.type.dims, block)
    zero = zero if zero is not None and zero.type.numel != 0 else None
    parameters = blocks.parameters(builder, scale), blocks.parameters(builder, zero)
    codes = emit_quantize(builder, blocks.view(builder, x), *parameters, low, high, dtype)
    return builder.emit("aten.view.default", codes, x.type.dims)


def _expand_dequantize_affine(builder: Builder, node: Node) -> Value:
    x, block, scale, zero = node.args[:4]
    blocks = Blocks(x.type.dims, block)
    zero = zero if zero is not None and zero.type.numel != 0 else None
    parameters = blocks.parameters(builder, scale), blocks.parameters(builder, zero)
    made = emit_dequantize(builder, blocks.view(builder, x), *parameters, node.result.type.dtype)
    return builder.emit("aten.view.default", made, x.type.dims)


register(
    Operator(
        "torchao.quantize_affine.default", _quantize_affine_shape, Rewrite(_expand_quantize_affine)
    )
)
register(
    Operator(
        "torchao.dequantize_affine.default",
        _dequantize_affine_shape,
        Rewrite(_expand_dequantize_affine),
    )
)
