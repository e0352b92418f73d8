"""Operators as attributes of a builder."""

from __future__ import annotations

import pytest

from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.ir import Graph, Value
from purevk.ir import TensorType as Type
from purevk.passes.rewrite import Rewriter


@pytest.fixture
def x() -> Value:
    return Value("x", Type(DType.float32, (2, 3)))


@pytest.fixture
def builder(x: Value) -> Rewriter:
    return Rewriter(Graph("forward", (x,), (), (x,)))


def test_attributes_name_operators_and_overloads(builder: Rewriter, x: Value) -> None:
    y = builder.aten.view(x, (3, 2))
    builder.aten.add.Tensor(y, y)
    builder.purevk.softmax(y, dim=-1, log=False, zero_rows=False, dtype=DType.float32)
    names = [node.op for node in builder.nodes]
    assert names == ["aten.view.default", "aten.add.Tensor", "purevk.softmax"]
    assert y.type.dims == (3, 2)


def test_keywords_and_defaults_stand_where_the_schema_has_them(builder: Rewriter, x: Value) -> None:
    builder.aten.slice.Tensor(x, end=2, dim=1)
    builder.emit("aten.slice.Tensor", x, 1, None, 2, 1)
    first, second = builder.nodes
    assert first.args == second.args


def test_all_gives_each_result(builder: Rewriter, x: Value) -> None:
    values, indices = builder.aten.sort.all(x, dim=1)
    assert (values.type.dtype, indices.type.dtype) == (DType.float32, DType.int64)


@pytest.mark.parametrize(
    "keywords, text",
    [({"axis": 0}, "aten.sum.dim_IntList got axis"), ({"x": 0}, "got x twice")],
)
def test_what_the_schema_does_not_have(
    builder: Rewriter, x: Value, keywords: dict[str, int], text: str
) -> None:
    with pytest.raises(GraphError, match=text):
        builder.aten.sum.dim_IntList(x, **keywords)
    with pytest.raises(GraphError, match="no operator aten.nonsense"):
        builder.aten.nonsense(x)
