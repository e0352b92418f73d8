"""Each architecture on the device, from a folder and from a GGUF file, against transformers and against
llama.cpp."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

import purevk.llm  # noqa: E402
from bench.peers.llama_cpp import LlamaCpp  # noqa: E402
from purevk.llm.sequences import TAIL  # noqa: E402
from tests.llm.families import DELTA, FAMILIES, PROMPT, expected, tiny, write_gguf  # noqa: E402

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


LLAMA_CPP_ROWS = 256  # its caches have a multiple of it
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
OTHER: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},  # llama.cpp gives this architecture no window
    "llama3": {"rope_parameters": PLAIN},
    "gpt-oss": {"rope_parameters": PLAIN},  # llama.cpp rounds the ranges of YaRN
    "longrope": {"max_position_embeddings": LLAMA_CPP_ROWS},
    "qwen35": {"linear_value_head_dim": DELTA["linear_key_head_dim"]},  # llama.cpp has one width
    "qwen35moe": {"linear_value_head_dim": DELTA["linear_key_head_dim"]},
}
"""What a config has in place of what llama.cpp computes in another way, or not at all."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_llama_cpp(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its CPU kernels, from one file."""
    if importlib.util.find_spec("cyllama") is None:
        pytest.skip("cyllama-vulkan is not installed, see bench/peers/llama_cpp.py")
    name, architecture, options = FAMILIES[family]
    options = {**options, **OTHER.get(family, {})}
    monkeypatch.setitem(FAMILIES, family, (name, architecture, options))
    path = tmp_path / "model.gguf"
    write_gguf(tiny(family), family, path, drafts=0)
    peer = LlamaCpp(path, LLAMA_CPP_ROWS, vulkan=False, exact=True)
    peer.run(PROMPT, 0)
    want = peer.logits(96)
    peer.close()
    with purevk.llm.load(path, context=LLAMA_CPP_ROWS, dtype="float32") as model:
        assert model.generate(PROMPT, max_tokens=1).tokens() == [int(want.argmax())]
        # llama.cpp's GELU, which Gemma has, is a table of float16.
        tolerance = 1e-2 if architecture.startswith("gemma") else 1e-5
        assert np.abs(model.logits - want).max() <= tolerance * np.abs(want).max()
