"""Test cases of the calls that torch's operator samples make."""

from __future__ import annotations

import functools

import torch
from torch.utils import _pytree as pytree

import purevk.ops  # noqa: F401
from purevk.ops import registry
from tests.ops.harness import Case
from tests.ops.samples import Call

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


def spread(found: list[Call], most: int = MOST) -> list[Call]:
    """Some of the calls, from all over the list."""
    step = max(len(found) / most, 1.0)
    return [found[int(n * step)] for n in range(min(most, len(found)))]


def is_sound(call: Call) -> bool:
    """Whether the result follows from the sizes and elements of the arguments, up to a rounding."""
    name = str(call.overload)
    if registry.find(name).random or "empty" in name:
        return False  # tests/ops/creation/test_random.py and test_fill.py
    if name == "aten._linalg_svd.default" and _has_vectors(call):
        return False  # signs of vectors; tests/ops/linalg/test_spectra.py puts matrices together
    if "linspace" in name and call.kwargs.get("dtype") is torch.float16:
        return False  # torch rounds every step to float16
    if "as_strided" in name:
        return False  # the samples read the memory behind views; tests/ops/movement/test_rearrange.py has cases
    if call.args and isinstance(call.args[0], torch.Tensor) and call.args[0].dtype is torch.float16:
        # torch rounds to float16 what these then take the whole part of.
        return not (call.kwargs.get("rounding_mode") or "grid_sampler" in name)
    return True


def _has_vectors(call: Call) -> bool:
    """Whether a singular value decomposition gives its vectors too (compute_uv, the third argument)."""
    return bool(call.args[2] if len(call.args) > 2 else call.kwargs.get("compute_uv", True))


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
