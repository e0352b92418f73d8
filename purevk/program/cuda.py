"""CUDA tensors of torch as inputs and outputs, without a copy through the host.

Vulkan allocates the buffers of inputs and outputs and exports them. CUDA imports them, and a tensor
is copied into them or out of them on the device. Two timeline semaphores order the work of both
APIs, so the host does not wait.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from purevk import api
from purevk.dtypes import DType
from purevk.errors import DeviceError, OutOfDeviceMemoryError, PurevkError
from purevk.fallback import to_torch
from purevk.graph.context import Context
from purevk.graph.executable import Executable
from purevk.graph.external import ExternalCalls, ExternalRange
from purevk.program import cuda_driver

if TYPE_CHECKING:
    import torch

MAX_VIEWS = 256
_FEATURES = ("external_memory_fd", "external_semaphore_fd", "timeline_semaphore")
_log = logging.getLogger("purevk")
_lock = threading.Lock()


def external_calls(
    context: Context, executable: Executable, device: torch.device
) -> ExternalCalls | None:
    """What runs calls with tensors of a torch device without a copy through the host; None if that
    cannot be: the tensors are in other memory, or the host has a part in the calls."""
    if not executable.takes_external:
        return None
    external = _external_device(context, device)
    if external is None:
        return None
    try:
        return executable.external_calls(external)
    except OutOfDeviceMemoryError:
        raise
    except DeviceError as error:
        context.external[external.index] = None
        _log.warning("CUDA tensors are copied through the host from now on: %s", error)
        return None


def _external_device(context: Context, device: torch.device) -> CudaDevice | None:
    """The Vulkan device of a context as CUDA knows it, if tensors of a torch device are in its
    memory and the drivers can share it; else None."""
    if device.type != "cuda":
        return None
    import torch

    if torch.version.cuda is None:
        return None  # ROCm
    index = torch.cuda.current_device() if device.index is None else device.index
    with _lock:
        if index not in context.external:
            context.external[index] = _find(context.device, index)
        external: CudaDevice | None = context.external[index]
    return external


def _find(device: api.Device, index: int) -> CudaDevice | None:

    missing = [name for name in _FEATURES if name not in device.features]
    try:
        # torch numbers the devices that CUDA_VISIBLE_DEVICES leaves, as the driver does.
        same = cuda_driver.device_uuid(index) == device.uuid
    except DeviceError as error:
        _log.info("CUDA tensors are copied through the host: %s", error)
        return None
    if not same or missing:
        reason = f"it lacks {', '.join(missing)}" if same else "it is another GPU"
        _log.info("cuda:%d and %s share no memory: %s", index, device.name, reason)
        return None
    return CudaDevice(index)


class CudaDevice:
    """A device of CUDA that is also the Vulkan device: an `ExternalDevice`.

    Args:
        index: its ordinal in CUDA.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def open(
        self,
        buffers: Sequence[api.Buffer],
        semaphores: tuple[api.TimelineSemaphore, api.TimelineSemaphore],
    ) -> CudaMemory:
        """See `ExternalDevice.open`."""
        import torch

        return CudaMemory(torch.device("cuda", self.index), buffers, semaphores)


class _Bytes:
    """Memory of CUDA, by the protocol that torch reads."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaMemory:
    """Exported buffers and semaphores in CUDA: an `ExternalMemory`. Its stream is the current one
    of torch."""

    def __init__(
        self,
        device: torch.device,
        buffers: Sequence[api.Buffer],
        semaphores: tuple[api.TimelineSemaphore, api.TimelineSemaphore],
    ) -> None:
        import torch

        self._device = device
        self._opened: list[Any] = []
        self._bytes: dict[int, torch.Tensor] = {}
        self._views: dict[tuple[int, int, tuple[int, ...], DType], torch.Tensor] = {}
        self._last: Any = None
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes the context of torch current
            try:
                for buffer in buffers:
                    size = buffer.allocation.block.size
                    memory = cuda_driver.ImportedMemory(buffer.export_fd(), size, buffer.nbytes)
                    self._opened.append(memory)
                    whole = torch.as_tensor(_Bytes(memory.address, buffer.nbytes), device=device)
                    self._bytes[buffer.number] = whole
                self._first, self._second = (self._semaphore(semaphore) for semaphore in semaphores)
            except BaseException:
                self._release()
                raise

    def _semaphore(self, semaphore: api.TimelineSemaphore) -> cuda_driver.ImportedSemaphore:
        imported = cuda_driver.ImportedSemaphore(semaphore.export_fd())
        self._opened.append(imported)
        return imported

    def _stream(self) -> Any:
        import torch

        return torch.cuda.current_stream(self._device)

    def begin(self) -> None:
        """See `ExternalMemory.begin`."""
        if self._last is not None:
            self._stream().wait_event(self._last)

    def write(self, target: ExternalRange, tensor: Any) -> None:
        """See `ExternalMemory.write`. A numpy array is copied from the host."""
        if isinstance(tensor, np.ndarray):
            tensor = to_torch(tensor, target.dtype)
        if tensor.numel():
            self._view(target).copy_(tensor)

    def signal(self, value: int) -> None:
        """See `ExternalMemory.signal`."""
        self._first.signal(value, self._stream().cuda_stream)

    def wait(self, value: int) -> None:
        """See `ExternalMemory.wait`."""
        self._second.wait(value, self._stream().cuda_stream)

    def read(self, source: ExternalRange, target: torch.Tensor | None) -> torch.Tensor:
        """See `ExternalMemory.read`."""
        import torch

        if target is None:
            dtype = source.dtype.to_torch()
            target = torch.empty(source.sizes, dtype=dtype, device=self._device)
        if target.numel():
            target.detach().copy_(self._view(source))
        return target

    def end(self) -> None:
        """See `ExternalMemory.end`."""
        import torch

        if self._last is None:
            self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last.record(self._stream())

    def _view(self, part: ExternalRange) -> torch.Tensor:
        span, sizes, dtype = part
        key = span.buffer.number, span.offset, sizes, dtype
        view = self._views.get(key)
        if view is None:
            kind = dtype.to_torch()
            count = dtype.itemsize
            for size in sizes:
                count *= size
            flat = self._bytes[span.buffer.number][span.offset : span.offset + count]
            view = flat.view(kind).view(sizes)
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view

    def close(self) -> None:
        """See `ExternalMemory.close`."""
        if self._last is not None:
            self._last.synchronize()
        self._release()

    def _release(self) -> None:
        import torch

        self._views.clear()
        self._bytes.clear()
        with torch.cuda.device(self._device), contextlib.suppress(PurevkError):
            while self._opened:
                self._opened.pop().close()
