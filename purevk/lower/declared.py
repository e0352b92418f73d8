"""Tensors of a dispatch, and what it need not pass of them, because the template declares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from purevk.dtypes import DType
from purevk.ir import Layout, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.numbers import gcd4
from purevk.shaders.interface import KernelInterface, TemplateInterface

AUTO = "auto"  # as the text of a macro TEXEL_X: a texel buffer where the device reads it faster


@dataclass(frozen=True)
class Operand:
    """A tensor as a kernel sees it: dims, and their layout in the bytes of `storage`."""

    storage: Value
    layout: Layout
    type: TensorType

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def dims(self) -> tuple[Size, ...]:
        return self.type.dims

    @property
    def strides(self) -> tuple[Size, ...]:
        return self.layout.strides

    @property
    def offset(self) -> Size:
        return self.layout.offset

    def aligned(self, count: int = 4) -> bool:
        """Whether the offset and all strides but that of the last dim are multiples of `count`
        elements, and the last dim is dense."""
        if not self.dims or (self.strides[-1] != 1 and self.dims[-1] != 1):
            return False
        outer = [stride for size, stride in zip(self.dims[:-1], self.strides[:-1]) if size != 1]
        return all(_dims.gcd_of(number) % count == 0 for number in (self.offset, *outer))


Buffers: TypeAlias = dict[str, tuple[Operand | Value, str]]
Tensor: TypeAlias = Operand | tuple[Operand | Value, str] | None
Texel: TypeAlias = Callable[[Operand, bool, bool], str]


class Form(Protocol):
    """The tile of a kernel."""

    @property
    def subgroup(self) -> int | None: ...

    def macros(self) -> Mapping[str, str | int]: ...


class EpilogueMacros(Protocol):
    """What `make_epilogue` gives."""

    @property
    def macros(self) -> Mapping[str, str]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...


def fill(
    texel_of: Texel,
    interface: TemplateInterface,
    tensors: Mapping[str, Tensor],
    text: dict[str, str],
    params: dict[str, Size],
) -> tuple[Buffers, KernelInterface]:
    """The buffers of a dispatch with their modes, and what its kernel takes. Adds to macros and
    parameters what the template declares of a tensor `x` and they lack (of one with a mode, neither
    T_X nor TEXEL_X):

    - macro X or HAS_X: whether the tensor is there, 0 or 1.
    - macro T_X: its type in GLSL.
    - macro TEXEL_X: the form of the texel buffer that it is read from, if it is, in templates with
      the macro VEC4_X, or where the caller passes AUTO. It is read as vec4s if VEC4_X is 1, or if
      there is none VEC4; a bias if VEC4_OUT is.
    - parameter offset_x or x_offset, or offset_o of `out`: its offset; 0 without the tensor.

    Args:
        texel_of: `Lowering.texel`.
    """
    modes: dict[str, str] = {}
    for name, operand in tensors.items():
        flag, kind, texel = name.upper(), f"T_{name.upper()}", f"TEXEL_{name.upper()}"
        for macro in (flag, f"HAS_{flag}"):
            if macro in interface.macros:
                text.setdefault(macro, str(int(operand is not None)))
        if operand is None or isinstance(operand, tuple):
            continue
        if kind in interface.macros:
            text.setdefault(kind, operand.dtype.glsl)
        own = f"VEC4_{flag}"
        declares = texel in interface.macros and (own in interface.macros or name == "bias")
        declares = declares and text.get(f"VEC8_{flag}", "0") == "0"  # words of 8 elements
        if text.get(texel, AUTO if declares else "") == AUTO:
            modes[name] = _texel(texel_of, own if own in interface.macros else "", operand, text)
            text[texel] = str(texel_form(modes[name]))
    kernel = interface.kernel(text)
    buffers: Buffers = {}
    for name, each in tensors.items():
        tensor, mode = each if isinstance(each, tuple) else (each, "")
        for word in (f"offset_{name}", f"{name}_offset", *(("offset_o",) * (name == "out"))):
            if word in kernel.params:
                params.setdefault(word, tensor.offset if isinstance(tensor, Operand) else 0)
        if tensor is not None:
            slot = kernel.buffers.get(name)
            access = slot.access if slot is not None else "r"
            buffers[name] = tensor, mode or access + modes.get(name, "")
    return buffers, kernel


def _texel(texel_of: Texel, own: str, operand: Operand, text: Mapping[str, str]) -> str:
    """What to add to the mode of a tensor whose template can read it from a texel buffer. `own`: the
    macro for its vectors."""
    vector = text.get(own or ("VEC4_OUT" if "VEC4_OUT" in text else "VEC4"), "0") != "0"
    reads = operand.dtype.is_float and (not vector or gcd4(operand.offset))
    return texel_of(operand, vector, bool(own)) if reads else ""


def texel_form(kind: str) -> int:
    """TEXEL_* of a kernel that reads bfloat16 from texel buffers, by what `Lowering.texel` gave: 0 for
    a storage buffer, 1 for floats, 2 for the bits of bfloat16."""
    return 0 if not kind else 2 if kind.endswith("16ui") else 1
