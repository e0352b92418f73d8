"""Models of the gallery as files: a .pvk, and an .npz with inputs and what eager torch makes of
them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# A model of each kind of network; with them come most templates of kernels.
NAMES = (
    "mobilenet_v2", "mobilenet_v3_small", "resnet18", "convnext_atto", "swin", "vit", "unet", "yolo_head", "lstm",
    "transformer", "bert", "gpt2", "llama", "whisper_encoder", "selective_scan", "graph_network", "wavenet", "detr",
    "segformer", "mixtral",
)  # fmt: skip
TOLERANCE = 1e-4  # of float32, relative to the largest output; the gallery's own where it is larger


def write_models(names: Iterable[str], folder: Path, half: bool = False) -> dict[str, str]:
    """Writes the models that the folder does not have.

    Args:
        names: of the gallery.
        folder: where to. A model "x" becomes `x.pvk` and `x.npz`; the latter has no outputs if
            `half`.
        half: models in float16.

    Returns:
        Why a model could not be written, by its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = folder / "not_exported.json"
    reasons: dict[str, str] = json.loads(failed.read_text()) if failed.is_file() else {}
    for name in names:
        if (folder / f"{name}.npz").is_file() or name in reasons:
            continue
        try:
            _write(name, folder, half)
        except Exception as error:  # of the model's library, torch.export or purevk
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            failed.write_text(json.dumps(reasons, indent=1), encoding="utf-8")
        print(f"{name}: {reasons.get(name, 'written')}", file=sys.stderr, flush=True)
    return {name: reason for name, reason in reasons.items() if name in set(names)}


def tolerance_of(name: str) -> float:
    """The error that a model of the gallery may have, relative to its largest output."""
    from tests.models.gallery import MODELS

    return max(TOLERANCE, MODELS[name].tolerance)


def _write(name: str, folder: Path, half: bool) -> None:
    import numpy
    import torch
    from torch.utils import _pytree

    from purevk.frontends.saved import write_program
    from purevk.frontends.torch.decompose import decompose
    from purevk.frontends.torch.exported import read_exported
    from tests.models.gallery import MODELS

    def cast(x: Any) -> Any:
        return x.half() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    warnings.simplefilter("ignore")
    built = MODELS[name].build()
    module = built.module.half() if half else built.module
    inputs = _pytree.tree_map(cast, built.inputs) if half else built.inputs
    with torch.no_grad():
        exported = torch.export.export(
            module, inputs, dynamic_shapes=built.dynamic_shapes, strict=False
        )
        outputs = [] if half else _tensors(module(*inputs))
    program = decompose(exported)
    arrays = {f"input{i}": x.numpy() for i, x in enumerate(_tensors(inputs))}
    counts = {"inputs": numpy.array(len(arrays)), "outputs": numpy.array(len(outputs))}
    arrays.update((f"output{i}", x.detach().numpy()) for i, x in enumerate(outputs))
    write_program(
        folder / f"{name}.pvk",
        name,
        {"forward": lambda sizes: read_exported(program, sizes)},
        "bench.drivers",
    )
    numpy.savez(folder / f"{name}.npz", **arrays, **counts)


def _tensors(values: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
