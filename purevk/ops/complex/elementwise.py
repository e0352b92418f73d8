"""Pointwise operators of complex numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from purevk.dtypes import DType
from purevk.ir import Dim, Node, TensorType, Value
from purevk.lower.expression import Term
from purevk.ops.builder import Builder
from purevk.ops.complex.algebra import Algebra, Function, Z
from purevk.ops.complex.split import (
    BY_RULE,
    Made,
    NoKernelError,
    Pairs,
    Parts,
    Split,
    apply_by,
    computing,
)
from purevk.ops.complex.views import AS_COMPLEX, AS_REAL
from purevk.ops.promotion import real_dtype, result_type
from purevk.ops.registry import ShapeError, define, rewrite_node
from purevk.ops.shapes import broadcast_of


class Applied:
    """One application of a pointwise operator: its operands, in a program."""

    def __init__(self, split: Split, node: Node, dtype: DType | None = None) -> None:
        self.split, self.node = split, node
        self.program = Algebra(split.builder, node.result.type.dims, dtype or computing(node))

    def operand(self, name: str) -> Z:
        """An argument: a tensor, complex or real, or a number."""
        given = self.node.tensor_or_scalar(name)
        if not isinstance(given, Value):
            return self.program.number(given)
        if not given.type.dtype.is_complex:
            return Z(self.program.tensor(given), self.program.real(0.0))
        parts = self.split.parts(given)
        return Z(self.program.tensor(parts.real), self.program.tensor(parts.imaginary))

    def complex(self, made: Z) -> Parts:
        """The result as complex numbers."""
        out = real_dtype(self.node.result.type.dtype)
        computed = self.program.dtype
        real, imaginary = self.program.emit([(term, computed, out) for term in made])
        return Parts(real, imaginary)

    def real(self, made: Term) -> Value:
        """The result as real numbers."""
        return self.program.emit([(made, self.program.dtype, self.node.result.type.dtype)])[0]

    def bool(self, made: Term) -> Value:
        """The result as bools."""
        return self.program.emit([(made, DType.bool, self.node.result.type.dtype)])[0]


def _operands(node: Node) -> DType:
    """The dtype of the parts in which the operands of a comparison are compared."""
    given = [node.tensor_or_scalar(name) for name in ("x", "y")]
    return real_dtype(
        result_type([each.type if isinstance(each, Value) else each for each in given])
    )


# -- functions of one number ---------------------------------------------------------------------
_FUNCTIONS: dict[str, Function] = {
    "neg": Algebra.neg,
    "exp": Algebra.exp,
    "exp2": lambda p, x: p.exp(p.scaled(x, p.real(math.log(2)))),
    "expm1": Algebra.expm1,
    "log": Algebra.log,
    "log2": lambda p, x: p.scaled(p.log(x), p.real(1 / math.log(2))),
    "log10": lambda p, x: p.scaled(p.log(x), p.real(1 / math.log(10))),
    "log1p": Algebra.log1p,
    "sqrt": Algebra.sqrt,
    "rsqrt": lambda p, x: p.reciprocal(p.sqrt(x)),
    "reciprocal": Algebra.reciprocal,
    "square": Algebra.square,
    "sin": Algebra.sin,
    "cos": Algebra.cos,
    "tan": Algebra.tan,
    "sinh": Algebra.sinh,
    "cosh": Algebra.cosh,
    "tanh": Algebra.tanh,
    "asin": Algebra.asin,
    "acos": Algebra.acos,
    "atan": Algebra.atan,
    "asinh": Algebra.asinh,
    "acosh": Algebra.acosh,
    "atanh": Algebra.atanh,
    "sigmoid": Algebra.sigmoid,
    "silu": lambda p, x: p.mul(x, p.sigmoid(x)),
    "_conj": Algebra.conj,
    "sgn": Algebra.sgn,
}


def _unary(function: Function) -> Callable[[Split, Node], Made]:
    def apply(split: Split, node: Node) -> Made:
        applied = Applied(split, node)
        return applied.complex(function(applied.program, applied.operand("x")))

    return apply


# -- operators that are of use for complex numbers alone ------------------------------------------
def _same(x: TensorType) -> TensorType:
    return x


rewrite_node("aten._neg_view.default", _same, "aten._neg_view_copy.default")(
    lambda builder, node: builder.aten.neg(node.tensor("x"))
)
for _name, _function in _FUNCTIONS.items():
    apply_by(f"aten.{_name}.default")(_unary(_function))
apply_by("aten._neg_view.default")(_unary(Algebra.neg))


def _part_shape(x: TensorType) -> TensorType:
    return x.with_dtype(real_dtype(x.dtype))


@rewrite_node("aten.real.default", _part_shape)
@rewrite_node("aten.resolve_conj.default", _same, "aten.resolve_neg.default")
@rewrite_node(
    "aten._conj.default",
    _same,
    "aten._conj_copy.default",
    "aten.conj.default",
    "aten._conj_physical.default",
    "aten.conj_physical.default",
)
def _alias(builder: Builder, node: Node) -> Value:
    return node.tensor("x")


define("aten.imag.default", _part_shape, BY_RULE)


@apply_by("aten.real.default")
def _real(split: Split, node: Node) -> Made:
    return split.parts(node.tensor("x")).real


@apply_by("aten.imag.default")
def _imaginary(split: Split, node: Node) -> Made:
    return split.parts(node.tensor("x")).imaginary


@apply_by(AS_REAL)
def _as_real(split: Split, node: Node) -> Made:
    return split.pairs(node.tensor("x"))


@apply_by(AS_COMPLEX)
def _as_complex(split: Split, node: Node) -> Made:
    return Pairs(node.tensor("x"))


def _joined_shape(x: TensorType, y: TensorType) -> TensorType:
    dtype = x.dtype.complex_dtype
    if dtype is None or x.dtype is not y.dtype:
        raise ShapeError(f"complex numbers of {x} and {y}")
    return TensorType(dtype, broadcast_of((x, y)))


define("aten.complex.default", _joined_shape, BY_RULE)
define("aten.polar.default", _joined_shape, BY_RULE)


@apply_by("aten.complex.default")
def _complex(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    return applied.complex(Z(applied.operand("x").re, applied.operand("y").re))


@apply_by("aten.polar.default")
def _polar(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    return applied.complex(applied.program.polar(applied.operand("x").re, applied.operand("y").re))


@apply_by("aten.abs.default")
def _abs(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    return applied.real(applied.program.abs(applied.operand("x")))


@apply_by("aten.angle.default")
def _angle(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    return applied.real(applied.program.angle(applied.operand("x")))


def _tests(name: str, glsl: str) -> None:
    def apply(split: Split, node: Node) -> Made:
        applied = Applied(split, node)
        return applied.bool(applied.program.test(glsl, *applied.operand("x")))

    apply_by(f"aten.{name}.default")(apply)


_tests("isnan", "(pv_isnan($0) || pv_isnan($1))")
_tests("isinf", "(pv_isinf($0) || pv_isinf($1))")
_tests("isfinite", "!(pv_isnan($0) || pv_isnan($1) || pv_isinf($0) || pv_isinf($1))")
_tests("logical_not", "($0 == 0.0 && $1 == 0.0)")


# -- two operands --------------------------------------------------------------------------------
@apply_by("aten.add.Tensor")
def _add(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    return applied.complex(applied.program.add(applied.operand("x"), _times_alpha(applied, "y")))


@apply_by("aten.sub.Tensor")
def _sub(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    return applied.complex(applied.program.sub(applied.operand("x"), _times_alpha(applied, "y")))


@apply_by("aten.rsub.Scalar")
def _rsub(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    return applied.complex(applied.program.sub(applied.operand("y"), _times_alpha(applied, "x")))


def _times_alpha(applied: Applied, name: str) -> Z:
    alpha, operand = applied.node.tensor_or_scalar("alpha"), applied.operand(name)
    return operand if alpha == 1 else _product(applied, "alpha", operand)


def _is_real(applied: Applied, name: str) -> bool:
    """Whether the imaginary part of an argument is 0."""
    given = applied.node.tensor_or_scalar(name)
    if isinstance(given, Value):
        return not given.type.dtype.is_complex
    return not isinstance(given, complex)


def _product(applied: Applied, name: str, other: Z) -> Z:
    """An argument times another number. torch multiplies by a real tensor as by a complex one, of
    which the imaginary part is 0: the same but for infinities."""
    operand = applied.operand(name)
    if _is_real(applied, name):
        return applied.program.scaled(other, operand.re)
    return applied.program.mul(operand, other)


@apply_by("aten.mul.Tensor")
def _mul(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    if _is_real(applied, "x"):
        return applied.complex(_product(applied, "x", applied.operand("y")))
    return applied.complex(_product(applied, "y", applied.operand("x")))


@apply_by("aten.div.Tensor")
def _div(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    x, program = applied.operand("x"), applied.program
    if _is_real(applied, "y"):
        y = applied.operand("y").re
        text = "pv_quotient($0, $1)"
        return applied.complex(Z(program.f(text, x.re, y), program.f(text, x.im, y)))
    return applied.complex(program.div(x, applied.operand("y")))


@apply_by("aten.pow.Tensor_Tensor")
def _pow(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    program, x = applied.program, applied.operand("x")
    exponent = node.tensor_or_scalar("y")
    if not isinstance(exponent, (Value, Dim)):
        known: dict[complex, Function] = {
            1: lambda p, x: x,
            2: Algebra.square,
            3: lambda p, x: p.mul(x, p.square(x)),
            0.5: Algebra.sqrt,
            -1: Algebra.reciprocal,
            -0.5: lambda p, x: p.reciprocal(p.sqrt(x)),
        }
        function = known.get(complex(exponent))
        if function is not None:
            return applied.complex(function(program, x))
    y = applied.operand("y")
    power = program.pow(x, y)
    if not isinstance(exponent, Value):  # torch gives 1 for the number 0 alone
        zero = program.test("($0 == 0.0 && $1 == 0.0)", y.re, y.im)
        power = program.choose(zero, program.number(1), power)
    return applied.complex(power)


def _compares(name: str, glsl: str) -> None:
    def apply(split: Split, node: Node) -> Made:
        applied = Applied(split, node, _operands(node))
        x, y = applied.operand("x"), applied.operand("y")
        return applied.bool(applied.program.test(glsl, x.re, x.im, y.re, y.im))

    apply_by(name)(apply)


_compares("aten.eq.Tensor", "($0 == $2 && $1 == $3)")
_compares("aten.ne.Tensor", "($0 != $2 || $1 != $3)")
for _name, _sign in {"and": "&&", "or": "||", "xor": "^^"}.items():
    _compares(
        f"aten.logical_{_name}.default",
        f"(($0 != 0.0 || $1 != 0.0) {_sign} ($2 != 0.0 || $3 != 0.0))",
    )


# -- three operands ------------------------------------------------------------------------------
@apply_by("aten.where.self")
def _where(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    test = applied.program.condition(node.tensor("cond"))
    return applied.complex(applied.program.choose(test, applied.operand("x"), applied.operand("y")))


@apply_by("aten.masked_fill.Scalar")
def _masked_fill(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    test = applied.program.condition(node.tensor("cond"))
    return applied.complex(applied.program.choose(test, applied.operand("y"), applied.operand("x")))


@apply_by("aten.addcmul.default")
def _addcmul(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    program = applied.program
    product = program.mul(applied.operand("y"), applied.operand("z"))
    return applied.complex(
        program.add(applied.operand("x"), program.mul(applied.operand("value"), product))
    )


@apply_by("aten.addcdiv.default")
def _addcdiv(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    program = applied.program
    product = program.mul(applied.operand("value"), applied.operand("y"))
    return applied.complex(
        program.add(applied.operand("x"), program.div(product, applied.operand("z")))
    )


@apply_by("aten.lerp.Scalar")
def _lerp(split: Split, node: Node) -> Made:
    applied = Applied(split, node)
    program, x = applied.program, applied.operand("x")
    step = program.sub(applied.operand("y"), x)
    return applied.complex(program.add(x, program.mul(applied.operand("z"), step)))


# -- conversions ---------------------------------------------------------------------------------
@apply_by("aten._to_copy.default")
def _to_copy(split: Split, node: Node) -> Made:
    x, out = node.tensor("x"), node.result.type.dtype
    if out.is_complex:
        if x.type.dtype.is_complex and split.has_pairs(x):
            return Pairs(split.pairs(x, out.component))
        return split.parts(x, out.component)
    if out is DType.bool:
        applied = Applied(split, node)
        return applied.bool(applied.program.test("($0 != 0.0 || $1 != 0.0)", *applied.operand("x")))
    return split.cast(split.parts(x).real, out)


@apply_by("aten.alias.default", "aten.resolve_conj.default", "aten.dropout.default")
def _same_elements(split: Split, node: Node) -> Made:
    x = node.tensor("x")
    if node.op == "aten.dropout.default" and node.bool("train"):
        raise NoKernelError("no kernel for dropout of complex numbers")
    if split.has_pairs(x):
        return Pairs(split.builder.aten.alias(split.pairs(x)))
    return split.parts(x)
