"""Every operator on the device, with the calls that the samples of torch's own operator tests
make."""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch.utils import _pytree as pytree

import purevk.ops  # noqa: F401
from purevk.ops import registry
from tests.ops.harness import Case, failures, ran_on_host
from tests.ops.samples import Call, calls

pytestmark = [
    pytest.mark.device,
    pytest.mark.slow,
]  # slow: torch's samples take half a minute to make

NAMES = [each.name for each in registry.definitions() if each.name.startswith("aten.")]
MOST = 24  # calls of each operator
# Tolerances of float32 above the usual, relative and absolute.
LOOSE = {
    # Samples up to 9: sums of terms up to 81.
    "aten.mm.default": (2e-5, 1e-4), "aten.addmm.default": (2e-5, 1e-4), "aten.bmm.default": (2e-5, 1e-4),
    "aten.convolution.default": (2e-5, 2e-4),
    # GLSL's own functions.
    "aten.sin.default": (2e-5, 1e-5), "aten.cos.default": (2e-5, 1e-5), "aten.tan.default": (2e-5, 1e-4),
    # A sum of many terms, in float32 throughout.
    "aten.polygamma.default": (5e-5, 1e-5), "aten.special_hermite_polynomial_he.default": (5e-5, 1e-5),
}  # fmt: skip
# The index of any of several equal elements is right. What is checked is that the elements at the
# indices are the values.
TIES = ("sort", "topk", "kthvalue", "median", "nanmedian", "mode")
# The second and later results are for torch's backward pass.
FIRST_ONLY = ("_embedding_bag_forward_only", "_embedding_bag")


def spread(found: list[Call]) -> list[Call]:
    """Some of the calls, from all over the list."""
    step = max(len(found) / MOST, 1.0)
    return [found[int(n * step)] for n in range(min(MOST, len(found)))]


def is_sound(call: Call) -> bool:
    """Whether the result follows from the sizes and elements of the arguments, up to a rounding."""
    name = str(call.overload)
    if registry.find(name).random or "empty" in name:
        return False  # tests/ops/creation/test_random.py and test_fill.py
    if "linspace" in name and call.kwargs.get("dtype") is torch.float16:
        return False  # torch rounds every step to float16
    if "as_strided" in name:
        return False  # the samples read the memory behind views; tests/ops/movement/test_rearrange.py has cases
    if call.args and isinstance(call.args[0], torch.Tensor) and call.args[0].dtype is torch.float16:
        # torch rounds to float16 what these then take the whole part of.
        return not (call.kwargs.get("rounding_mode") or "grid_sampler" in name)
    return True


def as_case(call: Call) -> Case:
    half = any(
        t.dtype is torch.float16
        for t in pytree.tree_leaves((call.args, call.kwargs))
        if isinstance(t, torch.Tensor)
    )
    packet = call.overload.overloadpacket.__name__
    fn, expected = call.overload, call.results
    if half and packet == "convolution":
        # torch adds up transposed convolutions in float16.
        wide = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in call.args]
        expected = call.overload(*wide, **call.kwargs).half()
    if packet in FIRST_ONLY:
        fn, expected = lambda *args, **kwargs: call.overload(*args, **kwargs)[0], call.results[0]
    elif packet in TIES and isinstance(call.results, tuple):
        fn, expected = (
            functools.partial(_values_at_indices, call),
            _values_at_indices(call, *call.args, **call.kwargs),
        )
    rtol, atol = (
        (4e-3, 2e-2) if half else LOOSE.get(registry.find(str(call.overload)).name, (2e-5, 1e-5))
    )
    # The samples lie within [-9, 9]; what is near 0 after a subtraction has their rounding.
    return Case(
        fn,
        call.args,
        call.kwargs,
        expected=expected,
        host=True,
        rtol=rtol,
        atol=atol,
        name=str(call.overload),
    )


def _values_at_indices(
    call: Call, x: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    made = call.overload(x, *args, **kwargs)
    values, indices = made[0], made[1]
    names = [argument.name for argument in call.overload._schema.arguments]
    dim = dict(zip(names[1:], args), **kwargs).get("dim", -1)
    if not x.dim():
        return values, indices
    if indices.dim() < x.dim():
        indices = indices.unsqueeze(dim)
    return values, torch.gather(x, dim, indices)


@pytest.mark.parametrize("name", NAMES)
def test_operator(name):
    found = spread([call for call in calls().get(name, []) if is_sound(call)])
    if not found:
        pytest.skip("no sample of torch's OpInfo calls the operator")
    before = len(ran_on_host)
    wrong = failures([as_case(call) for call in found])
    folder = os.environ.get("PUREVK_TEST_REPORT")
    if folder:
        with open(os.path.join(folder, "samples.txt"), "a", encoding="utf-8") as file:
            file.write(
                f"{name} {len(found) - len(wrong)}/{len(found)}, {len(ran_on_host) - before} on"
                f" the CPU {ran_on_host[before:][:1]}\n"
            )
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong)
