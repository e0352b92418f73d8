"""`purevk doctor`: what is missing on this machine, and the command that fixes it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from purevk import knobs
from purevk.cli import fixes
from purevk.cli.machine import describe_error, package_version
from purevk.cli.output import Output, count
from purevk.errors import PurevkError
from purevk.whole_file import make_private

_MANIFESTS = (
    "/etc/vulkan/icd.d",
    "/usr/local/etc/vulkan/icd.d",
    "/usr/local/share/vulkan/icd.d",
    "/usr/share/vulkan/icd.d",
    "~/.local/share/vulkan/icd.d",
    "~/.config/vulkan/icd.d",
    "/opt/homebrew/share/vulkan/icd.d",
    "/opt/homebrew/etc/vulkan/icd.d",
)
_REQUIRED_PACKAGES = ("numpy", "vulkan", "flatbuffers", "platformdirs", "rich")
_OPTIONAL_PACKAGES = {
    "torch": "runs operators that have no kernel, on the CPU",
    "executorch": "exports models to .pte files",
}
_FILL = 0x5EED5EED


@dataclass
class Check:
    """The result of one check.

    Attributes:
        name: what is checked.
        status: "ok", "missing" (purevk cannot run), "warning" (it is slower) or "optional" (it can
            do less).
        found: what is there, or what is wrong.
        fix: commands or advice.
    """

    name: str
    status: str
    found: str
    fix: list[str] = field(default_factory=list)


def collect(args: argparse.Namespace) -> dict[str, Any]:
    checks = [*_packages(), *_variables(), *_vulkan(args), _compiler(), _cache(), *_optional()]
    return {
        "ok": all(check.status != "missing" for check in checks),
        "checks": [asdict(check) for check in checks],
    }


# -- checks --------------------------------------------------------------------------------------
def _packages() -> list[Check]:
    missing = [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    there = [
        f"{name} {package_version(name) or ''}".strip()
        for name in _REQUIRED_PACKAGES
        if name not in missing
    ]
    if missing:
        return [
            Check(
                "Python packages",
                "missing",
                f"no {', '.join(missing)}",
                [f"pip install {' '.join(missing)}"],
            )
        ]
    return [Check("Python packages", "ok", ", ".join(there))]


def _variables() -> list[Check]:
    """The variables that cannot be read. A program raises for them when it is loaded."""
    checks = []
    for knob in knobs.ALL:
        try:
            knob()
        except PurevkError as error:
            checks.append(
                Check("environment", "missing", describe_error(error), [f"unset {knob.name}"])
            )
    return checks


def _vulkan(args: argparse.Namespace) -> list[Check]:
    """Loader, drivers, a device, and whether it works. Each needs the one before."""
    try:
        from purevk.api import vk

        vk.library()
    except PurevkError as error:
        advice = fixes.install("loader") or fixes.driver(fixes.graphics_vendors())
        return [Check("Vulkan loader", "missing", describe_error(error), advice), *_drivers()]
    drivers = _drivers()
    devices = _devices(args)
    # The fix for missing drivers also fixes missing devices.
    if any(check.status == "missing" for check in drivers):
        for check in devices:
            check.fix = []
    return [Check("Vulkan loader", "ok", "found"), *drivers, *devices]


def _manifests_of(folder: str) -> list[Path]:
    """The manifests in a folder. None where there is no such folder, or where this user may not look
    into it, as the Vulkan loader has it."""
    path = Path(os.path.expanduser(folder))
    try:
        return sorted(path / name for name in os.listdir(path) if name.endswith(".json"))
    except OSError:
        return []


def _drivers() -> list[Check]:
    """The manifests of the drivers on Linux and macOS. Windows keeps them in its registry."""
    if sys.platform == "win32":
        return []
    named = knobs.VK_DRIVER_FILES() or knobs.VK_ICD_FILENAMES()
    if named:
        files = [Path(name) for name in named.split(os.pathsep)]
        lost = [str(file) for file in files if not os.path.exists(file)]
        if lost:
            return [
                Check(
                    "Vulkan drivers",
                    "missing",
                    f"VK_DRIVER_FILES or VK_ICD_FILENAMES names files that this user cannot find: {', '.join(lost)}",
                    ["unset VK_DRIVER_FILES VK_ICD_FILENAMES"],
                )
            ]
    else:
        files = [file for folder in _MANIFESTS for file in _manifests_of(folder)]
    if not files:
        return [
            Check(
                "Vulkan drivers",
                "missing",
                "no driver is installed",
                fixes.driver(fixes.graphics_vendors()),
            )
        ]
    sound, broken = [], []
    for file in files:
        try:
            json.loads(file.read_text(encoding="utf-8"))["ICD"]["library_path"]
            sound.append(file.name.removesuffix(".json"))
        except OSError as error:
            broken.append(f"{file}: {error.strerror or error}")
        except (ValueError, KeyError, TypeError):
            broken.append(f"{file} is no file of a driver: JSON with ICD.library_path is expected")
    if not sound:
        return [
            Check(
                "Vulkan drivers",
                "missing",
                "; ".join(broken),
                fixes.driver(fixes.graphics_vendors()),
            )
        ]
    summary = ", ".join(dict.fromkeys(sound)) + (
        f"; damaged: {'; '.join(broken)}" if broken else ""
    )
    return [Check("Vulkan drivers", "warning" if broken else "ok", summary)]


def _devices(args: argparse.Namespace) -> list[Check]:
    from purevk import api

    try:
        instance = api.Instance()
    except PurevkError as error:
        advice = [error.next] if "validation" in error.what else _device_advice()
        return [Check("Vulkan device", "missing", describe_error(error), advice)]
    with instance:
        try:
            picked = instance.pick(args.device)
        except PurevkError as error:
            return [Check("Vulkan device", "missing", describe_error(error), [error.next])]
        listed = ", ".join(
            f"{device.name} ({device.kind}){' <- picked' if device.index == picked.index else ''}"
            for device in instance.physical_devices
        )
        checks = [Check("Vulkan device", "ok", listed)]
        vendors = fixes.graphics_vendors()
        if (
            picked.kind == "cpu"
            and vendors
            and all(device.kind == "cpu" for device in instance.physical_devices)
        ):
            checks[0] = Check(
                "Vulkan device",
                "warning",
                f"{listed}; the machine has a GPU of {', '.join(vendors)} that Vulkan does not see",
                _device_advice(),
            )
        checks.append(_works(picked))
    return checks


def _device_advice() -> list[str]:
    """Advice for a machine with drivers but without a device."""
    advice = [
        f"sudo usermod -aG render,video $USER    (this user may not open {node}; log in again afterwards)"
        for node in sorted(map(str, Path("/dev/dri").glob("renderD*")))[:1]
        if not os.access(node, os.R_OK | os.W_OK)
    ]
    return advice + fixes.driver(fixes.graphics_vendors())


def _works(physical: Any) -> Check:
    """Whether a device can be opened, and writes memory that the host then reads."""
    from purevk import api

    try:
        with api.Device(physical) as device:
            buffer = api.Buffer(device, 256, api.MemoryKind.READBACK)
            pool = api.CommandPool(device)
            commands = pool.buffer("doctor")
            commands.begin()
            commands.fill_buffer(buffer, 0, 256, _FILL)
            commands.barrier(api.Access.TRANSFER, api.Access.HOST)
            commands.end()
            device.queue.run(commands)
            written = bytes(buffer.read())
    except PurevkError as error:
        return Check(
            "device works", "missing", describe_error(error), [error.next] if error.next else []
        )
    if written != _FILL.to_bytes(4, sys.byteorder) * 64:
        return Check(
            "device works",
            "missing",
            "the host does not read what the device wrote",
            ["update the driver"],
        )
    return Check("device works", "ok", "memory written by the device is read by the host")


def _compiler() -> Check:
    from purevk.cache import default_cache
    from purevk.shaders import shaderc

    try:
        compiler = shaderc.load()
        compiler.compile(
            "#version 450\nlayout(local_size_x = 1) in;\nvoid main() {}\n", name="doctor.comp"
        )
    except PurevkError as error:
        advice = [error.next] if knobs.SHADERC() else fixes.shaderc()
        try:
            entries = default_cache().stats().entries
        except PurevkError:  # `_cache` says why
            entries = 0
        if entries:
            return Check(
                "shader compiler",
                "warning",
                f"{error.what}; models run whose kernels are in the cache ({count(entries, 'entry')})",
                advice,
            )
        return Check("shader compiler", "missing", error.what, advice)
    return Check("shader compiler", "ok", f"{compiler.version}, {compiler.origin}")


def _cache() -> Check:
    from purevk.cache import default_cache

    try:
        folder = default_cache().folder
    except PurevkError as error:
        return Check("cache folder", "missing", f"{error.where}: {error.what}", [error.next])
    if folder is None:
        return Check(
            "cache folder",
            "warning",
            f"{knobs.CACHE.name}=0: each process compiles anew",
            ["unset PUREVK_CACHE"],
        )
    try:
        make_private(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".purevk-"):
            pass
    except OSError as error:
        return Check(
            "cache folder",
            "warning",
            f"{folder} cannot be written ({error.strerror or error}): each process compiles anew",
            [f"export {knobs.CACHE.name}=/a/folder/that/can/be/written"],
        )
    return Check("cache folder", "ok", str(folder))


def _optional() -> list[Check]:
    checks = []
    for name, use in _OPTIONAL_PACKAGES.items():
        if importlib.util.find_spec(name) is None:
            checks.append(Check(name, "optional", f"not installed; {use}", [f"pip install {name}"]))
        else:
            checks.append(Check(name, "ok", package_version(name) or "found"))
    return checks


# -- for people ----------------------------------------------------------------------------------
def show(data: dict[str, Any], out: Output) -> None:
    out.table(
        ["", ("state", "w"), "found"],
        [[check["name"], check["status"], check["found"]] for check in data["checks"]],
        styled=1,
    )
    for check in data["checks"]:
        if check["fix"] and check["status"] != "ok":
            out.heading(f"{check['name']} ({check['status']}):")
            for command in check["fix"]:
                out.raw(f"  {command}")
    out.line()
    missing = sum(check["status"] == "missing" for check in data["checks"])
    if missing:
        out.line(
            f"{count(missing, 'thing')} that purevk needs {'is' if missing == 1 else 'are'} missing",
            "bold red",
        )
    else:
        out.line("purevk can run here", "green")
