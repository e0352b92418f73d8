"""Operators that walk many elements for one of the result, on a device that ends loops early: all of
them stay on the device, in parts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import purevk
from tests.lower.loops import ends_loops
from tests.ops.harness import Case, check, context, expected_of, host_nodes, program_of

pytestmark = pytest.mark.device
LIMIT = 512
P = (0.0, 1.0, 2.0, 3.0, math.inf)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _some(pick: random.Random, *sizes: int, special: bool = False) -> torch.Tensor:
    """Random numbers of few values, so that there are equal ones, in a random dtype. With `special`,
    some are NaN or infinite."""
    x = torch.randint(-9, 10, sizes) / 4
    if special and pick.random() < 0.5:
        for value in (math.nan, math.inf, -math.inf):
            x.view(-1)[torch.randint(0, x.numel(), (pick.randint(1, 4),))] = value
    return x.to(pick.choice(DTYPES))


def _length(pick: random.Random, limit: int) -> int:
    return pick.randint(limit + 1, 5 * limit)


def _window(pick: random.Random, limit: int, count: int) -> list[int]:
    """A window of more elements than the limit, in 1 to 3 dims."""
    sizes = [pick.randint(1, 4) for _ in range(count - 1)]
    sizes.append(_length(pick, limit) // math.prod(sizes) + 1)
    pick.shuffle(sizes)
    return sizes


def _image(pick: random.Random, window: Sequence[int], special: bool = False) -> torch.Tensor:
    sizes = [each + pick.randint(0, 3) for each in window]
    lead = [pick.randint(1, 2), pick.randint(1, 5)][pick.randint(0, 1) :]
    return _some(pick, *lead, *sizes, special=special)


# -- one random case of each kind ----------------------------------------------------------------
def _average_pool(pick: random.Random, limit: int) -> Case:
    count = pick.randint(1, 3)
    window = _window(pick, limit, count)
    options: dict[str, Any] = {
        "padding": [pick.randint(0, each // 2) for each in window],
        "stride": [pick.randint(1, each) for each in window],
        "count_include_pad": pick.random() < 0.5,
        "ceil_mode": pick.random() < 0.5,
    }
    if count > 1 and pick.random() < 0.3:
        options["divisor_override"] = pick.randint(1, 99)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[count - 1]
    return Case(pool, (_image(pick, window), window), options)


def _largest_pool(pick: random.Random, limit: int) -> Case:
    count = pick.randint(1, 3)
    window = _window(pick, limit, count)
    options: dict[str, Any] = {
        "padding": [pick.randint(0, each // 2) for each in window],
        "stride": [pick.randint(1, each) for each in window],
        "return_indices": pick.random() < 0.7,
        "ceil_mode": pick.random() < 0.5,
    }
    image = _image(pick, [each * 2 for each in window], special=True)
    options["dilation"] = [pick.randint(1, 2) for _ in window]
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[count - 1]
    return Case(pool, (image, window), options)


def _adaptive_pool(pick: random.Random, limit: int) -> Case:
    count = pick.randint(1, 3)
    parts = [pick.randint(1, 3) for _ in range(count)]
    sizes = [each * parts[n] for n, each in enumerate(_window(pick, limit, count))]
    if pick.random() < 0.5:
        pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[count - 1]
        return Case(pool, (_image(pick, sizes), parts))
    pool = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[count - 1]
    return Case(pool, (_image(pick, sizes, special=True), parts), {"return_indices": True})


def _fractional_pool(pick: random.Random, limit: int) -> Case:
    window, made = _window(pick, limit, 2), [pick.randint(1, 3) for _ in range(2)]
    x = torch.randn(1, 2, *(each + size for each, size in zip(window, made)))

    def pool(x: torch.Tensor, samples: torch.Tensor) -> Any:
        return torch.ops.aten.fractional_max_pool2d(x, window, made, samples)

    return Case(pool, (x, torch.rand(1, 2, 2)))


def _distances(pick: random.Random, limit: int) -> Case:
    length, p = _length(pick, limit), pick.choice(P)
    dtype = pick.choice((torch.float32, torch.float64))
    x, y = torch.randn(pick.randint(2, 5), length), torch.randn(2, pick.randint(1, 4), length)
    if pick.random() < 0.5:
        return Case(F.pdist, (x.to(dtype), p))
    return Case(torch.cdist, (x.to(dtype), y.to(dtype), p))


def _convolution(pick: random.Random, limit: int) -> Case:
    count, groups = pick.randint(1, 3), pick.choice((1, 1, 2))
    window = _window(pick, limit, count)
    whole, transposed = pick.random() < 0.3, pick.random() < 0.3
    dtype = torch.int64 if whole else pick.choice((torch.float32, torch.float64))
    channels, out = groups * pick.randint(1, 2), groups * pick.randint(1, 3)
    dilation = [pick.randint(1, 2) for _ in window]
    sizes = [pick.randint(1, 9) if transposed else each * 2 + 4 for each in window]
    x = torch.randint(-9, 10, (1, channels, *sizes)).to(dtype)
    lead = (channels, out // groups) if transposed else (out, channels // groups)
    weight = torch.randint(-9, 10, (*lead, *window)).to(dtype)
    bias = torch.randint(-9, 10, (out,)).to(dtype) if pick.random() < 0.5 else None
    stride = [pick.randint(1, 3) for _ in window]
    padding = [pick.randint(0, (each - 1) // 2) for each in window]

    def convolve(*tensors: torch.Tensor) -> torch.Tensor:
        x, weight, *rest = tensors
        bias = rest[0] if rest else None
        more = [0] * count
        return torch.ops.aten.convolution(
            x, weight, bias, stride, padding, dilation, transposed, more, groups
        )

    tensors = (x, weight) if bias is None else (x, weight, bias)
    return Case(convolve, tensors, constants=(1,) if pick.random() < 0.5 else ())


def _trilinear(pick: random.Random, limit: int) -> Case:
    left, right = 3, _length(pick, limit) // 3 + 1
    tensors = (torch.randn(2, left), torch.randn(4, left, right), torch.randn(2, right))

    def bilinear(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._trilinear(a, w, b, [1, 3], [0], [1, 2], [2, 3])

    return Case(bilinear, tensors)


def _segments(pick: random.Random, limit: int) -> Case:
    kind = pick.choice(("sum", "mean", "max", "min", "prod"))
    first, second = _length(pick, limit), pick.randint(0, 40)
    lengths = torch.tensor([second, 0, first])
    x = (
        torch.rand(first + second, 2)
        if kind != "prod"
        else torch.rand(first + second, 2) / 20 + 0.97
    )
    initial = pick.choice((None, 1.5))

    def reduce(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(x, kind, lengths=lengths, initial=initial)

    return Case(reduce, (x, lengths))


def _bags(pick: random.Random, limit: int) -> Case:
    mode = pick.choice(("sum", "mean", "max"))
    entries = _length(pick, limit)
    bags = pick.choice((3, entries))
    starts = sorted(pick.randint(0, entries) for _ in range(bags - 1))
    offsets = torch.tensor([0, *starts])
    options: dict[str, Any] = {"mode": mode, "include_last_offset": pick.random() < 0.5}
    if pick.random() < 0.5:
        options["padding_idx"] = 3
    elif mode == "sum" and pick.random() < 0.5:
        options["per_sample_weights"] = torch.randn(entries)
    if options["include_last_offset"]:
        offsets[-1] = entries
    table = torch.randint(-99, 99, (7, 3)) / 8
    return Case(F.embedding_bag, (torch.randint(0, 7, (entries,)), table, offsets), options)


def _complex_product(pick: random.Random, limit: int) -> Case:
    angle = torch.randn(2, _length(pick, limit), pick.randint(1, 3))
    x = torch.polar(torch.ones_like(angle), angle)
    return Case(pick.choice((torch.prod, torch.cumprod)), (x, 1), rtol=1e-3, atol=1e-3)


def _unique_slices(pick: random.Random, limit: int) -> Case:
    rows = torch.zeros(5, _length(pick, limit), dtype=torch.int32)
    rows[2:, -1] = 1
    return Case(torch.unique_consecutive, (rows,), {"dim": 0, "return_counts": True})


def _running_extremes(pick: random.Random, limit: int) -> Case:
    x = _some(pick, 2, pick.randint(34, 60) * limit, special=True)
    fn = pick.choice((torch.cummax, torch.cummin))
    return Case(fn, (x if x.dtype is not torch.float64 else x.float(), pick.choice((-1, 1))))


def _unique_rows(pick: random.Random, limit: int) -> Case:
    rows = torch.randint(0, 3, (_length(pick, limit) // 5, pick.randint(5, 9)))
    return Case(torch.unique, (rows.to(pick.choice((torch.float32, torch.int64))),), {"dim": 0})


def _overlapping_frames(pick: random.Random, limit: int) -> Case:
    frames = _length(pick, limit)
    size = frames + 7

    def add(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.unfold_backward(x, [frames - 1 + size], 0, size, 1)

    return Case(add, (torch.randint(-9, 9, (frames, size)) / 4,))


def _smooth_resize(pick: random.Random, limit: int) -> Case:
    sizes = pick.choice(((3, 2 * limit), (2 * limit, 3)))
    mode = pick.choice(("bilinear", "bicubic"))
    x = torch.rand(1, 2, *sizes)
    return Case(F.interpolate, (x, [2, 2]), {"mode": mode, "antialias": True}, rtol=1e-4)


def _two_dims(pick: random.Random, limit: int) -> Case:
    """A reduction of two dims that do not follow one another."""
    x = torch.randint(-99, 99, (pick.randint(2 * limit, 4 * limit), 2, pick.randint(2, 3))) / 4
    fn = pick.choice(
        (
            lambda x: x.sum((0, 2)),
            lambda x: x.amax((0, 2)),
            lambda x: x.mean((0, 2)),
            lambda x: x.var((0, 2)),
            lambda x: F.batch_norm(x, None, None, training=True),
        )
    )
    return Case(fn, (x,))


def _best_of_row(pick: random.Random, limit: int) -> Case:
    x = _some(pick, 2, pick.randint(130, 300) * limit, special=True)
    if x.dtype is torch.float64:
        x = x.float()
    fn = pick.choice(
        (
            lambda x: x.argmax(-1),
            lambda x: x.argmin(),
            lambda x: x.max(-1)[1],
            lambda x: x.nan_to_num(0, 9, -9).float().var(-1),
            lambda x: torch.var_mean(x.nan_to_num(0, 9, -9).float())[0],
        )
    )
    return Case(fn, (x,))


def _ranked(pick: random.Random, limit: int) -> Case:
    """The kernel that reads rows again and again takes 512 elements at once, 20 times."""
    x = _some(pick, 2, 512 * limit // 20 + pick.randint(1, 999), special=True)
    fn = pick.choice(
        (
            lambda x: x.median(-1)[0],
            lambda x: x.nanmedian(),
            lambda x: x.kthvalue(x.shape[1] // 3, -1)[0],
            lambda x: x.topk(9)[0],
            lambda x: torch.gather(x, 1, x.median(-1, keepdim=True)[1]),
        )
    )
    return Case(fn, (x,))


KINDS: dict[str, Callable[[random.Random, int], Case]] = {
    made.__name__[1:]: made
    for made in (
        _average_pool, _largest_pool, _adaptive_pool, _fractional_pool, _distances, _convolution,
        _trilinear, _segments, _bags, _complex_product, _unique_slices, _unique_rows,
        _running_extremes, _overlapping_frames, _smooth_resize, _two_dims, _best_of_row, _ranked,
    )
}  # fmt: skip


def _case(kind: str, seed: int, limit: int) -> Case:
    pick = random.Random(f"{kind} {seed}")
    torch.manual_seed(seed)
    case = KINDS[kind](pick, limit)
    case.atol = case.atol or 1e-3 if case.args[0].dtype is torch.float32 else case.atol
    return case


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_long_loops_run_in_parts(kind: str, seed: int) -> None:
    limit = 1000 if kind == "ranked" else LIMIT  # a sort has 700 iterations for any row
    with ends_loops(context(), limit) as seen:
        check(_case(kind, seed, limit))
    assert max((count for _, count in seen), default=0) <= limit


# -- sizes that vary -----------------------------------------------------------------------------
TAPS = torch.randint(-9, 10, (2, 1, 700)) / 4
VARYING: dict[str, Callable[[torch.Tensor], Any]] = {
    "cdist": lambda x: torch.cdist(x, x.flip(0), 1.0),
    "pdist": lambda x: F.pdist(x, 3.0),
    "adaptive_max_pool1d": lambda x: F.adaptive_max_pool1d(x, 2, return_indices=True),
    "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x, 3),
    "avg_pool1d": lambda x: F.avg_pool1d(x, 700, 50),
    "max_pool2d": lambda x: F.max_pool2d(x[None], (1, 700), 100, return_indices=True),
    "conv1d": lambda x: F.conv1d(x[:, None], TAPS.to(x.device), stride=2, padding=9),
    "segment_reduce": lambda x: torch.segment_reduce(
        x.t().contiguous(), "max", lengths=torch.full((1,), x.shape[1], device=x.device)
    ),
    "argmax": lambda x: (x.repeat(1, 40).argmax(-1), x[:, None].expand(-1, 40, -1).argmax()),
    "cummax": lambda x: torch.cummax(x.repeat(1, 12), 1),
    "var": lambda x: x[:, None].expand(-1, 2, -1).var((0, 2)),
}


@pytest.mark.parametrize("name", VARYING)
def test_long_loops_of_sizes_that_vary(name: str) -> None:
    """Sizes below the limit and above, up to the bound and beyond it."""
    fn = VARYING[name]
    with ends_loops(context(), LIMIT) as seen:
        with program_of(fn, (torch.randn(3, 3001),), dynamic=True) as program:
            for length in (3001, 1500, 901, 7003, 3000):
                x = torch.randint(-99, 100, (3, length)) / 8
                have, want = program.forward(x), fn(x)
                assert not host_nodes(program)
                wanted = want if isinstance(want, tuple) else (want,)
                for one, two in zip(have if isinstance(have, tuple) else (have,), wanted):
                    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)
    assert max(count for _, count in seen) <= LIMIT


class _Distances(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.cdist(x, y, 3.0), F.adaptive_max_pool1d(x, 3)


@pytest.mark.parametrize("most", [None, 5000])
def test_long_loops_of_exported_sizes(most: int | None) -> None:
    length = torch.export.Dim("length", min=4, max=most)
    inputs = torch.randn(2, 1000), torch.randn(3, 1000)
    module, varying = _Distances(), ({1: length}, {1: length})
    with ends_loops(context(), LIMIT) as seen:
        with purevk.compile(module, inputs, dynamic_shapes=varying) as program:
            for size in (1000, 40, 4999, 2500):
                x, y = torch.randn(2, size), torch.randn(3, size)
                for have, want in zip(program.forward(x, y), module(x, y)):
                    torch.testing.assert_close(have, want, rtol=2e-5, atol=1e-5)
                assert not host_nodes(program)
    assert max(count for _, count in seen) <= LIMIT


# -- the limit of the device ---------------------------------------------------------------------
def _real_cases() -> list[Case]:
    torch.manual_seed(3)
    long, taps = 270_000, 200_000
    line = torch.randn(1, 2, long)
    line[0, 1, [9, 200_123]] = math.nan
    rows, image = torch.randn(3, long), torch.randn(1, 2, 450, 451)
    signal, kernel = torch.randn(1, 1, taps + 4), torch.randn(2, 1, taps) / 450
    lengths = torch.tensor([7, long - 7])
    return [
        *(Case(torch.cdist, (rows, rows[:2] + 1, p)) for p in P),
        Case(F.pdist, (rows, 1.0)),
        Case(F.conv1d, (signal, kernel), constants=(1,)),
        Case(F.conv1d, (signal, kernel), {"padding": 99}),
        Case(F.avg_pool1d, (line, taps, 30_000)),
        Case(F.max_pool1d, (line, taps, 30_000), {"return_indices": True}),
        Case(F.avg_pool2d, (image, 449), {"stride": 1}),
        Case(F.max_pool2d, (image, 449), {"stride": 1, "return_indices": True}),
        Case(F.adaptive_avg_pool1d, (line, 2)),
        Case(F.adaptive_max_pool1d, (line, 2), {"return_indices": True}),
        Case(torch.segment_reduce, (rows.abs()[0], "mean"), {"lengths": lengths}),
        Case(lambda x: F.batch_norm(x, None, None, training=True), (torch.randn(long, 2, 3),)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(16))
def test_long_loops_of_the_device(number: int) -> None:
    """Sizes that are above what software devices of old Mesa run in one loop. Sums of as many float32
    differ from each other in torch too, so that float64 says what is right."""
    case = _real_cases()[number]

    def in_double(leaf: Any) -> Any:
        return leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf

    wanted = expected_of(replace(case, args=pytree.tree_map(in_double, case.args)))
    case.expected = [each.float() if each.is_floating_point() else each for each in wanted]
    case.atol = 1e-5
    check(case)
