"""float16 and bfloat16 in fused kernels: what is rounded before what reads it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from purevk.ops import registry
from purevk.program import Program
from tests.ops.harness import Case, build, check, context, dispatches

NARROW = (torch.float16, torch.bfloat16)
aten, functional = torch.ops.aten, torch.nn.functional
Tensor = torch.Tensor

# Float arithmetic whose results in float32 are those of torch, to the last bit.
EXACT: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: y - x,
    lambda x, y: x * 0.3 + y,
    lambda x, y: torch.where(y.isnan(), y, x * y.abs()),
    lambda x, y: torch.maximum(x * x, y),
)


def chain(pick: random.Random, count: int) -> Callable[..., Tensor]:
    """A random program of `count` operators of float arithmetic, over two tensors."""
    steps = [pick.choice(EXACT) for _ in range(count)]
    factor = pick.choice((0.1, 0.7, 1.3)) + pick.random() / 100

    def run(a: Tensor, b: Tensor) -> Tensor:
        value = a * b
        for step in steps:
            value = step(value, b)
        return value * factor

    return run


def numbers(dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Factors whose products lie between two numbers of a dtype, near whole ones, and among its
    smallest and largest."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 4, 48, generator=generator, dtype=torch.float64)
    smallest, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    a, b = a * 30, b * 8
    a[1], b[1] = a[1] * smallest**0.5, b[1] * smallest**0.5 / 64
    a[2], b[2] = a[2] * largest**0.25, b[2] * largest**0.5
    a[3, :24] = a[3, :24].round()
    a[3, 40:] = torch.tensor([0, -0.0, torch.inf, -torch.inf, torch.nan, 1, -1, 2])
    return a.to(dtype), b.to(dtype)


def in_float32(program: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """What a program of float arithmetic computes, rounded once."""
    return program(*(each.float() for each in tensors)).to(tensors[0].dtype)


def readers() -> list[tuple[Any, registry.Operator]]:
    """The pointwise operators of torch that read rounded numbers."""
    found = []
    for definition in registry.definitions():
        form = definition.form
        if not isinstance(form, registry.Pointwise) or not definition.name.startswith("aten."):
            continue
        if all(name in form.arithmetic for name in definition.parameters if name in "xyz"):
            continue
        _, name, overload = definition.name.split(".")
        found.append((getattr(getattr(aten, name), overload), definition))
    return found


EXTRA = {
    "_to_copy": [{"dtype": each} for each in (torch.float32, torch.int64, torch.uint8, torch.bool, *NARROW)],
    "threshold": [{"threshold": 0.5, "value": 3.0}],
    "div": [{"rounding_mode": "floor"}, {"rounding_mode": "trunc"}],
    "round.decimals": [{"decimals": 1}],
    "nan_to_num": [{"posinf": 1.0}],
}  # fmt: skip
# Smooth functions, whose errors are their own; torch computes ldexp as a power and a product. Signs are
# those of the unrounded numbers, and a NaN has any.
SMOOTH = ("special_", "i0.", "igamma", "polygamma", "ldexp", "signbit")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_what_is_no_float_arithmetic_reads_rounded_numbers(dtype):
    """The reference computes the chain in float32, and rounds it once before the reader."""
    pick, cases = random.Random(str(dtype)), []
    tensors = numbers(dtype, 1)
    for overload, definition in readers():
        name = definition.name.removeprefix("aten.")
        if name.startswith(SMOOTH):
            continue
        for extra in EXTRA.get(name, EXTRA.get(name.split(".")[0], [{}])):
            count = sum(each in "xyz" for each in definition.parameters)
            both = [chain(pick, pick.randint(0, 2)) for _ in range(count)]

            def run(a, b, overload=overload, both=both, extra=extra):
                return overload(*(each(a, b) for each in both), **extra)

            read = [in_float32(each, *tensors) for each in both]
            if definition.form.arithmetic:  # some may be unrounded
                read = [
                    each(*(tensor.float() for tensor in tensors))
                    if letter in definition.form.arithmetic
                    else value.float()
                    for letter, each, value in zip("xyz", both, read)
                ]
            try:
                expected = overload(*read, **extra)
            except (NotImplementedError, RuntimeError):
                continue  # torch has it for other dtypes alone
            if definition.form.arithmetic:
                expected = expected.to(dtype)
            exact = 0 if expected.is_floating_point() and not definition.form.arithmetic else None
            label = f"{name}{extra or ''}"
            cases.append(Case(run, tensors, {}, (), exact, exact, label, expected=expected))
    assert len(cases) > 35
    check(cases)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_kernels_and_wider_dtypes_read_rounded_numbers(dtype):
    forms: list[Callable[..., Any]] = [
        lambda x, a: x.argmax(-1),
        lambda x, a: x.sort(stable=True, dim=-1)[1],
        lambda x, a: x + a.float(),
        lambda x, a: torch.where(x > 3, x, a),
        lambda x, a: a.flatten()[x.nan_to_num(0, 0, 0).clamp(0, 9).to(torch.int64)],
        lambda x, a: torch.bucketize(x.float(), torch.tensor([0.0, 1.0, 100.0])),
        lambda x, a: (x.float() * 3).sum(-1),
        lambda x, a: torch.isclose(x, a),
        lambda x, a: torch.full((), 0.1, dtype=dtype) * a,
    ]
    pick, (a, b) = random.Random(2), numbers(dtype, 3)
    cases = []
    for number, form in enumerate(forms):
        made = chain(pick, 1 + number % 3)
        expected = form(in_float32(made, a, b), a)
        run = lambda a, b, form=form, made=made: form(made(a, b), a)  # noqa: E731
        cases.append(Case(run, (a, b), rtol=1e-6, name=f"form {number}", expected=expected))
    check(cases)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_numbers_are_rounded_where_they_are_compared(dtype):
    forms: list[Callable[[Tensor], Tensor]] = [
        lambda x: x >= 0.1,
        lambda x: x == 0.1,
        lambda x: x > 0.7,
        lambda x: x % 0.1,
        lambda x: x // 0.7,
        lambda x: x.abs() ** 1.7,
        lambda x: 1.7**x,
        lambda x: functional.hardshrink(x, 0.1),
        lambda x: functional.threshold(x, 0.1, 2.0),
    ]
    x = torch.tensor([0.1, 0.7, 0.3, -0.1, 2, 0.4]).to(dtype)
    check([Case(form, (x,), rtol=0, atol=0, name=f"form {n}") for n, form in enumerate(forms)])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_integers_are_rounded_before_floats_read_them(dtype):
    """torch converts both operands first."""
    pick, (a, _) = random.Random(f"integers {dtype}"), numbers(dtype, 4)
    a = a.nan_to_num(1, 2, 3)
    forms: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        lambda x, n: x + n,
        lambda x, n: x * n,
        lambda x, n: torch.xlogy(x, n),
        lambda x, n: n / x,
        lambda x, n: torch.minimum(x, n),
        lambda x, n: torch.where(x > 0, x, n),
        lambda x, n: n > x,
    )
    cases = []
    for each in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        info = torch.iinfo(each)
        n = torch.tensor(
            [pick.randint(info.min, info.max) >> pick.randint(0, 40) for _ in range(a.numel())]
        )
        n = n.to(each).view(a.shape)
        cases += [Case(form, (a, n), name=f"{each} {k}") for k, form in enumerate(forms)]
    check(cases)


# -- epilogues -----------------------------------------------------------------------------------
EPILOGUES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, y: x.relu() - y,
    lambda x, y: x / 1024,
    lambda x, y: x * y + y,
    lambda x, y: functional.silu(x / 512) * y,
    lambda x, y: (x * 0.01 + y).float(),
    lambda x, y: (x * 0.3).long(),
)


def whole(*sizes: int, dtype: torch.dtype, seed: int, top: int = 40) -> Tensor:
    """Whole numbers, whose sums of products are the same in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-top, top + 1, sizes, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_epilogues_read_rounded_results(dtype):
    """Of matmuls, convolutions and attention, also where a result is beyond the largest float16."""

    a, b, bias = (
        whole(9, 128, dtype=dtype, seed=1, top=100),
        whole(128, 16, dtype=dtype, seed=2, top=100),
        whole(16, dtype=dtype, seed=3),
    )
    a[0], b[:, 0] = 99, 99  # beyond the largest float16
    x, weight = whole(2, 32, 5, 6, dtype=dtype, seed=4), whole(8, 32, 3, 3, dtype=dtype, seed=5)
    q, v = torch.zeros(1, 2, 3, 8, dtype=dtype), whole(1, 2, 4, 8, dtype=dtype, seed=6, top=999)
    packed = whole(16, 128, dtype=torch.int8, seed=7)
    makers: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (torch.mm, (a, b)),
        (torch.bmm, (a.view(3, 3, 128), b.expand(3, 128, 16))),
        (functional.linear, (a, b.t().contiguous(), bias)),
        (lambda a, b, c: torch.addmm(c, a, b, beta=3, alpha=0.5), (a, b, whole(9, 16, dtype=dtype, seed=8))),
        (lambda a, b, c: torch.baddbmm(c, a, b), (a[None], b[None], whole(1, 9, 16, dtype=dtype, seed=9))),
        (lambda x, w: functional.conv2d(x, w, padding=1), (x, weight)),
        (lambda x, w: functional.conv2d(x, w, groups=32), (x, whole(32, 1, 3, 3, dtype=dtype, seed=10))),
        (lambda q, v: functional.scaled_dot_product_attention(q, v, v), (q, v)),
        (lambda a, w, s: aten._weight_int8pack_mm(a, w, s), (a, packed, torch.full((16,), 2.0, dtype=dtype))),
    ]  # fmt: skip
    cases = []
    makers = makers[: 8 if dtype is torch.bfloat16 else 9]  # int8 has kernels for float16 alone
    for number, (make, args) in enumerate(makers):
        wide = (
            make(*(each if each.dtype is torch.int8 else each.double() for each in args))
            if number < 8
            else (2 * a.double() @ packed.double().t())
        )
        product = wide.to(dtype)
        assert not torch.equal(product.double(), wide) or number > 6, "nothing is rounded"
        other = whole(*product.shape, dtype=dtype, seed=20 + number)
        for at, epilogue in enumerate(EPILOGUES):
            run = lambda *args, make=make, epilogue=epilogue: epilogue(make(*args[:-1]), args[-1])  # noqa: E731
            wanted = epilogue(product.float(), other.float())
            if at == 5:
                wanted = (product.float() * 0.3).to(dtype).long()
            elif at == 4:
                wanted = wanted.to(dtype).float()
            else:
                wanted = wanted.to(dtype)
            cases.append(
                Case(
                    run,
                    (*args, other),
                    rtol=None if at == 3 else 0,
                    atol=None if at == 3 else 0,
                    name=f"{number} {at}",
                    expected=wanted,
                )
            )
    check(cases)


# -- round="eager" -------------------------------------------------------------------------------
OPERATORS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    *EXACT,
    lambda x, y: x / y,
    lambda x, y: x.abs().sqrt(),
    lambda x, y: torch.where(x > y, x * 0.7, y),
    lambda x, y: (x.float() * y.float()).to(x.dtype) - x,
    lambda x, y: x.floor() + y.clamp(-2, 2),
    lambda x, y: torch.cat((-x[..., 24:], x[..., :24]), -1) * y,
    lambda x, y: functional.hardtanh(x) * functional.leaky_relu(y),
    lambda x, y: functional.hardswish(x) + torch.remainder(y, 3),
    lambda x, y: (x + 0.1 - y) * (x >= 0.7),
    lambda x, y: 0.3 - x**3 + y**2,
    lambda x, y: (x - y) * (x * 3 - y.square()).to(torch.int32).bitwise_and(255),
)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_eager_rounding_is_that_of_eager_torch(dtype):
    """Bit by bit, in chains that one kernel computes."""
    pick, (a, b) = random.Random(str(dtype)), numbers(dtype, 7)
    a, b = a[[0, 2, 3]].nan_to_num(1, 2, 3), b[[0, 2, 3]].nan_to_num(3, 2, 1)
    cases = []
    for number in range(12):
        steps = [pick.choice(OPERATORS) for _ in range(3 + number % 4)]

        def run(a, b, steps=steps):
            for step in steps:
                a, b = step(a, b), a
            return a

        cases.append(Case(run, (a, b), name=f"chain {number}"))
    graph = build(cases)
    with Program("test", {"forward": lambda sizes: graph}, context(), round="eager") as program:
        results = program.forward(a, b) if len(graph.inputs) == 2 else program.forward(*[a, b] * 12)
        assert len(dispatches(program)) < 40  # pointwise programs are joined all the same
    for case, result in zip(cases, results):
        expected = case.fn(a, b)
        same = (result == expected) | (result.isnan() & expected.isnan())
        assert same.all(), f"{case.name}: {(~same).sum()} elements differ"
