"""How a norm of heads rotates these as it stores them: the macros, buffers and parameters of
`norm.comp` with TURNED."""

from __future__ import annotations

from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.lower.lowering import Operand


@dataclass(frozen=True)
class Rows:
    """Where heads are stored: position s of a batch at position `index[s]` of `cache`.

    Attributes:
        cache: [B, T, H, D], the elements of a head one after the other.
        index: [S], dense.
    """

    cache: Operand
    index: Operand


@dataclass(frozen=True)
class Turn:
    """How heads [B, S, H, D] rotate that were normalized: element i and element D / 2 + i by the angles
    i of their position.

    Attributes:
        cos, sin: [S, D], dense. Both have one dtype.
        heads: H.
        rows: where they are stored; None: [B, S, H, D], dense.
    """

    cos: Operand
    sin: Operand
    heads: Size
    rows: Rows | None = None

    @property
    def aligned(self) -> list[Size]:
        """What is a multiple of 4 if four elements are read and written together."""
        steps = [] if self.rows is None else self.rows.cache.strides[:3]
        return [self.cos.offset, self.sin.offset, *steps]

    @property
    def macros(self) -> dict[str, int | str]:
        """Those of the template."""
        macros: dict[str, int | str] = {"TURNED": 1, "T_ANGLE": self.cos.dtype.glsl}
        if self.rows is not None:
            words = 2 if self.rows.index.dtype is DType.int64 else 1
            macros |= {"TURNED": 2, "INDEX_WORDS": words}
        return macros

    @property
    def buffers(self) -> dict[str, tuple[Operand, str]]:
        """Those behind the result."""
        buffers = {"cos": (self.cos, "r"), "sin": (self.sin, "r")}
        return buffers if self.rows is None else {**buffers, "index": (self.rows.index, "r")}

    @property
    def params(self) -> dict[str, Size]:
        """Those that other norms do not have, and `out_row`."""
        params: dict[str, Size] = {
            "heads": self.heads,
            "positions": self.cos.dims[0],
            "cos_offset": self.cos.offset,
            "sin_offset": self.sin.offset,
        }
        if self.rows is not None:
            cache = self.rows.cache
            params |= {
                "out_positions": cache.dims[1],
                "out_batch": cache.strides[0],
                "out_position": cache.strides[1],
                "out_row": cache.strides[2],
                "index_offset": self.rows.index.offset,
            }
        return params
