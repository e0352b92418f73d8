"""Layer norm, RMS norm and batch norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, packed
from purevk.lower.declared import AUTO, Tensor
from purevk.lower.epilogue import make_epilogue
from purevk.lower.expression import Expression
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4, gcd8
from purevk.lower.rows import RowWork, collapse, only_floats, spread
from purevk.ops.builder import Builder
from purevk.ops.facts import before_last, before_normalized
from purevk.ops.matmul.fragments import blocks_type
from purevk.ops.promotion import wide_type
from purevk.ops.reduce.reduction import NAME as REDUCE
from purevk.ops.reduce.turn import Turn, check_turn, turn_of
from purevk.ops.registry import Kernel, define, rewrite_node
from purevk.ops.shapes import is_empty
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits

NAME = "purevk.norm"
# Rows for each processor, from which on a subgroup or a workgroup takes two of them together, and the
# most vectors of a row that a workgroup keeps in registers then. Measured on an NVIDIA GPU.
_PAIRED_BY_SUBGROUP, _PAIRED_BY_WORKGROUP, _MOST_KEPT = 3, 1, 4096


@signature(
    "x, weight, bias, count: int, eps, rms, epilogue=None, extras=(), plain=True, "
    "blocks=False, cos=None, sin=None, start: Size = 0, state=None, dim: int = 1, index=None"
)
def _norm_shape(
    x: TensorType,
    epilogue: Expression | None,
    plain: bool,
    blocks: bool,
    cos: TensorType | None,
    sin: TensorType | None,
    state: TensorType | None,
    dim: int,
    index: TensorType | None,
) -> tuple[TensorType, ...]:
    """`count`: how many dims, the last ones, are normalized together. With `blocks` the result is in the
    order of fragments, with `plain` also as it is.

    Heads x [B, S, H, D] then rotate as in `purevk.rotate_halves` by the angles cos and sin [rows, D] from
    row `start` on. With a state [B, T, H, D] (`dim` 1) or [B, H, T, D] (`dim` 2) there is no result:
    position s becomes position `index[s]` of it. No two of these are equal."""
    if cos is not None:
        check_turn(x, cos, sin, state, dim, index)
    if state is not None:
        return ()
    result = x if epilogue is None else x.with_dtype(epilogue.dtypes[epilogue.outputs[0]])
    results = (blocks_type(result.dtype, _dims.product(x.dims[:-1]), x.dims[-1]),) * blocks
    return (*results, result) if plain else results


@dataclass(frozen=True)
class EpilogueIndex:
    """How `make_epilogue` finds an element of the result from the `row` and `col` of the kernel:
    its arguments of these names."""

    full: str
    column: tuple[int, str] | None = None
    row: tuple[int, str] | None = None


def _norm_lower(lowering: Lowering, node: Node) -> None:
    x, count = lowering.operand(node.tensor("x")), node.int("count")
    if is_empty(x.type):
        return
    turn, blocks, plain = turn_of(lowering, node), None, node.bool("plain")
    if node.bool("blocks"):
        blocks = lowering.operand(node.results[0])
    if turn is not None and turn.rows is not None:
        out = turn.rows.cache
    elif plain or blocks is None:
        out = lowering.operand(node.results[-1])
    else:
        out = Operand(blocks.storage, Layout.dense(x.dims), x.type.with_dtype(blocks.dtype))
    steps = _row_steps(x, count)
    if steps is None:
        x = dense(lowering, x)
        steps = _row_steps(x, count)
        assert steps is not None  # it has no gaps
    rows = _dims.product(x.dims[: len(x.dims) - count])
    columns = _dims.product(x.dims[len(x.dims) - count :])
    weight, bias = (packed(lowering, node.optional_tensor(name)) for name in ("weight", "bias"))
    operands = (x, out, blocks, weight, bias)
    aligned = [operand.offset for operand in operands if operand is not None]
    aligned += [] if turn is None else [*turn.aligned, columns // 2]
    emit_norm(
        lowering,
        node,
        x,
        out,
        weight,
        bias,
        rows,
        columns,
        vector=gcd4(columns, *aligned, steps.row, steps.inner_row),
        macros={"RMS": int(node.bool("rms")), "NESTED": int(steps.inner != 1)},
        group={},
        steps=steps,
        index=EpilogueIndex(
            "row * columns + col", (len(out.dims) - 1, "col") if count == 1 else None
        ),
        blocks=blocks,
        plain=plain,
        turn=turn,
    )


class RowSteps(NamedTuple):
    """Where the rows of x are: `row` elements from one to the next, or, if `inner` is not 1, groups
    of `inner` rows that are `row` apart, and rows within them that are `inner_row` apart."""

    row: Size
    inner: Size = 1
    inner_row: Size = 0


def _row_steps(x: Operand, count: int) -> RowSteps | None:
    """Where the kernel finds rows of the last `count` dims of a tensor; None: it has to be copied."""
    if not isinstance(x.offset, int):
        return None
    lead = len(x.dims) - count
    _, (own,) = collapse(x.dims[lead:], x.strides[lead:])
    sizes, (steps,) = collapse(x.dims[:lead], x.strides[:lead])
    if own not in ([], [1]) or len(steps) > 2:
        return None
    if len(steps) == 2:
        return RowSteps(steps[0], sizes[1], steps[1])
    return RowSteps(steps[0]) if steps else RowSteps(_dims.product(x.dims[lead:]))


def _by_pairs(traits: DeviceTraits, work: RowWork, rows: Size) -> tuple[RowWork, Size]:
    """Who works on rows that are stored in the order of fragments, and on how many rows or pairs of
    them: two rows are stored 16 bytes at a time, if the device has enough pairs then and an
    invocation registers for them."""
    by_subgroup = work.macros.get("ROW_PER_SUBGROUP", 0)
    kept = work.macros.get("CACHE", 0)
    if not kept or work.macros.get("ROW_PER_INVOCATION"):
        return work, rows
    least = _PAIRED_BY_SUBGROUP if by_subgroup else _PAIRED_BY_WORKGROUP
    if _dims.upper(rows) < least * traits.processors or kept * work.local > _MOST_KEPT:
        return work, rows
    macros, local, pairs = {**work.macros, "TOGETHER": 2}, work.local, work.rows
    if by_subgroup:
        lanes = work.local // work.rows
        pairs = max(min(4, traits.max_invocations // lanes), 1)
        local = macros["LOCAL"] = lanes * pairs
    return RowWork(macros, local, pairs), _dims.ceil_div(rows, 16) * 8


def passes_of_norm(rms: bool) -> int:
    """How often the kernel reads a row that registers do not hold."""
    return 2 if rms else 3


def emit_norm(
    lowering: Lowering,
    node: Node,
    x: Operand,
    out: Operand,
    weight: Operand | None,
    bias: Operand | None,
    rows: Size,
    columns: Size,
    *,
    vector: bool,
    macros: Mapping[str, int],
    group: Mapping[str, Size],
    index: EpilogueIndex,
    steps: RowSteps | None = None,
    blocks: Operand | None = None,
    plain: bool = True,
    turn: Turn | None = None,
) -> None:
    """Appends a dispatch of `norm.comp`.

    Args:
        node: its arguments `eps`, `epilogue` and `extras` are read.
        rows, columns: how many rows are normalized, and the elements of each.
        vector: what VEC4 reads and writes as vec4 is aligned.
        macros: those of the kind of norm.
        group: parameters of group norm alone.
        index: the index of an element, for the epilogue.
        steps: where the rows of x are. None: one after the other.
        blocks: the result in the order of fragments.
        plain: whether the result is stored in `out`; else only its type is read.
        turn: how the rows rotate after the norm.
    """
    passes, items = passes_of_norm(bool(macros.get("RMS"))), rows
    work = spread(lowering.traits, rows, columns, vector, cache=True, passes=passes)
    if blocks is not None and vector and gcd8(blocks.offset):
        work, items = _by_pairs(lowering.traits, work, rows)
    epilogue = make_epilogue(
        lowering,
        node.optional_attribute("epilogue", Expression),
        node.tensors("extras"),
        out,
        "row, col",
        full=index.full,
        column=index.column,
        vector=vector,
        row=index.row,
    )
    epilogue.macros.pop("HAS_8BIT", None)  # rows.glslh always reads bytes
    wide = vector and macros.get("GROUP") != 1
    scales: dict[str, Tensor] = {"weight": weight, "bias": bias}
    forms = {
        name: (operand, "r" + lowering.texel(operand, wide))
        for name, operand in (("weight", weight), ("bias", bias))
        if operand is not None
    }
    texels = bool(forms) and all(form != "r" for _, form in forms.values())
    params: dict[str, Size] = {
        "out_offset": out.offset,
        "rows": rows,
        "columns": columns,
        "eps_bits": bits_of(node.float("eps")),
        **group,
    }
    if macros.get("GROUP") != 2:
        params |= {"x_row": columns if steps is None else steps.row, "out_row": columns}
    if steps is not None and steps.inner != 1:
        params |= {"x_inner": steps.inner, "x_inner_row": steps.inner_row}
    if turn is not None:
        params |= turn.params
    lowering.dispatch(
        "reduce/norm.comp",
        {
            "x": x,
            **(scales | forms if texels else scales),
            "out": out if plain else None,
            **({} if turn is None else turn.buffers),
            "blocks": blocks,
        },
        params,
        {
            "T_OUT": out.dtype.glsl,
            "T_W": (weight or bias or x).dtype.glsl,
            "VEC4": int(vector),
            "TEXEL_X": AUTO,
            "TEXEL_W": int(texels),
            "BLOCKS": 0 if blocks is None else 1 if plain else 2,
            **({} if turn is None else turn.macros),
            **macros,
            **work.macros,
        },
        epilogue=epilogue,
        local=work.local,
        always=group,
        grid=work.grid(items),
        flops=8 * x.type.numel,
    )


def _takes_program(node: Node) -> bool:
    return node.arg("cos") is None and not node.bool("blocks")


define(NAME, _norm_shape, Kernel(_norm_lower, epilogue=_takes_program), mutates=(13,))


@signature("x, normalized_shape, weight=None, bias=None, eps=1e-05")
def _layer_norm_shape(
    x: TensorType, normalized_shape: Sequence[Size]
) -> tuple[TensorType, TensorType, TensorType]:
    lead = x.rank - len(normalized_shape)
    stats = x.with_dims((*x.dims[:lead], *([1] * len(normalized_shape))))
    return x, stats, stats


def alike(
    builder: Builder, weight: Value | None, bias: Value | None
) -> tuple[Value | None, Value | None]:
    """Weight and bias with the same dtype, as the kernel has them."""
    if weight is not None and bias is not None and weight.type.dtype is not bias.type.dtype:
        bias = builder.aten._to_copy(bias, weight.type.dtype)
    return weight, bias


def _normalized(
    builder: Builder, x: Value, weight: Value | None, bias: Value | None, count: int, eps: float
) -> Value:
    weight, bias = alike(builder, weight, bias)
    return builder.emit(NAME, x, weight, bias, count, eps, False, None, ())


@rewrite_node(
    "aten.native_layer_norm.default",
    _layer_norm_shape,
    supports=only_floats,
    rowwise=before_normalized,
)
def _expand_layer_norm(builder: Builder, node: Node) -> tuple[Value, Value, Value]:
    x, count, eps = node.tensor("x"), len(node.sizes("normalized_shape")), node.float("eps")
    dims = tuple(range(x.type.rank - count, x.type.rank))
    weight, bias = node.optional_tensor("weight"), node.optional_tensor("bias")
    result = _normalized(builder, x, weight, bias, count, eps)
    # Mean and rstd. A pass drops these nodes if nothing reads them.
    dtype = wide_type(x.type.dtype)
    wide = builder.aten._to_copy(x, dtype)
    mean = builder.emit(REDUCE, wide, "mean", dims, True, dtype)
    centred = builder.aten.sub.Tensor(wide, mean)
    variance = builder.emit(
        REDUCE, builder.aten.mul.Tensor(centred, centred), "mean", dims, True, dtype
    )
    rstd = builder.aten.rsqrt(builder.aten.add.Tensor(variance, eps))
    stats = [builder.aten._to_copy(value, node.results[1].type.dtype) for value in (mean, rstd)]
    return result, stats[0], stats[1]


@signature("x, normalized_shape, weight=None, bias=None, eps=1e-05, cudnn_enable=True")
def _layer_norm_one_shape(x: TensorType) -> TensorType:
    return x


@rewrite_node(
    "aten.layer_norm.default",
    _layer_norm_one_shape,
    supports=only_floats,
    rowwise=before_normalized,
)
def _expand_layer_norm_one(builder: Builder, node: Node) -> Value:
    return _normalized(
        builder,
        node.tensor("x"),
        node.optional_tensor("weight"),
        node.optional_tensor("bias"),
        len(node.sizes("normalized_shape")),
        node.float("eps"),
    )


def _rms_norm_shape(x: TensorType, weight: TensorType, eps: float = 1e-6) -> TensorType:
    return x


@rewrite_node("et_vk.rms_norm.default", _rms_norm_shape, supports=only_floats, rowwise=before_last)
def _expand_rms_norm(builder: Builder, node: Node) -> Value:
    x, weight = node.tensor("x"), node.tensor("weight")
    return builder.emit(NAME, x, weight, None, 1, node.float("eps"), True, None, ())


# The distance from 1 to the next larger number, of the type in which torch computes the norm.
_EPSILON = {
    DType.float32: 2.0**-23,
    DType.float16: 2.0**-23,
    DType.bfloat16: 2.0**-23,
    DType.float64: 2.0**-52,
}


@signature("x, normalized_shape, weight=None, eps=None")
def _aten_rms_norm_shape(x: TensorType) -> TensorType:
    return x


@rewrite_node(
    "aten.rms_norm.default", _aten_rms_norm_shape, supports=only_floats, rowwise=before_normalized
)
def _expand_aten_rms_norm(builder: Builder, node: Node) -> Value:
    x, weight, eps = node.tensor("x"), node.optional_tensor("weight"), node.optional_float("eps")
    eps = _EPSILON[x.type.dtype] if eps is None else eps
    count = len(node.sizes("normalized_shape"))
    return builder.emit(NAME, x, weight, None, count, eps, True, None, ())


@signature("x, weight, bias, running_mean, running_var, momentum, eps")
def _batch_norm_shape(x: TensorType) -> tuple[TensorType, TensorType, TensorType]:
    empty = TensorType(x.dtype, (0,))
    return x, empty, empty


def batch_norm_inputs(node: Node) -> tuple[Value | None, Value | None, Value, Value, float]:
    """What `batch_norm_factors` takes of a node."""
    scales = node.optional_tensor("weight"), node.optional_tensor("bias")
    return *scales, node.tensor("running_mean"), node.tensor("running_var"), node.float("eps")


def batch_norm_factors(
    builder: Builder,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    variance: Value,
    eps: float,
) -> tuple[Value, Value]:
    """Scale and shift, one of each per channel: batch norm is x * scale + shift."""

    def wide(value: Value) -> Value:
        return builder.aten._to_copy(value, wide_type(variance.type.dtype))

    scale = builder.aten.rsqrt(builder.aten.add.Tensor(wide(variance), float(eps)))
    if weight is not None:
        scale = builder.aten.mul.Tensor(scale, wide(weight))
    shift = builder.aten.mul.Tensor(wide(mean), scale)
    if bias is not None:
        return scale, builder.aten.sub.Tensor(wide(bias), shift)
    return scale, builder.aten.neg(shift)


@rewrite_node(
    "aten._native_batch_norm_legit_no_training.default", _batch_norm_shape, supports=only_floats
)
def _expand_batch_norm(builder: Builder, node: Node) -> tuple[Value, Value, Value]:
    x = node.tensor("x")
    scale, shift = batch_norm_factors(builder, *batch_norm_inputs(node))
    sizes = (scale.type.dims[0], *([1] * (x.type.rank - 2)))
    scale, shift = (builder.aten.view(value, sizes) for value in (scale, shift))
    made = builder.aten.add.Tensor(builder.aten.mul.Tensor(x, scale), shift)
    made = builder.aten._to_copy(made, x.type.dtype)
    empty = builder.aten.full((0,), fill_value=0.0, dtype=x.type.dtype)
    return made, empty, empty
