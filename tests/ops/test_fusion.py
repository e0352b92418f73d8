"""Chains of pointwise operators are one dispatch and give what torch gives."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, check, dispatches, program_of, tensor

pytestmark = pytest.mark.device

# Functions whose slope is small everywhere, so that chains of them do not blow up the rounding of
# one step.
UNARY = [
    torch.tanh,
    torch.sigmoid,
    torch.neg,
    torch.relu,
    F.gelu,
    F.silu,
    F.hardswish,
    torch.abs,
    lambda x: x.clamp(-1, 1),
    lambda x: x * 0.5 + 1,
    lambda x: F.leaky_relu(x, 0.1),
    torch.sin,
]
BINARY = [
    torch.add,
    torch.sub,
    lambda a, b: a * torch.sigmoid(b),
    torch.maximum,
    torch.minimum,
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: a + 0.25 * b,
    lambda a, b: (a + b) / 3,
]


def chain(seed, inputs, steps):
    """A random program over tensors that broadcast with each other; every value is used, the result
    is one tensor."""
    rng = random.Random(seed)
    plan = []
    unused = list(range(inputs))
    count = inputs
    for _ in range(steps):
        if rng.random() < 0.45 or count == 1:
            plan.append((0, rng.randrange(len(UNARY)), rng.randrange(count), 0))
        else:
            a = rng.choice(unused) if unused else rng.randrange(count)
            plan.append((1, rng.randrange(len(BINARY)), a, rng.randrange(count)))
        unused = [n for n in unused if n not in plan[-1][2 : 3 + plan[-1][0]]] + [count]
        count += 1

    def run(*tensors):
        values = list(tensors)
        for kind, which, a, b in plan:
            values.append(BINARY[which](values[a], values[b]) if kind else UNARY[which](values[a]))
        result = values[unused[0]]
        for n in unused[1:]:
            result = result + values[n]
        return result

    return run


SHAPES = [
    [(3, 5, 7)] * 3,
    [(3, 5, 7), (7,), (3, 1, 1)],
    [(4, 8), (8,), ()],
    [(1,), (6, 1), (1, 5)],
    [(2, 3, 4, 8), (3, 1, 1), (2, 1, 1, 8), (1, 8)],
    [(5, 1, 7), (1, 6, 1), (5, 6, 7)],
    [(), (), (3,)],
    [(2, 4, 4), (4, 1), (2, 4, 1), (4,), (1, 1, 1)],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_random_chains(dtype):
    """float16: the steps in between are not rounded, where torch rounds each."""
    cases = []
    for seed in range(16):
        shapes = SHAPES[seed % len(SHAPES)]
        tensors = tuple(
            tensor(*shape, dtype=dtype, seed=n + 10 * seed) for n, shape in enumerate(shapes)
        )
        fn = chain(seed, len(tensors), 4 + seed)
        cases.append(
            Case(
                fn,
                tensors,
                name=f"chain {seed} {dtype}",
                rtol=2e-5 if dtype is torch.float32 else 1e-2,
                atol=2e-5 if dtype is torch.float32 else 3e-2,
            )
        )
    check(cases)


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_is_one_dispatch(seed):
    tensors = tuple(tensor(*shape, seed=n) for n, shape in enumerate(SHAPES[seed]))
    fn = chain(100 + seed, len(tensors), 10)
    with program_of(fn, tensors) as program:
        assert dispatches(program) == ["elementwise/pointwise.comp"]
        torch.testing.assert_close(program.forward(*tensors), fn(*tensors), rtol=2e-5, atol=2e-5)


def test_what_is_read_twice_is_computed_once():
    """A value with two readers stays a tensor, or is computed in both: either way the result is
    right."""
    x, y = tensor(4, 6), tensor(6)
    forms = [
        lambda x, y: (lambda t: (t + 1, t * y))(torch.tanh(x)),
        lambda x, y: (lambda t: t + t * y)(torch.tanh(x)),
        lambda x, y: (lambda t: (t, t.sum(0)))(x + y),
        lambda x, y: (lambda t: torch.softmax(t, -1) + t)(x * y),
        lambda x, y: (x + y, x + y, x - y),
        lambda x, y: (x, x + 0, (x + y).t() * 2),
    ]
    check([Case(fn, (x, y), name=f"form {n}", atol=1e-5) for n, fn in enumerate(forms)])


def test_mixed_types_in_one_chain():
    x, n, b, h = (
        tensor(4, 8),
        tensor(4, 8, dtype=torch.int64),
        tensor(8, dtype=torch.bool),
        tensor(4, 1, dtype=torch.float16),
    )
    forms = [
        lambda x, n, b, h: torch.where(b, x + n, h.float()) * 2,
        lambda x, n, b, h: (n * 2 + 1).to(torch.float32) * x,
        lambda x, n, b, h: ((x > 0) & b).to(torch.int32) + n,
        lambda x, n, b, h: (n.to(torch.int8) * 50).to(torch.int64) + 1,
        lambda x, n, b, h: (n % 3 == 0) | ~b,
        lambda x, n, b, h: (h + x.half()).float() - x,
        lambda x, n, b, h: -(n < 2).float() * 1e4 + x,
        lambda x, n, b, h: (n.to(torch.uint8) + 200).to(torch.float32),
        lambda x, n, b, h: n + b,
        lambda x, n, b, h: (n // 2 * 2 == n).to(torch.float16) * h,
    ]
    check(
        [
            Case(fn, (x, n, b, h), name=f"form {k}", atol=4e-3 if k == 5 else None)
            for k, fn in enumerate(forms)
        ]
    )


def test_many_inputs():
    """More inputs than one kernel takes, and more steps than one program holds: split, and still
    right."""
    many = tuple(tensor(3, 5, seed=n) for n in range(21))

    def total(*xs):
        result = xs[0]
        for n, x in enumerate(xs[1:]):
            result = torch.tanh(result) + x * (n + 1)
        return result

    def long(x):
        for n in range(150):
            x = torch.tanh(x + n * 0.01) if n % 3 else x * 1.01
        return x

    check(Case(total, many, atol=1e-4), Case(long, (tensor(4, 4),), atol=1e-4, rtol=1e-4))


def test_states_between_nodes():
    """Programs with several outputs, some of which are inputs of later kernels."""
    x, w = tensor(6, 8), tensor(8, 8)

    def fn(x, w):
        a = torch.relu(x) + 1
        b = a @ w
        c = torch.tanh(b) + a
        return a, b, c, (c * a).sum(-1), c.t() @ b

    check(Case(fn, (x, w), atol=1e-4, rtol=1e-4))


@pytest.mark.parametrize("columns", [5, 8])
def test_masks_after_a_matmul(columns):
    """Booleans that an epilogue reads, by elements and by vectors."""
    a, b, mask = (
        tensor(9, 8),
        tensor(8, columns),
        torch.arange(9 * columns).reshape(9, columns) % 3 == 0,
    )
    run = lambda a, b, mask: torch.where(mask, a @ b, -1.0)  # noqa: E731
    check(Case(run, (a, b, mask)))
    with program_of(run, (a, b, mask)) as program:
        assert len(dispatches(program)) == 1


def test_concatenations_that_grow():
    """As in DenseNet: each reads all that is there so far; it starts with the one before it rather
    than with every piece."""

    def dense(x, w):
        pieces = [x, F.relu(x)]
        for _ in range(4):
            pieces.append(torch.tanh(torch.cat(pieces, 1) @ w[: 4 * len(pieces)]))
        return torch.cat(pieces, 1)

    given = (tensor(3, 4, dtype=torch.float32), tensor(24, 4, dtype=torch.float32, seed=1))
    check(Case(dense, given))
    with program_of(dense, given) as program:
        assert (
            len(dispatches(program)) <= 1 + 2 * 5 + 4
        )  # relu; two copies for each concatenation; four matmuls
    other = (
        tensor(3, 4, dtype=torch.float16),
        tensor(3, 4, dtype=torch.float32, seed=1),
        tensor(3, 4, dtype=torch.int64, seed=2),
    )
    check(
        Case(
            lambda a, b, c: (
                torch.cat([a, c]),
                torch.cat([a, c, b]),
                torch.cat([a, c, a]),
                torch.cat([a, c, b], 1),
            ),
            other,
        )
    )
