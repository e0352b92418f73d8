"""Every kernel of matrix cores compiles as lowering asks for it on a GPU that has them, and is valid
SPIR-V. Nothing runs: no device is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

import purevk.ops  # noqa: F401
from bench.operator_cases import Case, Tensor, operator_cases
from bench.operators import build
from purevk.dtypes import DType
from purevk.graph import fragments
from purevk.graph.context import typical_traits
from purevk.ir import GuardLog
from purevk.lower.lowering import KernelSpec
from purevk.passes.pipeline import optimize
from purevk.schedule.planning import make_plan
from purevk.shaders import shaderc
from purevk.shaders.source import GLSL_FOLDER, source_files
from purevk.tuning import DeviceTraits
from tests.glsl.harness import capabilities, compile_template

pytestmark = pytest.mark.slow  # for the compiler of the wheel; Debian 12's knows no matrix cores
MATRICES = 6022  # the SPIR-V capability CooperativeMatrixKHR
FAMILIES = ("matmul", "quantized", "images", "language")
TYPICAL = typical_traits()
SUBGROUPS = dataclasses.replace(  # about an NVIDIA H200
    TYPICAL,
    features=TYPICAL.features | {"cooperative_matrix", "cooperative_matrix2", "bfloat16"},
    cores=132,
    max_storage_range=2**32 - 1,
    max_shared_memory=49152,
    max_invocations=1024,
    coopmat_shape=(16, 16, 16),
    bfloat16_fragments=True,
    bfloat16_matrices=True,
)
FRAGMENTS = dataclasses.replace(
    SUBGROUPS,
    coopmat_columns=(8, 16),
    bfloat16_columns=(8, 16),
    int8_columns=(8, 16),
    fragment_order=lambda dtype, columns: True,
)
WORKGROUPS = dataclasses.replace(
    SUBGROUPS,
    workgroup_matrices=((32, 16, 16, 128), (32, 32, 16, 256)),
    max_workgroup_matrix=256,
)


def templates() -> set[str]:
    """Those whose text has cooperative matrices."""
    found = set()
    for path in GLSL_FOLDER.rglob("*.comp"):
        name = path.relative_to(GLSL_FOLDER).as_posix()
        files = source_files(path.read_text(encoding="utf-8"), name=name)
        if any("coopmat<" in text for text in files.values()):
            found.add(name)
    return found


def int8_convolution() -> Case:
    weight = Tensor((64, 9 * 64), DType.int8, 100, constant=True)
    sums = Tensor((64,), DType.int32, constant=True)
    scales = Tensor((64,), constant=True)
    x, window = Tensor((1, 64, 32, 32), DType.int8, 100), ((3, 3), (1, 1), (1, 1), (1, 1), 1)
    args = (x, 0.1, 3, weight, sums, scales, 0.1, 3, None, *window, "none")
    return Case("quantized", "et_vk.q8ta_conv2d.default", args)


def in_dtype(case: Case, dtype: DType) -> Case:
    """The case with this dtype in place of float32."""
    tensors: dict[int, Tensor] = {}

    def changed(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(changed(each) for each in arg)
        if isinstance(arg, Tensor) and arg.dtype is DType.float32:
            return tensors.setdefault(id(arg), dataclasses.replace(arg, dtype=dtype))
        return arg

    return dataclasses.replace(case, args=changed(case.args))


def kernels(traits: DeviceTraits, nbytes: int, dtype: DType) -> Iterator[KernelSpec]:
    cases = [case for case in operator_cases(nbytes) if case.family in FAMILIES]
    for case in (*cases, int8_convolution()):
        with GuardLog():
            graph, _ = build(in_dtype(case, dtype))
            yield from make_plan(optimize(graph, traits), traits).kernels


@pytest.mark.parametrize("dtype", [DType.float16, DType.bfloat16], ids=str)
def test_kernels_of_matrix_cores(dtype: DType) -> None:
    needed = ["GL_KHR_cooperative_matrix", "GL_NV_cooperative_matrix2"]
    needed += ["GL_EXT_bfloat16"] * (dtype is DType.bfloat16)
    if missing := [each for each in needed if not shaderc.load().supports(each)]:
        pytest.skip(f"the compiler does not know {', '.join(missing)}")
    specs = [fragments.spec_of(dtype, columns) for columns in (8, 16)]
    for traits, nbytes in ((FRAGMENTS, 1 << 16), (FRAGMENTS, 1 << 20), (WORKGROUPS, 1 << 24)):
        specs += kernels(traits, nbytes, dtype)
    expected, compiled = templates(), set()
    for template, macros in {(spec.template, spec.macros) for spec in specs}:
        if template in expected:
            code = compile_template(template, dict(macros), coopmat=True)
            if MATRICES in capabilities(code):
                compiled.add(template)
    assert compiled == expected
