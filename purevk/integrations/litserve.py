"""LitServe: an API whose workers are ready once the program has run."""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator
from typing import Annotated, Any

import litserve
from fastapi import Depends, Request
from fastapi.responses import Response

from purevk.errors import InputError
from purevk.integrations.http import Gate, answer, json_of
from purevk.integrations.worker import Worker

_gate = Gate()  # of this process


async def _body(request: Request) -> AsyncIterator[Any]:
    """What the JSON of a request holds, while it is answered."""
    async with json_of(request) as values:
        with _gate:
            yield values


class ProgramAPI(litserve.LitAPI):
    """`litserve.LitServer(ProgramAPI("model.pte", max_batch_size=8), accelerator="cpu").run()`.

    A request is JSON: inputs by name, without the batch dimension. `/health` answers 200 once all
    workers are ready. SIGTERM ends the server with its workers. `worker` has the keywords of
    `Worker`, the others are those of `LitAPI`.
    """

    def __init__(self, file: str, worker: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.file, self.options = file, worker or {}

    def pre_setup(self, *args: Any, **options: Any) -> None:
        """Runs in the process of the server."""
        super().pre_setup(*args, **options)
        if threading.current_thread() is threading.main_thread():
            _end_by_sigterm()

    def setup(self, device: str) -> None:
        self.worker = Worker(self.file, **self.options)
        _ = self.worker.batch_bounds  # raises InputError if samples cannot be batched

    # LitServe evaluates this type. An HTTPException would fail the whole batch, so that the error is
    # the answer of this request.
    def decode_request(self, request: Annotated[Any, Depends(_body)]) -> Any:
        try:
            return self.worker.sample(request)
        except InputError as error:
            return error

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, inputs: Any) -> Any:
        if self.max_batch_size == 1:
            return inputs if isinstance(inputs, InputError) else self.worker.batch([inputs])[0]
        samples = [sample for sample in inputs if not isinstance(sample, InputError)]
        results = iter(self.worker.batch(samples))
        return [error if isinstance(error, InputError) else next(results) for error in inputs]

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Response:
        return answer(output)


def _end_by_sigterm() -> None:
    """SIGTERM ends this process as Ctrl-C does, which LitServe cleans up after. By itself it would
    end this process only, and the processes of workers would stay."""
    server = os.getpid()

    def interrupt(number: int, frame: Any) -> None:
        if os.getpid() == server:
            raise KeyboardInterrupt
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork has inherited this handler
        os.kill(os.getpid(), signal.SIGTERM)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, interrupt)
        atexit.register(_end_children)


def _end_children() -> None:
    """Ends workers that still start: the exit of the interpreter would wait for them."""
    for process in multiprocessing.active_children():
        process.terminate()
