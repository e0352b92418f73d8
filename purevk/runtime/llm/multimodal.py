"""`MultimodalRunner`: a language model that also takes images and sounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError, UnsupportedProgramError
from purevk.frontends.files import FileSource, open_file
from purevk.frontends.files import ModelFile as ProgramFile
from purevk.graph.devices import choose_context
from purevk.ir import Value
from purevk.ir import dims as _dims
from purevk.llm.executorch import PteDecoder, PteFile, StepSource, decoder_of
from purevk.llm.files import close_on_error, to_bfloat16
from purevk.llm.pieces import Stats as Figures
from purevk.llm.tokenizer import tokenizer_of
from purevk.paths import path_text
from purevk.program.program import Program
from purevk.runtime.llm.config import GenerationConfig, now_ms
from purevk.runtime.llm.inputs import MultimodalInput, make_image_input, make_token_input
from purevk.runtime.llm.text import Runner, StatsCallback, TokenCallback

EMBEDDING, DECODER = "token_embedding", "text_decoder"
ENCODERS = {"image": ("vision_encoder", "image_encoder"), "audio": ("audio_encoder",)}
_FOREIGN = -1  # stands in the cache for what is no token


class _Decoder(PteDecoder):
    """The loop over a decoder that takes embeddings. They are computed before it runs: a prompt is
    empty."""

    last: Callable[[], Any]

    def feed(self, embeddings: np.ndarray, tokens: Sequence[int]) -> None:
        """Computes the next positions: embeddings [1, positions, width], of these tokens."""
        result = self._chunk(embeddings, len(self.tokens))
        self.tokens += tokens
        self.last = lambda: result

    def _chunk(self, tokens: Any, position: int) -> Any:
        prompt = self.program.method("prompt")
        rows = tokens.shape[1] if self.spreads else 1
        return prompt(tokens, self._typed(prompt, range(position, position + rows)))

    def _prompt(self, prompt: Sequence[int], stats: Figures) -> Callable[[], Any]:
        return self.last


class MultimodalRunner(Runner):
    """Runs a language model of a .pte file that also takes images or sounds, as ExecuTorch's class of
    this name does. The file has the methods `token_embedding` and `text_decoder`, and
    `vision_encoder` (or `image_encoder`) or `audio_encoder`.

    Args:
        model_path: of a .pte file.
        tokenizer_path: of tokenizer.json, or of tokenizer.model of SentencePiece or tiktoken.
        data_path: of a .ptd file with weights that are not in the program.

    Raises:
        FileFormatError: a file is damaged.
        UnsupportedProgramError: the file has other methods.
        OSError: a file cannot be opened.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        tokenizer_path: str | os.PathLike[str],
        data_path: str | os.PathLike[str] | None = None,
    ) -> None:
        start = now_ms()
        weights = () if data_path is None else (data_path,)
        with close_on_error(open_file(path_text(model_path), weights)) as opened:
            file = PteFile(opened, Path(path_text(tokenizer_path)))
            _check_methods(opened)
            vocab, context = file.number("get_vocab_size"), file.largest_context
            steps = {
                "prompt": StepSource(opened, DECODER, "prompt", vocab),
                "decode": StepSource(opened, DECODER, "decode", vocab, context, EMBEDDING),
            }
            names = [
                name for encoder in ENCODERS.values() for name in encoder if name in opened.methods
            ]
            sources = {name: FileSource(opened, name) for name in (EMBEDDING, *names)}
            program = Program(
                opened.label, {**steps, **sources}, choose_context(None, None), closing=opened.close
            )
        decoder = decoder_of(program, file, steps, context, _Decoder)
        super().__init__(decoder, tokenizer_of(file, decoder.vocab), start)
        self._rows = steps["prompt"].rows

    def generate(
        self,
        inputs: Sequence[MultimodalInput],
        config: GenerationConfig,
        token_callback: TokenCallback | None = None,
        stats_callback: StatsCallback | None = None,
    ) -> None:
        """Continues what is in the cache by a prompt, and generates text.

        Args:
            inputs: the parts of the prompt; [] goes on after `prefill`.
            config: what is generated.
            token_callback: gets the text of each token, whole characters; None: it is printed.
            stats_callback: gets figures at the end.

        Raises:
            InputError: a part is not what the model takes, or does not fit into the cache.
        """
        emit = self._begin(config, token_callback)
        if not inputs and not self._is_prefilled:
            raise InputError("the prompt is empty", next="give a part, or call prefill() before")
        self._feed(inputs, config.num_bos, config.num_eos)
        if inputs and config.echo and inputs[-1].is_text():
            emit(inputs[-1].get_text() or "")
        position = len(self._decoder.tokens)
        self._stats.num_prompt_tokens = position
        answer = self._run([], position, config, emit, stats_callback)
        self._is_prefilled = False
        if not self._decoder.is_recurrent:
            self._decoder.cut(position + len(answer) - 1)

    def generate_text(self, inputs: Sequence[MultimodalInput], config: GenerationConfig) -> str:
        """The text that `generate` gives to its callback."""
        texts: list[str] = []
        self.generate(inputs, config, texts.append)
        return "".join(texts)

    def generate_hf(
        self,
        inputs: Mapping[str, Any] | Sequence[MultimodalInput],
        config: GenerationConfig,
        image_token_id: int | None = None,
        token_callback: TokenCallback | None = None,
        stats_callback: StatsCallback | None = None,
    ) -> None:
        """As `generate`, for what a processor of transformers returns: `input_ids` and, if there is
        an image, `pixel_values`, as torch tensors or numpy arrays.

        Args:
            image_token_id: the token that stands for the image.

        Raises:
            InputError: as `generate`; or the tokens of the image are not in one run.
        """
        self.generate(_parts(inputs, image_token_id), config, token_callback, stats_callback)

    def generate_text_hf(
        self,
        inputs: Mapping[str, Any] | Sequence[MultimodalInput],
        config: GenerationConfig,
        image_token_id: int | None = None,
    ) -> str:
        """The text that `generate_hf` gives to its callback."""
        return self.generate_text(_parts(inputs, image_token_id), config)

    def prefill(self, inputs: Sequence[MultimodalInput]) -> None:
        """Puts parts of a prompt into the cache. `generate` goes on after them.

        Raises:
            InputError: as `generate`.
        """
        self._feed(inputs)

    def _feed(self, inputs: Sequence[MultimodalInput], num_bos: int = 0, num_eos: int = 0) -> None:
        """Computes the parts of a prompt, after all were checked."""
        program, decoder = self._decoder.program, self._decoder
        position = len(decoder.tokens)
        computed: list[tuple[np.ndarray, list[int]]] = []
        for number, part in enumerate(inputs):
            begins = number == 0 and not decoder.tokens
            added = (num_bos, num_eos) if begins else (0, 0)
            parts = self._embedded(part, *added)
            count = sum(each.shape[1] for each, _ in parts)
            self._check_fits(position, count)
            position += count
            computed += parts
        for embeddings, tokens in computed:
            if not decoder.tokens and decoder.is_recurrent:
                program.reset_state()
            decoder.feed(embeddings, tokens)
            self._is_prefilled = True

    def _embedded(
        self, part: MultimodalInput, num_bos: int, num_eos: int
    ) -> list[tuple[np.ndarray, list[int]]]:
        """The embeddings of a part, [1, positions, width] for each call, with its tokens."""
        program, decoder = self._decoder.program, self._decoder
        if part.is_text() or part.is_tokens():
            text, tokens = part.get_text(), part.get_tokens()
            ids = self._encode(text, num_bos, num_eos) if text is not None else tokens or []
            if not ids or max(ids) >= decoder.vocab:
                raise InputError(
                    f"{part!r} has no tokens" if not ids else f"there is no token {max(ids)}",
                    why=f"token ids are from 0 to {decoder.vocab - 1}",
                )
            embed = program.method(EMBEDDING)
            rows = min(self._rows, _dims.upper(_type_of(embed).dims[-1]))
            chunks = [ids[at : at + rows] for at in range(0, len(ids), rows)]
            dtype = _type_of(embed).dtype.numpy
            return [(embed(np.array([chunk], dtype)), chunk) for chunk in chunks]
        kind = "image" if part.is_image() else "audio" if part.is_audio() else ""
        name = next((name for name in ENCODERS.get(kind, ()) if name in program.methods), None)
        content = part.get_image() or part.get_audio()
        if name is None or content is None:
            raise UnsupportedProgramError(
                f"the model takes no {part!r}",
                where=program.name,
                why=f"its methods are {', '.join(program.methods)}",
            )
        encoder = program.method(name)
        embeddings = encoder(_fitting(content.array(), _type_of(encoder), name))
        embeddings = embeddings.reshape(1, -1, embeddings.shape[-1])
        if embeddings.shape[1] > self._rows:
            raise InputError(
                f"{part!r} has {embeddings.shape[1]} positions",
                where=program.name,
                why=f"{DECODER} takes {self._rows} at once",
            )
        return [(embeddings, [_FOREIGN] * embeddings.shape[1])]


def _check_methods(program: ProgramFile) -> None:
    if not {EMBEDDING, DECODER} <= set(program.methods):
        raise UnsupportedProgramError(
            "this is no model for MultimodalRunner",
            where=program.label,
            why=f"its methods are {', '.join(program.methods)}; {EMBEDDING} and {DECODER} are needed",
            next="a model with forward is run by TextLLMRunner",
        )


def _type_of(method: Any) -> Any:
    value = method.graph.inputs[0]
    assert isinstance(value, Value)
    return value.type


def _fitting(array: np.ndarray, type: Any, name: str) -> np.ndarray:
    """An image or a sound as an encoder takes it: a batch of 1 is added if there is none."""
    if type.rank == array.ndim + 1:
        array = array[None]
    is_bytes = type.dtype is DType.uint8
    if (array.dtype == np.uint8) != is_bytes:
        raise InputError(
            f"the elements are {array.dtype}",
            where=name,
            why=f"the model takes {type.dtype.name}",
            next="give uint8" if is_bytes else "give float32, normalized as the model expects",
        )
    if type.dtype is DType.bfloat16:
        return to_bfloat16(array)
    return array.astype(type.dtype.numpy)


def _parts(inputs: Any, image_token_id: int | None) -> Sequence[MultimodalInput]:
    """The parts of a prompt of a processor of transformers."""
    if not isinstance(inputs, Mapping) and not hasattr(inputs, "keys"):
        return list(inputs)
    if "input_ids" not in inputs:
        raise InputError("there are no input_ids", why=f"there are {', '.join(inputs.keys())}")
    ids = np.asarray(inputs["input_ids"])
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    pixels = inputs.get("pixel_values") if hasattr(inputs, "get") else None
    if ids.ndim != 1:
        raise InputError(
            f"input_ids are {list(ids.shape)}", why="[tokens] or [1, tokens] is expected"
        )
    places = (
        np.flatnonzero(ids == image_token_id) if image_token_id is not None else np.zeros(0, int)
    )
    if (pixels is None) != (not places.size) or (
        places.size and places[-1] - places[0] + 1 != places.size
    ):
        raise InputError(
            f"image_token_id={image_token_id!r} is {places.size} times in input_ids",
            why="one run for one image in pixel_values is expected, and none without an image",
        )
    if pixels is None:
        return [make_token_input(ids.tolist())]
    before, after = ids[: places[0]].tolist(), ids[places[-1] + 1 :].tolist()
    return [
        *([make_token_input(before)] if before else []),
        make_image_input(pixels),
        *([make_token_input(after)] if after else []),
    ]
