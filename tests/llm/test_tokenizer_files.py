"""Files of tokenizers, against the packages that define them."""

from __future__ import annotations

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from purevk.errors import FileFormatError, InputError, UnsupportedProgramError
from purevk.llm.saved import SavedFile
from purevk.llm.tokenizer import Tokenizer, tokenizer_of
from purevk.llm.tokenizer.files import read_tokenizer

pytest.importorskip("tokenizers")
LEARNED = [
    "the quick brown fox jumps over the lazy dog",
    "the dog and the fox: 12 jumps, 345 more",
    "def add(a, b):\n    return a + b",
]
TEXTS = [
    *LEARNED,
    "  two spaces,\ttabs\n\n\nand lines ",
    "人工智能 and emoji 👍🏽",
    "it's 1234567 O'Clock",
    "",
]


def tokenizer(path: Path, vocab: int = 1 << 20) -> Tokenizer:
    return tokenizer_of(SavedFile(path.name, read_tokenizer(path)), vocab)


def learn(**options: Any) -> bytes:
    pieces = pytest.importorskip("sentencepiece")
    stream = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "vocab_size": 340,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
        **options,
    }
    pieces.SentencePieceTrainer.train(
        sentence_iterator=iter(LEARNED), model_writer=stream, **settings
    )
    return stream.getvalue()


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool, tmp_path: Path) -> None:
    import sentencepiece

    data = learn(add_dummy_prefix=prefix)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    ours = tokenizer(tmp_path)
    for text in TEXTS:
        assert ours.encode(text, start=False) == reference.encode(text)
        assert ours.encode(text) == reference.encode(text, add_bos=True)
    assert ours.end_tokens == {reference.eos_id()}


def test_tiktoken(tmp_path: Path) -> None:
    theirs = pytest.importorskip("pytorch_tokenizers.tiktoken")
    from tiktoken._educational import SimpleBytePairEncoding

    split = r"\s?\w+|[^\w]"
    ranks = SimpleBytePairEncoding.train("\n".join(LEARNED), 300, split).mergeable_ranks
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    path = tmp_path / "tokenizer.model"
    path.write_text("\n".join(lines) + "\n")
    reference, ours = theirs.TiktokenTokenizer(str(path)), tokenizer(path)
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text, bos=True, eos=False)
    assert ours.encode("<|eot_id|>", start=False) == [reference.special_tokens["<|eot_id|>"]]
    assert ours.name(len(ranks) + 255) == "<|reserved_special_token_245|>"
    ends = {reference.special_tokens[name] for name in ("<|eot_id|>", "<|eom_id|>")}
    assert {reference.eos_id, *ends} == ours.end_tokens


def test_long_tokens_are_refused(tmp_path: Path) -> None:
    """The search for what a token is merged from takes the square of its length."""
    path, alphabet = tmp_path / "tokenizer.model", [bytes([byte]) for byte in range(256)]
    for more, why in (
        ([b"a" * 1025], "1025 bytes"),
        ([b"%1024d" % number for number in range(257)], "squares"),
    ):
        tokens = enumerate([*alphabet, *more])
        path.write_bytes(b"\n".join(b"%s %d" % (base64.b64encode(each), at) for at, each in tokens))
        with pytest.raises(FileFormatError, match=why):
            tokenizer(path)


def pieces_of(texts: list[str]) -> SavedFile:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": np.zeros(len(texts), np.float32),
    }
    return SavedFile("x", metadata)


def test_long_pieces_are_refused() -> None:
    with pytest.raises(FileFormatError, match="1025 characters"):
        tokenizer_of(pieces_of(["a", "a" * 1025]), 1 << 20)


def test_merges_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece may be cut anywhere: 40 of up to 40 characters are 21,320 characters of merges."""
    texts = ["a" * length for length in range(1, 41)]
    tokenizer_of(pieces_of(texts), 1 << 20)
    monkeypatch.setattr("purevk.llm.tokenizer._MOST_OF_MERGES", 10_000)
    with pytest.raises(FileFormatError, match="merges have more than 10000"):
        tokenizer_of(pieces_of(texts), 1 << 20)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    data = learn()
    for damaged in (
        b"",
        b"dummy tokenizer",
        data[: len(data) // 2 + 1],
        b"\x0a\xff" * 9,
        b"IQ== 0\n",
    ):
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError):
            tokenizer(path)
    for options in (
        {"model_type": "unigram", "hard_vocab_limit": False},
        {"normalization_rule_name": "nmt_nfkc"},
    ):
        path.write_bytes(learn(**options))
        with pytest.raises(UnsupportedProgramError, match="tokenizer.json"):
            tokenizer(path)


A_OR_B = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
PADDED = {
    "strategy": {"Fixed": 10**13}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "a",
}  # fmt: skip


def of_json(**parts: Any) -> Tokenizer:
    written = {"version": "1.0", "added_tokens": [], "model": A_OR_B, **parts}
    return tokenizer_of(SavedFile("tokenizer.json", {"tokenizer.json": json.dumps(written)}), 2)


def test_padding_of_the_file_is_not_used() -> None:
    """It ended the process: 40 TB."""
    assert of_json(padding=PADDED).encode("ab") == [0, 1]


def test_replacements_that_grow() -> None:
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}
    assert len(of_json(normalizer=longer).encode("a")) == 16
    with pytest.raises(FileFormatError, match="more than 64 characters"):
        of_json(normalizer={"type": "Sequence", "normalizers": [longer] * 9})


@pytest.mark.parametrize("part", ["bytes", "charsmap", "post_processor", "prefix"])
def test_parts_that_ask_for_much(part: str) -> None:
    """They took gigabytes or minutes, from files of some kilobytes."""
    text = b"x" * 1000
    charsmap = base64.b64encode(struct.pack("<I", 4) + bytes(4) + text + b"\0").decode()
    pieces = [{"SpecialToken": {"id": "a", "type_id": 0}}] * 1000
    parts: dict[str, Any] = {
        "bytes": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 9}},
        "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}},
        "post_processor": {"post_processor": {"type": "TemplateProcessing", "single": pieces}},
        "prefix": {"model": {**A_OR_B, "continuing_subword_prefix": "a" * 1000}},
    }
    with pytest.raises(FileFormatError, match="more than (64|16384) characters"):
        of_json(**parts[part])


def test_regular_expressions_that_fail() -> None:
    """The package panics, which is no `Exception`."""
    pattern = {"Regex": "^(a|a)*$"}
    ours = of_json(normalizer={"type": "Replace", "pattern": pattern, "content": "b"})
    assert ours.encode("aa") == [1]
    with pytest.raises(InputError, match="cannot encode this text"):
        ours.encode("a" * 40 + "b")
