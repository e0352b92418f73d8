"""How an exported program is called, as a `Signature`. Imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from purevk.ir import Parameter, Signature
from purevk.ir.signature import Tree, tree_of

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
    args, kwargs = (tree_of(each) for each in spec.children())
    stated = getattr(program.module_call_graph[0].signature, "forward_arg_names", None) or ()
    count = len(args.items)
    names = [stated[at] if at < len(stated) else f"input_{at}" for at in range(count)]
    parameters = [Parameter(name, item) for name, item in zip(names, args.items)]
    order, defaults = _declared(module, names)
    parameters += [
        Parameter(str(key), item, positional=False) for key, item in zip(kwargs.keys, kwargs.items)
    ]
    outputs = program.call_spec.out_spec
    free = () if module is None else _undeclared(module, [each.name for each in parameters[count:]])
    return Signature(
        tuple(parameters),
        tuple(order),
        defaults,
        Tree("tuple", items=()) if outputs is None else tree_of(outputs),
        free=free,
        exact=module is not None,
    )


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
        each.name
        for each in declared
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    if list(names) != order[: len(names)]:
        return names, {}  # it takes *args
    defaults = {
        each.name: each.default
        for each in declared
        if each.default is not each.empty and isinstance(each.default, _SIMPLE)
    }
    return order, defaults
