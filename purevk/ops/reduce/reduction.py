"""Reductions over any dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType, Value
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.declared import AUTO
from purevk.lower.elements import ACC_TYPES, conversions, extreme
from purevk.lower.expression import in_double
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import gcd4
from purevk.lower.rows import MOST_JOINS, RowWork, by_dim, collapse, column_team, spread
from purevk.ops.builder import Builder
from purevk.ops.facts import but_along
from purevk.ops.promotion import float_type
from purevk.ops.registry import Kernel, define, rewrite_node
from purevk.ops.shapes import is_empty, reduced, wrap_all
from purevk.shaders.code_size import loops_of_functions
from purevk.tuning import DeviceTraits


@dataclass(frozen=True)
class Reduction:
    """How elements are reduced to one, as GLSL.

    Attributes:
        start: the initial value (LOWEST and HIGHEST are the extremes of the computing type).
        combine: joins a and b.
        load: what is done to an element v first.
        finish: what is done last to the result a of n elements.
        variance: finish gets the sum of the squared distances from the mean.
        logarithm: finish gets the logarithm of the sum of exponentials.
        logical: elements count as true or false.
        best: whether a is better than b. The result is the index of the best element, or, with
            two results, the element and its index.
    """

    start: str = "ACC(0)"
    combine: str = "((a) + (b))"
    load: str = "(v)"
    finish: str = "(a)"
    variance: bool = False
    best: str = ""
    logarithm: bool = False
    logical: bool = False


_KINDS = {
    "sum": Reduction(),
    "mean": Reduction(finish="(n > 0 ? a / ACC(n) : ACC(PV_NAN))"),
    "prod": Reduction("ACC(1)", "((a) * (b))"),
    "amax": Reduction("LOWEST", "pv_max(a, b)"),
    "amin": Reduction("HIGHEST", "pv_min(a, b)"),
    "any": Reduction(combine="((a) | (b))", logical=True),
    "all": Reduction("ACC(1)", "((a) & (b))", logical=True),
    "argmax": Reduction("LOWEST", best="((a) > (b))"),
    "argmin": Reduction("HIGHEST", best="((a) < (b))"),
}
NAME = "purevk.reduce"


def _reduce_shape(
    x: TensorType,
    kind: str | Reduction,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: DType,
    index: DType | None = None,
) -> TensorType | tuple[TensorType, TensorType]:
    """`kind`: a name of `_KINDS`, or how to reduce. `index`: the index of the best element is a
    second result, of this dtype."""
    result = TensorType(dtype, reduced(x.dims, dims, keepdim))
    return (result, result.with_dtype(index)) if index else result


def _reduce_lower(lowering: Lowering, node: Node) -> None:
    kind, dims, index = node.arg("kind"), node.ints("dims"), node.optional_dtype("index")
    how = kind if isinstance(kind, Reduction) else _KINDS[node.str("kind")]
    x, out = lowering.operand(node.tensor("x")), lowering.operand(node.results[0])
    if is_empty(out.type):
        return
    acc = _computing(how, x.dtype, x.dtype if how.best else out.dtype)
    if acc == "double":
        how = replace(how, load=in_double(how.load), finish=in_double(how.finish))
    names = conversions(x.dtype, out.dtype, acc)
    if how.logical and x.dtype is not DType.bool:
        wide = x.dtype.acc
        number = names.get("FROM_X(v)", f"{wide}(v)")  # bfloat16 is read as bits: -0.0 is not 0
        names["FROM_X(v)"] = f"({number} != {wide}(0) ? 1 : 0)"
    joined: dict[str, str | int] = {"INIT": extreme(how.start, acc), "COMBINE(a, b)": how.combine}
    if how.variance or how.logarithm:
        joined.update({"VARIANCE": int(how.variance), "LOGARITHM": int(how.logarithm)})
    last = {"FINISH(a, n)": how.finish}
    if how.variance:  # of scaled numbers
        finish = f"({how.finish} * unscale)"
        if not how.finish.startswith("sqrt("):  # NVIDIA's driver takes a * b * b for a * (b * b)
            finish = f"(pv_computed{finish} * unscale)"
        last = {"FINISH(a, n)": finish}
    macros: dict[str, str | int] = {**names, **joined, "LOAD(v)": how.load}
    outs = [out]
    if how.best:
        macros |= {"ARG": 2 if index else 1, "T_INDEX": (index or out.dtype).glsl}
        macros["ARG_BETTER(a, b)"] = how.best
        outs += [lowering.operand(node.results[1])] if index else []
        if index is DType.int64:
            macros["HAS_INT64"] = "1"
    walk = _Walk.over(x, dims)
    if not walk.fits or walk.is_long(lowering.traits, macros):
        x = dense(lowering, x, [*(d for d in range(len(x.dims)) if d not in dims), *dims])
        walk = _Walk.over(x, dims)
    parts = 1 if how.best or how.variance else _parts(lowering, walk, x.dtype, macros)
    if parts == 1:
        _emit(lowering, x, outs, walk, {**macros, **last})
        return
    # There are too few rows for the device: reduce parts of them first.
    partial = ACC_TYPES[acc]
    outputs, length = _dims.product(walk.outer), walk.inner[1]
    step = 4 if gcd4(length) else 1
    part = _dims.ceil_div(_dims.ceil_div(length, step), parts) * step
    columns = walk.columns
    some = lowering.temporary(
        TensorType(partial, (parts, outputs) if columns else (outputs, parts))
    )
    # The result's own conversion is that of the second dispatch.
    macros = {
        **{k: v for k, v in macros.items() if k not in names},
        **conversions(x.dtype, partial, acc),
        **{k: v for k, v in names.items() if k.startswith("FROM_X")},
    }
    _emit(lowering, x, [some], walk, {**macros, "SPLIT": parts}, parts, {"part": part})
    outer_step, inner_step = (1, outputs) if columns else (parts, 1)
    _emit(
        lowering,
        some,
        outs,
        _Walk([outputs], [outer_step], [1, parts], [0, inner_step]),
        {**conversions(partial, out.dtype, acc), **joined, **last, "PARTS": 1},
        further={"reduced": length * walk.inner[0]},
    )


class _Walk(NamedTuple):
    """The loops of a reduction: those over the outputs, innermost first, and the two that are
    reduced, innermost last, with their strides in x. Dims are joined where they are dense within
    one another."""

    outer: list[Size]
    outer_steps: list[Size]
    inner: list[Size]
    inner_steps: list[Size]

    @classmethod
    def over(cls, x: Operand, dims: Sequence[int]) -> _Walk:
        rest = [d for d in range(len(x.dims)) if d not in dims]
        outer, (outer_steps,) = collapse([x.dims[d] for d in rest], [x.strides[d] for d in rest])
        inner, (inner_steps,) = collapse([x.dims[d] for d in dims], [x.strides[d] for d in dims])
        inner, inner_steps = inner or [1], inner_steps or [1]
        if len(inner) == 1:
            inner, inner_steps = [1, *inner], [0, *inner_steps]
        return cls(
            list(reversed(outer)) or [1], list(reversed(outer_steps)) or [0], inner, inner_steps
        )

    @property
    def fits(self) -> bool:
        """Whether the template has as many loops."""
        return len(self.outer) <= 4 and len(self.inner) == 2

    def is_long(self, traits: DeviceTraits, macros: Mapping[str, str | int]) -> bool:
        """Whether there are two loops, and an invocation may not walk its share of them. One loop can
        be cut."""
        outer, inner = map(_dims.upper, self.inner)
        lanes = min(256, traits.max_invocations) if self.contiguous else 1
        return outer > 1 and outer * (-(-inner // lanes) + 10) > _longest(traits, macros)

    @property
    def contiguous(self) -> bool:
        """Whether the reduced elements are neighbours in memory."""
        return isinstance(self.inner_steps[1], int) and self.inner_steps[1] == 1

    @property
    def columns(self) -> bool:
        """Whether neighbouring outputs have neighbouring elements, and the elements of one output
        are not neighbours."""
        return (
            not self.contiguous
            and isinstance(self.outer_steps[0], int)
            and self.outer_steps[0] == 1
        )


def _emit(
    lowering: Lowering,
    x: Operand,
    outs: list[Operand],
    walk: _Walk,
    macros: dict[str, str | int],
    parts: int = 1,
    further: Mapping[str, Size] | None = None,
) -> None:
    """Appends one dispatch of the template.

    Args:
        parts: how many parts of each row are reduced independently.
        further: the parameter that SPLIT or PARTS takes.
    """
    outer, outer_steps, inner, inner_steps = walk
    traits, profile, out = lowering.traits, lowering.traits.profile, outs[0]
    moments = macros.get("VARIANCE") or macros.get("LOGARITHM")
    reduce_dims = 1 if isinstance(inner[0], int) and inner[0] == 1 else 2
    macros = {**macros, "OUTER_DIMS": len(outer), "REDUCE_DIMS": reduce_dims}
    outputs = _dims.product(outer) * parts
    length = _dims.ceil_div(inner[0] * inner[1], parts)
    column = walk.columns or (not walk.contiguous and profile.coalesces_accesses)
    rest = [*outer_steps[1:], inner_steps[0], x.offset]
    reads_vectors = x.dtype in (DType.float32, DType.float16, DType.int32)
    vector = reads_vectors and walk.columns and gcd4(outer[0], inner_steps[1], out.offset, *rest)
    team = None
    if walk.columns and profile.has_fast_shared_memory:
        team = _team(traits, x.dtype.itemsize, 4 if vector else 1, outputs, length, macros)
    # One invocation per column is slow if columns are few and long.
    most = _longest(traits, macros)
    if profile.needs_many_invocations:
        most = max(4096, _dims.upper(outputs))
    if not team and parts == 1 and _dims.upper(length) > most:
        column = False
    if column:
        work = team or RowWork({"COLUMN": 1, "LOCAL": COLUMNS}, COLUMNS, COLUMNS)
        grid = lowering.linear_grid(_dims.ceil_div(outputs, 4) if vector else outputs, work.rows)
    else:
        vector = reads_vectors and walk.contiguous and gcd4(inner[1], outer_steps[0], *rest)
        work = spread(
            traits,
            outputs,
            _dims.ceil_div(inner[1], parts),
            vector,
            passes=inner[0] * _each(macros, 4 if vector else 1),
            short=True,
        )
        grid = work.grid(outputs)
    macros |= {**work.macros, "VEC4": int(vector)}
    items = work.local * (4 if vector and not column else 1)
    each = _dims.ceil_div(length * work.rows, items)
    # Reads in flight keep memory busy. Moments gain in any case, since a batch of elements is
    # cheaper than its elements.
    loads = max(profile.loads_in_flight, 4 if moments else 1)
    macros["AHEAD"] = next(
        n for n in (8, 4, 2, 1) if n <= loads and (n <= _dims.upper(each) or n == 1)
    )
    params: dict[str, Size] = {
        "outputs": outputs,
        "size_r1": inner[1],
        **by_dim("stride", outer_steps),
        **by_dim("size", outer[:-1]),
        **(further or {}),
    }
    if reduce_dims > 1:
        params |= {"size_r0": inner[0], "stride_r0": inner_steps[0]}
    if column or not vector:
        params["stride_r1"] = inner_steps[1]
    lowering.dispatch(
        "reduce/reduce.comp",
        {"x": x, **dict(zip(("out", "index"), outs))},
        params,
        {**macros, "TEXEL_X": AUTO},
        local=work.local,
        grid=grid,
        flops=_dims.product(outer) * inner[0] * inner[1],
    )


def _each(macros: Mapping[str, str | int], elements: int = 1) -> int:
    """Iterations that so many elements take, read at once, with those of the functions that are
    applied to them."""
    acc, load = macros.get("ACC"), str(macros.get("LOAD(v)", ""))
    floats, double = acc in ("float", "double"), acc != "float" or "double" in load
    return 1 + elements * loops_of_functions(load, floats, double)


def _longest(traits: DeviceTraits, macros: Mapping[str, str | int]) -> int:
    """Elements that one invocation may take, of 4 columns at once. A block of 64 of them has a few
    iterations more."""
    return max(traits.max_iterations - MOST_JOINS, 17) * 8 // 9 // _each(macros, 4)


def _parts(lowering: Lowering, walk: _Walk, dtype: DType, macros: Mapping[str, str | int]) -> int:
    """Into how many parts rows are cut if there are too few to keep the device busy, or if they are
    longer than it walks; else 1."""
    if not (isinstance(walk.inner[0], int) and walk.inner[0] == 1):
        return 1
    traits, length = lowering.traits, _dims.upper(walk.inner[1])
    outputs = max(_dims.upper(_dims.product(walk.outer)), 1)
    wanted = 4 * traits.processors  # workgroups
    if not walk.columns:
        part = traits.profile.reduce_part_elements
        least = max(-(-length // (_longest(traits, macros) * min(256, traits.max_invocations))), 1)
        return max(min(wanted // outputs, length // part), least) if outputs * 4 < wanted else least
    if traits.profile.has_fast_shared_memory:
        # A workgroup takes the columns of one transaction, and is as large as possible. One
        # workgroup per multiprocessor is enough.
        groups = -(-outputs * dtype.itemsize // traits.profile.transaction_bytes)
        if groups * 4 >= traits.processors * 3:
            return 1
        return max(min(2 * traits.processors // groups, length // 256), 1)
    if outputs * 4 >= wanted * COLUMNS:
        return 1
    least = -(-length // _longest(traits, macros))
    return max(min(wanted * COLUMNS // outputs, length // 256), least, 1)


COLUMNS = 64  # columns of a workgroup, if each invocation has one


def _team(
    traits: DeviceTraits,
    itemsize: int,
    each: int,
    outputs: Size,
    length: Size,
    macros: dict[str, str | int],
) -> RowWork | None:
    """A workgroup that takes several columns (of vectors of `each`) at once, with several invocations
    for each; None if columns are short, or so many that one invocation per column keeps a GPU busy."""
    count, rows = -(-_dims.upper(outputs) // each), _dims.upper(length)
    if count >= traits.profile.max_invocations_per_core * traits.processors:
        return None
    # Bytes of shared memory per invocation and column, for the state that lanes join.
    wide = macros["ACC"] in ("int64_t", "double")
    state = 12 if macros.get("VARIANCE") or macros.get("LOGARITHM") else 16 if wide else 8
    most = min(traits.max_invocations, 1024, traits.max_shared_memory // 3 * 2 // (state * each))
    width = min(max(traits.profile.transaction_bytes // (itemsize * each), 1), 32)
    width, lanes = column_team(width, most, count, rows // 8)
    if lanes == 1:
        return None
    return RowWork({"COLUMN": 1, "WIDTH": width, "LOCAL": width * lanes}, width * lanes, width)


def _computing(how: Reduction, source: DType, target: DType) -> str:
    if how.logical:
        return "int"
    if DType.int64 in (source, target) and not source.is_float:
        return "int64_t"
    if DType.float64 in (source, target):
        return "double"
    return "float" if source.is_float or target.is_float else "int"


define(NAME, _reduce_shape, Kernel(_reduce_lower))


def _register(name: str, kind: str, out: str, parameters: str, *names: str) -> None:
    """One reduction: `out` is the result's dtype: "same", "sum" (integers add up as int64), "float"
    (integers are converted first) or "bool"."""

    def result(x: TensorType, dtype: DType | None) -> DType:
        if out == "bool":
            return DType.uint8 if x.dtype is DType.uint8 else DType.bool
        if dtype is not None:
            return dtype
        if out == "sum" and not (x.dtype.is_float or x.dtype.is_complex):
            return DType.int64
        return float_type(x.dtype) if out == "float" else x.dtype

    def expand(builder: Builder, node: Node) -> Value:
        x, named = node.tensor("x"), parameters.split()
        dims = wrap_all(node.optional_ints("dim") if "dim" in named else None, x.type.rank)
        keepdim = "keepdim" in named and node.bool("keepdim")
        return _expand_reduction(builder, x, kind, dims, keepdim, node.result.type.dtype)

    shapes: dict[str, Callable[..., TensorType]] = {
        "x dtype": lambda x, dtype=None: TensorType(result(x, dtype), ()),
        "x": lambda x: TensorType(result(x, None), ()),
        "x dim keepdim dtype": lambda x, dim=None, keepdim=False, dtype=None: TensorType(
            result(x, dtype), reduced(x.dims, wrap_all(dim, x.rank), keepdim)
        ),
        "x dim keepdim": lambda x, dim=None, keepdim=False: TensorType(
            result(x, None), reduced(x.dims, wrap_all(dim, x.rank), keepdim)
        ),
    }
    rowwise = but_along if "dim" in parameters else None
    rewrite_node(name, shapes[parameters], *names, rowwise=rowwise)(expand)


def _expand_reduction(
    builder: Builder, x: Value, kind: str, dims: tuple[int, ...], keepdim: bool, dtype: DType
) -> Value:
    if x.type.rank == 0:
        x = builder.aten.view(x, (1,))
        return builder.aten.view(_expand_reduction(builder, x, kind, (0,), False, dtype), ())
    if not _KINDS[kind].logical and dtype is not x.type.dtype:
        if dtype.is_float != x.type.dtype.is_float or dtype is DType.bool:
            x = builder.aten._to_copy(x, dtype)
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
_register("aten.any.default", "any", "bool", "x", "aten._is_any_true.default")
_register("aten.all.dim", "all", "bool", "x dim keepdim", "aten.all.dims")
_register("aten.all.default", "all", "bool", "x", "aten._is_all_true.default")
