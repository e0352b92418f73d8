"""Sums of overlapping windows, as `torch.istft` adds up its frames."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.map import coordinates
from purevk.ops.builder import Builder
from purevk.ops.fold import Fold, Loop, folded
from purevk.ops.registry import rewrite
from purevk.ops.shapes import wrap


def _shape(
    grad_in: TensorType, input_sizes: Sequence[Size], dim: int, size: int, step: int
) -> TensorType:
    return grad_in.with_dims(input_sizes)


@rewrite("aten.unfold_backward.default", _shape)
def _overlap_add(
    builder: Builder,
    node: Node,
    grad_in: Value,
    input_sizes: Sequence[Size],
    dim: int,
    size: int,
    step: int,
) -> Value:
    """Each element is the sum of what the windows that cover it have at it."""
    rank = len(input_sizes)
    if not rank:
        return builder.aten.view(grad_in, ())
    at = wrap(dim, rank)
    here = coordinates(rank + 1, **{f"d{at}": "w", f"d{rank}": f"i{at} - w * step"})
    most = _dims.minimum(grad_in.type.dims[at], -(-size // step))
    last, count = f"min(x_size_{at}, i{at} / step + 1)", f"min(x_size_{at}, ceil(size, step))"
    fold = Fold(
        (Loop("w", "first", last, most, count),),
        f"r += X({here});",
        before=f"int first = i{at} < size ? 0 : (i{at} - size) / step + 1;",
    )
    numbers: dict[str, Size] = {"size": size, "step": step}
    return folded(builder, fold, {"X": grad_in}, node.result.type, numbers=numbers)[0]
