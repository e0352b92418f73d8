"""Images as NCHW or NHWC: the order that a kernel for both gives its result, by the bytes that the
conversions around it would move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from purevk.ir import Layout, Node, Size, Value
from purevk.ir import dims as _dims
from purevk.lower.lowering import Operand
from purevk.tuning import DeviceTraits

# Operators whose results have the order of dims of their arguments.
RESAMPLE_COARSENED = "purevk.resample_coarsened"
FOLLOWED = (
    "purevk.pointwise",
    "purevk.pool2d",
    "purevk.map",
    "aten.cat.default",
    "purevk.pieces",
    RESAMPLE_COARSENED,
)
# Operators that flatten or return a row-major tensor.
FLATTENING = ("aten.view.default", "purevk.host")
CONVOLUTION = "purevk.conv2d"
FRAGMENT_CONVOLUTION = "purevk.conv2d_fragments"  # always reads NHWC
NHWC = (0, 2, 3, 1)  # the order in memory of the dims of an image, outermost first


class LayoutQuery:
    """What a kernel's `layouts` and `adapt` decide by: `query(value)` is the layout of an argument.

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
        self._layout = layout
        self.copied = copied
        self.traits = traits
        self.users = users
        self.outputs = outputs

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
    """Whether the results of a kernel on images `x` should be NCHW, as these are.

    Args:
        converts: to make NHWC, the kernel copies `x` first; otherwise it reads NCHW.
        can: whether a convolution can work on NCHW, on a device.
    """
    traits = query.traits
    if traits is None or not traits.profile.coalesces_accesses or not is_nchw(query(x)):
        return False
    nhwc, nchw = _readers(node.results, query, lambda reader: can(reader, traits), set())
    made = 2 * sum(_bytes(value) for value in node.results)
    dispatch = traits.profile.dispatch_cost_bytes
    cost_nchw = nhwc * (made + dispatch)
    cost_nhwc = 2 * _bytes(x) + (dispatch if converts else 0) + (made + dispatch if nchw else 0)
    return cost_nchw <= cost_nhwc


def _bytes(value: Value) -> int:
    return _dims.hint(value.type.nbytes)


def _readers(
    values: Sequence[Value],
    query: LayoutQuery,
    can: Callable[[Node], bool],
    seen: set[Value],
) -> tuple[int, int]:
    """How many readers want these images as NHWC, and how many as NCHW."""
    nhwc = nchw = 0
    for value in values:
        if value in seen:
            continue
        seen.add(value)
        nchw += value in query.outputs
        for reader in query.users.get(value, ()):
            convolves = reader.op in (CONVOLUTION, FRAGMENT_CONVOLUTION)
            nchw_too = reader.op == CONVOLUTION and can(reader)
            if convolves and reader.tensor("x") is value and not nchw_too:
                nhwc += 1
            elif reader.op in FOLLOWED or convolves:
                more = _readers(reader.results, query, can, seen)
                nhwc, nchw = nhwc + more[0], nchw + more[1]
            else:
                nchw += reader.op in FLATTENING or bool(reader.graphs)
    return nhwc, nchw


def column_rows(
    traits: DeviceTraits,
    out: Sequence[Size],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    width: int = 1,
) -> int:
    """How many outputs of a column one invocation makes. More of them share more reads, as long as
    all invocations have work. 0 where the window is too large to be unrolled.

    Args:
        out: sizes of the result [B, C, H, W].
        width: channels that an invocation makes.
    """

    def loads(rows: int) -> int:
        return ((rows - 1) * stride[0] + (kernel[0] - 1) * dilation[0] + 1) * kernel[1]

    work = _dims.upper(_dims.product(out)) // width
    profile = traits.profile
    # An invocation that makes several channels has more work.
    enough = traits.processors * (
        profile.enough_invocations_per_core if width == 1 else profile.min_invocations_per_core
    )
    most = profile.max_window_elements
    for rows in (8, 4, 2) if stride[0] == 1 < kernel[0] else (4, 2):
        fits = loads(rows) <= most and work >= rows * enough
        if fits and _dims.upper(out[2]) >= rows:
            return rows
    return 1 if loads(1) <= most else 0
