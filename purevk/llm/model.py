"""A language model on a device. `purevk.llm.load` makes it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from purevk.closing import Closing
from purevk.errors import InputError, UnsupportedProgramError
from purevk.llm import arguments
from purevk.llm.decoding import Decoder
from purevk.llm.files import ModelFile
from purevk.llm.grammar import Constraint, checked_grammar, engine_of
from purevk.llm.pieces import (
    MARKER_TEXTS,
    TEXT,
    KindSplitter,
    Piece,
    Pieces,
    Stats,
    TextWriter,
)
from purevk.llm.plan import Plan
from purevk.llm.sampling import Sampling
from purevk.llm.session import Session
from purevk.llm.templates import Template
from purevk.llm.tokenizer import Tokenizer, tokenizer_of
from purevk.plain_text import printable


class Model(Closing):
    """A language model on a device. One generation runs at a time.

    Attributes:
        decoder: runs the methods of the program.
        context: tokens that the cache holds.
        vocab: tokens that there are.
        program: the program that runs.
        plan: the memory that the model needs.
        file: what it was loaded from.
    """

    def __init__(
        self,
        decoder: Decoder,
        file: ModelFile,
        plan: Plan,
        grow: Callable[[Model, int], Plan] | None = None,
    ) -> None:
        self.decoder, self.plan, self.file, self._grow = decoder, plan, file, grow
        self.program, self.context, self.vocab = decoder.program, decoder.context, decoder.vocab

    # -- the cache --------------------------------------------------------------------------------
    @property
    def position(self) -> int:
        """How many tokens the last sequence has. Set it to a smaller number to drop the last ones, or
        to 0 to drop all sequences. Models with recurrent layers drop tokens back to the last copy of
        their states.

        Raises:
            InputError: it is set to something other than a number from 0 to what it is.
        """
        return len(self.decoder.tokens)

    @position.setter
    def position(self, position: int) -> None:
        tokens = self.decoder.tokens
        if type(position) is not int or not 0 <= position <= len(tokens):
            raise InputError(
                f"position={position!r} is not accepted",
                why=f"the cache holds {len(tokens)} tokens now",
                next="set a smaller number, or generate from the tokens that are wanted",
            )
        self.decoder.cut(position)

    def grow(self, context: int) -> None:
        """Has the cache hold more tokens, besides those that it holds. For a moment, the old cache and
        the new one are both on the device. A generation that runs is ended.

        Args:
            context: tokens, more than now; above what the model was trained with, that number.

        Raises:
            InputError: the number is not accepted, or the model does not fit then; or the file has
                a context of its own, as .pvk and .pte files do. The model is as it was.
        """
        self.program.check_open()
        if self._grow is None:
            raise InputError(
                f"the cache cannot grow from {self.context} to {context!r} tokens",
                where=self.file.name,
                why="the context is part of the file",
                next="save or export the model with a larger context",
            )
        self.plan = self._grow(self, context)
        self.context = self.decoder.context

    @property
    def logits(self) -> np.ndarray:
        """Those that the last token was chosen by, float32 [vocab]."""
        return self.decoder.logits()

    # -- text -------------------------------------------------------------------------------------
    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the file.

        Raises:
            UnsupportedProgramError: the package `tokenizers` is not installed, or the kind of the
                tokenizer is not known.
            FileFormatError: the file has none, or a damaged one.
        """
        self.program.check_open()
        return tokenizer_of(self.file, self.vocab)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        stop: str | Sequence[str] = (),
        grammar: str | None = None,
        json_schema: str | Mapping[str, Any] | None = None,
    ) -> Pieces:
        """Continues a text, or token ids. What the prompt and the cache have in common from the start
        is not computed again.

        Args:
            prompt: text, in which control tokens such as "<|im_end|>" are recognized; or token ids.
            max_tokens: to generate; None: until an end token, or until the cache is full.
            temperature: 0 always takes the most likely token.
            top_k: the most likely tokens of which one is taken; 0: all.
            top_p: takes one of the most likely tokens that have this probability together.
            min_p: takes no token less likely than this part of the most likely one.
            seed: of the random numbers; None: another one at each call.
            repetition_penalty: divides logits above 0, and multiplies the others, of tokens that the
                prompt or the answer has; 1: nothing.
            presence_penalty: is subtracted from the logits of tokens that the answer has.
            logit_bias: numbers that are added to logits, by token.
            logprobs: pieces say how likely their tokens were, and so many of the most likely ones,
                20 at most; None: they do not.
            stop: strings that end the text, and are not part of it. With token ids as the prompt
                too, they need the tokenizer.
            grammar: the text follows this grammar, in the Lark-like form of llguidance.
            json_schema: the text is JSON of this schema.

        Raises:
            InputError: an argument is not accepted, or the prompt does not fit into the cache, which
                is as it was then.
            UnsupportedProgramError: a package that an argument needs is not installed.
        """
        sampling = Sampling(
            *(temperature, top_k, top_p, min_p, seed, repetition_penalty, presence_penalty),
            arguments.mapping("logit_bias", logit_bias),
            logprobs,
        )
        sampling.bias(self.vocab)
        stops = arguments.texts("stop", stop)
        tokens = (
            self.tokenizer.encode(prompt)
            if isinstance(prompt, str)
            else arguments.token_ids(prompt, self.vocab)
        )
        if not tokens:
            raise InputError("the prompt is empty", next="give one token or more")
        if len(tokens) > self.context:
            raise InputError(
                f"the prompt has {len(tokens)} tokens, and the cache holds {self.context} tokens",
                next="shorten the prompt, or load the model with a larger context",
            )
        if max_tokens is not None:
            arguments.whole("max_tokens", max_tokens, 1, "an integer above 0")
        rules = checked_grammar(grammar, json_schema)
        constraint = None if rules is None else Constraint(self._engine, rules)
        stats = Stats(prompt_tokens=len(tokens))
        needs_text = isinstance(prompt, str) or stops or constraint
        tokenizer = self.tokenizer if needs_text else None
        steps = self.decoder.steps(tokens, sampling, constraint, stats, max_tokens)
        return Pieces(_pieces(steps, max_tokens, stops, stats, tokenizer), stats)

    @functools.cached_property
    def _engine(self) -> Any:
        return engine_of(self.tokenizer, self.vocab)

    @functools.cached_property
    def _template(self) -> Template:
        tokenizer = self.tokenizer
        if not isinstance(tokenizer.template, str):
            raise UnsupportedProgramError(
                "the file has no chat template",
                where=self.program.name,
                next="give the whole text to generate()",
            )
        tokens = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
        return Template(tokenizer.template, self.program.name, tokens)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Pieces:
        """Answers a message, or a conversation. What the model thinks, and its calls of tools, are
        pieces of another `kind`.

        Args:
            messages: what the user says; or messages, each with "role" (system, user, assistant or
                tool) and "content".
            tools: functions that the model may call, each as {"type": "function", "function":
                {"name": ..., "description": ..., "parameters": JSON schema}}.
            template_args: further arguments of the chat template.
            options: as for `generate`.

        Raises:
            InputError: as for `generate`; or the template refuses the messages.
            UnsupportedProgramError: the file has no chat template, or a package is missing.
            FileFormatError: the template is damaged, or breaks a limit.
        """
        prompt = self._rendered(messages, tools, template_args)
        pieces = self.generate(prompt, **options)
        return Pieces(_by_kind(pieces, KindSplitter(prompt)), pieces.stats)

    def count_tokens(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> int:
        """How many tokens a prompt of `chat` has. Arguments and errors are those of `chat`."""
        return len(self.tokenizer.encode(self._rendered(messages, tools, template_args)))

    def cut_text(self, text: str, tokens: int) -> str:
        """A text without its last tokens.

        Raises:
            InputError: it has not so many.
        """
        ids = self.tokenizer.encode(arguments.text("text", text), start=False)
        if arguments.whole("tokens", tokens, 0, "an integer") > len(ids):
            raise InputError(f"tokens={tokens} is not accepted", why=f"the text has {len(ids)}")
        return self.tokenizer.decode(ids[: len(ids) - tokens])

    def _rendered(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any] | None,
    ) -> str:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        variables = arguments.template_args(template_args)
        if tools is not None:
            variables["tools"] = arguments.tools(tools)
        return self._template.render(arguments.messages(messages), variables)

    def session(
        self, *, system: str | None = None, overflow: str = "error", **options: Any
    ) -> Session:
        """A conversation, which remembers what was said.

        Args:
            system: the message that stands before all others.
            overflow: what happens if the conversation does not fit into the cache. "error": `send`
                raises InputError. "slide": the oldest turns are forgotten. "grow": the cache becomes
                twice as large, see `grow`; where it cannot, `send` raises InputError.
            options: of `chat`, for all messages.
        """
        return Session(self, system, overflow, options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model to a .pvk file that `purevk.llm.load` takes: graphs and weights as the
        kernels read them, the tokenizer, the chat template and the end tokens. It has the context
        and the dtype that the model was loaded with, and runs on any device.

        Raises:
            UnsupportedProgramError: it was loaded from a .pte file.
            OSError: the file cannot be written.
        """
        from purevk.llm.saved import save

        save(path, self.decoder, self.plan, self.file.metadata)

    # -- lifetime ---------------------------------------------------------------------------------
    def close(self) -> None:
        """Releases everything on the device, and the file. Safe to call twice."""
        self.program.close()

    def __repr__(self) -> str:
        name = printable(self.program.name)
        return f"<Model {name} on {self.program.device.name}, context {self.context}>"


def _pieces(
    steps: Iterator[tuple[int, Any]],
    max_tokens: int | None,
    stop: Sequence[str],
    stats: Stats,
    tokenizer: Tokenizer | None,
) -> Iterator[Piece]:
    """Pieces of text, until the generation ends."""
    writer = TextWriter(stop)
    ends = tokenizer.end_tokens if tokenizer else frozenset()
    last = ""
    for token, logprobs in steps:
        stats.count()
        if token in ends:
            stats.why = "end"
            break
        text = ""
        if tokenizer:
            name = tokenizer.name(token)
            is_marker = name in MARKER_TEXTS
            text = writer.write(name.encode() if is_marker else tokenizer.token_bytes(token))
        if writer.stopped:
            stats.why, last = "stop", text
            break
        if stats.tokens == max_tokens:
            stats.why = "length"
        yield Piece(text, (token,), stats, TEXT, logprobs)
        if stats.why == "length":
            break
    else:
        stats.why = stats.why or "context"
    last += writer.write(b"", last=True)
    if last:
        yield Piece(last, (), stats)


def _by_kind(pieces: Pieces, splitter: KindSplitter) -> Iterator[Piece]:
    """The pieces, split by kind. The tokens of a piece stay with the first part of it."""
    for piece in pieces:
        for kind, text in list(splitter.split(piece.text)) or [(splitter.kind, "")]:
            yield replace(piece, text=text, kind=kind)
            piece = replace(piece, tokens=(), logprobs=())
    for kind, text in splitter.split("", last=True):
        yield Piece(text, (), pieces.stats, kind)
