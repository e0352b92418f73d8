"""Fixtures for the Vulkan layer: kernels compiled by glslc, and devices with the validation layer
on."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from purevk import api

SCALE = """#version 450
layout(local_size_x_id = 0) in;
layout(constant_id = 1) const float FACTOR = 1.0;
layout(constant_id = 2) const int SHIFT = 0;
layout(constant_id = 3) const bool NEGATE = false;
layout(binding = 0) readonly buffer A { float a[]; };
layout(binding = 1) writeonly buffer B { float b[]; };
layout(push_constant) uniform P { uint n; float offset; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i < n) b[i] = (NEGATE ? -1.0 : 1.0) * FACTOR * a[i] + float(SHIFT) + offset;
}
"""
INCREMENT = """#version 450
layout(local_size_x = 64) in;
layout(binding = 0) buffer A { uint a[]; };
void main() { a[gl_GlobalInvocationID.x] += 1u; }
"""
SPIN = """#version 450
layout(local_size_x = 64) in;
layout(binding = 0) buffer A { uint a[]; };
layout(push_constant) uniform P { uint n; };  // below 65536: old Mesa ends loops of the CPU device there
void main() {
    uint x = a[gl_LocalInvocationID.x];
    for (uint i = 0u; i < n; i++) x = x * 1664525u + 1013904223u;
    a[gl_LocalInvocationID.x] = x;
}
"""


@functools.cache
def glsl(source: str) -> bytes:
    """SPIR-V of a compute shader."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.comp")
        path.write_text(source)
        command = [
            "glslc",
            "--target-env=vulkan1.1",
            "-o",
            str(path.with_suffix(".spv")),
            str(path),
        ]
        subprocess.run(command, check=True)
        return path.with_suffix(".spv").read_bytes()


@pytest.fixture
def compile_glsl() -> Callable[[str], bytes]:
    return glsl


@pytest.fixture(scope="session")
def scale_spirv() -> bytes:
    return glsl(SCALE)


@pytest.fixture(scope="session")
def increment_spirv() -> bytes:
    return glsl(INCREMENT)


@pytest.fixture(scope="session")
def spin_spirv() -> bytes:
    return glsl(SPIN)


@pytest.fixture(scope="session")
def instance() -> Iterator[api.Instance]:
    with api.Instance(validation=True) as made:
        yield made
        made.check()


@pytest.fixture
def device(instance: api.Instance) -> Iterator[api.Device]:
    """A device under validation; what the layer says fails the test."""
    with api.Device(instance.pick()) as made:
        yield made
    assert made.live_objects() == {}
