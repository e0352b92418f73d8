"""What a saved model says of itself is compared with its graphs. No device is needed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

from purevk.errors import FileFormatError
from purevk.frontends.files import open_file
from purevk.llm.saved import KEY, Description
from tests.fuzz import language
from tests.fuzz.mutations import description, with_description

MODEL = cache(language.saved_model)


def read(about: dict[str, Any], **graph: Any) -> None:
    content = description(MODEL())
    content["about"][KEY] |= about
    content["methods"]["decode"]["graph"] |= graph
    with open_file(with_description(MODEL(), content)) as file:
        language.read_saved(file)


def test_the_truth() -> None:
    read({})
    assert (
        Description.read(
            "", description(MODEL())["about"][KEY], ["decode", "prompt_15", "prompt_20"]
        ).vocab
        == 8
    )


WRONG: dict[str, Any] = {
    "vocab": [1 << 47, 0, 7, 9, "8", None, True, -1],
    "context": [1 << 47, 0, 23, 2.5],
    "dtype": ["bfloat16", "int64", [1], None],
    "prompts": [
        {"prompt_15": [1, 1 << 47]},
        {"prompt_15": [0, 15]},
        {"prompt_20": [16, 20], "prompt_15": [1, 15]},
        {"prompt_15": [15, 1]},
        {"decode": [1, 1]},
        {"prompt_16": [1, 16]},
        [],
        None,
    ],
    "metadata": [None, [], 5],
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG)
def test_lies(key: str) -> None:
    for wrong in WRONG[key]:
        with pytest.raises(FileFormatError, match="saved model is damaged"):
            read({key: wrong})


@pytest.mark.parametrize("ends", [["a", 1], [[1]], [1.5], [None], 5, [True], {"1": 2}], ids=str)
def test_ends_that_are_no_tokens(ends: Any) -> None:
    metadata = description(MODEL())["about"][KEY]["metadata"]
    for key in ("tokenizer.all_ends", "tokenizer.ends"):
        with pytest.raises(FileFormatError, match=f"{key} is"):
            read({"metadata": {**metadata, key: ends}})
    read({"metadata": {**metadata, "tokenizer.all_ends": [-1, 2, 1 << 40, 10**30]}})


def test_methods_with_other_outputs() -> None:
    (token,) = description(MODEL())["methods"]["decode"]["graph"]["outputs"]
    for outputs in ([], [token, token]):
        with pytest.raises(FileFormatError, match="decode gives"):
            read({}, outputs=outputs)
    with pytest.raises(FileFormatError, match="state 'logits' of decode"):
        read({}, labels=[])
