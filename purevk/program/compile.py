"""`purevk.compile`: makes a `Program` of modules or exported programs, without a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from purevk.api import check_fork
from purevk.errors import InputError
from purevk.graph.context import Context
from purevk.graph.devices import choose_context
from purevk.program.program import Program

_log = logging.getLogger("purevk")


def compile(
    model: Any,
    example_inputs: Any = (),
    dynamic_shapes: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    context: Context | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    bounds: str = "exported",
    compile: str = "allowed",
    device: Context | int | str | None = None,
) -> Program:
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
        device: device to run on: its index, a part of its name, or a context; None: the best one,
            or that of PUREVK_DEVICE. `purevk.devices()` lists them.

    Returns:
        A program with the method "forward", or with those of the mapping. A method that was made
        from a module exports it again for a call with other Python values, another nesting, or
        sizes for which the module takes another branch.

    Raises:
        UnsupportedProgramError: the model has an operator without a kernel and without a CPU
            function.
        InputError: `model` is none of the above.
    """
    from purevk.frontends.torch.weights import Weights

    check_fork()
    if isinstance(model, Mapping):
        if kwargs:
            raise InputError(
                "kwargs go with a single module",
                where="purevk.compile",
                next='name a method\'s example inputs in its tuple: {"name": (module, inputs)}',
            )
        given = {
            name: (*each, None, None)[:3] if isinstance(each, tuple) else (each, None, None)
            for name, each in model.items()
        }
        label = "+".join(given)
    else:
        given = {"forward": (model, example_inputs, dynamic_shapes)}
        label = type(model).__name__
    mutable: set[str] = set()
    sources = {
        name: _source(name, each, inputs, shapes, kwargs or {}, mutable)
        for name, (each, inputs, shapes) in given.items()
    }
    return Program(
        label,
        sources,
        choose_context(device, context),
        progress,
        bounds=bounds,
        weight_watch=Weights(list(sources.values())),
        compile=compile,
    )


def _source(
    name: str,
    model: Any,
    inputs: Any,
    dynamic_shapes: Any,
    kwargs: Mapping[str, Any],
    mutable: set[str],
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
            next='purevk.compile(module, inputs), or purevk.compile({"name": (module, inputs), ...})',
        )
    if not isinstance(inputs, (tuple, list)):
        inputs = (inputs,)
    _warn_of_training(model)
    return ModuleSource(name, model, inputs, kwargs, dynamic_shapes, mutable)


def _warn_of_training(module: Any) -> None:
    from purevk.frontends.torch.attributes import computes_by_mode

    found = [
        f"{name} ({type(each).__name__})" if name else type(each).__name__
        for name, each in module.named_modules()
        if computes_by_mode(each)
    ]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        _log.warning(
            "%s is compiled in training mode, in which these compute otherwise: %s%s. Call"
            " module.eval() for inference",
            type(module).__name__,
            ", ".join(found[:3]),
            more,
        )
