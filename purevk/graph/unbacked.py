"""Unbacked symbols: when their values become known, and the rules that they must keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from purevk.errors import InputError
from purevk.ir import Graph, Guard, Symbol, SymbolSource, Value
from purevk.ir import dims as _dims
from purevk.ir.host import HOST
from purevk.lower.lowering import Requirement

if TYPE_CHECKING:
    from purevk.schedule.plan import Plan


class Replan(Exception):
    """The value of an unbacked symbol does not fit the plan.

    Args:
        values: the values so far.
        outgrown: whether one is above its bound.
    """

    def __init__(self, values: dict[Symbol, int], outgrown: bool) -> None:
        super().__init__(", ".join(f"{symbol} = {value}" for symbol, value in values.items()))
        self.values, self.outgrown = values, outgrown


@dataclass
class Stage:
    """The symbols that are known after a step, and the rules that can be checked then."""

    symbols: list[tuple[Symbol, SymbolSource]] = field(default_factory=list)
    bounded: list[Symbol] = field(default_factory=list)
    rules: list[Requirement] = field(default_factory=list)
    checks: list[tuple[Guard, str]] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)


class UnbackedSymbols:
    """When the symbols of a plan become known, and the rules that they must keep.

    Attributes:
        stages: by the number of the step that they follow; -1: before the first step.
        may_replan: whether a running call may need another plan.
        unsafe: states that a call may write before it turns out to need another plan, or that an
            index is out of range, or that a size breaks a rule.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stages: dict[int, Stage] = {}
        self.unsafe: tuple[Value, ...] = ()
        self.may_replan = False
        graph = plan.assignment.graph
        made_by = {
            value: number
            for number, step in enumerate(plan.steps)
            for node in step.nodes
            for value in node.results
        }
        self._known: dict[Symbol, int] = {}
        for symbol, source in graph.symbols.items():
            value = source.value
            inner = value is not None and value not in graph.inputs
            if value is not None and inner:
                # A view has no node. What makes its storage makes it.
                storage = plan.assignment.storages.get(value, value)
                self._known[symbol] = made_by.get(value, made_by.get(storage, -1))
            else:
                self._known[symbol] = -1
            stage = self._stage({symbol})
            if inner:
                stage.symbols.append((symbol, source))
            if symbol.upper < _dims.UNBOUNDED and (inner or not symbol.is_size):
                stage.bounded.append(symbol)
        # Layers ask for the same: a call compares once.
        rules: dict[tuple[str, str], Requirement] = {}
        for rule in plan.requirements:
            rules.setdefault((repr(rule.left), repr(rule.right)), rule)
        for rule in rules.values():
            self._stage(_dims.symbols(rule.left) | _dims.symbols(rule.right)).rules.append(rule)
        for check in graph.checks:
            self._stage(check[0].symbols).checks.append(check)
        self.watch(())

    def _stage(self, symbols: set[Symbol]) -> Stage:
        return self.stages.setdefault(
            max((self._known.get(symbol, -1) for symbol in symbols), default=-1), Stage()
        )

    def watch(self, guards: Iterable[Guard], inner: Sequence[UnbackedSymbols] = ()) -> None:
        """Has guards of this graph's unbacked symbols checked.

        Args:
            guards: of the method.
            inner: the symbols of the sub-graphs, which watch these guards already.
        """
        around = self.plan.graph.outer
        for guard in guards:
            own = [symbol for symbol in guard.symbols if symbol in self._known]
            known = len(own) == len(guard.symbols - around) and (own or not around)
            if known and any(symbol.unbacked or not symbol.is_size for symbol in guard.symbols):
                self._stage(guard.symbols).guards.append(guard)
        last = max(
            (
                n
                for n, stage in self.stages.items()
                if stage.guards or any(s.open or s.open_below for s in stage.bounded)
            ),
            default=-1,
        )
        if any(each.may_replan for each in inner):
            last = len(self.plan.steps)
        self.may_replan = last >= 0 or any(stage.guards for stage in self.stages.values())
        self.unsafe = self._exposed(last)
        self.stages = {n: stage for n, stage in self.stages.items() if any(vars(stage).values())}

    def _exposed(self, replanned: int) -> tuple[Value, ...]:
        """The states that are unsafe. `replanned`: the last step after which the call may need another
        plan."""
        plan = self.plan
        ruled = [
            n for n, stage in self.stages.items() if stage.rules or stage.checks or stage.bounded
        ]
        last = max([replanned, *ruled])
        inner = [each for each in plan.nested() if each is not plan]
        if any(each.checks or each.assignment.graph.unbacked for each in inner):
            last = len(plan.steps)
        written = [*plan.exposed_states()]
        if last >= 0:
            written += _written(plan, last)
        for each in inner if last >= 0 else ():
            written += _written(each, len(each.steps))
        return tuple(dict.fromkeys(written))

    def check(self, stage: Stage, env: Mapping[Symbol, int], graph: Graph) -> None:
        """Raises `InputError` or `Replan` for the first rule that does not hold."""
        for symbol in stage.bounded:
            above = symbol.open and env[symbol] > symbol.upper
            if above or (symbol.open_below and env[symbol] < symbol.lower):
                raise Replan(self._unbacked_values(env), True)
        for guard, message in stage.checks:
            if not guard.holds(env):
                raise InputError(
                    message,
                    where=graph.name,
                    why=guard.explain(env),
                )
        for symbol in stage.bounded:
            if not symbol.lower <= env[symbol] <= symbol.upper:
                raise InputError(
                    f"a data-dependent size of this call is {env[symbol]}",
                    where=f"{symbol} of {graph.name}",
                    why=f"memory was planned for {symbol.lower} to {symbol.upper}",
                    next="export the model with larger bounds",
                )
        for rule in stage.rules:
            left, right = _dims.evaluate(rule.left, env), _dims.evaluate(rule.right, env)
            if not left <= right:
                raise InputError(
                    rule.message,
                    where=graph.name,
                    why=rule.why.format(left=left, right=right),
                    next=rule.next,
                )
        if not all(guard.holds(env) for guard in stage.guards):
            raise Replan(self._unbacked_values(env), False)

    def _unbacked_values(self, env: Mapping[Symbol, int]) -> dict[Symbol, int]:
        return {
            symbol: value for symbol, value in env.items() if symbol.unbacked or not symbol.is_size
        }


def _written(plan: Plan, last: int) -> list[Value]:
    """The storages that steps up to `last` write in place."""
    from purevk.ops import registry  # few plans need it, and it imports all operators

    storages = plan.assignment.storages
    return [
        storages.get(value, value)
        for step in plan.steps[: last + 1]
        for node in step.nodes
        for value in (registry.mutated(node) if node.op != HOST else ())
    ]
