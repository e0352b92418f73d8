"""Matmuls and convolutions of complex numbers, each by one of real numbers.

The pairs of the left matrix are its columns, two for each. Then the right matrix has two rows and two
columns for each element b + ci: (b, c) and (-c, b). The product has the pairs of the result.
"""

from __future__ import annotations

from purevk.ir import Node, Value
from purevk.ops.builder import Builder
from purevk.ops.complex.algebra import Algebra
from purevk.ops.complex.split import (
    Made,
    Pairs,
    Split,
    apply_by,
    computing,
    expand_by,
    expand_by_own,
)
from purevk.ops.complex.views import INTERLEAVE


def _turned(split: Split, pairs: Value) -> Value:
    """Pairs times i."""
    parts, dtype = split.parts_of(pairs), pairs.type.dtype
    program = Algebra(split.builder, parts.real.type.dims, dtype)
    real = program.f("(-$0)", program.tensor(parts.imaginary))
    imaginary = program.tensor(parts.real)
    made = program.emit([(real, dtype, dtype), (imaginary, dtype, dtype)])
    return split.emit(INTERLEAVE, *made)


def _rows(split: Split, pairs: Value, dim: int) -> Value:
    """Pairs with one more dim of size 2 before `dim`: themselves, and their products with i."""
    return split.builder.aten.stack((pairs, _turned(split, pairs)), dim)


def _matmul(split: Split, a: Value, b: Value) -> Value:
    """The pairs of a matmul, from the pairs of its operands."""
    *rows, depth, _ = a.type.dims
    left = split.builder.aten.view(a, (*rows, 2 * depth))
    if b.type.rank == 2:  # a vector: rows of pairs
        right = split.builder.aten.view(_rows(split, b, 1), (2 * depth, 2))
        return split.builder.aten.matmul(left, right)
    *batch, _, columns, _ = b.type.dims
    right = _rows(split, b, b.type.rank - 2)
    right = split.builder.aten.view(right, (*batch, 2 * depth, 2 * columns))
    return split.builder.aten.matmul(left, right)


def _product(split: Split, node: Node, a: Value, b: Value) -> Made:
    made = _matmul(split, split.pairs(a, computing(node)), split.pairs(b, computing(node)))
    return Pairs(split.builder.aten.view(made, (*node.result.type.dims, 2)))


@apply_by("aten.mm.default", "aten.bmm.default", "aten.matmul.default", "aten.mv.default")
def _multiply(split: Split, node: Node) -> Made:
    return _product(split, node, node.tensor("a"), node.tensor("b"))


@expand_by("aten.dot.default")
def _dot(builder: Builder, node: Node) -> Value:
    x, y = node.tensor("x"), node.tensor("y")
    if "vdot" in node.alias:
        x = builder.aten._conj(x)
    return builder.aten.matmul(x, y)


@expand_by("aten.linear.default")
def _linear(builder: Builder, node: Node) -> Value:
    x, weight, bias = node.tensor("x"), node.tensor("weight"), node.optional_tensor("bias")
    made = builder.aten.matmul(x, builder.aten.t(weight))
    return made if bias is None else builder.aten.add.Tensor(made, bias)


expand_by_own("aten.linalg_cross.default", "aten.cross.default")


@expand_by("aten.outer.default")
def _outer(builder: Builder, node: Node) -> Value:
    column = builder.aten.unsqueeze(node.tensor("x"), dim=1)
    return builder.aten.mul.Tensor(column, node.tensor("y"))


def _added(builder: Builder, node: Node, x: Value, product: Value) -> Value:
    """beta x + alpha times a product."""
    beta, alpha = (node.tensor_or_scalar(name) for name in ("beta", "alpha"))
    if alpha != 1:
        product = builder.aten.mul.Tensor(product, alpha)
    if beta == 0:
        return product
    if beta != 1:
        x = builder.aten.mul.Tensor(x, beta)
    return builder.aten.add.Tensor(product, x)


@expand_by("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def _add_product(builder: Builder, node: Node) -> Value:
    x = node.tensor("bias" if node.op == "aten.addmm.default" else "x")
    product = builder.aten.matmul(node.tensor("a"), node.tensor("b"))
    return _added(builder, node, x, product)


@expand_by("aten.addr.default")
def _add_outer(builder: Builder, node: Node) -> Value:
    column = builder.aten.unsqueeze(node.tensor("a"), dim=1)
    product = builder.aten.mul.Tensor(column, node.tensor("b"))
    return _added(builder, node, node.tensor("x"), product)


@expand_by("aten.addbmm.default")
def _add_batches(builder: Builder, node: Node) -> Value:
    product = builder.aten.bmm(node.tensor("a"), node.tensor("b"))
    total = builder.aten.sum.dim_IntList(product, (0,))
    return _added(builder, node, node.tensor("x"), total)


# -- convolutions --------------------------------------------------------------------------------
def _channels(split: Split, pairs: Value, dim: int) -> Value:
    """Pairs as two channels for each along `dim`."""
    rank = pairs.type.rank - 1
    order = (*range(dim + 1), rank, *range(dim + 1, rank))
    moved = split.builder.aten.permute(pairs, order)
    sizes = pairs.type.dims
    return split.builder.aten.view(moved, (*sizes[:dim], 2 * sizes[dim], *sizes[dim + 1 : rank]))


_CONVOLUTIONS = (
    "aten.convolution.default",
    "aten.conv1d.default",
    "aten.conv2d.default",
    "aten.conv3d.default",
    "aten.conv_transpose1d.default",
    "aten.conv_transpose2d.input",
    "aten.conv_transpose3d.input",
)


@apply_by(*_CONVOLUTIONS)
def _convolution(split: Split, node: Node) -> Made:
    """A convolution with two channels for each: the parts of a complex one."""
    dtype, spatial = computing(node), node.tensor("weight").type.rank - 2
    transposed = "transpose" in node.op or (
        node.op == "aten.convolution.default" and node.bool("transposed")
    )
    x = split.pairs(node.tensor("x"), dtype)
    x = _channels(split, x, x.type.rank - 2 - spatial)
    weight = split.pairs(node.tensor("weight"), dtype)
    # In the product with the number of an input channel, (b, c) is what its real part gives to the
    # parts of the result, and (-c, b) what its imaginary part gives.
    given = 0 if transposed else 1  # the dim of the input channels of the weight
    doubled = _channels(split, _rows(split, weight, given + 1), 0 if given else 2)
    sizes = list(doubled.type.dims)
    sizes[given : given + 2] = [2 * node.tensor("weight").type.dims[given]]
    doubled = split.builder.aten.view(doubled, tuple(sizes))
    bias = node.optional_tensor("bias")
    if bias is not None:
        bias = _channels(split, split.pairs(bias, dtype), 0)
    made = split.emit(node.op, *node.with_arguments(x=x, weight=doubled, bias=bias).args)
    at = node.result.type.rank - 1 - spatial
    dims = node.result.type.dims
    made = split.builder.aten.view(made, (*dims[: at + 1], 2, *dims[at + 1 :]))
    order = (*range(at + 1), *range(at + 2, len(dims) + 1), at + 1)
    return Pairs(split.builder.aten.permute(made, order))
