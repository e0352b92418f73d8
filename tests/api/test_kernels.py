"""Kernels run and give what numpy gives."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from purevk import api, knobs
from purevk.api import Access, MemoryKind
from purevk.errors import DeviceError, DeviceLostError, InputError

pytestmark = pytest.mark.device


def scale(
    device: api.Device, spirv: bytes, values: np.ndarray, offset: float = 0.0, **constants: object
) -> np.ndarray:
    """FACTOR * values + SHIFT + offset, through upload, device and readback buffers."""
    n, nbytes = len(values), values.nbytes
    upload = api.Buffer(device, nbytes, MemoryKind.UPLOAD)
    source, result = api.Buffer(device, nbytes), api.Buffer(device, nbytes)
    download = api.Buffer(device, nbytes, MemoryKind.READBACK)
    names = {"factor": 1, "shift": 2, "negate": 3}
    specialization = {0: 64} | {names[name]: value for name, value in constants.items()}
    pipeline = api.ComputePipeline(device, spirv, 2, specialization=specialization, label="scale")
    arena = api.DescriptorArena(device)
    (one,) = arena.make([(pipeline.layout, [(source, 0, None), (result, 0, None)])])
    commands = api.CommandPool(device).buffer("scale")
    commands.begin()
    commands.copy_buffer(upload, source, nbytes)
    commands.barrier(Access.TRANSFER, Access.COMPUTE)
    commands.record_dispatch(pipeline, one, struct.pack("If", n, offset), 8, -(-n // 64))
    commands.barrier(Access.COMPUTE, Access.TRANSFER)
    commands.copy_buffer(result, download, nbytes)
    commands.barrier(Access.TRANSFER, Access.HOST)
    commands.end()
    upload.write(0, values)
    device.queue.run(commands)
    return np.frombuffer(download.read(), values.dtype)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1009, 65537])
def test_doubling(device: api.Device, scale_spirv: bytes, n: int) -> None:
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    np.testing.assert_array_equal(scale(device, scale_spirv, values, factor=2.0), values * 2)


@pytest.mark.parametrize(
    ("constants", "factor", "shift"),
    [({}, 1, 0), ({"factor": -0.5}, -0.5, 0), ({"shift": -7}, 1, -7), ({"negate": True}, -1, 0)],
)
@pytest.mark.parametrize("offset", [0.0, 3.25])
def test_constants(
    device: api.Device,
    scale_spirv: bytes,
    constants: dict,
    factor: float,
    shift: int,
    offset: float,
) -> None:
    values = np.arange(101, dtype=np.float32)
    np.testing.assert_array_equal(
        scale(device, scale_spirv, values, offset, **constants), values * factor + shift + offset
    )


def test_bad_specialization(device: api.Device, scale_spirv: bytes) -> None:
    with pytest.raises(InputError, match="does not fit 32 bits"):
        api.ComputePipeline(device, scale_spirv, 2, specialization={0: 2**32})
    with pytest.raises(InputError, match="'wide'"):
        api.ComputePipeline(device, scale_spirv, 2, specialization={0: "wide"})  # type: ignore[dict-item]


def test_not_spirv(device: api.Device) -> None:
    for code in (b"", b"\x03\x02\x23\x07", b"x" * 40, b"\x03\x02\x23\x07" + b"\0" * 17):
        with pytest.raises(InputError, match="SPIR-V"):
            api.ShaderModule(device, code)


def test_layout_limits(device: api.Device) -> None:
    with pytest.raises(DeviceError, match="push constants"):
        api.PipelineLayout.shared(device, 1, 6)
    with pytest.raises(DeviceError, match="maxPerStageDescriptorStorageBuffers"):
        api.PipelineLayout.shared(device, device.limits.max_storage_buffers_per_stage + 1)


REACH = """#version 450
layout(local_size_x = 64) in;
layout(binding = 0) buffer A { uint a[]; };
layout(binding = 1) buffer B { uint b[]; };
layout(push_constant) uniform P { uint first; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    b[i] = a[first + i];
    a[first + i] = 7u;
}
"""


def test_accesses_outside_of_a_binding(
    device: api.Device, compile_glsl: Callable[[str], bytes]
) -> None:
    """Those of a kernel that has no checks read zeros, and write nothing, neither beside the binding
    nor beyond the buffer."""
    if not device.features.robust_access2:
        pytest.skip("the device has no VK_EXT_robustness2")
    words, bound = np.arange(1, 1025, dtype=np.uint32), slice(256, 320)
    kept = api.Buffer(device, words.nbytes, MemoryKind.READBACK)
    result = api.Buffer(device, 256, MemoryKind.READBACK)
    pipeline = api.ComputePipeline(device, compile_glsl(REACH), 2, push_bytes=4, label="reach")
    arena = api.DescriptorArena(device)
    (one,) = arena.make([(pipeline.layout, [(kept, 4 * bound.start, 256), (result, 0, None)])])
    for first in (0, 32, 64, 128, 1 << 10, 1 << 16, (1 << 30) - 64, (1 << 32) - 64):
        kept.write(0, words)
        commands = api.CommandPool(device).buffer("reach")
        commands.begin()
        commands.record_dispatch(pipeline, one, struct.pack("I", first), 4, 1)
        commands.barrier(Access.COMPUTE, Access.HOST)
        commands.end()
        device.queue.run(commands)
        inside = max(64 - first, 0)
        expected = words.copy()
        expected[bound][64 - inside :] = 7
        np.testing.assert_array_equal(np.frombuffer(kept.read(), np.uint32), expected)
        read = np.zeros(64, np.uint32)
        read[:inside] = words[bound][64 - inside :]
        np.testing.assert_array_equal(np.frombuffer(result.read(), np.uint32), read)


class Counter:
    """A buffer of words, and a pipeline that adds 1 to each."""

    def __init__(self, device: api.Device, spirv: bytes, words: int = 64) -> None:
        self.buffer = api.Buffer(device, 4 * words, MemoryKind.READBACK)
        self.pipeline = api.ComputePipeline(device, spirv, 1, push_bytes=0, label="increment")
        self.arena = api.DescriptorArena(device)
        (self.set,) = self.arena.make([(self.pipeline.layout, [(self.buffer, 0, None)])])
        self.pool = api.CommandPool(device)
        self.groups = words // 64

    def values(self) -> np.ndarray:
        return np.frombuffer(self.buffer.read(), np.uint32)


def test_chain_of_barriers_and_replay(device: api.Device, increment_spirv: bytes) -> None:
    counter = Counter(device, increment_spirv, 256)
    commands = counter.pool.buffer()
    commands.begin()
    commands.fill_buffer(counter.buffer, 0, 1024, 5)
    commands.barrier(Access.TRANSFER, Access.COMPUTE)
    for _ in range(50):
        commands.record_dispatch(counter.pipeline, counter.set, None, 0, counter.groups)
        commands.barrier()
    commands.barrier(Access.COMPUTE, Access.HOST)
    commands.end()
    for _ in range(3):  # the recording starts from 5 each time
        device.queue.run(commands)
        assert (counter.values() == 55).all()


def test_push_constants_from_a_pointer(device: api.Device, spin_spirv: bytes) -> None:
    pipeline = api.ComputePipeline(device, spin_spirv, 1, push_bytes=4)
    buffer = api.Buffer(device, 256, MemoryKind.READBACK)
    arena, pool = api.DescriptorArena(device), api.CommandPool(device)
    (one,) = arena.make([(pipeline.layout, [(buffer, 0, None)])])
    pushed = api.vk.ffi.new("uint32_t[]", [3])
    commands = pool.buffer()
    commands.begin()
    commands.fill_buffer(buffer, 0, 256, 7)
    commands.barrier(Access.TRANSFER, Access.COMPUTE)
    commands.record_dispatch(pipeline, one, pushed, 4, 1)
    commands.barrier(Access.COMPUTE, Access.HOST)
    commands.end()
    device.queue.run(commands)
    expected = 7
    for _ in range(3):
        expected = (expected * 1664525 + 1013904223) % 2**32
    assert set(np.frombuffer(buffer.read(), np.uint32)) == {expected}


def test_several_command_buffers_in_one_submission(
    device: api.Device, increment_spirv: bytes
) -> None:
    counter = Counter(device, increment_spirv)
    clear, add = counter.pool.buffer(), counter.pool.buffer()
    clear.begin()
    clear.fill_buffer(counter.buffer, 0, 256)
    clear.barrier(Access.TRANSFER, Access.COMPUTE)
    clear.end()
    add.begin()
    add.record_dispatch(counter.pipeline, counter.set, None, 0, 1)
    add.barrier(Access.COMPUTE, Access.COMPUTE | Access.HOST)
    add.end()
    device.queue.run([clear, add])
    device.queue.run(add)
    assert (counter.values() == 2).all()


def test_sets_in_bulk_with_offsets(device: api.Device, increment_spirv: bytes) -> None:
    """200 sets, each another part of one buffer; set i is dispatched i % 3 times."""
    step = max(256, device.limits.min_storage_buffer_alignment)
    buffer = api.Buffer(device, step * 200, MemoryKind.READBACK)
    pipeline = api.ComputePipeline(device, increment_spirv, 1)
    arena, pool = api.DescriptorArena(device), api.CommandPool(device)
    sets = arena.make([(pipeline.layout, [(buffer, step * i, 256)]) for i in range(200)])
    commands = pool.buffer()
    commands.begin()
    commands.fill_buffer(buffer, 0, buffer.nbytes)
    for iteration in range(2):
        commands.barrier(Access.TRANSFER | Access.COMPUTE, Access.COMPUTE)
        for i, one in enumerate(sets):
            if iteration < i % 3:
                commands.record_dispatch(pipeline, one, None, 0, 1)
    commands.barrier(Access.COMPUTE, Access.HOST)
    commands.end()
    device.queue.run(commands)
    words = np.frombuffer(buffer.read(), np.uint32).reshape(200, step // 4)[:, :64]
    np.testing.assert_array_equal(words, np.repeat(np.arange(200)[:, None] % 3, 64, 1))


def test_sets_can_be_pointed_elsewhere(device: api.Device, increment_spirv: bytes) -> None:
    counter = Counter(device, increment_spirv)
    other = api.Buffer(device, 256, MemoryKind.READBACK)
    counter.buffer.write(0, bytes(256))
    other.write(0, bytes(256))
    counter.arena.update([(counter.set, [(other, 0, None)])])
    commands = counter.pool.buffer()
    commands.begin()
    commands.record_dispatch(counter.pipeline, counter.set, None, 0, 1)
    commands.barrier(Access.COMPUTE, Access.HOST)
    commands.end()
    device.queue.run(commands)
    assert (counter.values() == 0).all()
    assert np.frombuffer(other.read(), np.uint32).tolist() == [1] * 64


def test_a_kernel_without_buffers(device: api.Device, compile_glsl) -> None:
    empty = compile_glsl("#version 450\nlayout(local_size_x = 1) in;\nvoid main() {}\n")
    pipeline = api.ComputePipeline(device, empty, 0, push_bytes=0)
    arena, pool = api.DescriptorArena(device), api.CommandPool(device)
    (one,) = arena.make([(pipeline.layout, [])])
    commands = pool.buffer()
    commands.begin()
    commands.record_dispatch(pipeline, one, None, 0, 1)
    commands.end()
    device.queue.run(commands)
    assert arena.make([]) == []


class Spinner:
    """Work of any length: `record(n)` dispatches a slow kernel n times, each taking some 5 ms or
    more."""

    def __init__(self, device: api.Device, spirv: bytes) -> None:
        self.device = device
        self.pipeline = api.ComputePipeline(device, spirv, 1, push_bytes=4, label="spin")
        self.buffer = api.Buffer(device, 256)
        self.arena, self.pool = api.DescriptorArena(device), api.CommandPool(device)
        (self.set,) = self.arena.make([(self.pipeline.layout, [(self.buffer, 0, None)])])
        self.groups = 1
        self.seconds(1)  # the first dispatch compiles
        while self.seconds(1) < 0.005 and self.groups < 65535:
            self.groups = min(2 * self.groups, 65535)

    def dispatch(self, commands: api.CommandBuffer, count: int) -> None:
        for _ in range(count):
            commands.record_dispatch(
                self.pipeline, self.set, struct.pack("I", 50_000), 4, self.groups
            )
            commands.barrier()

    def record(self, count: int) -> api.CommandBuffer:
        commands = self.pool.buffer()
        commands.begin()
        self.dispatch(commands, count)
        commands.end()
        return commands

    def seconds(self, count: int) -> float:
        commands = self.record(count)
        start = time.perf_counter()
        self.device.queue.run(commands)
        return time.perf_counter() - start


def test_timestamps(device: api.Device, spin_spirv: bytes) -> None:
    spinner, times = Spinner(device, spin_spirv), api.TimestampPool(device, 3)
    commands = spinner.pool.buffer()
    commands.begin()
    commands.reset_queries(times)
    commands.write_timestamp(times, 0)
    spinner.dispatch(commands, 20)
    commands.write_timestamp(times, 1)
    spinner.dispatch(commands, 1)
    commands.write_timestamp(times, 2)
    commands.end()
    start = time.perf_counter_ns()
    device.queue.run(commands)
    elapsed = time.perf_counter_ns() - start
    first, second, third = times.read()
    assert first == 0.0
    assert second > 3 * (third - second) > 0  # 20 dispatches against 1
    assert 0.2 * elapsed < third < 1.05 * elapsed
    times.reset()
    with pytest.raises(DeviceError, match="not all written"):
        times.read()


def test_time_out(device: api.Device, spin_spirv: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that begins when the host says so: the wait gives up before that and says so. A later wait
    lets other threads run: one of them has to let the work begin."""
    if not device.features.timeline_semaphore:
        pytest.skip("the device has no timeline semaphores")
    spinner = Spinner(device, spin_spirv)
    commands = spinner.record(1)
    begin, end = api.TimelineSemaphore(device), api.TimelineSemaphore(device)
    monkeypatch.setenv(knobs.TIMEOUT.name, "0.15")
    submission = device.queue.submit(commands, ((begin, 1), (end, 1)))
    with pytest.raises(DeviceLostError, match="did not finish within 0.15 s") as raised:
        submission.wait()
    assert "PUREVK_TIMEOUT" in str(raised.value)
    assert not submission.done()
    monkeypatch.setenv(knobs.TIMEOUT.name, "60")
    thread = threading.Thread(target=submission.wait)
    thread.start()
    time.sleep(0.02)
    assert thread.is_alive(), "the wait kept the interpreter's lock, or did not wait"
    begin.signal(1)
    thread.join()
    assert submission.done() and end.value == 1


def test_nothing_in_use_is_destroyed(device: api.Device, spin_spirv: bytes) -> None:
    """What a kernel uses is destroyed by name or collected while the kernel runs. The validation
    layer would say so if it went before the kernel ended."""
    spinner = Spinner(device, spin_spirv)
    commands = spinner.record(int(1.0 / spinner.seconds(1)) + 1)
    collected = api.Buffer(device, 64)
    before = device.live_objects()
    submission = device.queue.submit(commands)
    for made in (commands, spinner.buffer, spinner.arena, spinner.pool, spinner.pipeline):
        made.destroy()
        assert not made.alive
    del collected
    assert not submission.done()
    assert device.live_objects() == before
    later = api.Buffer(device, 64)
    submission.wait(60)
    assert device.live_objects() == {"Buffer": 1, "PipelineLayout": 1}  # layouts are shared
    later.destroy()


@pytest.mark.parametrize("poll", [0.0, 1e-4, 1000.0])
def test_polling_before_sleeping(
    device: api.Device, spin_spirv: bytes, monkeypatch: pytest.MonkeyPatch, poll: float
) -> None:
    """Work of 20 ms is finished after the wait, whether the poll ends before it or not."""
    spinner = Spinner(device, spin_spirv)
    commands = spinner.record(int(0.02 / spinner.seconds(1)) + 1)
    monkeypatch.setattr(device.queue.state, "poll", poll)
    submission = device.queue.submit(commands)
    submission.wait()
    assert submission.done() and not device.queue.state.pending
