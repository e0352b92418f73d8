"""The gated delta rule, against its definition."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from purevk.dtypes import DType
from purevk.ir import Dim, Symbol
from purevk.llm.graphs import GraphBuilder
from purevk.ops.attention.gated_delta import Chunks, choose_chunks
from purevk.program import Program
from purevk.tuning import DEFAULT, SOFTWARE, DeviceTraits
from tests.ops.harness import context, dispatches, tensor
from tests.ops.quantized.harness import kernels_of, run

TOKENS = 150

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


def hard_inputs(key_heads, keys, heads, values):
    """Tokens whose decays are 0, near 0, near 1 and 1, in turns, and whose keys are much alike."""
    q, k = tensor(TOKENS, key_heads, keys, seed=1), tensor(TOKENS, key_heads, keys, seed=2)
    k = torch.nn.functional.normalize(k + 2 * k[:1], dim=-1)
    decay, beta = tensor(TOKENS, heads, low=0, high=1), tensor(TOKENS, heads, low=0, high=1, seed=3)
    decay = torch.stack([decay * 0, decay * 1e-30, decay, 1 - decay * 1e-3, decay**0])
    decay = decay[torch.arange(TOKENS) // 9 % 5, torch.arange(TOKENS)]
    beta[20:80] = 1
    return (q * keys**-0.5, k, tensor(TOKENS, heads, values), decay, beta)


def program_of_prompts(inputs, is_tiled):
    """Takes the numbers of tokens, up to all, and the state. Queries, keys and values are views of what
    a row has for each."""
    sizes = [each[0].numel() for each in inputs]
    keys, (heads, values) = inputs[0].shape[2], inputs[2].shape[1:]
    builder = GraphBuilder("forward")
    numbers = builder.input(DType.int32, (0,), most=TOKENS, least=2)
    steps = numbers.type.dims[0]
    table = torch.cat([each.flatten(1) for each in inputs], 1).numpy()
    rows = builder.op("embedding.default", builder.constant(table, DType.float32), numbers)
    state = builder.input(DType.float32, (heads, values, keys))
    parts, end = [], 0
    for each, size in zip(inputs, sizes):
        part = builder.op("slice.Tensor", rows, 1, end, end + size, 1)
        parts.append(builder.op("view.default", part, (steps, *each.shape[1:])))
        end += size
    out, after = builder.purevk.gated_delta.all(*parts, state, is_tiled)
    graph = builder.finish(out, after)
    return Program("test", {"forward": lambda sizes: graph}, context())


@pytest.mark.parametrize(
    "shared, sizes, is_tiled, tokens",
    [(16384, (2, 16, 6, 20), True, 32), (32768, (1, 48, 3, 36), False, 64)],
)
def test_prompts_by_chunks(shared, sizes, is_tiled, tokens):
    inputs, state = hard_inputs(*sizes), tensor(sizes[2], sizes[3], sizes[1])
    with kernels_of("gpu"):
        context().traits = replace(context().traits, max_shared_memory=shared)
        with program_of_prompts(inputs, is_tiled) as program:
            kernels = program.method("forward").executable.plan.dispatches
            chosen = [dict(each.kernel.macros).get("CHUNK") for each in kernels]
            assert chosen.count(str(tokens)) == 2
            assert not any("gated_delta.comp" in each for each in dispatches(program))
            for steps in (2, 31, 64, 65, 96, TOKENS):
                numbers = torch.arange(TOKENS - steps, TOKENS, dtype=torch.int32)
                made = program.forward(numbers, state)
                wanted = reference(*(each[-steps:] for each in inputs), state, is_tiled)
                for got, want in zip(made, wanted):
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_tokens_before_one_that_is_not_finite():
    """NaN or infinity of a token reaches its own results and later ones only."""
    draw = random.Random(5)
    whole, state = hard_inputs(2, 16, 6, 20), tensor(6, 20, 16)
    with kernels_of("gpu"):
        builder = GraphBuilder("forward")
        values = [builder.input(DType.float32, tuple(each.shape)) for each in (*whole, state)]
        graph = builder.finish(*builder.purevk.gated_delta.all(*values, False))
        with Program("test", {"forward": lambda sizes: graph}, context()) as program:
            kernels = program.method("forward").executable.plan.dispatches
            assert any("gated_delta_chunks" in each.kernel.template for each in kernels)
            for number in range(25):
                inputs = [each.clone() for each in whole]
                token = draw.choice((1, TOKENS - 1, draw.randrange(TOKENS)))
                value = draw.choice((torch.nan, torch.inf, -torch.inf))
                row = inputs[number % 5][token]
                row.view(-1)[draw.randrange(row.numel())] = value
                made = program.forward(*inputs, state)
                wanted = reference(*inputs, state, False)
                torch.testing.assert_close(made[0][:token], wanted[0][:token], rtol=1e-5, atol=1e-5)
                if value != value:
                    for got, want in zip(made, wanted):
                        torch.testing.assert_close(got.isnan(), want.isnan())


def test_which_prompts_are_cut():
    def chosen(steps=2048, heads=32, values=128, keys=128, **traits):
        device = {"max_shared_memory": 49152, "max_invocations": 1024, "cores": 132}
        device = DeviceTraits(frozenset(), **{**device, **traits})
        return choose_chunks(device, steps, heads, values, keys)

    assert chosen(profile=DEFAULT) == Chunks(64, 16, 128)
    assert chosen(Dim.of(Symbol("s", 2048))) == Chunks(64, 16, 128)
    assert chosen(max_shared_memory=16384) == Chunks(32, 16, 128)
    assert chosen(max_invocations=64) is None
    assert chosen(keys=4096) is chosen(keys=8) is chosen(values=6) is None
    assert chosen(1) is chosen(Dim.of(Symbol("s", 32))) is chosen(profile=SOFTWARE) is None
    assert chosen(max_storage_range=1 << 24) is None
