"""Triton Inference Server: the `model.py` of its Python backend is one line,
`from purevk.integrations.triton import TritonPythonModel`. The program beside it is
`model.pte`, `model.ptn`, `model.pvk` or `model.pt2`."""

from __future__ import annotations

import os
from typing import Any

import triton_python_backend_utils as pb_utils

from purevk.errors import PurevkError
from purevk.integrations.worker import Worker


class TritonPythonModel:
    """Triton calls `initialize` once for each instance, and reports the model as ready after it.
    The names of tensors in config.pbtxt are those of `Program.inputs` and `Program.outputs`."""

    def initialize(self, args: dict[str, str]) -> None:
        folder = os.path.join(args["model_repository"], args["model_version"])
        on_gpu = args["model_instance_kind"] == "GPU"
        device = int(args["model_instance_device_id"]) if on_gpu else None
        files = [
            os.path.join(folder, f"model{suffix}") for suffix in (".pte", ".ptn", ".pvk", ".pt2")
        ]
        file = next(filter(os.path.exists, files), files[0])
        self.worker = Worker(file, device=device)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        program = self.worker.program
        found = {s.name: pb_utils.get_input_tensor_by_name(request, s.name) for s in program.inputs}
        given = {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}
        try:
            outputs = self.worker.forward(*self.worker.arguments(given))
        except PurevkError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor(*named) for named in outputs.items()])

    def finalize(self) -> None:
        self.worker.close()
