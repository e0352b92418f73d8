"""Complex values as real ones: what the rules of complex operators are written with.

While `passes.complex` goes through a graph, a `Split` knows each complex value in one or both of two
forms: a tensor of pairs (a last dim of size 2, as `torch.view_as_real` gives), or the real and the
imaginary parts. Both are views of the same bytes: the parts of pairs are slices, and parts that a
pointwise program makes are written as pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.ir import Arg, Node, Value
from purevk.ops.builder import Builder
from purevk.ops.complex.views import AS_COMPLEX, AS_REAL, INTERLEAVE
from purevk.ops.elementwise.program import constant
from purevk.ops.promotion import real_dtype
from purevk.ops.registry import Rewrite, definition_of


class NoKernelError(GraphError):
    """A rule does not take a node: it runs on the CPU. The first argument says why."""


@dataclass(frozen=True)
class Pairs:
    """A complex tensor as a real one with a last dim of size 2."""

    value: Value


@dataclass(frozen=True)
class Parts:
    """A complex tensor as two real ones."""

    real: Value
    imaginary: Value


Complex = Pairs | Parts
Made = Value | Complex  # a result: real, or complex in one of its forms


class Split:
    """The forms of complex values.

    Attributes:
        builder: takes the nodes.
    """

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self._same: dict[Value, Value] = {}
        self._defined: set[Value] = set()  # values without a node of their own
        self._pairs: dict[Value, Value] = {}
        self._parts: dict[Value, Parts] = {}
        self._whole: dict[Value, Value] = {}
        self._parts_of: dict[Value, Parts] = {}  # by the pairs

    def emit(self, op: str, *args: Arg) -> Value:
        return self.builder.emit(op, *args)

    def define(self, value: Value, form: Complex) -> None:
        """Says what a complex value is."""
        self._defined.add(value)
        if isinstance(form, Pairs):
            self._pairs[value] = form.value
        else:
            self._parts[value] = form

    def follow(self, value: Value, other: Value) -> None:
        """Says that a complex value is another one."""
        self._same[value] = self._root(other)

    def _root(self, value: Value) -> Value:
        return self._same.get(value, value)

    def is_split(self, value: Value) -> bool:
        """Whether a complex value has no node of its own."""
        return value in self._same or value in self._defined

    def has_pairs(self, value: Value) -> bool:
        """Whether the pairs of a complex value exist, or are a view."""
        return self._root(value) in self._pairs or self._root(value) not in self._parts

    def pairs(self, value: Value, dtype: DType | None = None) -> Value:
        """The pairs of a value; those of a real one have imaginary parts of 0.

        Args:
            dtype: of the parts; None: as they are.
        """
        if not value.type.dtype.is_complex:
            return self.interleaved(self.parts(value, dtype))
        value = self._root(value)
        if value not in self._pairs:
            parts = self._parts.get(value)
            self._pairs[value] = (
                self.emit(AS_REAL, value) if parts is None else self.interleaved(parts)
            )
        return self.cast(self._pairs[value], dtype)

    def interleaved(self, parts: Parts) -> Value:
        made = self.emit(INTERLEAVE, parts.real, parts.imaginary)
        self._parts_of[made] = parts
        return made

    def parts(self, value: Value, dtype: DType | None = None) -> Parts:
        """The parts of a value; the imaginary part of a real one is 0. `dtype` as for `pairs`."""
        if not value.type.dtype.is_complex:
            real = self.cast(value, dtype)
            zero = constant(self.builder, 0, real.type.dims, real.type.dtype)
            return Parts(real, zero)
        value = self._root(value)
        if value not in self._parts:
            self._parts[value] = self.parts_of(self.pairs(value))
        parts = self._parts[value]
        return Parts(self.cast(parts.real, dtype), self.cast(parts.imaginary, dtype))

    def parts_of(self, pairs: Value) -> Parts:
        """The parts of a tensor of pairs."""
        if pairs not in self._parts_of:
            last = pairs.type.rank - 1
            self._parts_of[pairs] = Parts(
                self.builder.aten.select.int(pairs, last, index=0),
                self.builder.aten.select.int(pairs, last, index=1),
            )
        return self._parts_of[pairs]

    def whole(self, value: Value) -> Value:
        """A complex value as a tensor of complex numbers, for what the host reads."""
        value = self._root(value)
        if value not in self._defined:
            return value
        if value not in self._whole:
            self._whole[value] = self.emit(AS_COMPLEX, self.pairs(value))
        return self._whole[value]

    def cast(self, value: Value, dtype: DType | None) -> Value:
        """A real tensor in another dtype; None: as it is."""
        if dtype is None or value.type.dtype is dtype:
            return value
        return self.builder.aten._to_copy(value, dtype)


Apply = Callable[[Split, Node], Made | Sequence[Made]]
Expand = Callable[[Builder, Node], Value | Sequence[Value]]
Refuse = Callable[[Node], str | None]


@dataclass(frozen=True)
class Rule:
    """What an operator is for complex numbers: one of `apply` and `expand`.

    Attributes:
        apply: `apply(split, node)` emits operators of real tensors, and returns the results.
        expand: `expand(builder, node)` emits other operators of complex numbers.
        refuse: why a node has no kernel, or None.
    """

    apply: Apply | None = None
    expand: Expand | None = None
    refuse: Refuse | None = None


_rules: dict[str, Rule] = {}


def _register(names: Sequence[str], rule: Rule) -> None:
    for name in names:
        if name in _rules:
            raise GraphError(f"{name} has two rules for complex numbers")
        _rules[name] = rule


def apply_by(*names: str, refuse: Refuse | None = None) -> Callable[[Apply], Apply]:
    """Registers the decorated function as `Rule.apply` of operators."""

    def decorate(function: Apply) -> Apply:
        _register(names, Rule(apply=function, refuse=refuse))
        return function

    return decorate


def expand_by(*names: str, refuse: Refuse | None = None) -> Callable[[Expand], Expand]:
    """Registers the decorated function as `Rule.expand` of operators."""

    def decorate(function: Expand) -> Expand:
        _register(names, Rule(expand=function, refuse=refuse))
        return function

    return decorate


def expand_by_own(*names: str) -> None:
    """Registers operators whose `Rewrite` holds for complex numbers too."""

    def expand(builder: Builder, node: Node) -> Value | Sequence[Value]:
        form = definition_of(node).form
        assert isinstance(form, Rewrite)  # as those that are registered here
        return form.expand(builder, node) or ()

    expand_by(*names)(expand)


def rule_of(node: Node) -> Rule | None:
    """The rule for a node; None if it has none."""
    return _rules.get(node.op)


def is_complex(node: Node) -> bool:
    """Whether a node takes or gives complex numbers."""
    return any(value.type.dtype.is_complex for value in (*node.inputs, *node.results))


def computing(node: Node) -> DType:
    """The dtype of the parts in which a node computes: that of its result if it is complex, else
    that of its operands."""
    values = [*node.results, *node.inputs]
    first = next(value.type.dtype for value in values if value.type.dtype.is_complex)
    return real_dtype(first)


def _not_complex(builder: Builder, node: Node) -> Value:
    raise GraphError(
        f"{node.op} takes complex numbers, or gives some",
        where=node.source,
        why="its values are real",
    )


# The form of operators that only a rule expresses.
BY_RULE = Rewrite(_not_complex)
