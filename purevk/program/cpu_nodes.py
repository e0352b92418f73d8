"""Tells the log which nodes of a program run on the CPU."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from purevk.schedule.plan import Plan

_log = logging.getLogger("purevk")
_SHOWN = 3  # operators that are named


def log_cpu_nodes(name: str, plans: Iterable[Plan]) -> None:
    """Writes one line at INFO, if there are such nodes.

    Args:
        name: of the program.
        plans: of all its methods, with their sub-graphs.
    """
    if not _log.isEnabledFor(logging.INFO):
        return
    steps = [step for plan in plans for step in plan.steps]
    # The arguments of such a node are the operator, the reason, and the operator's arguments.
    counts = Counter(
        (str(step.nodes[0].args[0]), str(step.nodes[0].args[1]))
        for step in steps
        if step.runs_on == "cpu"
    )
    if not counts:
        return
    shown = [
        f"{count} x {operator} ({reason})"
        for (operator, reason), count in counts.most_common(_SHOWN)
    ]
    if len(counts) > _SHOWN:
        shown.append(f"{len(counts) - _SHOWN} other kinds")
    _log.info(
        "%s: %d of %d nodes run on the CPU: %s; `purevk inspect` lists them",
        name,
        counts.total(),
        sum(len(step.nodes) for step in steps),
        ", ".join(shown),
    )
