"""`purevk.compile`: makes a `Program` of modules or exported programs, without a file."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from purevk.api import check_fork
from purevk.errors import InputError, UnsupportedProgramError
from purevk.graph.context import Context
from purevk.graph.devices import choose_context
from purevk.program.loading import check_devices, load
from purevk.program.options import Bounds, Compile, Options, Round
from purevk.program.program import Program
from purevk.whole_file import temporary_folder

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from purevk.frontends.torch.exported import WrittenBuffers
    from purevk.program.devices.replicas import Replicas
    from purevk.program.devices.stages import StagedProgram
    from purevk.program.loading import Devices

_log = logging.getLogger("purevk")


@overload
def compile(
    model: Any,
    example_inputs: Any = ...,
    dynamic_shapes: Any = ...,
    *,
    kwargs: Mapping[str, Any] | None = ...,
    context: Context | None = ...,
    device: Context | int | str | None = ...,
    **options: Unpack[Options],
) -> Program: ...


@overload
def compile(
    model: Any,
    example_inputs: Any = ...,
    dynamic_shapes: Any = ...,
    *,
    kwargs: Mapping[str, Any] | None = ...,
    device: Devices,
    split: Literal["batch"],
    **options: Unpack[Options],
) -> Replicas: ...


@overload
def compile(
    model: Any,
    example_inputs: Any = ...,
    dynamic_shapes: Any = ...,
    *,
    kwargs: Mapping[str, Any] | None = ...,
    device: Devices,
    split: Literal["layers"],
    **options: Unpack[Options],
) -> StagedProgram: ...


@overload
def compile(
    model: Any,
    example_inputs: Any = ...,
    dynamic_shapes: Any = ...,
    *,
    kwargs: Mapping[str, Any] | None = ...,
    device: Devices,
    split: str | None = ...,
    **options: Unpack[Options],
) -> Replicas | StagedProgram: ...


def compile(
    model: Any,
    example_inputs: Any = (),
    dynamic_shapes: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    context: Context | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    bounds: Bounds = "exported",
    compile: Compile = "allowed",
    round: Round = "fused",
    device: Context | int | str | Sequence[Context | int | str] | None = None,
    split: str | None = None,
) -> Program | Replicas | StagedProgram:
    """Makes modules of torch ready to run on a Vulkan device.

    Args:
        model: a `torch.nn.Module` or a `torch.export.ExportedProgram`. Put a module into eval mode
            first; the log warns if it is in training mode and computes otherwise then. For several
            methods: a mapping from their names to exported programs or tuples (module, example
            inputs) or (module, example inputs, dynamic shapes). Methods share weights and buffers
            that are the same tensors. If one method writes a buffer, all see it.
        example_inputs: inputs to trace the module with: a tuple, or a single tensor. Not needed for
            an exported program.
        dynamic_shapes: as for `torch.export.export`.
        kwargs: example inputs by name.
        context: device to run on, as a context; None: that of `device`.
        progress: called with (phase, done, total) during long work; None: a progress bar on a
            terminal.
        bounds: "exported", "grow" or "strict", as for `purevk.load`.
        compile: "allowed" or "never", as for `purevk.load`.
        round: "fused" or "eager", as for `purevk.load`.
        device: device to run on: its index, a part of its name, its kind
            ("discrete", "integrated", "cpu"), or a context; None: the best one,
            or that of PUREVK_DEVICE. `purevk.devices()` lists them. A list of devices uses all of
            them, as for `purevk.load`. The model goes through a temporary file then: what changes in
            the module afterwards has no effect, and it is not exported again for other calls.
        split: what several devices share, as for `purevk.load`.

    Returns:
        A program with the method "forward", or with those of the mapping. A method that was made
        from a module exports it again for a call with other Python values, another nesting, or
        sizes for which the module takes another branch.

    Raises:
        UnsupportedProgramError: the model has an operator without a kernel and without a CPU
            function.
        UnsupportedProgramError: torch is not installed; or the module, or one in it, is of
            TorchScript.
        InputError: `model` is none of the above, or a method's name is no text.
    """
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedProgramError(
            "torch is not installed",
            where="purevk.compile",
            why="it exports modules of torch",
            next="install torch; or save the program where torch is, and load the file:"
            ' purevk.compile(...).save("m.pvk")',
        ) from error
    from purevk.frontends.torch.exported import WrittenBuffers
    from purevk.frontends.torch.watch.weights import Weights

    check_fork()
    check_devices(device, context, split)
    if isinstance(model, Mapping):
        if kwargs:
            raise InputError(
                "kwargs go with a single module",
                where="purevk.compile",
                next='name a method\'s example inputs in its tuple: {"name": (module, inputs)}',
            )
        if not model or any(hasattr(value, "untyped_storage") for value in model.values()):
            raise InputError(
                "the mapping has tensors, as a state dict does" if model else "there is no method",
                where="purevk.compile",
                why="a module, an ExportedProgram, or a mapping of these by method is expected",
                next="load the state dict into its module: module.load_state_dict(...)"
                if model
                else 'purevk.compile({"name": (module, inputs), ...})',
            )
        method_sources = {
            name: (*source, None, None)[:3] if isinstance(source, tuple) else (source, None, None)
            for name, source in model.items()
        }
        wrong = [name for name in method_sources if not isinstance(name, str) or not name]
        if wrong:
            raise InputError(
                f"a method is named {wrong[0]!r}",
                where="purevk.compile",
                why="names of methods are texts",
                next='purevk.compile({"name": (module, inputs), ...})',
            )
        label = "+".join(method_sources)
    else:
        method_sources = {"forward": (model, example_inputs, dynamic_shapes)}
        label = type(model).__name__
    mutable = WrittenBuffers()
    sources = {
        name: _source(name, source, inputs, shapes, kwargs or {}, mutable)
        for name, (source, inputs, shapes) in method_sources.items()
    }
    if isinstance(device, Sequence) and not isinstance(device, (str, bytes)):
        options = {"progress": progress, "bounds": bounds, "compile": compile, "round": round}
        return _on_several(label, sources, device, split, options)
    return Program(
        label,
        sources,
        choose_context(device, context),
        progress,
        bounds=bounds,
        weight_watch=Weights(list(sources.values())),
        compile=compile,
        round=round,
    )


def _on_several(
    label: str,
    sources: Mapping[str, Any],
    devices: Sequence[Context | int | str],
    split: str | None,
    options: Mapping[str, Any],
) -> Replicas | StagedProgram:
    """The program on several devices, which read its weights from a file."""
    from purevk import __version__
    from purevk.frontends.saved import write_program

    with temporary_folder("purevk-") as folder:
        path = folder / f"{label}.pvk"
        methods = {name: getattr(source, "for_file", source) for name, source in sources.items()}
        write_program(path, label, methods, f"purevk {__version__}")
        return load(path, device=[*devices], split=split, check=False, **options)


def _instead_of(model: Any) -> str:
    """What to do with something that is no module; empty if it tells nothing."""
    if isinstance(model, (str, os.PathLike)):
        return "purevk.load(path) takes files"
    if isinstance(model, type):
        return f"make a module of the class: {model.__name__}(...)"
    if inspect.isroutine(model):
        return "write a torch.nn.Module whose forward calls the function"
    return ""


def _source(
    name: str,
    model: Any,
    inputs: Any,
    dynamic_shapes: Any,
    kwargs: Mapping[str, Any],
    mutable: WrittenBuffers,
) -> Any:
    """The graphs of one method."""
    import torch

    from purevk.frontends.torch.module import ModuleSource, ProgramSource

    if isinstance(model, torch.export.ExportedProgram):
        return ProgramSource(name, model, mutable)
    if not isinstance(model, torch.nn.Module) or inputs is None:
        raise InputError(
            f"method {name!r} is made of {type(model).__name__}",
            where="purevk.compile",
            why="an ExportedProgram, or a module with example inputs, is expected",
            next=_instead_of(model)
            or 'purevk.compile(module, inputs), or purevk.compile({"name": (module, inputs), ...})',
        )
    if not isinstance(inputs, (tuple, list)):
        inputs = (inputs,)
    _refuse_scripted(name, model)
    _warn_of_training(model)
    return ModuleSource(name, model, inputs, kwargs, dynamic_shapes, mutable)


def _refuse_scripted(name: str, module: Any) -> None:
    """Raises `UnsupportedProgramError` for a module of TorchScript, or one that holds such a module."""
    import torch

    for path, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            what = (
                f"{path} is a module of TorchScript" if path else "this is a module of TorchScript"
            )
            kind = type(submodule).__name__
            original = getattr(submodule, "original_name", kind)
            raise UnsupportedProgramError(
                what,
                where=f"purevk.compile, method {name!r}",
                why=f"{kind} of {original}: torch.export traces modules of Python alone",
                next="compile the module that torch.jit.script or torch.jit.trace was called with",
            )


def _warn_of_training(module: Any) -> None:
    from purevk.frontends.torch.watch.attributes import computes_by_mode

    modules = [
        f"{name} ({type(submodule).__name__})" if name else type(submodule).__name__
        for name, submodule in module.named_modules()
        if computes_by_mode(submodule)
    ]
    if modules:
        more = f" and {len(modules) - 3} more" if len(modules) > 3 else ""
        _log.warning(
            "%s is compiled in training mode, in which these compute otherwise: %s%s. Call"
            " module.eval() for inference",
            type(module).__name__,
            ", ".join(modules[:3]),
            more,
        )
