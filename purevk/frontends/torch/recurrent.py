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
_Library: Any = torch.library.Library
_check: Any = torch._check
_library = _Library("purevk_recurrent", "DEF")  # defines the operators while it lives


def _define(name: str, schema: str, results: Callable[..., Any]) -> Any:
    """An operator that only traces have, with what computes the sizes of its results."""
    _library.define(f"{name}({schema}")
    operator = getattr(torch.ops.purevk_recurrent, name).default
    torch.library.register_fake(operator, results, lib=_library)
    return operator


def _results(
    x: _Tensor, hx: Any, params: Sequence[_Tensor], biases: bool, layers: int, *options: Any
) -> tuple[_Tensor, ...]:
    """Tensors of the sizes and strides of a layer's results."""
    _, _, bidirectional, batch_first = options
    state = [hx] if isinstance(hx, _Tensor) else hx
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    steps, batch = (1, 0) if batch_first else (0, 1)
    outputs = x.new_empty((x.shape[steps], x.shape[batch], width)).transpose(0, steps)
    return outputs, *map(torch.empty_like, state)


def _results_of_lengths(x: _Tensor, lengths: _Tensor, *others: Any) -> tuple[_Tensor, ...]:
    return _results(x, *others, False)


def _run_lengths(
    name: str, x: _Tensor, lengths: _Tensor, hx: Any, *options: Any
) -> tuple[_Tensor, ...]:
    """A layer on sequences of some lengths, by torch's own functions."""
    functions: Any = torch._VF
    lengths, order = lengths.sort(descending=True)
    back = order.argsort()
    sorted_state = [state[:, order] for state in ([hx] if isinstance(hx, _Tensor) else hx)]
    data, sizes = functions._pack_padded_sequence(x[:, order], lengths, False)
    states = sorted_state[0] if isinstance(hx, _Tensor) else sorted_state
    outputs, *last = getattr(functions, name)(data, sizes, states, *options)
    outputs, _ = functions._pad_packed_sequence(outputs, sizes, False, 0.0, x.shape[0])
    return outputs[:, back], *(state[:, back] for state in last)


for _name in _LAYERS:
    _state = "Tensor[]" if _name == "lstm" else "Tensor"
    _define(
        f"{_name}_of_lengths",
        f"Tensor x, Tensor lengths, {_state} hx, Tensor[] params, bool has_biases, int num_layers,"
        " float dropout, bool train, bool bidirectional) -> "
        + ("(Tensor, Tensor, Tensor)" if _name == "lstm" else "(Tensor, Tensor)"),
        _results_of_lengths,
    )
    _library.impl(f"{_name}_of_lengths", functools.partial(_run_lengths, _name), "CPU")


@contextlib.contextmanager
def traced_whole() -> Iterator[None]:
    """Within, exports of layers hold for sequences of any length, also of packed ones. Only within
    `tracing`."""
    with contextlib.ExitStack() as stack:
        for name in _LAYERS:
            stack.enter_context(_replaced(name, lambda _: _results))
        for module in (torch.nn.utils.rnn, torch.nn.modules.rnn):
            variables: Any = vars(module)
            stack.callback(variables.__setitem__, "_VF", variables["_VF"])
            variables["_VF"] = _Functions(variables["_VF"])
        yield


@contextlib.contextmanager
def _replaced(name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Within, torch traces a layer by the function that `replace` makes of its decomposition."""
    op: Any = getattr(torch.ops.aten, name).input
    before, table = dict(op.py_kernels), torch._decomp.decomposition_table
    for key in _KEYS:
        op.py_kernels[key] = replace(before[key])
    op._dispatch_cache.clear()
    decomposition = table[op]  # for the sizes alone, where run_decompositions keeps the layer
    table[op] = replace(decomposition)
    try:
        yield
    finally:
        table[op] = decomposition
        op.py_kernels.clear()
        op.py_kernels.update(before)
        op._dispatch_cache.clear()


# -- packed sequences ----------------------------------------------------------------------------
class _Functions:
    """The functions that the modules of torch call, with packed sequences as `_Packed` holds them."""

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        if name not in _LAYERS:
            return function

        def layer(x: _Tensor, second: Any, *others: Any) -> Any:
            if not isinstance(second, _Packed):
                return function(x, second, *others)
            operator = getattr(torch.ops.purevk_recurrent, f"{name}_of_lengths")
            return second.run(operator, x, *others)

        return layer

    def _pack_padded_sequence(
        self, x: _Tensor, lengths: _Tensor, batch_first: bool
    ) -> tuple[_Tensor, _Packed]:
        packed = _Packed(x.transpose(0, 1) if batch_first else x, lengths)
        return packed.data, packed

    def _pad_packed_sequence(
        self, data: _Tensor, sizes: Any, batch_first: bool, padding: float, steps: Any
    ) -> Any:
        if not isinstance(sizes, _Packed):
            return self._functions._pad_packed_sequence(data, sizes, batch_first, padding, steps)
        padded = sizes.padded_to(data, padding, steps)
        return padded.transpose(0, 1) if batch_first else padded, sizes.lengths


class _Packed:
    """The batch sizes of a packed sequence while a module is exported. torch's tensor of them has a
    data-dependent size, and numbers of it are sizes of others. Recurrent layers read the sequence
    that was packed, [steps, batch, ...], and the lengths of its rows.

    Attributes:
        lengths: int64 [batch].
        longest: the greatest one.
        data: the elements, packed as by torch.
    """

    def __init__(self, x: _Tensor, lengths: _Tensor) -> None:
        self.lengths, self.device = lengths, lengths.device
        self.steps, self.batch = x.shape[:2]
        self.longest, shortest = lengths.max().item(), lengths.min().item()
        _check(self.longest >= 1)
        _check(shortest >= 1)
        _check(self.longest <= self.steps)
        self._mask = torch.arange(self.steps).unsqueeze(1) < lengths
        sizes = self._mask.sum(1)
        ends = sizes.cumsum(0)
        count = lengths.sum().item()
        _check(count >= 1)
        _check(count <= self.steps * self.batch)
        numbers = torch.arange(count)
        step = torch.searchsorted(ends, numbers, right=True)
        row = numbers - (ends - sizes)[step]
        self._indices = step * self.batch + row  # of the elements in the padded sequence
        self._places = (ends - sizes).unsqueeze(1) + torch.arange(self.batch)
        self._padded: dict[int, tuple[_Tensor, _Tensor]] = {}
        self.data = self._pack(x)

    def _pack(self, padded: _Tensor) -> _Tensor:
        data = padded.flatten(0, 1)[self._indices]
        self._padded[id(data)] = data, padded
        return data

    def __getitem__(self, step: int) -> Any:
        return self.batch if step == 0 else self._mask[step].sum()

    def size(self, dim: int) -> Any:
        return self.longest

    def padded(self, data: _Tensor) -> _Tensor:
        """A packed sequence as [steps, batch, ...]. What is behind the end of a row may be anything."""
        if id(data) in self._padded:
            return self._padded[id(data)][1]
        return data[self._places.clamp(max=data.shape[0] - 1)]

    def padded_to(self, data: _Tensor, padding: float, steps: Any) -> _Tensor:
        padded = self.padded(data)
        mask = self._mask.reshape(*self._mask.shape, *[1] * (padded.dim() - 2))
        padded = torch.where(mask, padded, padding)
        if steps is self.longest:
            return padded[:steps]
        more = padded.new_full((steps, *padded.shape[1:]), padding)
        return torch.cat([padded, more])[:steps]

    def run(self, operator: Any, data: _Tensor, hx: Any, *options: Any) -> Any:
        """The results of a layer: the packed outputs, and the last states."""
        state = [hx] if isinstance(hx, _Tensor) else list(hx)
        states = state if len(state) > 1 else state[0]
        outputs, *last = operator(self.padded(data), self.lengths, states, *options)
        return self._pack(outputs), *last


# -- torch.compile -------------------------------------------------------------------------------
class WholeLayers:
    """Has torch.compile keep layers whole, as operators of this project, where `wanted` says so. For
    others, torch traces them as before."""

    def __init__(self, enabled: Callable[[], bool]) -> None:
        self._originals: dict[Any, Any] = {}
        for name in _LAYERS:
            original: Any = getattr(torch.ops.aten, name).input
            schema = str(original._schema).partition("(")[2]
            operator = _define(name, schema, _results)
            self._originals[operator] = original
            for key in _KEYS:
                original.py_kernels[key] = functools.partial(
                    self._trace, enabled, operator, original.py_kernels[key]
                )
            original._dispatch_cache.clear()
        torch._dynamo.config.allow_rnn = True

    def restore(self, module: torch.fx.GraphModule) -> None:
        """Gives the nodes of a graph torch's operators again."""
        for node in module.graph.nodes:
            node.target = self._originals.get(node.target, node.target)

    @staticmethod
    def _trace(
        enabled: Callable[[], bool], operator: Any, torchs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Within autocast, the dtypes of results follow from what torch does in each step.
        cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        return (operator if enabled() and not cast else torchs)(*args, **kwargs)
