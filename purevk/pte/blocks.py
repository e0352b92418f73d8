"""Blocks of GGUF as the kernels of quantized weights read them.

Each type becomes quantized values of 4 or 8 bits, in groups with a scale, and for some a minimum: a
weight is `value * scale`, or with a minimum `(value + 2^(bits - 1)) * scale + minimum`. The values are
exact. Scales that a file has as float16 are too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_Array = np.ndarray
_MOST = 65504.0  # in float16
_BLOCKS_AT_ONCE = 2048  # that fit into the cache of a processor
IQ4_VALUES = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8
)
MXFP4_VALUES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)


@dataclass(frozen=True)
class Form:
    """What a type of blocks becomes: values of so many bits, in groups of so many."""

    bits: int
    group: int
    has_minimums: bool = False


@dataclass(frozen=True)
class BlockType:
    """A type of tensors: blocks of so many elements in so many bytes."""

    name: str
    elements: int
    nbytes: int


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20), 6: BlockType("Q5_0", 32, 22), 7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34), 10: BlockType("Q2_K", 256, 84), 11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144), 13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210), 20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136), 30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}  # fmt: skip
"""The types that can be read, by their number in a GGUF file."""


BLOCK_BYTES = {each.name: each.nbytes for each in BLOCK_TYPES.values()}
FORMS: Mapping[str, Form] = {
    "Q4_0": Form(4, 32), "Q4_1": Form(4, 32, True), "Q5_0": Form(8, 32),
    "Q5_1": Form(8, 32, True), "Q8_0": Form(8, 32), "Q2_K": Form(4, 16, True),
    "Q3_K": Form(4, 16), "Q4_K": Form(4, 32, True), "Q5_K": Form(8, 32, True),
    "Q6_K": Form(8, 16), "IQ4_NL": Form(8, 32), "IQ4_XS": Form(8, 32), "MXFP4": Form(8, 32),
}  # fmt: skip


def scales(kind: str, blocks: _Array, exact: bool = False) -> dict[str, _Array]:
    """`scales` and, if the type has them, `minimums` of blocks uint8 [blocks, bytes] of a type in
    `FORMS`: [blocks, groups], all float16 if that is precise enough, else float32.

    Args:
        exact: float16 only if the blocks have them so; then the dtype follows from the type.
    """
    found = _TYPES[kind].scales(blocks)
    parts = dict(zip(("scales", "minimums"), found))
    are_half = [each.dtype == np.float16 if exact else _fits_half(each) for each in found]
    dtype = np.float16 if all(are_half) else np.float32
    return {name: np.ascontiguousarray(each, dtype) for name, each in parts.items()}


def has_half_scales(kind: str) -> bool:
    """Whether blocks of a type have their scales, and minimums, as float16."""
    empty = np.empty((0, BLOCK_BYTES[kind]), np.uint8)
    return all(each.dtype == np.float16 for each in _TYPES[kind].scales(empty))


def weight(kind: str, blocks: _Array) -> _Array:
    """The quantized values of blocks uint8 [blocks, bytes] as kernels read them: bytes [blocks,
    bytes]. Of 4 bits, the low nibble has the even element."""
    starts = range(0, max(len(blocks), 1), _BLOCKS_AT_ONCE)
    return np.concatenate([_weight(kind, blocks[at : at + _BLOCKS_AT_ONCE]) for at in starts])


def _weight(kind: str, blocks: _Array) -> _Array:
    if kind in _PACKED:
        return _pairs_of_nibbles(blocks[:, _PACKED[kind].first :], _PACKED[kind].step)
    form, values = FORMS[kind], _TYPES[kind].values(blocks)
    if form.bits == 8:
        return (values.view(np.uint8) ^ 0x80).view(np.int8) if form.has_minimums else values
    pairs = (values if form.has_minimums else values + np.int8(8)).view("<u2")
    return np.asarray(pairs | pairs >> 4).astype(np.uint8)


def _fits_half(numbers: _Array) -> bool:
    """Whether float16 has numbers: the small ones relative to the largest."""
    if numbers.dtype == np.float16 or not numbers.any():
        return True
    return bool(2.0**-10 <= np.abs(numbers).max() <= _MOST)


# -- types ---------------------------------------------------------------------------------------
def _half(blocks: _Array, at: int) -> _Array:
    """The float16 at a byte of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _nibbles(packed: _Array) -> _Array:
    """All low nibbles of each block, then all high ones."""
    half = packed.shape[-1]
    nibbles = np.empty((*packed.shape[:-1], 2 * half), np.uint8)
    np.bitwise_and(packed, 15, out=nibbles[..., :half])
    np.right_shift(packed, 4, out=nibbles[..., half:])
    return nibbles


def _pairs_of_nibbles(packed: _Array, step: int) -> _Array:
    """Of each `step` bytes, whose low nibbles come before the high ones, bytes of two neighbours:
    uint8 [blocks, bytes]."""
    count, nbytes = packed.shape
    pairs = np.ascontiguousarray(packed).view("<u2").reshape(-1)  # numpy is quick in long loops
    halves = np.empty((count, nbytes // step, 2, step // 16), np.uint64)
    for half, shift in enumerate((0, 4)):
        joined = (pairs >> shift & 0xF | pairs >> 4 + shift & 0xF0).astype(np.uint8)
        halves[:, :, half] = joined.view(np.uint64).reshape(count, nbytes // step, step // 16)
    return halves.view(np.uint8).reshape(count, -1)


def _bits(packed: _Array, count: int) -> _Array:
    """Bit 0 of all bytes [..., bytes], then bit 1: [..., count, bytes]."""
    shifts = np.arange(count, dtype=np.uint8)[:, None]
    bits: _Array = packed[..., None, :] >> shifts & 1
    return bits


def _signed(values: _Array, offset: int = 0) -> _Array:
    signed: _Array = values.view(np.int8)
    return (signed - np.int8(offset) if offset else signed).reshape(len(values), -1)


def _fifth_bits(blocks: _Array, at: int) -> _Array:
    """16 for each element of a block whose bit is set in the 4 bytes at `at`."""
    bits: _Array = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << 4
    return bits


def _half_scale(b: _Array) -> tuple[_Array, ...]:
    return (_half(b, 0),)


def _half_scale_and_minimum(b: _Array) -> tuple[_Array, ...]:
    return _half(b, 0), _half(b, 2)


def _times(scale: _Array, factors: _Array) -> _Array:
    return scale.astype(np.float32) * factors.astype(np.float32)


def _pairs_of_bits(packed: _Array) -> _Array:
    """The 2-bit values of Q2_K and Q3_K, from 64 bytes: uint8 [blocks, 256]."""
    shifts = np.array((0, 2, 4, 6), np.uint8)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(len(packed), -1)


def _q2_k_scales(b: _Array) -> tuple[_Array, ...]:
    return _times(_half(b, 80), b[:, :16] & 15), -_times(_half(b, 82), b[:, :16] >> 4)


def _q3_k_values(b: _Array) -> _Array:
    high = _bits(b[:, :32], 8).reshape(len(b), -1)
    return _signed(_pairs_of_bits(b[:, 32:96]) | high << 2, 4)


def _q3_k_scales(b: _Array) -> tuple[_Array, ...]:
    low = np.concatenate((b[:, 96:104] & 15, b[:, 96:104] >> 4), 1)
    shifts = np.array((0, 2, 4, 6), np.uint8)[:, None]
    upper = (b[:, None, 104:108] >> shifts & 3).reshape(len(b), 16)
    return (_times(_half(b, 108), (low | upper << 4).astype(np.int8) - np.int8(32)),)


def _six_bit_scales(b: _Array) -> tuple[_Array, ...]:
    """Those of Q4_K and Q5_K: 8 scales and 8 minimums of 6 bits in 12 bytes."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), 1)
    minimums = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), 1)
    return _times(_half(b, 0), scales), -_times(_half(b, 2), minimums)


def _nibbles_by_32(packed: _Array) -> _Array:
    """32 low nibbles, then the high ones of the same bytes, and so on."""
    parts = packed.reshape(len(packed), -1, 1, 32)
    return np.concatenate((parts & 15, parts >> 4), 2).reshape(len(packed), -1)


def _q5_k_values(b: _Array) -> _Array:
    high = _bits(b[:, 16:48], 8).reshape(len(b), -1)
    return _signed(_nibbles_by_32(b[:, 48:]) | high << 4)


def _q6_k_values(b: _Array) -> _Array:
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), 2).reshape(len(b), 2, 4, 32)
    shifts = np.array((0, 2, 4, 6), np.uint8)[:, None]
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    return _signed(low | high << 4, 32)


def _iq4_xs_values(b: _Array) -> _Array:
    values: _Array = IQ4_VALUES[_nibbles(b[:, 8:].reshape(len(b), 8, 16))]
    return values.reshape(len(b), -1)


def _iq4_xs_scales(b: _Array) -> tuple[_Array, ...]:
    numbers = np.arange(8)
    low = b[:, 4 + numbers // 2] >> (numbers % 2 * 4).astype(np.uint8) & 15
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> (2 * numbers).astype(np.uint16) & 3
    factors = (low | high.astype(np.uint8) << 4).astype(np.int8) - np.int8(32)
    return (_times(_half(b, 0), factors),)


def _mxfp4_scales(b: _Array) -> tuple[_Array, ...]:
    return (np.ldexp(np.float32(1.0), b[:, :1].astype(np.int32) - 128).astype(np.float32),)


class _Type(NamedTuple):
    """How to read blocks: the quantized values, those of types with minimums 0 and above; the scales
    and, if there are any, the minimums [blocks, groups]."""

    values: Callable[[_Array], _Array]
    scales: Callable[[_Array], tuple[_Array, ...]] = _half_scale


_TYPES: Mapping[str, _Type] = {
    "Q4_0": _Type(lambda b: _signed(_nibbles(b[:, 2:]), 8)),
    "Q4_1": _Type(lambda b: _signed(_nibbles(b[:, 4:])), _half_scale_and_minimum),
    "Q5_0": _Type(lambda b: _signed(_nibbles(b[:, 6:]) | _fifth_bits(b, 2), 16)),
    "Q5_1": _Type(
        lambda b: _signed(_nibbles(b[:, 8:]) | _fifth_bits(b, 4)), _half_scale_and_minimum
    ),
    "Q8_0": _Type(lambda b: b[:, 2:].view(np.int8)),
    "Q2_K": _Type(lambda b: _signed(_pairs_of_bits(b[:, 16:80])), _q2_k_scales),
    "Q3_K": _Type(_q3_k_values, _q3_k_scales),
    "Q4_K": _Type(lambda b: _signed(_nibbles_by_32(b[:, 16:])), _six_bit_scales),
    "Q5_K": _Type(_q5_k_values, _six_bit_scales),
    "Q6_K": _Type(_q6_k_values, lambda b: (_times(_half(b, 208), b[:, 192:208].view(np.int8)),)),
    "IQ4_NL": _Type(lambda b: IQ4_VALUES[_nibbles(b[:, 2:])]),
    "IQ4_XS": _Type(_iq4_xs_values, _iq4_xs_scales),
    "MXFP4": _Type(lambda b: MXFP4_VALUES[_nibbles(b[:, 1:])], _mxfp4_scales),
}


class _Nibbles(NamedTuple):
    """Where the nibbles of a block begin, and in how many bytes low ones come before high ones."""

    first: int
    step: int


# Types whose nibbles are the values that kernels read.
_PACKED: Mapping[str, _Nibbles] = {
    "Q4_0": _Nibbles(2, 16), "Q4_1": _Nibbles(4, 16), "Q4_K": _Nibbles(16, 32)
}  # fmt: skip
