"""The operators `purevk.map` and `purevk.map_over`, and functions that emit them; see `lower/map.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from purevk.ir import Layout, Node, Size, TensorType, Value
from purevk.lower.lowering import Lowering
from purevk.lower.map import MapSpec, emit_map, takes_windows
from purevk.ops.builder import Builder
from purevk.ops.image_layout import LayoutQuery
from purevk.ops.registry import Kernel, Order, define
from purevk.ops.signatures import signature

if TYPE_CHECKING:
    from typing_extensions import Unpack

NAME = "purevk.map"


@signature("spec, inputs, numbers, types")
def _shape(types: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return types


def _lower(lowering: Lowering, node: Node, over: Sequence[Size] | None = None) -> None:
    spec = node.attribute("spec", MapSpec)
    emit_map(
        lowering,
        spec,
        [lowering.operand(value) for value in node.tensors("inputs")],
        dict(zip(spec.numbers, node.sizes("numbers"), strict=True)),
        [lowering.operand(value) for value in node.results],
        over,
    )


def same_order(value: Value, layout: Layout) -> tuple[int, ...] | None:
    """The order of a value's dims in memory, if it is dense."""
    return layout.dense_order(value.type.dims)


def _layouts(node: Node, query: LayoutQuery) -> tuple[Order | None, ...]:
    spec = node.attribute("spec", MapSpec)
    if spec.order is None:
        return (None,) * len(node.results)
    value = node.tensors("inputs")[spec.order]
    order = same_order(value, query(value))
    return tuple(order if result.type.rank == value.type.rank else None for result in node.results)


define(
    NAME,
    _shape,
    Kernel(
        _lower,
        layouts=_layouts,
        windows=lambda node: takes_windows(node.attribute("spec", MapSpec)),
    ),
)


class MapOptions(TypedDict, total=False):
    """Attributes of a `MapSpec`."""

    order: int | None
    lanes: Mapping[int, Sequence[int | None]]
    template: str
    macros: Mapping[str, object]
    flops: int
    pushed: tuple[str, ...]


def _spec(
    body: str,
    inputs: Mapping[str, Value],
    numbers: Mapping[str, Size],
    stores: bool,
    *,
    lanes: Mapping[int, Sequence[int | None]] = {},
    macros: Mapping[str, object] = {},
    **options: Any,
) -> MapSpec:
    return MapSpec(
        body,
        tuple(inputs),
        tuple(numbers),
        lanes=tuple((d, tuple(dims)) for d, dims in lanes.items()),
        macros=tuple((name, str(text)) for name, text in macros.items()),
        stores=stores,
        **options,
    )


def mapped(
    builder: Builder,
    body: str,
    inputs: Mapping[str, Value],
    result: TensorType,
    *,
    numbers: Mapping[str, Size] = {},
    **options: Unpack[MapOptions],
) -> Value:
    """Emits `purevk.map` for one result; see `mapped_all`."""
    return mapped_all(builder, body, inputs, result, numbers=numbers, **options)[0]


def mapped_all(
    builder: Builder,
    body: str,
    inputs: Mapping[str, Value],
    *results: TensorType,
    numbers: Mapping[str, Size] = {},
    **options: Unpack[MapOptions],
) -> tuple[Value, ...]:
    """Emits `purevk.map` for results of the types `results`."""
    spec = _spec(body, inputs, numbers, True, **options)
    return builder.emit_all(NAME, spec, tuple(inputs.values()), tuple(numbers.values()), results)


OVER = "purevk.map_over"


@signature("spec, inputs, numbers, types, over")
def _shape_over(types: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    return types


def _lower_over(lowering: Lowering, node: Node) -> None:
    _lower(lowering, node, node.sizes("over"))


define(OVER, _shape_over, Kernel(_lower_over))


def mapped_over(
    builder: Builder,
    body: str,
    inputs: Mapping[str, Value],
    over: Sequence[Size],
    result: TensorType,
    *,
    numbers: Mapping[str, Size] = {},
    **options: Unpack[MapOptions],
) -> Value:
    """Emits `purevk.map_over` for one result; see `mapped_over_all`."""
    return mapped_over_all(builder, body, inputs, over, result, numbers=numbers, **options)[0]


def mapped_over_all(
    builder: Builder,
    body: str,
    inputs: Mapping[str, Value],
    over: Sequence[Size],
    *results: TensorType,
    numbers: Mapping[str, Size] = {},
    **options: Unpack[MapOptions],
) -> tuple[Value, ...]:
    """Emits `purevk.map_over`: the statements `body` run once for each index of a space of sizes
    `over`. They write elements of the results with `R_PUT`; elements that no statement writes are
    undefined."""
    spec = _spec(body, inputs, numbers, False, **options)
    values = tuple(inputs.values()), tuple(numbers.values())
    return builder.emit_all(OVER, spec, *values, results, tuple(over))


def others(dims: Sequence[int], rank: int) -> dict[int, tuple[int, ...]]:
    """The `lanes` of a kernel on one input that treats all dims but `dims` element by element."""
    return {d: (d,) for d in range(rank) if d not in dims}
