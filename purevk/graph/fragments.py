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


def spec_of(bfloat16: bool, columns: int) -> KernelSpec:
    """The kernel that tries fragments of these operands, with sums of these columns."""
    macros = (("BFLOAT16", str(int(bfloat16))), ("COOPMAT", "1"), ("FRAGMENT_N", str(columns)))
    return KernelSpec(TEMPLATE, macros, (), ("storage",), 32)


def fragment_order(kernels: KernelStore) -> Callable[[bool, int], bool]:
    """A function that tries a fragment when it is first called: of float16 or of bfloat16, by its
    first argument, with 8 or 16 columns, its second. The device must have it. The cache keeps the
    answers for the driver. The function keeps no reference to the device.
    """
    held: weakref.ref[KernelStore] = weakref.ref(kernels)
    answers: dict[tuple[bool, int], bool] = {}

    def ask(bfloat16: bool, columns: int) -> bool:
        store, wanted = held(), (bfloat16, columns)
        if wanted not in answers and store is not None:
            answer = f"{TEMPLATE} A B{' bfloat16' * bfloat16}{' 16' * (columns == 16)}"
            kept = store.cache.get_tuning(store.device_key, answer)
            if kept is None:
                spec = spec_of(bfloat16, columns)
                try:
                    made = run_fragment(store.device, store.prepare([spec])[0], columns)
                except KernelNotCachedError:
                    raise
                except (DeviceError, ShaderCompilerError):
                    return False  # not cached: another driver or compiler may work
                kept = bool(np.array_equal(made, expected_product(columns)))
                store.cache.put_tuning(store.device_key, answer, kept)
            answers[wanted] = bool(kept)
        return answers.get(wanted, False)

    return ask


def expected_product(columns: int = 8) -> np.ndarray:
    """The expected result of `fragment_order.comp`: float32 [16, columns]."""
    m, k, n = np.arange(16)[:, None], np.arange(16), np.arange(columns)
    return (((7 * m + 13 * k) % 17 - 8) @ ((5 * k[:, None] + 11 * n) % 19 - 9)).astype(np.float32)


def run_fragment(device: api.Device, pipeline: api.ComputePipeline, columns: int = 8) -> np.ndarray:
    """The result of a pipeline of this template: float32 [16, columns]."""
    size = 64 * columns
    with contextlib.ExitStack() as stack:
        out = api.Buffer(device, size, api.MemoryKind.READBACK)
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
        made: np.ndarray = np.frombuffer(out.read(0, size), np.float32).reshape(16, columns).copy()
        return made
