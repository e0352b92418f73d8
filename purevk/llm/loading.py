"""Loads language models: `purevk.llm.load` and `purevk.llm.plan`."""

from __future__ import annotations

import functools
import os

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError, UnsupportedProgramError
from purevk.frontends.reading import check_limits
from purevk.graph.context import Context
from purevk.graph.devices import choose_context
from purevk.ir import Graph, TensorType, Value
from purevk.llm.decoding import ChunkSize, Decoder, prompt_lengths
from purevk.llm.gguf import GgufFile
from purevk.llm.graphs import source_of
from purevk.llm.llama import Llama
from purevk.llm.model import Model
from purevk.llm.network import Network
from purevk.llm.plan import Plan, check_fits, plan_of
from purevk.program.program import Program

ARCHITECTURES = {"llama": Llama, "qwen2": Llama, "qwen3": Llama}
"""How to build graphs, by the value of `general.architecture`."""
DTYPES = {
    "float32": DType.float32,
    "float16": DType.float16,
    "bfloat16": DType.bfloat16,
}
DEFAULT_CONTEXT = 4096
MOST_ROWS, GPU_ROWS = 512, 2048  # tokens of a prompt in one submission; of GPUs


def load(
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    dtype: str = "auto",
    device: Context | int | str | None = None,
) -> Model:
    """Loads a language model from a GGUF file. Weights stay packed on the device.

    Args:
        path: of the file, or of the first part of a split one.
        context: tokens that the cache holds; None: as many as the model was trained with, 4096 at
            most.
        dtype: what is computed in, and what the cache holds: "float32", "float16" or "bfloat16".
            "auto" is float16 on GPUs that have it, else float32.
        device: as for `purevk.load`.

    Raises:
        FileFormatError: the file is damaged or no GGUF.
        UnsupportedProgramError: the architecture or the type of a tensor is not known.
        InputError: an argument is not accepted, or the model does not fit into the memory of the
            device. The error says the largest context that does.
        DeviceError: there is no such device.
        OSError: the file cannot be opened.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(
            f"dtype={dtype!r} is not known", why=f"auto, {', '.join(DTYPES)} are accepted"
        )
    file = GgufFile(path)
    try:
        chosen = choose_context(device, None)
        narrow = chosen.traits.has("storage_16bit") and chosen.traits.profile.has_fast_shared_memory
        computed = DTYPES["float16" if narrow else "float32"] if dtype == "auto" else DTYPES[dtype]
        return _model(file, chosen, context, computed)
    except BaseException:
        file.close()
        raise


def plan(
    path: str | os.PathLike[str], *, context: int | None = None, dtype: str = "float16"
) -> Plan:
    """The memory that a model needs on a device; nothing is loaded. Arguments and errors are those
    of `load`."""
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r} is not known", why=f"{', '.join(DTYPES)} are accepted")
    with GgufFile(path) as file:
        architecture, rows = _architecture(file, context)
        return plan_of(_step_graph(file, architecture, rows, DTYPES[dtype]), rows)


def _architecture(file: GgufFile, context: int | None) -> tuple[Llama, int]:
    """The architecture of a file, and the tokens that the cache is to hold."""
    name = file.value("general.architecture", str)
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UnsupportedProgramError(
            f"the architecture {name!r} is not known",
            where=file.name,
            why=f"known architectures: {', '.join(ARCHITECTURES)}",
            next="load the model with transformers, and compile it with purevk.compile",
        )
    model = found.read(file)
    rows = context if context is not None else min(model.trained, DEFAULT_CONTEXT)
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 < rows <= model.trained:
        raise InputError(
            f"context={rows!r} is not accepted",
            where=file.name,
            why=f"an integer from 2 to {model.trained} is expected: the model was trained with that",
        )
    return model, rows


def _step_graph(
    file: GgufFile,
    model: Llama,
    rows: int,
    dtype: DType,
    name: str = "decode",
    length: tuple[int, int] | None = None,
) -> Graph:
    """A method of tokens that the host gives, from `length[0]` to `length[1]` of them. Without
    `length`, the method "decode" of the token that the last call has chosen.

    Both take the position of the first token, int64 [1], store the logits of the last one and the
    token with the largest, and return this token, int64 [1, 1]."""
    net = Network(name, file, dtype, rows)
    token = net.state(TensorType(DType.int64, (1, 1)), name="token")
    tokens: Value = token
    if length is not None:
        least, most = length
        tokens = net.input(DType.int64, (1, 1), most, least)
    else:
        tokens = net.op("clamp.default", token, 0, model.vocab - 1)
    position = net.input(DType.int64, (1,))
    numbers = net.constant(np.arange(rows), DType.int64)
    steps = net.op("slice.Tensor", numbers, 0, 0, tokens.type.dims[1], 1)
    positions = net.op("add.Tensor", position, steps, 1)
    if length is None:  # it is in range: no kernel has to check it, and steps overlap
        positions = net.op("clamp.default", positions, 0, rows - 1)
    columns, lines = (
        net.op("unsqueeze.default", each, dim) for each, dim in ((numbers, 0), (positions, 1))
    )
    mask = net.op("le.Tensor", columns, lines)
    logits = model.logits(net, tokens, positions, mask)
    chosen = net.op("argmax.default", logits, -1, True)
    stored = net.state(TensorType(dtype, (1, model.vocab)), name="logits")
    net.store(stored, logits)
    net.store(token, chosen)
    graph = net.finish(chosen)
    check_limits(graph, file.name)
    return graph


def _model(file: GgufFile, device: Context, context: int | None, dtype: DType) -> Model:
    """Builds the methods, and puts them onto a device."""
    architecture, rows = _architecture(file, context)
    arguments = (file, architecture, rows, dtype)
    plan = plan_of(_step_graph(*arguments), rows)
    check_fits(plan, device, file.name)
    is_gpu = device.traits.profile.has_fast_shared_memory
    most = min(GPU_ROWS if is_gpu else MOST_ROWS, rows)
    prompts = prompt_lengths(most, is_gpu)
    sources = {
        name: source_of(functools.partial(_step_graph, *arguments, name, length))
        for name, length in (*prompts.items(), ("decode", None))
    }
    program = Program(os.path.basename(file.name), sources, device, closing=file.close)
    decoder = Decoder(program, prompts, rows, architecture.vocab, dtype, ChunkSize(most, is_gpu))
    return Model(decoder, file, plan)
