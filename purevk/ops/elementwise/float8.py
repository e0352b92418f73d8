"""The dtypes of 8-bit floats: conversions from and to float32.

`passes/float8.py` replaces tensors of these dtypes by uint8 tensors of the same bytes, so that no
other kernel knows them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ops.elementwise.pointwise import unary


class Format(NamedTuple):
    """One of the formats.

    Attributes:
        mantissa: bits of the mantissa.
        bias: of the exponent.
        largest: the code of the largest number.
        above: the code of numbers above it, also of infinity.
        nan: the code of NaN.
        one_zero: there is no -0, and NaN has no sign.
    """

    mantissa: int
    bias: int
    largest: int
    above: int
    nan: int
    one_zero: bool

    @property
    def text(self) -> str:
        """The fields as arguments in GLSL."""
        return (
            f"{self.mantissa}, {self.bias}, {self.largest}, {self.above}, {self.nan},"
            f" {'true' if self.one_zero else 'false'}"
        )


FORMATS = {
    DType.float8_e4m3fn: Format(3, 7, 0x7E, 0x7E, 0x7F, False),
    DType.float8_e5m2: Format(2, 15, 0x7B, 0x7C, 0x7F, False),
    DType.float8_e4m3fnuz: Format(3, 8, 0x7F, 0x80, 0x80, True),
    DType.float8_e5m2fnuz: Format(2, 16, 0x7F, 0x80, 0x80, True),
}


def encode(number: float, dtype: DType) -> int:
    """The code of a number."""
    form = FORMATS[dtype]
    if math.isnan(number):
        return form.nan
    sign, size = (0x80 if math.copysign(1.0, number) < 0 else 0), abs(number)
    if math.isinf(size):
        code = form.above
    else:
        lowest = 1 - form.bias
        exponent = max(math.frexp(size)[1] - 1, lowest) if size else lowest
        steps = round(math.ldexp(size, form.mantissa - exponent))  # ties to even
        code = ((exponent - lowest) << form.mantissa) + steps
        code = form.above if code > form.largest else code
    return code if form.one_zero and code in (0, 0x80) else sign | code


def decode(code: int, dtype: DType) -> float:
    """The number of a code."""
    form, size = FORMATS[dtype], code & 0x7F
    if code == form.nan if form.one_zero else size > max(form.largest, form.above):
        return math.nan
    if not form.one_zero and size > form.largest:
        number = math.inf
    else:
        exponent, rest = size >> form.mantissa, size & ((1 << form.mantissa) - 1)
        rest += (1 << form.mantissa) if exponent else 0
        number = math.ldexp(rest, max(exponent, 1) - form.bias - form.mantissa)
    return -number if code & 0x80 else number


unary(
    "purevk.to_float8",
    lambda dtype, target, **_: f"fn_to_float8(x, {FORMATS[target].text})",
    params={"target": None},
    compute="float",
    out=DType.uint8,
)
unary(
    "purevk.from_float8",
    lambda dtype, source, **_: f"fn_from_float8(int(x), {FORMATS[source].text})",
    params={"source": None},
    compute="float",
    out=DType.float32,
)
