"""What the indices among the inputs of a call have to be within."""

from __future__ import annotations

from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.ir.dims import Size

# The alias of a node that converts an input for a delegate. The module that was exported has none
# such: a number that does not fit is no index of it.
DELEGATE_INPUT = "et_vk.input"


@dataclass(frozen=True)
class IndexRange:
    """The indices that an operator takes: from `lowest` to `below`, without it, once they are of
    `dtype`. Sizes that vary are known at a call."""

    lowest: Size
    below: Size
    dtype: DType
    op: str
    source: str
