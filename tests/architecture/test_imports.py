"""Which way imports run, as docs/architecture.md says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "purevk"

# What a room may import of purevk, besides itself and what everyone may.
EVERYONE = {"errors", "knobs", "dtypes"}
ROOMS = {
    "pte": set(),
    "ir": set(),
    "memory_planner": set(),
    "api": set(),
    "shader_source": set(),
    "shaderc": {"shader_source"},
    "cache": {"cache_entry", "shader_source", "shaderc"},
    "cache_entry": {"shader_source", "shaderc"},
    "ops": {"ir"},
    "passes": {"ops", "ir"},
    "fallback": {"ops", "ir"},
    "frontends": {"pte", "ops", "ir"},
    "graph": {
        "passes",
        "ops",
        "ir",
        "memory_planner",
        "shader_source",
        "shaderc",
        "cache",
        "cache_entry",
        "api",
        "fallback",
    },
    "errors": set(),
    "dtypes": set(),
}
FOREIGN = {
    "pte": {"vulkan", "torch"},
    "ir": {"vulkan", "torch"},
    "memory_planner": {"vulkan", "torch", "numpy"},
    "ops": {"vulkan", "torch"},
    "passes": {"vulkan", "torch"},
    "api": {"torch"},
    "graph": {"torch"},
}


def _files(room: str) -> list[Path]:
    single = PACKAGE / f"{room}.py"
    return [single] if single.exists() else sorted((PACKAGE / room).rglob("*.py"))


def _imports(path: Path) -> set[tuple[str, bool]]:
    """Modules that a file imports, and whether at the top (rather than inside a function or for
    type checks alone)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found: set[tuple[str, bool]] = set()
    top = set(tree.body)
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {(alias.name, node in top) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module == "purevk":
                found |= {(f"purevk.{alias.name}", node in top) for alias in node.names}
            else:
                found.add((node.module, node in top))
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room: str) -> None:
    allowed = ROOMS[room] | EVERYONE | {room}
    for path in _files(room):
        for module, _ in _imports(path):
            parts = module.split(".")
            if parts[0] == "purevk" and len(parts) > 1:
                assert parts[1] in allowed, f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("room", FOREIGN)
def test_rooms_leave_foreign_packages_alone(room: str) -> None:
    for path in _files(room):
        for module, top in _imports(path):
            if module.split(".")[0] in FOREIGN[room]:
                assert room in ("api",) and not top, f"{path.relative_to(ROOT)} imports {module}"


def test_every_room_is_known() -> None:
    rooms = {p.stem for p in PACKAGE.glob("*.py")} | {
        p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()
    }
    top = {
        "__init__",
        "__main__",
        "program",
        "method",
        "inputs",
        "compiling",
        "runtime",
        "submitting",
        "state",
        "cli",
        "progress",
        "knobs",
        "dynamo",
        "planning",
        "export",
    }
    assert rooms - set(ROOMS) - top == set(), (
        "a new room needs its rule here and a line in docs/architecture.md"
    )


@pytest.mark.parametrize(
    "module",
    ["purevk", "purevk.pte", "purevk.ir", "purevk.memory_planner", "purevk.ops", "purevk.program"],
)
def test_importing_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'executorch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_importing_the_package_loads_neither_numpy_nor_vulkan() -> None:
    code = "import sys, purevk; sys.exit('numpy' in sys.modules or any(m.startswith('vulkan') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_environment_is_read_in_one_place() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "knobs.py":
            text = path.read_text(encoding="utf-8")
            assert "os.environ" not in text and "os.getenv" not in text, path.relative_to(ROOT)
