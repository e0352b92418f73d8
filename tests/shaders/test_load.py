"""Where the compiler is looked for, in which order, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from purevk.errors import ShaderCompilerError
from purevk.shaders import shaderc

SPIRV = b"\x03\x02\x23\x07" + bytes(16)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which no rule finds anything: the test's own folder is the only place."""
    monkeypatch.delenv("PUREVK_SHADERC", raising=False)
    monkeypatch.setenv("VULKAN_SDK", str(tmp_path / "sdk"))
    monkeypatch.setattr(shaderc, "_loaded", {})
    monkeypatch.setattr(shaderc, "LIBRARY_FOLDER", tmp_path / "wheel")
    monkeypatch.setattr(shaderc, "_SONAMES", {})
    monkeypatch.setattr(
        shaderc, "_FILE_NAMES", {key: ["libpurevk_test.so"] for key in shaderc._FILE_NAMES}
    )
    monkeypatch.setattr(shaderc.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setitem(sys.modules, "pyshaderc", None)
    for folder in ("wheel", "sdk/lib", "sdk/bin", "system"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


@pytest.fixture
def library(compiler: shaderc.Compiler) -> Path:
    """A real shaderc as a file, to stand where a test wants one."""
    path = Path(compiler.origin.rsplit(" (", 1)[0])
    if not path.is_file():
        pytest.skip("the compiler of this machine was not found by its path")
    return path


def fake_pyshaderc() -> types.ModuleType:
    class CompilationError(Exception):
        pass

    def compile_into_spirv(
        raw: bytes, stage: str, filepath: str, language: str = "glsl", optimization: str = "size"
    ):
        assert (stage, type(raw), type(filepath)) == ("comp", bytes, str)
        if b"wrong" in raw:
            raise CompilationError(
                "\n\nCompilation error\nWarnings: 0, Errors: 1\nm.comp:3: error: 'wrong' : no\n"
            )
        return SPIRV + optimization.encode()

    module = types.ModuleType("pyshaderc")
    module.CompilationError = CompilationError  # type: ignore[attr-defined]
    module.compile_into_spirv = compile_into_spirv  # type: ignore[attr-defined]
    module.__version__ = "1.2"  # type: ignore[attr-defined]
    return module


def test_order(alone: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, bundled = alone / "own.so", alone / "wheel" / "libpurevk_test.so"
    system, sdk = alone / "system" / "s.so", alone / "sdk" / "lib" / "libpurevk_test.so"
    for path in (own, bundled, system, sdk):
        path.symlink_to(library)
    monkeypatch.setattr(
        shaderc.ctypes.util, "find_library", lambda name: str(system) if name == "shaderc" else None
    )
    monkeypatch.setitem(sys.modules, "pyshaderc", fake_pyshaderc())
    monkeypatch.setenv("PUREVK_SHADERC", str(own))

    def origin() -> str:
        shaderc._loaded.clear()
        return shaderc.load().origin

    assert origin() == f"{own} (PUREVK_SHADERC)"
    monkeypatch.delenv("PUREVK_SHADERC")
    assert origin() == f"{bundled} (in the purevk package)"
    bundled.unlink()
    assert origin() == "pyshaderc (pyshaderc)"
    monkeypatch.setitem(sys.modules, "pyshaderc", None)
    assert origin() == f"{system} (the system's)"
    system.unlink()
    assert origin() == f"{sdk} (the Vulkan SDK's)"
    assert (
        shaderc.load()
        .compile("#version 450\nvoid main() {}\n", name="m.comp")
        .startswith(SPIRV[:4])
    )
    sdk.unlink()
    with pytest.raises(ShaderCompilerError):
        origin()


def test_nothing_found_lists_what_was_tried_and_what_to_do(alone: Path) -> None:
    (alone / "wheel" / "libpurevk_test.so").write_text("no library" * 1000)
    with pytest.raises(ShaderCompilerError, match="no GLSL compiler was found") as caught:
        shaderc.load()
    why, what_next = caught.value.why, caught.value.next
    for part in (
        str(alone / "wheel" / "libpurevk_test.so"),
        "invalid ELF header",
        "pyshaderc",
        str(alone / "sdk"),
    ):
        assert part in why
    for part in (
        "wheel",
        "libshaderc1",
        "packaging/link_shaderc.sh",
        "PUREVK_SHADERC",
        "purevk warmup --bundle",
    ):
        assert part in what_next


def test_a_library_without_the_functions_is_passed_over(alone: Path, library: Path) -> None:
    import _ctypes

    (alone / "wheel" / "libpurevk_test.so").symlink_to(_ctypes.__file__)
    (alone / "sdk" / "lib" / "libpurevk_test.so").symlink_to(library)
    compiler = shaderc.load()
    assert "the Vulkan SDK's" in compiler.origin
    assert any("undefined symbol: shaderc_" in note for note in compiler.notes)


def test_the_one_named_by_the_user_is_not_passed_over(
    alone: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone / "wheel" / "libpurevk_test.so").symlink_to(library)
    monkeypatch.setenv("PUREVK_SHADERC", "/absent/libshaderc.so")
    with pytest.raises(ShaderCompilerError, match="/absent/libshaderc.so") as caught:
        shaderc.load()
    assert "unset PUREVK_SHADERC" in caught.value.next


def test_pyshaderc(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyshaderc", fake_pyshaderc())
    compiler = shaderc.load()
    assert "pyshaderc 1.2" in compiler.version
    source = "#version 450\nvoid main() {}\n"
    assert compiler.compile(source, name="m.comp") == SPIRV + b"size"
    assert compiler.compile(source, name="m.comp", optimize=False) == SPIRV + b"zero"
    with pytest.raises(
        ShaderCompilerError, match="m.comp does not compile: 'wrong' : no"
    ) as caught:
        compiler.compile(source + "wrong", name="m.comp")
    assert caught.value.where == "m.comp:3"


def test_a_compiler_that_returns_nonsense(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_pyshaderc()
    module.compile_into_spirv = lambda *args, **settings: b"\x7fELF"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyshaderc", module)
    with pytest.raises(ShaderCompilerError, match="no SPIR-V"):
        shaderc.load().compile("#version 450\nvoid main() {}\n", name="m.comp")


def test_import_loads_no_library() -> None:
    code = "import purevk.shaders.shaderc, purevk.cache; print(open('/proc/self/maps').read().count('shaderc'))"
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc/self/maps here")
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root
    )
    assert (run.stdout.strip(), run.stderr) == ("0", "")


@pytest.mark.parametrize(
    ("platform", "wanted"),
    [
        (
            "linux",
            ["wheel/libshaderc_shared.so", "libshaderc_shared.so.1", "sdk/lib/libshaderc.so"],
        ),
        ("win32", ["wheel/shaderc_shared.dll", "shaderc_shared.dll", "sdk/Bin/shaderc_shared.dll"]),
        (
            "darwin",
            [
                "wheel/libshaderc_shared.dylib",
                "libshaderc_shared.1.dylib",
                "/opt/homebrew/lib/libshaderc_shared.dylib",
                "sdk/lib/libshaderc_shared.dylib",
            ],
        ),
    ],
)
def test_candidates_of_each_platform(
    platform: str, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(shaderc, "LIBRARY_FOLDER", tmp_path / "wheel")
    monkeypatch.setattr(shaderc.ctypes.util, "find_library", lambda name: None)
    found = [path for _, path in shaderc._candidates(str(tmp_path / "sdk"))]
    places = [found.index(path if path[0] == "/" else _within(tmp_path, path)) for path in wanted]
    assert places == sorted(places) and places[0] == 0


def _within(folder: Path, path: str) -> str:
    """A path below a folder; a bare name stays one."""
    return str(folder / path) if "/" in path else path
