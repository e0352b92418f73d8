"""Language models in .pvk files: the program, with what a conversation needs besides."""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from purevk.dtypes import DType
from purevk.errors import FileFormatError, InputError, UnsupportedProgramError
from purevk.frontends.files import FileSource
from purevk.frontends.files import ModelFile as ProgramFile
from purevk.frontends.saved import SavedProgram, write_program
from purevk.graph.context import Context
from purevk.ir import Constant, Graph, Size, TensorType, Value
from purevk.ir.dims import range_of
from purevk.llm.decoding import Decoder
from purevk.llm.files import DTYPES, ModelFile, close_on_error, damaged
from purevk.llm.plan import Plan, check_fits
from purevk.llm.sequences import PAGE, STATE, pages_of
from purevk.program.program import Program

if TYPE_CHECKING:
    from purevk.frontends.importer import InputSizes
    from purevk.program.variants.variant import GraphSource

KEY = "language_model"
_damaged = functools.partial(damaged, what="the saved model is damaged")


class Description(NamedTuple):
    """What a saved model says of its graphs, which are compared with it.

    Attributes:
        context: tokens that the cache holds.
        vocab: tokens that there are.
        prompts: the methods of prompts, see `prompt_lengths`.
        dtype: of the state "logits".
        is_recurrent: see `Decoder`.
        weights, cache: bytes.
        metadata: of the tokenizer.
    """

    context: int
    vocab: int
    prompts: dict[str, tuple[int, int]]
    dtype: DType
    is_recurrent: bool
    weights: int
    cache: int
    metadata: dict[str, Any]

    @staticmethod
    def read(path: str, stated: Any, methods: Sequence[str]) -> Description:
        """Raises FileFormatError if it is none, or has values of other types."""
        if not isinstance(stated, dict) or "decode" not in methods:
            raise FileFormatError(
                "this is no language model", where=path, next="write it with Model.save"
            )
        context, vocab, weights, cache = (
            _number(path, stated, key) for key in ("context", "vocab", "weights", "cache")
        )
        dtype, metadata = DTYPES.get(str(stated.get("dtype"))), stated.get("metadata")
        if dtype is None or not isinstance(metadata, dict):
            raise _damaged(path, str(stated)[:200])
        prompts = _prompts(path, stated.get("prompts"), methods)
        is_recurrent = bool(stated.get("is_recurrent"))
        return Description(context, vocab, prompts, dtype, is_recurrent, weights, cache, metadata)

    def check(self, graph: Graph, method: str, path: str) -> None:
        """Raises FileFormatError if a method takes, gives or keeps something else."""
        from purevk.llm.graphs import types_of  # it imports all operators

        token, position = (DType.int64, (1, 1)), (DType.int64, (1,))
        states = {label.key: each for each, label in graph.labels.items() if each in graph.states}
        first = () if method == "decode" else graph.inputs[:1]
        takes = not first or _takes(first[0], *self.prompts[method])
        inputs = [*map(_shape, first), position] if takes else None
        logits, chosen = states.get("logits"), states.get("token")
        for what, values, shapes in (
            (f"the inputs of {method} are", graph.inputs, inputs),
            (f"{method} gives", graph.outputs, [token]),
            (f"the state 'logits' of {method} is", [logits], [(self.dtype, (1, self.vocab))]),
            (f"the state 'token' of {method} is", [chosen], [token]),
        ):
            if [*map(_shape, values)] != shapes:
                raise _damaged(path, f"{what} {types_of(values)}")
        rows = {each.type.dims[2] for each in graph.states if each.type.rank == 4}
        pages, positions = pages_of(self.context), TensorType(DType.int64, (self.context,))
        fits = _shape(states.get(STATE)) == (DType.int32, (pages,)) and rows == {pages * PAGE}
        fits = fits or (self.is_recurrent and not rows)
        if not fits or all(each.type != positions for each in graph.constants):
            raise _damaged(path, f"the caches of {method} are not for {self.context} tokens")


def _shape(value: Any) -> tuple[DType, tuple[Size, ...]] | None:
    return (value.type.dtype, value.type.dims) if isinstance(value, Value) else None


def _takes(value: Any, least: int, most: int) -> bool:
    """Whether an input is int64 [1, n], with n from `least` to `most`."""
    dtype, sizes = _shape(value) or (None, ())
    if dtype is not DType.int64 or len(sizes) != 2 or sizes[0] != 1:
        return False
    low, high = range_of(sizes[1])
    return low <= least <= most <= high


def save(
    path: str | os.PathLike[str], decoder: Decoder, plan: Plan, about_file: Mapping[str, Any]
) -> None:
    """Writes a model; `about_file` is the metadata of what it was loaded from."""
    program = decoder.program
    program.check_open()
    if type(decoder) is not Decoder:
        raise UnsupportedProgramError(
            "a model of a .pte file is not saved", where=program.name, next="copy the .pte file"
        )
    sources = {name: decoder.source(name) for name in decoder.prompts}
    metadata = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in about_file.items()
        if key.startswith("tokenizer.")
    }
    sizes = (decoder.context, decoder.vocab, dict(decoder.prompts), decoder.dtype)
    sums = (decoder.is_recurrent, plan.weights, plan.cache)
    description = Description(*sizes, *sums, metadata)
    write(path, program.name, {**sources, "decode": program.methods["decode"].source}, description)


def write(
    path: str | os.PathLike[str],
    name: str,
    sources: Mapping[str, GraphSource],
    description: Description,
) -> None:
    """Writes the methods of a model, of the name `name`."""
    from purevk import __version__

    constants: dict[Hashable, Constant] = {}
    methods = {
        method: functools.partial(_read, source, constants) for method, source in sources.items()
    }
    about = {**description._asdict(), "dtype": description.dtype.name}
    write_program(path, name, methods, f"purevk {__version__}", {KEY: about})


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


def _are_numbers(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(type(each) in (int, float) for each in value)


def load_saved(
    path: str, device: Context, context: int | None, dtype: str, cache: str, spill: bool
) -> tuple[Decoder, SavedFile, Plan]:
    """Loads what `save` wrote: the arguments of a `Model`. Its own are those of `purevk.llm.load`."""
    from purevk.frontends.files import open_file

    with close_on_error(open_file(path)) as opened:
        content = opened.content
        stated = content.about.get(KEY) if isinstance(content, SavedProgram) else None
        about = Description.read(path, stated, opened.methods)
        plan = Plan(about.context, about.weights, about.cache)
        fits = context in (None, plan.context) and dtype in ("auto", about.dtype.name)
        if not fits or cache != "auto":
            raise InputError(
                f"context={context!r}, dtype={dtype!r}, cache={cache!r} are not those of the file",
                where=path,
                why=f"it was saved with context={plan.context} and dtype={about.dtype.name!r}",
                next="leave them out, or load the file that it was saved from",
            )
        source = functools.partial(_CheckedSource, opened, about)
        longest = list(about.prompts)[-1]
        plan = check_fits(plan, device, path, source(longest), spill)
        local = plan.local_weights
        methods = {"decode": source("decode")}
        program = Program(
            opened.label, methods, device, closing=opened.close, local_weights=lambda _: local
        )
    sizes = (plan.context, about.vocab, about.dtype, about.is_recurrent)
    decoder = Decoder(program, about.prompts, source, *sizes)
    return decoder, SavedFile(path, about.metadata), plan


class _CheckedSource(FileSource):
    """Graphs that are what the file says of them."""

    def __init__(self, file: ProgramFile, about: Description, method: str) -> None:
        super().__init__(file, method)
        self.about = about

    def __call__(self, sizes: InputSizes | None) -> Graph:
        graph = super().__call__(sizes)
        if sizes is None:
            self.about.check(graph, self.method, self.file.name)
        return graph


def _number(path: str, about: Mapping[str, Any], key: str) -> int:
    number = about.get(key)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 48:
        raise _damaged(path, f"{key} is {number!r}")
    return number


def _prompts(path: str, stated: Any, methods: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The methods of prompts, with the tokens that each takes."""
    lengths = list(stated.values()) if isinstance(stated, dict) else []
    fits = bool(lengths) and {*stated} <= {*methods} - {"decode"}
    fits = fits and all(isinstance(length, list) and len(length) == 2 for length in lengths)
    ends = [
        _number(path, {"prompts": end}, "prompts") for length in lengths if fits for end in length
    ]
    if not fits or ends != sorted(ends) or 0 in ends:
        raise _damaged(path, "its prompts")
    return dict(zip(stated, zip(ends[::2], ends[1::2])))
