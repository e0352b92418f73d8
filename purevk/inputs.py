"""The inputs of a call: numpy arrays or torch tensors, checked against the method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.ir import Dim, Graph, Value
from purevk.ir import dims as _dims

if TYPE_CHECKING:
    from purevk.method import Method


@dataclass(frozen=True)
class Given:
    """Inputs as arrays, and the kind of result that the caller expects."""

    arrays: list[Any]
    torch: bool

    def convert(self, output: Any, value: Any) -> Any:
        """An output as the caller expects it."""
        if self.torch and isinstance(output, np.ndarray):
            from purevk.fallback import to_torch

            return to_torch(output, value.type.dtype)
        return output


def describe_inputs(graph: Graph) -> str:
    """The inputs as text: "float32[1,3,224,224], int64[1,s0<=128]"."""
    return ", ".join(_describe(value) for value in graph.inputs)


def describe_given(graph: Graph, arrays: Sequence[Any]) -> str:
    """The inputs of a call as text: "float32[1,3,224,224], int64[1,7]"."""
    return ", ".join(
        f"{value.type.dtype.name}[{','.join(map(str, array.shape))}]" if isinstance(value, Value) else _describe(value)
        for value, array in zip(graph.inputs, arrays)
    )


def _describe(value: Any) -> str:
    if isinstance(value, Value):
        sizes = [str(s) if isinstance(s, int) else f"{s}<={_dims.upper(s)}" for s in value.type.dims]
        return f"{value.type.dtype.name}[{','.join(sizes)}]"
    return "int" if isinstance(value, Dim) else "unused"


def read_inputs(method: "Method", inputs: Sequence[Any]) -> Given:
    """Checks the inputs of a call and turns them into contiguous arrays.

    Raises:
        InputError: their number, or the rank, dtype or size of one, does not fit the method.
    """
    expected = method.graph.inputs
    where = f"{method.program.name}, method {method.name}({describe_inputs(method.graph)})"
    if len(inputs) != len(expected):
        raise InputError(
            f"{len(inputs)} inputs were given, {len(expected)} are expected", where=where,
            next="pass one tensor for each input, in order",
        )  # fmt: skip
    arrays: list[Any] = []
    any_torch = False
    for position, (given, value) in enumerate(zip(inputs, expected)):
        if value is None:
            arrays.append(None)
            continue
        if isinstance(value, Dim):
            arrays.append(_integer(given, position, where))
            continue
        array, dtype, is_torch = _array(given, position, where)
        any_torch |= is_torch
        _check(array, dtype, value, position, where)
        arrays.append(array)
    return Given(arrays, any_torch)


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array with its elements in row-major order; its shape stays, which `numpy.ascontiguousarray` changes for 0 dims."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _integer(given: Any, position: int, where: str) -> int:
    try:
        return int(given)
    except (TypeError, ValueError):
        raise InputError(
            f"input {position} is {type(given).__name__}", where=where, why="an integer is expected"
        ) from None


def _array(given: Any, position: int, where: str) -> tuple[np.ndarray, DType | None, bool]:
    if isinstance(given, np.ndarray):
        return contiguous(given), DType.from_numpy(given.dtype), False
    if type(given).__module__.partition(".")[0] == "torch" or hasattr(given, "detach"):
        from purevk.fallback import to_numpy

        return to_numpy(given), DType.from_torch(given.dtype), True
    if isinstance(given, (int, float, bool, list, tuple)) or hasattr(given, "__array__"):
        array = np.asarray(given)
        return contiguous(array), DType.from_numpy(array.dtype), False
    raise InputError(
        f"input {position} is {type(given).__name__}", where=where, why="a numpy array or a torch tensor is expected"
    )


def _check(array: np.ndarray, dtype: DType | None, value: Value, position: int, where: str) -> None:
    wanted = value.type
    shown = f"{array.dtype if dtype is None else dtype.name}{list(array.shape)}"
    if dtype is not wanted.dtype:
        raise InputError(
            f"input {position} has dtype {array.dtype if dtype is None else dtype.name}", where=where,
            why=f"{wanted.dtype.name} is expected, {shown} was given",
            next=f"convert it: x.astype(numpy.{wanted.dtype.name}) or x.to(torch.{wanted.dtype.name})",
        )  # fmt: skip
    if array.ndim != wanted.rank:
        raise InputError(
            f"input {position} has rank {array.ndim}", where=where,
            why=f"{_describe(value)} is expected, {shown} was given",
        )  # fmt: skip
    for dim, (size, given) in enumerate(zip(wanted.dims, array.shape)):
        if isinstance(size, int) and size != given:
            raise InputError(
                f"input {position} has size {given} along dim {dim}", where=where,
                why=f"{_describe(value)} is expected, {shown} was given",
                next="export the model with a dynamic dim, or pass the exported size",
            )  # fmt: skip
