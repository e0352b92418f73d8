"""Whether the fragments of a device's matrix units lie as `glsl/core/fragments.glslh` says. Vulkan does
not tell: one is tried."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from purevk import api
from purevk.errors import DeviceError, ShaderCompilerError
from purevk.graph.kernels import KernelStore
from purevk.lower.lowering import KernelSpec

TEMPLATE = "core/fragment_order.comp"
ANSWER = f"{TEMPLATE} A B"  # what the cache calls it: it names the operands that are tried
SPEC = KernelSpec(TEMPLATE, (("MATRIX_UNITS", "1"),), (), ("storage",), 32)


def fragment_order(kernels: KernelStore) -> Callable[[], bool]:
    """A question that is answered when it is first asked; the cache keeps the answer for the
    driver. Nothing holds on to the kernels' device."""
    held: weakref.ref[KernelStore] = weakref.ref(kernels)
    answers: list[bool] = []

    def ask() -> bool:
        store = held()
        if not answers and store is not None:
            kept = store.cache.get_tuning(store.device_key, ANSWER)
            if kept is None:
                try:
                    made = run_fragment(store.device, store.prepare([SPEC])[0])
                except (
                    DeviceError,
                    ShaderCompilerError,
                ):  # not kept: another driver or compiler may do it
                    return False
                kept = bool(np.array_equal(made, expected_product()))
                store.cache.put_tuning(store.device_key, ANSWER, kept)
            answers.append(bool(kept))
        return bool(answers) and answers[0]

    return ask


def expected_product() -> np.ndarray:
    """What `fragment_order.comp` multiplies: float32 [16, 8]."""
    m, k, n = np.arange(16)[:, None], np.arange(16), np.arange(8)
    return (((7 * m + 13 * k) % 17 - 8) @ ((5 * k[:, None] + 11 * n) % 19 - 9)).astype(np.float32)


def run_fragment(device: api.Device, pipeline: api.ComputePipeline) -> np.ndarray:
    """What a pipeline of that template leaves: float32 [16, 8]."""
    out = api.Buffer(device, 512, api.MemoryKind.READBACK)
    arena, pool = api.DescriptorArena(device), api.CommandPool(device)
    (descriptors,) = arena.make([(pipeline.layout, [(out, 0, None)])])
    commands = pool.buffer()
    commands.begin()
    commands.record_dispatch(pipeline, descriptors, bytes(128), 128, 1, 1, 1)
    commands.barrier(api.Access.COMPUTE, api.Access.HOST)
    commands.end()
    device.queue.run(commands)
    made: np.ndarray = np.frombuffer(out.read(0, 512), np.float32).reshape(16, 8).copy()
    for each in (pool, arena, out):
        each.destroy()
    return made
