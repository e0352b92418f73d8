"""Softmax and log-softmax along any dim."""

from __future__ import annotations

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.declared import AUTO
from purevk.lower.lowering import Lowering
from purevk.lower.numbers import gcd4
from purevk.lower.rows import RowLoops, by_dim, reads_alone, spread, spread_columns
from purevk.ops.builder import Builder
from purevk.ops.facts import but_along
from purevk.ops.registry import Kernel, define, rewrite_node
from purevk.ops.shapes import is_empty, wrap
from purevk.tuning import DeviceTraits

NAME = "purevk.softmax"
PASSES = 2  # how often the kernel reads a row that registers do not hold


def _softmax_kernel_shape(
    x: TensorType, dim: int, log: bool = False, zero_rows: bool = False, dtype: DType | None = None
) -> TensorType:
    wrap(dim, x.rank)
    return x.with_dtype(dtype or x.dtype)


def _softmax_lower(lowering: Lowering, node: Node) -> None:
    x, out = lowering.operand(node.tensor("x")), lowering.operand(node.result)
    if is_empty(out.type):
        return
    at = wrap(node.int("dim"), len(x.dims))
    loops = RowLoops.of(x, out, at)
    if len(loops.sizes) > 3:
        x = dense(lowering, x)
        loops = RowLoops.of(x, out, at)
    sizes = loops.sizes or [1]
    x_strides, out_strides = loops.x_strides or [0], loops.out_strides or [0]
    rows, columns = loops.count, loops.length
    step, out_step = loops.x_step, loops.out_step
    contiguous = all(isinstance(s, int) and s == 1 for s in (step, out_step))
    adjacent = all(isinstance(s, int) and s == 1 for s in (x_strides[0], out_strides[0]))
    # Without shared memory one invocation takes a column. Columns must then be many, and short
    # enough for its loops.
    fit = lowering.traits.profile.has_fast_shared_memory or (
        _dims.upper(rows) >= 32 and reads_alone(lowering.traits, _dims.upper(columns), PASSES)
    )
    if adjacent and not contiguous and fit:
        vector = gcd4(
            sizes[0], x.offset, out.offset, step, out_step, *x_strides[1:], *out_strides[1:]
        )
        work = spread_columns(lowering.traits, rows, columns, vector, x.dtype.itemsize)
    else:
        vector = contiguous and gcd4(columns, x.offset, out.offset, *x_strides, *out_strides)
        work = spread(lowering.traits, rows, columns, vector, cache=True, passes=PASSES, short=True)
    params: dict[str, Size] = {
        "rows": rows,
        "columns": columns,
        **by_dim("x_stride", x_strides),
        **by_dim("out_stride", out_strides),
        **by_dim("size", sizes[:-1]),
    }
    if "COLUMN" in work.macros or not vector:
        params |= {"x_column": step, "out_column": out_step}
    # Float16 has neither the digits nor the range that GLSL's own exponential loses, bfloat16 has the
    # range. A GPU would take up to a third more time for digits that x - max has lost before.
    exponential = "exp" if out.dtype is DType.float16 else "pv_exp_half"
    if out.dtype is DType.float32 and not lowering.traits.profile.has_fast_shared_memory:
        exponential = "pv_exp"
    lowering.dispatch(
        "reduce/softmax.comp",
        {"x": x, "out": out},
        params,
        {
            "OUTER_DIMS": len(sizes),
            "LOG": int(node.bool("log")),
            "ZERO_ROWS": int(node.bool("zero_rows")),
            "EXP": exponential,
            "VEC4": int(vector),
            "TEXEL_X": AUTO,
            **work.macros,
        },
        local=work.local,
        grid=work.grid(_dims.ceil_div(rows, 4) if "COLUMN" in work.macros and vector else rows),
        flops=5 * x.type.numel,
    )


define(NAME, _softmax_kernel_shape, Kernel(_softmax_lower))


def _refuse(node: Node, traits: DeviceTraits) -> str | None:
    made = node.result.type.dtype
    return None if made.is_float else f"no kernel for {made.name}"


def _softmax(name: str, log: bool, *names: str) -> None:
    def shape(x: TensorType, dim: int, half_to_float: DType | bool | None = False) -> TensorType:
        """`half_to_float`: the dtype of the result, under another name of the operator."""
        wrap(dim, x.rank)
        if isinstance(half_to_float, DType):
            return x.with_dtype(half_to_float)
        return x.with_dtype(DType.float32 if half_to_float is True else x.dtype)

    def expand(builder: Builder, node: Node) -> Value:
        x = node.tensor("x")
        if not x.type.dtype.is_float:
            x = builder.aten._to_copy(x, node.result.type.dtype)
        if x.type.rank == 0:
            flat = builder.aten.view(x, (1,))
            made = builder.emit(NAME, flat, 0, log, False, node.result.type.dtype)
            return builder.aten.view(made, ())
        return builder.emit(NAME, x, node.int("dim"), log, False, node.result.type.dtype)

    rewrite_node(name, shape, *names, supports=_refuse, rowwise=but_along)(expand)


_softmax("aten._softmax.default", False, "aten.softmax.int")
_softmax("aten._log_softmax.default", True, "aten.log_softmax.int")
