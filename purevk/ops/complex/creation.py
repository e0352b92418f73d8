"""Operators that create complex tensors."""

from __future__ import annotations

from purevk.ir import Node, Scalar, Value
from purevk.ops.complex.split import Made, NoKernelError, Parts, Split, apply_by
from purevk.ops.elementwise.program import constant


def _filled(split: Split, node: Node, number: Value | Scalar) -> Made:
    """The result with the same number everywhere."""
    type = node.result.type
    if not type.dtype.is_complex:
        return constant(split.builder, number, type.dims, type.dtype)
    if isinstance(number, Value):
        if number.type.dtype.is_complex:
            raise NoKernelError("no kernel for complex numbers and a value in a tensor")
        parts: tuple[Value | Scalar, Scalar] = (number, 0)
    elif isinstance(number, complex):
        parts = (number.real, number.imag)
    else:
        parts = (number, 0)
    real, imaginary = (
        constant(split.builder, part, type.dims, type.dtype.component) for part in parts
    )
    return Parts(real, imaginary)


def _constant(number: int, *names: str) -> None:
    apply_by(*names)(lambda split, node: _filled(split, node, number))


_constant(
    0,
    "aten.zeros.default",
    "aten.zeros_like.default",
    "aten.new_zeros.default",
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.new_empty.default",
    "aten.empty_strided.default",
    "aten.new_empty_strided.default",
)
_constant(1, "aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")


@apply_by("aten.full.default", "aten.full_like.default", "aten.new_full.default")
def _full(split: Split, node: Node) -> Made:
    return _filled(split, node, node.tensor_or_scalar("fill_value"))


@apply_by("aten.fill.Scalar")
def _fill(split: Split, node: Node) -> Made:
    return _filled(split, node, node.tensor_or_scalar("value"))


@apply_by("aten.scalar_tensor.default")
def _scalar_tensor(split: Split, node: Node) -> Made:
    return _filled(split, node, node.tensor_or_scalar("s"))


@apply_by("aten.eye.default", "aten.eye.m")
def _eye(split: Split, node: Node) -> Made:
    type = node.result.type
    real = split.builder.aten.eye.m(*type.dims, type.dtype.component)
    return Parts(real, constant(split.builder, 0, type.dims, type.dtype.component))
