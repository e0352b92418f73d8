"""Quantized weights as elements, for matmuls with many rows."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.lowering import Lowering, Operand
from purevk.ops.matmul.fragments import BLOCK, blocks_type
from purevk.ops.quantized.operands import dense_rows, texels_of, whole, whole_or_none
from purevk.ops.registry import Kernel, ShapeError, define
from purevk.ops.signatures import signature

BLOCKS = "purevk.weight_blocks"


def emit_dequantized(
    lowering: Lowering,
    weight: Operand,
    scales: Operand,
    minimums: Operand | None,
    out: Operand,
    sizes: tuple[Size, Size],
    form: tuple[int, bool, int],
    blocks: bool = False,
) -> None:
    """Appends the dispatch that dequantizes a weight with dense rows, to the dtype of `out`.

    Args:
        sizes: columns and terms of the product, which are rows and columns of the weight.
        form: the bits of a value, whether the high nibble comes first, and the values of a group (0:
            a row).
        blocks: the result is in the order of fragments.
    """
    (n, k), (bits, high_first, group) = sizes, form
    params: dict[str, Size] = {"N": n, "K": k, "ldw": weight.strides[0] // 4}
    params |= {"groups": scales.dims[1], "group": group or k, "offset_w": weight.offset // 4}
    local = lowering.traits.profile.workgroup_size
    tensors = {"w": weight, "scale": scales, "minimum": minimums}
    texels = texels_of(lowering, tensors, "r32ui")
    lowering.dispatch(
        "quantized/qdequantize.comp",
        {**tensors, **texels, "out": out},
        params,
        {
            "BITS": bits,
            "HIGH_FIRST": int(high_first),
            "BLOCKS": int(blocks),
            "MINIMUM": int(minimums is not None),
            "TEXELS": int(bool(texels)),
        },
        local=local,
        grid=lowering.linear_grid(n * (k // (16 if blocks else 8)), local),
    )


@signature("weight, scales, terms: int, bits: int, high_first, group: int, minimums=None")
def _shape(weight: TensorType, terms: int) -> TensorType:
    if terms % BLOCK or not isinstance(weight.dims[0], int) or weight.dims[0] % BLOCK:
        raise ShapeError(f"{terms} terms of {weight} are no blocks")
    return blocks_type(DType.float16, weight.dims[0], terms)


def _lower(lowering: Lowering, node: Node) -> None:
    weight = dense_rows(lowering, lowering.operand(node.tensor("weight")))
    scales, out = whole(lowering, node.tensor("scales")), lowering.operand(node.result)
    minimums = whole_or_none(lowering, node.optional_tensor("minimums"))
    grouped = not (isinstance(scales.dims[1], int) and scales.dims[1] == 1)
    form = (node.int("bits"), node.bool("high_first"), node.int("group") if grouped else 0)
    sizes = (_dims.specialize(weight.dims[0]), node.int("terms"))
    emit_dequantized(lowering, weight, scales, minimums, out, sizes, form, True)


# The weight of a `purevk.quantized_matmul` with `terms` terms as halves in the order of fragments, as
# its right operand.
define(BLOCKS, _shape, Kernel(_lower), transient=True)
