"""Files of tokenizers, in the words of GGUF: tokenizer.json with what stands beside it, and
tokenizer.model of SentencePiece and of tiktoken."""

from __future__ import annotations

import base64
import itertools
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.reading import reading
from purevk.llm.safetensors import MOST_TEXT, read_json
from purevk.llm.tokenizer import MOST_OF_TOKEN, byte_codes
from purevk.paths import read_file

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\s*\Z")
_LLAMA3_NAMES = (
    "begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1",
    "finetune_right_pad_id", "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id",
    "python_tag", "image",
)  # fmt: skip
_RESERVED = 256  # control tokens of Llama 3
_MOST_OF_SEARCH = 1 << 28  # squares of the bytes of tokens: 10 s. 200,000 tokens may have 36 each
_BPE = 2  # model_type of SentencePiece
_CONTROL = 3


def read_tokenizer(path: Path) -> dict[str, Any]:
    """The metadata of a tokenizer.

    Args:
        path: of a tokenizer.json, or of a tokenizer.model of SentencePiece (by pairs, as Llama 2
            and Gemma have it) or tiktoken (with the control tokens of Llama 3); or of a folder with
            one.

    Raises:
        FileFormatError: it is none of these, or damaged.
        UnsupportedProgramError: it is a SentencePiece of another kind.
        OSError: it cannot be read.
    """
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model")
        path = next((path / name for name in names if (path / name).is_file()), path / names[0])
    data = read_file(path, MOST_TEXT)
    with reading(str(path)):
        metadata = read_about(path.parent)
        if data.lstrip()[:1] == b"{":
            metadata["tokenizer.json"] = data.decode()
        elif _TIKTOKEN_LINE.fullmatch(data[:400].split(b"\n")[0]):
            metadata.update(_of_tiktoken(path, data))
        else:
            metadata.update(_of_sentencepiece(path, data))
    return metadata


def read_about(folder: Path) -> dict[str, Any]:
    """The chat template, and what begins and ends an answer, if a folder of transformers has them."""

    def optional(name: str) -> dict[str, Any]:
        return read_json(folder / name) if (folder / name).is_file() else {}

    metadata: dict[str, Any] = {}
    about = optional("tokenizer_config.json")
    template: Any = about.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = read_file(folder / "chat_template.jinja", MOST_TEXT).decode()
    if isinstance(template, str):
        metadata["tokenizer.chat_template"] = template
    for key in ("bos_token", "eos_token"):
        token = about.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            metadata[f"tokenizer.{key}"] = text
    ends = optional("generation_config.json").get("eos_token_id")
    if ends is not None:
        metadata["tokenizer.ends"] = numbers_of(ends)
    return metadata


def numbers_of(value: Any) -> list[int]:
    """The integers of a number or a list in a config."""
    return [
        each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)
    ]


# -- tiktoken ---------------------------------------------------------------------------------
def _of_tiktoken(path: Path, data: bytes) -> dict[str, Any]:
    tokens: list[bytes] = []
    for number, line in enumerate(data.split(b"\n")):
        if not line.strip():
            continue
        if not _TIKTOKEN_LINE.fullmatch(line) or int(line.split()[1]) != len(tokens):
            raise _damaged(path, f"line {number + 1} is not a token with its number")
        tokens.append(base64.b64decode(line.split()[0]))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) != len(tokens) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise _damaged(path, "a token is there twice, or a byte has none")
    if (longest := max(map(len, tokens))) > MOST_OF_TOKEN:
        raise _damaged(path, f"a token has {longest} bytes; {MOST_OF_TOKEN} are accepted")
    if sum(len(token) ** 2 for token in tokens) > _MOST_OF_SEARCH:
        raise _damaged(path, f"the squares of its tokens' bytes exceed {_MOST_OF_SEARCH}")
    codes = {byte: chr(code) for byte, code in byte_codes().items()}

    def text(token: bytes) -> str:
        return "".join(codes[byte] for byte in token)

    pairs = (_pair(token, ranks) for token in tokens)
    merges = [f"{text(left)} {text(right)}" for left, right in filter(None, pairs)]
    names = [*_LLAMA3_NAMES]
    names += [f"reserved_special_token_{at}" for at in range(2, _RESERVED - len(names) + 2)]
    kinds = [1] * len(tokens) + [_CONTROL] * len(names)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*map(text, tokens), *(f"<|{name}|>" for name in names)],
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        "tokenizer.ggml.add_bos_token": True,
    }


def _pair(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that a token is merged from; None of a byte, and of a token that no merge of
    earlier ones gives."""

    def ranks_of(parts: list[bytes]) -> list[int]:
        return [ranks.get(left + right, 1 << 31) for left, right in itertools.pairwise(parts)]

    parts = [token[at : at + 1] for at in range(len(token))]
    joined = ranks_of(parts)
    while len(parts) > 2:
        least = min(joined)
        if least >= ranks[token]:
            return None
        at = joined.index(least)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        neighbors = slice(max(at - 1, 0), at + 2)
        joined[neighbors] = ranks_of(parts[neighbors])
    return (parts[0], parts[1]) if len(parts) == 2 else None


# -- SentencePiece ----------------------------------------------------------------------------
def _of_sentencepiece(path: Path, data: bytes) -> dict[str, Any]:
    """Reads the fields of sentencepiece_model.proto that matter here."""
    tokens, scores, kinds = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(piece[1].decode())
            scores.append(float(piece.get(2, 0.0)))
            kinds.append(int(piece.get(3, 1)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not tokens:
        raise _damaged(path, "it is no JSON, and neither of tiktoken nor of SentencePiece")
    kind, cleans = trainer.get(3, 1), normalizer.get(2) or normalizer.get(4, 1)
    if kind != _BPE or cleans:
        raise UnsupportedProgramError(
            "this SentencePiece tokenizer is not known",
            where=str(path),
            why="it is not by pairs (BPE)" if kind != _BPE else "it normalizes texts",
            next="convert it to a tokenizer.json",
        )
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
    }
    for key, field, default in (("bos", 41, 1), ("eos", 42, 2)):
        number = trainer.get(field, default)
        if number < len(tokens):  # none is -1, which is stored as a large number
            metadata[f"tokenizer.ggml.{key}_token_id"] = number
    return metadata


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message of protobuf: integers, floats and bytes, by number.

    Raises:
        ValueError, IndexError, struct.error: it is none.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        start = at
        while data[at] & 128:
            at += 1
        at += 1
        if at - start > 10:
            raise ValueError("a number is too long")
        return sum((byte & 127) << 7 * n for n, byte in enumerate(data[start:at]))

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 2:
            size = varint()
            if size > len(data) - at:
                raise ValueError("a field is longer than its message")
            yield key >> 3, data[at : at + size]
            at += size
        elif key & 7 in (1, 5):
            code, size = ("<d", 8) if key & 7 == 1 else ("<f", 4)
            yield key >> 3, struct.unpack_from(code, data, at)[0]
            at += size
        else:
            raise ValueError(f"a field of kind {key & 7}")


def _damaged(path: Path, why: str) -> FileFormatError:
    return FileFormatError(
        "this is no tokenizer",
        where=str(path),
        why=why,
        next="give tokenizer.json, or tokenizer.model of SentencePiece or tiktoken",
    )
