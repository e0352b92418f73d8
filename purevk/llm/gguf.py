"""Reads GGUF files: metadata, and tensors as the bytes of the mapped file.

A file that was split (`NAME-00001-of-00003.gguf`) is read as a whole. Nothing that a file says is
believed: counts, lengths, offsets and names are checked before they are used.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.llm import files
from purevk.mapped import own
from purevk.paths import path_text
from purevk.pte.blocks import BLOCK_TYPES, BlockType
from purevk.pte.source import Source

_READ_AHEAD = 1 << 20
_MAX_KEY = 1 << 16  # bytes of a name
_MAX_DEPTH = 3  # arrays in arrays
_MAX_RANK = 4
_MAX_PARTS = 10_000
_STRING, _ARRAY = 8, 9
_NUMBERS = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


ROTATED_NEIGHBOURS = ("llama", "mistral3", "smollm3")
"""Architectures whose files have heads whose neighbours are rotated with one another."""


@dataclass(frozen=True)
class Tensor(files.BlockTensor):
    """A tensor of a file.

    Attributes:
        data: the blocks, in row-major order: bytes of the mapped file, see `purevk.mapped`.
    """

    name: str
    type: BlockType
    dims: tuple[int, ...]
    data: memoryview

    @property
    def kind(self) -> str:
        return self.type.name

    def floats(self) -> np.ndarray:
        return files.floats_of(own(self.data), self.kind).reshape(self.dims)

    def _blocks(self) -> np.ndarray:
        return np.frombuffer(own(self.data), np.uint8).reshape(-1, self.type.nbytes)


class GgufFile(files.ModelFile):
    """A GGUF file, with all its parts if it was split.

    Args:
        path: of the file, or of its first part.

    Attributes:
        metadata: values by key. Arrays of numbers are numpy arrays, others are lists.
        tensors: by name.
        nbytes: of all parts.

    Raises:
        FileFormatError: the file is damaged or no GGUF, or a part is missing.
        UnsupportedProgramError: a tensor has a type that is not in `BLOCK_TYPES`.
        InputError: no file can have this path.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path_text(path))
        with files.close_on_error(self):
            self._read_parts(Path(self.name))
        self.nbytes = sum(source.size for source in self.sources)
        name = self.metadata.get("general.architecture")
        self.rotates_neighbours = isinstance(name, str) and name in ROTATED_NEIGHBOURS

    def _read_parts(self, path: Path) -> None:
        self.metadata = self._read(path)
        count = self.metadata.get("split.count", 1)
        if not isinstance(count, int) or not 0 <= count <= _MAX_PARTS:
            raise files.damaged(self.name, f"split.count is {count!r}")
        if count < 2:
            return
        name = _PART.fullmatch(path.name)
        if name is None or int(name[2]) != 1 or int(name[3]) != count:
            raise FileFormatError(
                f"the file is one of {count} parts, and not named as the first one",
                where=self.name,
                why=f"NAME-00001-of-{count:05}.gguf is expected",
                next="give the first part, with its name, in a folder with the others",
            )
        for number in range(2, count + 1):
            part = path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf")
            if not part.is_file():
                raise FileFormatError(
                    f"part {number} of {count} is missing",
                    where=str(part),
                    next="copy all parts into one folder",
                )
            if str(self._read(part).get("split.no")) != str(number - 1):
                raise files.damaged(str(part), f"split.no is not {number - 1}")
        stated = self.value("split.tensors.count", int, len(self.tensors))
        if stated != len(self.tensors):
            raise files.damaged(
                self.name, f"{stated} tensors are stated, {len(self.tensors)} are there"
            )

    def _read(self, path: Path) -> dict[str, Any]:
        """Adds the tensors of one part, and returns its metadata."""
        source = Source(path, "GGUF")
        self.sources.append(source)
        cursor = _Cursor(source)
        if bytes(cursor.take(4)) != b"GGUF":
            raise FileFormatError(
                "this is no GGUF file", where=source.name, why=f"it begins with {source.head[:4]!r}"
            )
        version = cursor.number("<I")
        if version not in (2, 3):
            swapped = version in (2 << 24, 3 << 24)
            raise FileFormatError(
                f"GGUF version {version} cannot be read",
                where=source.name,
                why="its bytes are in big-endian order" if swapped else "2 and 3 are known",
                next="convert it with llama.cpp's tools",
            )
        tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
        cursor.check_count(tensors, 24, "tensors")
        cursor.check_count(pairs, 13, "metadata values")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.text("a key", _MAX_KEY)
            if not key or key in metadata:
                raise files.damaged(source.name, f"the key {key!r} stands there twice or is empty")
            metadata[key] = cursor.value(key, cursor.number("<I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise files.damaged(source.name, f"general.alignment is {alignment!r}")
        infos = [self._tensor_info(cursor) for _ in range(tensors)]
        start, stated = -(-cursor.at // alignment) * alignment, 0
        for name, kind, dims, offset in infos:
            if name in self.tensors:
                raise files.damaged(source.name, f"the tensor {name!r} stands there twice")
            if offset % alignment:
                raise files.damaged(
                    source.name, f"{name!r} starts at {offset}, not at a multiple of {alignment}"
                )
            count = math.prod((*dims[:-1], dims[-1] // kind.elements))
            data = source.slice(start + offset, count * kind.nbytes, f"the tensor {name!r}")
            stated += len(data)
            if stated > source.size:
                raise files.damaged(source.name, f"{name!r} has the bytes of other tensors")
            self.tensors[name] = Tensor(name, kind, dims, data)
        return metadata

    def _tensor_info(self, cursor: _Cursor) -> tuple[str, BlockType, tuple[int, ...], int]:
        """Name, type, sizes and offset."""
        name, where = cursor.text("the name of a tensor", _MAX_KEY), cursor.source.name
        rank = cursor.number("<I")
        if not name or not 1 <= rank <= _MAX_RANK:
            raise files.damaged(where, f"the tensor {name!r} has {rank} dims")
        dims = tuple(cursor.number("<Q") for _ in range(rank))[::-1]
        number, offset = cursor.number("<I"), cursor.number("<Q")
        kind = BLOCK_TYPES.get(number)
        if kind is None:
            raise UnsupportedProgramError(
                f"the tensor {name!r} has type {number}, which cannot be read",
                where=where,
                why=f"known types: {', '.join(each.name for each in BLOCK_TYPES.values())}",
                next="quantize the model to one of these",
            )
        if not all(0 < size < 1 << 40 for size in dims) or dims[-1] % kind.elements:
            raise files.damaged(where, f"the tensor {name!r} has sizes {list(dims)} of {kind.name}")
        return name, kind, dims, offset


class _Cursor:
    """Reads a header from its start on, through copies of pieces of it."""

    def __init__(self, source: Source) -> None:
        self.source, self.at = source, 0
        self._first, self._piece = 0, memoryview(b"")

    def take(self, count: int) -> memoryview:
        """The next `count` bytes."""
        start = self.at - self._first
        if start + count > len(self._piece):
            data = self.source.slice(self.at, count, "the header")
            ahead = min(max(count, _READ_AHEAD), self.source.size - self.at)
            data = self.source.slice(self.at, ahead, "the header")
            self._first, start, self._piece = self.at, 0, own(data)
        self.at += count
        return self._piece[start : start + count]

    def number(self, format: str) -> Any:
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def check_count(self, count: int, least: int, what: str) -> None:
        """Raises unless the file has room for so many values of `least` bytes."""
        if count * least > self.source.size - self.at:
            raise files.damaged(
                self.source.name, f"{count} {what} are stated, and there is no room for them"
            )

    def text(self, what: str, most: int | None = None) -> str:
        size = self.number("<Q")
        if most is not None and size >= most:
            raise files.damaged(self.source.name, f"{what} has {size} bytes")
        self.check_count(size, 1, f"bytes of {what}")
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError as error:
            raise files.damaged(self.source.name, f"{what} is no UTF-8: {error.reason}") from None

    def _texts(self, key: str, count: int) -> list[str]:
        """So many texts; those that lie in the piece that was read ahead without a call for each."""
        texts: list[str] = []
        size_of, add = struct.Struct("<Q").unpack_from, texts.append
        while len(texts) < count:
            piece, at = bytes(self._piece), self.at - self._first
            most = len(piece)
            try:
                for _ in range(count - len(texts)):
                    start = at + 8
                    end = start + size_of(piece, at)[0]
                    if end > most:
                        break
                    add(piece[start:end].decode())
                    at = end
            except (struct.error, UnicodeDecodeError):
                pass  # the piece is at its end, or `text` says where
            self.at = self._first + at
            if len(texts) < count:
                texts.append(self.text(key))
        return texts

    def value(self, key: str, kind: int, depth: int = 0) -> Any:
        """A value of the metadata."""
        if kind == _STRING:
            return self.text(key)
        if kind == _ARRAY and depth < _MAX_DEPTH:
            kind, count = self.number("<I"), self.number("<Q")
            if kind < len(_NUMBERS) and _NUMBERS[kind]:
                dtype = np.dtype(_NUMBERS[kind])
                self.check_count(count, dtype.itemsize, f"elements of {key}")
                return np.frombuffer(bytes(self.take(count * dtype.itemsize)), dtype)
            self.check_count(count, 8, f"elements of {key}")
            if kind == _STRING:
                return self._texts(key, count)
            return [self.value(key, kind, depth + 1) for _ in range(count)]
        if kind >= len(_NUMBERS) or not _NUMBERS[kind]:
            raise files.damaged(self.source.name, f"{key} has the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
