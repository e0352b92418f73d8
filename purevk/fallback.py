"""Operators on the CPU: any ATen operator through `torch.ops`, its arguments rebuilt from its schema, or a function that the
user registered. torch is imported only when a node needs it."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import numpy as np

from purevk.dtypes import DType
from purevk.errors import FallbackError
from purevk.ir import TensorType, Value, map_values

_executors: dict[str, Callable[..., Any]] = {}


def register_executor(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a CPU function for an operator: `@register_executor("my_lib.gate.default")`.

    The function gets the operator's arguments in the order of its schema, tensors as numpy arrays, and returns an array or a
    tuple of arrays.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _executors[name] = function
        return function

    return decorate


def registered_executors() -> tuple[str, ...]:
    """Names of the operators with a registered CPU function."""
    return tuple(sorted(_executors))


def can_run(name: str) -> bool:
    """Whether the operator has a CPU function or torch knows it. Imports torch if need be."""
    if name in _executors:
        return True
    try:
        _operator(name, "")
    except FallbackError:
        return False
    return True


def run(
    name: str, args: Sequence[Any], arrays: Mapping[Value, np.ndarray], results: Sequence[TensorType], source: str
) -> list[np.ndarray]:
    """Runs one node on the CPU.

    Args:
        name: operator, "namespace.op.overload".
        args: its arguments in the schema's order; `Value`s stand for tensors.
        arrays: the tensors.
        results: types that the graph expects; results are converted to their dtypes.
        source: where the node comes from, for messages.

    Raises:
        FallbackError: torch is missing, does not know the operator, or refuses the arguments.
    """
    if name in _executors:
        made = _executors[name](*[map_values(arg, arrays.__getitem__) for arg in args])
        made = made if isinstance(made, (tuple, list)) else (made,)
        return [np.asarray(array, dtype=type.dtype.numpy, order="C") for array, type in zip(made, results)]
    operator = _operator(name, source)
    positional, keywords = _arguments(operator, args, arrays)
    import torch

    try:
        with torch.no_grad():
            made = operator(*positional, **keywords)
    except Exception as error:
        raise FallbackError(
            f"{name} failed on the CPU", where=source, why=str(error).splitlines()[0] if str(error) else repr(error),
            next="check the sizes and dtypes of the inputs",
        ) from error  # fmt: skip
    tensors = list(made) if isinstance(made, (tuple, list)) else [made]
    return [to_numpy(_as_tensor(tensor), type.dtype) for tensor, type in zip(tensors, results)]


def _operator(name: str, source: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise FallbackError(
            f"{name} has no kernel and torch is not installed", where=source,
            why="operators without a kernel run on the CPU through torch",
            next=f"pip install torch, or register a function: purevk.ops.register_executor({name!r})",
        ) from error  # fmt: skip
    parts = name.split(".")
    try:
        packet = getattr(getattr(torch.ops, parts[0]), parts[1])
        return _functional(packet, getattr(packet, parts[2] if len(parts) > 2 else "default"))
    except (AttributeError, RuntimeError) as error:
        raise FallbackError(
            f"{name} has no kernel here and torch does not know it", where=source,
            next=f"import the library that defines it, or register a function: purevk.ops.register_executor({name!r})",
        ) from error  # fmt: skip


def _functional(packet: Any, operator: Any) -> Any:
    """The overload that returns new tensors, for one that writes into arguments: the one with the same other arguments."""

    def inputs(each: Any) -> list[tuple[str, str]]:
        return [(arg.name, str(arg.type)) for arg in each._schema.arguments if not arg.is_out]

    if not any(arg.is_out for arg in operator._schema.arguments):
        return operator
    wanted = inputs(operator)
    for name in packet.overloads():
        each = getattr(packet, name)
        if not any(arg.is_out for arg in each._schema.arguments) and inputs(each)[: len(wanted)] == wanted:
            return each
    return operator


def _arguments(operator: Any, args: Sequence[Any], arrays: Mapping[Value, np.ndarray]) -> tuple[list[Any], dict[str, Any]]:
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument, arg in zip(operator._schema.arguments, args):
        value = _convert(arg, arrays, str(argument.type))
        if argument.kwarg_only:
            if value is not None or not argument.has_default_value():
                keywords[argument.name] = value
        else:
            positional.append(value)
    return positional, keywords


def _convert(arg: Any, arrays: Mapping[Value, np.ndarray], kind: str) -> Any:
    if isinstance(arg, Value):
        tensor = to_torch(arrays[arg], arg.type.dtype)
        # A schema that wants a number may have been given a 0-d tensor.
        return tensor if "Tensor" in kind else tensor.item()
    if isinstance(arg, tuple):
        return [_convert(item, arrays, kind) for item in arg]
    if isinstance(arg, DType):
        return arg.to_torch()
    if isinstance(arg, int) and not isinstance(arg, bool):
        if "ScalarType" in kind or kind in ("Optional[dtype]", "dtype"):
            dtype = DType.from_pte(arg)
            return None if dtype is None else dtype.to_torch()
        if "bool" in kind.lower():
            return bool(arg)
    if arg is not None and kind in ("Optional[Device]", "Device", "Optional[Layout]", "Layout"):
        return None
    if isinstance(arg, (int, float)) and kind == "Tensor":
        import torch

        return torch.tensor(arg)
    return arg


def _as_tensor(value: Any) -> Any:
    import torch

    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def to_torch(array: np.ndarray, dtype: DType) -> Any:
    """A torch tensor over an array's memory (a copy if the array is read-only)."""
    import torch

    shape = array.shape
    array = np.ascontiguousarray(array)
    if not array.flags.writeable:
        array = array.copy()
    tensor = torch.from_numpy(array.reshape(-1)).reshape(shape)
    return tensor.view(torch.bfloat16) if dtype is DType.bfloat16 else tensor


def to_numpy(tensor: Any, dtype: DType | None = None) -> np.ndarray:
    """The elements of a torch tensor as a contiguous array, converted to `dtype` if given (bfloat16 as uint16)."""
    import torch

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dtype is not None and tensor.dtype is not dtype.to_torch():
        tensor = tensor.to(dtype.to_torch())
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()
