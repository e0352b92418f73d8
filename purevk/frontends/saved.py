"""Files that `Program.save` writes (.pvk): the graphs of a program before any pass, and its
tensors. `docs/formats.md` has the layout. Neither writing nor reading imports torch."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from purevk.closing import Closing
from purevk.errors import FileFormatError
from purevk.frontends.reading import check_depth, reading
from purevk.ir import Graph, Guard, GuardLog
from purevk.ir.expected import FAR, rounding
from purevk.ir.serial import GraphReader, GraphWriter
from purevk.ir.verify import verify
from purevk.mapped import address_of, own, pieces
from purevk.pool import Pool
from purevk.pte.source import FileLike, Source
from purevk.whole_file import replace_file

if TYPE_CHECKING:
    from purevk.frontends.importer import InputSizes
    from purevk.frontends.respecialize import ReadGraph

MAGIC = b"PUREVK\r\n"  # transfers in text mode change these bytes
VERSION = 2  # 2 has constraints, ranges and signatures
ALIGNMENT = 64  # bytes, of tensors within the file
_HEADER = struct.Struct(
    "<8sIIQQQI"
)  # magic, version, 0, bytes of the file, offset and bytes of the JSON, its checksum
_CHECK = struct.Struct("<I")  # checksum of the header
_ZLIB_STEP = 1 << 26
_MOST_THREADS = 8


def is_saved(source: Source) -> bool:
    """Whether a file begins as a saved program does."""
    return source.head.startswith(MAGIC)


# -- writing -------------------------------------------------------------------------------------
def write_program(
    path: str | os.PathLike[str],
    name: str,
    methods: Mapping[str, Callable[[Any], Graph]],
    producer: str,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes a program.

    Args:
        path: the file. An existing file is replaced, as `replace_file` says.
        name: of the program, for messages.
        methods: functions that give the methods' graphs when called with None.
        producer: the program that writes it.
        about: further data of JSON, for those who read the file.

    Raises:
        UnsupportedProgramError: a node has an argument that cannot be written.
        OSError: the file cannot be written.
    """
    with replace_file(path) as stream:
        _Writer(stream).write(name, methods, producer, about or {})


class _Writer:
    """Writes the tensors, then the JSON that names them, then the header."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.tensors: list[list[int]] = []
        self._known: dict[tuple[int, int], int] = {}
        self._held: list[memoryview] = []  # addresses are unique among live objects

    def write(
        self,
        name: str,
        methods: Mapping[str, Callable[[Any], Graph]],
        producer: str,
        about: Mapping[str, Any],
    ) -> None:
        from purevk.frontends.respecialize import ReadGraph

        self.stream.write(bytes(ALIGNMENT))
        graphs = {}
        for method, source in methods.items():
            with GuardLog() as log, rounding(FAR):
                graph = source(None)
            read = ReadGraph(graph, list(log.guards), name)
            with rounding(0):
                examples = {
                    symbol.name: symbol.upper for symbol in source(None).symbols if symbol.is_size
                }
            written = GraphWriter(self._tensor).method(graph, read.guards, read.kept)
            graphs[method] = {**written, "examples": examples}
        content: dict[str, Any] = {
            "producer": producer,
            "name": name,
            "tensors": self.tensors,
            "methods": graphs,
        }
        if about:
            content["about"] = about
        text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        start = self._align()
        self.stream.write(text)
        head = _HEADER.pack(
            MAGIC, VERSION, 0, start + len(text), start, len(text), zlib.crc32(text)
        )
        self.stream.seek(0)
        self.stream.write(head + _CHECK.pack(zlib.crc32(head)))

    def _align(self) -> int:
        here = self.stream.tell()
        self.stream.write(bytes(-here % ALIGNMENT))
        return here + -here % ALIGNMENT

    def _tensor(self, data: memoryview) -> int:
        key = (address_of(data), len(data))
        if key not in self._known or not len(data):
            self._known[key] = len(self.tensors)
            self._held.append(data)
            start, check = self._align(), 0
            for piece in pieces(data):
                check = zlib.crc32(piece, check)
                self.stream.write(piece)
            self.tensors.append([start, len(data), check])
        return self._known[key]


def checksum(data: memoryview) -> int:
    """The CRC-32 of bytes, in steps that let other threads run."""
    value = 0
    for piece in pieces(data):
        value = zlib.crc32(piece, value)
    return value


# -- reading -------------------------------------------------------------------------------------
class SavedProgram(Closing):
    """A saved program. Its tensors are slices of the mapped file. A context manager.

    Attributes:
        name: of the program.
        producer: the program that wrote the file.
        source: the file.
        structure: (first byte, bytes) of the header and the description.
        methods: their names.
        about: further data that the file has; nobody has checked it.
    """

    def __init__(self, source: Source, content: Mapping[str, Any]) -> None:
        self.source = source
        start, length = _HEADER.unpack_from(source.head)[4:6]
        self.structure = [(0, _HEADER.size + _CHECK.size), (start, length)]
        self.name, self.producer = str(content["name"]), str(content["producer"])
        self._tensors = [
            (int(start), int(size), int(check)) for start, size, check in content["tensors"]
        ]
        for start, size, _ in self._tensors:
            source.slice(start, size, "a tensor")
        if self.tensor_bytes > source.size:  # their checksums would take longer than the file is
            raise _damaged(source, f"tensors of {self.tensor_bytes} bytes in {source.size}")
        self.methods = tuple(map(str, content["methods"]))
        self.about: dict[str, Any] = dict(content.get("about", {}))
        self._data: dict[str, Any] = dict(content["methods"])  # of those that nobody asked for
        self._methods: dict[str, ReadGraph] = {}  # those that were asked for

    @property
    def tensor_ranges(self) -> list[tuple[int, int]]:
        """(first byte, bytes) of the tensors."""
        return sorted((start, size) for start, size, _ in self._tensors)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(size for _, size, _ in self._tensors)

    def _tensor(self, number: int) -> memoryview:
        if number < 0:
            raise IndexError(number)
        start, size, _ = self._tensors[number]
        return self.source.view[start : start + size]

    def check(self) -> None:
        """Compares every tensor with its checksum, in several threads. Reads the whole file.

        Raises:
            FileFormatError: a tensor is damaged.
        """
        threads = min(_MOST_THREADS, os.cpu_count() or 1, self.tensor_bytes // _ZLIB_STEP)
        numbers = range(len(self._tensors))
        of_tensor = lambda number: checksum(self._tensor(number))  # noqa: E731
        with Pool(max(threads, 1), "purevk-check") as pool:
            sums = list((pool.map if threads > 1 else map)(of_tensor, numbers))
        for number, (found, (start, _, stored_sum)) in enumerate(zip(sums, self._tensors)):
            if found != stored_sum:
                raise _damaged(
                    self.source,
                    f"tensor {number} at byte {start} has checksum {found:#x}; {stored_sum:#x} was written",
                )

    def graph(self, method: str, sizes: InputSizes | None = None) -> Graph:
        """The graph of a method, for its own bounds or for the sizes of a call (see
        `respecialize`).

        Raises:
            FileFormatError: the graph is damaged, or does not hold for these sizes.
        """
        if method not in self._methods:
            from purevk.frontends.respecialize import ReadGraph  # with it, all operators

            with reading(f"{self.source.name}, method {method}"):
                data = self._data[method]
                graph, guards, kept_guards = GraphReader(self._tensor).method(data)
                verify(graph, "reading it")
                _check_symbols(graph, guards)
                examples = {str(k): int(size) for k, size in data.get("examples", {}).items()}
                self._methods[method] = ReadGraph(graph, guards, self.name, kept_guards, examples)
            del self._data[method]
        return self._methods[method](sizes)

    def examples(self, method: str) -> Mapping[str, int]:
        """The sizes that a method was traced with, by the names of their symbols; `graph` has read it."""
        return self._methods[method].examples

    def close(self) -> None:
        """Closes the file once nobody uses its tensors."""
        self._methods.clear()
        self._data.clear()
        self.source.close()


def read_program(file: FileLike | Source, check: bool = True) -> SavedProgram:
    """Reads a saved program.

    Args:
        file: path (mapped, not copied) or bytes. Of an open file, the program becomes the owner.
        check: compare the tensors with their checksums too. The graphs' checksum is always checked.

    Raises:
        FileFormatError: it is no saved program, damaged, cut short, or of another version.
        OSError: the path cannot be opened.
    """
    source = Source.of(file, ".pvk")
    try:
        program = _read(source)
        if check:
            program.check()
        return program
    except BaseException:
        source.close()
        raise


def _read(source: Source) -> SavedProgram:
    size = _HEADER.size + _CHECK.size
    head = source.head[:size]
    if head[: len(MAGIC)] != MAGIC:
        raise FileFormatError(
            "this is no saved program",
            where=source.name,
            why=f"it begins with {head[:8]!r}; {MAGIC!r} is accepted",
            next="write it with Program.save",
        )
    if len(head) < size:
        raise _damaged(source, f"{source.size} bytes; the header alone has {size}")
    _, version, _, total, start, length, check = _HEADER.unpack_from(head)
    if not 1 <= version <= VERSION:
        raise FileFormatError(
            f"the file has version {version} of the format",
            where=source.name,
            why=f"versions 1 to {VERSION} are accepted",
            next="save it again with this version of purevk, or load it with the one that wrote it",
        )
    if zlib.crc32(head[: _HEADER.size]) != _CHECK.unpack_from(head, _HEADER.size)[0]:
        raise _damaged(source, "the header does not have its checksum")
    if total != source.size:
        raise _damaged(source, f"{source.size} bytes are there, {total} were written")
    text = own(source.slice(start, length, "the description of the program"))
    if zlib.crc32(text) != check:
        raise _damaged(source, "the description of the program does not have its checksum")
    try:
        content = json.loads(bytes(text), parse_constant=_refuse_constant)
        check_depth(content, source.name)
        return SavedProgram(source, content)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        if isinstance(error, FileFormatError):
            raise
        raise _damaged(source, f"the description cannot be read: {error!r}") from error


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _damaged(source: Source, why: str) -> FileFormatError:
    return FileFormatError(
        "the saved program is damaged",
        where=source.name,
        why=why,
        next="copy it again, or save the program again",
    )


def _check_symbols(graph: Graph, guards: Iterable[Guard]) -> None:
    """Raises ValueError if a guard names a size that no input has."""
    sizes = {symbol for inner in graph.nested() for symbol in inner.symbols}
    for symbol in {symbol for guard in guards for symbol in guard.symbols} - sizes:
        if symbol.is_size and not symbol.unbacked:
            raise ValueError(f"a guard names {symbol.name}, which no input has as a size")
