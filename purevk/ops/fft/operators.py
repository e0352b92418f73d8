"""torch's Fourier transforms: `torch.fft` and `torch.stft` are decomposed to three operators."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Dim, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.complex.split import BY_RULE, Made, NoKernelError, Pairs, Split, apply_by
from purevk.ops.fft.transform import fourier, scale_of
from purevk.ops.registry import ShapeError, define
from purevk.ops.shapes import wrap


def _complex(dtype: DType) -> DType:
    if dtype.is_complex:
        return dtype
    made = dtype.complex_dtype
    if made is None:
        raise ShapeError(f"no Fourier transform of {dtype.name}")
    return made


def _real_to_complex_shape(
    x: TensorType, dim: Sequence[int], normalization: int, onesided: bool
) -> TensorType:
    sizes, last = list(x.dims), wrap(dim[-1], x.rank)
    if onesided:
        sizes[last] = sizes[last] // 2 + 1
    return TensorType(_complex(x.dtype), tuple(sizes))


def _complex_to_real_shape(
    x: TensorType, dim: Sequence[int], normalization: int, last_dim_size: Size
) -> TensorType:
    sizes = list(x.dims)
    sizes[wrap(dim[-1], x.rank)] = last_dim_size
    return TensorType(x.dtype.component, tuple(sizes))


def _complex_shape(
    x: TensorType, dim: Sequence[int], normalization: int, forward: bool
) -> TensorType:
    return x


define("aten._fft_r2c.default", _real_to_complex_shape, BY_RULE)
define("aten._fft_c2r.default", _complex_to_real_shape, BY_RULE)
define("aten._fft_c2c.default", _complex_shape, BY_RULE)


def _length(size: Size) -> int:
    """The length of a transform. One that only a call knows gets a specialization for each."""
    length = _dims.specialize(size)
    if length >= 1 << 27:
        raise NoKernelError(f"no kernel for Fourier transforms of {length} elements")
    return length


def _dims_of(node: Node) -> tuple[int, ...]:
    dims = tuple(wrap(dim, node.tensor("x").type.rank) for dim in node.ints("dim"))
    if not dims:
        raise NoKernelError("no kernel for a Fourier transform along no dims")
    return dims


def _is_empty(node: Node) -> bool:
    sizes = (*node.tensor("x").type.dims, *node.result.type.dims)
    return any(not isinstance(size, Dim) and size == 0 for size in sizes)


def _empty(split: Split, node: Node) -> Value:
    """The result of a transform of no elements."""
    type = node.result.type
    if not type.dtype.is_complex:
        return split.builder.aten.zeros(type.dims, type.dtype)
    return split.builder.aten.zeros((*type.dims, 2), type.dtype.component)


@apply_by("aten._fft_r2c.default")
def _real_to_complex(split: Split, node: Node) -> Made:
    if _is_empty(node):
        return Pairs(_empty(split, node))
    x, dims = node.tensor("x"), _dims_of(node)
    lengths = {dim: _length(x.type.dims[dim]) for dim in dims}
    scale = scale_of(node.int("normalization"), [lengths[dim] for dim in dims])
    *others, last = dims
    out = lengths[last] // 2 + 1 if node.bool("onesided") else lengths[last]
    made = fourier(
        split.builder,
        x,
        last,
        lengths[last],
        source="real",
        out=out,
        scale=1.0 if others else scale,
    )
    return Pairs(_along(split, made, others, lengths, False, scale))


@apply_by("aten._fft_c2c.default")
def _complex_to_complex(split: Split, node: Node) -> Made:
    if _is_empty(node):
        return Pairs(_empty(split, node))
    x, dims = node.tensor("x"), _dims_of(node)
    lengths = {dim: _length(x.type.dims[dim]) for dim in dims}
    scale = scale_of(node.int("normalization"), [lengths[dim] for dim in dims])
    inverse = not node.bool("forward")
    return Pairs(_along(split, split.pairs(x), dims[::-1], lengths, inverse, scale))


@apply_by("aten._fft_c2r.default")
def _complex_to_real(split: Split, node: Node) -> Made:
    if _is_empty(node):
        return _empty(split, node)
    x, dims = node.tensor("x"), _dims_of(node)
    *others, last = dims
    lengths = {dim: _length(x.type.dims[dim]) for dim in others}
    lengths[last] = _length(node.size("last_dim_size"))
    scale = scale_of(node.int("normalization"), [lengths[dim] for dim in dims])
    made = _along(split, split.pairs(x), others, lengths, True, 1.0)
    return fourier(
        split.builder,
        made,
        last,
        lengths[last],
        source="hermitian",
        real=True,
        inverse=True,
        scale=scale,
    )


def _along(
    split: Split,
    pairs: Value,
    dims: Sequence[int],
    lengths: dict[int, int],
    inverse: bool,
    scale: float,
) -> Value:
    """Transforms along several dims, of which the last one scales the result."""
    for dim in dims:
        pairs = fourier(
            split.builder,
            pairs,
            dim,
            lengths[dim],
            inverse=inverse,
            scale=scale if dim == dims[-1] else 1.0,
        )
    return pairs
