"""Writers that are killed, or run out of space, at any moment: who reads next finds what was there
before, or what was written, and no temporary files pile up."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from purevk.cache import Cache
from purevk.errors import PurevkError
from purevk.whole_file import TEMPORARY, replace_file
from tests.cache.harness import key_of, spirv_of
from tests.harness import python

FORKS = pytest.mark.skipif(sys.platform != "linux", reason="it forks and limits files")

# A process for each moment. `operation(n)` is killed at the nth call into the system: before it, or
# after it; `sized(n)` as soon as the file that it writes has n bytes.
KILLED = """
import json, os, resource, signal, sys, time
from pathlib import Path
from purevk.cache import Cache
from purevk.frontends.files import FileSource, open_file
from purevk.frontends.saved import write_program
from purevk.shaders.bundle import Bundle
from purevk.whole_file import TEMPORARY
from tests.cache.harness import key_of, spirv_of
from tests.harness import DATA

folder = Path(sys.argv[1])
CALLS = ("open", "replace", "unlink", "mkdir", "fsync", "utime", "scandir")

def operation(number, before):
    left = [number]
    def wrap(function):
        def call(*args, **options):
            left[0] -= 1
            if not left[0] and before:
                os.kill(os.getpid(), signal.SIGKILL)
            made = function(*args, **options)
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return made
        return call
    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))

def sized(number):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))

def killed(stop, action):
    child = os.fork()
    if child == 0:
        stop()
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

def left():
    return [path for path in folder.rglob(TEMPORARY + "*")]

def moments(action, check, size):
    count = 0
    stops = [lambda n=n: sized(n) for n in {0, 1, 40, size // 2, size - 1}]
    for before in (True, False):
        stops += [lambda n=n: operation(n, before) for n in range(1, 30)]
        for stop in stops:
            count += killed(stop, action)
            check()
        stops = []
    return count

def entries():
    number = [0]
    def write():
        cache = Cache(folder / "cache")
        cache.put_spirv(key_of(number[0]), spirv_of(number[0]))
        cache.put_tuning("device", "name", [number[0]] * 100)
    def check():
        cache = Cache(folder / "cache")
        assert cache.get_spirv(key_of(number[0])) in (None, spirv_of(number[0]))
        value = cache.get_tuning("device", "name")
        assert value is None or len(value) == 100 and value[0] <= number[0], value
        assert not cache.stats().damaged
        number[0] += 1
    return moments(write, check, 600)

def programs():
    path = folder / "program.pvk"
    def source(name):
        opened = open_file(DATA / f"{name}.pte", ())
        return {each: FileSource(opened, each) for each in opened.methods}
    old, new = source("two_methods"), source("topk")
    write_program(path, "old", old, "test")
    def check():
        with_name = open_file(path, ())
        assert set(with_name.methods) in (set(old), set(new))
        with_name.close()
        write_program(path, "old", old, "test")
    size = path.stat().st_size
    return moments(lambda: write_program(path, "new", new, "test"), check, min(size, 2000))

def bundles():
    path = folder / "shaders.zip"
    cache = Cache(None)
    for number in range(4):
        cache.put_spirv(key_of(number), spirv_of(number))
    def check():
        bundle = Bundle(path, trust=True)
        assert len(bundle.digests) in (1, 4)
        assert all(bundle.read(digest) for digest in bundle.digests)
        cache.export_bundle(path, [key_of(0)])
    cache.export_bundle(path, [key_of(0)])
    keys = [key_of(number) for number in range(4)]
    return moments(lambda: cache.export_bundle(path, keys), check, 900)

count = {"entries": entries, "programs": programs, "bundles": bundles}[sys.argv[2]]()
stale = left()
for path in stale:
    os.utime(path, (1, 1))
if sys.argv[2] == "entries":
    Cache(folder / "cache").put_spirv(key_of(999), spirv_of(999))
elif sys.argv[2] == "programs":
    opened = open_file(DATA / "topk.pte", ())
    write_program(
        folder / "program.pvk", "x", {e: FileSource(opened, e) for e in opened.methods}, "test"
    )
else:
    cache = Cache(None)
    cache.put_spirv(key_of(0), spirv_of(0))
    cache.export_bundle(folder / "shaders.zip", [key_of(0)])
files = [path for path in folder.rglob("*") if path.is_file()]
print(json.dumps([count, len(stale), len(left()), sorted(p.name for p in files)[:3]]))
"""


@FORKS
@pytest.mark.parametrize("what", ["entries", "programs", "bundles"])
def test_killed_at_any_moment(what: str, tmp_path: Path) -> None:
    count, stale, left, files = python(KILLED, tmp_path, what)
    assert count >= 12
    assert stale >= 4
    assert left == 0
    if what != "entries":
        assert len([name for name in files if not name.endswith(".sha256")]) == 1


FULL = [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO, errno.ENOENT]
PLACES = ["open", "replace", "fsync", "write"]


class Full:
    """Has the calls of `place` fail with `code`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: str, code: int) -> None:
        def fail(*args: Any, **options: Any) -> Any:
            raise OSError(code, os.strerror(code))

        if place == "write":
            fdopen = open

            def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
                made = fdopen(file, mode, *args, **options)
                if "w" not in mode:
                    return made
                made.close()
                return _Unwritable(code)

            monkeypatch.setattr("builtins.open", opened)
        else:
            monkeypatch.setattr(os, place, fail)


class _Unwritable:
    """A file whose buffer cannot be written: `write` takes the bytes, and `close` fails."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __enter__(self) -> _Unwritable:
        return self

    def __exit__(self, *unused: object) -> None:
        raise OSError(self.code, os.strerror(self.code))

    def write(self, data: bytes) -> int:
        return len(data)

    def tell(self) -> int:
        return 0

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def flush(self) -> None:
        self.__exit__()

    def fileno(self) -> int:
        return -1


@pytest.mark.parametrize("code", FULL, ids=[errno.errorcode[code] for code in FULL])
@pytest.mark.parametrize("place", PLACES)
def test_a_cache_that_cannot_be_written(
    place: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cache(tmp_path).put_spirv(key_of(1), spirv_of(1))
    cache = Cache(tmp_path)
    with monkeypatch.context() as patch:
        Full(patch, place, code)
        if place == "fsync":  # entries are not flushed: a checksum tells a damaged one
            cache.put_spirv(key_of(2), spirv_of(2))
        else:
            with pytest.warns(RuntimeWarning, match="in memory only"):
                cache.put_spirv(key_of(2), spirv_of(2))
        assert cache.get_spirv(key_of(2)) == spirv_of(2)
    assert cache.get_spirv(key_of(1)) == spirv_of(1)
    assert Cache(tmp_path).get_spirv(key_of(2)) in (None, spirv_of(2))
    assert list(tmp_path.rglob(f"{TEMPORARY}*")) == []


def write_bundle(path: Path) -> None:
    cache = Cache(None)
    cache.put_spirv(key_of(1), spirv_of(1))
    cache.export_bundle(path, [key_of(1)])


def test_a_folder_in_the_place_of_a_file(tmp_path):
    """The error names the folder, not a temporary file."""
    with pytest.raises(IsADirectoryError) as caught, replace_file(tmp_path):
        pass
    assert caught.value.filename == str(tmp_path)


def write_bytes(path: Path) -> None:
    with replace_file(path) as file:
        file.write(b"new")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("write", "error"),
    [(write_bundle, PurevkError), (write_bytes, OSError)],
    ids=["bundle", "file"],
)
def test_a_file_that_cannot_be_written(
    write: Callable[[Path], None],
    error: type[Exception],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        Full(patch, place, errno.ENOSPC)
        with pytest.raises(error, match="No space left"):
            write(path)
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    write(path)
    assert path.read_bytes() != b"old"


def test_a_cache_whose_folder_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is looked through."""
    cache = Cache(tmp_path / "cache")
    cache.put_spirv(key_of(1), spirv_of(1))
    for path in (tmp_path / "cache").rglob("*.pvk"):
        path.unlink()
    for folder in sorted((tmp_path / "cache").rglob("*"), reverse=True):
        folder.rmdir()
    (tmp_path / "cache").rmdir()
    assert cache.get_spirv(key_of(1)) == spirv_of(1)
    assert cache.get_spirv(key_of(2)) is None
    assert cache.stats().entries == 0 and cache.clear() == 0
    cache.put_tuning("device", "name", 1)
    assert Cache(tmp_path / "cache").get_tuning("device", "name") == 1
