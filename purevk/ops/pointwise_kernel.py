"""Lowers pointwise programs, and everything that copies elements, onto the template
`pointwise.comp`.

The iteration runs over the output in the order of its memory; dims that lie densely within one
another for all operands are one. Where the innermost run is a multiple of 4, an invocation makes 4
neighbours. A GPU reads and writes elements of one byte as words, and of programs of such elements
alone an invocation makes 16 neighbours: what it takes to find them is shared, and all accesses are
of 16 bytes. Where no vectors fit, an invocation of a GPU makes places a workgroup's width apart.
Inputs whose neighbours lie along another dim go through tiles (`transpose_kernel.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.ops.expression import Expression
from purevk.ops.lowering import Lowering, Operand
from purevk.ops.registry import Kernel, Operator, register
from purevk.ops.rows import in_one_row, next_place
from purevk.ops.shapes import wrap

_VECTOR = {
    DType.float32: "vec4", DType.float16: "f16vec4", DType.int32: "ivec4", DType.int8: "i8vec4", DType.uint8: "u8vec4",
    DType.bool: "u8vec4", DType.int16: "i16vec4",
}  # fmt: skip
_ACC_VECTOR = {"float": "vec4", "int": "ivec4", "bool": "bvec4"}
_UNPACK = {DType.int8: "pv_signed", DType.uint8: "pv_unsigned", DType.bool: "pv_flags"}
_WIDE_GROUPS = 256  # invocations a processor that 16 elements each have to leave
LOCAL = 64  # invocations of a workgroup on a software device
LOCAL_ID = 100  # specialization constant that holds the invocations of a workgroup


def broadcast_strides(operand: Operand, sizes: Sequence[Size]) -> tuple[Size, ...]:
    """Strides of an operand along the dims of the result, 0 where it is broadcast."""
    lead = len(sizes) - len(operand.dims)
    return tuple(
        0 if d < lead or (operand.dims[d - lead] == 1 and size != 1) else operand.strides[d - lead]
        for d, size in enumerate(sizes)
    )


def _collapse(
    sizes: Sequence[Size], strides: list[tuple[Size, ...]], output: int
) -> tuple[list[Size], list[list[Size]]]:
    order = [d for d, size in enumerate(sizes) if size != 1]
    order.sort(key=lambda d: -_dims.hint(strides[output][d]))
    merged: list[Size] = []
    steps: list[list[Size]] = []  # per loop dim, one stride per operand
    for d in order:
        mine = [operand[d] for operand in strides]
        if merged and all(outer == sizes[d] * inner for outer, inner in zip(steps[-1], mine)):
            merged[-1] = merged[-1] * sizes[d]
            steps[-1] = mine
        else:
            merged.append(sizes[d])
            steps.append(mine)
    if not merged:
        merged, steps = [1], [[1 if n >= output else 0 for n in range(len(strides))]]
    return merged, steps


def emit_pointwise(
    lowering: Lowering,
    expression: Expression,
    inputs: Sequence[Operand],
    scalars: Sequence[Size],
    outputs: Sequence[Operand],
    label: str = "",
) -> None:
    """Appends the dispatch of a pointwise program. All outputs have the same dims and strides."""
    sizes = outputs[0].dims
    if 0 in sizes:
        return
    from purevk.ops.transpose_kernel import emit_transposed

    operands = [*inputs, *outputs]
    strides = [broadcast_strides(operand, sizes) for operand in operands]
    loop, steps = _collapse(sizes, strides, len(inputs))
    if emit_transposed(lowering, expression, operands, len(inputs), loop, steps, scalars, label):
        return
    vector = _can_vectorize(loop, steps, operands, len(inputs))
    follow = (
        not vector
        and lowering.places(_dims.product(loop), 4) > 1
        and all(
            output.dtype in _VECTOR
            and in_one_row(loop, [step[-1] for step in steps], output.offset)
            for output in outputs
        )
    )
    small = all(operand.dtype.itemsize <= 2 for operand in operands) and len(expression.steps) <= 8
    apart = 1 if vector or follow else lowering.places(_dims.product(loop), 8 if small else 4)
    words = (vector or follow) and not lowering.traits.is_cpu
    enough = _dims.upper(_dims.product(loop)) >= 16 * _WIDE_GROUPS * lowering.traits.processors
    wide = words and vector and enough and _only_bytes(loop, steps, operands, len(inputs))
    writer = Writer(
        expression, operands, len(inputs), loop, steps, vector, scalars, apart, words, wide, follow
    )
    count = _dims.product(loop)
    local = LOCAL if lowering.traits.is_cpu else min(256, lowering.traits.max_invocations)
    work = (
        _dims.ceil_div(count, 16 if wide else 4)
        if vector or follow
        else _dims.ceil_div(count, apart * local) * local
        if apart > 1
        else count
    )
    writer.finish(
        lowering,
        "elementwise/pointwise.comp",
        work,
        local,
        lowering.linear_grid(work, local),
        label,
    )


def _can_vectorize(
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
        if operand.dtype not in _VECTOR and not repeated:
            return False
        if number >= first_output and not _is_aligned(number, steps, operand):
            return False
    return True


def _is_aligned(number: int, steps: list[list[Size]], operand: Operand, count: int = 4) -> bool:
    """Whether `count` neighbours of the innermost dim can be read or written as one vector."""
    inner = steps[-1][number]
    if not (isinstance(inner, int) and inner == 1):
        return False
    return all(
        _dims.gcd_of(size) % count == 0
        for size in (operand.offset, *(step[number] for step in steps[:-1]))
    )


def _only_bytes(
    loop: list[Size], steps: list[list[Size]], operands: Sequence[Operand], first_output: int
) -> bool:
    """Whether 16 neighbours can be made together, and all that is read and written along the
    innermost dim are bytes."""
    if _dims.gcd_of(loop[-1]) % 16:
        return False
    for number, operand in enumerate(operands):
        inner = steps[-1][number]
        if number < first_output and isinstance(inner, int) and inner == 0:
            continue
        if operand.dtype.itemsize != 1 or not _is_aligned(number, steps, operand, 16):
            return False
    return True


class Writer:
    """Writes the macros of one specialization.

    Args:
        loop, steps: the sizes of the iteration, and for each of its dims the strides of the
            operands.
        vector: an invocation makes 4 neighbours.
        apart: otherwise, places of an invocation: a workgroup's width apart, so that neighbours of
            a workgroup touch neighbours in memory.
        words: elements of one byte that are read or written as vectors are so as words.
        wide: an invocation makes 16 neighbours.
        follow: an invocation makes 4 places that follow one another in the outputs, where a row may
            end between them.
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
        grid: tuple,
        label: str,
        macros: Mapping[str, Any] | None = None,
    ) -> None:
        """Appends the dispatch; parameter 0 is `work`."""
        # Sizes and strides are written as names; those known are specialization constants where
        # there is index arithmetic to save, and the count of a plain loop stays a parameter, so
        # that one pipeline serves all sizes.
        rank, count = len(self.loop), len(self.operands)
        params = [
            *self.loop,
            *(operand.offset for operand in self.operands),
            *(s for step in self.steps for s in step),
            *self.scalars,
        ]
        plain = rank == 1 and all(
            isinstance(step, int) and step in (0, 1) for step in self.steps[0]
        )
        names = [f"d{n}" for n in range(rank)] + [f"o{n}" for n in range(count)]
        names += [f"s{n}_{k}" for n in range(rank) for k in range(count)] + [
            f"c{n}" for n in range(len(self.scalars))
        ]
        declared, push, constants, literal = [], [], {}, {}
        for number, (name, size) in enumerate(zip(names, params)):
            if isinstance(size, int) and (
                (size in (0, 1) and name[0] in "os") or (plain and name[0] in "os")
            ):
                literal[name] = str(size)
            elif isinstance(size, int) and not plain:
                place = number if number < LOCAL_ID else number + 1
                constants[place] = size
                declared.append(f"layout(constant_id = {place}) const int {name} = 1;")
            else:
                declared.append(f"int {name} = push.p[{len(push) + 1}];")
                push.append(size)
        constants[LOCAL_ID] = local
        buffers = [
            (operand, "r" if number < self.first_output else "w")
            for number, operand in enumerate(self.operands)
        ]
        lowering.dispatch(
            template,
            buffers,
            macros={
                "BUFFERS": " ".join(self._declare(number) for number in range(count)),
                "DECLARE": " ".join(declared),
                "BODY": self._statements(literal),
                **self._extensions(),
                **(macros or {}),
            },
            params=[work, *push],
            constants=constants,
            grid=grid,
            label=label,
            flops=_dims.product(self.loop) * len(self.expression.steps),
        )

    def can_store_vectors(self) -> bool:
        """Whether the types of all operands have vectors of 4, and the outputs can be written
        so."""
        return _can_vectorize(self.loop, self.steps, self.operands, self.first_output)

    def _extensions(self) -> dict[str, str]:
        dtypes = {operand.dtype for operand in self.operands} | set(self.expression.dtypes)
        found = {}
        if dtypes & {DType.int64}:
            found["HAS_INT64"] = "1"
        if dtypes & {DType.float64}:
            found["HAS_FLOAT64"] = "1"
        if any(dtype.itemsize == 1 for dtype in dtypes):
            found["HAS_8BIT"] = "1"
        if any(dtype.itemsize == 2 for dtype in dtypes):
            found["HAS_16BIT"] = "1"
        return found

    def _as_vector(self, number: int) -> bool:
        operand = self.operands[number]
        return (
            number >= self.first_output
            if self.follow
            else self.vector
            and operand.dtype in _VECTOR
            and _is_aligned(number, self.steps, operand)
        )

    def _declare(self, number: int) -> str:
        dtype = self.operands[number].dtype
        element = _VECTOR[dtype] if self._as_vector(number) else dtype.glsl
        if number in self.words:
            element = "uvec4" if self.wide else "uint"
        mode = "readonly" if number < self.first_output else "writeonly"
        return f"layout(set = 0, binding = {number}) {mode} buffer Buffer{number} {{ {element} b{number}[]; }};"

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
                    next_place(
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
                out.append(f"int x{k}_{lane} = {self._place(k, literal, f'_{lane}')};")
        values = [[f"v{k}_{lane}" for k in range(self.first_output)] for lane in range(self.lanes)]
        for lane in range(self.lanes):
            for k in range(self.first_output):
                out.append(
                    f"{self.operands[k].dtype.acc} v{k}_{lane} = {self._read(k, f'x{k}_{lane}')};"
                )
        once, texts, places = self.expression.glsl_of_lanes(
            values, [False] * self.first_output, self._scalars()
        )
        out += [once, *texts]
        if self.follow:
            for number, *names in zip(range(self.first_output, len(self.operands)), *places):
                out.append(self._store(number, names, f"x{number}_0"))
            return " ".join(out)
        for lane in range(self.lanes):
            stores = " ".join(
                self._store(number, [places[lane][number - self.first_output]], f"x{number}_{lane}")
                for number in range(self.first_output, len(self.operands))
            )
            out.append(f"if (first + {lane} * int(gl_WorkGroupSize.x) < count) {{ {stores} }}")
        return " ".join(out)

    def _work(self, literal: dict[str, str]) -> list[str]:
        """What is done at the place i0, i1, ..., or for 4 neighbours from there on."""
        out: list[str] = []
        for k in range(len(self.operands)):
            out.append(f"int x{k} = {self._place(k, literal)};")
        lanes: list[list[str]] = [[] for _ in range(self.lanes)]
        inner = len(self.loop) - 1
        same = [
            self.vector and literal.get(name, name) == "0"
            for name in (f"s{inner}_{k}" for k in range(self.first_output))
        ]
        each: list[str] = []
        for k in range(self.first_output):
            if self.wide and k in self.words:
                out.append(f"uvec4 p{k} = b{k}[x{k} >> 4];")
            for lane, name in enumerate(
                self._load(k, literal, each if self.wide and not same[k] else out)
            ):
                lanes[lane].append(name)
        once, texts, results = self.expression.glsl_of_lanes(lanes, same, self._scalars())
        out.append(once)
        each += texts
        outputs = range(self.first_output, len(self.operands))
        for number in outputs:
            place = number - self.first_output
            each.append(self._store(number, [names[place] for names in results], f"x{number}"))
        if not self.wide:
            return out + each
        out += [f"uvec4 p{number};" for number in outputs]
        # Not a loop: the optimizer unrolls those, and the copies of a `precise` operation lose that
        # property.
        out += [f"{{ const int w = {w}; {' '.join(each)} }}" for w in range(4)]
        return out + [f"b{number}[x{number} >> 4] = p{number};" for number in outputs]

    def _scalars(self) -> list[str]:
        return [f"c{n}" for n in range(len(self.scalars))]

    def _place(self, k: int, literal: dict[str, str], suffix: str = "") -> str:
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
            return f"(b{k}[{at}] != uint8_t(0))"
        if dtype is DType.bfloat16:
            return f"uintBitsToFloat(uint(b{k}[{at}]) << 16)"
        return f"{dtype.acc}(b{k}[{at}])"

    def _load(self, k: int, literal: dict[str, str], out: list[str]) -> list[str]:
        dtype = self.operands[k].dtype
        acc = dtype.acc
        inner = literal.get(f"s{len(self.loop) - 1}_{k}", f"s{len(self.loop) - 1}_{k}")
        if not self.vector or inner == "0":
            out.append(f"{acc} v{k} = {self._read(k, f'x{k}')};")
            return [f"v{k}"] * self.lanes
        if k in self.words:
            out.append(
                f"{_ACC_VECTOR[acc]} v{k} = {_UNPACK[dtype]}({f'p{k}[w]' if self.wide else f'b{k}[x{k} >> 2]'});"
            )
            return [f"v{k}.{c}" for c in "xyzw"]
        if self._as_vector(k):
            if dtype is DType.bool:
                out.append(f"bvec4 v{k} = notEqual(uvec4(b{k}[x{k} >> 2]), uvec4(0u));")
            else:
                out.append(f"{_ACC_VECTOR[acc]} v{k} = {_ACC_VECTOR[acc]}(b{k}[x{k} >> 2]);")
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
            word = f"p{number}[w]" if self.wide else f"b{number}[{at} >> 2]"
            return f"{word} = pv_pack({_ACC_VECTOR[dtype.acc]}({', '.join(names)}));"
        if not self.first_output and dtype.itemsize < 4:
            names = [f"pv_opaque({name})" for name in names]
        if self.vector or self.follow:
            values = ", ".join(
                f"uint8_t({name})" if dtype is DType.bool else name for name in names
            )
            return f"b{number}[{at} >> 2] = {_VECTOR[dtype]}({values});"
        if dtype is DType.bfloat16:
            return f"b{number}[{at}] = uint16_t(pv_bfloat16_bits({names[0]}));"
        return f"b{number}[{at}] = {dtype.glsl}({names[0]});"


def identity(source: DType, target: DType | None = None) -> Expression:
    """The program that copies an element, converting it if the types differ."""
    from purevk.ops.expression import Step, convert

    target = target or source
    text = convert("$0", source, target)
    if text == "$0":
        return Expression((source,), (), (), (0,))
    return Expression((source,), (), (Step(text, (0,), target),), (1,))


def emit_copy(lowering: Lowering, source: Operand, target: Operand, label: str = "") -> None:
    """Appends the dispatch that copies elements from one layout to another, converting their type
    if it differs."""
    emit_pointwise(lowering, identity(source.dtype, target.dtype), [source], [], [target], label)


# -- operators of purevk's own -------------------------------------------------------------------


def _pointwise_shape(
    expression: Expression, inputs: tuple, scalars: tuple, sizes: tuple
) -> tuple[TensorType, ...]:
    dtypes = expression.dtypes
    return tuple(TensorType(dtypes[number], tuple(sizes)) for number in expression.outputs)


def _pointwise_lower(lowering: Lowering, node: Node) -> None:
    expression, inputs, scalars, _ = node.args
    emit_pointwise(
        lowering,
        expression,
        [lowering.operand(value) for value in inputs],
        scalars,
        [lowering.operand(value) for value in node.results],
    )


def _pointwise_order(node: Node, layout_of) -> tuple:
    """The result lies as the first input of its own shape does, if that one is dense."""
    sizes = node.result.type.dims
    for value in node.args[1]:
        if value.type.rank == len(sizes) and all(a == b for a, b in zip(value.type.dims, sizes)):
            order = layout_of(value).dense_order(sizes)
            if order is not None:
                return (order,) * len(node.results)
    return (None,) * len(node.results)


register(
    Operator(
        "purevk.pointwise", _pointwise_shape, Kernel(_pointwise_lower, layouts=_pointwise_order)
    )
)


def _copy_lower(lowering: Lowering, node: Node) -> None:
    emit_copy(lowering, lowering.operand(node.args[0]), lowering.operand(node.result))


register(
    Operator(
        "purevk.copy",
        lambda x, order=None: x,
        Kernel(_copy_lower, layouts=lambda node, layout_of: (node.args[1],)),
    )
)


def _store_lower(lowering: Lowering, node: Node) -> None:
    state, value = node.args
    emit_copy(lowering, lowering.operand(value), lowering.operand(state))


register(Operator("purevk.store", lambda state, value: None, Kernel(_store_lower), mutates=(0,)))


def _iota_lower(lowering: Lowering, node: Node) -> None:
    (result,) = node.results
    out = lowering.operand(result)
    count = result.type.numel
    acc = out.dtype.acc
    local = LOCAL
    lowering.dispatch(
        "elementwise/pointwise.comp",
        [(out, "w")],
        macros={
            "BUFFERS": f"layout(set = 0, binding = 0) writeonly buffer Buffer0 {{ {out.dtype.glsl} b0[]; }};",
            "DECLARE": "",
            "BODY": f"b0[id] = {out.dtype.glsl}({acc}(id));",
            **({"HAS_INT64": "1"} if out.dtype is DType.int64 else {}),
        },
        params=[count],
        constants={LOCAL_ID: local},
        grid=lowering.linear_grid(count, local),
    )


register(
    Operator(
        "purevk.iota",
        lambda length, dtype=DType.int32: TensorType(dtype, (length,)),
        Kernel(_iota_lower),
    )
)


def _cat_shape(tensors: Sequence[TensorType], dim: int = 0) -> TensorType:
    from purevk.ops.promotion import promote_types
    from purevk.ops.registry import ShapeError

    kept = [tensor for tensor in tensors if not (tensor.rank == 1 and tensor.dims[0] == 0)] or list(
        tensors
    )
    at = wrap(dim, kept[0].rank)
    sizes = list(kept[0].dims)
    dtype = kept[0].dtype
    for tensor in kept[1:]:
        if tensor.rank != len(sizes) or any(
            a != b for d, (a, b) in enumerate(zip(sizes, tensor.dims)) if d != at
        ):
            raise ShapeError(f"cannot concatenate {list(tensors)} along dim {dim}")
        sizes[at] = sizes[at] + tensor.dims[at]
        dtype = promote_types(dtype, tensor.dtype)
    return TensorType(dtype, tuple(sizes))


def slice_of(operand: Operand, dim: int, start: Size, length: Size) -> Operand:
    """Part of an operand along a dim."""
    from purevk.ir import Layout

    layout = Layout(operand.offset + start * operand.strides[dim], operand.strides)
    sizes = (*operand.dims[:dim], length, *operand.dims[dim + 1 :])
    return Operand(operand.storage, layout, TensorType(operand.dtype, sizes))


def _cat_lower(lowering: Lowering, node: Node) -> None:
    tensors, dim = node.args
    out = lowering.operand(node.result)
    at, start = wrap(dim, len(out.dims)), 0
    pieces = [piece for piece in map(lowering.operand, tensors) if len(piece.dims) == len(out.dims)]
    if _interleaves(lowering, pieces, out, at):
        _interleave(lowering, pieces, out, at)
        return
    for piece in pieces:
        emit_copy(lowering, piece, slice_of(out, at, start, piece.dims[at]))
        start = start + piece.dims[at]


def _interleaves(lowering: Lowering, pieces: Sequence[Operand], out: Operand, at: int) -> bool:
    """Whether so few neighbours come from each tensor that a GPU would write memory in pieces, once
    for each."""
    runs = [_dims.upper(_dims.product(piece.dims[at:])) * out.dtype.itemsize for piece in pieces]
    alike = all(piece.dtype is out.dtype for piece in pieces)
    return not lowering.traits.is_cpu and alike and 1 < len(pieces) <= 8 and max(runs) < 64


def _interleave(lowering: Lowering, pieces: Sequence[Operand], out: Operand, at: int) -> None:
    """Appends one dispatch in which each place chooses the tensor that it comes from."""
    from purevk.ops.map_kernel import MapSpec, coordinates, emit_map

    start: Size = 0
    choices, ends = [], []
    for n, piece in enumerate(pieces):
        place = coordinates(len(out.dims), **({f"d{at}": f"i{at} - end_{n - 1}"} if n else {}))
        test = f"if (i{at} < end_{n}) " if n + 1 < len(pieces) else ""
        choices.append(f"{test}r = P{n}({place});")
        start = start + piece.dims[at]
        ends.append(start)
    numbers = tuple(f"end_{n}" for n in range(len(pieces)))
    spec = MapSpec(" else ".join(choices), tuple(f"P{n}" for n in range(len(pieces))), numbers)
    emit_map(lowering, spec, pieces, ends, [out])


register(
    Operator("aten.cat.default", _cat_shape, Kernel(_cat_lower), names=("aten.concat.default",))
)
