"""Ray: a callable class for `Dataset.map_batches`, and a deployment of Ray Serve, `Deployment`."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray import get_runtime_context

from purevk.errors import InputError
from purevk.integrations.worker import Worker


def assigned_device() -> int | None:
    """The device of the GPU that Ray assigned to this process. Ray counts GPUs as
    `purevk.devices()` does, if both see the same ones. None: Ray assigned none."""
    ids = get_runtime_context().get_accelerator_ids().get("GPU", [])
    if len(ids) > 1 or any(not each.isdecimal() for each in ids):
        raise InputError(f"Ray assigned the GPUs {ids}", next="ask for one, or name the device")
    return int(ids[0]) if ids else None


class MapBatches:
    """`dataset.map_batches(MapBatches, fn_constructor_args=("model.pte",), batch_size=32)` adds the
    outputs as columns. With `keep_inputs=False` the columns of the inputs go, which Ray would copy to
    its object store otherwise. The other keywords are those of `Worker`."""

    def __init__(self, file: str, *, keep_inputs: bool = True, **options: Any) -> None:
        self.keep_inputs = keep_inputs
        self.worker = Worker(file, **{"device": assigned_device(), **options})

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self.worker.columns(batch, keep_inputs=self.keep_inputs)


def __getattr__(name: str) -> Any:
    if name == "Deployment":  # `ray[data]` has not what Ray Serve needs
        from purevk.integrations.ray_serve import Deployment

        return Deployment
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
