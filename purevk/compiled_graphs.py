"""The graphs that `torch.compile` gives the backend "purevk", as methods of programs. Graphs of one
model share its parameters on the device."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from purevk.errors import GraphError, OutOfDeviceMemoryError
from purevk.fallback import copied_to_torch
from purevk.frontends.importer import InputSizes
from purevk.frontends.torch.aot import AotGraph
from purevk.frontends.torch.watch.samples import Samples
from purevk.graph.context import Context, context_of
from purevk.ir import Bound, Graph, GuardLog
from purevk.ir.guards import note
from purevk.passes.placement import outgrows
from purevk.program import Program
from purevk.tuning import DeviceTraits

_log = logging.getLogger("purevk")
_lock = threading.RLock()
_numbers = itertools.count()
_Key = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class _Copied(NamedTuple):
    """A tensor as it goes to the device: contiguous, with the version and some elements of the tensor
    of the model.

    `memory` is a `StorageWeakRef` to the model's tensor, if `tensor` is a copy that does not keep
    it: once it is freed, another tensor may have its address.
    """

    tensor: torch.Tensor
    version: int
    samples: Samples
    memory: Any

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Copied:
        copy = tensor.detach().cpu().contiguous()
        same = copy.data_ptr() == tensor.data_ptr()
        memory: Any = StorageWeakRef  # whose functions have no types
        memory = None if same else memory(tensor.untyped_storage())
        return cls(copy, tensor._version, Samples([tensor]), memory)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor with the same key has the same elements."""
        return (
            self.version == tensor._version
            and not (self.memory and self.memory.expired())
            and not self.samples.changed()
        )


class _Shared:
    """A program for the graphs of a model, which share its parameters on the device."""

    def __init__(self, context: Context, round: str) -> None:
        self.program = Program("torch.compile", {}, context, bounds="open", round=round)
        self.tensors: dict[_Key, _Copied] = {}

    def take(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The tensors as they go to the device. Each is copied once."""
        taken = {}
        for at, tensor in tensors.items():
            key = _key(tensor)
            if key not in self.tensors:
                self.tensors[key] = _Copied.of(tensor)
            taken[at] = self.tensors[key].tensor
        return taken

    def fits(self, tensors: Mapping[int, torch.Tensor]) -> bool:
        """Whether it has some of the tensors, and none of them in an older version."""
        held = [(self.tensors.get(_key(tensor)), tensor) for tensor in tensors.values()]
        return any(known for known, _ in held) and all(
            known is None or known.is_of(each) for known, each in held
        )


shared: weakref.WeakSet[_Shared] = weakref.WeakSet()
# AOTAutograd orders operators with effects by tokens. It passes None for each, traced as this.
_TOKEN = torch.empty(0)


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _share(context: Context, round: str, tensors: Mapping[int, torch.Tensor]) -> _Shared:
    for each in shared:
        program = each.program
        if program.context is context and program.round == round and each.fits(tensors):
            return each
    made = _Shared(context, round)
    shared.add(made)
    return made


class CompiledGraph:
    """One graph of dynamo.

    Parameters are constants on the device. If one changes, the graph is lowered again. If it changes
    a second time, it is an input from then on.

    Args:
        fixed: positions of the arguments that are parameters or buffers, without those that the
            graph itself writes.
        round: see `purevk.load`.
    """

    def __init__(
        self, module: torch.fx.GraphModule, fixed: set[int], context: Context | None, round: str
    ) -> None:
        self.aot = AotGraph(module, f"torch.compile graph {next(_numbers)}")
        # An attribute whose size varies is an input: it has told its size to the trace.
        self.fixed = {at for at in self.aot.tensors if at in fixed and not self.aot.varies(at)}
        self._given_context, self._round = context, round
        self._changed: set[int] = set()
        self._stamps: list[tuple[int, int, int]] = []
        self._samples = Samples([])
        self._memories: list[tuple[int, Any]] = []
        self._order: list[int] = []
        self._method: Any = None
        self._held: Any = None

    def __call__(self, args: list[Any]) -> list[Any]:
        with _lock:
            if self._method is None or self._held.program.context.closed or self._stale(args):
                self._lower(args)
            if self.aot.make_room(args):
                _log.debug("%s: integers above those that memory was planned for", self.aot.name)
            method, inputs = (
                self._method,
                [_TOKEN if args[at] is None else args[at] for at in self._order],
            )
        args.clear()
        made = method(*inputs)
        made = made if isinstance(made, tuple) else (made,)
        outputs = list(made[: len(self.aot.strided)])
        for number, value in enumerate(outputs):
            if isinstance(value, np.ndarray):  # no input is a tensor
                value = copied_to_torch(value, method.graph.outputs[number].type.dtype)
            traced = self.aot.results[number]
            if isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor):
                value = value.to(traced.device)
            outputs[number] = value
        for number, kind in self.aot.numbers:
            outputs[number] = kind(outputs[number])
        _lay_out(outputs, self.aot, iter(made[len(outputs) :]))
        return outputs

    def _stale(self, args: Sequence[Any]) -> bool:
        changed = {
            at
            for at, address, version in self._stamps
            if args[at].data_ptr() != address or args[at]._version != version
        }
        changed.update(at for at, memory in self._memories if memory.expired())
        if not changed and self._samples.changed():
            changed = {self._stamps[number][0] for number in self._samples.owners()}
        self.fixed -= changed & self._changed
        self._changed |= changed
        return bool(changed)

    def _lower(self, args: Sequence[Any]) -> None:
        # Inference tensors do not count their versions, so a change would not be seen.
        self.fixed = {at for at in self.fixed if not args[at].is_inference()}
        tensors = {at: args[at] for at in sorted(self.fixed)}
        held = _share(context_of(self._given_context), self._round, tensors)
        constants = held.take(tensors)
        aot = self.aot

        def read(sizes: InputSizes | None) -> Graph:
            return self._fitting(constants, sizes, held.program.context.traits)

        while True:
            try:
                held.program.add_methods({aot.name: read})
                break
            except OutOfDeviceMemoryError:
                if not aot.tighten():
                    raise
        self._held, self._method = held, held.program.method(aot.name)
        self._order = aot.arguments(constants)
        self._stamps = [(at, tensor.data_ptr(), tensor._version) for at, tensor in tensors.items()]
        self._samples = Samples(list(tensors.values()))
        memories = {at: held.tensors[_key(tensor)].memory for at, tensor in tensors.items()}
        self._memories = [(at, memory) for at, memory in memories.items() if memory]

    def _fitting(
        self, constants: Mapping[int, Any], sizes: InputSizes | None, traits: DeviceTraits
    ) -> Graph:
        """The graph, planned for sizes with which each operator runs on the device, if it does with
        those of the trace.

        Raises:
            GraphError: it does not with those that it is asked for.
        """
        while True:
            with GuardLog() as log:
                graph = self.aot.read(constants, sizes)
            fits = not any(outgrows(node, traits) for node in graph.nodes)
            wanted = [size for given in sizes or () for size in given or ()]
            if not fits and any(isinstance(size, Bound) for size in wanted):
                raise GraphError(
                    "at these bounds, a tensor is larger than one binding of the device"
                )
            if fits or sizes is not None or not self.aot.tighten():
                for guard in log.guards:  # without those of attempts with other bounds
                    note(guard)
                return graph


def _lay_out(outputs: list[Any], aot: AotGraph, numbers: Iterator[int]) -> None:
    """Gives results the strides and the shared memory that they were traced with. Code after the
    graph makes views of results, and of arguments, from these.

    Args:
        numbers: what the method gives after its results: strides and offsets.
    """
    layouts: dict[int, tuple[list[int], int]] = {}
    spans: dict[int, int] = {}
    for at, (value, rank, number) in enumerate(zip(outputs, aot.strided, aot.memories)):
        if rank is not None:
            strides, offset = list(itertools.islice(numbers, rank)), next(numbers)
            reach = (
                sum((size - 1) * stride for size, stride in zip(value.shape, strides)) + 1
                if value.numel()
                else 0
            )
            layouts[at] = strides, offset
            spans[number] = max(spans.get(number, 0), (offset + reach) * value.element_size())
    memories: dict[int, torch.Tensor] = {}
    for at, (strides, offset) in layouts.items():
        value, number = outputs[at], aot.memories[at]
        if number not in memories:
            memories[number] = torch.empty(spans[number], dtype=torch.uint8, device=value.device)
        memory = memories[number]
        whole = memory[: memory.numel() // value.element_size() * value.element_size()].view(
            value.dtype
        )
        # An expanded dim stores its elements once.
        once = [min(size, 1) if stride == 0 else size for size, stride in zip(value.shape, strides)]
        first = tuple(slice(0, size) for size in once)
        traced = aot.results[at]
        _as_traced(whole.as_strided(once, strides, offset), traced).copy_(value[first])
        outputs[at] = _as_traced(whole.as_strided(value.shape, strides, offset), traced)


def _as_traced(view: torch.Tensor, traced: Any) -> torch.Tensor:
    """The view, conjugated or negated lazily as the traced tensor. Writes into it undo that."""
    view = view.conj() if traced.is_conj() else view
    return torch._neg_view(view) if traced.is_neg() else view
