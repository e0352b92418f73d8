"""Copies from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Layout, Value
from purevk.lower.expression import Expression, Step, convert
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.pointwise import emit_pointwise


def identity(source: DType, target: DType | None = None) -> Expression:
    """The program that copies an element, converting it if the types differ."""
    target = target or source
    text = convert("$0", source, target)
    if text == "$0":
        return Expression((source,), (), (), (0,))
    return Expression((source,), (), (Step(text, (0,), target),), (1,))


def emit_copy(lowering: Lowering, source: Operand, target: Operand, label: str = "") -> None:
    """Appends the dispatch that copies elements from one layout to another, converting their type
    if it differs."""
    emit_pointwise(lowering, identity(source.dtype, target.dtype), [source], [], [target], label)


def dense(lowering: Lowering, operand: Operand, order: Sequence[int] | None = None) -> Operand:
    """A dense copy of an operand, its dims in memory in `order`."""
    copy = lowering.temporary(operand.type)
    copy = Operand(copy.storage, Layout.dense(operand.dims, order), operand.type)
    emit_copy(lowering, operand, copy, label="layout")
    return copy


def dense_operand(lowering: Lowering, value: Value) -> Operand:
    """A value as a dense row-major operand. A value that is a view with other strides is copied."""
    operand = lowering.operand(value)
    return operand if operand.layout.is_contiguous(operand.dims) else dense(lowering, operand)


def packed(lowering: Lowering, value: Value | None) -> Operand | None:
    """`dense_operand` of an optional tensor, such as a bias."""
    return None if value is None else dense_operand(lowering, value)
