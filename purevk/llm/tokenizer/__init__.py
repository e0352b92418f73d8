"""Tokenizers: of GGUF files (byte-level BPE, SentencePiece as Llama has it, and BPE of characters as
Gemma 4 has it), and of tokenizer.json."""

from __future__ import annotations

import base64
import functools
import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from purevk.errors import InputError, PurevkError, UnsupportedProgramError
from purevk.llm.arguments import not_installed
from purevk.llm.files import ModelFile, damaged
from purevk.program.variants.lowering import uncollected

_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,%d}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cases(suffix: str, digits: str) -> str:
    """Words split where a capital follows a small letter."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{_UPPER}*{_LOWER}+{suffix}|{before}{_UPPER}+{_LOWER}*{suffix}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2")
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys((*_WHOLE_WORDS, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_LLAMA3 % 3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"), (_LLAMA3 % 1,)),
    "qwen35": (_QWEN35,),
    "tekken": (_cases("", r"\p{N}"),),
    **dict.fromkeys(("gpt-4o", "llama4"), (_cases(rf"(?i:{_CONTRACTIONS})?", r"\p{N}{1,3}"),)),
}
"""How a text is split before pairs are merged, by `tokenizer.ggml.pre`: regular expressions, applied
one after the other."""
_damaged = functools.partial(damaged, what="the vocabulary is damaged")
MOST_OF_TOKEN = 1024  # bytes or characters of a token whose merges are searched for
_MOST_OF_MERGES = 1 << 26  # characters
_UNKNOWN, _CONTROL, _USER, _BYTE = 2, 3, 4, 6
_MOST_GROWTH = 64  # characters that the normalizers of a tokenizer.json may make of one
_MOST_OF_TEMPLATE = 1 << 14  # characters of a post_processor
_SPACE = "\u2581"  # stands for a space in pieces of SentencePiece
_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")
_END_NAMES = (
    "<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>",
    "<|tool_response>", "<|eom_id|>",
)  # fmt: skip
# gpt-oss ends an answer by one of these. Its "<|end|>" ends a message, which others of it may follow.
_ENDS_OF_MESSAGES = ("<|return|>", "<|call|>")


class Tokenizer:
    """Text to token ids and back.

    Args:
        where: the file, for messages.
        texts: of the tokens, as the vocabulary writes them.
        special: tokens that are recognized in texts, by id.
        hidden: those of them that are no text.
        implementation: a tokenizer of the package `tokenizers`.
        metadata: of the file; it says what begins a sequence and what ends one.
        by_bytes: texts are written in the characters of byte-level BPE; else of SentencePiece.

    Attributes:
        bos, eos: the texts of the tokens that begin and end a sequence; "" if there is none.
        end_tokens: the ids after which nothing is generated.
        template: the chat template; None if the file has none.
    """

    def __init__(
        self,
        where: str,
        texts: Sequence[str],
        special: set[int],
        hidden: set[int],
        implementation: Any,
        metadata: Mapping[str, Any],
        by_bytes: bool,
    ) -> None:
        self._texts, self._special, self._hidden = texts, special, hidden
        self._implementation, self._by_bytes = implementation, by_bytes
        self._bytes = {chr(code): byte for byte, code in byte_codes().items()}
        ids = {text: number for number, text in enumerate(texts)}

        def named(key: str) -> str:
            number = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if number is None:
                return str(metadata.get(f"tokenizer.{key}_token", ""))
            if not isinstance(number, int) or not 0 <= number < len(texts):
                raise _damaged(where, f"tokenizer.ggml.{key}_token_id is {number!r}")
            return texts[number]

        self.bos, self.eos = named("bos"), named("eos")
        default = not by_bytes and "tokenizer.ggml.model" in metadata
        adds = metadata.get("tokenizer.ggml.add_bos_token", default)
        self._adds_bos = bool(adds) and bool(self.bos)
        names = set(_END_NAMES)
        if ids.keys() >= {*_ENDS_OF_MESSAGES}:
            names = {*names, *_ENDS_OF_MESSAGES} - {"<|end|>"}
        ends = {self.eos, named("eot"), *names}
        stated = _tokens(where, metadata, "tokenizer.ends", len(texts)) or frozenset()
        usual = stated | {ids[name] for name in ends if name in ids}
        all_ends = _tokens(where, metadata, "tokenizer.all_ends", len(texts))
        self.end_tokens = usual if all_ends is None else all_ends
        self.template = metadata.get("tokenizer.chat_template")

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
            InputError: the text has surrogates, which are no characters; or the tokenizer's regular
                expressions fail on it.
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
        try:
            ids: list[int] = self._implementation.encode(text, add_special_tokens=False).ids
        except BaseException as error:  # whatever the package raises
            if not is_error(error):
                raise
            raise InputError(
                "the tokenizer of the file cannot encode this text",
                where=f"{len(text)} characters",
                why=str(error)[:1000],
                next="give other text, or token ids",
            ) from None
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 of a token, or a part of it. Control tokens have none."""
        if token in self._hidden or token >= len(self._texts):
            return b""
        text = self._texts[token]
        if not self._by_bytes:
            byte = _BYTE_NAME.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace(_SPACE, " ").encode()
        if token in self._special or any(each not in self._bytes for each in text):
            return text.encode()
        return bytes(self._bytes[each] for each in text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, without control tokens."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")


def is_error(error: BaseException) -> bool:
    """Whether something was raised by a failure. A panic of a package in Rust is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def tokenizer_of(file: ModelFile, vocab: int) -> Tokenizer:
    """The tokenizer of a file.

    Raises:
        UnsupportedProgramError: the package `tokenizers` is not installed, or the kind of the
            tokenizer is not known.
        FileFormatError: the vocabulary is damaged, or there is none.
    """
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise not_installed("tokenizers", "give token ids to generate()") from None
    try:
        text = file.metadata.get("tokenizer.json")
        with uncollected():
            return _of_json(file, text) if isinstance(text, str) else _of_gguf(file, vocab)
    except PurevkError:
        raise
    except BaseException as error:  # whatever the package raises
        if not is_error(error):
            raise
        raise _damaged(file.name, str(error)) from None


def _of_gguf(file: ModelFile, vocab: int) -> Tokenizer:
    kind = file.value("tokenizer.ggml.model", str)
    pre = file.value("tokenizer.ggml.pre", str, "" if kind == "gpt2" else "default")
    if kind not in _KINDS or (kind == "gpt2" and pre not in SPLITS):
        raise UnsupportedProgramError(
            f"the tokenizer {kind!r} with tokenizer.ggml.pre {pre!r} is not known",
            where=file.name,
            why=f"known: 'llama', 'gemma4', and 'gpt2' with {', '.join(SPLITS)}",
            next="give token ids to generate(); any tokenizer can make them",
        )
    texts = _list(file, "tokenizer.ggml.tokens")
    if len(texts) > vocab:
        raise _damaged(file.name, f"{len(texts)} tokens, and the model has {vocab}")
    ids = {text: number for number, text in enumerate(texts)}
    plain = np.ones(len(texts), np.int32)
    types = file.value("tokenizer.ggml.token_type", np.ndarray, plain).tolist()
    if len(types) != len(texts):
        raise _damaged(file.name, f"{len(types)} types of {len(texts)} tokens")
    special = {number for number, each in enumerate(types) if each in (_CONTROL, _USER)}
    hidden = {number for number, each in enumerate(types) if each in (_CONTROL, _UNKNOWN)}
    implementation = _KINDS[kind](file, texts, ids, types)
    from tokenizers import AddedToken

    marked = [texts[number] for number in sorted(special) if texts[number]]
    implementation.add_special_tokens([AddedToken(text, normalized=False) for text in marked])
    metadata = file.metadata
    if kind == "gemma4":  # some files say otherwise
        metadata = {**metadata, "tokenizer.ggml.add_bos_token": True}
    return Tokenizer(*(file.name, texts, special, hidden, implementation, metadata, kind == "gpt2"))


def _merges(file: ModelFile) -> list[Any]:
    """Pairs of texts. The package sees to it that they, and what they become, are tokens."""
    merges: list[Any] = [tuple(each.split(" ")) for each in _list(file, "tokenizer.ggml.merges")]
    if {*map(len, merges)} - {2}:
        pair = next(pair for pair in merges if len(pair) != 2)
        raise _damaged(file.name, f"the merge {' '.join(pair)[:40]!r} is not one of two tokens")
    return merges


def _byte_level(file: ModelFile, texts: list[str], ids: dict[str, int], types: list[int]) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    merges = _merges(file)
    pre = file.metadata.get("tokenizer.ggml.pre", "")
    tokenizer: Any = Tokenizer(
        models.BPE(ids, merges, ignore_merges=pre in (*_WHOLE_WORDS, "tekken"))
    )
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def _sentence_pieces(
    file: ModelFile, texts: list[str], ids: dict[str, int], types: list[int]
) -> Any:
    """Pairs are merged in the order of the scores of what they become, as llama.cpp does."""
    from tokenizers import normalizers

    scores = file.value("tokenizer.ggml.scores", np.ndarray, np.zeros(0))
    if len(scores) != len(texts):
        raise _damaged(file.name, "it has no score for each token")
    pieces = {text for text, number in ids.items() if types[number] in (1, _USER)}
    ranked, length = [], 0
    for text in pieces:
        if len(text) > MOST_OF_TOKEN:
            why = f"a token has {len(text)} characters; {MOST_OF_TOKEN} are accepted"
            raise _damaged(file.name, why)
        score = -float(scores[ids[text]])
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in pieces and right in pieces:
                ranked.append((score, ids[left], ids[right]))
                length += len(text)
        if length > _MOST_OF_MERGES:
            why = f"its merges have more than {_MOST_OF_MERGES} characters"
            raise _damaged(file.name, why)
    merges = [(texts[left], texts[right]) for _, left, right in sorted(ranked)]
    tokenizer = _of_merges(texts, ids, types, merges)
    spaces = normalizers.Replace(" ", _SPACE)
    has_prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    return tokenizer


def _of_merges(texts: list[str], ids: dict[str, int], types: list[int], merges: list[Any]) -> Any:
    """Pairs are merged in this order. A character that is no token becomes its bytes."""
    from tokenizers import Tokenizer, models

    unknown = next((texts[number] for number, each in enumerate(types) if each == _UNKNOWN), None)
    return Tokenizer(
        models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types)
    )


def _characters(file: ModelFile, texts: list[str], ids: dict[str, int], types: list[int]) -> Any:
    """Pairs of characters are merged in the order that the file states, within lines and within runs
    of newlines."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    tokenizer = _of_merges(texts, ids, types, _merges(file))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[^\n]+"), "isolated")
    return tokenizer


_KINDS = {"gpt2": _byte_level, "llama": _sentence_pieces, "gemma4": _characters}


def _of_json(file: ModelFile, text: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, which the package reads."""
    from tokenizers import Tokenizer as Implementation

    data = json.loads(text)
    if _growth(data.get("normalizer")) > _MOST_GROWTH:
        raise _damaged(file.name, f"a character becomes more than {_MOST_GROWTH} characters")
    # Each piece of a template stands for a list of tokens, and each part of a word has the affixes.
    if len(json.dumps(data.get("post_processor"))) > _MOST_OF_TEMPLATE:
        raise _damaged(
            file.name, f"its post_processor has more than {_MOST_OF_TEMPLATE} characters"
        )
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if any(len(str(data["model"].get(name))) > _MOST_GROWTH for name in affixes):
        raise _damaged(file.name, f"an affix has more than {_MOST_GROWTH} characters")
    implementation: Any = Implementation.from_str(text)
    implementation.no_padding()
    implementation.no_truncation()
    texts = [""] * implementation.get_vocab_size(with_added_tokens=True)
    for token, number in implementation.get_vocab(with_added_tokens=True).items():
        if number < len(texts):
            texts[number] = token
    added = {each["id"]: each for each in data.get("added_tokens", ())}
    hidden = {number for number, each in added.items() if each.get("special")}
    by_bytes = '"ByteLevel"' in json.dumps([data.get("decoder"), data.get("pre_tokenizer")])
    start = implementation.encode("", add_special_tokens=True).ids[:1]
    metadata = {**file.metadata, "tokenizer.ggml.add_bos_token": False}
    if start and metadata.setdefault("tokenizer.bos_token", texts[start[0]]) == texts[start[0]]:
        metadata["tokenizer.ggml.add_bos_token"] = True
    return Tokenizer(file.name, texts, set(added), hidden, implementation, metadata, by_bytes)


def _growth(normalizer: Any) -> int:
    """How many characters a normalizer of a tokenizer.json may make of one, by what it replaces."""
    if not isinstance(normalizer, dict):
        return 1
    growth = max(len(str(normalizer.get("content", ""))), 1)
    if normalizer.get("type") == "ByteLevel":
        growth = 4  # bytes of a character
    if normalizer.get("type") == "Precompiled":
        data = base64.b64decode(normalizer["precompiled_charsmap"])
        (first,) = struct.unpack_from("<I", data)  # bytes of a tree, which the texts follow
        growth = max(map(len, data[4 + first :].split(b"\0")))
    for part in normalizer.get("normalizers") or ():
        growth *= _growth(part)
    return growth


def _list(file: ModelFile, key: str) -> list[str]:
    texts: list[str] = file.value(key, list)
    if {*map(type, texts)} - {str}:
        raise _damaged(file.name, f"{key} is no list of texts")
    return texts


def _tokens(where: str, metadata: Mapping[str, Any], key: str, vocab: int) -> frozenset[int] | None:
    """The token ids of a list in the metadata that are below `vocab`; None if there is no list."""
    stated = metadata.get(key)
    items = stated.tolist() if isinstance(stated, np.ndarray) else stated
    if items is None:
        return None
    if not isinstance(items, (list, tuple)) or not all(type(each) is int for each in items):
        raise _damaged(where, f"{key} is {str(items)[:80]}")
    return frozenset(each for each in items if 0 <= each < vocab)


def byte_codes() -> dict[int, int]:
    """The character that stands for each byte in a vocabulary: printable ones for themselves, the
    others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: byte for byte in printable}, **{b: 256 + n for n, b in enumerate(others)}}
