"""The library that stands in for Intel's kernel driver, which Debian does not build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.drivers.packages import Root, source

INTEL = "libintel_noop_drm_shim.so"
RELEASE = "trixie"
"""Whose Mesa it is built from. The calls of a kernel driver stay, so it serves newer drivers too."""
_BUILT = f"src/intel/tools/{INTEL}"
_OFF = ("llvm", "glx", "egl", "gbm", "gles1", "gles2", "zstd", "xmlconfig")


def build_intel(root: Root, base: Path) -> None:
    """Adds the library to those of a release. Does nothing if it is there.

    Raises:
        FileNotFoundError: this system lacks what builds it.
        subprocess.CalledProcessError: it cannot be built.
    """
    target = root.libraries(base) / INTEL
    if target.is_file():
        return
    for tool, package in (
        ("ninja", "ninja-build"),
        ("pkg-config", "pkg-config"),
        ("bison", "bison"),
        ("flex", "flex"),
    ):
        if shutil.which(tool) is None:
            raise FileNotFoundError(f"no {tool}: apt-get install {package}")
    if subprocess.run(["pkg-config", "--exists", "libdrm", "zlib", "expat"]).returncode:
        raise FileNotFoundError("apt-get install libdrm-dev zlib1g-dev libexpat1-dev")
    folder, tools, build = source(RELEASE, "mesa", base), base / ".meson", base / ".shim"
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
    pip = [str(tools / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "meson", "mako", "pyyaml", "packaging"], check=True)
    path = f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"  # the build asks for "python3"
    shutil.rmtree(build, ignore_errors=True)
    options = [f"-D{name}=disabled" for name in _OFF]
    options += ["-Dvulkan-drivers=", "-Dgallium-drivers=", "-Dplatforms=", "-Dopengl=false"]
    options += ["-Dvideo-codecs=", "-Dbuildtype=release", "-Dtools=drm-shim,intel"]
    for command in (
        [str(tools / "bin" / "meson"), "setup", *options, str(build), str(folder)],
        ["ninja", "-j2", "-C", str(build), _BUILT],
    ):
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PATH": path}
        )
    shutil.copy2(build / _BUILT, target)
