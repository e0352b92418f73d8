"""KServe's model server: the Open Inference Protocol (version 2), over REST and gRPC."""

import asyncio
import reprlib
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import kserve
import numpy as np
from kserve import model_server
from kserve.logging import logger, trace_logger
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc import grpc_predict_v2_pb2_grpc as services
from kserve.protocol.grpc.interceptors import ExceptionToStatusInterceptor
from kserve.protocol.grpc.server import GRPCServer
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.model_repository_extension import ModelRepositoryExtension
from kserve.utils.numpy_codec import from_np_dtype, to_np_dtype
from prometheus_client import REGISTRY

from purevk.errors import InputError
from purevk.integrations.http import MAX_BODY, MAX_WAITING, Limits
from purevk.integrations.values import read_values, request_dtype
from purevk.integrations.worker import CLIENT_ERRORS, Worker
from purevk.plain_text import PrintableRecords
from purevk.program.specs import ArgumentSpec


class ProgramModel(kserve.Model):
    """`Server().start([ProgramModel("model", "model.pte")])`.

    The tensors of a request have the names of `Program.inputs`, and whole batches as sizes; those of
    an answer have the names of `Program.outputs`. bfloat16 is FP32.
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
        return _metadata(self.worker.inputs)

    def get_output_types(self) -> list[dict[str, Any]]:
        return _metadata(self.worker.outputs)

    async def predict(self, payload: Any, *_: Any, **__: Any) -> Any:
        if not isinstance(payload, kserve.InferRequest):
            raise kserve.errors.InvalidInput(
                "a request of version 2 of the protocol is expected: POST"
                f" /v2/models/{self.name}/infer"
            )
        try:
            _check_descriptions(payload)
            names = self._output_names(payload)
            arguments = self._arguments(payload)
            arrays = await asyncio.to_thread(self.worker.forward, *arguments)
        except CLIENT_ERRORS as error:
            raise kserve.errors.InvalidInput(str(error)) from error
        outputs = []
        for name in filter(arrays.__contains__, names):
            kind = from_np_dtype(arrays[name].dtype)
            outputs.append(kserve.InferOutput(name, list(arrays[name].shape), kind))
            outputs[-1].set_data_from_numpy(arrays[name], binary_data=payload.from_grpc)
        return kserve.InferResponse(
            payload.id or str(uuid.uuid4()),
            self.name,
            outputs,
            use_binary_outputs=payload.use_binary_outputs,
            requested_outputs=None if payload.from_grpc else payload.request_outputs,
        )

    def _output_names(self, payload: kserve.InferRequest) -> list[str]:
        """The outputs that a request asks for; all if it names none."""
        names = [spec.name for spec in self.worker.outputs]
        requested = [output.name for output in payload.request_outputs or ()]
        for name in requested:
            if name not in names:
                raise InputError(f"there is no output {name}", why=f"the outputs are {names}")
        return requested or names

    def _arguments(self, payload: kserve.InferRequest) -> list[Any]:
        """The inputs of a call, in order."""
        arrays: dict[str, Any] = {}
        for tensor in payload.inputs:
            if tensor.name in arrays:
                raise InputError(f"the input {tensor.name} is there twice")
            arrays[tensor.name] = _array(tensor)
        arguments = self.worker.arguments(arrays, only=True)
        return [
            argument.item()
            if spec.kind != "tensor" and getattr(argument, "size", 0) == 1
            else argument
            for spec, argument in zip(self.worker.inputs, arguments)
        ]


def _check_descriptions(payload: kserve.InferRequest) -> None:
    """Raises `InputError` for names and parameters of other types. KServe checks none of those that
    come with binary data."""
    tensors = (*payload.inputs, *(payload.request_outputs or ()))
    for each in tensors:
        if not isinstance(each.name, str):
            raise InputError(f"the name of a tensor is {reprlib.repr(each.name)}, and no text")
    for each in () if payload.from_grpc else (payload, *tensors):
        if not isinstance(each.parameters or {}, dict):
            raise InputError(f"parameters are {reprlib.repr(each.parameters)}, and no object")


def _array(tensor: kserve.InferInput) -> np.ndarray:
    """An input of a request. KServe itself reads null as NaN, texts as numbers, and cuts floats to
    integers."""
    dtype = to_np_dtype(tensor.datatype)
    if dtype is None or dtype is np.object_:
        raise InputError(f"{tensor.name} has the datatype {tensor.datatype}")
    try:
        if min(tensor.shape, default=0) < 0:
            raise ValueError("a size is negative")
        if tensor._raw_data is None:
            array = read_values(tensor.name, tensor.data, np.dtype(dtype))
        else:
            array = np.frombuffer(tensor._raw_data, dtype)
        return np.reshape(array, tensor.shape)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{tensor.name} has not the shape {tensor.shape}", why=str(error)
        ) from None


def _metadata(specs: list[ArgumentSpec]) -> list[dict[str, Any]]:
    tensors = []
    for spec in specs:
        if spec.kind == "integer":
            tensors.append({"name": spec.name, "datatype": "INT64", "shape": [1]})
        elif spec.kind == "tensor":
            sizes = [size if isinstance(size, int) else -1 for size in spec.sizes]
            kind = from_np_dtype(request_dtype(spec.dtype))
            tensors.append({"name": spec.name, "datatype": kind, "shape": sizes})
    return tensors


class Server(kserve.ModelServer):
    """KServe's server at one address and with limits. No client can load or unload a model.

    Args:
        host: address to listen at, for REST and gRPC.
        http_port, grpc_port: of REST and gRPC.
        max_body: bytes of the largest request; larger ones are refused (413).
        max_waiting: requests in work at a time; further ones are refused (503).
        options: those of `kserve.ModelServer`.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        http_port: int = 8080,
        grpc_port: int = 8081,
        max_body: int = MAX_BODY,
        max_waiting: int = MAX_WAITING,
        **options: Any,
    ) -> None:
        super().__init__(http_port=http_port, grpc_port=grpc_port, enable_grpc=False, **options)
        self.host, self.max_body, self.max_waiting = host, max_body, max_waiting
        self.dataplane = _DataPlane(model_registry=self.registered_models)
        self.model_repository_extension = _FixedModels(model_registry=self.registered_models)
        for log in (logger, trace_logger):  # they name models as clients do
            log.addFilter(PrintableRecords())
        model_server.app.add_middleware(Limits, max_body=max_body, max_waiting=max_waiting)

    async def _serve(self) -> None:
        self._rest_server.config.host = self.host
        self._grpc_server = _GRPCServer(self)
        self.servers.append(self._grpc_server.start())
        await super()._serve()


class _DataPlane(DataPlane):
    """Answers a request that cannot be read with 400. KServe answers some of them with 500."""

    def decode(self, *args: Any, **options: Any) -> Any:
        try:
            return super().decode(*args, **options)
        except Exception as error:  # whatever the bytes of a client cause
            if isinstance(error, kserve.errors.InvalidInput):
                raise
            text = f"the request cannot be read: {type(error).__name__}: {error}"
            raise kserve.errors.InvalidInput(text) from error


class _FixedModels(ModelRepositoryExtension):
    """Clients see the models, and do not change which there are."""

    async def load(self, model_name: str) -> None:
        raise kserve.errors.InvalidInput("this server does not load or unload models")

    unload = load


class _GRPCServer(GRPCServer):
    """KServe's gRPC service, at one address and with limits."""

    def __init__(self, server: Server) -> None:
        super().__init__(
            server.grpc_port,
            server.dataplane,
            server.model_repository_extension,
            kwargs={},
            grace_period=server.grace_period,
        )
        self._of = server

    async def start(self) -> None:
        size = self._of.max_body
        self._server = grpc.aio.server(
            ThreadPoolExecutor(self._of.max_threads),
            interceptors=(ExceptionToStatusInterceptor(),),
            options=[("grpc.max_receive_message_length", size)],
            maximum_concurrent_rpcs=self._of.max_waiting,
        )
        servicer = InferenceServicer(self._data_plane, self._model_repository_extension)
        services.add_GRPCInferenceServiceServicer_to_server(servicer, self._server)
        host = f"[{self._of.host}]" if ":" in self._of.host else self._of.host
        self._server.add_insecure_port(f"{host}:{self._port}")
        await self._server.start()
        await self._server.wait_for_termination()
