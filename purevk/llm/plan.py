"""Whether a model fits into the memory of a device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from purevk.errors import InputError
from purevk.graph.context import Context
from purevk.ir import Graph, GuardLog
from purevk.program.devices.memory import Heap
from purevk.program.leaves import Leaves
from purevk.program.plan_cache.cache import PlanCache
from purevk.tuning.traits import DeviceTraits

_AMPLE = 2  # times what weights and cache take: with as much free memory, a workspace fits too


@dataclass(frozen=True)
class Plan:
    """The memory of a device that a model needs, in bytes.

    Attributes:
        context: tokens that the cache holds.
        weights: of all weights, packed as they are on the device, of tables, and of the states of
            recurrent layers.
        cache: of the cache.
        spilled: of weights that are in memory of the host.
        workspace: of what the call of the longest prompt computes, besides its results. 0: `load`
            did not ask, because twice the rest was free.
        heaps: of the device, if the plan is for one.
    """

    context: int
    weights: int
    cache: int
    spilled: int = 0
    workspace: int = 0
    heaps: tuple[Heap, ...] = ()

    @property
    def local_weights(self) -> int | None:
        """Bytes of weights on the device; None: all."""
        return self.weights - self.spilled if self.spilled else None

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace

    def largest_context(self, available: int) -> int:
        """The largest context that fits into so many bytes; 0: not even the weights do."""
        room = max(available - self.weights - self.workspace, 0)
        return room * self.context // max(self.cache, 1)

    def __str__(self) -> str:
        sizes = (self.weights, self.cache, self.workspace)
        weights, cache, workspace = (f"{size / 1e6:.1f} MB" for size in sizes)
        spilled = f", {self.spilled / 1e6:.1f} MB of them on the host" if self.spilled else ""
        parts = [f"weights {weights}{spilled}, cache {cache} for {self.context} tokens"]
        if self.workspace:
            parts[0] += f", workspace {workspace}"
        return "; ".join((*parts, *map(str, self.heaps)))


def plan_of(graph: Graph, context: int) -> Plan:
    """The plan of the method "decode". A cache is [1, heads, context, width]; states of recurrent
    layers have three dims."""
    weights = sum(constant.nbytes for constant in graph.constants.values())
    sizes = [(state.type.rank, int(state.type.nbytes)) for state in graph.states]
    weights += sum(size for rank, size in sizes if rank == 3)
    cache = sum(size for rank, size in sizes if rank == 4)
    return Plan(context, weights, cache)


def check_context(context: object, most: int, where: str, why: str) -> None:
    """Raises InputError for what is no number of tokens that a cache can hold."""
    if isinstance(context, bool) or not isinstance(context, int) or not 1 < context <= most:
        raise InputError(
            f"context={context!r} is not accepted",
            where=where,
            why=f"an integer from 2 to {most} is expected: {why}",
        )


def workspace_of(graph: Graph, traits: DeviceTraits) -> int:
    """Bytes of the intermediate tensors of a call, at the upper bounds of its sizes."""
    from purevk.graph.report import memory_data
    from purevk.passes.pipeline import optimize
    from purevk.schedule.planning import make_plan

    with GuardLog():
        memory = memory_data(make_plan(optimize(graph, traits), traits), unified=False)
        return memory["planned"]


def _workspace(source: Callable[[None], Graph], device: Context) -> int:
    """`workspace_of` a method on a device. The cache remembers it for a `BuiltGraph`."""
    plans = PlanCache.of(device, source, Leaves()) if getattr(source, "built", "") else None
    key = plans and plans.key("workspace", None, None, False)
    if not key:
        return workspace_of(source(None), device.traits)
    name = f"workspace {hashlib.sha256(key.encode()).hexdigest()}"
    nbytes = device.cache.get_tuning(device.kernels.device_key, name)
    if not isinstance(nbytes, int):
        nbytes = workspace_of(source(None), device.traits)
        device.cache.put_tuning(device.kernels.device_key, name, nbytes)
    return nbytes


def check_fits(
    plan: Plan,
    device: Context,
    where: str,
    longest: Callable[[None], Graph],
    spill: bool = False,
    held: int = 0,
) -> Plan:
    """The plan, with the bytes of weights that do not fit on the device.

    Args:
        longest: the source of the method of the longest prompt.
        spill: these may be in memory of the host.
        held: bytes of it that are there already.

    Raises:
        InputError: the model does not fit. The error says the largest context that does.
    """
    from purevk.program.devices.memory import free_bytes

    available = free_bytes(device) + held
    if _AMPLE * plan.total > available:
        plan = replace(plan, workspace=_workspace(longest, device))
    if plan.total <= available:
        return plan
    room = available - plan.workspace - plan.cache
    spilled = plan.weights - room
    can_spill = room >= 0 and spilled <= free_bytes(device, local=False)
    if spill and can_spill:
        return replace(plan, spilled=spilled)
    largest = min(plan.largest_context(available), plan.context - 1)
    raise InputError(
        f"the model needs {plan.total / 1e6:.0f} MB on the device, and {available / 1e6:.0f} MB are free",
        where=where,
        why=str(plan),
        next=(f"load it with context={largest}" if largest > 1 else "take a smaller model")
        + (", or load it with spill=True" if can_spill else ""),
    )
