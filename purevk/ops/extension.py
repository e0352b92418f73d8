"""Operators from outside: what a user registers, on the GPU or the CPU. docs/extending.md has
complete examples."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from purevk.dtypes import DType
from purevk.errors import InputError
from purevk.ir import Arg, Node, Size, Value
from purevk.lower.copies import dense_operand
from purevk.lower.declarations import buffer, element_features
from purevk.lower.lowering import Lowering, Operand
from purevk.lower.numbers import bits_of
from purevk.ops import registry
from purevk.ops.elementwise.pointwise import pointwise_operator
from purevk.ops.executors import executors, full_name
from purevk.ops.registry import Kernel, Operator
from purevk.paths import path_text
from purevk.shaders.declarations import macro_name
from purevk.shaders.templates import add_template, template_interface
from purevk.tuning import DeviceTraits

_MAX_NUMBERS = 32  # words of the push constants
_FLOATS = ("float32", "float16", "bfloat16")
_own: dict[str, tuple[str, ...]] = {}  # operators registered here, with the dtypes that they take
_withdrawn: dict[str, Operator] = {}  # purevk's own operators that were taken away


@dataclass(frozen=True)
class RegisteredOp:
    """An operator that purevk knows.

    Attributes:
        name: "namespace.op.overload"; names: others of the same operator.
        form: how it runs: "pointwise", "view", "rewrite" or "kernel" on the GPU, "cpu" on the CPU.
        origin: "purevk", or "user" for one that was registered from outside.
        dtypes: those of its tensors on the GPU; None where each node is judged by itself (`purevk
            ops --check`).
        cpu_function: whether `register_executor` was called for it.
    """

    name: str
    names: tuple[str, ...]
    form: str
    origin: str
    dtypes: tuple[str, ...] | None
    cpu_function: bool


def list_registered_ops() -> tuple[RegisteredOp, ...]:
    """All operators with a definition or a registered CPU function, sorted by name. Every other operator
    of `torch.ops` runs on the CPU through torch."""
    functions = {executor.name for executor in executors()}
    found = []
    for each in registry.definitions():
        form = "cpu" if each.form is None else type(each.form).__name__.lower()
        origin = "user" if each.name in _own else "purevk"
        known = any(name in functions for name in (each.name, *each.names))
        found.append(RegisteredOp(each.name, each.names, form, origin, _own.get(each.name), known))
    for name in functions:
        if registry.find(name) is None:
            found.append(RegisteredOp(name, (), "cpu", "user", None, True))
    return tuple(sorted(found, key=lambda each: each.name))


def unregister(name: str) -> None:
    """Removes an operator's definition, if it has one."""
    definition = registry.find(full_name(name))
    if definition is not None:
        registry.unregister(definition.name)
        if definition.name in _own:
            del _own[definition.name]
        else:
            _withdrawn[definition.name] = definition


def any_changed() -> bool:
    """Whether operators for the device are others than purevk's own: the user has registered one, or
    taken one away."""
    return any(registry.find(name) is not None for name in _own) or any(
        registry.find(name) is not definition for name, definition in _withdrawn.items()
    )


def _register(definition: Operator, dtypes: tuple[str, ...], replace: bool) -> None:
    if replace:
        for name in (definition.name, *definition.names):
            unregister(name)
    registry.register(dataclasses.replace(definition, of_user=True))
    _own[definition.name] = dtypes


# -- an expression -------------------------------------------------------------------------------
def register_pointwise(
    name: str,
    glsl: str | Callable[..., str],
    arguments: str = "x",
    *,
    compute: str = "promote",
    out: str | None = None,
    names: Sequence[str] = (),
    replace: bool = False,
) -> None:
    """Registers an operator on one element at a time, such as
    `register_pointwise("mylib.gate", "x * pv_sigmoid(y * ACC(slope))", "x, y, slope=1.0")`.

    Chains of such operators become one kernel, and join the matmul or convolution before them.

    Args:
        name: "namespace.op" or "namespace.op.overload".
        glsl: the expression. `x`, `y` and `z` are elements of the tensors, which broadcast; other
            names are the numbers of a call; `ACC(c)` is a literal, or a number of the call, in the
            type that is computed with. The functions of `glsl/core/math.glslh` (`pv_exp`, `pv_sigmoid`,
            ...) may be used. A function gives another text for other arguments: it gets all of them
            by name, and `dtype`, the one that is computed in.
        arguments: the operator's arguments in the order of its schema: `x`, `y`, `z` for tensors
            (or numbers), other names, with defaults if they have any, for numbers and strings.
        compute: the dtype that is computed in: "promote" (as torch promotes the tensors), "float"
            (the same, integers become float32), or the name of a dtype.
        out: the name of the result's dtype; None: the one that is computed in.
        names: other names of the same operator.
        replace: replace the definition of that name.

    Raises:
        InputError: the arguments cannot be read.
        GraphError: the name is taken.
    """
    parameters = _parameters(name, arguments)
    tensors = [parameter.name for parameter in parameters if parameter.name in "xyz"]
    if not tensors:
        raise InputError(
            f"{name} has no tensor among its arguments {arguments!r}",
            why='one called "x" is expected',
        )
    kind = compute if compute in ("promote", "float") else _dtype(name, compute)
    definition = pointwise_operator(
        full_name(name),
        glsl,
        parameters,
        kind,
        None if out is None else _dtype(name, out),
        [full_name(n) for n in names],
    )
    _register(
        definition,
        tuple(
            each.name
            for each in DType
            if not (each.is_complex or each.is_float8 or each is DType.float64)
        ),
        replace,
    )


def _parameters(name: str, arguments: str) -> list[inspect.Parameter]:
    """The parameters that a text such as "x, y, slope=1.0" names."""
    try:
        given = ast.parse(f"def f({arguments}): pass").body[0].args  # type: ignore[attr-defined]
        if given.vararg or given.kwarg or given.posonlyargs or given.kwonlyargs:
            raise ValueError("only names with or without defaults are expected")
        defaults = [inspect.Parameter.empty] * (len(given.args) - len(given.defaults))
        defaults += [ast.literal_eval(default) for default in given.defaults]
    except (SyntaxError, ValueError) as error:
        raise InputError(
            f"the arguments {arguments!r} of {name} cannot be read",
            why=str(error),
            next='write them as "x, y, slope=1.0"',
        ) from None
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [
        inspect.Parameter(each.arg, kind, default=default)
        for each, default in zip(given.args, defaults)
    ]


def _dtype(name: str, text: str) -> DType:
    if text not in DType.__members__:
        raise InputError(
            f"{text!r} is no dtype", where=name, why=f"known: {', '.join(DType.__members__)}"
        )
    return DType[text]


# -- a template ----------------------------------------------------------------------------------
def register_kernel(
    name: str,
    template: str | os.PathLike[str],
    shape: Callable[..., Any],
    *,
    params: Callable[..., Mapping[str, Size | float]] | None = None,
    threads: Callable[..., Size] | None = None,
    groups: Callable[..., tuple[Size, Size, Size]] | None = None,
    local_size: int = 64,
    macros: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None = None,
    specialize: Sequence[str] = (),
    dtypes: Sequence[str] = _FLOATS,
    features: Sequence[str] = (),
    names: Sequence[str] = (),
    replace: bool = False,
) -> None:
    """Registers an operator with a compute shader of its own.

    The functions here get the operator's arguments by name, a `TensorType` (`dtype`, `dims`,
    `numel`) for each tensor; sizes may be expressions over the sizes of a call, with which one
    calculates as with integers.

    Args:
        name: "namespace.op" or "namespace.op.overload".
        template: the shader's text, or the path of its file. It includes "kernel.glslh", which
            declares all that is passed (docs/extending.md lists it).
        shape: gives the results' types (one `TensorType`, or a tuple); its parameters are the
            operator's schema.
        params: numbers for the shader by name, as push constants: integers, sizes and floats.
        threads: invocations with work; None: the elements of the first result.
        groups: workgroups along x, y and z, instead of `threads`.
        local_size: invocations of a workgroup.
        macros: further macros of the shader.
        specialize: names among `params` that become constants of the pipeline where they are known.
        dtypes: those of the tensors that the shader takes and gives; nodes with others run on the
            CPU. bfloat16 is passed as float32.
        features: optional features of the device that it needs (names as `purevk info --all`
            prints them).
        names: other names of the same operator.
        replace: replace the definition of that name.

    Raises:
        InputError: there is no such file, or an unknown dtype.
        GraphError: the name is taken.
    """
    full = full_name(name)
    text, folder = _read(full, template)
    for dtype in dtypes:
        _dtype(name, dtype)
    kernel = _Template(
        add_template(full, text, folder),
        shape,
        params,
        threads,
        groups,
        local_size,
        macros,
        tuple(specialize),
        frozenset(dtypes),
        tuple(features),
    )
    form = Kernel(kernel.lower, supports=kernel.supports, bfloat16=False)
    _register(
        Operator(full, shape, form, names=tuple(full_name(each) for each in names)),
        tuple(dtypes),
        replace,
    )


def _read(name: str, template: str | os.PathLike[str]) -> tuple[str, Path | None]:
    if isinstance(template, str) and "\n" in template:
        return template, None
    path = Path(path_text(template))
    try:
        return path.read_text(encoding="utf-8"), path.parent
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the template of {name} cannot be read", where=str(path), why=str(error)
        ) from None


@dataclass(frozen=True)
class _Template:
    template: str
    shape: Callable[..., Any]
    params: Callable[..., Mapping[str, Size | float]] | None
    threads: Callable[..., Size] | None
    groups: Callable[..., tuple[Size, Size, Size]] | None
    local_size: int
    macros: Mapping[str, Any] | Callable[..., Mapping[str, Any]] | None
    specialize: tuple[str, ...]
    dtypes: frozenset[str]
    features: tuple[str, ...]

    def supports(self, node: Node, traits: DeviceTraits) -> str | None:
        """Why a node cannot run with this shader."""
        for value in (*node.inputs, *node.results):
            if value.type.dtype.name not in self.dtypes:
                return f"its kernel takes no {value.type.dtype.name}"
        missing = [feature for feature in self.features if not traits.has(feature)]
        if missing:
            return f"its kernel needs the device feature {', '.join(missing)}"
        if self.local_size > traits.max_invocations:
            return f"its kernel needs {self.local_size} invocations a workgroup, the device has {traits.max_invocations}"  # noqa: E501
        return None

    def lower(self, lowering: Lowering, node: Node) -> None:
        """Emits the dispatch."""
        definition = registry.definition_of(node)
        bound, typed = definition.bind(node.args), definition.typed(node.args)
        count = self.threads(**typed) if self.threads else node.results[0].type.numel
        if any(
            isinstance(size, int) and size == 0
            for size in (count, *(value.type.numel for value in node.results))
        ):
            return
        buffers = _Buffers(lowering)
        for name, arg in bound.items():
            buffers.argument(name.upper(), arg)
        for position, value in enumerate(node.results):
            name = "OUT" if len(node.results) == 1 else f"OUT{position}"
            buffers.result(name, lowering.operand(value))
        macros = self.macros(**typed) if callable(self.macros) else self.macros
        params: dict[str, Size] = {"COUNT": count}
        declared, fixed = [], []
        numbers = {**(self.params(**typed) if self.params else {}), **buffers.offsets}
        for name, number in numbers.items():
            word = f"{name}_bits" if isinstance(number, float) else name
            if name in self.specialize:
                fixed.append(word)
            declared.append(f"PARAM({len(params)}, {word})")
            if isinstance(number, float):
                declared.append(f"float {name} = intBitsToFloat({word});")
            params[word] = _word(number)
        if len(params) > _MAX_NUMBERS:
            raise InputError(
                f"{node.op} has {len(params) - 1} parameters",
                why=f"a template has at most {_MAX_NUMBERS - 1}, offsets of its tensors included",
                next="pass what follows from others as macros",
            )
        given = {**buffers.macros(), "PARAMETERS": " ".join(declared), **(macros or {})}
        known = template_interface(self.template).macros
        lowering.dispatch(
            self.template,
            buffers.by_name,
            macros={name: text for name, text in given.items() if macro_name(name) in known},
            helpers={name: text for name, text in given.items() if macro_name(name) not in known},
            params=params,
            local=self.local_size,
            specialize=fixed,
            grid=self.groups(**typed)
            if self.groups
            else lowering.linear_grid(count, self.local_size),
        )


def _word(value: Size | float) -> Size:
    return bits_of(value) if isinstance(value, float) else value


class _Buffers:
    """The buffers of a dispatch, their declarations and the macros that read and write them."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.by_name: dict[str, tuple[Operand, str]] = {}
        self.offsets: dict[str, Size] = {}
        self._text: dict[str, str] = {}
        self._declared: list[str] = []

    def argument(self, name: str, arg: Arg) -> None:
        """A tensor; of a list of them each, as NAME0, NAME1, ..."""
        if isinstance(arg, tuple):
            self._text[f"COUNT_{name}"] = str(len(arg))
            for number, item in enumerate(arg):
                self.argument(f"{name}{number}", item)
        elif isinstance(arg, Value):
            operand = dense_operand(self.lowering, arg)
            self._text[f"HAS_{name}"] = "1"
            self._add(name, operand, "r")
        elif arg is None:
            self._text[f"HAS_{name}"] = "0"

    def result(self, name: str, operand: Operand) -> None:
        """A result; it may be read too."""
        element = self._add(name, operand, "rw")
        value = {DType.bool: "(v) ? 1 : 0", DType.bfloat16: "pv_bfloat16_bits(v)"}.get(
            operand.dtype, "v"
        )
        if operand.dtype.itemsize < 4:
            value = f"pv_opaque({value})"
        self._text[f"WRITE_{name}(i, v)"] = f"{element} = {operand.dtype.glsl}({value})"

    def _add(self, name: str, operand: Operand, mode: str) -> str:
        buffer_name, dtype = name.lower(), operand.dtype
        self._declared.append(buffer(len(self.by_name), buffer_name, dtype.glsl, mode))
        self.by_name[buffer_name] = (operand, mode)
        self._text[f"b{len(self.by_name) - 1}"] = f"buf_{buffer_name}"
        element = f"buf_{buffer_name}[i]"
        if not (isinstance(operand.offset, int) and operand.offset == 0):
            self.offsets[f"{buffer_name}_offset"] = operand.offset
            element = f"buf_{buffer_name}[(i) + {buffer_name}_offset]"
        read = f"({element} != 0)" if dtype is DType.bool else f"{dtype.acc}({element})"
        self._text.update({f"T_{name}": dtype.glsl, f"READ_{name}(i)": read})
        return element

    def macros(self) -> dict[str, str]:
        """All of them, and what the element types need of the compiler."""
        features = element_features({operand.dtype for operand, _ in self.by_name.values()})
        features.pop("HAS_FLOAT64", None)  # a template of a user includes double.glslh itself
        return {**self._text, "BUFFERS": " ".join(self._declared), **features}
