"""Random graphs of all families together, on the device, against torch: what single operators do
not show, such as views of results, memory that is used again, barriers, fusion across kernels, and
layouts that meet."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, check, program_of, tensor

pytestmark = pytest.mark.device

ACTIVATIONS = [
    torch.tanh,
    torch.sigmoid,
    F.gelu,
    torch.relu,
    lambda t: t * 0.5,
    lambda t: 1 - t,
    torch.sin,
]


BANK = tensor(20000, low=-0.4, high=0.4)


def program(seed: int, length: int):
    """A function of an image [2, 8, 6, 6], a matrix [5, 12] and indices; random steps on what was
    made before.

    Steps are taken by shape alone, so that torch and purevk walk the same way. Values stay
    small.
    """

    def run(
        image: torch.Tensor, matrix: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rng = random.Random(seed)
        values = [image, matrix]
        for n in range(length):
            x = rng.choice(values[-4:] if rng.random() < 0.7 else values)
            kind = rng.randrange(16)
            a, b = rng.random(), rng.random()
            d = int(a * x.dim()) if x.dim() else 0
            if x.numel() > 4000:
                x = x.flatten()[: 1 + int(a * 300)]
                d = 0
            weights = lambda *shape: BANK[n : n + math.prod(shape)].reshape(shape)  # noqa: E731
            if kind == 0 and x.dim() >= 2:
                x = x.transpose(d, int(b * x.dim()))
            elif kind == 1 and x.dim() and x.shape[d] > 1:
                start = int(b * (x.shape[d] - 1))
                x = x.narrow(d, start, x.shape[d] - start)
            elif kind == 2:
                x = x.reshape(-1) if x.dim() != 1 else x.reshape(1, -1)
            elif kind == 3 and x.dim() >= 1:
                x = torch.softmax(x, d)
            elif kind == 4 and x.dim() >= 1:
                x = F.layer_norm(x, x.shape[-1:], weights(x.shape[-1]), None, 0.1)
            elif kind == 5 and x.dim() >= 1:
                x = F.linear(x, weights(1 + int(b * 16), x.shape[-1]), None) / x.shape[-1] ** 0.5
            elif kind == 6 and x.dim() >= 1:
                x = torch.cat([x, torch.tanh(x)], d)
            elif kind == 7 and x.dim() >= 1:
                x = torch.index_select(x, d, index % x.shape[d])
            elif kind == 8 and x.dim() >= 2:
                x = x.mean(d, keepdim=b < 0.5)
            elif kind == 9 and x.dim() == 4 and min(x.shape[2:]) >= 2:
                x = (
                    F.conv2d(
                        x,
                        weights(4 * (1 + int(b * 3)), x.shape[1], 2, 2),
                        weights(4 * (1 + int(b * 3))),
                        padding=1,
                    )
                    / x.shape[1]
                )
            elif kind == 10 and x.dim() == 4 and min(x.shape[2:]) >= 3:
                x = F.max_pool2d(x, 3, 2, 1) if b < 0.5 else F.avg_pool2d(x, 2)
            elif kind == 11 and x.dim() >= 2:
                y = x.reshape(-1, x.shape[-1])[:40]
                x = torch.tanh(y @ y.t() / 4)
            elif kind == 12 and x.dim() >= 1:
                other = rng.choice(values)
                if other.dim() and other.shape[-1:] == x.shape[-1:]:
                    x = x + other.reshape(-1, other.shape[-1])[0]
                else:
                    x = x * other.reshape(-1)[0]
            elif kind == 13 and x.dim() and x.dim() < 5:
                x = x.unsqueeze(d).expand(*x.shape[:d], 2, *x.shape[d:])
            elif kind == 14 and x.dim():
                x = torch.where(x > 0.1, x, x.amax(d, keepdim=True) * 0.5)
            else:
                x = ACTIVATIONS[int(a * len(ACTIVATIONS))](x)
            values.append(x)
        made = [v for v in values[2:]]
        chosen = [made[-1], *rng.sample(made, min(2, len(made)))]
        return tuple(v.clone() for v in chosen)

    return run


IMAGE, MATRIX, INDEX = (
    tensor(2, 8, 6, 6, low=-1, high=1),
    tensor(5, 12, low=-1, high=1),
    torch.tensor([3, 0, 2, 2, 1]),
)


@pytest.mark.parametrize("first", range(0, 48, 8))
def test_graphs(first):
    # Two matmuls and a norm in sequence have several times the rounding of one.
    check(
        [
            Case(
                program(seed, 6 + seed % 20),
                (IMAGE, MATRIX, INDEX),
                name=f"graph {seed}",
                rtol=1e-4,
                atol=1e-4,
            )
            for seed in range(first, first + 8)
        ]
    )


@pytest.mark.parametrize("first", range(100, 116, 8))
def test_graphs_in_half(first):
    """float16 inputs: torch rounds every step, purevk those that are stored."""
    cases = [
        Case(program(seed, 6 + seed % 12), (IMAGE, MATRIX, INDEX), name=f"graph {seed}")
        for seed in range(first, first + 8)
    ]
    for case in cases:
        fn = case.fn
        case.fn = lambda i, m, n, fn=fn: tuple(
            t.to(torch.float16) for t in fn(i.float(), m.float(), n)
        )
        case.expected = case.fn(IMAGE.half(), MATRIX.half(), INDEX)
        case.args = (IMAGE.half(), MATRIX.half(), INDEX)
        case.rtol, case.atol = 2e-3, 2e-3
    check(cases)


@pytest.mark.parametrize("seed", range(200, 206))
def test_graphs_again_and_again(seed):
    """The same program with other inputs: nothing is left over from the call before."""
    fn = program(seed, 20)
    with program_of(fn, (IMAGE, MATRIX, INDEX)) as made:
        for scale in (1.0, -0.7, 0.0, 1.0):
            have, want = (
                made.forward(IMAGE * scale, MATRIX * scale, INDEX),
                fn(IMAGE * scale, MATRIX * scale, INDEX),
            )
            for a, b in zip(have, want):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
