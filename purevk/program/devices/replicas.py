"""One program on several devices, each of which takes a part of a batch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from purevk.closing import Closing
from purevk.errors import InputError, PurevkError
from purevk.fallback import to_numpy
from purevk.ir import Dim, Graph, Symbol, Value
from purevk.ir import dims as _dims
from purevk.plain_text import printable
from purevk.program.call import returned
from purevk.program.method import Method
from purevk.program.program import Program
from purevk.program.specs import ArgumentSpec

TOLERANCE = 2e-2
"""How far the results of parts may be from those of the whole, relative to the largest element: sizes
decide about kernels, and these round differently."""


class Replicas(Closing):
    """A program on several devices. A call splits the batch among them, and joins the results.

    Made by `purevk.load(file, device=[0, 1], split="batch")`. The batch is the dynamic size of the first dim of the
    first tensor input that has one. All inputs with this size are split along their first dim, and
    all other inputs go to every device. Results are joined along the dim of this size.

    The model must treat the rows of a batch independently. The first call of a method that is split
    compares a few rows in one part with the same rows in several, and raises PurevkError if they
    differ.

    Attributes:
        programs: one for each device, in the order that was given.
        methods: by name.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = tuple(programs)
        first = self.programs[0]
        self.name = first.name
        self._pool = ThreadPoolExecutor(len(self.programs), thread_name_prefix="purevk-replica")
        self._turns = itertools.count()
        self._unfinished = [0] * len(self.programs)
        self._lock = threading.Lock()
        self.methods = {name: SplitMethod(self, name) for name in first.methods}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method "forward"; see `SplitMethod.__call__`."""
        return self.method("forward")(*args, **kwargs)

    __call__ = forward

    def method(self, name: str) -> SplitMethod:
        """A method by its name. Raises `InputError` with the names that there are."""
        self.programs[0].method(name)
        return self.methods[name]

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Starts a call of the method "forward" as a whole on the device with the fewest calls that
        are not finished; see `Method.submit`."""
        with self._lock:
            turn = next(self._turns) % len(self.programs)
            order = [*range(turn, len(self.programs)), *range(turn)]
            number = min(order, key=self._unfinished.__getitem__)
            self._unfinished[number] += 1

        def finish(_: object) -> None:
            with self._lock:
                self._unfinished[number] -= 1

        try:
            future: Future[Any] = self.programs[number].submit(*args, **kwargs)
        except BaseException:
            finish(None)
            raise
        future.add_done_callback(finish)
        return future

    @property
    def inputs(self) -> list[ArgumentSpec]:
        """The inputs of the method "forward": names, dtypes, sizes and their bounds."""
        return self.programs[0].inputs

    @property
    def outputs(self) -> list[ArgumentSpec]:
        """The outputs of the method "forward"."""
        return self.programs[0].outputs

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """What functions return that run at the same time. Waits for all of them, also if one
        raises."""
        futures = [self._pool.submit(task) for task in tasks[1:]]
        try:
            results = [tasks[0]()]
        finally:
            for future in futures:
                future.exception()
        return results + [future.result() for future in futures]

    def close(self) -> None:
        """Closes the programs. Safe to call twice."""
        self._pool.shutdown()
        for program in self.programs:
            program.close()

    def __repr__(self) -> str:
        names = ", ".join(program.device.name for program in self.programs)
        return printable(f"<Replicas of {self.name} on {names}>")


class SplitMethod:
    """A method of `Replicas`.

    Attributes:
        batch: the size that is split.
        least: the fewest rows that the model takes.
    """

    def __init__(self, replicas: Replicas, name: str) -> None:
        self.replicas, self.name = replicas, name
        self._parts: list[Method] = [program.method(name) for program in replicas.programs]
        where = f"{replicas.name}, method {name}"
        self.batch, self._split, self._joined = find_batch(self._parts[0].graph, where)
        lower, _ = self._parts[0].graph.ranges.get(self.batch, (self.batch.lower, None))
        self.least = max(lower, 1)
        self._where, self._checked = where, False
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method on all devices.

        Args:
            args, kwargs: as `Method.__call__` takes them. A batch with fewer rows than devices runs
                on as many devices as it has rows.

        Returns:
            What the method returns for the whole batch.

        Raises:
            InputError, SizeConstraintError: as a method of a program raises them.
            PurevkError: the model mixes the rows of a batch, so that it cannot be split.
        """
        call = self._parts[0].variants[0].reader.read_call(args, kwargs)
        if isinstance(call, InputError):
            raise call
        inputs = [
            _sliceable(argument) if at in self._split else argument
            for at, argument in enumerate(call.inputs)
        ]
        rows = len(inputs[self._split[0]])
        for at in self._split:
            if len(inputs[at]) != rows:  # the first device says what is wrong with the sizes
                return self._parts[0](*args, **kwargs)
        sizes = part_sizes(rows, len(self._parts), self.least)
        if len(sizes) < 2:
            return self._parts[0](*args, **kwargs)
        with self._lock:
            if not self._checked:
                self._check(inputs, rows)
                self._checked = True
        results = self._run(inputs, sizes)
        return returned(self._parts[0].graph, tuple(results))

    def _run(self, inputs: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """The flat results for parts of the first rows, one for each device."""
        ends = list(itertools.accumulate(sizes))
        tasks = []
        for method, size, end in zip(self._parts, sizes, ends):
            part = [
                argument[end - size : end] if at in self._split else argument
                for at, argument in enumerate(inputs)
            ]
            tasks.append(lambda method=method, part=part: method.run_flat(part))
        results = self.replicas.run(tasks)
        return [
            _concatenated([result[at] for result in results], axis)
            for at, axis in enumerate(self._joined)
        ]

    def _check(self, inputs: Sequence[Any], rows: int) -> None:
        """Compares a few rows, whole and in parts. Inputs that the method writes are copies."""
        parts = len(self._parts)
        few = min(rows, self.least * parts)
        probe = [
            _copied(argument[:few]) if at in self._split else _copied(argument)
            for at, argument in enumerate(inputs)
        ]
        whole = self._parts[0].run_flat([_copied(argument) for argument in probe])
        for number, (first, many) in enumerate(
            zip(whole, self._run(probe, part_sizes(few, parts, self.least)))
        ):
            if not _close(_array(first), _array(many)):
                raise PurevkError(
                    f"output {number} for {few} rows differs from that for the same rows in parts",
                    where=self._where,
                    why="the model mixes the rows of a batch, or makes random numbers",
                    next="load it for one device",
                )

    def __repr__(self) -> str:
        return printable(f"<SplitMethod {self.name} along {self.batch}>")


def part_sizes(rows: int, parts: int, least: int) -> list[int]:
    """Rows of each part: at most `parts` parts of `least` rows or more, as equal as can be."""
    count = max(min(parts, rows // least), 1)
    return [rows // count + (number < rows % count) for number in range(count)]


def find_batch(graph: Graph, where: str) -> tuple[Symbol, list[int], list[int]]:
    """The size that is split, the inputs that have it, and the dim of it in each output.

    Raises:
        InputError: the method cannot be split.
    """

    def refuse(why: str) -> InputError:
        return InputError(
            "a batch cannot be split among devices",
            where=where,
            why=why,
            next='load it for one device, or with split="layers", or export it with a dynamic batch: '
            'dynamic_shapes={"x": {0: torch.export.Dim("batch")}}',
        )

    if graph.states:
        raise refuse("the method keeps states between calls, and each device would have its own")
    tensors = [(at, value) for at, value in enumerate(graph.inputs) if isinstance(value, Value)]
    sizes = [_symbol(value.type.dims[0]) for _, value in tensors if value.type.rank]
    batch = next((size for size in sizes if size is not None), None)
    if batch is None:
        raise refuse("no input has a first dim whose size is dynamic")
    split = []
    for at, value in enumerate(graph.inputs):
        dims = value.type.dims if isinstance(value, Value) else ()
        if isinstance(value, Dim) and batch in _dims.symbols(value):
            raise refuse(f"input {at} is a number that depends on the size {batch}")
        if any(batch in _dims.symbols(size) for size in dims[1:]):
            raise refuse(f"input {at} has the size {batch} in other dims than the first")
        if dims and batch in _dims.symbols(dims[0]):
            if _symbol(dims[0]) != batch:
                raise refuse(f"input {at} has {dims[0]} rows, not {batch}")
            split.append(at)
    joined = []
    for at, output in enumerate(graph.outputs[: len(graph.outputs) - len(graph.updates)]):
        dims = output.type.dims if isinstance(output, Value) else ()
        having = [d for d, size in enumerate(dims) if batch in _dims.symbols(size)]
        if len(having) != 1:
            raise refuse(f"output {at} has the size {batch} in {len(having)} dims, not in one")
        joined.append(having[0])
    if not set(graph.updates) <= set(split):
        raise refuse("the method writes to an input that every device gets")
    return batch, split, joined


def _symbol(size: Any) -> Symbol | None:
    """The symbol that a size is, if it is nothing else."""
    if isinstance(size, int):
        return None
    symbol, *others = _dims.symbols(size)
    return symbol if not others and Dim.of(symbol) == size else None


def _sliceable(value: Any) -> Any:
    """An input whose slices along its rows are parts of it."""
    if isinstance(value, np.ndarray) or hasattr(value, "detach"):
        return value
    return np.asarray(value)


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.clone() if hasattr(value, "detach") else value


def _concatenated(parts: Sequence[Any], axis: int) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    import torch

    return torch.cat(list(parts), axis)


def _array(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else to_numpy(value.detach())


def _close(first: np.ndarray, many: np.ndarray) -> bool:
    """Whether results differ by rounding alone."""
    if first.shape != many.shape:
        return False
    if first.dtype.kind not in "fc":
        return bool(np.mean(first == many) >= 0.99) if first.size else True
    a, b = first.astype(np.complex128), many.astype(np.complex128)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    largest = np.abs(a[finite]).max(initial=0.0)
    return bool(np.all(same | (finite & (np.abs(a - b) <= TOLERANCE * largest))))
