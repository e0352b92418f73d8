"""Operators that write into their arguments. torch.export functionalizes them: they write into
copies, which come after their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from purevk.errors import UnsupportedProgramError
from purevk.frontends.torch.decompose import name_of
from purevk.ops import registry

if TYPE_CHECKING:
    from purevk.frontends.torch.nodes import NodeReader


def is_taken_over(node: Any, base: Any, result: int, ends: Mapping[str, str], target: str) -> bool:
    """Whether a functionalized operator may write into a buffer itself.

    Args:
        node: the call of the operator.
        base: the node of the buffer, or of the buffer's copy after an earlier such operator.
        result: the number of the node's result that is the copy after the writes.
        ends: names of nodes, and the buffers that their results are stored to at the end.
        target: the buffer.

    Returns:
        Whether nothing reads the buffer's old value after the node, and the copy ends in the same
        buffer.
    """
    index = {graph_node: at for at, graph_node in enumerate(node.graph.nodes)}
    if any(index[user] > index[node] for user in base.users):
        return False
    waiting, seen = [(node, result)], set()
    while waiting:
        at, number = waiting.pop()
        for left in at.users:
            if (
                getattr(left.target, "__name__", "") != "getitem"
                or left.args[1] != number
                or left in seen
            ):
                continue
            seen.add(left)
            if ends.get(left.name) == target:
                return True
            for user in left.users:
                bases = list(user.kwargs.get("_all_bases") or ())
                if left in bases:
                    waiting.append((user, len(user.meta["val"]) - len(bases) + bases.index(left)))
    return False


def refuse_views(where: str, name: str) -> NoReturn:
    """Raises UnsupportedProgramError for an operator that writes into a view or a list."""
    raise UnsupportedProgramError(
        f"{name} cannot be run",
        where=where,
        why="it writes into views or lists of tensors",
        next="give it whole tensors, or return new ones",
    )


def read(reader: NodeReader, node: Any) -> tuple[Any, ...]:
    """The results of an operator that writes into copies of its arguments: its own, then the copies
    after the writes."""
    target, named = node.args[0], dict(node.kwargs)
    bases = named.pop("_all_bases", None)
    written = [argument.name for argument in target._schema.arguments if argument.is_write]
    if bases is None:
        order = [name for name in written if named.get(name) is not None]
    else:
        indices = {name: named.pop(f"_{name}_base_index", None) for name in written}
        order = [name for name in written if indices[name] is not None]
        if sorted(indices[name] for name in order) != list(range(len(bases))):
            refuse_views(f"{reader.importer.where}, {node.name}", name_of(target))
        named.update({name: bases[indices[name]] for name in order})
        order.sort(key=indices.__getitem__)
    if any(name.startswith("_") and value is not True for name, value in named.items()) or any(
        isinstance(named[name], (list, tuple)) for name in order
    ):
        refuse_views(f"{reader.importer.where}, {node.name}", name_of(target))
    examples = node.meta["val"]
    own, copies = examples[: len(examples) - len(order)], examples[len(examples) - len(order) :]
    definition = registry.find(name_of(target))
    in_place = definition is not None and bool(definition.mutates)
    states = [
        reader.env.get(named[name]) if hasattr(named[name], "users") else None for name in order
    ]
    ends = reader.program.graph_signature.buffers_to_mutate
    if in_place and all(
        state in reader.targets
        and is_taken_over(node, named[name], len(own) + at, ends, reader.targets[state])
        for at, (name, state) in enumerate(zip(order, states))
    ):
        results = reader.emit(node, name_of(target), reader.schema_args(target, (), named), own)
        return (*results, *states)
    # The operator gives its arguments back in the order of its schema.
    rank = sorted(range(len(order)), key=lambda at: written.index(order[at]))
    results = reader.emit(
        node,
        name_of(target),
        reader.schema_args(target, (), named),
        (*own, *(copies[at] for at in rank)),
        in_place,
    )
    left = dict(zip(rank, results[len(own) :]))
    return (*results[: len(own)], *(left[at] for at in range(len(order))))
