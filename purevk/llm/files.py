"""What architectures read of a file of any format: metadata by the keys of GGUF, and tensors by its
names."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from purevk.closing import Closing
from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.pte import blocks
from purevk.pte.source import Source


class Tensor(ABC):
    """A tensor of a file.

    Attributes:
        name, dims: the name, and sizes, the last of elements that follow one another.
    """

    name: str
    dims: tuple[int, ...]

    @property
    @abstractmethod
    def kind(self) -> str:
        """The type as messages name it."""

    @property
    def form(self) -> blocks.Form | None:
        """How it is quantized; None: it is not."""
        return None

    @property
    def scale_dtype(self) -> DType:
        """Of what `parts` gives."""
        return DType.float32

    def floats(self) -> np.ndarray:
        """The elements of a tensor that is not quantized, float32."""
        raise NotImplementedError

    def parts(self) -> Mapping[str, np.ndarray]:
        """`scales` and, if there are any, `minimums` of a quantized matrix: [rows, groups]."""
        raise NotImplementedError

    def values(self) -> np.ndarray:
        """The quantized values of a matrix as kernels read them: bytes [rows, bytes]."""
        raise NotImplementedError


class BlockTensor(Tensor):
    """A tensor whose blocks are those of a type of GGUF, its `kind`."""

    @property
    def form(self) -> blocks.Form | None:
        return blocks.FORMS.get(self.kind)

    @functools.cached_property
    def scale_dtype(self) -> DType:
        is_half = blocks.has_half_scales(self.kind)
        if not is_half:  # it follows from the numbers
            is_half = self.parts()["scales"].dtype == np.float16
        return DType.float16 if is_half else DType.float32

    @abstractmethod
    def _blocks(self) -> np.ndarray:
        """Bytes [blocks, bytes of a block]."""

    def parts(self) -> Mapping[str, np.ndarray]:
        rows, parts = math.prod(self.dims[:-1]), blocks.scales(self.kind, self._blocks())
        return {name: part.reshape(rows, -1) for name, part in parts.items()}

    def values(self) -> np.ndarray:
        return blocks.weight(self.kind, self._blocks()).reshape(math.prod(self.dims[:-1]), -1)


class ModelFile(Closing):
    """A model on disk.

    Attributes:
        name: of the file, for messages.
        metadata: by the keys of GGUF.
        tensors: by the names of GGUF.
        rotates_neighbours: queries and keys are rotated by pairs of neighbours, as files of GGUF are
            for some architectures; else the first half of a head with the second.
        is_raw: weights are as transformers has them. Files of GGUF have some in another form: norms
            with the 1 that some architectures add, heads in another order.
        sources: the maps of its files.
    """

    rotates_neighbours = False
    is_raw = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.sources: list[Source] = []
        self._parts: tuple[Tensor | None, Mapping[str, np.ndarray]] = None, {}

    @functools.cached_property
    def about(self) -> str:
        """What graphs of the file follow from: the SHA-256 of its metadata without the tokenizer, of
        the types and sizes of its tensors, and of the elements of those that are `DECIDING`."""
        hasher = hashlib.sha256(repr((self.rotates_neighbours, self.is_raw)).encode())
        for key, value in sorted(self.metadata.items()):
            if not key.startswith("tokenizer."):
                plain = value.tolist() if isinstance(value, np.ndarray) else value
                hasher.update(repr((key, plain)).encode("utf-8", "surrogatepass"))
        for name, tensor in sorted(self.tensors.items()):
            dtype = tensor.scale_dtype if tensor.form is not None else None
            hasher.update(repr((name, tensor.dims, tensor.kind, tensor.form, dtype)).encode())
            if name.startswith(DECIDING) and tensor.form is None:
                hasher.update(tensor.floats().tobytes())
        return hasher.hexdigest()

    def parts(self, tensor: Tensor) -> Mapping[str, np.ndarray]:
        """Its `parts`. Those of the last tensor are kept: they are asked for one by one."""
        if self._parts[0] is not tensor:
            self._parts = tensor, tensor.parts()
        return self._parts[1]

    def value(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of the metadata.

        Args:
            kind: the Python type that it must have.
            default: if there is none; None: there must be one.

        Raises:
            FileFormatError: it is missing, or of another type.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise FileFormatError(
                f"the file has no {key}", where=self.name, next="convert the model again"
            )
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise damaged(self.name, f"{key} is {str(value)[:80]!r}", "the metadata is damaged")
        return value

    def close(self) -> None:
        """Lets go of the files. Their maps stay as long as somebody has bytes of a tensor."""
        self.tensors, self._parts = {}, (None, {})
        for source in self.sources:
            with contextlib.suppress(BufferError):
                source.close()
        self.sources.clear()


_Open = TypeVar("_Open")


@contextlib.contextmanager
def close_on_error(file: _Open) -> Iterator[_Open]:
    """Closes a file, or what has files, if what is done within fails."""
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)  # type: ignore[attr-defined]
        yield file
        stack.pop_all()


def damaged(where: str, why: str, what: str = "the file is damaged") -> FileFormatError:
    """The error for a file that says what cannot be."""
    return FileFormatError(what, where=where, why=why, next="copy or convert the model again")


def unknown_architecture(where: str, name: object, known: Iterable[str]) -> UnsupportedProgramError:
    """The error for an architecture that has no class."""
    return UnsupportedProgramError(
        f"the architecture {name!r} is not known",
        where=where,
        why=f"known architectures: {', '.join(known)}",
        next="load the model with transformers, and compile it with purevk.compile",
    )


DTYPES = {each.name: each for each in (DType.float32, DType.float16, DType.bfloat16)}
"""What models compute in, by the names of `purevk.llm.load`."""
DECIDING = "rope_f"
"""Names of tensors whose elements graphs depend on begin so."""
MOST_HEAD_WIDTH = 4096
FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def floats_of(data: memoryview, kind: str) -> np.ndarray:
    """Bytes of elements that are F32, F16 or BF16, as float32 [elements]."""
    elements = np.frombuffer(data, FLOATS[kind])
    if kind == "BF16":
        return (elements.astype(np.uint32) << 16).view(np.float32)
    return elements.astype(np.float32)


def to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Bits of bfloat16, uint16, of float32."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
