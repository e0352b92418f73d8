"""Operators that are written with other ones here: what the transformer modules of torch call for
inference, kernels of whole layers, for which torch has no decompositions, and a loss whose
decomposition in torch is wrong; how these modules are traced with masks, and assertions of floats and classes.
Imports torch.

Masks are True, or not 0, where a key is not seen. `mask_type` says which they are: 0 for [T, T], 1
for [B, T], 2 for sizes that broadcast to [B, heads, T, T].
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental import symbolic_shapes
from torch.nn import functional
from torch.nn.modules import transformer

_Tensor = torch.Tensor


_DETECT = "_detect_is_causal_mask"
_detect_in_torch = vars(transformer).get(_DETECT)
_ASSERTION = "RuntimeAssert"
_assertion_in_torch = vars(symbolic_shapes).get(_ASSERTION)


def _as_given(mask: _Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


@contextlib.contextmanager
def masks_as_given() -> Iterator[None]:
    """Within, transformer modules of torch that are not told whether a mask is causal use it as it is,
    with the same results. Else they compare its elements with those of a causal mask, which no export
    can trace."""
    if _detect_in_torch is None:  # a torch that does not compare them
        yield
        return
    vars(transformer)[_DETECT] = _as_given
    try:
        yield
    finally:
        vars(transformer)[_DETECT] = _detect_in_torch


@contextlib.contextmanager
def with_bounds_of_floats() -> Iterator[None]:
    """Within, torch.export keeps the assertion `x.item() >= 2` of a float. Else it drops it, as if the
    range of the item said the same."""
    if _assertion_in_torch is None:
        yield
        return
    vars(symbolic_shapes)[_ASSERTION] = _assertion
    try:
        yield
    finally:
        vars(symbolic_shapes)[_ASSERTION] = _assertion_in_torch


def _assertion(condition: Any, *args: Any) -> Any:
    if isinstance(condition, (sympy.Le, sympy.Ge)) and not all(
        symbol.is_integer for symbol in condition.free_symbols
    ):
        less, equal = (kind(condition.lts, condition.gts) for kind in (sympy.Lt, sympy.Eq))
        condition = sympy.Or(less, equal, evaluate=False)
    assert _assertion_in_torch is not None
    return _assertion_in_torch(condition, *args)


@contextlib.contextmanager
def without_new_hooks() -> Iterator[None]:
    """Removes hooks of buffers that are still there after it. An export that fails leaves such a hook in
    torch 2.11, which then refuses that a module gets a buffer."""
    hooks = vars(torch.nn.modules.module).get("_global_buffer_registration_hooks", {})
    before = set(hooks)
    try:
        yield
    finally:
        for key in set(hooks) - before:
            del hooks[key]


def table() -> dict[Any, Any]:
    """The decompositions, by operator."""
    return {
        torch.ops.aten._transformer_encoder_layer_fwd.default: encoder_layer,
        torch.ops.aten._native_multi_head_attention.default: attention,
        torch.ops.aten.multilabel_margin_loss_forward.default: multilabel_margin_loss,
        torch.ops.aten.copy.default: copy,
    }


def copy(x: _Tensor, source: _Tensor, non_blocking: bool = False) -> _Tensor:
    """What `x.copy_(source)` leaves in x. `run_decompositions` takes `source` in place of a copy
    that becomes the new value of a buffer, whatever its dtype and sizes are, and though `source` may
    be a buffer that is written later."""
    return source.to(x.dtype).expand(x.shape).clone()


def where(condition: _Tensor, x: Any, y: Any) -> _Tensor:
    """`torch.where` of a tensor and a number that is known only at a call. torch itself asks for the
    number while it decomposes a program."""
    tensor, number = (x, y) if isinstance(x, _Tensor) else (y, x)
    kinds: dict[type, Any] = {torch.SymBool: True, torch.SymInt: 1, torch.SymFloat: 1.0}
    dtype = torch.result_type(tensor, kinds.get(type(number), number))
    tensor, number = tensor.to(dtype), torch.scalar_tensor(number, dtype=dtype)
    both = (tensor, number) if isinstance(x, _Tensor) else (number, tensor)
    return torch.where(condition, both[0], both[1])


def encoder_layer(
    src: _Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: _Tensor,
    qkv_bias: _Tensor,
    proj_weight: _Tensor,
    proj_bias: _Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: _Tensor,
    norm_bias_1: _Tensor,
    norm_weight_2: _Tensor,
    norm_bias_2: _Tensor,
    ffn_weight_1: _Tensor,
    ffn_bias_1: _Tensor,
    ffn_weight_2: _Tensor,
    ffn_bias_2: _Tensor,
    mask: _Tensor | None = None,
    mask_type: int | None = None,
) -> _Tensor:
    """A layer of `torch.nn.TransformerEncoder` on `src`, [B, T, embed_dim]."""

    def norm(x: _Tensor, weight: _Tensor, bias: _Tensor) -> _Tensor:
        return functional.layer_norm(x, (embed_dim,), weight, bias, eps)

    def attend(x: _Tensor) -> _Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return attention(x, x, x, embed_dim, num_heads, *projections, mask, False, True, mask_type)[
            0
        ]

    def feed_forward(x: _Tensor) -> _Tensor:
        x = functional.linear(x, ffn_weight_1, ffn_bias_1)
        x = functional.gelu(x) if use_gelu else functional.relu(x)
        return functional.linear(x, ffn_weight_2, ffn_bias_2)

    if norm_first:
        x = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)


def attention(
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: _Tensor,
    qkv_bias: _Tensor,
    proj_weight: _Tensor,
    proj_bias: _Tensor,
    mask: _Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[_Tensor, _Tensor]:
    """`torch.nn.MultiheadAttention` on [B, T, embed_dim]: the result and the weights, of which there
    are none (a tensor without elements) unless they are asked for."""
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    q, k, v = (
        functional.linear(x, weight, bias).view(*x.shape[:2], num_head, -1).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases)
    )
    seen = None if mask is None else ~_of_scores(mask.to(torch.bool), mask_type)
    if need_weights:
        scores = q @ k.transpose(-1, -2) * (embed_dim // num_head) ** -0.5
        if seen is not None:
            scores = scores.masked_fill(~seen, -float("inf"))
        shares = scores.softmax(-1)
        attended = shares @ v
        found = shares.mean(1) if average_attn_weights else shares
    else:
        attended = functional.scaled_dot_product_attention(q, k, v, seen)
        if seen is not None:  # these kernels give NaN where no key is seen, and that one 0
            attended = attended.masked_fill(~seen.any(-1, keepdim=True), float("nan"))
        found = query.new_empty(0)
    attended = attended.transpose(1, 2).flatten(2)
    return functional.linear(attended, proj_weight, proj_bias), found


def _of_scores(mask: _Tensor, kind: int | None) -> _Tensor:
    """A mask in sizes that broadcast to [B, heads, T, T]."""
    return mask[:, None, None, :] if kind == 1 else mask


def with_checked_classes(module: torch.nn.Module) -> None:
    """Has the graphs of dynamo check the classes of one_hot: torch up to 2.11 traces it without."""
    targets = functional.one_hot, torch.ops.aten.one_hot, torch.ops.aten.one_hot.default
    for graph_module in module.modules():
        if not isinstance(graph_module, torch.fx.GraphModule):
            continue
        nodes = [node for node in graph_module.graph.nodes if node.target in targets]
        for node in nodes:
            node.target = one_hot
        if nodes:
            graph_module.recompile()


def one_hot(x: _Tensor, num_classes: int = -1) -> _Tensor:
    """torch's one_hot, which raises for classes out of range whatever traces it."""
    if isinstance(num_classes, int) and num_classes < 0:
        return functional.one_hot(x)
    assert_async = torch.ops.aten._assert_async.msg
    assert_async((x >= 0).all(), "one_hot: Class values must be non-negative.")
    assert_async((x < num_classes).all(), "one_hot: Class values must be smaller than num_classes.")
    return (x.unsqueeze(-1) == torch.arange(num_classes, device=x.device)).long()


def multilabel_margin_loss(
    input: _Tensor, target: _Tensor, reduction: int
) -> tuple[_Tensor, _Tensor]:
    """The loss, and which classes are targets. The labels of a row end before its first -1; torch's
    decomposition takes those behind for label 0."""
    single = input.dim() < 2
    rows, labels = (operand.reshape(1, -1) if single else operand for operand in (input, target))
    classes = rows.shape[1]
    is_label = (labels == -1).cumsum(1) == 0
    labels = torch.where(is_label, labels, 0)
    hits = labels.unsqueeze(-1) == torch.arange(classes, device=target.device)
    is_target = (hits & is_label.unsqueeze(-1)).any(1)
    margins = 1 - rows.gather(1, labels).unsqueeze(-1) + rows.unsqueeze(1)
    counts = is_label.unsqueeze(-1) & ~is_target.unsqueeze(1) & (margins > 0)
    loss = torch.where(counts, margins, 0).sum((1, 2)) / classes
    if reduction:
        loss = loss.mean() if reduction == 1 else loss.sum()
    elif single:
        loss = loss.squeeze(0)
    return loss, is_target.to(input.dtype).reshape(target.shape)
