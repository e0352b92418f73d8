"""`llama.update_cache` and its kin for torch, where those that come compiled with executorch are
for another torch."""

from __future__ import annotations

from typing import Any

import torch

_ATTENTION = (
    "Tensor? attn_mask=None, float drpout_p=0.0, bool is_causal=False, float? scale=None) -> Tensor"
)
_library: torch.library.Library | None = None


def load() -> None:
    """Makes the operators known to torch."""
    if _library is not None:
        return
    try:
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
    except (ImportError, OSError):
        _define()


def _define() -> None:
    global _library
    _library = library = torch.library.Library("llama", "DEF")
    library.define("update_cache(Tensor value, Tensor(a!) cache, SymInt start_pos) -> Tensor")
    library.define(
        f"custom_sdpa(Tensor query, Tensor key, Tensor value, SymInt start_pos, {_ATTENTION}"
    )
    library.define(
        "sdpa_with_kv_cache(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        f"SymInt start_pos, SymInt seq_len, {_ATTENTION}"
    )
    library.impl("update_cache", _update, "CPU")
    library.impl("update_cache", lambda value, cache, start_pos: value.new_empty((1,)), "Meta")
    library.impl("custom_sdpa", _attend, "CPU")
    for name in ("custom_sdpa", "sdpa_with_kv_cache"):
        library.impl(name, lambda query, *rest: torch.empty_like(query), "Meta")


def _update(value: torch.Tensor, cache: torch.Tensor, start_pos: int) -> torch.Tensor:
    cache[:, start_pos : start_pos + value.shape[1]] = value
    return value.new_empty((1,))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, *rest: Any
) -> torch.Tensor:
    """Causal attention: query i [B, S, H, D] reads rows 0 to start + i of key and value [B,
    context, G, D]."""
    rows, heads = query.shape[1:3]
    read = torch.arange(key.shape[1]) <= start + torch.arange(rows)[:, None]
    key, value = (
        each.repeat_interleave(heads // each.shape[2], 2).transpose(1, 2) for each in (key, value)
    )
    made = torch.nn.functional.scaled_dot_product_attention(query.transpose(1, 2), key, value, read)
    return made.transpose(1, 2).contiguous()
