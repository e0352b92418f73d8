"""Arguments of nodes by name: each accessor gives what it says, and refuses everything else."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import purevk.ops  # noqa: F401  # fills the table of schemas
from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.ir import Dim, Graph, Node, Symbol, TensorType, Value, schema
from purevk.lower.expression import Expression
from purevk.ops import registry

X = Value("x", TensorType(DType.float32, (3, 5)))
Y = Value("y", TensorType(DType.int64, ()))
N = Dim.of(Symbol("n", 7))
BODY = Graph("body", (), (), ())


@dataclasses.dataclass(frozen=True)
class _Choice:
    width: int


CHOICE = _Choice(4)


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    schema.declare("test.op", lambda x, y=2, *, z=None: None)
    yield
    schema.withdraw("test.op")


def _node(arg: Any) -> Node:
    return Node("test.op", (arg,), (), "forward#7")


GIVEN: dict[str, tuple[tuple[Any, Any], ...]] = {
    "tensor": ((X, X),),
    "optional_tensor": ((X, X), (None, None)),
    "tensors": (((X, Y), (X, Y)), ((), ()), (X, (X,))),
    "optional_tensors": (((None, X), (None, X)),),
    "tensor_or_scalar": ((X, X), (2, 2), (2.5, 2.5), (N, N), (True, True)),
    "int": ((3, 3), (-1, -1)),
    "optional_int": ((3, 3), (None, None)),
    "ints": (((3, 4), (3, 4)), (3, (3,)), ((), ())),
    "optional_ints": (((3, 4), (3, 4)), (None, None)),
    "size": ((3, 3), (N, N)),
    "optional_size": ((N, N), (None, None)),
    "sizes": (((3, N), (3, N)), (N, (N,))),
    "float": ((2.5, 2.5), (2, 2.0)),
    "optional_float": ((2.5, 2.5), (None, None)),
    "floats": (((2.5, 2), (2.5, 2.0)),),
    "scalar": ((2.5, 2.5), (2, 2), (True, True), (1j, 1j), (N, N)),
    "scalars": (((2, 2.5, N), (2, 2.5, N)),),
    "bool": ((True, True), (False, False)),
    "optional_bool": ((False, False), (None, None)),
    "bools": (((True, False), (True, False)),),
    "str": (("sum", "sum"),),
    "dtype": ((DType.int8, DType.int8),),
    "optional_dtype": ((DType.int8, DType.int8), (None, None)),
    "graph": ((BODY, BODY),),
    "arg_list": (((X, 2, "a"), (X, 2, "a")),),
    "arg": ((X, X), (None, None), ((2, X), (2, X))),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "tensor": (None, 2, (X,), BODY),
    "optional_tensor": (2, (X,)),
    "tensors": (None, (X, None), (X, 2)),
    "optional_tensors": ((X, 2),),
    "tensor_or_scalar": (None, "a", (X,)),
    "int": (None, 2.5, 2.0, True, N, X, "2", (2,)),
    "optional_int": (2.5, True, N),
    "ints": (None, (2, None), (2, N), (2, True), 2.5),
    "optional_ints": ((2, 2.5),),
    "size": (None, 2.5, True),
    "optional_size": (2.5,),
    "sizes": (None, (2, 2.5)),
    "float": (None, True, N, "2", X),
    "optional_float": (True,),
    "floats": (None, (2.5, None)),
    "scalar": (None, "a", X),
    "scalars": (None, ("a",)),
    "bool": (None, 0, 1, 0.0),
    "optional_bool": (1,),
    "bools": (None, (True, 1)),
    "str": (None, 2),
    "dtype": (None, 2, "int8"),
    "optional_dtype": ("int8",),
    "graph": (None, X, CHOICE),
}


@pytest.mark.parametrize("name", GIVEN)
def test_gives_what_it_names(name: str) -> None:
    for arg, expected in GIVEN[name]:
        found = getattr(_node(arg), name)("x")
        assert found is expected or (type(found) is type(expected) and found == expected), arg


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_other_kinds(name: str) -> None:
    for arg in REFUSED[name]:
        with pytest.raises(GraphError, match="argument 'x' of test.op is "):
            getattr(_node(arg), name)("x")


def test_error_says_operator_argument_expected_and_given() -> None:
    with pytest.raises(GraphError) as caught:
        _node((2, 2.5)).ints("x")
    error = caught.value
    assert error.what == "argument 'x' of test.op is a list of an integer and a real number"
    assert error.why == "a list of integers is expected, and (2, 2.5) was given"
    assert error.where == "forward#7"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(GraphError, match=r"a tensor or None is expected, and 2 was given"):
        _node(2).optional_tensor("x")
    with pytest.raises(
        GraphError, match=r"an integer is expected, and %x: float32\[3,5\] was given"
    ):
        _node(X).int("x")


NUMBERS = ("ints", "sizes", "floats", "optional_ints")


@pytest.mark.parametrize("name", NUMBERS)
def test_one_number_stands_for_all(name: str) -> None:
    for arg in (3, (3,)):
        assert getattr(_node(arg), name)("x", 3) == (3, 3, 3)
    assert getattr(_node((1, 2)), name)("x", 2) == (1, 2)
    for arg in ((1, 2, 3), ()):
        with pytest.raises(GraphError, match="a list of 2 "):
            getattr(_node(arg), name)("x", 2)


def test_attributes_by_class() -> None:
    node = _node(CHOICE)
    assert node.attribute("x", _Choice) is CHOICE
    assert node.optional_attribute("x", _Choice) is CHOICE
    assert _node(None).optional_attribute("x", _Choice) is None
    with pytest.raises(GraphError, match="Expression is expected"):
        node.attribute("x", Expression)
    with pytest.raises(GraphError, match="is None"):
        _node(None).attribute("x", _Choice)


def test_defaults_and_names() -> None:
    node = _node(X)
    assert node.int("y") == 2
    assert node.optional_tensor("z") is None
    with pytest.raises(GraphError, match=r"test.op has no argument 'w'") as caught:
        node.int("w")
    assert caught.value.why == "its arguments are x, y, z"
    with pytest.raises(GraphError, match="test.op lacks its argument 'x'"):
        Node("test.op", (), ()).tensor("x")
    with pytest.raises(GraphError, match="no operator test.unknown"):
        Node("test.unknown", (X,), ()).tensor("x")


def test_every_definition_has_its_schema() -> None:
    for definition in registry.definitions():
        for name in (definition.name, *definition.names):
            found = schema.find(name)
            assert found is not None
            assert tuple(found.positions) == definition.parameters


def test_unregistering_withdraws_the_schema() -> None:
    definition = registry.Operator("test.gone", lambda x: x, None, names=("test.gone_too",))
    registry.register(definition)
    assert schema.find("test.gone_too") is not None
    registry.unregister("test.gone")
    assert schema.find("test.gone") is None and schema.find("test.gone_too") is None
