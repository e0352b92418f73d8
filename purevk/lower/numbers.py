"""Small arithmetic on sizes and parameters."""

from __future__ import annotations

import math
import struct

from purevk.dtypes import DType
from purevk.ir import Size
from purevk.ir import dims as _dims


def power_of_two(number: int) -> int:
    """The least power of 2 that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


def bits_of(number: float) -> int:
    """The bits of a float as the signed integer that a parameter holds. A number beyond those of
    float32 is infinite."""
    try:
        packed = struct.pack("<f", number)
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, number))
    bits: int = struct.unpack("<i", packed)[0]
    return bits


def rounded(number: float, dtype: DType) -> float:
    """The nearest number of a dtype of floats; infinite beyond its largest."""
    code = {DType.float16: "<e", DType.float64: "<d"}.get(dtype, "<f")
    try:
        (nearest,) = struct.unpack(code, struct.pack(code, float(number)))
    except OverflowError:
        nearest = math.copysign(math.inf, number)
    if dtype is DType.bfloat16 and not math.isnan(nearest):
        bits = bits_of(nearest) & 0xFFFFFFFF
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        (nearest,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(nearest)


def gcd4(*sizes: Size) -> bool:
    """Whether all sizes are multiples of 4 whatever the symbols are."""
    return all(_dims.gcd_of(size) % 4 == 0 for size in sizes)


def gcd16(*sizes: Size) -> bool:
    """Whether all sizes are multiples of 16 whatever the symbols are."""
    return all(_dims.gcd_of(size) % 16 == 0 for size in sizes)


def gcd8(*sizes: Size) -> bool:
    """Whether all sizes are multiples of 8 whatever the symbols are."""
    return all(_dims.gcd_of(size) % 8 == 0 for size in sizes)
