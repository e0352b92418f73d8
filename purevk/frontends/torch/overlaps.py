"""Inputs of a graph of dynamo that share memory, where the graph writes into one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from purevk.frontends.torch.written_views import example_of, memory_of, written_memories

_Pairs = frozenset[tuple[int, int]]


class Overlaps:
    """Which inputs of a graph share memory.

    AOTAutograd makes another graph if a written input shares memory with another one. It guards this
    for dynamic sizes in one memory alone. Parameters and buffers are not compared.

    Attributes:
        written: positions of the inputs that the graph may write into.
    """

    def __init__(self, module: Any) -> None:
        import torch

        memories = written_memories(module.graph)
        nodes = dict(enumerate(module.graph.find_nodes(op="placeholder")))
        self.written = [at for at, node in nodes.items() if memory_of(node) in memories]
        given = {
            at: node
            for at, node in nodes.items()
            if example_of(node) is not None
            and not node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
        }
        self._moving = [at for at in self.written if at in given]
        self._given = list(given) if self._moving else []
        self._spans: dict[int, int] = {}  # of the inputs whose sizes and strides are known
        ranges: dict[Any, dict[int, tuple[int, int]]] = {}
        guarded: dict[Any, list[int]] = {}
        for at in self._given:
            example, memory = example_of(given[at]), memory_of(given[at])
            numbers = (*example.shape, *example.stride(), example.storage_offset())
            if any(isinstance(each, torch.SymInt) for each in numbers):
                guarded.setdefault(memory, []).append(at)
            else:
                start = example.storage_offset() * example.itemsize
                self._spans[at] = _span(example)
                ranges.setdefault(memory, {})[at] = start, start + self._spans[at]
        self._traced = frozenset(
            pair for group in ranges.values() for pair in self._overlapping(group)
        )
        self._guarded = {
            (min(at, other), max(at, other))
            for memory, group in guarded.items()
            for at in group
            for other in (*group, *ranges.get(memory, ()))
        }

    def as_traced(self, args: Sequence[Any]) -> bool:
        """Whether the inputs of a call share memory as those that the graph was made for."""
        if len(self._given) < 2:
            return True
        ranges = {}
        for at in self._given:
            span = self._spans.get(at)
            start = args[at].data_ptr()
            ranges[at] = start, start + (_span(args[at]) if span is None else span)
        return self._overlapping(ranges) - self._guarded == self._traced - self._guarded

    def _overlapping(self, ranges: Mapping[int, tuple[int, int]]) -> _Pairs:
        """Pairs of tensors whose ranges overlap and of which one is written."""
        found: set[tuple[int, int]] = set()
        active: list[tuple[int, int]] = []
        for at, (start, end) in sorted(ranges.items(), key=lambda item: item[1]):
            active = [(stop, other) for stop, other in active if stop > start]
            if end > start:
                found.update((min(at, other), max(at, other)) for _, other in active)
                active.append((end, at))
        return frozenset(
            pair for pair in found if pair[0] in self._moving or pair[1] in self._moving
        )


def _span(tensor: Any) -> int:
    """The bytes from a tensor's first element to behind its last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return int((last + 1) * tensor.itemsize)
