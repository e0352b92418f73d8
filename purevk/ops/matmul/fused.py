"""What matmuls do beside multiplying, as attributes of their nodes.

- `norm`, `eps`: the rows are divided by their root mean square, and multiplied by the weight of a norm.
- `epilogue`, `extras`: a pointwise program of each sum; with `pair`, of two sums in columns that are so
  far apart.
- `epilogue` of type `ToCache`, `caches`: pairs rotate, and some are written to caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, dense_operand
from purevk.lower.epilogue import Epilogue, matrix_epilogue
from purevk.lower.expression import ROUND, Expression
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4
from purevk.ops.registry import ShapeError

_FLOATS = (DType.float32, DType.float16, DType.bfloat16)


@dataclass(frozen=True)
class ToCache:
    """An epilogue that does what `purevk.rotate_to_cache` does. The columns are heads of queries, keys
    and values of one batch, `pair` is half a head, and the extras are cos, sin and index.

    Attributes:
        start: the row of cos and sin for row 0.
        dim: that of the positions in the caches [1, T, G, D] or [1, G, T, D].
    """

    start: int
    dim: int

    def queries(self, product: TensorType, keys: TensorType, values: TensorType) -> TensorType:
        """The type of the rotated queries [1, S, H, D] in the columns of a product."""
        if any(cache.dims[0] != 1 or cache.rank != 4 for cache in (keys, values)):
            raise ShapeError(f"cannot write rows of {product} to {keys} and {values}")
        rows, columns = product.dims
        width, heads = keys.dims[3], keys.dims[3 - self.dim]
        return product.with_dims((1, rows, columns // width - 2 * heads, width))


def stored_type(
    product: TensorType,
    epilogue: Expression | ToCache | None,
    pair: int = 0,
    caches: tuple[TensorType, ...] = (),
) -> TensorType:
    """The type of what is stored of a product [..., N]. With `pair`, of each 2 * pair columns the second
    half belongs to the first, and a program, whose inputs 0 and 1 they are, makes one of two."""
    if isinstance(epilogue, ToCache):
        return epilogue.queries(product, *caches)
    if pair:
        *lead, columns = product.dims
        if epilogue is None or columns % (2 * pair) or pair % 4:
            raise ShapeError(f"no pairs of {pair} columns of {product}")
        product = product.with_dims((*lead, columns // 2))
    return product if epilogue is None else product.with_dtype(epilogue.dtypes[epilogue.outputs[0]])


def is_fused(node: Node) -> bool:
    """Whether a matmul does what only the kernels of few rows and those that read fragments do."""
    return node.arg("norm") is not None or node.int("pair") > 0


def takes_program(node: Node) -> bool:
    """Whether a matmul can have a pointwise program as its epilogue."""
    return not isinstance(node.arg("epilogue"), ToCache)


class Fusion(NamedTuple):
    """What the kernel of a node does beside multiplying.

    Attributes:
        norm: the weight of the norm, or None.
        eps: that of the norm.
        out: the result, or the queries of it, as rows.
        epilogue: what is done with the sums.
        pair: the distance of two columns of a pair, or 0.
        vector: whether vectors of 4 are stored.
    """

    norm: Operand | None
    eps: float
    out: Operand
    epilogue: Epilogue
    pair: int
    vector: bool

    @property
    def macros(self) -> dict[str, str | int]:
        """Those of the templates of few rows."""
        return {"VEC4_OUT": int(self.vector), "PAIRED": int(self.pair > 0)}

    @property
    def params(self) -> dict[str, Size]:
        """Those of the templates of few rows."""
        params: dict[str, Size] = {"ldo": self.out.strides[0]}
        params |= {"pair": self.pair} if self.pair else {}
        return params | ({} if self.norm is None else {"eps_bits": bits_of(self.eps)})


def fusion_of(
    lowering: Lowering, node: Node, sizes: tuple[Size, Size] | None = None, ahead: bool = False
) -> Fusion:
    """What the kernel of a node with all these parameters does; `ahead` as in `make_epilogue`. `sizes`
    are those of the result, if it is in the order of fragments."""
    out, pair = lowering.operand(node.result), node.int("pair")
    if isinstance(node.arg("epilogue"), ToCache):
        out, epilogue, vector = _flat(out), _to_caches(lowering, node, out), True
    else:
        if sizes is not None:
            out = Operand(out.storage, Layout.dense(sizes), TensorType(out.dtype, sizes))
        vector = gcd4(out.dims[1], out.offset)
        epilogue = matrix_epilogue(lowering, node, out, vector, paired=pair > 0, ahead=ahead)
    weight = node.optional_tensor("norm")
    norm = None if weight is None else _aligned(lowering, weight)
    return Fusion(norm, node.float("eps"), out, epilogue, pair, vector)


def _to_caches(lowering: Lowering, node: Node, out: Operand) -> Epilogue:
    to_cache = node.attribute("epilogue", ToCache)
    cos, sin, index = (_aligned(lowering, operand) for operand in node.tensors("extras"))
    keys, values = (lowering.operand(cache) for cache in node.tensors("caches"))
    dim = to_cache.dim
    return Epilogue(
        {
            "TO_CACHE": "1",
            "HEAD_WIDTH": str(_dims.specialize(out.dims[3])),
            "QUERIES": str(_dims.specialize(out.dims[2])),
            "KEY_HEADS": str(_dims.specialize(keys.dims[3 - dim])),
            "CACHE_ROWS": str(keys.dims[dim]),
            "CACHE_ROW": str(keys.strides[dim]),
            "CACHE_HEAD": str(keys.strides[3 - dim]),
            "FIRST_ANGLE": str(to_cache.start),
            "COS_OFFSET": str(cos.offset),
            "SIN_OFFSET": str(sin.offset),
            "POSITIONS_OFFSET": str(index.offset),
            "POSITION_WORDS": str(index.dtype.itemsize // 4),
            "ROUND_OUT(v)": ROUND.get(out.dtype, "$0").replace("$0", "v"),
        },
        {"cos": cos, "sin": sin, "positions": index, "keys": keys, "values": values},
    )


def _flat(out: Operand) -> Operand:
    """Heads [1, S, H, D] as rows [S, H * D]."""
    _, rows, heads, width = out.dims
    columns = heads * width
    type = TensorType(out.dtype, (rows, columns))
    return Operand(out.storage, Layout(out.offset, (columns, 1)), type)


def _aligned(lowering: Lowering, value: Value) -> Operand:
    """A value as a dense operand whose first element is at a known multiple of 4."""
    operand = dense_operand(lowering, value)
    known = isinstance(operand.offset, int) and gcd4(operand.offset)
    return operand if known else dense(lowering, operand)


def takes_caches(q: Value, cos: Value, sin: Value, start: Size, keys: Value, values: Value) -> bool:
    """Whether a matmul can do what `purevk.rotate_to_cache` does with these: its strides and sizes are
    part of the shader's text."""
    width = q.type.dims[3]
    return (
        q.type.dims[0] == 1
        and isinstance(start, int)
        and isinstance(width, int)
        and width % 8 == 0
        and all(cache.type.is_static for cache in (keys, values))
        and all(value.type.dtype in _FLOATS for value in (q, cos, sin, keys, values))
        and keys.type.dtype is values.type.dtype
    )
