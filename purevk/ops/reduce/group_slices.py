"""Group norms of few large groups, on GPUs, in two dispatches: the moments of slices of each group
(`group_moments.comp`), and what they make of x (`group_apply.comp`). So a device has work for all of
its multiprocessors, and channels are read in vectors where those of a group are no multiple of 4.
"""

from __future__ import annotations

from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Node, Size, TensorType
from purevk.ir import dims as _dims
from purevk.lower.epilogue import make_epilogue
from purevk.lower.expression import Expression
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of, gcd4
from purevk.tuning import DeviceTraits

_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
_LEAST_EACH = 4  # vectors of an invocation: with fewer, joining takes longer than reading
_WORKGROUPS = 2  # for each multiprocessor
# Measured on an NVIDIA H200: bytes that a multiprocessor moves in a nanosecond if a row is read in
# vectors or by elements, where whole sectors of memory belong to a group; and nanoseconds that the
# second dispatch takes and the joining of slices.
_RATE, _RATE_OF_ELEMENTS, _SECOND = 30.0, 6.0, 4000.0


class Form(NamedTuple):
    """How the work is divided: `groups` of a workgroup, whose channels are `lanes` vectors, or elements
    if not `vector`; `slices` of the pixels of an image, or of the elements of a group if not `nhwc`."""

    nhwc: bool
    vector: bool
    local: int
    groups: int
    lanes: int
    slices: int


def form_of(
    traits: DeviceTraits, x: TensorType, groups: Size, nhwc: bool, vector: bool, aligned: bool
) -> Form | None:
    """How several workgroups share each group; None if one for each is faster, or runs where this
    does not.

    Args:
        vector: whether one workgroup for each group reads vectors.
        aligned: whether x and the result start at a multiple of 4 elements.
    """
    batch, channels, area = x.dims[0], x.dims[1], _dims.product(x.dims[2:])
    if not (
        traits.profile.has_fast_shared_memory
        and traits.has("subgroup_arithmetic", "subgroup_basic")
        and x.dtype in _FLOATS
        and isinstance(channels, int)
        and isinstance(groups, int)
    ):
        return None
    made = _divided(traits, _dims.upper(batch), channels, groups, area, nhwc, aligned)
    if made is None:
        return None
    rows, columns = _dims.upper(batch) * groups, channels // groups * _dims.upper(area)
    row_bytes = 2 * columns * x.dtype.itemsize  # read and written
    rate = _RATE if vector else _RATE_OF_ELEMENTS
    if nhwc:  # other groups have the rest of a sector
        rate *= min(channels // groups * x.dtype.itemsize / traits.profile.sector_bytes, 1.0)
    whole = -(-rows // traits.processors) * row_bytes / rate
    shared = _SECOND + 1.5 * rows * row_bytes / (_RATE * traits.processors)
    return made if shared < whole else None


def _divided(
    traits: DeviceTraits,
    batch: int,
    channels: int,
    groups: int,
    area: Size,
    nhwc: bool,
    aligned: bool,
) -> Form | None:
    """The work in slices; None if there is too little for them."""
    inner = channels // groups
    local = 512 if traits.max_invocations >= 512 and traits.max_shared_memory >= 32768 else 256
    if local > traits.max_invocations or local % traits.subgroup_size:
        return None
    together, lanes = 1, 1
    vector = aligned and gcd4(channels if nhwc else area)
    each = 4 if vector else 1
    if nhwc:
        fitting = [
            count
            for count in range(1, groups + 1)
            if groups % count == 0 and count * inner % each == 0 and count * inner // each <= local
        ]
        if not fitting:
            return None
        # The most invocations that have work; then the longest runs of channels.
        together = max(fitting, key=lambda n: (local // (n * inner // each) * n, n))
        lanes = together * inner // each
        count = _dims.upper(area)
    else:
        count = inner * _dims.upper(area) // each
    blocks = batch * groups // together
    stride = local // lanes
    wanted = -(-_WORKGROUPS * traits.processors // blocks)
    slices = min(wanted, max(count // (_LEAST_EACH * stride), 1))
    if slices < 2 and together == 1:
        return None
    return Form(nhwc, vector, local, together, lanes, slices)


def lower_slices(
    lowering: Lowering,
    node: Node,
    x: Operand,
    out: Operand,
    weight: Operand | None,
    bias: Operand | None,
    form: Form,
) -> None:
    """Appends both dispatches of a group norm of dense images."""
    groups, channels = node.size("groups"), x.dims[1]
    area = _dims.product(x.dims[2:])
    inner, each = channels // groups, 4 if form.vector else 1
    count = area if form.nhwc else _dims.ceil_div(inner * area, each)
    images = x.dims[0]
    moments = lowering.temporary(TensorType(DType.float32, (images * groups * form.slices, 2)))
    macros: dict[str, str | int] = {"NHWC": int(form.nhwc), "VEC4": int(form.vector)}
    macros |= {"LOCAL": form.local, "GROUPS_HERE": form.groups, "LANES": form.lanes}
    params: dict[str, Size] = {
        "groups": groups,
        "inner": inner,
        "area": area,
        "share": _dims.ceil_div(count, form.slices),
        "slices": form.slices,
    }
    grid: tuple[Size, Size, Size] = (form.slices, groups // form.groups, images)
    lowering.dispatch(
        "reduce/group_moments.comp",
        {"x": x, "moments": moments},
        params,
        macros,
        grid=grid,
        flops=4 * x.type.numel,
    )
    epilogue = make_epilogue(
        lowering,
        node.optional_attribute("epilogue", Expression),
        node.tensors("extras"),
        out,
        "row, col",
        full="row * (groups * inner) + col" if form.nhwc else "row * area + col",
        column=(1, "col") if form.nhwc else None,
        vector=form.vector,
        row=None if form.nhwc else (1, "row % (groups * inner)"),
    )
    epilogue.macros.pop("HAS_8BIT", None)
    lowering.dispatch(
        "reduce/group_apply.comp",
        {"x": x, "moments": moments, "out": out, "weight": weight, "bias": bias},
        {**params, "eps_bits": bits_of(node.float("eps"))},
        {**macros, "T_W": (weight or bias or x).dtype.glsl},
        epilogue=epilogue,
        grid=grid,
        flops=4 * x.type.numel,
    )
