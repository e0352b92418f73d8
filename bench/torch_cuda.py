"""What a user of torch would pick on a GPU: eager torch, its CUDA graph, and `torch.compile` captured
as a CUDA graph, for networks of images with channels last too."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch

from bench.timing import (
    Budget,
    Sampler,
    captured,
    error_of,
    of_events,
    reason_of,
    time_limit,
)

MODES = ("default", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Form:
    """One way to run a module.

    Attributes:
        name: of its column.
        compiled: by `torch.compile`.
        graph: captured as a CUDA graph.
        channels_last: weights and images of four dims have their channels last.
    """

    name: str
    compiled: bool = False
    graph: bool = True
    channels_last: bool = False


FORMS = (
    Form("eager", graph=False),
    Form("graph"),
    Form("graph, channels last", channels_last=True),
    Form("compiled", compiled=True),
    Form("compiled, channels last", compiled=True, channels_last=True),
)


def forms(images: bool, compile: bool = True) -> Iterator[Form]:
    """The forms that make sense: channels last only for images."""
    for form in FORMS:
        if (images or not form.channels_last) and (compile or not form.compiled):
            yield form


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that limit what compiling takes."""
    add = parser.add_argument
    add("--budget", type=float, default=1500.0, help="seconds; nothing more starts afterwards")
    add("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    add("--mode", choices=MODES, default="default", help="of torch.compile")
    add("--compile-seconds", type=float, default=180.0, help="the most for compiling a module")


def prepare(
    form: Form,
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    mode: str = "default",
    seconds: float = 300.0,
) -> tuple[Callable[[], Any], torch.Tensor]:
    """A call of the module on the CUDA device, without copies, and its result.

    Args:
        form: how to run it.
        module: on any device. It is copied, so that states of the original stay.
        inputs: on any device.
        mode: of `torch.compile`.
        seconds: the most for compiling. The call before it may take any time.

    Raises:
        TimeLimitError: compiling took too long.
    """
    module = copy.deepcopy(module).to("cuda")
    given = [each.to("cuda") for each in inputs]
    if form.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        given = [
            each.contiguous(memory_format=torch.channels_last) if each.ndim == 4 else each
            for each in given
        ]
    run: Callable[..., Any] = module
    with torch.no_grad():
        if form.compiled:
            torch._dynamo.reset()
            run = torch.compile(module, mode=mode, dynamic=False)
            with time_limit(seconds):
                run(*given)
                torch.cuda.synchronize()
        if form.graph:
            return captured(lambda: run(*given))

        def call() -> Any:
            with torch.no_grad():
                return run(*given)

        return call, call()


class Contenders(NamedTuple):
    """By name of a form: what samples it, the error of its output, why it is not measured."""

    samplers: dict[str, Sampler]
    errors: dict[str, float]
    why: dict[str, str]


def contenders(
    module: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    expected: numpy.ndarray,
    images: bool,
    options: argparse.Namespace,
    budget: Budget,
) -> Contenders:
    """All forms of a module.

    Args:
        module, inputs: as for `prepare`.
        expected: the right output.
        images: whether channels last makes sense.
        options: with those of `add_arguments`.
        budget: what is left for compiling.
    """
    found = Contenders({}, {}, {})
    for form in forms(images, options.compile):
        seconds = min(options.compile_seconds, budget.left)
        if form.compiled and seconds <= 0:
            found.why[form.name] = "no time was left to compile"
            continue
        try:
            call, result = prepare(form, module, inputs, options.mode, seconds)
            call()
            torch.cuda.synchronize()
            found.errors[form.name] = error_of(result.double().cpu(), expected)
            found.samplers[form.name] = of_events(call)
        except Exception as error:  # the others go on, and the table says what happened
            found.why[form.name] = reason_of(error)
    return found
