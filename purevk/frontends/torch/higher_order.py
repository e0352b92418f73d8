"""Control flow of exported programs: torch.cond, while_loop, map and scan."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from purevk.errors import UnsupportedProgramError
from purevk.frontends import control
from purevk.ir import Arg, Value

if TYPE_CHECKING:
    from purevk.frontends.torch.nodes import NodeReader

NAMES = ("cond", "while_loop", "map_impl", "scan")
_lock = threading.Lock()


def is_control(target: Any) -> bool:
    """Whether the target of a node is control flow that runs here."""
    import torch

    return isinstance(target, torch._ops.HigherOrderOperator) and str(target) in NAMES


@contextlib.contextmanager
def sub_graphs_may_write(program: Any) -> Iterator[None]:
    """A context in which torch decomposes programs whose branches and loops write into buffers.
    Outside of it, torch writes these out but then refuses them."""
    import torch
    import torch._export.verifier as verifier

    if not any(is_control(node.target) for node in program.graph.nodes):
        yield
        return
    with _lock:
        saved = verifier.is_functional
        verifier.is_functional = lambda op: saved(op) or op is torch.ops.aten.copy_.default
        try:
            yield
        finally:
            verifier.is_functional = saved


def read(reader: NodeReader, node: Any) -> tuple[Any, ...]:
    """The results of a control-flow node."""
    if is_control(node.target):
        return _read(reader, node, node.target.name(), node.args, node.meta["val"])
    return _functionalized(reader, node)


def _functionalized(reader: NodeReader, node: Any) -> tuple[Any, ...]:
    """Control flow that writes into buffers. Gives its own results, then the buffers."""
    target, named = node.args[0], dict(node.kwargs)
    bases = named["_all_bases"]
    for base in bases:
        later = any(user is not node and user.op != "output" for user in base.users)
        if (
            not isinstance(reader.env[base], Value)
            or reader.env[base] not in reader.importer.states
            or later
        ):
            raise UnsupportedProgramError(
                f"{target.name()} cannot be run",
                where=f"{reader.importer.where}, {node.name}",
                why=f"it writes into {base.name}, which is no buffer, or whose old value is read again",
                next="return the new value from the branches, and write it into the buffer afterwards",
            )
    for name in [name for name in named if name.endswith("_base_index")]:
        named[name.removeprefix("_").removesuffix("_base_index")] = bases[named[name]]

    def group(stem: str) -> tuple[Any, ...]:
        numbered = {
            int(name[len(stem) :]): arg
            for name, arg in named.items()
            if name.startswith(stem) and name[len(stem) :].isdigit()
        }
        return tuple(numbered[key] for key in sorted(numbered))

    if target.name() == "cond":
        args: tuple[Any, ...] = (
            named["pred"],
            named["true_fn"],
            named["false_fn"],
            group("operand"),
        )
    elif target.name() == "while_loop":
        args = (
            named["cond_fn"],
            named["body_fn"],
            group("carried_input"),
            group("additional_input"),
        )
    else:
        raise UnsupportedProgramError(
            f"{target.name()} that writes into buffers cannot be run",
            where=f"{reader.importer.where}, {node.name}",
            next="return the new values from its body",
        )
    examples = node.meta["val"]
    own = examples[: len(examples) - len(bases)]
    return (*_read(reader, node, target.name(), args, own), *(reader.env[base] for base in bases))


def _read(
    reader: NodeReader, node: Any, name: str, args: Sequence[Any], examples: Sequence[Any]
) -> tuple[Any, ...]:
    importer, source = reader.importer, node.name

    def taken(part: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(reader.arg(item) for item in part)

    def walk(module: Any) -> control.Walk:
        return lambda region, values: reader.walk(module, values, region.importer)

    if name == "cond":
        predicate, *modules, operands = args
        predicate, branches = reader.arg(predicate), [reader.arg(module) for module in modules]
        if isinstance(predicate, bool):
            return tuple(reader.walk(branches[not predicate], taken(operands), importer))
        results = control.cond(
            importer, predicate, [walk(branch) for branch in branches], taken(operands), source
        )
    elif name == "while_loop":
        condition, body, carried, operands = args
        results = control.while_loop(
            importer,
            walk(reader.arg(condition)),
            walk(reader.arg(body)),
            taken(carried),
            taken(operands),
            source,
        )
    elif name == "map_impl":
        body, scanned, operands = args
        results = control.scan(
            importer, walk(reader.arg(body)), (), taken(scanned), taken(operands), source
        )
    else:
        body, carried, scanned, operands = args
        results = control.scan(
            importer,
            walk(reader.arg(body)),
            taken(carried),
            taken(scanned),
            taken(operands),
            source,
        )
    return tuple(_number(reader, value, example) for value, example in zip(results, examples))


def _number(reader: NodeReader, value: Value, example: Any) -> Arg:
    """A result: a number if torch has a number, else a tensor."""
    import torch

    if isinstance(example, torch.Tensor):
        return value
    element = reader.importer.element(value, 0)
    reader.bind_symbol(example, element)
    return element
