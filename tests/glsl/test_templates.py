"""What every template of this family promises, whatever it computes."""

from __future__ import annotations

import itertools

import pytest

from purevk.shaders.templates import template_interface
from tests.glsl.harness import capabilities, compile_template

TEMPLATES = [
    "reduce/reduce.comp",
    "reduce/softmax.comp",
    "reduce/norm.comp",
    "image/pool.comp",
    "index/gather.comp",
    "reduce/scan.comp",
    "sort/sort.comp",
    "sort/merge.comp",
    "elementwise/map.comp",
    "movement/transpose.comp",
    "index/gather_rows.comp",
]
FLOAT16, INT64, INT16, INT8 = 9, 11, 22, 39  # SPIR-V capabilities of arithmetic on these types


@pytest.mark.parametrize("template", TEMPLATES)
def test_compiles_without_macros(template):
    assert compile_template(template, {})


@pytest.mark.parametrize("template", TEMPLATES)
def test_compiles_with_all_parameters_pushed(template):
    numbers = template_interface(template).kernel({}).params.values()
    assert compile_template(template, {f"PUSH_{number}": 1 for number in numbers})


@pytest.mark.parametrize("template", TEMPLATES)
def test_half_storage_needs_no_half_arithmetic(template):
    for vec4, column, texel in itertools.product((0, 1), repeat=3):
        macros = {"VEC4": vec4, "COLUMN": column, "TEXEL_X": texel, "HAS_WEIGHT": 1, "HAS_BIAS": 1}
        macros |= {name: "float16_t" for name in ("T_X", "T_OUT", "T_W")}
        assert not capabilities(compile_template(template, macros)) & {FLOAT16, INT64, INT16, INT8}


@pytest.mark.parametrize("template", ["reduce/reduce.comp", "image/pool.comp", "index/gather.comp"])
@pytest.mark.parametrize("vec4", [0, 1])
def test_bytes_and_index_pairs_need_no_arithmetic_of_that_size(template, vec4):
    macros = {
        "VEC4": vec4,
        "T_X": "int8_t",
        "ACC": "int",
        "LOWEST": "-128",
        "T_OUT": "int8_t",
        "INDEX_WORDS": 2,
    }
    if template == "image/pool.comp":
        macros |= {"INDICES": 1, "T_INDEX": "ivec2", "TO_INDEX(v)": "ivec2(v, 0)"}
    assert not capabilities(compile_template(template, macros)) & {FLOAT16, INT64, INT16, INT8}
