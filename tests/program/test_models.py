"""Every reference model against eager torch: outputs, where the nodes run, dynamic lengths,
state."""

from __future__ import annotations

import gc
import json
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import cli
from purevk.errors import InputError
from tests.models.harness import (
    Samples,
    distance,
    eager_half,
    exported,
    outputs,
    parameters,
    run_samples,
    samples_of,
)
from tests.models.zoo import CASES

pytestmark = [pytest.mark.export, pytest.mark.device]

FLOAT32 = {"mobilenet_v2": 5e-5, "resnet18": 1e-5, "resnet50": 1e-4}
"""Largest error in float32 relative to the largest output; 5e-6 for the others, some tens of
roundings. Batch norms with random statistics make the deep convolutional models amplify roundings: an
input changed in its last bit moves the output of ResNet-50 by some 1e-5, and both sides sum in their own order."""

HALF = {"fallback_inverse": 1e-3}
"""Largest error in half where eager torch cannot run the model in half: twice the type's rounding, 2 ** -11."""

FALLBACK = ("fallback_inverse", "fallback_cumsum")
WHOLE = tuple(name for name in CASES if name not in FALLBACK)
MINILM = tuple(name for name in CASES if name.startswith("minilm"))
LENGTHS = (2, 3, 17, 64, 127, 128)


def executable(program: purevk.Program) -> Any:
    return program.methods["forward"].executable


@pytest.mark.parametrize(("name", "variant"), parameters(variants=("fp32",)))
def test_float32_is_eager_torchs(name: str, variant: str) -> None:
    path = exported(name, variant)
    with purevk.load(path) as program:
        found = run_samples(program, samples_of(path))
    assert found.error < FLOAT32.get(name, 5e-6)
    if name in MINILM:
        assert found.cosine > 0.99999


@pytest.mark.parametrize(("name", "variant"), parameters(variants=("fp16",)))
def test_half_is_as_exact_as_eager_torch_in_half(name: str, variant: str) -> None:
    """purevk rounds to half where eager torch in half does, or less often, and sums in float32. Two
    ways to round differ on single elements, so the worst of thousands may come out half as large
    again."""
    path = exported(name, variant)
    samples = samples_of(path)
    with purevk.load(path) as program:
        found = run_samples(program, samples)
    assert found.error < (HALF[name] if name in HALF else 1.5 * eager_half(name, samples).error)


@pytest.mark.parametrize(("name", "variant"), parameters(WHOLE))
def test_the_whole_method_is_one_segment_on_the_device(name: str, variant: str) -> None:
    with purevk.load(exported(name, variant)) as program:
        report = program.report()
        assert (report["segments"], report["cpu_nodes"]) == (1, 0)
        assert program.memory.planned < program.memory.naive


# -- dynamic lengths -----------------------------------------------------------------------------
def sentence(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and mask, int64 [1, length]; beyond 8 tokens the last ones are padding."""
    ids = np.random.default_rng(length).integers(1000, 29000, (1, length))
    mask = np.ones_like(ids)
    if length > 8:
        mask[:, -(length // 5) :] = 0
    return ids, mask


@pytest.fixture(scope="module")
def embeddings() -> dict[int, np.ndarray]:
    """What eager torch gives for `sentence(length)`, float32 [1, 384], and for 150 tokens."""
    torch = pytest.importorskip("torch")
    module = CASES["minilm_sdpa_dyn"].build().module
    with torch.no_grad():
        return {n: module(*map(torch.from_numpy, sentence(n))).numpy() for n in (*LENGTHS, 150)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minilm_sdpa_dyn", "minilm_eager_dyn"])
@pytest.mark.parametrize("variant", ["fp32", "fp16"])
def test_every_length_is_right(name: str, variant: str, embeddings: dict[int, np.ndarray]) -> None:
    with purevk.load(exported(name, variant)) as program:
        for length in LENGTHS:
            found = distance(program.forward(*sentence(length)), embeddings[length])
            assert found.cosine > 0.99999, length
            if variant == "fp32":
                assert found.error < 5e-6, length


@pytest.mark.slow
def test_a_length_that_came_before_is_not_recorded_again(embeddings: dict[int, np.ndarray]) -> None:
    with purevk.load(exported("minilm_sdpa_dyn")) as program:
        for length in LENGTHS:
            program.forward(*sentence(length))
        assert executable(program).graph.recorded == len(LENGTHS)
        for length in (128, 2, 128, 64, 3, 2, 17, 127) * 3:
            assert distance(program.forward(*sentence(length)), embeddings[length]).error < 5e-6
        assert executable(program).graph.recorded == len(LENGTHS)


@pytest.mark.slow
def test_the_oldest_recordings_go(
    monkeypatch: pytest.MonkeyPatch, embeddings: dict[int, np.ndarray]
) -> None:
    monkeypatch.setattr("purevk.graph.compute_graph.RECORDINGS", 2)
    with purevk.load(exported("minilm_sdpa_dyn")) as program:
        gc.collect()
        before = program.device.live_objects().get(
            "CommandBuffer", 0
        )  # of programs that other tests keep
        for length, recorded in ((2, 1), (3, 2), (2, 2), (17, 3), (2, 3), (3, 4)):
            assert distance(program.forward(*sentence(length)), embeddings[length]).error < 5e-6
            assert executable(program).graph.recorded == recorded
        assert program.device.live_objects()["CommandBuffer"] == before + 2


@pytest.mark.slow
def test_a_length_beyond_the_exported_bound_is_lowered_anew(
    embeddings: dict[int, np.ndarray],
) -> None:
    with purevk.load(exported("minilm_sdpa_dyn"), bounds="grow") as program:
        assert distance(program.forward(*sentence(150)), embeddings[150]).error < 5e-6
        assert distance(program.forward(*sentence(64)), embeddings[64]).error < 5e-6


# -- state ---------------------------------------------------------------------------------------
def steps(program: purevk.Program, samples: Samples) -> list[np.ndarray]:
    return [program.forward(*inputs) for inputs, _ in samples]


@pytest.mark.parametrize(
    ("name", "variant"), parameters(("decoder", "decoder_plain", "decoder_dyn"))
)
def test_state_stays_on_the_device_until_it_is_reset(name: str, variant: str) -> None:
    """The calls bring tokens and a position and take logits away, no more; after `reset_state` they
    answer the same again."""
    path = exported(name, variant)
    samples = samples_of(path)
    with purevk.load(path) as program:
        caches = (
            2 * 2 * 128 * 2 * 64 * (4 if variant == "fp32" else 2)
        )  # layers, keys and values, rows, heads, width
        assert program.memory.state >= caches
        tensors = sum(
            value.type.nbytes
            for value in (
                *executable(program).plan.graph.inputs,
                *executable(program).plan.graph.outputs,
            )
        )
        assert (
            program.memory.inputs + program.memory.outputs <= tensors + 1024
        )  # and their alignment
        first = steps(program, samples)
        later = program.forward(*samples[-1][0])
        np.testing.assert_array_equal(
            later, first[-1]
        )  # the same token at the same position finds the same rows before it
        program.reset_state()
        again = steps(program, samples)
        for one, two in zip(first, again):
            np.testing.assert_array_equal(one, two)


def test_a_step_sees_the_steps_before_it() -> None:
    """Without the tokens before it, the last step answers something else: the comparisons above do
    compare state."""
    path = exported("decoder")
    inputs, expected = samples_of(path)[-1]
    with purevk.load(path) as program:
        assert distance(program.forward(*inputs), expected[0]).error > 0.01


@pytest.mark.parametrize(
    ("position", "why", "advice"),
    [
        (128, "up to row 129 of 128", "reset_state()"),
        (1000, "up to row 1001 of 128", "a larger cache"),
        (-1, "start at row -1", "a position of 0 or more"),
    ],
)
def test_rows_outside_of_the_cache_are_an_input_error(position: int, why: str, advice: str) -> None:
    path = exported("decoder")
    samples = samples_of(path)
    with purevk.load(path) as program:
        for inputs, _ in samples[:5]:
            program.forward(*inputs)
        with pytest.raises(InputError) as caught:
            program.forward(samples[5][0][0], np.array([position]))
        assert "cache of" in caught.value.what and "sdpa_with_kv_cache" in caught.value.what
        assert why in caught.value.why and advice in caught.value.next
        # The refused call has changed nothing.
        inputs, expected = samples[5]
        assert distance(program.forward(*inputs), expected[0]).error < 5e-6
        program.forward(samples[5][0][0], np.array([127]))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["fp32", "fp16"])
def test_prefill_then_decode(variant: str) -> None:
    """A prompt in one call and then a token a call answers what a token a call from the start
    does."""
    path = exported("decoder_dyn", variant)
    tokens = np.random.default_rng(5).integers(0, 1000, (1, 40))
    with purevk.load(path) as program:
        single = [program.forward(tokens[:, n : n + 1], np.array([n])) for n in range(40)]
        program.reset_state()
        prompt = program.forward(tokens[:, :31], np.array([0]))
        assert prompt.shape == (1, 31, 1000)
        mixed = [
            prompt,
            *(program.forward(tokens[:, n : n + 1], np.array([n])) for n in range(31, 40)),
        ]
        found = distance(np.concatenate(mixed, axis=1), np.concatenate(single, axis=1))
        assert found.error < (5e-6 if variant == "fp32" else 2e-3)
        with pytest.raises(InputError, match="cache"):
            program.forward(tokens[:, :31], np.array([98]))
        program.forward(tokens[:, :31], np.array([97]))


# -- the CPU -------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "operator"),
    [("fallback_cumsum", None), ("fallback_inverse", "aten.linalg_inv_ex.default")],
)  # of 40 rows
def test_what_has_no_kernel_runs_on_the_cpu_and_inspect_says_why(
    name: str, operator: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = exported(name)
    with purevk.load(path) as program:
        cpu = [
            step.nodes[0].args[:2] for step in executable(program).plan.steps if not step.on_device
        ]
        assert program.report()["cpu_nodes"] == len(cpu) <= 1
    if operator is not None:
        assert cpu == [(operator, "no kernel above 32 rows")]
    assert cli.main(["inspect", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["methods"][0]
    assert [(node["operator"], node["why"]) for node in said["cpu_nodes"]] == cpu
    assert cli.main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    for name, why in cpu:
        assert name in text and why in text


@pytest.mark.parametrize("name", FALLBACK)
def test_torch_tensors_go_through_the_cpu_and_back(name: str) -> None:
    torch = pytest.importorskip("torch")
    path = exported(name)
    with purevk.load(path) as program:
        for inputs, expected in samples_of(path):
            made = outputs(program.forward(*map(torch.from_numpy, inputs)))
            assert all(isinstance(one, torch.Tensor) for one in made)
            assert distance(made[0].numpy(), expected[0]).error < 5e-6
