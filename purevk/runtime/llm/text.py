"""`TextLLMRunner`, and what it has in common with `MultimodalRunner`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from purevk.errors import InputError
from purevk.llm.loading import load
from purevk.llm.pieces import Stats as Figures
from purevk.llm.pieces import TextWriter
from purevk.llm.sampling import Sampling
from purevk.llm.tokenizer import Tokenizer
from purevk.plain_text import printable
from purevk.runtime.llm.config import GenerationConfig, Stats, now_ms

TokenCallback = Callable[[str], None]
StatsCallback = Callable[[Stats], None]
TOP_P = 0.9  # of ExecuTorch's sampler, where the temperature is not 0


class Runner:
    """Generates text, and keeps the position in the cache between calls, until `reset`.

    Args:
        decoder: the loop.
        tokenizer: the tokenizer of the model.
        start: when loading began, in ms.
    """

    def __init__(self, decoder: Any, tokenizer: Tokenizer, start: int) -> None:
        self._decoder, self._tokenizer = decoder, tokenizer
        self._is_prefilled = self._is_stopped = False
        self._stats = Stats(model_load_start_ms=start, model_load_end_ms=now_ms())

    def stop(self) -> None:
        """Ends the generation that runs, after its next token. A callback or another thread calls
        this."""
        self._is_stopped = True

    def reset(self) -> None:
        """Empties the cache: the next prompt begins a sequence."""
        self._decoder.cut(0)
        self._is_prefilled = False
        self._stats.reset()

    def get_vocab_size(self) -> int:
        """How many tokens there are."""
        vocab: int = self._decoder.vocab
        return vocab

    def close(self) -> None:
        """Releases everything on the device. Safe to call twice."""
        self._decoder.program.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def _encode(self, text: str, num_bos: int, num_eos: int) -> list[int]:
        tokenizer = self._tokenizer
        tokens = tokenizer.encode(text, start=False)
        before, after = (
            tokenizer.encode(name, start=False) * count
            for name, count in ((tokenizer.bos, num_bos), (tokenizer.eos, num_eos))
        )
        return [*before, *tokens, *after]

    def _check_fits(self, position: int, count: int) -> None:
        context = self._decoder.context
        if position + count >= context:
            raise InputError(
                f"{count} tokens follow {position}, and the cache holds {context} tokens",
                why="one must be left for the answer",
                next="call reset(), shorten the prompt, or export the model with a larger"
                " max_context_length",
            )

    def _begin(self, config: GenerationConfig, callback: TokenCallback | None) -> TokenCallback:
        """Notes the start of a generation, and returns what takes its text."""
        self._is_stopped = False
        self._stats.inference_start_ms = now_ms()
        if callback is None and not config.warming:
            return _show
        return callback or (lambda _: None)

    def _run(
        self,
        prompt: Sequence[Any],
        position: int,
        config: GenerationConfig,
        emit: TokenCallback,
        stats_callback: StatsCallback | None,
    ) -> list[int]:
        """Generates the answer to a prompt that ends at a position, and returns its tokens."""
        stats, tokenizer = self._stats, self._tokenizer
        most = config.resolve_max_new_tokens(self._decoder.context, position)
        if most < 1:
            raise InputError(
                f"{most} tokens are to be generated",
                why=f"{position} positions of {self._decoder.context} are in use",
                next="set a larger max_new_tokens or seq_len, or call reset()",
            )
        sampling = Sampling(config.temperature, top_p=TOP_P if config.temperature else 1.0)
        steps = self._decoder.steps(prompt, sampling, None, Figures(), most)
        writer = TextWriter(())
        tokens: list[int] = []
        stats.aggregate_model_execution_time_ms = 0
        while True:
            stats.model_execution_start_ms = now_ms()
            step = next(steps, None)
            stats.model_execution_end_ms = now_ms()
            stats.aggregate_model_execution_time_ms += (
                stats.model_execution_end_ms - stats.model_execution_start_ms
            )
            if step is None:
                break
            token = step[0]
            if not tokens:
                stats.first_token_ms = stats.prompt_eval_end_ms = now_ms()
            tokens.append(token)
            is_end = token in tokenizer.end_tokens
            is_last = is_end or len(tokens) == most
            emit(writer.write(tokenizer.token_bytes(token), is_last))
            if self._is_stopped or is_end:
                break
        steps.close()
        stats.inference_end_ms = now_ms()
        stats.num_generated_tokens = len(tokens) - 1
        if stats_callback is not None:
            stats_callback(stats)
        return tokens


def _show(text: str) -> None:
    """Prints a text, with escapes in place of what a terminal takes as commands, and of characters
    that the encoding of the output lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text).encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)


class TextLLMRunner(Runner):
    """Runs a language model of a .pte file, as ExecuTorch's class of this name does.

    Args:
        model_path: of a .pte file of `export_llm` or optimum-executorch.
        tokenizer_path: of tokenizer.json, or of tokenizer.model of SentencePiece or tiktoken.
        data_path: of a .ptd file with weights that are not in the program.

    Raises:
        PurevkError: as `purevk.llm.load`. It is a RuntimeError.
        OSError: a file cannot be opened.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        tokenizer_path: str | os.PathLike[str],
        data_path: str | os.PathLike[str] | None = None,
    ) -> None:
        start = now_ms()
        files = () if data_path is None else (data_path,)
        self._model = load(model_path, tokenizer=tokenizer_path, data_files=files)
        super().__init__(self._model.decoder, self._model.tokenizer, start)
        self._tokens: list[int] = []

    def generate(
        self,
        prompt: str,
        config: GenerationConfig,
        token_callback: TokenCallback | None = None,
        stats_callback: StatsCallback | None = None,
    ) -> None:
        """Continues what is in the cache by a prompt, and generates text.

        Args:
            prompt: "" goes on after `prefill`.
            config: what is generated.
            token_callback: gets the text of each token, whole characters; None: it is printed.
            stats_callback: gets figures at the end.

        Raises:
            InputError: the prompt does not fit into the cache, which is as it was then.
        """
        emit = self._begin(config, token_callback)
        if not prompt and not self._is_prefilled:
            raise InputError("the prompt is empty", next="call prefill() before, or give a text")
        tokens = self._encode(prompt, config.num_bos, config.num_eos) if prompt else []
        self._stats.token_encode_end_ms = now_ms()
        whole = self._extended(tokens)
        if prompt and config.echo:
            emit(prompt)
        self._stats.num_prompt_tokens = len(tokens) or len(whole)
        answer = self._run(whole, len(whole), config, emit, stats_callback)
        self._tokens, self._is_prefilled = [*whole, *answer[:-1]], False

    def prefill(self, prompt: str, config: GenerationConfig) -> None:
        """Puts a prompt into the cache. `generate` with an empty prompt goes on after it.

        Args:
            prompt: the text.
            config: its `num_bos` and `num_eos` are read.

        Raises:
            InputError: the prompt does not fit into the cache.
        """
        whole = self._extended(self._encode(prompt, config.num_bos, config.num_eos))
        list(self._decoder.steps(whole, Sampling(), None, Figures(), 1))
        self._tokens, self._is_prefilled = whole, True

    def reset(self) -> None:
        super().reset()
        self._tokens = []

    def _extended(self, tokens: Iterable[int]) -> list[int]:
        """The tokens in the cache and those of a prompt."""
        added = list(tokens)
        if added or not self._is_prefilled:
            if not added:
                raise InputError("the prompt has no tokens", next="give a longer text")
            self._check_fits(len(self._tokens), len(added))
        return [*self._tokens, *added]
