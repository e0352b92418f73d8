"""The printed form follows the grammar of `docs/ir.md`, and its example is what the printer
prints."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from purevk.dtypes import DType
from purevk.frontends.importer import Importer
from purevk.frontends.torch.decompose import decompose
from purevk.frontends.torch.exported import read_exported
from purevk.ir import TensorType
from purevk.ir.printer import to_text
from purevk.ir.verify import verify
from purevk.passes.pipeline import passes
from tests.passes.harness import TRAITS, random_graph

PAGE = (Path(__file__).parents[2] / "docs" / "ir.md").read_text(encoding="utf-8")
NAME = r"[A-Za-z_]\w*"
TYPE = rf"(?:{'|'.join(member.name for member in DType)})\[[^\[\]]*\]"
RESULT = rf"%{NAME}: {TYPE}"
LINES = [
    rf"method {NAME}",
    rf"symbol {NAME}(?: <= \d+)? = (?:%{NAME}\.(?:size|element)\(-?\d+\)|argument \d+)",
    rf"input (?:{RESULT}|{NAME}|None)",
    rf"constant {RESULT}",
    rf"state {RESULT}(?: = 0)?",
    rf"(?:{RESULT}(?:, {RESULT})* = )?(?:{NAME}\.{NAME}\.\w+|purevk\.{NAME})\(.*\)(?:  # .*)?",
    r"output .*",
    r"update %\w+",
]


def assert_follows(text: str) -> None:
    """Every line is one of the grammar's, and they come in its order; so do those of sub-graphs,
    further in."""
    at = 0
    lines = text.rstrip("\n").split("\n")
    inner = re.findall(r"(?:^  .*\n?)+", "\n".join(lines), re.MULTILINE)
    for block in inner:
        for body in re.split(
            r"^(?=graph )", re.sub(r"^  ", "", block, flags=re.MULTILINE), flags=re.MULTILINE
        )[1:]:
            head, _, rest = body.partition("\n")
            assert re.fullmatch(rf"graph {NAME}(?:\.{NAME})*", head), head
            assert_follows("method x\n" + rest)
    for line in (line for line in lines if not line.startswith("  ")):
        while not re.fullmatch(LINES[at], line):
            at += 1
            assert at < len(LINES), line
    assert at >= len(LINES) - 2  # `update` lines are rare


def test_printed_graphs_follow_the_grammar() -> None:
    for seed in range(20):
        graph, _ = random_graph(seed)
        assert_follows(to_text(graph))
        for each in passes(TRAITS):
            graph = each(graph, TRAITS)
            assert_follows(to_text(graph))


def test_the_example_is_printed_so() -> None:
    importer = Importer("forward", "test")
    weight = memoryview(bytearray(torch.zeros(8, 16).numpy().tobytes()))
    x = importer.input(DType.float32, (128, 16), True)
    x = type(x)(x.name, x.type.with_dims((x.type.dims[0], 16)))
    importer.inputs[0] = x
    importer.symbols = {
        symbol: type(source)(x, source.dim) for symbol, source in list(importer.symbols.items())[:1]
    }
    const = importer.constant(weight, TensorType(DType.float32, (8, 16)))
    state = importer.state(None, TensorType(DType.float32, (8,)))
    number = iter(range(9))

    def emit(op: str, *args: object) -> object:
        made = importer.emit(op, args, [], [], f"forward#{next(number)}")
        return made[0] if made else None

    y = emit("aten.linear.default", x, const, None)
    y = emit("aten.gelu.default", y, "tanh")
    y = emit("aten.add.Tensor", y, state, 1)
    emit("purevk.store", state, emit("aten.mean.dim", y, (0,)))
    graph = importer.finish([emit("aten.view.default", y, (x.type.dims[0], 2, 4)), x.type.dims[0]])
    verify(graph)
    assert_follows(to_text(graph))
    assert to_text(graph) in PAGE


class Choice(torch.nn.Module):
    def forward(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return torch.cond(second, lambda x: x.cumsum(0), lambda x: x.cumsum(1), (x,))

        return torch.cond(first, inner, lambda x, second: x * 3, (x, second))


def test_sub_graphs_are_printed_below_their_node() -> None:
    dims = {"x": {0: torch.export.Dim("rows", max=9)}, "first": None, "second": None}
    given = (torch.ones(3, 4), torch.tensor(True), torch.tensor(False))
    graph = read_exported(decompose(torch.export.export(Choice(), given, dynamic_shapes=dims)))
    verify(graph)
    text = to_text(graph)
    assert_follows(text)
    assert len(re.findall(r"^  graph ", text, re.MULTILINE)) == 2
    assert len(re.findall(r"^    graph ", text, re.MULTILINE)) == 2
    for each in passes(TRAITS):
        graph = each(graph, TRAITS)
        verify(graph, each.__name__)
        assert_follows(to_text(graph))
