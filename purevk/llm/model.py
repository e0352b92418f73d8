"""A language model on a device: `purevk.llm.load`."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import InputError, UnsupportedProgramError
from purevk.graph.context import Context
from purevk.graph.devices import choose_context
from purevk.ir import Graph, TensorType, Value
from purevk.llm.gguf import GgufFile
from purevk.llm.graphs import source_of
from purevk.llm.llama import Llama
from purevk.llm.network import Network
from purevk.llm.pieces import Piece, Pieces, Stats, TextWriter
from purevk.llm.plan import Plan, check_fits, plan_of
from purevk.llm.sampling import Sampling, sampling_graph
from purevk.llm.session import Session, check_messages
from purevk.llm.templates import Template
from purevk.llm.tokenizer import Tokenizer
from purevk.program.program import Program

ARCHITECTURES = {"llama": Llama, "qwen2": Llama, "qwen3": Llama}
"""How to build graphs, by the value of `general.architecture`."""
DTYPES = {
    "float32": DType.float32,
    "float16": DType.float16,
    "bfloat16": DType.bfloat16,
}
DEFAULT_CONTEXT = 4096
MOST_ROWS = 512  # tokens of a prompt in one submission


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
    file = GgufFile(os.fspath(path))
    try:
        chosen = choose_context(device, None)
        narrow = chosen.traits.has("storage_16bit") and chosen.traits.profile.has_fast_shared_memory
        computed = DTYPES["float16" if narrow else "float32"] if dtype == "auto" else DTYPES[dtype]
        return Model(file, chosen, context, computed)
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
    with GgufFile(os.fspath(path)) as file:
        architecture, rows = _architecture(file, context)
        return plan_of(_step_graph(file, architecture, rows, DTYPES[dtype], "decode"), rows)


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


def _step_graph(file: GgufFile, model: Llama, rows: int, dtype: DType, name: str) -> Graph:
    """The method "prompt", of tokens that the host gives, or "decode", of the token that the last
    call has chosen. Both take the position of the first token, int64 [1], store the logits of the
    last one and the token with the largest, and return this token, int64 [1, 1]."""
    net = Network(name, file, dtype, rows)
    token = net.state(TensorType(DType.int64, (1, 1)), name="token")
    tokens: Value = token
    if name == "prompt":
        tokens = net.input(DType.int64, (1, 1), min(MOST_ROWS, rows))
    else:  # it is in range: no kernel has to check it
        tokens = net.op("clamp.default", token, 0, model.vocab - 1)
    position = net.input(DType.int64, (1,))
    numbers = net.constant(np.arange(rows), DType.int64)
    steps = net.op("slice.Tensor", numbers, 0, 0, tokens.type.dims[1], 1)
    positions = net.op("add.Tensor", position, steps, 1)
    columns, lines = (
        net.op("unsqueeze.default", each, dim) for each, dim in ((numbers, 0), (positions, 1))
    )
    mask = net.op("le.Tensor", columns, lines)
    logits = model.logits(net, tokens, positions, mask)
    chosen = net.op("argmax.default", logits, -1, True)
    stored = net.state(TensorType(dtype, (1, model.vocab)), name="logits")
    net.store(stored, logits)
    net.store(token, chosen)
    return net.finish(chosen)


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


class Model:
    """A language model. `purevk.llm.load` makes it. One generation runs at a time.

    Attributes:
        context: tokens that the cache holds.
        vocab: tokens that there are.
        program: the program that runs, with the methods "prompt" and "decode".
        plan: the memory that the model needs.
    """

    def __init__(self, file: GgufFile, device: Context, context: int | None, dtype: DType) -> None:
        architecture, self.context = _architecture(file, context)
        self.vocab = architecture.vocab
        self._file, self._dtype = file, dtype
        arguments = (file, architecture, self.context, dtype)
        self.plan = plan_of(_step_graph(*arguments, "decode"), self.context)
        check_fits(self.plan, device, file.name)
        sources = {
            name: source_of(functools.partial(_step_graph, *arguments, name))
            for name in ("prompt", "decode")
        }
        self.program = Program(os.path.basename(file.name), sources, device, closing=file.close)
        self.program.in_flight = 4  # two steps, of two calls each
        self._tokens: list[int] = []  # whose keys and values are in the cache
        is_gpu = device.traits.profile.has_fast_shared_memory
        self._chunk = ChunkSize(min(MOST_ROWS, self.context), is_gpu)
        self._running: object = None

    # -- the cache --------------------------------------------------------------------------------
    @property
    def position(self) -> int:
        """How many tokens the cache holds. Set it to a smaller number to drop the last ones.

        Raises:
            InputError: it is set to something other than a number from 0 to what it is.
        """
        return len(self._tokens)

    @position.setter
    def position(self, position: int) -> None:
        if not isinstance(position, int) or not 0 <= position <= len(self._tokens):
            raise InputError(
                f"position={position!r} is not accepted",
                why=f"the cache holds {len(self._tokens)} tokens now",
                next="set a smaller number, or generate from the tokens that are wanted",
            )
        self._running = None
        del self._tokens[position:]

    @property
    def logits(self) -> np.ndarray:
        """Those that the last token was chosen by, float32 [vocab]."""
        stored = self.program.state["logits"].reshape(-1)
        if self._dtype is DType.bfloat16:
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)

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
        return Tokenizer(self._file, self.vocab)

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
        stop: str | Sequence[str] = (),
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
            stop: strings that end the text, and are not part of it. With token ids as the prompt
                too, they need the tokenizer.

        Raises:
            InputError: an argument is not accepted, or the prompt does not fit into the cache, which
                is as it was then.
        """
        sampling = Sampling.checked(temperature, top_k, top_p, min_p, seed)
        stops = [stop] if isinstance(stop, str) else list(stop)
        is_text = isinstance(prompt, str)
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self._ids(prompt)
        self._check_prompt(tokens)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise InputError(
                f"max_tokens={max_tokens!r} is not accepted", why="an integer above 0 is expected"
            )
        stats = Stats(prompt_tokens=len(tokens))
        tokenizer = self.tokenizer if is_text or stops else None
        made = self._pieces(tokens, max_tokens, sampling, stops, stats, tokenizer)
        return Pieces(made, stats)

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
        template_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Pieces:
        """Answers a message, or a conversation.

        Args:
            messages: what the user says; or messages, each with "role" (system, user, assistant or
                tool) and "content".
            template_args: further arguments of the chat template.
            options: as for `generate`.

        Raises:
            InputError: as for `generate`; or the template refuses the messages.
            UnsupportedProgramError: the file has no chat template, or a package is missing.
            FileFormatError: the template is damaged, or breaks a limit.
        """
        return self.generate(self._rendered(messages, template_args), **options)

    def count_tokens(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        template_args: Mapping[str, Any] | None = None,
    ) -> int:
        """How many tokens a prompt of `chat` has. Arguments and errors are those of `chat`."""
        return len(self.tokenizer.encode(self._rendered(messages, template_args)))

    def _rendered(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        template_args: Mapping[str, Any] | None,
    ) -> str:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._template.render(check_messages(messages), **(template_args or {}))

    def session(
        self, *, system: str | None = None, overflow: str = "error", **options: Any
    ) -> Session:
        """A conversation, which remembers what was said.

        Args:
            system: the message that stands before all others.
            overflow: what happens if the conversation does not fit into the cache. "error": `send`
                raises InputError. "slide": the oldest turns are forgotten.
            options: of `chat`, for all messages.
        """
        return Session(self, system, overflow, options)

    def _ids(self, prompt: Sequence[int]) -> list[int]:
        tokens = [int(token) for token in prompt]
        wrong = next((token for token in tokens if not 0 <= token < self.vocab), None)
        if wrong is not None:
            raise InputError(
                f"there is no token {wrong}", why=f"token ids are from 0 to {self.vocab - 1}"
            )
        return tokens

    def _check_prompt(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise InputError("the prompt is empty", next="give one token or more")
        if len(tokens) > self.context:
            raise InputError(
                f"the prompt has {len(tokens)} tokens, and the cache holds {self.context} tokens",
                next="shorten the prompt, or load the model with a larger context",
            )

    def _pieces(
        self,
        prompt: list[int],
        max_tokens: int | None,
        sampling: Sampling,
        stop: Sequence[str],
        stats: Stats,
        tokenizer: Tokenizer | None,
    ) -> Iterator[Piece]:
        writer = TextWriter(stop)
        ends = tokenizer.end_tokens if tokenizer else frozenset()
        last = ""
        for token in self._steps(prompt, sampling, stats):
            stats.count()
            if token in ends:
                stats.why = "end"
                break
            text = writer.write(tokenizer.token_bytes(token)) if tokenizer else ""
            if writer.stopped:
                stats.why, last = "stop", text
                break
            if stats.tokens == max_tokens:
                stats.why = "length"
                yield Piece(text, (token,), stats)
                break
            yield Piece(text, (token,), stats)
        else:
            stats.why = "context"
        last += writer.write(b"", last=True)
        if last:
            yield Piece(last, (), stats)

    def _steps(self, prompt: list[int], sampling: Sampling, stats: Stats) -> Iterator[int]:
        """The tokens that follow a prompt, until the cache is full. The next step is submitted before
        the token of the last one is read."""
        mine = self._running = object()
        decode = self.program.method("decode")
        pending: Future[Any] = self._prompt(prompt, sampling, stats)
        while True:
            submitted: Future[Any] | None = None
            position = len(self._tokens)
            if position < self.context:
                submitted = decode.submit(np.array([position]))
                if not sampling.greedy:
                    submitted = self._sample(sampling)
            token = int(pending.result().reshape(-1)[0])
            if submitted is not None:
                self._tokens.append(token)  # the step that was submitted has it as its input
            yield token
            if submitted is None:
                return
            if self._running is not mine:
                raise InputError(
                    "this generation was ended",
                    why="another one has begun, or the position was set",
                    next="finish one generation before the next one",
                )
            pending = submitted

    def _prompt(self, prompt: list[int], sampling: Sampling, stats: Stats) -> Future[Any]:
        """Computes what the cache does not hold of a prompt."""
        common = 0
        for ours, theirs in zip(self._tokens, prompt[:-1]):
            if ours != theirs:
                break
            common += 1
        stats.reused_tokens = common
        del self._tokens[common:]
        method = self.program.method("prompt")
        while True:
            at = len(self._tokens)
            part = prompt[at : at + self._chunk.rows]
            start = time.perf_counter()
            future = method.submit(np.array([part]), np.array([at]))
            future.result()
            self._chunk.took(time.perf_counter() - start, len(part))
            self._tokens += part
            if len(self._tokens) == len(prompt):
                return future if sampling.greedy else self._sample(sampling)

    def _sample(self, sampling: Sampling) -> Future[Any]:
        """Has a token be chosen by the logits of the last call. The method is lowered at its first
        use."""
        if "sample" not in self.program.methods:
            build = functools.partial(sampling_graph, self.vocab, self._dtype)
            self.program.add_methods({"sample": source_of(build)})
        return self.program.method("sample").submit(sampling.parameters())

    # -- lifetime ---------------------------------------------------------------------------------
    def close(self) -> None:
        """Releases everything on the device, and the file. Safe to call twice."""
        self.program.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {self.program.name} on {self.program.device.name}, context {self.context}>"
