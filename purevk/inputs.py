"""The inputs of a call, checked against the method: numpy arrays, torch tensors, and whatever else
gives its memory away through `__dlpack__`, `__array_interface__`, `__array__` or the buffer
protocol. Nothing is copied here that need not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.ir import Dim, Graph, Value
from purevk.ir import dims as _dims

if TYPE_CHECKING:
    from purevk.method import Method

# DLPack's device types whose memory the host reads: CPU, pinned memory of CUDA and of ROCm, managed
# memory of CUDA.
_HOST_MEMORY = (1, 3, 11, 13)


@dataclass(frozen=True)
class Given:
    """Inputs as arrays (bfloat16 as uint16), and the kind of result that the caller expects: torch
    tensors, and for arrays of bfloat16 the dtype that an input brought (numpy has none of its
    own)."""

    arrays: list[Any]
    torch: bool
    bfloat16: np.dtype | None = None

    def convert(self, output: Any, value: Any) -> Any:
        """An output as the caller expects it."""
        if self.torch and isinstance(output, np.ndarray):
            from purevk.fallback import to_torch

            return to_torch(output, value.type.dtype)
        if (
            self.bfloat16 is not None
            and isinstance(output, np.ndarray)
            and value.type.dtype is DType.bfloat16
        ):
            return output.view(self.bfloat16)
        return output

    def owned(self) -> Given:
        """The same with arrays that nobody else writes."""
        arrays = [array.copy() if isinstance(array, np.ndarray) else array for array in self.arrays]
        return Given(arrays, self.torch, self.bfloat16)


def describe_inputs(graph: Graph) -> str:
    """The inputs as text: "float32[1,3,224,224], int64[1,s0<=128]"."""
    return ", ".join(_describe(value) for value in graph.inputs)


def describe_given(graph: Graph, arrays: Sequence[Any]) -> str:
    """The inputs of a call as text: "float32[1,3,224,224], int64[1,7]"."""
    return ", ".join(
        f"{value.type.dtype.name}[{','.join(map(str, array.shape))}]"
        if isinstance(value, Value)
        else _describe(value)
        for value, array in zip(graph.inputs, arrays)
    )


def _describe(value: Any) -> str:
    if isinstance(value, Value):
        sizes = [
            str(s) if isinstance(s, int) else f"{s}<={_dims.upper(s)}" for s in value.type.dims
        ]
        return f"{value.type.dtype.name}[{','.join(sizes)}]"
    return "int" if isinstance(value, Dim) else "unused"


def read_inputs(method: Method, inputs: Sequence[Any]) -> Given:
    """Checks the inputs of a call and gives them as arrays, over the same memory where the host can
    read it.

    Raises:
        InputError: their number, or the rank, dtype or size of one, does not fit the method.
    """
    expected = method.graph.inputs
    where = _where(method)
    if len(inputs) != len(expected):
        raise InputError(
            f"{len(inputs)} inputs were given, {len(expected)} are expected",
            where=where,
            next="pass one tensor for each input, in order",
        )
    arrays: list[Any] = []
    any_torch, bfloat16 = False, None
    for position, (given, value) in enumerate(zip(inputs, expected)):
        if value is None:
            arrays.append(None)
            continue
        if isinstance(value, Dim):
            arrays.append(_integer(given, position, where))
            continue
        if _is_torch(given):
            any_torch = True
            array, dtype = _of_torch(given), DType.from_torch(given.dtype)
        else:
            array = _as_array(given, value.type.dtype, position, where)
            dtype = DType.from_numpy(array.dtype) if array.dtype.isbuiltin == 1 else None
            if dtype is None and array.dtype.name == "bfloat16":
                bfloat16, dtype, array = array.dtype, DType.bfloat16, array.view(np.uint16)
            elif array.dtype == np.uint16 and value.type.dtype is DType.bfloat16:
                dtype = DType.bfloat16  # the bits, as results give them
        if position in method.graph.updates:
            _check_writable(given, position, where)
        _check(array, dtype, value, position, where)
        arrays.append(array)
    return Given(arrays, any_torch, bfloat16)


def read_outputs(method: Method, out: Any) -> list[np.ndarray | None]:
    """The memory that a caller gives for results, as arrays over it; None where there is none.

    Args:
        out: a tensor, or one (or None) for each output.

    Raises:
        InputError: their number or a dtype does not fit, or one cannot be written to.
    """
    expected, where = (
        method.graph.outputs[: len(method.graph.outputs) - len(method.graph.updates)],
        _where(method),
    )
    given = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(given) != len(expected):
        raise InputError(
            f"out holds {len(given)} tensors, the method has {len(expected)} outputs", where=where
        )
    arrays: list[np.ndarray | None] = []
    for position, (each, value) in enumerate(zip(given, expected)):
        if each is None:
            arrays.append(None)
            continue
        if _is_torch(each) and each.device.type == "cpu":
            array, dtype = _of_torch(each), DType.from_torch(each.dtype)
        elif isinstance(each, np.ndarray):
            array, dtype = each, DType.from_numpy(each.dtype) if each.dtype.isbuiltin == 1 else None
            if each.dtype.name in ("bfloat16", "uint16"):
                array, dtype = each.view(np.uint16), DType.bfloat16
        else:
            raise InputError(
                f"out {position} is {type(each).__name__}",
                where=where,
                why="a numpy array or a torch tensor on the CPU is expected",
            )
        wanted = value.type.dtype if isinstance(value, Value) else None
        if dtype is None or dtype is not wanted or not array.flags.writeable:
            raise InputError(
                f"out {position} cannot take the result",
                where=where,
                why=f"a writable {wanted.name if wanted else 'None: the result is no tensor'} is expected, "
                f"{'a writable' if array.flags.writeable else 'a read-only'} {each.dtype} was given",
            )
        arrays.append(array)
    return [*arrays, *(None for _ in method.graph.updates)]


def _where(method: Method) -> str:
    """Text for messages, kept: a call needs it before it is known whether there is one."""
    if method.described is None:
        method.described = (
            f"{method.program.name}, method {method.name}({describe_inputs(method.graph)})"
        )
    return method.described


def write_back(inputs: Sequence[Any], updates: Sequence[int], results: Sequence[Any]) -> None:
    """Gives the inputs that a method writes, by position, their new elements."""
    for position, made in zip(updates, results):
        given = inputs[position]
        if isinstance(given, np.ndarray):
            np.copyto(given, np.asarray(made).view(given.dtype))
        else:
            given.detach().copy_(made)


def _check_writable(given: Any, position: int, where: str) -> None:
    writable = given.flags.writeable if isinstance(given, np.ndarray) else _is_torch(given)
    if not writable:
        raise InputError(
            f"input {position} cannot be written",
            where=where,
            why="the method writes it in place",
            next="pass a torch tensor or a numpy array of its own",
        )


def _integer(given: Any, position: int, where: str) -> int:
    try:
        return int(given)
    except (TypeError, ValueError):
        raise InputError(
            f"input {position} is {type(given).__name__}", where=where, why="an integer is expected"
        ) from None


def _is_torch(given: Any) -> bool:
    return type(given).__module__.partition(".")[0] == "torch" or hasattr(given, "detach")


def _of_torch(tensor: Any) -> np.ndarray:
    """A tensor's elements, without a copy if they are on the CPU (bfloat16 as uint16)."""
    import torch

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


def _as_array(given: Any, wanted: DType, position: int, where: str) -> np.ndarray:
    if isinstance(given, np.ndarray):
        return given
    if isinstance(given, (bool, int, float, complex, list, tuple)):
        array = np.asarray(given)
        # Numbers without a dtype take the method's, if it is of their kind.
        return (
            array.astype(wanted.numpy)
            if np.can_cast(array.dtype, wanted.numpy, "same_kind")
            else array
        )
    if hasattr(given, "__dlpack__") and hasattr(given, "__dlpack_device__"):
        kind = int(given.__dlpack_device__()[0])
        if kind not in _HOST_MEMORY:
            raise InputError(
                f"input {position} is in the memory of another device",
                where=where,
                why=f"its DLPack device type is {kind}; memory of the CPU is expected",
                next="copy it to the CPU first",
            )
        try:
            return np.from_dlpack(given)
        except (BufferError, RuntimeError, TypeError):
            pass  # a dtype that numpy has not: the object may give an array in another way
    if any(
        hasattr(given, name) for name in ("__array_interface__", "__array_struct__", "__array__")
    ):
        return np.asarray(given)
    try:
        return np.asarray(memoryview(given))
    except TypeError:
        raise InputError(
            f"input {position} is {type(given).__name__}",
            where=where,
            why="a numpy array or a torch tensor is expected, or an object with __dlpack__, __array_interface__, __array__ or"  # noqa: E501
            " the buffer protocol",
        ) from None


def _check(array: np.ndarray, dtype: DType | None, value: Value, position: int, where: str) -> None:
    wanted = value.type
    if dtype is wanted.dtype and all(
        not isinstance(size, int) or size == given for size, given in zip(wanted.dims, array.shape)
    ):
        if array.ndim == wanted.rank:
            return
    shown = f"{array.dtype if dtype is None else dtype.name}{list(array.shape)}"
    if dtype is not wanted.dtype:
        raise InputError(
            f"input {position} has dtype {array.dtype if dtype is None else dtype.name}",
            where=where,
            why=f"{wanted.dtype.name} is expected, {shown} was given",
            next=f"convert it: x.astype(numpy.{wanted.dtype.name}) or x.to(torch.{wanted.dtype.name})",
        )
    if array.ndim != wanted.rank:
        raise InputError(
            f"input {position} has rank {array.ndim}",
            where=where,
            why=f"{_describe(value)} is expected, {shown} was given",
        )
    for dim, (size, given) in enumerate(zip(wanted.dims, array.shape)):
        if isinstance(size, int) and size != given:
            raise InputError(
                f"input {position} has size {given} along dim {dim}",
                where=where,
                why=f"{_describe(value)} is expected, {shown} was given",
                next="export the model with a dynamic dim, or pass the exported size",
            )
