"""Ray: a callable class for `Dataset.map_batches`, and a deployment of Ray Serve, `Deployment`."""

from __future__ import annotations

from typing import Any

import numpy as np

from purevk.integrations.ray_device import assigned_device
from purevk.integrations.worker import Worker


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
