"""The recipes of CONTRIBUTING.md: what they say is typed into a copy of the checkout, and their tests
are run there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import purevk.ops  # noqa: F401
from purevk import knobs
from purevk.ops import registry

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^\[(\w+)\]: (\S+)$", TEXT, re.MULTILINE))
# What a recipe asks for in words: a file, the text there, and what takes its place.
WORDS = (
    ("elementwise", "import float8,", "import alternate, float8,"),
    ("pipeline", "    drop_empty,\n", "    drop_double_negation,\n    drop_empty,\n"),
    (
        "pipeline",
        "compute_selected_rows,\n                merge_equal,",
        "compute_selected_rows,\n                drop_double_negation,\n                merge_equal,",
    ),
    (
        "pipeline",
        "rotary_norm import rotate_norms\n",
        "rotary_norm import rotate_norms\nfrom purevk.passes.decoding.silu import find_silu\n",
    ),
    ("pipeline", "find_rotary, keep_weights", "find_rotary, find_silu, keep_weights"),
    ("test_reductions", "harness import kernels_of", "harness import kernels_of, run"),
    ("test_meaning", "import drop_empty,", "import drop_double_negation, drop_empty,"),
    (
        "test_profiles",
        "import amd, apple, intel, mobile,",
        "import amd, apple, intel, mali, mobile,",
    ),
    ("test_profiles", '"Mali-G710"), mobile.MOBILE', '"Mali-G710"), mali.MALI'),
    ("test_choice", "from purevk.tuning import", "from purevk.tuning.families import mali\n\\g<0>"),
    ("test_choice", "TRAITS = {\n", 'TRAITS = {\n    "mali": MALI,\n'),
)
# The tests that recipes add, or that read what they add.
TESTS = (
    *("tests/ops/elementwise/test_pointwise.py", "tests/ops/elementwise/test_alternate.py"),
    *("tests/ops/reduce/test_reductions.py", "tests/ops/quantized/test_linear.py"),
    *("tests/passes/test_meaning.py", "tests/frontends/test_lines.py"),
    "tests/passes/test_silu.py",
    *("tests/tuning/test_profiles.py", "tests/ops/matmul/test_choice.py"),
)
NAMES = "entr or root_mean_square or linear_int8 or alternate or double_negation or lines or ali or silu"


def _steps() -> Iterator[tuple[str, list[str]]]:
    """The words of each step of each recipe before its first block, and its blocks of code."""
    recipes = TEXT.split("The definition comes first in each recipe")[1]
    for step in re.findall(r"^\d+\. (.*?)(?=^\d+\. |^#+ |^\[|\Z)", recipes, re.DOTALL | re.M):
        words, *_ = step.split("   ```")
        blocks = re.findall(r"^   ```(?:python|glsl)\n(.*?)^   ```", step, re.DOTALL | re.M)
        if blocks:
            yield " ".join(words.split()), [textwrap.dedent(block) for block in blocks]


def _follow(folder: Path) -> int:
    """Writes what the recipes say below a folder; the number of blocks."""
    count = 0
    for words, blocks in _steps():
        made = re.search(r"[Aa] new (?:file|test), `([^`]+)`", words)
        named = re.search(r"\[(\w+)\]", words)
        assert made or named, words
        path = folder / (made[1] if made else FILES[named[1]])
        for block in blocks:
            count += 1
            if block.startswith("Phase("):
                continue  # shows the line of WORDS in its place
            if made:
                path.write_text(block, encoding="utf-8")
            elif block.startswith("MALI = "):
                text = path.read_text(encoding="utf-8")
                path.write_text(text.replace("TRAITS = {", f"{block}TRAITS = {{"), encoding="utf-8")
            else:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(f"\n\n{block}")
    for name, old, new in WORDS:
        path = folder / FILES[name]
        text = path.read_text(encoding="utf-8")
        assert re.search(re.escape(old), text), f"{name}: {old}"
        path.write_text(re.sub(re.escape(old), new, text, count=1), encoding="utf-8")
    return count


def test_the_recipes_define_new_operators() -> None:
    code = "".join(block for _, blocks in _steps() for block in blocks)
    names = re.findall(r'(?:define|rewrite_node|_register|unary)\(\s*"([^"]+)"', code)
    assert len(names) >= 4
    assert [name for name in names if registry.find(name) is not None] == []


@pytest.mark.device
@pytest.mark.slow
def test_the_recipes_work(tmp_path: Path) -> None:
    for name in ("purevk", "tests"):
        shutil.copytree(
            ROOT / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("__pycache__", "releases", "architecture"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert _follow(tmp_path) > 12
    ruff = [sys.executable, "-m", "ruff", "check", "--fix", "--quiet", "."]
    assert subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True).stdout == ""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--tier=landing", *TESTS, "-k", NAMES),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        env=knobs.child_environment({"PYTHONPATH": str(tmp_path)}),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 10
