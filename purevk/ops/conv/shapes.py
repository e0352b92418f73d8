"""Result sizes of convolutions, and which convolutions have a kernel."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.ops.matmul.matmul import supports_float
from purevk.ops.registry import ShapeError
from purevk.ops.shapes import pair
from purevk.tuning import DeviceTraits


def convolved_size(size: Size, kernel: Size, stride: int, padding: int, dilation: int) -> Size:
    return (size + (2 * padding - dilation * (kernel - 1) - 1)) // stride + 1


def transposed_size(
    size: Size, kernel: Size, stride: int, padding: int, dilation: int, extra: int
) -> Size:
    return (size - 1) * stride + (dilation * (kernel - 1) + 1 + extra - 2 * padding)


CONVOLUTION = "x, weight, bias, stride, padding, dilation, transposed, output_padding, groups: int"
"""The parameters of `aten.convolution`."""


def convolution_shape(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
) -> TensorType:
    spatial = weight.rank - 2
    if x.rank not in (spatial + 1, spatial + 2) or spatial < 1:
        raise ShapeError(f"cannot convolve {x} with {weight}")
    lead, at = x.dims[: x.rank - spatial - 1], x.rank - spatial
    channels = weight.dims[0] if transposed else weight.dims[1] * groups
    if not _dims.assume(x.dims[at - 1], "==", channels):
        raise ShapeError(
            f"convolution of {x} with {weight} in {groups} groups: {channels} channels are expected"
        )
    stride, padding, dilation = (
        pair(stride, spatial),
        pair(padding, spatial),
        pair(dilation, spatial),
    )
    extra = pair(output_padding or (0,), spatial)
    sizes: list[Size] = []
    for d in range(spatial):
        kernel = weight.dims[2 + d]
        if transposed:
            sizes.append(
                transposed_size(
                    x.dims[at + d], kernel, stride[d], padding[d], dilation[d], extra[d]
                )
            )
        else:
            sizes.append(convolved_size(x.dims[at + d], kernel, stride[d], padding[d], dilation[d]))
    out = weight.dims[1] * groups if transposed else weight.dims[0]
    if bias is not None and isinstance(out, int):
        numbers = bias.numel
        if isinstance(numbers, int) and numbers < out:
            raise ShapeError(f"a bias of {numbers} numbers for {out} channels")
    return x.with_dims((*lead, out, *sizes))


def refuse_convolution(node: Node, traits: DeviceTraits) -> str | None:
    weight = node.tensor("weight").type
    if weight.rank > 5:
        return f"no kernel for a convolution of {weight.rank - 2} dims"
    dtypes = {value.type.dtype for value in node.inputs}
    own = dtypes in ({DType.int64}, {DType.int32}) or node.tensor("x").type.dtype is DType.float64
    return None if own else supports_float(node, traits)
