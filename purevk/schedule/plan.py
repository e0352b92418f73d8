"""What a lowered method is: the plan of a method on a device, with its segments, dispatches and
transfers. `planning.py` makes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from purevk.ir import Dim, Graph, Guard, Layout, Node, Value
from purevk.ir.host import HOST
from purevk.ir.index_range import IndexRange
from purevk.lower.lowering import BufferWindow, Dispatch, IndexCheck, KernelSpec, Requirement


@dataclass(frozen=True)
class Segment:
    """Nodes that run together. `nodes` is one node where the host steps in: for the CPU, control
    flow, or a seed."""

    on_device: bool
    nodes: tuple[Node, ...]

    @property
    def runs_on(self) -> str:
        """ "gpu", "cpu" (an operator that the device cannot run), or "host" (control flow, a
        seed)."""
        return "gpu" if self.on_device else "cpu" if self.nodes[0].op == HOST else "host"


@dataclass(frozen=True)
class StorageAssignment:
    """A graph with a storage and a layout for each value.

    Attributes:
        graph: without view nodes; copies are nodes.
        storages: the value whose bytes hold each value; those missing hold their own.
        layouts: the layout of each value in its storage; those missing are dense and row-major.
    """

    graph: Graph
    storages: Mapping[Value, Value]
    layouts: Mapping[Value, Layout]

    def is_fixed(self, value: Value) -> bool:
        """Whether the sizes of a value, and where it lies in its storage, are the same at every
        call. A slice at a position of the call has an offset of its own."""
        layout = self.layouts.get(value)
        numbers = () if layout is None else (layout.offset, *layout.strides)
        return value.type.is_static and not any(isinstance(number, Dim) for number in numbers)


@dataclass
class Plan:
    """A method lowered for a device, before anything is allocated.

    Attributes:
        assignment: the graph that runs at each call, with the storage and layout of its values.
        steps: its segments.
        dispatches: of all device segments, in order. ranges: for each step, first and last dispatch
            (equal on the CPU).
        once: dispatches of the part that depends on constants alone, `once_of` their nodes;
            `once_kept` are the storages it leaves.
        sizes: bytes of each storage.
        constants: values whose bytes the device needs for calls; `once_constants` those for the
            part that runs once.
        checks: storages of the notes of indices, with what they are about.
        inner: the plans of the sub-graphs of each control-flow node.
    """

    graph: Graph
    assignment: StorageAssignment
    steps: tuple[Segment, ...]
    dispatches: tuple[Dispatch, ...]
    ranges: tuple[tuple[int, int], ...]
    nodes_of: tuple[Node, ...]
    once: tuple[Dispatch, ...]
    once_of: tuple[Node, ...]
    once_kept: tuple[Value, ...]
    sizes: dict[Value, int]
    constants: tuple[Value, ...]
    once_constants: tuple[Value, ...]
    uploads: tuple[tuple[Value, ...], ...] = ()
    downloads: tuple[tuple[Value, ...], ...] = ()
    requirements: tuple[Requirement, ...] = ()
    windows: dict[Value, BufferWindow] = field(default_factory=dict)
    checks: dict[Value, IndexCheck] = field(default_factory=dict)
    inner: dict[Node, tuple[Plan, ...]] = field(default_factory=dict)

    def nested(self) -> Iterator[Plan]:
        """This plan and those of all sub-graphs, outer ones first."""
        yield self
        for plans in self.inner.values():
            for plan in plans:
                yield from plan.nested()

    def exposed_states(self, external: bool = False) -> set[Value]:
        """States that a call may have written when it turns out that an index is out of range. All
        other states are written by kernels that have read the notes of all checks before.

        Args:
            external: of calls with tensors of another API.
        """
        states = self.assignment.graph.states
        checks = [
            at
            for at, dispatch in enumerate(self.dispatches)
            if any(each.write and each.storage in self.checks for each in dispatch.bindings)
            and (external or not dispatch.external)
        ]
        found: set[Value] = set()
        for at, dispatch in enumerate(self.dispatches):
            guarded = any(each.kind == "flags" for each in dispatch.bindings)
            for binding in dispatch.bindings if checks else ():
                window = self.windows.get(binding.storage)
                storage = binding.storage if window is None else window.storage
                if binding.write and storage in states and (at < checks[-1] or not guarded):
                    found.add(storage)
        return found

    @property
    def kernels(self) -> list[KernelSpec]:
        """The specs of all pipelines, those of sub-graphs included."""
        return list(
            dict.fromkeys(
                dispatch.kernel
                for plan in self.nested()
                for dispatch in (*plan.once, *plan.dispatches)
            )
        )


@dataclass(frozen=True)
class Lowered:
    """A method, lowered for some sizes.

    Attributes:
        imported: the graph as the front end made it.
        graph: the same after all passes.
        plan: what runs.
        guards: what was decided from sizes. Calls that break a guard are lowered again.
        indices: what the inputs that are indices have to be within, by their positions.
        read: the bytes of constants whose elements decided about the rest; None: also bytes that no
            file has as they are.
    """

    imported: Graph
    graph: Graph
    plan: Plan
    guards: tuple[Guard, ...]
    indices: Mapping[int, tuple[IndexRange, ...]]
    read: tuple[memoryview, ...] | None = ()


def count_steps(plans: Iterable[Plan]) -> dict[str, int]:
    """What runs in plans and in their sub-graphs: "dispatches", "segments" on the device,
    "cpu_nodes", and "control_flow" (choices and loops that the host runs)."""
    every = [each for plan in plans for each in plan.nested()]
    steps = [step for plan in every for step in plan.steps]
    return {
        "dispatches": sum(len(plan.dispatches) for plan in every),
        "segments": sum(step.on_device for step in steps),
        "cpu_nodes": sum(step.runs_on == "cpu" for step in steps),
        "control_flow": sum(len(plan.inner) for plan in every),
    }
