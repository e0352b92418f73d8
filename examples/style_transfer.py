"""Style transfer: paints one photo with pieces of another one.

    python examples/style_transfer.py --out style.jpg

No weights are needed. As in "style swap" (Chen and Schmidt, 2016), each patch of the content becomes the
patch of the style that is most like it; patches overlap, and their mean is the picture. Finding the
patches is a convolution whose filters are the patches of the style: about 5 billion multiplications
for a photo, in one GPU graph. Needs torch, scikit-learn (for the photos) and Pillow.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch.nn import functional as F

import purevk


class Swap(torch.nn.Module):
    """Replaces patches of a picture by those of the style that are nearest."""

    patches: torch.Tensor
    filters: torch.Tensor
    offsets: torch.Tensor
    window: torch.Tensor

    def __init__(self, style: torch.Tensor, size: int, stride: int, count: int) -> None:
        super().__init__()
        self.size, self.stride = size, stride
        turned = torch.cat([style, style.flip(3)])
        patches = F.unfold(turned, size, stride=2).transpose(1, 2).reshape(-1, 3 * size * size)
        patches = patches[torch.randperm(len(patches))[:count]]
        fade = torch.hann_window(size + 2, periodic=False)[1:-1]
        self.register_buffer("patches", patches)
        # |content - patch|^2 is least where 2 content * patch - |patch|^2 is greatest.
        self.register_buffer("filters", 2 * patches.reshape(-1, 3, size, size))
        self.register_buffer("offsets", -(patches**2).sum(1))
        self.register_buffer("window", (fade[:, None] * fade).reshape(1, -1).repeat(1, 3))

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        scores = F.conv2d(picture, self.filters, self.offsets, stride=self.stride)
        chosen = self.patches[scores.argmax(1).flatten(1)] * self.window  # [1, places, 3 * size^2]
        height, width = picture.shape[2:]
        weights = self.window.expand(chosen.shape)[..., None].squeeze(-1)
        options = {"kernel_size": self.size, "stride": self.stride}
        total = F.fold(chosen.transpose(1, 2), (height, width), **options)
        weight = F.fold(weights.transpose(1, 2), (height, width), **options)
        return total / weight.clamp_min(1e-6)


class Painter(torch.nn.Module):
    """Gives the content the colors of the style by brightness, then swaps patches, large ones first."""

    palette: torch.Tensor

    def __init__(self, style: torch.Tensor, ranks: torch.Tensor, palette: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("palette", palette)
        self.register_buffer("ranks", ranks)
        self.large = Swap(style, 16, 8, 1500)
        self.small = Swap(style, 8, 4, 1500)

    def forward(self, content: torch.Tensor) -> torch.Tensor:
        gray = (content.mean(1) * 255).round().long().clamp(0, 255)
        tinted = self.palette[self.ranks[gray]].permute(0, 3, 1, 2)
        drawn = self.large(tinted)
        return self.small(0.65 * drawn + 0.35 * tinted).clamp(0, 1)


def tables(content: torch.Tensor, style: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank of each brightness in the content, of 255, and the style's color for each rank."""
    gray = (content.mean(1) * 255).round().flatten()
    counts = torch.bincount(gray.long(), minlength=256).float()
    ranks = ((counts.cumsum(0) / counts.sum()) * 255).long()
    pixels = style[0].flatten(1).T
    ordered = pixels[pixels.mean(1).argsort()]
    colors = torch.stack([part.mean(0) for part in ordered.tensor_split(64)]).T[None]
    return ranks, F.interpolate(colors, 256, mode="linear", align_corners=True)[0].T.contiguous()


def loaded(path: Path | None, name: str, width: int) -> torch.Tensor:
    photo = Image.open(path) if path else Image.fromarray(load_sample_image(name))
    height = round(photo.height * width / photo.width) // 4 * 4
    pixels = np.array(photo.convert("RGB").resize((width, height), Image.Resampling.LANCZOS))
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("style.jpg"))
    parser.add_argument("--content", type=Path, help="another photo")
    parser.add_argument("--style", type=Path, help="another style")
    parser.add_argument("--width", type=int, default=480)
    options = parser.parse_args()
    torch.manual_seed(0)
    content = loaded(options.content, "china.jpg", options.width // 4 * 4)
    style = loaded(options.style, "flower.jpg", 260)
    style = style if options.style else style[..., 32:150, 65:185]  # the flower alone
    model = Painter(style, *tables(content, style)).eval()
    program = purevk.compile(model, (content,))
    assert program.report()["cpu_nodes"] == 0
    started = time.perf_counter()
    made = program.forward(content)
    seconds = time.perf_counter() - started
    with torch.no_grad():
        expected = model(content)
    # Two patches may be as near as each other, and rounding decides: compare the pictures as a whole.
    difference = float((made - expected).abs().mean())
    assert difference < 5e-3, difference
    print(f"{program.device}: {seconds:.2f} s; mean difference from torch {difference:.1e}")
    pixels = (made[0].permute(1, 2, 0) * 255).byte().numpy()
    Image.fromarray(pixels).save(options.out, quality=90)
    print(f"the picture: {options.out}")


if __name__ == "__main__":
    main()
