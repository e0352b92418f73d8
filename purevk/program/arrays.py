"""Arrays of numpy over what a caller gives: numpy arrays, torch tensors, and whatever else gives its
memory away through `__dlpack__`, `__array_interface__`, `__array__` or the buffer protocol. Nothing
is copied here that need not be."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from purevk.dtypes import DType, elements
from purevk.errors import InputError

# DLPack's device types whose memory the host reads: CPU, pinned memory of CUDA and of ROCm, managed
# memory of CUDA.
_HOST_MEMORY = (1, 3, 11, 13)
# Elements of an array whose addresses are compared one by one.
_MAX_OFFSETS = 1 << 20


def is_torch(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def dtype_of(array: np.ndarray) -> DType | None:
    """The element type of an array; None for one that numpy itself does not have. An array that was
    pickled has a copy of numpy's dtype, so its identity says nothing."""
    dtype = array.dtype
    own = dtype.num < 256 and dtype.isnative and dtype.kind in "biufc"
    return DType.from_numpy(dtype) if own else None


def of_torch(tensor: Any, name: str, where: str, writable: bool = False) -> np.ndarray:
    """A tensor's elements, without a copy if they are on the CPU (bfloat16 as uint16); see
    `purevk.dtypes.elements`."""
    if type(tensor) is not sys.modules["torch"].Tensor:
        _check_class(tensor, name, where)
    try:
        try:
            return elements(tensor, writable)
        except (RuntimeError, TypeError, BufferError):  # on another device, or conjugated lazily
            return elements(tensor.detach().cpu().resolve_conj().resolve_neg())
    except (RuntimeError, TypeError, NotImplementedError, BufferError) as error:
        kind, next = _unreadable(tensor)
        if kind:
            why = "a dense tensor of a dtype that purevk has is expected"
            raise InputError(f"{name} is {kind}", where=where, why=why, next=next) from error
        raise InputError(
            f"the elements of {name} cannot be read",
            where=where,
            why=f"{type(tensor).__name__}: {str(error).partition(chr(10))[0]}",
            next="pass a torch.Tensor of its own, such as x.detach().cpu().clone()",
        ) from error


def on_device(tensor: Any, name: str, where: str) -> Any:
    """A tensor that is not on the CPU, if purevk reads its kind."""
    _check_class(tensor, name, where)
    kind, next = _unreadable(tensor)
    if kind:
        why = "a dense tensor of a dtype that purevk has is expected"
        raise InputError(f"{name} is {kind}", where=where, why=why, next=next)
    return tensor.detach()


def _check_class(tensor: Any, name: str, where: str) -> None:
    """Raises `InputError` for a tensor of a class with operators of its own."""
    import torch

    of_class: Any = type(tensor)
    if of_class is torch.Tensor or not _computes_otherwise(of_class):
        return
    kind, next = _unreadable(tensor)
    raise InputError(
        f"{name} is {kind or f'a {of_class.__name__}'}",
        where=where,
        why="a plain torch.Tensor is expected"
        if kind
        else "its class changes what operators do (__torch_function__ or __torch_dispatch__),"
        " and a graph has only those of torch",
        next=next or "pass a plain tensor: x.as_subclass(torch.Tensor), or what it holds",
    )


@functools.cache
def _computes_otherwise(kind: Any) -> bool:
    """Whether a class of tensors has operators of its own. `Parameter` and `Buffer` have not."""
    import torch

    plain = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    disabled = (torch._C._disabled_torch_function_impl, torch._C._disabled_torch_dispatch_impl)
    own_dispatch = kind.__torch_dispatch__ not in disabled
    return own_dispatch or (function is not plain and function not in disabled)


def _unreadable(tensor: Any) -> tuple[str, str]:
    """What kind of tensor purevk does not read, and what to do; empty texts if it reads it."""
    import torch

    if tensor.is_nested:
        return "a nested tensor", "pad it: torch.nested.to_padded_tensor(x, 0)"
    if tensor.layout is not torch.strided:
        name = str(tensor.layout).removeprefix("torch.")
        return f"a tensor of the layout {name}", "convert it: x.to_dense()"
    if tensor.device.type == "meta":
        return "a tensor on the device meta, which has no elements", "pass a tensor on the CPU"
    if type(tensor).__name__ == "FakeTensor":
        return "a FakeTensor, which has no elements", "call the program outside of tracing"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor of torch.func", "call the program outside of torch.vmap and torch.func"
    if tensor.is_quantized:
        return "a quantized tensor", "pass x.dequantize() or x.int_repr()"
    if DType.from_torch(tensor.dtype) is None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"a tensor of the dtype {dtype}", "convert it to a dtype that the method expects"
    return "", ""


def as_array(obj: Any, dtype: DType, name: str, where: str) -> np.ndarray:
    if isinstance(obj, np.ndarray):
        if type(obj) is not np.ndarray and isinstance(obj, np.ma.MaskedArray):
            raise InputError(
                f"{name} is a masked array",
                where=where,
                why="the mask would be lost",
                next="fill it: x.filled(0)",
            )
        return obj
    if isinstance(obj, (bool, int, float, complex, list, tuple)):
        array = _asarray(obj, name, where)
        # Numbers without a dtype take the method's, if it is of their kind.
        if array.dtype.kind == "i" and dtype.numpy.kind in "iu" and array.size:
            limits = np.iinfo(dtype.numpy)
            if array.min() < limits.min or array.max() > limits.max:
                raise InputError(
                    f"{name} has numbers from {array.min()} to {array.max()}",
                    where=where,
                    why=f"{dtype.name} holds {limits.min} to {limits.max}",
                )
        return (
            array.astype(dtype.numpy)
            if np.can_cast(array.dtype, dtype.numpy, "same_kind")
            else array
        )
    try:
        array = _of_protocols(obj, name, where)
        _check_addresses(array)
        return array
    except InputError:
        raise
    except Exception as error:  # code of others, or what cannot be true
        raise _no_array(error, name, where) from error


def _of_protocols(obj: Any, name: str, where: str) -> np.ndarray:
    """An array over the memory that an object gives away."""
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        kind = int(obj.__dlpack_device__()[0])
        if kind not in _HOST_MEMORY:
            raise InputError(
                f"{name} is in the memory of another device",
                where=where,
                why=f"its DLPack device type is {kind}; memory of the CPU is expected",
                next="copy it to the CPU first",
            )
        try:
            array = np.from_dlpack(obj)
        except (BufferError, RuntimeError, TypeError):
            pass  # a dtype that numpy has not: the object may give an array in another way
        else:
            if array.flags.owndata and array.size:  # numpy makes memory, with anything in it
                raise ValueError("it has elements, and their address is 0")
            return array
    if any(hasattr(obj, name) for name in ("__array_interface__", "__array_struct__", "__array__")):
        return _asarray(obj, name, where)
    try:
        view = memoryview(obj)
    except TypeError:
        raise InputError(
            f"{name} is {type(obj).__name__}",
            where=where,
            why="a numpy array or a torch tensor is expected, or an object with __dlpack__, __array_interface__, __array__ or"  # noqa: E501
            " the buffer protocol",
            next="convert it: numpy.asarray(x) or torch.as_tensor(x)",
        ) from None
    return np.asarray(view)


def _check_addresses(array: np.ndarray) -> None:
    """Raises `ValueError` if an array of others has elements where no process has memory."""
    if not array.size:
        return
    steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides)]
    first = array.ctypes.data + sum(step for step in steps if step < 0)
    end = array.ctypes.data + sum(step for step in steps if step > 0) + array.itemsize
    if first <= 0 or end > 1 << 56 or end - first > 1 << 40:
        raise ValueError(f"its elements are at addresses from {first:#x} to {end:#x}")


def _asarray(obj: Any, name: str, where: str) -> np.ndarray:
    try:
        array = np.asarray(obj)
    except Exception as error:  # `__array__` runs code of others
        raise _no_array(error, name, where) from error
    if array.dtype.kind == "O":
        raise InputError(
            f"{name} is {type(obj).__name__} of Python objects",
            where=where,
            why="numpy makes no array of numbers from it",
            next="pass a numpy array or a torch tensor",
        )
    return array


def _no_array(error: Exception, name: str, where: str) -> InputError:
    """The error for an object that says it gives an array away, and does not."""
    return InputError(
        f"{name} cannot be made an array: {type(error).__name__}",
        where=where,
        why=str(error).partition("\n")[0],
        next="pass a numpy array or a torch tensor",
    )


def overlap(first: Any, two: Any) -> bool:
    """Whether two arrays, or two tensors of a device, share an element. What takes too long to find
    out counts as shared."""
    if not isinstance(first, np.ndarray) or not isinstance(two, np.ndarray):
        if (
            isinstance(first, np.ndarray)
            or isinstance(two, np.ndarray)
            or first.device != two.device
        ):
            return False
        first, two = _addresses(first), _addresses(two)
    if not np.may_share_memory(first, two):
        return False
    try:
        return np.shares_memory(first, two, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(array: Any) -> bool:
    """Whether two elements of an array, or of a tensor of a device, share memory. What takes too much
    memory to find out counts as shared."""
    memory = array if isinstance(array, np.ndarray) else _addresses(array)
    if memory.flags.c_contiguous or not memory.size:
        return False
    dims = sorted((abs(step), size) for size, step in zip(memory.shape, memory.strides) if size > 1)
    reach = memory.itemsize  # of the dims so far, in bytes
    for step, size in dims:
        if step < reach:
            break
        reach += (size - 1) * step
    else:
        return False
    if dims[0][0] < memory.itemsize or memory.size > _MAX_OFFSETS:
        return True
    offsets = np.zeros(1, np.int64)
    for step, size in dims:
        offsets = (offsets[:, None] + np.arange(size) * step).reshape(-1)
    offsets.sort()
    return bool((np.diff(offsets) < memory.itemsize).any())


def _addresses(tensor: Any) -> np.ndarray:
    """An array at the addresses of a tensor of a device. Its elements must not be read."""
    width = tensor.element_size()
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape),
        "strides": tuple(step * width for step in tensor.stride()),
        "typestr": f"|V{width}",
        "data": (tensor.data_ptr(), False),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
