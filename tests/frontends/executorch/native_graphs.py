"""Files of ExecuTorch's native backend with graphs that `to_native` does not write."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from executorch.backends.native.serialization import graph_serialize as serialize
from executorch.backends.native.serialization import schema
from executorch.exir._serialize import _ptn

from purevk.pte.native import PROGRAM, TENSORS


def tensor_argument(name: str) -> Any:
    return argument(schema.TensorArg(name=name))


def argument(value: Any, mutated: bool = False) -> Any:
    return schema.NamedArgument(name="", arg=schema.Argument(value=value), mutated=mutated)


def call(name: str, target: str, inputs: list[Any], alias: str | None = None) -> Any:
    return schema.Node(
        name=name,
        op_kind=schema.OpKind.CALL_FUNCTION,
        target=target,
        inputs=inputs,
        outputs=[schema.Output(name=name, alias_of=alias)],
    )


def tensor_meta(dtype: str, sizes: Sequence[int | tuple[int, int]], quant: Any = None) -> Any:
    """Of `schema.ScalarType.DTYPE`; a size with bounds is a pair."""
    dims = [schema.Dim(*(size if isinstance(size, tuple) else (size, size))) for size in sizes]
    code = schema.ScalarType[dtype]
    spec = None if quant is None else schema.QuantSpec(scheme=quant)
    return schema.TensorMeta(dtype=code, sizes=dims, dim_order=list(range(len(dims))), quant=spec)


def native_graph(
    nodes: list[Any],
    inputs: list[str],
    outputs: list[str],
    *names: str,
    metas: Mapping[str, Any] | None = None,
) -> Any:
    """A graph whose values are float32 [3], but for those in `metas`."""
    metas = {name: tensor_meta("FLOAT", [3]) for name in (*inputs, *outputs, *names)} | {
        **(metas or {})
    }
    values = [schema.TensorValue(name=name, meta=meta) for name, meta in metas.items()]
    return schema.Graph(nodes=nodes, inputs=inputs, outputs=outputs, tensor_values=values)


def native_file(
    graph: Any, version: str = "1", tensors: Mapping[str, Any] | None = None, **more: Any
) -> bytes:
    """A file of one method; `tensors` of torch, by their keys."""
    method = schema.Method(name="forward", graph=graph, **more)
    program = schema.Program(version=version, methods=[method])
    members = {PROGRAM: serialize._compile_to_bytes(program)}
    if tensors:
        stream = io.BytesIO()
        _ptn._write_safetensors(stream, dict(tensors))
        members[TENSORS] = stream.getvalue()
    return zipped(members)


def zipped(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()
