"""Resizing of images, and sampling at the coordinates of a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import UnsupportedProgramError
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ir.factors import scaled
from purevk.lower.map import MapSpec, coordinates
from purevk.ops.builder import Builder
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.image.resample_bytes import resize_bytes
from purevk.ops.image.resample_coarsened import resized, sampled
from purevk.ops.map import mapped, others
from purevk.ops.promotion import wide_type
from purevk.ops.registry import ShapeError, rewrite
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits


def _scaled(size: Size, factor: float) -> Size:
    """floor(size * factor)"""
    found = scaled(size, factor)
    if found is None:
        raise UnsupportedProgramError(
            f"a size known only at a call times {factor} cannot be followed",
            why="no fraction of few digits gives the same for all sizes",
            next="give the size in place of the factor, or export one program for each size",
        )
    return found


def _resized(
    x: TensorType, count: int, sizes: Sequence[Size] | None, factors: Sequence[float] | None
) -> TensorType:
    """The type of the result, from its sizes or from factors."""
    if x.rank != count + 2:
        raise ShapeError(f"cannot resize {count} dims of {x}")
    if sizes is None:
        if factors is None:
            raise ShapeError(f"neither sizes nor scale factors are given to resize {x}")
        sizes = tuple(_scaled(size, factor) for size, factor in zip(x.dims[2:], factors))
    return x.with_dims((*x.dims[:2], *sizes))


def _real(x: TensorType, kind: str) -> Callable[[float], float]:
    """The precision in which torch computes positions."""
    exact = x.dtype is DType.float64 and kind not in ("nearest", "exact")
    return np.float64 if exact else np.float32


def _step(
    x: TensorType, d: int, out: Size, factor: float | None, align: bool, kind: str
) -> float | None:
    """The distance in the input of neighbours of the result along dim d, in the precision in which
    torch computes it; None: it depends on the call."""
    real = _real(x, kind)
    size = x.dims[d]
    if not align and factor is not None and factor > 0:
        for times in _unscaled(x, kind):
            ignored = _gives(size, out, factor, times)
            if ignored is not False:
                return 1.0 / times if ignored else None
        return float(real(1.0 / factor))
    if not isinstance(size, int) or not isinstance(out, int):
        return None
    if align:
        return float(real(size - 1) / real(out - 1)) if out > 1 else 0.0
    return float(real(size) / real(out)) if out else 0.0


def _unscaled(x: TensorType, kind: str) -> tuple[int, ...]:
    """If a size becomes one of these multiples of itself, eager torch takes that multiple for the
    factor, whatever the factor is."""
    if kind == "nearest":
        return (1, 2) if x.rank == 4 else ()
    return () if kind in ("exact", "cubic") else (1,)


def _gives(size: Size, out: Size, factor: float, times: int) -> bool | None:
    """Whether a result has `times` the size; None: it depends on the call."""
    if isinstance(size, int) and isinstance(out, int):
        return out == times * size
    least = _dims.range_of(size)[0]
    return False if factor <= times or least * (factor - times) > 1 else None


def _scale(x: TensorType, d: int, out: Size, factor: float | None, align: bool, kind: str) -> str:
    """The same as GLSL."""
    number = _step(x, d, out, factor, align, kind)
    if number is not None:
        return f"({number!r})"
    if not align and factor is not None and factor > 0:
        text = repr(float(_real(x, kind)(1.0 / factor)))
        for times in _unscaled(x, kind):
            text = f"r_size_{d} == {times} * x_size_{d} ? {1.0 / times!r} : {text}"
        return f"({text})"
    if align:
        return f"(r_size_{d} > 1 ? float(x_size_{d} - 1) / float(r_size_{d} - 1) : 0.0)"
    return f"(float(x_size_{d}) / float(r_size_{d}))"


def _nearest(rank: int, scales: Sequence[str], exact: bool) -> str:
    find = "pv_nearest_exact" if exact else "pv_nearest"
    at = coordinates(
        rank,
        **{
            f"d{2 + n}": f"{find}(i{2 + n}, {scale}, x_size_{2 + n})"
            for n, scale in enumerate(scales)
        },
    )
    return f"r = X({at});"


def _linear(rank: int, scales: Sequence[str], align: bool) -> str:
    flag, dims = "true" if align else "false", range(2, rank)
    out = [f"LINEAR_ALONG({d}, x_size_{d}, {scale}, {flag})" for d, scale in zip(dims, scales)]
    terms = []
    for corner in range(2 ** len(dims)):
        upper = [corner >> n & 1 for n in range(len(dims))]
        weight = " * ".join(f"w{d}" if up else f"(1.0 - w{d})" for d, up in zip(dims, upper))
        at = coordinates(
            rank, **{f"d{d}": f"{'b' if up else 'a'}{d}" for d, up in zip(dims, upper)}
        )
        terms.append(f"X({at}) * ({weight})")
    return " ".join(out) + f" r = {' + '.join(terms)};"


def _cubic(rank: int, scales: Sequence[str], align: bool) -> str:
    flag = "true" if align else "false"
    out = [f"CUBIC_ALONG({d}, {scale}, {flag})" for d, scale in zip((2, 3), scales)]
    return f"{' '.join(out)} LOOPS(loop(4, loop(4))) CUBIC_SUM(x_size_2, x_size_3)"


_REACHES = {"linear": 1, "cubic": 2}  # of a filter, in elements of the result


def _smoothed(
    builder: Builder, x: Value, type: TensorType, scales: Sequence[str], kind: str
) -> Value:
    """The average over all elements that an element of the result covers, weighed by a filter."""
    reach, filter = float(_REACHES[kind]), "pv_triangle" if kind == "linear" else "pv_cubic"
    high, wide = _windows(x.type, type, kind)
    along = [f"SMOOTH_ALONG({d}, x_size_{d}, {scale}, {reach})" for d, scale in zip((2, 3), scales)]
    body = (
        f"{' '.join(along)} LOOPS(loop({wide}) + loop({high}, loop({wide}))) SMOOTH_SUM({filter})"
    )
    if builder.traits.too_long(high + 1, wide) is None:
        return mapped(builder, body, {"X": x}, type, order=0, lanes=others((2, 3), 4))
    # One dim after the other, as torch does.
    x = _smoothed_along(builder, x, type.dims[3], 3, along[1], filter, wide)
    return _smoothed_along(builder, x, type.dims[2], 2, along[0], filter, high)


def _smoothed_along(
    builder: Builder, x: Value, size: Size, d: int, along: str, filter: str, most: int
) -> Value:
    """The same of one dim, in which an element may cover very many."""
    type = x.type.with_dims([size if n == d else each for n, each in enumerate(x.type.dims)])
    loops = (Loop(f"k{d}", f"a{d}", f"b{d}", most, str(most)),)
    weight, element = f"SMOOTH_WEIGHT({d}, {filter})", f"X({coordinates(4, **{f'd{d}': f'k{d}'})})"
    flat = TensorType(wide_type(type.dtype), tuple(size if n == d else 1 for n in range(4)))
    weights = Fold(loops, f"r += {weight};", before=along)
    (total,) = folded(builder, weights, {"X": x}, flat)
    at = ", ".join(f"i{d}" if n == d else "0" for n in range(4))
    fold = Fold(
        loops,
        f"r += {element} * {weight};",
        before=along,
        finish=f"r = TOTAL({at}) == 0.0 ? T_R(0) : T_R(r / TOTAL({at}));",
    )
    return folded(builder, fold, {"X": x, "TOTAL": total}, type)[0]


def _windows(x: TensorType, type: TensorType, kind: str) -> tuple[int, int]:
    """The most elements of the input that one of an antialiased result covers, by dim."""
    high, wide = (
        2 * _REACHES[kind] * -(-_dims.upper(x.dims[d]) // max(_dims.upper(type.dims[d]), 1)) + 2
        for d in (2, 3)
    )
    return high, wide


def _resize(
    builder: Builder,
    node: Node,
    x: Value,
    count: int,
    kind: str,
    align: bool,
    factors: Sequence[float | None],
) -> Value:
    type, rank = node.result.type, count + 2
    if x.type.dtype is DType.uint8 and kind not in ("nearest", "exact"):
        return resize_bytes(builder, x, type, kind, align, (factors[0], factors[1]))
    scales = [
        _scale(x.type, 2 + n, type.dims[2 + n], factors[n], align, kind) for n in range(count)
    ]
    if kind in ("nearest", "exact"):
        body = _nearest(rank, scales, kind == "exact")
    elif kind.endswith("aa"):
        return _smoothed(builder, x, type, scales, kind.removesuffix("aa"))
    else:
        body = _linear(rank, scales, align) if kind == "linear" else _cubic(rank, scales, align)
    flops = {"linear": 2 ** (count + 1), "cubic": 40}.get(kind, 1)
    if count == 2 and kind in ("linear", "cubic"):
        steps = [
            _step(x.type, 2 + n, type.dims[2 + n], factors[n], align, kind) for n in range(count)
        ]
        plain = MapSpec(
            body, ("X",), order=0, lanes=tuple(others(range(2, rank), rank).items()), flops=flops
        )
        made = resized(builder, x, type, plain, 2 if kind == "linear" else 4, steps, align)
        if made is not None:
            return made
    return mapped(
        builder, body, {"X": x}, type, order=0, lanes=others(range(2, rank), rank), flops=flops
    )


def _refuse(node: Node, traits: DeviceTraits) -> str | None:
    dtype = node.inputs[0].type.dtype
    return None if dtype.is_float else f"no kernel for interpolation of {dtype.name}"


def _refuse_resize(node: Node, traits: DeviceTraits) -> str | None:
    type = node.inputs[0].type
    return None if type.dtype is DType.uint8 and type.rank == 4 else _refuse(node, traits)


def _resizes(name: str, count: int, kind: str) -> None:
    """The overloads of one operator: with sizes and scales, and (.vec) with sizes or scales."""
    plain = kind in ("nearest", "exact")
    scales = ", ".join(f"scales_{d}=None" for d in "dhw"[3 - count :])
    aligned = "" if plain else "align_corners=False, "

    @signature(f"x, output_size, {aligned}{scales}")
    def sized(x: TensorType, output_size: Sequence[Size]) -> TensorType:
        return _resized(x, count, output_size, None)

    def expand(builder: Builder, node: Node, x: Value, size: Sequence[Size], *rest: Any) -> Value:
        align, factors = (False, rest) if plain else (bool(rest[0]), rest[1:])
        return _resize(builder, node, x, count, kind, align, factors)

    @signature(f"x, output_size, {aligned}scale_factors=None")
    def vec(
        x: TensorType, output_size: Sequence[Size] | None, scale_factors: Sequence[float] | None
    ) -> TensorType:
        return _resized(x, count, output_size, scale_factors)

    def expand_vec(
        builder: Builder, node: Node, x: Value, size: Sequence[Size] | None, *rest: Any
    ) -> Value:
        align, factors = (False, rest[0]) if plain else (bool(rest[0]), rest[1])
        return _resize(builder, node, x, count, kind, align, factors or (None,) * count)

    supports = None if plain else _refuse_resize
    rewrite(f"aten.{name}.default", sized, supports=supports)(expand)
    rewrite(f"aten.{name}.vec", vec, supports=supports)(expand_vec)


# The dims that are resized, and how, by the names of operators.
RESIZED = {
    **{f"upsample_nearest{count}d": (count, "nearest") for count in (1, 2, 3)},
    **{f"_upsample_nearest_exact{count}d": (count, "exact") for count in (1, 2, 3)},
    "upsample_linear1d": (1, "linear"),
    "upsample_bilinear2d": (2, "linear"),
    "upsample_trilinear3d": (3, "linear"),
    "upsample_bicubic2d": (2, "cubic"),
    "_upsample_bilinear2d_aa": (2, "linearaa"),
    "_upsample_bicubic2d_aa": (2, "cubicaa"),
}
for _name, (_count, _kind) in RESIZED.items():
    _resizes(_name, _count, _kind)


# -- grids ---------------------------------------------------------------------------------------
@signature("x, grid, interpolation_mode: int = 0, padding_mode: int = 0, align_corners=False")
def _grid_shape(x: TensorType, grid: TensorType) -> TensorType:
    if x.rank != grid.rank or x.rank not in (4, 5):
        raise ShapeError(f"cannot sample {x} at {grid}")
    return x.with_dims((*x.dims[:2], *grid.dims[1:-1]))


def _refuse_grid(node: Node, traits: DeviceTraits) -> str | None:
    if node.tensor("x").type.rank == 5 and node.int("interpolation_mode") == 2:
        return "no cubic sampling of volumes"
    return _refuse(node, traits)


@rewrite("aten.grid_sampler_2d.default", _grid_shape, supports=_refuse_grid)
def _grid(
    builder: Builder, node: Node, x: Value, grid: Value, mode: int, padding: int, align: bool
) -> Value:
    rank = x.type.rank
    count, flag = rank - 2, "true" if align else "false"
    dims = range(2, rank)
    if grid.type.dtype is not x.type.dtype:
        grid = builder.aten._to_copy(grid, x.type.dtype)
    pixel = ", ".join(["i0", *(f"i{d}" for d in dims)])
    out = []
    for d in dims:
        # The last dim of the grid has the coordinate of the last dim first.
        coordinate = f"GRID({pixel}, {rank - 1 - d})"
        if mode != 2:
            out.append(f"LOCATE({d}, x_size_{d}, {coordinate}, {padding}, {flag})")
        else:
            out.append(f"float p{d} = pv_unnormalize({coordinate}, x_size_{d}, {flag});")
    # A result is NaN where a coordinate is none, or infinite, as the weights are; but the nearest
    # element has no weight, and coordinates that are clamped are no longer NaN.
    names = [f"{'p' if mode == 2 else 's'}{d}" for d in dims]
    lost = " || ".join(f"pv_isnan({name}) || pv_isinf({name})" for name in names)
    if mode == 0 and padding == 0:
        out.append(f"if ({lost}) {{ {' '.join(f'p{d} = PV_NAN;' for d in dims)} }}")
    locate = " ".join(out)
    if mode == 1:
        out += [f"int q{d} = int(pv_round(p{d}));" for d in dims]
        inside = " && ".join(f"q{d} >= 0 && q{d} < x_size_{d}" for d in dims)
        at = coordinates(rank, **{f"d{d}": f"q{d}" for d in dims})
        out.append(f"r = T_R(0); if ({inside}) r = X({at});")
    elif mode == 0:
        out += [f"FLOOR_ALONG({d})" for d in dims]
        steps = " ".join(f"CORNER({d}, {n})" for n, d in enumerate(dims))
        inside = " && ".join(f"q{d} >= 0 && q{d} < x_size_{d}" for d in dims)
        weight = " * ".join(f"(u{d} != 0 ? w{d} : 1.0 - w{d})" for d in dims)
        at = coordinates(rank, **{f"d{d}": f"q{d}" for d in dims})
        out.append(
            f"LOOPS(loop({2**count}))"
            f" SUM_OF_CORNERS({2**count}, {steps}, {inside}, X({at}) * ({weight}))"
        )
    else:
        out += [f"bool lost = {lost};", *(f"CUBIC_FLOOR({d})" for d in dims)]
        taps = " ".join(
            f"CUBIC_TAP({d}, x_size_{d}, {k}, {padding}, {flag})" for d, k in zip(dims, "uv")
        )
        inside = " && ".join(f"q{d} >= 0 && q{d} < x_size_{d}" for d in dims)
        out.append(
            f"LOOPS(loop(4, loop(4))) SUM_OF_TAPS({taps}, {inside}, X(i0, i1, q2, q3) * (w2[u] * w3[v]))"
            " if (lost) r = T_R(PV_NAN);"
        )
    body, flops = " ".join(out), 2 ** (count + 2)
    if mode == 0 and count == 2:
        plain = MapSpec(body, ("X", "GRID"), order=0, lanes=((1, (1, None)),), flops=flops)
        made = sampled(builder, x, grid, node.result.type, plain, locate)
        if made is not None:
            return made
    return mapped(
        builder,
        body,
        {"X": x, "GRID": grid},
        node.result.type,
        order=0,
        lanes={1: (1, None)},
        flops=flops,
    )


rewrite("aten.grid_sampler_3d.default", _grid_shape, supports=_refuse_grid)(_grid)
rewrite("aten.grid_sampler.default", _grid_shape, supports=_refuse_grid)(_grid)


def _affine_shape(theta: TensorType, size: Sequence[Size], align_corners: bool) -> TensorType:
    return theta.with_dims((size[0], *size[2:], len(size) - 2))


@rewrite("aten.affine_grid_generator.default", _affine_shape, supports=_refuse)
def _affine(builder: Builder, node: Node, theta: Value, size: Sequence[Size], align: bool) -> Value:
    """The coordinates of a regular grid between -1 and 1, transformed by a matrix."""
    count = len(size) - 2
    span = {
        d: f"(float(r_size_{d}) - 1.0)" if align else f"float(r_size_{d})"
        for d in range(1, count + 1)
    }
    statements = []
    for k in range(count):
        d = count - k
        first = (
            f"(2.0 * float(i{d}) - {span[d]}) / {span[d]}"
            if align
            else f"(2.0 * float(i{d}) + 1.0 - {span[d]}) / {span[d]}"
        )
        statements.append(f"float g{k} = r_size_{d} > 1 ? {first} : 0.0;")
    terms = " + ".join(
        [f"THETA(i0, i{count + 1}, {k}) * g{k}" for k in range(count)]
        + [f"THETA(i0, i{count + 1}, {count})"]
    )
    body = " ".join(statements) + f" r = {terms};"
    return mapped(builder, body, {"THETA": theta}, node.result.type)
