"""Runs operators on the CPU: operators of `torch.ops`, or a function that the user registered with
`purevk.ops.register_executor`. The operator's schema tells how to convert the arguments. torch is
imported only when a node needs it.

A model file gets only the operators that `pure_operators` accepts and those that the caller allowed.
torch checks their arguments on its meta device before anything runs. A module that the caller
compiles gets all operators, because they are the caller's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from purevk import pure_operators
from purevk.dtypes import DType, elements
from purevk.errors import FallbackError
from purevk.ir import TensorType, Value

if TYPE_CHECKING:
    from purevk.ops.executors import Executor

Arrays = Mapping[Value, np.ndarray]

# How many times larger than stated results may be: they may be computed in a wider dtype, and some
# operators have further results.
_SLACK = 64

# Arguments that operators of ATen write although their schemas do not say so.
_WRITTEN = {
    name: ("running_mean", "running_var")
    for name in ("native_batch_norm", "batch_norm", "instance_norm", "_batch_norm_impl_index")
}


def run(
    name: str,
    args: Sequence[Any],
    arrays: Arrays,
    results: Sequence[TensorType],
    source: str,
    trusted: bool = False,
    reason: str = "",
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
        trusted: the caller's own module calls the operator. Otherwise it is one of a file.
        reason: why the device does not run it, for messages.

    Raises:
        FallbackError: torch is missing, does not know the operator, or refuses the arguments. A file
            may not run the operator. Or the results are not those that the graph expects.
    """
    from purevk.ops.executors import find_executor  # with it all operators are imported

    executor = find_executor(name)
    tensors = (
        _execute(executor, args, arrays, source)
        if executor
        else _call(name, args, arrays, results, source, trusted, reason)
    )
    if len(tensors) < len(results):
        raise FallbackError(
            f"{name} gave {len(tensors)} results", where=source, why=f"{len(results)} are expected"
        )
    arrays_ = [_to_array(tensor, type.dtype) for tensor, type in zip(tensors, results)]
    for number, (array, type) in enumerate(zip(arrays_, results)):
        _expect(name, number, array.shape, type, source)
    return arrays_


def _expect(name: str, number: int, sizes: Sequence[int], type: TensorType, source: str) -> None:
    """Compares the sizes of a result with those that the graph states."""
    fits = len(sizes) == type.rank and all(
        not isinstance(stated, int) or stated == size for stated, size in zip(type.dims, sizes)
    )
    if not fits:
        raise FallbackError(
            f"result {number} of {name} has sizes {list(sizes)}",
            where=source,
            why=f"{type} is expected",
            next="make the operator's CPU function and its shape function (or fake kernel) agree",
        )


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
    text = str(error).strip().partition("\n")[0]
    why = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return FallbackError(f"{name} failed on the CPU", where=source, why=why, next=next)


def _flat(values: Any) -> Iterator[Any]:
    """The results, also those in lists and tuples, without those that are None."""
    if isinstance(values, (tuple, list)):
        for item in values:
            yield from _flat(item)
    elif values is not None:
        yield values


def _to_array(tensor: Any, dtype: DType) -> np.ndarray:
    if hasattr(tensor, "detach"):
        return to_numpy(tensor, dtype)
    return np.asarray(tensor, dtype=dtype.numpy, order="C")


# -- operators of torch --------------------------------------------------------------------------
def _call(
    name: str,
    args: Sequence[Any],
    arrays: Arrays,
    results: Sequence[TensorType],
    source: str,
    trusted: bool,
    reason: str,
) -> list[Any]:
    from purevk.ops.executors import is_allowed

    operator, names = _operator(name, len(args), source, reason)
    if not trusted and not is_allowed(name):
        _refuse_impure(name, operator, source)
    schema = operator._schema.arguments
    arguments = dict(zip(names, args))
    try:
        values = {
            argument.name: _convert(arguments[argument.name], str(argument.real_type), arrays)
            for argument in schema
            if argument.name in arguments
        }
    except Exception as error:
        raise _failed(name, source, error, "check the arguments of the operator") from error
    written = [argument.name for argument in schema if argument.is_write and not argument.is_out]
    import torch

    def attempt(values: Mapping[str, Any]) -> list[Any]:
        if not trusted:
            _check(name, operator, values, results, source)
        return _apply(operator, values, written, results)

    with torch.no_grad():
        try:
            result = attempt(values)
        except FallbackError:
            raise
        except Exception as error:
            wider = _widened(values) if operator.namespace in ("aten", "prims") else values
            if all(wider[value] is values[value] for value in values):
                raise _failed(
                    name, source, error, "check the sizes and dtypes of the inputs"
                ) from error
            # torch does not mix dtypes, and has no half precision or 32-bit indices everywhere.
            try:
                result = attempt(wider)
            except FallbackError:
                raise
            except Exception:
                raise _failed(
                    name, source, error, "check the sizes and dtypes of the inputs"
                ) from error
    return result


def _refuse_impure(name: str, operator: Any, source: str) -> None:
    reason = pure_operators.refusal(operator)
    if reason is not None:
        raise FallbackError(
            f"a model file may not run {name} on the CPU",
            where=source,
            why=reason,
            next=f"if you trust the file, call purevk.ops.allow_operator({name!r}), or register a"
            f" function: purevk.ops.register_executor({name!r})",
        )


def _check(
    name: str,
    operator: Any,
    values: Mapping[str, Any],
    results: Sequence[TensorType],
    source: str,
) -> None:
    """Has torch check the arguments. Refuses results that are far larger than the graph states.
    Runs no kernel and allocates nothing."""
    import torch

    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags):
        return

    def meta(value: Any) -> Any:
        if isinstance(value, list):
            return [meta(item) for item in value]
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        return value

    shown = {name: meta(value) for name, value in values.items()}
    for argument in operator._schema.arguments:
        if str(argument.real_type) in ("Device", "Optional[Device]"):
            shown[argument.name] = torch.device("meta")
    try:
        results_ = list(_flat(_apply(operator, shown, (), results, device="meta")))
    except NotImplementedError:
        return  # its kernel checks the arguments, see `pure_operators`
    except RuntimeError as error:
        if "meta tensor" in str(error):
            return  # it reads a number from a tensor before it calls what checks
        raise
    if all(type.is_static for type in results):
        # Some meta kernels give other sizes than the kernel, of results that nobody reads.
        tensors = [
            tensor for tensor in _flat(list(values.values())) if isinstance(tensor, torch.Tensor)
        ]
        stated = sum(type.nbytes for type in results) + sum(tensor.nbytes for tensor in tensors)
        needed = sum(tensor.nbytes for tensor in results_ if isinstance(tensor, torch.Tensor))
        if needed > _SLACK * (stated + _SLACK):
            raise FallbackError(
                f"the results of {name} need {needed} bytes",
                where=source,
                why=f"{', '.join(map(str, results))} are stated",
                next="the file is damaged: copy or export it again",
            )


def _apply(
    operator: Any,
    values: Mapping[str, Any],
    written: Sequence[str],
    results: Sequence[TensorType],
    device: str = "cpu",
) -> list[Any]:
    import torch

    spared = (*written, *_WRITTEN.get(operator._opname, ()))
    values = {name: _copied(value) if name in spared else value for name, value in values.items()}
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    fresh = iter([torch.empty(0, dtype=type.dtype.to_torch(), device=device) for type in results])
    for argument in operator._schema.arguments:
        if argument.is_out:
            is_list = str(argument.real_type).startswith("List")
            keywords[argument.name] = list(fresh) if is_list else next(fresh)
        elif argument.name not in values:
            continue
        elif not argument.kwarg_only and len(positional) == operator._schema.arguments.index(
            argument
        ):
            positional.append(values[argument.name])
        elif values[argument.name] is not None or not argument.has_default_value():
            keywords[argument.name] = values[argument.name]
    results_ = list(_flat(operator(*positional, **keywords)))
    if len(results_) < len(results):
        results_ += _flat([values[name] for name in written])
    return results_


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value.clone() if hasattr(value, "clone") else value


def _operator(name: str, count: int, source: str, reason: str) -> tuple[Any, tuple[str, ...]]:
    """The operator of torch that returns new tensors, and the names of the `count` arguments that a
    node has."""
    try:
        import torch
    except ImportError as error:
        raise FallbackError(
            f"{name} cannot run on the device, and torch is not installed",
            where=source,
            why=f"{reason or 'no kernel'}: such operators run on the CPU through torch",
            next=f"pip install torch, or register a function: purevk.ops.register_executor({name!r})",
        ) from error
    packet, operator = pure_operators.overload(torch, name)
    if operator is None:
        raise FallbackError(
            f"{name} has no kernel here and torch does not know it",
            where=source,
            why=reason if pure_operators.is_name(name) else "this is no name of an operator",
            next="import the library that defines it (for the command purevk: --import MODULE), or register"
            f" a function: purevk.ops.register_executor({name!r})",
        )
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
        types = {argument.name: str(argument.real_type) for argument in each._schema.arguments}
        if not _is_out(each) and all(types.get(name) == kind for name, kind in kinds.items()):
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
        item_kind = kind[len("List[") : -1] if kind.startswith("List[") else kind
        return [_convert(item, item_kind, arrays) for item in arg]
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

    tensors = [
        tensor for tensor in _flat(list(values.values())) if isinstance(tensor, torch.Tensor)
    ]
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

    if not array.flags.carray:
        array = np.array(array, order="C")
    # Not the array itself: a dim of size 1 may have any stride there, and torch would keep it.
    tensor = torch.from_numpy(np.ndarray(array.shape, array.dtype, array))
    return tensor if dtype.has_numpy else tensor.view(dtype.to_torch())


def copied_to_torch(array: np.ndarray, dtype: DType) -> Any:
    """A torch tensor with the elements of an array, in memory that torch can resize."""
    return to_torch(array, dtype).clone()


def to_numpy(tensor: Any, dtype: DType | None = None) -> np.ndarray:
    """The elements of a torch tensor as a contiguous array, converted to `dtype` if given (bfloat16
    as uint16)."""

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dtype is not None and tensor.dtype is not dtype.to_torch():
        tensor = tensor.to(dtype.to_torch())
    tensor = tensor.contiguous()
    return elements(tensor, writable=True)
