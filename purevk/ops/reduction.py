"""Reductions over any dims, softmax, and normalizations."""

from __future__ import annotations

from typing import Any, Sequence

from purevk.dtypes import DType
from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.ops.epilogue import bits_of, gcd4, make_epilogue
from purevk.ops.lowering import Lowering, Operand
from purevk.ops.matmul import dense
from purevk.ops.promotion import float_type
from purevk.ops.registry import Kernel, Operator, Rewrite, register
from purevk.ops.rows import collapse, spread
from purevk.ops.shapes import reduced, wrap, wrap_all

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
        work = spread(lowering.traits, outputs, inner[1], vector)
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
            return DType.bool
        if dtype is not None:
            return dtype
        if out == "sum" and not x.dtype.is_float:
            return DType.int64
        return float_type(x.dtype) if out == "float" else x.dtype

    def expand(builder: Any, node: Node) -> Value:
        x, dim, keepdim, _ = {**dict(zip("xdko", (None, None, False, None))), **dict(zip("xdko", _named(node)))}.values()
        dims = wrap_all(dim, x.type.rank)
        dtype = node.result.type.dtype
        return _expand_reduction(builder, x, kind, dims, bool(keepdim), dtype)

    def _named(node: Node) -> list[Any]:
        given = dict(zip(parameters.split(), node.args))
        return [given.get("x"), given.get("dim"), given.get("keepdim", False), given.get("dtype")]

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
    if kind in ("mean", "sum") and dtype.is_float and not x.type.dtype.is_float:
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


# -- softmax -----------------------------------------------------------------------------------------------------------
def _softmax_kernel_shape(x: TensorType, dim: int, log: bool = False, zero_rows: bool = False, dtype: DType | None = None) -> TensorType:
    wrap(dim, x.rank)
    return x.with_dtype(dtype or x.dtype)


def _softmax_lower(lowering: Lowering, node: Node) -> None:
    x_value, dim, log, zero_rows, _ = node.args
    x, out = lowering.operand(x_value), lowering.operand(node.result)
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    at = wrap(dim, len(x.dims))
    rest = [d for d in range(len(x.dims)) if d != at]
    loop, (mine, theirs) = collapse(
        [x.dims[d] for d in rest], [x.strides[d] for d in rest], [out.strides[d] for d in rest]
    )
    if len(loop) > 3:
        x = dense(lowering, x)
        loop, (mine, theirs) = collapse(
            [x.dims[d] for d in rest], [x.strides[d] for d in rest], [out.strides[d] for d in rest]
        )
    sizes = list(reversed(loop)) or [1]
    mine, theirs = list(reversed(mine)) or [0], list(reversed(theirs)) or [0]
    rows, columns = _dims.product(sizes), x.dims[at]
    step, out_step = x.strides[at], out.strides[at]
    unit = all(isinstance(s, int) and s == 1 for s in (step, out_step))
    vector = unit and gcd4(columns, x.offset, out.offset, *mine, *theirs)
    work = spread(lowering.traits, rows, columns, vector, cache=True)
    pad = lambda items, count: [*items, *([0] * count)][:count]  # noqa: E731
    params = [
        x.offset, out.offset, rows, columns, step, out_step, *pad(mine, 3), *pad(theirs, 3), *pad(sizes, 2),
    ]  # fmt: skip
    lowering.dispatch(
        "softmax.comp", [(x, "r"), (out, "w")],
        macros={
            "T_X": x.dtype.glsl, "T_OUT": out.dtype.glsl, "OUTER_DIMS": max(len(sizes), 1), "LOG": int(log),
            "ZERO_ROWS": int(zero_rows), "VEC4": int(vector), **work.macros,
        },
        params=params, constants={100: work.local}, grid=work.grid(rows), flops=5 * x.type.numel,
    )  # fmt: skip


def _only_floats(node: Node, traits: Any) -> str | None:
    for value in (*node.inputs, *node.results):
        if value.type.dtype not in (DType.float32, DType.float16):
            return f"no kernel for {value.type.dtype.name}"
    return None


register(Operator("purevk.softmax", _softmax_kernel_shape, Kernel(_softmax_lower)))


def _softmax(name: str, log: bool, *names: str) -> None:
    def shape(x: TensorType, dim: int, half_to_float: Any = False) -> TensorType:
        wrap(dim, x.rank)
        if isinstance(half_to_float, DType):
            return x.with_dtype(half_to_float)
        return x.with_dtype(DType.float32 if half_to_float is True else x.dtype)

    def expand(builder: Any, node: Node) -> Value:
        x, dim = node.args[:2]
        if x.type.rank == 0:
            flat = builder.emit("aten.view.default", x, (1,))
            made = builder.emit("purevk.softmax", flat, 0, log, False, node.result.type.dtype)
            return builder.emit("aten.view.default", made, ())
        return builder.emit("purevk.softmax", x, dim, log, False, node.result.type.dtype)

    register(Operator(name, shape, Rewrite(expand, _only_floats), names=names))


_softmax("aten._softmax.default", False, "aten.softmax.int")
_softmax("aten._log_softmax.default", True, "aten.log_softmax.int")


# -- normalization -----------------------------------------------------------------------------------------------------
def _norm_shape(
    x: TensorType, weight: TensorType | None, bias: TensorType | None, count: int, eps: float, rms: bool,
    epilogue: Any = None, extras: tuple = (),
) -> TensorType:  # fmt: skip
    return x if epilogue is None else x.with_dtype(epilogue.dtypes[epilogue.outputs[0]])


def _norm_lower(lowering: Lowering, node: Node) -> None:
    x_value, weight_value, bias_value, count, eps, rms, epilogue, extras = node.args
    x, out = lowering.operand(x_value), lowering.operand(node.result)
    if any(isinstance(size, int) and size == 0 for size in out.dims):
        return
    if not x.layout.is_contiguous(x.dims) or not isinstance(x.offset, int):
        x = dense(lowering, x)
    rows = _dims.product(x.dims[: len(x.dims) - count])
    columns = _dims.product(x.dims[len(x.dims) - count :])
    weight, bias = (None if value is None else lowering.operand(value) for value in (weight_value, bias_value))
    offsets = [operand.offset for operand in (x, out, weight, bias) if operand is not None]
    vector = gcd4(columns, *offsets)
    work = spread(lowering.traits, rows, columns, vector, cache=True)
    own = 2 + (weight is not None) + (bias is not None)
    column = (len(out.dims) - 1, "col") if count == 1 else None
    made = make_epilogue(lowering, epilogue, extras, out, own, "row, col", f"row * {'out_row' if False else 'columns'} + col", column, vector)
    buffers: list[tuple[Operand, str]] = [(x, "r")]
    buffers += [(operand, "r") for operand in (weight, bias) if operand is not None]
    buffers += [(out, "w"), *made.buffers]
    params = [
        x.offset, out.offset, rows, columns, columns, columns, bits_of(eps), weight.offset if weight else 0,
        bias.offset if bias else 0,
    ]  # fmt: skip
    lowering.dispatch(
        "norm.comp", buffers,
        macros={
            "T_X": x.dtype.glsl, "T_OUT": out.dtype.glsl, "T_W": (weight or bias or x).dtype.glsl,
            "HAS_WEIGHT": int(weight is not None), "HAS_BIAS": int(bias is not None), "RMS": int(rms), "VEC4": int(vector),
            **work.macros, **made.macros,
        },
        params=params, constants={100: work.local}, grid=work.grid(rows), flops=8 * x.type.numel,
    )  # fmt: skip


register(Operator("purevk.norm", _norm_shape, Kernel(_norm_lower, epilogue=True)))


def _layer_norm_shape(
    x: TensorType, normalized_shape: Sequence[Size], weight: TensorType | None = None, bias: TensorType | None = None,
    eps: float = 1e-5,
) -> tuple[TensorType, TensorType, TensorType]:  # fmt: skip
    lead = x.rank - len(normalized_shape)
    stats = x.with_dims((*x.dims[:lead], *([1] * len(normalized_shape))))
    return x, stats, stats


def _normalized(builder: Any, x: Value, weight: Any, bias: Any, count: int, eps: float) -> Value:
    if weight is not None and bias is not None and weight.type.dtype is not bias.type.dtype:
        bias = builder.emit("aten._to_copy.default", bias, weight.type.dtype)
    return builder.emit("purevk.norm", x, weight, bias, count, eps, False, None, ())


def _expand_layer_norm(builder: Any, node: Node) -> tuple[Value, Value, Value]:
    x, shape, weight, bias, eps = node.args
    dims = tuple(range(x.type.rank - len(shape), x.type.rank))
    result = _normalized(builder, x, weight, bias, len(shape), eps)
    # Mean and rstd; nodes that nobody reads are dropped.
    wide = builder.emit("aten._to_copy.default", x, DType.float32)
    mean = builder.emit(NAME, wide, "mean", dims, True, DType.float32)
    centred = builder.emit("aten.sub.Tensor", wide, mean, 1)
    variance = builder.emit(NAME, builder.emit("aten.mul.Tensor", centred, centred), "mean", dims, True, DType.float32)
    rstd = builder.emit("aten.rsqrt.default", builder.emit("aten.add.Tensor", variance, float(eps), 1))
    stats = [builder.emit("aten._to_copy.default", value, node.results[1].type.dtype) for value in (mean, rstd)]
    return result, stats[0], stats[1]


register(
    Operator("aten.native_layer_norm.default", _layer_norm_shape, Rewrite(_expand_layer_norm, _only_floats))
)  # fmt: skip


def _layer_norm_one_shape(
    x: TensorType, normalized_shape: Sequence[Size], weight: TensorType | None = None, bias: TensorType | None = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> TensorType:  # fmt: skip
    return x


register(
    Operator(
        "aten.layer_norm.default", _layer_norm_one_shape,
        Rewrite(lambda builder, node: _normalized(builder, node.args[0], node.args[2], node.args[3], len(node.args[1]), node.args[4]),
                _only_floats),
    )
)  # fmt: skip


def _rms_norm_shape(x: TensorType, weight: TensorType, eps: float = 1e-6) -> TensorType:
    return x


register(
    Operator(
        "et_vk.rms_norm.default", _rms_norm_shape,
        Rewrite(
            lambda builder, node: builder.emit("purevk.norm", node.args[0], node.args[1], None, 1, node.args[2], True, None, ()),
            _only_floats,
        ),
    )
)  # fmt: skip


def _aten_rms_norm_shape(x: TensorType, normalized_shape: Sequence[Size], weight: TensorType | None = None, eps: float | None = None) -> TensorType:
    return x


def _expand_aten_rms_norm(builder: Any, node: Node) -> Value:
    x, shape, weight, eps = node.args
    eps = {DType.float32: 1.1920928955078125e-07, DType.float16: 0.0009765625}[x.type.dtype] if eps is None else eps
    return builder.emit("purevk.norm", x, weight, None, len(shape), eps, True, None, ())


register(Operator("aten.rms_norm.default", _aten_rms_norm_shape, Rewrite(_expand_aten_rms_norm, _only_floats)))


def _batch_norm_shape(
    x: TensorType, weight: TensorType | None, bias: TensorType | None, running_mean: TensorType, running_var: TensorType,
    momentum: float, eps: float,
) -> tuple[TensorType, TensorType, TensorType]:  # fmt: skip
    empty = TensorType(x.dtype, (0,))
    return x, empty, empty


def batch_norm_factors(builder: Any, weight: Any, bias: Any, mean: Value, variance: Value, eps: float) -> tuple[Value, Value]:
    """Scale and shift, one of each a channel: batch norm is x * scale + shift."""
    wide = lambda value: builder.emit("aten._to_copy.default", value, DType.float32)  # noqa: E731
    scale = builder.emit("aten.rsqrt.default", builder.emit("aten.add.Tensor", wide(variance), float(eps), 1))
    if weight is not None:
        scale = builder.emit("aten.mul.Tensor", scale, wide(weight))
    shift = builder.emit("aten.mul.Tensor", wide(mean), scale)
    if bias is not None:
        return scale, builder.emit("aten.sub.Tensor", wide(bias), shift, 1)
    return scale, builder.emit("aten.neg.default", shift)


def _expand_batch_norm(builder: Any, node: Node) -> tuple[Value, Value, Value]:
    x, weight, bias, mean, variance, _, eps = node.args
    scale, shift = batch_norm_factors(builder, weight, bias, mean, variance, eps)
    sizes = (scale.type.dims[0], *([1] * (x.type.rank - 2)))
    scale, shift = (builder.emit("aten.view.default", value, sizes) for value in (scale, shift))
    made = builder.emit("aten.add.Tensor", builder.emit("aten.mul.Tensor", x, scale), shift, 1)
    made = builder.emit("aten._to_copy.default", made, x.type.dtype)
    empty = builder.emit("aten.full.default", (0,), 0.0, x.type.dtype)
    return made, empty, empty


register(
    Operator(
        "aten._native_batch_norm_legit_no_training.default", _batch_norm_shape, Rewrite(_expand_batch_norm, _only_floats)
    )
)  # fmt: skip
