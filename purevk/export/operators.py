"""The operators that the nodes of edge and exported programs call."""

from __future__ import annotations

from typing import Any

import torch


def name_of(target: Any) -> str:
    """The operator "namespace.op.overload" of an ATen overload, an edge one, or a Python function
    of sizes."""
    overload = overload_of(target)
    return str(overload) if overload is not None else getattr(target, "__name__", str(target))


def overload_of(target: Any) -> torch._ops.OpOverload | None:
    """The ATen overload that a node calls; an edge operator holds one."""
    if not isinstance(target, torch._ops.OpOverload):
        target = getattr(target, "_op", None)
    return target if isinstance(target, torch._ops.OpOverload) else None


def arguments_of(node: torch.fx.Node, overload: torch._ops.OpOverload) -> list[Any]:
    """The arguments in the schema's order, defaults filled in."""
    full = []
    for at, argument in enumerate(overload._schema.arguments):
        if at < len(node.args) and not argument.kwarg_only:
            full.append(node.args[at])
        else:
            full.append(node.kwargs.get(argument.name, argument.default_value))
    return full
