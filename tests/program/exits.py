"""Processes that end, or go on, in the middle of a call: what they run."""

from __future__ import annotations

from pathlib import Path


def save_long_program(path: Path) -> None:
    """Writes the program that the processes call."""
    import torch

    import purevk

    class Long(torch.nn.Module):
        """A call of some tenths of a second on a CPU device."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(640) * 0.5 + 0.001)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(16):
                x = torch.sin(x @ self.weight)
            return x

    with purevk.compile(Long().eval(), (torch.zeros(640, 640),)) as program:
        program.save(path)


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
"""Source and second argument of each process, by name. The first argument is the program; SECONDS is
when a process with a thread that loads ends. Each ends with exit code 0 and prints nothing."""
