"""Views through which a graph writes, as torch's functionalization takes them.

Functionalization writes the elements of a view back into the tensor that it is a view of. Behind
`expand`, it adds the difference to that tensor, which rounds, and makes NaN of infinite elements.
Behind `unfold`, elements that no window covers become 0. So such views are replaced by others that
show the same elements. What was written may have other strides than the tensor had: so its elements
are read by strides only if it is contiguous. Graphs come from torch.export, or from dynamo.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from purevk.errors import UnsupportedProgramError

_EXPANDING = frozenset({"expand", "expand_as", "broadcast_to"})
_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in (
        "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift",
        "irshift", "imatmul",
    )
)  # fmt: skip


def replace_written_views(module: Any) -> None:
    """Replaces the views of a graph module that torch would write through wrongly.

    Raises:
        UnsupportedProgramError: it writes floats into a part of an expanded tensor, or into windows
            that overlap or whose number is not known; or takes elements by the strides of a tensor
            that is written and not contiguous.
    """
    graph = module.graph
    memories = written_memories(graph)
    if not memories:
        return
    written = [view for node in graph.nodes for view in _written(node)]
    for node in graph.nodes:
        if takes_by_strides(node.target) and memory_of(node.args[0]) in memories:
            _refuse_strides(node)
    changed = False
    for node in list(graph.nodes):
        name = _name(node)
        if (name not in _EXPANDING and name != "unfold") or memory_of(node) not in memories:
            continue
        with graph.inserting_before(node):
            views = _Views(node)
            replacement = views.unfolded() if name == "unfold" else views.expanded()
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
            changed = True
        elif (
            name == "unfold"
            or example_of(node).is_floating_point()
            or example_of(node).is_complex()
        ):
            _refuse_written(node, written)
    if changed:
        module.recompile()


def written_memories(graph: Any) -> set[Any]:
    """What a graph may write into, as `memory_of` gives it."""
    return {memory_of(view) for node in graph.nodes for view in _written(node)} - {None}


def takes_by_strides(target: Any) -> bool:
    """Whether an operator, a function or a method takes elements by strides that are arguments."""
    name = target if isinstance(target, str) else getattr(target, "_opname", None)
    return str(name or getattr(target, "__name__", "")).startswith("as_strided")


def example_of(node: Any) -> Any:
    """The tensor that a node was traced with, or None."""
    import torch

    meta = getattr(node, "meta", {})
    example = meta.get("val", meta.get("example_value"))
    return example if isinstance(example, torch.Tensor) else None


def memory_of(node: Any) -> Any:
    """Which memory a node's tensor has; None: it has none that is known."""
    from torch.multiprocessing.reductions import StorageWeakRef

    example = example_of(node)
    if example is None:
        return None
    reference: Any = StorageWeakRef  # whose functions have no types
    try:
        return reference(example.untyped_storage()).cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like
        return None


def _is_whole(tensor: Any) -> bool:
    """Whether a tensor has all elements of its memory, in their order."""
    nbytes = tensor.numel() * tensor.itemsize
    return bool(tensor.is_contiguous() and nbytes == tensor.untyped_storage().nbytes())


def _name(node: Any) -> str:
    """The name of a function or a method of tensors."""
    import torch

    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._opname) if node.target.namespace == "aten" else ""
    # The function `torch.nn.functional.unfold` is no view.
    return "broadcast_to" if node.target is torch.broadcast_to else ""


def _written(node: Any) -> Iterator[Any]:
    """The nodes whose tensors a node may write into."""
    import torch

    if isinstance(node.target, torch._ops.OpOverload):
        for position, argument in enumerate(node.target._schema.arguments):
            if not argument.is_write:
                continue
            given = node.args[position] if position < len(node.args) else None
            given = node.kwargs.get(argument.name, given)
            yield from given if isinstance(given, (list, tuple)) else [given]
        return
    if node.op not in ("call_method", "call_function"):
        return
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if node.args and (in_place or node.target in _IN_PLACE or _is_in_place(node)):
        first = node.args[0]
        yield from first if isinstance(first, (list, tuple)) else [first]
    out = node.kwargs.get("out")
    yield from out if isinstance(out, (list, tuple)) else [out]


def _is_in_place(node: Any) -> bool:
    """Whether the argument `inplace` of a function is true."""
    if node.op != "call_function" or True not in node.args:
        return node.kwargs.get("inplace") is True
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # it is not written in Python
        return node.kwargs.get("inplace") is True
    return bound.arguments.get("inplace") is True


def _refuse_strides(node: Any) -> None:
    """Refuses elements by strides of a tensor that is not contiguous."""
    from torch._prims_common import is_contiguous_or_false

    source = node.args[0]
    example = example_of(source)
    if not is_contiguous_or_false(example):
        raise UnsupportedProgramError(
            f"{node.name} takes elements by the strides of a tensor that is written",
            where=node.name,
            why=f"{source.name} has the strides {list(example.stride())}, which a write may change",
            next="call contiguous() before, or index the tensor",
        )


def _refuse_written(view: Any, written: Sequence[Any]) -> None:
    """Refuses writes through a view that is not replaced."""
    memory = memory_of(view)
    for node in written:
        while isinstance(node, type(view)) and memory_of(node) == memory:
            if node is view:
                raise UnsupportedProgramError(
                    f"a write goes into a part of {view.name}",
                    where=f"{_name(view)} of {getattr(view.args[0], 'name', '')}",
                    why="it is a view whose elements may be one in memory, or the number of its"
                    " windows is not known, and torch would write other elements too",
                    next="write into the tensor itself, or into a clone() of the view",
                )
            node = node.args[0] if node.args else None


class _Views:
    """Makes views in place of a node that is one."""

    def __init__(self, node: Any) -> None:
        self.node, self.source = node, node.args[0]

    def _make(self, tensor: Any, overload: str, *args: Any) -> Any:
        import torch

        name, _, _ = overload.partition(".")
        graph, key = self.node.graph, "val" if "val" in self.node.meta else "example_value"
        if self.node.op == "call_method" or not isinstance(self.node.target, torch._ops.OpOverload):
            result = graph.call_method(name, (tensor, *args))
        else:
            target = operator.attrgetter(overload)(torch.ops.aten)
            result = graph.call_function(target, (tensor, *args))
        result.meta = {**self.node.meta, key: getattr(example_of(tensor), name)(*args)}
        return result

    def expanded(self) -> Any:
        """The source with dims of 1 in front; None: it shows elements several times."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        before, after = example_of(self.source).shape, example_of(self.node).shape
        front = len(after) - len(before)
        sizes_ = (*[1] * front, *before)
        if not all(statically_known_true(have == want) for have, want in zip(after, sizes_)):
            return None
        view = self.source
        for _ in range(front):
            view = self._make(view, "unsqueeze.default", 0)
        return view

    def unfolded(self) -> Any:
        """The windows as parts of a dim that is split. None: they overlap, or it is not known how
        many there are."""
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        names = ("dimension", "size", "step")
        arguments = dict(zip(names, self.node.args[1:])) | dict(self.node.kwargs)
        dim, size, step = (arguments[name] for name in names)
        source, result = example_of(self.source), example_of(self.node)
        if not source.dim() or not all(isinstance(number, int) for number in (dim, size, step)):
            return None
        dim %= source.dim()
        count = result.shape[dim]
        if statically_known_true(count == 1):
            narrowed = self._make(self.source, "narrow.default", dim, 0, size)
            narrowed = self._make(narrowed, "unsqueeze.default", dim)
        elif size > step or not isinstance(count, int):
            return None
        elif statically_known_true(count * step <= source.shape[dim]):
            narrowed = self._make(self.source, "narrow.default", dim, 0, count * step)
            narrowed = self._make(narrowed, "unflatten.int", dim, [count, step])
            if size < step:
                narrowed = self._make(narrowed, "narrow.default", dim + 1, 0, size)
        elif not _is_whole(source):
            return None  # torch does not write through views of views of this kind
        else:  # the last window is shorter than the step
            numbers = (list(result.shape), list(result.stride()), result.storage_offset())
            if not all(
                isinstance(number, int) for number in (*numbers[0], *numbers[1], numbers[2])
            ):
                return None
            return self._make(self.source, "as_strided.default", *numbers)
        return self._make(narrowed, "movedim.int", dim + 1, -1)
