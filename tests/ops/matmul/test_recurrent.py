"""Recurrent layers against torch, with the choices of GPUs: all steps of a layer as one node."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from purevk.graph.context import default_context
from purevk.ops.matmul import recurrent_steps
from purevk.tuning import DEFAULT
from tests.ops.harness import Case, check, dispatches, program_of, tensor

pytestmark = pytest.mark.device
STEP, LAYER = "matmul/recurrent_step.comp", "matmul/recurrent_layer.comp"


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    shared = default_context()
    traits = dataclasses.replace(shared.traits, profile=DEFAULT, cores=1)
    if not recurrent_steps._has_subgroups(traits):
        pytest.skip("the device has no shuffles in subgroups of 8 or more that are asked for")
    monkeypatch.setattr(shared, "traits", traits)


def take_steps(monkeypatch):
    """Weights do not fit into registers."""
    monkeypatch.setattr(recurrent_steps, "_WEIGHT_BYTES", 0)


def layer_of(kind: str, *sizes: int, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    name, _, function = kind.partition("_")
    if function:
        options["nonlinearity"] = function
    return getattr(torch.nn, name)(*sizes, **options).eval().requires_grad_(False)


def case_of(layer: torch.nn.Module, *inputs, dtype: torch.dtype) -> Case:
    """All results of a layer whose weights are inputs."""
    layer = layer.to(dtype)
    names, params = zip(*layer.named_parameters())

    def run(*args):
        values, params = args[: len(inputs)], args[len(inputs) :]
        given = (values[0], tuple(values[1:])) if len(values) > 2 else tuple(values)
        return torch.func.functional_call(layer, dict(zip(names, params)), given)

    atol = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    values = [each.to(dtype) for each in inputs]
    return Case(run, (*values, *params), atol=atol, name=f"{layer} {dtype}")


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_tanh", "RNN_relu"])
def test_all_steps(kind, dtype, steps, monkeypatch):
    """Units in whole vectors and not, batches that rows do not divide, layers in both directions."""
    if steps:
        take_steps(monkeypatch)
    count = 2 if kind == "LSTM" else 1
    state = [tensor(1, 3, 12, seed=n) for n in range(1, 1 + count)]
    both = [tensor(4, 2, 6, seed=n) for n in range(1, 1 + count)]
    layers = {"num_layers": 2, "bidirectional": True}
    # oneDNN has no LSTM of bfloat16 on some processors.
    with torch.backends.mkldnn.flags(enabled=False):
        check(
            [
                case_of(layer_of(kind, 8, 12), tensor(5, 3, 8), *state, dtype=dtype),
                case_of(layer_of(kind, 6, 5, batch_first=True), tensor(11, 2, 6), dtype=dtype),
                case_of(layer_of(kind, 6, 5, bias=False), tensor(1, 1, 6), dtype=dtype),
                case_of(layer_of(kind, 8, 16), tensor(4, 8), dtype=dtype),
                case_of(layer_of(kind, 4, 1), tensor(4, 2, 4), dtype=dtype),
                case_of(layer_of(kind, 4, 8, **layers), tensor(3, 9, 4), dtype=dtype),
                case_of(
                    layer_of(kind, 4, 6, batch_first=True, **layers),
                    tensor(2, 5, 4),
                    *both,
                    dtype=dtype,
                ),
                case_of(layer_of(kind, 4, 7, bias=False, **layers), tensor(4, 4), dtype=dtype),
            ]
        )


@pytest.mark.parametrize("steps", [False, True])
def test_units_beyond_a_subgroup(steps, monkeypatch):
    if steps:
        take_steps(monkeypatch)
    check(
        [
            case_of(layer_of("LSTM", 8, 132), tensor(3, 2, 8), dtype=torch.float32),
            case_of(layer_of("LSTM", 8, 128), tensor(3, 2, 8), dtype=torch.float16),
            case_of(
                layer_of("LSTM", 8, 64, bidirectional=True), tensor(3, 3, 8), dtype=torch.float32
            ),
            case_of(layer_of("GRU", 8, 70), tensor(3, 17, 8), dtype=torch.float32),
        ]
    )


@pytest.mark.parametrize("cores, batch, layers, steps", [
    (64, 300, 1, 0), (64, 128, 1, 0), (1, 60, 1, 0), (1, 64, 0, 1), (1, 65, 0, 0)
])  # fmt: skip
def test_large_batches(cores, batch, layers, steps, monkeypatch):
    """In as many workgroups as rows need, up to rounds of them that matmuls are faster than."""
    shared = default_context()
    monkeypatch.setattr(shared, "traits", dataclasses.replace(shared.traits, cores=cores))
    if not layers:
        monkeypatch.setattr(recurrent_steps, "_MOST_ROUNDS", 1)
    layer, x = layer_of("GRU", 8, 12, batch_first=True), tensor(batch, 3, 8)
    with program_of(lambda x: layer(x)[0], (x,)) as program:
        found = dispatches(program)
        assert (found.count(LAYER), found.count(STEP)) == (layers, steps)
        torch.testing.assert_close(program.forward(x), layer(x)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_tanh"])
def test_a_dispatch_is_repeated_for_each_step(kind, monkeypatch):
    """In both directions, if the weight does not fit into registers."""
    take_steps(monkeypatch)
    layer = layer_of(kind, 8, 12, batch_first=True, bidirectional=True)
    with program_of(lambda x: layer(x)[0], (tensor(3, 20, 8),)) as program:
        found = dispatches(program)
        assert found.count(STEP) == 1 and len(found) <= 4, found
        plan = program.methods["forward"].executable.plan
        (step,) = (each for each in plan.dispatches if each.kernel.template == STEP)
        assert step.repeat == 20


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_tanh"])
def test_a_small_layer_is_a_dispatch(kind):
    layer = layer_of(kind, 8, 12, batch_first=True, bidirectional=True)
    with program_of(lambda x: layer(x)[0], (tensor(3, 20, 8),)) as program:
        found = dispatches(program)
        assert found.count(LAYER) == 1 and len(found) <= 4, found


def test_a_batch_whose_size_is_known_at_the_call():
    import purevk

    layer = layer_of("LSTM", 8, 12, batch_first=True)
    batch = torch.export.Dim("batch", min=2, max=20)
    exported = torch.export.export(layer, (tensor(4, 6, 8),), dynamic_shapes={"input": {0: batch}})
    with purevk.compile(exported) as program:
        for count in (2, 5, 20):
            x = tensor(count, 6, 8, seed=count)
            (made, state), (want, last) = program.forward(x), layer(x)
            for have, expected in zip((made, *state), (want, *last), strict=True):
                torch.testing.assert_close(have, expected, atol=1e-5, rtol=1e-4)
