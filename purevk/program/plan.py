"""`purevk.plan`: lowers a model without its weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

from purevk.errors import InputError, UnsupportedProgramError
from purevk.graph.call_memory import MemoryReport
from purevk.graph.context import Context, default_context, typical_traits
from purevk.graph.drawing import GraphDrawing
from purevk.graph.limits import DeviceLimits, device_limits
from purevk.graph.report import NodeCost, kernels_data, memory_data, node_costs
from purevk.ir import Graph, Guard, GuardLog
from purevk.passes.pipeline import optimize
from purevk.plain_text import printable
from purevk.program.arguments import describe_inputs
from purevk.report.words import size_text
from purevk.schedule.plan import Plan
from purevk.schedule.planning import make_plan


class PlannedProgram:
    """A program that was lowered for a device but not loaded. It tells what a call would cost. It
    cannot run.

    Attributes:
        name: of the model.
        device: name of the device that it was lowered for.
        plan: the execution plan.
        limits: of the device, if they are known.
        guards: what sizes of calls have to keep; others would be lowered again.
    """

    def __init__(
        self,
        name: str,
        device: str,
        plan: Plan,
        unified: bool,
        limits: DeviceLimits | None,
        guards: Sequence[Guard] = (),
    ) -> None:
        self.name, self.device, self.plan, self.limits = name, device, plan, limits
        self.guards, self._unified = tuple(guards), unified

    def forward(self, *inputs: Any) -> NoReturn:
        """Raises `UnsupportedProgramError`, because no weights are loaded."""
        raise UnsupportedProgramError(
            "a planned program cannot run",
            where=self.name,
            why="none of its weights is on a device",
            next="purevk.compile(model, inputs) with a model whose weights are loaded",
        )

    __call__ = forward

    @property
    def memory(self) -> MemoryReport:
        """Bytes that the program would need on the device, at the upper bounds of sizes."""
        return MemoryReport(**memory_data(self.plan, self._unified))

    @property
    def kernels(self) -> list[dict[str, Any]]:
        """For each template "template", "dispatches", "at_load", "pipelines", "modules"."""
        return kernels_data(self.plan)

    def graph(self) -> GraphDrawing:
        """The optimized graph, to print or to draw."""
        return GraphDrawing(self.plan)

    def costs(self, **sizes: int) -> list[NodeCost]:
        """The cost of each node of a call, in order.

        Args:
            sizes: values of dynamic sizes by name. The others have their upper bounds.
        """
        names = {symbol.name for symbol in self.plan.graph.symbols}
        for name in sizes:
            if name not in names:
                raise InputError(
                    f"no size is named {name}",
                    where=self.name,
                    why=f"sizes: {', '.join(sorted(names)) or 'none'}",
                )
        return node_costs(self.plan, self.limits, sizes)

    def report(self, **sizes: int) -> dict[str, Any]:
        """A summary: "device", "inputs" (text), "dispatches", "segments", "cpu_nodes" (count by
        operator), "memory" (bytes), "bytes" moved and "flops" of a call, and "seconds": the least
        time that the device's limits allow, or None."""
        costs = self.costs(**sizes)
        plans = list(self.plan.nested())
        hosts = [step.nodes[0] for plan in plans for step in plan.steps if step.runs_on == "cpu"]
        return {
            "device": self.device,
            "inputs": describe_inputs(self.plan.graph),
            "dispatches": sum(len(plan.dispatches) for plan in plans),
            "segments": sum(step.on_device for plan in plans for step in plan.steps),
            "cpu_nodes": dict(Counter(str(node.args[0]) for node in hosts)),
            "memory": vars(self.memory).copy(),
            "bytes": sum(cost.nbytes for cost in costs),
            "flops": sum(cost.flops for cost in costs),
            "seconds": None if self.limits is None else sum(cost.seconds or 0.0 for cost in costs),
        }

    def report_html(self) -> str:
        """A page about the model, as `Program.report_html` makes it: without times, and without
        what SPIR-V consists of."""
        from purevk.report.contents import DeviceParts, MethodParts, contents
        from purevk.report.page import page

        graph = self.plan.graph
        method = MethodParts(graph.name, graph, self.plan, self.guards, {})
        device = DeviceParts(self.device, None, "", self._unified, None)
        return page(contents(self.name, [method], device, {}))

    def __str__(self) -> str:
        report = self.report()
        memory, seconds = report["memory"], report["seconds"]
        groups: dict[str, list[NodeCost]] = {}
        for cost in self.costs():
            groups.setdefault(cost.operator, []).append(cost)
        lines = [
            f"{self.name}({report['inputs']}) on {self.device}",
            f"  {_counted(report['dispatches'], 'dispatch', 'es')} in {_counted(report['segments'], 'segment')},"
            f" {_counted(sum(report['cpu_nodes'].values()), 'node')} on the CPU",
            f"  weights {size_text(memory['weights'])}, state {size_text(memory['state'])},"
            f" intermediate tensors {size_text(memory['planned'])}",
            f"  a call moves {size_text(report['bytes'])} and takes {report['flops'] / 1e9:.3g} Gflop"
            + ("" if seconds is None else f": at least {seconds * 1e3:.3g} ms"),
        ]
        for name, costs in sorted(
            groups.items(), key=lambda item: -sum(cost.nbytes for cost in item[1])
        ):
            nbytes, flops = sum(cost.nbytes for cost in costs), sum(cost.flops for cost in costs)
            lines.append(
                f"    {name:32} {_counted(len(costs), 'node'):>11} {size_text(nbytes):>10} {flops / 1e9:10.3g} Gflop"
            )
        return printable("\n".join(lines))

    def __repr__(self) -> str:
        count = sum(len(plan.dispatches) for plan in self.plan.nested())
        about = f"{self.name} for {self.device}: {_counted(count, 'dispatch', 'es')}"
        return printable(f"<PlannedProgram {about}>")


def _counted(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"


def plan(
    model: Any,
    example_inputs: Sequence[Any] = (),
    dynamic_shapes: Any = None,
    *,
    device: Context | str | None = None,
    limits: DeviceLimits | None = None,
    method: str = "forward",
) -> PlannedProgram:
    """Lowers a model for a device without loading it. The result has the memory, the kernels, the
    bytes moved and the operations of a call. No weight is read, so the model may be on the `meta`
    device.

    Args:
        model: a `torch.nn.Module`, a `torch.export.ExportedProgram`, or the path of a .pte or .pvk
            file.
        example_inputs: inputs to trace a module with: a tuple, or a single tensor. They are moved
            to the meta device if the module's weights are there.
        dynamic_shapes: as for `torch.export.export`.
        device: a context; None: the best device, or that of PUREVK_DEVICE; "typical": no device, a
            desktop GPU is assumed.
        limits: bytes and operations per second, to estimate times. None: those of the device,
            measured once and kept in the cache. Without a device, no times are estimated.
        method: of a file.

    Raises:
        UnsupportedProgramError: the model has an operator without a kernel and without a CPU
            function, or depends on the values of weights that are not loaded.
        InputError: `device` is no device, or `model` none of these.
    """
    if isinstance(device, str) and device != "typical":
        raise InputError(
            f"there is no device={device!r} to plan for",
            where="purevk.plan",
            why='a Context, None or "typical" is accepted',
            next="leave device out for a typical desktop GPU",
        )
    context = (
        default_context() if device is None else device if isinstance(device, Context) else None
    )
    traits = typical_traits() if context is None else context.traits
    with GuardLog() as log:
        if isinstance(model, (str, os.PathLike)):
            file_plan = _plan_file(model, method, traits)
            name = os.path.basename(os.fspath(model))
        else:
            file_plan = make_plan(
                optimize(_trace(model, example_inputs, dynamic_shapes), traits), traits
            )
            name = type(model).__name__
    if context is None:
        return PlannedProgram(
            name, "a typical desktop GPU", file_plan, False, limits, tuple(log.guards)
        )
    return PlannedProgram(
        name,
        context.device.name,
        file_plan,
        context.device.is_unified,
        limits or device_limits(context),
        tuple(log.guards),
    )


def _plan_file(path: str | os.PathLike[str], method: str, traits: Any) -> Plan:
    from purevk.frontends.files import open_file

    with open_file(path, check=False) as opened:
        if method not in opened.methods:
            raise InputError(
                f"there is no method {method!r}",
                where=opened.name,
                why=f"methods: {', '.join(opened.methods)}",
                next="name one of these",
            )
        return make_plan(optimize(opened.graph(method), traits), traits)


def _trace(model: Any, example_inputs: Sequence[Any], dynamic_shapes: Any) -> Graph:
    import torch

    from purevk.frontends.torch.decompose import decompose
    from purevk.frontends.torch.exported import WrittenBuffers, read_exported
    from purevk.frontends.torch.module import ModuleSource

    if isinstance(model, torch.export.ExportedProgram):
        program = decompose(model)
    elif not isinstance(model, torch.nn.Module):
        raise InputError(
            f"{type(model).__name__} is nothing to plan",
            where="purevk.plan",
            why="a module, an ExportedProgram, or the path of a .pte or .pvk file is expected",
            next="write a torch.nn.Module whose forward calls the function",
        )
    else:
        if not isinstance(example_inputs, (tuple, list)):
            example_inputs = (example_inputs,)
        tensors = [*model.parameters(), *model.buffers()]
        if any(tensor.device.type == "meta" for tensor in tensors):
            move = lambda tensor: tensor.to("meta") if isinstance(tensor, torch.Tensor) else tensor  # noqa: E731
            example_inputs = torch.utils._pytree.tree_map(move, tuple(example_inputs))
        program = ModuleSource(
            "forward", model, example_inputs, {}, dynamic_shapes, WrittenBuffers()
        ).program
    return read_exported(program, planned_only=True)
