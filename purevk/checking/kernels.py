"""References in torch for kernels that no operator of torch is: those that operators of files for
language models are expressed by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.fallback import to_numpy, to_torch
from purevk.ir import Node, Symbol, Value
from purevk.ir import dims as _dims

Arrays = Mapping[Value, np.ndarray]


def run_kernel(node: Node, arrays: Arrays, env: Mapping[Symbol, int]) -> list[np.ndarray] | None:
    """The result of a node whose operator has a reference here; else None."""
    function = _KERNELS.get(node.op)
    if function is None or (node.op == "purevk.norm" and node.bool("blocks")):
        return None
    return [to_numpy(function(node, arrays, env), node.result.type.dtype)]


def rotated_keys(node: Node, arrays: Arrays, env: Mapping[Symbol, int]) -> np.ndarray:
    """What a `purevk.norm` stores in its state, [B, S, H, D]."""
    return to_numpy(_norm(node, arrays, env), node.tensor("state").type.dtype)


def _tensor(node: Node, name: str, arrays: Arrays) -> Any:
    """A tensor among the arguments, in float32 or float64; None if it is left out."""
    import torch

    value = node.optional_tensor(name)
    if value is None:
        return None
    tensor = to_torch(arrays[value], value.type.dtype)
    return tensor.double() if tensor.dtype is torch.float64 else tensor.float()


def _attention(node: Node, arrays: Arrays, env: Mapping[Symbol, int]) -> Any:
    """Query row s is at `start` + s; with `causal` it attends the keys up to there. Keys from
    `length` on do not count, nor do those beyond the `limits` of a query. `sinks` are scores of keys
    whose values are 0. Of no key, the result is 0. `pages` are the first rows of each `page` keys."""
    import torch

    q, k, v, mask = (_tensor(node, name, arrays) for name in ("q", "k", "v", "mask"))
    length, pages = node.optional_size("length"), node.optional_tensor("pages")
    if pages is not None:
        rows = torch.from_numpy(arrays[pages]).long()[..., None] + torch.arange(node.int("page"))
        k, v = (torch.cat([x[:, :, row] for row in rows.flatten(1)]) for x in (k, v))
    if length is not None:
        count = _dims.evaluate(length, env)
        k, v = k[:, :, :count], v[:, :, :count]
        mask = None if mask is None else mask[..., :count]
    groups = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(groups, 1) for tensor in (k, v))
    scores, softcap = q @ k.transpose(2, 3) * node.float("scale"), node.float("softcap")
    scores = (scores / softcap).tanh() * softcap if softcap else scores
    if mask is not None and node.tensor("mask").type.dtype is DType.bool:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if node.bool("causal"):
        rows = torch.arange(q.shape[2])[:, None] + _dims.evaluate(node.size("start"), env)
        scores = scores.masked_fill(torch.arange(k.shape[2]) > rows, float("-inf"))
    limits = node.optional_tensor("limits")
    if limits is not None:
        ends, keys = to_torch(arrays[limits], limits.type.dtype), torch.arange(k.shape[2])
        scores = scores.masked_fill(keys >= ends[..., -1:], float("-inf"))
        if ends.shape[-1] == 2:
            scores = scores.masked_fill(keys < ends[..., :1], float("-inf"))
    unseeing = (scores == float("-inf")).all(-1, keepdim=True)
    sinks = _tensor(node, "sinks", arrays)
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
        return scores.softmax(-1)[..., :-1].masked_fill(unseeing, 0.0) @ v
    return scores.softmax(-1).masked_fill(unseeing, 0.0) @ v


def _page_rows(node: Node, arrays: Arrays, env: Mapping[Symbol, int]) -> Any:
    pages, positions = (arrays[node.tensor(name)] for name in ("pages", "positions"))
    page = node.int("page")
    rows = pages[(positions // page).clip(0, len(pages) - 1)] + positions % page
    return to_torch(rows.astype(np.int32), DType.int32)


def _norm(node: Node, arrays: Arrays, env: Mapping[Symbol, int]) -> Any:
    """The norm of the last `count` dims, and its rotation."""
    import torch

    x, weight, bias = (_tensor(node, name, arrays) for name in ("x", "weight", "bias"))
    dims = tuple(range(x.dim() - node.int("count"), x.dim()))
    centered = x if node.bool("rms") else x - x.mean(dims, keepdim=True)
    normalized = centered * torch.rsqrt((centered**2).mean(dims, keepdim=True) + node.float("eps"))
    normalized = normalized if weight is None else normalized * weight
    normalized = normalized if bias is None else normalized + bias
    return normalized if node.arg("cos") is None else _turned(node, normalized, arrays, env)


def _rotate_pairs(node: Node, arrays: Arrays, env: Mapping[Symbol, int]) -> Any:
    """x [B, S, H, D]: the pairs of adjacent numbers turn by the angles of their row."""
    import torch

    x, cos, sin = (_tensor(node, name, arrays) for name in ("x", "cos", "sin"))
    cos, sin = (table.reshape(x.shape[1], 1, -1) for table in (cos, sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def _rotate_halves(node: Node, arrays: Arrays, env: Mapping[Symbol, int]) -> Any:
    return _turned(node, _tensor(node, "x", arrays), arrays, env)


def _turned(node: Node, x: Any, arrays: Arrays, env: Mapping[Symbol, int]) -> Any:
    """x [B, S, H, D]: of the first R numbers, the two halves turn by the angles [rows, R] from row
    `start` on."""
    import torch

    start = _dims.evaluate(node.size("start"), env)
    tables = (_tensor(node, name, arrays) for name in ("cos", "sin"))
    cos, sin = (table[start : start + x.shape[1], None] for table in tables)
    first, tail = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, two = first.chunk(2, -1)
    return torch.cat((first * cos + torch.cat((-two, left), -1) * sin, tail), -1)


_KERNELS: dict[str, Callable[[Node, Arrays, Mapping[Symbol, int]], Any]] = {
    "purevk.attention": _attention,
    "purevk.page_rows": _page_rows,
    "purevk.norm": _norm,
    "purevk.rotate_halves": _rotate_halves,
    "purevk.rotate_pairs": _rotate_pairs,
}
