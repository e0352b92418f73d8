"""A loop with dynamic sizes: the Mandelbrot set, as a `while_loop` that ends once all points left.

    python examples/mandelbrot.py --out mandelbrot.png

One program computes every size of picture. The loop is part of it: each iteration runs on the device,
and the host reads only whether to go on. Needs torch and Pillow.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch._higher_order_ops.while_loop import while_loop

import purevk

LIMIT = 200


class Mandelbrot(torch.nn.Module):
    """For each point c: the number of steps of z = z * z + c after which z is far away."""

    def forward(self, real: torch.Tensor, imaginary: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def go_on(step, x, y, count):  # type: ignore[no-untyped-def]
            return (step < LIMIT) & (x * x + y * y < 256).any()

        def iterate(step, x, y, count):  # type: ignore[no-untyped-def]
            inside = x * x + y * y < 256
            moved_x = torch.where(inside, x * x - y * y + real, x)
            moved_y = torch.where(inside, 2 * x * y + imaginary, y)
            return step + 1, moved_x, moved_y, count + inside.float()

        zero = real * 0 + imaginary * 0
        first = (torch.tensor(0), zero, zero + 0, zero + 0)
        step, x, y, count = while_loop(go_on, iterate, first)
        distance = torch.log2(torch.log2((x * x + y * y).clamp_min(1.0001)).clamp_min(1e-4))
        smooth = torch.where(x * x + y * y < 256, -1.0, count + 3 - distance)  # -1: never left
        return step, smooth


def points(center: complex, width: float, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The real parts of the columns and the imaginary parts of the rows of a picture."""
    rows = columns * 2 // 3
    across = torch.linspace(-width / 2, width / 2, columns)
    down = torch.linspace(-width / 3, width / 3, rows)
    return (across + center.real)[None, :], (down + center.imag)[:, None]


def colored(smooth: torch.Tensor) -> Image.Image:
    """Colors for the numbers of steps; what never leaves is dark."""
    t = np.sqrt(np.clip(smooth.numpy(), 0, None) / LIMIT)[..., None]
    color = 0.5 + 0.5 * np.cos(2 * np.pi * (1.6 * t + np.array([0.62, 0.70, 0.82])))
    color[smooth.numpy() < 0] = (0.04, 0.03, 0.10)
    return Image.fromarray((color * 255).astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("mandelbrot.png"))
    parser.add_argument("--columns", type=int, default=600, help="of the largest picture")
    options = parser.parse_args()
    rows, columns = torch.export.Dim("rows", max=2048), torch.export.Dim("columns", max=4096)
    model = Mandelbrot()
    program = purevk.compile(model, points(-0.7, 3, 60), [{1: columns}, {0: rows}])

    views = (
        (0.9 + 0.6j, 0.9, options.columns // 3),  # all points leave: the loop ends early
        (-0.743 + 0.126j, 0.03, options.columns // 2),
        (-0.7453 + 0.1127j, 0.0065, options.columns),
    )
    for center, width, size in views:
        given = points(center, width, size)
        started = time.perf_counter()
        steps, smooth = program(*given)
        seconds = time.perf_counter() - started
        print(f"{size:5} columns, {int(steps):3} iterations on {program.device}: {seconds:.2f} s")
    # Rounding grows along an orbit, so a point at the edge may leave a step sooner or later.
    small = points(-0.7, 3, 96)
    ours, torchs = program(*small)[1], model(*small)[1]
    assert ((ours - torchs).abs() < 0.1).float().mean() > 0.97
    colored(smooth).save(options.out)
    print(f"the last one: {options.out}")


if __name__ == "__main__":
    main()
