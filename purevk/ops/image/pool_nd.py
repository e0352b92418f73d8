"""Pooling over windows of any number of dims: fixed ones, and those that divide the input evenly
(adaptive)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.elements import acc_of, extreme
from purevk.lower.map import coordinates
from purevk.ops.builder import Builder
from purevk.ops.conv.arguments import Ints, Window
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.image.pooling import NAME as POOL
from purevk.ops.image.pooling import Pool, pooled_size, with_indices
from purevk.ops.index.indexing import scatter_along
from purevk.ops.map import MapOptions, others
from purevk.ops.registry import ShapeError, in_double, in_parts, rewrite
from purevk.ops.shapes import pair
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits

# What an adaptive pooling is asked for: None keeps the size of the input.
OutputSizes = Sequence[Size | None] | int


@dataclass(frozen=True)
class _Windows:
    """The windows of a pooling.

    Attributes:
        dims: the dims that are pooled, the last ones.
        sizes: those of the result along these.
        numbers: what fixed windows are described by, for `mapped`.
        adaptive: the windows follow from the sizes of the result.
    """

    dims: range
    sizes: tuple[Size, ...]
    numbers: dict[str, Size]
    adaptive: bool

    @classmethod
    def fixed(
        cls,
        x: TensorType,
        count: int,
        kernel: Ints,
        stride: Ints = (),
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
    ) -> _Windows:
        """Windows over the last `count` dims; no `stride` means that of the kernel."""
        dims = _last_dims(x, count)
        kernel, padding, dilation = pair(kernel, count), pair(padding, count), pair(dilation, count)
        stride = pair(stride, count) if stride else kernel
        sizes = tuple(
            pooled_size(x.dims[d], kernel[n], stride[n], padding[n], dilation[n], ceil_mode)
            for n, d in enumerate(dims)
        )
        named = {"kernel": kernel, "stride": stride, "pad": padding, "dilation": dilation}
        numbers: dict[str, Size] = {
            f"{name}_{d}": values[n] for name, values in named.items() for n, d in enumerate(dims)
        }
        return cls(dims, sizes, numbers, False)

    @classmethod
    def even(cls, x: TensorType, count: int, sizes: OutputSizes) -> _Windows:
        """Windows that divide the last `count` dims of the input into `sizes` parts."""
        dims = _last_dims(x, count)
        chosen = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        chosen = chosen * count if len(chosen) == 1 else chosen
        wanted = tuple(x.dims[d] if size is None else size for d, size in zip(dims, chosen))
        return cls(dims, wanted, {}, True)

    def type(self, x: TensorType) -> TensorType:
        return x.with_dims((*x.dims[: self.dims.start], *self.sizes))

    def bounds(self) -> str:
        """Statements that declare from_d, to_d and step_d, within the input, and full_d, the length
        with padding."""
        out = []
        for d in self.dims:
            if self.adaptive:
                out.append(f"EVEN_WINDOW({d}, x_size_{d}, r_size_{d})")
            else:
                window = ", ".join(
                    f"{name}_{d}" for name in ("kernel", "stride", "pad", "dilation")
                )
                out.append(f"FIXED_WINDOW({d}, x_size_{d}, {window})")
        return " ".join(out)

    def loops(self, x: TensorType) -> tuple[Loop, ...]:
        found = []
        for d, made in zip(self.dims, self.sizes):
            most, count = self.numbers.get(f"kernel_{d}", 0), f"kernel_{d}"
            if self.adaptive:
                most = _dims.ceil_div(x.dims[d], _dims.maximum(made, 1)) + 1
                count = f"ceil(x_size_{d}, r_size_{d}) + 1"
            found.append(Loop(f"k{d}", f"from_{d}", f"to_{d}", most, count, f"step_{d}"))
        return tuple(found)

    def product(self, text: str) -> str:
        """GLSL: the product over the pooled dims of `text`, in which "{d}" is the dim."""
        return " * ".join(text.format(d=d) for d in self.dims)

    def read(self, rank: int) -> str:
        """GLSL: the element of the input at the indices of the loops."""
        return f"X({coordinates(rank, **{f'd{d}': f'k{d}' for d in self.dims})})"


def _last_dims(x: TensorType, count: int) -> range:
    if x.rank not in (count + 1, count + 2):
        raise ShapeError(
            f"pooling over {count} dims takes rank {count + 1} or {count + 2}, not {x.rank}"
        )
    return range(x.rank - count, x.rank)


def _average(
    builder: Builder,
    x: Value,
    windows: _Windows,
    include_pad: bool = True,
    divisor: int | None = None,
) -> Value:
    if divisor:
        by = str(divisor)
    else:
        by = windows.product("full_{d}" if include_pad else "max(to_{d} - from_{d}, 0)")
    number = "float" if x.type.dtype.is_float else acc_of(x.type.dtype)
    fold = Fold(
        windows.loops(x.type),
        f"r += {windows.read(x.type.rank)};",
        before=windows.bounds(),
        finish=f"r = r / {number}({by});",
    )
    lanes, type = others(windows.dims, x.type.rank), windows.type(x.type)
    options: MapOptions = {"order": 0, "lanes": lanes}
    return folded(builder, fold, {"X": x}, type, numbers=windows.numbers, **options)[0]


def _maximum(builder: Builder, x: Value, windows: _Windows, with_index: bool) -> tuple[Value, ...]:
    """The maxima and, if asked for, their indices, as int32."""
    type, acc = windows.type(x.type), acc_of(x.type.dtype)
    start = flat = "0"
    for d in windows.dims:
        start, flat = f"({start} * x_size_{d} + from_{d})", f"({flat} * x_size_{d} + k{d})"
    nan = " || pv_isnan(v)" if x.type.dtype.is_float else ""
    keep, first = (f" r1 = {flat};", f" r1 = {start};") if with_index else ("", "")
    fold = Fold(
        windows.loops(x.type),
        f"{acc} v = {windows.read(x.type.rank)}; if (v > r{nan}) {{ r = v;{keep} }}",
        join=f"if (v > r{nan}) {{ r = v;{' r1 = v1;' if with_index else ''} }}",
        start=f"r = {extreme('LOWEST', acc)};{first}",
        before=windows.bounds(),
    )
    types = (type, type.with_dtype(DType.int32)) if with_index else (type,)
    return folded(builder, fold, {"X": x}, *types, numbers=windows.numbers, order=0)


def _pool_images(builder: Builder, node: Node) -> tuple[Value, ...]:
    """`purevk.pool2d` with one invocation per element of the result."""
    pool = Pool.of(node)
    windows = _images(pool.x.type, pool.window, pool.sizes)
    if pool.average:
        return (_average(builder, pool.x, windows, pool.count_include_pad, pool.divisor),)
    values, *indices = _maximum(builder, pool.x, windows, pool.indices is not None)
    return values, *(builder.aten._to_copy(index, pool.indices) for index in indices)


def _has_long_windows(node: Node, traits: DeviceTraits) -> bool:
    return traits.too_long(1, *Pool.of(node).window.kernel) is not None


in_double(POOL, _pool_images)
in_parts(POOL, _pool_images, _has_long_windows)


def _images(x: TensorType, window: Window, sizes: tuple[Size, Size]) -> _Windows:
    windows = _Windows.fixed(x, 2, window.kernel, window.stride, window.padding, window.dilation)
    return replace(windows, sizes=sizes)


def _pools(count: int) -> None:
    @signature(
        "x, kernel_size, stride=(), padding=0, ceil_mode=False, count_include_pad=True,"
        " divisor_override: int | None = None"
    )
    def average_shape(
        x: TensorType, kernel_size: Ints, stride: Ints, padding: Ints, ceil_mode: bool
    ) -> TensorType:
        return _Windows.fixed(x, count, kernel_size, stride, padding, 1, ceil_mode).type(x)

    def average(
        builder: Builder,
        node: Node,
        x: Value,
        kernel: Ints,
        stride: Ints,
        padding: Ints,
        ceil_mode: bool,
        include_pad: bool,
        divisor: int | None = None,
    ) -> Value:
        windows = _Windows.fixed(x.type, count, kernel, stride, padding, 1, ceil_mode)
        return _average(builder, x, windows, include_pad, divisor)

    def maximum_shape(
        x: TensorType,
        kernel_size: Ints,
        stride: Ints = (),
        padding: Ints = 0,
        dilation: Ints = 1,
        ceil_mode: bool = False,
    ) -> TensorType:
        return _Windows.fixed(x, count, kernel_size, stride, padding, dilation, ceil_mode).type(x)

    def maximum(builder: Builder, node: Node, x: Value, *window: Any) -> tuple[Value, ...]:
        windows = _Windows.fixed(x.type, count, *window)
        return _maximum(builder, x, windows, len(node.results) == 2)

    both_shape = with_indices(maximum_shape)

    rewrite(f"aten.avg_pool{count}d.default", average_shape)(average)
    rewrite(f"aten.max_pool{count}d.default", maximum_shape)(maximum)
    rewrite(f"aten.max_pool{count}d_with_indices.default", both_shape)(maximum)


_pools(1)
_pools(3)


def _adaptive(count: int) -> None:
    def average_shape(x: TensorType, output_size: OutputSizes) -> TensorType:
        return _Windows.even(x, count, output_size).type(x)

    def average(builder: Builder, node: Node, x: Value, sizes: OutputSizes) -> Value:
        windows = _Windows.even(x.type, count, sizes)
        if all(isinstance(size, int) and size == 1 for size in windows.sizes):
            return builder.aten.mean.dim(x, tuple(windows.dims), keepdim=True)
        return _average(builder, x, windows)

    maximum_shape = with_indices(average_shape)

    def maximum(builder: Builder, node: Node, x: Value, sizes: OutputSizes) -> tuple[Value, ...]:
        return _maximum(builder, x, _Windows.even(x.type, count, sizes), True)

    names = () if count == 1 else (f"aten._adaptive_avg_pool{count}d.default",)
    rewrite(f"aten.adaptive_avg_pool{count}d.default", average_shape, *names)(average)
    rewrite(f"aten.adaptive_max_pool{count}d.default", maximum_shape)(maximum)


for _count in (1, 2, 3):
    _adaptive(_count)


# -- the inverse of maximum pooling ---------------------------------------------------------------
def _unpool(count: int) -> None:
    @signature("x, indices, output_size, stride=(), padding=()")
    def shape(x: TensorType, output_size: Sequence[Size]) -> TensorType:
        return x.with_dims((*x.dims[: x.rank - count], *output_size))

    def expand(
        builder: Builder,
        node: Node,
        x: Value,
        indices: Value,
        output_size: Sequence[Size],
        stride: Ints = (),
        padding: Ints = (),
    ) -> Value:
        type = node.result.type
        lead = type.dims[: type.rank - count]
        flat = [builder.aten.view(value, (*lead, -1)) for value in (x, indices)]
        empty = builder.aten.full(type.dims, fill_value=0, dtype=type.dtype)
        target = builder.aten.view(empty, (*lead, -1))
        made = scatter_along(builder, target, -1, flat[1], flat[0], "set")
        return builder.aten.view(made, type.dims)

    rewrite(f"aten.max_unpool{count}d.default", shape)(expand)


_unpool(2)
_unpool(3)
