"""What to do about an error of `torch.export`: notes that purevk adds to it."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def explain(error: Exception, name: str, module: Any, fixed: Sequence[str]) -> None:
    """Adds to an error of `torch.export` what was exported, the line of the user's code, and another
    way. Python 3.10 has no notes.

    Args:
        fixed: the declared dims along which an example has a size of 0 or 1, as text.
    """
    if not hasattr(error, "add_note"):
        return
    line = _user_line(error)
    parts = [
        f"torch.export could not export {type(module).__name__} for the method {name!r}"
        f"{f', at {line}' if line else ''}.",
        *_cures(error, module, line, fixed),
    ]
    error.add_note(" ".join(parts))


_COMPILE = (
    'torch.compile(module, backend="purevk") runs what torch can trace of a module, and the rest in '
    "Python."
)


_SHAPES = (
    "Check dynamic_shapes: it has an entry for each argument of forward, in their order or by their "
    'names, such as {"x": {0: torch.export.Dim("batch")}}, with dims that the arguments have; the '
    "sizes of the example inputs lie within the bounds, and the module must not fix a size that is "
    "dynamic."
)


_QUANTIZED = (
    "Weights that torch.ao.quantization packs belong to the CPU. Quantize the module with torchao: "
    "quantize_(module, config) of torchao.quantization, or prepare_pt2e and convert_pt2e."
)


def _cures(error: Exception, module: Any, line: str, fixed: Sequence[str]) -> Iterator[str]:
    """What to do about an error of `torch.export`, raised in a line of the user's code or in none."""
    kind, text = type(error).__name__, str(error)
    weights = (*module.parameters(), *module.buffers())
    if "meta" in text and any(weight.is_meta for weight in weights):
        yield "Weights of the module are on the meta device: load them, or use purevk.plan."
    elif "meta" in text and "device" in text.lower():
        yield "A tensor is on the meta device, which has no elements: pass tensors of the CPU."
    elif "torch.classes.quantized" in text:
        yield _QUANTIZED
    elif _raised_in(error, "_functorch", "eager_transforms.py"):
        yield "torch.export does not follow the derivatives of torch.func."
        yield _COMPILE
    elif kind == "GuardOnDataDependentSymNode" and _raised_in(error, "distributions", ""):
        yield (
            "torch.distributions checks the elements of its arguments. Pass validate_args=False, or "
            "call torch.distributions.Distribution.set_default_validate_args(False)."
        )
    elif kind == "GuardOnDataDependentSymNode":
        yield (
            "The elements of a tensor decide there what Python does. An exported program needs "
            "torch.where or torch.cond for that."
        )
        yield _COMPILE
    elif is_of_shapes(error):
        if fixed and fixes_sizes(error):
            yield (
                f"In the example, {' and '.join(fixed)}, and torch.export fixes sizes of 0 and 1. Take "
                "an example of 2 or more there. If that fails too, its error says what the module does "
                "not take."
            )
        else:
            yield _SHAPES
        if "satisfy the generated guard" in text:
            yield (
                "The module decides by this size, and not every size within the bounds gives the same "
                "answer. torch.export.Dim.DYNAMIC in place of the Dim exports what the example needs, "
                "and purevk exports the module again for a call with another answer."
            )
        elif fixes_sizes(error) and not fixed:
            yield (
                "With torch.export.Dim.AUTO in place of the Dim, purevk exports the module again for "
                "each size that it fixes."
            )
    elif "not a known type" in text or "Unsupported input type" in text:
        yield (
            "The arguments and results of forward may be tensors, numbers, and tuples, lists and dicts "
            "of them. Wrap the module in one that takes and returns these. For a dataclass, call "
            "torch.export.register_dataclass(TheClass) once."
        )
        if "EncoderDecoderCache" in text:
            yield (
                "With use_cache=False, a model with an encoder returns no cache. docs/state.md has a "
                "module that keeps the cache on the device."
            )
    elif ".numpy()" in text:
        yield "torch.export follows operators of torch, not those of numpy. Use torch's there."
        yield _COMPILE
    elif "Expected input.size(2) == n_fft" in text:
        yield (
            "torch.export takes torch.istft with an even n_fft alone. Take an even one, or write the "
            "inverse with torch.fft.irfft(x, n=n_fft) and torch.nn.functional.fold."
        )
        yield _COMPILE
    elif isinstance(error, TypeError) and not line:
        yield "Check the example inputs: one is needed for each argument of forward."
    elif not line or type(error).__module__ == "builtins":
        yield f"Check first that the module itself runs: module(*inputs). If it does, {_COMPILE}"
    else:
        yield _COMPILE


def fixes_sizes(error: Exception) -> bool:
    """Whether `torch.export` fixed a size that `dynamic_shapes` declare as dynamic."""
    return "specialized" in str(error) and is_of_shapes(error)


def decides_by_elements(error: Exception) -> bool:
    """Whether `torch.export` refused a decision of `forward` that follows from elements."""
    return type(error).__name__ == "GuardOnDataDependentSymNode"


def is_of_shapes(error: Exception) -> bool:
    """Whether `torch.export` refused `dynamic_shapes`: their form, or what they ask for."""
    line = _user_line(error)
    kind, text = type(error).__name__, str(error)
    return (
        kind == "ConstraintViolationError"
        or (kind == "AssertionError" and "expected dynamic_shapes" in text)
        or (kind == "UserError" and ("dynamic_shapes" in text or "Constraints violated" in text))
        or (kind == "ValueError" and "user-specified range" in text)
        or (kind == "IndexError" and not line and _raised_in(error, "_export", "non_strict_utils"))
        or (
            kind == "TypeError"
            and "argument" not in text  # of the example inputs
            and not line
            and _raised_in(error, "export", "dynamic_shapes")
        )
    )


def _raised_in(error: Exception, *parts: str) -> bool:
    """Whether a line of a file or folder of torch's package was running when an error was raised."""
    import torch

    path = os.path.join(os.path.dirname(torch.__file__), *parts)
    return any(
        frame.filename.startswith(path) for frame in traceback.extract_tb(error.__traceback__)
    )


def _user_line(error: Exception) -> str:
    """The innermost line in the traceback that belongs neither to torch, nor to purevk, nor to
    Python's library. Empty if there is none."""
    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if os.path.isfile(frame.filename) and not frame.filename.startswith(_not_of_the_user()):
            line = f"{frame.filename}:{frame.lineno}"
    return line


@functools.cache
def _not_of_the_user() -> tuple[str, ...]:
    import torch

    packages = [str(Path(__file__).parents[1]), os.path.dirname(torch.__file__)]
    library = os.path.dirname(os.__file__)
    modules = [entry.path for entry in os.scandir(library) if entry.name != "site-packages"]
    return tuple(os.path.join(package, "") for package in packages) + tuple(modules)
