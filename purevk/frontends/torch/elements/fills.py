"""Tensors that torch.compile fills with a number of a tensor. Imports torch.

torch reads the number while it traces `x.new_full(size, t)` and `torch.full_like(x, t)`, which ends
the graph there; in a loop over modules, every module becomes a graph. `fill_` takes the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable


def fill_with_tensors(enabled: Callable[[], bool]) -> None:
    """Has torch.compile fill tensors with numbers of tensors within a graph, where `enabled` says
    so."""
    call_method = TensorVariable.call_method

    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "new_full" and len(args) <= 2 and enabled():
            arguments = dict(zip(("size", "fill_value"), args)) | kwargs
            size, value = arguments.pop("size", None), arguments.pop("fill_value", None)
            if size is not None and value is not None and _is_number_of_tensor(value):
                return _filled(tx, self.call_method(tx, "new_empty", [size], arguments), value)
        return call_method(self, tx, name, args, kwargs)

    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    function = handlers.get(torch.full_like)

    def full_like(self: Any, tx: Any, x: Any, fill_value: Any, *args: Any, **kwargs: Any) -> Any:
        if args or not (enabled() and _is_number_of_tensor(fill_value)):
            return function and function(self, tx, x, fill_value, *args, **kwargs)
        empty: Any = TorchInGraphFunctionVariable(torch.empty_like)
        return _filled(tx, empty.call_function(tx, [x], kwargs), fill_value)

    TensorVariable.call_method = call  # type: ignore[method-assign]
    handlers[torch.full_like] = full_like


def _is_number_of_tensor(variable: Any) -> bool:
    variable = variable.realize()
    return isinstance(variable, TensorVariable) and variable.ndim == 0


def _filled(tx: Any, tensor: Any, value: Any) -> Any:
    return tensor.call_method(tx, "fill_", [value], {})
