"""Positions in sorted sequences: bucketize, searchsorted, isin."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Scalar, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.map import coordinates
from purevk.ops.builder import Builder
from purevk.ops.map import mapped
from purevk.ops.promotion import promote_types, result_type
from purevk.ops.registry import rewrite
from purevk.ops.signatures import signature
from purevk.ops.sort.sort import sort


def _bisect(after: str, count: Size) -> str:
    """Statements that count, by bisection, the elements of a sorted row before a value.

    They look at the elements at which torch looks, in its order: the result for rows with NaN, or
    out of order, depends on it.

    Args:
        after: the condition that the result is above `m`, an index.
    """
    if not isinstance(count, int):
        return f"LOOPS(loop(32)) BISECT(count, {after}) r = T_R(low);"
    # Every value takes as many steps, so no invocation waits for others, and several searches can
    # overlap.
    steps = [f"if (low < high) BISECT_STEP({after})"] * count.bit_length()
    return " ".join(("int low = 0, high = count;", *steps, "r = T_R(low);"))


def _is_before(right: bool, row: str, value: str) -> str:
    """Whether an element comes before a value. Not `<`: torch takes NaN for less than all."""
    return f"!({row} {'>' if right else '>='} {value})"


def _same_type(builder: Builder, x: Value | Scalar, y: Value) -> tuple[Value, Value]:
    """Both as tensors of the dtype that torch compares them in. A number takes that of the tensor."""
    if not isinstance(x, Value):
        dtype = result_type((x, y.type))
        x = builder.aten.scalar_tensor(x, dtype)
    else:
        dtype = promote_types(x.type.dtype, y.type.dtype)
    x, y = (
        value if value.type.dtype is dtype else builder.aten._to_copy(value, dtype)
        for value in (x, y)
    )
    return x, y


def _bucket_shape(
    x: TensorType | Scalar, boundaries: TensorType, out_int32: bool = False, right: bool = False
) -> TensorType:
    dims = x.dims if isinstance(x, TensorType) else ()
    return TensorType(DType.int32 if out_int32 else DType.int64, dims)


@rewrite("aten.bucketize.Tensor", _bucket_shape, "aten.bucketize.Scalar")
def _bucketize(
    builder: Builder,
    node: Node,
    x: Value | Scalar,
    boundaries: Value,
    out_int32: bool,
    right: bool,
) -> Value:
    x, boundaries = _same_type(builder, x, boundaries)
    value = f"X({coordinates(x.type.rank)})"
    count = boundaries.type.dims[0]
    body = _bisect(_is_before(right, "ROW(m)", value), count)
    inputs = {"X": x, "ROW": boundaries}
    return mapped(builder, body, inputs, node.result.type, numbers={"count": count})


@signature("sorted_sequence, x, out_int32=False, right=False, side=None, sorter=None")
def _search_shape(
    sorted_sequence: TensorType, x: TensorType | Scalar, out_int32: bool, right: bool
) -> TensorType:
    return _bucket_shape(x, sorted_sequence, out_int32, right)


@rewrite("aten.searchsorted.Tensor", _search_shape, "aten.searchsorted.Scalar")
def _search(
    builder: Builder,
    node: Node,
    rows: Value,
    x: Value | Scalar,
    out_int32: bool,
    right: bool,
    side: str | None,
    sorter: Value | None,
) -> Value:
    right = bool(right) or side == "right"
    if sorter is not None:
        rows = builder.aten.gather(rows, dim=-1, index=sorter)
    if rows.type.rank == 1 or not isinstance(x, Value):
        return _bucketize(builder, node, x, rows, out_int32, right)
    x, rows = _same_type(builder, x, rows)
    rank = x.type.rank
    there = ", ".join([*(f"i{d}" for d in range(rank - 1)), "m"])
    count = rows.type.dims[-1]
    body = _bisect(_is_before(right, f"ROW({there})", f"X({coordinates(rank)})"), count)
    return mapped(builder, body, {"X": x, "ROW": rows}, node.result.type, numbers={"count": count})


_FEW_TESTS = 128  # that each element is compared with


def _isin_shape(
    x: TensorType | Scalar, tests: TensorType, assume_unique: bool = False, invert: bool = False
) -> TensorType:
    return TensorType(DType.bool, x.dims if isinstance(x, TensorType) else ())


@rewrite("aten.isin.Tensor_Tensor", _isin_shape, "aten.isin.Scalar_Tensor")
def _isin(
    builder: Builder,
    node: Node,
    x: Value | Scalar,
    tests: Value,
    assume_unique: bool,
    invert: bool,
) -> Value:
    x, tests = _same_type(builder, x, tests)
    tests = builder.aten.view(tests, (tests.type.numel,))
    found, other = (0, 1) if invert else (1, 0)
    if _dims.upper(tests.type.dims[0]) > _FEW_TESTS:
        ordered = sort(builder, tests, 0, False)[0]
        value, last = f"X({coordinates(x.type.rank)})", "min(low, count - 1)"
        # By `<`: NaN, which is last and equals nothing, comes before no value.
        search = _bisect(f"ROW(m) < {value}", tests.type.dims[0])
        body = f"{search} r = ROW({last}) == {value} ? {found} : {other};"
        return mapped(
            builder,
            body,
            {"X": x, "ROW": ordered},
            node.result.type,
            numbers={"count": tests.type.dims[0]},
        )
    at = coordinates(x.type.rank)
    body = (
        "LOOPS(loop(tests_size_0))"
        f" FIND_ANY(j, 0, tests_size_0, TESTS(j) == X({at}), {found}, {other})"
    )
    return mapped(builder, body, {"X": x, "TESTS": tests}, node.result.type)
