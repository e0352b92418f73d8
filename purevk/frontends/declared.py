"""What the user declared of a module's inputs."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from purevk.errors import SizeConstraintError
from purevk.ir.signature import permutation_hint


class Declared:
    """What the user declared of a module's inputs: dynamic dims, their names and bounds."""

    def __init__(
        self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
    ) -> None:
        self.parameters: list[inspect.Parameter] = []
        try:
            self.parameters = list(inspect.signature(module.forward).parameters.values())
        except (TypeError, ValueError):
            pass
        self.simple = all(
            parameter.kind
            in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            for parameter in self.parameters
        )
        order = [parameter.name for parameter in self.parameters]
        self.by_name: dict[str, Any] = {}
        if isinstance(dynamic_shapes, Mapping):
            self.by_name = dict(dynamic_shapes)
        elif isinstance(dynamic_shapes, (tuple, list)):
            self.by_name = dict(zip([*order[: len(args)], *kwargs], dynamic_shapes))

    def _named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        order = [parameter.name for parameter in self.parameters]
        return {**dict(zip(order, args)), **kwargs}

    def names(self, leaves: Sequence[tuple[str, Any]]) -> dict[tuple[int, int], str]:
        """The user's names of dims, by the number of the input and the dim. A name counts once."""
        names_of_dims: dict[tuple[int, int], str] = {}
        used: set[str] = set()
        position = 0
        groups: dict[str, list[Any]] = {}
        for name, leaf in leaves:
            groups.setdefault(name, []).append(leaf)
        for name, group in groups.items():
            specs = _spec_leaves(group, self.by_name.get(name))
            for spec in specs:
                for dim, declared in _dims_of(spec):
                    label = getattr(declared, "__name__", None)
                    if isinstance(label, str) and label.isidentifier() and label not in used:
                        used.add(label)
                        names_of_dims[position, dim] = label
                position += 1
        return names_of_dims

    def fixed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """The declared dims along which an example has a size of 0 or 1, such as "x.shape[0] is 1"."""
        from torch.utils._pytree import tree_leaves

        leaves_ = []
        for name, value in self._named(args, kwargs).items():
            group = tree_leaves(value)
            for leaf, spec in zip(group, _spec_leaves(group, self.by_name.get(name))):
                shape = getattr(leaf, "shape", ())
                for dim, _ in _dims_of(spec):
                    if isinstance(dim, int) and dim < len(shape) and shape[dim] <= 1:
                        leaves_.append(f"{name}.shape[{dim}] is {int(shape[dim])}")
        return leaves_

    def without_ones(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Example inputs that have each element twice along the declared dims with a size of 1, which
        torch.export would fix. None: there are no such dims."""
        import torch
        from torch.utils._pytree import tree_flatten, tree_unflatten

        if not self.simple or not any(text.endswith(" is 1") for text in self.fixed(args, kwargs)):
            return None

        def twice(name: str, value: Any) -> Any:
            leaves, nesting = tree_flatten(value)
            specs = _spec_leaves(leaves, self.by_name.get(name))
            for number, (leaf, spec) in enumerate(zip(leaves, specs)):
                for dim, _ in _dims_of(spec) if isinstance(leaf, torch.Tensor) else ():
                    if dim < leaf.dim() and leaf.shape[dim] == 1:
                        leaf = torch.cat([leaf, leaf], dim).requires_grad_(leaf.requires_grad)
                leaves[number] = leaf
            return tree_unflatten(leaves, nesting)

        order = [parameter.name for parameter in self.parameters]
        values = {**dict(zip(order, args)), **kwargs}
        doubled = {name: twice(name, value) for name, value in values.items()}
        return (
            tuple(doubled[name] for name in order[: len(args)]),
            {name: doubled[name] for name in kwargs},
        )

    def refuse_outside(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        bounds: str,
        example: tuple[Any, Any],
    ) -> None:
        """Raises `SizeConstraintError` for a size outside of the declared bounds, or that is another
        one than the example's and was not declared as dynamic."""
        from torch.utils._pytree import tree_leaves

        before = self._named(*example)
        for name, value in self._named(args, kwargs).items():
            group = tree_leaves(value)
            self._refuse_other(name, group, tree_leaves(before.get(name)))
            for leaf, spec in zip(group, _spec_leaves(group, self.by_name.get(name))):
                for dim, declared in _dims_of(spec):
                    lower, upper = _bound(declared, "min"), _bound(declared, "max")
                    shape = getattr(leaf, "shape", ())
                    if dim >= len(shape) or bounds == "grow":
                        continue
                    size = int(shape[dim])
                    if (lower is not None and size < lower) or (upper is not None and size > upper):
                        label = getattr(declared, "__name__", f"dim {dim}")
                        raise SizeConstraintError(
                            f"{name}.shape[{dim}] is {size}",
                            where=f"dim {label!r}",
                            why=f"it was declared with min={lower}, max={upper}",
                            next='declare other bounds, or compile with bounds="grow"',
                        )

    def _refuse_other(self, name: str, group: Sequence[Any], before: Sequence[Any]) -> None:
        if len(group) != len(before) or not self.simple:
            return
        specs = _spec_leaves(group, self.by_name.get(name))
        for leaf, previous, spec in zip(group, before, specs):
            dynamic = {dim for dim, _ in _dims_of(spec)}
            sizes = zip(getattr(leaf, "shape", ()), getattr(previous, "shape", ()))
            for dim, (size, constant) in enumerate(sizes):
                if (
                    size != constant
                    and dim not in dynamic
                    and len(leaf.shape) == len(previous.shape)
                ):
                    fixed = [
                        None if dim in dynamic else size for dim, size in enumerate(previous.shape)
                    ]
                    raise SizeConstraintError(
                        f"{name} has size {size} along dim {dim}",
                        where="purevk.compile",
                        why=f"the example has {constant}, and the dim is not declared as dynamic",
                        next=permutation_hint(leaf.shape, fixed)
                        or "compile the module with dynamic_shapes, or pass the example's size",
                    )

    def automatic(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], example: tuple[Any, Any]
    ) -> Any:
        """Dynamic shapes for another export: what was declared is `Dim.AUTO`, and so are integers
        that were others before. None: nothing is dynamic."""
        import torch

        if not self.simple:
            return None
        auto = torch.export.Dim.AUTO
        before = self._named(*example)
        specs: dict[str, Any] = {}
        for name, value in self._named(args, kwargs).items():
            previous = before.get(name)
            varies = type(value) is int and type(previous) is int and previous != value
            if varies and 1 < value < 2**31:
                specs[name] = auto
            else:
                specs[name] = _automatic(value, self.by_name.get(name), auto)
        return specs if any(_has_dims(spec) for spec in specs.values()) else None


def _spec_leaves(group: Sequence[Any], spec: Any) -> list[Any]:
    """The declaration for each leaf of an argument."""
    if len(group) == 1 and not _is_nested(group, spec):
        return [spec]
    if isinstance(spec, Mapping):
        spec = list(spec.values())
    if not isinstance(spec, (tuple, list)):
        return [None] * len(group)
    flat: list[Any] = []
    for item in spec:
        flat += [item] if _is_leaf_spec(item) else _spec_leaves(group[len(flat) :], item)
    return (flat + [None] * len(group))[: len(group)]


def _is_nested(group: Sequence[Any], spec: Any) -> bool:
    return isinstance(spec, (tuple, list, Mapping)) and not _is_leaf_spec(spec)


def _is_leaf_spec(spec: Any) -> bool:
    """Whether a declaration is that of one tensor: dims by number, or a list of dims."""
    if spec is None or not isinstance(spec, (tuple, list, Mapping)):
        return True
    if isinstance(spec, Mapping):
        return all(isinstance(key, int) for key in spec)
    return all(not isinstance(item, (tuple, list, Mapping)) for item in spec)


def _dims_of(spec: Any) -> list[tuple[int, Any]]:
    """The dims that a tensor's declaration names, with what it says of them."""
    if isinstance(spec, Mapping):
        items = list(spec.items())
    elif isinstance(spec, (tuple, list)):
        items = list(enumerate(spec))
    else:
        return []
    return [(dim, item) for dim, item in items if item is not None and not isinstance(item, int)]


def _bound(declared: Any, name: str) -> int | None:
    value = getattr(declared, name, None)
    try:
        number = None if value is None else operator.index(value)
    except TypeError:
        return None
    return None if number is None or number >= 2**31 - 1 else number


def _automatic(value: Any, spec: Any, auto: Any) -> Any:
    """A declaration with `Dim.AUTO` in place of each dim, for a value of this nesting."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    if isinstance(value, torch.Tensor):
        # torch.export takes sizes 0 and 1 as fixed, and warns if they are declared.
        dims = [dim for dim, _ in _dims_of(spec) if dim < value.dim() and value.shape[dim] > 1]
        return dict.fromkeys(dims, auto) or None
    leaves, nesting = tree_flatten(value)
    if len(leaves) == 1 and nesting.is_leaf():
        return None
    specs = [
        _automatic(leaf, leaf_spec, auto)
        for leaf, leaf_spec in zip(leaves, _spec_leaves(leaves, spec))
    ]
    return tree_unflatten(specs, nesting)


def _has_dims(spec: Any) -> bool:
    if isinstance(spec, Mapping):
        return any(_has_dims(item) for item in spec.values())
    if isinstance(spec, (tuple, list)):
        return any(_has_dims(item) for item in spec)
    return spec is not None
