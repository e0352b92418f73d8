"""What templates declare: reading it needs no compiler. What every template of purevk declares is
compared with the compiler in tests/glsl/test_interfaces.py."""

from __future__ import annotations

from typing import ClassVar

import pytest

from purevk.dtypes import DType
from purevk.errors import KernelInterfaceError, ShaderCompilerError
from purevk.ir import Dim, Symbol, TensorType, Value
from purevk.lower.loops import iterations
from purevk.lower.lowering import Lowering
from purevk.shaders.interface import TemplateInterface
from purevk.shaders.templates import add_template
from purevk.tuning import DeviceTraits

TEXT = """\
#version 450
#include "io.glslh"
// PARAM(9, in_a_comment)
#ifndef RANK
#define RANK 1   // how many dims
#endif
PARAM(0, x_offset)
PARAM( 1 , rows )   // PARAM(8, in_a_comment)
#if RANK > 1 && !defined(FLAT)
PARAM(2, stride)
#elif defined FLAT
PARAM(3, stride)
#else
PARAM(4, last)
#endif
#define WIDE (RANK * 2 \\
    > 5)
#if WIDE
SPEC_CONSTANT(5, wide)
#endif
#pragma purevk macro FLAT  BODY
layout(local_size_x_id = 100) in;
#define OUTPUT (1 + WIDE)   // read by a binding alone
WRITEONLY_BUFFER(OUTPUT, out, VEC4_OF(T))
#if WIDE
TEXEL_BUFFER( 1 , table )
#endif
// READONLY_BUFFER(7, in_a_comment, float)
READONLY_BUFFER(0, x, float) BUFFER_VIEW(0, x, x4, vec4)
#define EXTRA_BINDING (OUTPUT + 1)
"""
IO = """\
#ifndef PUREVK_IO_GLSLH
#define PUREVK_IO_GLSLH
#ifndef LOAD
#define LOAD(v) float(v)
#endif
#if BIAS
PARAM(7, offset_bias)
#endif
#ifndef BIAS
#define BIAS 0
#endif
#endif
"""


def parse(text: str = TEXT, **files: str) -> TemplateInterface:
    found = {"io.glslh": IO, **files}
    return TemplateInterface.parse(text, "test.comp", lambda name: (name, found[name]))


@pytest.mark.parametrize(
    ("macros", "params", "constants"),
    [
        ({}, "x_offset=0 rows=1 last=4", "local_size_x=100"),
        ({"RANK": "2"}, "x_offset=0 rows=1 stride=2", "local_size_x=100"),
        ({"RANK": "2", "FLAT": "1"}, "x_offset=0 rows=1 stride=3", "local_size_x=100"),
        ({"RANK": "3"}, "x_offset=0 rows=1 stride=2", "local_size_x=100 wide=5"),
        ({"BIAS": "1"}, "offset_bias=7 x_offset=0 rows=1 last=4", "local_size_x=100"),
        (
            {"BODY": "PUSH_CONSTANT(5, d0) SPEC_CONSTANT(6, d1)"},
            "x_offset=0 rows=1 last=4 d0=5",
            "local_size_x=100 d1=6",
        ),
    ],
)
def test_declarations_of_a_kernel(macros: dict[str, str], params: str, constants: str) -> None:
    made = parse().kernel(macros)
    shown = lambda numbers: {f"{name}={number}" for name, number in numbers.items()}  # noqa: E731
    assert shown(made.params) == set(params.split())
    assert shown(made.constants) == set(constants.split())


@pytest.mark.parametrize(
    ("macros", "buffers"),
    [
        ({}, "x=0:r out=1:w"),
        ({"RANK": "3"}, "x=0:r table=1:r:texel out=2:w"),
        ({"BODY": "BUFFER(EXTRA_BINDING + 0, extra, int) v;"}, "x=0:r out=1:w extra=2:rw"),
        ({"BODY": "BUFFER(EXTRA_BINDING, e, int)", "RANK": "3"},
         "x=0:r table=1:r:texel out=2:w e=3:rw"),
    ],
)  # fmt: skip
def test_buffers_of_a_kernel(macros: dict[str, str], buffers: str) -> None:
    found = parse().kernel(macros).buffers
    assert (
        " ".join(
            f"{name}={slot.binding}:{slot.access}{':texel' if slot.texel else ''}"
            for name, slot in found.items()
        )
        == buffers
    )


def test_macros_of_a_template() -> None:
    made = parse()
    assert made.macros == {"RANK", "FLAT", "BODY", "LOAD", "BIAS"}
    assert made.conditions >= {"RANK", "FLAT", "BIAS"}
    made.check_macros(["LOAD(v)", "FLAT"], ["X(c0)"])
    with pytest.raises(KernelInterfaceError, match="unknown macros: RANKS"):
        made.check_macros(["RANKS"])
    with pytest.raises(KernelInterfaceError, match="declares these macros itself: LOAD"):
        made.check_macros([], ["LOAD(v)"])


def test_a_file_counts_once() -> None:
    again = 'PARAM(0, a)\n#if B\n#include "io.glslh"\n#endif\n#include "io.glslh"\n'
    made = TemplateInterface.parse(again, "t", lambda name: (name, "PARAM(1, b)\n"))
    for macros in ({}, {"B": "1"}):
        assert made.kernel(macros).params == {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PARAM(0, a)\nPARAM(1, a)", "a is declared twice"),
        ("PARAM(0, a)\nPARAM(0, b)", "number 0, which another has"),
        ("PARAM(0, a)\nSPEC_CONSTANT(0, b)", "parameter a has the number of a constant"),
        ("#if A\nPARAM(0, a)", "without #endif"),
        ("#endif", "#endif without #if"),
        ("#if A(1)\nPARAM(0, a)\n#endif", "cannot be evaluated"),
        ("#if 1 +\nPARAM(0, a)\n#endif", "cannot be evaluated"),
        ("#if (1\nPARAM(0, a)\n#endif", "cannot be evaluated"),
        ("#define A (B)\n#if A\nPARAM(0, a)\n#endif", "cannot be evaluated"),
        ("#if 1.5\nPARAM(0, a)\n#endif", "cannot be evaluated"),
        ("BUFFER(0, a, float)\nBUFFER(1, a, float)", "the buffer a is declared twice"),
        ("BUFFER(0, a, float)\nREADONLY_BUFFER(0, b, int)", "without gaps: a 0, b 0"),
        ("BUFFER(0, a, float)\nTEXEL_BUFFER(2, b)", "without gaps: a 0, b 2"),
        ("BUFFER(1 + NO_SUCH_MACRO, a, float)", "NO_SUCH_MACRO' cannot be evaluated"),
        ("BUFFER(EXTRA_BINDING, a, float)", "EXTRA_BINDING' cannot be evaluated"),
    ],
)
def test_texts_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(KernelInterfaceError, match=message):
        parse(text).kernel({})


def test_a_default_that_declares() -> None:
    """The default of a macro counts where the kernel gives no text of its own."""
    text = (
        "#ifndef BUFFERS\n#define BUFFERS READONLY_BUFFER(0, x, float) BUFFER(1, y, float)\n"
        "#define LOAD(v) READONLY_BUFFER(2, v, float)\n#endif\nBUFFERS\n"
    )
    template = TemplateInterface.parse(text, "own.comp")
    assert list(template.kernel({}).buffers) == ["x", "y"]
    given = template.kernel({"BUFFERS": "WRITEONLY_BUFFER(0, z, float)"})
    assert list(given.buffers) == ["z"]


def test_an_include_that_is_missing() -> None:
    def find(name: str) -> tuple[str, str]:
        raise ShaderCompilerError(f"{name} cannot be read")

    with pytest.raises(ShaderCompilerError, match=r"none\.glslh cannot be read"):
        TemplateInterface.parse('#include "none.glslh"', "t", find)


@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ("1", 1),
        ("A", 1),
        ("B", 0),
        ("UNKNOWN", 0),
        ("!UNKNOWN", 1),
        ("-A + 2 == 3 - 2", 1),
        ("C * 2 - 1 == 9", 1),
        ("C % 3 == 2 && C / 2 == 2", 1),
        ("(A || B) && B", 0),
        ("A || B && B", 1),
        ("1 << 3 >= 0x8u", 1),
        ("7 & 2 | 8 ^ 8", 1),
        ("~0 < 0 && +1 > 0", 1),
        ("C <= 4 || C != 5", 0),
        ("defined(C) && defined B && !defined(UNKNOWN)", 1),
        ("C / 0", 0),
        ("ITSELF", 0),
    ],
)
def test_conditions(condition: str, value: int) -> None:
    macros = {"A": "1", "B": "0", "C": "(A + 4)", "ITSELF": "ITSELF"}
    text = f"#if {condition}\nPARAM(0, yes)\n#else\nPARAM(0, no)\n#endif"
    assert list(parse(text).kernel(macros).params) == ["yes" if value else "no"]


class TestDispatches:
    """Names of a dispatch are compared with the template when it is lowered."""

    NAME = add_template("interface_test", TEXT.replace('#include "io.glslh"\n', ""))
    VALUE = Value("v", TensorType(DType.float32, (4,)))
    BUFFERS: ClassVar[dict[str, tuple[Value, str]]] = {"out": (VALUE, "w"), "x": (VALUE, "r")}
    GOOD: ClassVar[dict[str, dict]] = {
        "tensors": BUFFERS,
        "params": {"x_offset": 3, "rows": 4, "last": 5},
        "constants": {"local_size_x": 64},
        "macros": {"BODY": "X(0)"},
        "helpers": {"X(c0)": "c0"},
    }

    def lower(self, **changed):
        lowering = Lowering(DeviceTraits(frozenset()), {}, {})
        lowering.dispatch(self.NAME, grid=(1, 1, 1), **{**self.GOOD, **changed})
        (made,) = lowering.dispatches
        return made

    def test_bindings_come_from_the_template(self) -> None:
        made = self.lower()
        assert [binding.write for binding in made.bindings] == [False, True]
        assert made.kernel.bindings == ("storage", "storage")

    def test_numbers_come_from_the_template(self) -> None:
        made = self.lower(specialize=["rows"])
        assert made.push == (3, 0, 0, 0, 5)
        assert made.kernel.constants == ((1, 4), (100, 64))
        assert dict(made.kernel.macros) == {
            "BODY": "X(0)",
            "X(c0)": "c0",
            "PUSH_0": "1",
            "PUSH_4": "1",
        }

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"params": {"x_offset": 3, "rows": 4}}, "missing parameters: last"),
            (
                {"params": {"x_offset": 3, "rows": 4, "lost": 5}},
                "unknown .*: lost; missing .*: last",
            ),
            ({"macros": {"RANK": 2}}, "unknown parameters: last; missing parameters: stride"),
            ({"constants": {}}, "missing constants: local_size_x"),
            ({"constants": {"local_size_x": 64, "wide": 1}}, "unknown constants: wide"),
            ({"constants": {"local_size_x": "64"}}, "no known integers: local_size_x"),
            ({"specialize": ["stride"]}, "cannot become constants: stride"),
            ({"macros": {"RANKS": 2}}, "unknown macros: RANKS"),
            ({"helpers": {"RANK": 2}}, "declares these macros itself: RANK"),
            ({"tensors": {"x": (VALUE, "r")}}, "missing buffers: out"),
            ({"tensors": {**BUFFERS, "y": (VALUE, "r")}}, "unknown buffers: y"),
            ({"tensors": {**BUFFERS, "x": (VALUE, "rw")}}, "the buffer x is used as 'rw'"),
            ({"tensors": {**BUFFERS, "out": (VALUE, "r")}}, "the buffer out is used as 'r'"),
            ({"tensors": {**BUFFERS, "x": (VALUE, "r:r32f")}}, "the buffer x is used as 'r:r32f'"),
            (
                {
                    "macros": {"BODY": "BUFFER(EXTRA_BINDING, sums, float)"},
                    "tensors": {**BUFFERS, "sums": (VALUE, "r")},
                },
                "the buffer sums is used as 'r'",
            ),
        ],
    )
    def test_wrong_names(self, changed: dict, message: str) -> None:
        with pytest.raises(KernelInterfaceError, match=message):
            self.lower(**changed)


LOOPS = """\
#version 450
#ifndef WIDE
#define WIDE 0
#endif
PARAM(0, rows)
PARAM(1, columns)
#define EACH (WIDE == 1 ? 4 : 1)
#if WIDE
LOOPS(loop(ceil(columns, EACH), 2 * loop(log2(rows) - 1)) + min(rows, 3))
#else
LOOPS(loop(columns / EACH)) // and
LOOPS(max(rows, 1 << 2))
#endif
#ifndef BODY
#define BODY
#endif
"""


@pytest.mark.parametrize(
    ("macros", "count"),
    [
        ({}, 10 + 1 + 8),
        ({"BODY": "x = 1; LOOPS(loop(SPAN)) for (;;) {}", "SPAN": "(2 + 3)"}, 10 + 1 + 8 + 6),
        ({"WIDE": "1"}, 3 * (1 + 2 * 3) + 1 + 3),
    ],
)
def test_the_iterations_of_loops(macros: dict[str, str], count: int) -> None:
    loops = parse(LOOPS).kernel(macros).loops
    assert iterations("test.comp", loops, {"rows": 8, "columns": 10, "functions": 0}) == count


def test_loops_of_sizes_that_vary() -> None:
    size = Dim.of(Symbol("s0", 1, 100))
    made = iterations(
        "t", parse(LOOPS).kernel({}).loops, {"rows": 1, "columns": size, "functions": 7}
    )
    assert made == size + 1 + 4 + 7


def test_wrong_names_in_loops_are_refused() -> None:
    loops = parse(LOOPS).kernel({}).loops
    with pytest.raises(KernelInterfaceError, match="LOOPS names 'columns'"):
        iterations("t", loops, {"rows": 1, "functions": 0})
