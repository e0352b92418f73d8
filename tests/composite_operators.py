"""Keeps what torch collects anew in each `run_decompositions`."""

from __future__ import annotations

import functools
import sys
from typing import Any


def collect_composite_operators_once() -> None:
    """Has torch collect its composite operators once for each state of its registry, not for each
    namespace of each export: a fifth of the time in which executorch lowers a small model. Does nothing
    if torch is not imported, or has no such function."""
    if "torch" not in sys.modules:
        return
    import torch
    from torch._export import utils

    collect = getattr(utils, "_collect_all_valid_cia_ops_for_namespace", None)
    if collect is None or hasattr(collect, "__wrapped__"):
        return
    collected: dict[Any, Any] = {}

    @functools.wraps(collect)
    def collect_once(namespace: Any) -> Any:
        library = torch.library
        registered = len(library._defs), len(library._impls), len(torch.ops.loaded_libraries)
        key = namespace.name, len(torch.ops._dir), registered
        if key not in collected:
            collected[key] = collect(namespace)
        return collected[key]

    utils._collect_all_valid_cia_ops_for_namespace = collect_once
