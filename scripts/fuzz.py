"""Changes files in many ways, and has purevk read and run them.

    python scripts/fuzz.py --minutes 10 [--run-share 0.1] [--jobs 2] [--seed 0] [--corpus FOLDER]
    python scripts/fuzz.py --again failures/4711.json            # runs one case in this process
    python scripts/fuzz.py --again failures/4711.json --minimize # and looks for fewer changes

A case is a sound file and a few changes of it (`tests/fuzz`). Sound files are the committed .pte
and .ptn files, the same as .pvk files, external tensors, .pt2 files, an ETRecord, a bundle and an
entry of the cache, states, arrays, a module for --import, folders of kernels for PUREVK_OVERRIDE
and PUREVK_DUMP, GGUF files with tokenizers and chat templates, a folder of transformers, files of
tokenizers, a saved conversation, a request to a server, and the .pte and .pvk files of a corpus
folder; --kind takes those of one kind. Most cases are read, checked and planned without a device; a
share of them is loaded and called on the device of PUREVK_DEVICE.

Processes do the work, and this one watches them. A case fails if

* it ends a process (a crash);
* it starts a process, connects to a server, or writes outside of the folder of temporary files and
  the cache;
* it raises what is no error of purevk;
* it takes more than 10 seconds of CPU time, or 60 seconds (a hang: the process is killed);
* it takes more memory than --mib.

Each failure is written to --failures as JSON: the file, the changes, and what happened. The exit code
is 1 if there is one. The last line of the output is a summary as JSON.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

HANG_S = 10.0  # of CPU time
WAITS_S = 60.0
START_S = 120.0  # a process imports, and makes the sound files
WAIT_S = 0.5
_EVENTS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")


def case_of(number: int, args: argparse.Namespace) -> tuple[Any, list[Any], bool]:
    """The sound file, the changes, and whether the case is run on the device."""
    from tests.fuzz.mutations import draw_changes
    from tests.fuzz.targets import pick, with_archives

    draw = random.Random(f"{args.seed}:{number}")
    among = with_archives(args.corpus)
    among = tuple(seed for seed in among if seed.kind == args.kind) or among
    seed = pick(draw, among)
    runs = draw.random() < args.run_share
    return seed, draw_changes(draw, seed.kind, seed.data), runs


def perform(seed: Any, changes: list[Any], runs: bool) -> str:
    """What a case comes to: "read", the name of an error of purevk; all else is raised."""
    from tests.fuzz.mutations import apply
    from tests.fuzz.targets import check, parse, run

    return check(run if runs else parse, seed, apply(seed.data, changes))


# -- in a worker ----------------------------------------------------------------------------------
def work(args: argparse.Namespace) -> None:
    """Does cases from --first on, and writes a line before and after each."""
    from purevk.errors import ShaderCompilerError
    from purevk.knobs import cache_folder
    from purevk.shaders import shaderc
    from purevk.whole_file import _Folder

    try:
        import resource

        limit = args.mib << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except ImportError:
        pass  # Windows
    sys.dont_write_bytecode = True  # of modules that a case is the first to import
    number = args.first
    case_of(number, args)  # makes the sound files
    with contextlib.suppress(ShaderCompilerError):
        shaderc.load()  # which asks ldconfig
    accepted = tuple(map(os.path.realpath, (tempfile.gettempdir(), cache_folder(), "/dev")))
    seen: list[str] = []

    def watch(event: str, values: tuple[Any, ...]) -> None:
        """Keeps a process from what no file may bring about."""
        if event == "open" and not isinstance(values[0], int):
            path, caller = os.fsdecode(values[0]), sys._getframe(1)
            if caller.f_code is _Folder.call.__code__:  # an event does not tell `dir_fd`
                folder = caller.f_locals["self"].descriptor
                path = path if folder is None else f"/proc/self/fd/{folder}/{path}"
            writes = values[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if not writes or os.path.realpath(path).startswith(accepted):
                return
        elif event not in _EVENTS:
            return
        seen.append(f"{event}{values}\n{''.join(traceback.format_stack())}")
        raise RuntimeError(event)

    sys.addaudithook(watch)
    while True:
        seed, changes, runs = case_of(number, args)
        print(f"start {number}", flush=True)
        try:
            found, detail = perform(seed, changes, runs), ""
        except Exception as error:
            found, detail = f"!{type(error).__name__}", traceback.format_exc()
        if seen:
            found, detail = f"!{seen[0].partition('(')[0]}", seen[0]
            seen.clear()
        print("end", json.dumps([number, f"{seed.kind}: {found}", runs, detail]), flush=True)
        number += args.jobs


class Worker:
    """A process that does every --jobs-th case."""

    def __init__(self, args: argparse.Namespace, first: int) -> None:
        self.args, self.next = args, first
        self.since, self.used = time.monotonic(), 0.0
        self.running: int | None = None
        options = {"--seed": args.seed, "--jobs": args.jobs, "--run-share": args.run_share,
                   "--mib": args.mib, "--corpus": args.corpus, "--kind": args.kind, "--first": first}  # fmt: skip
        command = [sys.executable, __file__, "--work"]
        command += [f"{name}={value}" for name, value in options.items()]
        environment = {**os.environ, "PUREVK_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._rest = b""

    def lines(self) -> list[str]:
        """What it has written since the last time."""
        data = self.output.read() or b""
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode() for line in whole]

    def note_time(self) -> None:
        """Counts the time of a case from here on."""
        self.since, self.used = time.monotonic(), self._cpu_time()

    def hangs(self) -> bool:
        limit = START_S if self.running is None else WAITS_S
        used = self._cpu_time() - self.used
        return time.monotonic() - self.since > limit or (self.running is not None and used > HANG_S)

    def _cpu_time(self) -> float:
        """Seconds of the process; 0 where the system has no /proc."""
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return 0.0
        ticks = text.rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Campaign:
    """The workers, and what they have found.

    Attributes:
        outcomes: counts by the kind of file and the outcome.
        failures: (case, outcome).
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.outcomes: Counter[str] = Counter()
        self.cases = self.runs = 0
        self.failures: list[tuple[int, str]] = []
        self._workers = [Worker(args, args.first + number) for number in range(args.jobs)]

    def go(self) -> None:
        end = time.monotonic() + 60 * self.args.minutes
        try:
            while time.monotonic() < end:
                with selectors.DefaultSelector() as selector:
                    for worker in self._workers:
                        selector.register(worker.output, selectors.EVENT_READ)
                    selector.select(WAIT_S)
                for at, worker in enumerate(self._workers):
                    if self._attend(worker):
                        worker.end()
                        self._workers[at] = Worker(self.args, worker.next)
        finally:
            for worker in self._workers:
                worker.end()

    def _attend(self, worker: Worker) -> bool:
        """Takes in what a worker has written. Whether it needs another process."""
        gone = worker.process.poll() is not None
        for line in worker.lines():
            worker.note_time()
            word, _, rest = line.partition(" ")
            if word == "start":
                worker.running, worker.next = int(rest), int(rest) + self.args.jobs
            elif word == "end":
                self._note(*json.loads(rest))
                worker.running = None
        if not gone and not worker.hangs():
            return False
        if worker.running is None:
            raise SystemExit("a worker does not start: run with --work --first 0 to see why")
        code = worker.process.returncode
        seed, _, runs = case_of(worker.running, self.args)
        found = f"!crash, exit code {code}" if gone else "!hang"
        self._note(worker.running, f"{seed.kind}: {found}", runs, "")
        return True

    def _note(self, number: int, found: str, runs: bool, detail: str) -> None:
        self.cases += 1
        self.runs += runs
        self.outcomes[found] += 1
        if ": !" not in found:
            return
        self.failures.append((number, found))
        seed, changes, runs = case_of(number, self.args)
        folder = Path(self.args.failures)
        folder.mkdir(parents=True, exist_ok=True)
        written = {
            "case": number,
            "what": found,
            "file": seed.name,
            "kind": seed.kind,
            "run": runs,
            "changes": changes,
            "data": base64.b64encode(seed.data).decode(),
            "beside": base64.b64encode(seed.beside).decode(),
            "trace": detail,
        }
        (folder / f"{self.args.seed}-{number}.json").write_text(json.dumps(written))
        last = detail.strip().splitlines()[-1:] or [""]
        print(f"case {number}, {seed.name}: {found} {last[0]}", flush=True)

    def summary(self) -> dict[str, Any]:
        return {
            "cases": self.cases,
            "runs": self.runs,
            "outcomes": dict(self.outcomes.most_common()),
            "failures": len(self.failures),
        }


# -- one case -------------------------------------------------------------------------------------
def again(args: argparse.Namespace) -> int:
    """Runs a failure that was written, in this process; with --minimize, in others with fewer and
    fewer changes."""
    from tests.fuzz.targets import Seed

    case = json.loads(Path(args.again).read_text())
    seed = Seed(
        case["file"],
        case["kind"],
        base64.b64decode(case["data"]),
        base64.b64decode(case["beside"]),
    )
    changes = case["changes"]
    if not args.minimize:
        print(json.dumps(changes))
        print(perform(seed, changes, case["run"]))
        return 0
    at = 0
    while len(changes) > 1 and at < len(changes):
        fewer = [*changes[:at], *changes[at + 1 :]]
        if _fails(args.again, case, fewer):
            changes = fewer
        else:
            at += 1
    case["changes"] = changes
    Path(args.again).write_text(json.dumps(case))
    print(f"{len(changes)} changes are left: {json.dumps(changes)}")
    return 0


def _fails(path: str, case: dict[str, Any], changes: list[Any]) -> bool:
    trial = Path(f"{path}.trial")
    trial.write_text(json.dumps({**case, "changes": changes}))
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--again", str(trial)], capture_output=True, timeout=60
        )
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        trial.unlink()


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--run-share", type=float, default=0.1, help="share of cases that are run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--mib", type=int, default=4096, help="memory of a process")
    parser.add_argument("--corpus", default="", help="folder with more .pte and .pvk files")
    parser.add_argument("--kind", default="", help="one kind of file, such as pvk or request")
    parser.add_argument("--failures", default="failures", help="folder for what fails")
    parser.add_argument("--again", help="a file of --failures")
    parser.add_argument("--minimize", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.again:
        return again(args)
    if args.work:
        work(args)
    campaign = Campaign(args)
    campaign.go()
    print(json.dumps(campaign.summary()))
    return 1 if campaign.failures else 0


if __name__ == "__main__":
    sys.exit(main())
