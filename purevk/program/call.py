"""One call of a method, from what the caller gives to what the caller gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from purevk import knobs
from purevk.dtypes import DType
from purevk.errors import InputError, SizeConstraintError
from purevk.fallback import copied_to_torch, to_numpy, to_torch
from purevk.graph.call import Call
from purevk.graph.external import ExternalCalls
from purevk.ir import Graph, Symbol, Value
from purevk.program.arrays import is_torch, of_torch
from purevk.program.host_memory import HostMemory

if TYPE_CHECKING:
    from purevk.program.variants.specialization import Specialization


class Variant(Protocol):
    """What serves calls, see `purevk.program.variants.variant.Variant`."""

    graph: Graph
    where: str
    used: int

    def choose(self, call: MethodCall) -> SizeConstraintError | None: ...

    def run(self, call: MethodCall) -> None: ...


class MethodCall(Call):
    """One call of a method. It is read (`InputReader`), gets a lowering (`Variant.choose`), runs
    (`Variant.run`) and is finished.

    Attributes:
        graph: the one that has read the arguments.
        variant: of this graph at first, then the one that serves the call.
        inputs: as the caller gave them.
        arrays: the inputs as arrays (bfloat16 as uint16). A tensor that is not on the CPU is itself
            in place of its array, until `to_host`.
        torch: whether the caller expects torch tensors.
        foreign: for dtypes that numpy lacks, those that the inputs brought.
        device: of the inputs and the results, if it is not the CPU.
        differentiable: an input that requires gradients, if torch computes any now.
        checked: whether its nodes are compared with eager torch (PUREVK_CHECK).
        compares: whether the weights are compared with those of the module.
        out: what the caller gave for each output, as `read_outputs` returns it; None: nothing.
        chosen: the lowering that serves the call. `env` has the values of its symbols.
        external: what runs the call with tensors of another API; None: arrays of the host.
        results: the outputs of the graph.
    """

    variant: Variant
    chosen: Specialization
    env: dict[Symbol, int]
    results: list[Any]

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Any],
        arrays: list[Any],
        torch: bool,
        foreign: Mapping[DType, np.dtype],
        device: Any,
        differentiable: Any,
    ) -> None:
        super().__init__({}, {})
        self.graph, self.inputs, self.arrays = graph, inputs, arrays
        self.torch, self.foreign, self.device = torch, foreign, device
        self.differentiable = differentiable
        self.checked = knobs.CHECK()
        self.compares = False
        self.out: Sequence[Any] | None = None
        self.external: ExternalCalls | None = None

    def serve(self, chosen: Specialization, env: dict[Symbol, int]) -> None:
        """Has a lowering run the call, for values of its symbols."""
        self.chosen, self.env = chosen, env
        self.tensors = {value: self.arrays[position] for position, value in chosen.tensors}

    def aim(self) -> None:
        """Has outputs written to the caller's memory where what runs the call reaches it: arrays, or
        tensors of another API."""
        if self.out is not None:
            on_host = self.external is None
            self.targets = [
                target if isinstance(target, np.ndarray) is on_host else None for target in self.out
            ]

    # -- inputs ----------------------------------------------------------------------------------
    def leaves(self) -> list[Any]:
        """The inputs as values that torch can trace with: tensors of the same strides, and Python
        values. They may live for long, so none is an array over memory of the caller's tensors."""
        return [
            tensor.detach()
            if is_torch(tensor)
            else _as_tensor(array.copy(order="K"), value.type.dtype)
            if isinstance(value, Value) and not value.type.dtype.has_numpy
            else array
            for tensor, array, value in zip(self.inputs, self.arrays, self.graph.inputs)
        ]

    def own(self, memory: HostMemory) -> None:
        """Copies the inputs into arrays that nobody else writes, all of them on the host: in
        `memory`, if they are large."""
        self.arrays = [
            memory.copy(array) if isinstance(array, np.ndarray) else _on_host(array)
            for array in self.arrays
        ]

    def to_host(self) -> None:
        """Has all arrays on the host."""
        self.arrays = [_on_host(array) for array in self.arrays]

    # -- outputs ---------------------------------------------------------------------------------
    def copy(self, array: np.ndarray, dtype: DType) -> Any:
        """A copy of an output: a tensor on the CPU if the caller expects tensors. Its memory is
        torch's, so that it can be resized."""
        as_torch = self.torch and not self.checked
        return copied_to_torch(array, dtype) if as_torch else array.copy()

    def convert(self, output: Any, value: Any) -> Any:
        """An output as the caller expects it."""
        if self.torch:
            if isinstance(output, np.ndarray):
                output = copied_to_torch(output, value.type.dtype)
            if self.device is not None and is_torch(output):
                output = output.to(self.device)
        if self.differentiable is not None and is_torch(output):
            from purevk.program.gradients import refuse_gradients

            return refuse_gradients(output, self.differentiable)
        if isinstance(output, np.ndarray) and value.type.dtype in self.foreign:
            return output.view(self.foreign[value.type.dtype])
        return output

    def finish_flat(self) -> Sequence[Any]:
        """The results as the caller expects them, in its memory where it gave some. Inputs that the
        method writes get their new elements."""
        results, out = self.results, self.out
        for number, (value, output) in enumerate(zip(self.chosen.graph.outputs, results)):
            target = None if out is None else out[number]
            if target is None:
                results[number] = self.convert(output, value)
            elif output is not target:
                results[number] = _copy_to(target, self.convert(output, value))
        return self.update(results)

    def update(self, results: Sequence[Any]) -> Sequence[Any]:
        """Gives the inputs that the method writes their new elements, and returns the other
        results."""
        updates = self.graph.updates
        if not updates:
            return results
        count = len(results) - len(updates)
        for position, result in zip(updates, results[count:]):
            argument = self.inputs[position]
            if isinstance(argument, np.ndarray):
                np.copyto(argument, np.asarray(result).view(argument.dtype))
            else:
                argument.detach().copy_(result)
        return results[:count]

    def finish(self, out: Any = None) -> Any:
        """What the call returns, nested as the model does. `out` is what the caller gave for the
        results."""
        results = self.finish_flat()
        if out is not None:
            targets = out if isinstance(out, (tuple, list)) else [out]
            results = [new if old is None else old for old, new in zip(targets, results)]
        return returned(self.graph, results)


def returned(graph: Graph, results: Sequence[Any]) -> Any:
    """The results as the model returns them."""
    if graph.signature is not None:
        return graph.signature.unflatten(results)
    return results[0] if len(results) == 1 else tuple(results)


def _on_host(argument: Any) -> Any:
    """An input in the memory of the host."""
    return of_torch(argument, "input", "copying it to the CPU") if is_torch(argument) else argument


def _as_tensor(array: np.ndarray, dtype: DType) -> Any:
    """A tensor with the elements of an array, and its strides where torch has such."""
    strange = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    if array.flags.c_contiguous or strange:
        return to_torch(array, dtype)
    import torch

    tensor = torch.from_numpy(array if array.flags.writeable else array.copy(order="K"))
    return tensor if dtype.has_numpy else tensor.view(dtype.to_torch())


def _copy_to(target: Any, output: Any) -> Any:
    """The caller's memory, with the elements of an output."""
    if tuple(target.shape) != tuple(output.shape):
        raise InputError(
            f"out has sizes {list(target.shape)}",
            why=f"the result has sizes {list(output.shape)}",
            next="pass memory of the sizes of the result, or call it without out=",
        )
    if isinstance(target, np.ndarray):
        np.copyto(target, output if isinstance(output, np.ndarray) else to_numpy(output))
    else:
        dtype = DType.from_torch(target.dtype)
        if isinstance(output, np.ndarray) and dtype is not None:
            output = to_torch(output.view(dtype.numpy), dtype)
        target.copy_(output)
    return target
