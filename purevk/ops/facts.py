"""What operators do to elements, as their definitions say it and passes ask for it: whether they only
move elements, and of which rows of the operands a row of the result is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum

from purevk.ir import Node, Size, Value, values_in
from purevk.ir import dims as _dims


class Moves(IntEnum):
    """Where the elements of an operator's results are from. A greater number says more."""

    NO = 0
    """Some elements are computed."""
    TENSORS = 1
    """Each element is one of an operand, such as those of a concatenation."""
    SOME = 2
    """Each element is one of the first argument, such as those of a slice."""
    ALL = 3
    """They are all elements of the first argument, in any order."""
    IN_ORDER = 4
    """They are all elements of the first argument, in its order: a reshape, or a copy."""


Rowwise = Callable[[Node, int], Mapping[int, int] | None]
"""`rowwise(node, dim)`: the dims of the operands, by the arguments' positions, along which rows are needed
for rows along `dim` of the result; other operands are needed whole. None: a row needs more."""


def is_same(left: Size, right: Size) -> bool:
    """Whether two sizes are equal in each call, without a guard."""
    return _dims.settled(left, "==", right) is True


def by_element(node: Node, dim: int) -> Mapping[int, int] | None:
    """Of operators by element, whose operands broadcast."""
    result = node.result.type
    dims: dict[int, int] = {}
    for position, arg in enumerate(node.args):
        aligned = {
            _aligned(value, dim - result.rank, result.dims[dim]) for value in values_in((arg,))
        }
        if len(aligned) > 1 or None in aligned:
            return None
        (at,) = aligned or {-1}
        if at is not None and at >= 0:
            dims[position] = at
    return dims


def _aligned(value: Value, from_end: int, size: Size) -> int | None:
    """The dim of an operand that broadcasts to the one so far from the end; -1 if it has the size 1 or
    is not there, None if it may have the size 1 in some calls."""
    dim = value.type.rank + from_end
    if dim < 0 or (isinstance(value.type.dims[dim], int) and value.type.dims[dim] == 1):
        return -1
    return dim if is_same(value.type.dims[dim], size) else None


def before_last(node: Node, dim: int) -> Mapping[int, int] | None:
    """Of operators on the last dim of the first argument."""
    return _before(node, dim, 1)


def of_linear(node: Node, dim: int) -> Mapping[int, int] | None:
    """Of linear layers of the first argument, whose bias, if there is one, is that of all rows."""
    bias = node.optional_tensor("bias")
    return _before(node, dim, 1) if bias is None or bias.type.rank < 2 else None


def before_normalized(node: Node, dim: int) -> Mapping[int, int] | None:
    """Of norms over the dims `normalized_shape` of the first argument."""
    return _before(node, dim, len(node.sizes("normalized_shape")))


def _before(node: Node, dim: int, count: int) -> Mapping[int, int] | None:
    return {0: dim} if dim < node.inputs[0].type.rank - count else None


def but_along(node: Node, dim: int) -> Mapping[int, int] | None:
    """Of operators along the dims `dim` of the first argument, such as softmax and reductions."""
    rank, along = node.inputs[0].type.rank, node.optional_ints("dim")
    if not along or not rank:
        return None
    across = [at for at in range(rank) if at not in {number % rank for number in along}]
    if node.result.type.rank < rank:  # the dims are gone
        return {0: across[dim]}
    return {0: dim} if dim in across else None


def of_matmul(node: Node, dim: int) -> Mapping[int, int] | None:
    """Of matmuls `a b`: rows of a."""
    a, b = node.tensor("a").type, node.tensor("b").type
    if b.rank != 2 or a.rank < 2 or dim == a.rank - 1:
        return None
    return {node.position("a"): dim}


def of_addmm(node: Node, dim: int) -> Mapping[int, int] | None:
    """Of `bias + a b`: rows of a, and of a bias that has as many."""
    bias = _aligned(node.tensor("bias"), -2, node.result.type.dims[0])
    if dim != 0 or bias is None:
        return None
    rows = {node.position("a"): 0}
    return rows if bias < 0 else {**rows, node.position("bias"): bias}


def of_permute(node: Node, dim: int) -> Mapping[int, int] | None:
    """Of permutations of the dims of the first argument."""
    rank = node.result.type.rank
    return {0: node.ints("dims")[dim] % rank}


def of_transpose(node: Node, dim: int) -> Mapping[int, int] | None:
    """Of the exchange of two dims."""
    rank = node.result.type.rank
    first, second = (node.int(name) % rank for name in ("dim0", "dim1"))
    return {0: {first: second, second: first}.get(dim, dim)}


def of_reversed_dims(node: Node, dim: int) -> Mapping[int, int] | None:
    """Of views with the dims in reverse order."""
    return {0: node.result.type.rank - 1 - dim}
