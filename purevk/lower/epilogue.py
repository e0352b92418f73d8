"""A pointwise program as the epilogue of a kernel: the text of the macros EPILOGUE, EPILOGUE4 and
EXTRA_BUFFERS, and EXTRAS, READ_EXTRAS and USE_EXTRAS, which do in two steps what EPILOGUE4 does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from purevk.dtypes import DType
from purevk.ir import Node, Value
from purevk.lower.copies import emit_copy
from purevk.lower.declarations import buffer, element_features
from purevk.lower.expression import ROUND, Expression
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.operands import broadcast_strides
from purevk.shaders.interface import EXTRA_BINDING

_LANES = {"float": "vec4", "int": "ivec4", "bool": "bvec4", "int64_t": "i64vec4"}
# Four neighbours in a buffer, and as a vec4 (elements.glslh).
_VECTOR = {DType.float32: "vec4", DType.float16: "f16vec4", DType.bfloat16: "uvec2"}
# What makes a vec4 of two words, by the dtype of the four elements in them.
_FLOATS = {DType.float16: "pv_float16_quad", DType.bfloat16: "pv_bfloat16_quad"}


@dataclass
class Epilogue:
    """Macros, and the buffers extra0, extra1, ... that come after the kernel's own."""

    macros: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, Operand] = field(default_factory=dict)
    flops: int = 0


def make_epilogue(
    lowering: Lowering,
    expression: Expression | None,
    extras: Sequence[Value],
    out: Operand,
    arguments: str,
    full: str,
    column: tuple[int, str] | None,
    vector: bool,
    row: tuple[int, str] | None = None,
    second: str = "",
    ahead: bool = False,
) -> Epilogue:
    """The epilogue of one kernel.

    Args:
        expression: the program; its input 0 is the kernel's own result, rounded to the dtype of
            that input. None: no epilogue.
        extras: its other inputs.
        out: the kernel's result; dense.
        arguments: the coordinates that the template passes to EPILOGUE after the value, such as "b,
            m, n".
        full: the element's number in the result, in terms of them.
        column: the dim of the result along which EPILOGUE4 takes neighbours, and its coordinate;
            None if there is none.
        vector: whether the template stores 4 neighbours as a vector.
        row: another dim and its coordinate.
        second: a vec4 of the template, where the kernel has a second result: the program's input 1.
            Needs `vector`.
        ahead: whether the template can read the extras before it has the value.
    """
    if expression is None:
        return Epilogue()
    epilogue = Epilogue(flops=len(expression.steps))
    declared: list[str] = []
    names, loads, loads4 = ["v"], [], []
    fields: list[tuple[str, str, str]] = []  # type and value of what is loaded, what converts it
    kinds: list[str] = []  # what it is converted to
    words = 0
    if second:
        names.append("w")
        loads4.append(f"vec4 w = {second};")
    for number, value in enumerate(extras):
        operand = lowering.operand(value)
        kind, operand = _kind(lowering, operand, out, column, row)
        at = {
            "full": full,
            "column": column[1] if column else "",
            "row": row[1] if row else "",
            "scalar": "0",
        }[kind]
        offset = operand.offset if isinstance(operand.offset, int) else 0
        if offset:
            at = f"({at}) + {offset}"
        wide = (
            vector and kind in ("full", "column") and operand.dtype in _VECTOR and offset % 4 == 0
        )
        element = _VECTOR[operand.dtype] if wide else operand.dtype.glsl
        if wide and ahead and operand.dtype is DType.float16:
            # NVIDIA's compiler keeps a float16 in a register of its own, and runs out of them.
            element = "uvec2"
        name = f"extra{number}"
        declared.append(buffer(f"{EXTRA_BINDING} + {number}", name, element, "r"))
        acc = operand.dtype.acc
        loads.append(f"{acc} x{number} = {_scalar(operand.dtype, number, at)};")
        if wide:
            lanes = _FLOATS[operand.dtype] if element == "uvec2" else "vec4"
            fields.append((element, f"buf_{name}[({at}) >> 2]", lanes))
            words += operand.dtype.itemsize
        elif kind in ("full", "column"):
            parts = ", ".join(_scalar(operand.dtype, number, f"{at} + {lane}") for lane in range(4))
            fields.append((_LANES[acc], f"{_LANES[acc]}({parts})", _LANES[acc]))
            words += 8 if acc == "int64_t" else 4
        else:
            fields.append((acc, _scalar(operand.dtype, number, at), _LANES[acc]))
            words += 2 if acc == "int64_t" else 1
        _, read, lanes = fields[-1]
        loads4.append(f"{_LANES[acc]} x{number} = {lanes}({read});")
        kinds.append(_LANES[acc])
        names.append(f"x{number}")
        epilogue.buffers[name] = operand
    body, (result,) = expression.glsl(names, (), prefix="t")
    # What the kernel computes has the digits of float32; without the epilogue, memory rounds it.
    for name, dtype in zip(names[: 1 + bool(second)], expression.inputs):
        if dtype in ROUND:
            body = f"{name} = {ROUND[dtype].replace('$0', name)}; {body}"
    typed = ", ".join(
        [f"float {name}" for name in names[: 1 + bool(second)]]
        + [f"{lowering.operand(v).dtype.acc} x{n}" for n, v in enumerate(extras)]
    )
    coordinates = ", ".join(f"int {name.strip()}" for name in arguments.split(","))
    text = f"float pv_program({typed}) {{ {body} return {result}; }} "
    plain = ", ".join(names)
    if vector:
        lanes = ", ".join(
            "pv_program(" + ", ".join(f"{name}.{c}" for name in names) + ")" for c in "xyzw"
        )
        text += (
            " ".join(declared)
            + f" vec4 pv_epilogue4(vec4 v, {coordinates}) {{ {' '.join(loads4)} return vec4({lanes}); }}"
        )
        epilogue.macros[f"EPILOGUE4(v, {arguments})"] = f"pv_epilogue4(v, {arguments})"
        if fields and ahead:
            text += _two_steps(fields, kinds, coordinates, lanes)
            epilogue.macros |= {
                "EXTRAS": "PvExtras",
                "EXTRAS_WORDS": str(words),
                f"READ_EXTRAS({arguments})": f"pv_read_extras({arguments})",
                "USE_EXTRAS(v, e)": "pv_use_extras(v, e)",
            }
    else:
        text += (
            " ".join(declared)
            + f" float pv_epilogue(float v, {coordinates}) {{ {' '.join(loads)} return pv_program({plain}); }}"
        )
    if not vector:
        epilogue.macros[f"EPILOGUE(v, {arguments})"] = f"pv_epilogue(v, {arguments})"
    epilogue.macros["EXTRA_BUFFERS"] = text
    dtypes = {operand.dtype for operand in epilogue.buffers.values()} | set(expression.dtypes)
    needed = element_features(dtypes)
    epilogue.macros |= {name: needed[name] for name in ("HAS_8BIT", "HAS_INT64") if name in needed}
    return epilogue


def matrix_epilogue(
    lowering: Lowering,
    node: Node,
    out: Operand,
    vector: bool,
    full: str = "m * N + n",
    row: tuple[int, str] | None = (0, "m"),
    paired: bool = False,
    ahead: bool = False,
) -> Epilogue:
    """`make_epilogue` for a node with the parameters `epilogue` and `extras`, and a template with the
    coordinates b, m (row) and n (column). `paired`: a column is made of two of the N columns."""
    return make_epilogue(
        lowering,
        node.optional_attribute("epilogue", Expression),
        node.tensors("extras"),
        out,
        "b, m, n",
        full.replace("N", "(N / 2)") if paired else full,
        (1, "n"),
        vector,
        row,
        second="pv_second" if paired else "",
        ahead=ahead,
    )


def _two_steps(
    fields: list[tuple[str, str, str]], kinds: list[str], coordinates: str, result: str
) -> str:
    """A struct of what an epilogue loads, the function that loads it, and the one that uses it.
    `fields` has the type and value of each field, and what converts it to the type in `kinds`, which
    the program takes."""
    members = " ".join(f"{kind} x{n};" for n, (kind, _, _) in enumerate(fields))
    values = ", ".join(read for _, read, _ in fields)
    uses = " ".join(
        f"{kind} x{n} = {convert}(e.x{n});"
        for n, ((_, _, convert), kind) in enumerate(zip(fields, kinds))
    )
    return (
        f" struct PvExtras {{ {members} }};"
        f" PvExtras pv_read_extras({coordinates}) {{ return PvExtras({values}); }}"
        f" vec4 pv_use_extras(vec4 v, PvExtras e) {{ {uses} return vec4({result}); }}"
    )


def _scalar(dtype: DType, number: int, at: str) -> str:
    if dtype is DType.bool:
        return f"(int(buf_extra{number}[{at}]) != 0)"  # a conversion is all that storage of 8 bits allows
    if dtype is DType.bfloat16:
        return f"uintBitsToFloat(uint(buf_extra{number}[{at}]) << 16)"
    return f"{dtype.acc}(buf_extra{number}[{at}])"


def _kind(
    lowering: Lowering,
    operand: Operand,
    out: Operand,
    column: tuple[int, str] | None,
    row: tuple[int, str] | None,
) -> tuple[str, Operand]:
    """How an extra operand is indexed; a copy is made for what no formula says."""
    strides = broadcast_strides(operand, out.dims)
    moving = [
        d
        for d, size in enumerate(out.dims)
        if not (isinstance(size, int) and size == 1) and not _zero(strides[d])
    ]
    known = isinstance(operand.offset, int)
    if known and not moving:
        return "scalar", operand
    if known and column and moving == [column[0]] and strides[column[0]] == 1:
        return "column", operand
    if known and row and moving == [row[0]] and strides[row[0]] == 1:
        return "row", operand
    same = all(
        (isinstance(size, int) and size == 1) or a == b
        for size, a, b in zip(out.dims, strides, out.strides)
    )
    if known and same:
        return "full", operand
    copy = lowering.temporary(out.type.with_dtype(operand.dtype))
    copy = Operand(copy.storage, type(out.layout)(0, out.strides), copy.type)
    emit_copy(lowering, operand, copy, label="epilogue operand")
    return "full", copy


def _zero(stride: object) -> bool:
    return isinstance(stride, int) and stride == 0
