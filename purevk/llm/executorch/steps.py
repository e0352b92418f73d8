"""The methods of a .pte file, as the loop calls them."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from purevk.dtypes import DType
from purevk.errors import UnsupportedProgramError
from purevk.ir import Graph, Label, Node, TensorType, Value, map_leaves, map_values
from purevk.ir import dims as _dims
from purevk.llm.graphs import GraphBuilder, types_of

if TYPE_CHECKING:
    from purevk.frontends.files import ModelFile as ProgramFile
    from purevk.frontends.importer import InputSizes

_FLOATS = (DType.float32, DType.float16, DType.bfloat16)
_INTEGERS = (DType.int64, DType.int32)


class StepSource:
    """A method of a file as the loop calls it. It stores the logits of the last token in the state
    "logits", [1, vocab], stores the token with the largest in the state "token", and returns it,
    int64 [1, 1].

    Args:
        file: an open .pte file.
        method: takes what a token is computed from, and its position if the model has a cache, and
            returns logits, [1, vocab] or [1, tokens, vocab].
        name: of the method that the loop calls.
        vocab: tokens that there are; None: as many as there are logits.
        context: how many positions there are, of a step: its first input is the state "token".
        embedding: a method that makes the first input of the token then.
    """

    def __init__(
        self,
        file: ProgramFile,
        method: str,
        name: str,
        vocab: int | None = None,
        context: int | None = None,
        embedding: str | None = None,
    ) -> None:
        self.file, self.method, self.name = file, method, name
        self._vocab, self._context, self._embedding = vocab, context, embedding

    @property
    def label(self) -> str:
        return f"{self.file.label}, {self.method}"

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """As `purevk.frontends.files.FileSource.reading`."""
        from purevk.frontends.reading import reading

        return reading(self.label)

    def __call__(self, sizes: InputSizes | None) -> Graph:
        return self.graph if sizes is None or self._context is not None else self._read(sizes)

    @functools.cached_property
    def graph(self) -> Graph:
        """The graph for the bounds of the file; of a step, for one token."""
        if self._context is None:
            return self._read(None)
        if self._embedding is None:
            return self._read(((1, 1), (1,)))
        first = self.file.graph(self._embedding, ((1, 1),))
        embedding = first.outputs[0]
        if len(first.outputs) != 1 or not isinstance(embedding, Value) or first.symbols:
            raise self._refused(first)
        return self._read((embedding.type.dims, (1,)), first)  # type: ignore[arg-type]

    @property
    def rows(self) -> int:
        """The most tokens that a call may have."""
        return _dims.upper(tensor_input(self.graph, 0).type.dims[1])

    @property
    def is_static(self) -> bool:
        """Whether each call has as many tokens."""
        return isinstance(tensor_input(self.graph, 0).type.dims[1], int)

    @property
    def has_position(self) -> bool:
        """Whether the model has a cache."""
        return self._context is not None or len(self.graph.inputs) == 2

    @property
    def positions(self) -> int:
        """How many positions a call has, at most."""
        return _dims.upper(tensor_input(self.graph, -1).type.dims[0])

    def _read(self, sizes: InputSizes | None, first: Graph | None = None) -> Graph:
        graph = self.file.graph(self.method, sizes)
        if first is not None:
            graph = _joined(first, graph)
        tokens, logits = self._checked(graph)
        net = GraphBuilder(self.name, "step_")
        token = net.state(TensorType(DType.int64, (1, 1)), name="token")
        inputs = graph.inputs
        vocab = min(self._vocab or 1 << 31, _dims.upper(logits.type.dims[-1]))
        if self._context is not None:
            position = tensor_input(graph, 1)
            chosen = net.op("clamp.default", token, 0, vocab - 1)
            _rename_last(net, net.op("_to_copy.default", chosen, tokens.type.dtype), tokens)
            if all(source.value is not position for source in graph.symbols.values()):
                # It is in range: no kernel has to check it, and steps overlap.
                start = Value("step_position", position.type)
                limited = net.op("clamp.default", start, 0, self._context - 1)
                _rename_last(net, limited, position)
                position = start
            inputs = (position,)
        before = len(net.nodes)
        if logits.type.rank == 3:
            logits = net.op("select.int", logits, 1, -1)
        logits = net.op("slice.Tensor", logits, 1, 0, vocab, 1)
        net.store(net.state(TensorType(logits.type.dtype, (1, vocab)), name="logits"), logits)
        chosen = net.op("argmax.default", logits, -1, True)
        net.store(token, chosen)
        labels = {
            state: replace(label, key=label.key or f"{self.method}/{label.name}")
            for state in graph.states
            for label in [graph.labels.get(state, Label(state.name))]
        }
        graph = replace(graph, labels=labels)
        return net.finish_around(graph, before, inputs, chosen)

    def _checked(self, graph: Graph) -> tuple[Value, Value]:
        """The first input and the logits.

        Raises:
            UnsupportedProgramError: the method is none of a language model.
        """
        if len(graph.outputs) != 1 or graph.updates or not 1 <= len(graph.inputs) <= 2:
            raise self._refused(graph)
        values = (*graph.inputs, *graph.outputs)
        tensors = [value for value in values if isinstance(value, Value)]
        if len(tensors) != len(values):
            raise self._refused(graph)
        (first, *positions), logits = tensors[:-1], tensors[-1]
        fits = first.type.rank in (2, 3) and first.type.dims[0] == 1
        if self._context is not None:
            fits = first.type.dtype in _INTEGERS and first.type.dims == (1, 1)
        for position in positions:
            fits = fits and position.type.rank == 1 and position.type.dtype in _INTEGERS
        fits = fits and logits.type.dtype in _FLOATS and logits.type.rank in (2, 3)
        if not fits or logits.type.dims[0] != 1 or not isinstance(logits.type.dims[-1], int):
            raise self._refused(graph)
        return first, logits

    def _refused(self, graph: Graph) -> UnsupportedProgramError:
        inputs, outputs = types_of(graph.inputs), types_of(graph.outputs)
        return UnsupportedProgramError(
            f"the method {graph.name!r} is not one of a language model",
            where=self.file.label,
            why=f"it takes {inputs} and returns {outputs}; tokens [1, n], with positions [1] or"
            " [n] if there is a cache, and logits [1, vocab] or [1, n, vocab] are expected",
            next="run it with purevk.load",
        )


def _rename_last(net: GraphBuilder, result: Value, name: Value) -> None:
    """Has the last node define another value in place of its result."""
    assert net.nodes[-1].results == (result,)
    net.nodes[-1] = replace(net.nodes[-1], results=(name,))


def _joined(first: Graph, second: Graph) -> Graph:
    """Two graphs as one: the output of the first is the first input of the second."""
    renamed: dict[Value, Value] = {}

    def rename(value: Value) -> Value:
        return renamed.setdefault(value, Value(f"first_{value.name}", value.type))

    first = map_leaves(first, rename)
    renamed.update((leaf, leaf) for leaf in (*first.constants, *first.states))
    nodes = [
        replace(
            node,
            args=tuple(map_values(arg, rename) for arg in node.args),
            results=tuple(map(rename, node.results)),
        )
        for node in first.nodes
    ]
    inputs, outputs = (
        tuple(map_values(arg, rename) for arg in args) for args in (first.inputs, first.outputs)
    )
    join = Node("aten.clone.default", (outputs[0], None), (second.inputs[0],))  # type: ignore[arg-type]
    return replace(
        second,
        inputs=(*inputs, *second.inputs[1:]),  # type: ignore[arg-type]
        nodes=(*nodes, join, *second.nodes),
        constants={**first.constants, **second.constants},
        states={**first.states, **second.states},
        labels={**first.labels, **second.labels},
    )


def tensor_input(graph: Graph, position: int) -> Value:
    """An input of a graph of a language model."""
    value = graph.inputs[position]
    assert isinstance(value, Value)
    return value
