"""The loop of a generation: what the cache holds, and the calls that are submitted."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.ir import Graph
from purevk.llm.grammar import Constraint
from purevk.llm.pieces import Stats, TokenLogprobs
from purevk.llm.sampling import Sampling, logprobs_graph, sampling_graph, sampling_name
from purevk.llm.sequences import STATE, TAIL, Checkpoints, Pages, common_tokens
from purevk.llm.sources import BuiltGraph
from purevk.program.program import Program
from purevk.program.variants.variant import GraphSource

PROMPT_ROWS = (1, 33, 256, 1024)
SOFTWARE_PROMPT_ROWS = (1, 16)
"""Tokens from which on prompts have another method: other kernels are faster then. The first are
those of GPUs."""
_Started = Callable[[], Any]  # waits for a call, and gives its results
# Calls that choose a token: what gives it, and the results of `logprobs_graph`.
_Step = tuple[_Started, _Started | None]


def prompt_lengths(most: int, is_gpu: bool) -> dict[str, tuple[int, int]]:
    """The methods of prompts by name, with the fewest and the most tokens that each takes."""
    least = [rows for rows in (PROMPT_ROWS if is_gpu else SOFTWARE_PROMPT_ROWS) if rows <= most]
    ends = [*(rows - 1 for rows in least[1:]), most]
    return {f"prompt_{end}": (start, end) for start, end in zip(least, ends)}


class ChunkSize:
    """How many tokens of a prompt are computed in one submission. Drivers of desktops end what takes
    two seconds, so a submission that takes long has the next ones be smaller.

    Args:
        most: tokens.
        adapts: the device has such a driver; else it is always `most`.

    Attributes:
        rows: tokens of the next submission.
    """

    LONG, SHORT = 0.5, 0.15  # seconds

    def __init__(self, most: int, adapts: bool) -> None:
        self._most, self._adapts = most, adapts
        self.rows = min(64, most) if adapts else most

    def took(self, seconds: float, rows: int) -> None:
        """Notes how long a submission of so many tokens took."""
        if not self._adapts:
            return
        if seconds > self.LONG:
            self.rows = max(rows // 2, 1)
        elif seconds < self.SHORT and rows == self.rows:
            self.rows = min(2 * rows, self._most)


class Decoder:
    """Runs the methods of a program for prompts and "decode", and the cache that they write.

    Args:
        program: has "decode", and gets further methods when they are first needed.
        prompts: the methods for prompts, see `prompt_lengths`.
        source: of such a method, by its name.
        context: tokens that the cache holds.
        vocab: tokens that there are.
        dtype: of the state "logits".

    Attributes:
        chunk: tokens of a submission.
        tokens: whose keys and values are in the cache.
        is_recurrent: the cache can be cut only where there is a checkpoint.
    """

    def __init__(
        self,
        program: Program,
        prompts: Mapping[str, tuple[int, int]],
        source: Callable[[str], GraphSource],
        context: int,
        vocab: int,
        dtype: DType,
        is_recurrent: bool = False,
    ) -> None:
        self.program, self.context, self.vocab, self.dtype = program, context, vocab, dtype
        self.prompts, self.source, self.is_recurrent = prompts, source, is_recurrent
        most = max(most for _, most in prompts.values())
        self.chunk = ChunkSize(most, program.context.traits.profile.has_fast_shared_memory)
        self.tokens: list[int] = []
        self.checkpoints = Checkpoints(program)
        # .pte files have other caches, and a model of recurrent layers only has none.
        labels = program.method("decode").graph.labels if type(self) is Decoder else {}
        has_pages = any(label.key == STATE for label in labels.values())
        self.pages = Pages(program, is_recurrent) if has_pages else None
        self._running: object = None

    def cut(self, position: int) -> None:
        """Ends the generation that runs, and drops the tokens of the cache from a position on; of a
        recurrent model, from the last checkpoint before it. At 0, all sequences are dropped."""
        self._running = None
        if position < len(self.tokens):
            del self.tokens[self.checkpoints.restore(position) if self.is_recurrent else position :]
        if not position and self.pages is not None:
            self.tokens = self.pages.clear()

    def grow(
        self,
        context: int,
        prompts: Mapping[str, tuple[int, int]],
        source: Callable[[str], GraphSource],
    ) -> None:
        """Ends the generation that runs, and makes the cache larger, by methods for so many tokens. It
        holds what it held."""
        assert self.pages is not None
        self._running = None
        self.pages.enlarge({"decode": source("decode")}, self.prompts)
        self.context, self.prompts, self.source = context, prompts, source
        most = max(most for _, most in prompts.values())
        self.chunk = ChunkSize(most, self.program.context.traits.profile.has_fast_shared_memory)

    def logits(self) -> np.ndarray:
        """Those of the last step, float32 [vocab]. While a generation runs, this step is computed
        already when the token before it is given."""
        stored = self.program.state["logits"].reshape(-1)
        if self.dtype is DType.bfloat16:
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)

    def steps(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        constraint: Constraint | None,
        stats: Stats,
        most: int | None = None,
    ) -> Iterator[tuple[int, tuple[TokenLogprobs, ...]]]:
        """`most` tokens that follow a prompt, with what is asked for of their probabilities, or until
        the cache is full, or the constraint lets nothing follow. The next step is submitted before the
        token of the last one is read."""
        mine = self._running = object()
        random = np.random.default_rng(sampling.seed)
        computed = self._prompt(prompt, stats)
        sampler = self._sampler(prompt, sampling, constraint)
        choose = functools.partial(self._choose, sampler, sampling, constraint, random)
        step = choose(computed)
        for count in itertools.count(1):
            position = len(self.tokens)
            goes_on = position < self.context and count != most
            if goes_on:
                self.checkpoints.position = None  # until the token of the step is known
            submitted = self._decode(position) if goes_on else None
            following = choose(submitted) if submitted is not None and constraint is None else None
            token = self._token(step[0]())
            if submitted is not None:
                self.tokens.append(token)  # the step that was submitted has it as its input
                self.checkpoints.position = len(self.tokens)
            yield token, self._logprobs(step, token, sampling.logprobs or 0)
            if submitted is None:
                return
            if self._running is not mine:
                raise InputError(
                    "this generation was ended",
                    why="another one has begun, the position was set, or the cache has grown",
                    next="finish one generation before the next one",
                )
            if constraint is not None:
                constraint.accept(token)
                if constraint.is_complete:
                    stats.why = "end"
                    return
                following = choose(submitted)
            assert following is not None
            step = following

    def _decode(self, position: int) -> _Started:
        """Submits the step whose input is the token that was chosen last."""
        self._reserve(position + 1)
        return self.program.method("decode").start(np.array([position]))

    def _reserve(self, length: int) -> None:
        if self.pages is not None:
            self.pages.reserve(length)

    def _prompt_method(self, count: int) -> str:
        """The name of the method for so many tokens, which is lowered now if it was not."""
        name = next(name for name, (_, most) in self.prompts.items() if count <= most)
        if name not in self.program.methods:
            self.program.add_methods({name: self.source(name)})
        return name

    def _chunk(self, tokens: Sequence[int], position: int) -> Any:
        """Computes tokens of a prompt."""
        method = self.program.method(self._prompt_method(len(tokens)))
        return method(np.array([tokens]), np.array([position]))

    @staticmethod
    def _token(result: Any) -> int:
        return int(result.reshape(-1)[0])

    def _prompt(self, prompt: Sequence[int], stats: Stats) -> _Started:
        """Computes what the cache does not hold of a prompt."""
        if self.pages is not None:
            self.tokens = self.pages.switch_to(prompt[:-1])
        common, pause = common_tokens(self.tokens, prompt[:-1]), -1
        if self.is_recurrent:
            common, pause = self.checkpoints.restore(common), len(prompt) - TAIL
        stats.reused_tokens = common
        del self.tokens[common:]
        self._reserve(len(prompt))
        if not common:
            self._restart()
        while True:
            at = len(self.tokens)
            if at == pause:
                self.checkpoints.save()
            part = prompt[at : min(at + self.chunk.rows, pause if at < pause else len(prompt))]
            self.checkpoints.position = None
            self._prompt_method(len(part))  # what lowering takes says nothing about the device
            start = time.perf_counter()
            result = self._chunk(part, at)
            self.chunk.took(time.perf_counter() - start, len(part))
            self.tokens += part
            self.checkpoints.position = len(self.tokens)
            if len(self.tokens) == len(prompt):
                break
        return lambda: result

    def _restart(self) -> None:
        """Called before the first token of a sequence is computed."""

    def _sampler(
        self, prompt: Sequence[int], sampling: Sampling, constraint: Constraint | None
    ) -> str:
        """The method that chooses tokens, lowered at its first use; "" if "decode" does."""
        if sampling.logprobs is not None:
            self._add("logprobs", logprobs_graph)
        if sampling.greedy and not sampling.adjusts and constraint is None:
            return ""
        features = sampling.adjusts, constraint is not None
        name = sampling_name(*features)
        self._add(
            name, functools.partial(sampling_graph, adjusts=features[0], constrained=features[1])
        )
        if sampling.adjusts:
            seen = np.zeros((2, self.vocab), np.float32)
            seen[0, np.asarray(prompt)] = 1
            self.program.state["seen"] = seen
            self.program.state["bias"] = sampling.bias(self.vocab)
        return name

    def _add(self, name: str, graph: Callable[[int, DType], Graph]) -> None:
        """Has the program have a method that follows from its name, the vocabulary and the dtype."""
        if name not in self.program.methods:
            build = functools.partial(graph, self.vocab, self.dtype)
            built = f"{name} of {self.vocab} {self.dtype.name}"
            self.program.add_methods({name: BuiltGraph(build, name, built)})

    def _choose(
        self,
        sampler: str,
        sampling: Sampling,
        constraint: Constraint | None,
        random: np.random.Generator,
        computed: _Started,
    ) -> _Step:
        """Has a token be chosen by the logits of the last call."""
        if sampler:
            inputs = [sampling.parameters(random.random())]
            if constraint is not None:
                inputs.append(constraint.allowed(self.vocab))
            computed = self.program.method(sampler).start(*inputs)
        has_logprobs = sampling.logprobs is not None
        return computed, self.program.method("logprobs").start() if has_logprobs else None

    @staticmethod
    def _logprobs(step: _Step, token: int, count: int) -> tuple[TokenLogprobs, ...]:
        if step[1] is None:
            return ()
        logprob, largest, tokens = step[1]()
        pairs = zip(tokens[:count].tolist(), largest[:count].tolist())
        return (TokenLogprobs(token, float(logprob[0]), tuple(pairs)),)
