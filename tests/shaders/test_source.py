"""Includes and macros worked into the text. The reference is glslc's own preprocessor (`glslc
-E`)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purevk.errors import ShaderCompilerError
from purevk.shaders.source import CompileJob, expand, find_include, source_files

HEAD = "#version 450\n#extension GL_GOOGLE_include_directive : require\n"
TAIL = "layout(local_size_x = 1) in;\nvoid main() {}\n"


def of(files: dict[str, str]):
    return lambda name: (name, files[name])


def glslc_preprocess(path: Path, folder: Path, macros: dict[str, str]) -> str:
    """What glslc makes of a file: tokens only, its #line, #extension and blank lines left out."""
    definitions = [f"-D{name}={value}" for name, value in macros.items()]
    run = subprocess.run(
        ["glslc", "-E", "-fshader-stage=compute", "-I", str(folder), *definitions, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    lines = (
        line for line in run.stdout.split("\n") if not re.match(r"\s*#\s*(line|extension)\b", line)
    )
    return " ".join(" ".join(lines).split())


needs_glslc = pytest.mark.skipif(shutil.which("glslc") is None, reason="glslc is not installed")


def same_as_glslc(folder: Path, files: dict[str, str], source: str, macros: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "main.comp").write_text(source)
    (folder / "expanded.comp").write_text(
        expand(source, name="main.comp", macros=macros, include=folder)
    )
    assert glslc_preprocess(folder / "expanded.comp", folder, {}) == glslc_preprocess(
        folder / "main.comp", folder, macros
    )


@needs_glslc
def test_conditional_and_repeated_includes_mean_what_glslc_says(tmp_path: Path) -> None:
    files = {
        "a.glslh": '#ifndef A\n#define A\n#include "b.glslh"\nfloat a(float x) { return b(x) * SCALE; }\n#endif',
        "b.glslh": "#ifndef B\n#define B\nfloat b(float x) { return x; }\n#endif\n",
    }
    source = (
        HEAD
        + '#if SCALE > 5\n#include "b.glslh"\n#endif\n#include "a.glslh" // why\n  #  include <b.glslh>\n'
        + TAIL
    )
    same_as_glslc(tmp_path, files, source, {"SCALE": "3"})
    same_as_glslc(tmp_path, files, source, {"SCALE": "7"})


@needs_glslc
@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
@pytest.mark.slow
def test_random_include_trees_mean_what_glslc_says(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files: dict[str, str] = {}
    for index in range(data.draw(st.integers(1, 5))):
        lines = [f"#ifndef G{index}", f"#define G{index}"]
        for other in (
            data.draw(st.lists(st.integers(0, max(index - 1, 0)), max_size=3)) if index else []
        ):
            condition = data.draw(st.sampled_from(["", "#if N > 1", "#ifdef G0", "#ifndef ABSENT"]))
            lines += (
                [condition] * bool(condition)
                + [f'#include "f{other}.glslh"']
                + ["#endif"] * bool(condition)
            )
        lines += [f"float f{index}() {{ return {index}.0 * N; }}", "#endif"]
        files[f"f{index}.glslh"] = "\n".join(lines) + data.draw(st.sampled_from(["", "\n", "\n\n"]))
    wanted = data.draw(st.lists(st.sampled_from(sorted(files)), max_size=4))
    source = HEAD + "".join(f'#include "{name}"\n' for name in wanted) + TAIL
    same_as_glslc(
        tmp_path_factory.mktemp("tree"), files, source, {"N": str(data.draw(st.integers(0, 3)))}
    )


def test_files_are_followed_once_and_in_order() -> None:
    files = {
        "a": '#include "c"\n#include "b"\n',
        "b": '#include "c"\n',
        "c": "float c;\n",
        "unused": "",
    }
    source = HEAD + '#include "a"\n'
    assert list(source_files(source, name="m", include=of(files))) == ["m", "c", "b", "a"]


def test_commented_include_is_left_alone() -> None:
    source = HEAD + '// #include "absent.glslh"\n' + TAIL
    assert list(source_files(source, name="m", include=of({}))) == ["m"]


def test_cycle_names_the_way_round() -> None:
    files = {"a": '#include "b"\n', "b": '\n#include "a"\n'}
    with pytest.raises(ShaderCompilerError, match="a includes itself") as caught:
        expand(HEAD + '#include "a"\n', name="m.comp", include=of(files))
    assert caught.value.where == "m.comp -> a -> b -> a"


def test_missing_file_names_the_line_that_asks(tmp_path: Path) -> None:
    (tmp_path / "a.glslh").write_text('\n#include "absent.glslh"\n')
    with pytest.raises(ShaderCompilerError, match="'absent.glslh' cannot be read") as caught:
        expand(HEAD + '#include "a.glslh"\n', name="m.comp", include=tmp_path)
    assert "a.glslh:2 -> absent.glslh" in caught.value.where
    assert "No such file" in caught.value.why


@pytest.mark.parametrize("name", ["../secret.glslh", "/etc/hostname", "x/../../secret.glslh"])
def test_include_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "glsl"
    folder.mkdir()
    (tmp_path / "secret.glslh").write_text("secret")
    with pytest.raises(ShaderCompilerError, match="leaves the folder"):
        find_include(folder)(name)


def test_edited_include_is_read_again(tmp_path: Path) -> None:
    import os

    path = tmp_path / "a.glslh"
    path.write_text("float a;\n")
    assert find_include(tmp_path)("a.glslh")[1] == "float a;\n"
    path.write_text("float b;\n")
    os.utime(path, ns=(1, 1))
    assert find_include(tmp_path)("a.glslh")[1] == "float b;\n"


def test_no_version_line() -> None:
    with pytest.raises(ShaderCompilerError, match="no #version"):
        expand(TAIL, name="m.comp")


@pytest.mark.parametrize(
    "macros", [{"A B": "1"}, {"A": "1\n#error"}, {"1A": ""}, {"A": 3}, {"F(x": "x"}]
)
def test_bad_macro(macros: dict) -> None:
    with pytest.raises(ShaderCompilerError, match="cannot be defined"):
        expand(HEAD + TAIL, name="m.comp", macros=macros)


def test_order_of_macros_changes_nothing() -> None:
    first = expand(HEAD + TAIL, name="m", macros={"A": "1", "B": "2"})
    assert first == expand(HEAD + TAIL, name="m", macros={"B": "2", "A": "1"})


def test_job_of_an_absent_template() -> None:
    with pytest.raises(ShaderCompilerError, match="'absent.comp' cannot be read"):
        CompileJob.from_template("absent.comp")


def test_job_of_a_template_without_its_family() -> None:
    with pytest.raises(ShaderCompilerError, match=r"'scan.comp' cannot be read") as caught:
        CompileJob.from_template("scan.comp")
    assert caught.value.next == "name it from that folder on: reduce/scan.comp"
