"""The matmul templates for matrix units: they compile where the compiler can, and are right where a device has them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from purevk import api, shaderc
from tests.kernels.harness import PUSH_WORDS, Kernel, Out, device
from tests.kernels.heavy import ceil_div, close

TEMPLATES = {
    "matmul_coopmat.comp": ("GL_KHR_cooperative_matrix", "cooperative_matrix"),
    "matmul_coopmat2.comp": ("GL_NV_cooperative_matrix2", "cooperative_matrix2"),
}
VARIANTS = [{}, {"B_TRANSPOSED": 1}, {"BIAS": 1, "T_OUT": "float16_t"}]


def compiled(template, macros):
    if not shaderc.load().supports(TEMPLATES[template][0]):
        pytest.skip("the compiler does not know the extension")
    text = {name: str(value) for name, value in macros.items()}
    job = shaderc.CompileJob.from_template(template, text, target_env="vulkan1.3")
    return shaderc.compile_many([job], threads=1)[0]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("macros", [*VARIANTS, {"SPLIT_K": 1}], ids=str)
def test_compiles(template, macros):
    assert compiled(template, macros)[:4] == b"\x03\x02\x23\x07"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("macros", VARIANTS, ids=str)
@pytest.mark.parametrize("size", [(128, 128, 64), (40, 72, 24), (200, 264, 136)])
def test_agrees(template, macros, size):
    if not getattr(device().features, TEMPLATES[template][1]):
        pytest.skip("the device has no such matrix units")
    m, n, k = size
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((2, m, k)).astype(np.float16), rng.standard_normal((2, k, n)).astype(np.float16)
    bias = rng.standard_normal(n).astype(np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64) + bias * macros.get("BIAS", 0)
    turned = macros.get("B_TRANSPOSED", 0)
    macros = {**macros, **{f"PUSH_{i}": 1 for i in range(17)}}
    params = [m, n, k, k, k if turned else n, n, m * k, n * k, m * n, 1000, 0, 0, 0, 0, 0, 0, 0]
    kernel = Kernel.__new__(Kernel)
    kernel.push = struct.pack(f"<{PUSH_WORDS}i", *params, *[0] * (PUSH_WORDS - len(params)))
    bindings = 3 + macros.get("BIAS", 0)
    kernel.pipeline = api.ComputePipeline(device(), compiled(template, macros), bindings, required_subgroup_size=32)
    dtype = np.float16 if "T_OUT" in macros else np.float32
    held_b = np.ascontiguousarray(b.swapaxes(1, 2)) if turned else b
    inputs = [a, held_b, bias] if macros.get("BIAS") else [a, held_b]
    (got,), _ = kernel.run([*inputs, Out(want.shape, dtype)], (ceil_div(n, 128), ceil_div(m, 128), 2))
    close(got, want, np.float16 if dtype is np.float16 else np.float32)
