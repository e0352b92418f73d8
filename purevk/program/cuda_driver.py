"""The few functions of the CUDA driver API that import memory and semaphores of Vulkan.

The library belongs to NVIDIA's driver. The structs are those of `cuda.h`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import uuid
from typing import Any

from purevk.errors import DeviceError

_OPAQUE_FD, _TIMELINE_SEMAPHORE_FD = (
    1,
    9,
)  # CUexternalMemoryHandleType, CUexternalSemaphoreHandleType


class _Handle(ctypes.Union):
    _fields_ = [("fd", ctypes.c_int), ("words", ctypes.c_uint64 * 2)]


class _MemoryHandle(ctypes.Structure):
    """CUDA_EXTERNAL_MEMORY_HANDLE_DESC."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle", _Handle),
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    ]


class _BufferDescription(ctypes.Structure):
    """CUDA_EXTERNAL_MEMORY_BUFFER_DESC."""

    _fields_ = [
        ("offset", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    ]


class _SemaphoreHandle(ctypes.Structure):
    """CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle", _Handle),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    ]


class _SemaphoreParams(ctypes.Structure):
    """CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS and CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS, which differ
    only in what timeline semaphores do not use."""

    _fields_ = [
        ("value", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 8),
        ("flags", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 16),
    ]


@functools.cache
def _library() -> Any:
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise DeviceError("The CUDA driver cannot be opened", where=name, why=str(error)) from error
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of the driver.

    Raises:
        DeviceError: it failed, or this driver has no such function.
    """
    library = _library()
    try:
        function = getattr(library, name)
    except AttributeError as error:
        raise DeviceError(f"The CUDA driver has no {name}", next="update the driver") from error
    result = function(*arguments)
    if result:
        text = ctypes.c_char_p()
        library.cuGetErrorName(result, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"CUresult {result}"
        raise DeviceError(f"{name} failed with {reason}", where="CUDA driver")


def device_uuid(index: int) -> uuid.UUID:
    """The UUID of a device, as `VkPhysicalDeviceIDProperties.deviceUUID` has it.

    Args:
        index: the device's ordinal of CUDA.

    Raises:
        DeviceError: there is no such device, or no driver.
    """
    device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
    return uuid.UUID(bytes=bytes(found))


class ImportedMemory:
    """Memory of another API, mapped into the current CUDA context.

    Args:
        fd: an opaque file descriptor of the memory. It belongs to CUDA from now on.
        size: bytes of the memory.
        nbytes: of them, from the first one on, the bytes that are mapped.

    Attributes:
        address: of the first byte, in CUDA.
    """

    def __init__(self, fd: int, size: int, nbytes: int) -> None:
        self._memory = ctypes.c_void_p()
        handle = _MemoryHandle(type=_OPAQUE_FD, handle=_Handle(fd=fd), size=size)
        try:
            _call("cuImportExternalMemory", ctypes.byref(self._memory), ctypes.byref(handle))
        except DeviceError:
            os.close(fd)  # it belongs to CUDA only after a success
            raise
        mapped = ctypes.c_uint64()
        description = _BufferDescription(offset=0, size=nbytes)
        try:
            _call(
                "cuExternalMemoryGetMappedBuffer",
                ctypes.byref(mapped),
                self._memory,
                ctypes.byref(description),
            )
        except DeviceError:
            self.close()
            raise
        self.address = mapped.value

    def close(self) -> None:
        """Gives the memory back to its owner. No kernel may still use it."""
        address, self.address = getattr(self, "address", 0), 0
        if address:
            _call("cuMemFree_v2", ctypes.c_uint64(address))
        memory, self._memory = self._memory, ctypes.c_void_p()
        if memory:
            _call("cuDestroyExternalMemory", memory)


class ImportedSemaphore:
    """A timeline semaphore of Vulkan, in the current CUDA context.

    Args:
        fd: an opaque file descriptor of the semaphore. It belongs to CUDA from now on.
    """

    def __init__(self, fd: int) -> None:
        self._semaphore = ctypes.c_void_p()
        handle = _SemaphoreHandle(type=_TIMELINE_SEMAPHORE_FD, handle=_Handle(fd=fd))
        try:
            _call("cuImportExternalSemaphore", ctypes.byref(self._semaphore), ctypes.byref(handle))
        except DeviceError:
            os.close(fd)
            raise
        self._params = _SemaphoreParams()
        self._array = (ctypes.c_void_p * 1)(self._semaphore)

    def signal(self, value: int, stream: int) -> None:
        """Signals a value once a stream (its CUstream) has got here."""
        self._enqueue("cuSignalExternalSemaphoresAsync", value, stream)

    def wait(self, value: int, stream: int) -> None:
        """Has a stream wait for a value."""
        self._enqueue("cuWaitExternalSemaphoresAsync", value, stream)

    def _enqueue(self, name: str, value: int, stream: int) -> None:
        self._params.value = value
        _call(name, self._array, ctypes.byref(self._params), 1, ctypes.c_void_p(stream))

    def close(self) -> None:
        """Gives the semaphore back. No stream may still wait for it or signal it."""
        semaphore, self._semaphore = self._semaphore, ctypes.c_void_p()
        if semaphore:
            _call("cuDestroyExternalSemaphore", semaphore)
