"""Guards for what torch.export decided from the sizes of its example inputs. Imports torch."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from purevk.errors import UnsupportedProgramError
from purevk.frontends.torch.ratios import Ratios
from purevk.ir import Guard, Size
from purevk.ir import dims as _dims
from purevk.ir.relations import indicator
from purevk.ir.signature import children_of

_RELATIONS = {
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
}


def conditions(program: Any, users: Sequence[Any]) -> list[Any]:
    """The conditions on sizes under which a program was traced, in sympy.

    Args:
        program: a `torch.export.ExportedProgram`.
        users: the placeholders of the user's inputs.
    """
    found: dict[Any, None] = {}
    for environment in environments(users):
        for guard in environment.guards:
            condition = environment.simplify(guard.expr.xreplace(environment.replacements))
            found[condition] = None
    # A program that was loaded from a file has its guards only as text.
    text = None if found else getattr(program, "_guards_code", None)
    for code in text or ():
        condition = _parsed(code, program, users)
        if condition is not None:
            found[condition] = None
    return [condition for condition in found if condition.free_symbols or condition == False]  # noqa: E712


def environments(users: Sequence[Any]) -> list[Any]:
    """torch's shape environments of the sizes of placeholders."""
    import torch

    asserts: list[Any] = []
    for node in users:
        example = node.meta.get("val")
        sizes = example.shape if isinstance(example, torch.Tensor) else (example,)
        for size in sizes:
            if isinstance(size, torch.SymInt) and size.node.shape_env not in asserts:
                asserts.append(size.node.shape_env)
    return asserts


def relations(condition: Any, size: Callable[[Any], Size]) -> Iterator[Guard]:
    """The guards of a condition. All must hold.

    Raises:
        UnsupportedProgramError: the condition cannot be written as comparisons of sizes.
    """
    kind = type(condition).__name__
    if kind == "And":
        for part in condition.args:
            yield from relations(part, size)
    elif kind in _RELATIONS:
        ratios = Ratios(size)
        yield from _compared(condition, ratios)
        yield from ratios.limits
    elif kind in ("Or", "Not"):
        ratios = Ratios(size)
        yield Guard(_truth(condition, ratios), ">=", 1, True)
        yield from ratios.limits
    elif kind != "BooleanTrue":
        raise UnsupportedProgramError(f"the condition {condition} cannot be followed")


def _compared(condition: Any, ratios: Ratios) -> Iterator[Guard]:
    """The guards of a comparison. All must hold, and so must the limits of `ratios`."""
    left, right = condition.args
    op = _RELATIONS[type(condition).__name__]
    if left.is_integer and right.is_integer:
        yield Guard(ratios.whole(left), op, ratios.whole(right), True)
    else:
        yield from ratios.compare(left, op, right)


def _truth(condition: Any, ratios: Ratios) -> Size:
    """A condition as a size: 1 if it holds, else 0."""
    kind = type(condition).__name__
    if kind in ("BooleanTrue", "BooleanFalse"):
        return int(kind == "BooleanTrue")
    if kind == "Not":
        return 1 - _truth(condition.args[0], ratios)
    if kind in ("And", "Or"):
        parts = [_truth(part, ratios) for part in condition.args]
        if kind == "And":
            return _dims.product(parts)
        return 1 - _dims.product([1 - part for part in parts])
    if kind not in _RELATIONS:
        raise UnsupportedProgramError(f"the condition {condition} cannot be followed")
    truths = [
        indicator(comparison.left, comparison.op, comparison.right)
        for comparison in _compared(condition, ratios)
    ]
    return _dims.product([int(truth) if isinstance(truth, bool) else truth for truth in truths])


# -- guards as text ------------------------------------------------------------------------------
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}

_FUNCTIONS = {
    "math.floor": "FloorToInt",
    "math.ceil": "CeilToInt",
    "math.trunc": "TruncToInt",
    "round": "RoundToInt",
    "torch.sym_float": "ToFloat",
    "float": "ToFloat",
}


def _parsed(code: str, program: Any, users: Sequence[Any]) -> Any:
    """A guard such as "L['x'].size()[0] % 2 == 0" as a sympy condition; None if it names no size."""
    by_source = _sources(program, users)
    try:
        return _Text(by_source).read(ast.parse(code, mode="eval").body)
    except (KeyError, SyntaxError, UnsupportedProgramError):
        return _pinned(code, by_source)


def _sources(program: Any, users: Sequence[Any]) -> dict[str, Any]:
    """The sympy expression, or number, of each size by its text in guards."""
    from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

    spec = program.call_spec.in_spec
    if spec is None:
        return {}
    names = getattr(program.module_call_graph[0].signature, "forward_arg_names", None) or ()
    paths, _ = tree_flatten_with_path(tree_unflatten([0] * len(users), spec))
    positional = children_of(spec)[0].num_children
    found: dict[str, Any] = {}
    for number, (node, (path, _)) in enumerate(zip(users, paths)):
        at = path[1].idx if hasattr(path[1], "idx") and str(path[0]) == "[0]" else None
        name = names[at] if at is not None and at < len(names) else getattr(path[1], "key", None)
        texts = [f"L['flat_args'][{number}]"]
        if name is not None:
            texts.append(f"L['{name}']{keystr(path[2:])}")
        example = node.meta.get("val")
        for text in texts:
            for dim, size in enumerate(getattr(example, "shape", ())):
                found[f"{text}.size()[{dim}]"] = size if isinstance(size, int) else size.node.expr
            if hasattr(example, "node"):
                found[text] = example.node.expr
    return found if positional >= 0 else {}


def _pinned(code: str, by_source: dict[str, Any]) -> Any:
    """A condition for a guard that cannot be read: the sizes in it are those of the example."""
    import sympy

    named = {
        symbol
        for text, size in by_source.items()
        if text in code and not isinstance(size, int)
        for symbol in size.free_symbols
    }
    return sympy.Function("unreadable")(*sorted(named, key=str)) if named else None


class _Text:
    """Reads the text of a guard, without executing it."""

    def __init__(self, by_source: dict[str, Any]) -> None:
        self.by_source = by_source

    def read(self, node: ast.expr) -> Any:
        import sympy

        if isinstance(node, ast.BoolOp):
            join = sympy.And if isinstance(node.op, ast.And) else sympy.Or
            return join(*map(self.read, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return sympy.Not(self.read(node.operand))
        if isinstance(node, ast.Compare):
            sides = [self._size(side) for side in (node.left, *node.comparators)]
            return sympy.And(
                *(self._compare(op, a, b) for op, a, b in zip(node.ops, sides, sides[1:]))
            )
        raise UnsupportedProgramError("unknown guard")

    def _compare(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        import sympy

        relation = {
            ast.Eq: sympy.Eq,
            ast.NotEq: sympy.Ne,
            ast.Lt: sympy.Lt,
            ast.LtE: sympy.Le,
            ast.Gt: sympy.Gt,
            ast.GtE: sympy.Ge,
        }.get(type(op))
        if relation is None:
            raise UnsupportedProgramError("unknown comparison")
        return relation(left, right)

    def _size(self, node: ast.expr) -> Any:
        import sympy
        import torch.utils._sympy.functions as functions
        from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, IntTrueDiv, Mod

        text = ast.unparse(node)
        if text in self.by_source:
            return sympy.sympify(self.by_source[text])
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return sympy.Integer(node.value)
        if isinstance(node, ast.Constant) and type(node.value) is float:
            return sympy.Float(node.value, precision=53)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._size(node.operand)
        if isinstance(node, ast.BinOp):
            left, right = self._size(node.left), self._size(node.right)
            if isinstance(node.op, ast.FloorDiv):
                return FloorDiv(left, right)
            if isinstance(node.op, ast.Mod):
                return Mod(left, right)
            if isinstance(node.op, ast.Div):
                divide = IntTrueDiv if left.is_integer and right.is_integer else FloatTrueDiv
                return divide(left, right)
            if type(node.op) in _BINARY:
                return _BINARY[type(node.op)](left, right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            join = {"max": sympy.Max, "min": sympy.Min}.get(node.func.id)
            if join is not None and not node.keywords:
                return join(*map(self._size, node.args))
        if isinstance(node, ast.Call) and len(node.args) == 1:
            function = _FUNCTIONS.get(ast.unparse(node.func))
            if function is not None:
                return getattr(functions, function)(self._size(node.args[0]))
        raise UnsupportedProgramError("unknown size")
