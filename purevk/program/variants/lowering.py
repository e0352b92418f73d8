"""From the front end's graph to a plan: the one way that all lowerings of graphs take."""

from __future__ import annotations

import contextlib
import gc
import re
import time
from collections.abc import Callable, Iterator, Mapping

from purevk.errors import GraphError, PurevkError, located
from purevk.ir import Graph, GuardLog, ReadLog
from purevk.ir.expected import Expected, expecting
from purevk.schedule.plan import Lowered
from purevk.tuning import DeviceTraits


def lower_graph(
    source: Callable[[], Graph],
    traits: DeviceTraits,
    expected: Mapping[str, Expected] | None = None,
    add_seconds: Callable[[str, float], None] | None = None,
    round: str = "fused",
) -> Lowered:
    """Runs a front end and the passes, and makes the plan. Needs no device.

    Args:
        source: makes the graph, whose constants and states are those that lowerings share.
        traits: of the device.
        expected: data-dependent sizes that earlier calls had, by the names of their symbols.
        add_seconds: is told the name of each phase ("import", "passes", "lower") and when it began.
        round: "fused" or "eager", see `purevk.load`.

    Raises:
        GraphError: a node cannot be lowered; the error names the line of the user's code.
        UnsupportedProgramError, FileFormatError: as `purevk.load` does.
    """
    # All operators come with these, and a program whose plan is kept needs none of them.
    from purevk.passes.check_indices import ranges_of_inputs
    from purevk.passes.pipeline import optimize
    from purevk.schedule.planning import make_plan

    done = add_seconds or (lambda phase, start: None)
    with GuardLog() as log, ReadLog() as reads, expecting(expected or {}):
        start = time.perf_counter()
        imported = source()
        done("import", start)
        with naming_lines(imported):
            start = time.perf_counter()
            graph = optimize(imported, traits, round=round)
            done("passes", start)
            start = time.perf_counter()
            plan = make_plan(graph, traits)
            done("lower", start)
    _check_decisions(graph, log)
    indices = ranges_of_inputs(imported)
    read = None if reads.borrowed else tuple(reads.data)
    return Lowered(imported, graph, plan, tuple(log.guards), indices, read)


def _check_decisions(graph: Graph, log: GuardLog) -> None:
    """Raises `GraphError` if something was decided about a number that follows from data, and no call
    can check it."""
    symbols = {symbol for inner in graph.nested() for symbol in inner.symbols}
    for guard in log.guards:
        if any(symbol.unbacked and symbol not in symbols for symbol in guard.symbols):
            raise GraphError(
                "a decision about a data-dependent number cannot be checked",
                where=graph.name,
                why=f"{guard} was taken to hold, and no call computes it",
                next="report it, with the module; bound the number with torch._check in the model",
            )


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Within this, Python looks for no reference cycles. It would go through all nodes and
    dispatches again and again while they are made, so that the time for each grows with the graph."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def naming_lines(graph: Graph) -> Iterator[None]:
    """Errors about a node of the graph say where it stands in the user's code."""
    try:
        yield
    except PurevkError as error:
        raise with_line(error, graph) from error.__cause__


def with_line(error: PurevkError, graph: Graph) -> PurevkError:
    for source in re.split(r"[\s,;()]+", error.where):
        if source in graph.lines:
            return located(error, source, graph.lines[source])
    return error
