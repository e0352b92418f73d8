"""The time to read a program grows with its instructions, not with their square."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from purevk import knobs, pte
from purevk.dtypes import DType
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.executorch import methods
from purevk.frontends.executorch.control_flow import Choice, Uses, structure
from purevk.frontends.executorch.native import _Method
from purevk.frontends.executorch.shared_memory import SharedMemory
from purevk.pte import types as P
from purevk.pte.native import (
    Argument,
    NativeGraph,
    NativeMethod,
    NativeNode,
    NativeProgram,
    Ref,
    Result,
    TensorMeta,
)
from tests.harness import DATA

X = TensorMeta(DType.float32, ((4, 4), (4, 4)))


@pytest.fixture(autouse=True)
def seconds() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 4


def plan_of(name: str, instructions: Any) -> tuple[Any, Any]:
    """A program, and its method with other instructions: a function of those that it has."""
    program = pte.read_program((DATA / f"{name}.pte").read_bytes())
    (plan,) = program.plans
    (chain,) = plan.chains
    changed = chain._replace(instructions=tuple(instructions(chain.instructions)))
    return program, plan._replace(chains=(changed,))


def test_instructions_without_jumps() -> None:
    _, plan = plan_of("linear_portable", lambda given: given[:1] * 40_000)
    assert structure(plan, "") == tuple(range(40_000))


def test_many_choices() -> None:
    _, plan = plan_of(
        "linear_portable",
        lambda given: [
            each for at in range(0, 20_000, 2) for each in (P.JumpFalse(0, at + 2), given[0])
        ],
    )
    steps = structure(plan, "")
    assert len(steps) == 10_000 and isinstance(steps[-1], Choice)
    uses = Uses(plan, lambda instruction: [])
    (read, *_) = plan.chains[0].instructions[1].args
    unread = next(
        number
        for number, value in enumerate(plan.values)
        if number not in uses._count and not isinstance(value, P.Tensor)
    )
    for step in steps:
        assert isinstance(step, Choice)
        assert uses.wanted_outside([read, unread], step.first, step.last) == [read]


def test_a_long_list_that_all_instructions_read() -> None:
    program, plan = plan_of("linear_portable", lambda given: given[:1] * 2000)
    items = P.BoxedIntList((0,) * 3000)
    (call, *_) = plan.chains[0].instructions
    plan = plan._replace(
        values=(*plan.values[: call.args[0]], items, *plan.values[call.args[0] + 1 :])
    )
    with pytest.raises(UnsupportedProgramError, match="6004000 items of lists"):
        methods._Plan(program, plan, None).run()


def test_delegates_that_are_called_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has all nodes of the delegate: the limit is compared as they are made."""
    monkeypatch.setenv(knobs.LIMITS.name, "nodes=20")
    program, plan = plan_of("linear_relu", lambda given: given * 8)
    assert len(methods._Plan(program, plan, None).run().nodes) == 16
    program, plan = plan_of("linear_relu", lambda given: given * 500)
    with pytest.raises(FileFormatError, match="2[0-9] nodes"):
        methods._Plan(program, plan, None).run()


def call(name: str, target: str, value: str, alias: str = "", writes: bool = False) -> NativeNode:
    return NativeNode(
        name, target, (Argument("x", Ref(value), writes),), (Result((name,), False, alias),)
    )


def native(nodes: list[NativeNode], outputs: tuple[str, ...]) -> Any:
    types = dict.fromkeys(["x", *(node.name for node in nodes)], X)
    method = NativeMethod(NativeGraph(tuple(nodes), ("x",), outputs, types), {}, ((0, ""),))
    return _Method(NativeProgram({"forward": method}, [], []), "forward", "a.ptn", None).run()


def test_many_aliases_and_writes() -> None:
    names = ["x", *(f"v{n}" for n in range(4000))]
    nodes = [call(new, "aten.alias.default", old, old) for old, new in pairwise(names)]
    nodes.append(call("y", "aten.neg.default", "x"))
    nodes += [call(f"w{n}", "aten.relu_.default", "y", "y", True) for n in range(2000)]
    assert len(native(nodes, ("y",)).nodes) == 6001


def test_names_of_a_memory() -> None:
    nodes = [call(f"n{at}", "aten.neg.default", name) for at, name in enumerate("abcdeab")]
    memory = SharedMemory(NativeGraph(tuple(nodes), (), ("d",), {}))
    for name, alias in (("a", ""), ("b", "a"), ("c", "b"), ("d", "c"), ("e", "")):
        memory.add(name, alias)
    assert {memory.owner(name) for name in "abcd"} == {"a"} and memory.owner("e") == "e"
    assert memory.read_after("c", 4, {"c"}) == ["a", "b", "d"]
    assert memory.read_after("d", 5, {"d", "a"}) == ["b"]
    assert memory.read_after("d", 6, {"d"}) == [] and memory.read_after("a", 6, {"a"}) == ["d"]
    assert memory.read_after("e", 4, {"a"}) == []
