"""Matmuls of few rows, as in decoding, with what comes before and after them in the same dispatch: a
root mean square norm of the rows, a gated activation, and rotary embeddings with the writes to a
cache.

They run `matmul_dot.comp` or `matmul_vec.comp`, or `matmul_dot_blocks.comp` if the weight is in the
order of fragments. With more rows, other templates are faster, and passes leave the parts alone.
"""

from __future__ import annotations

from dataclasses import replace

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense, dense_operand, packed
from purevk.lower.epilogue import Epilogue, matrix_epilogue
from purevk.lower.expression import ROUND, Expression
from purevk.lower.gpu_kernels import Dot, DotBlocks, Problem, Vector
from purevk.lower.gpu_tiles import choose_dot_blocks, prefers_few_rows
from purevk.lower.gpu_tiles import choose_few_rows as choose
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4, gcd8
from purevk.ops.matmul.choice import Batches, both_half, vector_macros
from purevk.ops.matmul.fragments import emit as emit_fragments
from purevk.ops.matmul.fragments import matrix_of
from purevk.ops.matmul.matmul import matmul_type
from purevk.ops.registry import Kernel, Operator, ShapeError, register
from purevk.tuning import DeviceTraits

NAME = "purevk.matmul_few_rows"
TO_CACHE = "purevk.matmul_to_cache"
FRAGMENTS_TO_CACHE = "purevk.fragments_to_cache"
MOST_SAVED = (
    2  # dispatches that such a matmul takes over: a norm before it, and what reads its columns
)
_FLOATS = (DType.float32, DType.float16, DType.bfloat16)


def choose_few_rows(
    traits: DeviceTraits,
    a: TensorType,
    b: TensorType,
    paired: bool,
    transposed: bool,
    saved: int = 0,
) -> Vector | Dot | None:
    """The tile for a matmul of these types; None if another template is faster.

    Args:
        paired: each workgroup computes pairs of columns.
        transposed: B is dense along its columns.
        saved: how many dispatches before and after the matmul become part of it.
    """
    (m, k), n = a.dims, b.dims[1]
    if not traits.profile.has_fast_shared_memory or k % 4 or (paired and n % 8):
        return None
    half = both_half(a.dtype, b.dtype)
    sizes = (_dims.upper(m), _dims.upper(n), _dims.upper(k))
    wide = transposed and k % (8 if half else 4) == 0
    bfloat16 = half and a.dtype is DType.bfloat16
    problem = Problem(*sizes, half=half, transposed=transposed, wide=wide, bfloat16=bfloat16)
    if not prefers_few_rows(traits, problem, saved):
        return None
    if paired and not transposed:
        problem = replace(problem, n=sizes[1] // 2)
    return choose(traits, problem, saved)


def _shape(
    a: TensorType,
    b: TensorType,
    bias: TensorType | None = None,
    scale: TensorType | None = None,
    eps: float = 0.0,
    pair: int = 0,
    epilogue: Expression | None = None,
    extras: tuple[TensorType, ...] = (),
) -> TensorType:
    """`a b + bias`, the rows of a normalized by `scale` and `eps` if there is a scale. b is a matrix, or
    one in the order of fragments, as a right operand (rank 3). With `pair`, of
    each 2 * pair columns the second half belongs to the first, and the epilogue, whose inputs 0 and
    1 they are, makes one column of two."""
    result = _product(a, b)
    return joined_pairs(result, pair, epilogue)


def joined_pairs(result: TensorType, pair: int, epilogue: Expression | None) -> TensorType:
    """The type of what an epilogue makes of the columns of a result, or (`pair`) of pairs of them."""
    if pair:
        if epilogue is None or result.dims[1] % (2 * pair) or pair % 4:
            raise ShapeError(f"no pairs of {pair} columns of {result}")
        result = result.with_dims((result.dims[0], result.dims[1] // 2))
    return result if epilogue is None else result.with_dtype(epilogue.dtypes[epilogue.outputs[0]])


def _product(a: TensorType, b: TensorType) -> TensorType:
    if a.rank != 2 or b.rank not in (2, 3):
        raise ShapeError(f"cannot multiply the rows of {a} by {b}")
    return matmul_type(a, b if b.rank == 2 else matrix_of(b))


def _lower(lowering: Lowering, node: Node) -> None:
    _emit(lowering, node, *epilogue_of(lowering, node))


def epilogue_of(lowering: Lowering, node: Node) -> tuple[Operand, int, Epilogue, bool]:
    """The result of a node with the parameters `pair`, `epilogue` and `extras`; the distance of two
    columns of a pair, or 0; the epilogue; and whether vectors of 4 are stored."""
    pair, out = node.int("pair"), lowering.operand(node.result)
    vector = gcd4(out.dims[1], out.offset)
    epilogue = matrix_epilogue(lowering, node, out, vector, paired=pair > 0)
    return out, pair, epilogue, vector


def _emit(
    lowering: Lowering, node: Node, out: Operand, pair: int, epilogue: Epilogue, vector: bool
) -> None:
    """Appends the dispatch of a node with the parameters `a`, `b`, `bias`, `scale` and `eps`."""
    a, b = lowering.operand(node.tensor("a")), lowering.operand(node.tensor("b"))
    bias, scale = (packed(lowering, node.optional_tensor(name)) for name in ("bias", "scale"))
    if scale is not None and not gcd4(scale.offset):
        scale = dense(lowering, scale)
    blocks = len(b.dims) == 3
    m, (k, n) = a.dims[0], (matrix_of(b.type) if blocks else b.type).dims
    columns = n // 2 if pair else n
    params: dict[str, Size] = {"pair": pair} if pair else {}
    macros: dict[str, str | int] = {"VEC4_A": 1, "VEC8_B": 1}
    form: Vector | Dot | DotBlocks | None
    if blocks:
        if a.strides[1] != 1 or not gcd4(a.strides[0], a.offset):
            a = dense(lowering, a)
        if not b.layout.is_contiguous(b.dims) or not gcd8(b.offset):
            b = dense(lowering, b)
        sizes = (_dims.upper(m), _dims.upper(columns), _dims.upper(k))
        bfloat16 = a.dtype is DType.bfloat16
        problem = Problem(*sizes, half=True, transposed=True, wide=True, bfloat16=bfloat16)
        form = choose_dot_blocks(lowering.traits, problem, pair)
    else:
        transposed = b.strides[0] == 1 and b.strides[1] != 1  # one column is dense along both dims
        if not transposed and (b.strides[1] != 1 or not isinstance(b.offset, int)):
            b = dense(lowering, b)
        ldb = b.strides[1] if transposed else b.strides[0]
        # How many dispatches it saves has been weighed by the pass.
        form = choose_few_rows(
            lowering.traits, a.type, b.type, bool(pair), transposed, saved=MOST_SAVED
        )
        dot = isinstance(form, Dot)
        whole = gcd8 if dot and a.dtype.itemsize == 2 else gcd4
        if a.strides[1] != 1 or not isinstance(a.offset, int) or not whole(a.strides[0], a.offset):
            a = dense(lowering, a)
        if form is None or (dot and not whole(ldb, b.offset)):
            # Sizes and layout are those that the pass has seen.
            raise ShapeError(f"{node.op} of {a.type} and {b.type}")
        vectors = gcd4(k, a.strides[0], a.offset), gcd4(k if transposed else n, ldb, b.offset)
        macros = vector_macros(b, *vectors, vector, wide=dot)
        if not dot:
            macros["B_TRANSPOSED"] = 0
        params |= {"ldb": ldb, **Batches().params}
    tensors = {"a": a, "b": b, "bias": bias, "out": out}
    if scale is not None:
        tensors["scale"] = scale
        params["eps_bits"] = bits_of(node.float("eps"))
    lowering.dispatch(
        form.template,
        tensors,
        {"M": m, "N": n, "K": k, "lda": a.strides[0], "ldo": out.strides[0], **params},
        {
            **macros,
            "VEC4_OUT": int(vector),
            "PAIRED": int(pair > 0),
            "NORM": int(scale is not None),
        },
        form=form,
        epilogue=epilogue,
        grid=form.grid(m, columns, 1),
        flops=2 * m * n * k,
    )


register(Operator(NAME, _shape, Kernel(_lower, epilogue=True)))


# -- with a cache --------------------------------------------------------------------------------
def _to_cache_shape(
    a: TensorType,
    b: TensorType,
    bias: TensorType | None,
    scale: TensorType | None,
    eps: float,
    cos: TensorType,
    sin: TensorType,
    start: int,
    keys: TensorType,
    values: TensorType,
    dim: int,
    index: TensorType,
) -> TensorType:
    """`purevk.rotate_to_cache` of the columns of `a b + bias`: heads of queries, keys and values of
    one batch. The result is the rotated queries [1, S, H, D]."""
    return queries_of(_product(a, b), keys, values, dim)


def queries_of(result: TensorType, keys: TensorType, values: TensorType, dim: int) -> TensorType:
    """The type of the queries in the columns of queries, keys and values."""
    width, heads = keys.dims[3], keys.dims[3 - dim]
    if any(each.dims[0] != 1 or each.rank != 4 for each in (keys, values)):
        raise ShapeError(f"cannot write rows of {result} to {keys} and {values}")
    queries = result.dims[1] // width - 2 * heads
    return result.with_dims((1, result.dims[0], queries, width))


def _to_cache_lower(lowering: Lowering, node: Node) -> None:
    out, store, pair = store_to_cache(lowering, node)
    _emit(lowering, node, out, pair, store, True)


def store_to_cache(lowering: Lowering, node: Node) -> tuple[Operand, Epilogue, int]:
    """The result of a node with the parameters `cos` to `index` of `purevk.matmul_to_cache`, as rows;
    how pairs are stored; and the distance of two columns of a pair."""
    out = lowering.operand(node.result)
    cos, sin, index = (_aligned(lowering, node.tensor(name)) for name in ("cos", "sin", "index"))
    keys, values = (lowering.operand(node.tensor(name)) for name in ("keys", "values"))
    width, dim = _dims.specialize(out.dims[3]), node.int("dim")
    heads = _dims.specialize(keys.dims[3 - dim])
    queries = _dims.specialize(out.dims[2])
    store = Epilogue(
        {
            "TO_CACHE": "1",
            "HEAD_WIDTH": str(width),
            "QUERIES": str(queries),
            "KEY_HEADS": str(heads),
            "CACHE_ROWS": str(keys.dims[dim]),
            "CACHE_ROW": str(keys.strides[dim]),
            "CACHE_HEAD": str(keys.strides[3 - dim]),
            "FIRST_ANGLE": str(node.int("start")),
            "COS_OFFSET": str(cos.offset),
            "SIN_OFFSET": str(sin.offset),
            "POSITIONS_OFFSET": str(index.offset),
            "POSITION_WORDS": str(index.dtype.itemsize // 4),
            "ROUND_OUT(v)": ROUND.get(out.dtype, "$0").replace("$0", "v"),
        },
        {"cos": cos, "sin": sin, "positions": index, "keys": keys, "values": values},
    )
    flat = Operand(
        out.storage,
        type(out.layout)(out.offset, (queries * width, 1)),
        TensorType(out.dtype, (out.dims[1], queries * width)),
    )
    return flat, store, width // 2


def _aligned(lowering: Lowering, value: Value) -> Operand:
    """A value as a dense operand whose first element is at a known multiple of 4."""
    operand = dense_operand(lowering, value)
    known = isinstance(operand.offset, int) and gcd4(operand.offset)
    return operand if known else dense(lowering, operand)


register(Operator(TO_CACHE, _to_cache_shape, Kernel(_to_cache_lower), mutates=(8, 9)))


def _fragments_to_cache_shape(
    a: TensorType,
    b: TensorType,
    rows: Size,
    bias: TensorType | None,
    cos: TensorType,
    sin: TensorType,
    start: int,
    keys: TensorType,
    values: TensorType,
    dim: int,
    index: TensorType,
) -> TensorType:
    """The same for any number of rows, with both operands in the order of fragments."""
    if a.rank != 3 or b.rank != 3 or a.dims[1:] != b.dims[1:] or a.dtype is not b.dtype:
        raise ShapeError(f"cannot multiply {a} by {b} in the order of fragments")
    return queries_of(TensorType(a.dtype, (rows, matrix_of(b).dims[1])), keys, values, dim)


def _fragments_to_cache_lower(lowering: Lowering, node: Node) -> None:
    out, store, pair = store_to_cache(lowering, node)
    emit_fragments(lowering, node, out, store, pair, out.strides[0])


register(
    Operator(
        FRAGMENTS_TO_CACHE,
        _fragments_to_cache_shape,
        Kernel(_fragments_to_cache_lower),
        mutates=(7, 8),
    )
)


def takes_caches(q: Value, cos: Value, sin: Value, start: Size, keys: Value, values: Value) -> bool:
    """Whether `purevk.matmul_to_cache` can do what `purevk.rotate_to_cache` does with these: its
    strides and sizes are part of the shader's text."""
    width = q.type.dims[3]
    return (
        q.type.dims[0] == 1
        and isinstance(start, int)
        and isinstance(width, int)
        and width % 8 == 0
        and all(each.type.is_static for each in (keys, values))
        and all(each.type.dtype in _FLOATS for each in (q, cos, sin, keys, values))
        and keys.type.dtype is values.type.dtype
    )
