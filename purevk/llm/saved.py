"""Language models in .pvk files: the program, with what a conversation needs besides."""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from purevk.errors import FileFormatError, InputError, UnsupportedProgramError
from purevk.frontends.saved import SavedProgram, write_program
from purevk.graph.context import Context
from purevk.ir import Constant, Graph
from purevk.llm.decoding import Decoder
from purevk.llm.files import ModelFile, dtype_named
from purevk.llm.plan import Plan, check_fits
from purevk.program.program import Program

if TYPE_CHECKING:
    from purevk.frontends.importer import InputSizes
    from purevk.program.variants.variant import GraphSource

KEY = "language_model"


def save(
    path: str | os.PathLike[str], decoder: Decoder, plan: Plan, about_file: Mapping[str, Any]
) -> None:
    """Writes a model; `about_file` is the metadata of what it was loaded from."""
    from purevk import __version__

    program = decoder.program
    program.check_open()
    if type(decoder) is not Decoder:
        raise UnsupportedProgramError(
            "a model of a .pte file is not saved", where=program.name, next="copy the .pte file"
        )
    constants: dict[Hashable, Constant] = {}
    methods = {
        name: functools.partial(_read, source, constants)
        for name, source in (
            *((name, decoder.source(name)) for name in decoder.prompts),
            ("decode", program.methods["decode"].source),
        )
    }
    metadata = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in about_file.items()
        if key.startswith("tokenizer.")
    }
    about = {
        "context": decoder.context,
        "vocab": decoder.vocab,
        "prompts": dict(decoder.prompts),
        "dtype": decoder.dtype.name,
        "is_recurrent": decoder.is_recurrent,
        "weights": plan.weights,
        "cache": plan.cache,
        "metadata": metadata,
    }
    write_program(path, program.name, methods, f"purevk {__version__}", {KEY: about})


def _read(
    source: GraphSource, constants: dict[Hashable, Constant], sizes: InputSizes | None
) -> Graph:
    """A graph whose constants are in memory: methods share them, so that a file has them once."""
    graph = source(sizes)
    shared = {}
    for value, constant in graph.constants.items():
        key = constant.memory
        if key not in constants:
            constants[key] = Constant(constant.data)
        shared[value] = constants[key]
    return replace(graph, constants=shared)


class SavedFile(ModelFile):
    """What a conversation needs of a .pvk file."""

    def __init__(self, name: str, metadata: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.metadata = {
            key: np.array(value) if _are_numbers(value) else value
            for key, value in metadata.items()
        }

    def close(self) -> None:
        pass


def _are_numbers(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(type(each) in (int, float) for each in value)


def load_saved(
    path: str, device: Context, context: int | None, dtype: str, cache: str
) -> tuple[Decoder, SavedFile, Plan]:
    """Loads what `save` wrote: the arguments of a `Model`. Its own are those of `purevk.llm.load`."""
    from purevk.frontends.files import FileSource, open_file
    from purevk.llm.decoding import ChunkSize

    opened = open_file(path)
    try:
        content = opened.content
        about = content.about.get(KEY) if isinstance(content, SavedProgram) else None
        if not isinstance(about, dict) or "decode" not in opened.methods:
            raise FileFormatError(
                "this is no language model", where=path, next="write it with Model.save"
            )
        plan = Plan(*(_number(path, about, key) for key in ("context", "weights", "cache")))
        vocab, computed = _number(path, about, "vocab"), dtype_named(str(about.get("dtype")))
        if computed is None or not isinstance(about.get("metadata"), dict):
            raise FileFormatError("the saved model is damaged", where=path, why=str(about)[:200])
        fits = context in (None, plan.context) and dtype in ("auto", computed.name)
        if not fits or cache != "auto":
            raise InputError(
                f"context={context!r}, dtype={dtype!r}, cache={cache!r} are not those of the file",
                where=path,
                why=f"it was saved with context={plan.context} and dtype={computed.name!r}",
                next="leave them out, or load the file that it was saved from",
            )
        prompts = _prompts(path, about.get("prompts"), opened.methods)
        check_fits(plan, device, path)
        source = functools.partial(FileSource, opened)
        program = Program(opened.label, {"decode": source("decode")}, device, closing=opened.close)
    except BaseException:
        opened.close()
        raise
    is_gpu = device.traits.profile.has_fast_shared_memory
    chunk = ChunkSize(max(most for _, most in prompts.values()), is_gpu)
    decoder = Decoder(program, prompts, source, plan.context, vocab, computed, chunk)
    decoder.is_recurrent = bool(about.get("is_recurrent"))
    return decoder, SavedFile(path, about["metadata"]), plan


def _number(path: str, about: Mapping[str, Any], key: str) -> int:
    number = about.get(key)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 48:
        raise FileFormatError("the saved model is damaged", where=path, why=f"{key} is {number!r}")
    return number


def _prompts(path: str, stated: Any, methods: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The methods of prompts, with the tokens that each takes."""
    prompts = {}
    for name, lengths in stated.items() if isinstance(stated, dict) else ():
        if name not in methods or not isinstance(lengths, list) or len(lengths) != 2:
            break
        numbers = {str(at): length for at, length in enumerate(lengths)}
        prompts[str(name)] = _number(path, numbers, "0"), _number(path, numbers, "1")
    if not prompts or len(prompts) != len(stated):
        raise FileFormatError("the saved model is damaged", where=path, why="its prompts")
    return prompts
