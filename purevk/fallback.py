"""Runs operators on the CPU: any operator of `torch.ops`, or a function that the user registered
with `purevk.ops.register_executor`. The operator's schema tells how to convert the arguments.
torch is imported only when a node needs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from purevk.dtypes import DType
from purevk.errors import FallbackError
from purevk.ir import TensorType, Value
from purevk.ops.executors import Executor, find_executor

Arrays = Mapping[Value, np.ndarray]

# Arguments that operators of ATen write although their schemas do not say so.
_WRITTEN = {
    name: ("running_mean", "running_var")
    for name in ("native_batch_norm", "batch_norm", "instance_norm", "_batch_norm_impl_index")
}


def run(
    name: str, args: Sequence[Any], arrays: Arrays, results: Sequence[TensorType], source: str
) -> list[np.ndarray]:
    """Runs one node on the CPU.

    Args:
        name: operator, "namespace.op.overload".
        args: its arguments in the schema's order, with a `Value` for each tensor.
        arrays: the tensors.
        results: types that the graph expects. Results are converted to their dtypes. Numbers are
            0-d tensors. An operator that writes into arguments gives its own results first, then
            these arguments.
        source: where the node comes from, for messages.

    Raises:
        FallbackError: torch is missing, does not know the operator, or refuses the arguments. Or
            the results are not those that the graph expects.
    """
    executor = find_executor(name)
    made = (
        _execute(executor, args, arrays, source)
        if executor
        else _call(name, args, arrays, results, source)
    )
    if len(made) < len(results):
        raise FallbackError(
            f"{name} gave {len(made)} results", where=source, why=f"{len(results)} are expected"
        )
    found = [_to_array(each, type.dtype) for each, type in zip(made, results)]
    for number, (array, type) in enumerate(zip(found, results)):
        fits = array.ndim == type.rank and all(
            not isinstance(size, int) or size == given
            for size, given in zip(type.dims, array.shape)
        )
        if not fits:
            raise FallbackError(
                f"result {number} of {name} has sizes {list(array.shape)}",
                where=source,
                why=f"{type} is expected",
                next="make the operator's CPU function and its shape function (or fake kernel) agree",
            )
    return found


# -- registered functions ------------------------------------------------------------------------
def _execute(executor: Executor, args: Sequence[Any], arrays: Arrays, source: str) -> list[Any]:
    def given(arg: Any) -> Any:
        if isinstance(arg, Value):
            return (
                to_torch(arrays[arg], arg.type.dtype)
                if executor.tensors == "torch"
                else arrays[arg]
            )
        if isinstance(arg, tuple):
            return [given(item) for item in arg]
        if isinstance(arg, DType):
            return arg.to_torch() if executor.tensors == "torch" else arg.numpy
        return arg

    try:
        return list(_flat(executor.function(*[given(arg) for arg in args])))
    except Exception as error:
        raise _failed(
            executor.name, source, error, "the function is that of register_executor"
        ) from error


def _failed(name: str, source: str, error: Exception, next: str) -> FallbackError:
    why = str(error).splitlines()[0] if str(error) else repr(error)
    return FallbackError(f"{name} failed on the CPU", where=source, why=why, next=next)


def _flat(made: Any) -> Iterator[Any]:
    """The results, also those in lists and tuples, without those that are None."""
    if isinstance(made, (tuple, list)):
        for each in made:
            yield from _flat(each)
    elif made is not None:
        yield made


def _to_array(made: Any, dtype: DType) -> np.ndarray:
    if hasattr(made, "detach"):
        return to_numpy(made, dtype)
    return np.asarray(made, dtype=dtype.numpy, order="C")


# -- operators of torch --------------------------------------------------------------------------
def _call(
    name: str, args: Sequence[Any], arrays: Arrays, results: Sequence[TensorType], source: str
) -> list[Any]:
    operator, names = _operator(name, len(args), source)
    schema = operator._schema.arguments
    given = dict(zip(names, args))
    values = {
        each.name: _convert(given[each.name], str(each.real_type), arrays)
        for each in schema
        if each.name in given
    }
    written = [each.name for each in schema if each.is_write and not each.is_out]
    import torch

    with torch.no_grad():
        try:
            made = _apply(operator, values, written, results)
        except Exception as error:
            wider = _widened(values) if operator.namespace in ("aten", "prims") else values
            if all(wider[each] is values[each] for each in values):
                raise _failed(
                    name, source, error, "check the sizes and dtypes of the inputs"
                ) from error
            # torch does not mix dtypes, and has no half precision or 32-bit indices everywhere.
            try:
                made = _apply(operator, wider, written, results)
            except Exception:
                raise _failed(
                    name, source, error, "check the sizes and dtypes of the inputs"
                ) from error
    return made


def _apply(
    operator: Any, values: Mapping[str, Any], written: Sequence[str], results: Sequence[TensorType]
) -> list[Any]:
    import torch

    spared = (*written, *_WRITTEN.get(operator._opname, ()))
    values = {name: _copied(value) if name in spared else value for name, value in values.items()}
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    fresh = iter([torch.empty(0, dtype=type.dtype.to_torch()) for type in results])
    for each in operator._schema.arguments:
        if each.is_out:
            is_list = str(each.real_type).startswith("List")
            keywords[each.name] = list(fresh) if is_list else next(fresh)
        elif each.name not in values:
            continue
        elif not each.kwarg_only and len(positional) == operator._schema.arguments.index(each):
            positional.append(values[each.name])
        elif values[each.name] is not None or not each.has_default_value():
            keywords[each.name] = values[each.name]
    made = list(_flat(operator(*positional, **keywords)))
    if len(made) < len(results):
        made += _flat([values[name] for name in written])
    return made


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.clone() if hasattr(value, "clone") else value


def _operator(name: str, count: int, source: str) -> tuple[Any, tuple[str, ...]]:
    """The operator of torch that returns new tensors, and the names of the `count` arguments that a
    node has."""
    try:
        import torch
    except ImportError as error:
        raise FallbackError(
            f"{name} has no kernel and torch is not installed",
            where=source,
            why="operators without a kernel run on the CPU through torch",
            next=f"pip install torch, or register a function: purevk.ops.register_executor({name!r})",
        ) from error
    parts = name.split(".")
    try:
        packet = getattr(getattr(torch.ops, parts[0]), parts[1])
        operator = getattr(packet, parts[2] if len(parts) > 2 else "default")
    except (AttributeError, RuntimeError) as error:
        raise FallbackError(
            f"{name} has no kernel here and torch does not know it",
            where=source,
            next=f"import the library that defines it, or register a function: purevk.ops.register_executor({name!r})",
        ) from error
    names = _inputs(operator)
    if _is_out(operator):
        return _functional(packet, operator), names[:count]
    if len(names) > count:
        # A file calls an out-variant, which may lack arguments in the middle, such as dtypes: it
        # takes them from its results.
        for each in (getattr(packet, overload) for overload in packet.overloads()):
            if _is_out(each) and len(_inputs(each)) == count and set(_inputs(each)) < set(names):
                return operator, _inputs(each)
    return operator, names[:count]


def _is_out(operator: Any) -> bool:
    return any(argument.is_out for argument in operator._schema.arguments)


def _inputs(operator: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator._schema.arguments if not argument.is_out)


def _functional(packet: Any, operator: Any) -> Any:
    """The overload that returns new tensors and has the same other arguments as an overload that
    writes into arguments. The operator itself if there is none."""
    kinds = {
        argument.name: str(argument.real_type)
        for argument in operator._schema.arguments
        if not argument.is_out
    }
    for each in (getattr(packet, overload) for overload in packet.overloads()):
        known = {argument.name: str(argument.real_type) for argument in each._schema.arguments}
        if not _is_out(each) and all(known.get(name) == kind for name, kind in kinds.items()):
            return each
    return operator


def _convert(arg: Any, kind: str, arrays: Arrays) -> Any:
    """An argument, converted to the type that the schema wants."""
    optional = kind.startswith("Optional[")
    if optional:
        kind = kind[len("Optional[") : -1]
    if kind in ("Device", "Layout", "MemoryFormat", "Generator"):
        # Without meaning here: tensors are dense and on the CPU, and files have no generators.
        return None if optional else _own(kind)
    if isinstance(arg, tuple):
        each = kind[len("List[") : -1] if kind.startswith("List[") else kind
        return [_convert(item, each, arrays) for item in arg]
    if isinstance(arg, Value):
        tensor = to_torch(arrays[arg], arg.type.dtype)
        if "Tensor" in kind or kind in ("t", "Any"):
            return tensor
        # The schema wants numbers, but a node may pass tensors.
        return tensor.tolist() if kind.startswith("List[") else _number(tensor.item(), kind)
    if isinstance(arg, DType):
        return arg.to_torch()
    if isinstance(arg, (bool, int, float)):
        return _number(arg, kind)
    return arg


def _own(kind: str) -> Any:
    import torch

    if kind == "Generator":
        return torch.Generator()
    return {
        "Device": torch.device("cpu"),
        "Layout": torch.strided,
        "MemoryFormat": torch.contiguous_format,
    }[kind]


def _number(number: Any, kind: str) -> Any:
    if kind == "Tensor":
        import torch

        # A 0-d tensor does not widen the other tensors, and float64 keeps all digits.
        return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)
    if kind == "ScalarType":
        dtype = DType.from_pte(int(number))
        return int(number) if dtype is None else dtype.to_torch()
    convert = {"bool": bool, "float": float, "int": int}.get(kind)
    return number if convert is None else convert(number)


def _widened(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with all floating-point tensors in one dtype (float32 or float64) and all
    integer tensors in int64. Arguments that are so already stay the same objects."""
    import torch

    tensors = [each for each in _flat(list(values.values())) if isinstance(each, torch.Tensor)]
    double = any(tensor.dtype is torch.float64 for tensor in tensors)

    def wide(value: Any) -> Any:
        if isinstance(value, list):
            items = [wide(item) for item in value]
            return value if all(new is old for new, old in zip(items, value)) else items
        if not isinstance(value, torch.Tensor) or value.dtype is torch.bool or value.is_complex():
            return value
        return value.to(
            (torch.float64 if double else torch.float32)
            if value.is_floating_point()
            else torch.int64
        )

    return {name: wide(value) for name, value in values.items()}


# -- tensors and arrays --------------------------------------------------------------------------
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
    """The elements of a torch tensor as a contiguous array, converted to `dtype` if given (bfloat16
    as uint16)."""
    import torch

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dtype is not None and tensor.dtype is not dtype.to_torch():
        tensor = tensor.to(dtype.to_torch())
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: np.ndarray = tensor.numpy()
    return array
