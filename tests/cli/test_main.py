"""The command line as a whole: exit codes, errors, --json, width."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from purevk.cli import make_parser
from purevk.cli.commands import COMMANDS
from purevk.errors import DeviceError, InputError

ROOT = Path(__file__).parent.parent.parent


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "purevk", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["run"],
        ["run", "x.pte", "--size", "4"],
        ["run", "x.pte", "--seed", "-1"],
        ["bench", "x.pte", "--seconds", "-1"],
        ["bench"],
        ["info", "--wrong"],
        ["inspect", "x.pte", "--device", "0", "--no-device"],
    ],
)
def test_a_wrong_command_line_is_2(cli, arguments: list[str]) -> None:
    ran = cli(*arguments)
    assert ran.code == 2
    assert "usage: purevk" in ran.err and not ran.out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["profile", "x.pvk", "--runs", "0"], "purevk profile: error: there is no --runs"),
        (["run", "x.pvk", "--imput=a"], "there is no --imput; did you mean --input?"),
        (["--json", "info"], "--json goes behind the command: purevk info --json"),
        (["inspect", "x.pvk", "other"], "unknown arguments: other"),
    ],
)
def test_an_unknown_argument_is_named(cli, arguments: list[str], what: str) -> None:
    ran = cli(*arguments)
    assert (
        ran.code == 2 and what in ran.err and f"usage: purevk {ran.err.split()[2]} [-h]" in ran.err
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *[[command.name, "--help"] for command in COMMANDS]],
)
def test_help(cli, arguments: list[str]) -> None:
    ran = cli(*arguments)
    assert ran.code == 0 and ran.out and not ran.err


_HELP = """
import sys
before = set(sys.modules)
from purevk.cli import main
for arguments in {arguments!r}:
    assert main(arguments) == 0
print("MODULES", *sorted(set(sys.modules) - before))
"""


def test_help_imports_nothing_of_the_library() -> None:
    asked = [["--help"], *[[command.name, "--help"] for command in COMMANDS]]
    done = subprocess.run(
        [sys.executable, "-c", _HELP.format(arguments=asked)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    modules = done.stdout.splitlines()[-1].split()[1:]
    assert {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "purevk",
        "purevk.errors",
        "purevk.plain_text",
        "purevk.cli",
        "purevk.cli.command",
        "purevk.cli.commands",
    }


def test_an_error_says_what_where_why_and_next(cli, tmp_path: Path) -> None:
    file = tmp_path / "model.pte"
    file.write_bytes(b"no program at all, but long enough to be looked at")
    ran = cli("inspect", file, "--no-device")
    assert ran.code == 1 and not ran.out
    assert ran.err.startswith("FileFormatError: ")
    assert str(file) in ran.err and "  why: " in ran.err and "Traceback" not in ran.err


@pytest.mark.device
def test_an_error_as_json(cli, tmp_path: Path) -> None:
    ran = cli("run", tmp_path / "none.pte", "--json")
    assert ran.code == 1 and not ran.err
    assert list(ran.json) == ["command", "purevk", "error"]
    error = ran.json["error"]
    assert list(error) == ["type", "what", "where", "why", "next"]
    assert error["type"] == "InputError" and error["where"] == str(tmp_path / "none.pte")
    assert error["why"] == "No such file or directory"


@pytest.mark.device
def test_a_traceback_where_asked_for(cli, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        cli("run", tmp_path / "none.pte", "--traceback")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "topk.pte", "--node-table", "--no-device"],
        ["inspect", "two_methods.pte", "--no-device"],
        ["ops"],
        ["ops", "--check", "topk.pte", "--no-device"],
        ["doctor"],
        ["info"],
    ],
)
def test_tables_fit_the_terminal(
    cli, data: Path, monkeypatch, width: int, arguments: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    ran = cli(*[data / each if each.endswith(".pte") else each for each in arguments])
    assert ran.code in (0, 1)
    assert max(len(line) for line in ran.out.splitlines()) <= width


def test_tables_are_whole_in_a_pipe(
    cli, data: Path, monkeypatch: pytest.MonkeyPatch, unregister_topk
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    size = lambda fallback=(80, 24): os.terminal_size(fallback)  # noqa: E731
    monkeypatch.setattr("shutil.get_terminal_size", size)
    name = "of_a_long_name" * 20
    line = f"{name}.py:7, in {name}"
    rows = lambda *run: [{**_ROW, "results": [name], "source": name, "line": line}]  # noqa: E731
    monkeypatch.setattr("purevk.report.lowered.node_rows", rows)
    ran = cli("inspect", data / "topk.pte", "--node-table", "--no-device")
    (row,) = [each for each in ran.out.splitlines() if line in each]
    assert row.count(name) == 4 and "\u2026" not in ran.out


_ROW = {
    "on": "gpu", "depth": 0, "operator": "aten.relu", "templates": [], "why": "", "choices": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "arguments, what",
    [
        (["report", "absent.pte", "--output"], "the page cannot be written"),
        (["run", "absent.pte", "--output"], "the outputs cannot be written"),
        (["profile", "absent.pte", "--trace"], "the trace cannot be written"),
        (["profile", "absent.pte", "--etdump"], "the ETDump cannot be written"),
        (["warmup", "absent.pte", "--bundle"], "the bundle cannot be written"),
    ],
)
def test_outputs_are_checked_before_the_work(
    cli, tmp_path: Path, arguments: list[str], what: str
) -> None:
    path = tmp_path / "none" / "file"
    ran = cli(*arguments, path)
    assert ran.code == 1 and what in ran.err and str(path) in ran.err
    assert f"there is no folder {tmp_path / 'none'}" in ran.err
    assert "this is a folder" in cli(*arguments, tmp_path).err


def test_a_warning_is_one_line(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def loader() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("the driver is old", RuntimeWarning, stacklevel=2)
        raise DeviceError("No Vulkan loader on this machine")

    monkeypatch.setattr("purevk.api.vk.library", loader)
    formatted = warnings.formatwarning
    with warnings.catch_warnings():  # pytest records them otherwise
        warnings.showwarning = lambda message, *args: sys.stderr.write(
            warnings.formatwarning(message, *args)
        )
        assert cli("info").err == "warning: the driver is old\n"
    assert warnings.formatwarning is formatted


def test_every_command_has_json_and_traceback() -> None:
    (subparsers,) = [action for action in make_parser()._actions if action.dest == "command"]
    assert list(subparsers.choices) == [command.name for command in COMMANDS]
    for parser in subparsers.choices.values():
        assert {"--json", "--traceback"} <= set(parser._option_string_actions)


def test_the_module_and_a_closed_pipe(data: Path) -> None:
    done = shell("inspect", str(data / "topk.pte"), "--no-device")
    assert done.returncode == 0 and "method forward" in done.stdout and not done.stderr
    for words, first in (("ops --json", "{\n"), ("ops", None), ("--help", None)):
        command = f"{sys.executable} -m purevk {words} | head -n 1; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0 and not done.stderr
        assert done.stdout == first if first else done.stdout.count("\n") == 1


_INTERRUPTED = """
import _thread, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            _thread.interrupt_main()
sys.meta_path.insert(0, Interrupting())
sys.argv[:] = ["purevk", "inspect", sys.argv[2]]
runpy.run_module("purevk", run_name="__main__")
"""


@pytest.mark.parametrize(
    "module",
    ["numpy"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("purevk.errors", "purevk.cli.inspect", "purevk.passes.fusion.pointwise")
    ],
)
def test_ctrl_c_is_quiet(data: Path, module: str) -> None:
    """Also while modules are imported: `module` is the one at which it comes."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, module, str(data / "topk.pte")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_module_with_operators_is_imported(tmp_path: Path) -> None:
    """A file whose operator only that module defines; without it the error says what to do."""
    torch = pytest.importorskip("torch")
    (tmp_path / "my_operators.py").write_text(
        "import purevk\n"
        "import torch\n"
        "@torch.library.custom_op('cli_test::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n"
        "    return 2 * x\n"
        "twice.register_fake(lambda x: torch.empty_like(x))\n"
        "purevk.ops.register_pointwise('cli_test.twice', 'x * 2.0', 'x')\n"
    )
    (tmp_path / "make.py").write_text(
        "import torch, my_operators\n"
        "class Twice(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.ops.cli_test.twice(x) + 1\n"
        "torch.export.save(torch.export.export(Twice(), (torch.ones(3),)), 'twice.pt2')\n"
    )

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )

    assert torch and python("make.py").returncode == 0
    ran = python(
        "-m", "purevk", "run", "twice.pt2", "-i", "ones", "--import", "my_operators", "--json"
    )
    assert ran.returncode == 0, ran.stderr
    (output,) = json.loads(ran.stdout)["outputs"]
    assert (output["min"], output["max"]) == (3.0, 3.0)


def test_a_module_that_cannot_be_imported(cli, data: Path) -> None:
    ran = cli("run", data / "topk.pte", "--import", "no_such_module_of_mine")
    assert ran.code == 1 and "--import no_such_module_of_mine" in ran.err


def test_an_output_that_lacks_characters(tmp_path: Path) -> None:
    """Names of a file have characters that the encoding lacks. It raised UnicodeEncodeError."""
    path = tmp_path / "m\u00e9\u4e2d.pte"
    path.write_bytes((ROOT / "tests" / "data" / "pte" / "linear_relu.pte").read_bytes())
    for command in (["inspect", "--no-device"], ["inspect", "--no-device", "--graph"]):
        done = shell(command[0], str(path), *command[1:], PYTHONIOENCODING="ascii")
        assert done.returncode == 0, done.stderr
        assert "m\\xe9\\u4e2d.pte" in done.stdout
