"""Segments: nodes that the device runs in one submission, and what the host runs between them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

from purevk.ir import Graph, Node, Symbol, Value
from purevk.ir.host import HOST, SEED
from purevk.ops import registry
from purevk.schedule.plan import Segment


def on_host(node: Node) -> bool:
    """Whether the host runs a node, or decides what runs."""
    return node.op in (HOST, SEED) or bool(node.graphs)


def segments(
    graph: Graph,
    storage_of: Callable[[Value], Value] = lambda value: value,
    needs: Mapping[Node, Iterable[Symbol]] | None = None,
) -> tuple[Segment, ...]:
    """Nodes in as few segments as their dependencies allow: everything that the device can do, then
    what the CPU can, and so on. Nodes that write in place keep their order against those that touch
    the same bytes. A node comes in a later segment than what makes the values of the symbols that
    it needs."""
    producers = graph.producers()
    counts = {}
    for symbol, source in graph.unbacked.items():
        assert source.value is not None  # unbacked symbols have sources
        # A view has no node. What makes its storage makes it.
        maker = producers.get(source.value) or producers.get(storage_of(source.value))
        if maker is not None:
            counts[symbol] = maker
    after = {
        node: {counts[symbol] for symbol in symbols if symbol in counts}
        for node, symbols in (needs or {}).items()
    }
    waits, followers = _dependencies(graph, storage_of, after)
    pending = {node: len(before) for node, before in waits.items()}
    done: list[Segment] = []
    order = {node: at for at, node in enumerate(graph.nodes)}
    ready = [node for node in graph.nodes if not pending[node]]
    # Seeds come first: they need nothing from the device.
    for node in [node for node in ready if node.op == SEED]:
        done.append(Segment(False, (node,)))
        ready.remove(node)
        for follower in followers[node]:
            pending[follower] -= 1
            if not pending[follower]:
                ready.append(follower)
    while ready:
        batch: list[Node] = []
        queue = [(order[node], node) for node in ready if not on_host(node)]
        rest = [node for node in ready if on_host(node)]
        if queue:
            heapq.heapify(queue)
            within: set[Node] = set()
            while queue:
                node = heapq.heappop(queue)[1]
                batch.append(node)
                within.add(node)
                for follower in followers[node]:
                    pending[follower] -= 1
                    if not pending[follower]:
                        if on_host(follower) or not within.isdisjoint(after.get(follower, ())):
                            rest.append(follower)
                        else:
                            heapq.heappush(queue, (order[follower], follower))
            done.append(Segment(True, tuple(batch)))
            ready = rest
        else:
            node = min(rest, key=order.__getitem__)
            rest.remove(node)
            done.append(Segment(False, (node,)))
            for follower in followers[node]:
                pending[follower] -= 1
                if not pending[follower]:
                    rest.append(follower)
            # Other CPU nodes that are ready run before the device is asked again.
            hosts = [each for each in rest if on_host(each)]
            if hosts:
                later = [each for each in rest if not on_host(each)]
                for each in sorted(hosts, key=order.__getitem__):
                    done.append(Segment(False, (each,)))
                    for follower in followers[each]:
                        pending[follower] -= 1
                        if not pending[follower]:
                            later.append(follower)
                rest = later
            ready = rest
    return tuple(done)


def _dependencies(
    graph: Graph, storage_of: Callable[[Value], Value], after: Mapping[Node, set[Node]]
) -> tuple[dict[Node, set[Node]], dict[Node, list[Node]]]:
    producers = graph.producers()
    waits: dict[Node, set[Node]] = {node: set(after.get(node, ())) for node in graph.nodes}
    states = set(graph.states)
    writer: dict[Value, Node] = {}
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            for each in {value, storage_of(value)}:
                if each in producers:
                    waits[node].add(producers[each])
            state = storage_of(value)
            if state in states:
                if state in writer:
                    waits[node].add(writer[state])
                readers.setdefault(state, []).append(node)
        for value in registry.mutated(node):
            state = storage_of(value)
            waits[node].update(each for each in readers.get(state, []) if each is not node)
            writer[state] = node
            readers[state] = []
        waits[node].discard(node)
    followers: dict[Node, list[Node]] = {node: [] for node in graph.nodes}
    for node, before in waits.items():
        for earlier in before:
            followers[earlier].append(node)
    return waits, followers
