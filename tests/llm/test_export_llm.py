"""Files that ExecuTorch's own export_llm writes for its own Llama, against eager torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("executorch.examples.models.llama.export_llama_lib")
torch = pytest.importorskip("torch")

import purevk.llm  # noqa: E402

pytestmark = [pytest.mark.export, pytest.mark.device, pytest.mark.slow]
SHAPE = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 300,
    "hidden_dim": 96,
    "multiple_of": 1,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def _config(folder: Path, cache: bool, dynamic: bool, fused: bool, delegated: bool) -> Any:
    from executorch.extension.llm.export.config.llm_config import LlmConfig

    config = LlmConfig()
    config.base.params = str(folder / "params.json")
    config.base.checkpoint = str(folder / "weights.pth")
    config.base.metadata = json.dumps({"get_bos_id": 1, "get_eos_ids": [2, 3]})
    config.model.use_kv_cache = cache
    config.model.enable_dynamic_shape = dynamic
    config.model.use_sdpa_with_kv_cache = fused
    config.export.max_seq_length, config.export.max_context_length = 32, 64
    config.backend.vulkan.enabled = bool(delegated)
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from executorch.examples.models.llama.model import Llama2Model

    folder = tmp_path_factory.mktemp("export_llm")
    (folder / "params.json").write_text(json.dumps(SHAPE))
    config = _config(folder, True, False, False, False)
    config.base.checkpoint = None
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, weight in Llama2Model(config).get_eager_model().state_dict().items():
        if not any(part in name for part in ("cache", "mask", "freqs")):
            numbers = torch.randn(weight.shape, generator=generator)
            scale, middle = (0.15, 0.0) if weight.ndim == 2 else (0.1, 1.0)
            weights[name] = numbers * (1.0 if "embeddings" in name else scale) + middle
    torch.save(weights, folder / "weights.pth")
    return folder


def _greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    from executorch.examples.models.llama.model import Llama2Model

    model = Llama2Model(_config(folder, False, True, False, False)).get_eager_model().eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens]))
            logits = logits[0] if isinstance(logits, tuple) else logits
            tokens.append(int(logits.reshape(-1, SHAPE["vocab_size"])[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("cache", "dynamic", "fused", "delegated"),
    [
        (True, False, False, True),
        (True, True, True, True),  # with llama.sdpa_with_kv_cache: the plain form cannot be lowered
        (True, True, False, False),
        (False, True, False, True),
    ],
)
def test_tokens_are_those_of_eager(
    cache: bool, dynamic: bool, fused: bool, delegated: bool, folder: Path, tmp_path: Path
) -> None:
    from executorch.examples.models.llama.export_llama_lib import export_llama

    config = _config(folder, cache, dynamic, fused, delegated)
    config.export.output_name = str(tmp_path / "model.pte")
    export_llama(config)
    with purevk.llm.load(tmp_path / "model.pte") as model:
        for prompt in ([5, 17, 3], [9], [44, 200, 131, 4, 77, 299, 0, 12]):
            tokens = model.generate(prompt, max_tokens=20).tokens()
            assert tokens == _greedy(folder, prompt, 20)
        assert model.vocab == SHAPE["vocab_size"]
        assert model.context == (64 if cache else 31)
