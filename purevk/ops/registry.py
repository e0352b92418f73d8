"""What an operator is: one definition, from which support checks, lowering, tests and `docs/ops.md` all
read.

A definition names the operator, gives its shape function (whose signature is the operator's schema), and
says how it runs, as one of five forms:

* `Pointwise`: an expression of GLSL per element; chains of these become one kernel.
* `View`: no data moves; the result is another layout of the same bytes.
* `Rewrite`: expressed by other operators.
* `Kernel`: a function that picks templates and emits dispatches.
* `Control`: sub-graphs, which the host runs by what it reads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict, TypeVar

from purevk.dtypes import DType
from purevk.errors import GraphError
from purevk.errors import ShapeError as ShapeError
from purevk.ir import Arg, Layout, Node, Size, TensorType, Value, map_values, schema, values_in
from purevk.lower.lowering import Lowering
from purevk.ops.facts import Moves, Rowwise, by_element
from purevk.ops.image_layout import LayoutQuery
from purevk.tuning import DeviceTraits

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from purevk.ops.builder import Builder

Types = TensorType | tuple[TensorType, ...] | None
Made = Value | Sequence[Value] | None  # the result(s) of a node
Order = tuple[int, ...]  # dims in the order of memory, outermost first
Supports = Callable[[Node, DeviceTraits], str | None]
_P = ParamSpec("_P")
_Expand = TypeVar("_Expand", bound=Callable[..., Made])


@dataclass(frozen=True)
class Pointwise:
    """One element at a time.

    Attributes:
        glsl: an expression over the operator's argument names; `ACC(c)` converts a literal to the
            computing type.
        compute: the type in which it is computed: "promote" (torch's promotion of the tensors and
            scalars), "float" (the same, with integers promoted to float32), "result" (the result's
            dtype), a dtype, or a function of the arguments that gives one of these.
        arithmetic: letters of the arguments that take part in float arithmetic alone. Only these
            may have the digits of float32 where the dtype is float16 or bfloat16, and a joined
            program computes them; all others are rounded to the dtype first.
    """

    glsl: str | Callable[..., str]
    compute: str | DType | Callable[..., str | DType] = "promote"
    arithmetic: str = ""


@dataclass(frozen=True)
class View:
    """Another layout of the same bytes.

    `layout(input_layout, input_type, result_types, *args)` returns one `Layout` per result, or None
    where the bytes have to move first (the runtime then copies the input into a dense tensor and
    asks again).
    """

    layout: Callable[..., tuple[Layout, ...] | None]


@dataclass(frozen=True)
class Rewrite:
    """Expressed by other operators: `expand(builder, node)` emits them and returns the result(s).

    `supports(node, traits)` returns a reason not to run this node on the device, or None.
    """

    expand: Callable[[Builder, Node], Made]
    supports: Supports | None = None


@dataclass(frozen=True)
class Kernel:
    """Dispatches of templates.

    Attributes:
        lower: `lower(lowering, node)` emits the dispatches.
        layouts: `layouts(node, query)` returns, for each result, the order of its dims in memory
            (outermost first), or None for row-major. None: all results are row-major.
        supports: `supports(node, traits)` returns a reason not to run this node on the device, or
            None.
        epilogue: a pointwise program on the result may be computed by this kernel, or a function of
            the node that says so; the operator then has the parameters `epilogue` (an `Expression`
            whose input 0 is the kernel's own result) and `extras` (its other inputs).
        bfloat16: the kernel reads and writes bfloat16; otherwise it is given float32 in its place.
        any_size: it cuts its work where a binding cannot span a tensor.
        windows: `windows(node)`: whether it does so where that is a result, and binds several windows
            where it is an operand.
        adapt: `adapt(node, orders, query)` returns the node as it suits the chosen orders of its
            results and what is read of these. Copies of constants that `query.copied` emits are
            made once, at load.
    """

    lower: Callable[[Lowering, Node], None]
    layouts: Callable[[Node, LayoutQuery], tuple[Order | None, ...]] | None = None
    supports: Supports | None = None
    epilogue: bool | Callable[[Node], bool] = False
    bfloat16: bool = True
    any_size: bool = False
    windows: Callable[[Node], bool] | None = None
    adapt: Callable[[Node, tuple[Order | None, ...], LayoutQuery], Node] | None = None


@dataclass(frozen=True)
class Control:
    """Control flow: the arguments hold sub-graphs, and the host says which of them run, and how
    often."""


Form = Pointwise | View | Rewrite | Kernel | Control


_INTEGER_TYPES = ("int", "int | None", "Size", "Size | None")
# Quantization parameters are tensors too, and a dim may be a list, so that they have no such type.
_INTEGER_NAMES = ("zero_point", "quant_min", "quant_max", "dim")


@dataclass(frozen=True)
class Operator:
    """The definition of an operator.

    Attributes:
        name: canonical name, an ATen overload such as "aten.add.Tensor", or "purevk.*" for those of
            purevk's own.
        shape: gives the results' types from the arguments (a `TensorType` for each tensor); raises
            `ShapeError`.
        form: how it runs; None: on the CPU only.
        mutates: positions of arguments (tensors, or lists of them) that are written in place.
        names: further names under which files know it.
        transient: the result is made in each call, even of constants: it takes more memory than they do.
        random: two applications to the same arguments give different results; or a function of
            the node that says so.
        of_user: it was registered from outside, so its arguments and results may be others than those
            of the operator.
        moves: where the elements of the results are from, or a function of the node that says so; None:
            what the form says, see `movement`.
        rowwise: what rows of the operands a row of the result needs; None: what the form says, see
            `rows`.
    """

    name: str
    shape: Callable[..., Types]
    form: Form | None
    mutates: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    transient: bool = False
    random: bool | Callable[[Node], bool] = False
    of_user: bool = False
    moves: Moves | Callable[[Node], Moves] | None = None
    rowwise: Rowwise | None = None

    @property
    def rows(self) -> Rowwise | None:
        """What rows of the operands a row of the result needs. Pointwise operators broadcast."""
        is_pointwise = isinstance(self.form, Pointwise) and not self.random
        return self.rowwise or (by_element if is_pointwise else None)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.shape)

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the arguments, in the schema's order."""
        return tuple(self.signature.parameters)

    def bind(self, args: tuple[Arg, ...], keywords: Mapping[str, Arg] = {}) -> dict[str, Arg]:
        """Arguments by name, defaults filled in.

        Raises:
            GraphError: there are too many, or one that the operator does not have.
        """
        names = self.parameters
        if len(args) > len(names):
            raise GraphError(
                f"{self.name} got {len(args)} arguments", why=f"it takes {len(names)}: {names}"
            )
        bound: dict[str, Arg] = dict(zip(names, args))
        for name, arg in keywords.items():
            if name not in names or name in bound:
                twice = name in bound
                raise GraphError(
                    f"{self.name} got {name}{' twice' * twice}", why=f"its arguments are {names}"
                )
            bound[name] = arg
        if len(bound) < len(names):
            parameters = self.signature.parameters
            for name in names[len(args) :]:
                default = parameters[name].default
                if default is not inspect.Parameter.empty:
                    bound.setdefault(name, default)
        return bound

    def integers(self, bound: dict[str, Arg]) -> dict[str, Arg]:
        """Arguments by name, those that are integers by the schema as such: a file may share one
        number, 3.0, between an operator that takes a real number and one that takes a dim."""
        for name, arg in bound.items():
            if isinstance(arg, float) and arg.is_integer():
                if (
                    name in _INTEGER_NAMES
                    or self.signature.parameters[name].annotation in _INTEGER_TYPES
                ):
                    bound[name] = int(arg)
        return bound

    def typed(self, args: tuple[Arg, ...]) -> dict[str, Any]:
        """Arguments by name, each tensor as its `TensorType`: what the shape function takes."""
        return {name: map_values(arg, _type_of) for name, arg in self.bind(args).items()}

    def infer(self, args: tuple[Arg, ...]) -> tuple[TensorType, ...]:
        """The types of the results, from the shape function."""
        types = self.shape(**self.typed(args))
        if types is None:
            return ()
        return types if isinstance(types, tuple) else (types,)


def _type_of(value: Value) -> TensorType:
    return value.type


@dataclass(frozen=True)
class DataDependentSize:
    """A size that follows from the values of the arguments.

    Attributes:
        upper: what it never exceeds; None: nothing is known of it.
        key: sizes of one node with the same key are one size.
        guess: where there is no bound, what to plan for at first.
        misstated: a bound that exporters state though it does not hold.
    """

    upper: Size | None
    key: int = 0
    guess: int = 64
    misstated: Size | None = None


@dataclass(frozen=True)
class DataDependentType:
    """The type of a result some of whose sizes follow from the values of the arguments."""

    dtype: DType
    dims: tuple[Size | DataDependentSize, ...]


class UnknownSizes(ShapeError):
    """The result's sizes follow from the values of the arguments.

    Args:
        text: why.
        types: the results' types; None: only the file that recorded the node knows more.
    """

    def __init__(
        self, text: str, types: Sequence[TensorType | DataDependentType] | None = None
    ) -> None:
        super().__init__(text)
        self.types = types

    def __reduce__(self) -> tuple[Any, ...]:
        return UnknownSizes, (self.what, self.types)


_definitions: dict[str, Operator] = {}
_in_double: dict[str, Callable[[Node], Callable[[Builder, Node], Made] | None]] = {}
_in_parts: dict[
    str, list[tuple[Callable[[Builder, Node], Made], Callable[[Node, DeviceTraits], bool]]]
] = {}
_canonical: dict[str, str] = {}


def register(definition: Operator) -> Operator:
    """Adds a definition. A name that is taken raises `GraphError`."""
    for name in (definition.name, *definition.names):
        if name in _canonical:
            raise GraphError(
                f"operator {name} is registered twice",
                why=f"its definition is that of {_canonical[name]}",
                next="give the new definition another name",
            )
    _definitions[definition.name] = definition
    for name in (definition.name, *definition.names):
        _canonical[name] = definition.name
        schema.declare(name, definition.shape)
    return definition


def _registers(make: Callable[_P, Operator]) -> Callable[_P, Operator]:
    return lambda *args, **keywords: register(make(*args, **keywords))


define = _registers(Operator)
"""Registers an operator; takes the attributes of `Operator`."""


def unregister(name: str) -> None:
    """Removes a definition, for tests and for those who replace one."""
    definition = _definitions.pop(_canonical[name])
    for each in (definition.name, *definition.names):
        del _canonical[each]
        schema.withdraw(each)


def find(name: str) -> Operator | None:
    """The definition of an operator by any of its names, or None."""
    canonical = _canonical.get(name)
    return None if canonical is None else _definitions[canonical]


def in_double(
    name: str,
    expand: Callable[[Builder, Node], Made],
    when: Callable[[Node], bool] = lambda node: True,
) -> None:
    """Has an operator whose kernel lacks double precision expressed by others where a value of a
    node is float64.

    `expand(builder, node)` as for `Rewrite`; `when(node)`: whether this node needs it.
    """
    _in_double[name] = lambda node: expand if when(node) else None


def in_parts(
    name: str,
    expand: Callable[[Builder, Node], Made],
    when: Callable[[Node, DeviceTraits], bool],
) -> None:
    """Has an operator expressed by others where a device cannot run it whole: the loops of its kernels
    would be too long, or a binding too large.

    `expand(builder, node)` as for `Rewrite`; `when(node, traits)`: whether this node needs it.
    """
    _in_parts.setdefault(name, []).append((expand, when))


def expansion(
    node: Node, traits: DeviceTraits | None = None
) -> Callable[[Builder, Node], Made] | None:
    """How other operators express a node; None if it is run as it is.

    Args:
        traits: of the device, for nodes that it runs in parts.
    """
    for expand, when in _in_parts.get(node.op, ()):
        if traits is not None and when(node, traits):
            return expand
    if node.op in _in_double and any(
        value.type.dtype is DType.float64 for value in (*node.inputs, *node.results)
    ):
        double = _in_double[node.op](node)
        if double is not None:
            return double
    definition = find(node.op)
    return (
        definition.form.expand
        if definition is not None and isinstance(definition.form, Rewrite)
        else None
    )


def definition_of(node: Node) -> Operator:
    """The definition of a node's operator; raises `GraphError` if it has none."""
    definition = find(node.op)
    if definition is None:
        raise GraphError(f"no operator {node.op}", where=node.source)
    return definition


def mutated(node: Node) -> tuple[Value, ...]:
    """The values that a node writes in place."""
    definition = find(node.op)
    if definition is None or not definition.mutates:
        return ()
    return tuple(values_in(node.args[at] for at in definition.mutates))


def is_view(node: Node) -> bool:
    """Whether a node only gives its input another layout."""
    definition = find(node.op)
    return definition is not None and isinstance(definition.form, View)


def movement(node: Node) -> Moves:
    """Where the elements of a node's results are from. A view has elements of its operand."""
    definition = find(node.op)
    if definition is None:
        return Moves.NO
    moves = definition.moves
    if moves is None:
        return Moves.SOME if isinstance(definition.form, View) else Moves.NO
    return moves if isinstance(moves, Moves) else moves(node)


def is_reshape(node: Node) -> bool:
    """Whether a node is a view with the elements of its operand in their order."""
    return is_view(node) and movement(node) is Moves.IN_ORDER


def is_random(node: Node) -> bool:
    """Whether each application of a node gives other results."""
    definition = find(node.op)
    if definition is None:
        return False
    random = definition.random
    return random if isinstance(random, bool) else random(node)


def is_control(node: Node) -> bool:
    """Whether a node is control flow."""
    return bool(node.graphs)


def definitions() -> Iterable[Operator]:
    """All definitions, sorted by name."""
    return [_definitions[name] for name in sorted(_definitions)]


class Facts(TypedDict, total=False):
    """Attributes of `Operator` that an operator which others express may have."""

    mutates: tuple[int, ...]
    transient: bool
    random: bool | Callable[[Node], bool]
    moves: Moves | Callable[[Node], Moves] | None
    rowwise: Rowwise | None


def rewrite(
    name: str,
    shape: Callable[..., Types],
    *names: str,
    supports: Supports | None = None,
    **facts: Unpack[Facts],
) -> Callable[[_Expand], _Expand]:
    """As `rewrite_node`, for a function that gets the builder, the node, and the arguments. Its
    results are converted to the node's dtypes, which a file may have chosen (int32 for int64)."""

    def decorate(expand: _Expand) -> _Expand:
        @functools.wraps(expand)
        def typed(builder: Builder, node: Node) -> tuple[Value, ...]:
            made = expand(builder, node, *node.args)
            values = (made,) if isinstance(made, Value) else made or ()
            return tuple(
                value
                if value.type.dtype is result.type.dtype
                else builder.aten._to_copy(value, result.type.dtype)
                for value, result in zip(values, node.results)
            )

        rewrite_node(name, shape, *names, supports=supports, **facts)(typed)
        return expand

    return decorate


def rewrite_node(
    name: str,
    shape: Callable[..., Types],
    *names: str,
    supports: Supports | None = None,
    **facts: Unpack[Facts],
) -> Callable[[_Expand], _Expand]:
    """Registers an operator that other operators express, by the function below it, which gets the
    builder and the node."""

    def decorate(expand: _Expand) -> _Expand:
        define(name, shape, Rewrite(expand, supports), names=names, **facts)
        return expand

    return decorate
