"""Commands that install what is missing, by distribution."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PACKAGES: dict[str, dict[str, str]] = {
    "loader": {"debian": "libvulkan1", "fedora": "vulkan-loader", "arch": "vulkan-icd-loader"},
    "software": {
        "debian": "mesa-vulkan-drivers",
        "fedora": "mesa-vulkan-drivers",
        "arch": "vulkan-swrast",
    },
    "amd": {
        "debian": "mesa-vulkan-drivers",
        "fedora": "mesa-vulkan-drivers",
        "arch": "vulkan-radeon",
    },
    "intel": {
        "debian": "mesa-vulkan-drivers",
        "fedora": "mesa-vulkan-drivers",
        "arch": "vulkan-intel",
    },
    "nvidia": {"debian": "nvidia-driver", "fedora": "akmod-nvidia", "arch": "nvidia-utils"},
    "shaderc": {"debian": "libshaderc1", "fedora": "libshaderc", "arch": "shaderc"},
    "validation": {
        "debian": "vulkan-validationlayers",
        "fedora": "vulkan-validation-layers",
        "arch": "vulkan-validation-layers",
    },
}
_INSTALL = {"debian": "apt-get install", "fedora": "dnf install", "arch": "pacman -S"}
_FAMILIES = {
    "debian": ("debian", "ubuntu"),
    "fedora": ("fedora", "rhel", "centos"),
    "arch": ("arch",),
}
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}


def distribution() -> tuple[str, str, float]:
    """(family, id, version) of the Linux distribution: ("debian", "ubuntu", 24.04); ("", "", 0.0)
    if it is unknown."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return "", "", 0.0
    names = [release.get("ID", ""), *release.get("ID_LIKE", "").split()]
    family = next(
        (family for family, ids in _FAMILIES.items() if any(name in ids for name in names)), ""
    )
    try:
        version = float(release.get("VERSION_ID", "0"))
    except ValueError:
        version = 0.0
    return family, release.get("ID", ""), version


def install(*things: str) -> list[str]:
    """The command that installs keys of the table. The commands of all known distributions if this
    one is unknown."""
    if not sys.platform.startswith("linux"):
        return []
    family, _, _ = distribution()
    sudo = "" if os.geteuid() == 0 else "sudo "
    commands = []
    for name in [family] if family else list(_INSTALL):
        packages = list(dict.fromkeys(_PACKAGES[thing][name] for thing in things))
        note = "" if family else f"    ({'/'.join(_FAMILIES[name])})"
        commands.append(f"{sudo}{_INSTALL[name]} {' '.join(packages)}{note}")
    return commands


def graphics_vendors() -> list[str]:
    """Makers of the graphics devices on the PCI bus of a Linux machine: "nvidia", "amd",
    "intel"."""
    vendors = set()
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            display = (device / "class").read_text().startswith("0x03")
            vendor = (device / "vendor").read_text().strip()
        except OSError:
            continue
        if display and vendor in _VENDORS:
            vendors.add(_VENDORS[vendor])
    if Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists():
        vendors.add("nvidia")
    return sorted(vendors)


def driver(vendors: list[str]) -> list[str]:
    """How to install the Vulkan driver of each maker, or a driver for the CPU if there is none."""
    if sys.platform == "darwin":
        return ["brew install molten-vk vulkan-loader"]
    if sys.platform == "win32":
        return [
            "install the graphics driver from the maker of the GPU: nvidia.com, amd.com or intel.com"
        ]
    advice: list[str] = []
    for vendor in vendors:
        if vendor == "nvidia" and Path("/proc/driver/nvidia/version").exists():
            advice.append(
                "the NVIDIA kernel driver is loaded but its Vulkan part is not visible; in a container, start it with"
                " NVIDIA_DRIVER_CAPABILITIES=all (docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=all)"
            )
        elif vendor == "nvidia" and distribution()[1] == "ubuntu":
            advice.append("sudo ubuntu-drivers install    (the NVIDIA driver)")
        else:
            advice += install(vendor)
    return advice or [f"{command}    (runs on the CPU)" for command in install("software")]


def shaderc() -> list[str]:
    """How to install a GLSL compiler."""
    _, name, version = distribution()
    advice = ["install the wheel of purevk for this platform, which carries the library"]
    if sys.platform.startswith("linux"):
        if name == "debian" and version < 13:
            sudo = "" if os.geteuid() == 0 else "sudo "
            installed = not (
                _PACKAGE.parent / "packaging"
            ).is_dir()  # else the script knows the place
            target = f" {_PACKAGE / '_lib' / 'libshaderc_shared.so'}" if installed else ""
            advice.append(
                f"{sudo}apt-get install libshaderc-dev glslang-dev spirv-tools g++"
                f" && packaging/link_shaderc.sh{target}    (in a checkout)"
            )
        else:
            advice += install("shaderc")
    else:
        advice.append(
            "install the Vulkan SDK from https://vulkan.lunarg.com, which sets VULKAN_SDK"
        )
    advice.append(
        "purevk warmup --from-bundle FILE.zip --sha256 H    (a bundle from a machine with a compiler)"
    )
    return advice
