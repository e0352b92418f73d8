"""How the statements of `purevk.map` declare, read and write the elements of operands, as GLSL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.ir import Value
from purevk.lower.declarations import buffer
from purevk.lower.elements import acc_of
from purevk.lower.lowering import Operand

VECTOR = {
    DType.float32: "vec4", DType.float16: "f16vec4", DType.int32: "ivec4", DType.int8: "i8vec4", DType.uint8: "u8vec4",
    DType.int16: "i16vec4", DType.bool: "u8vec4",
}  # fmt: skip


@dataclass(frozen=True)
class MapAccess:
    """The operands of a dispatch, and how the statements use them.

    Attributes:
        names, operands: of the inputs, then of the results.
        inputs: the count of inputs.
        windows: for inputs that are larger than one binding, by number, the windows and the elements
            of each.
        words: whether elements of 8 bits are read as words.
        vector: for each operand the dim along which it is read or written as vec4, or None; None:
            none is.
        four: whether the results are stored as vectors of 4.
        fours, atomic: as of `MapSpec`.
        adds_floats: the device adds floats atomically.
    """

    names: Sequence[str]
    operands: Sequence[Operand]
    inputs: int
    windows: Mapping[int, tuple[list[Value], int]]
    words: bool
    vector: Sequence[int | None] | None
    four: bool
    fours: bool
    atomic: bool
    adds_floats: bool

    def is_vector(self, number: int) -> bool:
        return self.vector is not None and self.vector[number] is not None

    def declare(self, number: int, text: str) -> str:
        dtype = self.operands[number].dtype
        whole = self.is_vector(number) or ((self.four or self.fours) and number >= self.inputs)
        element = (
            ("uint" if self.words and dtype.itemsize == 1 else VECTOR[dtype])
            if whole
            else dtype.glsl
        )
        if self.atomic and number >= self.inputs:
            element = "float" if self.adds_floats else "uint"
        return buffer(number, self.names[number].lower(), element, self.mode(number, text))

    def window_names(self, number: int) -> list[str]:
        name = self.names[number].lower()
        return [name, *(f"{name}_w{n}" for n in range(1, len(self.windows[number][0])))]

    def declare_windows(self, number: int) -> str:
        """The windows of an input but the first, and a function that reads an element from them."""
        names, count = self.window_names(number), self.windows[number][1]
        before = [len(windows) - 1 for n, (windows, _) in self.windows.items() if n < number]
        at, element = len(self.operands) + sum(before), self.operands[number].dtype.glsl
        declared = [
            buffer(at + n, name, element, self.mode(number, "")) for n, name in enumerate(names[1:])
        ]
        read = f"buf_{names[-1]}[max(e - {(len(names) - 1) * count}, 0)]"
        for n in reversed(range(len(names) - 1)):
            here = f"buf_{names[n]}[clamp(e - {n * count}, 0, {count - 1})]"
            read = f"e < {(n + 1) * count} ? {here} : {read}"
        return f"{' '.join(declared)} {element} pv_at_{names[0]}(int e) {{ return {read}; }}"

    def mode(self, number: int, text: str) -> str:
        """How the statements use an operand; `text`: all that may name it."""
        if number < self.inputs:
            return "r"
        read = self.atomic or re.search(rf"\b{self.names[number]}\(", text) is not None
        return "rw" if read else "w"

    def name_of(self, number: int) -> str:
        """GLSL's name of an operand's buffer."""
        return f"buf_{self.names[number].lower()}"

    def macros(self) -> dict[str, str]:
        """The macros by which the statements read and write elements."""
        macros: dict[str, str] = {}
        for number, (name, operand) in enumerate(zip(self.names, self.operands)):
            dtype = operand.dtype
            given = ", ".join(f"c{d}" for d in range(len(operand.dims))) or "none"
            index = self.index(name, operand)
            element = self.name_of(number)
            at = f"{element}[({index}) >> 2]" if self.is_vector(number) else f"{element}[{index}]"
            if number in self.windows:
                at = f"pv_at_{name.lower()}({index})"
            macros[f"{name}({given})"] = self.read(number, dtype, at)
            if number >= self.inputs and self.atomic:
                macros.update(_atomics(name, given, dtype, element, index, self.adds_floats))
            elif number >= self.inputs and self.fours:
                value = "pv_opaque(v)" if dtype.itemsize < 4 else "v"
                macros[f"{name}_PUT4({given}, v)"] = (
                    f"{element}[({index}) >> 2] = {VECTOR[dtype]}({value})"
                )
            elif number >= self.inputs:
                macros[f"{name}_PUT({given}, v)"] = f"{at} = {self.written(number, dtype, 'v')}"
        return macros

    def index(self, name: str, operand: Operand) -> str:
        """The index in its buffer of the element at c0, c1, ...."""
        low = name.lower()
        terms = []
        for d, (size, stride) in enumerate(zip(operand.dims, operand.strides)):
            if (isinstance(stride, int) and stride == 0) or (isinstance(size, int) and size == 1):
                continue
            terms.append(
                f"(c{d})"
                if isinstance(stride, int) and stride == 1
                else f"(c{d}) * {low}_stride_{d}"
            )
        if not (isinstance(operand.offset, int) and operand.offset == 0) or not terms:
            terms.append(f"{low}_offset")
        return " + ".join(terms)

    def type(self, number: int) -> str:
        acc = acc_of(self.operands[number].dtype)
        return {"float": "vec4", "int": "ivec4"}[acc] if self.is_vector(number) else acc

    def read(self, number: int, dtype: DType, at: str) -> str:
        if dtype is DType.bool:
            return f"({at} != uint8_t(0) ? 1 : 0)"
        if dtype is DType.bfloat16:
            return f"uintBitsToFloat(uint({at}) << 16)"
        if self.words and self.is_vector(number) and dtype.itemsize == 1:
            return f"pv_{'signed' if dtype is DType.int8 else 'unsigned'}({at})"
        return f"{self.type(number)}({at})"

    def written(self, number: int, dtype: DType, value: str) -> str:
        if dtype is DType.bool:
            return f"uint8_t(pv_opaque(({value}) != 0 ? 1 : 0))"
        if dtype is DType.bfloat16:
            return f"uint16_t(pv_opaque(pv_bfloat16_bits({value})))"
        if self.words and self.is_vector(number) and dtype.itemsize == 1:
            return f"pv_pack(ivec4({value}))"
        if dtype.itemsize < 4:
            value = f"pv_opaque({value})"
        return f"{VECTOR[dtype] if self.is_vector(number) else dtype.glsl}({value})"

    def element(self, dtype: DType, value: str) -> str:
        if dtype is DType.bool:
            value = f"({value} != 0 ? 1 : 0)"
        return f"pv_opaque({value})" if dtype.itemsize < 4 else value


def _atomics(
    name: str, given: str, dtype: DType, buffer: str, index: str, adds_floats: bool
) -> dict[str, str]:
    """The macros that add to an element of a buffer of 32-bit words (`adds_floats`: of floats), or
    raise it to a number."""
    if adds_floats:
        return {f"{name}_ADD({given}, v)": f"atomicAdd({buffer}[{index}], v)"}
    number, bits = ("uintBitsToFloat", "floatBitsToUint") if dtype.is_float else ("int", "uint")

    def exchange(made: str) -> str:
        return f"LOOPS(loop(subgroup_size)) EXCHANGE({buffer}, {index}, {bits}({made}))"

    if dtype is DType.float32:
        add = exchange("uintBitsToFloat(old) + (v)")
    elif dtype is DType.int64:
        add = f"ADD_PAIR({buffer}, {index}, v)"
    else:
        add = f"atomicAdd({buffer}[{index}], uint(v))"
    return {
        f"{name}_ADD({given}, v)": add,
        f"{name}_JOIN({given}, v)": exchange(f"COMBINE({number}(old), (v))"),
        # The words start at 0, and only grow.
        f"{name}_MAX({given}, v)": f"atomicMax({buffer}[{index}], uint(v))",
    }
