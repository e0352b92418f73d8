"""The recipe for optimum-executorch, with its own export."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("executorch")
pytest.importorskip("tokenizers")

import purevk.export.optimum  # noqa: E402
import purevk.llm  # noqa: E402
from purevk.errors import UnsupportedProgramError  # noqa: E402
from tests.llm import executorch_models as models  # noqa: E402

pytestmark = pytest.mark.export


@pytest.mark.slow
@pytest.mark.device
def test_tokens_of_an_exported_model_are_those_of_eager_torch(tmp_path: Path) -> None:
    executorch = pytest.importorskip("optimum.exporters.executorch")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=models.VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    models.write_tokenizer(tmp_path)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    purevk.export.optimum.register()
    executorch.main_export(str(tmp_path), "text-generation", "purevk", str(tmp_path))
    prompt = [5, 17, 3]
    with purevk.llm.load(tmp_path / "model.pte", tokenizer=tmp_path / "tokenizer.json") as exported:
        tokens = exported.generate(prompt, max_tokens=20).tokens()
    with torch.inference_mode():
        want = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
    assert tokens == want[0, len(prompt) :].tolist()


def test_without_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optimum.exporters.executorch", None)
    with pytest.raises(UnsupportedProgramError, match="pip install optimum-executorch"):
        purevk.export.optimum.register()
