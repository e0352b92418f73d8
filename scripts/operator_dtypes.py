#!/usr/bin/env python3
"""Finds out which dtypes each ATen operator takes on the device, for docs/ops.md.

    python scripts/operator_dtypes.py --update

Calls of PyTorch's own operator samples (`torch.testing`'s op_db) are repeated in every dtype that
eager torch takes, and lowered for this machine's device. A dtype counts if a call in it leaves no
node to the CPU. Otherwise the reason is kept. Nothing runs: `scripts/opinfo.py` compares results.
Overloads that torch decomposes before export have no entry.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from purevk.dtypes import DType  # noqa: E402
from purevk.errors import PurevkError  # noqa: E402
from purevk.ir.host import HOST  # noqa: E402
from purevk.ops import registry  # noqa: E402
from purevk.passes.pipeline import optimize  # noqa: E402
from tests.ops.harness import Case, build, context  # noqa: E402
from tests.ops.samples import DTYPES as SAMPLED  # noqa: E402
from tests.ops.samples import Call, calls  # noqa: E402

FOUND = ROOT / "docs" / "data" / "operator_dtypes.json"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
TRIES = 6  # calls tried for each operator and dtype


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help=f"writes {FOUND.relative_to(ROOT)}")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    traits, recorded = context().traits, calls((*SAMPLED, torch.complex64))
    found = {}
    for definition in registry.definitions():
        name = definition.name
        if recorded.get(name):
            found[name] = dtypes_of(recorded[name], traits)
            print(name, json.dumps(found[name]), flush=True)
    if args.update:
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()
        )
        text = f'{{"device": {json.dumps(context().device.name)}, "torch": "{torch.__version__.partition("+")[0]}", "rows": {{\n{lines}\n}}}}\n'  # noqa: E501
        FOUND.write_text(text, encoding="utf-8")
    return 0


def dtypes_of(recorded: list[Call], traits: Any) -> dict[str, Any]:
    """{"device": the dtypes that run there, "cpu": {dtype: why}}; dtypes that torch refuses are in
    neither."""
    device, cpu = [], {}
    for dtype in DTYPES:
        reasons = [
            reason
            for call in in_dtype(recorded, dtype)
            if (reason := why_on_cpu(call, traits)) is not None
        ]
        if not reasons:
            continue
        name = DType.from_torch(dtype).name
        if "" in reasons:
            device.append(name)
        else:
            cpu[name] = reasons[0]
    return {"device": device, "cpu": cpu} if cpu else {"device": device}


def in_dtype(recorded: list[Call], dtype: torch.dtype) -> list[Call]:
    """Calls whose first tensor is of a dtype: recorded ones, and some recorded in another dtype of
    its kind."""
    kinds = [[dtype], *([list(kind)] for kind in (FLOATS, INTEGERS, COMPLEX) if dtype in kind)]
    kinds = [kinds[0], *(kind[0] for kind in kinds[1:]), list(DTYPES)]
    for kind in kinds:
        made = []
        for call in recorded:
            main = main_dtype(call)
            if (
                main in kind
                and len(made) < TRIES
                and not is_empty(call)
                and (cast := in_another(call, main, dtype)) is not None
            ):
                made.append(cast)
        if made:
            return made
    return []


def main_dtype(call: Call) -> torch.dtype | None:
    """That of the first tensor, or of what the call makes."""
    leaves = pytree.tree_leaves((call.args, call.kwargs, call.results))
    return next((leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor)), None)


def is_empty(call: Call) -> bool:
    """Whether it is of no elements, for which nothing runs."""
    return any(
        leaf.numel() == 0
        for leaf in pytree.tree_leaves(call.results)
        if isinstance(leaf, torch.Tensor)
    )


def in_another(call: Call, main: torch.dtype, dtype: torch.dtype) -> Call | None:
    """The call with one dtype in the place of another; None if eager torch does not take it."""
    if main is dtype:
        return call

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype is main:
            return (
                leaf.abs().to(dtype)
                if dtype is torch.uint8 and main is not torch.bool
                else leaf.to(dtype)
            )
        return dtype if leaf is main else leaf

    args, kwargs = pytree.tree_map(cast, (call.args, call.kwargs))
    try:
        with torch.no_grad():
            results = call.overload(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None
    made = Call(call.overload, args, kwargs, results)
    return made if main_dtype(made) is dtype else None


def why_on_cpu(call: Call, traits: Any) -> str | None:
    """Why a node of the call would run on the CPU: empty if none would, None if the graph cannot be
    made."""
    try:
        graph = optimize(build([Case(call.overload, call.args, call.kwargs)]), traits)
    except (PurevkError, NotImplementedError, ValueError, TypeError, KeyError) as error:
        print(
            f"  {call.overload}: {type(error).__name__}: {' '.join(str(error).split())[:160]}",
            file=sys.stderr,
        )
        return None
    return next((node.args[1] for node in graph.nodes if node.op == HOST), "")


if __name__ == "__main__":
    sys.exit(main())
