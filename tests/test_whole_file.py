"""Files that users name for outputs: what is no regular file is never replaced by one, and links stay."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import purevk
from purevk import paths, runtime, whole_file
from purevk.cache import Cache
from purevk.checking import report as checking
from purevk.cli import cache as cli_cache
from purevk.cli.output import output_file
from purevk.errors import FileFormatError, InputError, OutputError, PurevkError
from purevk.frontends.files import FileSource, open_file
from purevk.frontends.saved import write_program
from purevk.graph import kernel_files
from purevk.integrations.worker import Worker
from purevk.ir import Graph
from purevk.ir.printer import to_text
from purevk.llm.session import Session
from purevk.ops import extension
from purevk.passes import pipeline
from purevk.report.etrecord import read_etrecord
from purevk.shaders.bundle import Bundle
from purevk.whole_file import output_target, replace_file, temporary_folder
from tests.cache.harness import key_of, spirv_of
from tests.harness import DATA
from tests.states import States

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs the kinds of files of POSIX")

ROOT = not hasattr(os, "geteuid") or os.geteuid() == 0
# What may stand at the end of a path, by what becomes of it.
REPLACED = ["absent", "regular", "link", "chain", "linked folder"]
STREAMS = ["fifo", "link to fifo", *(["device", "link to device"] if ROOT else [])]
REFUSED = [
    *("folder", "socket", "dangling", "loop"),
    *("shared link", "shared link to device", "shared folder", "shared folder in a link"),
]


class Node:
    """A node of a kind, and what it holds.

    Attributes:
        path: what the user names.
        target: the file at the end of its links.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.path, self.target = kind, folder / "out.x", folder / "target.x"
        make = getattr(self, "_" + kind.replace(" ", "_"))
        make()
        self._reader: threading.Thread | None = None
        self._read = b""
        if "fifo" in kind:
            self._reader = threading.Thread(target=self._read_all, daemon=True)
            self._reader.start()

    def _read_all(self) -> None:
        self._read = self.target.read_bytes()

    def _absent(self) -> None:
        self.target = self.path

    def _regular(self) -> None:
        self.target = self.path
        self._file()

    def _file(self) -> None:
        self.target.write_bytes(b"old" * 99)
        self.target.chmod(0o640)
        if ROOT:
            os.chown(self.target, 1234, 2345)

    def _link(self) -> None:
        self._file()
        self.path.symlink_to(self.target.name)

    def _chain(self) -> None:
        (self.path.parent / "deep").mkdir()
        self.target = self.path.parent / "deep" / "target.x"
        self._file()
        (self.path.parent / "between").symlink_to("deep/../deep/target.x")
        self.path.symlink_to(self.path.parent / "between")

    def _fifo(self) -> None:
        self.target = self.path
        os.mkfifo(self.path, 0o600)

    def _link_to_fifo(self) -> None:
        os.mkfifo(self.target, 0o600)
        self.path.symlink_to(self.target)

    def _device(self) -> None:
        self.target = self.path
        os.mknod(self.path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))

    def _link_to_device(self) -> None:
        os.mknod(self.target, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        self.path.symlink_to(self.target)

    def _folder(self) -> None:
        self.path.mkdir()
        (self.path / "inside").touch()

    def _socket(self) -> None:
        self._socket_object = socket.socket(socket.AF_UNIX)
        self._socket_object.bind(os.path.relpath(self.path))

    def _dangling(self) -> None:
        self.path.symlink_to(self.path.parent / "nothing")

    def _loop(self) -> None:
        self.path.symlink_to(self.path)

    def _shared_link(self, target: Path | None = None) -> None:
        self._file()
        shared = self.path.parent / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        self.path = shared / "out.x"
        self.path.symlink_to(target or self.target)

    def _shared_link_to_device(self) -> None:
        self._shared_link(Path("/dev/null"))

    def _linked_folder(self) -> None:
        (self.path.parent / "real").mkdir()
        self.target = self.path.parent / "real" / "target.x"
        self._file()
        (self.path.parent / "folder").symlink_to("real")
        self.path = self.path.parent / "folder" / "target.x"

    def _shared_folder(self) -> None:
        """A link to a folder, in a folder for everybody."""
        self._linked_folder()
        shared = self.target.parent.parent / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        (shared / "folder").symlink_to(self.target.parent)
        self.path = shared / "folder" / "target.x"

    def _shared_folder_in_a_link(self) -> None:
        self._shared_folder()
        link = self.target.parent.parent / "link"
        link.symlink_to("shared/folder/target.x")
        self.path = link

    def written(self) -> bytes | None:
        """What was written; None: it cannot be told."""
        if self._reader is not None:
            self._reader.join(10)
            return self._read
        return None if "device" in self.kind else self.target.read_bytes()


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """All nodes below a folder: kind, mode, owner, and what they hold."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        held: object = None
        if stat.S_ISLNK(status.st_mode):
            held = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            held = path.read_bytes()
        found[str(path.relative_to(folder))] = status.st_mode, status.st_uid, status.st_gid, held
    return found


def check(folder: Path, kind: str, write: Callable[[Path], None], content: bytes | None) -> None:
    """Writes to a node of a kind with a writer, and compares all that is in the folder."""
    folder.mkdir()
    node = Node(folder, kind)
    before = snapshot(folder)
    if kind in REFUSED:
        with pytest.raises(OSError) as caught:
            write(node.path)
        assert isinstance(caught.value, OutputError) or kind in ("folder", "loop")
        assert snapshot(folder) == before
        return
    write(node.path)
    written = node.written()
    assert written is None or (written == content if content is not None else written)
    name = str(node.target.relative_to(folder))
    after = {key: each for key, each in snapshot(folder).items() if not key.endswith(".sha256")}
    if kind == "absent":
        assert set(after) == {name} and after[name][0] == stat.S_IFREG | 0o644
        return
    assert set(after) == set(before)
    for key, was in before.items():
        same = 3 if key == name and kind in REPLACED else 4  # mode and owner, or all
        assert after[key][:same] == was[:same], key


@pytest.fixture(autouse=True)
def short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The path of a socket has at most 108 characters, and the mode of a new file its umask."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("kind", [*REPLACED, *STREAMS, *REFUSED])
def test_every_kind_of_node(kind: str, tmp_path: Path) -> None:
    """With contents of many sizes, which are more than a pipe holds too."""
    chance = random.Random(kind)
    for number in range(6):
        content = chance.randbytes(chance.choice([0, 1, 100, 65536, 300_000]) + number)

        def write(path: Path) -> None:
            with replace_file(path) as file:
                file.write(b"x" + content)
                file.seek(0)  # a header that is written last
                file.write(b"y")

        check(tmp_path / str(number), kind, write, b"y" + content)


def _save(path: Path) -> None:
    with open_file(DATA / "linear_relu.pte") as file:
        methods = {name: FileSource(file, name) for name in file.methods}
        write_program(path, "name", methods, "test")


def _export(path: Path) -> None:
    cache = Cache(None)
    cache.put_spirv(key_of(1), spirv_of(1))
    cache.export_bundle(path, [key_of(1)])


def _cache_export(path: Path) -> None:
    cache = Cache(None)
    cli_cache._export(cache, argparse.Namespace(paths=[str(path)]))


def _output(path: Path) -> None:
    with output_file(str(path), "the page") as file:
        file.write(b"page")


def _session(path: Path) -> None:
    model: Any = None  # is not asked
    Session(model, "be brief", "error", {}).save(path)


WRITERS = {
    "Program.save": _save,
    "save_state": lambda path: States().save(path),
    "bundle": _export,
    "cache export": _cache_export,
    "-o": _output,
    "Session.save": _session,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", ["link", "fifo", STREAMS[-1], "dangling", "shared link", "socket"])
def test_every_writer(writer: str, kind: str, tmp_path: Path) -> None:
    check(tmp_path / "w", kind, WRITERS[writer], None)


def test_dumps_follow_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kernels, of graphs and of tensors that differ, also where the folder is for everybody."""
    folder = tmp_path / "dump"
    folder.mkdir()
    folder.chmod(0o1777)
    names = (f"{kernel_files.stem_of(key_of(1))}.spv", "a_b.03.fuse.txt", "a_b.npz")
    for name in names:
        (folder / name).symlink_to(tmp_path / "victim")
    graph = Graph("../a/b", (), (), ())
    monkeypatch.setenv("PUREVK_DUMP", str(folder))
    with pytest.raises(OutputError):
        kernel_files.dump_spirv(folder, {key_of(1): spirv_of(1)})
    (folder / ".._a_b.03.fuse.txt").symlink_to(tmp_path / "victim")
    with pytest.raises(OutputError):
        pipeline._dump(graph, folder, 3, "fuse")
    assert checking.save("a/b", {"x": np.ones(2)}, "") == ""
    assert not (tmp_path / "victim").exists() and not (tmp_path / "a").exists()
    for name in (*names, ".._a_b.03.fuse.txt"):
        (folder / name).unlink()
    kernel_files.dump_spirv(folder, {key_of(1): spirv_of(1)})
    pipeline._dump(graph, folder, 3, "fuse")
    assert checking.save("a/b", {"x": np.ones(2)}, "") == str(folder / "a_b.npz")
    assert len(list(folder.iterdir())) == 3 and len(list(tmp_path.iterdir())) == 1


def test_nobody_reads_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_file, "WAIT_S", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    start = time.monotonic()
    with pytest.raises(OutputError, match="nobody reads") as caught, replace_file(pipe):
        pass
    assert time.monotonic() - start < 5 and caught.value.where == str(pipe)
    idle = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # open, and never read
    with pytest.raises(OutputError, match="nobody reads"), replace_file(pipe) as file:
        file.write(bytes(1 << 20))
    os.close(idle)
    assert stat.S_ISFIFO(os.lstat(pipe).st_mode)


@pytest.mark.parametrize("node", ["link", "regular"])
def test_a_pipe_that_is_replaced_while_it_has_no_reader(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write the folder puts a link to another file there, or another name of it."""
    pipe, victim = tmp_path / "pipe", tmp_path / "victim"
    victim.write_bytes(b"content")
    os.mkfifo(pipe)

    def swap(_: float) -> None:
        if stat.S_ISFIFO(os.lstat(pipe).st_mode):
            pipe.unlink()
            pipe.symlink_to(victim) if node == "link" else os.link(victim, pipe)

    monkeypatch.setattr(time, "sleep", swap)
    with pytest.raises(OSError, match="replaced meanwhile"), replace_file(pipe) as file:
        file.write(b"other")
    assert victim.read_bytes() == b"content"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1"])
@pytest.mark.parametrize("where", ["pipe", "file", "appended"])
def test_what_the_process_has_open(name: str, where: str, tmp_path: Path) -> None:
    """What was printed before and after stays."""
    lines = (
        "import sys; from purevk.whole_file import replace_file",
        "print('before', flush=True)",
        "with replace_file(sys.argv[1]) as file: file.write(b'page\\n')",
        "print('after')",
    )
    out = tmp_path / "out"
    out.write_text("first\n" if where == "appended" else "")
    with contextlib.ExitStack() as stack:
        stdout = subprocess.PIPE if where == "pipe" else stack.enter_context(open(out, "a"))
        command = [sys.executable, "-c", "\n".join(lines), name]
        ran = subprocess.run(command, stdout=stdout, check=True)
    text = ran.stdout.decode() if where == "pipe" else out.read_text()
    assert text == f"{'first' + chr(10) if where == 'appended' else ''}before\npage\nafter\n"
    assert stat.S_ISLNK(os.lstat(name).st_mode)


def test_a_file_whose_owner_this_user_cannot_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written in place, as `cat >` would."""
    path = tmp_path / "theirs"
    path.write_bytes(b"old content")
    path.chmod(0o666)
    node = path.stat().st_ino

    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    with replace_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new" and path.stat().st_ino == node
    with pytest.raises(ZeroDivisionError), replace_file(path) as file:
        file.write(b"never")
        raise ZeroDivisionError
    assert path.read_bytes() == b"new" and [each.name for each in tmp_path.iterdir()] == ["theirs"]


def test_the_target_of_plain_names(tmp_path: Path) -> None:
    assert output_target("new")[0] == Path("new") and output_target("new")[1] is None
    Path("there").touch()
    assert stat.S_ISREG(output_target("there")[1].st_mode)  # type: ignore[union-attr]
    with pytest.raises(NotADirectoryError):
        output_target("there/new")
    with pytest.raises(FileNotFoundError), replace_file("absent/new"):
        pass


def test_a_file_with_another_name_in_a_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not written in place: the other name may be a file that its user wants to keep."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "own").write_bytes(b"keep")
    os.link(tmp_path / "own", shared / "out")
    shared.chmod(0o777)

    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fchmod", refuse)
        with pytest.raises(OutputError, match="other names"), replace_file(shared / "out") as file:
            file.write(b"new")
    with replace_file(shared / "out") as file:
        file.write(b"new")
    assert (tmp_path / "own").read_bytes() == b"keep" and (shared / "out").read_bytes() == b"new"


def _refused_or_written(path: Path, content: bytes) -> bool:
    """Writes a file, if that is not refused."""
    try:
        with replace_file(path) as file:
            file.write(content)
    except OSError:
        return False
    return True


def _swapped_folders(folder: Path) -> tuple[Path, Path]:
    """(folder for everybody, folder of this user): the first has a folder `sub` and a link `link` to the
    second."""
    shared, own = folder / "shared", folder / "own"
    (shared / "sub").mkdir(parents=True)
    shared.chmod(0o777)
    own.mkdir()
    (own / "out.x").write_bytes(b"keep")
    (shared / "link").symlink_to(own)
    return shared, own


@pytest.mark.parametrize("node", ["absent", "regular", "theirs", "fifo"])
@pytest.mark.parametrize("moment", ["lstat", "uuid", "body"])
def test_a_folder_that_a_link_replaces(
    moment: str, node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link comes after each look at the path. What is written is below the folder that was seen."""
    shared, own = _swapped_folders(tmp_path)
    before = snapshot(own)
    output, victim = shared / "sub" / "out.x", own / "out.x"
    if node == "fifo":
        os.mkfifo(output)
        victim.unlink()
        os.mkfifo(victim)
        before = snapshot(own)
        readers = [os.open(each, os.O_RDONLY | os.O_NONBLOCK) for each in (output, victim)]
    elif node != "absent":
        output.write_bytes(b"old")
    swapped = []

    def swap() -> None:
        if not swapped:
            swapped.append(True)
            (shared / "sub").rename(shared / "seen")
            (shared / "link").rename(shared / "sub")

    def calling(
        function: Callable[..., object], when: Callable[..., bool]
    ) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            result = function(*args, **options)
            if when(*args):
                swap()
            return result

        return call

    if node == "theirs":  # is written in place

        def refuse(*args: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "fchmod", refuse)
    if moment == "lstat":
        monkeypatch.setattr(os, "lstat", calling(os.lstat, lambda path, *_: "out.x" in str(path)))
    elif moment == "uuid":
        monkeypatch.setattr(whole_file.uuid, "uuid4", calling(whole_file.uuid.uuid4, lambda: True))
    with replace_file(output) as file:
        file.write(b"new")
        if moment == "body":
            swap()
    if node == "fifo":
        assert [os.read(each, 10) for each in readers] == [b"new", b""]
        for each in readers:
            os.close(each)
    else:
        assert ((shared / "seen") if swapped else (shared / "sub")).joinpath(
            "out.x"
        ).read_bytes() == b"new"
    assert snapshot(own) == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs renameat2")
def test_a_folder_that_is_exchanged_with_a_link_again_and_again(tmp_path: Path) -> None:
    shared, own = _swapped_folders(tmp_path)
    before = snapshot(own)
    exchange = ctypes.CDLL(None, use_errno=True).renameat2
    names = [-100, os.fsencode(shared / "sub"), -100, os.fsencode(shared / "link"), 2]
    if exchange(*names) != 0:
        pytest.skip(f"this file system exchanges no names: {os.strerror(ctypes.get_errno())}")
    done = threading.Event()

    def loop() -> None:
        while not done.is_set():
            exchange(*names)

    thread = threading.Thread(target=loop)
    thread.start()
    written = 0
    try:
        for number in range(400):
            written += _refused_or_written(shared / "sub" / "out.x", b"other%d" % number)
    finally:
        done.set()
        thread.join()
    assert snapshot(own) == before and written


@pytest.mark.parametrize("by_path", [False, True])
def test_a_slash_at_the_end(by_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names a folder, as it does for `cat >`."""
    if by_path:
        monkeypatch.setattr(whole_file, "_HAS_DIR_FD", False)
    Path("there").write_bytes(b"keep")
    Path("folder").mkdir()
    os.symlink("folder", "to folder")
    os.symlink("there/", "to there")
    before = snapshot(tmp_path)
    names = ["new/", "new//", "new/.", "there/", "there/.", "folder/", "to folder/", "folder/new/"]
    for name in [*names, "", ".", "..", "/", *([] if by_path else ["to there"])]:
        with pytest.raises((IsADirectoryError, NotADirectoryError)), replace_file(name):
            pass
    assert snapshot(tmp_path) == before
    for name in (
        "folder/new",
        "./folder/../there",
        str(tmp_path / "folder" / "new"),
        "to folder//new",
    ):
        with replace_file(name) as file:
            file.write(name.encode())
        assert Path(name).read_bytes() == name.encode()
    with replace_file("there") as file:
        file.write(b"again")
    assert Path("there").read_bytes() == b"again"
    assert {each.name for each in tmp_path.iterdir()} == {
        "there",
        "folder",
        "to folder",
        "to there",
    }


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    os.symlink(tmp_path / "a", "link")
    before = os.listdir("/dev/fd")
    for name in ("link/b/../b/out", "link/none/out", "a/b", "out", "link/"):
        _refused_or_written(Path(name), b"")
    assert os.listdir("/dev/fd") == before


class BytesPath:
    """An os.PathLike whose path is bytes."""

    def __fspath__(self) -> bytes:
        return b"name"


def _files() -> dict[str, Callable[[Any], object]]:
    """All that takes the path of a file from users."""
    return {
        "load": purevk.load,
        "data files": lambda path: purevk.load(DATA / "linear_relu_external.pte", [path]),
        "data file": lambda path: purevk.load(DATA / "linear_relu_external.pte", path),
        "plan": purevk.plan,
        "runtime": runtime.Runtime.get().load_program,
        "worker": Worker,
        "save": _save,
        "save_state": lambda path: States().save(path),
        "load_state": lambda path: States().load(path),
        "export_bundle": _export,
        "import_bundle": lambda path: Cache(None).import_bundle(path, trust=True),
        "use_bundle": lambda path: Bundle(path, trust=True),
        "cache": Cache,
        "ETRecord": lambda path: read_etrecord(path, "forward"),
        "template": lambda path: extension._read("name", path),
        "replace_file": lambda path: replace_file(path).__enter__(),
        "output_target": output_target,
        "open_regular": paths.open_regular,
    }


@pytest.mark.parametrize("path", [BytesPath(), "a\0b", Path("a\0b"), "a\ud800", 3, 1.5, ["a"]])
def test_paths_that_no_file_can_have(path: Any, tmp_path: Path) -> None:
    for name, take in _files().items():
        if name == "plan" and not isinstance(path, (str, os.PathLike)):
            continue  # is taken for a module
        if name == "data file" and isinstance(path, list):
            continue
        with pytest.raises((InputError, TypeError)) as caught:
            take(path)
        error = caught.value
        if name == "data file" and not isinstance(path, (str, os.PathLike)):
            continue  # and no sequence
        if name == "runtime" and not isinstance(path, (str, os.PathLike)):
            continue  # executorch's error
        assert isinstance(error, InputError) and error.why, name
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [
    memoryview(b"abcdefgh" * 20)[::2], memoryview(np.arange(12).reshape(3, 4).T), memoryview(b""),
    memoryview(np.zeros(9, "i4,f8")), memoryview(np.float32(1)), bytearray(b"x"), memoryview(b"PK\3\4")[::-1],
])  # fmt: skip
def test_bytes_of_any_form_that_are_no_program(data: Any) -> None:
    for files in (
        (data,),
        (DATA / "linear_relu_external.pte", [data]),
        (DATA / "linear_relu_external.pte", data),
    ):
        with pytest.raises(FileFormatError):
            purevk.load(*files)


def test_bytes_that_do_not_follow_each_other() -> None:
    data = (DATA / "linear_relu.pte").read_bytes()
    strided = memoryview(np.repeat(np.frombuffer(data, np.uint8), 3))[::3]
    with open_file(strided) as one, open_file(data) as other:
        assert to_text(one.graph("forward")) == to_text(other.graph("forward"))
    strided.release()
    with pytest.raises(InputError, match="cannot be read"):
        open_file(strided)


def test_errors_say_what_to_do() -> None:
    os.symlink("nothing", "dangling")
    with pytest.raises(PurevkError) as caught, replace_file("dangling"):
        pass
    error = caught.value
    assert isinstance(error, OSError) and str(error).startswith("this is a link to a file")
    assert error.where == "dangling" and "nothing" in error.why and error.next


def test_no_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(OutputError, match="temporary files") as caught, temporary_folder("a"):
        pass
    assert "TMPDIR" in caught.value.next
