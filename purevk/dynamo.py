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
import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext

from purevk import knobs
from purevk.compiled_graphs import CompiledGraph
from purevk.errors import (
    DeviceError,
    DifferenceError,
    InputError,
    KernelNotCachedError,
    PurevkError,
    UnsupportedProgramError,
)
from purevk.frontends.private_names import warn_once
from purevk.frontends.torch.decompose import decompositions, keep_checks
from purevk.frontends.torch.elements.fills import fill_with_tensors
from purevk.frontends.torch.fast_paths import with_checked_classes
from purevk.frontends.torch.overlaps import Overlaps
from purevk.frontends.torch.recurrent import WholeLayers
from purevk.frontends.torch.written_views import replace_written_views
from purevk.graph.context import Context
from purevk.plain_text import printable
from purevk.program.options import check_round

NAME = "purevk"
# A program that the compiled code calls runs as it is. Tracing it would run parts of it with other
# values, and leave its lists changed.
trace_rules.add("purevk")
_log = logging.getLogger("purevk")
_lock = threading.RLock()
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
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # dynamo does not trace
        return False
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
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
    draws: list[bool] = []
    compile = functools.partial(_compile, context=context, round=round, draws=draws)
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
    return _WithFallback(module, compiled, overlaps, any(draws))


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
    draws: list[bool],
) -> Callable[[list[Any]], list[Any]]:
    """A compiler of AOTAutograd. The graph is lowered at the first call, when its parameters are
    there. `draws` gets whether it may draw random numbers."""
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
    draws.append(any(map(_may_draw, module.graph.nodes)))
    _layers.restore(module)
    compiled = CompiledGraph(module, fixed, context, round)

    def run(args: list[Any]) -> list[Any]:
        return compiled(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _may_draw(node: torch.fx.Node) -> bool:
    """Whether a node may draw random numbers: an operator that torch says it of, or one of which torch
    does not know, such as a custom one or one with sub-graphs."""
    if node.op != "call_function" or getattr(node.target, "__module__", "") == "_operator":
        return False
    if getattr(node.target, "namespace", "") not in ("aten", "prims"):
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


if NAME not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(purevk_backend, name=NAME)
