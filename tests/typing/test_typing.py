"""What a user's type checker sees of the package once it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "purevk" / "py.typed").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree."""
    pytest.importorskip(
        "setuptools.command.bdist_wheel",
        reason="no setuptools of 70.1 or later, which builds wheels",
    )
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", "_lib")
    shutil.copytree(ROOT / "purevk", folder / "purevk", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert build.returncode == 0, build.stderr
    (made,) = (folder / "dist").glob("purevk-*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_has_every_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "purevk/py.typed" in names
    kinds = (".py", ".comp", ".glslh")
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "purevk").rglob("*")
        if path.suffix in kinds and "_lib" not in path.parts
    }
    assert wanted - names == set()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, and with what is installed here."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    windows = sys.platform == "win32"
    python = folder / ("Scripts/python.exe" if windows else "bin/python")
    site = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    (site / "here.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return python


@pytest.mark.slow
def test_users_programs_are_checked(installed: Path, tmp_path: Path) -> None:
    """One is clean, and each mistake in the other is seen: its types are not `Any`."""
    found = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-pretty", "--show-error-codes",
            f"--python-executable={installed}", f"--cache-dir={tmp_path / 'cache'}",
            str(HERE / "client.py"), str(HERE / "misuse.py"),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    seen = {
        (name, int(line), code)
        for name, line, code in re.findall(r"(\w+\.py):(\d+): error: .*\[([a-z-]+)\]", found.stdout)
    }
    mistakes = (HERE / "misuse.py").read_text(encoding="utf-8").splitlines()
    expected = {
        ("misuse.py", number, comment[1])
        for number, line in enumerate(mistakes, 1)
        if (comment := re.search(r"  # ([a-z-]+)$", line))
    }
    assert seen == expected, found.stdout + found.stderr


def test_every_module_is_checked() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert config["strict"] is True and config["python_version"] == "3.10"
    assert "purevk" in config["files"] and "exclude" not in config
    for override in config["overrides"]:
        assert not override.get("ignore_errors")
        others = ("bench.*", "scripts.*", "tests.*")
        assert "disable_error_code" not in override or set(override["module"]) <= {*others}
