"""Tensors that are larger than one binding of the device, on a device whose bindings are small."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from purevk.program import Program
from tests.ops.harness import (
    Case,
    build,
    compare,
    context,
    expected_of,
    host_nodes,
    inputs_of,
    program_of,
    tensor,
)

pytestmark = pytest.mark.device
RANGE = 8192  # bytes


@pytest.fixture
def small_bindings() -> Iterator[None]:
    """Within this, a binding spans `RANGE` bytes."""
    shared = context()
    traits = shared.traits
    shared.traits = replace(traits, max_storage_range=RANGE)
    try:
        yield
    finally:
        shared.traits = traits


def check(cases: list[Case]) -> None:
    """Compares with torch. Nothing runs on the CPU, and no binding is larger than the device has."""
    graph = build(cases)
    with Program("test", {"forward": lambda sizes: graph}, context()) as program:
        assert not host_nodes(program), host_nodes(program)
        plan = program.methods["forward"].executable.plan
        for dispatch in (*plan.once, *plan.dispatches):
            for binding in dispatch.bindings:
                assert plan.sizes.get(binding.storage, 0) <= RANGE, dispatch.label
        made = program.forward(*[each for case in cases for each in inputs_of(case)])
    results = list(made) if isinstance(made, tuple) else [made]
    for case in cases:
        wanted = expected_of(case)
        case.rtol, case.atol = case.rtol or 1e-4, case.atol or 1e-4  # sums in another order
        wrong = compare(case, results[: len(wanted)], wanted)
        assert not wrong, f"{case}: {wrong}"
        del results[: len(wanted)]


class Numbers(random.Random):
    """Random sizes and tensors of more than one binding."""

    def sizes(self, rank: int, nbytes: int = 3 * RANGE) -> list[int]:
        """Sizes of up to so many bytes as float32."""
        if rank == 1:
            return [self.randint(RANGE // 4 + 1, nbytes // 4)]
        while True:
            sizes = [self.choice([1, 2, 3, 5, 8, 13, 16, 33, 64, 100, 257]) for _ in range(rank)]
            numel = torch.Size(sizes).numel()
            if RANGE // 4 < numel < nbytes // 4:
                return sizes

    def floats(self, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return tensor(*sizes, low=-1, high=1, seed=self.randrange(1000)).to(dtype)


def pointwise(rng: Numbers) -> Case:
    sizes = rng.sizes(rng.randint(1, 4))
    dtype = rng.choice([torch.float32, torch.float64, torch.float16, torch.int32, torch.int64])
    x = (rng.floats(*sizes) * 9).to(dtype)
    other = [size if rng.random() < 0.6 else 1 for size in sizes][rng.randrange(len(sizes)) :]
    y = (rng.floats(*other) * 9).to(dtype)
    order = rng.sample(range(len(sizes)), len(sizes))
    functions = [
        lambda x, y: torch.where(x > y, x, y * 2) - 1,
        lambda x, y: (x + y).permute(order) * 2,
        lambda x, y: ((x + y) > 0).transpose(0, -1).contiguous(),
        lambda x, y: (F.gelu(x.float()) * y).to(torch.int32),
    ]
    return Case(rng.choice(functions), (x, y))


def moves(rng: Numbers) -> Case:
    sizes = rng.sizes(rng.randint(2, 4))
    x = (rng.floats(*sizes) * 99).to(rng.choice([torch.float32, torch.int64, torch.uint8]))
    x = x.repeat(*[RANGE // x.nbytes + 1 if d == 0 else 1 for d in range(len(sizes))])
    order, d = rng.sample(range(len(sizes)), len(sizes)), rng.randrange(len(sizes))
    step = rng.randint(1, 3)
    functions = [
        lambda x: x.permute(order).contiguous(),
        lambda x: x.permute(order).reshape(-1),
        lambda x: torch.cat([x, x.permute(order).reshape(x.shape)], d),
        lambda x: torch.cat([x[..., ::step], x.flatten(0, -2)[:, :1].view(*x.shape[:-1], 1)], -1),
        lambda x: torch.stack([x, x + 1], d),
        lambda x: x.repeat(*[2 if k == d else 1 for k in range(x.dim())]),
        lambda x: x.unsqueeze(d).expand(*x.shape[:d], 2, *x.shape[d:]).clone(),
        lambda x: x.select(d, x.shape[d] // 2) * 2,
    ]
    return Case(rng.choice(functions), (x,))


def reductions(rng: Numbers) -> Case:
    sizes = rng.sizes(rng.randint(1, 4))
    dtype = rng.choice([torch.float32, torch.float32, torch.float16, torch.int32, torch.float64])
    x = (rng.floats(*sizes) * (9 if dtype is torch.int32 else 1)).to(dtype)
    x = x.repeat(*[RANGE // x.nbytes + 1 if d == 0 else 1 for d in range(len(sizes))])
    some = sorted(rng.sample(range(len(sizes)), rng.randint(1, len(sizes))))
    d, keepdim, order = some[0], rng.random() < 0.5, rng.choice([1, 2, 3])
    functions: list[Callable[..., Any]] = [
        lambda x: x.sum(some, keepdim),
        lambda x: x.float().mean(some, keepdim),
        lambda x: x.amax(some, keepdim),
        lambda x: x.amin(),
        lambda x: (x > 0.5).any(d),
        lambda x: (x > -8).all(),
        lambda x: x.max(d, keepdim),
        lambda x: x.argmin(d),
        lambda x: x.argmax(),
        lambda x: x.float().std(some),
        lambda x: x.float().var(),
        lambda x: x.float().logsumexp(some, keepdim),
        lambda x: torch.linalg.vector_norm(x.float(), order, some),
        lambda x: torch.softmax(x.float(), d),
        lambda x: torch.log_softmax(x.float(), -1),
        lambda x: x.float().cumsum(d),
        lambda x: (x.float() / 9).cumprod(d),
        lambda x: x.cummax(d),
        lambda x: x.float().logcumsumexp(d),
    ]
    tolerance = 2e-3 if dtype is torch.float16 else None
    return Case(rng.choice(functions), (x,), rtol=tolerance, atol=tolerance)


def products(rng: Numbers) -> Case:
    m, k, n = (rng.choice([1, 3, 20, 64, 100, 350]) for _ in range(3))
    while max(m * k, k * n, m * n) <= RANGE // 4 or max(m * k, k * n, m * n) > 4 * RANGE:
        m, k, n = (rng.choice([1, 3, 20, 64, 100, 350]) for _ in range(3))
    a, b, bias = rng.floats(m, k), rng.floats(k, n), rng.floats(n)
    batches = rng.choice([2, 5])
    functions: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = [
        (torch.mm, (a, b)),
        (lambda a, b: torch.relu(a @ b.t()), (a, b.t().contiguous())),
        (torch.addmm, (bias, a, b)),
        (lambda x, w, b: F.gelu(F.linear(x, w, b)), (a, b.t().contiguous(), bias)),
        (lambda a, b: a.expand(batches, *a.shape) @ b, (a, b)),
        (torch.bmm, (rng.floats(batches, 20, 33), rng.floats(batches, 33, 64))),
    ]
    function, args = rng.choice(functions)
    return Case(function, args)


def positions(rng: Numbers) -> Case:
    """Operators that read elements at other positions."""
    sizes = rng.sizes(rng.randint(2, 4))
    x = (rng.floats(*sizes) * 99).to(rng.choice([torch.float32, torch.int64, torch.float16]))
    x = x.repeat(*[RANGE // x.nbytes + 1 if d == 0 else 1 for d in range(len(sizes))])
    some = sorted(rng.sample(range(len(sizes)), rng.randint(1, len(sizes))))
    d, shift, pads = some[0], rng.randint(-9, 9), [rng.randint(0, 3) for _ in range(4)]
    draw = torch.Generator().manual_seed(rng.randrange(1000))

    def indices(size: int, *dims: int) -> torch.Tensor:
        return torch.randint(0, size, dims, generator=draw)

    few = [rng.randint(1, 4) if k == d else size for k, size in enumerate(x.shape)]
    rows, many = indices(x.shape[d], rng.randint(1, 60)), indices(9, RANGE // 8 + 99)
    functions: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = [
        (lambda x: x.flip(some), (x,)),
        (lambda x: x.roll(shift, d), (x,)),
        (lambda x: x.flatten().roll(shift), (x,)),
        (lambda x: x.tril(shift), (x,)),
        (lambda x: F.pad(x, pads, value=3), (x,)),
        (lambda x: x.repeat_interleave(2, d), (x,)),
        (lambda x, rows: x.index_select(d, rows), (x, rows)),
        (lambda x, index: x.gather(d, index), (x, indices(x.shape[d], *few))),
        (lambda x, index: x.take(index), (x, indices(x.numel(), 33))),
        (lambda x, i, j: x[i, j], (x, indices(x.shape[0], 7), indices(x.shape[1], 7))),
        (lambda x, many: x[many], (rng.floats(9, 3), many)),
        (lambda x: torch.arange(RANGE // 4 + 99) * x, (rng.floats(1),)),
        (lambda x: torch.linspace(-1, 3, RANGE // 4 + 99) * x, (rng.floats(1),)),
        (lambda x, edges: torch.bucketize(x, edges), (x.float(), rng.floats(9).sort()[0])),
        (lambda a, b: a @ b, (indices(9, 60, 50), indices(9, 50, 70))),
    ]
    function, args = rng.choice(functions)
    return Case(function, args)


def complex_numbers(rng: Numbers) -> Case:
    sizes = rng.sizes(rng.randint(1, 3))
    x, y = (torch.complex(rng.floats(*sizes), rng.floats(*sizes)) for _ in range(2))
    d = rng.randrange(len(sizes))
    functions = [
        lambda x, y: x * y + x,
        lambda x, y: x.abs() + y.angle(),
        lambda x, y: torch.cat([x, y.conj()], d),
        lambda x, y: torch.view_as_real(x - y) * 2,
        lambda x, y: (x / (y + 3)).sum(d),
    ]
    return Case(rng.choice(functions), (x, y))


def images(rng: Numbers) -> Case:
    batch, channels = rng.choice([(1, 3), (1, 8), (2, 4), (3, 16)])
    height, width = rng.choice([(41, 37), (64, 32), (20, 60)])
    x = rng.floats(batch, channels, height, width)
    out, kernel = rng.choice([4, 8]), rng.choice([1, 3, 5])
    stride, padding, dilation = rng.choice([1, 2]), rng.choice([0, 1, 2]), rng.choice([1, 2])
    dense, each = rng.floats(out, channels, kernel, kernel), rng.floats(channels, 1, 3, 3)
    bias, small = rng.floats(out), x[:1, :1, :40]
    mode = rng.choice(["nearest", "bilinear", "bicubic"])
    functions: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = [
        (lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation), (x, dense, bias)),
        (lambda x, w, b: F.relu(F.conv2d(x, w, None, stride, padding)) + 1, (x, dense, bias)),
        (lambda x, w: F.conv2d(x, w, None, stride, padding, groups=channels), (x, each)),
        (lambda x: F.interpolate(x, size=(31, 29), mode="bilinear"), (x,)),
        (lambda x: F.interpolate(x, size=(40, 45)), (x,)),
        (lambda x: F.interpolate(x, size=(17, 45), mode="bicubic"), (x,)),
        (lambda x: F.interpolate(x, size=(70, 64), mode=mode), (small,)),
        (lambda x: F.pad(x, (3, 20, 2, 9)), (small,)),
        (lambda x: F.max_pool2d(x, 3, 2, 1), (x,)),
        (lambda x: F.group_norm(x, channels), (x,)),
    ]
    function, args = rng.choice(functions)
    return Case(function, args, constants=tuple(range(1, len(args))))


@pytest.mark.usefixtures("small_bindings")
@pytest.mark.parametrize(
    "family", [pointwise, moves, reductions, positions, complex_numbers, products, images]
)
def test_random_operators(family: Callable[[Numbers], Case]) -> None:
    rng = Numbers(family.__name__)
    check([family(rng) for _ in range(10)])


@pytest.mark.usefixtures("small_bindings")
def test_sizes_of_the_call() -> None:
    """The parts follow from the bounds of sizes, and from sizes where the strides depend on these."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x) + x[:1]
        return y.sum(0), torch.softmax(y, -1), torch.cat([x, y], 1), y.transpose(0, 1).contiguous()

    with program_of(function, (tensor(20, 9, 33),), dynamic=True) as program:
        assert not host_nodes(program)
        for number, sizes in enumerate([(20, 9), (7, 9), (1, 1), (20, 3), (2, 9), (31, 12)]):
            x = tensor(*sizes, 33, seed=number)
            for have, want in zip(program.forward(x), function(x), strict=True):
                torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_more_than_128_mib() -> None:
    """The bindings of lavapipe and Adreno."""

    def function(
        x: torch.Tensor, weight: torch.Tensor, image: torch.Tensor, kernel: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        y = F.relu(x + x[:1])
        return (
            y.t().contiguous().sum(0),
            y.sum(0),
            x.argmax(1),
            F.linear(x, weight),
            torch.cat([x[:5], y], 0)[-1],
            F.conv2d(image, kernel, padding=1).mean((2, 3)),
            F.interpolate(image[:, :24], scale_factor=2.0).amax((2, 3)),
        )

    args = (
        tensor(1100, 32768, low=-1, high=1),
        tensor(8, 32768, low=-0.01, high=0.01),
        tensor(1, 40, 1024, 1024, low=-1, high=1),
        tensor(4, 40, 3, 3, low=-1, high=1),
    )
    with program_of(function, args) as program:
        assert not host_nodes(program)
        for have, want in zip(program.forward(*args), function(*args), strict=True):
            torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-3)
