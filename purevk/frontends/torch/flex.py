"""flex_attention: attention whose scores and mask are functions of the user.

torch traces both functions into sub-graphs of scalars. They are traced once more here, over all
positions: each becomes pointwise operators on tensors of the positions that it reads. Where the
scores are only shifted or masked, one attention kernel does the rest. Imports torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from purevk.frontends.importer import Importer
from purevk.ir import Value

_SDPA = "aten.scaled_dot_product_attention.default"


def is_flex(target: Any) -> bool:
    """Whether the target of a node is flex_attention."""
    import torch

    return target is torch.ops.higher_order.flex_attention


class Flex:
    """A call of flex_attention.

    Args:
        node: it, in the graph of torch.
        arg: gives an argument of a node in the graph: a value, a size, or a module.
        walk: reads a module of torch, with its inputs, and gives its outputs.
        table: decompositions of torch for operators without a definition here.
    """

    def __init__(
        self,
        node: Any,
        importer: Importer,
        arg: Callable[[Any], Any],
        walk: Callable[[Any, Sequence[Any]], tuple[Any, ...]],
        table: Any,
    ) -> None:
        self.node, self.importer, self._walk, self._table = node, importer, walk, table
        query, key, value, score, block_mask, scale, self.options, shifts, masks = node.args
        self.tensors = (query, key, value)
        self.operands = tuple(arg(each) for each in self.tensors)
        self.score, self.mask = arg(score), arg(block_mask[-1])
        self.scale = float(scale)
        self.score_buffers, self.mask_buffers = tuple(shifts), tuple(masks)
        self._arg = arg

    def read(self) -> tuple[Any, ...]:
        """The result; the logarithms of the sums and the maxima where they are read, else None."""
        results = {user.args[1] for user in self.node.users if user.users}
        if results - {0} or not (self._is_open() or _is_shift(_result(self.score))):
            return self._written_out()
        causal = _is_causal(self.mask)
        mask = self._traced_mask(causal)
        q, k, _ = self.operands
        args = (*self.operands, mask, 0.0, causal, self.scale, k.type.dims[1] != q.type.dims[1])
        types = [q.type.with_dims((*q.type.dims[:3], self.operands[2].type.dims[3]))]
        made = self.importer.emit(_SDPA, args, types, [False], self.node.name, exact=True)
        return (*made, None, None)

    def _is_open(self) -> bool:
        """Whether the function of the scores gives them as they are."""
        result = _result(self.score)
        return result is _placeholders(self.score)[0]

    def _traced_mask(self, causal: bool) -> Value | None:
        """What is added to the scores, or a boolean mask; None if all keys are seen."""
        import torch

        shifted, masked = not self._is_open(), not (causal or _is_true(_result(self.mask)))
        if not (shifted or masked):
            return None
        score, mask = self.score, self.mask
        split = 2 + len(self.score_buffers)

        def combined(query: Any, key: Any, *buffers: Any) -> Any:
            axes = [torch.arange(size) for size in (*query.shape[:3], key.shape[2])]
            seen = _over_positions(mask, axes, buffers[split - 2 :]) if masked else None
            if not shifted:
                return (seen,)
            # A function that only shifts or forbids scores gives the shift for a score of 0.
            zero = torch.zeros((), dtype=_working(query.dtype))
            bias = _over_positions(functools.partial(score, zero), axes, buffers[: split - 2])
            if seen is not None:
                bias = torch.where(seen, bias, -float("inf"))
            return (bias,)

        inputs = (*self.tensors[:2], *self.score_buffers, *self.mask_buffers)
        made: Value = self._traced(combined, inputs)[0]
        return made

    def _written_out(self) -> tuple[Any, ...]:
        """All results as torch computes them: scores, the functions, softmax, matmul."""
        from torch._higher_order_ops.flex_attention import math_attention

        split = 3 + len(self.score_buffers)

        def whole(query: Any, key: Any, value: Any, *buffers: Any) -> Any:
            return math_attention(
                query,
                key,
                value,
                self.score,
                (self.mask,),
                self.scale,
                {},
                buffers[: split - 3],
                buffers[split - 3 :],
            )

        return self._traced(whole, (*self.tensors, *self.score_buffers, *self.mask_buffers))

    def _traced(self, function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        import torch
        from torch._guards import detect_fake_mode
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx

        examples = [getattr(each, "meta", {}).get("val", each) for each in inputs]
        mode = detect_fake_mode(examples) or FakeTensorMode()
        # What is decided here does not reach the guards of dynamo. These operators decide nothing.
        guards = mode.shape_env.suppress_guards() if mode.shape_env else nullcontext()
        with mode, guards:
            fakes = [
                mode.from_tensor(each) if isinstance(each, torch.Tensor) else each
                for each in examples
            ]
            table = dict(self._table.items())
            module = make_fx(function, decomposition_table=table)(*fakes)
        return self._walk(module, [self._arg(each) for each in inputs])


def _over_positions(function: Callable[..., Any], axes: Sequence[Any], buffers: Any) -> Any:
    """A function of batch, head, query and key, at all of them: [B, H, S, T]. Dims that it does not
    read are expanded."""
    import torch

    for axis in (3, 2, 1, 0):
        dims = tuple(0 if axis == number else None for number in range(4))
        function = torch.vmap(function, in_dims=(*dims, *(None for _ in buffers)))
    return function(*axes, *buffers)


def _working(dtype: Any) -> Any:
    import torch

    return torch.float64 if dtype is torch.float64 else torch.float32


def _placeholders(module: Any) -> list[Any]:
    return list(module.graph.find_nodes(op="placeholder"))


def _result(module: Any) -> Any:
    (output,) = module.graph.find_nodes(op="output")
    found = output.args[0]
    return found[0] if isinstance(found, (list, tuple)) else found


def _name(node: Any) -> str:
    return str(node.target)


def _is_shift(node: Any) -> bool:
    """Whether a node is the score plus what does not depend on it, or -inf."""
    score = _placeholders(node.graph.owning_module)[0]
    if node is score:
        return True
    if _name(node) == "aten.add.Tensor" and node.kwargs.get("alpha", 1) == 1:
        return any(
            _is_score_shift(one) and not _reads(other, score)
            for one, other in (node.args, node.args[::-1])
        )
    if _name(node) == "aten.sub.Tensor" and node.kwargs.get("alpha", 1) == 1:
        return _is_score_shift(node.args[0]) and not _reads(node.args[1], score)
    if _name(node) == "aten.where.self":
        condition, *choices = node.args
        return not _reads(condition, score) and all(
            _is_score_shift(each) or _is_minus_infinity(each) for each in choices
        )
    return False


def _is_score_shift(arg: Any) -> bool:
    return hasattr(arg, "users") and _is_shift(arg)


def _reads(arg: Any, wanted: Any) -> bool:
    """Whether an argument depends on a node."""
    pending, seen = ([arg] if hasattr(arg, "users") else []), set()
    while pending:
        node = pending.pop()
        if node is wanted:
            return True
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return False


def _is_minus_infinity(node: Any) -> bool:
    if not hasattr(node, "users"):
        return bool(node == -float("inf"))
    if _name(node) in ("aten.scalar_tensor.default", "aten.lift_fresh_copy.default"):
        return _is_minus_infinity(node.args[0])
    if _name(node) in ("aten.full.default", "aten.full_like.default"):
        return _is_minus_infinity(node.args[1])
    if node.op == "get_attr":
        tensor = getattr(node.graph.owning_module, node.target)
        return bool(tensor.numel() == 1 and tensor.item() == -float("inf"))
    return False


def _is_true(node: Any) -> bool:
    """Whether a mask allows every key, as that of a call without a mask."""
    if _name(node) in ("aten.new_ones.default", "aten.ones.default"):
        return True
    return _name(node) == "aten.full.default" and bool(node.args[1] is True)


def _is_causal(module: Any) -> bool:
    """Whether a mask is `q_idx >= kv_idx`."""
    _, _, query, key, *_ = _placeholders(module)
    node = _result(module)
    if _name(node) == "aten.ge.Tensor":
        return tuple(node.args) == (query, key)
    return _name(node) == "aten.le.Tensor" and tuple(node.args) == (key, query)
