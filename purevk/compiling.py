"""From a module or an exported program to a `Program`, with no file between: `purevk.compile`."""

from __future__ import annotations

from typing import Any, Callable, Sequence

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
    """Makes a module of torch ready to run on a Vulkan device.

    Args:
        model: a `torch.nn.Module` (put it into eval mode first) or a `torch.export.ExportedProgram`.
        example_inputs: what the module is traced with; not needed for an exported program.
        dynamic_shapes: as for `torch.export.export`.
        context: device to run on; None: the best one, or that of PUREVK_DEVICE.
        progress: called with (phase, done, total) during long work; None: a progress bar on a terminal.
        bounds: "grow" or "strict", as for `purevk.load`.

    Returns:
        A program with the one method "forward".

    Raises:
        UnsupportedProgramError: the model holds something that has no kernel and no CPU function.
    """
    from purevk.frontends.decompose import export
    from purevk.frontends.exported import read_exported

    exported = export(model, example_inputs, dynamic_shapes)
    name = type(model).__name__
    return Program(
        name, {"forward": lambda sizes: read_exported(exported, sizes)}, context or default_context(), progress,
        bounds=bounds,
    )
