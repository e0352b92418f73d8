"""Inputs of a graph of dynamo that share memory, where the graph writes into one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from purevk.frontends.torch.written_views import example_of, memory_of, written_memories

_Pairs = frozenset[tuple[int, int]]


class Overlaps:
    """Which inputs of a graph share memory.

    AOTAutograd makes another graph if a written input shares memory with another one, and that graph
    may be wrong. It guards this for dynamic sizes in one memory alone. Parameters and buffers are
    not compared.

    Attributes:
        written: positions of the inputs that the graph may write into.
        traced: whether inputs that the graph was made for overlap.
    """

    def __init__(self, module: Any) -> None:
        import torch

        memories = written_memories(module.graph)
        nodes = dict(enumerate(module.graph.find_nodes(op="placeholder")))
        self.written = [at for at, node in nodes.items() if memory_of(node) in memories]
        placeholders = {
            at: node
            for at, node in nodes.items()
            if example_of(node) is not None
            and not node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        }
        self._moving = [at for at in self.written if at in placeholders]
        self._given = list(placeholders) if self._moving else []
        self._spans: dict[int, int] = {}  # of the inputs whose sizes and strides are known
        ranges: dict[Any, dict[int, tuple[int, int]]] = {}
        for at in self._given:
            example, memory = example_of(placeholders[at]), memory_of(placeholders[at])
            numbers = (*example.shape, *example.stride(), example.storage_offset())
            *layout, offset = map(_hint, numbers)
            start, span = offset * example.itemsize, _span(example.itemsize, layout)
            ranges.setdefault(memory, {})[at] = start, start + span
            if not any(isinstance(number, torch.SymInt) for number in numbers):
                self._spans[at] = span
        self.traced = any(map(self._overlapping, ranges.values()))
        self._guarded = {
            (min(at, index), max(at, index))
            for group in ranges.values()
            for at in group
            for index in group
            if at not in self._spans
        }

    def of_call(self, args: Sequence[Any]) -> bool:
        """Whether inputs of a call overlap where no guard of AOTAutograd compares them."""
        if len(self._given) < 2:
            return False
        ranges = {}
        for at in self._given:
            span = self._spans.get(at)
            start = args[at].data_ptr()
            if span is None:
                span = _span(args[at].itemsize, (*args[at].shape, *args[at].stride()))
            ranges[at] = start, start + span
        return not self._overlapping(ranges) <= self._guarded

    def _overlapping(self, ranges: Mapping[int, tuple[int, int]]) -> _Pairs:
        """Pairs of tensors whose ranges overlap and of which one is written."""
        pairs: set[tuple[int, int]] = set()
        active: list[tuple[int, int]] = []
        for at, (start, end) in sorted(ranges.items(), key=lambda item: item[1]):
            active = [(stop, index) for stop, index in active if stop > start]
            if end > start:
                pairs.update((min(at, index), max(at, index)) for _, index in active)
                active.append((end, at))
        return frozenset(
            pair for pair in pairs if pair[0] in self._moving or pair[1] in self._moving
        )


def _hint(number: Any) -> int:
    """A number as it was traced; 1 if it is unbacked."""
    if isinstance(number, int):
        return number
    return int(number.node.hint) if number.node.has_hint() else 1


def _span(itemsize: int, layout: Sequence[int]) -> int:
    """The bytes from a tensor's first element to behind its last one, by its sizes and strides."""
    sizes, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
    if 0 in sizes:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides))
    return int((last + 1) * itemsize)
