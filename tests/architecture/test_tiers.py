"""The tiers of checks have the same names everywhere, and nothing is skipped without a reason."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests import tiers

ROOT = Path(__file__).parents[2]
TIERS = ("lint", "unit", "fast", "traits", "landing", "nightly")
FILES = sorted((ROOT / "tests").rglob("*.py"))


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_has_one_name(tier: str) -> None:
    script = (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8")
    assert f"#   {tier} " in script and f"{tier}" in script.partition("case ${1:-} in")[2]
    assert tier in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert ("\nlint:" if tier == "lint" else f"test-{tier}") in makefile
    assert f"`{tier}`" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def _has_reason(call: ast.Call, position: int) -> bool:
    return len(call.args) > position or any(each.arg == "reason" for each in call.keywords)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _skips_without_reason(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _called(node)
            bare = (name in ("skip", "xfail") and not _has_reason(node, 0)) or (
                name == "skipif" and not _has_reason(node, 1)
            )
        else:
            name = node.attr if isinstance(node, ast.Attribute) else ""
            bare = name in ("skip", "xfail", "skipif") and node not in called
        if bare:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_every_skip_has_a_reason() -> None:
    """`importorskip` has one of its own: what could not be imported."""
    assert [each for path in FILES for each in _skips_without_reason(path)] == []


def test_the_budget_names_tests_that_are_there() -> None:
    lines = tiers.budget()
    assert list(lines) == sorted(lines)
    for name, (_, tier) in lines.items():
        path, _, rest = name.partition("::")
        assert tier in (("landing", "nightly") if rest else ("sum",)), name
        function = rest.partition("[")[0].rpartition("::")[2]
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert not rest or re.search(rf"def {function}\(", text), name


def _collected(pytester: pytest.Pytester, *options: str) -> list[str]:
    found = pytester.runpytest("-p", "tests.tiers", "--collect-only", "-q", *options).outlines
    return [line for line in found if "::" in line]


def test_every_test_is_in_a_tier(pytester: pytest.Pytester) -> None:
    """Landing takes every row of each `parametrize`; what it leaves out is in the tenth of some commit;
    without a tier everything runs."""
    pytester.makeini("[pytest]\nmarkers =\n    slow")
    pytester.makepyfile(
        test_it="""
            import pytest

            @pytest.mark.parametrize("n", range(7))
            @pytest.mark.parametrize("name, size", [("a", 1), ("a", 2), ("b", 1)])
            def test_product(name, size, n): pass

            @pytest.mark.parametrize("n", range(9))
            def test_rows(n): pass

            @pytest.mark.slow
            @pytest.mark.parametrize("n", range(3))
            def test_slow(n): pass

            def test_plain(): pass
        """
    )
    everything, landing = _collected(pytester), _collected(pytester, "--tier", "landing")
    assert len(everything) == 21 + 9 + 3 + 1 and len(landing) == 7 + 9 + 1
    product = [line for line in landing if "test_product" in line]
    assert all(any(f"{row}-" in line for line in product) for row in ("a-1", "a-2", "b-1"))
    assert all(any(f"-{n}]" in line for line in product) for n in range(7))
    assert "test_it.py::test_plain" in landing and not any("test_slow" in line for line in landing)
    sliced = _collected(pytester, "--tier", "landing", "--slice", "a commit")
    assert sliced == _collected(pytester, "--tier", "landing", "--slice", "a commit")
    assert set(landing) <= set(sliced) <= set(everything)
    tenths = [{each for each in everything if tiers.in_slice(each, str(n))} for n in range(200)]
    assert set().union(*tenths) == set(everything)
    assert 2.5 < sum(map(len, tenths)) / len(tenths) < 4.5


def test_the_recipes_name_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    assert [path for path in files.values() if not (ROOT / path).exists()] == []
    prose = re.sub(r"```.*?```|^\[\w+\]: .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"(?<!\w)\[([a-z_]+)\](?!\()", prose))
    assert named - {"brackets"} == set(files)
    new = set(re.findall(r"A new (?:file|test), `(\S+)`", text))
    paths = set(re.findall(r"(?<![\w./])(?:docs|purevk|scripts|tests)/[\w/.]*\w", text))
    assert [path for path in paths - new if not (ROOT / path).exists()] == []


def test_the_recipes_import_what_is_there() -> None:
    pytest.importorskip("torch")  # the harness of operators needs it
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    new = {
        path.removesuffix(".py").replace("/", ".")
        for path in re.findall(r"A new file, `(\S+\.py)`", text)
    }
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    imports = [
        node
        for block in blocks
        for node in ast.walk(ast.parse(textwrap.dedent(block)))
        if isinstance(node, ast.ImportFrom) and node.module not in new
    ]
    assert len(imports) > 10
    for node in imports:
        module = importlib.import_module(node.module or "")
        assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_an_unknown_tier_is_refused() -> None:
    run = ROOT / ".ci" / "run"
    if os.name == "nt":
        pytest.skip("it is a script of bash")
    made = subprocess.run(["bash", run, "quick"], capture_output=True, text=True, timeout=60)
    assert made.returncode == 2 and "no tier quick" in made.stderr


@pytest.mark.skipif(os.name == "nt", reason="it is a script of bash")
def test_a_run_tests_what_changed_since_the_last_one_that_passed(tmp_path: Path) -> None:
    """Engines and wheels: also after several commits, and where nothing is known of main."""
    there, clone = tmp_path / "there", tmp_path / "clone"
    for path in ("examples/a.py", "purevk/integrations/b.py", "c.py"):
        (there / path).parent.mkdir(parents=True, exist_ok=True)
        (there / path).write_text("1\n", encoding="utf-8")
    for path, text in {
        ".ci/run": (ROOT / ".ci" / "run").read_text(encoding="utf-8"),
        "scripts/test.sh": '#!/bin/sh\necho "$@"\n',
        "bin/make": '#!/bin/sh\necho "$@"\n',
    }.items():
        (there / path).parent.mkdir(exist_ok=True)
        (there / path).write_text(text, encoding="utf-8")
        (there / path).chmod(0o755)

    def git(folder: Path, *args: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *names, *args], cwd=folder, check=True, capture_output=True)

    def change(path: str) -> None:
        with (clone / path).open("a", encoding="utf-8") as file:
            file.write("2\n")
        git(clone, "commit", "-qam", "a change")

    def ran() -> set[str]:
        path = f"{there / 'bin'}{os.pathsep}{os.environ['PATH']}"
        run = subprocess.run(
            ["bash", ".ci/run"], cwd=clone, env={**os.environ, "PATH": path}, capture_output=True
        )
        assert run.returncode == 0, run.stderr
        words = set(run.stdout.decode().split())
        assert {"lint", "test"} <= words
        return words & {"test-engines", "tests/docs/test_examples.py", "tests/deploy"}

    git(tmp_path, "init", "-qb", "main", "there")
    git(there, "add", "-A")
    git(there, "commit", "-qm", "first")
    git(tmp_path, "clone", "-q", "there", "clone")
    assert ran() == {"test-engines", "tests/docs/test_examples.py", "tests/deploy"}
    assert ran() == set()
    change("examples/a.py")
    change("c.py")
    assert ran() == {"test-engines", "tests/docs/test_examples.py"}
    change("c.py")
    assert ran() == set()
    git(clone, "update-ref", "-d", "refs/ci/passed")
    assert ran() == {"test-engines", "tests/docs/test_examples.py"}  # since origin/main


def test_the_matrix_counts_the_cases_of_a_report(tmp_path: Path) -> None:
    """A test that raises in its set-up counts as failed, and a run without a passed test too."""
    from scripts import matrix

    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): raise ValueError\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_is_not_reached(broken): pass\n"
        "@pytest.mark.skip(reason='none')\n"
        "def test_is_skipped(): pass\n",
        encoding="utf-8",
    )
    outcome = matrix.run(matrix.NONE, [str(tmp_path / "test_it.py")], 60.0)
    assert (outcome.passed, outcome.skipped) == (1, 1)
    assert [name.partition("::")[2] for name in outcome.failed] == [
        "test_fails",
        "test_is_not_reached",
    ]
    assert not outcome.is_ok
    absent = matrix.run(matrix.NONE, [str(tmp_path / "test_none.py")], 60.0)
    assert absent.passed == 0 and not absent.is_ok
