"""What a page about a program shows, as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from purevk import __version__
from purevk.graph.drawing import GraphDrawing, operators_label
from purevk.graph.kernels import GLSL_FOLDER
from purevk.graph.limits import DeviceLimits
from purevk.graph.report import call_buffers, memory_data, resident_weights
from purevk.ir import Graph, Guard, Node, Value
from purevk.ir import dims as _dims
from purevk.ir.symbols import Symbol
from purevk.lower.lowering import Dispatch, KernelSpec
from purevk.program.specs import input_specs, output_specs
from purevk.report.lowered import describe, size_symbols, type_text
from purevk.report.timings import Timing
from purevk.report.words import guard_in_words, symbol_origins
from purevk.schedule.plan import Plan
from purevk.shaders.source import find_include_beside, source_files
from purevk.shaders.statistics import statistics_of
from purevk.shaders.templates import find_template, template_interface

_PATH = re.compile(r"\w+(\.\w+)*")
_DELEGATE = re.compile(r"(delegate \d+)#")
_NAMED_WEIGHTS = 2000  # of a method, the largest ones


@dataclass(frozen=True)
class MethodParts:
    """A method, for a page.

    Attributes:
        name: of the method.
        graph: after the passes.
        plan: what runs.
        guards: those that calls must keep; others are lowered again.
        sizes: values of the symbols that counts of bytes and operations hold for. The others are at
            their upper bounds.
        timings: of the dispatches of a call; None: they were not timed.
        whole_call: seconds of a call with these inputs.
        why_untimed: why there are no timings, if somebody asked for them.
        host_seconds: of the nodes of a call that run on the CPU, all runs together.
    """

    name: str
    graph: Graph
    plan: Plan
    guards: tuple[Guard, ...]
    sizes: Mapping[str, int]
    timings: Sequence[Timing] | None = None
    whole_call: float | None = None
    why_untimed: str = ""
    host_seconds: Mapping[Node, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceParts:
    """The device that methods were lowered for.

    Attributes:
        name, kind, driver: of the device; a kind of None: there is none, and the device is assumed.
        unified: whether the host reads the device's memory at full speed.
        max_arena: the most bytes of one allocation; None: no limit is known.
        limits: measured on it, if they are known.
    """

    name: str
    kind: str | None
    driver: str
    unified: bool
    max_arena: int | None
    limits: DeviceLimits | None = None


def contents(
    name: str,
    methods: Sequence[MethodParts],
    device: DeviceParts,
    spirv: Mapping[KernelSpec, bytes],
) -> dict[str, Any]:
    """The contents of a page.

    Args:
        name: of the program.
        methods: at least one.
        device: what they were lowered for.
        spirv: the modules of the kernels; without a device there are none.

    Returns:
        "purevk" (the version), "model", "device", "methods", and what methods share: "kernels", to
        which their dispatches refer by number, and "files", the texts of templates by name.
    """
    shared = _Kernels(spirv)
    made = [_method(method, device, shared) for method in methods]
    return {
        "purevk": __version__,
        "model": name,
        "device": {
            "name": device.name,
            "kind": device.kind,
            "driver": device.driver,
            "limits": None if device.limits is None else asdict(device.limits),
        },
        "methods": made,
        "kernels": shared.rows,
        "files": shared.files,
    }


# -- methods -------------------------------------------------------------------------------------
def _method(parts: MethodParts, device: DeviceParts, kernels: _Kernels) -> dict[str, Any]:
    plan = parts.plan
    values = _Values(parts.sizes)
    inputs = describe(input_specs(parts.graph))
    origins = symbol_origins(parts.graph, [each["name"] for each in inputs])
    outputs = describe(output_specs(parts.graph))
    drawing = GraphDrawing(plan).data()
    _add_dispatches(drawing, plan, values, kernels)
    if parts.timings is not None:
        timings = {id(timing.dispatch): timing for timing in parts.timings}
        _add_times(drawing, timings, plan, parts.host_seconds)
    return {
        "name": parts.name,
        "inputs": [_argument(each) for each in inputs],
        "outputs": [_argument(output) for output in outputs],
        "symbols": {
            name: {**bounds, "origin": origins.get(name)}
            for name, bounds in size_symbols(parts.graph).items()
        },
        "sizes": {symbol.name: values[symbol] for symbol in parts.graph.symbols},
        "guards": [
            {"text": text, "words": words}
            for words, text in {
                guard_in_words(guard): str(guard)
                for guard in (*parts.guards, *parts.graph.constraints)
            }.items()
        ],
        "checks": [
            {"text": message, "words": guard_in_words(guard)}
            for guard, message in parts.graph.checks
        ],
        "timed": parts.timings is not None,
        "why_untimed": parts.why_untimed,
        "whole_call": parts.whole_call,
        "graph": drawing,
        "memory": memory_picture(
            plan, device.unified, device.max_arena, _ends_of(parts.graph, inputs)
        ),
    }


def _ends_of(graph: Graph, inputs: Sequence[Mapping[str, Any]]) -> dict[Value, str]:
    """The inputs of a graph by the names that calls use."""
    return {
        value: each["name"] for each, value in zip(inputs, graph.inputs) if isinstance(value, Value)
    }


def _argument(data: dict[str, Any]) -> dict[str, Any]:
    return {"name": data["name"], "type": type_text(data)}


class _Values(dict[Symbol, int]):
    """Values of symbols: those that are given by name, and the upper bounds of the others."""

    def __init__(self, known: Mapping[str, int]) -> None:
        super().__init__()
        self.names = known

    def __missing__(self, symbol: Symbol) -> int:
        self[symbol] = self.names.get(symbol.name, symbol.upper)
        return self[symbol]


def _add_dispatches(
    drawing: dict[str, Any], plan: Plan, values: _Values, kernels: _Kernels
) -> None:
    """Gives each node its module, and its dispatches in place of their positions."""
    inner = iter(plan.inner.values())
    for segment in drawing["segments"]:
        of = plan.once if segment["on"] == "load" else plan.dispatches
        for node in segment["nodes"]:
            node["path"] = module_path(node["source"])
            node["dispatches"] = [
                _dispatch(position, of[position], values, kernels)
                for position in node["dispatches"]
            ]
            node["bytes"] = sum(each["bytes"] for each in node["dispatches"])
            node["flops"] = sum(each["flops"] for each in node["dispatches"])
            node["seconds"] = None
            del node["kernels"]
            if node["graphs"]:
                for part, sub_plan in zip(node["graphs"], next(inner)):
                    _add_dispatches(part, sub_plan, values, kernels)


def _dispatch(
    position: int, dispatch: Dispatch, values: _Values, kernels: _Kernels
) -> dict[str, Any]:
    return {
        "step": position,
        "kernel": kernels.number(dispatch.kernel),
        "grid": [str(size) for size in dispatch.grid],
        "bytes": _dims.evaluate(dispatch.nbytes, values),
        "flops": _dims.evaluate(dispatch.flops, values),
        "seconds": None,
        "runs": 1,
    }


def _add_times(
    drawing: dict[str, Any],
    timings: Mapping[int, Timing],
    plan: Plan,
    host_seconds: Mapping[Node, float],
) -> None:
    """Gives dispatches, and nodes on the CPU, their times.

    Args:
        timings: by the `id` of the dispatch.
    """
    segments = [each for each in drawing["segments"] if each["on"] != "load"]
    for segment, step in zip(segments, plan.steps, strict=True):
        for drawn, node in zip(segment["nodes"], step.nodes, strict=True):
            drawn["seconds"] = host_seconds.get(node)
            for each in drawn["dispatches"]:
                timing = timings.get(id(plan.dispatches[each["step"]]))
                each["seconds"] = None if timing is None else timing.seconds
                each["runs"] = 0 if timing is None else timing.runs
            for part, inner in zip(drawn["graphs"], plan.inner.get(node, ()), strict=True):
                _add_times(part, timings, inner, host_seconds)


def module_path(source: str) -> list[str]:
    """The module that a node belongs to, from the outermost to the innermost. That of a fused node
    is the module that has all of its parts. A node of a .pte file belongs to its delegate."""
    parts = re.split(r" [+|] ", source)
    delegates = {match[1] for match in map(_DELEGATE.match, parts) if match}
    if delegates:
        return [delegates.pop()] if len(delegates) == 1 else []
    paths = [part.split(".")[:-1] for part in parts if _PATH.fullmatch(part)]
    levels = takewhile(lambda names: len(set(names)) == 1, zip(*paths))
    return [names[0] for names in levels]


# -- memory --------------------------------------------------------------------------------------
def memory_picture(
    plan: Plan,
    unified: bool,
    max_arena: int | None = None,
    names: Mapping[Value, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Where the tensors of a call lie, and when.

    Args:
        names: those of inputs.

    Returns:
        What `memory_data` gives; "weight_count" and "weight_tensors" ("name", "type", "bytes"; the
        largest ones); and of the method without its sub-graphs: "steps" (dispatches of a call),
        "arenas" (bytes of each), "blocks" (intermediate tensors: "name", "type", "bytes", "arena",
        "offset", and the "first" and the "last" step that needs them) and "buffers" (what the host
        writes and reads: "name", "type", "bytes", "role"). Each tensor has a "label" too: the
        parameter that it comes from, or the module and the operators that make it.
    """
    buffers = call_buffers(plan, unified, max_arena)
    offsets = buffers.temporaries.offsets
    labels = _Labels(plan, names)
    blocks = []
    for block in buffers.blocks:
        assert isinstance(block.key, Value)  # as `call_buffers` makes them
        arena, offset = offsets[block.key]
        blocks.append(
            {
                **_tensor(block.key, block.nbytes, labels),
                "arena": arena,
                "offset": offset,
                "first": block.first,
                "last": block.last,
            }
        )
    resident = dict.fromkeys(value for each in plan.nested() for value in resident_weights(each))
    weights = sorted(resident, key=lambda value: -value.type.nbytes)
    return {
        **memory_data(plan, unified, max_arena),
        "steps": len(plan.dispatches),
        "arenas": list(buffers.temporaries.arenas),
        "blocks": blocks,
        "buffers": [
            {**_tensor(value, plan.sizes[value], labels), "role": role}
            for role, values in (("written", buffers.uploads), ("read", buffers.downloads))
            for value in values
        ],
        "weight_count": len(weights),
        "weight_tensors": [
            _tensor(value, value.type.nbytes, labels) for value in weights[:_NAMED_WEIGHTS]
        ],
    }


def _tensor(value: Value, nbytes: int, labels: _Labels) -> dict[str, Any]:
    return {
        "name": value.name,
        "label": labels.of(value),
        "type": str(value.type),
        "bytes": nbytes,
    }


class _Labels:
    """What tensors are, in the words of the model: values of the optimized graph have numbers."""

    def __init__(self, plan: Plan, names: Mapping[Value, str]) -> None:
        self._names = names
        self._made: dict[Value, Node] = {}
        # The constants that each value is made of, if it is of constants alone.
        self._roots: dict[Value, frozenset[Value]] = {}
        for each in plan.nested():
            self._roots |= {value: frozenset([value]) for value in each.graph.constants}
            for node in each.graph.nodes:
                self._made.update(dict.fromkeys(node.results, node))
                if node.inputs and all(value in self._roots for value in node.inputs):
                    found = frozenset().union(*(self._roots[value] for value in node.inputs))
                    self._roots.update(dict.fromkeys(node.results, found))

    def of(self, value: Value) -> str:
        if value in self._names:
            return self._names[value]
        roots = self._roots.get(value)
        if roots:
            largest = max(roots, key=lambda each: (each.type.nbytes, each.name))
            return largest.name if len(roots) == 1 else f"{largest.name}, folded"
        node = self._made.get(value)
        if node is None:
            return value.name
        path = ".".join(module_path(node.source))
        operators = operators_label(node)
        return f"{path}: {operators}" if path else operators


# -- kernels -------------------------------------------------------------------------------------
class _Kernels:
    """The kernels of all methods, each once."""

    def __init__(self, spirv: Mapping[KernelSpec, bytes]) -> None:
        self._spirv = spirv
        self._numbers: dict[KernelSpec, int] = {}
        self.rows: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}

    def number(self, spec: KernelSpec) -> int:
        """The number of a kernel; a new one gets a row."""
        if spec not in self._numbers:
            self._numbers[spec] = len(self.rows)
            self.rows.append(self._row(spec))
        return self._numbers[spec]

    def _row(self, spec: KernelSpec) -> dict[str, Any]:
        own = find_template(spec.template)
        if own is None:
            text = (GLSL_FOLDER / spec.template).read_text(encoding="utf-8")
            files = source_files(text, name=spec.template, include=GLSL_FOLDER)
        else:
            include = find_include_beside(own.folder)
            files = source_files(own.text, name=spec.template, include=include)
        code = self._spirv.get(spec)
        return {
            "template": spec.template,
            "macros": [list(pair) for pair in spec.macros],
            "constants": _named_constants(spec),
            "bindings": list(spec.bindings),
            "subgroup_size": spec.subgroup_size,
            "files": [[name, self._file(name, text)] for name, text in files.items()],
            "spirv": None if code is None else asdict(statistics_of(code)),
        }

    def _file(self, name: str, text: str) -> str:
        """Keeps a file; the name that it is kept under. Folders of users may have a file of the same
        name."""
        key, number = name, 1
        while self.files.setdefault(key, text) != text:
            number += 1
            key = f"{name} ({number})"
        return key


def _named_constants(spec: KernelSpec) -> list[list[Any]]:
    """The specialization constants: number, name and value."""
    declared = template_interface(spec.template).kernel(dict(spec.macros))
    names = {
        number: name for name, number in (*declared.params.items(), *declared.constants.items())
    }
    return [[number, names.get(number, ""), value] for number, value in spec.constants]
