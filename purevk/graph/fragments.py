"""Whether the fragments of a device's matrix cores have the order of `glsl/core/fragments.glslh`.

Vulkan does not say which invocation holds which element, so one fragment is tried.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import numpy as np

from purevk import api
from purevk.errors import DeviceError, KernelNotCachedError, ShaderCompilerError
from purevk.graph.kernels import KernelStore
from purevk.lower.lowering import KernelSpec

TEMPLATE = "core/fragment_order.comp"
# By whether the operands are bfloat16: what is tried, and the key of the answer in the cache. A and B
# are the operands that are tried.
SPECS = {
    False: KernelSpec(TEMPLATE, (("COOPMAT", "1"),), (), ("storage",), 32),
    True: KernelSpec(TEMPLATE, (("BFLOAT16", "1"), ("COOPMAT", "1")), (), ("storage",), 32),
}
ANSWERS = {False: f"{TEMPLATE} A B", True: f"{TEMPLATE} A B bfloat16"}


def fragment_order(kernels: KernelStore, bfloat16: bool) -> Callable[[bool], bool]:
    """A function that tries a fragment of float16, or of bfloat16 if its argument is true, when it is
    first called. The cache keeps the answers for the driver. The function keeps no reference to the
    device.

    Args:
        bfloat16: whether there are fragments of bfloat16.
    """
    held: weakref.ref[KernelStore] = weakref.ref(kernels)
    answers: dict[bool, bool] = {} if bfloat16 else {True: False}

    def ask(wanted: bool) -> bool:
        store = held()
        if wanted not in answers and store is not None:
            kept = store.cache.get_tuning(store.device_key, ANSWERS[wanted])
            if kept is None:
                try:
                    made = run_fragment(store.device, store.prepare([SPECS[wanted]])[0])
                except KernelNotCachedError:
                    raise
                except (DeviceError, ShaderCompilerError):
                    return False  # not cached: another driver or compiler may work
                kept = bool(np.array_equal(made, expected_product()))
                store.cache.put_tuning(store.device_key, ANSWERS[wanted], kept)
            answers[wanted] = bool(kept)
        return answers.get(wanted, False)

    return ask


def expected_product() -> np.ndarray:
    """The expected result of `fragment_order.comp`: float32 [16, 8]."""
    m, k, n = np.arange(16)[:, None], np.arange(16), np.arange(8)
    return (((7 * m + 13 * k) % 17 - 8) @ ((5 * k[:, None] + 11 * n) % 19 - 9)).astype(np.float32)


def run_fragment(device: api.Device, pipeline: api.ComputePipeline) -> np.ndarray:
    """The result of a pipeline of this template: float32 [16, 8]."""
    with contextlib.ExitStack() as stack:
        out = api.Buffer(device, 512, api.MemoryKind.READBACK)
        stack.callback(out.destroy)
        arena = api.DescriptorArena(device)
        stack.callback(arena.destroy)
        pool = api.CommandPool(device)
        stack.callback(pool.destroy)
        (descriptors,) = arena.make([(pipeline.layout, [(out, 0, None)])])
        commands = pool.buffer()
        commands.begin()
        commands.record_dispatch(pipeline, descriptors, bytes(128), 128, 1, 1, 1)
        commands.barrier(api.Access.COMPUTE, api.Access.HOST)
        commands.end()
        device.queue.run(commands)
        made: np.ndarray = np.frombuffer(out.read(0, 512), np.float32).reshape(16, 8).copy()
        return made
