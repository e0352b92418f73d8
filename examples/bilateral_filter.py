"""A GPU operator of your own: a bilateral filter, which smooths a photo and keeps its edges.

    python examples/bilateral_filter.py --out bilateral.jpg

torch has no such operator. The script defines it with `torch.library`, and registers a compute shader
for it. The model calls it between other operators, and stays one GPU graph. Needs torch, scikit-learn
(for the photo) and Pillow.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import purevk

RADIUS = 5
SHADER = """
#version 450
#extension GL_GOOGLE_include_directive : enable
#include "kernel.glslh"

// One invocation for each pixel. A neighbour counts less the further away it is, and the more its
// color differs.
void main() {
    int at = INDEX;
    if (at >= COUNT / 3) return;
    int row = at / width, column = at % width, plane = height * width;
    vec3 here = vec3(READ_IMAGE(at), READ_IMAGE(plane + at), READ_IMAGE(2 * plane + at));
    vec3 sum = vec3(0.0);
    float weights = 0.0;
    for (int dy = -radius; dy <= radius; dy++) {
        for (int dx = -radius; dx <= radius; dx++) {
            int y = clamp(row + dy, 0, height - 1), x = clamp(column + dx, 0, width - 1);
            int i = y * width + x;
            vec3 there = vec3(READ_IMAGE(i), READ_IMAGE(plane + i), READ_IMAGE(2 * plane + i));
            vec3 change = there - here;
            float weight = exp(-float(dx * dx + dy * dy) * near - dot(change, change) * alike);
            sum += weight * there;
            weights += weight;
        }
    }
    sum /= weights;
    WRITE_OUT(at, sum.r);
    WRITE_OUT(plane + at, sum.g);
    WRITE_OUT(2 * plane + at, sum.b);
}
"""


@torch.library.custom_op("photo::bilateral", mutates_args=())
def bilateral(image: torch.Tensor, distance: float, contrast: float) -> torch.Tensor:
    """The filter in torch: what the shader is compared with."""
    padded = torch.nn.functional.pad(image[None], (RADIUS,) * 4, mode="replicate")[0]
    total, weights = torch.zeros_like(image), torch.zeros_like(image[:1])
    height, width = image.shape[1:]
    for dy in range(-RADIUS, RADIUS + 1):
        for dx in range(-RADIUS, RADIUS + 1):
            there = padded[:, RADIUS + dy :, RADIUS + dx :][:, :height, :width]
            change = ((there - image) ** 2).sum(0, keepdim=True)
            weight = torch.exp(
                -(dx * dx + dy * dy) / (2 * distance**2) - change / (2 * contrast**2)
            )
            total, weights = total + weight * there, weights + weight
    return total / weights


@bilateral.register_fake
def _(image: torch.Tensor, distance: float, contrast: float) -> torch.Tensor:
    return torch.empty_like(image)


def register() -> None:
    """Gives the operator a kernel."""
    purevk.ops.register_kernel(
        "photo.bilateral",
        SHADER,
        shape=lambda image, distance, contrast: image,
        params=lambda image, distance, contrast: {
            "height": image.dims[1],
            "width": image.dims[2],
            "radius": RADIUS,
            "near": 1 / (2 * float(distance) ** 2),
            "alike": 1 / (2 * float(contrast) ** 2),
        },
    )


class Cartoon(torch.nn.Module):
    """Two passes of the filter, fewer colors, and dark lines where the brightness jumps."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            image = torch.ops.photo.bilateral(image, 3.0, 0.12)
        gray = image.mean(0, keepdim=True)[None]
        right = torch.nn.functional.pad(gray, (0, 1, 0, 0), mode="replicate")[..., 1:] - gray
        down = torch.nn.functional.pad(gray, (0, 0, 0, 1), mode="replicate")[..., 1:, :] - gray
        lines = torch.sigmoid(40 * ((right**2 + down**2).sqrt()[0] - 0.12))
        flat = torch.round(image * 9) / 9 * 0.6 + image * 0.4
        return (flat * (1 - 0.8 * lines)).clamp(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("bilateral.jpg"))
    parser.add_argument("--photo", type=Path, help="another photo")
    options = parser.parse_args()
    photo = Image.open(options.photo) if options.photo else load_sample_image("china.jpg")
    image = torch.from_numpy(np.array(photo)[..., :3].copy()).permute(2, 0, 1).float() / 255

    register()
    model = Cartoon()
    program = purevk.compile(model, (image,))
    assert program.report()["cpu_nodes"] == 0
    started = time.perf_counter()
    made = program.forward(image)
    ours = time.perf_counter() - started
    started = time.perf_counter()
    expected = model(image)
    torchs = time.perf_counter() - started
    # Rounding to a color may fall to either side: the mean says whether the pictures agree.
    difference = float((made - expected).abs().mean())
    assert difference < 1e-3, difference
    print(f"{program.device}: {ours:.2f} s; torch on the CPU: {torchs:.2f} s")
    print(f"mean difference from torch: {difference:.1e}")

    half = image.shape[2] // 3
    made[:, :, :half] = image[:, :, :half]  # the left third as it was
    pixels = (made.permute(1, 2, 0) * 255).round().byte().numpy()
    Image.fromarray(pixels).save(options.out, quality=88)
    print(f"left: the photo, right: filtered: {options.out}")


if __name__ == "__main__":
    main()
