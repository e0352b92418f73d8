"""The drivers of the table, and how each is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.drivers.packages import Root, unpack
from bench.drivers.shim import INTEL, build_intel

ROOT = Path(__file__).resolve().parents[2]
_PURE = (
    "vulkan",
    "flatbuffers",
    "platformdirs",
    "rich",
)  # what purevk imports, beside numpy and cffi
_SYSTEM = Path("/usr/share/vulkan/icd.d")


@dataclass(frozen=True)
class Row:
    """A driver with a device that it drives, or takes for present.

    Attributes:
        name: of the row, on the command line too.
        family: the devices of users that it speaks for.
        manifest: the driver's manifest: the stem of a file of `root` or of this system, or a path.
        root: the release that it comes from; None: this system.
        environment: variables that the driver reads. LD_PRELOAD names a library of `root`, which
            has all but Intel's.
        runs: whether it runs kernels. Otherwise it only makes pipelines.
    """

    name: str
    family: str
    manifest: str
    root: Root | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    runs: bool = False

    def command(self, base: Path) -> tuple[list[str], dict[str, str]]:
        """The command of a Python with this driver, and its environment.

        Args:
            base: the folder of roots, which unpacks what it lacks.

        Raises:
            FileNotFoundError: this system has no such driver.
        """
        path = f"{ROOT}{os.pathsep}{self._pure(base)}" if self.root else str(ROOT)
        variables = {
            "PYTHONPATH": path,
            "VK_DRIVER_FILES": self._manifest(base),
            "VK_ICD_FILENAMES": self._manifest(base),
            "PUREVK_DEVICE": "",
            "MESA_SHADER_CACHE_DISABLE": "1",
            "PUREVK_CACHE": str(base / f".cache-{self.name.replace(' ', '-')}"),
            **self.environment,
        }
        if self.root is None:
            return [sys.executable], {**os.environ, **variables}
        return self.root.python(base, variables), dict(os.environ)

    def _manifest(self, base: Path) -> str:
        if self.root is None:
            named = sorted(_SYSTEM.glob(f"{Path(self.manifest).name}_icd*.json"))
            existing = next(
                (path for path in (Path(self.manifest), *named) if path.is_file()), None
            )
            if existing is None:
                raise FileNotFoundError(f"no manifest {self.manifest}")
            return str(existing)
        unpack(self.root, base)
        if self.environment.get("LD_PRELOAD") == INTEL:
            build_intel(self.root, base)
        folder = self.root.folder(base)
        source = folder / "usr" / "share" / "vulkan" / "icd.d" / f"{self.manifest}_icd.json"
        content = json.loads(source.read_text(encoding="utf-8"))
        library = Path(content["ICD"]["library_path"]).name
        content["ICD"]["library_path"] = str(self.root.libraries(base) / library)
        made = base / f"{folder.name}-{self.manifest}.json"
        made.write_text(json.dumps(content), encoding="utf-8")
        return str(made)

    @staticmethod
    def _pure(base: Path) -> Path:
        """A folder with the packages of this Python that any Python can import."""
        import importlib.util

        folder = base / ".python"
        folder.mkdir(parents=True, exist_ok=True)
        for name in _PURE:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise FileNotFoundError(f"no package {name}")
            link = folder / name
            if not link.exists():
                link.symlink_to(Path(spec.origin).parent)
        return folder


TRIXIE, SID = Root("trixie", "amd64"), Root("sid", "amd64")
SID_ARM = Root("sid", "arm64")
_WIDTH = "LP_NATIVE_VECTOR_WIDTH"


def _lavapipe(root: Root | None, release: str) -> list[Row]:
    return [
        Row(f"lavapipe {release}, {bits} bit", "CPU", "lvp", root, {_WIDTH: str(bits)}, runs=True)
        for bits in (128, 256, 512)
    ]


def _shim(
    name: str, family: str, manifest: str, shim: str, root: Root = SID, **environment: str
) -> Row:
    preload = f"lib{shim}_noop_drm_shim.so"
    return Row(name, family, manifest, root, {"LD_PRELOAD": preload, **environment})


ROWS = (
    *_lavapipe(None, "of this system"),
    *_lavapipe(TRIXIE, "of trixie"),
    *_lavapipe(SID, "of sid"),
    Row("SwiftShader", "CPU", "/usr/lib/chromium/vk_swiftshader_icd.json", None, {}, runs=True),
    *[
        _shim(f"RADV {gpu}", f"AMD {family}", "radeon", "amdgpu", AMDGPU_GPU_ID=gpu)
        for gpu, family in (
            ("vega10", "GCN 5"), ("renoir", "GCN 5, integrated"), ("navi10", "RDNA 1"), ("navi21", "RDNA 2"),
            ("navi31", "RDNA 3"), ("gfx1201", "RDNA 4"),
        )
    ],
    *[
        _shim(f"ANV {gpu}", f"Intel {family}", "intel", "intel", INTEL_STUB_GPU_PLATFORM=gpu)
        for gpu, family in (
            ("skl", "Gen9"), ("tgl", "Xe-LP"), ("dg2", "Xe-HPG (Arc A)"), ("mtl", "Xe-LPG"), ("bmg", "Xe2 (Arc B)"),
            ("ptl", "Xe3"),
        )
    ],
    *[
        _shim(f"NVK {chip}", f"NVIDIA {family}", "nouveau", "nouveau", NOUVEAU_CHIPSET=chip)
        for chip, family in (("164", "Turing"), ("174", "Ampere"), ("194", "Ada"))
    ],
    *[
        _shim(f"Turnip {gpu}", f"Qualcomm Adreno {gpu}", "freedreno", "freedreno", FD_GPU_ID=gpu)
        for gpu in ("618", "630", "660", "730", "740", "750")
    ],
    _shim("Honeykrisp", "Apple M1", "asahi", "asahi"),
    *[
        _shim(f"panvk {name}", f"Arm Mali-{name}", "panfrost", "panfrost", SID_ARM, PAN_GPU_ID=gpu)
        for name, gpu in (("G52", "7402"), ("G57", "9093"), ("G610", "a867"))
    ],
    _shim("v3dv", "Broadcom VideoCore", "broadcom", "v3d", SID_ARM),
    _shim(
        "PowerVR", "Imagination PowerVR", "powervr_mesa", "powervr", SID_ARM, PVR_I_WANT_A_BROKEN_VULKAN_DRIVER="1"
    ),
)  # fmt: skip
