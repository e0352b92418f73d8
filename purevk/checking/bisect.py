"""Finds what makes a program differ from eager torch: a node, a pass, a device feature."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from purevk import api, knobs
from purevk.checking.check import narrowest, program_difference
from purevk.checking.differences import Difference
from purevk.checking.parts import PartProgram, States, make_part
from purevk.checking.reference import Reference
from purevk.checking.report import describe
from purevk.checking.walk import Found, Trail, Walk
from purevk.errors import PurevkError
from purevk.graph.context import Context
from purevk.graph.unbacked import Replan
from purevk.ir import Graph, Symbol, Value, values_in
from purevk.ir import dims as _dims
from purevk.ir.binding import bind_symbols, input_symbols
from purevk.ir.printer import node_to_text
from purevk.passes.pipeline import OPTIONAL, skipped_passes


@dataclass(frozen=True)
class Trial:
    """One comparison: what ran, with what switched off, and how it differs ("": it does not)."""

    what: str
    without: str
    difference: str


@dataclass
class Verdict:
    """What was found.

    Attributes:
        kind: "none" (nothing differs), "node" (it differs when it runs by itself), "pass" or
            "feature" (without it, nothing differs), or "nodes" (neither explains it).
        passes, features: the smallest sets without which nothing differs; empty: there is none.
        nodes: the smallest run of nodes that differs, as text; its first one is number `first` of
            the graph.
        difference: of these nodes.
        trials: all comparisons.
        unchecked: operators without a reference, with the reasons.
        random: whether results of the whole program could not be compared.
    """

    kind: str = "none"
    passes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    first: int = 0
    difference: str = ""
    trials: list[Trial] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    random: bool = False


# Whether something agrees without some passes and features.
_Agrees = Callable[[Collection[str], Collection[str]], "str"]


class Bisection:
    """Bisects a call of a graph. A context manager, which closes the devices that it opens.

    Args:
        context: the device.
        graph: as the front end made it.
        inputs: of the call: arrays, integers or None.
        states: bytes of the states before the call.
        progress: called with what is compared next, as (phase, done, total).
    """

    def __init__(
        self,
        context: Context,
        graph: Graph,
        inputs: Sequence[object],
        states: States,
        progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
    ) -> None:
        self._context, self._graph, self._inputs = context, graph, inputs
        self._states, self._progress = states, progress
        self._env: dict[Symbol, int] = bind_symbols(input_symbols(graph), inputs)
        self._devices: dict[frozenset[str], Context] = {frozenset(): context}
        self._trail, self._eager = Trail(), Trail()
        self._narrow = narrowest(graph)
        self.verdict = Verdict()

    def __enter__(self) -> Bisection:
        return self

    def __exit__(self, *exc: object) -> None:
        for context in self._devices.values():
            if context is not self._context:
                context.close()

    def run(self) -> Verdict:
        """Finds the culprit."""
        verdict = self.verdict
        walk = Walk(self._context, self._graph, dict(self._states), trail=self._trail)
        walk.progress = partial(self._progress, "each node with eager torch")
        try:
            walk.run(self._inputs)
        except Found as difference:
            self._bisect_node(difference)
            return verdict
        finally:
            verdict.unchecked = dict(walk.counts.unchecked)
        self._note("each node by itself", (), (), "")
        verdict.random = walk.counts.random
        if verdict.random:
            return verdict
        self._env = self._trail.env
        walk = Walk(self._context, self._graph, dict(self._states), eager=True, trail=self._eager)
        walk.progress = partial(self._progress, "nodes in eager torch")
        walk.run(self._inputs)
        count = len(self._graph.nodes)
        whole: _Agrees = lambda passes, features: self._range(0, count, passes, features)  # noqa: E731
        self._progress("the optimized program", 0, 1)
        text = whole((), ())
        self._note("the optimized program", (), (), text)
        if text:
            self._bisect_program(whole)
        return verdict

    def _note(
        self, what: str, passes: Iterable[str], features: Iterable[str], difference: str
    ) -> bool:
        """Keeps a comparison; returns whether it agreed."""
        trial = Trial(what, ", ".join((*passes, *features)), difference)
        self.verdict.trials.append(trial)
        return not difference

    # -- passes and features -----------------------------------------------------------------------
    def _smallest_sets(self, what: str, agrees: _Agrees) -> None:
        """Finds the passes, and the features, without which something agrees."""

        def without_passes(names: Sequence[str]) -> bool:
            self._progress(f"{what} without {', '.join(names)}", 0, 1)
            return self._note(what, names, (), agrees(names, ()))

        def without_features(names: Sequence[str]) -> bool:
            self._progress(f"{what} without {', '.join(names)}", 0, 1)
            return self._note(what, (), names, agrees((), names))

        passes = [name for name in OPTIONAL if name not in skipped_passes()]
        self.verdict.passes = smallest(passes, without_passes)
        self.verdict.features = smallest(sorted(self._context.device.features), without_features)

    def _on(self, features: Collection[str]) -> Context:
        """A context on the same device without some features."""
        disabled = frozenset(features)
        if disabled not in self._devices:
            physical = self._context.device.physical
            device = api.Device(physical, disable=(*knobs.DISABLE(), *disabled))
            self._devices[disabled] = Context(device, self._context.cache)
        return self._devices[disabled]

    # -- a node that differs by itself ---------------------------------------------------------------
    def _bisect_node(self, difference: Found) -> None:
        verdict, node = self.verdict, difference.node
        what = f"node {difference.number} of {difference.graph.name}"
        verdict.kind, verdict.first = "node", difference.number
        verdict.nodes = (node_to_text(node),)
        verdict.difference = f"{describe(node, difference.arrays)}; {difference.difference.text}"
        self._note("each node by itself", (), (), f"{what}: {difference.difference.text}")
        reference = Reference(difference.graph, self._context.traits)
        results = tuple(value for value in difference.part.outputs if isinstance(value, Value))

        def agrees(passes: Collection[str], features: Collection[str]) -> str:
            return self._text(
                lambda: self._node_difference(difference, reference, results, passes, features)
            )

        self._smallest_sets(what, agrees)

    def _node_difference(
        self,
        found: Found,
        reference: Reference,
        results: Sequence[Value],
        passes: Collection[str],
        features: Collection[str],
    ) -> Difference | None:
        made, after = self._part(
            found.part, found.arrays, found.states, found.env, passes, features
        )
        by_value: dict[Value, np.ndarray] = dict(zip(results, made))
        for value, data in after.items():
            by_value[value] = _unpacked(value, data)
        node = found.node
        count = len(node.results)
        differences = reference.differences(
            node,
            {**found.inputs},
            found.env,
            [by_value.get(value) for value in node.results],
            found.expected[:count],
        )
        if differences:
            return differences[0]
        for value, expected in zip(found.values[count:], found.expected[count:]):
            dtype = value.type.dtype
            difference = program_difference([by_value[value]], [expected], [dtype], dtype)
            if difference is not None:
                return difference
        return None

    def _part(
        self,
        part: Graph,
        arrays: Mapping[Value, np.ndarray],
        states: States,
        env: Mapping[Symbol, int],
        passes: Collection[str],
        features: Collection[str],
    ) -> tuple[list[np.ndarray], States]:
        skip = {*skipped_passes(), *passes}
        with PartProgram(self._on(features), part, env, skip) as program:
            return program.run(arrays, states, dict(env))

    def _text(self, compare: Callable[[], Difference | None]) -> str:
        """The text of a difference; or why there was nothing to compare."""
        try:
            difference = compare()
        except (PurevkError, Replan) as error:
            return f"did not run: {str(error).splitlines()[0]}"
        return "" if difference is None else difference.text

    # -- an optimized program that differs ---------------------------------------------------------
    def _bisect_program(self, whole: _Agrees) -> None:
        verdict = self.verdict
        self._smallest_sets("the optimized program", whole)
        verdict.kind = "pass" if verdict.passes else "feature" if verdict.features else "nodes"

        def differs(first: int, end: int) -> bool:
            self._progress(f"nodes {first} to {end - 1}", 0, 1)
            text = self._range(first, end, (), ())
            return not self._note(f"nodes {first} to {end - 1}", (), (), text)

        first, end = 0, _first_true(0, len(self._graph.nodes), lambda end: differs(0, end))
        # The last start from which the nodes still differ: one later, they agree.
        first = end - _first_true(0, end, lambda length: differs(end - length, end))
        verdict.first = first
        verdict.nodes = tuple(map(node_to_text, self._graph.nodes[first:end]))
        verdict.difference = self._range(first, end, (), ())

    def _range(
        self, first: int, end: int, passes: Collection[str], features: Collection[str]
    ) -> str:
        return self._text(lambda: self._range_difference(first, end, passes, features))

    def _range_difference(
        self, first: int, end: int, passes: Collection[str], features: Collection[str]
    ) -> Difference | None:
        """How nodes `first` to `end - 1`, optimized together, differ from the same nodes by
        themselves."""
        graph, trail = self._graph, self._trail
        nodes = graph.nodes[first:end]
        inside = set(nodes)
        views = dict.fromkeys(
            view
            for node in nodes
            for value in node.inputs
            for view in trail.views.get(value, ())
            if view not in inside
        )
        later = {value for node in graph.nodes[end:] for value in node.inputs}
        later |= {*values_in(graph.outputs)}
        later |= {source.value for source in graph.symbols.values() if source.value is not None}
        outputs = [
            value
            for node in nodes
            for value in node.results
            if value in later and value in trail.values
        ]
        part = make_part(graph, (*views, *nodes), outputs)
        arrays = {v: trail.values[v] for v in part.inputs if isinstance(v, Value)}
        results, after = self._part(part, arrays, trail.states[first], self._env, passes, features)
        got = [*results, *(_unpacked(v, data) for v, data in after.items())]
        ends, others = trail.states[end], self._eager.states[end]
        want = [*(trail.values[v] for v in outputs), *(_unpacked(v, ends[v]) for v in after)]
        expected = [
            *(self._eager.values.get(v, trail.values[v]) for v in outputs),
            *(_unpacked(v, others[v]) for v in after),
        ]
        dtypes = [value.type.dtype for value in (*outputs, *after)]
        return program_difference(got, want, dtypes, self._narrow, expected)


def smallest(names: Sequence[str], agrees: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """A smallest set of names without which something agrees: leaving out any of them makes it
    differ. Empty if it differs without all of them too."""
    needed = list(names)
    if not needed or not agrees(needed):
        return ()
    parts = 2
    while len(needed) > 1:
        size = -(-len(needed) // parts)
        pieces = [needed[at : at + size] for at in range(0, len(needed), size)]
        for piece in pieces:
            remaining = [name for name in needed if name not in piece]
            if agrees(piece):
                needed, parts = piece, 2
                break
            if len(pieces) > 2 and agrees(remaining):
                needed, parts = remaining, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(parts * 2, len(needed))
    return tuple(needed)


def _first_true(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """A number at which something holds, and one below which it does not. It holds at `high`, and
    not at `low`."""
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _unpacked(value: Value, data: bytes) -> np.ndarray:
    sizes = [_dims.specialize(size) for size in value.type.dims]
    return np.frombuffer(data, value.type.dtype.numpy).reshape(sizes)
