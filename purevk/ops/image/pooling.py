"""Pooling over windows."""

from __future__ import annotations

from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import gcd4
from purevk.lower.rows import bind_x
from purevk.ops.builder import Builder
from purevk.ops.conv.convolution import CHANNELS_LAST, runs_in_nchw
from purevk.ops.image_layout import LayoutQuery, column_rows, is_nchw_operand, keeps_nchw
from purevk.ops.registry import Kernel, Operator, Rewrite, ShapeError, register
from purevk.ops.shapes import pair

NAME = "purevk.pool2d"


def _out(
    size: Size, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> Size:
    span = size + (2 * padding - dilation * (kernel - 1) - 1)
    if not ceil_mode:
        return span // stride + 1
    count = (span + (stride - 1)) // stride + 1
    # The last window must start inside the input or its left padding.
    return count - 1 if (count - 1) * stride >= size + padding else count


def _pool_shape(
    x: TensorType,
    average: bool,
    kernel: tuple,
    stride: tuple,
    padding: tuple,
    dilation: tuple,
    sizes: tuple,
    count_include_pad: bool = True,
    divisor: int = 0,
    indices: DType | None = None,
) -> Any:
    result = x.with_dims((*x.dims[:2], *sizes))
    return result if indices is None else (result, result.with_dtype(indices))


def _pool_lower(lowering: Lowering, node: Node) -> None:
    (
        x_value,
        average,
        kernel,
        stride,
        padding,
        dilation,
        sizes,
        count_include_pad,
        divisor,
        indices,
    ) = node.args
    x, out = lowering.operand(x_value), lowering.operand(node.results[0])
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    batches, channels, height, width = x.dims
    n, c, h, w = (0, 1, 2, 3)
    last = isinstance(x.strides[c], int) and x.strides[c] == 1
    acc = "float" if x.dtype.is_float else "int64_t" if x.dtype is DType.int64 else "int"
    lowest = {
        "float": "uintBitsToFloat(0xff800000u)",
        "int": "(-2147483647 - 1)",
        "int64_t": "PV_INT64_MIN",
    }[acc]
    macros: dict[str, Any] = {
        "T_X": x.dtype.glsl,
        "T_OUT": out.dtype.glsl,
        "ACC": acc,
        "AVERAGE": int(average),
        "LOWEST": lowest,
        **({"HAS_INT64": 1} if x.dtype is DType.int64 else {}),
        "COUNT_INCLUDE_PAD": int(count_include_pad),
        "INDICES": int(indices is not None),
    }
    second = None
    if indices is not None:
        second = lowering.operand(node.results[1])
        # An index is not negative and takes 32 bits, so that no arithmetic of 64 is needed.
        wide = {"T_INDEX": "uvec2", "TO_INDEX(v)": "uvec2(uint(v), 0u)"}
        macros |= wide if indices is DType.int64 else {"T_INDEX": "int"}
    window = {
        f"{name}_{axis}": size
        for name, sizes_ in zip(
            ("kernel", "stride", "pad", "dilation"), (kernel, stride, padding, dilation)
        )
        for axis, size in zip("hw", sizes_)
    }
    common: dict[str, Size] = {
        "C": channels,
        "H": height,
        "W": width,
        "OH": sizes[0],
        "OW": sizes[1],
        **({"divisor": divisor} if average else {}),
        **({"index_offset": second.offset} if second is not None else {}),
    }
    flops = out.type.numel * kernel[0] * kernel[1]
    rows = column_rows(lowering.traits, out.dims, kernel, stride, dilation)
    if is_nchw_operand(x) and is_nchw_operand(out) and rows:
        buffers = [(x, "r"), (out, "w"), *([(second, "w")] if second is not None else [])]
        params = {
            "x_offset": x.offset,
            "out_offset": out.offset,
            "planes": batches * channels,
            **common,
            "x_n": x.strides[n],
            "x_c": x.strides[c],
            "x_h": x.strides[h],
        }
        local = min(256, lowering.traits.max_invocations)
        work = batches * channels * _dims.ceil_div(sizes[0], rows) * sizes[1]
        lowering.dispatch(
            "image/pool_nchw.comp",
            buffers,
            macros={**macros, "ROWS": rows},
            params=params,
            constants={**window, "local_size_x": local},
            specialize=params,
            grid=lowering.linear_grid(work, local),
            flops=flops,
        )
        return
    vector = (
        last
        and x.dtype in (DType.float32, DType.float16)
        and gcd4(
            channels,
            x.offset,
            out.offset,
            *(x.strides[d] for d in (n, h, w)),
            *(out.strides[d] for d in (n, h, w)),
        )
    )
    profile = lowering.traits.profile
    most = profile.max_unrolled_window if profile.overlaps_loads else 0
    unrolled = kernel[0] * kernel[1] <= most
    macros |= {"CHANNELS_LAST": int(last), "VEC4": int(vector), "UNROLLED": int(unrolled)}
    texel, binding = bind_x(lowering, x, vector)
    macros |= texel
    buffers = [binding, (out, "w"), *([(second, "w")] if second is not None else [])]
    count = out.type.numel
    local = 64
    order = {"n": n, "h": h, "w": w, "c": c}
    params = {
        "x_offset": x.offset,
        "out_offset": out.offset,
        "outputs": count,
        **common,
        **window,
        **{f"x_{axis}": x.strides[d] for axis, d in order.items()},
        **{f"out_{axis}": out.strides[d] for axis, d in order.items()},
    }
    lowering.dispatch(
        "image/pool.comp",
        buffers,
        macros=macros,
        params=params,
        constants={"local_size_x": local},
        specialize=lowering.fixed(params, window),
        grid=lowering.linear_grid(_dims.ceil_div(count, 4) if vector else count, local),
        flops=flops,
    )


def _pool_layouts(node: Node, query: LayoutQuery) -> tuple:
    planes = keeps_nchw(node, node.args[0], query, False, runs_in_nchw)
    return (None if planes else CHANNELS_LAST,) * len(node.results)


def _pool_adapt(node: Node, orders: tuple, query: LayoutQuery) -> Node:
    """The node without the indices, where nobody reads these."""
    if len(node.results) == 1 or query.read(node.results[1]):
        return node
    return Node(NAME, (*node.args[:-1], None), node.results[:1], node.source, node.alias)


register(
    Operator(
        NAME,
        _pool_shape,
        Kernel(_pool_lower, layouts=_pool_layouts, adapt=_pool_adapt, bfloat16=False),
    )
)


def _window(
    x: TensorType, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> tuple:
    if x.rank not in (3, 4):
        raise ShapeError(f"2-D pooling takes rank 3 or 4, not {x.rank}")
    kernel, padding, dilation = pair(kernel), pair(padding), pair(dilation)
    stride = pair(stride) if stride else kernel
    sizes = tuple(
        _out(x.dims[x.rank - 2 + d], kernel[d], stride[d], padding[d], dilation[d], ceil_mode)
        for d in range(2)
    )
    return kernel, stride, padding, dilation, sizes


def _max_shape(
    x: TensorType,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> TensorType:
    return x.with_dims(
        (*x.dims[:-2], *_window(x, kernel_size, stride, padding, dilation, ceil_mode)[4])
    )


def _max_indices_shape(
    x: TensorType,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple:
    values = _max_shape(x, kernel_size, stride, padding, dilation, ceil_mode)
    return values, values.with_dtype(DType.int64)


def _as_images(builder: Builder, x: Value) -> Value:
    return x if x.type.rank == 4 else builder.emit("aten.view.default", x, (1, *x.type.dims))


def _like(builder: Builder, value: Value, node_result: Value) -> Value:
    if value.type.dtype is not node_result.type.dtype:
        value = builder.emit("aten._to_copy.default", value, node_result.type.dtype)
    return (
        value
        if value.type.rank == node_result.type.rank
        else builder.emit("aten.view.default", value, node_result.type.dims)
    )


def _expand_max(builder: Builder, node: Node) -> Any:
    x = node.args[0]
    kernel, stride, padding, dilation, sizes = _window(x.type, *node.args[1:6])
    images = _as_images(builder, x)
    window = (images, False, kernel, stride, padding, dilation, sizes)
    if len(node.results) == 1:
        return _like(builder, builder.emit(NAME, *window), node.result)
    values, indices = builder.emit_all(NAME, *window, True, 0, node.results[1].type.dtype)
    return _like(builder, values, node.results[0]), _like(builder, indices, node.results[1])


def _refuse_long(node: Node, traits: Any) -> str | None:
    return traits.too_long(_dims.product(pair(node.args[1])))


register(Operator("aten.max_pool2d.default", _max_shape, Rewrite(_expand_max, _refuse_long)))
register(
    Operator(
        "aten.max_pool2d_with_indices.default",
        _max_indices_shape,
        Rewrite(_expand_max, _refuse_long),
    )
)


def _average_shape(
    x: TensorType,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> TensorType:
    return x.with_dims((*x.dims[:-2], *_window(x, kernel_size, stride, padding, 1, ceil_mode)[4]))


def _expand_average(builder: Builder, node: Node) -> Value:
    x, kernel, stride, padding, ceil_mode, include, divisor = node.args
    kernel, stride, padding, dilation, sizes = _window(
        x.type, kernel, stride, padding, 1, ceil_mode
    )
    made = builder.emit(
        NAME,
        _as_images(builder, x),
        True,
        kernel,
        stride,
        padding,
        dilation,
        sizes,
        bool(include),
        divisor or 0,
    )
    return _like(builder, made, node.result)


register(
    Operator("aten.avg_pool2d.default", _average_shape, Rewrite(_expand_average, _refuse_long))
)


def _expand_max_backward(builder: Builder, node: Node) -> Value:
    """What came in at the largest elements adds up there."""
    slopes, x, *_, indices = node.args
    *lead, height, width = x.type.dims
    flat = [
        builder.emit("aten.view.default", each, (*lead, each.type.dims[-2] * each.type.dims[-1]))
        for each in (indices, slopes)
    ]
    zeros = builder.emit("aten.full.default", (*lead, height * width), 0, x.type.dtype)
    made = builder.emit("aten.scatter_add.default", zeros, len(lead), *flat)
    return builder.emit("aten.view.default", made, x.type.dims)


register(
    Operator(
        "aten.max_pool2d_with_indices_backward.default",
        lambda slopes, x, kernel_size, stride, padding, dilation, ceil_mode, indices: x,
        Rewrite(_expand_max_backward),
    )
)
