"""LitServe: an API whose workers are ready once the program has run."""

from typing import Any

import litserve
from fastapi import Request
from fastapi.responses import JSONResponse

from purevk.errors import InputError
from purevk.integrations.worker import Worker


class ProgramAPI(litserve.LitAPI):
    """`litserve.LitServer(ProgramAPI("model.pte", max_batch_size=8), accelerator="cpu").run()`.

    A request is JSON: inputs by name, without the batch dimension. `/health` answers 200 once all
    workers are ready. `worker` has the keywords of `Worker`, the others are those of `LitAPI`.
    """

    def __init__(self, file: str, worker: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.file, self.options = file, worker or {}

    def setup(self, device: str) -> None:
        self.worker = Worker(self.file, **self.options)

    # LitServe evaluates this type to find that the body is JSON, and passes what the body holds. An
    # HTTPException would fail the whole batch, so that the error is the answer of this request.
    def decode_request(self, request: Request) -> Any:
        try:
            return self.worker.sample(request)
        except InputError as error:
            return error

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, inputs: Any) -> Any:
        if self.max_batch_size == 1:
            return inputs if isinstance(inputs, InputError) else self.worker.batch([inputs])[0]
        good = [each for each in inputs if not isinstance(each, InputError)]
        outputs = iter(self.worker.batch(good) if good else ())
        return [each if isinstance(each, InputError) else next(outputs) for each in inputs]

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Any:
        if isinstance(output, InputError):
            return JSONResponse({"error": str(output)}, 400)
        return {name: each.tolist() for name, each in output.items()}
