"""Nodes that run pointwise programs: a program built step by step, and constant tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.ir import Dim, Scalar, Size, TensorType, Value
from purevk.lower.expression import (
    ROUND,
    Expression,
    ExpressionBuilder,
    Step,
    Term,
    convert,
    literal,
)
from purevk.lower.numbers import bits_of, rounded
from purevk.ops.builder import Builder
from purevk.ops.elementwise.pointwise import NAME as POINTWISE


def constant(
    builder: Builder, number: Value | Scalar, sizes: Sequence[Size], dtype: DType
) -> Value:
    """A tensor with the same number everywhere; the number may be a tensor of one element."""
    if isinstance(number, Value):
        flat = builder.aten.view(builder.aten._to_copy(number, dtype), ())
        return builder.aten.expand(flat, tuple(sizes))
    if isinstance(number, Dim):
        steps = ExpressionBuilder()
        expression = steps.build([steps.number(number, dtype)])
        return builder.emit(POINTWISE, expression, (), tuple(steps.scalars), tuple(sizes))
    if isinstance(number, complex):
        raise GraphError("no kernel for a complex constant")
    if dtype in ROUND:
        number = rounded(number, dtype)
    expression = Expression((), (), (Step(literal(number, dtype), (), dtype),), (0,))
    return builder.emit(POINTWISE, expression, (), (), tuple(sizes))


REAL = DType.float32


class Program:
    """A pointwise program in the making, over tensors and numbers.

    Args:
        builder: takes the node.
        sizes: of the result; tensors broadcast to it.

    Attributes:
        steps: those that it has so far.
    """

    def __init__(self, builder: Builder, sizes: Sequence[Size]) -> None:
        self.builder, self.sizes = builder, tuple(sizes)
        self.steps = ExpressionBuilder()

    def real(self, source: Value | float | int) -> Term:
        """A tensor's element or a number, as float32."""
        if not isinstance(source, Value):
            bits = self.steps.scalar(bits_of(float(np.float32(source))), DType.int32)
            return self.steps.step("intBitsToFloat($0)", [bits], REAL)
        return self.step(convert("$0", source.type.dtype, REAL), self.code(source))

    def code(self, source: Value) -> Term:
        """A tensor's element as it is."""
        return self.steps.rounded_input(source)

    def step(self, glsl: str, *operands: Term, dtype: DType = REAL) -> Term:
        """One assignment; `glsl` names the operands $0, $1, ..."""
        return operands[0] if glsl == "$0" else self.steps.step(glsl, operands, dtype)

    def emit(self, result: tuple[Term, DType]) -> Value:
        """A result as a tensor of the given dtype."""
        return self.emit_all(result)[0]

    def emit_all(self, *results: tuple[Term, DType]) -> tuple[Value, ...]:
        """The results as tensors of the given dtypes."""
        expression = self.steps.build([term for term, _ in results])
        types = tuple(TensorType(dtype, self.sizes) for _, dtype in results)
        return self.builder.emit_all(
            POINTWISE,
            expression,
            tuple(self.steps.inputs),
            tuple(self.steps.scalars),
            self.sizes,
            results=types,
        )
