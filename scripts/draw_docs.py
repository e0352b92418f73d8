"""Draws the diagrams of the documentation into docs/pictures.

    python scripts/draw_docs.py            writes them
    python scripts/draw_docs.py --check    exits with 1 if one differs from what would be written

Boxes have their own background and lines are of a middle gray, so a diagram is readable on a light
page and on a dark one.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
FILLS = {
    "user": ("#e8dcfb", "#7e57c2"),
    "host": ("#dbe7fb", "#4a78c4"),
    "device": ("#d6f0e0", "#3a9a66"),
    "disk": ("#fdeccb", "#c98a1b"),
    "other": ("#fbdcdc", "#c25757"),
}
LINE = "#8a8a96"


@dataclass(frozen=True)
class Box:
    """A box with a title and further lines, around the point (x, y)."""

    x: int
    y: int
    text: str
    kind: str = "host"
    width: int = 190
    height: int = 56

    def drawn(self) -> str:
        fill, stroke = FILLS[self.kind]
        title, *rest = self.text.split("\n")
        top = self.y + 5 - 9 * len(rest)
        lines = [
            f'<rect x="{self.x - self.width // 2}" y="{self.y - self.height // 2}"'
            f' width="{self.width}" height="{self.height}" rx="9" fill="{fill}" stroke="{stroke}"'
            ' stroke-width="1.5"/>',
            f'<text x="{self.x}" y="{top}" class="title">{escape(title)}</text>',
        ]
        for index, line in enumerate(rest):
            lines.append(f'<text x="{self.x}" y="{top + 18 * (index + 1)}">{escape(line)}</text>')
        return "\n".join(lines)


@dataclass(frozen=True)
class Arrow:
    """A line through points, with a head at its end and perhaps a label at a point."""

    points: tuple[tuple[int, int], ...]
    label: str = ""
    at: tuple[int, int] = (0, 0)
    dashed: bool = False

    def drawn(self) -> str:
        path = " ".join(
            f"{'L' if index else 'M'}{x} {y}" for index, (x, y) in enumerate(self.points)
        )
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        line = f'<path d="{path}" class="arrow"{dash} marker-end="url(#head)"/>'
        if not self.label:
            return line
        return f'{line}\n<text x="{self.at[0]}" y="{self.at[1]}" class="label">{self.label}</text>'


def picture(width: int, height: int, title: str, *parts: Box | Arrow) -> str:
    """An SVG file. `title` is read out by screen readers."""
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
            f' width="{width}" height="{height}">',
            f"<title>{escape(title)}</title>",
            f"<style>text {{ font: 13px {font}; fill: #23232b; text-anchor: middle }}",
            ".title { font-weight: 600; font-size: 14px }",
            f".label {{ fill: {LINE}; font-size: 12.5px }}",
            f".arrow {{ fill: none; stroke: {LINE}; stroke-width: 1.8 }}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            f' markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>',
            *(part.drawn() for part in parts),
            "</svg>\n",
        ]
    )


def ways() -> str:
    """Which way a model takes."""
    return picture(
        720,
        340,
        "Three ways to run a model: a file through load, a module through compile, and torch.compile",
        Box(120, 45, "a .pte, .pvk or .pt2 file", "disk", 200),
        Box(360, 45, "a torch module\nof which you know the inputs", "user", 220),
        Box(605, 45, "a torch program\nthat stays as it is", "user", 200),
        Box(120, 150, "purevk.load", "host", 180, 46),
        Box(360, 150, "purevk.compile", "host", 180, 46),
        Box(605, 150, "torch.compile\nbackend='purevk'", "host", 180),
        Box(240, 250, "Program\none GPU graph per method, states", "device", 250),
        Box(605, 250, "compiled module\ngraphs, eager torch between", "device", 220),
        Arrow(((120, 73), (120, 125))),
        Arrow(((360, 73), (360, 125))),
        Arrow(((605, 73), (605, 120))),
        Arrow(((140, 173), (190, 220))),
        Arrow(((340, 173), (290, 220))),
        Arrow(((605, 178), (605, 220))),
        Arrow(
            ((240, 278), (240, 318), (8, 318), (8, 45), (18, 45)), "program.save", (130, 310), True
        ),
    )


def load_picture() -> str:
    """From a model to command buffers."""
    return picture(
        760,
        330,
        "Loading: front end, passes, plan, kernels, memory, command buffer",
        Box(105, 45, "model\nfile or module", "user", 170),
        Box(380, 45, "front end\nreads it as one graph", "host", 190),
        Box(645, 45, "passes\nfuse, remove, rewrite", "host", 190),
        Box(645, 165, "plan\ndevice or CPU for each node", "host", 210),
        Box(380, 165, "kernels\nGLSL to SPIR-V, in this process", "host", 230),
        Box(105, 165, "cache on disk\nnothing is compiled twice", "disk", 180),
        Box(380, 285, "memory\none plan for all tensors", "device", 210),
        Box(645, 285, "command buffer\nreplayed at each call", "device", 190),
        Arrow(((190, 45), (283, 45))),
        Arrow(((475, 45), (548, 45))),
        Arrow(((645, 73), (645, 135))),
        Arrow(((540, 165), (497, 165))),
        Arrow(((265, 158), (197, 158))),
        Arrow(((195, 172), (263, 172))),
        Arrow(((380, 193), (380, 255))),
        Arrow(((485, 285), (548, 285))),
    )


def call_picture() -> str:
    """A call, between host and device."""
    return picture(
        760,
        270,
        "A call: inputs are checked and copied, the command buffer runs, outputs are copied back",
        Box(105, 45, "program.forward(x)\ntorch, numpy, DLPack", "user", 180),
        Box(370, 45, "check\nnames, dtypes, sizes", "host", 180),
        Box(640, 45, "recording\nfor these sizes", "host", 180),
        Box(640, 150, "GPU segment\nall kernels, one submission", "device", 210),
        Box(370, 150, "CPU node\nonly without a kernel", "other", 180),
        Box(105, 150, "result\nthe kind of the input", "user", 180),
        Box(640, 238, "states and weights\nstay on the device", "device", 210, 50),
        Arrow(((195, 45), (278, 45))),
        Arrow(((460, 45), (548, 45))),
        Arrow(((640, 73), (640, 120))),
        Arrow(((535, 142), (462, 142)), dashed=True),
        Arrow(((460, 158), (533, 158)), dashed=True),
        Arrow(((590, 178), (590, 196), (105, 196), (105, 180))),
        Arrow(((640, 213), (640, 180))),
    )


def fusion() -> str:
    """What one graph saves."""
    small = 118
    return picture(
        760,
        250,
        "The same layers as single operators, and as one kernel after fusion",
        *(
            Box(75 + 152 * index, 62, text, "host", small, 50)
            for index, text in enumerate(
                ("linear\nx W + b", "scale\n* 0.5", "GELU", "add\n+ residual", "result")
            )
        ),
        *(
            Arrow(((75 + 152 * i + small // 2, 62), (75 + 152 * (i + 1) - small // 2 - 2, 62)))
            for i in range(4)
        ),
        Box(75, 190, "x, residual", "host", small, 50),
        Box(379, 190, "one kernel\nlinear, scale, GELU, add: in registers", "device", 330),
        Box(683, 190, "result", "host", small, 50),
        Arrow(((134, 190), (212, 190))),
        Arrow(((544, 190), (622, 190))),
        Arrow(((379, 97), (379, 158)), "fused: no tensor is written between", (505, 132)),
    )


def logo() -> str:
    """The icon of the pages."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><title>purevk</title>'
        '<rect width="32" height="32" rx="7" fill="#5e35b1"/>'
        '<path d="M7 9 L16 25 L25 9" fill="none" stroke="#fff" stroke-width="3.6"'
        ' stroke-linejoin="round" stroke-linecap="round"/></svg>\n'
    )


PICTURES = {
    "ways.svg": ways,
    "load.svg": load_picture,
    "call.svg": call_picture,
    "fusion.svg": fusion,
    "logo.svg": logo,
}


def stale() -> list[str]:
    """The pictures that are not what would be written."""
    return [
        name
        for name, draw in PICTURES.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != draw()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        names = stale()
        for name in names:
            print(
                f"docs/pictures/{name} is stale: run python scripts/draw_docs.py", file=sys.stderr
            )
        return 1 if names else 0
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
        print(f"docs/pictures/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
