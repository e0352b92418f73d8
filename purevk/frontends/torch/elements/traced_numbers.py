"""Decisions of `forward` by numbers that follow from buffers and constants. torch.export cannot
follow them, since it makes a symbol of each element that `forward` reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_MOST_OF_A_BUFFER = 64  # elements
_MOST = 1 << 20  # elements of a result
# Functions whose results follow from their arguments alone, tensors and numbers, and are new tensors
# or views.
_FOLLOWED = frozenset(
    "_to_copy abs add alias all amax amin any arange argmax argmin argsort argwhere as_tensor"
    " bincount bitwise_and bitwise_not bitwise_or bool broadcast_tensors broadcast_to bucketize"
    " cat ceil chunk clamp clone concat contiguous cumprod cumsum detach diag diagonal diff div"
    " double eq expand expand_as eye flatten flip float floor floor_divide full full_like gather"
    " ge gt hstack index_select int isin le lift_fresh lift_fresh_copy linspace logical_and"
    " logical_not logical_or logical_xor long lt masked_fill masked_select max maximum mean"
    " meshgrid min minimum moveaxis movedim mul narrow ne neg new_full new_ones new_tensor"
    " new_zeros nonzero ones ones_like outer pad permute pow prod ravel reciprocal remainder"
    " repeat repeat_interleave reshape roll round rsub scalar_tensor searchsorted select sort"
    " split split_with_sizes sqrt square squeeze stack sub sum swapaxes swapdims t take tensor"
    " tensor_split tile to transpose tril triu true_divide trunc type type_as unbind unflatten"
    " unique unique_consecutive unsqueeze view view_as vstack where zeros zeros_like"
    " __add__ __and__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __invert__ __le__ __lt__"
    " __mod__ __mul__ __ne__ __neg__ __or__ __pow__ __radd__ __rdiv__ __rfloordiv__ __rmul__"
    " __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__ __xor__".split()
)
# Those of them whose results have as many elements as the elements of their arguments say.
_OF_ELEMENTS = frozenset(
    "__getitem__ argwhere bincount masked_select nonzero repeat_interleave unique unique_consecutive"
    " where".split()
)
_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__"
    " __ipow__ __irshift__ __isub__ __itruediv__ __ixor__".split()
)
# Functions that write what follows from their arguments alone; so do those of `_FOLLOWED` with "_".
_WRITING = _IN_PLACE | frozenset(
    "copy_ fill_ fill_diagonal_ index_add_ index_copy_ index_fill_ index_put_ masked_scatter_ scatter_"
    " scatter_add_ zero_".split()
)
# Functions that write into their arguments, if argument number 5 says so, and do not count it
# (`Tensor._version`): its name, and what it is if it is not given.
_UNCOUNTED = {
    "batch_norm": ("training", False),
    "native_batch_norm": ("training", False),
    "instance_norm": ("use_input_stats", True),
}
NUMBERS = frozenset(
    "__bool__ __contains__ __float__ __index__ __int__ allclose equal is_nonzero item tolist".split()
)


class _Known(NamedTuple):
    """A traced tensor whose elements are known.

    Attributes:
        traced: held, so that its identity stays its own.
        elements: views of one tensor are views of one tensor here.
        buffers: names of the buffers that the elements follow from.
        version: of the traced tensor. torch counts writes in it, also those that are not seen here.
    """

    traced: Any
    elements: torch.Tensor
    buffers: frozenset[str]
    version: int


class NumbersOfTensors(TorchFunctionMode):
    """While a module is exported, numbers that follow from its small buffers, or from tensors that
    `forward` makes of Python numbers, are those of the moment. Where they are sizes, tensors of such
    sizes are constants.

    Attributes:
        used: names of the buffers that numbers were taken from. The exported program holds for their
            elements alone.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.used: set[str] = set()
        self._module = module
        self._buffers = {
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if buffer.numel() <= _MOST_OF_A_BUFFER and buffer.device.type != "meta"
        }
        self._known: dict[int, _Known] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "pad" and len(args) > 1:
            args = (args[0], self._numbers_in(args[1]), *args[2:])
        tensors = [part for part in _parts((args, kwargs)) if isinstance(part, torch.Tensor)]
        entries = [self._find(tensor) for tensor in tensors]
        recorded = [entry for entry in entries if entry is not None]
        if recorded and (writes(func, name) or "out" in kwargs):
            return self._write(func, name, args, kwargs, recorded, len(recorded) == len(entries))
        follows = len(recorded) == len(entries) and not _is_symbolic((args, kwargs))
        if follows and name in NUMBERS:
            return self._elements_of(func, args, kwargs, recorded)
        if follows and name in _FOLLOWED:
            return self._follow(func, name, args, kwargs, recorded)
        return self._plain(func, args, kwargs, recorded)

    def _plain(self, func: Any, args: Any, kwargs: dict[str, Any], entries: list[_Known]) -> Any:
        """The result of a function, which is not followed. Neither is what it may have written, nor
        what shares memory with it."""
        result = func(*args, **kwargs)
        written = _writes_uncounted(name_of(func), args, kwargs)
        self._forget([entry for entry in entries if written or _is_view(result, entry.traced)])
        return result

    def _follow(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], entries: list[_Known]
    ) -> Any:
        """The result of a function, whose elements are known."""
        try:
            elements = self._real(func, args, kwargs)
        except Exception:  # the function raises its own error
            return self._plain(func, args, kwargs, entries)
        buffers = frozenset().union(*(entry.buffers for entry in entries))
        leaves, spec = tree_flatten(elements)
        if sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)) > _MOST:
            return self._plain(func, args, kwargs, entries)
        if name in _OF_ELEMENTS and _has_such_sizes(name, (args, kwargs)):
            self.used |= buffers
            constants = [
                _constant(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
            ]
            result = tree_unflatten(constants, spec)
        else:
            result = func(*args, **kwargs)
        for traced, constant in zip(tree_leaves(result), leaves):
            if isinstance(traced, torch.Tensor) and isinstance(constant, torch.Tensor):
                self._known[id(traced)] = _Known(traced, constant, buffers, traced._version)
        return result

    def _elements_of(
        self, func: Any, args: Any, kwargs: dict[str, Any], entries: list[_Known]
    ) -> Any:
        """Numbers that follow from known tensors."""
        self.used |= frozenset().union(*(entry.buffers for entry in entries))
        return self._real(func, args, kwargs)

    def _write(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        entries: list[_Known],
        all_known: bool,
    ) -> Any:
        """The result of a function that writes into tensors, some of which are known."""
        if any(entry.buffers for entry in entries) or name in ("__get__", "__set__"):
            self._buffers.clear()  # of this tensor, or of those that share its memory
            self._known.clear()
            return func(*args, **kwargs)
        follows = name in _WRITING or name.removesuffix("_") in _FOLLOWED
        plain = follows and all_known and "out" not in kwargs and not _is_symbolic((args, kwargs))
        if plain and not isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            try:
                self._real(func, args, kwargs)
            except Exception:  # it raises its own error below
                self._forget(entries)
        else:
            self._forget(entries)
        result = func(*args, **kwargs)
        first = self._known.get(id(args[0])) if args else None
        if first is not None and isinstance(result, torch.Tensor):
            self._known[id(result)] = first._replace(traced=result)
        memory = {_memory_of(entry) for entry in entries}
        self._known |= {
            key: entry._replace(version=entry.traced._version)
            for key, entry in self._known.items()
            if _memory_of(entry) in memory
        }
        return result

    def _real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        def element(value: Any) -> Any:
            return self._known[id(value)].elements if isinstance(value, torch.Tensor) else value

        given_args, given_kwargs = _mapped(element, (args, kwargs))
        with _untraced():
            return func(*given_args, **given_kwargs)

    def _forget(self, entries: list[_Known]) -> None:
        """Follows tensors that share memory with these no more."""
        if not entries:
            return
        gone = {_memory_of(entry) for entry in entries}
        if any(entry.buffers for entry in entries):
            self._buffers.clear()
        self._known = {
            key: entry for key, entry in self._known.items() if _memory_of(entry) not in gone
        }

    def _find(self, tensor: torch.Tensor) -> _Known | None:
        if id(tensor) not in self._known:
            for name, elements in self._buffers.items():
                # torch.export gives the module other tensors while it traces.
                if self._module.get_buffer(name) is tensor:
                    names = frozenset((name,))
                    self._known[id(tensor)] = _Known(tensor, elements, names, tensor._version)
                    break
        entry = self._known.get(id(tensor))
        if entry is not None and entry.version != tensor._version:
            self._forget([entry])
            return None
        return entry

    def _numbers_in(self, widths: Any) -> Any:
        """Widths of padding, in which tensors may stand for numbers."""
        if not isinstance(widths, (list, tuple)):
            return widths
        numbers = []
        for width in widths:
            entry = self._find(width) if isinstance(width, torch.Tensor) else None
            if entry is not None:
                self.used |= entry.buffers
                with _untraced():
                    width = int(entry.elements)
            numbers.append(width)
        return tuple(numbers)


def _memory_of(entry: _Known) -> int:
    """The same number for all that share memory."""
    return int(entry.elements.untyped_storage()._cdata)


def _writes_uncounted(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name not in _UNCOUNTED:
        return False
    flag, default = _UNCOUNTED[name]
    return bool(kwargs.get(flag, args[5] if len(args) > 5 else default))


def _constant(elements: torch.Tensor) -> torch.Tensor:
    tensor = torch.tensor(elements.tolist(), dtype=elements.dtype, device=elements.device)
    return tensor.reshape(elements.shape)


def _has_such_sizes(name: str, arguments: Any) -> bool:
    """Whether the sizes of the result of one of `_OF_ELEMENTS` follow from elements."""
    args, kwargs = arguments
    if name == "__getitem__":
        return any(
            isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
            for part in _parts(args[1:])
        )
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        given = [*args, *kwargs.values()]
        return len(given) == 1 or isinstance(given[1], torch.Tensor)
    return True


def _parts(value: Any) -> Iterator[Any]:
    """The leaves of nested arguments, and those of slices."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, slice):
        yield from _parts((value.start, value.stop, value.step))
    else:
        yield value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Nested arguments with other leaves."""
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*_mapped(function, (value.start, value.stop, value.step)))
    return function(value)


def _is_symbolic(arguments: Any) -> bool:
    """Whether a number is a symbol of torch, so that following it would fix it."""
    return any(isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool))
               for part in _parts(arguments))  # fmt: skip


def _is_view(result: Any, tensor: torch.Tensor) -> bool:
    """Whether a result, or a part of it, shares memory with a tensor."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            try:
                if leaf.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                    return True
            except (NotImplementedError, RuntimeError):  # sparse ones have no such memory
                continue
    return False


def name_of(func: Any) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return str(func._schema.name).rpartition("::")[2]
    return getattr(func, "__name__", "")


def writes(func: Any, name: str) -> bool:
    """Whether a function writes into an argument, or gives out memory that torch does not follow."""
    if name in ("__get__", "__set__"):  # of a property
        return getattr(getattr(func, "__self__", None), "__name__", "") == "data"
    overloads = [func] if hasattr(func, "_schema") else []
    if isinstance(func, torch._ops.OpOverloadPacket):
        names: list[str] = func.overloads()  # type: ignore[no-untyped-call]
        overloads = [getattr(func, overload_name) for overload_name in names]
    if any(overload._schema.is_mutable for overload in overloads):
        return True
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
