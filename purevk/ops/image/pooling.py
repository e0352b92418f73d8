"""Pooling of images over windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.declared import AUTO
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4
from purevk.ops.builder import Builder
from purevk.ops.conv.arguments import Ints, Window
from purevk.ops.conv.nchw import runs_in_nchw
from purevk.ops.image_layout import NHWC, LayoutQuery, column_rows, is_nchw_operand, keeps_nchw
from purevk.ops.registry import Kernel, Order, ShapeError, define, rewrite_node
from purevk.ops.signatures import signature

NAME = "purevk.pool2d"
# What a maximum starts from, by the type that is computed in.
# Elements are the bits of bfloat16.
_BFLOAT16 = {
    "FROM_X(v)": "uintBitsToFloat(uint(v) << 16)",
    "TO_OUT(v)": "uint16_t(pv_bfloat16_bits(v))",
}
_TO_BFLOAT16_4 = {
    "TO_OUT4(v)": "u16vec4(uvec4(pv_bfloat16_bits((v).x), pv_bfloat16_bits((v).y),"
    " pv_bfloat16_bits((v).z), pv_bfloat16_bits((v).w)))"
}
_LOWEST = {
    "float": "uintBitsToFloat(0xff800000u)",
    "int": "(-2147483647 - 1)",
    "int64_t": "PV_INT64_MIN",
}
# Of integers that are stored in fewer bits than they are compared in.
_SMALL = {DType.int8: "(-128)", DType.int16: "(-32768)", DType.uint8: "0"}


def pooled_size(
    size: Size, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> Size:
    """The size of the result along one dim."""
    span = size + (2 * padding - dilation * (kernel - 1) - 1)
    if not ceil_mode:
        return span // stride + 1
    count = (span + (stride - 1)) // stride + 1
    # The last window must start inside the input or its left padding.
    return count - 1 if (count - 1) * stride >= size + padding else count


@dataclass(frozen=True)
class Pool:
    """The arguments of a `purevk.pool2d` node.

    Attributes:
        sizes: rows and columns of the result.
        divisor: what averages are divided by; 0: the elements of the window.
        indices: the dtype of the indices of the maxima, if they are wanted.
    """

    x: Value
    average: bool
    window: Window
    sizes: tuple[Size, Size]
    count_include_pad: bool
    divisor: int
    indices: DType | None

    @classmethod
    def of(cls, node: Node) -> Pool:
        height, width = node.sizes("sizes", 2)
        return cls(
            node.tensor("x"),
            node.bool("average"),
            Window.make(
                *(node.ints(name, 2) for name in ("kernel", "stride", "padding", "dilation"))
            ),
            (height, width),
            node.bool("count_include_pad"),
            node.int("divisor"),
            node.optional_dtype("indices"),
        )

    @property
    def params(self) -> dict[str, int]:
        """The window as the templates declare it."""
        window = self.window
        return {
            "kernel_h": window.kernel[0],
            "kernel_w": window.kernel[1],
            "stride_h": window.stride[0],
            "stride_w": window.stride[1],
            "pad_h": window.padding[0],
            "pad_w": window.padding[1],
            "dilation_h": window.dilation[0],
            "dilation_w": window.dilation[1],
        }


@signature(
    "x, average, kernel, stride, padding, dilation, sizes, count_include_pad=True, "
    "divisor: int = 0, indices=None"
)
def _pool_shape(
    x: TensorType, sizes: tuple[Size, Size], indices: DType | None
) -> TensorType | tuple[TensorType, TensorType]:
    result = x.with_dims((*x.dims[:2], *sizes))
    return result if indices is None else (result, result.with_dtype(indices))


def _pool_lower(lowering: Lowering, node: Node) -> None:
    pool, traits = Pool.of(node), lowering.traits
    x, out = lowering.operand(pool.x), lowering.operand(node.results[0])
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    second = lowering.operand(node.results[1]) if pool.indices is not None else None
    window = pool.window
    rows = column_rows(traits, out.dims, window.kernel, window.stride, window.dilation)
    if is_nchw_operand(x) and is_nchw_operand(out) and rows:
        _lower_nchw(lowering, pool, x, out, second, rows)
    else:
        _lower_strided(lowering, pool, x, out, second)


def _lower_nchw(
    lowering: Lowering, pool: Pool, x: Operand, out: Operand, indices: Operand | None, rows: int
) -> None:
    """One invocation makes `rows` outputs of a column."""
    batches, channels, _, _ = x.dims
    params = {
        "channels": batches * channels,
        **_params(pool, x, indices),
        "x_n": x.strides[0],
        "x_c": x.strides[1],
        "x_h": x.strides[2],
    }
    local = min(256, lowering.traits.max_invocations)
    work = batches * channels * _dims.ceil_div(pool.sizes[0], rows) * pool.sizes[1]
    lowering.dispatch(
        "image/pool_nchw.comp",
        {"x": x, "out": out, "index": indices},
        params,
        {**_macros(pool, x, out), "ROWS": rows},
        constants=pool.params,
        local=local,
        specialize=True,
        grid=lowering.linear_grid(work, local),
        flops=out.type.numel * pool.window.taps,
    )


def _lower_strided(
    lowering: Lowering, pool: Pool, x: Operand, out: Operand, indices: Operand | None
) -> None:
    """One invocation makes one output, or four channels of one pixel, in any layout."""
    channels = x.dims[1]
    nhwc = isinstance(x.strides[1], int) and x.strides[1] == 1
    vector = (
        nhwc
        and x.dtype in (DType.float32, DType.float16, DType.bfloat16)
        and gcd4(
            channels,
            x.offset,
            out.offset,
            *(operand.strides[d] for operand in (x, out) for d in (0, 2, 3)),
        )
    )
    profile = lowering.traits.profile
    unrolled = profile.overlaps_loads and pool.window.taps <= profile.max_unrolled_window
    count, local = out.type.numel, 64
    axes = {"n": 0, "h": 2, "w": 3, "c": 1}
    params = {
        "outputs": count,
        **_params(pool, x, indices),
        **pool.params,
        **{f"x_{axis}": x.strides[d] for axis, d in axes.items()},
        **{f"out_{axis}": out.strides[d] for axis, d in axes.items()},
    }
    lowering.dispatch(
        "image/pool.comp",
        {"x": x, "out": out, "index": indices},
        params,
        {
            **_macros(pool, x, out),
            "NHWC": int(nhwc),
            "VEC4": int(vector),
            "TEXEL_X": AUTO,
            "UNROLLED": int(unrolled),
            **(_TO_BFLOAT16_4 if x.dtype is DType.bfloat16 else {}),
        },
        local=local,
        always=pool.params,
        grid=lowering.linear_grid(_dims.ceil_div(count, 4) if vector else count, local),
        flops=count * pool.window.taps,
    )


def _macros(pool: Pool, x: Operand, out: Operand) -> dict[str, str | int]:
    """The macros that both templates have."""
    acc = "float" if x.dtype.is_float else "int64_t" if x.dtype is DType.int64 else "int"
    macros: dict[str, str | int] = {
        "T_X": x.dtype.glsl,
        "T_OUT": out.dtype.glsl,
        "ACC": acc,
        "AVERAGE": int(pool.average),
        "LOWEST": _SMALL.get(x.dtype, _LOWEST[acc]),
        "COUNT_INCLUDE_PAD": int(pool.count_include_pad),
        "INDICES": int(pool.indices is not None),
    }
    if x.dtype is DType.int64:
        macros["HAS_INT64"] = 1
    if x.dtype is DType.bfloat16:
        macros |= _BFLOAT16
    if pool.indices is DType.int64:
        # An index is not negative and takes 32 bits, so that no arithmetic of 64 is needed.
        macros |= {"T_INDEX": "uvec2", "TO_INDEX(v)": "uvec2(uint(v), 0u)"}
    elif pool.indices is not None:
        macros["T_INDEX"] = "int"
    return macros


def _params(pool: Pool, x: Operand, indices: Operand | None) -> dict[str, Size]:
    """The parameters that both templates have."""
    _, channels, height, width = x.dims
    params = {
        "C": channels,
        "H": height,
        "W": width,
        "OH": pool.sizes[0],
        "OW": pool.sizes[1],
    }
    if pool.average:
        params["divisor"] = pool.divisor
    if indices is not None:
        params["index_offset"] = indices.offset
    return params


def _pool_layouts(node: Node, query: LayoutQuery) -> tuple[Order | None, ...]:
    nchw = keeps_nchw(node, node.tensor("x"), query, False, runs_in_nchw)
    return (None if nchw else NHWC,) * len(node.results)


def _pool_adapt(node: Node, orders: tuple[Order | None, ...], query: LayoutQuery) -> Node:
    """The node without the indices, if nobody reads them."""
    if len(node.results) == 1 or query.read(node.results[1]):
        return node
    return Node(NAME, (*node.args[:-1], None), node.results[:1], node.source, node.alias)


define(NAME, _pool_shape, Kernel(_pool_lower, layouts=_pool_layouts, adapt=_pool_adapt))


# -- operators of torch ---------------------------------------------------------------------------
def _sizes(x: TensorType, window: Window, ceil_mode: bool) -> tuple[Size, Size]:
    """Rows and columns of the result."""
    if x.rank not in (3, 4):
        raise ShapeError(f"2-D pooling takes rank 3 or 4, not {x.rank}")
    height, width = (
        pooled_size(
            x.dims[x.rank - 2 + d],
            window.kernel[d],
            window.stride[d],
            window.padding[d],
            window.dilation[d],
            ceil_mode,
        )
        for d in range(2)
    )
    return height, width


def _max_shape(
    x: TensorType,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> TensorType:
    window = Window.make(kernel_size, stride or kernel_size, padding, dilation)
    return x.with_dims((*x.dims[:-2], *_sizes(x, window, ceil_mode)))


def with_indices(shape: Callable[..., TensorType]) -> Callable[..., tuple[TensorType, ...]]:
    """The shape function of maxima and their indices, with the parameters of that of maxima."""

    @wraps(shape)
    def both(*args: Any, **keywords: Any) -> tuple[TensorType, ...]:
        values = shape(*args, **keywords)
        return values, values.with_dtype(DType.int64)

    return both


_max_indices_shape = with_indices(_max_shape)


def _as_images(builder: Builder, x: Value) -> Value:
    return x if x.type.rank == 4 else builder.aten.view(x, (1, *x.type.dims))


def _like(builder: Builder, value: Value, node_result: Value) -> Value:
    if value.type.dtype is not node_result.type.dtype:
        value = builder.aten._to_copy(value, node_result.type.dtype)
    return (
        value
        if value.type.rank == node_result.type.rank
        else builder.aten.view(value, node_result.type.dims)
    )


def _emit(
    builder: Builder,
    node: Node,
    average: bool,
    dilation: Sequence[int],
    count_include_pad: bool = True,
    divisor: int = 0,
) -> tuple[Value, ...]:
    """Emits `purevk.pool2d` for a node of torch."""
    x, kernel = node.tensor("x"), node.ints("kernel_size", 2)
    window = Window.make(kernel, node.ints("stride") or kernel, node.ints("padding"), dilation)
    made = builder.emit_all(
        NAME,
        _as_images(builder, x),
        average,
        window.kernel,
        window.stride,
        window.padding,
        window.dilation,
        _sizes(x.type, window, node.bool("ceil_mode")),
        count_include_pad,
        divisor,
        node.results[1].type.dtype if len(node.results) == 2 else None,
    )
    return tuple(_like(builder, value, result) for value, result in zip(made, node.results))


@rewrite_node("aten.max_pool2d_with_indices.default", _max_indices_shape)
@rewrite_node("aten.max_pool2d.default", _max_shape)
def _expand_max(builder: Builder, node: Node) -> tuple[Value, ...]:
    return _emit(builder, node, False, node.ints("dilation", 2))


@signature(
    "x, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True, "
    "divisor_override: int | None = None"
)
def _average_shape(
    x: TensorType, kernel_size: Ints, stride: Ints, padding: Ints, ceil_mode: bool
) -> TensorType:
    window = Window.make(kernel_size, stride or kernel_size, padding, 1)
    return x.with_dims((*x.dims[:-2], *_sizes(x, window, ceil_mode)))


@rewrite_node("aten.avg_pool2d.default", _average_shape)
def _expand_average(builder: Builder, node: Node) -> tuple[Value, ...]:
    divisor = node.optional_int("divisor_override") or 0
    return _emit(builder, node, True, (1, 1), node.bool("count_include_pad"), divisor)


@rewrite_node(
    "aten.max_pool2d_with_indices_backward.default",
    lambda slopes, x, kernel_size, stride, padding, dilation, ceil_mode, indices: x,
)
def _expand_max_backward(builder: Builder, node: Node) -> Value:
    """Gradients are added up at the elements that were the maxima."""
    slopes, x, indices = node.tensor("slopes"), node.tensor("x"), node.tensor("indices")
    *lead, height, width = x.type.dims
    flat = [
        builder.aten.view(each, (*lead, each.type.dims[-2] * each.type.dims[-1]))
        for each in (indices, slopes)
    ]
    zeros = builder.aten.full((*lead, height * width), fill_value=0, dtype=x.type.dtype)
    made = builder.aten.scatter_add(zeros, len(lead), *flat)
    return builder.aten.view(made, x.type.dims)
