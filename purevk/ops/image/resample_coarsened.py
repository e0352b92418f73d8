"""Resampling of planes (NCHW) by strips: an invocation makes several rows of a column, of several
channels, that share places, weights and what they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map import MapSpec, emit_map
from purevk.lower.numbers import gcd4
from purevk.ops.builder import Builder
from purevk.ops.image_layout import is_nchw_operand
from purevk.ops.mapped import same_order
from purevk.ops.registry import Kernel, Operator, register
from purevk.tuning import DeviceTraits

NAME = "purevk.strips"
# Rows and planes that an invocation makes, by the columns.
_STRIPS = {1: ((4, 4), (4, 2), (4, 1), (2, 1)), 4: ((4, 2), (4, 1), (2, 1))}


def _shape(
    plain: MapSpec, strips: MapSpec, over: tuple, inputs: tuple, type: TensorType
) -> tuple[TensorType, ...]:
    return (type,)


def _lower(lowering: Lowering, node: Node) -> None:
    plain, strips, over, values, _ = node.args
    inputs, out = [lowering.operand(value) for value in values], lowering.operand(node.result)
    fits = not strips.fours or gcd4(out.offset, *out.strides[:3])
    if is_nchw_operand(inputs[0]) and is_nchw_operand(out) and _follow(inputs[0]) and fits:
        emit_map(lowering, strips, inputs, {}, [out], over)
    else:
        emit_map(lowering, plain, inputs, {}, [out])


def _follow(x: Operand) -> bool:
    """Whether the planes of one image follow those of another, so that they are one dim."""
    batches, channels = x.dims[:2]
    return (isinstance(batches, int) and batches == 1) or x.strides[0] == channels * x.strides[1]


def _orders(node: Node, layout_of: Any) -> tuple:
    value = node.args[3][0]
    return (same_order(value, layout_of(value)),)


register(Operator(NAME, _shape, Kernel(_lower, layouts=_orders)))


def _known(*sizes: Size) -> bool:
    return all(isinstance(size, int) and size > 0 for size in sizes)


def resized(
    builder: Builder,
    x: Value,
    type: TensorType,
    plain: MapSpec,
    taps: int,
    scales: Sequence[float | None],
    align: bool,
) -> Value | None:
    """The resizing of images that `plain` says, so that planes are made by strips where that is
    faster; None where it is not.

    Args:
        taps: elements along each dim that make one of the result: 2, or 4 by cubic weights.
        scales: how far apart neighbours of the result are in the input, along y and x; None:
            unknown.
    """
    down, across = scales
    if not _known(*x.type.dims, *type.dims) or down is None or across is None or not 0 < down <= 1:
        return None
    images, (height, width) = x.type.dims[0] * x.type.dims[1], type.dims[2:]
    traits: DeviceTraits = builder.traits
    enough = traits.profile.enough_invocations_per_core * traits.processors
    columns = 4 if width % 4 == 0 and 0 < across <= 1 else 1
    sizes = next(
        (
            (rows, planes)
            for rows, planes in _STRIPS[columns]
            if images % planes == 0
            and height >= rows
            and images // planes * -(-height // rows) * (width // columns) >= enough
        ),
        None,
    )
    if not traits.profile.prefers_unrolled_code or sizes is None or type.dtype is DType.float64:
        return None
    rows, planes = sizes
    over = (images // planes, -(-height // rows), width // columns)
    body = _resize(
        taps, _along(2, rows, taps, down, align), _along(3, columns, taps, across, align), planes
    )
    flops = plain.flops * rows * columns * planes
    spec = MapSpec(body, ("X",), stores=False, fours=columns == 4, flops=flops)
    return builder.emit(NAME, plain, spec, over, (x,), type)


@dataclass(frozen=True)
class _Along:
    """What several neighbours of the result along a dim share.

    Attributes:
        text: statements that declare what the others name.
        count: how many they are.
        span: elements of the input that they read, from q{dim}_0 on.
        taps: for each neighbour, the number of each element, or two with the condition under which
            it is the second.
        weights: for each neighbour, the text of each element's weight.
    """

    text: str
    count: int
    span: int
    taps: tuple[tuple[tuple[int, int, str] | int, ...], ...]
    weights: tuple[tuple[str, ...], ...]


def _repeats(step: float, count: int, align: bool) -> bool:
    """Whether `count` neighbours have the same places between elements everywhere, without
    rounding."""
    return not align and math.frexp(step)[0] == 0.5 and step < 1 and step * count >= 1


def _along(d: int, count: int, taps: int, step: float, align: bool) -> _Along:
    before, first = taps // 2 - 1, f"i{d - 1} * {count}"
    weigh = _cubic_weights if taps == 4 else lambda t: (1.0 - t, t)
    q = lambda number, place: f"int q{d}_{number} = clamp({place}, 0, x_size_{d} - 1);"  # noqa: E731
    if _repeats(step, count, align):
        places = [(n + 0.5) * step - 0.5 for n in range(count)]
        low = [math.floor(place) for place in places]
        span = low[-1] - low[0] + taps
        text = [f"int a{d} = i{d - 1} * {int(step * count)};"]
        text += [q(t, f"a{d} + {t + low[0] - before}") for t in range(span)]
        each = tuple(tuple(n - low[0] + k for k in range(taps)) for n in low)
        weights = tuple(
            tuple(f"({weight!r})" for weight in weigh(place - n)) for place, n in zip(places, low)
        )
        return _Along(" ".join(text), count, span, each, weights)
    flag, vector = "true" if align else "false", f"vec{taps}"
    weights_of = "pv_cubic_weights({})" if taps == 4 else "pv_linear_weights({})"
    # The places of neighbours differ by `step`, rounded down or up.
    low = [math.floor(n * step) for n in range(count)]
    span = low[-1] + 1 + taps if count > 1 else taps
    text = [f"int a{d} = int(floor(pv_source({first}, ({step!r}), {flag})));"]
    text += [q(t, f"a{d} + {t - before}") for t in range(span)]
    each = []
    for n in range(count):
        # A place between two elements by rounding alone counts for the one that it is meant for.
        up, place = f"up{d}_{n}", f"pv_source({first} + {n}, ({step!r}), {flag})"
        text.append(
            f"float p{d}_{n} = {place}; bool {up} = {'false' if n == 0 else f'int(floor(p{d}_{n})) - a{d} > {low[n]}'};"
            f" {vector} w{d}_{n} = {weights_of.format(f'p{d}_{n} - float(a{d} + {low[n]} + ({up} ? 1 : 0))')};"
        )
        each.append(
            tuple(low[n] + k if n == 0 else (low[n] + k, low[n] + k + 1, up) for k in range(taps))
        )
    weights = tuple(tuple(f"w{d}_{n}[{k}]" for k in range(taps)) for n in range(count))
    return _Along(" ".join(text), count, span, tuple(each), weights)


def _cubic_weights(t: float) -> tuple[float, ...]:
    """`pv_cubic_weights`."""
    a = -0.75
    near = lambda x: ((a + 2) * x - (a + 3)) * x * x + 1  # noqa: E731
    far = lambda x: ((a * x - 5 * a) * x + 8 * a) * x - 4 * a  # noqa: E731
    return (far(t + 1), near(t), near(1 - t), far(2 - t))


def _joined(name: str, along: _Along, n: int) -> str:
    """The sum for neighbour `n`, where `name` and a number are the text of an element."""

    def one(tap: tuple[int, int, str] | int) -> str:
        return (
            f"{name}{tap}"
            if isinstance(tap, int)
            else f"({tap[2]} ? {name}{tap[1]} : {name}{tap[0]})"
        )

    return " + ".join(
        f"{one(tap)} * {weight}" for tap, weight in zip(along.taps[n], along.weights[n])
    )


def _resize(taps: int, down: _Along, across: _Along, planes: int) -> str:
    loop = []
    for t in range(down.span):
        loop += [f"float x{t}_{k} = X(0, plane, q2_{t}, q3_{k});" for k in range(across.span)]
    for t in range(down.span):
        loop += [
            f"float line{n}_{t} = {_joined(f'x{t}_', across, n)};" for n in range(across.count)
        ]
    for row in range(down.count):
        sums = [_joined(f"line{n}_", down, row) for n in range(across.count)]
        at = f"0, plane, top + {row}, i2"
        put = (
            f"R_PUT4({at} * 4, vec4({', '.join(sums)}))"
            if len(sums) == 4
            else f"R_PUT({at}, {sums[0]})"
        )
        loop.append(f"if (top + {row} < r_size_2) {put};")
    return (
        f"int top = i1 * {down.count}; {down.text} {across.text}"
        f" for (int k = 0; k < {planes}; k++) {{ int plane = i0 * {planes} + k; {' '.join(loop)} }}"
    )


def sampled(
    builder: Builder, x: Value, grid: Value, type: TensorType, plain: MapSpec, places: str
) -> Value | None:
    """The bilinear sampling of images at places of a grid that `plain` says, so that the places
    serve several planes; None where that is not faster.

    Args:
        places: statements that declare p2 and p3, the place along y and x, at i0, i2, i3.
    """
    if not _known(*x.type.dims, *type.dims) or type.dtype is DType.float64:
        return None
    batches, channels, height, width = type.dims
    traits: DeviceTraits = builder.traits
    enough = traits.profile.enough_invocations_per_core * traits.processors
    planes = next(
        (
            count
            for count in (4, 2)
            if channels % count == 0 and _dims.product(type.dims) // count >= enough
        ),
        None,
    )
    if not traits.profile.prefers_unrolled_code or planes is None:
        return None
    staged = _staged(traits, x.type, type)
    if staged is not None:
        count, local, rounds = staged
        (high, wide), number = x.type.dims[2:], height * width
        spec = MapSpec(
            _sample_staged(places, count, local, rounds, (high, wide), number),
            ("X", "GRID"),
            stores=False,
            template="elementwise/map_shared.comp",
            macros=(("SHARED", f"shared {_LANES[count]} kept[{(high + 2) * (wide + 2)}];"),),
            local=local,
            flops=plain.flops * count * rounds * number // local,
        )
        return builder.emit(
            NAME, plain, spec, (batches, channels // (count * rounds), 1, local), (x, grid), type
        )
    terms = " + ".join(
        f"(in{n} ? X(i0, c, q2{up}, q3{across}) : 0.0) * u{n}"
        for n, (up, across) in enumerate(_CORNERS)
    )
    each = f"int c = i1 * {planes} + k; R_PUT(i0, c, i2, i3, {terms});"
    body = f"{places} {_AROUND} UNROLL for (int k = 0; k < {planes}; k++) {{ {each} }}"
    # Places may be anywhere: the more of them a workgroup has, the more of what it brings to its
    # processor serves many.
    spec = MapSpec(body, ("X", "GRID"), stores=False, flops=plain.flops * planes, local=1024)
    return builder.emit(
        NAME, plain, spec, (batches, channels // planes, height, width), (x, grid), type
    )


_CORNERS = tuple((up, across) for up in (0, 1) for across in (0, 1))
_LANES = {1: "float", 2: "vec2"}
_STAGED_GROUPS = 0.9  # workgroups a processor, at least


def _around() -> str:
    """Statements for the place p2, p3: the elements q20, q21 x q30, q31 around it, whether each is
    there, its weight."""
    out = []
    for d in (2, 3):
        out.append(f"float f{d} = floor(p{d}), w{d} = p{d} - f{d}; int a{d} = int(f{d});")
        for step in (0, 1):
            place = f"a{d} + {step}"
            out.append(
                f"int q{d}{step} = clamp({place}, 0, x_size_{d} - 1); bool in{d}{step} = q{d}{step} == {place};"
            )
    for n, (up, across) in enumerate(_CORNERS):
        vertical, horizontal = ("w2" if up else "(1.0 - w2)"), ("w3" if across else "(1.0 - w3)")
        out.append(f"bool in{n} = in2{up} && in3{across}; float u{n} = {vertical} * {horizontal};")
    return " ".join(out)


_AROUND = _around()


def _staged(traits: DeviceTraits, x: TensorType, type: TensorType) -> tuple[int, int, int] | None:
    """Planes that a workgroup keeps in shared memory, its invocations, and how often it does so,
    where all places read from there; else None."""
    (high, wide), places = x.dims[2:], _dims.product(type.dims[2:])
    room = min(traits.profile.staged_image_bytes, traits.max_shared_memory)
    local = next((n for n in (1024, 512, 256) if n <= min(places, traits.max_invocations)), None)
    count = next(
        (n for n in (2, 1) if type.dims[1] % n == 0 and 4 * n * (high + 2) * (wide + 2) <= room),
        None,
    )
    if count is None or local is None or places < high * wide:
        return None
    # All workgroups at once, each reading what it will sample next while it samples.
    images, sets = type.dims[0], type.dims[1] // count
    least = _STAGED_GROUPS * traits.processors
    rounds = next(
        (n for n in (16, 8, 4, 2, 1) if sets % n == 0 and images * sets // n >= least), None
    )
    return None if rounds is None else (count, local, rounds)


def _sample_staged(
    places: str, count: int, local: int, rounds: int, size: tuple[int, int], number: int
) -> str:
    """The statements of a workgroup: it copies planes with zeros around them to shared memory, and
    makes all `number` places of theirs, so many times for planes after one another."""
    high, wide = size
    vector, line, turns = _LANES[count], wide + 2, -(-number // local)
    loads, together = -(-high * wide // local), next(n for n in (2, 1) if turns % n == 0)
    if_there = lambda name, limit: f"if ({name} < {limit}) " if limit % local else ""  # noqa: E731
    read = ", ".join(f"X(i0, c + {k}, y, x)" for k in range(count))
    spot = f"int at = mine + n * {local}, y = at / {wide}, x = at - y * {wide};"
    each = f"UNROLL for (int n = 0; n < {loads}; n++) {{ {spot} {if_there('at', high * wide)}"
    fetch, keep = (
        f"{each} next[n] = {vector}({read}); }}",
        f"{each} kept[(y + 1) * {line} + x + 1] = next[n]; }}",
    )
    zeros = (
        f"for (int at = mine; at < {2 * line + 2 * high}; at += {local}) {{ int side = at - {2 * line};"
        f" kept[at < {line} ? at : at < {2 * line} ? at + {high * line}"
        f" : ((side >> 1) + 1) * {line} + (side & 1) * {wide + 1}] = {vector}(0.0); }}"
    )
    around = " ".join(
        f"float f{d} = floor(p{d}), w{d} = p{d} - f{d}; int a{d} = int(f{d}), q{d}0 = clamp(a{d}, -1, {limit}) + 1,"
        f" q{d}1 = clamp(a{d} + 1, -1, {limit}) + 1;"
        for d, limit in ((2, high), (3, wide))
    )
    rows = [
        f"(kept[q2{up} * {line} + q30] * (1.0 - w3) + kept[q2{up} * {line} + q31] * w3)"
        for up in (0, 1)
    ]
    puts = " ".join(
        f"R_PUT(i0, c + {k}, i2, i3, {'v' if count == 1 else f'v[{k}]'});" for k in range(count)
    )
    sample = (
        f"[[dont_unroll]] for (int turn = 0; turn < {turns}; turn += {together}) {{"
        f" UNROLL for (int n = 0; n < {together}; n++) {{ int at = mine + (turn + n) * {local};"
        f" {if_there('at', number)}{{ int i2 = at / r_size_3, i3 = at - i2 * r_size_3;"
        f" {places} {around} {vector} v = {rows[0]} * (1.0 - w2) + {rows[1]} * w2; {puts} }} }} }}"
    )
    return (
        f"int mine = i3, c = i1 * {count * rounds}; {vector} next[{loads}]; {fetch} {zeros}"
        f" [[dont_unroll]] for (int round = 0; round < {rounds}; round++) {{ barrier(); {keep} barrier();"
        f" if (round + 1 < {rounds}) {{ c += {count}; {fetch} c -= {count}; }} {sample} c += {count}; }}"
    )
