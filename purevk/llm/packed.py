"""Weights that quantization has packed, as folders of safetensors files have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from purevk.errors import UnsupportedProgramError
from purevk.llm import files
from purevk.llm.files import damaged
from purevk.llm.safetensors import Computed, Stored, quantized

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def of_words(
    base: str, stored: Mapping[str, Stored], is_awq: bool, bits: int, plus: int
) -> Computed:
    """A matrix of AWQ or GPTQ. Integers of AWQ are packed along the rows of the weight, in another
    order; those of GPTQ along the columns. Zero points of GPTQ are stored without 1."""
    try:
        weight, zeros, scales = (
            stored[f"{base}.{part}"] for part in ("qweight", "qzeros", "scales")
        )
        count, groups, rows = 32 // bits, scales.dims[0], scales.dims[1]
        columns = weight.dims[0] * (1 if is_awq else count)
        ok = columns % groups == 0 and zeros.dims == (groups, rows // count)
        ok = ok and weight.dims == (
            (columns, rows // count) if is_awq else (columns // count, rows)
        )
        if not ok or {weight.type, zeros.type} != {"I32"}:
            raise ValueError(f"{weight.dims}, {zeros.dims} and {scales.dims}")
    except (KeyError, ValueError, IndexError) as error:
        raise damaged(base, f"its packed weight: {error!r}") from None
    shifts = np.arange(count, dtype=np.uint32) * bits
    order = np.argsort(_AWQ_ORDER) if is_awq and bits == 4 else np.arange(count)

    def integers(packed: Stored) -> np.ndarray:
        """The last dim is unpacked."""
        parts = packed.array("<u4")[..., None] >> shifts & ((1 << bits) - 1)
        return parts[..., order].astype(np.uint8).reshape(packed.dims[0], -1)

    def of_weight() -> np.ndarray:
        if is_awq:
            return np.ascontiguousarray(integers(weight).T)
        parts = weight.array("<u4")[:, None, :] >> shifts[:, None] & ((1 << bits) - 1)
        return np.ascontiguousarray(parts.reshape(columns, rows).astype(np.uint8).T)

    def minimums() -> np.ndarray:
        return np.ascontiguousarray(-(scales.floats() * (integers(zeros) + np.float32(plus))).T)

    parts = {"scales": lambda: np.ascontiguousarray(scales.floats().T), "minimums": minimums}
    return quantized(base, (rows, columns), bits, columns // groups, of_weight, parts)


_TORCHAO = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "Float8Tensor")


def of_torchao(base: str, stored: Mapping[str, Stored]) -> files.Tensor:
    """A matrix that torchao has packed: integers with zero points, those of 4 bits with minimums, or
    8-bit floats. What it does to activations is left out.

    Raises:
        UnsupportedProgramError: the kind of the tensor is not known.
        FileFormatError: its parts do not go together.
    """
    values = stored[f"{base}._weight_qdata"]
    try:
        described = json.loads(values.about or "{}")
        kind, about = described.get("_type"), described.get("_data", {})
        scales, zeros = (stored.get(f"{base}._weight_{part}") for part in ("scale", "zero_point"))
        if kind not in _TORCHAO or f"{base}._weight_act_pre_scale" in stored or scales is None:
            raise UnsupportedProgramError(
                f"the tensor {base}.weight is {kind!r} of torchao",
                why=f"known: {', '.join(_TORCHAO)}, without a scale of activations",
                next="dequantize the model with torchao, and save it again; or load it with"
                " transformers, and compile it with purevk.compile",
            )
        if kind == "Float8Tensor":
            return Stored(f"{base}.weight", values.type, values.dims, values.data, scales)
        is_int4 = kind == "Int4Tensor"
        rows, columns = values.dims[0], values.dims[1] * (2 if is_int4 else 1)
        groups = scales.dims[0 if is_int4 else 1]
        dims = (groups, rows) if is_int4 else (rows, groups)
        others = {each.dims for each in (scales, zeros) if each is not None}
        if others != {dims} or columns % groups or values.type not in ("I8", "U8"):
            raise ValueError(f"{values.dims}, {sorted(others)}")
        target = str(about.get("target_dtype", {}).get("_data", "int8"))
        bits = 4 if is_int4 or target in ("int1", "int2", "int3", "int4") else 8
        half = 1 << bits - 1
    except (AttributeError, ValueError, IndexError, ArithmeticError, RecursionError) as error:
        raise damaged(base, f"its packed weight: {error!r}") from None

    def integers() -> np.ndarray:
        codes = values.array("u1")
        if is_int4:  # the low nibble has the even column
            codes = np.stack((codes & 15, codes >> 4), -1).reshape(rows, columns)
        return np.asarray(codes + np.uint8(half) & np.uint8(2 * half - 1))

    def of_scales() -> np.ndarray:
        return np.ascontiguousarray(scales.floats().T if is_int4 else scales.floats())

    def minimums() -> np.ndarray:
        assert zeros is not None
        if is_int4:
            return np.ascontiguousarray((zeros.floats() - half * scales.floats()).T)
        return np.asarray(-of_scales() * (zeros.array("i1") + np.float32(half)), np.float32)

    parts = {"scales": of_scales}
    if zeros is not None and (is_int4 or zeros.array("i1").any()):
        parts["minimums"] = minimums
    return quantized(f"{base}.weight", (rows, columns), bits, columns // groups, integers, parts)


@dataclass(frozen=True)
class Mxfp4(files.BlockTensor):
    """Matrices of MXFP4 as gpt-oss has them: every `step`-th row from `first` on.

    Attributes:
        codes: U8 [..., rows, groups, 16], the low nibble has the even element.
        exponents: U8 [..., rows, groups].
    """

    name: str
    codes: Stored
    exponents: Stored
    first: int = 0
    step: int = 1

    @property
    def kind(self) -> str:
        return "MXFP4"

    @property
    def dims(self) -> tuple[int, ...]:  # type: ignore[override]
        *outer, rows, groups = self.exponents.dims
        if self.codes.dims != (*self.exponents.dims, 16) or rows % self.step:
            raise damaged(self.name, f"{self.codes.dims} with {self.exponents.dims}")
        return *outer, rows // self.step, 32 * groups

    def _blocks(self) -> np.ndarray:
        """As GGUF has them: the exponent, then elements whose nibbles are 16 apart."""
        codes, exponents = (
            each.array("u1")[:, self.first :: self.step] for each in (self.codes, self.exponents)
        )
        pairs = np.stack((codes & 15, codes >> 4), -1).reshape(-1, 32)
        packed = pairs[:, :16] | pairs[:, 16:] << 4
        return np.concatenate((exponents.reshape(-1, 1), packed), 1)
