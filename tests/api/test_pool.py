"""Work in threads while the interpreter exits."""

from __future__ import annotations

import subprocess
import sys

SOURCE = """
import threading, time
from purevk.pool import Pool
ready, ended = threading.Event(), threading.Event()
def work():
    ready.set()
    while not ended.is_set():
        time.sleep(0.001)
    with Pool(2) as pool:
        print(sum(pool.map(lambda n: n * n, range(10))), flush=True)
thread = threading.Thread(target=work, daemon=True)
thread.start()
ready.wait()
import atexit
atexit.register(lambda: (ended.set(), thread.join()))
"""


def test_work_in_threads_while_the_interpreter_exits() -> None:
    """Daemon threads are in calls then, and may compile kernels."""
    ended = subprocess.run([sys.executable, "-c", SOURCE], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "285\n", "")
