"""The part of the build that pyproject.toml cannot say: a wheel that carries libshaderc is for one
platform, and has the licences and the bill of materials (PEP 770) of this library. The README's
links lead to the repository that PUREVK_REPOSITORY names, since an index has no files beside it.
"""

import json
import os
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
LICENCES = {
    "shaderc": "Apache-2.0",
    "glslang": "BSD-3-Clause AND GPL-3.0-or-later WITH Bison-exception-2.2 AND Apache-2.0",
    "SPIRV-Tools": "Apache-2.0",
    "SPIRV-Headers": "MIT",
}
# Of a wheel with a library.
EXPRESSION = "MIT AND Apache-2.0 AND BSD-3-Clause AND (GPL-3.0-or-later WITH Bison-exception-2.2)"


def readme() -> str:
    """The README with links that work elsewhere: to files of the repository, or none to files if the
    repository is not known."""
    text = Path("README.md").read_text(encoding="utf-8")
    base = os.environ.get("PUREVK_REPOSITORY", "").rstrip("/")
    link = re.compile(r"\[([^]]*)\]\((?!https?://|#)([^)]*)\)")
    return link.sub(rf"[\1]({base}/blob/HEAD/\2)" if base else r"\1", text)


def urls() -> dict[str, str]:
    """What the metadata says of the project's places."""
    base = os.environ.get("PUREVK_REPOSITORY", "").rstrip("/")
    if not base:
        return {}
    return {
        "Source": base,
        "Issues": f"{base}/issues",
        "Documentation": f"{base}/blob/HEAD/docs/index.md",
        "Changelog": f"{base}/blob/HEAD/CHANGELOG.md",
    }


def check_files_beside(library: Path) -> None:
    """Ends the build of a wheel if a library lacks what the scripts of packaging/ write beside it."""
    for suffix in (".txt", ".LICENSES"):
        path = library.with_suffix(suffix)
        if not path.is_file():
            raise SystemExit(
                f"{library} has no {path.name}: make both with packaging/build_shaderc.sh or"
                " packaging/link_shaderc.sh, or remove purevk/_lib for a wheel without a compiler"
            )


def bill_of_materials(library: Path) -> dict[str, object]:
    """What a library is made of, in CycloneDX 1.6, from the line of versions beside it."""
    line = library.with_suffix(".txt").read_text(encoding="utf-8").strip()
    components = []
    for part in line.split(", "):
        name, _, version = part.partition(" ")
        components.append(
            {
                "type": "library",
                "bom-ref": name,
                "name": name,
                "version": version,
                "licenses": [{"expression": LICENCES[name]}],
            }
        )
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "file", "bom-ref": library.name, "name": library.name}},
        "components": components,
        "dependencies": [
            {"ref": library.name, "dependsOn": [each["bom-ref"] for each in components]}
        ],
    }


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
        """Any Python 3. auditwheel makes a manylinux tag of the platform."""
        return "py3", "none", super().get_tag()[2]

    def run(self) -> None:
        for library in BUNDLED:
            check_files_beside(library)
        super().run()

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        """Editable installs take this step too, also of a library without these files."""
        super().egg2dist(egginfo_path, distinfo_path)
        for library in BUNDLED:
            licences = library.with_suffix(".LICENSES")
            if not (licences.is_file() and library.with_suffix(".txt").is_file()):
                continue
            metadata = Path(distinfo_path, "METADATA")
            target = Path(distinfo_path, "licenses", *licences.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(licences, target)
            head, blank, body = metadata.read_text(encoding="utf-8").partition("\n\n")
            head = head.replace("License-Expression: MIT", f"License-Expression: {EXPRESSION}")
            head += f"\nLicense-File: {licences.as_posix()}"
            metadata.write_text(head + blank + body, encoding="utf-8")
            bill = Path(distinfo_path, "sboms", f"{library.stem}.cdx.json")
            bill.parent.mkdir(exist_ok=True)
            bill.write_text(json.dumps(bill_of_materials(library), indent=1), encoding="utf-8")


setup(
    distclass=Bundle,
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
)
