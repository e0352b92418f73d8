"""The tokenizer of a GGUF file: byte-level BPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from purevk.errors import FileFormatError, InputError, PurevkError, UnsupportedProgramError
from purevk.llm.gguf import GgufFile

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,%d}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "refact": (r"\p{N}", _GPT2),
    "command-r": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3 % 3,),
    "qwen2": (_LLAMA3 % 1,),
}
"""How a text is split before pairs are merged, by `tokenizer.ggml.pre`: regular expressions, applied
one after the other."""
_CONTROL, _USER = 3, 4
_END_NAMES = (
    "<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>",
)  # fmt: skip


class Tokenizer:
    """Text to token ids and back.

    Args:
        file: has the vocabulary.
        vocab: tokens of the model.

    Attributes:
        bos, eos: the texts of the tokens that begin and end a sequence; "" if there is none.
        end_tokens: the ids after which nothing is generated.
        template: the chat template; None if the file has none.

    Raises:
        UnsupportedProgramError: the package `tokenizers` is not installed, or the kind of the
            tokenizer is not known.
        FileFormatError: the vocabulary is damaged, or there is none.
    """

    def __init__(self, file: GgufFile, vocab: int) -> None:
        self._file = file
        kind = file.value("tokenizer.ggml.model", str)
        pre = file.value("tokenizer.ggml.pre", str, "" if kind == "gpt2" else "-")
        if kind != "gpt2" or pre not in SPLITS:
            raise UnsupportedProgramError(
                f"the tokenizer {kind!r} with tokenizer.ggml.pre {pre!r} is not known",
                where=file.name,
                why=f"known: 'gpt2' with {', '.join(SPLITS)}",
                next="give token ids to generate(); any tokenizer can make them",
            )
        self._texts = self._list("tokenizer.ggml.tokens")
        if len(self._texts) > vocab:
            raise self._damaged(f"{len(self._texts)} tokens, and the model has {vocab}")
        ids = {text: number for number, text in enumerate(self._texts)}
        types = file.value(
            "tokenizer.ggml.token_type", np.ndarray, np.ones(len(self._texts), np.int32)
        ).tolist()
        if len(types) != len(self._texts):
            raise self._damaged(f"{len(types)} types of {len(self._texts)} tokens")
        merges = [tuple(each.split(" ")) for each in self._list("tokenizer.ggml.merges")]
        for pair in merges:
            if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys():
                raise self._damaged(f"the merge {' '.join(pair)[:40]!r} is not one of two tokens")
        self._special = {number for number, each in enumerate(types) if each in (_CONTROL, _USER)}
        self._hidden = {number for number, each in enumerate(types) if each == _CONTROL}
        try:
            self._tokenizer = self._make(pre, ids, merges)
        except PurevkError:
            raise
        except BaseException as error:  # whatever the package raises
            if not is_error(error):
                raise
            raise self._damaged(str(error)) from None
        self._bytes = {chr(code): byte for byte, code in _byte_codes().items()}
        self.bos, self.eos = (
            self._text_of(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")
        )
        self._adds_bos = file.value("tokenizer.ggml.add_bos_token", bool, False) and bool(self.bos)
        names = {self.eos, self._text_of("tokenizer.ggml.eot_token_id"), *_END_NAMES}
        self.end_tokens = frozenset(ids[name] for name in names if name in ids)
        self.template = file.metadata.get("tokenizer.chat_template")

    def _make(self, pre: str, ids: dict[str, int], merges: list[Any]) -> Any:
        try:
            from tokenizers import AddedToken, Regex, models, pre_tokenizers
            from tokenizers import Tokenizer as Implementation
        except ImportError:
            raise UnsupportedProgramError(
                "the package tokenizers is not installed",
                next="pip install purevk[llm], or give token ids to generate()",
            ) from None
        model = models.BPE(ids, merges, ignore_merges=pre == "llama-bpe")
        made = Implementation(model)
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[pre]]
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        texts = [self._texts[number] for number in sorted(self._special) if self._texts[number]]
        made.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
        return made

    def _list(self, key: str) -> list[str]:
        found: list[str] = self._file.value(key, list)
        if not all(isinstance(each, str) for each in found):
            raise self._damaged(f"{key} is no list of texts")
        return found

    def _text_of(self, key: str) -> str:
        number = self._file.metadata.get(key)
        if number is None:
            return ""
        if not isinstance(number, int) or not 0 <= number < len(self._texts):
            raise self._damaged(f"{key} is {number!r}")
        return self._texts[number]

    def _damaged(self, why: str) -> FileFormatError:
        return FileFormatError(
            "the vocabulary is damaged",
            where=self._file.name,
            why=why,
            next="convert the model again",
        )

    @property
    def control_tokens(self) -> frozenset[int]:
        """Tokens that are no text."""
        return frozenset(self._hidden)

    def name(self, token: int) -> str:
        """How the vocabulary writes a token."""
        return self._texts[token] if token < len(self._texts) else ""

    def encode(self, text: str, start: bool = True) -> list[int]:
        """The token ids of a text. Control tokens such as "<|im_end|>" are recognized.

        Args:
            start: the text begins a sequence: it gets the token for that if the model wants it.

        Raises:
            InputError: the text has surrogates, which are no characters.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                "this text cannot be encoded",
                where=f"character {error.start}",
                why=error.reason,
                next="decode its bytes with errors='replace'",
            ) from None
        if start and self._adds_bos and not text.startswith(self.bos):
            text = self.bos + text
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 of a token, or a part of it. Control tokens have none."""
        if token in self._hidden or token >= len(self._texts):
            return b""
        text = self._texts[token]
        if token in self._special or any(each not in self._bytes for each in text):
            return text.encode()
        return bytes(self._bytes[each] for each in text)

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, without control tokens."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")


def is_error(error: BaseException) -> bool:
    """Whether something was raised by a failure. A panic of a package in Rust is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _byte_codes() -> dict[int, int]:
    """The character that stands for each byte in a vocabulary: printable ones for themselves, the
    others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: byte for byte in printable}, **{b: 256 + n for n, b in enumerate(others)}}
