"""Pooling over windows of any number of dims, and over windows that divide the input evenly
(adaptive)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.elements import extreme
from purevk.lower.map import acc_of, coordinates
from purevk.ops.builder import Builder
from purevk.ops.image.pooling import _out
from purevk.ops.index.indexing import scatter_along
from purevk.ops.mapped import mapped, mapped_all, others
from purevk.ops.registry import ShapeError, rewrite
from purevk.ops.shapes import pair


class _Window:
    """The windows of a pooling over the last `count` dims: fixed ones, or (adaptive) those that
    `sizes` ask for."""

    def __init__(
        self,
        x: TensorType,
        count: int,
        kernel: Any = (),
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        sizes: Sequence[Size] | None = None,
    ) -> None:
        if x.rank not in (count + 1, count + 2):
            raise ShapeError(
                f"pooling over {count} dims takes rank {count + 1} or {count + 2}, not {x.rank}"
            )
        self.dims = range(x.rank - count, x.rank)
        self.adaptive = sizes is not None
        if sizes is not None:
            chosen = pair(sizes, count)
            self.sizes = tuple(
                x.dims[d] if size is None else size for d, size in zip(self.dims, chosen)
            )
            self.numbers: dict[str, Size] = {}
            return
        kernel, padding, dilation = pair(kernel, count), pair(padding, count), pair(dilation, count)
        stride = pair(stride, count) if stride else kernel
        self.sizes = tuple(
            _out(x.dims[d], kernel[n], stride[n], padding[n], dilation[n], ceil_mode)
            for n, d in enumerate(self.dims)
        )
        named = {"kernel": kernel, "stride": stride, "pad": padding, "dilation": dilation}
        self.numbers = {
            f"{name}_{d}": values[n]
            for name, values in named.items()
            for n, d in enumerate(self.dims)
        }

    def type(self, x: TensorType) -> TensorType:
        return x.with_dims((*x.dims[: self.dims.start], *self.sizes))

    def bounds(self) -> str:
        """Statements that declare from_d, to_d and step_d, within the input, and full_d, the length
        with padding."""
        out = []
        for d in self.dims:
            if self.adaptive:
                out.append(
                    f"int from_{d} = i{d} * x_size_{d} / r_size_{d}, to_{d} = ((i{d} + 1) *"
                    f" x_size_{d} + r_size_{d} - 1) / r_size_{d};"
                    f" const int step_{d} = 1; int full_{d} = to_{d} - from_{d};"
                )
            else:
                out.append(
                    f"int step_{d} = dilation_{d}, from_{d} = i{d} * stride_{d} - pad_{d}, to_{d}"
                    f" = from_{d} + (kernel_{d} - 1) * step_{d} + 1;"
                    f" int full_{d} = min(to_{d}, x_size_{d} + pad_{d}) - from_{d};"
                    f" if (from_{d} < 0) from_{d} += (step_{d} - 1 - from_{d}) / step_{d} *"
                    f" step_{d}; to_{d} = min(to_{d}, x_size_{d});"
                )
        return " ".join(out)

    def loops(self) -> str:
        return " ".join(
            f"for (int k{d} = from_{d}; k{d} < to_{d}; k{d} += step_{d})" for d in self.dims
        )

    def product(self, text: str) -> str:
        return " * ".join(text.format(d=d) for d in self.dims)

    def read(self, rank: int) -> str:
        return f"X({coordinates(rank, **{f'd{d}': f'k{d}' for d in self.dims})})"


def _average(
    builder: Builder,
    x: Value,
    window: _Window,
    include_pad: bool = True,
    divisor: int | None = None,
) -> Value:
    if divisor:
        by = str(int(divisor))
    else:
        by = window.product("full_{d}" if include_pad else "max(to_{d} - from_{d}, 0)")
    body = f"{window.bounds()} r = T_R(0); {window.loops()} r += {window.read(x.type.rank)}; r = r / {_number(x.type.dtype)}({by});"  # noqa: E501
    lanes = others(window.dims, x.type.rank)
    return mapped(
        builder, body, {"X": x}, window.type(x.type), numbers=window.numbers, order=0, lanes=lanes
    )


def _number(dtype: DType) -> str:
    return "float" if dtype.is_float else acc_of(dtype)


def _maximum(builder: Builder, x: Value, window: _Window, with_index: bool) -> Any:
    """The maxima, and if asked for their places, as int32."""
    type, acc = window.type(x.type), acc_of(x.type.dtype)
    place = flat = "0"
    for d in window.dims:
        place, flat = f"({place} * x_size_{d} + from_{d})", f"({flat} * x_size_{d} + k{d})"
    nan = " || pv_isnan(v)" if x.type.dtype.is_float else ""
    keep, first = (f" r1 = {flat};", f" r1 = {place};") if with_index else ("", "")
    body = (
        f"{window.bounds()} r = {extreme('LOWEST', acc)};{first} {window.loops()} {{ {acc} v ="
        f" {window.read(x.type.rank)};"
        f" if (v > r{nan}) {{ r = v;{keep} }} }}"
    )
    types = (type, type.with_dtype(DType.int32)) if with_index else (type,)
    return mapped_all(builder, body, {"X": x}, *types, numbers=window.numbers, order=0)


def pooled(
    builder: Builder,
    x: Value,
    average: bool,
    window: tuple,
    sizes: tuple,
    include_pad: bool,
    divisor: int,
    with_index: bool,
) -> Any:
    """Pooling of images by (kernel, stride, padding, dilation) to `sizes`; maxima with their
    places, as int32, if asked for."""
    whole = _Window(x.type, 2, *window)
    whole.sizes = tuple(sizes)
    return (
        _average(builder, x, whole, include_pad, divisor)
        if average
        else _maximum(builder, x, whole, with_index)
    )


def _pools(count: int) -> None:
    def refuse(node: Node, traits: Any) -> str | None:
        return traits.too_long(_dims.product(pair(node.args[1], count)))

    def average_shape(
        x: TensorType,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> TensorType:
        return _Window(x, count, kernel_size, stride, padding, 1, ceil_mode).type(x)

    def average(
        builder: Builder,
        node: Node,
        x: Value,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil: bool,
        include: bool,
        divisor: Any = None,
    ) -> Value:
        return _average(
            builder,
            x,
            _Window(x.type, count, kernel, stride, padding, 1, ceil),
            bool(include),
            divisor,
        )

    def maximum_shape(
        x: TensorType,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> TensorType:
        return _Window(x, count, kernel_size, stride, padding, dilation, ceil_mode).type(x)

    def both_shape(
        x: TensorType,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple:
        values = maximum_shape(x, kernel_size, stride, padding, dilation, ceil_mode)
        return values, values.with_dtype(DType.int64)

    def maximum(builder: Builder, node: Node, x: Value, *window: Any) -> Any:
        return _maximum(builder, x, _Window(x.type, count, *window), len(node.results) == 2)

    rewrite(f"aten.avg_pool{count}d.default", average_shape, average, supports=refuse)
    rewrite(f"aten.max_pool{count}d.default", maximum_shape, maximum, supports=refuse)
    rewrite(f"aten.max_pool{count}d_with_indices.default", both_shape, maximum, supports=refuse)


_pools(1)
_pools(3)


def _adaptive(count: int) -> None:
    def refuse(node: Node, traits: Any) -> str | None:
        ends = zip(node.args[0].type.dims[-count:], node.results[0].type.dims[-count:])
        windows = [_dims.upper(size) // max(_dims.upper(out), 1) + 2 for size, out in ends]
        alone = len(node.results) == 1 and all(
            out == 1 for out in node.results[0].type.dims[-count:]
        )  # a mean
        return None if alone else traits.too_long(_dims.product(windows))

    def average_shape(x: TensorType, output_size: Any) -> TensorType:
        return _Window(x, count, sizes=output_size).type(x)

    def average(builder: Builder, node: Node, x: Value, sizes: Any) -> Value:
        window = _Window(x.type, count, sizes=sizes)
        if all(isinstance(size, int) and size == 1 for size in window.sizes):
            return builder.emit("aten.mean.dim", x, tuple(window.dims), True)
        return _average(builder, x, window)

    def maximum_shape(x: TensorType, output_size: Any) -> tuple[TensorType, TensorType]:
        values = average_shape(x, output_size)
        return values, values.with_dtype(DType.int64)

    def maximum(builder: Builder, node: Node, x: Value, sizes: Any) -> Any:
        return _maximum(builder, x, _Window(x.type, count, sizes=sizes), True)

    names = () if count == 1 else (f"aten._adaptive_avg_pool{count}d.default",)
    rewrite(
        f"aten.adaptive_avg_pool{count}d.default", average_shape, average, *names, supports=refuse
    )
    rewrite(f"aten.adaptive_max_pool{count}d.default", maximum_shape, maximum, supports=refuse)


for _count in (1, 2, 3):
    _adaptive(_count)


# -- the way back --------------------------------------------------------------------------------
def _unpool(count: int) -> None:
    def shape(
        x: TensorType,
        indices: TensorType,
        output_size: Sequence[Size],
        stride: Any = (),
        padding: Any = (),
    ) -> TensorType:
        return x.with_dims((*x.dims[: x.rank - count], *output_size))

    def expand(builder: Builder, node: Node, x: Value, indices: Value, *rest: Any) -> Value:
        type = node.result.type
        lead = type.dims[: type.rank - count]
        flat = [builder.emit("aten.view.default", value, (*lead, -1)) for value in (x, indices)]
        empty = builder.emit("aten.full.default", type.dims, 0, type.dtype)
        target = builder.emit("aten.view.default", empty, (*lead, -1))
        made = scatter_along(builder, target, -1, flat[1], flat[0], "set")
        return builder.emit("aten.view.default", made, type.dims)

    rewrite(f"aten.max_unpool{count}d.default", shape, expand)


_unpool(2)
_unpool(3)
