"""The backend "purevk" of `torch.compile`: graphs that dynamo traces run on a Vulkan device.

    compiled = torch.compile(module, backend="purevk")
    with torch.no_grad():
        y = compiled(x)

Importing this module registers the backend. If purevk is installed, torch finds it without the
import. Only inference is compiled. A graph with gradients runs in eager torch, with one warning. So
does a graph that purevk cannot run, unless `options={"fallback": False}` or PUREVK_EAGER_FALLBACK=0
says otherwise.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._dynamo import trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch.multiprocessing.reductions import StorageWeakRef

from purevk import knobs
from purevk.errors import (
    DeviceError,
    DifferenceError,
    GraphError,
    InputError,
    KernelNotCachedError,
    OutOfDeviceMemoryError,
    PurevkError,
    UnsupportedProgramError,
)
from purevk.fallback import copied_to_torch
from purevk.frontends.importer import InputSizes
from purevk.frontends.private_names import warn_once
from purevk.frontends.torch.aot import AotGraph
from purevk.frontends.torch.decompose import decompositions, keep_checks
from purevk.frontends.torch.elements.fills import fill_with_tensors
from purevk.frontends.torch.fast_paths import with_checked_classes
from purevk.frontends.torch.overlaps import Overlaps
from purevk.frontends.torch.recurrent import WholeLayers
from purevk.frontends.torch.watch.samples import Samples
from purevk.frontends.torch.written_views import replace_written_views
from purevk.graph.context import Context, context_of
from purevk.ir import Bound, Graph, GuardLog
from purevk.ir.dims import note
from purevk.passes.placement import outgrows
from purevk.plain_text import printable
from purevk.program import Program
from purevk.program.options import check_round
from purevk.tuning import DeviceTraits

NAME = "purevk"
# A program that the compiled code calls runs as it is. Tracing it would run parts of it with other
# values, and leave its lists changed.
trace_rules.add("purevk")
_log = logging.getLogger("purevk")
_lock = threading.RLock()
_numbers = itertools.count()
# Errors that eager torch would only hide: of the device, of memory, and how dynamo steers tracing.
_RAISED = (
    DeviceError,
    DifferenceError,
    KernelNotCachedError,
    MemoryError,
    RestartAnalysis,
    SkipFrame,
)


def _is_tracing() -> bool:
    """Whether this thread traces for this backend, in dynamo or in AOTAutograd."""
    try:
        compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
        backend = innermost_backend(compiler)
    except AttributeError:  # dynamo does not trace
        return False
    return getattr(getattr(backend, "compiler_fn", backend), "__module__", "") == __name__


# Without this, dynamo leaves modules with recurrent layers to eager torch.
_layers = WholeLayers(_is_tracing)
fill_with_tensors(_is_tracing)


def make_backend(
    context: Context | None = None,
) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A backend for `torch.compile(model, backend=...)` on a device.

    Args:
        context: the device; None: the best one, or that of PUREVK_DEVICE.

    `torch.compile(model, backend="purevk", options={"fallback": False})` raises what purevk cannot
    run. True runs it in eager torch, and warns. The default is that of PUREVK_EAGER_FALLBACK.
    The option "round" is that of `purevk.load`: "fused" or "eager".
    """
    if context is None:
        return purevk_backend

    def backend(
        module: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Callable[..., Any]:
        return _compile_or_warn(module, example_inputs, options or {}, context)

    return backend


def purevk_backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """The backend on the default device. Modules that are compiled with it can be pickled, since it
    is found by its name."""
    return _compile_or_warn(module, example_inputs, options or {}, None)


def _compile_or_warn(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any],
    context: Context | None,
) -> Callable[..., Any]:
    """A graph of dynamo, as it runs on the device or in eager torch."""
    warn_once()
    fallback, round = _checked(options)
    if torch.is_grad_enabled() and _differentiable((*example_inputs, *module.parameters())):
        _warn_about_training()
        return module.forward
    graphs: list[_CompiledGraph] = []
    compile = functools.partial(_compile, context=context, round=round, graphs=graphs)
    aot = aot_autograd(
        fw_compiler=compile, inference_compiler=compile, decompositions=_decompositions()
    )
    try:
        overlaps = Overlaps(module)
        if overlaps.traced:
            raise _shared_inputs()
        replace_written_views(module)
        with_checked_classes(module)
        compiled = aot(module, example_inputs)
        if not fallback:
            return _Strict(compiled, overlaps)
    except _RAISED:
        raise
    except Exception as error:
        if not fallback:
            raise
        _warn_about_eager(error)
        return module.forward
    return _WithFallback(module, compiled, overlaps, any(graph.draws for graph in graphs))


def _differentiable(tensors: Sequence[Any]) -> bool:
    return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)


@functools.cache
def _warn_about_training() -> None:
    warnings.warn(
        "torch.compile(backend='purevk') compiles inference only: this graph has tensors that require gradients and"
        " runs in eager torch; call the model under torch.no_grad()",
        stacklevel=2,
    )


def _checked(options: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether eager torch runs what purevk cannot, and when values are rounded."""
    unknown = sorted(set(options) - {"fallback", "round"})
    if unknown:
        raise InputError(
            f"unknown options: {', '.join(unknown)}",
            where="torch.compile(backend='purevk')",
            why='the options are "fallback": True or False, and "round": "fused" or "eager"',
            next="drop them, or set what they stand for in purevk.knobs",
        )
    round = options.get("round", "fused")
    check_round(round, "torch.compile(backend='purevk')")
    return bool(options.get("fallback", knobs.EAGER_FALLBACK())), round


def _shared_inputs() -> UnsupportedProgramError:
    return UnsupportedProgramError(
        "inputs share memory, and the graph writes into one of them",
        where="torch.compile",
        why="AOTAutograd traces such graphs wrongly, and guards few others",
        next="pass copies: x.clone()",
    )


class _Strict:
    """A graph of dynamo that nothing takes over for."""

    def __init__(self, compiled: Callable[..., Any], overlaps: Overlaps) -> None:
        self._compiled, self._overlaps = compiled, overlaps

    def __call__(self, *args: Any) -> Any:
        if self._overlaps.of_call(args):
            raise _shared_inputs()
        return self._compiled(*args)


class _WithFallback:
    """A graph of dynamo. When a call fails, eager torch takes over for good. If eager torch fails
    too, its error is raised: it is one of the call.

    AOTAutograd writes into arguments after the graph has run. So a graph that failed has left
    nothing behind, but if what AOTAutograd does then fails. That call raises.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        compiled: Callable[..., Any],
        overlaps: Overlaps,
        draws: bool = True,
    ) -> None:
        self._overlaps, self._draws = overlaps, draws
        self._eager = module.forward
        self._compiled: Callable[..., Any] | None = compiled

    def __call__(self, *args: Any) -> Any:
        compiled = self._compiled
        if compiled is None:
            return self._eager(*args)
        if self._overlaps.of_call(args):
            _warn_about_eager(_shared_inputs())
            return self._eager(*args)
        random_state = torch.get_rng_state() if self._draws else None
        versions = self._versions(args)
        try:
            return compiled(*args)
        except _RAISED:
            raise
        except Exception as error:
            if versions != self._versions(args):
                self._compiled = None
                raise UnsupportedProgramError(
                    "a graph failed after it had written into its inputs",
                    where="torch.compile",
                    why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
                    next="pass inputs that share no memory; later calls of the graph run in eager"
                    " torch",
                ) from error
            # Eager torch draws the random numbers that it would have drawn alone.
            if random_state is not None:
                torch.set_rng_state(random_state)
            outputs = self._eager(*args)
            _warn_about_eager(error)
            self._compiled = None
            return outputs

    def _versions(self, args: Sequence[Any]) -> list[int]:
        """How often each input that the graph may write has been written."""
        return [args[at]._version for at in self._overlaps.written if not args[at].is_inference()]


_reasons: set[str] = set()


def _warn_about_eager(error: Exception) -> None:
    """Warns that a graph runs in eager torch, once for each reason."""
    _log.debug("a graph runs in eager torch", exc_info=error)
    if isinstance(error, PurevkError):
        reason = ": ".join(each for each in (error.what, error.why) if each)
        where = f" (in {error.where})" if error.where else ""
    else:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        where = ""
    with _lock:
        if reason in _reasons:
            return
        _reasons.add(reason)
    warnings.warn(
        printable(
            f"torch.compile(backend='purevk') runs a graph in eager torch: {reason}{where};"
            " options={'fallback': False} raises instead"
        ),
        stacklevel=2,
    )


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    keep_checks()
    table = dict(decompositions().items())
    # A kernel does all of it.
    table.pop(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, None)
    return table


def _compile(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    context: Context | None,
    round: str,
    graphs: list[_CompiledGraph],
) -> Callable[[list[Any]], list[Any]]:
    """A compiler of AOTAutograd. The graph is lowered at the first call, when its parameters are
    there. It is added to `graphs`."""
    if any(isinstance(each, torch.Tensor) and each.is_meta for each in example_inputs):
        raise UnsupportedProgramError(
            "a tensor is on the device meta",
            where="torch.compile",
            why="it has no elements",
            next="move the model and its inputs to the CPU or to CUDA",
        )
    traced = TracingContext.try_get()
    meta = None if traced is None else traced.fw_metadata
    fixed = (
        set()
        if meta is None
        else set(meta.static_input_indices) - set(meta.mutated_inp_runtime_indices)
    )
    compiled = _CompiledGraph(module, fixed, context, round)
    graphs.append(compiled)

    def run(args: list[Any]) -> list[Any]:
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


# -- graphs of one model -------------------------------------------------------------------------
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


_shared: weakref.WeakSet[_Shared] = weakref.WeakSet()
# AOTAutograd orders operators with effects by tokens. It passes None for each, traced as this.
_TOKEN = torch.empty(0)


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _share(context: Context, round: str, tensors: Mapping[int, torch.Tensor]) -> _Shared:
    for each in _shared:
        program = each.program
        if program.context is context and program.round == round and each.fits(tensors):
            return each
    made = _Shared(context, round)
    _shared.add(made)
    return made


class _CompiledGraph:
    """One graph of dynamo.

    Parameters are constants on the device. If one changes, the graph is lowered again. If it changes
    a second time, it is an input from then on.

    Args:
        fixed: positions of the arguments that are parameters or buffers, without those that the
            graph itself writes.
        round: see `purevk.load`.

    Attributes:
        draws: whether it may draw random numbers.
    """

    def __init__(
        self, module: torch.fx.GraphModule, fixed: set[int], context: Context | None, round: str
    ) -> None:
        self.draws = any(_may_draw(node) for node in module.graph.nodes)
        _layers.restore(module)
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


def _may_draw(node: torch.fx.Node) -> bool:
    """Whether a node may draw random numbers: an operator that torch says it of, or one of which torch
    does not know, such as a custom one or one with sub-graphs."""
    if node.op != "call_function" or getattr(node.target, "__module__", "") == "_operator":
        return False
    if getattr(node.target, "namespace", "") not in ("aten", "prims"):
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


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


if NAME not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(purevk_backend, name=NAME)
