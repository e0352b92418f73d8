"""Whether a model fits into the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from purevk.errors import InputError
from purevk.graph.context import Context
from purevk.ir import Graph

_WORKSPACE = 8  # part of the memory that is for what a call computes, if weights fill the rest


@dataclass(frozen=True)
class Plan:
    """The memory of a device that a model needs, in bytes.

    Attributes:
        context: tokens that the cache holds.
        weights: of all weights, packed as they are on the device, of tables, and of the states of
            recurrent layers.
        cache: of the cache.
        spilled: of weights that are in memory of the host.
    """

    context: int
    weights: int
    cache: int
    spilled: int = 0

    @property
    def local_weights(self) -> int | None:
        """Bytes of weights on the device; None: all."""
        return self.weights - self.spilled if self.spilled else None

    @property
    def total(self) -> int:
        return self.weights + self.cache

    def largest_context(self, available: int) -> int:
        """The largest context that fits into so many bytes; 0: not even the weights do."""
        return max(available - self.weights, 0) * self.context // max(self.cache, 1)

    def __str__(self) -> str:
        weights, cache = (f"{each / 1e6:.1f} MB" for each in (self.weights, self.cache))
        spilled = f", {self.spilled / 1e6:.1f} MB of them on the host" if self.spilled else ""
        return f"weights {weights}{spilled}, cache {cache} for {self.context} tokens"


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


def check_fits(
    plan: Plan, device: Context, where: str, spill: bool = False, released: int = 0
) -> Plan:
    """The plan, with the bytes of weights that do not fit on the device.

    Args:
        spill: these may be in memory of the host.
        released: bytes that are free before it is loaded, besides those that are now.

    Raises:
        InputError: the model does not fit. The error says the largest context that does.
    """
    from purevk.program.devices.memory import free_bytes

    available = free_bytes(device) + released
    if plan.total <= available:
        return plan
    room = available - available // _WORKSPACE - plan.cache
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
