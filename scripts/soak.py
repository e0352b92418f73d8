"""Uses purevk for a long time, and checks that memory does not grow.

    python scripts/soak.py --minutes 5 [--threads 3] [--seed 0]
    python scripts/soak.py --calls 100000

Threads call programs that stay open, with changing sizes and with states, submit calls, and load
programs, call and close them. Each result is compared. After each round the threads end, and memory
is sampled: resident memory of the process, and purevk's own counts of device memory and objects.

The first quarter is for warming up. The run fails if the samples of the last quarter are, in the
median, more than 1 % above those of the second one. The last line of the output is a summary as JSON.
The exit code is 1 after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import logging
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import purevk  # noqa: E402
from purevk.graph.context import Context, default_context  # noqa: E402

FOLDER = ROOT / "tests" / "data" / "pte"
MOST_GROWTH = 0.01
ACTIONS = 40  # of a thread in a round
WARM_UP = 300  # calls of each program
ROUNDS = 12  # at least, so that each quarter has samples
_MARGIN = 64 << 10  # bytes: a page or two more is no growth


@dataclass(frozen=True)
class Sample:
    """What is held between two rounds: bytes, and objects of Vulkan."""

    resident: int
    device: int
    objects: int


@dataclass(frozen=True)
class Case:
    """A program with inputs, and its results as numpy computes them."""

    file: str
    inputs: Callable[[random.Random], tuple[Any, ...]]
    expected: Callable[..., Any]


def _floats(draw: random.Random, *sizes: int) -> np.ndarray:
    return np.random.default_rng(draw.randrange(2**32)).standard_normal(sizes, np.float32)


def _views(x: np.ndarray) -> np.ndarray:
    y = x.reshape(1, x.shape[1], 2, 4) + 1.0
    return np.concatenate([y, y * y], -1)


def _counted(x: np.ndarray) -> tuple[np.ndarray, ...]:
    count = int(np.abs(x[0, 0]))
    return x[x[:, 0] > 0.5] * 2, (x > 0).nonzero()[1] + 1, x[:count] + 1


def _topk(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    indices = np.argsort(-x, -1)[:, :2]
    return 1 / (1 + np.exp(-(np.take_along_axis(x, indices, -1) * 2 + 1))), indices


CASES = {
    "dynamic": Case(
        "dynamic_views", lambda draw: (_floats(draw, 1, draw.randint(1, 16), 8),), _views
    ),
    "above the bounds": Case(
        "dynamic_views", lambda draw: (_floats(draw, 1, draw.randint(17, 64), 8),), _views
    ),
    "data-dependent": Case(
        "counted", lambda draw: (np.clip(_floats(draw, 5, 4) * 2, -5, 5),), _counted
    ),
    "static": Case("topk", lambda draw: (_floats(draw, 2, 7),), _topk),
    "control flow": Case(
        "branch",
        lambda draw: (np.array(draw.random() < 0.5), _floats(draw, 3)),
        lambda flag, x: x + 1 if flag else x * 3,
    ),
}


def check(name: str, inputs: tuple[Any, ...], made: Any) -> None:
    wanted = CASES[name].expected(*inputs)
    pairs = zip(made, wanted) if isinstance(wanted, tuple) else [(made, wanted)]
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=f"{name}: {inputs}")


class Soak:
    """Programs that stay open, and what threads do with them."""

    def __init__(self, context: Context, seed: int) -> None:
        self.context, self.seed = context, seed
        self.calls = self.opened = self.rounds = 0
        self._lock = threading.Lock()
        self._open = {name: self._load(name) for name in CASES}
        self._counter = purevk.load(FOLDER / "counter.pte", context=context)
        self._start = self._counter.state[next(iter(self._counter.state))]
        self._added = 0
        draw = random.Random(seed)
        for name, program in self._open.items():
            for _ in range(WARM_UP):  # most sizes have their recordings then
                self._call(draw, program, name)

    def _load(self, name: str) -> purevk.Program:
        self.opened += 1
        return purevk.load(FOLDER / f"{CASES[name].file}.pte", context=self.context, bounds="grow")

    def _call(self, draw: random.Random, program: purevk.Program, name: str) -> None:
        inputs = CASES[name].inputs(draw)
        submitted = draw.random() < 0.3
        check(name, inputs, program.submit(*inputs).result() if submitted else program(*inputs))

    def _act(self, draw: random.Random) -> int:
        """One action; the number of its calls."""
        name = draw.choice(list(CASES))
        action = draw.random()
        if action < 0.6:
            self._call(draw, self._open[name], name)
            return 1
        if action < 0.9:
            self._counter(np.ones((2, 4), np.float32))
            with self._lock:
                self._added += 1
            return 1
        with self._load(name) as program:
            for _ in range(3):
                self._call(draw, program, name)
        return 3

    def _work(self, thread: int, failed: list[BaseException]) -> None:
        draw = random.Random(f"{self.seed}:{self.rounds}:{thread}")
        try:
            for _ in range(ACTIONS):
                count = self._act(draw)
                with self._lock:
                    self.calls += count
        except BaseException as error:  # raised in the main thread
            failed.append(error)

    def round(self, count: int) -> None:
        """Lets `count` threads work, then checks the states."""
        failed: list[BaseException] = []
        threads = [
            threading.Thread(target=self._work, args=(number, failed)) for number in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        (state,) = self._counter.state.values()
        np.testing.assert_array_equal(state, self._start + self._added)
        self._counter.reset_state()
        self._added = 0
        self.rounds += 1

    def sample(self) -> Sample:
        """What is held now."""
        gc.collect()
        if sys.platform == "linux":
            with contextlib.suppress(AttributeError):  # musl has none
                ctypes.CDLL(None).malloc_trim(0)
        device = self.context.device
        objects = sum(device.live_objects().values())
        return Sample(_resident(), device.allocator.stats().used, objects)

    def close(self) -> None:
        for program in (*self._open.values(), self._counter):
            program.close()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(samples: list[Sample]) -> dict[str, float]:
    """How much more the last quarter has than the second one, as a fraction."""
    quarter = len(samples) // 4
    grown = {}
    for name in ("resident", "device", "objects"):
        values = [getattr(sample, name) for sample in samples]
        before = statistics.median(values[quarter : 2 * quarter])
        after = statistics.median(values[-quarter:])
        grown[name] = (after - before) / before if after - before > _margin(name) else 0.0
    return grown


def _margin(name: str) -> int:
    return _MARGIN if name == "resident" else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--calls", type=int, default=0)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.minutes and not args.calls:
        parser.error("give --minutes or --calls")
    logging.getLogger("purevk").setLevel(logging.ERROR)  # it says when it lowers again
    context = default_context()
    soak, samples = Soak(context, args.seed), []
    began = time.monotonic()
    while (
        soak.rounds < ROUNDS
        or time.monotonic() - began < 60 * args.minutes
        or soak.calls < args.calls
    ):
        soak.round(args.threads)
        samples.append(soak.sample())
        if soak.rounds % 100 == 0:
            print(f"{soak.calls} calls, {samples[-1]}", flush=True)
    grown = growth(samples)
    soak.close()
    summary = {
        "device": context.device.name,
        "seconds": round(time.monotonic() - began, 1),
        "calls": soak.calls,
        "programs": soak.opened + 1,
        "rounds": soak.rounds,
        "last": asdict(samples[-1]),
        "growth": {name: round(value, 5) for name, value in grown.items()},
        "left": context.device.live_objects(),
    }
    print(json.dumps(summary))
    return 1 if max(grown.values()) > MOST_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
