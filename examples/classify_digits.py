"""Image classification: reads handwritten digits, and shows those that it is least sure of.

    python examples/classify_digits.py --out digits.png

The images are the 1,797 real scans of scikit-learn's digits. Weights for them come in no package, so
the script trains a small network for a few seconds with torch. purevk then classifies the images that
the training did not see, in batches of any size. Needs torch, scikit-learn and Pillow.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from sklearn.datasets import load_digits
from torch import nn

import purevk

TRAIN = 1200


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The images, float32 [1797, 1, 8, 8] from 0 to 1, and their labels, in a random order."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images))
    return images[order], labels[order]


def network() -> nn.Module:
    """A small convolutional network for images of 8 x 8."""
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.Conv2d(24, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(48 * 16, 10)),
    )


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    """Trains with torch: purevk computes no gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def sheet(images: torch.Tensor, texts: list[str], right: list[bool]) -> Image.Image:
    """A picture of the images in rows of six, with a text below each."""
    columns, size, pad = 6, 96, 12
    rows = -(-len(images) // columns)
    step = size + 2 * pad
    page = Image.new("RGB", (columns * step, rows * (step + 14)), "white")
    draw = ImageDraw.Draw(page)
    for index, (pixels, text, good) in enumerate(zip(images, texts, right)):
        x, y = index % columns * step + pad, index // columns * (step + 14) + pad
        gray = Image.fromarray((255 - pixels[0] * 255).byte().numpy())
        page.paste(gray.resize((size, size), Image.Resampling.NEAREST), (x, y))
        draw.text((x, y + size + 4), text, fill="#1b7f4b" if good else "#c0392b")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("digits.png"))
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)

    images, labels = digits()
    model = network()
    train(model, images[:TRAIN], labels[:TRAIN], options.epochs)
    model.eval()

    unseen, truth = images[TRAIN:], labels[TRAIN:]
    batch = torch.export.Dim("batch", min=1, max=len(unseen))
    program = purevk.compile(nn.Sequential(model, nn.Softmax(-1)), (unseen[:2],), [{0: batch}])
    probabilities = program.forward(unseen)
    with torch.no_grad():
        torch.testing.assert_close(probabilities, model(unseen).softmax(-1), rtol=1e-4, atol=1e-5)

    sure, guess = probabilities.max(-1)
    right = guess == truth
    print(f"{program.device}: {int(right.sum())} of {len(unseen)} unseen digits are right")
    print(f"{program.report()['dispatches']} kernels, the same for every batch size")
    doubtful = sure.argsort()[:18]
    texts = [f"{guess[i]}: {sure[i]:.0%}, is {truth[i]}" for i in doubtful]
    sheet(unseen[doubtful], texts, right[doubtful].tolist()).save(options.out)
    print(f"the 18 digits that it is least sure of: {options.out}")


if __name__ == "__main__":
    main()
