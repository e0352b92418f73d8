"""Tokenizers in GGUF files, against the packages that make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from purevk.errors import FileFormatError, UnsupportedProgramError  # noqa: E402
from purevk.llm.gguf import GgufFile  # noqa: E402
from purevk.llm.tokenizer import Tokenizer, tokenizer_of  # noqa: E402

DATA = Path(__file__).parents[1] / "data"
TEXTS = (
    "The sky is blue, 3 times 14 is 42.",
    "def f(x):\n    return x ** 2  # square\n",
    "  two spaces  and\ttab ",
    "天空为什么是蓝色的。 그리고 日本語",
    "naïve café 🙂👩‍👩‍👧 ½ ²",
    "don't WE'LL camelCase HTTPServer 1234567",
)


def sentence_pieces(path: Path) -> Any:
    """A small vocabulary of SentencePiece, trained here, in a GGUF file too."""
    spm = pytest.importorskip("sentencepiece")
    corpus = path.with_suffix(".txt")
    corpus.write_text("\n".join(TEXTS * 20), encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(path.with_suffix("")), model_type="bpe",
        vocab_size=420, byte_fallback=True, character_coverage=0.98, split_digits=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        allow_whitespace_only_pieces=True,
    )  # fmt: skip
    model = spm.SentencePieceProcessor(model_file=str(path.with_suffix(".model")))
    numbers = range(model.get_piece_size())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([model.id_to_piece(number) for number in numbers])
    writer.add_token_scores([model.get_score(number) for number in numbers])
    kinds = [
        2 if model.is_unknown(n) else 3 if model.is_control(n) else 6 if model.is_byte(n) else 1
        for n in numbers
    ]
    writer.add_token_types(kinds)
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return model


def test_sentence_pieces(tmp_path: Path) -> None:
    model = sentence_pieces(tmp_path / "model.gguf")
    with GgufFile(tmp_path / "model.gguf") as file:
        tokenizer = tokenizer_of(file, 1 << 20)
        for text in (*TEXTS, "x", "\n"):
            assert tokenizer.encode(text, start=False) == model.encode(text), text
            assert tokenizer.encode(text)[0] == model.bos_id()
            assert tokenizer.decode(tokenizer.encode(text)) == " " + text
        assert tokenizer.end_tokens == {model.eos_id()}
        del file.metadata["tokenizer.ggml.scores"]
        with pytest.raises(FileFormatError, match="score"):
            tokenizer_of(file, 1 << 20)


def test_characters(tmp_path: Path) -> None:
    """The tokenizer of Gemma 4's files, against what llama.cpp makes of the same file."""
    expected = json.loads((DATA / "gemma4_tokens.json").read_text(encoding="utf-8"))
    tokens = expected["tokens"]
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_types(expected["types"])
    writer.add_token_merges(expected["merges"])
    writer.add_bos_token_id(tokens.index("<bos>"))
    writer.add_eos_token_id(tokens.index("<eos>"))
    writer.add_add_bos_token(False)  # as some files say wrongly
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GgufFile(path) as file:
        tokenizer = tokenizer_of(file, 1 << 20)
        for text, ids in expected["texts"].items():
            assert tokenizer.encode(text, start=False) == ids, text
            assert tokenizer.encode(text) == [tokens.index("<bos>"), *ids]
            if "\u2581" not in text and "<|" not in text:
                assert tokenizer.decode(ids) == text
        assert tokenizer.end_tokens == {tokens.index("<eos>"), tokens.index("<turn|>")}
        for merge, why in (("no pair", "out of vocabulary"), ("T h e", "not one of two tokens")):
            file.metadata["tokenizer.ggml.merges"] = ["T h", merge]
            with pytest.raises(FileFormatError, match=why):
                tokenizer_of(file, 1 << 20)


def test_what_ends_an_answer_of_gpt_oss() -> None:
    """Its messages end by a token that ends the answers of other models."""

    def ends(*texts: str) -> set[str]:
        tokenizer = Tokenizer("", texts, set(), set(), None, {}, by_bytes=True)
        return {texts[number] for number in tokenizer.end_tokens}

    assert ends("<|end|>", "<|endoftext|>", "a") == {"<|end|>", "<|endoftext|>"}
    assert ends("<|end|>", "<|return|>", "<|call|>") == {"<|return|>", "<|call|>"}
    assert ends("<|return|>", "a") == set()


# What the expressions of models' own tokenizer.json files give, in words of each text.
WORDS = {
    "gpt-2": ["don", "'t", " WE", "'", "LL", " camelCase", " HTTPServer", " 1234567"],
    "smollm": ["don", "'t", " WE", "'", "LL", " camelCase", " HTTPServer", " ", *"1234567"],
    "llama-bpe": ["don", "'t", " WE", "'LL", " camelCase", " HTTPServer", " ", "123", "456", "7"],
    "qwen2": ["don", "'t", " WE", "'LL", " camelCase", " HTTPServer", " ", *"1234567"],
    "qwen35": ["don", "'t", " WE", "'LL", " camelCase", " HTTPServer", " ", *"1234567"],
    "gpt-4o": ["don't", " WE'LL", " camel", "Case", " HTTPServer", " ", "123", "456", "7"],
    "tekken": ["don", "'t", " WE", "'LL", " camel", "Case", " HTTPServer", " ", *"1234567"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_texts_are_split(pre: str) -> None:
    import tokenizers

    from purevk.llm.tokenizer import SPLITS

    splits = [
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in SPLITS[pre]
    ]
    sequence = tokenizers.pre_tokenizers.Sequence(splits)
    assert [word for word, _ in sequence.pre_tokenize_str(TEXTS[-1])] == WORDS[pre]
    marks = "e\u0301a 漢字かな"
    words = [word for word, _ in sequence.pre_tokenize_str(marks)]
    parts = {"gpt-2": ["e", "\u0301", "a"], "smollm": ["e", "\u0301", "a"]}
    parts |= {"llama-bpe": ["e", "\u0301a"], "qwen2": ["e", "\u0301a"]}
    assert words == [*parts.get(pre, ["e\u0301a"]), " 漢字かな"]


def test_unknown_splits_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("newest")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with GgufFile(tmp_path / "model.gguf") as file:
        with pytest.raises(UnsupportedProgramError, match="'newest' is not known"):
            tokenizer_of(file, 10)
