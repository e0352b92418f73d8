"""Whether the fragments of a device's matrix cores have the order of `glsl/core/fragments.glslh`.

Vulkan does not say which invocation holds which element, so one fragment is tried.
"""

from __future__ import annotations

import contextlib
import weakref

import numpy as np

from purevk import api
from purevk.dtypes import DType
from purevk.errors import DeviceError, KernelNotCachedError, ShaderCompilerError
from purevk.graph.kernels import KernelStore
from purevk.lower.lowering import KernelSpec

TEMPLATE = "core/fragment_order.comp"


# Macros of the operands that are tried.
_OPERANDS = {DType.float16: (), DType.bfloat16: (("BFLOAT16", "1"),), DType.int8: (("BYTES", "1"),)}


def spec_of(dtype: DType, columns: int) -> KernelSpec:
    """The kernel that tries fragments of operands of a dtype, with sums of so many columns."""
    macros = (*_OPERANDS[dtype], ("COOPMAT", "1"), ("FRAGMENT_N", str(columns)))
    return KernelSpec(TEMPLATE, macros, (), ("storage",), 32)


def trial_of(spec: KernelSpec) -> KernelSpec | None:
    """The kernel that tried the fragments of a kernel; None if that need not know their order."""
    macros = dict(spec.macros)
    bfloat16 = macros.get("BFLOAT16") == "1" or macros.get("T_B") == DType.bfloat16.glsl
    half = DType.bfloat16 if bfloat16 else DType.float16
    dtype = {
        "attention/attention_coopmat.comp": half,
        "conv/conv2d_fragments.comp": half,
        "matmul/matmul_dot_blocks.comp": half,
        "matmul/matmul_fragments.comp": half,
        "quantized/qdot_coopmat.comp": DType.float16,
        "quantized/qmatmul_coopmat.comp": DType.float16,
        "quantized/qmatmul_int.comp": DType.int8 if macros.get("FRAGMENTS") == "1" else None,
        "quantized/qconv2d.comp": DType.int8 if macros.get("FRAGMENTS") == "1" else None,
    }.get(spec.template)
    columns = 16 if spec.template.endswith(("_fragments.comp", "_blocks.comp")) else 8
    return None if dtype is None else spec_of(dtype, int(macros.get("FRAGMENT_N", columns)))


class FragmentOrder:
    """Tries a fragment when it is first asked, by the dtype of the operands and the columns of the
    sums, 8 or 16. The device must have it. The cache keeps the answers for the driver. It keeps no
    reference to the device.

    Attributes:
        settled: False once a fragment could not be tried, which counts as no and is not cached.
    """

    def __init__(self, kernels: KernelStore) -> None:
        self._kernels: weakref.ref[KernelStore] = weakref.ref(kernels)
        self._answers: dict[tuple[DType, int], bool] = {}
        self.settled = True

    def __call__(self, dtype: DType, columns: int) -> bool:
        store, wanted = self._kernels(), (dtype, columns)
        if wanted not in self._answers and store is not None:
            answer = f"{TEMPLATE} {dtype.name} {columns}, both operands"
            kept = store.cache.get_tuning(store.device_key, answer)
            if kept is None:
                try:
                    made = run_fragment(
                        store.device, store.prepare([spec_of(dtype, columns)])[0], columns
                    )
                except KernelNotCachedError:
                    raise
                except (DeviceError, ShaderCompilerError):
                    self.settled = False
                    return False  # not cached: another driver or compiler may work
                kept = bool(np.array_equal(made, expected_product(dtype, columns)))
                store.cache.put_tuning(store.device_key, answer, kept)
            self._answers[wanted] = bool(kept)
        return self._answers.get(wanted, False)


def expected_product(dtype: DType = DType.float16, columns: int = 8) -> np.ndarray:
    """The expected result of `fragment_order.comp`: float32 [16, columns]."""
    depth = 32 if dtype is DType.int8 else 16
    m, k, n = np.arange(16)[:, None], np.arange(depth), np.arange(columns)
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
