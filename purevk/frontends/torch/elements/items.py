"""Numbers that a program reads from tensors, and what it asserts of them. Imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from purevk.frontends import numbers
from purevk.frontends.source_lines import path_of
from purevk.frontends.torch.sizes import solved
from purevk.ir import Dim, Relation, Size, Value
from purevk.ir import dims as _dims
from purevk.ops.index.check import ASSERT

if TYPE_CHECKING:
    from purevk.frontends.torch.nodes import Call, NodeReader


def read_item(call: Call) -> Any:
    """The element of a tensor with one."""
    reader, tensor = call.reader, call.args[0]
    assert isinstance(tensor, Value)
    expression = getattr(getattr(call.examples, "node", None), "expr", None)
    bounded = expression is not None and expression.is_Symbol
    lower, upper = reader.sizes.range(expression) if bounded else (None, None)
    lower = -_dims.UNBOUNDED if lower is None else lower
    item = numbers.item(reader.importer, tensor, call.node.name, lower, upper)
    reader.bind_symbol(call.examples, item)
    return item


def read_assert(call: Call) -> None:
    """Has each call check a condition, also one that the stated bounds settle."""
    reader, condition, message = call.reader, call.operands[0], str(call.args[1])
    # As it is: `NodeReader.arg` settles relations by their bounds.
    condition = reader.env.get(condition, condition)
    if isinstance(condition, Dim):
        condition = Relation(condition, "!=", 0)
    if isinstance(condition, Value):
        reader.importer.emit(ASSERT, (condition, message), [], [], path_of(call.node))
    elif isinstance(condition, Relation):
        reader.importer.check(*condition.sides, message)
        if condition.op == "==":
            _use_equal(reader, condition.left, condition.right)


def _use_equal(reader: NodeReader, left: Size, right: Size) -> None:
    """Writes a size that follows from data by others from here on, as the program asserts: the parts of
    a split add up to the whole."""
    solution = solved(left, right, tuple(reader.importer.symbols))
    if solution is None:
        return
    both: tuple[dict[Any, Any], ...] = (reader.env, reader.sizes.symbols)
    for names in both:
        for name, value in names.items():
            if isinstance(value, Dim):
                names[name] = _dims.substitute(value, solution)
            elif isinstance(value, Relation):
                names[name] = value.substituted(solution)
