"""Operators with the argument `dtype`: every pair of input and result dtypes that torch takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purevk.ops  # noqa: F401
from purevk.ops import registry
from tests.ops.harness import Case, aten, check, tensor, works

pytestmark = [
    pytest.mark.device,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
REQUIRED = {"dim": 0, "p": 2, "keepdim": False}
UNDEFINED = ("empty", "rand", "new_")  # values that are none, or random


def _overloads() -> list[Any]:
    found = []
    for definition in registry.definitions():
        for name in (definition.name, *definition.names):
            if not name.startswith("aten.") or name[5:].startswith(UNDEFINED):
                continue
            _, packet, overload = name.split(".")
            made = getattr(getattr(aten, packet, None), overload, None)
            if made is None:
                continue
            arguments = made._schema.arguments
            if str(arguments[0].type) == "Tensor" and any(a.name == "dtype" for a in arguments):
                found.append(made)
    return found


def _arguments(overload: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments after the tensor, by name."""
    required = {}
    for argument in overload._schema.arguments[1:]:
        if not argument.has_default_value() and argument.name in REQUIRED:
            value = REQUIRED[argument.name]
            several = argument.name == "dim" and "List" in str(argument.type)
            required[argument.name] = [value] if several else value
    return {**required, "dtype": dtype}


@pytest.mark.parametrize("overload", _overloads(), ids=str)
def test_every_pair(overload: Any) -> None:
    cases = []
    for source in DTYPES:
        # Products of more would overflow float16.
        low, high = (1, 2) if "prod" in str(overload) else (-4, 4)
        x = tensor(4, 6, dtype=source, low=low, high=high)
        for target in DTYPES:
            arguments = _arguments(overload, target)
            if works(overload, x, **arguments) is not None:
                cases.append(Case(overload, (x,), arguments, name=f"{overload} {source} {target}"))
    if not cases:
        pytest.skip("needs arguments that no rule here gives")
    check(cases)
