"""Statistics of random numbers, against the distribution that they should have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

# The quantile of Kolmogorov's distribution that a good generator exceeds once in 10,000 tests.
QUANTILE = 2.23


def distance(made: torch.Tensor, cumulative: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Kolmogorov and Smirnov's distance, times the root of the number of elements: at most QUANTILE
    for numbers of a continuous distribution."""
    ordered = made.double().flatten().sort().values
    expected = cumulative(ordered).numpy()
    count = len(ordered)
    steps = np.arange(count + 1) / count
    apart = max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())
    return float(apart * np.sqrt(count))


def chi_square(counts: torch.Tensor, chances: torch.Tensor) -> float:
    """The chi-square statistic as a number of standard deviations above its mean: at most 5. Counts
    that are expected to be below 10 are added up."""
    expected = chances.double() / chances.sum() * counts.sum()
    few = expected < 10
    counts = torch.cat([counts[~few].double(), counts[few].sum().double()[None]])
    expected = torch.cat([expected[~few], expected[few].sum()[None]])
    used = expected > 0
    assert not counts[~used].any(), "what has no chance was drawn"
    counts, expected = counts[used], expected[used]
    free = max(len(counts) - 1, 1)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - free) / np.sqrt(2 * free))


def counted(made: torch.Tensor, chance: Callable[[torch.Tensor], torch.Tensor], most: int) -> float:
    """`chi_square` of whole numbers from 0 to `most`, from the probability of each."""
    whole = made.double().flatten()
    assert torch.equal(whole, whole.floor()) and whole.min() >= 0
    counts = torch.bincount(whole.long().clamp(max=most), minlength=most + 1)
    chances = chance(torch.arange(most + 1, dtype=torch.float64))
    chances[most] = max(1 - float(chances[:most].sum()), 0)
    return chi_square(counts, chances)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """The correlation of two streams, times the root of their length: at most 4.5 if they are
    independent."""
    pair = torch.stack([a.flatten().double(), b.flatten().double()])
    return abs(float(torch.corrcoef(pair)[0, 1])) * float(np.sqrt(a.numel()))
