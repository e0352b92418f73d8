"""Tables and a plot of what `bench.growth` measured, as a part of RESULTS.md between two comments."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def device_key(name: str) -> str:
    """A short name of a device, for files and comments."""
    return re.sub(r"[^a-z0-9]+", "-", name.split("(")[0].lower()).strip("-") or "device"


def write_page(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the part of the device into RESULTS.md of a folder, in place of an older one, and its
    plot. Without matplotlib there is no plot.

    Returns:
        The files.
    """
    key = device_key(results["machine"]["device"])
    image = folder / "plots" / f"growth-{key}.svg"
    drawn = draw(results, image)
    page = folder / "RESULTS.md"
    text = page.read_text(encoding="utf-8") if page.exists() else "# Benchmark results\n"
    part = "\n".join(lines_of(results, image.name if drawn else None))
    page.write_text(replaced(text, key, part), encoding="utf-8")
    return [page, image] if drawn else [page]


def replaced(text: str, key: str, part: str) -> str:
    """The page with another part between the comments of a key. Without them, it is added at the
    end."""
    first, last = f"<!-- growth on {key} -->", f"<!-- end of growth on {key} -->"
    made = f"{first}\n\n{part}\n\n{last}"
    start, end = text.find(first), text.find(last)
    if start < 0 or end < start:
        return f"{text.rstrip()}\n\n{made}\n"
    return text[:start] + made + text[end + len(last) :]


# -- tables --------------------------------------------------------------------------------------
def lines_of(results: dict[str, Any], image: str | None) -> list[str]:
    """The part in Markdown."""
    machine = results["machine"]
    day = time.strftime("%Y-%m-%d", time.gmtime(machine["unix_time"]))
    lines = [f"## Growth with size: {machine['device']}, {day}", "", *_prose(_about(results))]
    if image:
        lines += ["", f"![Growth with size](plots/{image})"]
    for series in results["series"]:
        lines += ["", f"### {series['about'][0].upper()}{series['about'][1:]}", ""]
        lines += _table(
            [
                series["axis"],
                "purevk, ms",
                "torch, ms",
                "purevk / torch",
                "GFLOP/s",
                "MiB",
                "error",
            ],
            [
                [
                    str(point["size"]),
                    _number(point["purevk"]),
                    _number(point["torch"]),
                    _number(point["ratio"]),
                    _number(point["flops"] and 1e-6 * point["flops"] / point["purevk"]),
                    _number(point["nbytes"] / 2**20),
                    f"{point['error']:.0e}",
                ]
                for point in series["points"]
                if point["purevk"] is not None
            ],
        )
        lines += _left_out([(str(p["size"]), p["why"]) for p in series["points"] if p["why"]])
    if results["nodes"]:
        names = list(results["nodes"][0])
        lines += ["", "### Nodes of a graph", "", *_prose(_NODES), ""]
        lines += _table(names, [[_number(row[name]) for name in names] for row in results["nodes"]])
        left = [(key, why) for key, why in results["why"].items() if key.startswith("nodes ")]
        lines += _left_out([(key.removeprefix("nodes "), why) for key, why in left])
    if results["recordings"]:
        lines += ["", "### Recordings that are kept", "", *_prose(_RECORDINGS), ""]
        lines += _table(
            ["recordings", "dispatches", "call, us", "recorded again", "KiB each"],
            [
                [
                    str(row["recordings"]),
                    str(row["dispatches"]),
                    _number(row["call"]),
                    str(row["recorded_again"]),
                    _number(row.get("bytes_each") and row["bytes_each"] / 1024),
                ]
                for row in results["recordings"]
            ],
        )
    return lines


_NODES = """`bench/nodes.py`: a graph of layers of 15 nodes. Microseconds for each node, with a warm
cache: CPU time to load the graph, wall time of three phases of that, CPU time to record the command
buffer, and the time of a call beyond submitting and waiting."""
_RECORDINGS = """A chain of kernels with a dynamic length, called with so many lengths in turn. *call*:
the time of a call beyond submitting and waiting. *KiB each*: growth of the resident memory of the
process for each recording and the inputs of its call, with what the driver keeps."""


def _about(results: dict[str, Any]) -> str:
    machine = results["machine"]
    cores, load = machine.get("cpus"), machine.get("load")
    other = (
        f"CUDA graphs of eager torch {machine['torch']}, between events"
        if machine.get("cuda")
        else f"eager torch {machine['torch']} on the CPU with {machine.get('threads')} threads, "
        "wall time"
    )
    text = (
        f"`{results['command']}` with {machine['driver']}, in {machine['dtype']}. Medians. purevk: "
        f"time of a call between timestamps of the device. torch: {other}. Both took turns. Every "
        "output was compared with torch's; *error* is relative to the largest element."
    )
    if load is not None and cores:
        text += f" The load average was {load:.1f} on {cores} processors before the run"
        text += ", so other work disturbed it." if load > 0.25 * cores else "."
    return text


def _prose(text: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(names) + " |",
        "|" + "--:|" * len(names),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _left_out(left: Sequence[tuple[str, str]]) -> list[str]:
    """Says which sizes have no figures: those of the same reason together."""
    groups: dict[str, list[str]] = {}
    for size, why in left:
        groups.setdefault(why, []).append(size)
    lines = []
    for why, sizes in groups.items():
        lines += ["", *_prose(f"Left out: {', '.join(sizes)}: {why}.")]
    return lines


def _number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}" if value >= 10000 else str(value)
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


# -- plot ----------------------------------------------------------------------------------------
def draw(results: dict[str, Any], path: Path) -> bool:
    """Draws all series in one picture. False: matplotlib is not installed, and nothing is drawn."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    from matplotlib import pyplot

    # Text stays text, and the same figures make the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "growth", "font.size": 9})
    panels = [*results["series"]]
    count = len(panels) + bool(results["nodes"]) + bool(results["recordings"])
    figure, axes = pyplot.subplots(
        -(-count // 2), 2, figsize=(9, 2.8 * -(-count // 2)), layout="constrained", squeeze=False
    )
    places = list(axes.flat)
    for series in panels:
        points = [point for point in series["points"] if point["purevk"] is not None]
        sizes = [point["size"] for point in points]
        lines = {name: [point[name] for point in points] for name in ("purevk", "torch")}
        _panel(places.pop(0), series["about"], series["axis"], "ms", sizes, lines)
    if rows := results["nodes"]:
        lines = {name: [row[name] for row in rows] for name in rows[0]}
        sizes, _ = lines.pop("nodes"), lines.pop("dispatches")
        _panel(places.pop(0), "nodes of a graph", "nodes", "us for each node", sizes, lines)
    if rows := results["recordings"]:
        sizes, lines = [r["recordings"] for r in rows], {"call": [r["call"] for r in rows]}
        _panel(places.pop(0), "recordings that are kept", "recordings", "us", sizes, lines)
    for unused in places:
        unused.remove()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    text = re.sub(r"(\.\d\d)\d+", r"\1", path.read_text(encoding="utf-8"))  # half the bytes
    lines = (line.rstrip() for line in text.splitlines())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return True


def _panel(
    axes: Any, title: str, axis: str, unit: str, sizes: list[int], lines: dict[str, list[float]]
) -> None:
    for name, values in lines.items():
        axes.plot(sizes, values, marker="o", markersize=3, linewidth=1, label=name)
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set(xscale="log", yscale="log", xlabel=axis, ylabel=unit)
    axes.set_title(title, fontsize=9)
    shown = sizes[:: -(-len(sizes) // 6)] if sizes else []
    axes.set_xticks(shown, [str(size) for size in shown])
    low, high = axes.get_ylim()
    steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, at: f"{value:g}"))
    axes.minorticks_off()
    axes.grid(True, which="major", linewidth=0.3)
    axes.legend(fontsize=8)
