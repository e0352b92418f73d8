"""The memory that a caller gives for the results of a call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.ir import Graph, Value
from purevk.program.arguments import FOREIGN
from purevk.program.arrays import dtype_of, is_torch, of_torch, on_device, overlap, overlaps_itself


def read_outputs(graph: Graph, out: Any, where: str) -> list[Any]:
    """The memory that a caller gives for results, as arrays over it; None where there is none. A
    tensor that is not on the CPU, or is conjugated or negated lazily, is itself in place of an array.

    Args:
        out: a tensor, or one (or None) for each output.

    Raises:
        InputError: their number or a dtype does not fit, or one cannot be written to: it is
            read-only, torch computes gradients of it, or two of its elements, or elements of two
            outputs, are one in memory.
    """
    expected = graph.outputs[: len(graph.outputs) - len(graph.updates)]
    targets = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(targets) != len(expected):
        raise InputError(
            f"out holds {len(targets)} tensors, the method has {len(expected)} outputs", where=where
        )
    arrays: list[Any] = []
    for position, (target, value) in enumerate(zip(targets, expected)):
        if target is None:
            arrays.append(None)
            continue
        array: Any
        writable = True
        if is_torch(target):
            _refuse_gradients(target, position, where)
            lazy = target.is_conj() or target.is_neg()  # its elements in memory are others
            name, dtype = f"out {position}", DType.from_torch(target.dtype)
            array = None
            if target.is_cpu and not lazy:
                array = of_torch(target, name, where, writable=True)
            if array is None or not array.flags.writeable:
                array = on_device(target, name, where)
        elif isinstance(target, np.ndarray):
            array, dtype = target, dtype_of(target)
            if target.dtype.name in FOREIGN:
                dtype = FOREIGN[target.dtype.name]
                array = target.view(dtype.numpy)
            elif isinstance(value, Value) and not value.type.dtype.has_numpy:
                if target.dtype == value.type.dtype.numpy:  # the bits
                    dtype = value.type.dtype
        else:
            raise InputError(
                f"out {position} is {type(target).__name__}",
                where=where,
                why="a numpy array or a torch tensor is expected",
            )
        if isinstance(array, np.ndarray):
            writable = array.flags.writeable
        value_dtype = value.type.dtype if isinstance(value, Value) else None
        if dtype is None or dtype is not value_dtype or not writable:
            raise InputError(
                f"out {position} cannot take the result",
                where=where,
                why=f"a writable {value_dtype.name if value_dtype else 'None: the result is no tensor'} is expected, "
                f"{'a writable' if writable else 'a read-only'} {str(target.dtype).removeprefix('torch.')}"
                " was given",
                next="pass memory of the dtype of the result that can be written, or call it without out=",
            )
        if overlaps_itself(array):
            raise InputError(
                f"elements of out {position} share memory",
                where=where,
                why=f"its sizes are {list(array.shape)} and its strides {_strides(array)},"
                " so that several elements of the result would be written to one",
                next="pass memory of its own for each element, or call it without out=",
            )
        _refuse_overlap(arrays, array, where)
        arrays.append(array)
    return [*arrays, *(None for _ in graph.updates)]


def _refuse_gradients(target: Any, position: int, where: str) -> None:
    """torch refuses such memory too, unless it computes no gradients now."""
    torch = sys.modules["torch"]
    if target.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"out {position} requires gradients",
            where=where,
            why="results are written to it, and purevk computes no gradients",
            next="call the method under torch.no_grad(), or pass out.detach()",
        )


def _refuse_overlap(before: Sequence[Any], array: Any, where: str) -> None:
    for position, index in enumerate(before):
        if index is not None and overlap(index, array):
            raise InputError(
                f"out {position} and out {len(before)} share memory",
                where=where,
                why="one result would overwrite the other",
                next="pass memory of its own for each output, or None to leave one of them out",
            )


def _strides(array: Any) -> list[int]:
    """In bytes."""
    if isinstance(array, np.ndarray):
        return list(array.strides)
    return [step * array.element_size() for step in array.stride()]
