"""What is done with a changed file, and the sound files that changes start from."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from purevk.cache import Cache
from purevk.dtypes import DType
from purevk.errors import (
    DeviceLostError,
    FileFormatError,
    GraphError,
    InputError,
    KernelInterfaceError,
    PurevkError,
    ShaderCompilerError,
    ValidationError,
)
from purevk.frontends.files import FileSource, open_file
from purevk.frontends.saved import write_program
from purevk.graph.context import typical_traits
from purevk.passes.pipeline import optimize
from purevk.program.specs import ArgumentSpec
from purevk.report.etrecord import read_etrecord
from purevk.schedule.planning import make_plan
from purevk.shaders.cache_entry import CacheKey, unpack
from purevk.shaders.source import CompileJob
from tests.fuzz import archives, language
from tests.fuzz.mutations import MARK
from tests.fuzz.requests import REQUEST, ask, read
from tests.harness import DATA
from tests.states import States

# Errors that no file may cause.
OF_PUREVK = (
    GraphError,
    KernelInterfaceError,
    ShaderCompilerError,
    DeviceLostError,
    ValidationError,
)
ROOM = 1 << 22  # elements of the inputs of a call, above which it is not run


class Seed(NamedTuple):
    """A sound file.

    Attributes:
        kind: "pte", "ptn", "ptd" (the external tensors of `beside`), "pvk", "bundle", "entry", "state",
            "request" (see `requests.py`), or one of `archives.py`: "pt2", "etrecord", "array",
            "import" (a module), "override" or "dump" (a folder of kernels), or of `language.py`:
            "gguf" (also its description in JSON), "transformers" (a folder), "tokenizer", "session".
        beside: for a "ptd", the program that the tensors belong to; for a "request", any .pvk file.
    """

    name: str
    kind: str
    data: bytes
    beside: bytes = b""


@cache
def seeds(extra: str = "") -> tuple[Seed, ...]:
    """The sound files of all kinds, but for archives of torch: those made of the committed .pte files,
    and small ones.

    Args:
        extra: a folder with more .pte and .pvk files.
    """
    found: list[Seed] = []
    paths = [*sorted(DATA.glob("*.pte")), *sorted((DATA.parent / "ptn").glob("*.ptn"))]
    paths += (DATA.parent / "llm").glob("*.pte")
    paths += (
        sorted(p for p in Path(extra).glob("*") if p.suffix in (".pte", ".pvk")) if extra else []
    )
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            data = path.read_bytes()
            external = [
                *path.parent.glob(f"{path.stem}/*.ptd"),
                *path.parent.glob(f"{path.stem}.ptd"),
            ]
            found += [Seed(each.name, "ptd", each.read_bytes(), data) for each in external]
            if not external:
                found.append(Seed(path.name, path.suffix[1:], data))
            if path.suffix in (".pte", ".ptn") and not external:
                made = Path(folder) / "m.pvk"
                with open_file(data) as file:
                    methods = {name: FileSource(file, name) for name in file.methods}
                    write_program(made, path.stem, methods, "fuzz")
                found.append(Seed(f"{path.stem}.pvk", "pvk", made.read_bytes()))
        kept = Cache(Path(folder) / "cache")
        for number in range(3):
            kept.put_spirv(_key(number), _SPIRV)
        kept.export_bundle(Path(folder) / "bundle", [_key(number) for number in range(3)])
        found.append(Seed("bundle", "bundle", (Path(folder) / "bundle").read_bytes()))
        entry = min(path for path in (Path(folder) / "cache").rglob("*") if path.is_file())
        found.append(Seed("entry", "entry", entry.read_bytes()))
        with open(Path(folder) / "state", "wb") as stream:
            np.savez_compressed(stream, total=np.arange(3, dtype=np.float32), cache=np.zeros(500))
        found.append(Seed("state", "state", (Path(folder) / "state").read_bytes()))
    programs = [seed.data for seed in found if seed.kind == "pvk"]
    found.append(Seed("request", "request", REQUEST, programs[0]))
    found += [Seed(name, "array", data) for name, data in archives.arrays().items()]
    found += [Seed("dump", "dump", archives.kernel_folder())]
    found += [Seed("override", "override", archives.kernel_folder("fuzz."))]
    found.append(Seed("session", "session", language.SESSION))
    if language.has_packages():
        model = language.MODEL
        found.append(Seed("model.pvk", "pvk", language.saved_model()))
        found += [Seed("gguf", "gguf", language.gguf(model)), Seed("gguf as JSON", "gguf", model)]
        found.append(Seed("folder", "transformers", language.FOLDER))
        found += [Seed(name, "tokenizer", data) for name, data in language.TOKENIZERS.items()]
    return (*found, Seed("import", "import", archives.IMPORT))


@cache
def with_archives(extra: str = "") -> tuple[Seed, ...]:
    """`seeds`, and the archives of torch, if there is torch. Takes seconds."""
    if not importlib.util.find_spec("torch"):
        return seeds(extra)
    program = (DATA / "linear_relu_inline.pte").read_bytes()
    made = archives.of_torch().items()
    return (*seeds(extra), *(Seed(name, name.split()[0], data, program) for name, data in made))


_SPIRV = b"\x03\x02\x23\x07" + bytes(range(64))


def _key(number: int) -> CacheKey:
    return CacheKey.of(CompileJob("void main() {}", "a.comp", {"N": str(number)}))


def parse(seed: Seed, data: bytes) -> None:
    """Reads a file and does with it what needs no device: import, checks, passes, planning.

    Raises:
        PurevkError: the file is refused.
    """
    if seed.kind == "request":
        read(data)
    elif seed.kind in _READERS:
        _READERS[seed.kind](data)
    elif seed.kind == "bundle":
        _read_bundle(seed.data, data)
    elif seed.kind == "etrecord":
        with _as_file(data) as path:
            read_etrecord(Path(path), "forward")
    elif seed.kind == "state":
        with _as_file(data) as path:
            States(total=("float32", (3,)), cache=("float64", (500,))).load(path)
    elif seed.kind == "entry":
        unpack(_key(0).digest(), data)
    elif seed.kind == "ptd":
        with tempfile.NamedTemporaryFile(suffix=".ptd") as tensors:
            tensors.write(data)
            tensors.flush()
            with open_file(seed.beside, [tensors.name]) as file:
                _plan(file)
    else:
        with open_file(data) as file:
            _plan(file)
            if seed.kind == "pte" and language.is_model(file):
                language.read_pte(file)
            if seed.kind == "pvk" and getattr(file.content, "about", None):
                language.read_saved(file)


_READERS: dict[str, Callable[[bytes], None]] = {
    "array": archives.read_array,
    "import": archives.import_module,
    "override": archives.read_override,
    "dump": archives.write_dump,
    "gguf": language.read_gguf,
    "transformers": language.read_folder,
    "tokenizer": language.read_tokenizer,
    "session": language.read_session,
}


def _read_bundle(sound: bytes, data: bytes) -> None:
    with _as_file(data) as path:
        if data != sound:
            try:
                Cache(None).import_bundle(path, sha256=hashlib.sha256(sound).hexdigest())
                raise AssertionError("a changed bundle was taken")
            except FileFormatError as error:
                assert "SHA-256" in error.what
        found = Cache(None)
        found.attach_bundle(path, trust=True)
        for number in range(3):
            found.get_spirv(_key(number))
        whole = Cache(None)
        try:
            whole.import_bundle(path, trust=True)
        except PurevkError:
            assert all(whole.get_spirv(_key(number)) is None for number in range(3))
            raise


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.name


def _plan(file: Any) -> None:
    for method in file.methods:
        graph = file.graph(method)
        with FileSource(file, method).reading():
            make_plan(optimize(graph, typical_traits()), typical_traits())


def run(seed: Seed, data: bytes) -> None:
    """Loads a file on the device and calls each method once.

    Raises:
        PurevkError: the file, or a call, is refused.
    """
    import purevk

    if seed.kind == "request":
        ask(data, seed.beside)
        return
    if seed.kind == "etrecord":
        with _as_file(data) as path:
            _show("pte", seed.beside, "--etrecord", path)
    if seed.kind not in ("pte", "ptn", "pvk", "pt2"):
        parse(seed, data)
        return
    _show(seed.kind, data)
    draw = np.random.default_rng(0)
    with purevk.load(data) as program:
        for name, method in program.methods.items():
            inputs = [_input(spec, draw) for spec in method.inputs]
            if sum(getattr(each, "size", 1) for each in inputs) <= ROOM:
                program.method(name).run_flat(inputs)
    with open_file(data) as file:
        is_model = seed.kind == "pte" and language.is_model(file)
    if is_model:
        language.answer_by_pte(data)


def _show(kind: str, data: bytes, *more: str) -> None:
    """Shows a file by the command; no character of it may reach a terminal as a command."""
    from purevk.cli import main

    text = io.StringIO()
    with tempfile.NamedTemporaryFile(suffix=f".{kind}") as file:
        file.write(data)
        file.flush()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            code = main(["inspect", file.name, "--no-device", "--graph", *more])
    assert code in (0, 1), text.getvalue()
    assert is_safe(text.getvalue())


def is_safe(text: str) -> bool:
    """Whether a terminal may get a text."""
    return all(each.isprintable() or each in "\n\t" for each in text)


def _input(spec: ArgumentSpec, draw: np.random.Generator) -> Any:
    if spec.kind != "tensor":
        return spec.value if spec.kind == "fixed" else 1 if spec.kind == "integer" else None
    dtype = DType[spec.dtype or "float32"].numpy
    sizes = [size if isinstance(size, int) else 2 for size in spec.sizes]
    if int(np.prod(sizes, dtype=object)) > ROOM:
        return np.broadcast_to(np.zeros((), dtype), sizes)
    return (draw.standard_normal(sizes) * 4).astype(dtype)


def check(do: Callable[[Seed, bytes], None], seed: Seed, data: bytes) -> str:
    """Does something with a file: "read" if it is accepted, or the name of the error of purevk that
    refuses it. All else is raised, and so are errors that say that purevk itself is at fault."""
    try:
        do(seed, data)
    except PurevkError as error:
        if isinstance(error, OF_PUREVK):
            if seed.kind != "override" or type(error) is not ShaderCompilerError:
                raise
        assert is_safe(str(error))
        assert isinstance(error, InputError) or seed.kind != "request", "a request is the client's"
        return type(error).__name__
    finally:
        assert not os.path.exists(MARK), "code of a file has run"
    return "read"


def pick(draw: random.Random, among: tuple[Seed, ...]) -> Seed:
    """A file to change: half of the time a program, else one of any kind."""
    kinds: dict[str, list[Seed]] = {}
    for seed in among:
        kinds.setdefault(seed.kind, []).append(seed)
    programs = [kind for kind in ("pte", "pvk") if kind in kinds]
    kind = draw.choice(programs if programs and draw.random() < 0.5 else list(kinds))
    return draw.choice(kinds[kind])
