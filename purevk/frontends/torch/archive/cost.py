"""How long torch takes to read an expression of sizes.

torch and sympy look for common divisors of both sides of each division, and compare all arguments of
a maximum with one another. A hundred bytes of text can take hours. So the time is estimated from the
text before torch gets it: by the number of products that both sides have once they are multiplied
out, and by how functions are nested."""

from __future__ import annotations

import ast
import math

_FREE = 64  # steps of an expression: what models have takes no time
_NUMBERS = ("Float", "Integer", "Rational")
_POWERS = ("Pow", "PowByNatural", "FloatPow")
_MOST_LOG = 40.0  # of a number of products


class _Sum:
    """A part of an expression, multiplied out.

    Attributes:
        terms, degree: how many products there are at most, and how many atoms the longest has.
        atoms: symbols and functions.
        depth: of functions within functions.
    """

    def __init__(self, atoms: set[str], depth: int = 0) -> None:
        self.terms, self.degree, self.atoms, self.depth = 1.0, min(len(atoms), 1), atoms, depth

    def add(self, other: _Sum) -> None:
        self._join(other)
        self.terms += other.terms
        self.degree = max(self.degree, other.degree)

    def multiply(self, other: _Sum) -> None:
        self._join(other)
        self.degree += other.degree
        self.terms = min(self.terms * other.terms, _choices(len(self.atoms), self.degree))

    def to_power(self, exponent: int) -> None:
        self.degree *= exponent
        of_terms = _choices(self.terms - 1, exponent)
        self.terms = min(of_terms, _choices(len(self.atoms), self.degree))

    def _join(self, other: _Sum) -> None:
        self.atoms |= other.atoms
        self.depth = max(self.depth, other.depth)


def _choices(kinds: float, most: int) -> float:
    """How many products there are of at most so many factors of so many kinds."""
    log = math.lgamma(kinds + most + 1) - math.lgamma(kinds + 1) - math.lgamma(most + 1)
    return math.exp(min(log, _MOST_LOG)) + 1e-6


class _Reader:
    """Adds up what the functions of an expression take.

    Attributes:
        steps: of divisions, about half a millisecond each.
        compared: arguments of maxima and minima.
    """

    def __init__(self, text: str) -> None:
        self.text, self.steps, self.compared = text, 0.0, 0.0

    def read(self, node: ast.expr) -> _Sum:
        outer = []  # sums and products nest to the left
        while isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
            outer.append(node)
            node = node.left
        total = self._read(node)
        for each in reversed(outer):
            right = self.read(each.right)
            (total.multiply if isinstance(each.op, ast.Mult) else total.add)(right)
        return total

    def _read(self, node: ast.expr) -> _Sum:
        if isinstance(node, ast.UnaryOp):
            return self.read(node.operand)
        name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Name) or name == "Symbol":
            return _Sum({self._text(node)})
        operands = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        if isinstance(node, ast.Call):
            operands = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not operands or name in _NUMBERS:
            return _Sum(set())
        parts = list(map(self.read, operands))
        first, *others = parts
        if len(parts) == 2 and (
            name in _POWERS or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))
        ):
            first.to_power(_exponent(operands[1]))
            return first
        if name in ("Add", "Mul"):
            for part in others:
                (first.add if name == "Add" else first.multiply)(part)
            return first
        return self._function(node, name, parts)

    def _function(self, node: ast.expr, name: str, parts: list[_Sum]) -> _Sum:
        atoms = set[str]().union(*(part.atoms for part in parts))
        terms = sum(part.terms for part in parts)
        is_linear = all(part.degree <= 1 for part in parts)
        self.steps += terms if is_linear else terms * len(atoms)
        if name in ("Max", "Min"):
            self.compared += terms
        return _Sum({self._text(node)}, 1 + max(part.depth for part in parts))

    def _text(self, node: ast.expr) -> str:
        return self.text[node.col_offset : node.end_col_offset]


def _exponent(node: ast.expr) -> int:
    """The integer of an exponent; 1 if it is none. Large ones were refused."""
    value = node.args[0] if isinstance(node, ast.Call) and node.args else node
    number = value.value if isinstance(value, ast.Constant) else 1
    return min(abs(number), 64) if isinstance(number, int) else 1


def steps_of(text: str) -> int:
    """What an expression takes, in steps; 0 for those that models have."""
    reader = _Reader(text)
    depth = reader.read(ast.parse(text, mode="eval").body).depth
    return int(max(reader.steps + reader.compared**3 / 4096 + depth**3 / 16 - _FREE, 0))
