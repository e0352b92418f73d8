"""The inputs of a call, checked against the method: numpy arrays, torch tensors, and whatever else
gives its memory away through `__dlpack__`, `__array_interface__`, `__array__` or the buffer
protocol. Nothing is copied here that need not be."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError, SignatureError, SizeConstraintError
from purevk.ir import Dim, FixedInput, Graph, StructureError, Value
from purevk.ir import dims as _dims
from purevk.ir.signature import same_literal

_NUMBERS = (bool, int, float, complex)
# DLPack's device types whose memory the host reads: CPU, pinned memory of CUDA and of ROCm, managed
# memory of CUDA.
_HOST_MEMORY = (1, 3, 11, 13)


class Given(NamedTuple):
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

    def leaves(self, graph: Graph) -> list[Any]:
        """The inputs as values that torch can trace with: tensors, and Python values."""
        from purevk.fallback import to_torch

        return [
            to_torch(array, value.type.dtype) if isinstance(value, Value) else array
            for array, value in zip(self.arrays, graph.inputs)
        ]

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
    if isinstance(value, FixedInput):
        return repr(value.value)
    return "int" if isinstance(value, Dim) else "unused"


def name_of_input(graph: Graph, position: int) -> str:
    """An input for messages: its name, or "input 2"."""
    if graph.signature is not None and position < len(graph.signature.names):
        return graph.signature.names[position]
    return f"input {position}"


def bind(graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> Sequence[Any]:
    """The inputs of a graph, in order, for the arguments of a call.

    Raises:
        InputError: a graph without a signature was called by name.
        SignatureError: an argument is missing, unknown, given twice, or nested otherwise.
    """
    if graph.signature is None:
        if kwargs:
            raise InputError(
                f"the inputs have no names; {', '.join(kwargs)} was given by name",
                where=where,
                next="pass the inputs by position, in order",
            )
        return args
    try:
        return graph.signature.bind(args, kwargs)
    except StructureError as error:
        raise SignatureError(
            str(error),
            where=where,
            why="the arguments have to be nested as those of the export were",
            next="call the method as the exported module was called",
        ) from None


def read_inputs(graph: Graph, inputs: Sequence[Any], where: str) -> Given:
    """Checks the inputs of a call and gives them as arrays, over the same memory where the host can
    read it.

    Args:
        graph: of the method. inputs: one for each of its inputs. where: the method, for messages.

    Raises:
        InputError: their number, or the rank or dtype of one, does not fit the method; or two share
            memory, one of which the method writes.
        SignatureError: a Python value is another one than at export.
        SizeConstraintError: a size is another one than at export.
    """
    expected = graph.inputs
    if len(inputs) != len(expected):
        raise InputError(
            f"{len(inputs)} inputs were given, {len(expected)} are expected",
            where=where,
            next="pass one tensor for each input, in order",
        )
    arrays: list[Any] = []
    any_torch, bfloat16 = False, None
    exact = graph.signature is not None and graph.signature.exact
    for position, (given, value) in enumerate(zip(inputs, expected)):
        if not isinstance(value, Value):
            arrays.append(_read_number(graph, given, value, position, where))
            continue
        if given is None or isinstance(given, str):
            raise SignatureError(
                f"{name_of_input(graph, position)} is {given!r}",
                where=where,
                why=f"{_describe(value)} is expected",
            )
        if exact and type(given) in _NUMBERS:
            raise SignatureError(
                f"{name_of_input(graph, position)} is {given!r}",
                where=where,
                why=f"{_describe(value)} is expected, and torch computes otherwise with Python numbers",
            )
        if _is_torch(given):
            any_torch = True
            name = name_of_input(graph, position)
            array, dtype = _of_torch(given, name, where), DType.from_torch(given.dtype)
        else:
            array = (
                given
                if type(given) is np.ndarray
                else _as_array(given, value.type.dtype, name_of_input(graph, position), where)
            )
            dtype = _dtype_of(array)
            if dtype is value.type.dtype:
                pass
            elif dtype is None and array.dtype.name == "bfloat16":
                bfloat16, dtype, array = array.dtype, DType.bfloat16, array.view(np.uint16)
            elif array.dtype == np.uint16 and value.type.dtype is DType.bfloat16:
                dtype = DType.bfloat16  # the bits, as results give them
        if position in graph.updates:
            _check_writable(given, array, name_of_input(graph, position), where)
        _check(array, dtype, value, graph, position, where)
        arrays.append(array)
    if graph.updates:
        _refuse_shared_memory(graph, arrays, where)
    return Given(arrays, any_torch, bfloat16)


def _read_number(graph: Graph, given: Any, value: Any, position: int, where: str) -> Any:
    """An input that is no tensor."""
    name = name_of_input(graph, position)
    if isinstance(value, FixedInput):
        if not same_literal(_plain(given), value.value):
            shown = f"a {type(given).__name__}" if hasattr(given, "shape") else repr(given)
            raise SignatureError(
                f"{name} is {shown}, and the model was exported for {value.value!r}",
                where=where,
                why="export makes Python values part of the graph",
                next="export it with this value, or with a tensor in its place; an int can be dynamic:"
                " torch.export.Dim.DYNAMIC",
            )
        return value.value
    return None if value is None else _integer(given, name, where)


def _plain(given: Any) -> Any:
    """A number of numpy as Python's own."""
    return given.item() if isinstance(given, np.generic) else given


def _refuse_shared_memory(graph: Graph, arrays: Sequence[Any], where: str) -> None:
    """torch.export traces each input as memory of its own; eager torch would see one's writes in
    the other."""
    for written in graph.updates:
        for other, array in enumerate(arrays):
            if other == written or not isinstance(array, np.ndarray):
                continue
            if _overlap(arrays[written], array):
                one, two = name_of_input(graph, written), name_of_input(graph, other)
                raise InputError(
                    f"{one} and {two} share memory",
                    where=where,
                    why=f"the method writes {one} in place, and was traced with memory of their own",
                    next="pass a copy of one of them",
                )


def _overlap(one: np.ndarray, two: np.ndarray) -> bool:
    if not np.may_share_memory(one, two):
        return False
    try:
        return np.shares_memory(one, two, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def read_outputs(graph: Graph, out: Any, where: str) -> list[np.ndarray | None]:
    """The memory that a caller gives for results, as arrays over it; None where there is none.

    Args:
        out: a tensor, or one (or None) for each output.

    Raises:
        InputError: their number or a dtype does not fit, or one cannot be written to.
    """
    expected = graph.outputs[: len(graph.outputs) - len(graph.updates)]
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
            array, dtype = _of_torch(each, f"out {position}", where), DType.from_torch(each.dtype)
        elif isinstance(each, np.ndarray):
            array, dtype = each, _dtype_of(each)
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
    return [*arrays, *(None for _ in graph.updates)]


def write_back(inputs: Sequence[Any], updates: Sequence[int], results: Sequence[Any]) -> None:
    """Gives the inputs that a method writes, by position, their new elements."""
    for position, made in zip(updates, results):
        given = inputs[position]
        if isinstance(given, np.ndarray):
            np.copyto(given, np.asarray(made).view(given.dtype))
        else:
            given.detach().copy_(made)


def _check_writable(given: Any, array: np.ndarray, name: str, where: str) -> None:
    writable = given.flags.writeable if isinstance(given, np.ndarray) else _is_torch(given)
    repeated = any(size > 1 and not step for size, step in zip(array.shape, array.strides))
    if not writable or repeated:
        raise InputError(
            f"{name} cannot be written",
            where=where,
            why="the method writes it in place",
            next="pass a torch tensor or a numpy array of its own",
        )


def _integer(given: Any, name: str, where: str) -> int:
    if not isinstance(given, (bool, float, str)) and given is not None:
        try:
            return operator.index(given.item() if hasattr(given, "item") else given)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise SignatureError(
        f"{name} is {given!r}"
        if given is None or isinstance(given, (bool, float, str))
        else f"{name} is {type(given).__name__}",
        where=where,
        why="an integer is expected",
    )


def _dtype_of(array: np.ndarray) -> DType | None:
    """The element type of an array; None for one that numpy itself does not have. An array that was
    pickled has a copy of numpy's dtype, so its identity says nothing."""
    dtype = array.dtype
    own = dtype.num < 256 and dtype.isnative and dtype.kind in "biufc"
    return DType.from_numpy(dtype) if own else None


def _is_torch(given: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.Tensor)


def _of_torch(tensor: Any, name: str, where: str) -> np.ndarray:
    """A tensor's elements, without a copy if they are on the CPU (bfloat16 as uint16)."""
    import torch

    try:
        if not tensor.requires_grad and tensor.dtype is not torch.bfloat16:
            try:
                direct: np.ndarray = tensor.numpy()
                return direct
            except (RuntimeError, TypeError):
                pass  # on another device, or conjugated or negated lazily
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        if plain.dtype is torch.bfloat16:
            plain = plain.view(torch.uint16)
        array: np.ndarray = plain.numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
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
    return array


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
    if tensor.is_quantized:
        return "a quantized tensor", "pass x.dequantize() or x.int_repr()"
    if DType.from_torch(tensor.dtype) is None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return f"a tensor of the dtype {dtype}", "convert it to a dtype that the method expects"
    return "", ""


def _as_array(given: Any, wanted: DType, name: str, where: str) -> np.ndarray:
    if isinstance(given, np.ndarray):
        if type(given) is not np.ndarray and isinstance(given, np.ma.MaskedArray):
            raise InputError(
                f"{name} is a masked array",
                where=where,
                why="the mask would be lost",
                next="fill it: x.filled(0)",
            )
        return given
    if isinstance(given, (bool, int, float, complex, list, tuple)):
        array = _asarray(given, name, where)
        # Numbers without a dtype take the method's, if it is of their kind.
        if array.dtype.kind == "i" and wanted.numpy.kind in "iu" and array.size:
            limits = np.iinfo(wanted.numpy)
            if array.min() < limits.min or array.max() > limits.max:
                raise InputError(
                    f"{name} has numbers from {array.min()} to {array.max()}",
                    where=where,
                    why=f"{wanted.name} holds {limits.min} to {limits.max}",
                )
        return (
            array.astype(wanted.numpy)
            if np.can_cast(array.dtype, wanted.numpy, "same_kind")
            else array
        )
    if hasattr(given, "__dlpack__") and hasattr(given, "__dlpack_device__"):
        kind = int(given.__dlpack_device__()[0])
        if kind not in _HOST_MEMORY:
            raise InputError(
                f"{name} is in the memory of another device",
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
        return _asarray(given, name, where)
    try:
        return np.asarray(memoryview(given))
    except TypeError:
        raise InputError(
            f"{name} is {type(given).__name__}",
            where=where,
            why="a numpy array or a torch tensor is expected, or an object with __dlpack__, __array_interface__, __array__ or"  # noqa: E501
            " the buffer protocol",
        ) from None


def _asarray(given: Any, name: str, where: str) -> np.ndarray:
    try:
        array = np.asarray(given)
    except Exception as error:  # `__array__` runs code of others
        raise InputError(
            f"{name} cannot be made an array: {type(error).__name__}",
            where=where,
            why=str(error).partition("\n")[0],
            next="pass a numpy array or a torch tensor",
        ) from error
    if array.dtype.kind == "O":
        raise InputError(
            f"{name} is {type(given).__name__} of Python objects",
            where=where,
            why="numpy makes no array of numbers from it",
            next="pass a numpy array or a torch tensor",
        )
    return array


def _check(
    array: np.ndarray, dtype: DType | None, value: Value, graph: Graph, position: int, where: str
) -> None:
    wanted = value.type
    if dtype is wanted.dtype and all(
        not isinstance(size, int) or size == given for size, given in zip(wanted.dims, array.shape)
    ):
        if array.ndim == wanted.rank:
            return
    name = name_of_input(graph, position)
    shown = f"{array.dtype if dtype is None else dtype.name}{list(array.shape)}"
    if dtype is not wanted.dtype:
        raise InputError(
            f"{name} has dtype {array.dtype if dtype is None else dtype.name}",
            where=where,
            why=f"{wanted.dtype.name} is expected, {shown} was given",
            next=f"convert it: x.astype(numpy.{wanted.dtype.name}) or x.to(torch.{wanted.dtype.name})",
        )
    if array.ndim != wanted.rank:
        raise InputError(
            f"{name} has rank {array.ndim}",
            where=where,
            why=f"{_describe(value)} is expected, {shown} was given",
        )
    for dim, (size, given) in enumerate(zip(wanted.dims, array.shape)):
        if isinstance(size, int) and size != given:
            raise SizeConstraintError(
                f"{name} has size {given} along dim {dim}",
                where=where,
                why=f"{_describe(value)} is expected, {shown} was given",
                next="export the model with a dynamic dim, or pass the exported size",
            )
