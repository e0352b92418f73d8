"""Answers that follow a grammar or a JSON schema, by the package llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from purevk.errors import InputError, UnsupportedProgramError
from purevk.llm.arguments import not_installed, refuse, text
from purevk.llm.tokenizer import Tokenizer, is_error

_MOST_TEXT = 1 << 17  # characters of a grammar
_MOST_RULES = 500  # and references of a schema: llguidance follows chains of them by recursion
_RULE = re.compile(r"^\s*[?!]?\w+[^:\n]*:|\$ref", re.MULTILINE)


def _library() -> Any:
    """The package llguidance. Raises UnsupportedProgramError if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise not_installed("llguidance") from None
    return llguidance


class Constraint:
    """Which tokens may come next. It is for one generation.

    Args:
        engine: of the tokenizer, see `engine_of`.
        grammar: in the form of llguidance, see `checked_grammar`.

    Raises:
        InputError: the grammar is damaged.
    """

    def __init__(self, engine: Any, grammar: str) -> None:
        self._matcher = _library().LLMatcher(engine, grammar, log_level=0)
        self._check()

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, vocab: int) -> np.ndarray:
        """A bit for each of `vocab` tokens, set if it may come next: uint8 [bytes], a multiple of 4.

        Raises:
            InputError: the grammar asks for more than llguidance's limits.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        return np.frombuffer(bits, np.uint8)[: -(-vocab // 32) * 4]  # there may be a word more

    def accept(self, token: int) -> None:
        """Goes on after a token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError("the grammar cannot be used", why=self._matcher.get_error()[:1000])


class _Vocabulary:
    """A tokenizer as llguidance takes it: attributes by these names, and a function."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        control = tokenizer.control_tokens
        self.eos_token_id = min(tokenizer.end_tokens, default=0)
        self.bos_token_id = None
        self.special_token_ids = sorted(control)
        self.tokens = [
            # llguidance recognizes names of control tokens by this byte
            b"\xff" + tokenizer.name(token).encode()
            if token in control
            else tokenizer.token_bytes(token)
            for token in range(vocab)
        ]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, start=False)


def engine_of(tokenizer: Tokenizer, vocab: int) -> Any:
    """What llguidance knows of a tokenizer; it is the same for all generations.

    Raises:
        UnsupportedProgramError: the package is not installed, or the tokenizer has no token that
            ends an answer.
    """
    library = _library()
    ends = sorted(tokenizer.end_tokens)
    if not ends:
        raise UnsupportedProgramError(
            "the tokenizer has no token that ends an answer",
            why="a grammar must be able to end one",
            next="generate without a grammar, with max_tokens",
        )
    try:
        vocabulary = library.TokenizerWrapper(_Vocabulary(tokenizer, vocab))
        return library.LLTokenizer(vocabulary, n_vocab=vocab, eos_token=ends)
    except BaseException as error:
        if not is_error(error):
            raise
        raise UnsupportedProgramError(
            "llguidance does not accept the vocabulary",
            why=str(error)[:1000],
            next="generate without a grammar",
        ) from None


def checked_grammar(grammar: str | None, json_schema: str | Mapping[str, Any] | None) -> str | None:
    """A grammar in the form of llguidance; None if there is none.

    Raises:
        InputError: both are there, or one is not what is expected.
        UnsupportedProgramError: the package is not installed.
    """
    if grammar is None and json_schema is None:
        return None
    if grammar is not None and json_schema is not None:
        raise InputError("both grammar and json_schema are there", next="leave one of them out")
    if grammar is not None:
        text("grammar", grammar)
    elif not isinstance(json_schema, (str, Mapping, bool)):
        raise refuse("json_schema", json_schema, "a schema")
    matcher = _library().LLMatcher
    try:
        if grammar is not None:
            rules = len(_RULE.findall(grammar))
            serialized: str = matcher.grammar_from_lark(grammar)
        else:
            schema = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
            rules = schema.count("$ref")
            serialized = matcher.grammar_from_json_schema(schema)
    except (TypeError, ValueError, RecursionError) as error:
        what = "json_schema is no JSON schema" if grammar is None else "this is no grammar"
        raise InputError(what, why=str(error)[:1000]) from None
    for count, most, what in (
        (rules, _MOST_RULES, "rules or references"),
        (len(serialized), _MOST_TEXT, "characters"),
    ):
        if count > most:
            raise InputError(f"the grammar has {count} {what}", why=f"{most} are accepted")
    return serialized
