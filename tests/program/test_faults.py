"""Every Vulkan call that can fail, made to fail: a typed error or the right result comes of it, nothing
is left behind, and what is called next is right."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import purevk
from purevk import api
from purevk.api import queue, vk
from purevk.cache import default_cache
from purevk.errors import DeviceError, DeviceLostError, OutOfDeviceMemoryError, PurevkError
from purevk.graph import context as contexts
from purevk.graph.context import Context
from purevk.graph.memory import DeviceStore
from purevk.program.program import Program
from tests.api.stand_in import (
    DEVICE_LOST,
    INCOMPLETE,
    NOT_READY,
    OUT_OF_DEVICE_MEMORY,
    OUT_OF_HOST_MEMORY,
    STATUSES,
    TIMEOUT,
    VulkanStandIn,
)

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.device

ERRORS: dict[int, type[PurevkError]] = {
    OUT_OF_HOST_MEMORY: OutOfDeviceMemoryError,
    OUT_OF_DEVICE_MEMORY: OutOfDeviceMemoryError,
    DEVICE_LOST: DeviceLostError,
}
# What an open context holds; the messenger is that of the validation layer.
HELD = {"Instance", "DebugUtilsMessengerEXT", "Device", "PipelineCache", "Fence"}
# Calls that may fail without an error, or with that of a later call: purevk can do without them.
OPTIONAL = {
    "vkSetDebugUtilsObjectNameEXT",
    "vkGetPipelineCacheData",
    "vkResetFences",
    "vkGetFenceStatus",
    "vkDeviceWaitIdle",
    "vkAllocateMemory",  # a smaller block may do
}


class Static(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(self.linear(x)), -1)


class Stateful(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 7)
        self.register_buffer("total", torch.arange(7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.total.add_(y.sum(0))
        return torch.cumsum(y, 0) + self.total


@dataclass(frozen=True)
class Model:
    """A saved program, with calls one after the other, and what eager torch makes of them."""

    path: Path
    inputs: list[np.ndarray]
    expected: list[np.ndarray]

    def load(self, context: Context | None) -> Program:
        return purevk.load(self.path, context=context, bounds="grow")

    def check(self, program: Program, calls: int | None = None) -> None:
        """Calls the program as it is just after it was loaded."""
        last = len(self.inputs) - 1
        for number, x in enumerate(self.inputs[:calls]):
            call = program.forward if number != last else _submitted(program)
            np.testing.assert_allclose(call(x), self.expected[number], rtol=1e-5, atol=1e-5)


def _submitted(program: Program) -> Callable[[np.ndarray], Any]:
    return lambda x: program.submit(x).result()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=1, max=8)
    found = {}
    for name, module, sizes, dynamic in (
        ("static", Static().eval(), (2, 2), None),
        # Sizes within the bounds, above them, and of a `submit`.
        ("stateful", Stateful().eval(), (2, 4, 20, 3), ({0: rows},)),
    ):
        path = tmp_path_factory.mktemp("faults") / f"{name}.pvk"
        with purevk.compile(module, (torch.zeros(2, 5),), dynamic) as program:
            program.save(path)
        inputs = [torch.randn(size, 5) for size in sizes]
        with torch.no_grad():
            outputs = [module(x).numpy().copy() for x in inputs]
        found[name] = Model(path, [x.numpy() for x in inputs], outputs)
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for kernels that no other process writes to."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def _without_garbage_of_others(models: dict[str, Model]) -> None:
    """What is there is no garbage of these tests, and takes seconds to look through each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def stand_in(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> Iterator[Any]:
    # So that calls always have one order, and their number depends neither on time nor on others.
    monkeypatch.setenv("PUREVK_COMPILE_THREADS", "1")
    monkeypatch.setattr(queue, "_POLL_S", 0.0)
    monkeypatch.setattr(queue, "_SLICE_NS", 20_000_000_000)  # on a busy machine a wait was two
    monkeypatch.setenv("PUREVK_CACHE", str(cache))
    monkeypatch.setenv("PUREVK_VERIFY", "0")
    gc.collect()
    made = VulkanStandIn(monkeypatch, discrete=getattr(request, "param", "") == "discrete")
    yield made
    gc.collect()
    assert (made.live, made.faults) == ({}, [])


def open_context() -> Context:
    device = api.open_device()
    try:
        return Context(device, default_cache())
    except BaseException:
        device.close()
        raise


class Failure(NamedTuple):
    """An error without its frames, which would keep objects alive."""

    kind: type[PurevkError]
    text: str
    next: str


def failure(error: PurevkError) -> Failure:
    return Failure(type(error), str(error), error.next)


def live(model: Model, stand_in: VulkanStandIn, again: bool) -> Failure | None:
    """Opens a device, loads, calls and closes; the first error of purevk. Any other is raised.

    Args:
        again: whether the device is to work after an error.
    """
    try:
        context = open_context()
    except PurevkError as error:
        return failure(error)
    failed: Failure | None = None
    program: Program | None = None
    with context:
        try:
            program = model.load(context)
            model.check(program)
        except PurevkError as error:
            failed = failure(error)
        if failed is not None and again:
            if program is not None:
                program.reset_state()
                model.check(program)
            with model.load(context) as other:
                model.check(other, calls=1)
            del other
        if program is not None:
            program.close()
            program = None
        gc.collect()
        context.device.core.collect()
        context.device.allocator.trim()
        left = stand_in.kinds().keys() - HELD
        assert not left, f"{stand_in.failed}: {left}"
    return failed


def sweep(
    model: Model,
    stand_in: VulkanStandIn,
    result: int,
    log: pytest.LogCaptureFixture,
    few: bool = False,
) -> int:
    """Makes each call fail in turn, or the first and the last one of each function. The number of
    calls that did."""
    stand_in.fail()
    assert live(model, stand_in, again=True) is None
    calls = list(stand_in.calls)
    last = {name: number for number, name in enumerate(calls)}
    first = {name: number for number, name in reversed(list(enumerate(calls)))}
    chosen = {*first.values(), *last.values()} if few else range(len(calls))
    if result in STATUSES:
        chosen = [number for number in chosen if calls[number] in STATUSES[result]]
    for number in sorted(chosen):
        stand_in.fail(number, result)
        log.clear()
        error = live(model, stand_in, again=result != DEVICE_LOST)
        what = f"{vk.result_name(result)} of {stand_in.failed}, call {number}"
        assert stand_in.failed == calls[number], what
        if error is None:
            told = any(
                stand_in.failed in each.getMessage()
                for each in log.records
                if each.levelno >= logging.WARNING
            )
            ignored = result in STATUSES or stand_in.failed in OPTIONAL
            assert ignored or told, f"{what} was not noticed"
        else:
            assert result not in STATUSES and issubclass(error.kind, ERRORS[result]), (what, error)
            assert stand_in.failed in error.text or stand_in.failed in OPTIONAL, what
            assert error.next, what
        gc.collect()
        assert (stand_in.live, stand_in.faults) == ({}, []), what
        if result == DEVICE_LOST:
            stand_in.fail()
            assert live(model, stand_in, again=False) is None
    return len(chosen)


def fail_next(
    program: Program, model: Model, stand_in: VulkanStandIn, name: str, result: int
) -> None:
    """Has the function fail in the next call with the first inputs."""
    program.forward(model.inputs[0])
    stand_in.fail()
    program.forward(model.inputs[0])
    stand_in.fail(stand_in.calls.index(name), result)


WHOLE = [
    pytest.param(name, memory, result, marks=pytest.mark.slow, id=f"{name}, {memory}, {short}")
    for name, memory in (("static", "unified"), ("stateful", "discrete"))
    for result, short in (
        (OUT_OF_HOST_MEMORY, "host memory"),
        (OUT_OF_DEVICE_MEMORY, "device memory"),
        (DEVICE_LOST, "lost"),
    )
]


@pytest.mark.parametrize(("name", "stand_in", "result"), WHOLE, indirect=["stand_in"])
def test_any_call_fails(
    name: str,
    stand_in: VulkanStandIn,
    result: int,
    models: dict[str, Model],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert sweep(models[name], stand_in, result, caplog) > 60


@pytest.mark.parametrize("stand_in", ["discrete"], indirect=True)
@pytest.mark.parametrize("result", [OUT_OF_DEVICE_MEMORY, DEVICE_LOST], ids=["memory", "lost"])
def test_each_function_fails(
    stand_in: VulkanStandIn,
    result: int,
    models: dict[str, Model],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert sweep(models["static"], stand_in, result, caplog, few=True) > 30


@pytest.mark.parametrize("stand_in", ["discrete"], indirect=True)
@pytest.mark.parametrize("result", [TIMEOUT, INCOMPLETE], ids=["timeout", "incomplete"])
def test_a_call_that_is_not_done_is_made_again(
    result: int,
    stand_in: VulkanStandIn,
    models: dict[str, Model],
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert sweep(models["stateful"], stand_in, result, caplog) > 5


@pytest.mark.parametrize("stand_in", ["discrete"], indirect=True)
def test_states_after_a_call_that_failed(stand_in: VulkanStandIn, models: dict[str, Model]) -> None:
    """They are those before the call or those after it, whatever fails in it."""
    model = models["stateful"]
    x, failed = model.inputs[0], 0
    with open_context() as context, model.load(context) as program:
        program.forward(x)
        stand_in.fail()
        program.forward(x)
        for number in range(len(stand_in.calls)):
            stand_in.fail()
            before = program.state["total"]
            stand_in.fail(number, OUT_OF_DEVICE_MEMORY)
            try:
                program.forward(x)
            except PurevkError:
                failed += 1
            stand_in.fail()
            state = program.state["total"]
            program.state["total"] = before
            program.forward(x)
            after = program.state["total"]
            assert not np.array_equal(before, after)
            assert np.array_equal(state, before) or np.array_equal(state, after), stand_in.failed
    assert failed > 1


@pytest.mark.parametrize("result", [NOT_READY, OUT_OF_HOST_MEMORY], ids=["early", "memory"])
def test_waits_that_poll(result: int, stand_in: VulkanStandIn, models: dict[str, Model]) -> None:
    """As on a graphics card."""
    model = models["stateful"]
    with open_context() as context, model.load(context) as program:
        context.device.queue.state.poll = 60.0
        fail_next(program, model, stand_in, "vkGetFenceStatus", result)
        program.reset_state()
        if result == OUT_OF_HOST_MEMORY:
            with pytest.raises(OutOfDeviceMemoryError):
                program.forward(model.inputs[0])
            program.reset_state()
        model.check(program)
        assert stand_in.failed == "vkGetFenceStatus"
        context.device.queue.state.poll = 0.0  # a poll that is not long enough
        program.reset_state()
        model.check(program)


def test_timestamps_that_are_not_ready(stand_in: VulkanStandIn) -> None:
    with open_context() as context:
        device = context.device
        times, pool = api.TimestampPool(device, 1), api.CommandPool(device)
        commands = pool.buffer()
        commands.begin()
        commands.reset_queries(times)
        commands.write_timestamp(times, 0)
        commands.end()
        device.queue.run(commands)
        stand_in.fail(0, NOT_READY)
        with pytest.raises(DeviceError, match="not all written"):
            times.read()
        assert stand_in.failed == "vkGetQueryPoolResults"
        assert times.read() == [0.0]
        del commands
        pool.destroy()
        times.destroy()


def test_pipelines_that_are_added_while_a_cache_is_read(
    stand_in: VulkanStandIn, models: dict[str, Model]
) -> None:
    with open_context() as context, models["static"].load(context):
        cache = context.kernels._driver_cache
        assert cache is not None
        data = cache.get_data()
        assert len(data) >= 32
        stand_in.fail(1, INCOMPLETE)  # the second call, which is not for the size
        assert cache.get_data() == data
        assert stand_in.failed == "vkGetPipelineCacheData"


def test_states_wait_for_a_call_that_was_given_up(
    stand_in: VulkanStandIn, models: dict[str, Model]
) -> None:
    """The device goes on after a wait has failed. What the host writes must come after that."""
    model = models["stateful"]
    with open_context() as context, model.load(context) as program:
        model.check(program)
        program.reset_state()
        for use in (
            lambda: program.reset_state(),
            lambda: program.state.update({"total": np.arange(7, dtype=np.float32)}),
        ):
            fail_next(program, model, stand_in, "vkWaitForFences", OUT_OF_HOST_MEMORY)
            with pytest.raises(OutOfDeviceMemoryError):
                program.forward(model.inputs[0])
            stand_in.fail()
            use()
            assert stand_in.calls[0] in ("vkWaitForFences", "vkGetFenceStatus")
            model.check(program)
            program.reset_state()


def test_a_call_that_was_given_up_keeps_nothing(
    stand_in: VulkanStandIn, models: dict[str, Model]
) -> None:
    """Nobody waits for it once its program is closed; the next submission lets go of it."""
    model = models["static"]
    with open_context() as context:
        with model.load(context) as program:
            fail_next(program, model, stand_in, "vkWaitForFences", OUT_OF_HOST_MEMORY)
            with pytest.raises(OutOfDeviceMemoryError):
                program.forward(model.inputs[0])
        del program
        with model.load(context) as program:
            model.check(program)
        del program
        gc.collect()
        assert not context.device.queue.state.pending
        assert context.device.live_objects().keys() <= {"PipelineCache"}


@pytest.mark.parametrize("stand_in", ["discrete", "integrated"], indirect=True)
def test_tensors_are_read_together(
    stand_in: VulkanStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one submission for as many as fit into a buffer."""
    sizes = {"a": 4, "b": 600, "c": 100, "d": 260}
    contents = {
        key: bytes(range(size % 251)) * (size // (size % 251)) for key, size in sizes.items()
    }
    with open_context() as context:
        store = DeviceStore(context.device, "weights")
        store.add([(key, len(data), memoryview(data)) for key, data in contents.items()])
        monkeypatch.setattr("purevk.graph.memory._CHUNK", 1300)
        stand_in.fail()
        items = [(key, len(contents[key])) for key in "cabd"]
        assert store.read_all(items) == [contents[key] for key in "cabd"]
        submitted = stand_in.calls.count("vkQueueSubmit")
        assert submitted == (0 if store.ranges["a"].buffer.mapped else 2)
        assert store.read_all([]) == []
        store.close()


@pytest.mark.parametrize("stand_in", ["discrete"], indirect=True)
@pytest.mark.parametrize("name", ["vkCreateBuffer", "vkFlushMappedMemoryRanges", "vkQueueSubmit"])
@pytest.mark.parametrize("is_staged", [True, False])
def test_what_could_not_be_filled_has_no_memory(
    is_staged: bool, name: str, stand_in: VulkanStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next lowering would take it as it is."""
    if is_staged:
        monkeypatch.setattr("purevk.graph.memory._FEW_BYTES", 0)
    elif name == "vkFlushMappedMemoryRanges":
        pytest.skip("commands hold the bytes")
    data = memoryview(bytes(range(64)))
    with open_context() as context:
        store = DeviceStore(context.device, "weights")
        store.add([("kept", 64, data)])
        stand_in.fail()
        store.add([("first", 64, data)])
        before = store.nbytes
        stand_in.fail(stand_in.calls.index(name), OUT_OF_HOST_MEMORY)
        with pytest.raises(OutOfDeviceMemoryError):
            store.add([("second", 64, data), ("kept", 64, data)])
        assert store.ranges.keys() == {"kept", "first"} and store.nbytes == before
        store.add([("second", 64, data)])
        for key in ("kept", "first", "second"):
            assert store.read(key, 64) == data
        store.close()


def test_the_default_context_is_another_one_after_a_loss(
    stand_in: VulkanStandIn, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "_default", None)
    model = models["static"]
    with model.load(None) as program:
        lost = program.context
        fail_next(program, model, stand_in, "vkQueueSubmit", DEVICE_LOST)
        with pytest.raises(DeviceLostError):
            program.forward(model.inputs[0])
        stand_in.fail()
        with model.load(None) as other:
            assert lost.lost and other.context is not lost and not other.context.lost
            model.check(other)
            other.context.close()
    lost.close()
    contexts._default = None  # `monkeypatch` would keep it
