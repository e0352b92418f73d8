"""Writes the macros of `pointwise.comp` for a pointwise program; see `pointwise.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims
from purevk.lower.declarations import buffer, element_features, spec_constant
from purevk.lower.expression import Expression
from purevk.lower.lowering import MAX_PUSH, Lowering, Operand
from purevk.lower.rows import next_coordinates

VECTOR = {
    DType.float32: "vec4", DType.float16: "f16vec4", DType.int32: "ivec4", DType.int8: "i8vec4", DType.uint8: "u8vec4",
    DType.bool: "u8vec4", DType.int16: "i16vec4",
}  # fmt: skip
_ACC_VECTOR = {"float": "vec4", "int": "ivec4", "bool": "bvec4"}
_LITTLE_WORK = 1024  # invocations
_UNPACK = {DType.int8: "pv_signed", DType.uint8: "pv_unsigned", DType.bool: "pv_flags"}


def can_vectorize(
    loop: list[Size], steps: list[list[Size]], operands: Sequence[Operand], first_output: int
) -> bool:
    if _dims.gcd_of(loop[-1]) % 4:
        return False
    for number, operand in enumerate(operands):
        # What is the same for all neighbours is read once, of whatever type.
        repeated = (
            number < first_output
            and isinstance(steps[-1][number], int)
            and steps[-1][number] == 0
            and len(loop) > 1
        )
        if operand.dtype not in VECTOR and not repeated:
            return False
        if number >= first_output and not is_aligned(number, steps, operand):
            return False
    return True


def is_aligned(number: int, steps: list[list[Size]], operand: Operand, count: int = 4) -> bool:
    """Whether `count` neighbours of the innermost dim can be read or written as one vector."""
    inner = steps[-1][number]
    if not (isinstance(inner, int) and inner == 1):
        return False
    return all(
        _dims.gcd_of(size) % count == 0
        for size in (operand.offset, *(step[number] for step in steps[:-1]))
    )


class Writer:
    """Writes the macros of one specialization.

    Args:
        loop, steps: the sizes of the iteration, and for each of its dims the strides of the
            operands.
        vector: an invocation makes 4 neighbours.
        apart: otherwise, elements per invocation. They are a workgroup's width apart, so that
            neighbouring invocations touch neighbours in memory.
        words: elements of one byte that are read or written as vectors are so as words.
        wide: an invocation makes 16 neighbours.
        follow: an invocation makes 4 elements that follow one another in the outputs. A row may end
            between them.
    """

    def __init__(
        self,
        expression: Expression,
        operands: Sequence[Operand],
        first_output: int,
        loop: list[Size],
        steps: list[list[Size]],
        vector: bool,
        scalars: Sequence[Size],
        apart: int = 1,
        words: bool = False,
        wide: bool = False,
        follow: bool = False,
    ) -> None:
        self.expression, self.operands, self.first_output = expression, operands, first_output
        self.loop, self.steps, self.vector, self.scalars = loop, steps, vector, scalars
        self.apart, self.wide, self.follow, self.lanes = (
            apart,
            wide,
            follow,
            4 if vector or follow else apart,
        )
        self.words = {
            n
            for n, operand in enumerate(operands)
            if words and operand.dtype in _UNPACK and self._as_vector(n)
        }

    def finish(
        self,
        lowering: Lowering,
        template: str,
        work: Size,
        local: int,
        grid: tuple[Size, Size, Size],
        label: str,
        macros: Mapping[str, str | int] | None = None,
    ) -> None:
        """Appends the dispatch; `work` is the invocations that have some."""
        # Sizes and strides are written as names; those known are specialization constants where
        # there is index arithmetic to save. The count of a plain loop, and what runs once, stay
        # parameters, so that one pipeline serves all sizes. So does little work of devices whose
        # compiler takes longer than thousands of such calls.
        rank, count = len(self.loop), len(self.operands)
        values = {f"d{n}": size for n, size in enumerate(self.loop)}
        values |= {f"o{k}": operand.offset for k, operand in enumerate(self.operands)}
        values |= {
            f"s{n}_{k}": stride
            for n, step in enumerate(self.steps)
            for k, stride in enumerate(step)
        }
        values |= {f"c{n}": scalar for n, scalar in enumerate(self.scalars)}
        plain = rank == 1 and all(
            isinstance(step, int) and step in (0, 1) for step in self.steps[0]
        )
        little = not lowering.traits.profile.specialize_sizes and _dims.upper(work) <= _LITTLE_WORK
        pushed = plain or (
            (lowering.runs_once or lowering.in_parts or little) and len(values) < MAX_PUSH
        )
        declared: list[str] = []
        words: dict[str, Size] = {}
        constants: dict[str, int] = {}
        literal: dict[str, str] = {}
        for number, (name, size) in enumerate(values.items()):
            if isinstance(size, int) and name[0] in "os" and (size in (0, 1) or plain):
                if name[0] == "s" or not lowering.in_parts:
                    literal[name] = str(size)
                    continue
            if isinstance(size, int) and not pushed:
                constants[name] = size
                declared.append(spec_constant(number, name))
            else:
                words[name] = size
                declared.append(f"PUSH_CONSTANT({len(words)}, {name})")
        constants["local_size_x"] = local
        buffers = {
            self._name(number): (operand, self._access(number))
            for number, operand in enumerate(self.operands)
        }
        dtypes = {operand.dtype for operand in self.operands} | set(self.expression.dtypes)
        lowering.dispatch(
            template,
            buffers,
            macros={
                "BUFFERS": " ".join(self._declare(number) for number in range(count)),
                "DECLARE": " ".join(declared),
                "BODY": self._statements(literal),
                **element_features(dtypes),
                **(macros or {}),
            },
            params={"work": work, **words},
            constants=constants,
            grid=grid,
            label=label,
            flops=_dims.product(self.loop) * len(self.expression.steps),
            specialize=(),
        )

    def can_store_vectors(self) -> bool:
        """Whether the types of all operands have vectors of 4, and the outputs can be written
        so."""
        return can_vectorize(self.loop, self.steps, self.operands, self.first_output)

    def _as_vector(self, number: int) -> bool:
        operand = self.operands[number]
        return (
            number >= self.first_output
            if self.follow
            else self.vector and operand.dtype in VECTOR and is_aligned(number, self.steps, operand)
        )

    def _declare(self, number: int) -> str:
        dtype = self.operands[number].dtype
        element = VECTOR[dtype] if self._as_vector(number) else dtype.glsl
        if number in self.words:
            element = "uvec4" if self.wide else "uint"
        return buffer(number, self._name(number), element, self._access(number))

    def _name(self, number: int) -> str:
        """The name of an operand's buffer: in0, in1, ..., out0, ...."""
        first = self.first_output
        return f"in{number}" if number < first else f"out{number - first}"

    def _access(self, number: int) -> str:
        return "r" if number < self.first_output else "w"

    def _buffer(self, number: int) -> str:
        """GLSL's name of an operand's buffer."""
        return f"buf_{self._name(number)}"

    def _statements(self, literal: dict[str, str]) -> str:
        rank = len(self.loop)
        if self.apart == 1 and not self.follow:
            split = [f"int r = int(id){' * 16' if self.wide else ' * 4' if self.vector else ''};"]
            split += [
                f"int i{n} = r % d{n}; r /= d{n};" if n else "int i0 = r;"
                for n in reversed(range(rank))
            ]
            return " ".join((*split, *self._work(literal)))
        count = " * ".join(f"d{n}" for n in range(rank))
        start = (
            "int(id) * 4"
            if self.follow
            else f"int(id - gl_LocalInvocationIndex) * {self.lanes} + int(gl_LocalInvocationIndex)"
        )
        out = [f"int count = {count}, first = {start};"]
        for lane in range(self.lanes):
            if self.follow and lane:
                out += [f"int i{n}_{lane} = i{n}_{lane - 1};" for n in range(rank)]
                out.append(
                    next_coordinates(
                        [f"i{n}_{lane}" for n in range(rank)], [f"d{n}" for n in range(rank)]
                    )
                )
            else:
                out.append(
                    f"int r{lane} = min(first + {lane} * int(gl_WorkGroupSize.x), count - 1);"
                )
                out += [
                    f"int i{n}_{lane} = r{lane} % d{n}; r{lane} /= d{n};"
                    for n in reversed(range(1, rank))
                ]
                out.append(f"int i0_{lane} = r{lane};")
            for k in range(len(self.operands)):
                out.append(f"int x{k}_{lane} = {self._index(k, literal, f'_{lane}')};")
        values = [[f"v{k}_{lane}" for k in range(self.first_output)] for lane in range(self.lanes)]
        for lane in range(self.lanes):
            for k in range(self.first_output):
                out.append(
                    f"{self.operands[k].dtype.acc} v{k}_{lane} = {self._read(k, f'x{k}_{lane}')};"
                )
        once, texts, results = self.expression.glsl_of_lanes(
            values, [False] * self.first_output, self._scalars()
        )
        out += [once, *texts]
        if self.follow:
            for number, *names in zip(range(self.first_output, len(self.operands)), *results):
                out.append(self._store(number, names, f"x{number}_0"))
            return " ".join(out)
        for lane in range(self.lanes):
            stores = " ".join(
                self._store(
                    number, [results[lane][number - self.first_output]], f"x{number}_{lane}"
                )
                for number in range(self.first_output, len(self.operands))
            )
            out.append(f"if (first + {lane} * int(gl_WorkGroupSize.x) < count) {{ {stores} }}")
        return " ".join(out)

    def _work(self, literal: dict[str, str]) -> list[str]:
        """The statements for the element at i0, i1, ..., or for the 4 neighbours from there on."""
        out: list[str] = []
        for k in range(len(self.operands)):
            out.append(f"int x{k} = {self._index(k, literal)};")
        lanes: list[list[str]] = [[] for _ in range(self.lanes)]
        inner = len(self.loop) - 1
        same = [
            self.vector and literal.get(name, name) == "0"
            for name in (f"s{inner}_{k}" for k in range(self.first_output))
        ]
        each: list[str] = []
        for k in range(self.first_output):
            if self.wide and k in self.words:
                out.append(f"uvec4 p{k} = {self._buffer(k)}[x{k} >> 4];")
            for lane, name in enumerate(
                self._load(k, literal, each if self.wide and not same[k] else out)
            ):
                lanes[lane].append(name)
        once, texts, results = self.expression.glsl_of_lanes(lanes, same, self._scalars())
        out.append(once)
        each += texts
        outputs = range(self.first_output, len(self.operands))
        for number in outputs:
            result = number - self.first_output
            each.append(self._store(number, [names[result] for names in results], f"x{number}"))
        if not self.wide:
            return out + each
        out += [f"uvec4 p{number};" for number in outputs]
        # Not a loop: the optimizer unrolls those, and the copies of a `precise` operation lose that
        # property.
        out += [f"{{ const int w = {w}; {' '.join(each)} }}" for w in range(4)]
        return out + [f"{self._buffer(number)}[x{number} >> 4] = p{number};" for number in outputs]

    def _scalars(self) -> list[str]:
        return [f"c{n}" for n in range(len(self.scalars))]

    def _index(self, k: int, literal: dict[str, str], suffix: str = "") -> str:
        terms = []
        for n in range(len(self.loop)):
            stride = literal.get(f"s{n}_{k}", f"s{n}_{k}")
            if stride != "0":
                terms.append(f"i{n}{suffix}" if stride == "1" else f"i{n}{suffix} * {stride}")
        offset = literal.get(f"o{k}", f"o{k}")
        if offset != "0" or not terms:
            terms.append(offset)
        return " + ".join(terms)

    def _read(self, k: int, at: str) -> str:
        dtype = self.operands[k].dtype
        if dtype is DType.bool:
            return f"({self._buffer(k)}[{at}] != uint8_t(0))"
        if dtype is DType.bfloat16:
            return f"uintBitsToFloat(uint({self._buffer(k)}[{at}]) << 16)"
        return f"{dtype.acc}({self._buffer(k)}[{at}])"

    def _load(self, k: int, literal: dict[str, str], out: list[str]) -> list[str]:
        dtype = self.operands[k].dtype
        acc = dtype.acc
        inner = literal.get(f"s{len(self.loop) - 1}_{k}", f"s{len(self.loop) - 1}_{k}")
        if not self.vector or inner == "0":
            out.append(f"{acc} v{k} = {self._read(k, f'x{k}')};")
            return [f"v{k}"] * self.lanes
        if k in self.words:
            word = f"p{k}[w]" if self.wide else f"{self._buffer(k)}[x{k} >> 2]"
            out.append(f"{_ACC_VECTOR[acc]} v{k} = {_UNPACK[dtype]}({word});")
            return [f"v{k}.{c}" for c in "xyzw"]
        if self._as_vector(k):
            if dtype is DType.bool:
                out.append(
                    f"bvec4 v{k} = notEqual(uvec4({self._buffer(k)}[x{k} >> 2]), uvec4(0u));"
                )
            else:
                out.append(
                    f"{_ACC_VECTOR[acc]} v{k} = {_ACC_VECTOR[acc]}({self._buffer(k)}[x{k} >> 2]);"
                )
            return [f"v{k}.{c}" for c in "xyzw"]
        names = []
        for lane in range(4):
            at = (
                f"x{k}"
                if lane == 0
                else f"x{k} + {lane} * {inner}"
                if inner != "1"
                else f"x{k} + {lane}"
            )
            out.append(f"{acc} v{k}_{lane} = {self._read(k, at)};")
            names.append(f"v{k}_{lane}")
        return names

    def _store(self, number: int, names: list[str], at: str) -> str:
        dtype = self.operands[number].dtype
        if number in self.words:
            word = f"p{number}[w]" if self.wide else f"{self._buffer(number)}[{at} >> 2]"
            return f"{word} = pv_pack({_ACC_VECTOR[dtype.acc]}({', '.join(names)}));"
        if not self.first_output and dtype.itemsize < 4:
            names = [f"pv_opaque({name})" for name in names]
        if self.vector or self.follow:
            values = ", ".join(
                f"uint8_t({name})" if dtype is DType.bool else name for name in names
            )
            return f"{self._buffer(number)}[{at} >> 2] = {VECTOR[dtype]}({values});"
        if dtype is DType.bfloat16:
            return f"{self._buffer(number)}[{at}] = uint16_t(pv_bfloat16_bits({names[0]}));"
        return f"{self._buffer(number)}[{at}] = {dtype.glsl}({names[0]});"
