"""Objects are counted, released in order, and refuse to be used afterwards; buffers and memory."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from purevk import api
from purevk.api import MemoryKind
from purevk.api.physical import DEVICE_LOCAL, HOST_COHERENT
from purevk.errors import DeviceError, InputError, OutOfDeviceMemoryError

pytestmark = pytest.mark.device


def make_one_of_each(device: api.Device, spirv: bytes) -> list[object]:
    buffer = api.Buffer(device, 256)
    cache = api.PipelineCache(device)
    module = api.ShaderModule(device, spirv)
    pipeline = api.ComputePipeline(device, module, 1, cache=cache)
    arena = api.DescriptorArena(device)
    arena.make([(pipeline.layout, [(buffer, 0, None)])])
    pool = api.CommandPool(device)
    return [
        buffer,
        cache,
        module,
        pipeline,
        arena,
        pool,
        pool.buffer(),
        api.TimestampPool(device, 2),
    ]


ONE_OF_EACH = {
    "Buffer": 1,
    "PipelineCache": 1,
    "ShaderModule": 1,
    "ComputePipeline": 1,
    "PipelineLayout": 1,
    "DescriptorArena": 1,
    "CommandPool": 1,
    "CommandBuffer": 1,
    "TimestampPool": 1,
}


def test_garbage_collection_releases(device: api.Device, increment_spirv: bytes) -> None:
    made = make_one_of_each(device, increment_spirv)
    assert device.live_objects() == ONE_OF_EACH
    del made
    gc.collect()
    assert device.live_objects() == {}


@pytest.mark.parametrize("order", [1, -1])
def test_destroy_in_any_order_and_twice(
    device: api.Device, increment_spirv: bytes, order: int
) -> None:
    made = make_one_of_each(device, increment_spirv)[::order]
    for thing in made * 2:
        thing.destroy()
        assert not thing.alive
    del made, thing
    gc.collect()
    assert device.live_objects() == {}


def test_close_releases_what_is_left(instance: api.Instance, increment_spirv: bytes) -> None:
    device = api.Device(instance.pick())
    made = make_one_of_each(device, increment_spirv)
    device.close()  # the validation layer would name each object that is left
    device.close()
    assert device.closed
    assert device.live_objects() == {}
    assert not any(thing.alive for thing in made)
    for thing in made:
        thing.destroy()


def test_nothing_works_on_a_closed_device(instance: api.Instance, increment_spirv: bytes) -> None:
    device = api.Device(instance.pick())
    buffer, cache, _, pipeline, arena, pool, commands, _ = make_one_of_each(device, increment_spirv)
    device.close()
    attempts = [
        lambda: api.Buffer(device, 4),
        lambda: api.ComputePipeline(device, increment_spirv, 1),
        lambda: api.CommandPool(device),
        lambda: api.TimestampPool(device, 1),
        lambda: buffer.read(),
        lambda: cache.get_data(),
        lambda: arena.make([(pipeline.layout, [(buffer, 0, None)])]),
        lambda: pool.buffer(),
        lambda: commands.begin(),
        lambda: device.queue.submit(commands),
    ]
    for attempt in attempts:
        with pytest.raises(DeviceError, match="closed|destroyed"):
            attempt()


def test_no_driver_is_asked_with_a_destroyed_handle() -> None:
    asked: list[object] = []
    instance = api.Instance()
    physical = instance.pick()
    device = api.Device(physical)
    for functions in (instance.functions, device.functions):
        asks = functions._get_address
        functions._get_address = lambda *args, asks=asks: (asked.append(args), asks(*args))[1]
    assert device.functions.vkGetFenceStatus  # found before the device is closed
    device.close()
    instance.close()
    asked.clear()
    attempts = [
        lambda: device.functions.vkGetFenceStatus,
        lambda: device.functions.vkDeviceWaitIdle,
        lambda: device.functions.has("vkDeviceWaitIdle"),
        lambda: instance.functions.vkCreateDevice,
        lambda: instance.functions.has("vkCreateDevice"),
        lambda: api.Device(physical),
    ]
    for attempt in attempts:
        with pytest.raises(DeviceError, match="closed"):
            attempt()
    assert asked == []


def test_an_instance_closes_its_devices(increment_spirv: bytes) -> None:
    instance = api.Instance(validation=True)
    device = api.Device(instance.pick())
    made = make_one_of_each(device, increment_spirv)
    instance.close()
    assert device.closed
    assert not made[0].alive
    instance.check()


def test_an_error_inside_a_context_is_not_covered(instance: api.Instance) -> None:
    with pytest.raises(ZeroDivisionError):
        with api.Device(instance.pick()) as device:
            api.Buffer(device, 4)
            1 // 0
    assert device.closed


@pytest.mark.parametrize(
    "last", ["pass", "del device", "instance.close()", "device.close()", "import sys; sys.exit(0)"]
)
def test_the_interpreter_exits_cleanly(last: str) -> None:
    program = f"""
from purevk import api
instance = api.Instance(validation=True)
device = api.Device(instance.pick())
buffer = api.Buffer(device, 1 << 20)
pool = api.CommandPool(device)
commands = pool.buffer()
commands.begin(); commands.fill_buffer(buffer, 0, 1 << 20); commands.end()
submission = device.queue.submit(commands)
loop = [device, buffer]; loop.append(loop)
{last}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_failed_constructor_leaves_nothing(
    device: api.Device, increment_spirv: bytes, monkeypatch
) -> None:
    def refuse(*arguments: object) -> int:
        return -2  # VK_ERROR_OUT_OF_DEVICE_MEMORY

    for name, make in (
        ("vkBindBufferMemory", lambda: api.Buffer(device, 256)),
        ("vkAllocateMemory", lambda: api.Buffer(device, 256)),
        ("vkCreatePipelineLayout", lambda: api.PipelineLayout.shared(device, 2)),
        ("vkCreateComputePipelines", lambda: api.ComputePipeline(device, increment_spirv, 1)),
        ("vkAllocateCommandBuffers", lambda: api.CommandPool(device).buffer()),
        ("vkCreateQueryPool", lambda: api.TimestampPool(device, 1)),
    ):
        getattr(device.functions, name)
        device.allocator.trim()
        with monkeypatch.context() as patch:
            patch.setattr(device.functions, name, refuse)
            with pytest.raises(OutOfDeviceMemoryError):
                make()
        gc.collect()
        assert device.live_objects() == {}, name
        assert device.allocator.stats().used == 0


def test_threads_make_pipelines_at_once(device: api.Device, scale_spirv: bytes) -> None:
    made: list[api.ComputePipeline] = []

    def work(first: int) -> None:
        for number in range(first, first + 8):
            made.append(
                api.ComputePipeline(
                    device, scale_spirv, 2, specialization={0: 64, 1: float(number)}
                )
            )

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert device.live_objects() == {"ComputePipeline": 16, "PipelineLayout": 1}
    assert len({id(pipeline.layout) for pipeline in made}) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_pipelines_in_a_batch(
    device: api.Device, scale_spirv: bytes, increment_spirv: bytes, threads: int
) -> None:
    specs = [
        api.PipelineSpec(scale_spirv, 2, specialization={0: 64}, label=f"scale {i}")
        for i in range(5)
    ]
    specs.append(api.PipelineSpec(increment_spirv, 1, label="increment"))
    seen: list[int] = []
    made = api.create_pipelines(device, specs, threads=threads, progress=seen.append)
    assert [pipeline.label for pipeline in made] == [spec.label for spec in specs]
    assert sorted(seen) == [1, 2, 3, 4, 5, 6]
    assert api.create_pipelines(device, []) == []
    del made
    bad = [*specs, api.PipelineSpec(b"not a module", 1), *specs]
    with pytest.raises(InputError, match="SPIR-V"):
        api.create_pipelines(device, bad, threads=threads)
    gc.collect()
    assert device.live_objects() == {}


def test_pipeline_cache_round_trip(device: api.Device, increment_spirv: bytes) -> None:
    cache = api.PipelineCache(device)
    assert not cache.accepted
    api.ComputePipeline(device, increment_spirv, 1, cache=cache)
    data = cache.get_data()
    assert len(data) >= 32
    assert api.PipelineCache(device, data).accepted
    for other in (b"", b"x" * 10, data[:31], bytes(64), data[:16] + bytes(16) + data[32:]):
        assert not api.PipelineCache(device, other).accepted
    again = api.PipelineCache(device, data)
    api.ComputePipeline(device, increment_spirv, 1, cache=again)
    assert again.get_data()[:32] == data[:32]


@pytest.mark.parametrize("kind", list(MemoryKind))
def test_host_bytes(device: api.Device, kind: MemoryKind) -> None:
    buffer = api.Buffer(device, 1001, kind, label="bytes")
    if not buffer.mapped:
        with pytest.raises(DeviceError, match="host cannot reach"):
            buffer.read()
        return
    data = np.random.default_rng(0).integers(0, 256, 1001, np.uint8)
    buffer.write(0, data)
    assert buffer.read() == data.tobytes()
    assert buffer.read(17, 5) == data[17:22].tobytes()
    buffer.write(1000, b"!")
    assert buffer.read(1000) == b"!"
    array = np.frombuffer(buffer.view(), np.uint8)
    array[3:7] = 9
    buffer.flush()
    assert buffer.read(2, 6)[1:5] == b"\x09" * 4
    assert buffer.read(5, 0) == b""
    buffer.write(1001, b"")
    for offset, size in ((-1, 2), (0, 1002), (1001, 1)):
        with pytest.raises(InputError, match="1001 bytes"):
            buffer.read(offset, size)
        with pytest.raises(InputError, match="1001 bytes"):
            buffer.view(offset, size)
    with pytest.raises(InputError, match="1001 bytes"):
        buffer.write(1000, b"12")


def test_buffers_need_bytes(device: api.Device) -> None:
    with pytest.raises(InputError, match="0 bytes"):
        api.Buffer(device, 0)


def test_buffers_share_blocks_and_do_not_overlap(device: api.Device) -> None:
    sizes = np.random.default_rng(1).integers(1, 200_000, 60).tolist()
    buffers = [api.Buffer(device, size) for size in sizes]
    del buffers[::3]
    gc.collect()
    buffers += [api.Buffer(device, size) for size in sizes[:10]]
    ranges: dict[int, list[tuple[int, int]]] = {}
    for buffer in buffers:
        allocation = buffer.allocation
        ranges.setdefault(id(allocation.block), []).append((allocation.offset, allocation.size))
        assert allocation.offset + allocation.size <= allocation.block.size
    assert len(ranges) < 3
    for spans in ranges.values():
        spans.sort()
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
    stats = device.allocator.stats()
    assert stats.allocations == len(buffers)
    assert sum(buffer.nbytes for buffer in buffers) <= stats.used <= stats.reserved <= stats.peak
    buffers.clear()
    del buffer
    gc.collect()
    assert device.allocator.stats().used == 0
    device.allocator.trim()
    assert device.allocator.stats().reserved == 0


def test_a_large_buffer_gets_its_own_block(device: api.Device) -> None:
    small, large = api.Buffer(device, 64), api.Buffer(device, 80 << 20)
    assert large.allocation.block.dedicated
    assert small.allocation.block is not large.allocation.block
    before = device.allocator.stats().reserved
    large.destroy()
    assert before - device.allocator.stats().reserved >= 80 << 20


def test_out_of_memory_says_how_much(device: api.Device) -> None:
    heap = max(device.physical.heaps, key=lambda heap: heap.size)
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        api.Buffer(device, heap.size + 4096)
    assert f"{(heap.size + 4096) / 2**20:.1f} MiB" in str(caught.value)
    # lavapipe of Mesa 25 has a heap that is larger than a buffer may be.
    limit = device.limits.max_buffer_size
    assert ("heap" if heap.size + 4096 <= limit else "one buffer may have") in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert device.live_objects() == {}


def test_a_buffer_beyond_the_limit_of_the_device_says_so(
    device: api.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is not asked: vkCreateBuffer does not allow such a size."""
    assert device.limits.max_buffer_size >= 1 << 30  # what Vulkan 1.3 guarantees
    limits = replace(device.limits, max_buffer_size=1 << 20)
    monkeypatch.setattr(device, "limits", limits)
    api.Buffer(device, 1 << 20).destroy()
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        api.Buffer(device, (1 << 20) + 1, label="weights")
    assert "one buffer may have 1.0 MiB" in str(caught.value)
    assert "weights" in str(caught.value)
    assert device.live_objects() == {}


def test_memory_that_is_not_coherent(
    instance: api.Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flushes and invalidates cover the bytes in whole atoms; the validation layer checks their
    ranges."""
    physical = instance.pick()
    types = tuple(
        replace(kind, flags=kind.flags & ~HOST_COHERENT) for kind in physical.memory_types
    )
    monkeypatch.setattr(physical, "memory_types", types)
    calls = []
    with api.Device(physical) as device:
        for name in ("vkFlushMappedMemoryRanges", "vkInvalidateMappedMemoryRanges"):
            call = getattr(device.functions, name)
            monkeypatch.setattr(
                device.functions,
                name,
                lambda *a, call=call, name=name: (calls.append(name), call(*a))[1],
            )
        buffers = [api.Buffer(device, size, MemoryKind.READBACK) for size in (1, 100, 40 << 20)]
        for buffer in buffers:
            buffer.write(0, b"x")
            assert buffer.read(0, 1) == b"x"
            assert buffer.allocation.offset % device.limits.non_coherent_atom == 0
        ends = [
            buffer.allocation.offset + device.limits.non_coherent_atom for buffer in buffers[:2]
        ]
        assert ends[0] <= buffers[1].allocation.offset, "two buffers share an atom"
    assert calls == ["vkFlushMappedMemoryRanges", "vkInvalidateMappedMemoryRanges"] * 3


def test_a_device_whose_memory_the_host_cannot_reach(
    instance: api.Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    physical = instance.pick()
    types = tuple(replace(kind, flags=kind.flags & DEVICE_LOCAL) for kind in physical.memory_types)
    monkeypatch.setattr(physical, "memory_types", types)
    with api.Device(physical) as device:
        assert not device.is_unified
        buffer = api.Buffer(device, 64)
        assert not buffer.mapped
        for attempt in (buffer.view, buffer.read, lambda: buffer.write(0, b"x")):
            with pytest.raises(DeviceError, match="host cannot reach"):
                attempt()
        with pytest.raises(DeviceError, match="no memory of kind UPLOAD"):
            api.Buffer(device, 64, MemoryKind.UPLOAD)
        assert device.live_objects() == {"Buffer": 1}


def test_device_addresses(device: api.Device) -> None:
    if not device.features.buffer_device_address:
        return
    buffer = api.Buffer(device, 64, usage=api.Usage.DEFAULT | api.Usage.ADDRESS)
    assert buffer.address > 0
    with pytest.raises(DeviceError, match="no address"):
        api.Buffer(device, 64).address
