"""Complex numbers: real tensors with a last dim of size 2, or two real tensors.

`views.py` has the operators that view the one as the other, `split.py` what rules are written with,
and the other modules have the rules: for each operator, what it is of real tensors.
"""

from purevk.ops.complex import (  # noqa: F401
    creation,
    elementwise,
    movement,
    products,
    reductions,
    views,
)
