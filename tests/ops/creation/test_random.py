"""Random numbers: the generator's known answers, the distributions, and that every call and
operator has its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.ops.harness import aten, dispatches, program_of, tensor

pytestmark = pytest.mark.device


def philox(counter, key):
    """Philox 4x32-10 in whole numbers, after the paper."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ counter[3] ^ key[1],
            a & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


def test_known_answers_of_the_reference():
    """Random123's vectors."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    assert philox([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


@pytest.mark.parametrize("shape", [(3, 5), (3, 8)], ids=str)
def test_numbers_follow_from_element_call_operator_and_seed(monkeypatch, shape):
    monkeypatch.setenv("PUREVK_SEED", "1234567")

    def run(x):
        return torch.rand_like(x), torch.rand_like(x)

    x = tensor(*shape)
    with program_of(run, (x,)) as program:
        for call in range(3):
            for operator, made in enumerate(program.forward(x)):
                wanted = [
                    (philox([n // 4, call, operator, 0], [1234567, 0])[n % 4] >> 8) * 2.0**-24
                    for n in range(x.numel())
                ]
                assert made.flatten().tolist() == wanted
        program.reset_state()
        assert (
            program.forward(x)[0][0, 0].item()
            == (philox([0, 0, 0, 0], [1234567, 0])[0] >> 8) * 2.0**-24
        )


def test_distributions():
    def run(x):
        return (
            torch.rand(50000),
            torch.randn(50000),
            torch.randint(-3, 7, (50000,)),
            torch.bernoulli(x),
            torch.randint(0, 2**31 - 1, (50000,)),
        )

    with program_of(run, (torch.full((50000,), 0.3),)) as program:
        uniform, normal, whole, chance, wide = program.forward(torch.full((50000,), 0.3))
    assert 0 <= uniform.min() and uniform.max() < 1
    # Kolmogorov and Smirnov's distance; its 0.1 percent quantile for this count is 0.0087.
    steps = np.arange(1, 50001) / 50000
    assert np.abs(np.sort(uniform.numpy()) - steps).max() < 0.0087
    cumulative = np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in np.sort(normal.numpy())])
    assert np.abs(cumulative - steps).max() < 0.0087
    counts = torch.bincount(whole + 3, minlength=10)
    assert whole.min() == -3 and whole.max() == 6 and ((counts - 5000).abs() < 350).all()
    assert set(chance.unique().tolist()) == {0.0, 1.0} and abs(chance.mean() - 0.3) < 0.01
    assert 0 <= wide.min() and wide.double().mean() / 2**30 == pytest.approx(1, abs=0.02)


def test_permutations():
    def run(x):
        return torch.randperm(1000), torch.randperm(7, dtype=torch.int32), x

    with program_of(run, (tensor(1),)) as program:
        first, short, _ = program.forward(tensor(1))
        second = program.forward(tensor(1))[0]
    assert torch.equal(first.sort().values, torch.arange(1000)) and torch.equal(
        second.sort().values, torch.arange(1000)
    )
    assert (
        not torch.equal(first, second)
        and short.dtype is torch.int32
        and sorted(short.tolist()) == list(range(7))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dropout(dtype):
    x = torch.full((100, 200), 3.0, dtype=dtype)
    with program_of(lambda x: aten.native_dropout.default(x, 0.25, True), (x,)) as program:
        made, kept = program.forward(x)
        again, _ = program.forward(x)
    assert (
        torch.equal(made == 0, ~kept)
        and abs(kept.float().mean() - 0.75) < 0.02
        and not torch.equal(made, again)
    )
    torch.testing.assert_close(made[kept], torch.full_like(made[kept], 4.0))
    with program_of(lambda x: aten.native_dropout.default(x, 0.25, False), (x,)) as program:
        made, kept = program.forward(x)
        assert torch.equal(made, x) and kept.all() and len(dispatches(program)) <= 2
