"""Images as planes (NCHW) or channels last: what a kernel that works on both makes its result, by
the bytes that conversions around it would move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from purevk.ir import Layout, Node, Value
from purevk.ir import dims as _dims
from purevk.lower.lowering import Operand
from purevk.tuning import DeviceTraits

FOLLOWED = (
    "purevk.pointwise",
    "purevk.pool2d",
    "purevk.map",
    "purevk.strips",
)  # their results lie as their arguments do
ROW_MAJOR = (
    "aten.view.default",
    "aten.cat.default",
    "purevk.host",
)  # they flatten, join or give away what is row-major
CONVOLUTION = "purevk.conv2d"


class LayoutQuery:
    """What a kernel's `layouts` and `adapt` decide by: `query(value)` is where an argument lies.

    Attributes:
        copied: `copied(value, order)` emits a copy with another order of dims in memory.
        traits: the device; None: unknown.
        users: the nodes that read each value.
        outputs: the values that leave the graph.
    """

    def __init__(
        self,
        layout: Callable[[Value], Layout],
        copied: Callable[[Value, tuple[int, ...]], Value],
        traits: DeviceTraits | None,
        users: Mapping[Value, Sequence[Node]],
        outputs: set[Value],
    ) -> None:
        self._layout, self.copied, self.traits, self.users, self.outputs = (
            layout,
            copied,
            traits,
            users,
            outputs,
        )

    def __call__(self, value: Value) -> Layout:
        return self._layout(value)

    def read(self, value: Value) -> bool:
        """Whether anybody reads a value."""
        return value in self.users or value in self.outputs


def is_nchw(layout: Layout) -> bool:
    """Whether the rows of [B, C, H, W] are dense, and the channels are not."""
    _, channel, _, column = layout.strides
    return (
        isinstance(column, int) and column == 1 and not (isinstance(channel, int) and channel == 1)
    )


def is_nchw_operand(operand: Operand) -> bool:
    """`is_nchw` of an operand."""
    return is_nchw(operand.layout)


def keeps_nchw(
    node: Node,
    x: Value,
    query: LayoutQuery,
    converts: bool,
    can: Callable[[Node, DeviceTraits], bool],
) -> bool:
    """Whether the results of a kernel on images `x` should be planes, as these are.

    Args:
        converts: to work channels last, the kernel copies `x` first; otherwise it reads it as it
            lies.
        can: whether a convolution can work on planes, on a device.
    """
    traits = query.traits
    if traits is None or not traits.profile.coalesces_accesses or not is_nchw(query(x)):
        return False
    last, planes = _readers(node.results, query, can, set())
    made = 2 * sum(_bytes(value) for value in node.results)
    dispatch = traits.profile.dispatch_cost_bytes
    cost_planes = last * (made + dispatch)
    cost_last = 2 * _bytes(x) + (dispatch if converts else 0) + (made + dispatch if planes else 0)
    return cost_planes <= cost_last


def _bytes(value: Value) -> int:
    return _dims.hint(value.type.nbytes)


def _readers(
    values: Sequence[Value],
    query: LayoutQuery,
    can: Callable[[Node, DeviceTraits], bool],
    seen: set[Value],
) -> tuple[int, int]:
    """How many readers want these images channels last, and how many as planes."""
    last = planes = 0
    for value in values:
        if value in seen:
            continue
        seen.add(value)
        planes += value in query.outputs
        for reader in query.users.get(value, ()):
            if (
                reader.op == CONVOLUTION
                and reader.args[0] is value
                and not can(reader, query.traits)
            ):
                last += 1
            elif reader.op in FOLLOWED or reader.op == CONVOLUTION:
                more = _readers(reader.results, query, can, seen)
                last, planes = last + more[0], planes + more[1]
            else:
                planes += reader.op in ROW_MAJOR or bool(reader.graphs)
    return last, planes


def column_rows(
    traits: DeviceTraits,
    out: Sequence[Any],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    width: int = 1,
) -> int:
    """How many outputs of a column an invocation makes: more share more, for as long as all have
    work; 0 where the windows are too large to be unrolled.

    Args:
        out: sizes of the result [B, C, H, W].
        width: channels that an invocation makes.
    """
    loads = lambda rows: ((rows - 1) * stride[0] + (kernel[0] - 1) * dilation[0] + 1) * kernel[1]  # noqa: E731
    work = _dims.upper(_dims.product(out)) // width
    profile = traits.profile
    # Invocations of several channels have more to do each.
    enough = traits.processors * (
        profile.enough_invocations_per_core if width == 1 else profile.min_invocations_per_core
    )
    most = profile.max_window_elements
    for rows in (8, 4, 2) if stride[0] == 1 < kernel[0] else (4, 2):
        fits = loads(rows) <= most and work >= rows * enough
        if fits and _dims.upper(out[2]) >= rows:
            return rows
    return 1 if loads(1) <= most else 0
