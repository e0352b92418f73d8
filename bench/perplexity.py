"""The perplexity of a text beside llama.cpp's CPU backend: `python bench/perplexity.py MODEL.gguf TEXT`.

Both engines read the tokens one by one, and the text's own next token is compared with the logits.
llama.cpp computes products of quantized weights with 8-bit activations. `cyllama-vulkan==0.7.0` has
its libraries. A Python that the wheel does not take can use an unpacked one:
`pip download --no-deps --python-version 3.12 --only-binary=:all: cyllama-vulkan==0.7.0`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import purevk.llm
from bench.peers.llama_cpp import LlamaCpp


def perplexity(logits: Iterator[numpy.ndarray], tokens: Sequence[int]) -> float:
    """Of tokens, but the first, by the logits after each one before: float32 [vocabulary]."""
    costs = []
    for row, token in zip(logits, tokens[1:]):
        shifted = row.astype(numpy.float64) - row.max()
        costs.append(numpy.log(numpy.exp(shifted).sum()) - shifted[token])
    return float(numpy.exp(numpy.mean(costs)))


def logits_of_model(model: purevk.llm.Model, tokens: Sequence[int]) -> Iterator[numpy.ndarray]:
    """The logits after each token but the last."""
    for count in range(1, len(tokens)):
        for _ in model.generate(tokens[:count], max_tokens=1, temperature=0.0):
            pass
        yield model.logits.reshape(-1)


def logits_of_llama_cpp(
    peer: LlamaCpp, tokens: Sequence[int], vocab: int
) -> Iterator[numpy.ndarray]:
    """The logits after each token but the last."""
    for position, token in enumerate(tokens[:-1]):
        peer.run([token], position)
        yield peer.logits(vocab)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    with purevk.llm.load(options.model, context=4096, dtype=options.dtype) as model:
        tokens = model.tokenizer.encode(text)
        purevk_perplexity = perplexity(logits_of_model(model, tokens), tokens)
        peer = LlamaCpp(options.model, len(tokens), vulkan=False)
        vocab = model.logits.size
        llama_perplexity = perplexity(logits_of_llama_cpp(peer, tokens, vocab), tokens)
        peer.close()
    ratio = purevk_perplexity / llama_perplexity
    print(f"{len(tokens)} tokens: purevk {purevk_perplexity:.3f}, llama.cpp {llama_perplexity:.3f}")
    print(f"ratio {ratio:.5f}")


if __name__ == "__main__":
    main()
