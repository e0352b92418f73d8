"""Each architecture on the device, from a folder and from a GGUF file, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

import purevk.llm  # noqa: E402
from purevk.llm.checkpoints import TAIL  # noqa: E402
from tests.llm.families import FAMILIES, PROMPT, expected, tiny, write_gguf  # noqa: E402

pytestmark = pytest.mark.device


def check(model: purevk.llm.Model, reference: Any) -> None:
    """Logits after a prompt, after it in chunks, after a prompt of one token, and after single
    tokens."""
    pieces = model.generate(PROMPT, max_tokens=3)
    tokens = pieces.tokens()
    for rows in (len(PROMPT), 4):
        model.position = 0
        model.decoder.chunk.rows = rows
        assert model.generate(PROMPT, max_tokens=1).tokens() == tokens[:1]
        want = expected(reference, PROMPT)
        assert np.abs(model.logits - want).max() <= 1e-4 * np.abs(want).max()
        model.position = 0
        model.generate(PROMPT, max_tokens=2).tokens()
        want = expected(reference, [*PROMPT, tokens[0]])
        assert np.abs(model.logits - want).max() <= 1e-4 * np.abs(want).max()
    model.position = 0
    model.generate(PROMPT[:1], max_tokens=1).tokens()
    want = expected(reference, PROMPT[:1])
    assert np.abs(model.logits - want).max() <= 1e-4 * np.abs(want).max()
    for count, token in enumerate(tokens):
        assert token == int(expected(reference, [*PROMPT, *tokens[:count]]).argmax())


@pytest.mark.parametrize("source", ["folder", "gguf"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, source: str, tmp_path: Path) -> None:
    if source == "gguf" and family == "llama3":
        pytest.skip("test_model.py has factors of the rotation in a GGUF file")
    reference = tiny(family)
    path = tmp_path / "model"
    if source == "gguf":
        write_gguf(reference, family, path)
    else:
        reference.save_pretrained(path)
    with purevk.llm.load(
        path, context=32 if family != "longrope" else 16, dtype="float32"
    ) as model:
        check(model, reference)


@pytest.mark.parametrize("family", ["qwen35", "lfm2"])
def test_a_recurrent_model_computes_again_what_is_cut(family: str, tmp_path: Path) -> None:
    reference = tiny(family)
    reference.save_pretrained(tmp_path)
    with purevk.llm.load(tmp_path, context=32, dtype="float32") as model:
        for prompt, reused in (
            (PROMPT, 0),
            ([*PROMPT, 3, 4], len(PROMPT)),  # goes on with what is there
            ([*PROMPT[:5], 6, 7], len(PROMPT) - TAIL),
        ):
            pieces = model.generate(prompt, max_tokens=1)
            pieces.tokens()
            assert pieces.stats.reused_tokens == reused
            want = expected(reference, prompt)
            assert np.abs(model.logits - want).max() <= 1e-4 * np.abs(want).max()
        model.position = 4
        assert model.position == 2
