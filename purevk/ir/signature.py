"""What a call of a method looks like to the user: parameters by name, nested containers, results.

A graph takes a flat list of inputs and gives a flat list of outputs. A `Signature` says how the
arguments of a Python call become that list, and how the outputs become what the model returned.
It is plain data: no torch is needed to use one.
"""

from __future__ import annotations

import collections
import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from purevk.plain_text import printable

LEAF, TUPLE, LIST, DICT, NAMED_TUPLE, OBJECT = (
    "leaf",
    "tuple",
    "list",
    "dict",
    "namedtuple",
    "object",
)
KINDS = (TUPLE, LIST, DICT, NAMED_TUPLE, OBJECT)
CONTIGUOUS = "contiguous"
_NAMED: dict[tuple[str, tuple[Any, ...]], type] = {}


class StructureError(ValueError):
    """A value is not nested as a tree says."""


def _nearest(name: str, names: Sequence[str]) -> str:
    """A question after the name that a misspelt one may mean; empty if none is like it."""
    import difflib

    near = difflib.get_close_matches(name, names, 1)
    return f"; is {near[0]} meant?" if near else ""


@dataclass(frozen=True)
class Tree:
    """How a value is nested.

    Attributes:
        kind: "leaf", "tuple", "list", "dict", "namedtuple", or "object": a class that is registered
            with torch's pytree, such as a dataclass or a `ModelOutput`.
        keys: of a dict; the fields of a named tuple; for an object what torch's pytree calls its
            context, if that is a list of names.
        items: one tree for each child.
        type: the class of a dict, named tuple or object; None: as read from a file.
        context: of an object, as torch's pytree has it.
        name: of the class, for messages.
    """

    kind: str
    keys: tuple[Any, ...] = ()
    items: tuple[Tree, ...] = ()
    type: type | None = field(default=None, compare=False)
    context: Any = field(default=None, compare=False)
    name: str = ""

    def is_like(self, other: Tree) -> bool:
        """Whether two trees are equal, and their classes and contexts too."""
        return (
            self == other
            and self.type is other.type
            and bool(self.context == other.context)
            and all(map(Tree.is_like, self.items, other.items))
        )

    @property
    def leaves(self) -> int:
        """Number of leaves."""
        return 1 if self.kind == LEAF else sum(item.leaves for item in self.items)

    def names(self, prefix: str) -> Iterator[str]:
        """A name for each leaf: "x", "caches.0", "batch.mask"."""
        if self.kind == LEAF:
            yield prefix
        keys = self.keys if len(self.keys) == len(self.items) else range(len(self.items))
        for key, item in zip(keys, self.items):
            yield from item.names(f"{prefix}.{key}" if prefix else str(key))

    def __str__(self) -> str:
        if self.kind == LEAF:
            return "*"
        items = ", ".join(
            f"{key}: {item}" if self.kind in (DICT, OBJECT) else str(item)
            for key, item in zip(self.keys or range(len(self.items)), self.items)
        )
        brackets = {LIST: "[]", DICT: "{}"}.get(self.kind, "()")
        return printable(f"{self.name}{brackets[0]}{items}{brackets[1]}")


LEAF_TREE = Tree(LEAF)


def flatten(value: Any, tree: Tree, exact: bool = False) -> list[Any]:
    """The leaves of a value that is nested as `tree` says. Raises `StructureError` if it is not.

    Args:
        exact: dicts must have their keys in the same order.
    """
    if tree.kind == LEAF:
        if isinstance(value, (tuple, list, dict)) and not _is_number_list(value):
            raise StructureError(f"a {type(value).__name__} was given where one value is expected")
        return [value]
    children = _children(value, tree, exact)
    if len(children) != len(tree.items):
        raise StructureError(f"{len(children)} items were given, {len(tree.items)} are expected")
    return [
        leaf for child, item in zip(children, tree.items) for leaf in flatten(child, item, exact)
    ]


def _is_number_list(value: Any) -> bool:
    """Whether a list stands for one array: numbers, or lists of them."""
    return isinstance(value, (tuple, list)) and all(
        isinstance(item, (bool, int, float, complex)) or _is_number_list(item) for item in value
    )


def _children(value: Any, tree: Tree, exact: bool = False) -> Sequence[Any]:
    if tree.kind in (TUPLE, LIST):
        if type(value).__name__ != tree.kind or not isinstance(value, (tuple, list)):
            raise StructureError(f"a {tree.kind} is expected, not {type(value).__name__}")
        return list(value)
    if tree.kind == DICT:
        if not isinstance(value, Mapping) or set(value) != set(tree.keys):
            given = list(value) if isinstance(value, Mapping) else type(value).__name__
            raise StructureError(f"a dict with the keys {list(tree.keys)} is expected, not {given}")
        if exact and tree.type is not None and type(value) is not tree.type:
            raise StructureError(f"a {tree.type.__name__} is expected, not {type(value).__name__}")
        if exact and tuple(value) != tree.keys:
            raise StructureError(
                f"a dict with its keys in the order {list(tree.keys)} is expected, not {list(value)}"
            )
        return [value[key] for key in tree.keys]
    if tree.kind == NAMED_TUPLE:
        other = tree.type is not None and type(value) is not tree.type
        if other or not isinstance(value, tuple) or getattr(value, "_fields", None) != tree.keys:
            raise StructureError(f"{tree} is expected, not {type(value).__name__}")
        return list(value)
    return _object_children(value, tree)


def _object_children(value: Any, tree: Tree) -> Sequence[Any]:
    if tree.type is None:  # read from a file: by the names of its fields
        if isinstance(value, Mapping) and set(value) == set(tree.keys):
            return [value[key] for key in tree.keys]
        if tree.keys and all(hasattr(value, str(key)) for key in tree.keys):
            return [getattr(value, str(key)) for key in tree.keys]
        raise StructureError(f"{tree} is expected, not {type(value).__name__}")
    if type(value) is not tree.type:
        raise StructureError(f"a {tree.name} is expected, not {type(value).__name__}")
    children, context = _pytree().SUPPORTED_NODES[tree.type].flatten_fn(value)
    if context != tree.context:
        raise StructureError(f"the {tree.name} holds other items than the one of the export")
    result: Sequence[Any] = list(children)
    return result


def _pytree() -> Any:
    """torch's registry of containers; an object of one of its classes exists, so it is loaded."""
    return sys.modules["torch.utils._pytree"]


def unflatten(leaves: Iterator[Any], tree: Tree) -> Any:
    """A value nested as `tree` says. What was read from a file gives plain dicts for objects."""
    if tree.kind == LEAF:
        return next(leaves)
    children = [unflatten(leaves, item) for item in tree.items]
    if tree.kind == TUPLE:
        return tuple(children)
    if tree.kind == LIST:
        return children
    if tree.kind == NAMED_TUPLE:
        made = tree.type if tree.type is not None else _named_tuple(tree)
        return made(*children)
    if tree.kind == OBJECT and tree.type is not None:
        return _pytree().SUPPORTED_NODES[tree.type].unflatten_fn(children, tree.context)
    pairs = dict(zip(tree.keys, children)) if tree.keys else dict(enumerate(children))
    if tree.type in (None, dict):
        return pairs
    return tree.type(pairs)


def _named_tuple(tree: Tree) -> type:
    key = (tree.name, tree.keys)
    if key not in _NAMED:
        _NAMED[key] = collections.namedtuple(
            tree.name if tree.name.isidentifier() else "Outputs", tree.keys, rename=True
        )
    return _NAMED[key]


def children_of(spec: Any) -> list[Any]:
    """The parts of a `torch.utils._pytree.TreeSpec`: before torch 2.10 an attribute has them."""
    found: list[Any] = spec.children() if hasattr(spec, "children") else spec.children_specs
    return found


def tree_of(spec: Any) -> Tree:
    """The tree of a `torch.utils._pytree.TreeSpec`."""
    if spec.is_leaf():
        return LEAF_TREE
    kind, context = spec.type, spec.context
    items = tuple(tree_of(child) for child in children_of(spec))
    if kind in (tuple, list):
        return Tree(kind.__name__, items=items)
    if kind in (dict, collections.OrderedDict):
        return Tree(DICT, tuple(context), items, kind)
    if kind is collections.namedtuple:
        return Tree(NAMED_TUPLE, tuple(context._fields), items, context, name=context.__name__)
    names = (
        context[0]
        if isinstance(context, (tuple, list)) and context and isinstance(context[0], list)
        else context
    )
    keys = tuple(names) if isinstance(names, (tuple, list)) and len(names) == len(items) else ()
    if not all(isinstance(key, str) for key in keys):
        keys = ()
    return Tree(OBJECT, keys, items, kind, context, kind.__name__)


# -- calls ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Parameter:
    """An argument of the Python call.

    Attributes:
        tree: how it is nested; its leaves are inputs of the graph, in order.
        positional: whether the export had it by position.
    """

    name: str
    tree: Tree
    positional: bool = True


@dataclass(frozen=True)
class Signature:
    """How a method is called.

    Attributes:
        parameters: in the order of the graph's inputs.
        order: names in the order of positional arguments; it may name parameters that the export
            left at their defaults.
        defaults: default values of parameters that have a simple one, also of those that are no
            inputs of the graph.
        outputs: how the outputs are nested.
        numbers: outputs that the model returns as Python numbers, by position, each with its type:
            "float" or "bool".
        free: keywords that no parameter of the module declares.
        exact: what the model may tell apart is told apart: the order of dict keys and of keywords
            that no parameter declares, and a Python number from a tensor. So it is where the module
            can be exported again; an exported program of torch goes by names.
        layouts: inputs whose memory layout decides what is computed, by position, each with the
            layout of the export, see `memory_layout`.
    """

    parameters: tuple[Parameter, ...]
    order: tuple[str, ...]
    defaults: Mapping[str, Any]
    outputs: Tree
    numbers: tuple[tuple[int, str], ...] = ()
    free: tuple[str, ...] = ()
    exact: bool = False
    layouts: tuple[tuple[int, str], ...] = ()

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """A name for each input of the graph."""
        return tuple(
            name for parameter in self.parameters for name in parameter.tree.names(parameter.name)
        )

    @property
    def output_names(self) -> tuple[str, ...]:
        """A name for each output of the graph."""
        if self.outputs.kind == LEAF:
            return ("output",)
        return tuple(self.outputs.names("" if self.outputs.keys else "output"))

    @property
    def taken(self) -> str:
        """The names of the arguments, as text."""
        return ", ".join(parameter.name for parameter in self.parameters) or "none"

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The inputs of the graph for the arguments of a call.

        Raises:
            StructureError: an argument is missing, unknown, given twice, or nested otherwise.
        """
        if self._flat and not kwargs and len(args) == len(self.order):
            for name, value in zip(self.order, args):
                if isinstance(value, (tuple, list, dict)):
                    self._flatten(name, value, LEAF_TREE)
            return list(args)
        if len(args) > len(self.order):
            keywords = [each.name for each in self.parameters if each.name not in self.order]
            raise StructureError(
                f"{len(args)} positional arguments were given, {len(self.order)} are expected"
                + (f"; pass {', '.join(keywords)} by name" if keywords else "")
            )
        given = dict(zip(self.order, args))
        for name, value in kwargs.items():
            if name in given:
                raise StructureError(f"{name} was given twice")
            given[name] = value
        if self.exact:
            free = [name for name in kwargs if name in self.free]
            if free != [name for name in self.free if name in kwargs]:
                raise StructureError(f"keywords are expected in the order {list(self.free)}")
        inputs: list[Any] = []
        for parameter in self.parameters:
            if parameter.name not in given and parameter.name not in self.defaults:
                known = {each.name for each in self.parameters} | self.defaults.keys()
                unknown = [name for name in given if name not in known]
                missing = [name for name in known if name not in given]
                raise StructureError(
                    f"{parameter.name} is missing"
                    + (f", and {', '.join(unknown)} is no argument" if unknown else "")
                    + (_nearest(unknown[0], missing) if len(unknown) == 1 else "")
                )
            value = given.pop(parameter.name, self.defaults.get(parameter.name))
            inputs += self._flatten(parameter.name, value, parameter.tree, self.exact)
        for name, value in given.items():
            if name not in self.defaults:
                names = [*(each.name for each in self.parameters), *self.defaults]
                near = _nearest(name, [each for each in names if each not in kwargs])
                raise StructureError(
                    f"{name} is no argument{near or f'; the method takes {self.taken}'}"
                )
            if not same_literal(value, self.defaults[name]):
                raise StructureError(
                    f"{name} was left at its default {self.defaults[name]!r} at export"
                )
        return inputs

    @staticmethod
    def _flatten(name: str, value: Any, tree: Tree, exact: bool = False) -> list[Any]:
        try:
            return flatten(value, tree, exact)
        except StructureError as error:
            raise StructureError(f"{name}: {error}") from None

    @functools.cached_property
    def _flat(self) -> bool:
        """Whether each parameter is one input, in order."""
        return tuple(parameter.name for parameter in self.parameters) == self.order and all(
            parameter.tree.kind == LEAF for parameter in self.parameters
        )

    def arguments(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the Python call that has these inputs: the opposite of `bind`."""
        leaves = iter(inputs)
        args, kwargs = [], {}
        for parameter in self.parameters:
            value = unflatten(leaves, parameter.tree)
            if parameter.positional:
                args.append(value)
            else:
                kwargs[parameter.name] = value
        return tuple(args), kwargs

    def unflatten(self, outputs: Sequence[Any]) -> Any:
        """The outputs of the graph as the model returned them."""
        if self.numbers:
            outputs = list(outputs)
            for position, kind in self.numbers:
                number = outputs[position]
                number = number.item() if hasattr(number, "item") else number
                outputs[position] = bool(number) if kind == "bool" else float(number)
        return unflatten(iter(outputs), self.outputs)


def memory_layout(sizes: Sequence[int], strides: Sequence[int]) -> str:
    """How the elements of a tensor lie in memory, as text: "contiguous" if they are dense in
    row-major order, "1, 0" if they are dense in another order of the dims, else their strides. Dims
    of size 1 do not count, so the text is the same for other sizes.

    Args:
        strides: in elements.
    """
    if 0 in sizes:
        return CONTIGUOUS
    dims = [dim for dim, size in enumerate(sizes) if size != 1]
    order = sorted(dims, key=lambda dim: -strides[dim])
    step = 1
    for dim in reversed(order):
        if strides[dim] != step:
            return f"strides {', '.join(str(strides[each]) for each in dims)}"
        step *= sizes[dim]
    return CONTIGUOUS if order == dims else ", ".join(map(str, order))


def same_literal(given: Any, wanted: Any) -> bool:
    """Whether a Python value is the one that an export made part of the graph: of the same type and
    equal (a NaN equals a NaN)."""
    if type(given) is not type(wanted):
        return False
    if isinstance(given, float) and given == wanted:
        return math.copysign(1.0, given) == math.copysign(1.0, wanted)  # -0.0 is not 0.0
    return given is wanted or bool(given == wanted) or (given != given and wanted != wanted)


def permutation_hint(given: Sequence[int], wanted: Sequence[int | None]) -> str:
    """How to make an image with its channels last (NHWC) one with its channels first, if that gives
    the sizes that are wanted, or the other way around. Empty if neither does.

    Args:
        wanted: None for a dim of any size.
    """
    rank = len(given)
    if rank not in (3, 4, 5) or len(wanted) != rank:
        return ""
    # With three dims, the first one may be the batch or not.
    for first in (0, 1) if rank == 3 else (1,):
        batch, inner = [*range(first)], [*range(first, rank)]
        for before, after, order in (
            ("last", "first", [*batch, inner[-1], *inner[:-1]]),
            ("first", "last", [*batch, *inner[1:], first]),
        ):
            if all(size in (None, given[dim]) for dim, size in zip(order, wanted)):
                dims = ", ".join(map(str, order))
                return (
                    f"if the channels are {before} and should be {after}: x.permute({dims}), or "
                    f"x.transpose({dims}) in numpy"
                )
    return ""
