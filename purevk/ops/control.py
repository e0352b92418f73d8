"""Control flow: nodes whose arguments are sub-graphs.

A sub-graph's inputs are the node's operands, in order. Constants and states of the graphs around it
are its own under the same values. `reads` and `writes` name the states that the sub-graphs touch,
so that the node keeps its order against other nodes that do.
"""

from __future__ import annotations

from typing import TypeAlias

from purevk.dtypes import DType
from purevk.ir import Arg, Dim, Graph, Size, TensorType, Value
from purevk.ops.registry import Control, ShapeError, define
from purevk.ops.signatures import signature

# In these shape functions, an operand that is a tensor is its type.
Operands: TypeAlias = tuple[Arg | TensorType, ...]
States: TypeAlias = tuple[TensorType, ...]


def output_type(output: Arg) -> TensorType:
    """The type of a control-flow node's result for an output of its sub-graph; numbers become
    tensors without dims."""
    if isinstance(output, Value):
        return output.type
    if isinstance(output, bool):
        return TensorType(DType.bool, ())
    if isinstance(output, (int, Dim)):
        return TensorType(DType.int64, ())
    if isinstance(output, float):
        return TensorType(DType.float32, ())
    raise ShapeError(f"a sub-graph returns {output!r}")


def same_type(left: TensorType, right: TensorType) -> bool:
    """Whether two types are the same, under guards where sizes are expressions."""
    return (
        left.dtype is right.dtype
        and left.rank == right.rank
        and all(a == b for a, b in zip(left.dims, right.dims))
    )


def _agree(what: str, left: tuple[TensorType, ...], right: tuple[TensorType, ...]) -> None:
    if len(left) != len(right):
        raise ShapeError(f"{what}: {len(left)} against {len(right)} tensors")
    for number, (a, b) in enumerate(zip(left, right)):
        if not same_type(a, b):
            raise ShapeError(f"{what}: tensor {number} is {a} against {b}")


def _types(args: Operands) -> tuple[TensorType, ...]:
    """Types of arguments, of which tensors were replaced by their types."""
    return tuple(arg if isinstance(arg, TensorType) else output_type(arg) for arg in args)


@signature("predicate, true, false, true_operands, false_operands, reads, writes")
def _cond(true: Graph, false: Graph) -> tuple[TensorType, ...]:
    made = tuple(output_type(output) for output in true.outputs)
    _agree(
        "the branches differ in what they return",
        made,
        tuple(output_type(output) for output in false.outputs),
    )
    return made


@signature("condition, body, carried, condition_operands, body_operands, reads, writes")
def _while(body: Graph, carried: Operands) -> tuple[TensorType, ...]:
    made = _types(carried)
    _agree(
        "the body of a loop returns other types than it takes",
        made,
        tuple(output_type(output) for output in body.outputs),
    )
    return made


@signature("body, length: Size, carried, scanned, operands, reads, writes")
def _for(body: Graph, length: Size, carried: Operands) -> tuple[TensorType, ...]:
    made = tuple(output_type(output) for output in body.outputs)
    first = _types(carried)
    _agree("the body of a scan returns other types than it takes", first, made[: len(first)])
    return first + tuple(type.with_dims((length, *type.dims)) for type in made[len(first) :])


# The number or one-element tensor `predicate` selects a sub-graph; each has its own operands.
define("purevk.cond", _cond, Control(), mutates=(6,))
# While `condition(*carried, *condition_operands)`: `carried = body(*carried, *body_operands)`. The
# results are `carried`.
define("purevk.while", _while, Control(), mutates=(6,))
# For each i < `length`: `(carried..., rows...) = body(*carried, *(each[i] for each in scanned),
# *operands)`. The results are `carried` and the stacked rows.
define("purevk.for", _for, Control(), mutates=(6,))
