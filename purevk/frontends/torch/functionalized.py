"""Operators that write into their arguments. torch.export functionalizes them: they write into
copies, which come after their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from purevk.errors import UnsupportedProgramError


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
