"""`purevk doctor`: here, where all is there, and on machines that lack something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from purevk import knobs
from purevk.cli import doctor, fixes
from purevk.errors import DeviceError

ROOT = Path(__file__).parent.parent.parent


def by_name(found: dict) -> dict[str, dict]:
    return {check["name"]: check for check in found["checks"]}


@pytest.mark.device
def test_here(cli, cache_folder: Path) -> None:
    ran = cli("doctor", "--json")
    checks = by_name(ran.json)
    assert ran.code == 0 and ran.json["ok"]
    for name in (
        "Python packages",
        "Vulkan loader",
        "device works",
        "shader compiler",
        "cache folder",
    ):
        assert checks[name]["status"] == "ok", checks[name]
    assert checks["cache folder"]["found"] == str(cache_folder)
    assert "purevk can run here" in cli("doctor").out


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="hides the loader through LD_LIBRARY_PATH, which only Linux reads",
)
def test_a_bare_machine(tmp_path: Path) -> None:
    """No loader, no compiler, no folder to write to, nothing in the environment."""
    for name in ("libvulkan.so.1", "libvulkan.so"):
        (tmp_path / name).write_bytes(b"")
    environment = {
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
        knobs.SHADERC.name: "/nonexistent",
        knobs.CACHE.name: "/proc/none",
    }
    for extra in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "purevk", "doctor", *extra],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    checks = by_name(json.loads(done.stdout))
    assert checks["Vulkan loader"]["status"] == checks["shader compiler"]["status"] == "missing"
    assert checks["cache folder"]["status"] == "warning" and "device works" not in checks
    assert (
        checks["Vulkan loader"]["fix"]
        and "unset PUREVK_SHADERC" in checks["shader compiler"]["fix"][0]
    )


def test_no_driver(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VK_DRIVER_FILES", raising=False)
    monkeypatch.setenv("VK_ICD_FILENAMES", str(tmp_path / "none.json"))
    (check,) = doctor._drivers()
    assert check.status == "missing" and check.fix == ["unset VK_DRIVER_FILES VK_ICD_FILENAMES"]
    (tmp_path / "none.json").write_text("{}")
    (check,) = doctor._drivers()
    assert check.status == "missing" and "none.json" in check.found and check.fix
    monkeypatch.delenv("VK_ICD_FILENAMES")
    monkeypatch.setattr(doctor, "_MANIFESTS", (str(tmp_path / "nowhere"),))
    (check,) = doctor._drivers()
    assert check.found == "no driver is installed" and check.fix
    # os.stat raises for it, also for root, as for a folder that is closed to a user.
    monkeypatch.setattr(doctor, "_MANIFESTS", (str(tmp_path / ("x" * 300)),))
    (check,) = doctor._drivers()
    assert check.found == "no driver is installed"


def test_a_damaged_file_of_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VK_ICD_FILENAMES", raising=False)
    path = tmp_path / "icd.json"
    for content in ("", "[]", '{"ICD": {}}'):
        path.write_text(content, encoding="utf-8")
        monkeypatch.setenv("VK_DRIVER_FILES", str(path))
        (check,) = doctor._drivers()
        assert check.status == "missing"
        assert (
            check.found == f"{path} is no file of a driver: JSON with ICD.library_path is expected"
        )


def test_a_variable_that_cannot_be_read(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_TIMEOUT", "2 min")
    ran = cli("doctor", "--json")
    check = by_name(ran.json)["environment"]
    assert ran.code == 1 and check["fix"] == ["unset PUREVK_TIMEOUT"]
    assert "PUREVK_TIMEOUT='2 min' cannot be read" in check["found"]


def test_no_device(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(*args: object, **kwargs: object) -> None:
        raise DeviceError("No Vulkan driver on this machine", why="the loader found none")

    monkeypatch.setattr("purevk.api.Instance", no_device)
    checks = by_name(cli("doctor", "--json").json)
    assert checks["Vulkan device"]["status"] == "missing" and "device works" not in checks


def test_no_compiler_but_a_filled_cache(
    cli, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from purevk.graph.context import default_cache

    monkeypatch.setenv(knobs.SHADERC.name, "/nonexistent")
    default_cache().put_tuning("a device", "a test", 1)
    check = doctor._compiler()
    assert check.status == "warning" and "in the cache" in check.found


@pytest.mark.parametrize(
    "release, uid, command",
    [
        ({"ID": "debian", "VERSION_ID": "13"}, 0, "apt-get install libvulkan1 mesa-vulkan-drivers"),
        (
            {"ID": "ubuntu", "ID_LIKE": "debian"},
            1000,
            "sudo apt-get install libvulkan1 mesa-vulkan-drivers",
        ),
        ({"ID": "fedora"}, 0, "dnf install vulkan-loader mesa-vulkan-drivers"),
        (
            {"ID": "rocky", "ID_LIKE": "rhel centos fedora"},
            0,
            "dnf install vulkan-loader mesa-vulkan-drivers",
        ),
        ({"ID": "arch"}, 0, "pacman -S vulkan-icd-loader vulkan-swrast"),
    ],
)
def test_the_command_is_that_of_the_distribution(
    monkeypatch, release: dict, uid: int, command: str
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: release)
    monkeypatch.setattr(os, "geteuid", lambda: uid, raising=False)
    assert fixes.install("loader", "software") == [command]


def test_an_unknown_distribution_and_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"ID": "plan9"})
    assert any("apt-get install libvulkan1" in command for command in fixes.install("loader"))
    assert any("dnf install vulkan-loader" in command for command in fixes.install("loader"))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert fixes.install("loader") == [] and fixes.driver([]) == [
        "brew install molten-vk vulkan-loader"
    ]
    assert any("Vulkan SDK" in each for each in fixes.shaderc())


def test_a_compiler_for_old_and_new_debian(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(
        "platform.freedesktop_os_release", lambda: {"ID": "debian", "VERSION_ID": "12"}
    )
    assert any("packaging/link_shaderc.sh    (in a checkout)" in each for each in fixes.shaderc())
    with monkeypatch.context() as patch:  # as pip installs it from a checkout
        patch.setattr(fixes, "_PACKAGE", Path("/env/site-packages/purevk"))
        target = "packaging/link_shaderc.sh /env/site-packages/purevk/_lib/libshaderc_shared.so"
        assert any(target in each for each in fixes.shaderc())
    monkeypatch.setattr(
        "platform.freedesktop_os_release", lambda: {"ID": "debian", "VERSION_ID": "13"}
    )
    assert any(each.endswith("apt-get install libshaderc1") for each in fixes.shaderc())


def test_a_driver_for_each_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(
        "platform.freedesktop_os_release",
        lambda: {"ID": "ubuntu", "ID_LIKE": "debian", "VERSION_ID": "24.04"},
    )
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert "ubuntu-drivers install" in fixes.driver(["nvidia"])[0]
    assert fixes.driver(["amd"])[0].endswith("apt-get install mesa-vulkan-drivers")
    assert "runs on the CPU" in fixes.driver([])[0]
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/proc/driver/nvidia/version")
    assert "NVIDIA_DRIVER_CAPABILITIES" in fixes.driver(["nvidia"])[0]


def test_it_works_without_the_vulkan_package() -> None:
    """What looks for missing packages needs none of them."""
    code = "import sys; sys.modules['vulkan'] = None; from purevk.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "pip install vulkan" in done.stdout and not done.stderr


def test_a_cache_folder_that_others_may_write(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv(knobs.CACHE.name, str(tmp_path))
    check = by_name(cli("doctor", "--json").json)["cache folder"]
    assert check["status"] == "missing" and "other users may write" in check["found"]
    assert "chmod go-w" in check["fix"][0]
