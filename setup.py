"""The part of the build that pyproject.toml cannot say: a wheel that carries libshaderc is for one
platform."""

import re
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

BUNDLED = sorted(
    path
    for path in Path("purevk", "_lib").glob("*shaderc*")
    if path.suffix in (".so", ".dylib", ".dll")
)


def needed_glibc(library: Path) -> int:
    """The minor version of the oldest glibc 2 that the library loads with, from the symbol versions
    it names."""
    return max(
        (int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes())), default=17
    )


class Bundle(Distribution):
    """Counts as platform-dependent if a library is inside, so that the wheel's files are laid out
    as such."""

    def has_ext_modules(self) -> bool:
        return bool(BUNDLED)


class Build(build_py):
    """Leaves nothing of an earlier build's bundled library."""

    def run(self) -> None:
        shutil.rmtree(Path(self.build_lib, "purevk", "_lib"), ignore_errors=True)
        super().run()


class Wheel(bdist_wheel):
    """Tagged py3-none-<platform> if a library is inside, py3-none-any if not."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        if BUNDLED and platform.startswith("linux_"):
            glibc = max(needed_glibc(library) for library in BUNDLED)
            platform = platform.replace("linux_", f"manylinux_2_{glibc}_", 1)
        return "py3", "none", platform


setup(distclass=Bundle, cmdclass={"build_py": Build, "bdist_wheel": Wheel})
