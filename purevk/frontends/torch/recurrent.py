"""Recurrent layers in traces of torch, kept whole. Imports torch.

torch traces them by its decompositions, which go through all steps: so they fix the length of a
sequence. Here the sizes of results alone are computed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_Tensor = torch.Tensor
_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _results(
    x: _Tensor, hx: Any, params: Sequence[_Tensor], biases: bool, layers: int, *options: Any
) -> tuple[_Tensor, ...]:
    """Tensors of the sizes of a layer's results."""
    _, _, bidirectional, _ = options
    state = [hx] if isinstance(hx, _Tensor) else hx
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    return x.new_empty((*x.shape[:-1], width)), *map(torch.empty_like, state)


@contextlib.contextmanager
def traced_whole() -> Iterator[None]:
    """Within, exports of layers hold for sequences of any length. Only within `tracing`."""
    with contextlib.ExitStack() as stack:
        for name in _LAYERS:
            stack.enter_context(_replaced(name, lambda _: _results))
        yield


@contextlib.contextmanager
def _replaced(name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Within, torch traces a layer by the function that `replace` makes of its decomposition."""
    op: Any = getattr(torch.ops.aten, name).input
    before = dict(op.py_kernels)
    for key in _KEYS:
        op.py_kernels[key] = replace(before[key])
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels.clear()
        op.py_kernels.update(before)
        op._dispatch_cache.clear()


# -- torch.compile -------------------------------------------------------------------------------
class WholeLayers:
    """Has torch.compile keep layers whole, as operators of this project, where `wanted` says so. For
    others, torch traces them as before."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        make: Any = torch.library.Library
        self._library = library = make(
            "purevk_recurrent", "DEF"
        )  # which defines the operators while it lives
        self._originals: dict[Any, Any] = {}
        for name in _LAYERS:
            original: Any = getattr(torch.ops.aten, name).input
            schema = str(original._schema).partition("(")[2]
            library.define(f"{name}({schema}")
            operator = getattr(torch.ops.purevk_recurrent, name).default
            torch.library.register_fake(operator, _results, lib=library)
            self._originals[operator] = original
            for key in _KEYS:
                original.py_kernels[key] = functools.partial(
                    self._trace, wanted, operator, original.py_kernels[key]
                )
            original._dispatch_cache.clear()
        torch._dynamo.config.allow_rnn = True

    def restore(self, module: torch.fx.GraphModule) -> None:
        """Gives the nodes of a graph torch's operators again."""
        for node in module.graph.nodes:
            node.target = self._originals.get(node.target, node.target)

    @staticmethod
    def _trace(
        wanted: Callable[[], bool], operator: Any, torchs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return (operator if wanted() else torchs)(*args, **kwargs)
