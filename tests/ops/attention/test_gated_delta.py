"""The gated delta rule, against its definition."""

from __future__ import annotations

import pytest
import torch

from tests.ops.harness import tensor
from tests.ops.quantized.harness import run

pytestmark = pytest.mark.device


def reference(q, k, v, decay, beta, state, is_tiled):
    """Token by token, float64."""
    q, k, v, decay, beta, state = (each.double() for each in (q, k, v, decay, beta, state))
    repeats = v.shape[1] // q.shape[1]
    q, k = (
        each.repeat(1, repeats, 1) if is_tiled else each.repeat_interleave(repeats, 1)
        for each in (q, k)
    )
    outputs = []
    for t in range(len(q)):
        state = state * decay[t, :, None, None]
        delta = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + delta[:, :, None] * k[t, :, None, :]
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(outputs).float(), state.float()


@pytest.mark.parametrize("steps", [1, 13])
@pytest.mark.parametrize("keys, values", [(16, 24), (12, 130), (5, 7)])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_gated_delta(steps, keys, values, is_tiled):
    q, k = tensor(steps, 2, keys, low=-0.5, high=0.5), tensor(steps, 2, keys, low=-0.5, high=0.5)
    v, state = tensor(steps, 6, values), tensor(6, values, keys)
    decay, beta = tensor(steps, 6, low=0.3, high=1), tensor(steps, 6, low=0, high=1)
    inputs = (q, k, v, decay, beta, state)
    made = run("purevk.gated_delta", (*inputs, is_tiled))
    for got, want in zip(made, reference(*inputs, is_tiled)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
