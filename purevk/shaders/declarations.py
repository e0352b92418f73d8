"""The declarations of a kernel template: one line that GLSL and Python both read.

    PARAM(7, row_stride)              word 7 of the push constants, or specialization constant 7
    SPEC_CONSTANT(12, kernel_h)       specialization constant 12, never a push constant
    PUSH_CONSTANT(3, d0)              word 3 of the push constants, never a specialization constant
    RAW_PUSH_CONSTANT(0, count)       the same without a variable: the text reads `push.p[0]`
    layout(local_size_x_id = 100) in; specialization constant `local_size_x`

    READONLY_BUFFER(0, x, float)      storage buffer `x`, binding 0: `float buf_x[]`, only read
    WRITEONLY_BUFFER(1, out, float)   the same, only written
    BUFFER(1, out, float)             the same, read and written
    TEXEL_BUFFER(0, x)                uniform texel buffer `x`, binding 0: `samplerBuffer buf_x`
    UTEXEL_BUFFER(0, x)               the same of unsigned integers
    BUFFER_VIEW(0, x, x4, vec4)       the buffer `x` of binding 0 with other elements: no buffer of
                                      its own

    LOOPS(loop(columns / LOCAL))      how many iterations the loops of an invocation have, at most

`glsl/core/common.glslh` defines these macros. The number of a binding may be an expression of
macros, such as `2 + BIAS`.

`LOOPS` takes an expression of parameters, constants and macros. `workgroups` are those along x
and y, `subgroup_size` is that of the kernel. The functions are min, max, ceil(a, b) for a / b
rounded up, log2 (rounded up), and loop:

    loop(n)                a loop of n iterations
    loop(n, loop(m) * 2)   n iterations, each of which has two loops of m

Several declarations add up. Loops that UNROLL stands before are not loops in the end, and do not
count.

    UNROLLED_CODE(KH * KW * PX)           how many products UNROLL makes of those in a loop, about

A template may have the macro ROLLED: what is above `max_depthwise_code` of the profile gets it, 1 or
2, and then so many loops, the outer ones first, stay loops. Of others `max_unrolled_code` is the
limit.
"""

import re
from functools import lru_cache
from typing import NamedTuple

_CONSTANT = re.compile(
    r"\b(PARAM|SPEC_CONSTANT|PUSH_CONSTANT|RAW_PUSH_CONSTANT)[ \t]*"
    r"\([ \t]*(\d+)[ \t]*,[ \t]*(\w+)[ \t]*\)"
)
_LOCAL_SIZE = re.compile(r"\b(local_size_x)_id[ \t]*=[ \t]*(\d+)")
_BUFFER = re.compile(r"\b(\w*BUFFER)[ \t]*\([ \t]*([^,()]+?)[ \t]*,[ \t]*(\w+)[ \t]*[,)]")
_ACCESS = {
    "READONLY_BUFFER": "r",
    "WRITEONLY_BUFFER": "w",
    "BUFFER": "rw",
    "TEXEL_BUFFER": "r",
    "UTEXEL_BUFFER": "r",
}
_LOOPS = re.compile(r"\b(LOOPS|UNROLLED_CODE)[ \t]*(?=\()")
_HINT = re.compile(
    "PARAM|_CONSTANT|local_size_x_id|BUFFER|LOOPS|UNROLLED_CODE"
)  # one of these is in each declaration


class ConstantDeclaration(NamedTuple):
    """`kind` is PARAM, SPEC_CONSTANT, PUSH_CONSTANT or RAW_PUSH_CONSTANT."""

    kind: str
    name: str
    number: int


class BufferDeclaration(NamedTuple):
    """A storage buffer or (`texel`) a uniform texel buffer.

    Attributes:
        name: what Python calls it. GLSL's name is `buf_` and this.
        number: of the binding: an integer expression of macros.
        access: "r", "w" or "rw".
    """

    name: str
    number: str
    access: str
    texel: bool


class LoopDeclaration(NamedTuple):
    """`iterations`: an expression of those that loops have, or (`unrolled`) had."""

    iterations: str
    unrolled: bool


Declaration = ConstantDeclaration | BufferDeclaration | LoopDeclaration


def may_declare(text: str) -> bool:
    """Whether a text may hold a declaration: a quick test."""
    return _HINT.search(text) is not None


@lru_cache(maxsize=4096)
def declarations(text: str) -> tuple[Declaration, ...]:
    """The declarations in a line of GLSL, or in the text of a macro."""
    if not may_declare(text):
        return ()
    found: list[Declaration] = [
        ConstantDeclaration(m[1], m[3], int(m[2])) for m in _CONSTANT.finditer(text)
    ]
    found += [
        ConstantDeclaration("SPEC_CONSTANT", m[1], int(m[2])) for m in _LOCAL_SIZE.finditer(text)
    ]
    found += [
        BufferDeclaration(m[3], m[2], _ACCESS[m[1]], "TEXEL" in m[1])
        for m in _BUFFER.finditer(text)
        if m[1] in _ACCESS
    ]
    found += [
        LoopDeclaration(_in_brackets(text, m.end()), m[1] == "UNROLLED_CODE")
        for m in _LOOPS.finditer(text)
    ]
    return tuple(found)


def _in_brackets(text: str, start: int) -> str:
    """What is between the bracket at `start` and the one that closes it."""
    depth = 0
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if not depth:
            return text[start + 1 : end]
    return text[start + 1 :]


def macro_name(macro: str) -> str:
    """The name of a macro that may be written with its parameters: `X(c0)` is X."""
    return macro.partition("(")[0].strip()
