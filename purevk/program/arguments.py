"""The arguments of a call, checked against what a graph takes: their form, dtypes, ranks and fixed
sizes. `arrays.py` makes numpy arrays of them."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError, SignatureError, SizeConstraintError
from purevk.ir import Dim, FixedInput, Graph, StructureError, Symbol, Value
from purevk.ir import dims as _dims
from purevk.ir.index_range import IndexRange
from purevk.ir.signature import CONTIGUOUS, memory_layout, permutation_hint, same_literal
from purevk.program.arrays import (
    as_array,
    dtype_of,
    is_torch,
    of_torch,
    on_device,
    overlap,
    overlaps_itself,
)
from purevk.program.call import MethodCall
from purevk.program.specs import DimSpec, size_spec

_NUMBERS = (bool, int, float, complex)
# Dtypes that numpy lacks. Other packages add them under these names.
FOREIGN = {dtype.name: dtype for dtype in DType if not dtype.has_numpy}


def describe_inputs(graph: Graph) -> str:
    """The inputs as text: "float32[1,3,224,224], int64[1,s0<=128]"."""
    return ", ".join(_describe(graph, value) for value in graph.inputs)


def describe_given(graph: Graph, arrays: Sequence[Any]) -> str:
    """The inputs of a call as text: "float32[1,3,224,224], int64[1,7]"."""
    return ", ".join(
        f"{value.type.dtype.name}[{','.join(map(str, array.shape))}]"
        if isinstance(value, Value)
        else _describe(graph, value)
        for value, array in zip(graph.inputs, arrays)
    )


def _describe(graph: Graph, value: Any) -> str:
    if isinstance(value, Value):
        sizes = [_size_text(size_spec(graph, size)) for size in value.type.dims]
        return f"{value.type.dtype.name}[{','.join(sizes)}]"
    if isinstance(value, FixedInput):
        return repr(value.value)
    return "int" if isinstance(value, Dim) else "unused"


def _size_text(size: int | DimSpec) -> str:
    if isinstance(size, DimSpec) and size.upper is not None:
        return f"{size}<={size.upper}"
    return str(size)


def name_of_input(graph: Graph, position: int) -> str:
    """An input for messages: its name, or "input 2"."""
    if graph.signature is not None and position < len(graph.signature.names):
        return graph.signature.names[position]
    return f"input {position}"


def bind(
    graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any], where: str
) -> Sequence[Any] | SignatureError:
    """The inputs of a graph, in order, for the arguments of a call; or why the arguments have
    another form: one is missing, unknown, given twice, or nested otherwise.

    Raises:
        InputError: a graph without a signature was called by name.
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
        return SignatureError(
            str(error),
            where=where,
            why="the arguments have to be nested as those of the export were",
            next="call the method as the exported module was called; its arguments are "
            f"{graph.signature.taken}",
        )


class InputReader:
    """Checks the arguments of calls against a graph, and gives them as arrays.

    Another export of the module may take what this graph does not. So arguments of another form,
    other Python values and other sizes are answered with the error, which nobody has raised yet.
    What no export takes is raised.

    Args:
        graph: of the method.
        where: the method, for messages.
    """

    def __init__(self, graph: Graph, where: str) -> None:
        self.graph, self.where = graph, where
        self._expected = [
            _ExpectedTensor(graph, position, value) if isinstance(value, Value) else value
            for position, value in enumerate(graph.inputs)
        ]
        self._exact = graph.signature is not None and graph.signature.exact

    def read_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MethodCall | InputError:
        """The inputs for the arguments of a call, or why the graph does not take them. Raises what
        `bind` and `read` raise."""
        inputs = bind(self.graph, args, kwargs, self.where)
        return inputs if isinstance(inputs, SignatureError) else self.read(inputs)

    def read(self, inputs: Sequence[Any]) -> MethodCall | InputError:
        """The inputs as arrays, over the same memory where the host can read it; or why the graph
        does not take them: a `SignatureError` or a `SizeConstraintError`.

        Args:
            inputs: one for each input of the graph.

        Raises:
            InputError: their number, or the rank or dtype of one, does not fit the method; or two
                share memory, one of which the method writes.
        """
        if len(inputs) != len(self._expected):
            raise InputError(
                f"{len(inputs)} inputs were given, {len(self._expected)} are expected",
                where=self.where,
                next="pass one tensor for each input, in order",
            )
        torch = sys.modules.get("torch")
        arrays: list[Any] = []
        any_torch, device, differentiable = False, None, None
        foreign: dict[DType, np.dtype] = {}
        for position, (argument, expected) in enumerate(zip(inputs, self._expected)):
            if not isinstance(expected, _ExpectedTensor):
                number = self._read_number(argument, expected, position)
                if isinstance(number, SignatureError):
                    return number
                arrays.append(number)
                continue
            if torch is not None and isinstance(argument, torch.Tensor):
                any_torch = True
                if argument.requires_grad and torch.is_grad_enabled():
                    differentiable = argument
                if argument.is_cpu:
                    array = of_torch(argument, expected.name, self.where)
                else:
                    array = on_device(argument, expected.name, self.where)
                    device = argument.device if device is None else device
                dtype = DType.from_torch(argument.dtype)
            else:
                array = argument
                if type(argument) is not np.ndarray:
                    refused = self._refused_number(argument, expected)
                    if refused is not None:
                        return refused
                    array = as_array(argument, expected.dtype, expected.name, self.where)
                # numpy has one object for each native dtype, but for those that were pickled.
                same = array.dtype is expected.numpy
                dtype = expected.dtype if same else dtype_of(array)
                if dtype is expected.dtype:
                    pass
                elif dtype is None and array.dtype.name in FOREIGN:
                    dtype = FOREIGN[array.dtype.name]
                    foreign[dtype], array = array.dtype, array.view(dtype.numpy)
                elif not expected.dtype.has_numpy and array.dtype == expected.dtype.numpy:
                    dtype = expected.dtype  # the bits, as results give them
            if expected.written:
                _check_writable(argument, array, expected.name, self.where)
                if argument is differentiable:
                    raise InputError(
                        f"{expected.name} requires gradients",
                        where=self.where,
                        why="the method writes it in place, and purevk computes no gradients",
                        next="call the method under torch.no_grad(), or pass x.detach()",
                    )
            if dtype is not expected.dtype or not expected.fits(array):
                return self._refused_array(array, dtype, expected)
            if expected.layout is not None and expected.layout != _layout(array):
                return self._refused_layout(array, expected)
            arrays.append(array)
        if self.graph.updates:
            _refuse_shared_memory(self.graph, arrays, self.where)
        return MethodCall(self.graph, inputs, arrays, any_torch, foreign, device, differentiable)

    def refused_sizes(self, arrays: Sequence[Any]) -> SizeConstraintError | None:
        """Why the fixed sizes of the graph are not those of inputs that another graph of the same
        form took; None if they are."""
        for array, expected in zip(arrays, self._expected):
            if isinstance(expected, _ExpectedTensor) and not expected.fits(array):
                return self._refused_array(array, expected.dtype, expected)
        return None

    def _read_number(self, argument: Any, expected: Any, position: int) -> Any:
        """An input that is no tensor, or the `SignatureError` that refuses it."""
        if expected is None:
            return None
        if isinstance(expected, FixedInput) and same_literal(_plain(argument), expected.value):
            return expected.value
        name = name_of_input(self.graph, position)
        if not isinstance(expected, FixedInput):
            return _integer(argument, name, self.where)
        shown = f"a {type(argument).__name__}" if hasattr(argument, "shape") else repr(argument)
        return SignatureError(
            f"{name} is {shown}, and the model was exported for {expected.value!r}",
            where=self.where,
            why="export makes Python values part of the graph",
            next="export it with this value, or with a tensor in its place; an int can be dynamic:"
            " torch.export.Dim.DYNAMIC",
        )

    def _refused_number(self, argument: Any, expected: _ExpectedTensor) -> SignatureError | None:
        """Why a value that is no tensor does not stand for one; None if it may be an array."""
        if argument is None or isinstance(argument, str):
            why = f"{expected} is expected"
        elif self._exact and type(argument) in _NUMBERS:
            why = f"{expected} is expected, and torch computes otherwise with Python numbers"
        else:
            return None
        return SignatureError(
            f"{expected.name} is {argument!r}",
            where=self.where,
            why=why,
            next="pass a torch tensor or a numpy array",
        )

    def _refused_array(
        self, array: np.ndarray, dtype: DType | None, expected: _ExpectedTensor
    ) -> SizeConstraintError:
        """Which size of an array is another one than at export. Raises `InputError` if its dtype or
        its rank is wrong."""
        dtype_name = str(array.dtype) if dtype is None else dtype.name
        why = f"{expected} is expected, {dtype_name}{list(array.shape)} was given"
        if dtype is not expected.dtype:
            expected_name = expected.dtype.name
            raise InputError(
                f"{expected.name} has dtype {dtype_name}",
                where=self.where,
                why=f"{expected_name} is expected, {dtype_name}{list(array.shape)} was given",
                next=f"convert it: x.astype(numpy.{expected_name}) or x.to(torch.{expected_name})",
            )
        if array.ndim != expected.rank:
            missing = expected.rank - array.ndim
            raise InputError(
                f"{expected.name} has rank {array.ndim}",
                where=self.where,
                why=why,
                next="add the batch dim: x[None]"
                if missing == 1
                else "drop the outer dim: x[0]; an input is passed by itself, not in a list or tuple"
                if missing == -1 and array.shape[0] == 1
                else "reshape it, or export the model for inputs of this rank",
            )
        dim = next(dim for dim, size in expected.fixed if array.shape[dim] != size)
        return SizeConstraintError(
            f"{expected.name} has size {array.shape[dim]} along dim {dim}",
            where=self.where,
            why=why,
            next=permutation_hint(array.shape, expected.sizes)
            or "export the model with a dynamic dim, or pass the exported size",
        )

    def _refused_layout(self, array: np.ndarray, expected: _ExpectedTensor) -> SignatureError:
        return SignatureError(
            f"the elements of {expected.name} lie in memory as: {_layout(array)}",
            where=self.where,
            why=f"the model was exported for: {expected.layout}; what it computes depends on it",
            next="pass a contiguous tensor, or export the model with a tensor of these strides",
        )


class _ExpectedTensor:
    """A tensor among the inputs of a graph.

    Attributes:
        fixed: each dim that is no symbol, with its size.
        sizes: of each dim; None for a symbol.
        written: whether the method writes it in place.
        layout: how its elements have to lie in memory, see `memory_layout`; None: any way.
    """

    def __init__(self, graph: Graph, position: int, value: Value) -> None:
        self.name = name_of_input(graph, position)
        self.dtype, self.rank = value.type.dtype, value.type.rank
        self.numpy = self.dtype.numpy
        self.fixed = [
            (dim, size) for dim, size in enumerate(value.type.dims) if isinstance(size, int)
        ]
        self.sizes = tuple(size if isinstance(size, int) else None for size in value.type.dims)
        self.written = position in graph.updates
        self.layout = dict(graph.signature.layouts).get(position) if graph.signature else None
        self._graph, self._value = graph, value
        # If all sizes are fixed, one comparison of tuples is enough.
        self._shape = value.type.dims if len(self.fixed) == self.rank else None

    def fits(self, array: np.ndarray) -> bool:
        """Whether an array has the rank and the fixed sizes."""
        shape = array.shape
        if self._shape is not None:
            return shape == self._shape
        return len(shape) == self.rank and all(shape[dim] == size for dim, size in self.fixed)

    def __str__(self) -> str:
        return _describe(self._graph, self._value)


def check_indices(
    graph: Graph,
    ranges: Mapping[int, tuple[IndexRange, ...]],
    arrays: Sequence[Any],
    env: Mapping[Symbol, int],
    where: str,
    outer: int = 0,
) -> None:
    """Compares the inputs that are indices with the sizes of a call. A kernel would take the nearest
    element for one that is out of range.

    Args:
        graph: of the method.
        ranges: what the indices have to be within, by the position of the input.
        arrays: the inputs. Those that are not on the host are left out.
        env: the values of the symbols in the ranges.
        where: the method, for messages.
        outer: leading dims that the caller does not know, such as a batch; messages leave them out.

    Raises:
        InputError: an index is out of range. It names the element.
    """
    for position, takers in ranges.items():
        array = arrays[position]
        if not isinstance(array, np.ndarray) or not array.size:
            continue
        for taker in takers:
            # As the model itself converts them: large numbers wrap.
            indices = array.astype(taker.dtype.numpy, copy=False)
            if indices.size == 1:  # a position: the general way takes microseconds
                least = greatest = int(indices.item())
            else:
                least, greatest = int(indices.min()), int(indices.max())
            lowest, below = _dims.evaluate(taker.lowest, env), _dims.evaluate(taker.below, env)
            if least >= lowest and greatest < below:
                continue
            wrong = greatest if greatest >= below else least
            name = name_of_input(graph, position)
            element = np.unravel_index(int(np.argmax(indices == wrong)), indices.shape)[outer:]
            path = [where, f"{name}[{', '.join(map(str, element))}]" if element else name]
            raise InputError(
                f"{name} has the index {wrong}",
                where=", ".join([*path, taker.source] if taker.source else path),
                why=f"{taker.op} takes indices from {lowest} to {below - 1}",
                next="pass indices within this range",
            )


def _layout(array: Any) -> str:
    if not isinstance(array, np.ndarray):
        return memory_layout(array.shape, array.stride())
    if array.flags.c_contiguous:
        return CONTIGUOUS
    return memory_layout(array.shape, [stride // array.itemsize for stride in array.strides])


def _plain(argument: Any) -> Any:
    """A number of numpy as Python's own."""
    return argument.item() if isinstance(argument, np.generic) else argument


def _refuse_shared_memory(graph: Graph, arrays: Sequence[Any], where: str) -> None:
    """torch.export traces each input as memory of its own; eager torch would see one's writes in
    the other."""
    for written in graph.updates:
        for index, array in enumerate(arrays):
            if index == written or not hasattr(array, "shape"):
                continue
            if overlap(arrays[written], array):
                first, two = name_of_input(graph, written), name_of_input(graph, index)
                raise InputError(
                    f"{first} and {two} share memory",
                    where=where,
                    why=f"the method writes {first} in place, and was traced with memory of their own",
                    next="pass a copy of one of them",
                )


def _check_writable(argument: Any, array: Any, name: str, where: str) -> None:
    writable = argument.flags.writeable if isinstance(argument, np.ndarray) else is_torch(argument)
    if not writable or overlaps_itself(array):
        raise InputError(
            f"{name} cannot be written",
            where=where,
            why="the method writes it in place",
            next="pass a torch tensor or a numpy array of its own",
        )


def _integer(argument: Any, name: str, where: str) -> int | SignatureError:
    if not isinstance(argument, (bool, float, str)) and argument is not None:
        try:
            return operator.index(argument.item() if hasattr(argument, "item") else argument)
        except (TypeError, ValueError, RuntimeError):
            pass
    return SignatureError(
        f"{name} is {argument!r}"
        if argument is None or isinstance(argument, (bool, float, str))
        else f"{name} is {type(argument).__name__}",
        where=where,
        why="an integer is expected",
    )
