"""What SPIR-V modules consist of, against the disassembler."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from purevk.shaders import shaderc
from purevk.shaders.source import CompileJob
from purevk.shaders.statistics import statistics_of

SHADER = """#version 450
#extension GL_KHR_shader_subgroup_arithmetic : enable
layout(local_size_x = 64) in;
layout(binding = 0) buffer A { float a[]; };
shared float part[64], other[64];
void main() {
    uint i = gl_LocalInvocationID.x;
    part[i] = a[i] * 2.0 + 1.0;
    other[i] = sin(a[i]);
    barrier();
    float sum = 0.0;
    for (uint j = 0u; j < a.length(); j++) sum += part[(i + j) % 64u] * other[j % 64u];
    if (i == 3u) a[1] = subgroupAdd(sum);
    a[i] = sum;
}
"""


@pytest.mark.parametrize("target", ["vulkan1.1", "vulkan1.3"])
def test_counts_are_those_of_the_disassembler(target: str, tmp_path: Path) -> None:
    if shutil.which("spirv-dis") is None:
        pytest.skip("there is no spirv-dis")
    (code,) = shaderc.compile_many([CompileJob(SHADER, "shader.comp", target_env=target)])
    path = tmp_path / "shader.spv"
    path.write_bytes(code)
    text = subprocess.run(
        ["spirv-dis", "--no-color", str(path)], check=True, capture_output=True, text=True
    ).stdout
    ops = Counter(re.findall(r"^\s*(?:%\w+ = )?(Op\w+)", text, re.MULTILINE))
    found = statistics_of(code)
    assert found.nbytes == len(code)
    assert found.instructions == ops.total()
    assert found.version == re.findall(r"; Version: (\S+)", text)[0]
    assert list(found.capabilities) == re.findall(r"OpCapability (\w+)", text)
    classes = found.classes
    assert classes["loops"] == ops["OpLoopMerge"] == 1
    assert classes["branches"] == ops["OpSelectionMerge"] == 1
    assert classes["barriers"] == ops["OpControlBarrier"] + ops["OpMemoryBarrier"] >= 1
    assert classes["loads"] == ops["OpLoad"] and classes["stores"] == ops["OpStore"]
    assert classes["subgroup"] == ops["OpGroupNonUniformFAdd"] == 1
    arithmetic = ("FMul", "FAdd", "IAdd", "UMod", "ULessThan", "IEqual", "ExtInst", "FSub", "ISub")
    assert classes["arithmetic"] == sum(ops[f"Op{name}"] for name in arithmetic)
    assert found.shared == len(re.findall(r"OpVariable \S+ Workgroup", text)) == 2
    assert "atomics" not in classes and "matrix" not in classes
