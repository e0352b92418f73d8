"""Reads safetensors files: tensors as bytes of the mapped file. Nothing that a file says is believed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import UnsupportedProgramError
from purevk.frontends.reading import reading
from purevk.llm import files
from purevk.llm.files import damaged
from purevk.mapped import own
from purevk.paths import read_file
from purevk.pte import safetensors
from purevk.pte.blocks import Form
from purevk.pte.source import Source

MOST_TEXT = 1 << 26  # bytes of a JSON file
_ITEMSIZES = {**safetensors.ITEMSIZES, "F8_E4M3": 1, "F8_E5M2": 1}
_BLOCK = 128  # rows and columns of FP8 that have one scale


@dataclass(frozen=True)
class Stored(files.Tensor):
    """A tensor of a file, as it is there.

    Attributes:
        scale: of FP8: that elements are multiplied by; one, one of each row, or one of each block.
        about: what the header says of it.
    """

    name: str
    type: str
    dims: tuple[int, ...]
    data: memoryview
    scale: Stored | None = None
    about: str = ""

    @property
    def kind(self) -> str:
        return self.type

    def array(self, dtype: str) -> np.ndarray:
        """The elements as they are stored."""
        return np.frombuffer(own(self.data), dtype).reshape(self.dims)

    def floats(self) -> np.ndarray:
        if self.type.startswith("F8"):
            numbers = _float8(self.type)[self.array("u1")]
            factors = 1.0 if self.scale is None else self._factors(self.scale)
            return np.asarray(numbers * factors, np.float32)
        if self.type not in files.FLOATS:
            raise UnsupportedProgramError(
                f"the tensor {self.name} is {self.type}",
                why=f"{', '.join(files.FLOATS)}, F8_E4M3 and F8_E5M2 are known",
            )
        return files.floats_of(own(self.data), self.type).reshape(self.dims)

    def _factors(self, scale: Stored) -> np.ndarray:
        """A scale for each element, unless it broadcasts."""
        rows = self.dims[:1]
        if math.prod(scale.dims) == 1:
            return scale.floats().reshape(())
        if len(self.dims) == 2 and scale.dims in (rows, (*rows, 1)):
            return scale.floats().reshape(-1, 1)
        if len(self.dims) != 2 or scale.dims != tuple(-(-size // _BLOCK) for size in self.dims):
            why = f"{list(scale.dims)} scales of {list(self.dims)} elements"
            raise damaged(self.name, f"{why}; one, one a row, or one a block of 128 are known")
        factors = scale.floats().repeat(_BLOCK, 0)[: self.dims[0]]
        return factors.repeat(_BLOCK, 1)[:, : self.dims[1]]


@dataclass(frozen=True)
class Computed(files.Tensor):
    """A tensor that is computed from others.

    Attributes:
        read: gives the elements, or the quantized values.
        read_parts: gives what `parts` does.
    """

    name: str
    dims: tuple[int, ...]
    read: Callable[[], np.ndarray]
    kind: str = "F32"
    form: Form | None = None
    read_parts: Callable[[], Mapping[str, np.ndarray]] = dict
    scale_dtype: DType = DType.float32

    def floats(self) -> np.ndarray:
        return np.ascontiguousarray(self.read(), np.float32)

    def parts(self) -> Mapping[str, np.ndarray]:
        return self.read_parts()

    def values(self) -> np.ndarray:
        return self.read()


def quantized(
    name: str,
    dims: tuple[int, ...],
    bits: int,
    group: int,
    integers: Callable[[], np.ndarray],
    parts: Mapping[str, Callable[[], np.ndarray]],
) -> Computed:
    """A matrix of unsigned integers, each times its scale, plus its minimum.

    Args:
        integers: reads the integers, uint8 [rows, columns].
        parts: read `scales` and `minimums`, float32 [rows, groups]. Without minimums, half of what the
            bits can say stands for 0.
    """

    def values() -> np.ndarray:
        numbers = integers()
        if bits == 8:
            return (numbers ^ 0x80).view(np.int8)
        return np.asarray(numbers[:, ::2] | numbers[:, 1::2] << 4, np.uint8)

    def read_parts() -> dict[str, np.ndarray]:
        return {name: read() for name, read in parts.items()}

    kind, form = f"{bits} bits in groups of {group}", Form(bits, group, "minimums" in parts)
    return Computed(name, dims, values, kind, form, read_parts)


def stacked(name: str, tensors: Sequence[files.Tensor]) -> Computed:
    """Tensors of the same type and sizes, one after the other."""
    first = tensors[0]

    def read() -> np.ndarray:
        if first.form is None:
            return np.stack([tensor.floats() for tensor in tensors])
        return np.concatenate([tensor.values() for tensor in tensors])

    def parts() -> Mapping[str, np.ndarray]:
        parts = [tensor.parts() for tensor in tensors]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    is_half = first.form and all(each.scale_dtype is DType.float16 for each in tensors)
    dtype = DType.float16 if is_half else DType.float32
    return Computed(name, (len(tensors), *first.dims), read, first.kind, first.form, parts, dtype)


def read_tensors(path: Path) -> tuple[Source, dict[str, Stored]]:
    """The tensors of a file, by name. They are bytes of the mapped file.

    Raises:
        FileFormatError: the file is damaged.
        UnsupportedProgramError: a tensor has a type that is not known.
        OSError: it cannot be opened.
    """
    with files.close_on_error(Source(path, "safetensors")) as source:
        tensors = safetensors.read_tensors(source.view, source.name, _ITEMSIZES)
    about = {f"{name.removesuffix('.weight')}._weight_qdata": text for name, text in tensors.about}
    return source, {
        name: Stored(name, *stored, about=about.get(name, ""))
        for name, stored in tensors.by_name.items()
    }


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file. Raises FileFormatError if there is none, OSError if no file."""
    return parse_json(read_file(path, MOST_TEXT), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    with reading(where):
        parsed = json.loads(data)
    if not isinstance(parsed, dict):
        raise damaged(where, "its JSON is no object")
    return parsed


def _float8(kind: str) -> np.ndarray:
    """The 256 numbers of a type (Micikevicius et al., FP8 formats for deep learning): those of float16
    with the same bits, or 256 times as large."""
    codes = np.arange(256, dtype=np.uint16)
    if kind == "F8_E5M2":
        return (codes << 8).view(np.float16).astype(np.float32)
    numbers = (codes << 8 & 0x8000 | codes << 7 & 0x3F80).view(np.float16) * np.float32(256)
    numbers[[127, 255]] = np.nan
    return np.asarray(numbers, np.float32)
