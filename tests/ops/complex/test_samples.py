"""Operators of complex numbers, with the calls that the samples of torch's own operator tests make."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.ops.harness import failures
from tests.ops.sample_cases import as_case, is_sound, spread
from tests.ops.samples import Call, calls

pytestmark = [pytest.mark.device, pytest.mark.slow]
# Results that are not determined up to a rounding: torch inverts singular matrices, and near its
# poles the hyperbolic arc tangent loses digits in either way of computing it.
SKIPPED = ("aten.linalg_pinv.atol_rtol_tensor", "aten.atanh.default")


def is_complex(call: Call) -> bool:
    """Whether a call takes or gives complex numbers."""
    leaves = pytree.tree_leaves((call.args, call.kwargs, call.results))
    return any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in leaves)


def test_calls_of_samples() -> None:
    """A few calls of each operator, many in one program."""
    cases = []
    for name, found in calls((torch.complex64,)).items():
        chosen = [call for call in found if is_complex(call) and is_sound(call)]
        if name not in SKIPPED:
            cases += [as_case(call) for call in spread(chosen, 2)]
    assert len(cases) > 150
    wrong = [
        line for first in range(0, len(cases), 40) for line in failures(cases[first : first + 40])
    ]
    assert not wrong, "\n".join(wrong)
