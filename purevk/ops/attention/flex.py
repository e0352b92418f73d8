"""Attention with functions of scores and masks: one kernel with the functions inside, or other
operators where the kernel does not take the sizes, the dtypes, the number of buffers or the size of
the code."""

from __future__ import annotations

import math

from purevk.dtypes import DType
from purevk.ir import Arg, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.attention.attention import MAX_WIDTH, repeated
from purevk.ops.attention.attention import NAME as ATTENTION
from purevk.ops.attention.functions import (
    FULL,
    GATHER,
    Functions,
    FunctionStep,
    Operand,
    read_functions,
)
from purevk.ops.attention.narrow import narrowed
from purevk.ops.attention.score_program import MAX_CODE, score_program
from purevk.ops.builder import Builder
from purevk.ops.registry import ShapeError, rewrite_node
from purevk.tuning import DeviceTraits

NAME = "purevk.flex_attention"
# Queries, keys, values, result and parameters are buffers too. Any device has 8.
_MOST_BUFFERS = 3
_MOST_ROWS = 2**28  # kernels count elements in int32
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)


def _shape(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    buffers: tuple[TensorType, ...],
    steps: tuple[Arg, ...],
    score: str | None,
    mask: str | None,
    scale: float,
) -> TensorType:
    if (
        not q.rank == k.rank == v.rank == 4
        or not _dims.assume(q.dims[3], "==", k.dims[3])
        or not _dims.assume(k.dims[2], "==", v.dims[2])
    ):
        raise ShapeError(f"attention of {q} over {k} and {v}")
    read_functions(steps, score, mask, buffers)
    return q.with_dims((*q.dims[:3], v.dims[3]))


def check_functions(steps: Arg, score: Arg, mask: Arg, buffers: tuple[TensorType, ...]) -> None:
    """Raises a `PurevkError` if functions cannot be written for a kernel."""
    score_program(narrowed(read_functions(steps, score, mask, buffers), (2**20,) * 4))


def _functions(node: Node) -> Functions:
    types = [value.type for value in node.tensors("buffers")]
    return read_functions(node.arg("steps"), node.arg("score"), node.arg("mask"), types)


def _narrowed(node: Node) -> Functions:
    """The functions, with int32 where it suffices for the positions of the node."""
    sizes = (*node.tensor("q").type.dims[:3], node.tensor("k").type.dims[2])
    limits = [min(_dims.upper(size), _MOST_ROWS) - 1 for size in sizes]
    return narrowed(_functions(node), limits)


def fits_kernel(node: Node, traits: DeviceTraits) -> bool:
    """Whether the attention kernels take a node."""
    q, k, v = (node.tensor(name).type for name in "qkv")
    buffers = [value.type for value in node.tensors("buffers")]
    if any(each.dtype not in _FLOATS for each in (q, k, v)) or len(buffers) > _MOST_BUFFERS:
        return False
    if any(isinstance(size, int) and size == 0 for buffer in buffers for size in buffer.dims):
        return False
    wide = any(buffer.dtype is DType.int64 for buffer in buffers) or any(
        step.dtype is DType.int64 for step in _narrowed(node).steps
    )
    if wide and not traits.has("int64"):
        return False
    if score_program(_narrowed(node))[0].code_size > MAX_CODE:
        return False
    widths = (_dims.specialize(q.dims[3]), _dims.specialize(v.dims[3]))
    return all(0 < width <= MAX_WIDTH for width in widths)


@rewrite_node(NAME, _shape)
def _expand(builder: Builder, node: Node) -> Value:
    q, k, v = (node.tensor(name) for name in "qkv")
    batches = q.type.dims[0]
    k, v = (
        each
        if each.type.dims[0] == batches
        else builder.aten.expand(each, (batches, *each.type.dims[1:]))
        for each in (k, v)
    )
    program, sizes = score_program(_narrowed(node))
    width, padding = (
        v.type.dims[3],
        [-_dims.specialize(each.type.dims[3]) % 4 for each in (q, k, v)],
    )
    q, k, v = (
        builder.aten.constant_pad_nd(each, (0, more)) if more else each
        for each, more in zip((q, k, v), padding)
    )
    scale, extras = node.float("scale"), node.tensors("buffers")
    made = builder.emit(ATTENTION, q, k, v, None, scale, False, 0, None, program, sizes, extras)
    return builder.aten.slice.Tensor(made, dim=3, start=0, end=width) if padding[2] else made


def composed(builder: Builder, node: Node) -> Value:
    """The node by other operators, with all scores in memory."""
    q, k, v = (node.tensor(name) for name in "qkv")
    functions, buffers = _functions(node), node.tensors("buffers")
    lead = q.type.dims[:2]
    k, v = (
        each if each.type.dims[:2] == lead else repeated(builder, each, lead) for each in (k, v)
    )
    q, k = (builder.aten._to_copy(each, DType.float32) for each in (q, k))
    scores = builder.aten.matmul(q, builder.aten.permute(k, (0, 1, 3, 2)))
    scores = builder.aten.mul.Scalar(scores, node.float("scale"))
    dims = scores.type.dims
    values = [scores, *_positions(builder, dims)]
    for step in functions.steps:
        values.append(_emit(builder, step, values, buffers))
    if functions.score is not None:
        scores = builder.aten._to_copy(values[functions.score], DType.float32)
    if functions.mask is not None:
        seen = builder.aten._to_copy(values[functions.mask], DType.bool)
        scores = builder.aten.where.ScalarOther(seen, scores, -math.inf)
    if scores.type.dims != dims:
        scores = builder.aten.expand(scores, dims)
    weights = builder.purevk.softmax(scores, dim=-1, log=False, zero_rows=True, dtype=v.type.dtype)
    return builder.aten.matmul(weights, v)


def _positions(builder: Builder, dims: tuple[Size, ...]) -> list[Value]:
    """The batch, the head, the query and the key of all scores, each along its own dim."""
    made = []
    for dim, size in enumerate(dims):
        line = builder.aten.arange(size, DType.int64)
        sizes = tuple(size if other == dim else 1 for other in range(4))
        made.append(builder.aten.view(line, sizes))
    return made


def _emit(
    builder: Builder, step: FunctionStep, values: list[Value], buffers: tuple[Value, ...]
) -> Value:
    """A step, for all scores."""

    def given(arg: Arg | Operand) -> Arg:
        return values[arg.number] if isinstance(arg, Operand) else arg

    if step.op == FULL:
        return builder.aten.full((1, 1, 1, 1), given(step.args[0]), step.dtype)
    if step.op != GATHER:
        made = builder.emit(step.op, *(given(arg) for arg in step.args))
    else:
        number, *indices = (given(arg) for arg in step.args)
        assert isinstance(number, int)
        if not indices:
            return builder.aten.view(buffers[number], (1, 1, 1, 1))
        made = builder.aten.index.Tensor(
            buffers[number],
            tuple(
                index
                if isinstance(index, Value)
                else builder.aten.full((1, 1, 1, 1), index, DType.int32)
                for index in indices
            ),
        )
    if made.type.dtype is step.dtype:
        return made
    return builder.aten._to_copy(made, step.dtype)
