"""Pointwise programs: a few steps of GLSL per element, which the fusion pass joins and the
templates are given as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from purevk.dtypes import DType
from purevk.ir import Size, Value
from purevk.ir import dims as _dims
from purevk.shaders.code_size import code_size


@dataclass(frozen=True)
class Step:
    """One assignment. `glsl` names its operands $0, $1, ...; `dtype` is the type of the result;
    `name`, of the operator that it computes, is for people."""

    glsl: str
    operands: tuple[int, ...]
    dtype: DType
    name: str = field(default="", compare=False)


@dataclass(frozen=True)
class Expression:
    """A program over one element of each input.

    Operand numbers count the inputs first, then the scalars (numbers known at a call), then the
    steps.

    Attributes:
        inputs: dtypes of the tensors read.
        scalars: dtypes of the numbers known only at a call.
        steps: assignments in order.
        outputs: operand numbers of the results.
    """

    inputs: tuple[DType, ...]
    scalars: tuple[DType, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    @property
    def dtypes(self) -> tuple[DType, ...]:
        return self.inputs + self.scalars + tuple(step.dtype for step in self.steps)

    @property
    def names(self) -> tuple[str, ...]:
        """The operators that were joined, as far as they are known."""
        return tuple(step.name for step in self.steps if step.name)

    @property
    def code_size(self) -> int:
        """How much code the steps become (`shaders/code_size.py`)."""
        return sum(
            _code_size(step.glsl, step.dtype) for step in self.steps if not self._rounds_input(step)
        )

    def _rounds_input(self, step: Step) -> bool:
        """Whether a step rounds an input, which memory has rounded."""
        return (
            step.glsl == ROUND.get(step.dtype)
            and step.operands[0] < len(self.inputs)
            and self.inputs[step.operands[0]] is step.dtype
        )

    def glsl(
        self, inputs: Sequence[str], scalars: Sequence[str] = (), prefix: str = "t"
    ) -> tuple[str, tuple[str, ...]]:
        """The statements, and the names that hold the outputs, for inputs that are already in
        variables."""
        _, (text,), (results,) = self.glsl_of_lanes(
            [inputs], [False] * len(inputs), scalars, (prefix,)
        )
        return text, results

    def glsl_of_lanes(
        self,
        inputs: Sequence[Sequence[str]],
        same: Sequence[bool],
        scalars: Sequence[str] = (),
        prefixes: Sequence[str] = (),
    ) -> tuple[str, list[str], list[tuple[str, ...]]]:
        """The statements for several elements: those that all have in common, then those of each,
        and the names that hold the outputs of each.

        Args:
            inputs: for each element, the variables of its inputs.
            same: inputs that are the same for all.
            prefixes: of the names of each element's steps.
        """
        if len(inputs) > 1:
            common = [*same, *[True] * len(self.scalars)]
            prefixes = prefixes or [f"t{lane}_" for lane in range(len(inputs))]
        else:
            common = [False] * (len(same) + len(self.scalars))
            prefixes = prefixes or ["t"]
        names = [[*lane, *scalars] for lane in inputs]
        once: list[str] = []
        each: list[list[str]] = [[] for _ in inputs]
        for step in self.steps:
            common.append(len(inputs) > 1 and all(common[operand] for operand in step.operands))
            if self._rounds_input(step):
                for lane_names in names:
                    lane_names.append(lane_names[step.operands[0]])
                continue
            for lane, prefix in enumerate(prefixes):
                name = f"{'t' if common[-1] else prefix}{len(names[lane])}"
                operands = [names[lane][operand] for operand in step.operands]
                text = _with_operands(step.glsl, operands)
                if not common[-1] or lane == 0:
                    (once if common[-1] else each[lane]).append(
                        f"{_declaration(step.dtype)} {name} = {text};"
                    )
                names[lane].append(name)
        return (
            " ".join(once),
            [" ".join(text) for text in each],
            [tuple(lane[o] for o in self.outputs) for lane in names],
        )


def _with_operands(glsl: str, operands: Sequence[str]) -> str:
    """The text of a step with the names of its operands for $0, $1, ..."""
    return re.sub(r"\$(\d+)", lambda match: operands[int(match[1])], glsl)


class Term(NamedTuple):
    """What a step of an unfinished expression can read: an input, a scalar or a step, by number."""

    kind: Literal["input", "scalar", "step"]
    number: int


# GLSL, operands and dtype of a step of an unfinished expression. Not a class: there are many.
_TermStep: TypeAlias = tuple[str, tuple[Term, ...], DType]


def times_zero(dtype: DType) -> str:
    """GLSL for $0 * 0. Compilers take the product for 0, also where $0 is infinite or NaN."""
    return f"(pv_isnan($0) || pv_isinf($0) ? PV_NAN : pv_copysign({_OPAQUE_ZEROS[dtype is DType.float64]}, $0))"


def _declaration(dtype: DType) -> str:
    """`precise` keeps a compiler from taking x - x for 0 where x is infinite or NaN."""
    return f"precise {dtype.acc}" if dtype.is_float else dtype.acc


def _code_size(glsl: str, dtype: DType) -> int:
    return code_size(glsl, dtype is DType.float64, not dtype.is_float and dtype is not DType.bool)


# Compilers compute with constants as if 0.0 and -0.0 were one number: of a choice between -1.0 and 0.0
# they make the negative of another one, of 0.0 - x they make -x, of x + 0.0 x. So bits of zeros depend
# on a number that only a dispatch knows; workgroups are fewer than 2^31.
_NO_BITS = "gl_NumWorkGroups[0] >> 31"
_OPAQUE_ZEROS = (f"uintBitsToFloat({_NO_BITS})", f"packDouble2x32(uvec2(0u, {_NO_BITS}))")
_MINUS_ZEROS = tuple(text.replace(_NO_BITS, f"0x80000000u | {_NO_BITS}") for text in _OPAQUE_ZEROS)
# Zeros that are chosen or added. Others, of comparisons and bounds, stay constants.
_RESULT_ZERO = re.compile(
    r"(?<=[?:+-] )\(0\.0(lf)?\)(?! [<>=!])|(?<![?:+-] )\(0\.0(lf)?\)(?= [+-] )"
)
# GLSL that rounds $0, a float, to the nearest number of a dtype.
ROUND = {DType.float16: "pv_round_float16($0)", DType.bfloat16: "pv_round_bfloat16($0)"}
# GLSL of a number of 64 bits whose lower 32 bits are $0 and whose others are $1.
_OF_WORDS = {
    "bool": "(($0 | $1) != 0)",
    "int64_t": "packInt2x32(ivec2($0, $1))",
    "float": "pv_float_of_words($1, uint($0))",
    "double": "(double($1) * 4294967296.0lf + double(uint($0)))",
}
# Steps that give 0 if all of their operands are 0.
_KEEPS_ZERO = ("($0 * $1)", "($0 * $0)", *ROUND.values())


class ExpressionBuilder:
    """Joins expressions. Equal steps are kept once.

    Attributes:
        inputs: the tensors that are read, in the order of first mention.
        scalars: the numbers known only at a call, in the order of first mention.
    """

    def __init__(self) -> None:
        self.inputs: dict[Value, DType] = {}
        self.scalars: dict[Size, DType] = {}
        self._inputs: dict[Value, Term] = {}
        self._scalars: dict[Size, Term] = {}
        self._steps: dict[_TermStep, Term] = {}
        self._names: list[str] = []
        self._code_size = 0
        self._zeros: set[Term] = set()
        self._rounded: dict[Term, DType] = {}
        self._stored: dict[Term, Term] = {}

    def input(self, value: Value, dtype: DType) -> Term:
        if value not in self.inputs:
            self._inputs[value] = Term("input", len(self.inputs))
            self.inputs[value] = dtype
        return self._inputs[value]

    def rounded_input(self, value: Value) -> Term:
        """An element as memory holds it. Where this program is joined with the one that makes the
        tensor, that one's result has the digits of float32."""
        dtype = value.type.dtype
        return self.rounded(self.input(value, dtype), dtype)

    def rounded(self, term: Term, dtype: DType) -> Term:
        """A term as memory would hold it in a dtype of 16 bits; of other dtypes the term itself."""
        return self.step(ROUND[dtype], [term], dtype) if dtype in ROUND else term

    def stored(self, term: Term, dtype: DType) -> Term:
        """A result that memory holds in float32 with the digits of `dtype`, one of 16 bits."""
        is_rounded = self._rounded.get(term) is dtype
        return self.step("$0" if is_rounded else ROUND[dtype], [term], DType.float32)

    def before_storing(self, term: Term) -> Term:
        """The term that `stored` has rounded, as a program reads it that needs no memory between."""
        return self._stored.get(term, term)

    def scalar(self, size: Size, dtype: DType) -> Term:
        if size not in self.scalars:
            self._scalars[size] = Term("scalar", len(self.scalars))
            self.scalars[size] = dtype
        return self._scalars[size]

    def number(self, size: Size, dtype: DType) -> Term:
        """A number known only at a call, as an element of a dtype. It may have 64 bits, unless
        `dtype` has fewer."""
        low, high = _dims.range_of(size)
        if (-(2**31) <= low and high < 2**31) or dtype.acc not in _OF_WORDS:
            term, text = self.scalar(size, DType.int32), convert("$0", DType.int32, dtype)
            term = term if text == "$0" else self.step(text, [term], dtype)
        else:
            lower = size - 2**32 * ((size + 2**31) // 2**32)
            words = [self.scalar(word, DType.int32) for word in (lower, size // 2**32)]
            term = self.step(_OF_WORDS[dtype.acc], words, dtype)
        return self.rounded(term, dtype)

    def step(self, glsl: str, operands: Sequence[Term], dtype: DType, name: str = "") -> Term:
        """Appends a step; `name` is the operator that it computes."""
        if "(0.0" in glsl:
            glsl = _with_opaque_zeros(glsl)
        zeros = [operand in self._zeros for operand in operands]
        if any(zeros) and dtype.is_float:
            if all(zeros) and glsl in _KEEPS_ZERO:
                return operands[0]
            if glsl == "($0 * $1)":
                glsl, operands = times_zero(dtype), [operands[zeros.index(False)]]
        rounds = glsl == ROUND.get(dtype)
        if rounds and self._rounded.get(operands[0]) is dtype:
            return operands[0]
        step: _TermStep = (glsl, tuple(operands), dtype)
        found = self._steps.get(step)
        if found is None:
            found = self._steps[step] = Term("step", len(self._steps))
            if glsl in _OPAQUE_ZEROS:
                self._zeros.add(found)
            if rounds:
                self._rounded[found] = dtype
            elif glsl in ROUND.values() and dtype is DType.float32:
                self._stored[found] = operands[0]
            self._names.append(name)
            self._code_size += _code_size(glsl, dtype)
        return found

    def inline(self, expression: Expression, operands: Sequence[Term]) -> list[Term]:
        """Appends an expression's steps, with `operands` for its inputs and scalars. Returns its
        outputs."""
        names = list(operands)
        for step in expression.steps:
            inner = [names[operand] for operand in step.operands]
            names.append(self.step(step.glsl, inner, step.dtype, step.name))
        return [names[output] for output in expression.outputs]

    def mark(self) -> tuple[int, int, int]:
        """The state that `return_to` takes."""
        return len(self.inputs), len(self.scalars), len(self._steps)

    def return_to(self, mark: tuple[int, int, int]) -> None:
        """Forgets what was added since `mark`."""
        inputs, scalars, steps = mark
        while len(self.inputs) > inputs:
            del self._inputs[self.inputs.popitem()[0]]
        while len(self.scalars) > scalars:
            del self._scalars[self.scalars.popitem()[0]]
        while len(self._steps) > steps:
            (glsl, _, dtype), term = self._steps.popitem()
            self._zeros.discard(term)
            self._rounded.pop(term, None)
            self._stored.pop(term, None)
            self._code_size -= _code_size(glsl, dtype)
        del self._names[steps:]

    def needs_at_most(self, steps: int, size: int, outputs: Sequence[Term]) -> bool:
        """Whether `outputs` need no more than so many steps, of a code size of no more than
        `size`."""
        if len(self._steps) <= steps and self._code_size <= size:
            return True
        needed = self._needed(outputs)
        if len(needed) > steps:
            return False
        unfinished = list(self._steps)
        return sum(_code_size(*unfinished[number][::2]) for number in needed) <= size

    def _needed(self, outputs: Sequence[Term]) -> set[int]:
        unfinished = list(self._steps)
        needed: set[int] = set()
        stack = list(outputs)
        while stack:
            kind, number = stack.pop()
            if kind == "step" and number not in needed:
                needed.add(number)
                stack.extend(unfinished[number][1])
        return needed

    def build(self, outputs: Sequence[Term]) -> Expression:
        """The expression of the steps that `outputs` need. Inputs and scalars keep the order of
        first mention."""
        needed = self._needed(outputs)
        leaves = (*self._inputs.values(), *self._scalars.values())
        position = {operand: number for number, operand in enumerate(leaves)}
        steps = []
        for number, ((glsl, operands, dtype), term) in enumerate(self._steps.items()):
            if number in needed:
                numbers = tuple([position[operand] for operand in operands])
                steps.append(Step(glsl, numbers, dtype, self._names[number]))
                position[term] = len(position)
        return Expression(
            tuple(self.inputs.values()),
            tuple(self.scalars.values()),
            tuple(steps),
            tuple(position[output] for output in outputs),
        )


def is_zero(number: float, dtype: DType) -> bool:
    """Whether a number is 0 in the type in which `dtype`, one of floats, is computed."""
    return abs(number) <= (0.0 if dtype is DType.float64 else 2.0**-150)


def _with_opaque_zeros(glsl: str) -> str:
    """The text of a step whose zeros keep their sign in the result."""
    if glsl in ("(0.0)", "(0.0lf)"):
        return _OPAQUE_ZEROS[glsl == "(0.0lf)"]
    return _RESULT_ZERO.sub(lambda match: _OPAQUE_ZEROS["lf" in match[0]], glsl)


def literal(value: float | int | bool, dtype: DType) -> str:
    """A number as GLSL of the type in which `dtype` is computed."""
    if dtype is DType.bool:
        return "true" if value else "false"
    if dtype.is_int:
        # Numbers wrap around, as torch's do.
        bits = 8 * dtype.itemsize
        number = int(value) % 2**bits
        if dtype is not DType.uint8 and number >= 2 ** (bits - 1):
            number -= 2**bits
        if dtype is DType.int64:
            if -(2**31) < number < 2**31:
                return f"int64_t({number})"
            # No literals of 64 bits: macros are read before the extension that allows them.
            return f"((int64_t({number >> 32}) << 32) | int64_t({number % 2**32}u))"
        return f"({number})" if number > -(2**31) else "(-2147483647 - 1)"
    number = float(value)
    wide = dtype is DType.float64
    if math.isnan(number):
        return "double(uintBitsToFloat(0x7fc00000u))" if wide else "uintBitsToFloat(0x7fc00000u)"
    if (not wide and abs(number) > 3.4028235677973366e38) or math.isinf(number):
        infinity = f"uintBitsToFloat({'0x7f800000u' if number > 0 else '0xff800000u'})"
        return f"double({infinity})" if wide else infinity
    if is_zero(number, dtype):
        if math.copysign(1.0, number) < 0:
            return _MINUS_ZEROS[wide]
        number = 0.0
    text = repr(number)
    if "e" not in text and "." not in text:
        text += ".0"
    return f"({text}{'lf' if wide else ''})"


_NUMBER = re.compile(
    r"(?<![\w.])(\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(?![\w.])"
)


def in_double(text: str) -> str:
    """GLSL that was written for float, in double precision."""
    return _NUMBER.sub(
        r"\1lf", re.sub(r"\b(vec[234])\b", r"d\1", re.sub(r"\bfloat\b", "double", text))
    )


def convert(name: str, source: DType, target: DType) -> str:
    """GLSL that converts an element from the computing type of `source` to that of `target`, as
    torch's `.to()`."""
    if source is target or (
        source.acc == target.acc and target.itemsize >= source.itemsize and source.is_float
    ):
        return name
    if target is DType.bool:
        return name if source is DType.bool else f"({name} != {literal(0, source)})"
    if source is DType.bool:
        # ?: of constants, not a conversion of an int (see pv_int64 in math.glslh).
        text = f"({name} ? {literal(1, target)} : {literal(0, target)})"
        return f"pv_computed{text}" if target.is_float else text
    if target.is_float:
        return name if source.acc == target.acc else f"{target.acc}({name})"
    if source.is_float:
        if target is DType.uint8:
            return f"pv_to_byte({name})"
        text = f"pv_to_int64({name})" if target is DType.int64 else f"pv_to_int({name})"
    elif target is DType.int64 and source.acc == "int":
        text = f"pv_int64({name})"
    else:
        text = name if source.acc == target.acc else f"{target.acc}({name})"
    if target is DType.uint8:
        return f"({text} & 255)"
    if target in (DType.int8, DType.int16):
        shift = 32 - 8 * target.itemsize
        return f"(({text} << {shift}) >> {shift})"
    return text
