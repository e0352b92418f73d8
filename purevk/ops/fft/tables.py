"""Tables for Fourier transforms: roots of unity and chirps. They are made once, at load."""

from __future__ import annotations

from typing import Literal

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.lower.lowering import Lowering
from purevk.ops.builder import Builder
from purevk.ops.registry import Kernel, define

NAME = "purevk.fft_table"
Kind = Literal["roots", "chirp", "filter"]
_KINDS = {"roots": 0, "chirp": 1, "filter": 2}


def reals(dtype: DType) -> dict[str, str | int]:
    """The macros for complex numbers with parts of a dtype."""
    double = dtype is DType.float64
    return {
        "REAL": "double" if double else "float",
        "COMPLEX": "dvec2" if double else "vec2",
        "DOUBLE": int(double),
    }


def _shape(kind: str, whole: int, count: int, dtype: DType) -> TensorType:
    return TensorType(dtype, (count, 2))


def _lower(lowering: Lowering, node: Node) -> None:
    out = lowering.operand(node.result)
    count, dtype = node.int("count"), node.dtype("dtype")
    macros = reals(dtype)
    lowering.dispatch(
        "fft/roots.comp",
        {"out": out},
        {"count": count, "whole": node.int("whole")},
        {**macros, "T_OUT": macros["COMPLEX"], "KIND": _KINDS[node.str("kind")]},
        grid=lowering.linear_grid(count, 64),
        flops=30 * count,
        specialize=(),
    )


define(NAME, _shape, Kernel(_lower))


def table(builder: Builder, kind: Kind, whole: int, count: int, dtype: DType) -> Value:
    """Pairs of a table.

    Args:
        kind: "roots": exp(-2 pi i j / whole); "chirp": exp(-pi i j^2 / whole); "filter": the
            conjugated chirp of the distance to 0 of j modulo count, and 0 from whole on.
        count: elements.
        dtype: of the parts.
    """
    return builder.emit(NAME, kind, whole, count, dtype)
