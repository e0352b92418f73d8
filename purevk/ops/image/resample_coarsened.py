"""Resampling of NCHW images with thread coarsening: an invocation makes several rows of a column, in
several channels. They share coordinates, weights and the elements that they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map import MapSpec, emit_map
from purevk.lower.numbers import gcd4
from purevk.ops.builder import Builder
from purevk.ops.image_layout import RESAMPLE_COARSENED as NAME
from purevk.ops.image_layout import LayoutQuery, is_nchw_operand
from purevk.ops.map import same_order
from purevk.ops.registry import Kernel, Order, define
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits

# Rows and channels that an invocation makes, by its columns.
_COARSENING = {1: ((4, 4), (4, 2), (4, 1), (2, 1)), 4: ((4, 2), (4, 1), (2, 1))}


@signature("plain, coarsened, over, inputs, type")
def _shape(type: TensorType) -> tuple[TensorType, ...]:
    return (type,)


def _lower(lowering: Lowering, node: Node) -> None:
    coarsened = node.attribute("coarsened", MapSpec)
    inputs = [lowering.operand(value) for value in node.tensors("inputs")]
    out = lowering.operand(node.result)
    fits = not coarsened.fours or gcd4(out.offset, *out.strides[:3])
    if is_nchw_operand(inputs[0]) and is_nchw_operand(out) and _joins(inputs[0]) and fits:
        emit_map(lowering, coarsened, inputs, {}, [out], node.sizes("over"))
    else:
        emit_map(lowering, node.attribute("plain", MapSpec), inputs, {}, [out])


def _joins(x: Operand) -> bool:
    """Whether images and channels are one dim: the channels of one image follow those of
    another."""
    batches, channels = x.dims[:2]
    return (isinstance(batches, int) and batches == 1) or x.strides[0] == channels * x.strides[1]


def _orders(node: Node, query: LayoutQuery) -> tuple[Order | None]:
    value = node.tensors("inputs")[0]
    return (same_order(value, query(value)),)


define(NAME, _shape, Kernel(_lower, layouts=_orders))


def _known(sizes: Sequence[Size]) -> tuple[int, ...] | None:
    """The sizes, if they are known and not 0."""
    known = tuple(size for size in sizes if isinstance(size, int) and size > 0)
    return known if len(known) == len(sizes) else None


def _enough(traits: DeviceTraits) -> int:
    """Invocations that keep the device busy."""
    return traits.profile.enough_invocations_per_core * traits.processors


def resized(
    builder: Builder,
    x: Value,
    type: TensorType,
    plain: MapSpec,
    taps: int,
    scales: Sequence[float | None],
    align: bool,
) -> Value | None:
    """Resizes images as `plain` does, with thread coarsening. None where that is not faster.

    Args:
        taps: elements along each dim that make one of the result: 2, or 4 by cubic weights.
        scales: the distance in the input of neighbours of the result, along y and x; None:
            unknown.
    """
    sizes, traits = _known(type.dims), builder.traits
    down, across = scales
    if _known(x.type.dims) is None or sizes is None or not traits.profile.prefers_unrolled_code:
        return None
    if down is None or across is None or not 0 < down <= 1 or type.dtype is DType.float64:
        return None
    if type.nbytes > traits.max_storage_range:
        return None
    batches, channels, height, width = sizes
    images, enough = batches * channels, _enough(traits)
    columns = 4 if width % 4 == 0 and 0 < across <= 1 else 1
    coarsening = next(
        (
            (rows, each)
            for rows, each in _COARSENING[columns]
            if images % each == 0
            and height >= rows
            and images // each * -(-height // rows) * (width // columns) >= enough
        ),
        None,
    )
    if coarsening is None:
        return None
    rows, each = coarsening
    over = (images // each, -(-height // rows), width // columns)
    body = _resize(
        taps, _along(2, rows, taps, down, align), _along(3, columns, taps, across, align), each
    )
    flops = plain.flops * rows * columns * each
    spec = MapSpec(body, ("X",), stores=False, fours=columns == 4, flops=flops)
    return builder.emit(NAME, plain, spec, over, (x,), type)


# An element of the span of `_Along`, or one of two, by a condition.
Tap = int | tuple[int, int, str]


@dataclass(frozen=True)
class _Along:
    """What several neighbours of the result along a dim share.

    Attributes:
        text: statements that declare what the others name.
        count: how many they are.
        span: elements of the input that they read, from q{dim}_0 on.
        taps: for each neighbour, the index of each element in the span, or two with the condition
            under which it is the second.
        weights: for each neighbour, the text of each element's weight.
    """

    text: str
    count: int
    span: int
    taps: tuple[tuple[Tap, ...], ...]
    weights: tuple[tuple[str, ...], ...]


def _repeats(step: float, count: int, align: bool) -> bool:
    """Whether each group of `count` neighbours has the same fractional coordinates, without
    rounding."""
    return not align and math.frexp(step)[0] == 0.5 and step < 1 and step * count >= 1


def _along(d: int, count: int, taps: int, step: float, align: bool) -> _Along:
    before, first = taps // 2 - 1, f"i{d - 1} * {count}"
    weigh = _cubic_weights if taps == 4 else _linear_weights

    def q(index: int, coordinate: str) -> str:
        return f"int q{d}_{index} = clamp({coordinate}, 0, x_size_{d} - 1);"

    if _repeats(step, count, align):
        sources = [(n + 0.5) * step - 0.5 for n in range(count)]
        low = [math.floor(source) for source in sources]
        span = low[-1] - low[0] + taps
        text = [f"int a{d} = i{d - 1} * {int(step * count)};"]
        text += [q(t, f"a{d} + {t + low[0] - before}") for t in range(span)]
        same = tuple(tuple(n - low[0] + k for k in range(taps)) for n in low)
        weights = tuple(
            tuple(f"({weight!r})" for weight in weigh(source - n))
            for source, n in zip(sources, low)
        )
        return _Along(" ".join(text), count, span, same, weights)
    flag, vector = "true" if align else "false", f"vec{taps}"
    weights_of = "pv_cubic_weights({})" if taps == 4 else "pv_linear_weights({})"
    # The elements of neighbours are `step` apart, rounded down or up.
    low = [math.floor(n * step) for n in range(count)]
    span = low[-1] + 1 + taps if count > 1 else taps
    text = [f"int a{d} = int(floor(pv_source({first}, ({step!r}), {flag})));"]
    text += [q(t, f"a{d} + {t - before}") for t in range(span)]
    each: list[tuple[Tap, ...]] = []
    for n in range(count):
        # Rounding may move a coordinate below an element. It counts as the element that is meant.
        up, source = f"up{d}_{n}", f"pv_source({first} + {n}, ({step!r}), {flag})"
        above = "false" if n == 0 else f"int(floor(p{d}_{n})) - a{d} > {low[n]}"
        text.append(
            f"float p{d}_{n} = {source}; bool {up} = {above};"
            f" {vector} w{d}_{n} = {weights_of.format(f'p{d}_{n} - float(a{d} + {low[n]} + ({up} ? 1 : 0))')};"
        )
        each.append(
            tuple(low[n] + k if n == 0 else (low[n] + k, low[n] + k + 1, up) for k in range(taps))
        )
    weights = tuple(tuple(f"w{d}_{n}[{k}]" for k in range(taps)) for n in range(count))
    return _Along(" ".join(text), count, span, tuple(each), weights)


def _linear_weights(t: float) -> tuple[float, ...]:
    """`pv_linear_weights`."""
    return 1.0 - t, t


def _cubic_weights(t: float) -> tuple[float, ...]:
    """`pv_cubic_weights`."""
    a = -0.75

    def near(x: float) -> float:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: float) -> float:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return (far(t + 1), near(t), near(1 - t), far(2 - t))


def _joined(name: str, along: _Along, n: int) -> str:
    """The sum for neighbour `n`; `name` and an index are the text of an element."""

    def one(tap: Tap) -> str:
        return (
            f"{name}{tap}"
            if isinstance(tap, int)
            else f"({tap[2]} ? {name}{tap[1]} : {name}{tap[0]})"
        )

    return " + ".join(
        f"{one(tap)} * {weight}" for tap, weight in zip(along.taps[n], along.weights[n])
    )


def _resize(taps: int, down: _Along, across: _Along, channels: int) -> str:
    loop = []
    for t in range(down.span):
        loop += [f"float x{t}_{k} = X(0, channel, q2_{t}, q3_{k});" for k in range(across.span)]
    for t in range(down.span):
        loop += [f"float row{n}_{t} = {_joined(f'x{t}_', across, n)};" for n in range(across.count)]
    for row in range(down.count):
        sums = [_joined(f"row{n}_", down, row) for n in range(across.count)]
        at = f"0, channel, top + {row}, i2"
        put = (
            f"R_PUT4({at} * 4, vec4({', '.join(sums)}))"
            if len(sums) == 4
            else f"R_PUT({at}, {sums[0]})"
        )
        loop.append(f"if (top + {row} < r_size_2) {put};")
    return (
        f"int top = i1 * {down.count}; {down.text} {across.text}"
        f" LOOPS(loop({channels}))"
        f" for (int k = 0; k < {channels}; k++) {{ int channel = i0 * {channels} + k; {' '.join(loop)} }}"
    )


def sampled(
    builder: Builder, x: Value, grid: Value, type: TensorType, plain: MapSpec, locate: str
) -> Value | None:
    """Samples images bilinearly as `plain` does, with thread coarsening: several channels share the
    coordinates. None where that is not faster.

    Args:
        locate: statements that declare p2 and p3, the coordinates in the input along y and x for
            the element i0, i2, i3 of the result.
    """
    source, sizes, traits = _known(x.type.dims), _known(type.dims), builder.traits
    if source is None or sizes is None or type.dtype is DType.float64:
        return None
    if type.nbytes > traits.max_storage_range:
        return None
    batches, channels, height, width = sizes
    enough = _enough(traits)
    each = next(
        (
            count
            for count in (4, 2)
            if channels % count == 0 and math.prod(sizes) // count >= enough
        ),
        None,
    )
    if not traits.profile.prefers_unrolled_code or each is None:
        return None
    staged = _staged(traits, source, sizes)
    if staged is not None:
        count, local, rounds = staged
        (high, wide), pixels = source[2:], height * width
        samples = -(-pixels // local)
        macros = {
            "COUNT": count,
            "LANES": _LANES[count],
            "HIGH": high,
            "WIDE": wide,
            "PIXELS": pixels,
            "LOCAL": local,
            "ROUNDS": rounds,
            "TOGETHER": next(n for n in (2, 1) if samples % n == 0),
            "LOCATE_ALL": locate,
        }
        spec = MapSpec(
            "",
            ("X", "GRID"),
            stores=False,
            template="image/sample_staged.comp",
            macros=tuple((name, str(text)) for name, text in macros.items()),
            local=local,
            flops=plain.flops * count * rounds * pixels // local,
        )
        return builder.emit(
            NAME, plain, spec, (batches, channels // (count * rounds), 1, local), (x, grid), type
        )
    terms = " + ".join(
        f"(in{n} ? X(i0, c, q2{up}, q3{across}) : 0.0) * u{n}"
        for n, (up, across) in enumerate(_CORNERS)
    )
    put = f"int c = i1 * {each} + k; R_PUT(i0, c, i2, i3, {terms});"
    body = f"{locate} {_AROUND} UNROLL for (int k = 0; k < {each}; k++) {{ {put} }}"
    # Coordinates may be anywhere. A large workgroup reuses more of what it brings into the cache of
    # its multiprocessor.
    spec = MapSpec(body, ("X", "GRID"), stores=False, flops=plain.flops * each, local=1024)
    return builder.emit(
        NAME, plain, spec, (batches, channels // each, height, width), (x, grid), type
    )


_CORNERS = tuple((up, across) for up in (0, 1) for across in (0, 1))
_LANES = {1: "float", 2: "vec2"}
_STAGED_GROUPS = 0.9  # workgroups per multiprocessor, at least


_AROUND = "AROUND(2, x_size_2) AROUND(3, x_size_3) AROUND_CORNERS"


def _staged(
    traits: DeviceTraits, source: Sequence[int], sizes: Sequence[int]
) -> tuple[int, int, int] | None:
    """Channels that a workgroup keeps in shared memory, its invocations, and how many times it
    does so, if all samples are to be read from there; else None."""
    (high, wide), pixels = source[2:], math.prod(sizes[2:])
    room = min(traits.profile.staged_image_bytes, traits.max_shared_memory)
    local = next((n for n in (1024, 512, 256) if n <= min(pixels, traits.max_invocations)), None)
    count = next(
        (n for n in (2, 1) if sizes[1] % n == 0 and 4 * n * (high + 2) * (wide + 2) <= room),
        None,
    )
    if count is None or local is None or pixels < high * wide:
        return None
    # All workgroups run together. Each reads what it will sample next while it samples.
    images, sets = sizes[0], sizes[1] // count
    least = _STAGED_GROUPS * traits.processors
    rounds = next(
        (n for n in (16, 8, 4, 2, 1) if sets % n == 0 and images * sets // n >= least), None
    )
    return None if rounds is None else (count, local, rounds)
