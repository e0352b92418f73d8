"""What every template declares, against what the compiler makes of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from purevk.dtypes import DType
from purevk.errors import KernelInterfaceError
from purevk.ir import TensorType, Value
from purevk.lower.lowering import Lowering
from purevk.shaders.interface import BufferSlot
from purevk.shaders.source import GLSL_FOLDER, source_files
from purevk.shaders.templates import template_interface
from purevk.tuning import DeviceTraits
from tests.glsl.harness import compile_template

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted(path.relative_to(GLSL_FOLDER).as_posix() for path in GLSL_FOLDER.rglob("*.comp"))
OWN = ("PUREVK_", "PUSH_", "PARAMS_BUFFER", "GL_EXT_")  # what is no macro of a dispatch
TESTED = re.compile(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b(.*?)(?://.*)?$", re.MULTILINE)
DEFINED = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
NAME = re.compile(r"\b[A-Za-z_]\w*")


def spec_ids(code: bytes) -> set[int]:
    """The specialization constants of a SPIR-V module."""
    words, at, found = np.frombuffer(code, np.uint32), 5, set()
    while at < len(words):
        count, op = int(words[at]) >> 16, int(words[at]) & 0xFFFF
        if op == 71 and words[at + 2] == 1:  # OpDecorate SpecId
            found.add(int(words[at + 3]))
        at += count
    return found


def lower(template: str, buffers, specialize=(), **given) -> None:
    lowering = Lowering(DeviceTraits(frozenset()), {}, {})
    lowering.dispatch(template, buffers, specialize=specialize, grid=(1, 1, 1), **given)


VALUE = Value("v", TensorType(DType.float32, (4,)))


def mode(slot: BufferSlot) -> str:
    return f"{slot.access}:r32f" if slot.texel else slot.access


def decorated(code: bytes, decoration: int) -> dict[int, int]:
    """The number that a decoration with one (Binding 33) gives to ids of a SPIR-V module."""
    words, at, found = np.frombuffer(code, np.uint32), 5, {}
    while at < len(words):
        count, op = int(words[at]) >> 16, int(words[at]) & 0xFFFF
        if op == 71 and words[at + 2] == decoration:
            found[int(words[at + 1])] = int(words[at + 3])
        at += count
    return found


def test_wrong_names_are_refused() -> None:
    """For each template without macros: all names are taken, and none may lack or be too many, but
    for the offsets, which are those of the tensors."""
    other_value = {"params": 1, "constants": 1, "buffers": (VALUE, "r")}
    for template in TEMPLATES:
        takes = template_interface(template).kernel({})
        given = {
            "params": dict.fromkeys(takes.params, 1),
            "constants": dict.fromkeys(takes.constants, 1),
            "buffers": {name: (VALUE, mode(slot)) for name, slot in takes.buffers.items()},
        }
        offsets = {f"offset_{name}" for name in (*takes.buffers, "o")}
        offsets |= {f"{name}_offset" for name in takes.buffers}
        lower(template, **given)
        lower(template, **given, specialize=set(takes.params) - takes.push_only)
        for kind, names in given.items():
            for name in names.keys() - offsets:
                less = {other: value for other, value in names.items() if other != name}
                with pytest.raises(KernelInterfaceError, match=rf"missing \w+: {name}\n"):
                    lower(template, **{**given, kind: less})
            with pytest.raises(KernelInterfaceError, match=r"unknown \w+: no_such_name\n"):
                lower(template, **{**given, kind: {**names, "no_such_name": other_value[kind]}})
        for name, slot in takes.buffers.items():
            wrong = "r:r32f" if not slot.texel else "r"
            if not slot.texel:
                wrong = "rw" if slot.access != "rw" else "r"
            with pytest.raises(
                KernelInterfaceError, match=f"the buffer {name} is used as '{wrong}'"
            ):
                changed = {**given["buffers"], name: (VALUE, wrong)}
                lower(template, **{**given, "buffers": changed})
        with pytest.raises(KernelInterfaceError, match="unknown macros: NO_SUCH_MACRO"):
            lower(template, **given, macros={"NO_SUCH_MACRO": 1})


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_compiler_sees_the_same_constants(template: str) -> None:
    takes = template_interface(template).kernel({})
    declared = {takes.params[name] for name in set(takes.params) - takes.push_only}
    # The optimizer drops those that are not used.
    assert spec_ids(compile_template(template, {})) <= declared | set(takes.constants.values())


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_compiler_sees_the_same_bindings(template: str) -> None:
    takes = template_interface(template).kernel({})
    bindings = {slot.binding for slot in takes.buffers.values()}
    # The optimizer drops those that are not used.
    assert set(decorated(compile_template(template, {}), 33).values()) <= bindings
    assert bindings or not takes.params, "a kernel has a buffer"


def test_every_macro_of_a_condition_is_declared() -> None:
    """A macro that a condition reads has a default, is declared, or is defined by the template."""
    wrong = {}
    for template in TEMPLATES:
        files = source_files((GLSL_FOLDER / template).read_text(encoding="utf-8"), name=template)
        known = set(template_interface(template).macros) | {"defined"}
        tested = set()
        for text in files.values():
            known |= set(DEFINED.findall(text))
            tested |= {name for line in TESTED.findall(text) for name in NAME.findall(line)}
        wrong[template] = {name for name in tested - known if not name.startswith(OWN)}
    assert not {template: names for template, names in wrong.items() if names}


def test_numbers_stand_in_declarations_only() -> None:
    """No line takes a specialization constant or a binding without declaring its name."""
    for path in GLSL_FOLDER.rglob("*.*"):
        if path.name not in ("common.glslh", "params.glslh"):
            text = path.read_text(encoding="utf-8")
            assert not re.findall(r"\bPARAM_\d+|\bconstant_id\b", text), path.name
            assert "binding =" not in text, path.name


def test_numbers_are_rounded_by_functions_that_are_right_for_double() -> None:
    """`trunc` and `roundEven` of Mesa round ties of doubles towards zero on some processors, so only
    `pv_trunc` and `pv_round` may use them."""
    raw = re.compile(r"(?<![\w.])(?:trunc|roundEven)\(")
    texts = [
        *GLSL_FOLDER.rglob("*.comp"),
        *GLSL_FOLDER.rglob("*.glslh"),
        *(GLSL_FOLDER.parent / "ops").rglob("*.py"),
    ]
    found = [
        f"{path.name}: {line.strip()}"
        for path in texts
        if path.name != "math.glslh" and path.parent.name != "quantized"  # has no doubles
        for line in path.read_text().splitlines()
        if raw.search(line.partition("//")[0])
    ]
    assert not found, "\n".join(found)


def test_the_ladder_is_current() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_params.py", "--check"], check=True)
