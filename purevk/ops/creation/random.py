"""Random numbers: Philox 4x32-10, counted by element, call and operator.

The bits of element n at the k-th call (from 0 on) of random operator number m of a program are word
n % 4 of `philox(counter=(n // 4, k, m, 0), key=(seed, 0))`, with the seed that the knob PUREVK_SEED
gives. A float32 in [0, 1) is the upper 24 bits; an integer in [low, high) is low + the upper half
of the product of the bits and high - low. Normally distributed numbers are made in pairs by Box and
Muller's method, of words 0 and 1, and 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from purevk import knobs
from purevk.dtypes import DType
from purevk.ir import Arg, Node, Size, TensorType, Value
from purevk.lower.lowering import Lowering
from purevk.lower.map import MapSpec, emit_map
from purevk.ops.builder import Builder
from purevk.ops.creation.shapes import like, sized
from purevk.ops.registry import Kernel, Operator, Rewrite, ShapeError, Types, register
from purevk.ops.sort.sort import sort

NAME = "purevk.random"


def _shape(
    calls: TensorType,
    kind: str,
    number: int,
    seed: int,
    sizes: Sequence[Size],
    dtype: DType,
    low: Size,
    span: Size,
) -> TensorType:
    return TensorType(dtype, tuple(sizes))


def _lower(lowering: Lowering, node: Node) -> None:
    calls, out = lowering.operand(node.tensor("calls")), lowering.operand(node.result)
    kind, seed = node.str("kind"), node.int("seed")
    element = "0"
    for d in range(len(out.dims)):
        element = f"({element} * size_{d} + i{d})"
    more = ", low, span" if kind == "integers" else ""
    # A software device would pay more for the barrier of each workgroup than for another dispatch.
    counted = lowering.traits.profile.has_fast_shared_memory
    calls_read = "calls" if counted else "CALLS(0)"
    body = (
        f"int element = {element};"
        f" uvec4 bits = pv_philox(uvec4(uint(element >> 2), uint({calls_read}), uint(number), 0u),"
        f" uvec2({seed & 0xFFFFFFFF}u, 0u)); pv_random_{kind}(bits, element & 3{more}, r);"
    )
    # Numbers, not text: one kernel serves all random operators of a kind.
    numbers: dict[str, Size] = {"number": node.int("number")}
    if kind == "integers":
        numbers |= {"low": node.size("low"), "span": node.size("span")}
    names = tuple(numbers)
    lanes = ((len(out.dims) - 1, (None,)),) if out.dims else ()
    spec = MapSpec(body, ("CALLS",), names, pushed=names, lanes=lanes, counts_calls=counted)
    emit_map(lowering, spec, [calls], numbers, [out])
    if not counted:
        emit_map(lowering, MapSpec("R_PUT(0, R(0) + 1);", (), stores=False), [], {}, [calls], (1,))


register(Operator(NAME, _shape, Kernel(_lower), mutates=(0,)))


def random(
    builder: Builder,
    kind: str,
    sizes: Sequence[Size],
    dtype: DType,
    low: Size = 0,
    span: Size = 1,
) -> Value:
    """Random numbers, others at each call: "uniform" in [0, 1), "normal", or "integers" in [low,
    low + span)."""
    number = builder.random_operators
    builder.random_operators += 1
    calls = builder.state(TensorType(DType.int32, (2,)))  # calls, workgroups that are done
    made = DType.float32 if dtype.is_float and kind != "integers" else dtype
    values = builder.emit(NAME, calls, kind, number, knobs.SEED(), tuple(sizes), made, low, span)
    return values if made is dtype else builder.emit("aten._to_copy.default", values, dtype)


def _random(
    name: str, shape: Callable[..., Types], expand: Callable[..., Value | tuple[Value, ...]]
) -> None:
    """Registers an operator with random results. `expand` gets the builder, the node and its
    arguments."""
    form = Rewrite(lambda builder, node: expand(builder, node, *node.args))
    register(Operator(name, shape, form, random=True))


def _sized(kind: str, name: str) -> None:
    def expand(builder: Builder, node: Node, *_: Arg) -> Value:
        return random(builder, kind, node.result.type.dims, node.result.type.dtype)

    _random(f"aten.{name}.default", sized, expand)
    _random(f"aten.{name}_like.default", like, expand)


_sized("uniform", "rand")
_sized("normal", "randn")


def _integers(builder: Builder, node: Node, low: int, high: int) -> Value:
    if not 0 < high - low <= 2**31 - 1:
        raise ShapeError(f"random integers in [{low}, {high})")
    type = node.result.type
    made = type.dtype if type.dtype.is_int else DType.int32
    values = random(builder, "integers", type.dims, made, low, high - low)
    return (
        values if made is type.dtype else builder.emit("aten._to_copy.default", values, type.dtype)
    )


def _integers_shape(size: Sequence[Size], dtype: DType | int | None) -> TensorType:
    """The schema's default dtype is a number."""
    known = dtype if isinstance(dtype, DType) else None
    return TensorType(known or DType.int64, tuple(size))


_random(
    "aten.randint.default",
    lambda high, size, dtype=None, layout=None, device=None, pin_memory=None: _integers_shape(
        size, dtype
    ),
    lambda builder, node, high, *_: _integers(builder, node, 0, high),
)
_random(
    "aten.randint.low",
    lambda low, high, size, dtype=None, layout=None, device=None, pin_memory=None: _integers_shape(
        size, dtype
    ),
    lambda builder, node, low, high, *_: _integers(builder, node, low, high),
)
_random(
    "aten.randint_like.default",
    lambda x, high, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None: (
        x.with_dtype(dtype or x.dtype)
    ),
    lambda builder, node, x, high, *_: _integers(builder, node, 0, high),
)
_random(
    "aten.randint_like.low_dtype",
    lambda x, low, high, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None: (
        x.with_dtype(dtype or x.dtype)
    ),
    lambda builder, node, x, low, high, *_: _integers(builder, node, low, high),
)


def _permutation(builder: Builder, node: Node, count: Size, *_: Arg) -> Value:
    """The order of random numbers; equal ones, of 2^32, keep their order."""
    order = sort(builder, random(builder, "bits", (count,), DType.int32), 0, False)[1]
    return builder.emit("aten._to_copy.default", order, node.result.type.dtype)


_random(
    "aten.randperm.default",
    lambda n, dtype=None, layout=None, device=None, pin_memory=None: TensorType(
        dtype or DType.int64, (n,)
    ),
    _permutation,
)


# -- chances -------------------------------------------------------------------------------------
def _chance(builder: Builder, sizes: Sequence[Size], p: Value | float) -> Value:
    """True with probability p."""
    return builder.emit("aten.lt.Tensor", random(builder, "uniform", sizes, DType.float32), p)


_random(
    "aten.bernoulli.default",
    lambda x: x,
    lambda builder, node, x: builder.emit(
        "aten._to_copy.default", _chance(builder, x.type.dims, x), x.type.dtype
    ),
)
_random(
    "aten.bernoulli.p",
    lambda x, p=0.5: x,
    lambda builder, node, x, p: builder.emit(
        "aten._to_copy.default", _chance(builder, x.type.dims, float(p)), x.type.dtype
    ),
)


def _dropout(
    builder: Builder, node: Node, x: Value, p: float, train: bool | None
) -> tuple[Value, Value]:
    if train is False or p == 0:
        return builder.emit("aten.alias.default", x), builder.emit(
            "aten.full.default", x.type.dims, True, DType.bool
        )
    kept = _chance(builder, x.type.dims, 1.0 - float(p))
    scale = 0.0 if p == 1 else 1.0 / (1.0 - float(p))
    return builder.emit("aten.mul.Tensor", builder.emit("aten.mul.Tensor", x, kept), scale), kept


_random(
    "aten.native_dropout.default", lambda x, p, train=None: (x, x.with_dtype(DType.bool)), _dropout
)
_random(
    "aten.dropout.default",
    lambda x, p=0.5, train=False: x,
    lambda builder, node, x, p, train: _dropout(builder, node, x, p, bool(train))[0],
)
