"""Processes that end, or go on, in the middle of a call: none crashes, none hangs. Each runs in a
process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import purevk
from purevk.errors import DeviceError
from tests.harness import DATA, start
from tests.program.exits import ENDS, save_long_program

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def long_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exit") / "long.pvk"
    save_long_program(path)
    return path


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
