"""Layers of sliding windows of a `StaticCache` of transformers, in modules that torch.export
traces.

`StaticSlidingWindowLayer` keeps the keys and values of the last tokens of a window. It knows from a
Python number how many tokens it has seen, and takes one of four ways by it. torch.export would take
the number for a constant. The layer here keeps the same keys and values at the same indices, and
counts in a tensor, so that one way serves all counts.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def traceable_windows(caches: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Within, layers of sliding windows of caches can be traced. They have the same tensors.

    Args:
        caches: each with the module that has it, and a name.
    """
    cache_module = sys.modules["transformers.cache_utils"]
    replaced = []
    for _, _, cache in caches:
        for number, layer in enumerate(cache.layers):
            if type(layer) is cache_module.StaticSlidingWindowLayer:
                replaced.append((cache, number, layer))
                cache.layers[number] = _traceable(layer)
    if not replaced:
        yield
        return
    try:
        with _masks_at_tensor_offsets():
            yield
    finally:
        for cache, number, layer in replaced:
            cache.layers[number] = layer


def _traceable(layer: Any) -> Any:
    """A layer with the same tensors that counts tokens in a tensor."""
    new_layer = _layer_class()(layer.max_cache_len)
    vars(new_layer).update(vars(layer))
    # The layer itself stops to count in the tensor, and to read it, once the window is full.
    count = vars(new_layer).pop("cumulative_length_int")
    if layer.is_initialized and int(layer.cumulative_length) != count:
        layer.cumulative_length.fill_(count)
    return new_layer


@functools.cache
def _layer_class() -> Any:
    import torch
    from transformers import cache_utils

    base: Any = cache_utils.StaticLayer

    class WindowLayer(base):  # type: ignore[misc]
        """The last W tokens. Index i along dim 2 of `keys` and `values` has token i + max(n - W, 0),
        where n tokens were seen. From index n on there are zeros."""

        is_sliding = True

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            added, window = key_states.shape[-2], self.max_cache_len
            first = torch.clamp(self.cumulative_length, max=window)
            new = torch.arange(added, device=self.device) + first
            # How many tokens leave the window.
            moved = torch.clamp(first + added - window, min=0)
            positions = torch.arange(window, device=self.device) + moved
            self.cumulative_length.add_(added)
            results = []
            for part, states in (("keys", key_states), ("values", value_states)):
                tensor = getattr(self, part)
                room = torch.nn.functional.pad(tensor, (0, 0, 0, added))
                room = room.index_copy(2, new, states)
                tensor.copy_(room.index_select(2, positions))
                results.append(room)
            return tuple(results)

        def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
            """The length of what `update` returns, and the token of its first index."""
            window = self.max_cache_len
            return window + query_length, torch.clamp(self.cumulative_length - window, min=0)

    return WindowLayer


@contextlib.contextmanager
def _masks_at_tensor_offsets() -> Iterator[None]:
    """Within, transformers makes masks of keys that begin at a token that a tensor has.

    It compares lengths of masks of padding with the end of the keys, to make them longer. Such a
    comparison of a tensor cannot be traced.
    """
    import torch
    from transformers import masking_utils as known

    masking_utils: Any = known
    padding, blocks = masking_utils.prepare_padding_mask, masking_utils.maybe_pad_block_sequence_ids

    def prepare_padding_mask(attention_mask: Any, kv_length: int, kv_offset: Any) -> Any:
        if attention_mask is None or not isinstance(kv_offset, torch.Tensor):
            return padding(attention_mask, kv_length, kv_offset)
        return torch.nn.functional.pad(attention_mask, (0, kv_length))

    def maybe_pad_block_sequence_ids(
        block_sequence_ids: Any, attention_mask: Any, kv_length: int, kv_offset: Any
    ) -> Any:
        if not isinstance(kv_offset, torch.Tensor):
            return blocks(block_sequence_ids, attention_mask, kv_length, kv_offset)
        return torch.nn.functional.pad(block_sequence_ids, (0, kv_length), value=-1)

    masking_utils.prepare_padding_mask = prepare_padding_mask
    masking_utils.maybe_pad_block_sequence_ids = maybe_pad_block_sequence_ids
    try:
        yield
    finally:
        masking_utils.prepare_padding_mask = padding
        masking_utils.maybe_pad_block_sequence_ids = blocks
