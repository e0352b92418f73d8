"""A wheel that carries a library has its licences and its bill of materials."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = "libshaderc_shared"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tag is that of Linux")


def built(
    folder: Path, beside: dict[str, str], command: str = "bdist_wheel"
) -> subprocess.CompletedProcess[str]:
    """Builds a wheel of a package with a library of a few bytes, and the files beside it."""
    pytest.importorskip(
        "setuptools.command.bdist_wheel",
        reason="no setuptools of 70.1 or later, which builds wheels",
    )
    inside = folder / "purevk" / "_lib"
    inside.mkdir(parents=True)
    shutil.copy(ROOT / "purevk" / "__init__.py", folder / "purevk")
    (inside / f"{LIBRARY}.so").write_bytes(b"")
    for suffix, text in beside.items():
        (inside / f"{LIBRARY}{suffix}").write_text(text, encoding="utf-8")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(
        [sys.executable, "setup.py", "-q", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


BESIDE = {
    ".txt": "shaderc 2025.2, glslang 15.1.0+1.4.309.0, SPIRV-Tools 2025.1~rc1\n",
    ".LICENSES": "==== shaderc ====\n\nApache License\n",
}


def test_licences_and_bill_of_materials(tmp_path: Path) -> None:
    made = built(tmp_path, BESIDE)
    assert made.returncode == 0, made.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "py3-none-linux_" in wheel.name  # auditwheel gives it the tag of an index
    with zipfile.ZipFile(wheel) as file:
        (info,) = {name.split("/")[0] for name in file.namelist() if ".dist-info/" in name}
        metadata = Parser().parsestr(file.read(f"{info}/METADATA").decode())
        assert metadata["License-Expression"].startswith("MIT AND Apache-2.0 AND ")
        stated = metadata.get_all("License-File") or []
        assert stated == ["LICENSE", f"purevk/_lib/{LIBRARY}.LICENSES"]
        for name in stated:
            file.getinfo(f"{info}/licenses/{name}")
        bill = json.loads(file.read(f"{info}/sboms/{LIBRARY}.cdx.json"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {each["name"]: each["version"] for each in bill["components"]} == {
        "shaderc": "2025.2",
        "glslang": "15.1.0+1.4.309.0",
        "SPIRV-Tools": "2025.1~rc1",
    }
    assert all(each["licenses"][0]["expression"] for each in bill["components"])


@pytest.mark.parametrize("repository", ["", "https://example.org/purevk"])
def test_links_of_the_description(
    repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUREVK_REPOSITORY", repository)
    made = built(tmp_path, {}, "dist_info")
    assert made.returncode == 0, made.stderr
    (info,) = tmp_path.glob("*.dist-info")
    metadata = Parser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)]*)\)", metadata.get_payload())
    assert all(each.startswith(("https://", "#")) for each in links), links
    assert bool(metadata.get_all("Project-URL")) is bool(repository)
    assert any(each.startswith(repository) for each in links) or not repository
    assert "bench/RESULTS.md" in metadata.get_payload()


@pytest.mark.parametrize("missing", sorted(BESIDE))
def test_a_library_without_them_is_refused(missing: str, tmp_path: Path) -> None:
    made = built(tmp_path, {name: text for name, text in BESIDE.items() if name != missing})
    assert made.returncode != 0
    assert f"{LIBRARY}{missing}" in made.stderr and "build_shaderc.sh" in made.stderr


def test_an_editable_install_takes_it(tmp_path: Path) -> None:
    """Such a checkout may have a library of an earlier script."""
    made = built(tmp_path, {}, "dist_info")
    assert made.returncode == 0, made.stderr


@pytest.mark.device
@pytest.mark.slow
def test_an_installed_wheel_compiles_and_runs(tmp_path: Path) -> None:
    """With the library of this checkout, away from it."""
    if not list((ROOT / "purevk" / "_lib").glob("*.LICENSES")):
        pytest.skip(
            "this checkout has no library with licences: packaging/link_shaderc.sh makes it"
        )
    tree, site = tmp_path / "tree", tmp_path / "site"
    shutil.copytree(ROOT / "purevk", tree / "purevk", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for command in (
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site],
    ):
        wheels = [*tree.glob("dist/*.whl")] if "pip" in command else []
        made = subprocess.run(
            [*command, *wheels], cwd=tree, capture_output=True, text=True, timeout=300
        )
        assert made.returncode == 0, made.stderr
    run = subprocess.run(
        [sys.executable, ROOT / "packaging" / "try_wheel.py", ROOT / "tests" / "data" / "pte"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "right" in run.stdout
