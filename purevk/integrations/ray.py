"""Ray: a callable class for `Dataset.map_batches`, and a deployment of Ray Serve."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from ray import get_runtime_context, serve
from starlette.requests import Request
from starlette.responses import JSONResponse

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


@serve.deployment
class Deployment:
    """`serve.run(Deployment.bind("model.pte"))`. A request is JSON, inputs by name, without the
    batch dimension. A replica is ready once the worker is."""

    def __init__(self, file: str, max_batch_size: int = 8, **options: Any) -> None:
        self.worker = Worker(file, **{"device": assigned_device(), **options})
        self.run.set_max_batch_size(max_batch_size)

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.01)
    async def run(self, samples: list[list[np.ndarray]]) -> list[dict[str, np.ndarray]]:
        return await asyncio.to_thread(self.worker.batch, samples)

    async def __call__(self, request: Request) -> Any:
        try:
            sample = self.worker.sample(await request.json())
        except (InputError, ValueError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return {name: each.tolist() for name, each in (await self.run(sample)).items()}
