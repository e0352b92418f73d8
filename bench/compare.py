"""purevk beside other runtimes in one run: `python -m bench.compare [MODEL...] [--peers a,b]
[--json FILE]`.

Every peer runs in a process of its own. The peers are timed in rounds, each in another order, so that
other work on the machine hits all of them alike. The figure is the median over all calls. A peer
whose output differs from eager torch is marked wrong, and its time is not compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from bench.peers import PEERS
from tests.models.export import VARIANTS, export_pte
from tests.models.zoo import CASES

FOLDER = Path(__file__).parent.parent / "build" / "models"
MODELS = ("mobilenet_v2", "resnet18", "encoder6")
DEFAULT_PEERS = ("purevk", "torch-1", "torch-2", "ncnn")
TOLERANCE = {"fp32": 1e-3, "fp16": 5e-2}
"""The largest accepted error relative to the reference's largest value: of Winograd in float32, of halves in fp16."""


@dataclass
class Result:
    """What one peer did with one model. Times are in milliseconds."""

    model: str
    variant: str
    peer: str
    device: str = ""
    note: str = ""
    why: str = ""
    load_ms: float = 0.0
    first_ms: float = 0.0
    error: float | None = None
    cosine: float | None = None
    times_ms: list[float] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        """Its output differs from eager torch's by more than the variant's rounding."""
        limit = max(TOLERANCE[self.variant], TOLERANCE["fp16"] if "half" in self.peer else 0.0)
        return self.error is not None and not self.error <= limit

    @property
    def median_ms(self) -> float | None:
        """Median call, or None if there is none to be believed."""
        return statistics.median(self.times_ms) if self.times_ms and not self.wrong else None


class Child:
    """The process of one peer."""

    def __init__(self, peer: str, log: IO[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.worker", peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, **PEERS[peer].environment()},
        )

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return the answer; a process that died answers with `"ok": False`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": action, **arguments}) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            return {"ok": False, "why": f"its process ended with {self.process.wait()}"}
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def measure(
    model: str, variant: str, peers: list[str], folder: Path, rounds: int, repeat: int, log: IO[str]
) -> list[Result]:
    """Time one model on all peers and return one result each, in the order of `peers`."""
    reference = export_pte(model, variant, folder)
    results = {peer: Result(model, variant, peer) for peer in peers}
    children = {peer: Child(peer, log) for peer in peers}
    try:
        for peer, child in children.items():
            result = results[peer]
            loaded = child.ask("load", model=model, variant=variant, folder=str(folder.resolve()))
            if not loaded["ok"]:
                result.why = loaded["why"]
                continue
            result.load_ms, result.first_ms = loaded["load_s"] * 1e3, loaded["first_s"] * 1e3
            result.device, result.note = loaded["device"], loaded["note"]
            checked = child.ask("check", reference=str(reference.resolve()))
            if not checked["ok"]:
                result.why = checked["why"]
                continue
            result.error, result.cosine = checked["error"], checked["cosine"]
            child.ask("run", repeat=2)
        running = [peer for peer in peers if not results[peer].why]
        for number in range(rounds):
            for position in range(len(running)):
                peer = running[(position + number) % len(running)]
                answer = children[peer].ask("run", repeat=repeat)
                if answer["ok"]:
                    results[peer].times_ms += [seconds * 1e3 for seconds in answer["seconds"]]
                else:
                    results[peer].why = answer["why"]
    finally:
        for child in children.values():
            child.close()
    return list(results.values())


def show(results: list[Result], base: str) -> None:
    """Print the table of medians, with each peer's time as a multiple of the base's, and what did
    not run."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    peers = list(dict.fromkeys(result.peer for result in results))
    table = Table(title="median ms a call (least to most), and how many times the base's time")
    table.add_column("model")
    for peer in peers:
        table.add_column(f"{peer} (base)" if peer == base else peer, justify="right")
    cells = {(result.model, result.variant, result.peer): result for result in results}
    for model, variant in dict.fromkeys((result.model, result.variant) for result in results):
        row = []
        reference = (
            cells[model, variant, base].median_ms if (model, variant, base) in cells else None
        )
        for peer in peers:
            result = cells[model, variant, peer]
            if result.why:
                row.append("-")
            elif result.median_ms is None:
                row.append(f"[red]wrong[/] ({result.error:.1e})")
            else:
                ratio = (
                    f"  x{result.median_ms / reference:.2f}" if reference and peer != base else ""
                )
                spread = f"({min(result.times_ms):.1f}-{max(result.times_ms):.1f})"
                row.append(f"{result.median_ms:.2f} {spread}{ratio}")
        table.add_row(f"{model} {variant}", *row)
    console.print(table)
    for result in results:
        where = f"{result.model} {result.variant} {result.peer}"
        if result.why:
            console.print(f"{where}: not run: {result.why}", markup=False)
        else:
            note = f"; {result.note}" if result.note else ""
            console.print(
                f"{where}: {result.device}; load {result.load_ms:.0f} ms, first call {result.first_ms:.0f} ms, "
                f"error {result.error:.1e}, cosine {result.cosine:.6f}{note}",
                markup=False,
            )


def machine() -> dict[str, Any]:
    """Return what has to stand beside a figure: processor count, load, system, time."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpus": os.cpu_count(),
        "load": load,
        "system": platform.platform(),
        "unix_time": int(time.time()),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the tables, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help=f"of {', '.join(CASES)}; default {' '.join(MODELS)}",
    )
    parser.add_argument("--peers", default=",".join(DEFAULT_PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--base", default="purevk", help="the peer whose time the ratios divide by")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="default: fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=3, help="calls of each peer per round")
    parser.add_argument("--models-dir", type=Path, default=FOLDER, help="where exports are kept")
    parser.add_argument("--json", type=Path, help="write all times there")
    parser.add_argument("--log", type=Path, help="what the peers print; default: dropped")
    options = parser.parse_args(arguments)
    peers = [peer for peer in options.peers.split(",") if peer]
    for kind, names, known in (("peer", peers, PEERS), ("model", options.models, CASES)):
        unknown = [name for name in names if name not in known]
        if unknown:
            parser.error(f"no such {kind}: {', '.join(unknown)}; there are {', '.join(known)}")
    before, results = machine(), []
    with open(options.log or os.devnull, "w") as log:
        for model in options.models or MODELS:
            for variant in options.variant or ["fp32"]:
                results += measure(
                    model, variant, peers, options.models_dir, options.rounds, options.repeat, log
                )
    show(results, options.base if options.base in peers else peers[0])
    if options.json:
        rows = [{**asdict(r), "median_ms": r.median_ms, "wrong": r.wrong} for r in results]
        options.json.write_text(json.dumps({"machine": before, "results": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
