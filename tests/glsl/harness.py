"""Runs one kernel template on a device, with the validation layer on and sentinels around the
outputs."""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from purevk import api
from purevk.errors import KernelInterfaceError
from purevk.shaders import shaderc
from purevk.shaders.templates import template_interface

SENTINEL = 0xC5
PUSH_WORDS = 32
GLSL = {
    np.float32: "float",
    np.float16: "float16_t",
    np.int32: "int",
    np.int8: "int8_t",
    np.uint8: "uint8_t",
    np.int64: "int64_t",
}
"""The type of GLSL that has the elements of a dtype."""
_VALIDATOR = shutil.which("spirv-val")


@dataclass
class Out:
    """A buffer that the kernel writes: `shape` elements of `dtype` from element `offset` on, 4096
    bytes after them."""

    shape: tuple[int, ...]
    dtype: np.dtype | type
    offset: int = 0

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def bits(value: float) -> int:
    """A float as the integer that an integer parameter carries it in."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def strides_of(array: np.ndarray) -> list[int]:
    """The strides of an array in elements."""
    return [stride // array.itemsize for stride in array.strides]


def flat_grid(groups: int) -> tuple[int, int, int]:
    """The grid of `groups` workgroups, of which x holds at most 65535."""
    groups = max(groups, 1)
    return min(groups, 65535), -(-groups // 65535), 1


@functools.cache
def device() -> api.Device:
    """The device of the tests, for the whole process; with the validation layer unless
    PUREVK_VALIDATION=0."""
    return api.open_device(validation=os.environ.get("PUREVK_VALIDATION") != "0")


@functools.cache
def _spirv(template: str, macros: tuple[tuple[str, str], ...]) -> bytes:
    (code,) = shaderc.compile_many(
        [shaderc.CompileJob.from_template(template, dict(macros))], threads=1
    )
    if _VALIDATOR:
        command = [_VALIDATOR, "--target-env", "vulkan1.1", "-"]
        checked = subprocess.run(command, input=code, capture_output=True, check=False)
        if checked.returncode:
            raise AssertionError(
                f"{template} {dict(macros)}: {(checked.stdout + checked.stderr).decode()}"
            )
    return code


def compile_template(template: str, macros: Mapping[str, object]) -> bytes:
    """SPIR-V of a template, checked by spirv-val where that is installed."""
    return _spirv(template, tuple(sorted((name, str(value)) for name, value in macros.items())))


def subgroup_size() -> int:
    return device().physical.subgroup_size


def numbered(
    template: str, macros: Mapping[str, object], params: Mapping[str | int, int]
) -> dict[int, int]:
    """Parameters and constants by their numbers in the template.

    Raises KernelInterfaceError for a name that the template does not declare with these macros.
    """
    takes = template_interface(template).kernel({name: str(v) for name, v in macros.items()})
    known = {**takes.params, **takes.constants}
    unknown = {name for name in params if isinstance(name, str)} - set(known)
    if unknown:
        raise KernelInterfaceError(
            f"unknown: {', '.join(sorted(unknown))}", where=template, why=f"known: {list(known)}"
        )
    return {known.get(name, name): value for name, value in params.items()}


class Kernel:
    """A template made ready for its parameters.

    Args:
        template: file name in purevk/glsl.
        macros: its macros.
        params: parameter name -> value, as specialization constants, or push constants (`push`;
            number below 32). Those left out are what an unset constant is.
        n_buffers: bindings.
        local: invocations of a workgroup.
    """

    def __init__(
        self,
        template: str,
        macros: Mapping[str, object],
        params: Mapping[str | int, int],
        n_buffers: int,
        local: int = 64,
        push: bool = False,
    ) -> None:
        macros = {"LOCAL": local, **macros}
        words = [0] * PUSH_WORDS
        constants: dict[int, int | float | bool] = {100: local}
        for index, value in numbered(template, macros, params).items():
            if push and index < PUSH_WORDS:
                macros[f"PUSH_{index}"] = 1
                words[index] = value
            else:
                constants[index] = value
        self.push = struct.pack(f"<{PUSH_WORDS}i", *words)
        self.pipeline = api.ComputePipeline(
            device(),
            compile_template(template, macros),
            n_buffers,
            specialization=constants,
            label=template,
        )

    def run(
        self, buffers: Sequence[np.ndarray | Out], grid: tuple[int, int, int], repeat: int = 0
    ) -> tuple[list[np.ndarray], float]:
        """Runs it once, and `repeat` times more. Returns the outputs, and the least milliseconds of
        the repeats.

        Raises AssertionError if anything but the outputs' own elements was written.
        """
        made = device()
        held, before = [], []
        for item in buffers:
            if isinstance(item, Out):
                itemsize = np.dtype(item.dtype).itemsize
                data = np.full((item.offset + item.count) * itemsize + 4096, SENTINEL, np.uint8)
            else:
                data = np.ascontiguousarray(item).view(np.uint8).reshape(-1)
            buffer = api.Buffer(made, max(data.nbytes, 4), api.MemoryKind.READBACK)
            buffer.write(0, data.tobytes() or bytes(4))
            held.append(buffer)
            before.append(data)
        arena, pool, queue = api.DescriptorArena(made), api.CommandPool(made), api.Queue(made)
        (descriptors,) = arena.make(
            [(self.pipeline.layout, [(buffer, 0, None) for buffer in held])]
        )
        commands = pool.buffer()
        commands.begin()
        commands.barrier(api.Access.HOST, api.Access.COMPUTE)
        commands.record_dispatch(self.pipeline, descriptors, self.push, len(self.push), *grid)
        commands.barrier(api.Access.COMPUTE, api.Access.HOST)
        commands.end()
        queue.run(commands)
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            queue.run(commands)
            times.append((time.perf_counter() - start) * 1e3)
        results = []
        for item, buffer, data in zip(buffers, held, before):
            after = np.frombuffer(buffer.read(0, data.nbytes), np.uint8)
            if isinstance(item, Out):
                itemsize = np.dtype(item.dtype).itemsize
                start, stop = item.offset * itemsize, (item.offset + item.count) * itemsize
                results.append(after[start:stop].copy().view(item.dtype).reshape(item.shape))
                after = np.concatenate([after[:start], after[stop:]])
                assert (after == SENTINEL).all(), "the kernel wrote beside its output"
            else:
                assert (after == data).all(), "the kernel wrote to its input"
        return results, min(times, default=0.0)


def run(
    template: str,
    buffers: Sequence[np.ndarray | Out],
    params: Mapping[str | int, int],
    *,
    groups: int,
    macros: Mapping[str, object] | None = None,
    local: int = 64,
    push: bool = False,
) -> list[np.ndarray]:
    """The outputs of one dispatch of `groups` workgroups."""
    kernel = Kernel(template, macros or {}, params, len(buffers), local, push)
    return kernel.run(buffers, flat_grid(groups))[0]
