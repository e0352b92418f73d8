"""From modules or exported programs to a `Program`, with no file between: `purevk.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from purevk.errors import InputError
from purevk.graph.context import Context, default_context
from purevk.program import Program


def compile(
    model: Any,
    example_inputs: Sequence[Any] = (),
    dynamic_shapes: Any = None,
    *,
    context: Context | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    bounds: str = "grow",
) -> Program:
    """Makes modules of torch ready to run on a Vulkan device.

    Args:
        model: a `torch.nn.Module` (put it into eval mode first), a `torch.export.ExportedProgram`,
            or, for a program of several methods, a mapping from their names to such, or to tuples
            (module, example inputs) or (module, example inputs, dynamic shapes). Methods share the
            weights and buffers that are the same tensors: a buffer that one method writes is seen
            by all.
        example_inputs: what the module is traced with; not needed for an exported program.
        dynamic_shapes: as for `torch.export.export`.
        context: device to run on; None: the best one, or that of PUREVK_DEVICE.
        progress: called with (phase, done, total) during long work; None: a progress bar on a
            terminal.
        bounds: "grow" or "strict", as for `purevk.load`.

    Returns:
        A program with the one method "forward", or with those of the mapping.

    Raises:
        UnsupportedProgramError: the model holds something that has no kernel and no CPU function.
        InputError: `model` is nothing of the above.
    """
    from purevk.frontends.exported import mutated_buffers, read_exported

    given = (
        dict(model)
        if isinstance(model, Mapping)
        else {"forward": (model, example_inputs, dynamic_shapes)}
    )
    exported = {name: _exported(name, each) for name, each in given.items()}
    mutable = frozenset().union(*map(mutated_buffers, exported.values()))
    sources = {
        name: (lambda sizes, name=name, each=each: read_exported(each, sizes, name, mutable))
        for name, each in exported.items()
    }
    label = "+".join(given) if isinstance(model, Mapping) else type(model).__name__
    return Program(label, sources, context or default_context(), progress, bounds=bounds)


def _exported(name: str, given: Any) -> Any:
    """The decomposed program of one method."""
    import torch

    from purevk.frontends.decompose import export

    model, inputs, dynamic_shapes = (
        (*given, None, None)[:3] if isinstance(given, tuple) else (given, None, None)
    )
    if not isinstance(model, torch.export.ExportedProgram) and (
        not isinstance(model, torch.nn.Module) or inputs is None
    ):
        raise InputError(
            f"method {name!r} is made of {type(model).__name__}",
            where="purevk.compile",
            why="an ExportedProgram, or a module with example inputs, is expected",
            next='purevk.compile(module, inputs), or purevk.compile({"name": (module, inputs), ...})',
        )
    return export(model, inputs or (), dynamic_shapes)
