"""Sees writes into tensors that torch does not count, by some of their elements."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_WORD, _FIRST, _LAST = 4, 4096, 1 << 62
_PER_TENSOR = 4
# All memory of the process, as words. Reading each word by its address takes one call of numpy, so
# that a check of hundreds of tensors takes some microseconds.
_MEMORY: np.ndarray[tuple[int], np.dtype[np.uint32]] = np.frombuffer(
    memoryview((ctypes.c_uint32 * ((_LAST - _FIRST) // _WORD)).from_address(_FIRST)), np.uint32
)
# Multiples of it, modulo 1, are spread evenly, and rarely lie in one column of a matrix.
_GOLDEN = (5**0.5 - 1) / 2


class Samples:
    """Some elements of each of the tensors, as they are now.

    Libraries write weights through `tensor.data`, such as `peft` when it merges an adapter, and
    averages of weights: `Tensor._version` stays what it was. Such a write changes nearly all
    elements, so that a few tell. A write into single elements may go unseen.

    Args:
        tensors: those that are not in CPU memory have no samples.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        found = [(at, word) for at, tensor in enumerate(tensors) for word in _words(tensor)]
        self._owners = [at for at, _ in found]
        self._words = np.array([word for _, word in found], np.intp)
        self._values = _MEMORY[self._words]
        self._bytes = self._values.tobytes()

    def changed(self) -> bool:
        """Whether an element is another one. The tensors must be alive, and their memory where it
        was."""
        found: bytes = _MEMORY[self._words].tobytes()
        return found != self._bytes

    def owners(self) -> set[int]:
        """The positions of the tensors of which an element is another one."""
        differ = _MEMORY[self._words] != self._values
        return {self._owners[at] for at in np.flatnonzero(differ)}


def _words(tensor: Any) -> Iterator[int]:
    """The positions in `_MEMORY` of some elements."""
    count, start = tensor.numel(), tensor.data_ptr() if tensor.device.type == "cpu" else 0
    size = tensor.element_size()
    if count and start and tensor.untyped_storage().nbytes() < size * _reach(tensor):
        return  # its storage was made smaller
    if not count or not _FIRST <= start < _LAST - count * size:
        return
    for number in range(min(count, _PER_TENSOR)):
        at = number if count <= _PER_TENSOR else int((number + 1) * _GOLDEN % 1 * count)
        offset = 0
        for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride())):
            at, index = divmod(at, length)
            offset += index * stride
        yield (start + offset * size - _FIRST) // _WORD


def _reach(tensor: Any) -> int:
    """The elements of the storage up to the last one of a tensor."""
    last: int = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return int(tensor.storage_offset()) + last + 1
