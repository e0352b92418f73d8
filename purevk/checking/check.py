"""Checks a call, with PUREVK_CHECK=1."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from purevk.checking.differences import Difference, find_difference, largest, numbers, tolerance
from purevk.checking.report import node_error, program_error
from purevk.checking.walk import Counts, Found, Trail, Walk
from purevk.dtypes import DType
from purevk.graph.context import Context
from purevk.graph.memory import DeviceStore
from purevk.ir import Graph, Value
from purevk.mapped import own

# Of results of a whole program, as a multiple of the tolerance of one operator in the narrowest dtype
# of the program: errors add up, and fused kernels round less often. By bytes of an element.
_PROGRAM = {1: 2.0, 2: 4.0, 4: 10.0, 8: 10.0}
# Tolerated, times the difference that single nodes on the device and eager torch accumulate.
_ACCUMULATED = 16
_CAP = 2e-2  # of the largest element

_log = logging.getLogger("purevk")


def states_of(graph: Graph, store: DeviceStore) -> dict[Value, bytes]:
    """The bytes of the states of a graph and its sub-graphs."""
    states: dict[Value, bytes] = {}
    for inner in graph.nested():
        for value, first in inner.states.items():
            size = value.type.nbytes
            if value in store.ranges:
                states[value] = store.read(value, max(size, 4))[:size]
            elif value not in states:
                states[value] = bytes(size) if first is None else bytes(own(first.data[:size]))
    return states


class CallCheck:
    """The check of one call: made before it, with copies of what it may change.

    Args:
        context: the device.
        graph: as the front end made it; its states are read.
        inputs: of the call: arrays, integers or None.
        store: the states of the program.
        where: the program and method, for messages.
    """

    def __init__(
        self,
        context: Context,
        graph: Graph,
        inputs: Sequence[Any],
        store: DeviceStore,
        where: str,
    ) -> None:
        self._context, self._graph, self._where = context, graph, where
        self._inputs = [
            np.array(operand) if isinstance(operand, np.ndarray) else operand for operand in inputs
        ]
        self._store, self._before = store, states_of(graph, store)

    def compare(self, graph: Graph, outputs: Sequence[Any], trail: Trail | None = None) -> Counts:
        """Compares the nodes with eager torch, and the results of the call with those of the nodes.

        Args:
            graph: the front end's graph of what served the call, for the data-dependent sizes that
                the call turned out to have.
            outputs: of the call.
            trail: where to keep what the nodes make.

        Raises:
            DifferenceError: something differs.
        """
        self._graph = graph
        walk = Walk(self._context, graph, dict(self._before), trail=trail)
        try:
            expected = walk.run(self._inputs)
        except Found as found:
            raise node_error(found, self._where) from None
        after = states_of(self._graph, self._store)
        dtypes = [_dtype(value) for value in (*self._graph.outputs, *after)]
        got = [*outputs, *(_elements(value, data) for value, data in after.items())]
        want = [*expected, *(_elements(value, walk.states[value]) for value in after)]
        if not walk.counts.random:
            difference = self._difference(got, want, dtypes)
            if difference is not None:
                raise program_error(
                    difference, self._graph.name, self._where, want, got, self._inputs
                )
        return walk.counts

    def _difference(
        self, got: Sequence[Any], expected: Sequence[Any], dtypes: Sequence[DType | None]
    ) -> Difference | None:
        narrow = narrowest(self._graph)
        difference = program_difference(got, expected, dtypes, narrow)
        if difference is None:
            return None
        # Models differ in how far they let roundings grow. Eager torch shows it.
        eager = Walk(self._context, self._graph, dict(self._before), eager=True)
        outputs = eager.run(self._inputs)
        other = [*outputs, *(_elements(v, eager.states[v]) for v in self._before)]
        return program_difference(got, expected, dtypes, narrow, other)


def narrowest(graph: Graph) -> DType | None:
    """The narrowest dtype of real or complex numbers in a graph; None without any."""
    dtypes = {
        value.type.dtype
        for inner in graph.nested()
        for node in inner.nodes
        for value in (*node.inputs, *node.results)
    }
    return min(
        (dtype for dtype in dtypes if dtype.is_float or dtype.is_complex),
        key=_part_size,
        default=None,
    )


def program_difference(
    got: Sequence[Any],
    expected: Sequence[Any],
    dtypes: Sequence[DType | None],
    narrow: DType | None,
    eager: Sequence[Any] | None = None,
) -> Difference | None:
    """The first result of a program that differs.

    Args:
        dtypes: of the results; None for integers and what is None.
        narrow: the narrowest dtype of the program.
        other: the results by eager torch. How far these are off says what to tolerate.
    """
    for number, (have, want, dtype) in enumerate(zip(got, expected, dtypes)):
        if dtype is None:
            if have != want:
                text = f"result {number} is {have}, not {want}"
                return Difference(number, text, abs(float(have or 0) - float(want or 0)))
            continue
        have, want = np.asarray(have), np.asarray(want)
        wide = numbers(want, dtype)
        coarse = narrow if narrow is not None and (dtype.is_float or dtype.is_complex) else dtype
        allowed: np.ndarray = tolerance(wide, coarse, _PROGRAM[_part_size(coarse)])
        if eager is not None:
            drift = _drift(wide, numbers(np.asarray(eager[number]), dtype))
            if drift and dtype.is_int:
                continue  # such as an index of the largest of numbers that round
            allowed = allowed + min(_ACCUMULATED * drift, _CAP * largest(wide))
        difference = find_difference(number, have, want, dtype, allowed)
        if difference is not None:
            return difference
    return None


def _part_size(dtype: DType) -> int:
    """Bytes of a number, or of a part of a complex one."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def _drift(first: np.ndarray, two: np.ndarray) -> float:
    """The largest finite difference."""
    if first.shape != two.shape or not first.size:
        return 0.0
    if first.dtype.kind in "biu":
        return float((first != two).any())
    with np.errstate(all="ignore"):
        distance = np.abs(first.astype(np.complex128) - two)
    return float(np.where(np.isfinite(distance), distance, 0.0).max())


def _dtype(value: Any) -> DType | None:
    return value.type.dtype if isinstance(value, Value) else None


def _elements(value: Value, data: bytes) -> np.ndarray:
    return np.frombuffer(data, value.type.dtype.numpy).reshape([int(n) for n in value.type.dims])


def report_unchecked(counts: Counts, where: str) -> None:
    """Logs what was not compared."""
    if not counts.unchecked:
        return
    note = (
        "; results of the whole call were not compared, because some are random"
        if counts.random
        else ""
    )
    _log.warning(
        "%s: PUREVK_CHECK did not compare %s%s",
        where,
        ", ".join(f"{op}: {reason}" for op, reason in sorted(counts.unchecked.items())),
        note,
    )
