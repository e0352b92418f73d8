"""The generator: Philox 4x32-10, counted by element and operator, with a seed for each run.

The four words of block b of random operator number m of a graph are
`philox(counter=(b, a, m, 0), key=seed)`. The seed is drawn at each run of the graph, see
`purevk.generators`. `a` is 0; operators that try again count their attempts there.

- 32 bits per element: element n has word n % 4 of block n // 4. A float32 in [0, 1) is the upper 24
  bits; one in (0, 1] is (all bits + 0.5) 2^-32. An integer below 2^16 is the upper half of the bits
  times the size of the range. Normally distributed numbers are made in pairs by Box and Muller's
  method, of words 0 and 1, and 2 and 3.
- 64 bits per element: element n has words 2 (n % 2) (the upper ones) and 2 (n % 2) + 1 of block
  n // 2. A float64 is the upper 53 bits. Integers of larger ranges are the upper 64 bits of the
  bits times the size of the range.

Elements are counted in row-major order. So the numbers depend neither on the layout nor on the
device's workgroups.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from purevk.dtypes import DType
from purevk.errors import ShapeError
from purevk.ir import Arg, Dim, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.lowering import Lowering
from purevk.lower.map import MapSpec, emit_map
from purevk.ops.builder import Builder
from purevk.ops.registry import Kernel, define
from purevk.ops.registry import rewrite as register_rewrite
from purevk.ops.signatures import signature

NAME = "purevk.random"
TEMPLATE = "random/map.comp"
_NARROW = 1 << 16  # sizes of ranges for which 32 bits are even enough


@signature("seed, kind, number: int, sizes, dtype, low: Size, span: Size")
def _shape(sizes: Sequence[Size], dtype: DType) -> TensorType:
    return TensorType(dtype, tuple(sizes))


def element_number(rank: int) -> str:
    """The number of the element at i0, i1, ... in row-major order, as GLSL."""
    element = "0"
    for d in range(rank):
        element = f"({element} * r_size_{d} + i{d})"
    return element


def _lower(lowering: Lowering, node: Node) -> None:
    seed, out = lowering.operand(node.tensor("seed")), lowering.operand(node.result)
    kind = node.str("kind")
    wide = kind == "wide" or out.dtype is DType.float64
    numbers: dict[str, Size] = {"number": node.int("number")}
    if kind in ("integers", "wide"):
        numbers |= _range(kind, node.size("low"), node.size("span"))
    more = "".join(f", {name}" for name in numbers if name != "number")
    step = 1 if wide else 2
    body = (
        f"int element = {element_number(len(out.dims))};"
        f" uvec4 bits = pv_random_bits(uint(element >> {step}), 0u, uint(number), uvec2(SEED(0), SEED(1)));"
        f" pv_random_{kind}(bits, element & {(1 << step) - 1}{more}, r);"
    )
    # Numbers, not text: one kernel serves all random operators of a kind.
    lanes = ((len(out.dims) - 1, (None,)),) if out.dims and not wide else ()
    names = tuple(numbers)
    spec = MapSpec(body, ("SEED",), names, pushed=names, lanes=lanes, template=TEMPLATE)
    emit_map(lowering, spec, [seed], numbers, [out])


def _range(kind: str, low: Size, span: Size) -> Mapping[str, Size]:
    """The numbers of a kernel that makes integers: of wide ones, words of 32 bits."""
    if kind == "integers" or not (isinstance(low, int) and isinstance(span, int)):
        return {"low": low, "span": span} | (
            {"low_high": 0, "span_high": 0} if kind == "wide" else {}
        )
    return {
        "low": _word(low),
        "span": _word(span),
        "low_high": _word(low >> 32),
        "span_high": _word(span >> 32),
    }


def _word(number: int) -> int:
    """The lower 32 bits, as a signed number."""
    return (number + 2**31) % 2**32 - 2**31


define(NAME, _shape, Kernel(_lower, windows=lambda node: True))


# Registers an operator with random results, see `registry.rewrite`.
rewrite = functools.partial(register_rewrite, random=True)


def random(
    builder: Builder,
    generator: Arg,
    kind: str,
    sizes: Sequence[Size],
    dtype: DType,
    low: Size = 0,
    span: Size = 1,
) -> Value:
    """Random numbers, others at each run.

    Args:
        generator: the operator's argument: None for the default generator, or a number of
            `purevk.generators`.
        kind: "uniform" in [0, 1), "open" in (0, 1], "normal", "integers" in [low, low + span), or
            "bits" (an int32).
        dtype: float32 or float64; an integer type for integers.
    """
    if kind == "integers" and not (isinstance(span, int) and span <= _NARROW):
        kind = "wide"
    if kind == "normal" and dtype is DType.float64:
        return _normal_in_double(builder, generator, sizes)
    seed = seed_of(builder, generator)
    return builder.emit(NAME, seed, kind, next_number(builder), tuple(sizes), dtype, low, span)


def seed_of(builder: Builder, generator: Arg) -> Value:
    """The seed of a generator, see `random`."""
    return builder.seed(generator if isinstance(generator, int) else 0)


def next_number(builder: Builder) -> int:
    """A number that no other random operator of the graph has."""
    builder.random_operators += 1
    return builder.random_operators - 1


def _normal_in_double(builder: Builder, generator: Arg, sizes: Sequence[Size]) -> Value:
    """Box and Muller's method in double precision, one number of each pair."""
    size, angle = (random(builder, generator, "open", sizes, DType.float64) for _ in range(2))
    size = builder.aten.mul.Tensor(builder.aten.log(size), y=-2.0)
    angle = builder.aten.mul.Tensor(angle, y=6.283185307179586)
    return builder.aten.mul.Tensor(
        builder.aten.sqrt(size),
        builder.aten.cos(angle),
    )


def whole(
    builder: Builder, generator: Arg, sizes: Sequence[Size], dtype: DType, low: Size, high: Size
) -> Value:
    """Integers in [low, high) as elements of `dtype`.

    Raises:
        ShapeError: no integer is in this range.
    """
    span = high - low
    if isinstance(span, int) and not 0 < span <= 2**64:
        raise ShapeError(f"random integers in [{low}, {high})")
    fits = isinstance(low, Dim) or (-(2**31) <= low and _dims.upper(high) <= 2**31)
    made = dtype if dtype.is_int else DType.int32 if fits else DType.int64
    values = random(builder, generator, "integers", sizes, made, low, span)
    return values if made is dtype else builder.aten._to_copy(values, dtype)


def uniform(builder: Builder, generator: Arg, sizes: Sequence[Size], dtype: DType) -> Value:
    """Numbers in [0, 1) as elements of `dtype`, evenly spaced: as many bits as its mantissa has."""
    if dtype is DType.float64 or dtype is DType.float32:
        return random(builder, generator, "uniform", sizes, dtype)
    made = random(builder, generator, "uniform", sizes, DType.float32)
    steps = float(MANTISSA.get(dtype, 1 << 24))
    made = builder.aten.floor(builder.aten.mul.Tensor(made, steps))
    return builder.aten._to_copy(builder.aten.mul.Tensor(made, 1 / steps), dtype)


# The first integer after which not all integers are numbers of the type.
MANTISSA = {
    DType.bfloat16: 1 << 8,
    DType.float16: 1 << 11,
    DType.float32: 1 << 24,
    DType.float64: 1 << 53,
}
