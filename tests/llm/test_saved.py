"""Models in .pvk files, and what a cache holds."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

import purevk.llm  # noqa: E402
from purevk.errors import FileFormatError, InputError, OutputError  # noqa: E402
from purevk.frontends.files import open_file  # noqa: E402
from purevk.llm.saved import KEY, Description  # noqa: E402
from tests.fuzz import language  # noqa: E402
from tests.fuzz.mutations import description, with_description  # noqa: E402
from tests.llm.harness import write_llama  # noqa: E402

pytestmark = pytest.mark.device
PROMPT = [5, 17, 3, 88, 41, 9, 60]


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    path, saved = tmp_path / "model.gguf", tmp_path / "model.pvk"
    write_llama(path, "Q4_1", table="Q8_0", vocabulary=True)
    with purevk.llm.load(path, context=64, dtype="float32") as model:
        tokens = model.generate(PROMPT, max_tokens=8).tokens()
        answer = model.chat("hi", max_tokens=4).text()
        logits, weights = model.logits, model.plan.weights
        link = tmp_path / "link.pvk"
        link.symlink_to(saved.name)
        with pytest.raises(OutputError, match="link"):  # to nothing
            model.save(link)
        model.save(saved)
        model.save(link)  # stays one
    assert link.is_symlink() and not saved.is_symlink()
    path.unlink()
    assert saved.stat().st_size <= 1.2 * weights + 100_000  # weights once, and stay packed
    with purevk.llm.load(saved) as model:
        assert model.context == 64 and model.generate(PROMPT, max_tokens=8).tokens() == tokens
        assert model.chat("hi", max_tokens=4).text() == answer
        assert (model.logits == logits).all()
        assert model.generate(PROMPT, max_tokens=3, temperature=1.0, seed=1).tokens()
    with pytest.raises(InputError, match="not those of the file"):
        purevk.llm.load(saved, context=32)
    with pytest.raises(FileFormatError, match="no language model"):
        data = Path(__file__).parents[1] / "data" / "pte" / "linear_relu.pte"
        (tmp_path / "other.pvk").write_bytes(saved_program(data))
        purevk.llm.load(tmp_path / "other.pvk")


def saved_program(path: Path) -> bytes:
    import purevk

    target = path.name + ".pvk"
    with purevk.load(path) as program:
        folder = Path(program.context.cache.folder or ".")
        program.save(folder / target)
    data = (folder / target).read_bytes()
    (folder / target).unlink()
    return data


@pytest.mark.parametrize(
    "cache, tolerance, size",
    [("float16", 2e-3, 2), ("int8", 2e-2, 1 + 4 / 16), ("float8", 1e-1, 1)],
)
def test_what_the_cache_holds(cache: str, tolerance: float, size: float, tmp_path: Path) -> None:
    reference = write_llama(tmp_path / "model.gguf", "F32")
    plan = purevk.llm.plan(tmp_path / "model.gguf", context=32, dtype="float32", cache=cache)
    assert plan.cache == 2 * 2 * 2 * 16 * 64 * size
    with purevk.llm.load(
        tmp_path / "model.gguf", context=32, dtype="float32", cache=cache
    ) as model:
        assert model.plan.cache == plan.cache
        token = model.generate(PROMPT, max_tokens=2).tokens()[0]
        with torch.inference_mode():
            want = reference(torch.tensor([[*PROMPT, token]])).logits[0, -1].numpy()
        error = np.abs(model.logits - want).max() / np.abs(want).max()
        assert 1e-6 < error <= tolerance, error


@pytest.mark.parametrize("wrong", [{"cache": "int4"}, {"dtype": "int8"}], ids=str)
def test_names_are_checked(wrong: dict[str, Any], tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", "F32")
    with pytest.raises(InputError, match="is not known"):
        purevk.llm.load(tmp_path / "model.gguf", **wrong)


def test_damaged_descriptions(tmp_path: Path) -> None:
    from purevk.llm.saved import _number

    for number in (None, -1, True, "1", 1 << 60):
        with pytest.raises(FileFormatError, match="context is"):
            _number("x", json.loads(json.dumps({"context": number})), "context")


# -- what a file says of itself --------------------------------------------------------------------
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
