"""The arguments of an operator, from those of a file to those of its definition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from purevk.dtypes import DType
from purevk.errors import FileFormatError, InputError
from purevk.frontends.result_types import Recorded
from purevk.ir import Arg, Relation, Value
from purevk.ops import registry

# Parameters for which an operator takes a tensor of one element as well as a number.
_NUMBER_OR_TENSOR = {"x", "y", "z", "min", "max", "fill_value", "s", "predicate"}
# The same of pointwise operators, but of sums, and of what is written with these. Passes read `alpha`.
_FACTORS = {"alpha", "beta", "eps", "lambd", "negative_slope", "threshold", "value"}
_SUMS = {"aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Scalar"}
_WITH_FACTORS = {
    "aten.addbmm.default", "aten.addmm.default", "aten.addmv.default", "aten.addr.default",
    "aten.baddbmm.default", "aten.fill.Scalar", "aten.index_fill.int_Scalar", "aten.scatter.value",
    "aten.scatter.value_reduce",
}  # fmt: skip


def complete(
    definition: registry.Operator, args: Any, recorded: Sequence[Recorded], where: str
) -> tuple[Arg, ...]:
    """All arguments of an operator by position.

    Args:
        args, recorded: as `Importer.emit` takes them.
        where: the file, for messages.
    """
    if isinstance(args, Mapping):
        names = definition.parameters
        bound = definition.bind(())
        bound.update({name: arg for name, arg in args.items() if name in names})
    else:
        bound = definition.bind(tuple(args)[: len(definition.parameters)])
    bound = definition.integers(bound)
    if "dtype" in bound:
        if isinstance(bound["dtype"], int):
            bound["dtype"] = DType.from_pte(bound["dtype"])
        if recorded:
            bound["dtype"] = recorded[0].dtype
    if bound.get("zero_point_dtype", 0) is None and len(recorded) > 1:
        bound["zero_point_dtype"] = recorded[1].dtype
    for name in ("layout", "device", "pin_memory", "memory_format"):
        if name in bound:
            bound[name] = None  # without meaning here: planning chooses the layout
    missing = [name for name in definition.parameters if name not in bound]
    if missing:
        raise FileFormatError(f"{definition.name} lacks arguments {missing}", where=where)
    return tuple(bound[name] for name in definition.parameters)


def with_relations(
    names: Sequence[str], args: tuple[Arg, ...], truth: Callable[[Arg], Value]
) -> tuple[Arg, ...]:
    """The arguments of an operator, with relations as tensors of one element, which promote as truth
    values do, or as 1 or 0 where the operator takes no such tensor.

    Args:
        names: of the parameters.
        truth: makes such a tensor.
    """
    if not any(isinstance(arg, (Relation, tuple)) for arg in args):
        return args

    def plain(arg: Any, name: str) -> Any:
        if isinstance(arg, tuple):
            return tuple(plain(item, "in a list") for item in arg)
        if not isinstance(arg, Relation):
            return arg
        if name and name not in _NUMBER_OR_TENSOR:
            return arg.truth
        return truth(arg.truth)

    return tuple(map(plain, args, names))


def takes_number(
    definition: registry.Operator, args: tuple[Arg, ...], numbers: Collection[Value]
) -> bool:
    """Whether a number that an operator gave, one of `numbers`, is an argument that cannot be a
    tensor."""
    pointwise = isinstance(definition.form, registry.Pointwise)
    allowed = _NUMBER_OR_TENSOR
    if definition.name in _WITH_FACTORS or (pointwise and definition.name not in _SUMS):
        allowed = allowed | _FACTORS
    if definition.name == "aten.linspace.default":
        allowed = allowed | {"start", "end"}
    return any(
        isinstance(arg, Value) and arg in numbers and name not in allowed
        for name, arg in zip(definition.parameters, args)
    )


def check_schema(
    definition: registry.Operator, args: Any, results: int, recorded: int, source: str
) -> None:
    """Compares the definition that a user registered with the operator of torch: arguments that the
    definition lacks would have no effect."""
    names = definition.parameters
    extra = [] if isinstance(args, Mapping) else [*args][len(names) :]
    if any(arg is not None for arg in extra):
        raise InputError(
            f"the definition of {definition.name} lacks arguments of the operator",
            where=source,
            why=f"the call has {len(args)}, the definition {len(names)}: {', '.join(names)}",
            next="register it again with all arguments of the operator's schema, in its order",
        )
    if results != recorded:
        raise InputError(
            f"the definition of {definition.name} has another number of results than the operator",
            where=source,
            why=f"its shape function gives {results}, the operator gives {recorded}",
            next="register it again with a shape function that gives a tuple of as many types",
        )
