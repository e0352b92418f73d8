"""How an exported program is called, as a `Signature`. Imports torch."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from purevk.errors import UnsupportedProgramError
from purevk.frontends.torch.watch.effects import VIEW_OR_COPY, Effects
from purevk.frontends.torch.written_views import takes_by_strides
from purevk.ir import Parameter, Signature, StructureError
from purevk.ir.signature import CONTIGUOUS, Tree, children_of, memory_layout, tree_of

_SIMPLE = (type(None), bool, int, float, str)


def signature_of(program: Any, module: Any = None) -> Signature | None:
    """The signature of a `torch.export.ExportedProgram`.

    Args:
        program: what was exported.
        module: the module that was exported, for the order and the defaults of its parameters. None:
            those of the program.
    """
    spec = program.call_spec.in_spec
    if spec is None:
        return None
    args, kwargs = (tree_of(child) for child in children_of(spec))
    stated = getattr(program.module_call_graph[0].signature, "forward_arg_names", None) or ()
    count = len(args.items)
    names = [stated[at] if at < len(stated) else f"input_{at}" for at in range(count)]
    parameters = [Parameter(name, item) for name, item in zip(names, args.items)]
    order, defaults = _declared(module, names)
    parameters += [
        Parameter(str(key), item, positional=False) for key, item in zip(kwargs.keys, kwargs.items)
    ]
    outputs = program.call_spec.out_spec
    free = (
        ()
        if module is None
        else _undeclared(module, [parameter.name for parameter in parameters[count:]])
    )
    return Signature(
        tuple(parameters),
        tuple(order),
        defaults,
        Tree("tuple", items=()) if outputs is None else tree_of(outputs),
        free=free,
        exact=module is not None,
    )


def with_layouts(
    signature: Signature | None, program: Any, decomposed: Any, effects: Effects | None = None
) -> Signature | None:
    """The signature with the memory layouts on which the result of a program depends.

    They matter if the module asked for strides, or takes elements by strides of its own. And if an
    input is written through what is a view in one layout and a copy in another.

    Args:
        program: as it was exported. decomposed: the same, where what is written is known.
        effects: of the module that was exported. None: those that its nodes show.

    Raises:
        UnsupportedProgramError: it takes elements by strides from an input that is not contiguous.
    """
    examples = program.example_inputs
    if signature is None or examples is None:
        return signature
    try:
        bound = signature.bind(*examples)
    except StructureError:
        return signature
    layouts_of = {
        position: memory_layout(tensor.shape, tensor.stride())
        for position, tensor in enumerate(bound)
        if hasattr(tensor, "stride")
    }
    targets = [node.target for node in program.graph.nodes if hasattr(node.target, "_opname")]
    operators = {target._opname for target in targets}
    layouts: list[tuple[int, str]] = []
    if any(map(takes_by_strides, targets)) or (effects and effects.asked_for_strides):
        layouts = list(layouts_of.items())
    elif any(target._schema.is_mutable for target in targets) and (
        operators & VIEW_OR_COPY or (effects is not None and effects.viewed_or_copied)
    ):
        # What is written through a copy here is the input itself in another layout.
        names = _user_inputs(decomposed)
        written = set(map(names.index, decomposed.graph_signature.user_inputs_to_mutate.values()))
        written |= _written_through_copies(program)
        layouts = [
            item for item in layouts_of.items() if item[0] in written or item[1] != CONTIGUOUS
        ]
    for position, layout in layouts:
        if "as_strided" in operators and layout != CONTIGUOUS:
            raise UnsupportedProgramError(
                f"as_strided is used, and {signature.names[position]} is not contiguous",
                where="purevk.compile",
                why=f"its elements lie in memory as: {layout}; the device gets them in row-major order",
                next="pass a contiguous tensor",
            )
    return dataclasses.replace(signature, layouts=tuple(layouts))


def _user_inputs(program: Any) -> list[str]:
    specs = program.graph_signature.input_specs
    return [spec.arg.name for spec in specs if spec.kind.name == "USER_INPUT"]


def _written_through_copies(program: Any) -> set[int]:
    """The positions of inputs of which something is written that is a view or a copy, by the
    strides."""
    names = _user_inputs(program)
    origins: dict[Any, int] = {}  # the inputs that nodes may be views of
    unsure: set[Any] = set()
    positions: set[int] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            origins[node] = names.index(node.name)
        for argument, source in _aliased(node):
            if source not in origins:
                continue
            if argument is not None and argument.alias_info.is_write and source in unsure:
                positions.add(origins[source])
            origins[node] = origins[source]
            asks = argument is not None and node.target._opname in VIEW_OR_COPY
            if source in unsure or (asks and _dtype(node) == _dtype(source)):
                unsure.add(node)
    return positions


def _aliased(node: Any) -> list[tuple[Any, Any]]:
    """The arguments that what a node gives may share memory with: as the operator declares them, and
    the nodes that they are."""
    if node.target is operator.getitem:
        return [(None, node.args[0])]
    if not hasattr(node.target, "_opname"):
        return []
    declared = node.target._schema.arguments
    return [
        (argument, node.args[at] if at < len(node.args) else node.kwargs.get(argument.name))
        for at, argument in enumerate(declared)
        if argument.alias_info is not None
    ]


def _dtype(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _undeclared(module: Any, keywords: Sequence[str]) -> tuple[str, ...]:
    """The keywords of a call that go into `**kwargs` of the module's `forward`."""
    try:
        declared = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return tuple(keywords)
    return tuple(name for name in keywords if name not in declared)


def _declared(module: Any, names: Sequence[str]) -> tuple[Sequence[str], Mapping[str, Any]]:
    """Names by position, and simple defaults, as the module's `forward` declares them."""
    if module is None:
        return names, {}
    try:
        declared = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return names, {}
    order = [
        parameter.name
        for parameter in declared
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if list(names) != order[: len(names)]:
        return names, {}  # it takes *args
    defaults = {
        parameter.name: parameter.default
        for parameter in declared
        if parameter.default is not parameter.empty and isinstance(parameter.default, _SIMPLE)
    }
    return order, defaults
