"""Names of a plan's kernels against torch's own schemas."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest

from purevk.frontends.executorch.names import OUT_ARGUMENTS, plan_name

torch = pytest.importorskip("torch")


def portable_kernels() -> list[str]:
    """The out-variants that executorch's portable kernels offer, as "op.overload" of aten."""
    pytest.importorskip("executorch")
    text = (
        resources.files("executorch.kernels.portable")
        .joinpath("functions.yaml")
        .read_text(encoding="utf-8")
    )
    return [
        line.split("op:")[1].strip()
        for line in text.splitlines()
        if line.startswith("- op:") and "::" not in line
    ]


def arguments(schema: Any) -> list[tuple[str, str]]:
    return [(each.name, str(each.type)) for each in schema.arguments if not each.is_out]


def writes(schema: Any) -> bool:
    return any(
        each.alias_info is not None and each.alias_info.is_write for each in schema.arguments
    )


@pytest.mark.export
def test_out_variants_stand_for_the_overload_with_their_arguments() -> None:
    """Each portable kernel's name is that of the overload whose arguments begin with its own, in
    torch's schemas."""
    overloads: dict[str, dict[str, Any]] = {}
    for schema in torch._C._jit_get_all_schemas():
        overloads.setdefault(schema.name, {})[schema.overload_name or "default"] = schema
    wrong, checked = [], 0
    for kernel in portable_kernels():
        op, _, overload = kernel.partition(".")
        known = overloads.get(f"aten::{op}", {})
        if overload not in known or f"aten.{kernel}" in OUT_ARGUMENTS:
            continue
        own = arguments(known[overload])
        fitting = [
            name
            for name, each in known.items()
            if not writes(each) and arguments(each)[: len(own)] == own
        ]
        if fitting:
            checked += 1
            named = plan_name(f"aten::{op}", overload)
            if named not in [f"aten.{op}.{name}" for name in fitting]:
                wrong.append(f"{kernel} is {named}, not {fitting}")
    assert not wrong, "\n".join(wrong)
    assert checked > 100
