"""Folders with the packages of a Debian release, unpacked and not installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TRIPLES = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
_LOADERS = {"amd64": "ld-linux-x86-64.so.2", "arm64": "ld-linux-aarch64.so.1"}
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SOURCES = Path("/etc/apt")
PACKAGES = (
    "mesa-vulkan-drivers", "mesa-drm-shim", "libvulkan1", "libshaderc1", "python3", "python3-numpy", "python3-cffi",
)  # fmt: skip


def _mirror() -> str:
    """The first archive that this machine's apt reads.

    Raises:
        RuntimeError: apt has none.
    """
    files = [_SOURCES / "sources.list", *sorted((_SOURCES / "sources.list.d").glob("*"))]
    for file in files:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        match = re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?) *(\S+)", text, re.MULTILINE)
        if match:
            return match[1]
    raise RuntimeError(f"no archive in {_SOURCES}: this needs Debian")


@dataclass(frozen=True)
class Root:
    """A release for an architecture.

    Attributes:
        release: Debian's name of it: "trixie", "sid".
        architecture: "amd64" or "arm64".
    """

    release: str
    architecture: str

    def folder(self, base: Path) -> Path:
        """Where its files are."""
        return base / f"{self.release}-{self.architecture}"

    def libraries(self, base: Path) -> Path:
        """Its folder of shared libraries."""
        return self.folder(base) / "usr" / "lib" / _TRIPLES[self.architecture]

    def search_path(self, base: Path) -> str:
        """Where the loader looks for shared libraries: the alternatives of Debian have folders."""
        libraries = self.libraries(base)
        return ":".join(str(libraries / name) for name in ("", "blas", "lapack"))

    def version(self, base: Path, package: str) -> str:
        """The version of a package that was unpacked."""
        listed = (self.folder(base) / "packages.txt").read_text(encoding="utf-8").split()
        return next(
            (name.split("_")[1] for name in listed if name.startswith(f"{package}_")), ""
        ).replace("%3a", ":")

    def python(self, base: Path, environment: dict[str, str]) -> list[str]:
        """The command that starts its Python: by its own loader, or under qemu-user.

        Args:
            base: the folder of all roots.
            environment: variables of the process; LD_PRELOAD names a file of `libraries`.
        """
        folder, libraries = self.folder(base), self.libraries(base)
        loader = libraries / _LOADERS[self.architecture]
        executable = str(folder / "usr" / "bin" / "python3")
        variables = {**environment, "PYTHONHOME": str(folder / "usr")}
        preload = variables.pop("LD_PRELOAD", None)
        if self.architecture == "amd64":
            named = [f"{name}={value}" for name, value in variables.items()]
            command = ["env", *named, str(loader), "--library-path", self.search_path(base)]
            if preload:
                command += ["--preload", str(libraries / preload)]
            return [*command, executable]
        variables["LD_LIBRARY_PATH"] = self.search_path(base)
        variables["PUREVK_SHADERC"] = ""  # this system's is of another architecture
        if preload:
            variables["LD_PRELOAD"] = str(libraries / preload)
        named = [part for name, value in variables.items() for part in ("-E", f"{name}={value}")]
        emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
        if emulator is None:
            raise FileNotFoundError("no qemu-aarch64: apt-get install qemu-user-static")
        return [emulator, "-L", str(folder), *named, executable]


def _state(base: Path, release: str, architecture: str) -> Path:
    """The folder of what apt knows of a release."""
    return base / f".apt-{release}-{architecture}"


def _apt_options(base: Path, release: str, architecture: str, kind: str = "deb") -> list[str]:
    """What makes apt read a release, and nothing of this system."""
    state = _state(base, release, architecture)
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    (state / "sources.list").write_text(
        f"{kind} [signed-by={_KEYS}] {_mirror()} {release} main\n", encoding="utf-8"
    )
    settings = {
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Install-Recommends": "false",
        "Debug::NoLocking": "true",
    }
    return [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]


def source(release: str, package: str, base: Path) -> Path:
    """The folder with the sources of a package, without Debian's patches.

    Raises:
        subprocess.CalledProcessError: apt or tar failed.
    """
    folder = base / f"{package}-{release}"
    if folder.is_dir():
        return folder
    options = [*_apt_options(base, release, "source", "deb-src"), "-o", "APT::Sandbox::User=root"]
    state = _state(base, release, "source")
    for command in (["update"], ["--download-only", "source", package]):
        subprocess.run(
            ["apt-get", *options, "-q", *command], check=True, stdout=subprocess.DEVNULL, cwd=state
        )
    (archive,) = state.glob(f"{package}_*.orig.tar.*z")
    made = base / f".{folder.name}"
    made.mkdir(exist_ok=True)
    subprocess.run(
        ["tar", "-x", "-f", str(archive), "-C", str(made), "--strip-components=1"], check=True
    )
    return made.rename(folder)


def unpack(root: Root, base: Path) -> None:
    """Downloads `PACKAGES` and all that they depend on, and unpacks them. Nothing is installed, no
    script of a package runs. Does nothing if that was done before.

    Raises:
        subprocess.CalledProcessError: apt or dpkg failed.
    """
    folder = root.folder(base)
    if (folder / "packages.txt").is_file():
        return
    options = _apt_options(base, root.release, root.architecture)
    for command in (["update"], ["-y", "--download-only", "install", *PACKAGES]):
        subprocess.run(["apt-get", *options, "-q", *command], check=True, stdout=subprocess.DEVNULL)
    archives = sorted(_state(base, root.release, root.architecture).glob("cache/archives/*.deb"))
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("bin", "lib", "lib64", "sbin"):  # one tree, whatever a package calls it
        (folder / "usr" / part).mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(folder / part):
            (folder / part).symlink_to(f"usr/{part}")
    for archive in archives:
        files = subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
        )
        subprocess.run(
            ["tar", "-x", "--keep-directory-symlink", "-C", str(folder)],
            stdin=files.stdout,
            check=True,
        )
        if files.wait():
            raise subprocess.CalledProcessError(files.returncode, files.args)
    (folder / "packages.txt").write_text(
        "".join(f"{archive.name}\n" for archive in archives), encoding="utf-8"
    )
