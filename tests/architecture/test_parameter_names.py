"""Kernels take their parameters and buffers by name: no source of `ops/` and `lower/` passes them by
position."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "purevk"
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("ops", "lower")
    for path in (ROOT / folder).rglob("*.py")
)
BY_NAME = ("buffers", "params", "constants", "specialize")  # arguments of Lowering.dispatch
PARAMETERS = re.compile(r"(^|_)(params|push)$")
SEQUENCE = re.compile(r"\b(list|List|tuple|Tuple|Sequence)\[.*\b(Size|int)\b")
# Numbers in generated GLSL: outside of PARAM, BUFFER and so on there are none.
NUMBER_IN_TEXT = re.compile(r"\bpush\.p\b|\bconstant_id\b|\bbinding *=|\bPARAM_\d|\bPUSH_\d")
LISTS = (ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp, ast.Set, ast.SetComp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def called(node: ast.expr) -> str:
    """The name of the function of a call; "" for anything else."""
    return name_of(node.func) if isinstance(node, ast.Call) else ""


def name_of(node: ast.expr) -> str:
    return (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )


def is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def by_position(node: ast.expr) -> bool:
    """Whether an expression makes a sequence of values or of numbers, or a dict with numbers as
    keys. Sequences of strings, which are names, are none."""
    if isinstance(node, ast.IfExp):
        return by_position(node.body) or by_position(node.orelse)
    if isinstance(node, ast.BinOp):
        return by_position(node.left) or by_position(node.right)
    if isinstance(node, ast.Starred):
        return by_position(node.value)
    if isinstance(node, ast.Dict):
        merged = (v for k, v in zip(node.keys, node.values) if k is None)
        return any(key is not None and is_number(key) for key in node.keys) or any(
            map(by_position, merged)
        )
    if isinstance(node, ast.DictComp):
        return not is_string(node.key) and not isinstance(node.key, (ast.Name, ast.Call))
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return any(
            by_position(each) if isinstance(each, ast.Starred) else not is_string(each)
            for each in node.elts
        )
    if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
        # Some of the names of a dict are names.
        picked = any(
            each.ifs and name_of(each.target) == name_of(node.elt) != "" for each in node.generators
        )
        return not is_string(node.elt) and not picked
    if isinstance(node, ast.Call):
        return called(node) in ("range", "list", "tuple", "enumerate") or (
            called(node) in ("fixed", "dict", "set", "frozenset")
            and any(is_number(arg) or called(arg) == "len" or by_position(arg) for arg in node.args)
        )
    return False


def inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module or function without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, FUNCTIONS):
            yield child
            yield from inside(child)


def assigned(scope: ast.AST, name: str) -> Iterator[ast.expr]:
    """What a name is set to in a module or function."""
    for node in inside(scope):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for target in targets:
            if name_of(target) == name:
                yield value
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from (v for t, v in zip(target.elts, value.elts) if name_of(t) == name)
            elif isinstance(target, ast.Subscript) and name_of(target.value) == name:
                yield ast.Dict([target.slice], [value])


def positional(source: str) -> list[str]:
    """What in a source names a parameter by its number or position: "line: what"."""
    tree = ast.parse(source)
    found = set()
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    for scope in (tree, *functions):
        for node in inside(scope):
            if not (isinstance(node, ast.Call) and called(node) == "dispatch"):
                continue
            second = [ast.keyword("buffers", given) for given in node.args[1:2]]
            for keyword in (*second, *node.keywords):
                given = keyword.value
                values = [given, *(assigned(scope, given.id) if type(given) is ast.Name else ())]
                if keyword.arg in BY_NAME and any(map(by_position, values)):
                    found.add((given.lineno, f"{keyword.arg} by position"))
    if "Lowering" not in source and "dispatch" not in source:
        return []  # other parameters, such as those of a model
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and PARAMETERS.search(name_of(node.value)):
            index = node.slice
            if isinstance(index, (ast.Slice, ast.UnaryOp)) or is_number(index):
                found.add((node.lineno, "a parameter by its number"))
        elif isinstance(node, ast.arg) and PARAMETERS.search(node.arg) and node.annotation:
            if SEQUENCE.match(ast.unparse(node.annotation)):
                found.add((node.lineno, "parameters as a sequence"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if NUMBER_IN_TEXT.search(node.value):
                found.add((node.lineno, "a number in the text of a kernel"))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name for name in map(name_of, targets) if PARAMETERS.search(name)]
            if names and node.value is not None and isinstance(node.value, LISTS):
                found.add((node.lineno, f"{names[0]} is a sequence"))
    return [f"{line}: {what}" for line, what in sorted(found)]


@pytest.mark.parametrize("source", SOURCES)
def test_no_parameter_by_position(source: str) -> None:
    found = positional((ROOT / source).read_text(encoding="utf-8"))
    assert not found, f"{source}: {'; '.join(found)}"


@pytest.mark.parametrize(
    "text",
    [
        "lowering.dispatch('a.comp', params=[m, n])",
        "lowering.dispatch('a.comp', params=(m, *sizes))",
        "params = [m, n]\nlowering.dispatch('a.comp', params=params)",
        "def f():\n    params = [m]\n    params += [n]\n    lowering.dispatch('a', params=params)",
        "lowering.dispatch('a.comp', constants={100: local})",
        "constants = {}\nconstants[100] = local\nlowering.dispatch('a.comp', constants=constants)",
        "lowering.dispatch('a.comp', specialize=range(10, 18))",
        "lowering.dispatch('a.comp', specialize=(*range(8), 13) if known else ())",
        "lowering.dispatch('a.comp', specialize=lowering.fixed(len(params), (3, 4)))",
        "lowering.dispatch('a.comp', params={**common, 7: n})",
        "more = split_params[14:17]  # for a dispatch",
        "params[24] = 0  # for a dispatch",
        "push[-1] = 0  # for a dispatch",
        "def emit(lowering: Lowering, params: list[Size]): ...",
        "lowering.dispatch('a.comp', [(x, 'r'), (out, 'w')])",
        "lowering.dispatch('a.comp', buffers=[*buffers, (out, 'w')])",
        "buffers = [(x, 'r')]\nlowering.dispatch('a.comp', buffers)",
        "text = f'layout(set = 0, binding = {n}) buffer B {{ float b[]; }};'  # of a dispatch",
        "macros = {'BODY': 'b0[id] = float(push.p[1]);'}  # of a dispatch",
        "text = f'layout(constant_id = {n}) const int {name} = 1;'  # of a dispatch",
    ],
)
def test_positions_are_found(text: str) -> None:
    assert positional(text)


@pytest.mark.parametrize(
    "text",
    [
        "lowering.dispatch('a.comp', params={'M': m, **({'bias': b} if b else {})})",
        "params = {f'size_{d}': s for d, s in enumerate(sizes)}\nlowering.dispatch('a', params=params)",
        "lowering.dispatch('a.comp', {'x': (x, 'r'), **epilogue.buffers})",
        "buffers = {'x': (x, 'r')}\nbuffers['out'] = (out, 'w')\nlowering.dispatch('a.comp', buffers)",
        "lowering.dispatch('a.comp', specialize=('KH', 'KW'), constants={'local_size_x': 64})",
        "lowering.dispatch('a.comp', specialize=lowering.fixed(params, window))",
        "lowering.dispatch('a.comp', specialize=params if known else ())",
        "lowering.dispatch('a.comp', specialize=lowering.fixed(params, [n for n in params if 'i3' in n]))",
        "sizes[0] = params['M']  # of a dispatch",
        "weights = params[:2]",
    ],
)
def test_names_are_not(text: str) -> None:
    assert not positional(text)
