"""Loads .pte files, and runs the loop over their methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from purevk.errors import FileFormatError, InputError, UnsupportedProgramError
from purevk.graph.context import Context
from purevk.ir import TensorType
from purevk.llm.decoding import Decoder
from purevk.llm.executorch.steps import StepSource, tensor_input
from purevk.llm.files import ModelFile, close_on_error
from purevk.llm.pieces import Stats
from purevk.llm.plan import Plan, check_context, check_fits
from purevk.llm.sequences import Checkpoints
from purevk.llm.tokenizer.files import read_tokenizer
from purevk.program.program import Program

if TYPE_CHECKING:
    from purevk.frontends.files import ModelFile as ProgramFile

NUMBERS = (
    "get_max_seq_len", "get_max_context_len", "get_bos_id", "get_eos_id", "get_eos_ids",
    "get_vocab_size", "use_kv_cache", "enable_dynamic_shape",
)  # fmt: skip
"""Methods without inputs, by which a file says how it is called."""


class PteFile(ModelFile):
    """What a conversation needs of a .pte file.

    Attributes:
        numbers: what its methods of `NUMBERS` return.
    """

    def __init__(self, program: ProgramFile, tokenizer: Path | None) -> None:
        super().__init__(program.label)
        self.numbers = {name: _numbers(program, name) for name in NUMBERS}
        if tokenizer is None:
            return
        self.metadata = read_tokenizer(tokenizer)
        ends = self.numbers["get_eos_ids"] or self.numbers["get_eos_id"]
        if ends:
            self.metadata["tokenizer.all_ends"] = ends
        if self.numbers["get_bos_id"]:
            self.metadata.setdefault("tokenizer.ggml.bos_token_id", self.numbers["get_bos_id"][0])

    def number(self, name: str, default: int | None = None) -> int | None:
        """What a method of `NUMBERS` returns; `default` if there is none."""
        numbers = self.numbers[name]
        return numbers[0] if numbers else default

    @property
    def largest_context(self) -> int:
        """How many tokens the cache holds.

        Raises:
            FileFormatError: the file does not say it.
        """
        length = self.number("get_max_seq_len")
        if not length:
            raise FileFormatError(
                "the file has no get_max_seq_len",
                where=self.name,
                next='export it with constant_methods={"get_max_seq_len": ...}',
            )
        return self.number("get_max_context_len") or length

    def value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        if not self.metadata and key.startswith("tokenizer."):
            raise InputError(
                "the file has no tokenizer",
                where=self.name,
                next='load it with tokenizer="tokenizer.json", or give token ids to generate()',
            )
        return super().value(key, kind, default)

    def is_cache(self, state: TensorType) -> bool:
        """Whether a state surely has one row for each position: [1, heads, positions, width], in any
        order. A windowed or recurrent one has not, and cannot be cut."""
        return state.rank == 4 and state.dims.count(self.largest_context) == 1


def _numbers(program: ProgramFile, name: str) -> list[int]:
    if name not in program.methods:
        return []
    numbers = program.graph(name).outputs
    if not all(isinstance(number, int) and 0 <= number < 1 << 31 for number in numbers):
        raise FileFormatError(
            f"the method {name} returns {str(numbers)[:80]}",
            where=program.label,
            why="integers from 0 to 2147483647 are expected",
        )
    return [int(number) for number in numbers if isinstance(number, int)]


def load_pte(
    path: Path,
    device: Context,
    context: int | None,
    tokenizer: Path | None,
    data_files: Sequence[Path],
) -> tuple[Decoder, PteFile, Plan]:
    """Loads a .pte file: the arguments of a `Model`. Its own are those of `purevk.llm.load`."""
    from purevk.frontends.files import open_file

    with close_on_error(open_file(path, data_files)) as opened:
        file = PteFile(opened, tokenizer)
        sources = step_sources(opened, file)
        prompt, step = sources["prompt"], sources.get("decode")
        graph = (step or prompt).graph
        largest = file.largest_context
        if step is None:
            largest = min(largest, prompt.rows)
        rows = largest if context is None else context
        check_context(rows, largest, opened.label, "the model was exported for that")
        weights = sum(constant.nbytes for constant in graph.constants.values())
        plan = Plan(rows, weights, sum(int(state.type.nbytes) for state in graph.states))
        check_fits(plan, device, opened.label, lambda _: prompt.graph)
        program = Program(opened.label, sources, device, closing=opened.close)
    return decoder_of(program, file, sources, rows), file, plan


def step_sources(program: ProgramFile, file: PteFile) -> dict[str, StepSource]:
    """The method "prompt" of a program and, if the model has a cache, "decode".

    Raises:
        UnsupportedProgramError: the methods of the file are none of a language model.
    """
    vocab = file.number("get_vocab_size")
    names = [name for name in ("forward", "prefill") if name in program.methods]
    if not names:
        raise UnsupportedProgramError(
            "this is no language model for text",
            where=program.label,
            why=f"methods: {', '.join(program.methods)}; forward or prefill is expected",
            next="a model with text_decoder is run by purevk.runtime.llm.MultimodalRunner",
        )
    prompt = StepSource(program, names[0], "prompt", vocab)
    one = "decode" if "decode" in program.methods else names[0]
    if prompt.is_static and prompt.rows > 1 and one != names[0]:
        prompt = StepSource(program, one, "prompt", vocab)  # by single tokens: none is padded
    if prompt.is_static and (prompt.rows > 1 or not prompt.has_position):
        raise UnsupportedProgramError(
            f"the method {prompt.method!r} takes exactly {prompt.rows} tokens",
            where=program.label,
            next="export the model with enable_dynamic_shape, or with a cache for one token",
        )
    if bool(file.number("use_kv_cache", prompt.has_position)) != prompt.has_position:
        raise FileFormatError(
            f"use_kv_cache is {file.number('use_kv_cache')}",
            where=program.label,
            why=f"the method {prompt.method!r} takes {len(prompt.graph.inputs)} inputs",
            next="export the model again",
        )
    if not prompt.has_position:
        return {"prompt": prompt}
    step = StepSource(program, one, "decode", vocab, file.largest_context)
    return {"prompt": prompt, "decode": step}


def decoder_of(
    program: Program,
    file: PteFile,
    sources: Mapping[str, StepSource],
    context: int,
    kind: type[PteDecoder] | None = None,
) -> Decoder:
    """The loop over methods of `step_sources`."""
    prompt, step = sources["prompt"], sources.get("decode")
    chunk = context if step is None else file.number("get_max_seq_len", context) or context
    most = min(prompt.rows, chunk, context)
    if step is not None and not file.number("enable_dynamic_shape", 1):
        most = 1
    states = {label.key or label.name: state.type for state, label in prompt.graph.labels.items()}
    logits = states.pop("logits")
    prompts = {"prompt": (1, most)}
    sizes = (context, int(logits.dims[1]), logits.dtype)
    if step is None:
        return CachelessDecoder(program, prompts, sources.__getitem__, *sizes)
    del states["token"]
    is_recurrent = not all(map(file.is_cache, states.values()))
    decoder = (kind or PteDecoder)(program, prompts, sources.__getitem__, *sizes, is_recurrent)
    decoder.checkpoints = Checkpoints(program, file.is_cache)
    decoder.spreads = prompt.positions > 1
    return decoder


class PteDecoder(Decoder):
    """The loop over a method that has a cache.

    Attributes:
        spreads: the method takes the positions of all tokens, not that of the first one.
    """

    spreads = False

    def _chunk(self, tokens: Sequence[int], position: int) -> Any:
        prompt = self.program.method("prompt")
        rows = len(tokens) if self.spreads else 1
        positions = range(position, position + rows)
        return prompt(self._typed(prompt, [tokens], 0), self._typed(prompt, positions))

    @staticmethod
    def _typed(method: Any, numbers: Any, at: int = -1) -> np.ndarray:
        """Numbers as an input of a method."""
        return np.array(numbers, tensor_input(method.graph, at).type.dtype.numpy)

    def _decode(self, position: int) -> Callable[[], Any]:
        decode = self.program.method("decode")
        return decode.start(self._typed(decode, [position]))

    def _restart(self) -> None:
        """The states of a recurrent model begin anew."""
        if self.is_recurrent:
            self.program.reset_state()


class CachelessDecoder(Decoder):
    """The loop over a method without a cache: each step computes the whole sequence."""

    def _prompt(self, prompt: Sequence[int], stats: Stats) -> Callable[[], Any]:
        self.tokens = list(prompt)
        return self._compute(self.tokens)

    def _decode(self, position: int) -> Callable[[], Any]:
        return self._compute([*self.tokens, self._token(self.program.state["token"])])

    def _compute(self, tokens: Sequence[int]) -> Callable[[], Any]:
        prompt = self.program.method("prompt")
        dtype = tensor_input(prompt.graph, 0).type.dtype
        return prompt.start(np.array([tokens], dtype.numpy))
