"""Measures the limits of a device: bytes per second of a copy, and multiply-adds per second.

Measured once a device and driver, and remembered in the cache.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from purevk import api
from purevk.compiling import compile_cached
from purevk.shaders.source import CompileJob

if TYPE_CHECKING:
    from purevk.graph.context import Context

# Of elementwise/measure_copy.comp and elementwise/measure_fma.comp.
_GROUP = 128
_CHAINS = 4  # of vec4
_NAME = "device limits 1"
_ROUNDS = 10


@dataclass(frozen=True)
class DeviceLimits:
    """Measured limits.

    Attributes:
        bytes_per_second: copy bandwidth: bytes read plus bytes written, by an elementwise kernel over
            buffers larger than the caches.
        flops_per_second: float32, counting a multiply-add as two. Matrix cores are faster.
    """

    bytes_per_second: float
    flops_per_second: float


def device_limits(context: Context, again: bool = False) -> DeviceLimits:
    """The limits of a context's device, from the cache or measured now (a second or two).

    Args:
        context: the device.
        again: measure also if they are known. What was faster counts, for other work on the machine
            only slows down.
    """
    key = context.kernels.device_key
    known = _known(context.cache.get_tuning(key, _NAME))
    if known is not None and not again:
        return known
    measured = DeviceLimits(_copy_rate(context), _fma_rate(context))
    if known is not None:
        measured = faster(measured, known)
    context.cache.put_tuning(key, _NAME, asdict(measured))
    return measured


def faster(one: DeviceLimits, other: DeviceLimits) -> DeviceLimits:
    """The larger of each rate."""
    return DeviceLimits(
        max(one.bytes_per_second, other.bytes_per_second),
        max(one.flops_per_second, other.flops_per_second),
    )


def _known(value: Any) -> DeviceLimits | None:
    names = [item.name for item in fields(DeviceLimits)]
    if not isinstance(value, dict) or sorted(value) != sorted(names):
        return None
    if not all(isinstance(rate, float) and rate > 0 for rate in value.values()):
        return None
    return DeviceLimits(**value)


def _copy_rate(context: Context) -> float:
    device = context.device
    size = 32 << 20 if device.kind == "cpu" else 256 << 20
    own = sum(heap.size for heap in device.physical.heaps if heap.device_local)
    size = min(size, device.limits.max_storage_buffer_range, max(own // 8, 1 << 20)) // 16 * 16
    groups = -(-size // 16 // _GROUP)
    rows = -(-groups // 32768)
    seconds = _best(context, "copy", [size, size], size // 16, (-(-groups // rows), rows))
    return 2.0 * size / seconds


def _fma_rate(context: Context) -> float:
    cpu = context.device.kind == "cpu"
    groups, count = (256, 1024) if cpu else (4096, 4096)
    seconds = _best(context, "fma", [16 * (1 + groups * _GROUP)], count, (groups, 1))
    return 2.0 * 4 * _CHAINS * count * groups * _GROUP / seconds


def warm_up(context: Context, seconds: float) -> None:
    """Multiplies for some time. A GPU takes about a second of work to leave its idle clocks."""
    groups, count = (256, 1024) if context.device.kind == "cpu" else (4096, 4096)
    _best(context, "fma", [16 * (1 + groups * _GROUP)], count, (groups, 1), seconds)


def _best(
    context: Context,
    kernel: str,
    sizes: list[int],
    count: int,
    grid: tuple[int, int],
    seconds: float = 0.0,
) -> float:
    """Seconds of the fastest of several runs: `_ROUNDS`, or as many as fill `seconds`. By the
    device's clock if it has one."""
    device = context.device
    (spirv,) = compile_cached(
        [CompileJob.from_template(f"elementwise/measure_{kernel}.comp")], context.cache
    )
    made: list[api.DeviceObject] = []
    try:
        pipeline = api.ComputePipeline(device, spirv, len(sizes), push_bytes=4, label=kernel)
        made.append(pipeline)
        buffers = [api.Buffer(device, nbytes, label=kernel) for nbytes in sizes]
        made += buffers
        arena, pool = api.DescriptorArena(device), api.CommandPool(device)
        made += [arena, pool]
        (descriptors,) = arena.make([(pipeline.layout, [(buffer, 0, None) for buffer in buffers])])
        queries = api.TimestampPool(device, 2) if device.features.timestamp else None
        if queries is not None:
            made.append(queries)
        commands = pool.buffer(kernel)
        commands.begin()
        for buffer in buffers:
            commands.fill_buffer(buffer, 0, buffer.nbytes // 4 * 4)
        commands.end()
        device.queue.run(commands)
        commands.begin()
        if queries is not None:
            commands.reset_queries(queries)
            commands.write_timestamp(queries, 0)
        commands.record_dispatch(pipeline, descriptors, count.to_bytes(4, "little"), 4, *grid)
        if queries is not None:
            commands.write_timestamp(queries, 1)
        commands.end()
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < _ROUNDS or time.perf_counter() < end:
            start = time.perf_counter()
            device.queue.run(commands)
            elapsed = time.perf_counter() - start
            times.append(queries.read()[1] / 1e9 if queries is not None else elapsed)
        return max(min(times), 1e-9)
    finally:
        for each in reversed(made):
            each.destroy()
