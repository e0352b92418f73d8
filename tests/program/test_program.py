"""A loaded program: what goes in and comes out, sharing a device, threads, what it releases, what
it reports."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk.errors import InputError, PurevkError
from purevk.graph.context import Context
from tests.harness import DATA, NO_TORCH, in_threads, python
from tests.models.harness import distance, exported, samples_of

pytestmark = pytest.mark.device
LINEAR = DATA / "linear_relu.pte"
COUNTER = DATA / "counter_portable.pte"
EXACT = 1e-6  # sums of six products


# -- inputs and outputs --------------------------------------------------------------------------
def test_numpy_in_numpy_out_without_torch(
    tmp_path: Path, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    np.save(tmp_path / "x.npy", linear_input)
    source = (
        NO_TORCH
        + """
import json, numpy as np, purevk
y = purevk.load(sys.argv[1]).forward(np.load(sys.argv[2]))
assert type(y) is np.ndarray and y.dtype == np.float32
print(json.dumps({"y": y.tolist(), "torch": "torch" in sys.modules}))
"""
    )
    said = python(source, LINEAR, tmp_path / "x.npy")
    assert said["torch"] is False
    np.testing.assert_allclose(said["y"], linear_output, rtol=0, atol=EXACT)


@pytest.mark.export
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v2", "minilm_sdpa_dyn", "decoder"])
def test_real_models_need_no_torch(name: str) -> None:
    source = (
        NO_TORCH
        + """
import json, numpy as np, purevk
from tests.models.export import load_samples
inputs, (expected,) = load_samples(sys.argv[1])[0]
error = np.abs(purevk.load(sys.argv[1]).forward(*inputs) - expected).max() / np.abs(expected).max()
print(json.dumps({"error": float(error), "torch": "torch" in sys.modules}))
"""
    )
    said = python(source, exported(name))
    assert said["torch"] is False and said["error"] < 1e-4


def test_torch_in_torch_out(linear_input: np.ndarray, linear_output: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(linear_input)
    with purevk.load(LINEAR) as program:
        strided = torch.empty(5, 2).t().copy_(x)
        for given in (x, strided, x.clone().requires_grad_()):
            y = program.forward(given)
            assert isinstance(y, torch.Tensor) and y.dtype is torch.float32
            assert y.requires_grad == given.requires_grad
            np.testing.assert_allclose(y.detach().numpy(), linear_output, rtol=0, atol=EXACT)
        np.testing.assert_array_equal(x.numpy(), linear_input)


def test_arrays_of_any_layout(linear_input: np.ndarray, linear_output: np.ndarray) -> None:
    wide = np.zeros((4, 10), np.float32)
    wide[::2, ::2] = linear_input
    frozen = linear_input.copy()
    frozen.flags.writeable = False
    with purevk.load(LINEAR) as program:
        for given in (np.asfortranarray(linear_input), wide[::2, ::2], frozen):
            np.testing.assert_allclose(program.forward(given), linear_output, rtol=0, atol=EXACT)


def test_an_output_stays_as_it_was(linear_input: np.ndarray) -> None:
    """What a call returned belongs to the caller: the next call does not write into it."""
    with purevk.load(LINEAR) as program:
        first = program.forward(linear_input)
        kept = first.copy()
        program.forward(-linear_input)
        np.testing.assert_array_equal(first, kept)
        first[:] = 7.0
        np.testing.assert_array_equal(program.forward(linear_input), kept)
    np.testing.assert_array_equal(first, np.full_like(kept, 7.0))


@pytest.mark.parametrize("on_the_cpu", [False, True])
def test_several_outputs_are_a_tuple(on_the_cpu: bool, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue("topk_on_the_cpu") if on_the_cpu else DATA / "topk.pte"
    x = np.random.default_rng(4).standard_normal((2, 7), np.float32)
    with purevk.load(path) as program:
        if on_the_cpu:
            assert program.report()["cpu_nodes"] == 1
        values, indices = program.forward(x)
    order = np.argsort(-x, axis=1)[:, :2]
    np.testing.assert_array_equal(indices, order)
    expected = 1 / (1 + np.exp(-(np.take_along_axis(x, order, 1) * 2.0 + 1.0)))
    np.testing.assert_allclose(values, expected, rtol=1e-5)


@pytest.mark.parametrize("path", [COUNTER, DATA / "counter.pte"], ids=["portable", "delegate"])
def test_state_is_kept_and_reset(path: Path) -> None:
    """A buffer that the model adds to: by a CPU kernel of the file, or as an extra output of a
    delegate."""
    first = np.arange(8, dtype=np.float32).reshape(2, 4)
    step = np.full((2, 4), 0.5, np.float32)
    with purevk.load(path) as program:
        for _ in range(2):
            for count in (1, 2, 3):
                np.testing.assert_array_equal(program.forward(step), (first + 0.5 * count) * 2)
            program.reset_state()
        with purevk.load(path) as other:  # state of its own
            np.testing.assert_array_equal(other.forward(step), (first + 0.5) * 2)
        np.testing.assert_array_equal(program.forward(step), (first + 0.5) * 2)


def test_methods_by_name(linear_input: np.ndarray, linear_output: np.ndarray) -> None:
    with purevk.load(DATA / "two_methods.pte") as program:
        assert sorted(program.methods) == ["forward", "step"]
        np.testing.assert_allclose(program.forward(linear_input), linear_output, rtol=0, atol=EXACT)
        step = program.method("step")
        np.testing.assert_allclose(step(linear_input[:1]), linear_output[:1], rtol=0, atol=EXACT)
        with pytest.raises(InputError, match="no method 'stop'") as caught:
            program.method("stop")
        assert "forward, step" in caught.value.why


# -- files ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["path", "text", "bytes"])
def test_a_path_or_bytes(kind: str, linear_input: np.ndarray, linear_output: np.ndarray) -> None:
    file: Any = {"path": LINEAR, "text": str(LINEAR), "bytes": LINEAR.read_bytes()}[kind]
    with purevk.load(file) as program:
        np.testing.assert_allclose(program.forward(linear_input), linear_output, rtol=0, atol=EXACT)


@pytest.mark.parametrize("name", ["linear_relu_inline", "linear_portable", "linear_relu_half"])
def test_other_ways_to_store_the_same_model(
    name: str, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    limit = 4e-3 if name.endswith("half") else EXACT
    with purevk.load(DATA / f"{name}.pte") as program:
        np.testing.assert_allclose(program.forward(linear_input), linear_output, rtol=0, atol=limit)


@pytest.mark.parametrize("name", ["linear_relu_external", "linear_portable_external"])
def test_weights_in_a_data_file(
    name: str, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    data = sorted((DATA / name).glob("*.ptd"))
    with purevk.load(DATA / f"{name}.pte", data) as program:
        np.testing.assert_allclose(program.forward(linear_input), linear_output, rtol=0, atol=EXACT)
    with pytest.raises(PurevkError) as caught:
        purevk.load(DATA / f"{name}.pte")
    assert ".ptd" in str(caught.value)


def test_the_file_may_go_after_loading(
    tmp_path: Path, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(LINEAR.read_bytes())
    with purevk.load(path) as program:
        path.unlink()
        np.testing.assert_allclose(program.forward(linear_input), linear_output, rtol=0, atol=EXACT)


# -- sharing a device ----------------------------------------------------------------------------
def test_two_programs_on_one_device(
    context: Context, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    one, two = (purevk.load(path, context=context) for path in (LINEAR, COUNTER))
    step = np.ones((2, 4), np.float32)
    counted = np.arange(8, dtype=np.float32).reshape(2, 4)
    for count in (1, 2):
        np.testing.assert_allclose(one.forward(linear_input), linear_output, rtol=0, atol=EXACT)
        np.testing.assert_array_equal(two.forward(step), (counted + count) * 2)
    one.close()
    np.testing.assert_array_equal(two.forward(step), (counted + 3) * 2)
    assert one.device is two.device is context.device


def test_two_devices_side_by_side(
    context: Context, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    with purevk.load(LINEAR, context=context) as one, purevk.load(LINEAR) as two:
        assert one.device is not two.device
        np.testing.assert_array_equal(one.forward(linear_input), two.forward(linear_input))


def test_threads_share_a_program(linear_input: np.ndarray) -> None:
    with purevk.load(LINEAR) as program:
        inputs = [linear_input * scale for scale in (1.0, -2.0, 0.25)]
        inputs = [x.astype(np.float32) for x in inputs]
        expected = [program.forward(x) for x in inputs]

        def calls(number: int) -> None:
            for _ in range(60):
                np.testing.assert_array_equal(program.forward(inputs[number]), expected[number])

        in_threads(*(lambda number=number: calls(number) for number in range(3)))


def test_threads_load_run_and_close_on_one_device(
    context: Context, linear_input: np.ndarray, linear_output: np.ndarray
) -> None:
    views = np.random.default_rng(6).standard_normal((1, 5, 8), np.float32)
    shifted = views.reshape(1, 5, 2, 4) + 1.0
    expected = np.concatenate([shifted, shifted * shifted], axis=-1)

    def linear() -> None:
        for _ in range(4):
            with purevk.load(LINEAR, context=context) as program:
                for _ in range(10):
                    np.testing.assert_allclose(
                        program.forward(linear_input), linear_output, rtol=0, atol=EXACT
                    )

    def view() -> None:
        for _ in range(4):
            with purevk.load(DATA / "dynamic_views.pte", context=context) as program:
                for length in (5, 1, 3, 5, 2):
                    made = program.forward(views[:, :length])
                    np.testing.assert_allclose(made, expected[:, :length], rtol=1e-6)

    in_threads(linear, view, linear)


@pytest.mark.export
@pytest.mark.slow
def test_threads_run_real_models(context: Context) -> None:
    """A convolutional model and a stateful one on one queue, each in its own thread, give what they
    give alone."""

    # torch.export is not thread-safe, nor is ast.literal_eval of Python 3.11, with which numpy reads.
    paths = [exported(name) for name in ("mobilenet_v2", "decoder", "minilm_sdpa_dyn")]
    samples = {path: samples_of(path) for path in paths}

    def run(path: Path) -> None:
        with purevk.load(path, context=context) as program:
            for _ in range(2):
                for inputs, expected in samples[path]:
                    assert distance(program.forward(*inputs), expected[0]).error < 1e-4
                program.reset_state()

    in_threads(*(partial(run, path) for path in paths))


# -- what it releases ----------------------------------------------------------------------------
def load_and_run(context: Context, x: np.ndarray, topk: Path) -> list[purevk.Program]:
    linear = purevk.load(LINEAR, context=context)
    linear.forward(x)
    views = purevk.load(DATA / "dynamic_views.pte", context=context, bounds="grow")
    for length in (1, 5, 16):
        views.forward(np.zeros((1, length, 8), np.float32))
    views.forward(np.zeros((1, 20, 8), np.float32))  # beyond its bound: lowered a second time
    fallback = purevk.load(topk, context=context)
    fallback.forward(np.zeros((2, 7), np.float32))
    return [linear, views, fallback]


@pytest.fixture
def used_context(context: Context, linear_input: np.ndarray, topk_on_the_cpu: Path) -> Context:
    """A device on which programs have run before, so that what belongs to the device (the driver's
    cache) is there."""
    for program in load_and_run(context, linear_input, topk_on_the_cpu):
        program.close()
    assert set(context.device.live_objects()) <= {"PipelineCache"}
    return context


def test_close_releases_everything(
    used_context: Context, linear_input: np.ndarray, topk_on_the_cpu: Path
) -> None:
    context = used_context
    before = context.device.live_objects()
    used = context.device.allocator.stats().used
    programs = load_and_run(context, linear_input, topk_on_the_cpu)
    assert context.device.live_objects() != before
    for program in programs:
        program.close()
        program.close()
    assert context.device.live_objects() == before
    assert context.device.allocator.stats().used == used


def test_garbage_collection_releases_everything(
    used_context: Context, linear_input: np.ndarray, topk_on_the_cpu: Path
) -> None:
    context = used_context
    before = context.device.live_objects()
    used = context.device.allocator.stats().used
    programs = load_and_run(context, linear_input, topk_on_the_cpu)
    held = len(context.device.core.objects)
    del programs
    gc.collect()
    # A collection may start anywhere, inside the allocator too: it destroys nothing itself. The
    # next safe point does.
    assert len(context.device.core.objects) == held
    assert context.device.live_objects() == before
    assert context.device.allocator.stats().used == used


def test_a_failed_load_leaves_nothing(
    used_context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    from purevk.graph.compute_graph import ComputeGraph

    context = used_context
    before = context.device.live_objects()

    def fail(self: ComputeGraph) -> None:
        raise PurevkError("made to fail")

    monkeypatch.setattr(ComputeGraph, "_hazards", fail)
    with pytest.raises(PurevkError, match="made to fail"):
        purevk.load(LINEAR, context=context)
    gc.collect()
    assert context.device.live_objects() == before


def test_results_that_a_copy_fetches(
    linear_input: np.ndarray, linear_output: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across a bus, large results are copied to memory of the host. That memory is made visible
    before the host reads it, not that of the device."""
    from purevk import api
    from purevk.graph import call_memory
    from purevk.graph.context import default_context

    invalidated: list[api.Buffer] = []
    invalidate = api.Buffer.invalidate

    def noted(self: api.Buffer) -> None:
        invalidated.append(self)
        invalidate(self)

    monkeypatch.setattr(call_memory, "_COPIED", 0)
    monkeypatch.setattr(default_context().device, "is_unified", False)
    with purevk.load(LINEAR) as program:
        copies = program.method("forward").executable.graph.memory.copies
        monkeypatch.setattr(api.Buffer, "invalidate", noted)
        np.testing.assert_allclose(program.forward(linear_input), linear_output, rtol=1e-5)
        assert [span.buffer for span in copies.values()] == invalidated != []


def test_no_use_after_close(linear_input: np.ndarray) -> None:
    program = purevk.load(LINEAR)
    method = program.method("forward")
    program.close()
    for use in (
        lambda: program.forward(linear_input),
        lambda: method(linear_input),
        program.reset_state,
    ):
        with pytest.raises(PurevkError, match="the program is closed") as caught:
            use()
        assert "load it again" in caught.value.next


def test_closing_the_device_closes_its_programs(linear_input: np.ndarray, tmp_path: Path) -> None:
    from purevk import api
    from purevk.cache import Cache

    context = Context(api.open_device(), Cache(tmp_path))
    program = purevk.load(LINEAR, context=context)
    program.forward(linear_input)
    context.close()
    assert context.device.live_objects() == {}
    with pytest.raises(PurevkError, match="the program is closed"):
        program.forward(linear_input)
    program.close()


# -- what it reports -----------------------------------------------------------------------------
def test_the_report(context: Context, topk_on_the_cpu: Path) -> None:
    with purevk.load(LINEAR, context=context) as program:
        report = program.report()
        assert report["device"] == context.device.name
        kernels = report["kernels"]
        assert (
            kernels["compiled"] >= 1
            and kernels["cached"] == 0
            and kernels["pipelines"] >= kernels["compiled"]
        )
        assert {"import", "passes", "lower", "kernels", "weights", "buffers"} <= set(
            report["seconds"]
        )
        assert all(0 <= value < 60 for value in report["seconds"].values())
        assert report["dispatches"] >= 1 and report["segments"] == 1 and report["cpu_nodes"] == 0
    with purevk.load(topk_on_the_cpu, context=context) as program:
        report = program.report()
        assert (report["segments"], report["cpu_nodes"]) == (2, 1)


def test_memory_is_reported(context: Context) -> None:
    with purevk.load(LINEAR, context=context) as program:
        memory = program.memory
        assert memory.lower_bound <= memory.planned <= memory.naive
        assert memory.weights >= 4 * (5 * 3 + 3) and memory.state == 0
        assert memory.inputs >= 4 * 2 * 5 and memory.outputs >= 4 * 2 * 3
        held = memory.planned + memory.inputs + memory.outputs + memory.weights + memory.state
        assert context.device.allocator.stats().used >= held
    with purevk.load(COUNTER, context=context) as program:
        assert program.memory.state >= 4 * 8


def test_progress_is_told(context: Context) -> None:
    seen: list[tuple[str, int, int]] = []
    purevk.load(
        LINEAR,
        context=context,
        progress=lambda phase, done, total: seen.append((phase, done, total)),
    ).close()
    assert {"compile", "pipeline", "weights"} <= {phase for phase, _, _ in seen}
    for phase in {phase for phase, _, _ in seen}:
        steps = [(done, total) for name, done, total in seen if name == phase]
        assert steps[-1][0] == steps[-1][1] > 0
        assert all(0 <= done <= total for done, total in steps)
