"""KServe's model server: the Open Inference Protocol (version 2), over REST and gRPC."""

import asyncio
import uuid
from typing import Any

import kserve
import numpy as np
from kserve.utils.numpy_codec import from_np_dtype
from prometheus_client import REGISTRY

from purevk.integrations.worker import Worker
from purevk.program.specs import ArgumentSpec


class ProgramModel(kserve.Model):
    """`kserve.ModelServer().start([ProgramModel("model", "model.pte")])`.

    The tensors of a request have the names of `Program.inputs`, and whole batches as sizes.
    `/v2/models/model/ready` answers 200 once the program has run. `/metrics` has the server's
    counters and those of the worker. The options are those of `Worker`.
    """

    def __init__(self, name: str, file: str, **options: Any) -> None:
        super().__init__(name)
        self.file, self.options = file, options
        self.load()

    def load(self) -> bool:
        self.worker = Worker(self.file, **self.options)
        REGISTRY.register(self.worker)
        self.ready = True
        return True

    def get_input_types(self) -> list[dict[str, Any]]:
        return [_metadata(spec) for spec in self.worker.program.inputs]

    def get_output_types(self) -> list[dict[str, Any]]:
        return [_metadata(spec) for spec in self.worker.program.outputs]

    async def predict(self, payload: Any, *_: Any, **__: Any) -> Any:
        try:
            given = {each.name: each.as_numpy() for each in payload.inputs}
            arguments = self.worker.arguments(given, only=True)
            outputs = await asyncio.to_thread(self.worker.forward, *arguments)
        except ValueError as error:  # InputError, or data that is not as long as its shape says
            raise kserve.errors.InvalidInput(str(error)) from error
        answers = []
        for spec, array in zip(self.worker.program.outputs, outputs, strict=True):
            kind = from_np_dtype(array.dtype)
            answers.append(kserve.InferOutput(spec.name, list(array.shape), kind))
            answers[-1].set_data_from_numpy(array, binary_data=payload.from_grpc)
        return kserve.InferResponse(payload.id or str(uuid.uuid4()), self.name, answers)


def _metadata(spec: ArgumentSpec) -> dict[str, Any]:
    sizes = [size if isinstance(size, int) else -1 for size in spec.sizes]
    return {"name": spec.name, "datatype": from_np_dtype(np.dtype(spec.dtype)), "shape": sizes}
