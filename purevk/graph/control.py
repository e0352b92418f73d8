"""Control flow during a call: the host reads the predicate or the count, and runs sub-graphs.

Sub-graphs share the weights and states of their program on the device. Their operands and results
cross over the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from purevk.errors import InputError
from purevk.graph.call import Call
from purevk.ir import Arg, Dim, Node, Symbol, Value, values_in
from purevk.ir import dims as _dims
from purevk.ir.binding import bind_symbols, input_symbols

if TYPE_CHECKING:
    from purevk.graph.executable import Executable

Read = Callable[[Value], np.ndarray]


class _Call:
    """A sub-graph, ready to be called with numbers and arrays."""

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        graph = executable.plan.graph
        self.inputs = graph.inputs
        self._read = {value for node in graph.nodes for value in node.inputs} | set(
            values_in(graph.outputs)
        )
        self._read |= {
            source.value for source in graph.symbols.values() if source.value is not None
        }
        self._symbols = input_symbols(graph)

    def __call__(self, args: Sequence[Any], env: dict[Symbol, int]) -> list[np.ndarray]:
        """The outputs for arguments: arrays, numbers, or functions that return an array."""
        given: dict[Value, np.ndarray] = {}
        inputs: list[Any] = [None] * len(self.inputs)
        for position, (value, arg) in enumerate(zip(self.inputs, args)):
            if not isinstance(value, Value):
                inputs[position] = int(arg)
            elif value in self._read:
                given[value] = inputs[position] = arg() if callable(arg) else arg
        inside = {**env, **bind_symbols(self._symbols, inputs)}
        return [np.asarray(output) for output in self.executable.run(Call(given, inside))]


class ControlStep:
    """A control-flow node with the executables of its sub-graphs.

    Args:
        node: `purevk.cond`, `purevk.while` or `purevk.for`.
        inner: the executables, in the order of the sub-graphs.
    """

    def __init__(self, node: Node, inner: Sequence[Executable]) -> None:
        self.node, self.inner = node, tuple(inner)
        self._calls = [_Call(each) for each in inner]
        self._run = {
            "purevk.cond": self._cond,
            "purevk.while": self._while,
            "purevk.for": self._scan,
        }[node.op]

    def run(self, read: Read, env: dict[Symbol, int]) -> dict[Value, np.ndarray]:
        """Runs the node and returns its results.

        Args:
            read: gives the elements of a tensor of the graph around.
            env: values of the symbols there.
        """
        made = self._run(read, env)
        results = {}
        for value, array in zip(self.node.results, made):
            expected = tuple(_dims.evaluate(size, env) for size in value.type.dims)
            if array.shape != expected:
                raise InputError(
                    f"a sub-graph gave a tensor of sizes {list(array.shape)}",
                    where=f"{value!r} at {self.node.source}",
                    why=f"{list(expected)} are expected",
                    next="have all branches and iterations give tensors of one size",
                )
            results[value] = array.astype(value.type.dtype.numpy, copy=False)
        return results

    def _cond(self, read: Read, env: dict[Symbol, int]) -> Sequence[np.ndarray]:
        node = self.node
        chosen = 0 if _is_true(_given(node.arg("predicate"), read, env)) else 1
        operands = node.arg_list("true_operands" if chosen == 0 else "false_operands")
        return self._calls[chosen](_lazy(operands, read, env), env)

    def _while(self, read: Read, env: dict[Symbol, int]) -> Sequence[np.ndarray]:
        node = self.node
        condition, body = self._calls
        current: list[Any] = [_given(arg, read, env) for arg in node.arg_list("carried")]
        fixed = [
            _lazy(node.arg_list(each), read, env)
            for each in ("condition_operands", "body_operands")
        ]
        while _is_true(condition([*current, *fixed[0]], env)[0]):
            current = list(body([*current, *fixed[1]], env))
        return [np.asarray(each) for each in current]

    def _scan(self, read: Read, env: dict[Symbol, int]) -> Sequence[np.ndarray]:
        node = self.node
        count = _dims.evaluate(node.size("length"), env)
        current: list[Any] = [_given(arg, read, env) for arg in node.arg_list("carried")]
        tensors = [read(tensor) for tensor in node.tensors("scanned")]
        fixed = _lazy(node.arg_list("operands"), read, env)
        stacked = [
            np.empty(
                tuple(_dims.evaluate(size, env) for size in value.type.dims), value.type.dtype.numpy
            )
            for value in self.node.results[len(current) :]
        ]
        for index in range(count):
            made = self._calls[0]([*current, *(tensor[index] for tensor in tensors), *fixed], env)
            current = list(made[: len(current)])
            for result, array in zip(stacked, made[len(current) :]):
                result[index] = array
        return [*(np.asarray(each) for each in current), *stacked]


def _is_true(value: Any) -> bool:
    return bool(np.all(value))


def _given(arg: Arg, read: Read, env: dict[Symbol, int]) -> Any:
    if isinstance(arg, Value):
        return read(arg)
    return _dims.evaluate(arg, env) if isinstance(arg, Dim) else arg


def _lazy(args: Sequence[Arg], read: Read, env: dict[Symbol, int]) -> list[Any]:
    """Arguments in which each tensor is a function. It reads the tensor once, if it is called."""
    known: dict[Value, np.ndarray] = {}

    def reader(value: Value) -> Callable[[], np.ndarray]:
        def get() -> np.ndarray:
            if value not in known:
                known[value] = read(value)
            return known[value]

        return get

    return [reader(arg) if isinstance(arg, Value) else _given(arg, read, env) for arg in args]
