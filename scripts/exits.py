"""Ends processes in the middle of calls, again and again, and counts crashes.

    python scripts/exits.py --minutes 10
    python scripts/exits.py --rounds 100 --only "daemon threads in calls"

A round is one process for each case of `tests/program/exits.py`. A process fails if it ends with
another exit code than 0, prints anything, or takes more than two minutes. The last line of the output
is a summary as JSON. The exit code is 1 if a process failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

HANG_S = 120.0
_FIRST_S, _LAST_S = 0.05, 0.8  # when a process with a daemon thread ends


def ends(name: str, path: Path, seconds: float) -> str:
    """How a process ended: "ok", "hang", the name of a signal, or its exit code and messages."""
    from tests.harness import start
    from tests.program.exits import ENDS

    source, argument = ENDS[name]
    if "daemon" in name:
        source += f"\ntime.sleep({seconds})"
    process = start(source, path, argument, SECONDS=str(seconds))
    try:
        out, err = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "hang"
    if process.returncode < 0:
        return signal.Signals(-process.returncode).name
    text = (out + err).strip()
    return "ok" if not process.returncode and not text else f"{process.returncode}: {text[-500:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=0, help="0: as many as fit")
    parser.add_argument("--only", help="one case")
    args = parser.parse_args()
    from tests.program.exits import ENDS, save_long_program

    names = [args.only] if args.only else list(ENDS)
    counts: Counter[str] = Counter()
    end, rounds = time.monotonic() + 60 * args.minutes, 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "long.pvk")
        save_long_program(path)
        while time.monotonic() < end and not 0 < args.rounds <= rounds:
            seconds = _FIRST_S + (_LAST_S - _FIRST_S) * (rounds * 7 % 16) / 15
            for name in names:
                how = ends(name, path, seconds)
                counts[how] += 1
                if how != "ok":
                    print(f"{name}, {seconds:.2f} s: {how}", flush=True)
            rounds += 1
    failed = sum(counts.values()) - counts["ok"]
    crashed = sum(count for how, count in counts.items() if how.startswith("SIG"))
    summary = {
        "processes": sum(counts.values()),
        "failed": failed,
        "crashed": crashed,
        "segmentation faults": counts["SIGSEGV"],
    }
    print(json.dumps(summary))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
