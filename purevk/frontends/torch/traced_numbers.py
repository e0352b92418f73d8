"""Decisions of `forward` by numbers in buffers. torch.export cannot follow them, since it makes a
symbol of each element that `forward` reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_MOST = 64  # elements of a buffer
# Functions whose results follow from their arguments alone, and are new tensors or views.
_FOLLOWED = frozenset(
    "abs add all any bool ceil clamp clone detach div eq float floor floor_divide ge gt int le"
    " logical_and logical_not logical_or long lt max maximum min minimum mul ne neg prod remainder"
    " reshape round rsub select squeeze sub sum to true_divide trunc type unsqueeze view"
    " __add__ __and__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __invert__ __le__ __lt__ __mod__"
    " __mul__ __ne__ __neg__ __or__ __radd__ __rdiv__ __rfloordiv__ __rmul__ __rsub__ __rtruediv__"
    " __sub__ __truediv__".split()
)
_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__ __imul__ __ior__"
    " __ipow__ __irshift__ __isub__ __itruediv__ __ixor__".split()
)
_NUMBERS = frozenset("item tolist __bool__ __int__ __index__ __float__".split())


class NumbersOfBuffers(TorchFunctionMode):
    """While a module is exported, numbers that follow from its small buffers are those of the moment.

    Attributes:
        used: names of the buffers that numbers were taken from. The exported program holds for their
            elements alone.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.used: set[str] = set()
        self._module = module
        self._elements = {
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if buffer.numel() <= _MOST and buffer.device.type != "meta"
        }
        # By the identity of traced tensors, which are held: their elements, and the buffers that
        # these follow from.
        self._known: dict[int, tuple[Any, torch.Tensor, frozenset[str]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if name == "pad" and len(args) > 1:
            args = (args[0], self._numbers_in(args[1]), *args[2:])
        known = [self._find(each) for each in tensors] if self._elements else []
        if (_writes(func, name) or "out" in kwargs) and any(each is not None for each in known):
            self._elements.clear()  # of this tensor, or of those that share its memory
            self._known.clear()
            return func(*args, **kwargs)
        if not known or None in known:
            return func(*args, **kwargs)
        names = frozenset().union(*(each[2] for each in known if each is not None))
        if name in _NUMBERS:
            self.used |= names
            with _untraced():
                return getattr(known[0][1], name)()  # type: ignore[index]
        result = func(*args, **kwargs)
        if name in _FOLLOWED and isinstance(result, torch.Tensor):
            with _untraced():
                given = tree_map(self._elements_of, (args, kwargs))
                with contextlib.suppress(Exception):  # then the result is not followed
                    self._known[id(result)] = result, func(*given[0], **given[1]), names
        return result

    def _find(self, tensor: torch.Tensor) -> tuple[Any, torch.Tensor, frozenset[str]] | None:
        if id(tensor) not in self._known:
            for name, elements in self._elements.items():
                # torch.export gives the module other tensors while it traces.
                if self._module.get_buffer(name) is tensor:
                    self._known[id(tensor)] = tensor, elements, frozenset((name,))
                    break
        return self._known.get(id(tensor))

    def _elements_of(self, value: Any) -> Any:
        return self._known[id(value)][1] if isinstance(value, torch.Tensor) else value

    def _numbers_in(self, widths: Any) -> Any:
        """Widths of padding, in which tensors may stand for numbers."""
        if not isinstance(widths, (list, tuple)):
            return widths
        made = []
        for each in widths:
            found = self._find(each) if isinstance(each, torch.Tensor) else None
            if found is not None:
                self.used |= found[2]
                with _untraced():
                    each = int(found[1])
            made.append(each)
        return tuple(made)


def _writes(func: Any, name: str) -> bool:
    """Whether a function writes into an argument, or gives out memory that torch does not follow."""
    if name in ("__get__", "__set__"):  # of a property
        return getattr(getattr(func, "__self__", None), "__name__", "") == "data"
    overloads = [func] if hasattr(func, "_schema") else []
    if isinstance(func, torch._ops.OpOverloadPacket):
        names: list[str] = func.overloads()  # type: ignore[no-untyped-call]
        overloads = [getattr(func, each) for each in names]
    if any(each._schema.is_mutable for each in overloads):
        return True
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
