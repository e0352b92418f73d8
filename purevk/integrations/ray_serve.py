"""Ray Serve: a deployment. `ray.py` gives it as `Deployment`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from purevk.errors import InputError
from purevk.integrations.ray_device import assigned_device
from purevk.integrations.worker import Worker


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
