"""The process of one peer: reads a command a line from standard input, answers each with one line
of JSON.

Commands: `{"do": "load", "model", "variant", "folder"}`, `{"do": "run", "repeat"}`, `{"do":
"check", "reference"}`, `{"do": "quit"}`. Answers carry `"ok": false` and a `"why"` if a command
failed. Whatever a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from bench.peers import PEERS, Peer
from bench.peers.base import Loaded, Unavailable


def compare(actual: list, expected: list) -> dict[str, float]:
    """Return the largest error relative to the reference's largest value, and the least cosine
    similarity."""
    import numpy

    worst, cosine = 0.0, 1.0
    if len(actual) != len(expected):
        raise ValueError(f"{len(actual)} outputs where the reference has {len(expected)}")
    for have, want in zip(actual, expected, strict=True):
        have = have.cpu().numpy() if hasattr(have, "cpu") else numpy.asarray(have)
        have, want = have.astype(numpy.float64).ravel(), want.astype(numpy.float64).ravel()
        if have.size != want.size:
            raise ValueError(f"{have.size} elements where the reference has {want.size}")
        worst = max(worst, float(numpy.abs(have - want).max() / numpy.abs(want).max()))
        cosine = min(
            cosine, float(have @ want / (numpy.linalg.norm(have) * numpy.linalg.norm(want)))
        )
    return {"error": worst, "cosine": cosine}


class Worker:
    """Holds the loaded model between commands."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.loaded: Loaded | None = None

    def load(self, model: str, variant: str, folder: str) -> dict[str, Any]:
        """Load a model and call it once; report both times, in seconds."""
        self.loaded = None
        started = time.perf_counter()
        self.loaded = self.peer.load(model, variant, Path(folder))
        ready = time.perf_counter()
        self.loaded.run()
        return {
            "load_s": ready - started,
            "first_s": time.perf_counter() - ready,
            "device": self.loaded.device,
            "note": self.loaded.note,
        }

    def run(self, repeat: int) -> dict[str, Any]:
        """Call the model `repeat` times and report each call's seconds."""
        assert self.loaded is not None
        seconds = []
        for _ in range(repeat):
            started = time.perf_counter()
            self.loaded.run()
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds}

    def check(self, reference: str) -> dict[str, Any]:
        """Compare with the eager outputs of an `.npz`."""
        assert self.loaded is not None
        from tests.models.export import load_samples

        return compare(self.loaded.run(), load_samples(reference)[0][1])


def main() -> int:
    """Serve commands until `quit` or the end of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(PEERS[sys.argv[1]])
    for line in sys.stdin:
        command = json.loads(line)
        action = command.pop("do")
        if action == "quit":
            break
        try:
            answer = {"ok": True, **getattr(worker, action)(**command)}
        except Unavailable as error:
            answer = {"ok": False, "why": str(error)}
        except (
            Exception
        ) as error:  # the other peers go on; the table shows what happened to this one
            traceback.print_exc()
            answer = {"ok": False, "why": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
