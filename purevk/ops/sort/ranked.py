"""One element of each row, where rows are too long to read them again and again: by sorting them."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, Value
from purevk.ir import dims as _dims
from purevk.lower.elements import acc_of
from purevk.lower.map import coordinates
from purevk.ops.builder import Builder
from purevk.ops.map import mapped_all
from purevk.ops.reduce.reduction import NAME as REDUCE
from purevk.ops.registry import in_parts
from purevk.ops.sort.selection import NAME as SELECT
from purevk.ops.sort.selection import reads_too_long
from purevk.ops.sort.sort import NAME as SORT
from purevk.tuning import DeviceTraits


def select_by_sorting(builder: Builder, node: Node, keys: Value) -> tuple[Value, Value]:
    """`purevk.select` by the order of `keys`, where NaNs come last."""
    x, dim, rank = node.tensor("x"), node.int("dim"), node.str("rank")
    index, length = node.dtype("index"), x.type.dims[dim]
    _, order = builder.emit_all(SORT, keys, dim, False, length, index)

    def at(index: str) -> str:
        return coordinates(x.type.rank, **{f"d{dim}": index})

    inputs, numbers = {"X": x, "ORDER": order}, {"number": node.size("number")}
    found = "number - 1"
    if rank != "kth":
        nans = builder.emit(REDUCE, builder.aten.isnan(x), "sum", (dim,), True, DType.int32)
        inputs, numbers = {**inputs, "NANS": nans}, {"count": length}
        some = f"int(NANS({at('0')}))"
        found = f"max((count - {some} - 1) / 2, 0)"
        if rank == "median":
            found = f"{some} > 0 ? count - {some} : (count - 1) / 2"
    body = f"int k = {found}; r1 = int(ORDER({at('k')})); r = X({at('r1')});"
    values, positions = (value.type for value in node.results)
    types = (values, positions.with_dtype(DType.int32))
    value, position = mapped_all(builder, body, inputs, *types, numbers=numbers)
    return value, builder.aten._to_copy(position, positions.dtype)


def _sort_long_rows(builder: Builder, node: Node) -> tuple[Value, Value]:
    return select_by_sorting(builder, node, node.tensor("x"))


def _is_long(node: Node, traits: DeviceTraits) -> bool:
    x = node.tensor("x").type
    length: Size = x.dims[node.int("dim")]
    return reads_too_long(traits, _dims.upper(length), acc_of(x.dtype) == "int64_t")


in_parts(SELECT, _sort_long_rows, _is_long)
