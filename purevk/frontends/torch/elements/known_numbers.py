"""Numbers that follow from a module's constants, such as the padding of a convolution that its module
keeps in a buffer. torch.export makes a symbol of each `item()`, so that the sizes that depend on it
would be known at a call alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from purevk import pure_operators
from purevk.frontends.torch.decompose import decompositions
from purevk.frontends.torch.exported import address_of

_ITEMS = ("aten::item", "aten::_local_scalar_dense")
_MOST = 4096  # elements of a tensor that is computed here


def with_known_numbers(
    program: Any, original: Any, moving: Collection[str], mutable: Collection[str]
) -> tuple[Any, frozenset[str]]:
    """A program in which such integers take the place of `item()`.

    Args:
        program: an exported program without operators that write. original: what it was made of;
            it is not changed.
        moving: names of parameters, buffers and constants that change between calls.
        mutable: addresses of buffers that methods write.

    Returns:
        The program, traced again if there are such numbers, and the names of the tensors that
        decide them.
    """
    constants = _Constants(program, moving, mutable)
    if not any(constants.numbers()):
        return program, frozenset()
    if program is original:
        program = program.run_decompositions({})
        constants = _Constants(program, moving, mutable)
    used: set[str] = set()
    graph = program.graph_module.graph
    for node, number in list(constants.numbers()):
        used |= constants.names[node]
        node.replace_all_uses_with(number)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program.run_decompositions(decompositions(program)), frozenset(used)


class _Constants:
    """The nodes of a program whose values follow from constants alone.

    Attributes:
        values: of these nodes. names: the tensors that each follows from.
    """

    def __init__(self, program: Any, moving: Collection[str], mutable: Collection[str]) -> None:
        self.values: dict[Any, Any] = {}
        self.names: dict[Any, frozenset[str]] = {}
        if not any(_is_item(node) for node in program.graph.nodes):
            return
        self._read_inputs(program, moving, mutable)
        for node in program.graph.nodes:
            if node.op == "call_function" and all(
                operand in self.values for operand in node.all_input_nodes
            ):
                self._compute(node)

    def numbers(self) -> Iterator[tuple[Any, int]]:
        """Each `item()` of an integer, with the integer."""
        for node, value in self.values.items():
            if _is_item(node) and type(value) is int:
                yield node, value

    def _read_inputs(self, program: Any, moving: Collection[str], mutable: Collection[str]) -> None:
        signature = program.graph_signature
        names_of_state = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        written = {*moving, *signature.buffers_to_mutate.values()}
        for node in program.graph.find_nodes(op="placeholder"):
            name = names_of_state.get(node.name)
            if name is None or name in written:
                continue
            tensor = program.state_dict.get(name, program.constants.get(name))
            # A tensor without an address is a fake one, or on another device.
            if _is_small(tensor) and address_of(tensor) not in {"", *mutable}:
                self.values[node], self.names[node] = tensor, frozenset((name,))

    def _compute(self, node: Any) -> None:
        import torch

        schema = getattr(node.target, "_schema", None)
        if schema is None:
            is_operator = getattr(node.target, "__module__", "") == "_operator"
        else:
            seeded = torch.Tag.nondeterministic_seeded in node.target.tags
            is_operator = schema.name.startswith("aten::") and not schema.is_mutable and not seeded
            is_operator = is_operator and pure_operators.refusal(node.target) is None
        example = node.meta.get("val")
        if not is_operator or (isinstance(example, torch.Tensor) and not _is_small(example)):
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        try:
            with torch.no_grad():
                self.values[node] = node.target(*args, **kwargs)
        except Exception:  # torch raises errors of many classes; the call will raise it too
            return
        self.names[node] = frozenset().union(
            *(self.names[operand] for operand in node.all_input_nodes)
        )


def _is_item(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in _ITEMS


def _is_small(tensor: Any) -> bool:
    import torch

    return (
        isinstance(tensor, torch.Tensor)
        and all(isinstance(size, int) for size in tensor.shape)
        and tensor.numel() <= _MOST
    )
