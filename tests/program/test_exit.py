"""Processes that end, or go on, in the middle of a call: none crashes, none hangs. Each runs in a
process of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import purevk
from purevk.errors import DeviceError
from tests.harness import DATA, start

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.device


class Long(torch.nn.Module):
    """A call of some tenths of a second on a CPU device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(640) * 0.5 + 0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            x = torch.sin(x @ self.weight)
        return x


@pytest.fixture(scope="module")
def long_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("exit") / "long.pvk"
    with purevk.compile(Long().eval(), (torch.zeros(640, 640),)) as program:
        program.save(path)
    yield path


BEGIN = """
import gc, os, signal, sys, threading, time
import numpy as np
import purevk
program = purevk.load(sys.argv[1])
x = np.ones((640, 640), np.float32)
"""
INTERRUPTED = """
def stop():
    while not program.device.queue.state.pending:
        time.sleep(0.001)
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=stop).start()
try:
    program.forward(x)
    print("not interrupted")
except KeyboardInterrupt:
    pass
"""
TIMED_OUT = """
os.environ["PUREVK_TIMEOUT"] = "0.05"
try:
    program.forward(x)
    print("not timed out")
except purevk.errors.DeviceLostError:
    pass
os.environ["PUREVK_TIMEOUT"] = "120"
"""
AGAIN = """
with purevk.load(sys.argv[1]) as other:
    expected = other.forward(x)
np.testing.assert_array_equal(program.forward(x), expected)
"""
DAEMONS = """
def call():
    while True:
        program.forward(x)
for _ in range(2):
    threading.Thread(target=call, daemon=True).start()
while not program.device.queue.state.pending:
    time.sleep(0.001)
time.sleep(0.1)
"""
LOADING_DAEMON = """
program.close()
def load():
    while True:
        with purevk.load(sys.argv[1]) as other:
            other.forward(x)
threading.Thread(target=load, daemon=True).start()
time.sleep(float(os.environ["SECONDS"]))
"""
CALLBACKS = """
import logging
logging.disable(logging.CRITICAL)
seen = []
def leave(future):
    seen.append(future)
    raise SystemExit(3)
def fail(future):
    seen.append(future)
    raise ValueError("from a callback")
first = program.submit(x)
for function in (leave, fail, leave):
    first.add_done_callback(function)
assert program.submit(x).result(120) is not None
assert len(seen) == 3
"""
GARBAGE = """
program.forward(x)
held = [program, program.method("forward"), program.states, program.weights, program.device.queue]
future = program.submit(x)
held.append(held)
program.itself = held
if sys.argv[2] == "backwards":
    held.reverse()
del program
while held:
    each = held.pop()
    if each is held:
        continue
    del each
    gc.collect()
del held
gc.collect()
assert future.result(120) is not None
del future
gc.collect()
"""
ENDS = {
    "interrupted, closed": (BEGIN + INTERRUPTED + "program.close()", ""),
    "interrupted, dropped": (BEGIN + INTERRUPTED + "del program; gc.collect()", ""),
    "interrupted, left": (BEGIN + INTERRUPTED, ""),
    "interrupted, called again": (BEGIN + INTERRUPTED + AGAIN, ""),
    "timed out, closed": (BEGIN + TIMED_OUT + "program.close()", ""),
    "timed out, device closed": (BEGIN + TIMED_OUT + "program.context.close()", ""),
    "timed out, called again": (BEGIN + TIMED_OUT + AGAIN, ""),
    "daemon threads in calls": (BEGIN + DAEMONS, ""),
    "a daemon thread that loads": (BEGIN + LOADING_DAEMON, ""),
    "callbacks that raise": (BEGIN + CALLBACKS + "program.close()", ""),
    "garbage": (BEGIN + GARBAGE, "forwards"),
    "garbage, backwards": (BEGIN + GARBAGE, "backwards"),
}


FEW = ("interrupted, closed", "daemon threads in calls")  # in the fast tier


@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in ENDS],
)
def test_ends_cleanly(name: str, long_program: Path) -> None:
    source, argument = ENDS[name]
    process = start(source, long_program, argument, SECONDS="0.4")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.2, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("name", ["daemon threads in calls", "a daemon thread that loads"])
def test_ends_cleanly_at_any_time(name: str, seconds: float, long_program: Path) -> None:
    process = start(
        ENDS[name][0] + f"\ntime.sleep({seconds})", long_program, "", SECONDS=str(seconds)
    )
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "")


FORKED = """
import json, os, sys, threading, time
import numpy as np
import purevk
from purevk.errors import DeviceError
x = np.ones((2, 5), np.float32)
program = purevk.load(sys.argv[1])
expected = program.submit(x).result()
lock = program.method("forward").lock
held, free = threading.Event(), threading.Event()
def hold():
    with lock:
        held.set()
        free.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    began = time.monotonic()
    for use in (
        lambda: program.forward(x), lambda: program.submit(x), lambda: program.method("forward").run_flat([x]),
        lambda: program.reset_state(), lambda: purevk.load(sys.argv[1]),
    ):
        try:
            use()
            os._exit(1)
        except DeviceError as error:
            if "spawn" not in error.next:
                os._exit(2)
    program.close()
    os._exit(3 if time.monotonic() - began > 1 else 0)
_, status = os.waitpid(child, 0)
free.set()
assert np.array_equal(program.forward(x), expected)  # the parent goes on
program.close()
print(json.dumps(os.waitstatus_to_exitcode(status)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_process() -> None:
    process = start(FORKED, DATA / "linear_relu.pte")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.split()[-1:]) == (0, ["0"]), err


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_data_loader_of_forked_processes() -> None:
    """The error comes out of the loader, and names what to do."""
    with purevk.load(DATA / "linear_relu.pte") as program:

        class Samples(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return 2

            def __getitem__(self, at: int) -> torch.Tensor:
                return program.forward(torch.ones(2, 5))

        loader = torch.utils.data.DataLoader(
            Samples(), num_workers=1, multiprocessing_context="fork", timeout=30
        )
        with pytest.raises(DeviceError, match="spawn"):
            next(iter(loader))
        assert program.forward(torch.ones(2, 5)) is not None
