"""Positions in sorted sequences: torch's also with NaN, and in sequences out of order."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

import pytest
import torch

from tests.ops.harness import Case, check, program_of

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32)


def _numbers(draw: random.Random, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Few different numbers, so that many are equal; floats with NaN and infinities."""
    values = [float(draw.randint(-9, 9)) for _ in range(math.prod(shape))]
    if dtype.is_floating_point and draw.random() < 0.7:
        for _ in range(draw.randint(1, 1 + len(values) // 5)):
            special = draw.choice((math.nan, math.nan, math.inf, -math.inf, -0.0))
            values[draw.randrange(len(values))] = special
    return torch.tensor(values, dtype=torch.float64).reshape(shape).to(dtype)


def _search(draw: random.Random, dtype: torch.dtype) -> Case:
    kind = draw.choice(("isin", "bucketize", "searchsorted", "rows"))
    count, right = (
        draw.choice((1, 2, draw.randint(3, 40), draw.randint(129, 300))),
        draw.random() < 0.5,
    )
    if kind == "isin":
        invert = draw.random() < 0.5
        tests = _numbers(draw, dtype, count)
        return Case(
            functools.partial(torch.isin, invert=invert), (_numbers(draw, dtype, 3, 7), tests)
        )
    rows = (4,) if kind == "rows" else ()
    x, edges = (
        _numbers(draw, dtype, *rows, draw.randint(1, 30)),
        _numbers(draw, dtype, *rows, count),
    )
    if draw.random() < 0.8:
        edges = edges.sort(-1).values
    search: Callable[..., torch.Tensor] = functools.partial(torch.searchsorted, right=right)
    if kind == "bucketize":
        return Case(functools.partial(torch.bucketize, right=right), (x, edges))
    return Case(lambda edges, x: search(edges, x), (edges, x))


def test_searches_with_nan() -> None:
    draw = random.Random(3)
    check([_search(draw, dtype) for dtype in DTYPES for _ in range(4)])


def _numbers_searched(x: torch.Tensor) -> list[torch.Tensor]:
    special = (0.1, 2.5, math.inf, math.nan) if x.is_floating_point() else (2**24 + 1, -1, 100, 0.5)
    edges = x.sort().values
    found = [torch.isin(number, x) for number in (2, 4, *special[-2:])]
    for number in (2, *special):
        found.append(torch.bucketize(number, edges))
        found.append(torch.searchsorted(edges, number, right=True))
    return found


def test_searches_for_a_number() -> None:
    # torch rounds the number to the dtype of the tensor.
    draw = random.Random(5)
    dtypes = (*DTYPES, torch.uint8)
    tensors = [
        _numbers(draw, dtype, 17).abs().where(torch.arange(17) != 3, 0.1) for dtype in dtypes
    ]
    check([Case(_numbers_searched, (each.to(dtype),)) for each, dtype in zip(tensors, dtypes)])


def test_a_search_of_any_length() -> None:
    edges = torch.tensor([-1.0, 0, 1, 2, 2, math.nan, math.nan])
    x = torch.tensor([-2.0, 0.5, 3, math.nan, math.inf])
    with program_of(torch.searchsorted, (edges, x), dynamic=True) as program:
        for length in (7, 6, 4, 2):
            ends = edges[-length:]
            assert torch.equal(program.forward(ends, x), torch.searchsorted(ends, x))
