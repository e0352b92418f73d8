"""Reductions over any dims."""

from __future__ import annotations

from typing import Any

from purevk.dtypes import DType
from purevk.ir import Node, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.epilogue import gcd4
from purevk.ops.lowering import Lowering
from purevk.ops.matmul import dense
from purevk.ops.promotion import float_type
from purevk.ops.registry import Kernel, Operator, Rewrite, register
from purevk.ops.rows import collapse, spread
from purevk.ops.shapes import reduced, wrap_all

# How an operator reduces: start, step, what is done to each element and to the sum.
_KINDS = {
    "sum": ("ACC(0)", "((a) + (b))", "(v)", "(a)"),
    "mean": ("ACC(0)", "((a) + (b))", "(v)", "(n > 0 ? a / float(n) : PV_NAN)"),
    "prod": ("ACC(1)", "((a) * (b))", "(v)", "(a)"),
    "amax": ("LOWEST", "pv_max(a, b)", "(v)", "(a)"),
    "amin": ("HIGHEST", "pv_min(a, b)", "(v)", "(a)"),
    "any": ("ACC(0)", "((a) | (b))", "(v)", "(a)"),
    "all": ("ACC(1)", "((a) & (b))", "(v)", "(a)"),
}
_EXTREMES = {
    "float": ("uintBitsToFloat(0xff800000u)", "uintBitsToFloat(0x7f800000u)"),
    "int": ("(-2147483647 - 1)", "2147483647"),
    "int64_t": ("PV_INT64_MIN", "PV_INT64_MAX"),
}
NAME = "purevk.reduce"


def _reduce_shape(x: TensorType, kind: str, dims: tuple[int, ...], keepdim: bool, dtype: DType) -> TensorType:
    return TensorType(dtype, reduced(x.dims, dims, keepdim))


def conversions(source: DType, target: DType, acc: str) -> dict[str, str]:
    """Macros that name element types and convert them to and from the computing type."""
    macros = {"T_X": source.glsl, "T_OUT": target.glsl, "ACC": acc}
    if source is DType.bool and acc != "bool":
        macros["FROM_X(v)"] = f"{acc}(v)"
    if DType.int64 in (source, target) or acc == "int64_t":
        macros["HAS_INT64"] = "1"
    if source.itemsize == 1 or target.itemsize == 1:
        macros["HAS_8BIT"] = "1"
    return macros


def _reduce_lower(lowering: Lowering, node: Node) -> None:
    x_value, kind, dims, _, _ = node.args
    x, out = lowering.operand(x_value), lowering.operand(node.result)
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    outer_dims = [d for d in range(len(x.dims)) if d not in dims]
    outer, (outer_steps,) = collapse([x.dims[d] for d in outer_dims], [x.strides[d] for d in outer_dims])
    inner, (inner_steps,) = collapse([x.dims[d] for d in dims], [x.strides[d] for d in dims])
    if len(outer) > 4 or len(inner) > 2:
        x = dense(lowering, x, [*outer_dims, *dims])
        outer, (outer_steps,) = collapse([x.dims[d] for d in outer_dims], [x.strides[d] for d in outer_dims])
        inner, (inner_steps,) = collapse([x.dims[d] for d in dims], [x.strides[d] for d in dims])
    acc = _computing(kind, x.dtype, out.dtype)
    start, combine, load, finish = _KINDS[kind]
    lowest, highest = _EXTREMES.get(acc, ("", ""))
    names = conversions(x.dtype, out.dtype, acc)
    if kind in ("any", "all") and x.dtype is not DType.bool:
        wide = x.dtype.acc
        names["FROM_X(v)"] = f"({wide}(v) != {wide}(0) ? 1 : 0)"
    macros: dict[str, Any] = {
        **names, "INIT": start.replace("LOWEST", lowest).replace("HIGHEST", highest),
        "COMBINE(a, b)": combine, "LOAD(v)": load, "FINISH(a, n)": finish,
        "OUTER_DIMS": max(len(outer), 1), "REDUCE_DIMS": max(len(inner), 1),
    }  # fmt: skip
    outer, outer_steps = list(reversed(outer)) or [1], list(reversed(outer_steps)) or [0]
    inner, inner_steps = inner or [1], inner_steps or [1]
    if len(inner) == 1:
        inner, inner_steps = [1, *inner], [0, *inner_steps]
    outputs = _dims.product(outer)
    unit = isinstance(inner_steps[1], int) and inner_steps[1] == 1
    fast_outer = isinstance(outer_steps[0], int) and outer_steps[0] == 1
    column = not unit and fast_outer or not unit and not lowering.traits.is_cpu
    if _dims.upper(inner[0] * inner[1]) > lowering.traits.max_iterations:
        column = False
    reads_vectors = x.dtype in (DType.float32, DType.float16, DType.int32)
    rest = [*outer_steps[1:], inner_steps[0], x.offset]
    if column:
        vector = reads_vectors and fast_outer and gcd4(outer[0], inner_steps[1], out.offset, *rest)
        local = 64
        per = _dims.ceil_div(outputs, 4) if vector else outputs
        macros.update({"COLUMN": 1, "VEC4": int(vector), "LOCAL": local})
        grid = lowering.linear_grid(per, local)
    else:
        vector = reads_vectors and unit and gcd4(inner[1], outer_steps[0], *rest)
        work = spread(lowering.traits, outputs, inner[1], vector, passes=inner[0])
        macros.update({**work.macros, "VEC4": int(vector)})
        local, grid = work.local, work.grid(outputs)
    pad = lambda items, count: [*items, *([0] * count)][:count]  # noqa: E731
    params = [
        x.offset, out.offset, outputs, inner[0], inner[1], inner_steps[0], inner_steps[1], *pad(outer_steps, 4),
        *pad(outer, 3),
    ]  # fmt: skip
    lowering.dispatch(
        "reduce.comp", [(x, "r"), (out, "w")], macros=macros, params=params, constants={100: local}, grid=grid,
        flops=x.type.numel,
    )  # fmt: skip


def _computing(kind: str, source: DType, target: DType) -> str:
    if kind in ("any", "all"):
        return "int"
    if DType.int64 in (source, target) and not source.is_float:
        return "int64_t"
    return "float" if source.is_float or target.is_float else "int"


def _supports(node: Node, traits: Any) -> str | None:
    dtypes = {value.type.dtype for value in (*node.inputs, *node.results)}
    for dtype in (DType.float64, DType.bfloat16):
        if dtype in dtypes:
            return f"no kernel for {dtype.name}"
    return None


register(Operator(NAME, _reduce_shape, Kernel(_reduce_lower, supports=_supports)))


def _register(name: str, kind: str, out: str, parameters: str, *names: str) -> None:
    """One reduction: `out` is the result's dtype: "same", "sum" (integers add up as int64), "float" or "bool"."""

    def result(x: TensorType, dtype: DType | None) -> DType:
        if out == "bool":
            return DType.uint8 if x.dtype is DType.uint8 else DType.bool
        if dtype is not None:
            return dtype
        if out == "sum" and not x.dtype.is_float:
            return DType.int64
        return float_type(x.dtype) if out == "float" else x.dtype

    def expand(builder: Any, node: Node) -> Value:
        given = dict(zip(parameters.split(), node.args))
        x = given["x"]
        dims = wrap_all(given.get("dim"), x.type.rank)
        return _expand_reduction(builder, x, kind, dims, bool(given.get("keepdim")), node.result.type.dtype)

    shapes = {
        "x dtype": lambda x, dtype=None: TensorType(result(x, dtype), ()),
        "x": lambda x: TensorType(result(x, None), ()),
        "x dim keepdim dtype": lambda x, dim=None, keepdim=False, dtype=None: TensorType(
            result(x, dtype), reduced(x.dims, wrap_all(dim, x.rank), keepdim)
        ),
        "x dim keepdim": lambda x, dim=None, keepdim=False: TensorType(
            result(x, None), reduced(x.dims, wrap_all(dim, x.rank), keepdim)
        ),
    }
    register(Operator(name, shapes[parameters], Rewrite(expand, _supports), names=names))


def _expand_reduction(builder: Any, x: Value, kind: str, dims: tuple[int, ...], keepdim: bool, dtype: DType) -> Value:
    if x.type.rank == 0:
        x = builder.emit("aten.view.default", x, (1,))
        return builder.emit("aten.view.default", _expand_reduction(builder, x, kind, (0,), False, dtype), ())
    if kind in ("mean", "sum", "prod") and dtype.is_float != x.type.dtype.is_float:
        x = builder.emit("aten._to_copy.default", x, dtype)
    return builder.emit(NAME, x, kind, dims, keepdim, dtype)


_register("aten.sum.dim_IntList", "sum", "sum", "x dim keepdim dtype")
_register("aten.sum.default", "sum", "sum", "x dtype")
_register("aten.mean.dim", "mean", "float", "x dim keepdim dtype")
_register("aten.mean.default", "mean", "float", "x dtype")
_register("aten.prod.dim_int", "prod", "sum", "x dim keepdim dtype")
_register("aten.prod.default", "prod", "sum", "x dtype")
_register("aten.amax.default", "amax", "same", "x dim keepdim")
_register("aten.amin.default", "amin", "same", "x dim keepdim")
_register("aten.max.default", "amax", "same", "x")
_register("aten.min.default", "amin", "same", "x")
_register("aten.any.dim", "any", "bool", "x dim keepdim", "aten.any.dims")
_register("aten.any.default", "any", "bool", "x")
_register("aten.all.dim", "all", "bool", "x dim keepdim", "aten.all.dims")
_register("aten.all.default", "all", "bool", "x")
