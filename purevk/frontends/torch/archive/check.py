"""Checks what a .pt2 file says of its program, before torch reads it. Imports torch.

torch evaluates expressions of sizes as Python, writes names into Python source that it runs, looks
operators up as paths of attributes, and imports modules that the structures of inputs name. So every
text of the program is checked by the field that it is in. A field without a rule takes a name."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from purevk import pure_operators
from purevk.errors import FileFormatError, UnsupportedProgramError
from purevk.frontends.torch.archive.cost import steps_of

_NAME = re.compile(r"(?!\d)\w*")
# Names of parameters and keys of dictionaries. torch writes some into source, between quotes.
_PATH = re.compile(r"""[^"'\\\x00-\x1f\x7f-\x9f\u2028\u2029]*""")
_KEPT_METADATA = {"stack_trace", "nn_module_stack"}  # for messages
_HIGHER_ORDER = frozenset(
    """
    associative_scan auto_functionalized auto_functionalized_v2 cond flex_attention hints_wrapper
    invoke_subgraph map map_impl out_dtype scan strict_mode tag_activation_checkpoint while_loop
    wrap wrap_with_autocast wrap_with_set_grad_enabled
    """.split()
)
_FUNCTIONS = frozenset(
    """
    _operator.abs _operator.add _operator.and_ _operator.eq _operator.floordiv _operator.ge
    _operator.getitem _operator.gt _operator.le _operator.lshift _operator.lt _operator.mod
    _operator.mul _operator.ne _operator.neg _operator.not_ _operator.or_ _operator.pos
    _operator.pow _operator.rshift _operator.sub _operator.truediv math.ceil math.floor math.trunc
    torch._sym_sqrt torch.sym_float torch.sym_int torch.sym_ite torch.sym_max torch.sym_min
    torch.sym_not torch.sym_sqrt torch.sym_sum
    """.split()
)
# Functions and names in expressions of sizes, as sympy and torch write them.
_SYMPY = frozenset(
    """
    Abs Add And BooleanFalse BooleanTrue CeilDiv CeilToInt CleanDiv Equality Eq ExprCondPair Float
    FloatPow FloatTrueDiv FloorDiv FloorToInt Ge GreaterThan Gt Identity IntTrueDiv Integer
    IsNonOverlappingAndDenseIndicator Le LessThan LShift Lt Max Min Mod ModularIndexing Mul Ne Not
    Or Piecewise Pow PowByNatural PythonMod RShift Rational RoundDecimal RoundToInt
    StrictGreaterThan StrictLessThan Symbol ToFloat TruncToFloat TruncToInt Unequality Where ceiling
    false floor int_oo oo true
    """.split()
)
_POWERS = ("Pow", "PowByNatural", "FloatPow", "LShift")
_MOST_POWER = 64
_MOST_STEPS, _BYTES_OF_STEP = 1 << 11, 512  # some seconds, and some for each megabyte
_SYMBOL = re.compile(r"[a-z]+\d+", re.ASCII)
_GUARD_NAMES = frozenset("L float max math min round torch".split())
_GUARD_ATTRIBUTES = frozenset(
    "ceil floor size storage_offset stride sym_float sym_max sym_min trunc".split()
)
_ARITHMETIC = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.Constant),
    *(ast.Name, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Load, ast.keyword),
)


def check_program(program: Any, where: str, nbytes: int) -> None:
    """Checks a program, and drops what neither purevk nor torch needs to run it.

    Args:
        program: a `torch._export.serde.schema.ExportedProgram`.
        where: the file.
        nbytes: of its description.

    Raises:
        FileFormatError: a text in it is none that torch writes there, or could run code.
        UnsupportedProgramError: it has an operator that this process does not know.
    """
    program.graph_module.metadata = {}
    program.graph_module.treespec_namedtuple_fields = {}
    program.torch_version = ""
    checked: set[tuple[Any, str]] = set()
    steps, costs = 0, dict[str, int]()
    for rule, text in _texts(program):
        if (rule, text) not in checked:
            checked.add((rule, text))
            try:
                rule(text)
                if rule is _expression:
                    costs[text] = steps_of(text)
            except _ERRORS as error:
                raise FileFormatError(
                    f"the program holds the text {text[:100]!r}",
                    where=where,
                    why=f"it is no {rule.__name__.strip('_')} that torch.export writes"
                    + (f": {error}" if isinstance(error, _Refused) else ""),
                    next="it is damaged, or could run code: export the module again, with"
                    " torch.export.save(torch.export.export(module, inputs), path)",
                ) from None
            except UnsupportedProgramError as error:
                error.where = where
                raise
        steps += costs.get(text, 0) if rule is _expression else 0
    if steps > _MOST_STEPS + nbytes // _BYTES_OF_STEP:
        raise FileFormatError(
            "the sizes of the file take too long to compute",
            where=where,
            why=f"torch would take about {steps} steps to read them",
            next="export the module with fewer dynamic sizes, or smaller expressions of them",
        )


class _Refused(Exception):
    """Why a text is refused."""


_ERRORS = (_Refused, RecursionError, SyntaxError, ValueError, KeyError, TypeError)


def _texts(value: Any, rule: Callable[[str], None] | None = None) -> Iterator[tuple[Any, str]]:
    """The texts in a value, each with the function that checks it."""
    if isinstance(value, str):
        yield rule or _name, value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, rule)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield _path, key
            yield from _texts(item, rule)
    elif dataclasses.is_dataclass(value):
        kind = type(value).__name__
        for name, item in vars(value).items():
            if (kind, name) == ("Node", "metadata"):
                for key in set(item) - _KEPT_METADATA:
                    del item[key]
            if not name.startswith("_"):  # the tag of a union
                yield from _texts(item, _RULES.get((kind, name)))


# -- rules ---------------------------------------------------------------------------------------
def _free(text: str) -> None:
    """A text that is only compared or shown."""


def _name(text: str) -> None:
    if not _NAME.fullmatch(text):
        raise _Refused("letters, digits and _ are accepted")


def _path(text: str) -> None:
    if not _PATH.fullmatch(text):
        raise _Refused("quotes and control characters are refused")


def _operator(text: str) -> None:
    import torch

    if text in _FUNCTIONS:
        return
    name = text.removeprefix("torch.ops.")
    space, _, base = name.partition(".")
    if name != text and space == "higher_order" and base in _HIGHER_ORDER:
        return
    if name == text or not pure_operators.is_name(name):
        raise _Refused(f"operators of torch.ops and {len(_FUNCTIONS)} functions are accepted")
    _, overload = pure_operators.overload(torch, name)
    if overload is None:
        raise UnsupportedProgramError(
            f"torch does not know the operator {name}",
            next="import the library that defines it (for the command purevk: --import MODULE)",
        )
    reason = pure_operators.untraceable(overload)
    if reason is not None:
        raise _Refused(reason)


def _expression(text: str) -> None:
    """An expression of sizes."""
    if not re.fullmatch(r"[\w ,.()=+\-*/%<>&|~'!]*", text, re.ASCII):
        raise _Refused("it has characters that no such expression has")
    for node in ast.walk(ast.parse(text, mode="eval")):
        if not isinstance(node, _ARITHMETIC):
            raise _Refused(f"{type(node).__name__} is refused")
        if isinstance(node, ast.Name):
            is_function = node.id in _SYMPY or node.id.startswith(("OpaqueUnaryFn_", "BitwiseFn_"))
            if not is_function and not _SYMBOL.fullmatch(node.id):
                raise _Refused(f"{node.id} is refused")
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                if not re.fullmatch(r"[a-z]+\d+|-?[\d.]+(?:e[+-]?\d+)?", node.value, re.ASCII):
                    raise _Refused("a text in it is refused")
            elif type(node.value) not in (int, float, bool):
                raise _Refused(f"{node.value!r} is refused")
        elif isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise _Refused("a call is refused")
        _check_power(node)


def _check_power(node: ast.AST) -> None:
    """Refuses powers that are numbers of very many digits."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        base, power = node.left, node.right
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _POWERS:
        if len(node.args) != 2:
            raise _Refused("a power has two arguments")
        base, power = node.args
    else:
        return
    text = ast.unparse(power)
    number = re.fullmatch(
        r"(?:Integer\()?-?(\d+)\)?|Rational\(-?(\d+), (\d+)\)|Float\(.*\)|[\d.]+", text
    )
    numbers = [int(each) for each in (number.groups() if number else ()) if each]
    if (number is None and "Symbol(" not in text and not _SYMBOL.fullmatch(text)) or any(
        exponent > _MOST_POWER for exponent in numbers
    ):
        raise _Refused(f"a power above {_MOST_POWER} is refused")
    if any(getattr(part, "id", "") in _POWERS for part in ast.walk(base)):
        raise _Refused("a power of a power is refused")


def _guard(text: str) -> None:
    """A condition on the sizes of the inputs."""
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Name):
            accepted = node.id in _GUARD_NAMES
        elif isinstance(node, ast.Attribute):
            accepted = node.attr in _GUARD_ATTRIBUTES
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            accepted = _PATH.fullmatch(node.value) is not None
        else:
            accepted = isinstance(node, (*_ARITHMETIC, ast.Subscript)) and not isinstance(
                node, ast.keyword
            )
        if not accepted:
            raise _Refused(f"{ast.unparse(node)} is refused")


def _structure(text: str) -> None:
    """The structure of inputs or outputs, as JSON."""
    _, root = json.loads(text)
    _check_context(root)
    if len(root["children_spec"]) == 2:
        context = root["children_spec"][1]["context"]
        for keyword in json.loads(context) or () if isinstance(context, str) else ():
            _name(keyword)


def _check_context(value: Any) -> None:
    """Refuses what makes torch import a module, and texts that it would write into source."""
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except ValueError:
            _path(value)
        else:
            if not isinstance(inner, str):
                _check_context(inner)
            else:
                _path(inner)
    elif isinstance(value, list):
        for item in value:
            _check_context(item)
    elif isinstance(value, dict):
        module = value.get("default_factory_module", "builtins")
        if module != "builtins" or value.get("default_factory_name", "int") not in _FACTORIES:
            raise _Refused("a factory of another module")
        if "__enum__" in value:
            raise _Refused("enumerations are keys in it; use texts or numbers")
        for key, item in value.items():
            _path(key)
            _check_context(item)


_FACTORIES = ("dict", "float", "int", "list", "set", "str", "tuple")
_RULES: dict[tuple[str, str], Callable[[str], None]] = {
    ("SymExpr", "expr_str"): _expression,
    ("Node", "target"): _operator,
    ("Node", "metadata"): _free,
    ("Argument", "as_operator"): _operator,
    ("Argument", "as_string"): _free,
    ("Argument", "as_strings"): _free,
    ("ConstantValue", "as_string"): _free,
    ("CustomObjArgument", "class_fqn"): _path,
    ("InputToParameterSpec", "parameter_name"): _path,
    ("InputToBufferSpec", "buffer_name"): _path,
    ("InputToTensorConstantSpec", "tensor_constant_name"): _path,
    ("InputToCustomObjSpec", "custom_obj_name"): _path,
    ("BufferMutationSpec", "buffer_name"): _path,
    ("ParameterMutationSpec", "parameter_name"): _path,
    ("GradientToParameterSpec", "parameter_name"): _path,
    ("UserInputMutationSpec", "user_input_name"): _path,
    ("ModuleCallEntry", "fqn"): _path,
    ("ModuleCallSignature", "in_spec"): _structure,
    ("ModuleCallSignature", "out_spec"): _structure,
    ("ExportedProgram", "guards_code"): _guard,
}
