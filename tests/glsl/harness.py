"""Runs a kernel template on the device, with the validation layer on and sentinels around each
output.

`run` is the one way in: a template, its buffers and its parameters by name, and a grid.
"""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from purevk import api, knobs
from purevk.cache import Cache, CacheKey
from purevk.errors import KernelInterfaceError
from purevk.graph.context import traits_of
from purevk.shaders import shaderc
from purevk.shaders.source import text_hash
from purevk.shaders.templates import template_interface

SENTINEL = 0xC5
PUSH_WORDS = 32
LOCAL_SIZE = 100  # the specialization constant that is the size of a workgroup
GLSL = {
    np.float32: "float",
    np.float16: "float16_t",
    np.int32: "int",
    np.int8: "int8_t",
    np.uint8: "uint8_t",
    np.int64: "int64_t",
}
"""The type of GLSL that has the elements of a dtype."""
# Largest error relative to the largest result: sums in float, in another order than the
# reference's.
TOLERANCE = {np.float32: 1e-5, np.float16: 2e-3}
_VALIDATOR = shutil.which("spirv-val")


@dataclass
class Out:
    """A buffer that the kernel writes: `shape` elements of `dtype` from element `offset` on, 4096
    bytes after them."""

    shape: tuple[int, ...]
    dtype: np.dtype | type
    offset: int = 0

    @property
    def byte_range(self) -> slice:
        """Where the elements are in the buffer."""
        itemsize = np.dtype(self.dtype).itemsize
        start = self.offset * itemsize
        return slice(start, start + int(np.prod(self.shape, dtype=np.int64)) * itemsize)


@dataclass
class Texel:
    """An input that is bound as a uniform texel buffer of a format such as "rgba32f"."""

    data: np.ndarray
    format: str


@functools.cache
def device() -> api.Device:
    """The device of the tests, for the whole process; with the validation layer unless
    PUREVK_VALIDATION=0."""
    return api.open_device(validation=os.environ.get("PUREVK_VALIDATION") != "0")


def subgroup_size() -> int:
    return device().physical.subgroup_size


def workgroup_matrices() -> None:
    """Skips a test where the device or the compiler have no cooperative matrices of a workgroup, or
    not in workgroups of 128."""
    if not shaderc.load().supports("GL_NV_cooperative_matrix2"):
        pytest.skip("the compiler does not know GL_NV_cooperative_matrix2")
    if not traits_of(device()).takes_matrices(64, 64, 32, 128):
        pytest.skip("the device has no cooperative matrices of a workgroup")


# -- compiling -----------------------------------------------------------------------------------
@functools.cache
def _validated() -> Cache:
    """What this spirv-val has passed of this compiler's SPIR-V, from one run of the tests to the next:
    an older one passes what it cannot read."""
    folder = knobs.cache_folder()
    if not folder or not _VALIDATOR:
        return Cache(None)
    validator = subprocess.run([_VALIDATOR, "--version"], capture_output=True, check=True).stdout
    tools = text_hash(f"{shaderc.load().version} {validator.decode()}")[:16]
    return Cache(Path(folder, "validated", tools))


@functools.cache
def _spirv(template: str, macros: tuple[tuple[str, str], ...], target: str) -> bytes:
    job = shaderc.CompileJob.from_template(template, dict(macros), target_env=target)
    key = CacheKey.of(job)
    code = _validated().get_spirv(key)
    if code is None:
        (code,) = shaderc.compile_many([job], threads=1)
        if _VALIDATOR:
            _validate(_VALIDATOR, code, target, f"{template} {dict(macros)}")
        _validated().put_spirv(key, code)
    return code


def _validate(validator: str, code: bytes, target: str, where: str) -> None:
    command = [validator, "--target-env", target, "-"]
    checked = subprocess.run(command, input=code, capture_output=True, check=False)
    said = (checked.stdout + checked.stderr).decode()
    # A validator that is older than the compiler cannot read new capabilities.
    if checked.returncode and "Invalid capability operand" not in said:
        raise AssertionError(f"{where}: {said}")


def compile_template(template: str, macros: Mapping[str, object], coopmat: bool = False) -> bytes:
    """SPIR-V of a template, checked by spirv-val where that is installed. With `coopmat`, skips if
    the compiler does not know cooperative matrices."""
    if coopmat and not shaderc.load().supports("GL_KHR_cooperative_matrix"):
        pytest.skip("the compiler does not know GL_KHR_cooperative_matrix")
    texts = tuple(sorted((name, str(value)) for name, value in macros.items()))
    return _spirv(template, texts, "vulkan1.3" if coopmat else "vulkan1.1")


def capabilities(code: bytes) -> set[int]:
    """The capabilities that a SPIR-V module declares."""
    words = np.frombuffer(code, np.uint32)
    found, at = set(), 5
    while at < len(words) and words[at] & 0xFFFF == 17:
        found.add(int(words[at + 1]))
        at += words[at] >> 16
    return found


def pipeline(
    template: str,
    macros: Mapping[str, object],
    bindings: int | Sequence[str],
    constants: Mapping[int, int] | None = None,
    coopmat: bool = False,
) -> api.ComputePipeline:
    """A template for the device. With `coopmat`, skips where compiler or device have no cooperative
    matrices; subgroups then have 32 invocations."""
    code = compile_template(template, macros, coopmat)
    if coopmat and not device().features.cooperative_matrix:
        pytest.skip("the device has no cooperative matrices")
    return api.ComputePipeline(
        device(),
        code,
        bindings,
        specialization=constants,
        label=template,
        required_subgroup_size=32 if coopmat else None,
    )


def numbered(
    template: str, macros: Mapping[str, object], params: Mapping[str, int]
) -> dict[int, int]:
    """Parameters and constants by their numbers in the template.

    Raises KernelInterfaceError for a name that the template does not declare with these macros.
    """
    takes = template_interface(template).kernel({name: str(v) for name, v in macros.items()})
    known = {**takes.params, **takes.constants}
    unknown = set(params) - set(known)
    if unknown:
        raise KernelInterfaceError(
            f"unknown: {', '.join(sorted(unknown))}", where=template, why=f"known: {list(known)}"
        )
    return {known[name]: value for name, value in params.items()}


# -- running -------------------------------------------------------------------------------------
def run(
    template: str,
    buffers: Sequence[np.ndarray | Texel | Out],
    params: Mapping[str, int],
    grid: int | tuple[int, int, int],
    macros: Mapping[str, object] | None = None,
    *,
    specialize: bool | Collection[str] = False,
    local: int = 64,
    coopmat: bool = False,
) -> list[np.ndarray]:
    """The outputs of one dispatch.

    Args:
        template: a file in purevk/glsl.
        buffers: those of the bindings, in order. Inputs are arrays.
        params: parameters by name. Those left out are 0 or, as a specialization constant, their
            default.
        grid: workgroups along x, y and z, or how many there are.
        specialize: the parameters that are specialization constants, not push constants; True for
            all.
        local: invocations of a workgroup, where the template does not fix them.
        coopmat: runs on matrix cores; see `pipeline`.

    Raises AssertionError if the kernel writes anything but the elements of its outputs.
    """
    macros, words = dict(macros or {}), [0] * PUSH_WORDS
    constants = {LOCAL_SIZE: local}
    if local > 64 and "LOCAL" in template_interface(template).macros:
        macros.setdefault("LOCAL", local)  # the length of shared arrays
    numbers = numbered(template, macros, params)
    fixed = params if specialize is True else (specialize or ())
    fixed_numbers = set(numbered(template, macros, dict.fromkeys(fixed, 0)))
    for number, value in numbers.items():
        if number in fixed_numbers or number >= PUSH_WORDS:
            constants[number] = value
        else:
            macros[f"PUSH_{number}"] = 1
            words[number] = value
    kinds = ["texel" if isinstance(item, Texel) else "storage" for item in buffers]
    kernel = pipeline(template, macros, kinds, constants, coopmat)
    return _dispatch(kernel, struct.pack(f"<{PUSH_WORDS}i", *words), buffers, _grid(grid))


def _grid(groups: int | tuple[int, int, int]) -> tuple[int, int, int]:
    """A number of workgroups as a grid: x holds at most 65535."""
    if isinstance(groups, tuple):
        return groups
    groups = max(groups, 1)
    return min(groups, 65535), ceil_div(groups, 65535), 1


def _bytes_before(item: np.ndarray | Texel | Out) -> np.ndarray:
    """What a buffer holds before the dispatch."""
    if isinstance(item, Out):
        return np.full(item.byte_range.stop + 4096, SENTINEL, np.uint8)
    data = item.data if isinstance(item, Texel) else item
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


def _dispatch(
    kernel: api.ComputePipeline,
    push: bytes,
    buffers: Sequence[np.ndarray | Texel | Out],
    grid: tuple[int, int, int],
) -> list[np.ndarray]:
    held, bound, before = [], [], [_bytes_before(item) for item in buffers]
    for item, data in zip(buffers, before):
        usage = api.Usage.DEFAULT | (api.Usage.TEXEL if isinstance(item, Texel) else 0)
        buffer = api.Buffer(device(), max(data.nbytes, 4), api.MemoryKind.READBACK, usage)
        buffer.write(0, data.tobytes() or bytes(4))
        held.append(buffer)
        bound.append(
            api.BufferView(buffer, item.format) if isinstance(item, Texel) else (buffer, 0, None)
        )
    arena, pool = api.DescriptorArena(device()), api.CommandPool(device())
    (descriptors,) = arena.make([(kernel.layout, bound)])
    commands = pool.buffer()
    commands.begin()
    commands.barrier(api.Access.HOST, api.Access.COMPUTE)
    commands.record_dispatch(kernel, descriptors, push, len(push), *grid)
    commands.barrier(api.Access.COMPUTE, api.Access.HOST)
    commands.end()
    api.Queue(device()).run(commands)
    results = []
    for item, buffer, data in zip(buffers, held, before):
        after = np.frombuffer(buffer.read(0, data.nbytes), np.uint8).copy()
        if isinstance(item, Out):
            at = item.byte_range
            results.append(after[at].copy().view(item.dtype).reshape(item.shape))
            after[at] = SENTINEL
        assert (after == data).all(), "the kernel wrote beside its outputs"
    return results


# -- arrays and numbers --------------------------------------------------------------------------
def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def bits(value: float) -> int:
    """A float as the integer that an integer parameter carries it in."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


def strides_of(array: np.ndarray) -> list[int]:
    """The strides of an array in elements."""
    return [stride // array.itemsize for stride in array.strides]


def close(got: np.ndarray, want: np.ndarray, dtype: type) -> None:
    """Fails if an error is above `TOLERANCE` of a dtype."""
    scale = np.abs(want).max()
    error = np.abs(got.astype(np.float64) - want).max() / scale
    assert error < TOLERANCE[dtype], error
