"""Writes the expressions of scores and masks for the attention kernels: the macros and buffers that
`attention_io.glslh` takes for a `ScoreProgram`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.lower.declarations import buffer
from purevk.lower.lowering import MAX_PUSH, Operand
from purevk.ops.attention.score_program import ScoreProgram
from purevk.shaders.interface import EXTRA_BINDING

_STATEMENT = re.compile(r"((?:precise )?(\w+)) (t\d+) = (.*?);(?= (?:precise )?\w+ t\d+ = |$)")
_FIRST_WORD = 28  # of the parameters, after those of all attention kernels


@dataclass
class ScoreFunctions:
    """Macros, buffers and parameters of a program."""

    macros: dict[str, str | int] = field(default_factory=dict)
    buffers: dict[str, tuple[Operand, str]] = field(default_factory=dict)
    params: dict[str, Size] = field(default_factory=dict)


def write_functions(
    program: ScoreProgram, sizes: Sequence[Size], extras: Sequence[Operand]
) -> ScoreFunctions:
    """The functions of a program.

    Args:
        sizes: the scalars of its expression.
        extras: the buffers that it gathers from.
    """
    return _Writer(program).write(sizes, extras)


class _Writer:
    def __init__(self, program: ScoreProgram) -> None:
        self.program = program
        self.made = ScoreFunctions()
        self.text: list[str] = []

    def write(self, sizes: Sequence[Size], extras: Sequence[Operand]) -> ScoreFunctions:
        program, made = self.program, self.made
        for number, operand in enumerate(extras):
            self._gather(number, operand)
        scalars = [self._number(size, f"n{number}") for number, size in enumerate(sizes)]
        # What follows from the batch and the head alone is computed once.
        names = ["score", "int(WORKGROUP_ID.z)", "HEAD_INDEX", "s", "t"]
        once, (steps, _), ((score, seen, *uniforms), _) = program.expression.glsl_of_lanes(
            [names, names], [False, True, True, False, False], scalars
        )
        made.macros = {
            "SCORED": int(program.scored),
            "MASKED": int(program.masked),
            "BOUNDED": int(program.bounds is not None),
            "EXACT_BOUNDS": int(program.exact),
            "BEGIN_STEPS": self._begin(once),
            "SCORE_STEPS": steps,
            "SCORE": score,
            "SEEN": seen,
        }
        if program.bounds is not None:
            names = ["s0", "s1", "t0", "t1", *uniforms]
            made.macros["BOUND_STEPS"], (made.macros["MAY_SEE"],) = program.bounds.glsl(
                names, prefix="b"
            )
        made.macros["EXTRA_BUFFERS"] = " ".join(self.text)
        dtypes = {operand.dtype for operand in extras} | set(program.expression.dtypes)
        if program.bounds is not None:
            dtypes |= set(program.bounds.dtypes)
        if DType.int64 in dtypes:
            made.macros["HAS_INT64"] = 1
        return made

    def _begin(self, statements: str) -> str:
        """The statements that assign what is computed once. The global variables are not `precise`,
        since the optimizer of shaderc takes none that are."""
        made = list(_STATEMENT.finditer(statements))
        self.text += [f"{each[2]} {each[3]};" for each in made]
        return " ".join(f"{{ {each[1]} p = {each[4]}; {each[3]} = p; }}" for each in made)

    def _number(self, size: Size, name: str) -> str:
        """GLSL of a size. As a parameter it lets one pipeline serve several sizes, as long as the
        parameters are push constants."""
        word = _FIRST_WORD + len(self.made.params)
        if isinstance(size, int) and (size in (0, 1) or word >= MAX_PUSH):
            return str(size) if size >= 0 else f"({size})"
        kind = "PARAM" if isinstance(size, int) else "PUSH_CONSTANT"
        self.made.params[f"pv_{name}"] = size
        self.text.append(f"{kind}({word}, pv_{name})")
        return f"pv_{name}"

    def _gather(self, number: int, operand: Operand) -> None:
        """Declares a buffer, and the function that reads an element of it."""
        name, dtype = f"extra{number}", operand.dtype
        self.made.buffers[name] = (operand, "r")
        self.text.append(buffer(f"{EXTRA_BINDING} + {number}", name, dtype.glsl, "r"))
        terms = [self._number(operand.offset, f"offset{number}")]
        for dim, (size, stride) in enumerate(zip(operand.dims, operand.strides)):
            index = f"pv_at(i{dim}, {self._number(size, f'size{number}_{dim}')})"
            terms.append(f"{index} * {self._number(stride, f'stride{number}_{dim}')}")
        arguments = ", ".join(f"int i{dim}" for dim in range(len(operand.dims)))
        at = f"buf_{name}[{' + '.join(terms)}]"
        # A conversion is all that storage of 8 bits allows.
        if dtype is DType.bool:
            element = f"(int({at}) != 0)"
        elif dtype is DType.bfloat16:  # stored as bits
            element = f"uintBitsToFloat(uint({at}) << 16)"
        else:
            element = f"{dtype.acc}({at})"
        self.text.append(f"{dtype.acc} pv_gather{number}({arguments}) {{ return {element}; }}")
