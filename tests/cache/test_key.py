"""Keys: every setting counts, nothing else does, and a difference can be explained."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from purevk.cache import Cache, CacheKey
from purevk.shaders.cache_entry import FORMAT
from purevk.shaders.shaderc import CompileJob
from tests.cache.harness import key_of, spirv_of

ROOT = Path(__file__).parents[2]
TEXTS = {"a.glslh": '#include "b.glslh"\n', "b.glslh": "float b;\n"}
JOB = CompileJob(
    '#version 450\n#include "a.glslh"\nvoid main() {}\n',
    "m.comp",
    {"T": "float", "N": "4"},
    lambda name: (name, TEXTS[name]),
)
OTHERS = {
    "template": replace(JOB, name="n.comp"),
    "target_env": replace(JOB, target_env="vulkan1.2"),
    "spirv_version": replace(JOB, spirv_version="1.4"),
    "optimize": replace(JOB, optimize=False),
    "macros.N": replace(JOB, macros={"T": "float", "N": "8"}),
    "macros.M": replace(JOB, macros={"T": "float", "N": "4", "M": ""}),
    "files.m.comp": replace(JOB, source=JOB.source + "\n"),
    "files.b.glslh": replace(
        JOB, include=lambda name: (name, {**TEXTS, "b.glslh": "float c;\n"}[name])
    ),
}


@pytest.mark.parametrize("field", OTHERS)
def test_every_setting_counts_and_is_explained(field: str) -> None:
    mine, other = CacheKey.of(JOB), CacheKey.of(OTHERS[field])
    assert mine.digest() != other.digest()
    lines = mine.explain(other).split("\n")
    assert lines[0].startswith(f"{field}: ")
    assert " here, " in lines[0]
    assert lines[0].endswith(" there")


def test_explanations_in_words() -> None:
    mine = CacheKey.of(JOB)
    assert mine.explain(CacheKey.of(OTHERS["macros.N"])) == "macros.N: '4' here, '8' there"
    assert mine.explain(CacheKey.of(OTHERS["macros.M"])) == "macros.M: absent here, '' there"
    assert mine.explain(CacheKey.of(OTHERS["optimize"])) == "optimize: True here, False there"
    assert (
        mine.explain(replace(mine, format=FORMAT + 1))
        == f"format: {FORMAT} here, {FORMAT + 1} there"
    )
    assert mine.explain(CacheKey.of(replace(JOB))) == ""


def test_order_of_macros_and_kind_of_include_do_not_count(tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    same = replace(JOB, macros={"N": "4", "T": "float"}, include=tmp_path)
    assert CacheKey.of(same).digest() == CacheKey.of(JOB).digest()


def test_digest_is_the_same_in_another_process() -> None:
    code = (
        "from purevk.cache import CacheKey; from purevk.shaders.shaderc import CompileJob;"
        "print(CacheKey.of(CompileJob('#version 450', 'x', {'b': '1', 'a': '2'})).digest())"
    )
    here = CacheKey.of(CompileJob("#version 450", "x", {"a": "2", "b": "1"})).digest()
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert run.stdout.strip() == here


def test_explain_miss(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.explain_miss(key_of(1)) == "no entry of a.comp is in the cache"
    cache.put_spirv(key_of(1), spirv_of(1))
    cache.put_spirv(replace(key_of(2), optimize=False), spirv_of(2))
    assert cache.explain_miss(key_of(3)) == "macros.N: '3' here, '1' there"
    assert cache.explain_miss(key_of(1)) == "it is in the cache"
