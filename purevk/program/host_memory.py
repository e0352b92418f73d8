"""Memory of the host for large arrays that live as long as a call."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST = 1 << 20
"""Bytes from which on an array uses memory again. The system clears new memory page by page, which
takes about as long as the copy into it; for less, the C library keeps memory itself."""


class HostMemory:
    """Arrays in memory that is used again, once nothing refers to an array in it any more. It holds
    as much as the arrays that were alive at one time."""

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []
        self._lock = threading.Lock()

    def empty(self, sizes: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        """A contiguous array with any content."""
        nbytes = math.prod(sizes) * dtype.itemsize
        if nbytes < LEAST:
            return np.empty(sizes, dtype)
        with self._lock:
            free = self._free()
            fitting = [at for at in free if self._buffers[at].nbytes == nbytes]
            if fitting:
                buffer = self._buffers[fitting[0]]
            else:
                self._buffers = [
                    buffer for at, buffer in enumerate(self._buffers) if at not in free
                ]
                buffer = np.empty(nbytes, np.uint8)
                self._buffers.append(buffer)
            array: np.ndarray = np.ndarray(sizes, dtype, buffer)
            return array

    def copy(self, array: np.ndarray) -> np.ndarray:
        """A copy with the same strides."""
        copied: np.ndarray
        if array.nbytes < LEAST or not array.flags.c_contiguous:
            copied = array.copy(order="K")
        else:
            copied = self.empty(array.shape, array.dtype)
            np.copyto(copied, array)
        return copied

    def _free(self) -> list[int]:
        """The buffers that no array lies in: each array refers to its own."""
        buffers = self._buffers
        return [at for at in range(len(buffers)) if sys.getrefcount(buffers[at]) <= _ALONE]


_one = [np.empty(0)]
_ALONE = sys.getrefcount(_one[0])
"""References to what only a list holds, as the function counts them."""
