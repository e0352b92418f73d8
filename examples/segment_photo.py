"""Segmentation with an overlay: a few marked boxes in a photo become a label for every pixel.

    python examples/segment_photo.py --out segments.jpg

A small network with a wide field of view learns from the boxes alone, with torch, in about ten
seconds. purevk then labels the whole photo. This is how interactive tools work; nothing is known of
other photos. Needs torch, scikit-learn (for the photo) and Pillow.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from sklearn.datasets import load_sample_image
from torch import nn

import purevk

# Class -> its color, and boxes of pixels that belong to it: left, top, right, bottom.
CLASSES = {
    "sky": ((80, 150, 255), [(350, 20, 620, 120), (20, 10, 80, 100), (330, 120, 500, 190)]),
    "water": ((0, 220, 220), [(370, 250, 520, 300), (5, 282, 55, 300), (345, 225, 400, 300)]),
    "trees": (
        (60, 210, 60),
        [(400, 320, 620, 420), (575, 150, 635, 290), (5, 350, 60, 420), (2, 165, 45, 205)],
    ),
    "pagoda": (
        (255, 80, 60),
        [(165, 85, 250, 118), (110, 118, 300, 230), (90, 250, 320, 330), (225, 365, 310, 385)],
    ),
}


class Segmenter(nn.Module):
    """Colors, their surroundings and the position: classes for each pixel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index, dilation in enumerate((1, 2, 4, 8)):
            channels = 24 if index else 5
            layers += [nn.Conv2d(channels, 24, 3, padding=dilation, dilation=dilation)]
            layers += [nn.BatchNorm2d(24), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Conv2d(24, classes, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        down = torch.linspace(-1, 1, image.shape[2])[:, None] + 0 * image[:1, :1]
        across = torch.linspace(-1, 1, image.shape[3]) + 0 * image[:1, :1]
        return self.body(torch.cat([image - 0.5, 0.5 * down, 0.2 * across], 1))


def train(model: nn.Module, image: torch.Tensor, labels: torch.Tensor, steps: int) -> None:
    """Learns from the pixels whose label is not -1, at half the size."""
    small, marks = nn.functional.interpolate(image, scale_factor=0.5), labels[:, ::2, ::2]
    marks = marks[:, : small.shape[2], : small.shape[3]]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=1e-3)
    for _ in range(steps):
        noisy = small + 0.03 * torch.randn_like(small)
        loss = nn.functional.cross_entropy(model(noisy), marks, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def overlay(image: torch.Tensor, classes: torch.Tensor) -> Image.Image:
    """The photo, tinted by class, with white edges, the boxes, and a legend."""
    colors = torch.tensor([color for color, _ in CLASSES.values()]) / 255
    mixed = 0.45 * image[0].permute(1, 2, 0) + 0.55 * colors[classes]
    edge = torch.zeros_like(classes, dtype=torch.bool)
    edge[1:] |= classes[1:] != classes[:-1]
    edge[:, 1:] |= classes[:, 1:] != classes[:, :-1]
    mixed[edge] = 1.0
    page = Image.fromarray((mixed * 255).byte().numpy())
    draw = ImageDraw.Draw(page)
    for index, (name, (color, boxes)) in enumerate(CLASSES.items()):
        for box in boxes:
            draw.rectangle(box, outline=color, width=2)
        draw.rectangle((10 + 90 * index, 402, 90 + 90 * index, 420), fill=color)
        draw.text((16 + 90 * index, 405), name, fill="black")
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("segments.jpg"))
    parser.add_argument("--steps", type=int, default=60, help="of the training")
    options = parser.parse_args()
    torch.manual_seed(0)
    photo = torch.from_numpy(load_sample_image("china.jpg").copy())
    image = photo.permute(2, 0, 1)[None].float() / 255
    labels = torch.full(image.shape[2:], -1)[None]
    for index, (_, boxes) in enumerate(CLASSES.values()):
        for left, top, right, bottom in boxes:
            labels[0, top:bottom, left:right] = index

    model = Segmenter(len(CLASSES))
    train(model, image, labels, options.steps)
    model.eval()
    program = purevk.compile(model, (image,))
    program.forward(image)  # the first call records the command buffer
    started = time.perf_counter()
    scores = program.forward(image)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        torch.testing.assert_close(scores, model(image), rtol=1e-3, atol=1e-3)
    classes = scores[0].argmax(0)
    marked = labels[0] >= 0
    right = float((classes == labels[0])[marked].float().mean())
    print(f"{program.device}: {seconds * 1e3:.0f} ms for {classes.numel()} pixels")
    print(f"{right:.1%} of the marked pixels have their own label")
    for index, name in enumerate(CLASSES):
        print(f"{name:8} {float((classes == index).float().mean()):6.1%} of the photo")
    overlay(image, classes).save(options.out, quality=88)
    print(f"the overlay: {options.out}")


if __name__ == "__main__":
    main()
