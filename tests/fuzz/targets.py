"""What is done with a changed file, and the sound files that changes start from."""

from __future__ import annotations

import contextlib
import io
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
    GraphError,
    InputError,
    KernelInterfaceError,
    PurevkError,
    ShaderCompilerError,
    ValidationError,
)
from purevk.frontends.files import FileSource, open_file
from purevk.frontends.reading import reading
from purevk.frontends.saved import write_program
from purevk.graph.context import typical_traits
from purevk.passes.pipeline import optimize
from purevk.program.specs import ArgumentSpec
from purevk.schedule.planning import make_plan
from purevk.shaders.cache_entry import CacheKey, unpack
from purevk.shaders.source import CompileJob
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
        kind: "pte", "ptd" (the external tensors of `beside`), "pvk", "bundle", "entry", "state" or
            "request" (see `requests.py`).
        beside: for a "ptd", the program that the tensors belong to; for a "request", any .pvk file.
    """

    name: str
    kind: str
    data: bytes
    beside: bytes = b""


@cache
def seeds(extra: str = "") -> tuple[Seed, ...]:
    """The committed .pte files, the same as .pvk files, their external tensors, a bundle, an entry of
    the cache, and a file of states.

    Args:
        extra: a folder with more .pte and .pvk files.
    """
    found: list[Seed] = []
    paths = sorted(DATA.glob("*.pte"))
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
            if path.suffix == ".pte" and not external:
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
    return (*found, *(Seed("request", "request", REQUEST, each) for each in programs[:1]))


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
    elif seed.kind == "bundle":
        _read_bundle(data)
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


def _read_bundle(data: bytes) -> None:
    with _as_file(data) as path:
        found = Cache(None)
        found.attach_bundle(path, trust=True)
        for number in range(3):
            held = found.get_spirv(_key(number))
            assert held is None or held == _SPIRV, "a changed entry was taken"
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
        with reading(method):
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
    if seed.kind not in ("pte", "pvk"):
        parse(seed, data)
        return
    _show(seed, data)
    draw = np.random.default_rng(0)
    with purevk.load(data) as program:
        for name, method in program.methods.items():
            inputs = [_input(spec, draw) for spec in method.inputs]
            if sum(getattr(each, "size", 1) for each in inputs) <= ROOM:
                program.method(name).run_flat(inputs)


def _show(seed: Seed, data: bytes) -> None:
    """Shows a file by the command; no character of it may reach a terminal as a command."""
    from purevk.cli import main

    text = io.StringIO()
    with tempfile.NamedTemporaryFile(suffix=f".{seed.kind}") as file:
        file.write(data)
        file.flush()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            code = main(["inspect", file.name, "--no-device", "--graph"])
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
    except OF_PUREVK:
        raise
    except PurevkError as error:
        assert is_safe(str(error))
        assert isinstance(error, InputError) or seed.kind != "request", "a request is the client's"
        return type(error).__name__
    return "read"


def pick(draw: random.Random, among: tuple[Seed, ...]) -> Seed:
    """A file to change: mostly a program."""
    programs = [each for each in among if each.kind in ("pte", "pvk")] or among
    return draw.choice(programs if draw.random() < 0.9 else among)
