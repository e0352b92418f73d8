"""What tests of several packages share: the folder of committed programs, Python in a process of its
own, and calls from several threads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from purevk import knobs

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "pte"
"""The folder of the small committed programs; `tests/data/make_pte.py` writes them."""
NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is made unimportable here")
sys.meta_path.insert(0, NoTorch())
"""
"""Source that makes `import torch` fail."""


def start(source: str, *arguments: Any, **environment: str) -> subprocess.Popen[str]:
    """Starts Python on a source text in the checkout; `sys.argv[1:]` are the arguments.

    A shell lets the processes that it starts in the background ignore SIGINT, and these let their
    own. Such a process could not be interrupted."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=knobs.child_environment({"PYTHONPATH": str(ROOT), **environment}),
    )


def finish(process: subprocess.Popen[str]) -> Any:
    """What the process printed last, as JSON. Fails with its messages if it failed."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def python(source: str, *arguments: Any, **environment: str) -> Any:
    """Runs Python on a source text and gives the JSON that it prints last."""
    return finish(start(source, *arguments, **environment))


def in_threads(*functions: Any) -> None:
    """Runs the functions at once and raises what one of them raised."""
    failed: list[BaseException] = []

    def run(function: Any) -> None:
        try:
            function()
        except BaseException as error:  # handed to the thread of the test
            failed.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if failed:
        raise failed[0]
