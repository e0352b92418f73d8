"""Attention within the parts of a sequence: one kernel, if all parts are there in their order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.ops.harness import Case, check, dispatches, program_of, tensor

pytestmark = pytest.mark.device


def attend(lengths, *, turned=True, keys=None, order=None, scales=None, mask=None):
    """A function of q, k and v [B, H, S, D] that attends within parts."""

    def run(q, k, v):
        parts = [q.split(lengths, 2), *(each.split(keys or lengths, 2) for each in (k, v))]
        made = []
        for number, (a, b, c) in enumerate(zip(*parts)):
            scale = 0.3 if scales is None else scales[number]
            made.append(F.scaled_dot_product_attention(a, b, c, mask, scale=scale))
        made = [made[at] for at in order] if order else made
        if turned:
            return torch.cat([each.transpose(1, 2).contiguous() for each in made], 1)
        return torch.cat(made, 2)

    return run


def some(batch, queries, keys=None, dtype=torch.float32, width=16):
    sizes = ((batch, 2, rows, width) for rows in (queries, keys or queries, keys or queries))
    return tuple(tensor(*size, seed=seed).to(dtype) for seed, size in enumerate(sizes))


JOINED = {
    "windows": (attend([8] * 4), some(1, 32)),
    "windows of several images": (attend([8] * 4), some(2, 32)),
    "one size": (attend(12), some(1, 40)),
    "other lengths": (attend([5, 16, 1, 10]), some(1, 32)),
    "one head": (attend([8] * 3), tuple(each[:, :1] for each in some(1, 24))),
    "an empty part": (attend([9, 0, 23]), some(2, 32)),
    "not turned": (attend([8] * 4, turned=False), some(1, 32)),
    "not turned, other lengths": (attend([20, 12], turned=False), some(2, 32)),
    "keys of other lengths": (attend([8, 24], keys=[30, 7]), some(1, 32, 37)),
    "halves": (attend([16, 40, 8]), some(1, 64, dtype=torch.float16)),
    "windows in halves": (attend([16] * 4), some(1, 64, dtype=torch.float16)),
}
APART = {
    "another order": (attend([8] * 4, order=[1, 0, 2, 3]), some(1, 32)),
    "a part is missing": (attend([8] * 4, order=[0, 1, 2]), some(1, 32)),
    "other scales": (attend([8] * 2, scales=[0.3, 0.4]), some(1, 16)),
    "masks": (attend([8] * 2, mask=torch.eye(8)), some(1, 16)),
}


@pytest.mark.parametrize("name", JOINED)
def test_parts_are_one_kernel(name: str) -> None:
    function, given = JOINED[name]
    near = {"rtol": 2e-3, "atol": 2e-3} if "halves" in name else {"atol": 1e-5}
    check(Case(function, given, **near))
    with program_of(function, given) as program:
        found = [each for each in dispatches(program) if each.startswith("attention/")]
        copies = [each for each in dispatches(program) if each.startswith("elementwise/")]
        assert len(found) == 1
        assert len(copies) <= (name in ("not turned", "not turned, other lengths"))


@pytest.mark.parametrize("name", APART)
def test_what_is_no_whole_stays_in_parts(name: str) -> None:
    function, given = APART[name]
    check(Case(function, given))
    with program_of(function, given) as program:
        assert sum(each.startswith("attention/") for each in dispatches(program)) > 1
