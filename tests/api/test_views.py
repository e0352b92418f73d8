"""Views of buffers as uniform texel buffers: their limits, and what kernels read through them."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

from purevk import api
from purevk.api import Access, MemoryKind
from purevk.errors import DeviceError, InputError, OutOfDeviceMemoryError

pytestmark = pytest.mark.device

USAGE = api.Usage.DEFAULT | api.Usage.TEXEL
# b[i] += x of element i of the first view + element i of the second, lane by lane.
SUM = """#version 450
layout(local_size_x = 64) in;
layout(binding = 0) uniform %s first;
layout(binding = 1) buffer B { vec4 b[]; };
layout(binding = 2) uniform %s second;
layout(push_constant) uniform P { uint n; };
void main() {
    int i = int(gl_GlobalInvocationID.x);
    if (i < n) b[i] += vec4(texelFetch(first, i)) + vec4(texelFetch(second, i));
}
"""


def texels(format: str, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Elements in memory, and as a shader sees them: four floats, missing lanes (0, 0, 0, 1)."""
    lanes = len(format.rstrip("0123456789fui"))
    if format.endswith("f"):
        dtype = np.float16 if "16" in format else np.float32
        data = rng.standard_normal((count, lanes)).astype(dtype)
    else:
        bits = int(format.strip("rgbaui"))
        data = rng.integers(0, min(2**bits, 2**20), (count, lanes)).astype(f"u{bits // 8}")
    seen = np.tile(np.array([0, 0, 0, 1], np.float32), (count, 1))
    seen[:, :lanes] = data
    return data, seen


def view_of(device: api.Device, format: str, data: np.ndarray, skip: int) -> api.BufferView:
    buffer = api.Buffer(device, skip + data.nbytes, MemoryKind.UPLOAD, USAGE)
    buffer.write(0, b"\x7f" * skip)
    buffer.write(skip, data)
    return api.BufferView(buffer, format, skip)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("rgba32f", "r32f"),
        ("rgba16f", "r16f"),
        ("r8ui", "rgba32f"),
        ("r16ui", "rg16f"),
        ("rgba8ui", "r32ui"),
    ],
)
def test_kernels_read_views(device: api.Device, compile_glsl, first: str, second: str) -> None:
    n, rng = 101, np.random.default_rng(3)
    skip = max(256, device.limits.min_texel_buffer_alignment)
    (left, a), (right, b) = texels(first, n, rng), texels(second, n, rng)
    views = view_of(device, first, left, skip), view_of(device, second, right, 0)
    assert [view.elements for view in views] == [n, n]
    names = tuple(
        "usamplerBuffer" if form.endswith("ui") else "samplerBuffer" for form in (first, second)
    )
    pipeline = api.ComputePipeline(
        device, compile_glsl(SUM % names), ("texel", "storage", "texel"), push_bytes=4
    )
    target = api.Buffer(device, 16 * n, MemoryKind.READBACK)
    target.write(0, bytes(16 * n))
    arena, pool = api.DescriptorArena(device), api.CommandPool(device)
    sets = arena.make([(pipeline.layout, [views[0], (target, 0, None), views[1]])] * 2)
    commands = pool.buffer()
    commands.begin()
    for one in sets:
        commands.record_dispatch(pipeline, one, n.to_bytes(4, "little"), 4, 2)
        commands.barrier(Access.COMPUTE, Access.COMPUTE | Access.HOST)
    commands.end()
    device.queue.run(commands)
    np.testing.assert_allclose(
        np.frombuffer(target.read(), np.float32).reshape(n, 4), 2 * (a + b), rtol=1e-6
    )


def test_a_kernel_reads_what_another_wrote(
    device: api.Device, scale_spirv: bytes, compile_glsl
) -> None:
    """The barrier between two dispatches covers reads through a view; the validation layer checks
    it too."""
    n = 64
    source = api.Buffer(device, 16 * n, MemoryKind.UPLOAD)
    middle = api.Buffer(device, 16 * n, usage=USAGE)
    target = api.Buffer(device, 16 * n, MemoryKind.READBACK)
    values = np.arange(4 * n, dtype=np.float32)
    source.write(0, values)
    target.write(0, bytes(16 * n))
    scale = api.ComputePipeline(device, scale_spirv, 2, specialization={0: 64, 1: 3.0})
    add = api.ComputePipeline(
        device,
        compile_glsl(SUM % ("samplerBuffer", "samplerBuffer")),
        ["texel", "storage", "texel"],
    )
    view = api.BufferView(middle, "rgba32f")
    arena = api.DescriptorArena(device)
    first, second = arena.make(
        [
            (scale.layout, [(source, 0, None), (middle, 0, None)]),
            (add.layout, [view, (target, 0, None), view]),
        ]
    )
    commands = api.CommandPool(device).buffer()
    commands.begin()
    commands.record_dispatch(scale, first, (4 * n).to_bytes(4, "little") + bytes(4), 8, 4)
    commands.barrier()
    commands.record_dispatch(add, second, n.to_bytes(4, "little"), 4, 1)
    commands.barrier(Access.COMPUTE, Access.HOST)
    commands.end()
    device.queue.run(commands)
    np.testing.assert_array_equal(np.frombuffer(target.read(), np.float32), 6 * values)


def test_sets_of_views_can_be_pointed_elsewhere(device: api.Device, compile_glsl) -> None:
    add = api.ComputePipeline(
        device,
        compile_glsl(SUM % ("samplerBuffer", "samplerBuffer")),
        ("texel", "storage", "texel"),
        push_bytes=4,
    )
    ones, twos = (
        view_of(device, "r32f", np.full((64, 1), value, np.float32), 0) for value in (1, 2)
    )
    targets = [api.Buffer(device, 1024, MemoryKind.READBACK) for _ in range(2)]
    for target in targets:
        target.write(0, bytes(1024))
    arena = api.DescriptorArena(device)
    (one,) = arena.make([(add.layout, [ones, (targets[0], 0, None), ones])])
    arena.update([(one, [ones, (targets[1], 0, None), twos])])
    commands = api.CommandPool(device).buffer()
    commands.begin()
    commands.record_dispatch(add, one, (64).to_bytes(4, "little"), 4, 1)
    commands.barrier(Access.COMPUTE, Access.HOST)
    commands.end()
    device.queue.run(commands)
    assert not any(targets[0].read())
    assert (
        np.frombuffer(targets[1].read(), np.float32).reshape(64, 4).tolist() == [[3, 0, 0, 2]] * 64
    )


def test_layouts_are_shared_by_kinds(device: api.Device) -> None:
    plain = api.PipelineLayout.shared(device, 2)
    assert plain is api.PipelineLayout.shared(device, ["storage", "storage"])
    mixed = api.PipelineLayout.shared(device, ("storage", "texel"))
    assert mixed is not plain
    assert mixed is not api.PipelineLayout.shared(device, ("texel", "storage"))
    with pytest.raises(InputError, match="'image'"):
        api.PipelineLayout.shared(device, ("storage", "image"))
    with pytest.raises(DeviceError, match="buffers"):
        api.PipelineLayout.shared(
            device, ("texel",) * (device.limits.max_texel_buffers_per_stage + 1)
        )


def test_bindings_must_be_of_the_kinds_of_the_layout(device: api.Device) -> None:
    buffer = api.Buffer(device, 256, usage=USAGE)
    view, part = api.BufferView(buffer, "rgba32f"), (buffer, 0, None)
    plain, mixed = (
        api.PipelineLayout.shared(device, 1),
        api.PipelineLayout.shared(device, ("texel", "storage")),
    )
    arena = api.DescriptorArena(device)
    for layout, bindings in (
        (plain, [view]),
        (mixed, [part, view]),
        (mixed, [part, part]),
        (mixed, [view]),
        (mixed, [view, view]),
    ):
        with pytest.raises(InputError, match="do not fit the layout"):
            arena.make([(layout, bindings)])
    arena.make([(mixed, [view, part]), (plain, [part])])


def test_ranges_of_views(device: api.Device) -> None:
    step = device.limits.min_texel_buffer_alignment
    buffer = api.Buffer(device, 2 * step + 23, usage=USAGE)
    whole = api.BufferView(buffer, "rgba32f")
    assert (whole.offset, whole.elements) == (0, (2 * step + 23) // 16)
    part = api.BufferView(buffer, "r16f", step, 6)
    assert (part.offset, part.elements, part.nbytes) == (step, 3, 6)
    for offset, nbytes in ((1, 16), (-step, 16), (0, 2 * step + 24), (4 * step, None)):
        with pytest.raises(InputError, match="cannot be viewed"):
            api.BufferView(buffer, "r8ui", offset, nbytes)
    for nbytes in (0, 8, 17):
        with pytest.raises(InputError, match="whole elements"):
            api.BufferView(buffer, "rgba32f", 0, nbytes)
    with pytest.raises(InputError, match="'rgb32f'"):
        api.BufferView(buffer, "rgb32f")
    with pytest.raises(DeviceError, match="Usage.TEXEL"):
        api.BufferView(api.Buffer(device, 256), "rgba32f")
    buffer.destroy()
    with pytest.raises(DeviceError, match="destroyed"):
        api.BufferView(buffer, "rgba32f")


def test_limits_of_the_device(instance: api.Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    physical = instance.pick()
    assert physical.limits.max_texel_buffer_elements >= 65536
    assert 1 <= physical.limits.min_texel_buffer_alignment <= 256
    for name in ("r8ui", "r16f", "r32f", "rgba16f", "rgba32f"):  # what every device reads
        assert physical.has_texel_format(name)
    with pytest.raises(InputError, match="'r7f'"):
        physical.has_texel_format("r7f")
    monkeypatch.setattr(physical, "limits", replace(physical.limits, max_texel_buffer_elements=5))
    monkeypatch.setattr(physical, "has_texel_format", lambda name: name != "r16f")
    with api.Device(physical) as device:
        buffer = api.Buffer(device, 256, usage=USAGE)
        assert api.BufferView(buffer, "rgba32f").elements == 5
        with pytest.raises(InputError, match="1 to 5 whole elements"):
            api.BufferView(buffer, "r32f", 0, 24)
        with pytest.raises(DeviceError, match="r16f"):
            api.BufferView(buffer, "r16f")


@pytest.mark.parametrize("order", [1, -1])
def test_views_are_counted_and_released(device: api.Device, order: int) -> None:
    buffer = api.Buffer(device, 256, usage=USAGE)
    view = api.BufferView(buffer, "r32f")
    assert device.live_objects() == {"Buffer": 1, "BufferView": 1}
    for thing in [buffer, view, view][::order]:
        thing.destroy()
    assert device.live_objects() == {}
    view = api.BufferView(api.Buffer(device, 256, usage=USAGE), "r32f")
    gc.collect()
    assert device.live_objects() == {"Buffer": 1, "BufferView": 1}, "a view keeps its buffer"
    del view, thing
    gc.collect()
    assert device.live_objects() == {}


def test_a_failed_view_leaves_nothing(device: api.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = api.Buffer(device, 256, usage=USAGE)
    device.functions.vkCreateBufferView
    monkeypatch.setattr(device.functions, "vkCreateBufferView", lambda *arguments: -2)
    with pytest.raises(OutOfDeviceMemoryError):
        api.BufferView(buffer, "r32f")
    gc.collect()
    assert device.live_objects() == {"Buffer": 1}
