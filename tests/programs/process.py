"""Python in a process of its own, with its own environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from purevk import knobs

CHECKOUT = Path(__file__).parents[2]
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
    """Starts Python on a source text in the checkout; `sys.argv[1:]` are the arguments."""
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
        env=knobs.child_environment({"PYTHONPATH": str(CHECKOUT), **environment}),
    )


def finish(process: subprocess.Popen[str]) -> Any:
    """What the process printed last, as JSON. Fails with its messages if it failed."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def python(source: str, *arguments: Any, **environment: str) -> Any:
    """Runs Python on a source text and gives the JSON that it prints last."""
    return finish(start(source, *arguments, **environment))
