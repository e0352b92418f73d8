"""Rules that many shape functions share."""

from __future__ import annotations

from collections.abc import Sequence

from purevk.ir import Size, TensorType
from purevk.ir import dims as _dims
from purevk.ops.registry import ShapeError

_MOST_PIECES = 1 << 16


def piece_count(size: Size, most: int = _MOST_PIECES) -> int:
    """`size` as a number, for what has a result, or a row of a table that the host makes, for each.

    Raises:
        ShapeError: there are more than `most`, as a small file can state.
    """
    count = _dims.specialize(size)
    if count > most:
        raise ShapeError(f"it takes {count} pieces", why=f"at most {most} are made")
    return count


def broadcast(*shapes: Sequence[Size]) -> tuple[Size, ...]:
    """The common shape of shapes under broadcasting."""
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for position, size in enumerate(shape, rank - len(shape)):
            present = result[position]
            if isinstance(present, int) and present == 1:
                result[position] = size
            elif (isinstance(size, int) and size == 1) or _dims.assume(present, "==", size):
                if isinstance(size, int):
                    result[position] = size if size != 1 else present
            else:
                raise ShapeError(
                    f"shapes {[list(map(str, s)) for s in shapes]} do not broadcast at dim {position}"
                )
    return tuple(result)


def equal_shapes(left: Sequence[Size], right: Sequence[Size]) -> bool:
    """Whether two shapes are equal. Sizes for which the bounds leave it open are taken to be, with a
    guard."""
    return len(left) == len(right) and all(_dims.assume(a, "==", b) for a, b in zip(left, right))


def broadcast_of(operands: Sequence[object]) -> tuple[Size, ...]:
    """The common shape of the tensors among operands."""
    return broadcast(*(operand.dims for operand in operands if isinstance(operand, TensorType)))


def wrap(dim: int, rank: int) -> int:
    """A dim counted from the end made one counted from the front; a 0-d tensor has dim 0 and -1
    too."""
    span = max(rank, 1)
    if not -span <= dim < span:
        raise ShapeError(f"dim {dim} is out of range for rank {rank}")
    return dim % span


def wrap_all(dims: Sequence[int] | int | None, rank: int) -> tuple[int, ...]:
    """Dims counted from the front, sorted; None or an empty list stands for all of them."""
    if isinstance(dims, int):
        dims = (dims,)
    if not dims:
        return tuple(range(rank))
    return tuple(sorted({wrap(dim, rank) for dim in dims}))


def reduced(sizes: Sequence[Size], dims: Sequence[int], keepdim: bool) -> tuple[Size, ...]:
    """Sizes after a reduction over `dims`."""
    if keepdim:
        return tuple(1 if d in dims else size for d, size in enumerate(sizes))
    return tuple(size for d, size in enumerate(sizes) if d not in dims)


def reshape(sizes: Sequence[Size], wanted: Sequence[Size]) -> tuple[Size, ...]:
    """`wanted` with its -1, if any, replaced so that the number of elements stays the same."""
    numel = _dims.product(sizes)
    holes = [
        position for position, size in enumerate(wanted) if isinstance(size, int) and size == -1
    ]
    if not holes:
        if not _dims.assume(_dims.product(wanted), "==", numel):
            raise ShapeError(f"cannot view {list(sizes)} as {list(wanted)}")
        return tuple(wanted)
    if len(holes) > 1:
        raise ShapeError(f"more than one -1 in {list(wanted)}")
    rest = _dims.product(size for position, size in enumerate(wanted) if position != holes[0])
    if rest == 0:
        raise ShapeError(f"cannot infer a size of {list(wanted)}")
    if not _dims.assume(numel % rest, "==", 0):
        raise ShapeError(f"cannot view {list(sizes)} as {list(wanted)}")
    return tuple(
        numel // rest if position == holes[0] else size for position, size in enumerate(wanted)
    )


def pair(values: Sequence[int] | int, count: int = 2) -> tuple[int, ...]:
    """A list of `count` numbers from one or `count` of them."""
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * count if len(values) == 1 else values


def is_empty(type: TensorType) -> bool:
    """Whether a tensor is known to have no elements."""
    return any(isinstance(size, int) and size == 0 for size in type.dims)
