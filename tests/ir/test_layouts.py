"""Layouts and views against torch's strided tensors."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import purevk.ops  # noqa: F401
from purevk.dtypes import DType
from purevk.ir import Dim, GuardLog, Layout, Symbol, TensorType, contiguous_strides, dims
from purevk.ops.movement.views import view_layout

SIZES = st.lists(st.sampled_from([1, 1, 2, 3, 4, 6, 8]), min_size=0, max_size=4)


@st.composite
def strided(draw) -> torch.Tensor:
    """A tensor that was permuted, sliced, stepped over, expanded and viewed."""
    sizes = draw(SIZES)
    x = torch.arange(torch.Size(sizes).numel(), dtype=torch.float32).reshape(sizes)
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.integers(0, 4))
        if kind == 0 and x.dim():
            x = x.permute(draw(st.permutations(range(x.dim()))))
        elif kind == 1 and x.dim():
            d = draw(st.integers(0, x.dim() - 1))
            start = draw(st.integers(0, x.shape[d] - 1))
            x = x.narrow(d, start, draw(st.integers(1, x.shape[d] - start)))
        elif kind == 2 and x.dim():
            d = draw(st.integers(0, x.dim() - 1))
            x = x[(slice(None),) * d + (slice(None, None, 2),)]
        elif kind == 3 and x.dim() < 4:
            x = x.unsqueeze(draw(st.integers(0, x.dim())))
        elif kind == 4:
            ones = [d for d, size in enumerate(x.shape) if size == 1]
            if ones:
                x = x.expand([3 if d == ones[0] else size for d, size in enumerate(x.shape)])
    return x


def layout_of(x: torch.Tensor) -> Layout:
    return Layout(x.storage_offset(), tuple(x.stride()))


@st.composite
def viewed(draw) -> tuple[torch.Tensor, list[int]]:
    """A strided tensor and sizes with as many elements."""
    x = draw(strided())
    left, sizes = x.numel(), []
    while left > 1 and len(sizes) < 4:
        divisors = [n for n in range(1, left + 1) if left % n == 0]
        sizes.append(draw(st.sampled_from(divisors)))
        left //= sizes[-1]
    sizes += [left] if left > 1 or draw(st.booleans()) else []
    return x, draw(st.permutations(sizes))


@settings(max_examples=600, deadline=None)
@given(viewed())
def test_views_are_those_of_torch(case: tuple[torch.Tensor, list[int]]) -> None:
    """Where `Tensor.view` succeeds so does `view_layout`, with the same strides; where it refuses,
    so does this."""
    x, wanted = case
    try:
        seen = x.view(wanted)
    except RuntimeError:
        seen = None
    made = view_layout(layout_of(x), tuple(x.shape), tuple(wanted))
    assert (made is None) == (seen is None)
    if made is not None:
        assert made.offset == seen.storage_offset()
        # The stride of a dim of size 1 means nothing.
        assert [s for s, n in zip(made.strides, wanted) if n != 1] == [
            s for s, n in zip(seen.stride(), wanted) if n != 1
        ]


@settings(max_examples=300, deadline=None)
@given(strided())
def test_contiguity_is_that_of_torch(x: torch.Tensor) -> None:
    assert layout_of(x).is_contiguous(tuple(x.shape)) == x.is_contiguous()


@settings(max_examples=300, deadline=None)
@given(strided())
def test_dense_order(x: torch.Tensor) -> None:
    """A dense tensor permuted into its order of memory is contiguous; one without an order covers
    its span with gaps or twice."""
    order = layout_of(x).dense_order(tuple(x.shape))
    if order is not None:
        assert x.permute(order).is_contiguous()
    else:
        span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
        assert span != x.numel() or len({int(v) for v in x.reshape(-1)}) != x.numel()


@given(SIZES, st.randoms(use_true_random=False))
def test_strides_of_dense_tensors(sizes: list[int], rng: object) -> None:
    order = list(range(len(sizes)))
    rng.shuffle(order)
    x = torch.empty([sizes[d] for d in order]).permute([order.index(d) for d in range(len(sizes))])
    made = contiguous_strides(sizes, order)
    assert [s for s, n in zip(made, sizes) if n != 1] == [
        s for s, n in zip(x.stride(), sizes) if n != 1
    ]
    assert Layout.dense(sizes, order).dense_order(sizes) is not None


@settings(max_examples=200, deadline=None)
@given(viewed(), st.integers(1, 5), st.integers(0, 1))
def test_views_with_a_symbolic_size(
    case: tuple[torch.Tensor, list[int]], value: int, position: int
) -> None:
    """With a symbolic dim in front, a layout that is found is torch's at every value that keeps the
    guards."""
    x, wanted = case
    symbol = Symbol("s", 8, lower=1)
    batch = Dim.of(symbol)
    joined = bool(position and wanted)
    sizes = (batch, *x.shape)
    target = (batch * wanted[0], *wanted[1:]) if joined else (batch, *wanted)
    layout = Layout(0, (dims.product(x.shape) * 7, *x.stride()))
    with GuardLog() as log:
        made = view_layout(layout, sizes, target)
    env = {symbol: value}
    if not all(guard.holds(env) for guard in log.guards):
        return
    extents, strides = [value, *x.shape], [dims.evaluate(s, env) for s in layout.strides]
    storage = torch.arange(
        1 + sum((n - 1) * s for n, s in zip(extents, strides)), dtype=torch.float32
    )
    real = torch.as_strided(storage, extents, strides)
    try:
        seen = real.view([dims.evaluate(size, env) for size in target])
    except RuntimeError:
        seen = None
    if made is not None:
        assert seen is not None
        mine = torch.as_strided(
            storage,
            seen.shape,
            [dims.evaluate(s, env) for s in made.strides],
            dims.evaluate(made.offset, env),
        )
        assert torch.equal(mine, seen)


def test_types() -> None:
    s = Dim.of(Symbol("s", 10))
    made = TensorType(DType.float16, (3, s))
    assert made.rank == 2 and made.nbytes == 60 and not made.is_static
    assert dims.evaluate(made.numel, {Symbol("s", 10): 4}) == 12
    assert repr(made) == "float16[3,s]" and made.with_dtype(DType.int64).nbytes == 240
    assert TensorType(DType.bool, ()).numel == 1 and made.with_dims((2,)).is_static
    assert TensorType(DType.float32, (0, 5)).nbytes == 0


def test_division_by_a_size_around_zero() -> None:
    """The range of a quotient holds what small divisors give, on both sides of 0."""
    for low, high in ((0, 5), (-3, 5), (-4, -1), (1, 6), (-2, 0)):
        symbol = Symbol("d", high, low, is_size=False)
        for number in (10, -7, 0):
            bounds = dims.range_of(number // Dim.of(symbol))
            rest = dims.range_of(number % Dim.of(symbol))
            for value in range(low, high + 1):
                if value:
                    assert bounds[0] <= number // value <= bounds[1], (number, value, bounds)
                    assert rest[0] <= number % value <= rest[1], (number, value, rest)
