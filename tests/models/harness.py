"""The reference models as files, exported once a checkout, and how close their outputs are to eager
torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.export import export_pte, exporters_installed, file_stem, load_samples
from tests.models.zoo import CASES

FOLDER = Path(__file__).parents[2] / "build" / "models"
"""Where exports are kept: the folder that the demo and the benchmarks use too."""

# Exports that take more than some seconds. They, and what is slow to run, are left out of the fast
# tier.
QUICK = frozenset(
    {
        ("mobilenet_v2", "fp32"),
        ("encoder2", "fp32"),
        ("decoder", "fp32"),
        ("fallback_cumsum", "fp32"),
    }
)

Samples = Sequence[tuple[list[np.ndarray], list[np.ndarray]]]


def exported(name: str, variant: str = "fp32") -> Path:
    """The path of an exported model. It is exported on first use, by one process at a time; skips
    without executorch."""
    path = FOLDER / f"{file_stem(name, variant)}.pte"
    if not exporters_installed() and not path.exists():
        pytest.skip(f"{path.name} is not exported yet, and torch or executorch is not installed")
    from filelock import FileLock

    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        return export_pte(name, variant, FOLDER)


def samples_of(path: Path) -> Samples:
    """(inputs, eager outputs in float32) of each recorded sample."""
    return load_samples(path)


def parameters(
    names: Sequence[str] = tuple(CASES), variants: Sequence[str] = ("fp32", "fp16")
) -> list[Any]:
    """`pytest.param(name, variant)` for each, marked by what it takes."""
    return [
        pytest.param(
            name,
            variant,
            id=f"{name}-{variant}",
            marks=() if (name, variant) in QUICK else (pytest.mark.slow,),
        )
        for name in names
        for variant in variants
    ]


@dataclass(frozen=True)
class Distance:
    """How far outputs are from a reference: `error` is the largest difference relative to the
    reference's largest value, `cosine` the cosine similarity of all elements."""

    error: float
    cosine: float


def distance(actual: Any, expected: Any) -> Distance:
    """The distance of two tensors. Fails if shapes differ or something is not finite."""
    have, want = np.asarray(actual), np.asarray(expected)
    assert have.shape == want.shape
    assert np.isfinite(have).all()
    have, want = have.astype(np.float64).ravel(), want.astype(np.float64).ravel()
    norms = float(np.linalg.norm(have) * np.linalg.norm(want))
    return Distance(
        float(np.abs(have - want).max() / np.abs(want).max()), float(have @ want) / norms
    )


def worst(distances: Sequence[Distance]) -> Distance:
    """The largest error and the least cosine of several."""
    return Distance(max(one.error for one in distances), min(one.cosine for one in distances))


def outputs(result: Any) -> tuple[Any, ...]:
    """The outputs of a call as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def run_samples(program: Any, samples: Samples) -> Distance:
    """Runs every sample in order and gives the distance of the worst output from eager torch's."""
    found = []
    for inputs, expected in samples:
        made = outputs(program.forward(*inputs))
        assert len(made) == len(expected)
        assert all(
            isinstance(one, np.ndarray) and one.dtype == two.dtype
            for one, two in zip(made, expected)
        )
        found += [distance(one, two) for one, two in zip(made, expected)]
    return worst(found)


def eager_half(name: str, samples: Samples) -> Distance:
    """How far eager torch in half (weights and activations) is from eager torch in float32 on the
    recorded samples."""
    import torch

    module = CASES[name].build().module.half()
    found = []
    with torch.no_grad():
        for inputs, expected in samples:
            tensors = [torch.from_numpy(array) for array in inputs]
            result = module(
                *[tensor.half() if tensor.is_floating_point() else tensor for tensor in tensors]
            )
            found += [
                distance(one.float().numpy(), two) for one, two in zip(outputs(result), expected)
            ]
    return worst(found)
