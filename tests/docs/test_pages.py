"""The code blocks of README.md and of the pages under docs/ run as they are printed: all blocks of
Python, and the commands `purevk` of shell blocks. Other commands are checked for what they name.
test_recipes.py runs the recipes of CONTRIBUTING.md, whose blocks are steps of lists."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from purevk import knobs

ROOT = Path(__file__).parents[2]
OTHERS = ("CONTRIBUTING.md", "SECURITY.md", "bench/NOTES.md", "bench/RESULTS.md")
PAGES = [
    str(path.relative_to(ROOT))
    for path in sorted(
        (
            *(ROOT / "docs").rglob("*.md"),
            *(ROOT / name for name in ("README.md", "packaging/README.md", *OTHERS)),
        )
    )
]
TUTORIAL = "docs/start/five_minutes.md"
_SLOW = (
    *(
        "README.md",
        "docs/calling.md",
        "docs/compatibility.md",
        "docs/extending.md",
        "docs/state.md",
    ),
    *("docs/torch_compile.md", TUTORIAL),
)
_COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ +)*purevk .*$", re.MULTILINE)
# Languages of blocks: those that run, and those that are no code. What `text` holds is printed
# output, grammars, signatures and usages.
_LANGUAGES = {"python", "sh", "text", "json", "glsl"}


def _blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def _commands(page: str) -> list[str]:
    return [line for block in _blocks(page, "sh") for line in _COMMAND.findall(block)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the files that pages name."""
    shutil.copy(ROOT / "tests" / "data" / "pte" / "linear_relu.pte", tmp_path / "model.pte")
    np.save(tmp_path / "x.npy", np.ones((2, 5), np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_language_model(page: str, folder: Path) -> None:
    """The language models that a page names."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if "model.gguf" in text:
        for name in ("gguf", "transformers", "tokenizers", "jinja2", "llguidance"):
            pytest.importorskip(name)
        from tests.llm.harness import write_llama

        write_llama(folder / "model.gguf", "Q4_1", table="Q8_0", vocabulary=True)
    if "llama.pte" in text:
        pytest.importorskip("executorch")
        from tests.llm import executorch_models as models

        (folder / "llama.pte").write_bytes(models.export("input_pos", True, delegated=False))
        (folder / "seeing.pte").write_bytes(models.export_seeing(delegated=False))
        models.write_tokenizer(folder)


@pytest.mark.device
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in _SLOW else [])
        for page in PAGES
        if _blocks(page, "python")
    ],
)
def test_the_python_of_a_page_runs(page: str, folder: Path) -> None:
    torch = pytest.importorskip("torch")
    if page == "docs/compatibility.md":
        pytest.importorskip("executorch")
    if "transformers" in "".join(_blocks(page, "python")):
        pytest.importorskip("transformers")
    _write_language_model(page, folder)
    space: dict[str, Any] = {}
    for block in _blocks(page, "python"):
        exec(compile(block, page, "exec"), space)
    if page == "README.md":
        assert (folder / "model.pvk").is_file()
        torch.testing.assert_close(space["y"], space["model"](space["x"]))
    if page == "docs/compatibility.md":
        assert (folder / "half.pte").is_file()
    if page == "docs/state.md":
        assert space["y"].tolist() == [2, 2, 2]


@pytest.mark.device
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if _commands(page)])
def test_the_commands_of_a_page_run(page: str, folder: Path) -> None:
    if page == TUTORIAL:  # takes no files but those that it makes
        (folder / "model.pte").unlink()
        (folder / "x.npy").unlink()
        test_the_python_of_a_page_runs(page, folder)
    _write_language_model(page, folder)
    for command in _commands(page):
        done = subprocess.run(
            ["bash", "-c", f'purevk() {{ "{sys.executable}" -m purevk "$@"; }}\n{command}'],
            capture_output=True,
            text=True,
            timeout=300,
            env=knobs.child_environment({"PYTHONPATH": str(ROOT)}),
        )
        assert done.returncode == 0 and done.stdout, f"{command}: {done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_is_no_code(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = re.findall(r"^ *```(.*)$", text, re.MULTILINE)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= _LANGUAGES and set(fences[1::2]) <= {""}
    for block in _blocks(page, "text"):
        try:
            tree = ast.parse(block)
        except SyntaxError:
            continue
        statements = (ast.Import, ast.ImportFrom, ast.Assign, ast.With, ast.FunctionDef)
        assert not any(isinstance(each, statements) for each in tree.body), block


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page, "sh")])
def test_the_other_commands_of_a_page_exist(page: str) -> None:
    """What does not begin with `purevk` installs something, or runs scripts, for minutes: its files,
    targets and extras are compared with what there is."""
    for block in _blocks(page, "sh"):
        for line in _COMMAND.sub("", block).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words.pop(0)
            if words:
                _check_command(words)


_PATH = re.compile(r"`((?:tests|scripts|bench|deploy|packaging|examples)/[\w./-]+)`")


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    """CONTRIBUTING.md has recipes for files that are not there yet."""
    missing = [
        path
        for path in _PATH.findall((ROOT / page).read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    ]
    assert not missing


def test_each_promise_of_the_page_on_security_has_a_test() -> None:
    """Each row of its tables but those that promise nothing, and each paragraph on how."""
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    sections = {each.partition("\n")[0]: each for each in text.split("\n## ")}
    rows = [
        line
        for name in ("What is promised", "When Vulkan or the system fails")
        for line in sections[name].splitlines()
        if line.startswith("| ") and not line.startswith("| what ")
    ]
    rows = [row for row in rows if "| anything" not in row]
    rows += sections["How"].split("\n- ")[1:]
    assert len(rows) > 25
    assert not [row for row in rows if "`tests/" not in row]


def _check_command(words: list[str]) -> None:
    name, *rest = words
    if name == "make":
        text = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^# make {re.escape(rest[0])}\b", text, re.MULTILINE), words
    elif name in ("pip", "python", ".venv/bin/python", "bash"):
        if rest[:2] == ["-m", "pip"]:
            rest = rest[2:]
        if name == "pip" or rest[0] in ("install", "wheel"):
            _check_pip(rest)
        elif rest[0] == "-m":
            module = rest[1].replace(".", "/")
            assert rest[1] == "pytest" or any(
                (ROOT / path).is_file() for path in (f"{module}.py", f"{module}/__main__.py")
            ), words
        else:
            assert (ROOT / rest[0]).is_file(), words
    elif "/" in name:
        assert (ROOT / name).is_file(), words
    else:
        assert name in ("apt-get", "export", "source", "$EDITOR"), words


def _check_pip(words: list[str]) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"^(\w+) = \[", text.split("[project.optional-dependencies]")[1], re.M)
    for word in words:
        if found := re.search(r"\[(.*)\]", word):
            assert set(found[1].split(",")) <= set(extras), words


@pytest.mark.slow
def test_the_line_that_installs_purevk(tmp_path: Path) -> None:
    (line,) = [
        line
        for block in _blocks(TUTORIAL, "sh")
        for line in block.splitlines()
        if line.startswith("pip install")
    ]
    words = shlex.split(line)[2:]
    found = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pip",
                "install",
                "--dry-run",
                "--no-deps",
                "--ignore-installed",
            ),
            *("--no-build-isolation", "--no-index", "--disable-pip-version-check", *words),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0 and "Would install purevk-" in found.stdout, found.stderr
