"""Tells of nodes of a program that run on the CPU: in the log, and by warnings."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from purevk.errors import TorchNeededWarning
from purevk.ir import Node
from purevk.ir import dims as _dims
from purevk.plain_text import printable
from purevk.program.variants.ranges import shown
from purevk.schedule.plan import Plan

_log = logging.getLogger("purevk")
_SHOWN = 3  # operators that are named


def log_cpu_nodes(name: str, plans: Sequence[Plan], binding: int) -> None:
    """Writes one line at INFO, if there are such nodes; one at WARNING if some are there because of
    upper bounds; and warns if only torch runs some, and is not installed.

    Args:
        name: of the program.
        plans: of all its methods, with their sub-graphs.
        binding: the bytes that one binding spans.
    """
    nodes = list(_cpu_nodes(plans))
    if not nodes:
        return
    bounds = {text: None for plan, node in nodes for text in _bounds(plan, node, binding)}
    if bounds:
        _log.warning(
            "%s: operators run on the CPU because of upper bounds, at which a tensor is larger than"
            " the %d bytes of one binding: %s; declare smaller bounds",
            name,
            binding,
            ", ".join(list(bounds)[:_SHOWN]),
        )
    if not _has_torch():
        warn_of_torch(name, plans)
    # The arguments of such a node are the operator, the reason, and the operator's arguments.
    counts = Counter((str(node.args[0]), str(node.args[1])) for _, node in nodes)
    kinds = [f"{count} x {op} ({reason})" for (op, reason), count in counts.most_common(_SHOWN)]
    if len(counts) > _SHOWN:
        kinds.append(f"{len(counts) - _SHOWN} other kinds")
    _log.info(
        "%s: %d of %d nodes run on the CPU: %s; `purevk inspect` lists them",
        name,
        counts.total(),
        sum(len(step.nodes) for plan in plans for step in plan.steps),
        ", ".join(kinds),
    )


def _has_torch() -> bool:
    try:
        return find_spec("torch") is not None
    except ImportError:  # something keeps it from being imported
        return False


def warn_of_torch(name: str, plans: Iterable[Plan]) -> None:
    """Gives `TorchNeededWarning` if only torch runs some nodes."""
    operators = list(dict.fromkeys(str(node.args[0]) for _, node in _cpu_nodes(plans)))
    if operators:
        from purevk.ops.executors import find_executor  # with it all operators are imported

        executors = {operator: find_executor(operator) for operator in operators}
        operators = [op for op, each in executors.items() if not each or each.tensors == "torch"]
    if operators:
        more = f" and {len(operators) - _SHOWN} others" if len(operators) > _SHOWN else ""
        warnings.warn(
            printable(
                f"{name} runs only where torch is installed: {', '.join(operators[:_SHOWN])}{more} run"
                " on the CPU on this device; register functions for them"
                " (purevk.ops.register_executor), or change the model (`purevk inspect` says why)"
            ),
            TorchNeededWarning,
            stacklevel=4,
        )


def _cpu_nodes(plans: Iterable[Plan]) -> Iterable[tuple[Plan, Node]]:
    return ((plan, step.nodes[0]) for plan in plans for step in plan.steps if step.runs_on == "cpu")


def _bounds(plan: Plan, node: Node, binding: int) -> Iterable[str]:
    """The bounds of sizes at which a tensor of a node is larger than a binding, as "x.shape[0] <= 9"."""
    for value in (*node.inputs, *node.results):
        if value.type.nbytes <= binding:
            continue
        for symbol in sorted(set().union(*map(_dims.symbols, value.type.dims)), key=str):
            if symbol.lower < symbol.upper:
                yield f"{shown(plan.graph, str(symbol))} <= {symbol.upper}"
