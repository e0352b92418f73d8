"""Ray Serve: a deployment. `ray.py` gives it as `Deployment`."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from starlette.exceptions import HTTPException
from starlette.requests import Request

from purevk.errors import InputError
from purevk.integrations.http import MAX_WAITING, answer, error_response, json_of
from purevk.integrations.ray_device import assigned_device
from purevk.integrations.worker import Worker


@serve.deployment(max_ongoing_requests=MAX_WAITING, max_queued_requests=MAX_WAITING)
class Deployment:
    """`serve.run(Deployment.bind("model.pte"))`. A request is JSON, inputs by name, without the
    batch dimension. A replica is ready once the worker is. `Deployment.options(...)` changes the
    limits of requests in work and in the queue."""

    def __init__(self, file: str, max_batch_size: int = 8, **options: Any) -> None:
        self.worker = Worker(file, **{"device": assigned_device(), **options})
        _ = self.worker.batch_bounds  # raises InputError if samples cannot be batched
        self.run.set_max_batch_size(max_batch_size)

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.01)
    async def run(self, samples: list[list[Any]]) -> list[Any]:
        return await asyncio.to_thread(self.worker.batch, samples)

    async def __call__(self, request: Request) -> Any:
        try:
            async with json_of(request) as values:
                return answer(await self.run(self.worker.sample(values)))
        except HTTPException as error:
            return error_response(error)
        except InputError as error:
            return answer(error)
