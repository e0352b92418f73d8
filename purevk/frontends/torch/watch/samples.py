"""Sees writes into tensors that torch does not count, by some of their elements."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from purevk.errors import InputError

_PER_TENSOR = 4
_nbytes = operator.methodcaller("nbytes")


class Samples:
    """Some elements of each of the tensors, as they are now.

    Libraries write weights through `tensor.data`, such as `peft` when it merges an adapter, and
    averages of weights: `Tensor._version` stays what it was. Such a write changes nearly all
    elements, so that a few tell. A write into single elements may go unseen.

    Elements are read through views, which own the storages. A storage can still be resized, so its
    address and its size are compared before anything in it is read.

    Args:
        tensors: those that are not in CPU memory have no samples.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        sampled = [(at, list(_views(tensor))) for at, tensor in enumerate(tensors)]
        sampled = [(at, views) for at, views in sampled if views]
        self._owners = [at for at, _ in sampled]
        self._tensors = [tensors[at] for at in self._owners]
        self._storages = _storages(self._tensors)
        self._addresses = addresses_of(self._tensors)
        self._sizes = list(map(_nbytes, self._storages))
        # Views of one form, which one operator reads, and the number of each one's tensor.
        self._views: dict[Any, list[Any]] = {}
        self._numbers: dict[Any, list[int]] = {}
        for number, (_, views) in enumerate(sampled):
            for view in views:
                form = view.dtype, view.shape, view.stride()
                self._views.setdefault(form, []).append(view)
                self._numbers.setdefault(form, []).append(number)
        self._values = self._read()

    def changed(self) -> bool:
        """Whether an element is another one, or a tensor is elsewhere in memory."""
        import torch

        if self._moved():
            return True
        return not all(map(torch.equal, self._read(), self._values))

    def owners(self) -> set[int]:
        """The positions of the tensors of which an element is another one, or that are elsewhere."""
        numbers = self._moved()
        for (form, views), values in zip(self._views.items(), self._values):
            for number, view, value in zip(self._numbers[form], views, values.split(form[1][0])):
                if number not in numbers and not view.equal(value):
                    numbers.add(number)
        return {self._owners[number] for number in numbers}

    def _moved(self) -> set[int]:
        """The numbers of the tensors whose memory is not where it was: nothing may be read there."""
        storages = _storages(self._tensors)
        if (
            all(map(operator.is_, storages, self._storages))
            and addresses_of(self._tensors) == self._addresses
            and list(map(_nbytes, storages)) == self._sizes
        ):
            return set()
        now = zip(storages, addresses_of(self._tensors), map(_nbytes, storages))
        then = zip(self._storages, self._addresses, self._sizes)
        return {
            number
            for number, (new, old) in enumerate(zip(now, then))
            if new[0] is not old[0] or new[1:] != old[1:]
        }

    def _read(self) -> list[Any]:
        import torch

        return list(map(torch.cat, self._views.values()))


def _storages(tensors: Sequence[Any]) -> list[Any]:
    import torch

    return list(map(torch.Tensor.untyped_storage, tensors))


def addresses_of(tensors: Sequence[Any]) -> list[int]:
    """Where the first elements of tensors are."""
    import torch

    return list(map(torch.Tensor.data_ptr, tensors))


def _views(tensor: Any) -> Iterator[Any]:
    """Views of some elements, as integers of two dims."""
    import torch

    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        return
    if not tensor.numel() or not tensor.data_ptr() or not has_memory(tensor):
        return
    if tensor.is_conj() or tensor.is_neg():
        return
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    for count, step, first in _lines(tensor.shape, tensor.stride()):
        first += tensor.storage_offset()
        yield tensor.detach().as_strided((count, 1), (step, 1), first).view(bits)


def _lines(shape: Sequence[int], strides: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Elements of a tensor as lines in memory: how many, the step between them, and the first."""
    offsets = [0]
    for size, stride in zip(shape, strides):
        if len(offsets) * size > _PER_TENSOR:
            break
        offsets = [offset + index * stride for offset in offsets for index in range(size)]
    else:
        yield from ((1, 1, offset) for offset in offsets)
        return
    # A diagonal does not lie in one row or column of a matrix.
    count = min(_PER_TENSOR, max(shape))
    step = first = 0
    for size, stride in zip(shape, strides):
        steps = size // count
        step += steps * stride
        first += (size - 1 - (count - 1) * steps) // 2 * stride
    yield count, step, first


def refuse_released(tensor: Any, name: str, where: str) -> None:
    """Raises `InputError` for a tensor on the CPU whose memory was released."""
    import torch

    if tensor.device.type == "cpu" and tensor.layout is torch.strided and not has_memory(tensor):
        raise InputError(
            f"the memory of {name or 'a weight'} was released",
            where=where,
            why=f"its storage has {tensor.untyped_storage().nbytes()} bytes, and {tensor.nbytes} are"
            " read from it",
            next="give it memory again before the call; for FSDP: module.unshard()",
        )


def has_memory(tensor: Any) -> bool:
    """Whether the storage of a tensor is as large as the tensor says. It is not after
    `untyped_storage().resize_(0)`, as FSDP does it."""
    if not tensor.numel():
        return True
    last: int = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() >= needed)
