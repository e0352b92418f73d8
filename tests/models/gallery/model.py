"""What a model of the gallery is, and how its random weights are made fit for comparing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.models.zoo import Built

SEED = 20262


@dataclass(frozen=True)
class Model:
    """One model of the gallery.

    Attributes:
        name: on the command line and in the table.
        library: where its code comes from: "torchvision", "timm", "transformers", "torch.nn".
        about: what it is and what its input is, in a few words.
        build: makes it, with seeded random weights.
        tolerance: the error, relative to the largest output, that it may have.
    """

    name: str
    library: str
    about: str
    build: Callable[[], Built]
    tolerance: float = 1e-4


def seeded() -> Any:
    """A generator of torch for inputs and weights, after seeding torch itself."""
    import torch

    torch.manual_seed(SEED)
    return torch.Generator().manual_seed(SEED + 1)


def lively(module: Any, inputs: Sequence[Any] = ()) -> Any:
    """The module in eval mode, its weights such that a wrong or missing operator shows in the
    outputs.

    Parameters that are all ones or all zeros, which would hide a missing scale or bias, and all
    with one dim get noise. Given `inputs`, batch norms get the statistics of a batch of noise of
    their shape, so that activations stay near unit size.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED + 2)
    module.eval()
    for parameter in module.parameters():
        if parameter.dim() <= 1 or parameter.min() == parameter.max():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    if norms and inputs:
        for norm in norms:
            norm.momentum = None
            norm.reset_running_stats()
            norm.train()
        batch = [
            torch.randn(3, *x.shape[1:], generator=generator) if x.is_floating_point() else x
            for x in inputs
        ]
        with torch.no_grad():
            module(*batch)
    return module.eval()


def built(module: Any, *inputs: Any, calibrate: bool = True, **options: Any) -> Built:
    """The module made lively, with one sample."""
    return Built(lively(module, inputs if calibrate else ()), inputs, (inputs,), **options)


def first_of(module: Any, *keys: Any) -> Any:
    """A module that gives some results of another: entries by index, attributes by name; one, or a
    tuple of several."""
    import torch

    class Chosen(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *inputs: Any) -> Any:
            made = self.inner(*inputs)
            results = tuple(
                made[key] if isinstance(key, int) or isinstance(made, dict) else getattr(made, key)
                for key in keys
            )
            return results[0] if len(results) == 1 else results

    return Chosen(module)
