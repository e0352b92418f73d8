"""Makes the plan of a method on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from purevk.errors import GraphError
from purevk.ir import Graph, Node, Size, Symbol, Value, dims_in, values_in
from purevk.ir import dims as _dims
from purevk.lower.copies import dense
from purevk.lower.lowering import Dispatch, Lowering
from purevk.ops import registry
from purevk.schedule.constants import split_constant
from purevk.schedule.plan import Plan, StorageAssignment
from purevk.schedule.segments import on_host, segments
from purevk.schedule.storage import assign_storage
from purevk.tuning import DeviceTraits


def make_plan(graph: Graph, context_traits: DeviceTraits) -> Plan:
    """Assigns storages, splits into segments, and lowers an optimized graph."""
    assignment = assign_storage(graph, context_traits)
    storage_of: Callable[[Value], Value] = lambda value: assignment.storages.get(value, value)  # noqa: E731
    split = split_constant(assignment.graph, storage_of, assignment.is_fixed)
    kept = split.kept
    once = Lowering(context_traits, assignment.storages, assignment.layouts, runs_once=True)
    once_of: list[Node] = []
    for node in split.once:
        _lower(once, node)
        once_of += [node] * (len(once.dispatches) - len(once_of))
    states = frozenset(split.graph.states)
    main = Lowering(context_traits, assignment.storages, assignment.layouts, states=states)
    made: dict[Node, list[Dispatch]] = {}
    for node in split.graph.nodes:
        if not on_host(node):
            first = len(main.dispatches)
            _lower(main, node)
            made[node] = main.dispatches[first:]
    steps = segments(split.graph, storage_of, _needs(split.graph, made))
    ranges: list[tuple[int, int]] = []
    nodes_of: list[Node] = []
    dispatches: list[Dispatch] = []
    for step in steps:
        first = len(dispatches)
        if step.on_device:
            for node in step.nodes:
                dispatches += made[node]
                nodes_of += [node] * len(made[node])
        ranges.append((first, len(dispatches)))
    sizes: dict[Value, int] = {}
    for dispatch in (*once.dispatches, *dispatches):
        for binding in dispatch.bindings:
            sizes[binding.storage] = max(
                -(-binding.storage.type.nbytes // 4) * 4, 4
            )  # kernels may read whole words
    windows = {**once.windows, **main.windows}
    whole: Callable[[Value], Value] = lambda storage: (  # noqa: E731
        windows[storage].storage if storage in windows else storage
    )
    for window in windows.values():
        sizes[window.storage] = window.storage.type.nbytes
    used = {whole(b.storage) for d in dispatches for b in d.bindings}
    used_once = {whole(b.storage) for d in once.dispatches for b in d.bindings}
    plan = Plan(
        graph=graph,
        assignment=StorageAssignment(split.graph, assignment.storages, assignment.layouts),
        steps=steps,
        dispatches=tuple(dispatches),
        ranges=tuple(ranges),
        nodes_of=tuple(nodes_of),
        once=tuple(once.dispatches),
        once_of=tuple(once_of),
        once_kept=kept,
        sizes=sizes,
        constants=tuple(value for value in graph.constants if value in used),
        once_constants=tuple(value for value in graph.constants if value in used_once),
        requirements=tuple(main.requirements),
        windows=windows,
        checks=main.checks,
        inner={
            step.nodes[0]: tuple(make_plan(inner, context_traits) for inner in step.nodes[0].graphs)
            for step in steps
            if step.nodes[0].graphs
        },
    )
    _find_transfers(plan, set(kept))
    return plan


def _needs(graph: Graph, made: Mapping[Node, list[Dispatch]]) -> dict[Node, set[Symbol]]:
    """The unbacked symbols whose values each node's dispatches, or its CPU function, need."""
    unbacked = graph.unbacked
    if not unbacked:
        return {}
    found = {}
    for node in graph.nodes:
        sizes: list[Size] = [
            size
            for dispatch in made.get(node, ())
            for size in (*dispatch.grid, *dispatch.push, dispatch.repeat)
        ]
        if on_host(node):
            nodes = [
                node,
                *(
                    inside
                    for inner in node.graphs
                    for each in inner.nested()
                    for inside in each.nodes
                ),
            ]
            for each in nodes:
                sizes += dims_in(each.args)
                sizes += [
                    size for value in (*each.inputs, *each.results) for size in value.type.dims
                ]
        needed = set().union(*map(_dims.symbols, sizes)) & set(unbacked) if sizes else set()
        if needed:
            found[node] = needed
    return found


def _lower(lowering: Lowering, node: Node) -> None:
    lowering.node = node
    lowering.traits.choices.begin(node)
    form = registry.definition_of(node).form
    if not isinstance(form, registry.Kernel):
        raise GraphError(
            f"{node.op} cannot be lowered",
            where=node.source,
            why=f"its form is {type(form).__name__}; kernels alone are lowered",
        )
    if not form.any_size and not (form.windows and form.windows(node)):
        _copy_far_apart(lowering, node)
    form.lower(lowering, node)
    lowering.copies.clear()
    lowering.traits.choices.begin(None)
    lowering.node = None


def _copy_far_apart(lowering: Lowering, node: Node) -> None:
    """Copies the inputs of a node whose elements are farther apart than a binding spans, for a kernel
    that binds each at once."""
    for value in dict.fromkeys(node.inputs):
        if value in registry.mutated(node):
            continue
        operand = lowering.operand(value)
        if lowering.is_large(operand) and value.type.nbytes <= lowering.traits.max_storage_range:
            lowering.copies[value] = dense(lowering, operand)


def _find_transfers(plan: Plan, kept: set[Value]) -> None:
    """What each device segment needs written before it and read after it."""
    graph, storages = plan.assignment.graph, plan.assignment.storages
    on_device: set[Value] = set()
    made_by: dict[Value, int] = {}
    for number, step in enumerate(plan.steps):
        for node in step.nodes:
            for value in node.results:
                made_by[value] = number
    host_reads: dict[Value, None] = dict.fromkeys(values_in(graph.outputs))
    for step in plan.steps:
        if not step.on_device:
            host_reads.update(dict.fromkeys(step.nodes[0].inputs))
    for source in graph.symbols.values():
        if source.value is not None and source.dim is None and source.value not in graph.inputs:
            host_reads[source.value] = None
    resident = set(graph.constants) | set(graph.states) | set(plan.checks) | kept
    uploads: list[tuple[Value, ...]] = []
    downloads: list[tuple[Value, ...]] = []
    for step, (first, last) in zip(plan.steps, plan.ranges):
        if not step.on_device:
            uploads.append(())
            downloads.append(())
            continue
        needs: dict[Value, None] = {}
        written: set[Value] = set()
        for dispatch in plan.dispatches[first:last]:
            for binding in dispatch.bindings:
                window = plan.windows.get(binding.storage)
                storage = binding.storage if window is None else window.storage
                if storage in resident or storage in on_device:
                    continue
                if binding.write:
                    written.add(storage)
                elif storage not in written:
                    needs[storage] = None
        # A storage that the host made (an input, or a result of a CPU node).
        host_made = [v for v in needs if v not in made_by or not plan.steps[made_by[v]].on_device]
        uploads.append(tuple(host_made))
        on_device.update(host_made)
        on_device.update(written)
        reads = []
        for value in host_reads:
            storage = storages.get(value, value)
            if storage in written and storage not in reads:
                reads.append(storage)
        downloads.append(tuple(reads))
    # States and folded constants that the host reads come down with the last device segment.
    plan.uploads, plan.downloads = tuple(uploads), tuple(downloads)
