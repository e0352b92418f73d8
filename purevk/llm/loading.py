"""Loads language models: `purevk.llm.load` and `purevk.llm.plan`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from purevk.dtypes import DType
from purevk.errors import InputError, UnsupportedProgramError
from purevk.frontends.reading import check_limits, reading
from purevk.graph.context import Context, typical_traits
from purevk.graph.devices import choose_context
from purevk.ir import Graph, TensorType, Value
from purevk.llm.architectures import ARCHITECTURES
from purevk.llm.architectures.transformer import Transformer
from purevk.llm.checkpoint import Folder
from purevk.llm.decoding import Decoder, prompt_lengths
from purevk.llm.files import DTYPES, ModelFile, close_on_error, unknown_architecture
from purevk.llm.gguf import GgufFile
from purevk.llm.model import Model
from purevk.llm.plan import Plan, check_context, check_fits, plan_of, workspace_of
from purevk.llm.sources import BuiltGraph, constant_named
from purevk.paths import path_text
from purevk.program.devices.memory import heaps_of
from purevk.program.program import Program
from purevk.tuning.traits import DeviceTraits

CACHES = {**{name: name for name in DTYPES}, "int8": "int8", "float8": "float8"}
DEFAULT_CONTEXT = 4096
MOST_ROWS, GPU_ROWS = 512, 2048  # tokens of a prompt in one submission; of GPUs


def load(
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    dtype: str = "auto",
    cache: str = "auto",
    spill: bool = False,
    device: Context | int | str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    data_files: Sequence[str | os.PathLike[str]] = (),
) -> Model:
    """Loads a language model. Weights stay packed on the device.

    Args:
        path: of a GGUF file, or of the first part of a split one; of a folder with safetensors
            files, config.json and tokenizer.json, as transformers writes it; of a .pvk file of
            `Model.save`; or of a .pte file of ExecuTorch's `export_llm` or of optimum-executorch.
        context: tokens that the cache holds; None: as many as the model was trained with, 4096 at
            most.
        dtype: what is computed in: "float32", "float16" or "bfloat16". "auto" is float16 on GPUs
            that have it, else float32.
        cache: what the cache holds: one of these, "int8" with a scale for each head of a token, or
            "float8" (E4M3). "auto" is `dtype`.
        spill: weights that do not fit on the device are in memory of the host, which kernels read over
            the bus. False: such a model is refused.
        device: as for `purevk.load`.
        tokenizer: of a .pte file: path of tokenizer.json, or of a tokenizer.model of SentencePiece
            or tiktoken. None: only token ids are taken.
        data_files: of a .pte file: .ptd files with its weights.

    Raises:
        FileFormatError: the file is damaged or no GGUF.
        UnsupportedProgramError: the architecture or the type of a tensor is not known.
        InputError: an argument is not accepted, or the model does not fit into the memory of the
            device. The error says the largest context that does.
        DeviceError: there is no such device.
        OSError: the file cannot be opened.
    """
    _check_names(dtype, cache)
    place = Path(path_text(path))
    chosen = choose_context(device, None)
    if place.suffix == ".pte":
        from purevk.llm.executorch import load_pte

        if dtype != "auto" or cache != "auto" or spill:
            raise InputError(
                f"{dtype=}, {cache=}, {spill=} are not accepted for a .pte file",
                where=str(place),
                why="they were chosen when it was exported",
                next="leave them out",
            )
        vocabulary = None if tokenizer is None else Path(path_text(tokenizer))
        weights = [Path(path_text(file)) for file in data_files]
        return Model(*load_pte(place, chosen, context, vocabulary, weights))
    if tokenizer is not None or data_files:
        raise InputError(
            "tokenizer and data_files are of .pte files",
            where=str(place),
            next="leave them out: this file has its own",
        )
    if place.suffix == ".pvk":
        from purevk.llm.saved import load_saved

        return Model(*load_saved(str(place), chosen, context, dtype, cache, spill))
    computed = _computed(dtype, chosen.traits)
    cache_dtype = CACHES.get(cache, computed.name)
    return Model(*_load(place, chosen, computed, cache_dtype, spill, context))


def open_model(place: Path) -> ModelFile:
    """A model on disk: a folder of safetensors files, one such file in its folder, or a GGUF file."""
    if place.suffix == ".pte":
        raise UnsupportedProgramError(
            "there is no plan of a .pte file", where=str(place), next="load it, and read model.plan"
        )
    if place.suffix == ".safetensors":
        place = place.parent
    return Folder(place) if place.is_dir() else GgufFile(place)


def plan(
    path: str | os.PathLike[str],
    *,
    context: int | None = None,
    dtype: str = "float16",
    cache: str = "auto",
    device: Context | int | str | None = None,
) -> Plan:
    """The memory that a model needs on a device, and what its heaps have free; nothing is loaded.

    Arguments and errors are those of `load`, but `device=None` is no device: the workspace is that
    of a typical desktop GPU."""
    _check_names(dtype, cache)
    chosen = None if device is None else choose_context(device, None)
    if dtype == "auto" and chosen is None:
        raise InputError("dtype='auto' needs a device", next=f"name one of {', '.join(DTYPES)}")
    traits = typical_traits() if chosen is None else chosen.traits
    computed = _computed(dtype, traits)
    with open_model(Path(path_text(path))) as file:
        architecture, rows = _architecture(file, context)
        arguments = (file, architecture, rows, computed, CACHES.get(cache, computed.name))
        *_, longest = _prompts(rows, traits).items()
        return replace(
            plan_of(_step_graph(*arguments), rows),
            workspace=workspace_of(_step_graph(*arguments, *longest), traits),
            heaps=() if chosen is None else heaps_of(chosen),
        )


def _computed(dtype: str, traits: DeviceTraits) -> DType:
    """What is computed in: on GPUs that have them, halves by default."""
    narrow = traits.has("storage_16bit") and traits.profile.has_fast_shared_memory
    return DTYPES["float16" if narrow else "float32"] if dtype == "auto" else DTYPES[dtype]


def _prompts(rows: int, traits: DeviceTraits) -> dict[str, tuple[int, int]]:
    is_gpu = traits.profile.has_fast_shared_memory
    return prompt_lengths(min(GPU_ROWS if is_gpu else MOST_ROWS, rows), is_gpu)


def _check_names(dtype: str, cache: str) -> None:
    for key, name, names in (("dtype", dtype, DTYPES), ("cache", cache, CACHES)):
        if not isinstance(name, str) or (name != "auto" and name not in names):
            raise InputError(
                f"{key}={name!r} is not known", why=f"auto, {', '.join(names)} are accepted"
            )


def _architecture(
    file: ModelFile, context: int | None, *, clamps: bool = False
) -> tuple[Transformer, int]:
    """The architecture of a file, and the tokens that the cache is to hold.

    Args:
        clamps: a context above what the model was trained with is taken for that number.
    """
    name = file.value("general.architecture", str)
    found = ARCHITECTURES.get(name)
    if found is None:
        raise unknown_architecture(file.name, name, ARCHITECTURES)
    with reading(file.name):
        model = found(file)
    rows = context if context is not None else min(model.trained, DEFAULT_CONTEXT)
    if clamps and isinstance(rows, int):
        rows = min(rows, model.trained)
    check_context(rows, model.trained, file.name, "the model was trained with that")
    return model, rows


def _step_graph(
    file: ModelFile,
    model: Transformer,
    rows: int,
    dtype: DType,
    cache: str,
    name: str = "decode",
    length: tuple[int, int] | None = None,
) -> Graph:
    """A method of tokens that the host gives, from `length[0]` to `length[1]` of them. Without
    `length`, the method "decode" of the token that the last call has chosen.

    Both take the position of the first token, int64 [1], store the logits of the last one and the
    token with the largest, and return this token, int64 [1, 1]."""
    from purevk.llm.network import Network  # it imports all operators

    net = Network(name, file, dtype, rows, cache)
    token = net.state(TensorType(DType.int64, (1, 1)), name="token")
    tokens: Value = token
    if length is not None:
        least, most = length
        tokens = net.input(DType.int64, (1, 1), most, least)
    else:
        tokens = net.op("clamp.default", token, 0, model.vocab - 1)
    position = net.input(DType.int64, (1,))
    steps = net.op("slice.Tensor", net.row_numbers, 0, 0, tokens.type.dims[1], 1)
    net.tokens, net.start = tokens, position
    net.positions = net.op("add.Tensor", position, steps, 1)
    if length is None:  # it is in range: no kernel has to check it, and steps overlap
        net.positions = net.op("clamp.default", net.positions, 0, rows - 1)
    with reading(file.name):
        logits = model.logits(net)
    chosen = net.op("argmax.default", logits, -1, True)
    stored = net.state(TensorType(dtype, (1, model.vocab)), name="logits")
    net.store(stored, logits)
    net.store(token, chosen)
    graph = net.finish(chosen)
    check_limits(graph, file.name)
    return graph


def _load(
    place: Path,
    device: Context,
    dtype: DType,
    cache: str,
    spill: bool,
    context: int | None,
) -> tuple[Decoder, ModelFile, Plan, Callable[[Model, int], Plan] | None]:
    """Builds the methods, and puts them onto a device: the arguments of a `Model`."""
    with close_on_error(open_model(place)) as file:
        architecture, rows = _architecture(file, context)
        name, plans = os.path.basename(file.name), []

        def sources(rows: int) -> tuple[dict[str, tuple[int, int]], Callable[[str], BuiltGraph]]:
            """The methods of prompts for a cache of so many tokens, and the source of a method."""
            prompts = _prompts(rows, device.traits)

            def source(method: str) -> BuiltGraph:
                length = prompts.get(method)
                built = repr((file.about, rows, dtype.name, cache, length))
                build = functools.partial(
                    _step_graph, file, architecture, rows, dtype, cache, method, length
                )
                borrowed = functools.partial(constant_named, file)
                return BuiltGraph(build, f"{name}, {method}", built, borrowed)

            return prompts, source

        prompts, source = sources(rows)

        def local_weights(graph: Graph) -> int | None:
            longest = source([*prompts][-1])
            plan = check_fits(plan_of(graph, rows), device, file.name, longest, spill)
            plans.append(plan)
            return plan.local_weights

        program = Program(
            name,
            {"decode": source("decode")},
            device,
            closing=file.close,
            local_weights=local_weights,
        )
    sizes = (rows, architecture.vocab, dtype, architecture.is_recurrent)

    def grow(model: Model, context: int) -> Plan:
        _, rows = _architecture(file, context, clamps=True)
        if rows <= model.context:
            raise InputError(
                f"the cache cannot grow to {rows} tokens",
                where=file.name,
                why=f"it holds {model.context} tokens, and the model was trained with "
                f"{architecture.trained}",
            )
        prompts, source = sources(rows)
        longest = source([*prompts][-1])
        plan = plan_of(source("decode")(None), rows)
        plan = check_fits(plan, device, file.name, longest, held=model.plan.weights)
        model.decoder.grow(rows, prompts, source)
        return replace(plan, spilled=model.plan.spilled)

    decoder = Decoder(program, prompts, source, *sizes)
    return decoder, file, plans[0], grow if decoder.pages is not None else None
