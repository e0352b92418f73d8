"""Lowers `purevk.map`: a few GLSL statements that run once for each element of the result.

The statements may read the inputs at any index. So padding, flipping, resampling, scattering and the
like are this one operator. A `MapSpec` has the statements. This module writes what surrounds them
(buffers, strides, indices) for the template `map.comp` and those beside it. `ops/map.py` has the
operator, and functions that emit it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.errors import KernelInterfaceError
from purevk.ir import Layout, Size, Value
from purevk.ir import dims as _dims
from purevk.lower.declarations import spec_constant
from purevk.lower.expression import in_double
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.map_access import VECTOR, MapAccess
from purevk.lower.operands import bound_parts
from purevk.lower.rows import in_one_row, next_coordinates
from purevk.shaders.source import find_include

_COMMENT = re.compile("//.*")


@dataclass(frozen=True)
class MapSpec:
    """The statements of `purevk.map`, and what they name.

    They run once for each index of a space, which is that of the first result unless the node gives
    another. They can name:

    - `i0`, `i1`, ...: the index.
    - `r`, `r1`, ...: the elements of the results at this index. `T_R` is the type of `r`.
    - `X(a, b)`: an element of an input X of rank 2. A bool reads as 0 or 1, float16 as float.
    - `x_size_0`, `r_size_0`: a size of X, or of the first result.

    If an input or a result is float64, `float`, `vec4` and numbers in the statements are of double
    precision.

    Attributes:
        body: statements; "" if the template has its own, between MAP_BEGIN and MAP_END
            (`map.glslh`). They compute in NUMBER, float or double.
        inputs: names of the inputs, in capitals.
        numbers: names of further integers.
        order: the input whose order of dims in memory the results have; None: row-major.
        lanes: dims of the result along which 4 neighbours may be computed as one vector: for each,
            the dim of every input that the body reads at just this index, or None for an input that
            is the same for all four.
        template: file of `glsl/`.
        macros: further macros that the template declares.
        helpers: further macros that only the statements name.
        stores: whether r, r1, ... are stored at the index; otherwise the body writes by `R_PUT(a,
            b, v)`, `R1_PUT`, ...
        pushed: numbers that are parameters of the dispatch even where they are known, so that one
            pipeline serves many.
        atomic: several invocations may write one element of the outputs. The body writes them only
            by `R_ADD(a, b, v)` (float32, int32, int64), `R_MAX(a, b, v)` (int32, not negative), or
            `R_JOIN(a, b, v)` (float32, int32), which stores COMBINE(old, v).
        flops: operations per index, for profiles.
        walk: the dims in the order in which neighbouring invocations go over them, the innermost
            last; by default that of memory.
        local: invocations per workgroup, or as many as the device takes; None: as the profile says.
        fours: the body writes by `R_PUT4(a, b, v)`, the vec4 of 4 neighbours along the last dim, the
            first a multiple of 4. That dim of the results is dense, its size and their other
            strides and offsets are multiples of 4; elements are floats.
    """

    body: str
    inputs: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    order: int | None = None
    lanes: tuple[tuple[int, tuple[int | None, ...]], ...] = ()
    template: str = "elementwise/map.comp"
    macros: tuple[tuple[str, str], ...] = ()
    helpers: tuple[tuple[str, str], ...] = ()
    stores: bool = True
    flops: int = 1
    atomic: bool = False
    pushed: tuple[str, ...] = ()
    walk: tuple[int, ...] = ()
    local: int | None = None
    fours: bool = False

    def statements(self) -> str:
        """The statements, which a template may have."""
        return self.body or _COMMENT.sub("", find_include(None)(self.template)[1])

    def is_repeatable(self) -> bool:
        """Whether the template has macros for a loop around the statements."""
        return self.template == MapSpec.template or "MAP_BEGIN" in self.statements()


def emit_map(
    lowering: Lowering,
    spec: MapSpec,
    inputs: Sequence[Operand],
    numbers: Mapping[str, Size],
    outputs: Sequence[Operand],
    over: Sequence[Size] | None = None,
) -> None:
    """Appends the dispatch of a `MapSpec`.

    Args:
        numbers: those of `spec.numbers`, by name.
        over: sizes of the space of indices; None: those of the first output.

    Raises:
        KernelInterfaceError: `numbers` has other names than the statements.
    """
    if set(numbers) != set(spec.numbers):
        raise KernelInterfaceError(
            f"the numbers {', '.join(sorted(numbers))} are given",
            where=spec.template,
            why=f"the statements name {', '.join(sorted(spec.numbers))}",
        )
    sizes = tuple(outputs[0].dims if over is None else over)
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return
    if over is None and any(map(lowering.is_large, outputs)):
        _emit_parts(lowering, spec, tuple(inputs), numbers, outputs)
        return
    _Writer(lowering, spec, tuple(inputs), numbers, tuple(outputs), sizes, over is None).emit()


def takes_windows(spec: MapSpec) -> bool:
    """Whether the statements can run for a part of the indices at a time, and read inputs from several
    windows."""
    by_element = spec.is_repeatable() or spec.template == "random/map.comp"
    return spec.stores and not spec.atomic and by_element


def _emit_parts(
    lowering: Lowering,
    spec: MapSpec,
    inputs: tuple[Operand, ...],
    numbers: Mapping[str, Size],
    outputs: Sequence[Operand],
) -> None:
    """Appends a dispatch for each part of results that are larger than one binding."""
    lowering.in_parts = True
    for first, parts in bound_parts(lowering, outputs, outputs[0].dims):
        results = []
        for whole, part in zip(outputs, parts):  # the index counts from the whole's first element
            skipped = sum(start * stride for start, stride in zip(first, part.strides))
            layout = Layout(part.offset - skipped, part.strides)
            results.append(Operand(part.storage, layout, whole.type))
        sizes = parts[0].dims
        _Writer(lowering, spec, inputs, numbers, tuple(results), sizes, False, first).emit()
    lowering.in_parts = False


class _Writer:
    """Writes the macros of one dispatch."""

    def __init__(
        self,
        lowering: Lowering,
        spec: MapSpec,
        inputs: tuple[Operand, ...],
        numbers: Mapping[str, Size],
        outputs: tuple[Operand, ...],
        sizes: tuple[Size, ...],
        by_output: bool,
        first: tuple[int, ...] = (),
    ) -> None:
        self.first = first
        self.lowering, self.spec, self.sizes = lowering, spec, sizes
        self.inputs, self.outputs = inputs, outputs
        self.operands = (*inputs, *outputs)
        self.windows = {
            number: lowering.windows_of(operand)
            for number, operand in enumerate(inputs)
            if lowering.is_large(operand)
        }
        self.words = lowering.traits.profile.prefers_word_access
        self.names = (*spec.inputs, *("R" if n == 0 else f"R{n}" for n in range(len(outputs))))
        # Neighbouring invocations make neighbours in memory.
        walked = [
            d
            for d in spec.walk or range(len(sizes))
            if not (isinstance(sizes[d], int) and sizes[d] == 1)
        ]
        if by_output:
            walked.sort(key=lambda d: -_dims.hint(outputs[0].strides[d]))
        self.walked = walked
        by_output = by_output and bool(walked)
        if by_output:
            self._join_dims()
        self.vector = self._lane() if by_output else None
        # Otherwise, if the results allow it, the statements run for 4 neighbours, which are stored as
        # one vector. On a GPU they may continue in the next row.
        self.four = self.vector is None and by_output and self._stores_four()
        self.goes_on = self.vector is None and by_output and not self.four and self._goes_on()
        self.four |= self.goes_on
        # Otherwise, on a GPU, they run for so many indices, a workgroup's width apart.
        self.apart = 1
        if self.vector is None and not self.four and self._unrolls() and walked:
            many = 8 if all(operand.dtype.itemsize <= 2 for operand in self.operands) else 4
            self.apart = lowering.items_per_thread(_dims.product(self.sizes), many)
        # A device with atomic float addition needs no loop of exchanges.
        self.adds_floats = (
            spec.atomic
            and "R_ADD(" in spec.statements()
            and outputs[0].dtype is DType.float32
            and lowering.traits.profile.has_fast_float_atomics
            and lowering.traits.has("atomic_float_add")
        )
        self.access = MapAccess(
            self.names,
            self.operands,
            len(inputs),
            self.windows,
            self.words,
            self.vector,
            self.four,
            spec.fours,
            spec.atomic,
            self.adds_floats,
        )
        self.values: dict[str, Size] = {name: numbers[name] for name in spec.numbers}
        for name, operand in zip(self.names, self.operands):
            low = name.lower()
            self.values[f"{low}_offset"] = operand.offset
            self.values.update({f"{low}_size_{d}": size for d, size in enumerate(operand.dims)})
            self.values.update(
                {f"{low}_stride_{d}": stride for d, stride in enumerate(operand.strides)}
            )
        self.values.update({f"size_{d}": size for d, size in enumerate(self.sizes)})
        self.values.update({f"from_{d}": start for d, start in enumerate(first)})

    def _join_dims(self) -> None:
        """Joins neighbouring dims that the statements use as they are, if each follows the other in
        memory in all tensors. This saves a division per index."""
        lanes, sizes, kept = dict(self.spec.lanes), list(self.sizes), self.walked[-1:]
        for a in reversed(self.walked[:-1]):
            b = kept[0]
            if a in lanes and b in lanes and self._follow(lanes, a, b, sizes[b]):
                sizes[b], sizes[a] = sizes[a] * sizes[b], 1
            else:
                kept.insert(0, a)
        self.walked, self.sizes = kept, tuple(sizes)

    def _follow(self, lanes: dict[int, tuple[int | None, ...]], a: int, b: int, size: Size) -> bool:
        pairs = (*zip(lanes[a], lanes[b]), *([(a, b)] * len(self.outputs)))
        return all(
            outer is inner is None
            or (
                outer is not None
                and inner is not None
                and operand.strides[outer] == size * operand.strides[inner]
            )
            for operand, (outer, inner) in zip(self.operands, pairs)
        )

    def _lane(self) -> tuple[int | None, ...] | None:
        """For each operand, the dim along which it is read or written as vec4, or None. None in all
        if no four neighbours can be computed together."""
        inner = self.walked[-1]
        lanes = dict(self.spec.lanes)
        if inner not in lanes:
            return None
        dims = (*lanes[inner], *([inner] * len(self.outputs)))
        fits = not self.windows and all(
            d is None or (operand.dtype is not DType.bool and _is_in_fours(operand, d))
            for operand, d in zip(self.operands, dims)
        )
        return dims if fits else None

    def _unrolls(self) -> bool:
        """Whether an invocation may run the statements for several indices, and store the results
        after them."""
        spec = self.spec
        return (
            spec.stores
            and not spec.atomic
            and "LOOPS(" not in spec.statements()
            and spec.is_repeatable()
        )

    def _stores_four(self) -> bool:
        inner = self.walked[-1]
        return self._unrolls() and all(_is_in_fours(output, inner) for output in self.outputs)

    def _goes_on(self) -> bool:
        """Whether an invocation of a GPU makes 4 elements that follow one another in memory, in one
        row or two."""
        if not self._unrolls() or self.lowering.items_per_thread(_dims.product(self.sizes), 4) == 1:
            return False
        sizes = [self.sizes[d] for d in self.walked]
        return all(
            operand.dtype in VECTOR
            and in_one_row(sizes, [operand.strides[d] for d in self.walked], operand.offset)
            for operand in self.outputs
        )

    def emit(self) -> None:
        lowering, spec = self.lowering, self.spec
        helpers = {**self.access.macros(), **dict(spec.helpers)}
        macros = dict(spec.macros)
        macros["COORDINATES"] = self._coordinates()
        macros["STORE"] = self._store() if spec.stores else ""
        wide = any(operand.dtype is DType.float64 for operand in self.operands)
        before, after = self._loop()
        if spec.body:
            body = " ".join((before, spec.body, after)).strip()
            macros["BODY"] = in_double(body) if wide else body
        elif before:
            macros |= {"EACH": before, "END_EACH": after}
        macros["T_R"] = self.access.type(len(self.inputs))
        declared: list[str] = []
        words: dict[str, Size] = {}
        constants: dict[str, int] = {}
        text = " ".join((*helpers.values(), *macros.values(), spec.statements()))
        mentioned = set(re.findall(r"[A-Za-z_]\w*", text)) | set(spec.numbers)
        for number, (name, size) in enumerate(
            (name, size) for name, size in self.values.items() if name in mentioned
        ):
            if isinstance(size, int) and name not in spec.pushed and not self._varies(name):
                constants[name] = size
                declared.append(spec_constant(number, name))
            else:
                words[name] = size
                declared.append(f"PUSH_CONSTANT({len(words)}, {name})")
        macros["DECLARE"] = " ".join(declared)
        macros["BUFFERS"] = " ".join(
            (
                *(self.access.declare(number, text) for number in range(len(self.operands))),
                *map(self.access.declare_windows, self.windows),
            )
        )
        if any(operand.dtype is DType.int64 for operand in self.operands):
            macros["HAS_INT64"] = "1"
        if wide:
            macros["HAS_FLOAT64"] = "1"
        if self.adds_floats:
            macros["HAS_ATOMIC_FLOAT"] = "1"
        count = _dims.product(self.sizes)
        traits = lowering.traits
        local = min(spec.local or traits.profile.workgroup_size, traits.max_invocations)
        work = _dims.ceil_div(count, 4) if self.vector or self.four else count
        if self.apart > 1:
            work = _dims.ceil_div(count, self.apart * local) * local
        constants["local_size_x"] = local
        buffers: dict[str, tuple[Operand | Value, str]] = {
            name.lower(): (operand, self.access.mode(number, text))
            for number, (name, operand) in enumerate(zip(self.names, self.operands))
        }
        for number, (windows, _) in self.windows.items():
            names = self.access.window_names(number)
            buffers |= {name: (window, "r") for name, window in zip(names, windows)}
        grid = lowering.linear_grid(work, local)
        lowering.dispatch(
            spec.template,
            buffers,
            macros=macros,
            helpers=helpers,
            params={"work": work, **words},
            constants=constants,
            grid=grid,
            flops=count * spec.flops,
            specialize=(),
        )

    def _varies(self, name: str) -> bool:
        """Whether a number differs from part to part, which one pipeline should serve."""
        return bool(self.first) and re.fullmatch(r"from_\d+|size_\d+|r\d*_offset", name) is not None

    def _coordinates(self) -> str:
        if self.apart > 1:
            count = " * ".join(f"size_{d}" for d in self.walked)
            first = (
                f"int(id - gl_LocalInvocationIndex) * {self.apart} + int(gl_LocalInvocationIndex)"
            )
            kept = (
                f"{self.access.type(len(self.inputs) + n)} q{n}[{self.apart}]; int at{n}[{self.apart}];"
                for n in range(len(self.outputs))
            )
            return " ".join((f"int count_all = {count}, first = {first};", *kept))
        out = self._split(f"int(id){' * 4' if self.vector or self.four else ''}")
        if self.four:
            inner = "" if self.goes_on else f"int first = i{self.walked[-1]};"
            out += [
                inner,
                *(
                    f"{self.access.type(len(self.inputs) + n)} q{n}[4];"
                    for n in range(len(self.outputs))
                ),
            ]
        elif self.spec.stores:
            out += self._results()
        return " ".join(out)

    def _split(self, number: str) -> list[str]:
        """Statements that declare the index i0, i1, ... of an element from its number."""
        out = [f"int i{d} = 0;" for d in range(len(self.sizes)) if d not in self.walked]
        out.append(f"int rest = {number};")
        for n, d in enumerate(reversed(self.walked)):
            if n + 1 < len(self.walked):
                out.append(f"int i{d} = rest % size_{d}; rest /= size_{d};")
            else:
                out.append(f"int i{d} = rest;")
        return [*out, *(f"i{d} += from_{d};" for d in range(len(self.first)))]

    def _results(self) -> list[str]:
        return [
            f"{self.access.type(len(self.inputs) + n)} r{n or ''};"
            for n in range(len(self.outputs))
        ]

    def _loop(self) -> tuple[str, str]:
        """What is before and after the statements, to run them for several indices."""
        if not self.four and self.apart == 1:
            return "", ""
        kept = " ".join(f"q{n}[lane] = r{n or ''};" for n in range(len(self.outputs)))
        if self.apart > 1:
            kept += " ".join(
                f" at{n}[lane] = {self._index_here(n)};" for n in range(len(self.outputs))
            )
            # Elements beyond the end repeat the last one.
            split = self._split("min(first + lane * int(gl_WorkGroupSize.x), count_all - 1)")
            start, following = " ".join(split), ""
        elif self.goes_on:
            start = "{"
            following = "} " + next_coordinates(
                [f"i{d}" for d in self.walked], [f"size_{d}" for d in self.walked]
            )
        else:
            start, following = f"int i{self.walked[-1]} = first + lane;", ""
        before = " ".join((start, *self._results()))
        count = self.apart if self.apart > 1 else 4
        return (
            f"UNROLL for (int lane = 0; lane < {count}; lane++) {{ {before}",
            f"{kept} {following} }}",
        )

    def _index_here(self, n: int) -> str:
        """The index in its buffer of result n's element at i0, i1, ...."""
        return re.sub(r"\bc(\d+)\b", r"i\1", self.access.index(f"R{n or ''}", self.outputs[n]))

    def _store(self) -> str:
        out = []
        if self.apart > 1:
            for n, operand in enumerate(self.outputs):
                number = len(self.inputs) + n
                written = self.access.written(number, operand.dtype, f"q{n}[lane]")
                out.append(f"{self.access.name_of(number)}[at{n}[lane]] = {written};")
            inside = "if (first + lane * int(gl_WorkGroupSize.x) < count_all)"
            return f"UNROLL for (int lane = 0; lane < {self.apart}; lane++) {inside} {{ {' '.join(out)} }}"
        if self.four:
            for n, operand in enumerate(self.outputs):
                index = f"int(id) * 4 + r{n or ''}_offset" if self.goes_on else self._index_here(n)
                if self.words and operand.dtype.itemsize == 1:
                    made = f"ivec4({', '.join(f'q{n}[{lane}]' for lane in range(4))})"
                    made = f"pv_pack({f'notEqual({made}, ivec4(0))' if operand.dtype is DType.bool else made})"
                else:
                    values = ", ".join(
                        self.access.element(operand.dtype, f"q{n}[{lane}]") for lane in range(4)
                    )
                    made = f"{VECTOR[operand.dtype]}({values})"
                out.append(f"{self.access.name_of(len(self.inputs) + n)}[({index}) >> 2] = {made};")
            return " ".join(out)
        for n, operand in enumerate(self.outputs):
            out.append(f"R{n or ''}_PUT({coordinates(len(operand.dims))}, r{n or ''});")
        return " ".join(out)


def _is_in_fours(operand: Operand, dim: int) -> bool:
    """Whether the elements along a dim of any index are vectors of 4 in memory."""
    step, others = operand.strides[dim], (*operand.strides[:dim], *operand.strides[dim + 1 :])
    numbers = (operand.dims[dim], operand.offset, *others)
    return (
        operand.dtype in VECTOR
        and isinstance(step, int)
        and step == 1
        and not any(_dims.gcd_of(number) % 4 for number in numbers)
    )


def coordinates(rank: int, **changed: str) -> str:
    """The text "i0, i1, ..." of an index, with other text for some dims: `coordinates(3, d1="0")`.
    "0" for rank 0."""
    return ", ".join(changed.get(f"d{d}", f"i{d}") for d in range(rank)) or "0"
