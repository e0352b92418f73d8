"""Slices and selections of rows move up through what computes each row of one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purevk
from purevk.frontends.torch.decompose import decompose
from purevk.frontends.torch.exported import read_exported
from purevk.ir import Dim, Graph, Symbol
from purevk.ir.verify import verify
from purevk.ops.matmul.matmul import NAME as MATMUL
from purevk.passes.matmul.selected_rows import Rows, compute_selected_rows, rows_before_reshape
from purevk.passes.pipeline import optimize
from purevk.passes.simplify import drop_unused
from tests.ops.harness import Recorder, context, tensor
from tests.passes.harness import TRAITS, interpret

aten = torch.ops.aten


def graph_of(function: Any, *inputs: torch.Tensor) -> Graph:
    """The graph of a function of a recorder's `call` and the inputs."""
    recorder = Recorder()
    values = [recorder.input(x) for x in inputs]
    outputs = function(lambda op, *args, **kwargs: recorder.call(op, args, kwargs), *values)
    return recorder.importer.finish(list(outputs) if isinstance(outputs, tuple) else [outputs])


def moved(graph: Graph, inputs: tuple[torch.Tensor, ...]) -> Graph:
    """The graph after the pass; checks that it has the same meaning."""
    after = drop_unused(compute_selected_rows(graph, TRAITS), TRAITS)
    verify(after)
    for x, y in zip(interpret(graph, [*inputs]), interpret(after, [*inputs])):
        torch.testing.assert_close(x, y)
    return after


def rows_of(graph: Graph, op: str) -> list[tuple[int, ...]]:
    return [node.result.type.dims for node in graph.nodes if node.op == op]


def feed_forward(call: Any, x: Any, norm: Any, a: Any, b: Any) -> Any:
    """x + b(gelu(a(norm(x))))."""
    normed = call(aten.layer_norm.default, x, [8], norm)
    hidden = call(aten.gelu.default, call(aten.linear.default, normed, a))
    return call(aten.add.Tensor, x, call(aten.linear.default, hidden, b))


INPUTS = (tensor(2, 6, 8), tensor(8), tensor(16, 8), tensor(8, 16))


@pytest.mark.parametrize("select", ["select", "slice"])
def test_last_row(select: str) -> None:
    def function(call: Any, *values: Any) -> Any:
        result = feed_forward(call, *values)
        if select == "select":
            return call(aten.select.int, result, 1, -1)
        return call(aten.slice.Tensor, result, 1, -2, 2**63 - 1)

    after = moved(graph_of(function, *INPUTS), INPUTS)
    count = 1 if select == "select" else 2
    assert rows_of(after, "aten.linear.default") == [(2, count, 16), (2, count, 8)]
    assert rows_of(after, "aten.layer_norm.default") == [(2, count, 8)]


def test_rows_of_a_flat_matmul() -> None:
    """As `Conv1D` of GPT-2 has it: the batch and the rows are one dim of the matmul."""

    def function(call: Any, x: Any, bias: Any, weight: Any) -> Any:
        flat = call(aten.view.default, x, [12, 8])
        result = call(aten.view.default, call(aten.addmm.default, bias, flat, weight), [2, 6, 16])
        return call(aten.select.int, result, 1, 3)

    inputs = (tensor(2, 6, 8), tensor(16), tensor(8, 16))
    after = moved(graph_of(function, *inputs), inputs)
    assert rows_of(after, "aten.addmm.default") == [(2, 16)]


def test_other_readers() -> None:
    """Where all rows are read as well, all are computed, once."""

    def function(call: Any, *values: Any) -> Any:
        result = feed_forward(call, *values)
        return call(aten.select.int, result, 1, -1), result

    graph = graph_of(function, *INPUTS)
    assert compute_selected_rows(graph, TRAITS).nodes == graph.nodes


def test_two_selections() -> None:
    """Equal selections are one; different ones need all rows."""

    def function(*positions: int) -> Any:
        def build(call: Any, *values: Any) -> Any:
            result = feed_forward(call, *values)
            return tuple(call(aten.select.int, result, 1, position) for position in positions)

        return build

    equal, different = (graph_of(function(*ends), *INPUTS) for ends in ((-1, 5), (-1, 0)))
    assert rows_of(moved(equal, INPUTS), "aten.linear.default") == [(2, 1, 16), (2, 1, 8)]
    assert compute_selected_rows(different, TRAITS).nodes == different.nodes


def test_rows_that_need_others() -> None:
    """A softmax along the rows, a matrix that is both operands, and most of the rows."""

    def softmax(call: Any, x: Any) -> Any:
        return call(aten.select.int, call(aten._softmax.default, x, 1, False), 1, 0)

    def square(call: Any, x: Any) -> Any:
        x = call(aten.view.default, call(aten.slice.Tensor, x, 2, 0, 6), [2, 6, 6])
        x = call(aten.select.int, x, 0, 0)
        return call(aten.select.int, call(aten.mm.default, x, x), 0, 0)

    def most(call: Any, x: Any) -> Any:
        return call(aten.slice.Tensor, call(aten._softmax.default, x, 2, False), 1, 1, 6)

    x = tensor(2, 6, 8)
    for function in (softmax, square, most):
        graph = graph_of(function, x)
        assert rows_of(moved(graph, (x,)), graph.nodes[-2].op) == [graph.nodes[-2].result.type.dims]


def test_rows_before_reshapes() -> None:
    s = Dim.of(Symbol("s", 1, 64))
    last = Rows(1, 1, s, s - 1, 1)
    assert rows_before_reshape((3 * s, 8), (3, s, 8), last) == Rows(0, 3, s, s - 1, 1)
    assert rows_before_reshape((s, 8), (1, s, 8), last) == Rows(0, 1, s, s - 1, 1)
    flat = Rows(0, 3, s, s - 1, 1)
    assert rows_before_reshape((3, s, 8), (3 * s, 8), flat) == last
    heads = Rows(1, 1, s, s - 1, 1)
    assert rows_before_reshape((3, s, 32), (3, s, 4, 8), heads) == last
    assert rows_before_reshape((3, 8, s), (3, s, 8), last) is None


class LastLogits(torch.nn.Module):
    """The logits of the last token, as the caller of a language model reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.mix = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.mix(self.embedding(ids))))[:, -1]


@pytest.mark.device
def test_language_model() -> None:
    """One row of logits, of the last norm and of the feed-forward part, for all numbers of tokens."""
    torch.manual_seed(0)
    module = LastLogits().eval()
    ids = torch.randint(50, (2, 12))
    sizes = {"ids": {1: torch.export.Dim("tokens", min=2, max=32)}}
    exported = torch.export.export(module, (ids,), dynamic_shapes=sizes)
    graph = optimize(read_exported(decompose(exported)), TRAITS)
    matmuls = [node for node in graph.nodes if node.op == MATMUL]
    few = [node.result.type.dims for node in matmuls if node.tensor("a").type.dims[-2] in (1, 2)]
    assert sorted(dims[-1] for dims in few) == [16, 16, 32, 50]  # of attention, feed-forward, head
    assert len(few) < len(matmuls)
    with purevk.compile(module, (ids,), dynamic_shapes=sizes, context=context()) as program:
        for tokens in (12, 2, 31):
            ids = torch.randint(50, (2, tokens))
            torch.testing.assert_close(program.forward(ids), module(ids), rtol=1e-5, atol=1e-5)
