"""Compiling: what comes out is valid SPIR-V (`spirv-val`), the same on threads as alone; errors say
where."""

from __future__ import annotations

import pickle
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from purevk.errors import ShaderCompilerError
from purevk.shaders import shaderc
from purevk.shaders.shaderc import CompileJob

TEMPLATE = """#version 450
#extension GL_GOOGLE_include_directive : require
#ifndef EXPR
#define EXPR(x) (x)
#endif
#include "twice.glslh"
layout(local_size_x = 64) in;
layout(constant_id = 0) const uint STEP = 1;
layout(set = 0, binding = 0) buffer Data { float data[]; };
void main() {
    uint i = gl_GlobalInvocationID.x * STEP;
    data[i] = EXPR(twice(data[i]));
}
"""
FILES = {"twice.glslh": "float twice(float x) {\n    return x * 2.0;\n}\n"}


def include(name: str) -> tuple[str, str]:
    return name, FILES[name]


def job(expression: str = "(x)", **settings) -> CompileJob:
    return CompileJob(TEMPLATE, "map.comp", {"EXPR(x)": expression}, include, **settings)


def words(spirv: bytes) -> list[int]:
    return [int.from_bytes(spirv[i : i + 4], "little") for i in range(0, len(spirv), 4)]


def validate(spirv: bytes, target_env: str, path: Path) -> None:
    if shutil.which("spirv-val") is None:
        pytest.skip("spirv-val is not installed")
    path.write_bytes(spirv)
    run = subprocess.run(
        ["spirv-val", "--target-env", target_env, path], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("target_env", ["vulkan1.1", "vulkan1.2", "vulkan1.3"])
def test_output_is_valid(
    compiler: shaderc.Compiler, tmp_path: Path, target_env: str, optimize: bool
) -> None:
    spirv = compiler.compile_job(job("sqrt(x)", target_env=target_env, optimize=optimize))
    validate(spirv, target_env, tmp_path / "out.spv")


@pytest.mark.parametrize(
    ("settings", "version"),
    [
        ({}, 0x10300),
        ({"target_env": "vulkan1.2"}, 0x10500),
        ({"target_env": "vulkan1.3"}, 0x10600),
        ({"target_env": "vulkan1.3", "spirv_version": "1.4"}, 0x10400),
        ({"spirv_version": "1.0"}, 0x10000),
    ],
)
def test_version_of_the_output(
    compiler: shaderc.Compiler, settings: dict[str, str], version: int
) -> None:
    assert words(compiler.compile_job(job(**settings)))[:2] == [0x07230203, version]


def test_optimizer_removes_debug_names(compiler: shaderc.Compiler) -> None:
    plain, optimized = (compiler.compile_job(job(optimize=optimize)) for optimize in (False, True))
    assert b"twice(f1;" in plain
    assert len(optimized) < len(plain)


def test_macro_reaches_the_code(compiler: shaderc.Compiler) -> None:
    pi = 0x40490FDB  # as a float32
    assert pi in words(compiler.compile_job(job("x * 3.14159265", optimize=False)))
    assert pi not in words(compiler.compile_job(job("x * 2.5", optimize=False)))


def test_error_in_the_template(compiler: shaderc.Compiler) -> None:
    with pytest.raises(ShaderCompilerError) as caught:
        compiler.compile_job(job("nonsense(x)"))
    error = caught.value
    line = TEMPLATE.split("\n").index("    data[i] = EXPR(twice(data[i]));") + 1
    assert error.where == f"map.comp:{line}"
    assert "map.comp does not compile" in error.what
    assert "nonsense" in error.what
    assert "data[i] = EXPR(twice(data[i]));" in error.why
    assert "EXPR(x)=nonsense(x)" in error.why
    assert compiler.origin in error.next
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_error_in_an_included_file(compiler: shaderc.Compiler) -> None:
    def broken(name: str) -> tuple[str, str]:
        return name, "float twice(float x) {\n    return y * 2.0;\n}\n"

    with pytest.raises(ShaderCompilerError) as caught:
        compiler.compile(TEMPLATE, name="map.comp", include=broken)
    assert caught.value.where == "twice.glslh:2"
    assert "return y * 2.0;" in caught.value.why


def test_error_after_an_include_has_the_right_line(compiler: shaderc.Compiler) -> None:
    source = TEMPLATE + "int f() { return absent; }\n"
    with pytest.raises(ShaderCompilerError) as caught:
        compiler.compile(source, name="map.comp", include=include)
    assert caught.value.where == f"map.comp:{len(TEMPLATE.splitlines()) + 1}"


def test_file_without_a_guard_takes_effect_once_wherever_it_is_included(
    compiler: shaderc.Compiler,
) -> None:
    line = '#include "twice.glslh"\n'
    source = TEMPLATE.replace(line, f"#if 0\n{line}#endif\n{line}{line}")
    assert source.count(line) == 3
    spirv = compiler.compile(source, name="map.comp", include=include)
    assert spirv == compiler.compile(TEMPLATE, name="map.comp", include=include)


@pytest.mark.parametrize("settings", [{"target_env": "vulkan9"}, {"spirv_version": "7.0"}])
def test_unknown_settings(compiler: shaderc.Compiler, settings: dict[str, str]) -> None:
    with pytest.raises(
        ShaderCompilerError, match=r"unknown (target environment|SPIR-V version)"
    ) as caught:
        compiler.compile_job(job(**settings))
    assert caught.value.where == "map.comp"


def test_no_entry_point(compiler: shaderc.Compiler) -> None:
    with pytest.raises(ShaderCompilerError, match="empty.comp does not compile"):
        compiler.compile("#version 450\nlayout(local_size_x = 1) in;\n", name="empty.comp")


def test_supports(compiler: shaderc.Compiler) -> None:
    assert compiler.supports("GL_EXT_shader_explicit_arithmetic_types_float16")
    assert compiler.supports("GL_KHR_shader_subgroup_arithmetic")
    assert not compiler.supports("GL_EXT_no_such_extension")
    with pytest.raises(ShaderCompilerError, match="not the name"):
        compiler.supports("cooperative matrix")


def test_every_probe_is_valid_where_it_is_supported(
    compiler: shaderc.Compiler, tmp_path: Path
) -> None:
    for extension in shaderc._PROBES:
        if compiler.supports(extension):
            settings = {"target_env": "vulkan1.3", "spirv_version": "1.6", "optimize": True}
            spirv = compiler.compile(shaderc.probe_source(extension), name="probe", **settings)
            assert words(spirv)[1] == 0x10600


def test_threads_give_what_one_thread_gives(compiler: shaderc.Compiler) -> None:
    jobs = [job(f"x * {i}.5 + sin(x)", optimize=bool(i % 2)) for i in range(40)]
    alone = [compiler.compile_job(each) for each in jobs]
    assert len(set(alone)) == len(jobs)
    seen: list[tuple[int, int]] = []
    assert (
        shaderc.compile_many(
            jobs, threads=4, progress=lambda done, total: seen.append((done, total))
        )
        == alone
    )
    assert seen == [(i + 1, 40) for i in range(40)]
    assert shaderc.compile_many(jobs[:3], threads=1) == alone[:3]
    assert shaderc.compile_many([]) == []


def test_a_failing_job_among_many(compiler: shaderc.Compiler) -> None:
    jobs = [job(f"x + {i}.0") for i in range(10)]
    jobs[4] = job("wrong(x)")
    with pytest.raises(ShaderCompilerError, match="wrong"):
        shaderc.compile_many(jobs, threads=3)


def test_load_from_many_threads_gives_one_compiler(
    compiler: shaderc.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shaderc, "_loaded", {})
    found: list[shaderc.Compiler] = []
    threads = [threading.Thread(target=lambda: found.append(shaderc.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(each) for each in found}) == 1


def test_version_is_for_people(compiler: shaderc.Compiler) -> None:
    assert re.search(r"shaderc.*SPIR-V 1\.\d", compiler.version)


@pytest.mark.parametrize(("bits", "capability"), [(8, 39), (16, 22)])
def test_constants_of_narrow_integers_are_declared(bits: int, capability: int) -> None:
    """A shader that only stores such numbers does not declare their arithmetic, until the optimizer
    makes constants of them."""

    def module(*capabilities: int, constant: bool = True) -> bytes:
        header = [0x07230203, 0x10300, 0, 10, 0]
        declared = [word for each in (1, *capabilities) for word in (2 << 16 | 17, each)]
        memory_model, integer = [3 << 16 | 14, 0, 1], [4 << 16 | 21, 1, bits, 1]
        number = [4 << 16 | 43, 1, 2, 7] if constant else []
        return b"".join(
            word.to_bytes(4, "little")
            for word in (*header, *declared, *memory_model, *integer, *number)
        )

    declared = shaderc.declare_narrow_integers(module())
    assert sorted(words(declared)) == sorted(words(module(capability)))
    assert declared[:20] == module()[:20] and words(declared)[5:9].count(2 << 16 | 17) == 2
    for kept in (module(capability), module(constant=False)):
        assert shaderc.declare_narrow_integers(kept) == kept


@pytest.mark.parametrize("bits", [8, 16])
def test_folded_constants_of_narrow_integers_are_valid(
    compiler: shaderc.Compiler, tmp_path: Path, bits: int
) -> None:
    """Whether the optimizer folds this one depends on its release; what comes out is valid either
    way."""
    source = f"""#version 450
#extension GL_EXT_shader_{bits}bit_storage : require
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer Data {{ int{bits}_t data[]; }};
int zero(int a) {{ return a < 0 ? 0 : a; }}
void main() {{ data[gl_GlobalInvocationID.x] = int{bits}_t(zero(-3)); }}
"""
    validate(compiler.compile(source, name="narrow.comp"), "vulkan1.1", tmp_path / "out.spv")


@pytest.mark.parametrize("asked", [False, True])
def test_nothing_is_contracted_where_a_template_says_so(
    compiler: shaderc.Compiler, tmp_path: Path, asked: bool
) -> None:
    source = f"""#version 450
#extension GL_EXT_control_flow_attributes : enable
{shaderc.PRECISE if asked else ""}
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) buffer Data {{ float data[]; }};
void main() {{
    uint i = gl_GlobalInvocationID.x * 8u;
    [[unroll]] for (uint j = 0u; j < 4u; j++) data[i + j] = data[i + j] * data[4] + data[5];
}}
"""
    spirv = compiler.compile(source, name="sums.comp")
    validate(spirv, "vulkan1.1", tmp_path / "out.spv")
    operations, decorated, fused, at = set(), set(), 0, 5
    code = words(spirv)
    while at < len(code):
        if code[at] & 0xFFFF in (129, 131, 133):
            operations.add(code[at + 2])
        fused += code[at] & 0xFFFF == 12 and code[at + 4] == 50  # some releases make Fma of them
        if code[at] & 0xFFFF == 71 and code[at + 2] == 42:
            decorated.add(code[at + 1])
        at += code[at] >> 16
    assert decorated == (operations if asked else set())
    assert len(operations) == 8 and not fused if asked else operations or fused
