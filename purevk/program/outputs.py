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
    given = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(given) != len(expected):
        raise InputError(
            f"out holds {len(given)} tensors, the method has {len(expected)} outputs", where=where
        )
    arrays: list[Any] = []
    for position, (each, value) in enumerate(zip(given, expected)):
        if each is None:
            arrays.append(None)
            continue
        array: Any
        writable = True
        if is_torch(each):
            _refuse_gradients(each, position, where)
            lazy = each.is_conj() or each.is_neg()  # its elements in memory are others
            name, dtype = f"out {position}", DType.from_torch(each.dtype)
            array = None
            if each.is_cpu and not lazy:
                array = of_torch(each, name, where, writable=True)
            if array is None or not array.flags.writeable:
                array = on_device(each, name, where)
        elif isinstance(each, np.ndarray):
            array, dtype = each, dtype_of(each)
            if each.dtype.name in FOREIGN:
                dtype = FOREIGN[each.dtype.name]
                array = each.view(dtype.numpy)
            elif isinstance(value, Value) and not value.type.dtype.has_numpy:
                if each.dtype == value.type.dtype.numpy:  # the bits
                    dtype = value.type.dtype
        else:
            raise InputError(
                f"out {position} is {type(each).__name__}",
                where=where,
                why="a numpy array or a torch tensor is expected",
            )
        if isinstance(array, np.ndarray):
            writable = array.flags.writeable
        wanted = value.type.dtype if isinstance(value, Value) else None
        if dtype is None or dtype is not wanted or not writable:
            raise InputError(
                f"out {position} cannot take the result",
                where=where,
                why=f"a writable {wanted.name if wanted else 'None: the result is no tensor'} is expected, "
                f"{'a writable' if writable else 'a read-only'} {str(each.dtype).removeprefix('torch.')}"
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


def _refuse_gradients(given: Any, position: int, where: str) -> None:
    """torch refuses such memory too, unless it computes no gradients now."""
    torch = sys.modules["torch"]
    if given.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"out {position} requires gradients",
            where=where,
            why="results are written to it, and purevk computes no gradients",
            next="call the method under torch.no_grad(), or pass out.detach()",
        )


def _refuse_overlap(before: Sequence[Any], array: Any, where: str) -> None:
    for position, other in enumerate(before):
        if other is not None and overlap(other, array):
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
