"""Operators of training on the device."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.expression import Term
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import bits_of, gcd4
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import REAL, Program
from purevk.ops.quantized.matmul import by_rows
from purevk.ops.quantized.operands import dense_rows, supports, whole
from purevk.ops.registry import Kernel, ShapeError, define, rewrite_node
from purevk.ops.signatures import signature
from purevk.tuning import DeviceTraits


# -- loss ----------------------------------------------------------------------------------------
def _loss_shape(
    logits: TensorType, labels: TensorType, n_valid: float
) -> tuple[TensorType, TensorType]:
    if logits.rank != 2 or labels.rank != 1:
        raise ShapeError(f"cross entropy of {logits} and {labels}")
    return logits.with_dims(()), logits


@rewrite_node("et_vk.fused_ce.default", _loss_shape, supports=supports)
def _expand_loss(builder: Builder, node: Node) -> tuple[Value, Value]:
    """The sum of log(sum(exp(logits))) - logits[label] over all rows, divided by `n_valid`, and its
    gradient. Rows with a label below 0 are left out."""
    logits, labels, count = node.tensor("logits"), node.tensor("labels"), node.float("n_valid")
    rows, classes = logits.type.dims
    column = builder.aten.view(labels, (rows, 1))
    is_valid = builder.aten.ge.Tensor(column, y=0)
    label = builder.aten.clamp(column, min=0)
    index = label if label.type.dtype is DType.int64 else builder.aten._to_copy(label, DType.int64)
    picked = builder.aten.gather(logits, dim=1, index=index)
    total = builder.aten.logsumexp(logits, (1,), keepdim=True)
    each = builder.aten.div.Tensor(builder.aten.sub.Tensor(total, picked), count)
    losses = builder.aten.where.self(is_valid, each, y=0.0)
    loss = builder.aten.sum(losses)
    numbers = builder.aten.view(builder.purevk.iota(classes, label.type.dtype), (1, classes))
    one_hot = builder.aten._to_copy(builder.aten.eq.Tensor(numbers, label), logits.type.dtype)
    probabilities = builder.aten._softmax(logits, dim=1)
    gradient = builder.aten.div.Tensor(builder.aten.sub.Tensor(probabilities, one_hot), count)
    return loss, builder.aten.where.self(is_valid, gradient, y=0.0)


# -- optimizer -----------------------------------------------------------------------------------
@signature(
    "param, m, v, grad, lr, beta1, beta2, eps, weight_decay, bias_correction1, bias_correction2"
)
def _adamw_shape(
    param: TensorType, m: TensorType, v: TensorType
) -> tuple[TensorType, TensorType, TensorType]:
    return param, m, v


@rewrite_node("et_vk.adamw_step.default", _adamw_shape, supports=supports, mutates=(0, 1, 2))
def _expand_adamw(builder: Builder, node: Node) -> tuple[Value, ...]:
    """One step. It writes the parameter and both moments in place."""
    names = ("param", "m", "v", "grad")
    states = [node.tensor(name) for name in names[:3]]
    lr, beta1, beta2 = node.float("lr"), node.float("beta1"), node.float("beta2")
    correction1, correction2 = node.float("bias_correction1"), node.float("bias_correction2")
    decay, eps = node.float("weight_decay"), node.float("eps")
    program = Program(builder, states[0].type.dims)
    p, m, v, g = (program.real(node.tensor(name)) for name in names)

    def step(text: str, *operands: Term | float) -> Term:
        return program.step(
            text,
            *(
                operand if isinstance(operand, Term) else program.real(operand)
                for operand in operands
            ),
        )

    m = step("$0 * $1 + $2 * $3", m, beta1, g, 1.0 - beta1)
    v = step("$0 * $1 + $2 * $3 * $3", v, beta2, 1.0 - beta2, g)
    root = step("sqrt($0 / $1) + $2", v, correction2, eps)
    p = step("$0 * $1 - $2 * (($3 / $4) / $5)", p, 1.0 - lr * decay, lr, m, correction1, root)
    made = program.emit_all(*((term, state.type.dtype) for term, state in zip((p, m, v), states)))
    for state, value in zip(states, made):
        builder.purevk.store.all(state, value)
    return made


# -- gradients of linear layers ------------------------------------------------------------------
def _flat(builder: Builder, x: Value) -> Value:
    return builder.aten.view(x, (_dims.product(x.type.dims[:-1]), x.type.dims[-1]))


def _weight_shape(d_out: TensorType, x: TensorType) -> TensorType:
    return d_out.with_dims((d_out.dims[-1], x.dims[-1]))


@rewrite_node("et_vk.linear_dW.default", _weight_shape, supports=supports)
def _expand_weight(builder: Builder, node: Node) -> Value:
    gradient, x = (_flat(builder, node.tensor(name)) for name in ("d_out", "x"))
    return builder.aten.mm(builder.aten.permute(gradient, (1, 0)), x)


BACKWARD = "purevk.quantized_backward"


def _backward_shape(
    gradient: TensorType, weight: TensorType, scales: TensorType, group: int, dtype: DType = REAL
) -> TensorType:
    """gradient [M, N], weight [N, bytes] with two quantized values in a byte, scales [N, groups]."""
    return TensorType(dtype, (gradient.dims[0], weight.dims[1] * 2))


def _backward_lower(lowering: Lowering, node: Node) -> None:
    out = lowering.operand(node.result)
    gradient, weight = (
        dense_rows(lowering, lowering.operand(node.tensor(name))) for name in ("gradient", "weight")
    )
    scales = whole(lowering, node.tensor("scales"))
    (m, n), k = gradient.dims, out.dims[1]
    macros: dict[str, int | str] = {
        "BACKWARD": 1,
        "BITS": 4,
        "GROUPED": 1,
        "VEC4_A": int(gcd4(n, gradient.strides[0], gradient.offset)),
        "VEC4_OUT": int(gcd4(k, out.offset)),
        "TILE_M": 32,
        "TILE_N": 32,
        "TILE_K": 32,
        "THREAD_M": 4,
        "THREAD_N": 4,
    }
    params: dict[str, Size] = {
        "M": m,
        "N": n,
        "K": k,
        "lda": gradient.strides[0],
        "ldw": weight.strides[0] // 4,
        "ldo": k,
        "groups": scales.dims[1],
        "group": node.int("group"),
        "x_scale": bits_of(1.0),
        "x_zero": 0,
        "out_inverse": bits_of(1.0),
        "out_zero": 0,
        "out_low": 0,
        "offset_w": weight.offset // 4,
    }
    lowering.dispatch(
        "quantized/qmatmul.comp",
        {"a": gradient, "w": weight, "scale": scales, "bias": None, "out": out},
        params,
        macros,
        grid=(_dims.ceil_div(k, 32), _dims.ceil_div(m, 32), 1),
        flops=2 * m * n * k,
        specialize=(),
    )


define(BACKWARD, _backward_shape, Kernel(_backward_lower, supports=supports))


def _input_shape(
    d_out: TensorType, weights: TensorType, weight_scales: TensorType, group_size: int
) -> TensorType:
    return d_out.with_dims((*d_out.dims[:-1], weights.dims[1] * 2))


def _refuse_odd_groups(node: Node, traits: DeviceTraits) -> str | None:
    group = node.int("group_size")
    return f"no kernel for groups of {group}" if group % 4 else supports(node, traits)


@rewrite_node("et_vk.linear_q4gsw_backward.default", _input_shape, supports=_refuse_odd_groups)
def _expand_input(builder: Builder, node: Node) -> Value:
    weight = node.tensor("weights")
    scales = node.tensor("weight_scales")
    gradient = builder.emit(
        BACKWARD,
        _flat(builder, node.tensor("d_out")),
        weight,
        by_rows(builder, scales, weight.type.dims[0], transposed=True),
        node.int("group_size"),
        node.result.type.dtype,
    )
    return builder.aten.view(gradient, node.result.type.dims)


# -- quantizing a weight again -------------------------------------------------------------------
def _requant_shape(latent: TensorType, scales: TensorType, group_size: int) -> TensorType:
    if latent.rank != 2 or scales.rank != 2:
        raise ShapeError(f"cannot quantize {latent} with scales {scales}")
    return TensorType(DType.uint8, (latent.dims[0], (latent.dims[1] + 1) // 2))


@rewrite_node("et_vk.q4gsw_requant.default", _requant_shape, supports=supports)
def _expand_requant(builder: Builder, node: Node) -> Value:
    """Two values in a byte, that of the even column in the low nibble. Scales are [groups, rows or
    more]; values with scale 0 become those of 0."""
    latent, scales, group = node.tensor("latent"), node.tensor("scales"), node.int("group_size")
    rows, columns = latent.type.dims
    column = builder.purevk.iota(columns)
    groups = builder.aten.div.Tensor_mode(column, group, rounding_mode="floor")
    spread = builder.aten.index_select(
        by_rows(builder, scales, rows, transposed=True), dim=1, index=groups
    )
    program = Program(builder, (rows, columns))
    number, scale = program.real(latent), program.real(spread)
    value = program.step(
        "($1 == 0.0 ? 8 : int(clamp(pv_round(pv_divide($0, $1)), -8.0, 7.0)) + 8)",
        number,
        scale,
        dtype=DType.int32,
    )
    values = program.emit((value, DType.uint8))
    low, high = (
        builder.aten.slice.Tensor(values, dim=1, start=at, end=columns, step=2) for at in (0, 1)
    )
    pairs = columns // 2
    first = low if columns % 2 == 0 else builder.aten.slice.Tensor(low, dim=1, start=0, end=pairs)
    packed = Program(builder, (rows, pairs))
    joined = packed.step(
        "($0 | ($1 << 4))", packed.code(first), packed.code(high), dtype=DType.int32
    )
    made = packed.emit((joined, DType.uint8))
    if columns % 2:
        last = builder.aten.slice.Tensor(low, dim=1, start=pairs, end=pairs + 1)
        made = builder.aten.cat((made, last), dim=1)
    return made
