"""The generator: its known answers, and that each element, operator and run has its own numbers."""

from __future__ import annotations

import pytest
import torch

from tests.ops.harness import program_of, tensor
from tests.ops.random.harness import correlation

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


def seeds(number, seed):
    """The seeds that torch's default generator gives after `torch.manual_seed(seed)`, as words."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.empty((), dtype=torch.int64).random_(generator=generator) for _ in range(number)]
    return [[int(each) & 0xFFFFFFFF, int(each) >> 32] for each in made]


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
def test_numbers_follow_from_element_operator_and_seed(shape):
    """In row-major order, also where the layout is another."""

    def run(x):
        made = torch.rand_like(x.T)
        return made.T.contiguous().T, torch.rand_like(x), torch.randint(-(2**40), 2**41, (5,))

    x = tensor(*shape)
    with program_of(run, (x,)) as program:
        torch.manual_seed(1234567)
        calls = [program.forward(x) for _ in range(2)]
        torch.manual_seed(1234567)
        again = program.forward(x)
    for seed, call in zip(seeds(2, 1234567), calls):
        for operator, made in enumerate(call[:2]):
            words = [philox([n // 4, 0, operator, 0], seed)[n % 4] for n in range(x.numel())]
            assert made.flatten().tolist() == [(word >> 8) * 2.0**-24 for word in words]
        blocks = [philox([n // 2, 0, 2, 0], seed)[2 * (n % 2) :][:2] for n in range(5)]
        wide = [-(2**40) + ((a << 32 | b) * 3 * 2**40 >> 64) for a, b in blocks]
        assert call[2].tolist() == wide
    assert all(torch.equal(a, b) for a, b in zip(calls[0], again))


@pytest.mark.slow
def test_streams_are_independent():
    """Two operators, two calls, and two programs after one seed."""

    def run(x):
        return torch.rand_like(x), torch.rand_like(x)

    x = torch.zeros(20000)
    torch.manual_seed(3)
    with program_of(run, (x,)) as first, program_of(run, (x,)) as second:
        streams = [*first.forward(x), *second.forward(x), *first.forward(x)]
    for n, a in enumerate(streams):
        shifted = [(a[1:], a[:-1]), (a[4:], a[:-4])]
        for left, right in [*((a, b) for b in streams[:n]), *shifted]:
            assert correlation(left, right) < 4.5


def test_a_new_size_does_not_begin_the_stream_again():
    def run(x):
        return torch.rand_like(x)

    torch.manual_seed(4)
    with program_of(run, (torch.zeros(40),), dynamic=True) as program:
        first = program.forward(torch.zeros(40))
        longer = program.forward(torch.zeros(100))  # another lowering
    assert not (first == longer[:40]).any()
