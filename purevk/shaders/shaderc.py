"""GLSL compute shaders to SPIR-V, inside this process.

The library behind it is shaderc, called through ctypes. A call releases the GIL, so shaders compile
in parallel on threads (`compile_many`). Includes and macros are worked into the text in Python
(`expand`): the compiler gets one self-contained source, the same text that any other GLSL compiler
accepts.

Importing this module loads no library; `load()` does.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path
from typing import Any

from purevk import knobs
from purevk.errors import ShaderCompilerError
from purevk.pool import Pool
from purevk.shaders.source import CompileJob, Include, expand, source_files
from purevk.shaders.spirv import declare_narrow_integers, forbid_contraction

__all__ = [
    "SPIRV_VERSIONS",
    "TARGET_ENVS",
    "CompileJob",
    "Compiler",
    "Include",
    "compile_many",
    "expand",
    "load",
    "source_files",
]

LIBRARY_FOLDER = Path(__file__).parents[1] / "_lib"

TARGET_ENVS = {f"vulkan1.{minor}": (1 << 22) | (minor << 12) for minor in range(5)}
SPIRV_VERSIONS = {f"1.{minor}": 0x10000 | (minor << 8) for minor in range(7)}
"""SPIR-V versions by name. Which of them a target takes, and its default, is the compiler's to know."""

_MESSAGE = re.compile(
    r"^(?P<file>.*?):(?P<line>\d+): (?P<kind>error|warning): (?P<text>.*)$", re.MULTILINE
)

_HOW_TO_GET_ONE = (
    "install the platform wheel of purevk (it carries the library), or the Vulkan SDK, or a distribution's libshaderc"
    " (Debian 13: apt install libshaderc1; Debian 12: apt install libshaderc-dev glslang-dev spirv-tools g++, then"
    " packaging/link_shaderc.sh), or build it with packaging/build_shaderc.sh; PUREVK_SHADERC=/path/to/libshaderc names"
    " one. A bundle made on a machine that has a compiler (`purevk warmup --bundle`) needs none here"
)


PRECISE = "#pragma purevk precise"
"""In a template: none of its sums and products may be contracted, as if every float were
`precise`. The optimizer unrolls loops and leaves the copies of a `precise` operation without that property."""


class Compiler:
    """A loaded shaderc. Its methods may be called from several threads at once.

    Attributes:
        origin: the path, or module, of the library and the rule that found it.
        version: what is known of its version, for people.
    """

    def __init__(
        self, backend: _Library | _PyShaderc, origin: str, notes: tuple[str, ...] = ()
    ) -> None:
        self._backend = backend
        self.origin = origin
        self.notes = notes
        self.version = backend.version()
        self._supported: dict[str, bool] = {}

    def __repr__(self) -> str:
        return f"<Compiler {self.version}, {self.origin}>"

    def compile(
        self,
        source: str,
        *,
        name: str,
        macros: Mapping[str, str] | None = None,
        include: Include = None,
        target_env: str = "vulkan1.1",
        spirv_version: str | None = None,
        optimize: bool = True,
    ) -> bytes:
        """Compiles one compute shader, entry point `main`, to SPIR-V (little-endian words, as
        bytes).

        Args:
            source: the template's text.
            name: its file name, for messages.
            macros: name (or `name(parameters)`) -> text; defined right after `#version`.
            include: where included files are found; see `Include`.
            target_env: a key of `TARGET_ENVS`.
            spirv_version: a key of `SPIRV_VERSIONS`; None: the target's own default.
            optimize: run the optimizer for speed. Drivers compile its output several times faster.

        Raises:
            ShaderCompilerError: the shader does not compile, with the lines concerned, or a setting
                is unknown.
        """
        macros = macros or {}
        for what, value, known in (
            ("target environment", target_env, TARGET_ENVS),
            ("SPIR-V version", spirv_version or "1.0", SPIRV_VERSIONS),
        ):
            if value not in known:
                raise ShaderCompilerError(
                    f"unknown {what} {value!r}", where=name, why=f"known: {', '.join(known)}"
                )
        text = expand(source, name=name, macros=macros, include=include)
        spirv, messages = self._backend.compile(
            text.encode(),
            name,
            TARGET_ENVS[target_env],
            SPIRV_VERSIONS[spirv_version] if spirv_version else None,
            optimize,
        )
        if spirv is None:
            raise self._refusal(
                name, macros, source_files(source, name=name, include=include), messages
            )
        if len(spirv) < 20 or len(spirv) % 4 or spirv[:4] != b"\x03\x02\x23\x07":
            raise ShaderCompilerError(
                f"{self.origin} returned {len(spirv)} bytes that are no SPIR-V", where=name
            )
        if PRECISE in text:
            spirv = forbid_contraction(spirv)
        return declare_narrow_integers(spirv) if optimize else spirv

    def compile_job(self, job: CompileJob) -> bytes:
        """`compile` with the arguments of a job."""
        return self.compile(
            job.source,
            name=job.name,
            macros=job.macros,
            include=job.include,
            target_env=job.target_env,
            spirv_version=job.spirv_version,
            optimize=job.optimize,
        )

    def supports(self, extension: str) -> bool:
        """Whether the compiler knows a GLSL extension (`"GL_KHR_cooperative_matrix"`).

        Found by compiling a few lines that use it (or only ask for it, where no lines are known),
        the first time.
        """
        known = self._supported.get(extension)
        if known is None:
            if not re.fullmatch(r"GL_\w+", extension):
                raise ShaderCompilerError(
                    f"{extension!r} is not the name of a GLSL extension", next="they start with GL_"
                )
            spirv, _ = self._backend.compile(
                probe_source(extension).encode(),
                f"probe {extension}",
                TARGET_ENVS["vulkan1.3"],
                SPIRV_VERSIONS["1.6"],
                False,
            )
            known = self._supported[extension] = spirv is not None
        return known

    def _refusal(
        self, name: str, macros: Mapping[str, str], files: Mapping[str, str], messages: str
    ) -> ShaderCompilerError:
        found = list(_MESSAGE.finditer(messages))
        errors = [m for m in found if m["kind"] == "error"]
        shown = []
        for match in errors[:8]:
            lines = files.get(match["file"], "").split("\n")
            number = int(match["line"])
            shown.append(f"{match['file']}:{number}: {match['text'].strip()}")
            if 1 <= number <= len(lines):
                shown.append(f"    {lines[number - 1].strip()}")
        if len(errors) > 8:
            shown.append(f"and {len(errors) - 8} more")
        first = (
            errors[0]["text"].strip()
            if errors
            else messages.strip().split("\n")[0] or "no message was given"
        )
        location = f"{errors[0]['file']}:{errors[0]['line']}" if errors else name
        # The operators of users are named by comments. One statement for each: others are the same
        # for other elements.
        own: dict[str, str] = {}
        for value in macros.values():
            for statement in value.split(";"):
                if named := re.search(r"/\* (.*?) \*/", statement):
                    own.setdefault(named[1], statement.strip())
        shown = list(dict.fromkeys(shown))
        shown += [f"    from an operator of yours: {each}" for each in own.values()]
        definitions = (
            " ".join(f"{macro}={value}" for macro, value in sorted(macros.items())) or "none"
        )
        why = (
            "\n       ".join(shown) if shown else messages.strip()
        ) + f"\n       macros: {definitions}"
        return ShaderCompilerError(
            f"{name} does not compile: {first}",
            where=location,
            why=why,
            next=f"the compiler was {self.version}, {self.origin}",
        )


_PROBE_FRAME = """
layout(local_size_x = 32) in;
layout(set = 0, binding = 0) buffer Words { uint words[]; };
void main() {
%s
}
"""

# Lines that use an extension, so that a compiler which knows the name only does not pass for one
# that supports it.
_PROBES: dict[str, tuple[tuple[str, ...], str]] = {
    "GL_KHR_cooperative_matrix": (
        ("GL_KHR_memory_scope_semantics",),
        "coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator> m ="
        " coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>(0.0); words[0] = uint(m[0]);",
    ),
    "GL_NV_cooperative_matrix2": (
        ("GL_KHR_memory_scope_semantics", "GL_KHR_cooperative_matrix"),
        "tensorLayoutNV<2> t = createTensorLayoutNV(2); t = setTensorLayoutDimensionNV(t, 16, 16);"
        " coopmat<uint, gl_ScopeWorkgroup, 16, 16, gl_MatrixUseAccumulator> m;"
        " coopMatLoadTensorNV(m, words, 0, sliceTensorLayoutNV(t, 0, 16, 0, 16)); words[0] = m[0];",
    ),
    "GL_EXT_integer_dot_product": (
        (),
        "words[0] = uint(dotPacked4x8EXT(int(words[1]), int(words[2])));",
    ),
    "GL_EXT_shader_explicit_arithmetic_types_float16": (
        (),
        "words[0] = uint(float16_t(words[1]) + float16_t(1));",
    ),
    "GL_EXT_shader_atomic_float": ((), ""),
    "GL_EXT_bfloat16": ((), "words[0] = uint(float(bfloat16_t(1.0)));"),
}


def probe_source(extension: str) -> str:
    """The shader whose compiling answers `Compiler.supports`."""
    needs, body = _PROBES.get(extension, ((), ""))
    lines = [f"#extension {each} : require\n" for each in (extension, *needs)]
    return f"#version 450\n{''.join(lines)}{_PROBE_FRAME % body}"


class _Library:
    """The C interface of shaderc in a shared library.

    Raises OSError when the file does not load, AttributeError when it lacks a function.
    """

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        handle, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t

        def bind(name: str, result: Any, *arguments: Any) -> Any:
            function = getattr(library, f"shaderc_{name}")
            function.restype, function.argtypes = result, list(arguments)
            return function

        self._options_new = bind("compile_options_initialize", handle)
        self._options_free = bind("compile_options_release", None, handle)
        self._set_env = bind(
            "compile_options_set_target_env", None, handle, ctypes.c_int, ctypes.c_uint32
        )
        self._set_spirv = bind("compile_options_set_target_spirv", None, handle, ctypes.c_int)
        self._set_level = bind("compile_options_set_optimization_level", None, handle, ctypes.c_int)
        self._compile = bind(
            "compile_into_spv", handle, handle, text, size, ctypes.c_int, text, text, handle
        )
        self._free = bind("result_release", None, handle)
        self._status = bind("result_get_compilation_status", ctypes.c_int, handle)
        self._length = bind("result_get_length", size, handle)
        self._bytes = bind("result_get_bytes", handle, handle)
        self._message = bind("result_get_error_message", text, handle)
        spv_version = bind(
            "get_spv_version", None, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_uint)
        )
        version, revision = ctypes.c_uint(), ctypes.c_uint()
        spv_version(ctypes.byref(version), ctypes.byref(revision))
        self._spirv = (
            f"SPIR-V {version.value >> 16}.{version.value >> 8 & 255} revision {revision.value}"
        )
        self._path = path
        # One compiler object for the life of the process: shaderc allows its use from several
        # threads at once.
        self._compiler = bind("compiler_initialize", handle)()
        if not self._compiler:
            raise OSError("shaderc_compiler_initialize failed")

    def version(self) -> str:
        """The versions noted beside the library when it was built, or the SPIR-V version that it
        reports."""
        try:
            noted = (
                Path(self._path)
                .with_suffix(".txt")
                .read_text(encoding="utf-8")
                .split("\n")[0]
                .strip()
            )
        except (OSError, UnicodeDecodeError):
            noted = ""
        return f"{noted or 'shaderc'} ({self._spirv})"

    def compile(
        self, source: bytes, name: str, target: int, spirv: int | None, optimize: bool
    ) -> tuple[bytes | None, str]:
        """SPIR-V, or None, and the compiler's messages."""
        options = self._options_new()
        if not options:
            return None, "shaderc is out of memory"
        result = None
        try:
            self._set_env(options, 0, target)
            if spirv is not None:
                self._set_spirv(options, spirv)
            self._set_level(options, 2 if optimize else 0)
            shown = name.encode("utf-8", "replace").replace(b"\0", b" ")
            result = self._compile(self._compiler, source, len(source), 2, shown, b"main", options)
            if not result:
                return None, "shaderc gave no result"
            messages = (self._message(result) or b"").decode("utf-8", "replace")
            if self._status(result) != 0:
                return None, messages or f"shaderc failed with status {self._status(result)}"
            return ctypes.string_at(self._bytes(result), self._length(result)), messages
        finally:
            if result:
                self._free(result)
            self._options_free(options)


class _PyShaderc:
    """The `pyshaderc` package. It compiles for Vulkan 1.0 only, whatever the target; Vulkan takes
    older SPIR-V."""

    def __init__(self) -> None:
        import pyshaderc  # type: ignore[import-not-found]

        self._module = pyshaderc
        if not callable(getattr(pyshaderc, "compile_into_spirv", None)):
            raise AttributeError("pyshaderc has no function compile_into_spirv")

    def version(self) -> str:
        return f"pyshaderc {getattr(self._module, '__version__', 'of unknown version')} (for Vulkan 1.0 only)"

    def compile(
        self, source: bytes, name: str, target: int, spirv: int | None, optimize: bool
    ) -> tuple[bytes | None, str]:
        """SPIR-V, or None, and the compiler's messages."""
        error: type[Exception] = getattr(self._module, "CompilationError", RuntimeError)
        try:
            level = "size" if optimize else "zero"
            return self._module.compile_into_spirv(source, "comp", name, optimization=level), ""
        except error as raised:
            return None, str(raised)


_loaded: dict[tuple[str, str], Compiler] = {}
_load_lock = threading.Lock()


def load() -> Compiler:
    """The compiler, loaded on the first call and kept.

    Looked for in this order: `PUREVK_SHADERC`; the library inside the purevk wheel; the package
    `pyshaderc`; the system's libshaderc; the Vulkan SDK's.

    Raises:
        ShaderCompilerError: none could be loaded (each one tried is listed), or the one that
            `PUREVK_SHADERC` names.
    """
    wanted, sdk = knobs.SHADERC(), knobs.VULKAN_SDK()
    with _load_lock:
        compiler = _loaded.get((wanted, sdk))
        if compiler is None:
            compiler = _loaded[wanted, sdk] = _find(wanted, sdk)
        return compiler


def _find(wanted: str, sdk: str) -> Compiler:
    if wanted:
        try:
            return Compiler(_Library(wanted), f"{wanted} (PUREVK_SHADERC)")
        except (OSError, AttributeError) as error:
            raise ShaderCompilerError(
                f"the shader compiler that PUREVK_SHADERC names cannot be used: {wanted}",
                why=str(error),
                next="correct the path, or unset PUREVK_SHADERC so that the others are tried",
            ) from None
    tried: list[str] = []
    for rule, path in _candidates(sdk):
        if os.path.isabs(path) and not os.path.isfile(path):
            tried.append(f"{path} ({rule}): no such file")
            continue
        try:
            backend = _PyShaderc() if rule == "pyshaderc" else _Library(path)
        except (OSError, AttributeError, ImportError) as error:
            tried.append(f"{path} ({rule}): {error}")
            continue
        return Compiler(backend, f"{path} ({rule})", tuple(tried))
    raise ShaderCompilerError(
        "no GLSL compiler was found", why="tried " + "\n       ".join(tried), next=_HOW_TO_GET_ONE
    )


_FILE_NAMES = {
    "win32": ["shaderc_shared.dll"],
    "darwin": ["libshaderc_shared.dylib", "libshaderc.dylib"],
    "linux": ["libshaderc_shared.so", "libshaderc.so"],
}
_SONAMES = {
    "linux": ["libshaderc_shared.so.1", "libshaderc.so.1"],
    "darwin": ["libshaderc_shared.1.dylib"],
}
_HOMEBREW = ("/opt/homebrew/lib", "/usr/local/lib")


def _candidates(sdk: str) -> list[tuple[str, str]]:
    """(rule, path or name to load) of everything that may be there, the first first."""
    names, sonames = (
        _FILE_NAMES.get(sys.platform, _FILE_NAMES["linux"]),
        _SONAMES.get(sys.platform, []),
    )
    found = [("in the purevk package", str(LIBRARY_FOLDER / names[0])), ("pyshaderc", "pyshaderc")]
    system = [
        ctypes.util.find_library("shaderc_shared"),
        *sonames,
        ctypes.util.find_library("shaderc"),
        *names,
    ]
    found += [("the system's", path) for path in dict.fromkeys(system) if path]
    if sys.platform == "darwin":  # dlopen does not look there on Apple's own processors
        homebrew = [Path(folder, name) for folder in _HOMEBREW for name in names]
        found += [("Homebrew's", str(path)) for path in homebrew]
    folder = "Bin" if sys.platform == "win32" else "lib"
    found += [("the Vulkan SDK's", str(Path(sdk) / folder / name)) for name in names if sdk]
    return found


def compile_many(
    jobs: Sequence[CompileJob],
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[bytes]:
    """Compiles several shaders on threads; the results are in the order of the jobs.

    Args:
        threads: how many; None: `PUREVK_COMPILE_THREADS`, and 0: one a core.
        progress: called with (done, of how many) by the threads that compile, one at a time.

    Raises:
        ShaderCompilerError: of the first job, in their order, that failed; those not yet begun are
            left out.
    """
    if not jobs:
        return []
    compiler = load()
    count = knobs.COMPILE_THREADS() if threads is None else threads
    count = min(count if count > 0 else os.cpu_count() or 1, len(jobs))
    done, lock = 0, threading.Lock()

    def one(job: CompileJob) -> bytes:
        nonlocal done
        spirv = compiler.compile_job(job)
        with lock:
            done += 1
            if progress is not None:
                progress(done, len(jobs))
        return spirv

    if count == 1:
        return [one(job) for job in jobs]
    with Pool(count, thread_name_prefix="purevk-shaderc") as pool:
        futures = [pool.submit(one, job) for job in jobs]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled() and future.exception() is not None:
                raise future.exception()  # type: ignore[misc]
        return [future.result() for future in futures]
