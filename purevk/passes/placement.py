"""Which nodes run on the device and which on the CPU, and the segments that follow."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from purevk.dtypes import DType
from purevk.ir import Graph, Node, Symbol, Value
from purevk.lower.lowering import DeviceTraits
from purevk.ops import registry
from purevk.passes.expand import expand_rewrites
from purevk.passes.layout import HOST
from purevk.passes.rewrite import Rewriter

# Features that a kernel needs to read and write elements of a type.
_NEEDS = {
    DType.bool: ("storage_8bit", "int8"),
    DType.uint8: ("storage_8bit", "int8"),
    DType.int8: ("storage_8bit", "int8"),
    DType.int16: ("storage_16bit", "int16"),
    DType.float16: ("storage_16bit",),
    DType.bfloat16: ("storage_16bit", "int16"),
    DType.int64: ("int64",),
    DType.float64: ("float64",),
}


# Operators that take a large weight in parts.
_SPLIT = {
    "aten.linear.default", "aten.embedding.default", "aten._weight_int8pack_mm.default", "et_vk.linear_qcs4w.default",
    "et_vk.linear_q4gsw.default", "et_vk.linear_dq8ca_q4gsw.default", "et_vk.linear_q8ta_q8csw.default",
    "et_vk.q8ta_linear.default", "et_vk.embedding_q4gsw.default", "quantized_decomposed.embedding_byte.default",
    "quantized_decomposed.embedding_4bit.default", "quantized_decomposed.embedding_2bit.default",
}  # fmt: skip


def refusal(node: Node, traits: DeviceTraits) -> str | None:
    """Why a node cannot run on the device; None if it can."""
    if node.op == HOST:
        return node.args[1]
    row = registry.find(node.op)
    if row is None or row.form is None:
        return "no kernel"
    for value in (*node.inputs, *node.results):
        if value.type.dtype.is_complex:
            return "no kernel takes complex numbers"
        missing = [name for name in _NEEDS.get(value.type.dtype, ()) if name not in traits.features]
        if missing:
            return f"{value.type.dtype.name} needs the device feature {', '.join(missing)}"
    if node.op not in _SPLIT:
        for value in (*node.inputs, *node.results):
            if value.type.nbytes > traits.max_storage_range and not isinstance(
                row.form, registry.View
            ):
                return f"{value.type} is larger than the {traits.max_storage_range} bytes that one binding spans"
    if isinstance(row.form, registry.Kernel) and registry.expansion(node) is not None:
        return None
    supports = getattr(row.form, "supports", None)
    return supports(node, traits) if supports is not None else None


def _refused_inside(graph: Graph, node: Node, traits: DeviceTraits) -> str | None:
    """Why what a node expands to cannot run on the device: asked of nodes in double precision
    alone, for which fewer kernels are written."""
    if registry.expansion(node) is None:
        return None
    if all(value.type.dtype is not DType.float64 for value in (*node.inputs, *node.results)):
        return None
    inside = expand_rewrites(graph.with_nodes((node,)), traits)
    return next(
        (reason for each in inside.nodes if (reason := refusal(each, traits)) is not None), None
    )


def assign_hosts(graph: Graph, traits: DeviceTraits) -> Graph:
    """Wraps each node that the device cannot run into a `purevk.host` node, whose first argument is
    the operator's name."""
    reasons = {
        node: None
        if registry.is_control(node)
        else refusal(node, traits) or _refused_inside(graph, node, traits)
        for node in graph.nodes
    }
    _stay_on_host(graph, reasons)
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        reason = reasons[node]
        if reason is not None and node.op != HOST:
            node = Node(HOST, (_name_for_cpu(node), reason, node.args), node.results, node.source)
        rewriter.keep(node)
    return rewriter.finish()


def _name_for_cpu(node: Node) -> str:
    """The operator as torch knows it: the overload that the file names, or the ATen operator that
    it stands for."""
    foreign = not node.alias.startswith("aten.") and node.op.startswith("aten.")
    return node.op if foreign or not node.alias else node.alias


def _stay_on_host(graph: Graph, reasons: dict[Node, str | None]) -> None:
    """Views between CPU nodes stay there: crossing over would only copy."""
    producers = graph.producers()
    users = graph.users()
    outputs = graph.output_values()
    for node in reversed(graph.nodes):
        row = registry.find(node.op)
        if reasons[node] is not None or row is None or not isinstance(row.form, registry.View):
            continue
        readers = [user for value in node.results for user in users.get(value, [])]
        makers = [producers.get(value) for value in node.inputs]
        if any(value in outputs for value in node.results) or not readers:
            continue
        if all(reasons[user] for user in readers) and all(
            maker is not None and reasons[maker] for maker in makers
        ):
            reasons[node] = "between nodes on the CPU"


@dataclass(frozen=True)
class Segment:
    """Nodes that run together. `nodes` is one node where the host steps in: for the CPU, or control
    flow."""

    on_device: bool
    nodes: tuple[Node, ...]


def on_host(node: Node) -> bool:
    """Whether the host runs a node, or decides what runs."""
    return node.op == HOST or registry.is_control(node)


def segments(
    graph: Graph,
    storage_of: Any = lambda value: value,
    needs: Mapping[Node, Iterable[Symbol]] | None = None,
) -> tuple[Segment, ...]:
    """Nodes in as few segments as their dependencies allow: everything that the device can do, then
    what the CPU can, and so on. Nodes that write in place keep their order against those that touch
    the same bytes. A node comes in a later segment than what makes the values of the symbols that
    it needs."""
    producers = graph.producers()
    counts = {symbol: producers.get(source.value) for symbol, source in graph.learned.items()}
    after = {
        node: {counts[symbol] for symbol in symbols if counts.get(symbol) is not None}
        for node, symbols in (needs or {}).items()
    }
    waits, followers = _dependencies(graph, storage_of, after)
    pending = {node: len(before) for node, before in waits.items()}
    done: list[Segment] = []
    order = {node: at for at, node in enumerate(graph.nodes)}
    ready = [node for node in graph.nodes if not pending[node]]
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
    graph: Graph, storage_of: Any, after: Mapping[Node, set[Node]]
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
        for each in before:
            followers[each].append(node)
    return waits, followers
