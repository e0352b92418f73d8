"""The notebook of examples/ runs, cell after cell, without Jupyter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from purevk import knobs
from tests.harness import ROOT

pytest.importorskip("torch")
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"

RUN = """
import json, sys
for number, source in enumerate(json.load(sys.stdin)):
    *lines, last = source.splitlines()
    try:
        value = compile(last, "cell", "eval")
    except SyntaxError:
        exec(compile(source, f"cell {number}", "exec"))
        continue
    exec(compile("\\n".join(lines), f"cell {number}", "exec"))
    shown = eval(value)
    if shown is not None:
        print(shown._repr_html_() if hasattr(shown, "_repr_html_") else repr(shown))
"""


@pytest.mark.device
@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(cells),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=knobs.child_environment({"PYTHONPATH": str(ROOT)}),
    )
    assert done.returncode == 0, done.stderr
    assert "<iframe" in done.stdout and "(33, 17) largest slope" in done.stdout
    assert (tmp_path / "edges.html").stat().st_size > 50_000


def test_the_notebook_shows_what_it_printed() -> None:
    """It is read on the web, where nothing runs."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code)
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
