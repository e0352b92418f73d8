"""Which way imports run, as docs/architecture.md says. The whole graph of imports is read, those inside
functions included; imports for type checks alone are a graph of their own."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "purevk"

# What everyone may import, and what each package may import besides itself.
EVERYONE = {
    "closing",
    "errors",
    "knobs",
    "knob_values",
    "dtypes",
    "mapped",
    "paths",
    "plain_text",
    "pool",
    "whole_file",
}
BELOW = {
    "closing": set(),
    "errors": set(),
    "knobs": set(),
    "knob_values": set(),
    "dtypes": set(),
    "plain_text": set(),
    "pool": set(),
    "paths": set(),
    "whole_file": set(),
    "mapped": set(),
    "progress": set(),
    "pte": set(),
    "ir": set(),
    "memory_planner": set(),
    "api": set(),
    "shaders": set(),
    "cache": {"shaders"},
    "compiling": {"shaders", "cache"},
    "tuning": {"ir"},
    "lower": {"tuning", "shaders", "ir"},
    "ops": {"lower", "tuning", "shaders", "ir"},
    "passes": {"ops", "lower", "tuning", "ir"},
    "schedule": {"passes", "ops", "lower", "tuning", "ir"},
    "pure_operators": set(),
    "generators": set(),
    "fallback": {"pure_operators", "ops", "ir"},
    "frontends": {"pte", "ops", "ir", "generators", "pure_operators"},
    "graph": {
        "schedule",
        "ops",
        "lower",
        "tuning",
        "ir",
        "memory_planner",
        "shaders",
        "cache",
        "compiling",
        "api",
        "fallback",
        "generators",
    },
}
BELOW["checking"] = (BELOW["graph"] | {"graph", "passes"}) - {"memory_planner", "shaders"}
# What users hold. These import one another and everything above; the command imports them.
PROGRAM = {
    "compiled_graphs",
    "dynamo",
    "export",
    "integrations",
    "llm",
    "portable_lib",
    "program",
    "report",
    "runtime",
    "testing",
}
COMMAND = {"__main__", "cli"}
FOREIGN = {
    "pte": {"vulkan", "torch"},
    "ir": {"vulkan", "torch"},
    "memory_planner": {"vulkan", "torch", "numpy"},
    "tuning": {"vulkan", "torch", "numpy"},
    "lower": {"vulkan", "torch"},
    "ops": {"vulkan", "torch"},
    "passes": {"vulkan", "torch"},
    "schedule": {"vulkan", "torch"},
    "shaders": {"vulkan", "torch", "numpy"},
    "api": {"torch"},
    "graph": {"torch"},
    "llm": {"vulkan", "torch"},
}
# A device makes objects that know it.
CIRCLES = [{f"purevk.api.{path.stem}" for path in (PACKAGE / "api").glob("*.py")}]
# Modules that know one another by their types as well.
CIRCLES_OF_TYPES = [
    *CIRCLES,
    {
        "purevk.program.method",
        "purevk.program.pages",
        "purevk.program.program",
        "purevk.program.state",
        "purevk.program.variants.variant",
    },
    {
        "purevk.frontends.torch.decompose",
        "purevk.frontends.torch.elements.items",
        "purevk.frontends.torch.nodes",
        "purevk.frontends.torch.positions",
        "purevk.frontends.torch.strides",
        "purevk.frontends.torch.functionalized",
        "purevk.frontends.torch.higher_order",
        "purevk.frontends.torch.flex",
    },
    {
        "purevk.program.arguments",
        "purevk.program.call",
        "purevk.program.variants.specialization",
    },
    {"purevk.graph.call", "purevk.graph.control", "purevk.graph.executable"},
    {"purevk.ir.arguments", "purevk.ir.graph"},
    {"purevk.ops.builder", "purevk.ops.registry"},
]
MOST_FILES = 20  # of one folder
MOST_LINES = 500  # of one module


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def package_of(module: str) -> str:
    return module.split(".")[1]


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in {
        child.id for child in ast.walk(node.test) if isinstance(child, ast.Name)
    }


@functools.cache
def imports(module: str, types: bool) -> frozenset[str]:
    """What a module imports, at its top and inside functions; `types`: for type checks alone
    instead."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    for_types = {
        child for node in ast.walk(tree) if _is_for_types(node) for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if (node in for_types) != types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{module} has a relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in full if name in FILES}
            found |= modules | ({node.module} if modules != full else set())
    return frozenset(found)


def graph_of(types: bool) -> dict[str, set[str]]:
    """The modules of purevk that each module imports."""
    return {
        module: {
            other
            for kind in ((False, True) if types else (False,))
            for other in imports(module, kind)
            if other in FILES and other not in ("purevk", module)
        }
        for module in FILES
    }


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """The sets of nodes that reach one another."""

    @functools.cache
    def reached(start: str) -> frozenset[str]:
        seen: set[str] = set()
        todo = list(graph.get(start, ()))
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += graph.get(node, ())
        return frozenset(seen)

    found: list[set[str]] = []
    for node in graph:
        if node in reached(node) and not any(node in circle for circle in found):
            found.append({other for other in reached(node) if node in reached(other)})
    return found


def grouped(graph: Mapping[str, Iterable[str]], group: Mapping[str, str]) -> dict[str, set[str]]:
    """The graph of groups of modules; modules without one are left out."""
    made: dict[str, set[str]] = {name: set() for name in group.values()}
    for module, others in graph.items():
        if module in group:
            made[group[module]] |= {group[other] for other in others if other in group}
    return {name: others - {name} for name, others in made.items()}


@pytest.mark.parametrize("package", BELOW)
def test_packages_import_only_what_is_below(package: str) -> None:
    allowed = BELOW[package] | EVERYONE | {package}
    for module in FILES:
        if module != "purevk" and package_of(module) == package:
            for types in (False, True):
                for other in imports(module, types):
                    if other.startswith("purevk."):
                        assert package_of(other) in allowed, f"{module} imports {other}"


def test_the_command_is_on_top() -> None:
    for module in FILES:
        if module != "purevk" and package_of(module) not in COMMAND:
            others = imports(module, False) | imports(module, True)
            assert not any(
                other.startswith(tuple(f"purevk.{name}" for name in COMMAND)) for other in others
            ), module


def test_modules_import_in_no_circle() -> None:
    for circle in circles(graph_of(types=False)):
        assert any(circle <= known for known in CIRCLES), sorted(circle)


def test_types_add_no_other_circle() -> None:
    for circle in circles(graph_of(types=True)):
        assert any(circle <= known for known in CIRCLES_OF_TYPES), sorted(circle)


def test_packages_import_in_no_circle() -> None:
    group = {
        module: "program" if package_of(module) in PROGRAM else package_of(module)
        for module in FILES
        if module != "purevk"
    }
    assert circles(grouped(graph_of(types=True), group)) == []


def test_families_of_operators_import_in_no_circle() -> None:
    families = {
        path.name for path in (PACKAGE / "ops").iterdir() if (path / "__init__.py").exists()
    }
    group = {
        module: module.split(".")[2]
        for module in FILES
        if module.startswith("purevk.ops.") and module.split(".")[2] in families
    }
    assert circles(grouped(graph_of(types=True), group)) == []


def test_families_of_templates_are_those_of_operators() -> None:
    families = {path.name for path in (PACKAGE / "ops").iterdir() if path.is_dir()}
    templates = {path.name for path in (PACKAGE / "glsl").iterdir() if path.is_dir()}
    assert templates - families == {"core"}
    assert [path.name for path in (PACKAGE / "glsl").iterdir() if path.is_file()] == [
        "kernel.glslh"
    ]


@pytest.mark.parametrize("kind", ["*.py", "*.comp", "*.glslh"])
def test_no_folder_is_crowded(kind: str) -> None:
    folders = {path.parent for path in PACKAGE.rglob(kind)}
    for folder in folders - {PACKAGE}:
        files = [path for path in folder.iterdir() if path.is_file() and path.name != "__init__.py"]
        assert len(files) <= MOST_FILES, folder


def test_no_module_is_long() -> None:
    long = [path for path in FILES.values() if path.read_text().count("\n") > MOST_LINES]
    assert not long


@pytest.mark.parametrize("package", FOREIGN)
def test_packages_leave_foreign_packages_alone(package: str) -> None:
    for module in FILES:
        if module != "purevk" and package_of(module) == package:
            for other in imports(module, False):
                assert other.split(".")[0] not in FOREIGN[package], f"{module} imports {other}"


def test_every_package_is_known() -> None:
    packages = {package_of(module) for module in FILES if module != "purevk"}
    assert packages - set(BELOW) - PROGRAM - COMMAND == set(), (
        "a new package needs its rule here and a line in docs/architecture.md"
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


def test_only_tuning_knows_device_families() -> None:
    """Kernels ask a profile for what matters. `api` reads the identity of a device; the caches, the
    context and the command hand it on."""
    for module, path in FILES.items():
        if module != "purevk" and package_of(module) in ("lower", "ops", "passes", "schedule"):
            names = {
                name
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                for name in (getattr(node, "attr", None), getattr(node, "id", None))
            }
            asked = names & {"is_cpu", "is_gpu", "vendor", "vendor_id", "device_id", "driver"}
            assert not asked, f"{module} asks for {asked}"
            assert "profile.name" not in path.read_text(encoding="utf-8"), module


_LOAD = """
import sys
before = set(sys.modules)
import purevk
purevk.load(sys.argv[1]).close()
print(*sorted(set(sys.modules) - before))
"""
# Modules of the standard library that take milliseconds to import, and that a load does not need.
SLOW = {
    "argparse", "asyncio", "bz2", "email", "http", "importlib.metadata", "lzma", "multiprocessing",
    "numpy.random", "pdb", "random", "secrets", "shutil", "socket", "ssl", "subprocess", "tempfile",
    "unittest", "urllib.request", "xml", "zipfile",
}  # fmt: skip


@pytest.mark.device
def test_a_load_imports_little(tmp_path: Path) -> None:
    """With a filled cache, imports are half of the CPU time of the first load in a process."""
    file = ROOT / "tests" / "data" / "pte" / "topk.pte"
    for _ in ("compiles", "finds all in the cache"):
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, str(file)],
            cwd=ROOT,
            env={**os.environ, "PUREVK_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    packages = {name.partition(".")[0] for name in modules}
    assert packages - sys.stdlib_module_names <= {
        "_cffi_backend",
        "flatbuffers",
        "numpy",
        "purevk",
        "vulkan",
    }
    assert not modules & SLOW
    for ours in ("checking", "cli", "dynamo", "export", "frontends.torch", "runtime"):
        assert f"purevk.{ours}" not in modules
