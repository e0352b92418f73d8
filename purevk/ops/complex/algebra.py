"""Arithmetic and functions of complex numbers, as steps of a pointwise program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from purevk.dtypes import DType
from purevk.ir import Dim, Scalar, Size, Value
from purevk.lower.expression import Term, convert, in_double, literal
from purevk.ops.builder import Builder
from purevk.ops.elementwise.program import Program


class Z(NamedTuple):
    """A complex number in a program."""

    re: Term
    im: Term


class Algebra:
    """A pointwise program over complex numbers in the making.

    Args:
        builder: takes the node.
        sizes: of the result; tensors broadcast to it.
        dtype: in which it computes, float32 or float64.
    """

    def __init__(self, builder: Builder, sizes: Sequence[Size], dtype: DType) -> None:
        self.dtype, self._program = dtype, Program(builder, sizes)
        self._steps = self._program.steps

    # -- leaves -----------------------------------------------------------------------------------
    def tensor(self, value: Value) -> Term:
        """An element of a real tensor, in the dtype of the program."""
        term = self._steps.rounded_input(value)
        return self._converted(term, value.type.dtype, self.dtype)

    def condition(self, value: Value) -> Term:
        """An element of a tensor of bools."""
        term = self._steps.input(value, value.type.dtype)
        return self._converted(term, value.type.dtype, DType.bool)

    def number(self, number: Scalar) -> Z:
        """A Python number."""
        if isinstance(number, Dim):
            term = self._steps.scalar(number, DType.int32)
            return Z(self._converted(term, DType.int32, self.dtype), self.real(0.0))
        whole = complex(number)
        return Z(self.real(whole.real), self.real(whole.imag))

    def real(self, number: float) -> Term:
        return self._steps.step(literal(number, self.dtype), [], self.dtype)

    def f(self, glsl: str, *operands: Term) -> Term:
        """A step that is written for float."""
        if glsl == "$0":
            return operands[0]
        text = in_double(glsl) if self.dtype is DType.float64 else glsl
        return self._steps.step(text, operands, self.dtype)

    def test(self, glsl: str, *operands: Term) -> Term:
        """A step that gives a bool."""
        text = in_double(glsl) if self.dtype is DType.float64 else glsl
        return self._steps.step(text, operands, DType.bool)

    def _converted(self, term: Term, source: DType, target: DType) -> Term:
        text = convert("$0", source, target)
        return term if text == "$0" else self._steps.step(text, [term], target)

    def emit(self, results: Sequence[tuple[Term, DType, DType]]) -> tuple[Value, ...]:
        """The results as tensors: for each a term, its dtype, and that of the tensor."""
        return self._program.emit_all(
            *((self._converted(term, source, target), target) for term, source, target in results)
        )

    # -- arithmetic -------------------------------------------------------------------------------
    def add(self, x: Z, y: Z) -> Z:
        return Z(self.f("($0 + $1)", x.re, y.re), self.f("($0 + $1)", x.im, y.im))

    def sub(self, x: Z, y: Z) -> Z:
        return Z(self.f("($0 - $1)", x.re, y.re), self.f("($0 - $1)", x.im, y.im))

    def neg(self, x: Z) -> Z:
        return Z(self.f("(-$0)", x.re), self.f("(-$0)", x.im))

    def conj(self, x: Z) -> Z:
        return Z(x.re, self.f("(-$0)", x.im))

    def scaled(self, x: Z, factor: Term) -> Z:
        return Z(self.f("($0 * $1)", x.re, factor), self.f("($0 * $1)", x.im, factor))

    def mul(self, x: Z, y: Z) -> Z:
        operands = (x.re, x.im, y.re, y.im)
        return Z(
            self.f("($0 * $2 - $1 * $3)", *operands),
            self.f("($0 * $3 + $1 * $2)", *operands),
        )

    def square(self, x: Z) -> Z:
        return Z(
            self.f("(($0 - $1) * ($0 + $1))", x.re, x.im), self.f("(2.0 * ($0 * $1))", x.re, x.im)
        )

    def div(self, x: Z, y: Z) -> Z:
        """Divides by the larger part of y first, so that no square overflows."""
        wide = self.test("(abs($0) >= abs($1))", y.re, y.im)
        big = self._choose(wide, y.re, y.im)
        small = self._choose(wide, y.im, y.re)
        ratio = self.f("($1 == 0.0 ? 0.0 : $0 / $1)", small, big)
        under = self.f("($0 + $1 * $2)", big, small, ratio)
        along = Z(
            self.f("($0 + $1 * $2)", x.re, x.im, ratio), self.f("($0 - $1 * $2)", x.im, x.re, ratio)
        )
        across = Z(
            self.f("($0 * $2 + $1)", x.re, x.im, ratio), self.f("($1 * $2 - $0)", x.re, x.im, ratio)
        )
        over = self.choose(wide, along, across)
        return Z(
            self.f("pv_quotient($0, $1)", over.re, under),
            self.f("pv_quotient($0, $1)", over.im, under),
        )

    def _choose(self, test: Term, x: Term, y: Term) -> Term:
        return self.f("($0 ? $1 : $2)", test, x, y)

    def choose(self, test: Term, x: Z, y: Z) -> Z:
        return Z(self._choose(test, x.re, y.re), self._choose(test, x.im, y.im))

    def reciprocal(self, x: Z) -> Z:
        return self.div(self.number(1), x)

    # -- polar form -------------------------------------------------------------------------------
    def abs(self, x: Z) -> Term:
        return self.f("pv_hypot($0, $1)", x.re, x.im)

    def angle(self, x: Z) -> Term:
        return self.f("pv_atan2($1, $0)", x.re, x.im)

    def polar(self, length: Term, angle: Term) -> Z:
        return Z(
            self.f("($0 * pv_cos($1))", length, angle), self.f("($0 * pv_sin($1))", length, angle)
        )

    def sgn(self, x: Z) -> Z:
        length = self.abs(x)
        text = "($1 == 0.0 ? 0.0 : $0 / $1)"
        return Z(self.f(text, x.re, length), self.f(text, x.im, length))

    # -- exponentials -----------------------------------------------------------------------------
    def _product(self, x: Term, y: Term) -> Term:
        """x * y, but 0 where one of them is 0 and the other infinite or NaN."""
        text = "($0 == 0.0 ? $0 * pv_copysign(1.0, $1) : $1 == 0.0 ? $1 * pv_copysign(1.0, $0) : $0 * $1)"
        return self.f(text, x, y)

    def _split(self, x: Term) -> tuple[Term, Term]:
        """x as far as its exponential is finite, and the exponential of what is left of its size."""
        limit = "709.0" if self.dtype is DType.float64 else "88.0"
        inner = self.f(f"(abs($0) > {limit} ? pv_copysign({limit}, $0) : $0)", x)
        return inner, self.f(f"(abs($0) > {limit} ? pv_exp(abs($0) - {limit}) : 1.0)", x)

    def exp(self, x: Z) -> Z:
        inner, rest = self._split(self.f("pv_max($0, 0.0)", x.re))
        power = self.f("($0 < 0.0 ? pv_exp($0) : pv_exp($1))", x.re, inner)
        cos, sin = self.f("pv_cos($0)", x.im), self.f("pv_sin($0)", x.im)
        cos = self.f("($0 == PV_INF && pv_isnan($1) ? 1.0 : $1)", x.re, cos)
        text = "($1 == 0.0 ? $1 : $2 == -PV_INF ? 0.0 : $0 * $1)"
        return Z(
            self._product(self.f(text, power, cos, x.re), rest),
            self._product(self.f(text, power, sin, x.re), rest),
        )

    def expm1(self, x: Z) -> Z:
        half = self.f("pv_sin(0.5 * $0)", x.im)
        return Z(
            self.f("(pv_expm1($0) * pv_cos($1) - 2.0 * $2 * $2)", x.re, x.im, half),
            self.f("(pv_exp($0) * pv_sin($1))", x.re, x.im),
        )

    def log(self, x: Z) -> Z:
        """Near the unit circle the logarithm of the length is that of 1 + (length^2 - 1)."""
        big = self.f("max(abs($0), abs($1))", x.re, x.im)
        small = self.f("min(abs($0), abs($1))", x.re, x.im)
        length = self.abs(self._lowered(x, big))
        near = self.f("(0.5 * pv_log1p(($0 - 1.0) * ($0 + 1.0) + $1 * $1))", big, small)
        far = self.f("($1 > 1e37 ? pv_log($0) + 1.3862943611198906 : pv_log($0))", length, big)
        real = self.f("($0 > 0.5 && $0 < 2.0 ? $1 : $2)", length, near, far)
        return Z(real, self.angle(x))

    def _lowered(self, x: Z, big: Term) -> Z:
        """A quarter of x where its length may be infinite."""
        return self.scaled(x, self.f("($0 > 1e37 ? 0.25 : 1.0)", big))

    def log1p(self, x: Z) -> Z:
        near = self.f("(0.5 * pv_log1p($0 * (2.0 + $0) + $1 * $1))", x.re, x.im)
        far = self.log(Z(self.f("(1.0 + $0)", x.re), x.im))
        small = self.test("(max(abs($0), abs($1)) < 0.5)", x.re, x.im)
        return Z(self._choose(small, near, far.re), far.im)

    def sqrt(self, x: Z) -> Z:
        big = self.f("max(abs($0), abs($1))", x.re, x.im)
        part = self._lowered(x, big)
        root = self.f("sqrt(0.5 * (abs($0) + $1))", part.re, self.abs(part))
        root = self.f("(pv_isinf($2) ? PV_INF : $1 > 1e37 ? 2.0 * $0 : $0)", root, big, x.im)
        other = self.f("($1 == 0.0 || pv_isinf($0) ? abs($0) : 0.5 * abs($0) / $1)", x.im, root)
        right = self.test("($0 >= 0.0)", x.re)
        return Z(
            self._choose(right, root, other),
            self.f("pv_copysign($0, $1)", self._choose(right, other, root), x.im),
        )

    def pow(self, x: Z, y: Z) -> Z:
        """0 to a power is 0, infinite or NaN by the sign of the real part of the power."""
        power = self.exp(self.mul(y, self.log(x)))
        zero = self.test("($0 == 0.0 && $1 == 0.0)", x.re, x.im)
        of_zero = Z(
            self.f("($0 > 0.0 ? 0.0 : $0 < 0.0 ? PV_INF : PV_NAN)", y.re),
            self.f("($0 > 0.0 ? 0.0 : PV_NAN)", y.re),
        )
        return self.choose(zero, of_zero, power)

    # -- trigonometry -----------------------------------------------------------------------------
    def sin(self, x: Z) -> Z:
        turned = self.sinh(Z(self.f("(-$0)", x.im), x.re))
        return Z(turned.im, self.f("(-$0)", turned.re))

    def cos(self, x: Z) -> Z:
        return self.cosh(Z(self.f("(-$0)", x.im), x.re))

    def sinh(self, x: Z) -> Z:
        return self._by_parts("pv_sinh($0)", "pv_cosh($0)", x)

    def cosh(self, x: Z) -> Z:
        return self._by_parts("pv_cosh($0)", "pv_sinh($0)", x)

    def _by_parts(self, real: str, imaginary: str, x: Z) -> Z:
        """The real part is a function of the real part of x times the cosine of the other part."""
        inner, rest = self._split(x.re)
        wave = "(pv_isinf($0) && pv_isnan($1) ? 1.0 : $1)"
        cos, sin = self.f(wave, x.re, self.f("pv_cos($0)", x.im)), self.f("pv_sin($0)", x.im)
        re = self._product(self.f(real, inner), cos)
        im = self._product(self.f(imaginary, inner), sin)
        return Z(self._product(re, rest), self._product(im, rest))

    def tanh(self, x: Z) -> Z:
        """By tan y and sinh x, which are exact near 0; far from it the limit."""
        far = self.test(
            "(abs($0) > 11.0)" if self.dtype is not DType.float64 else "(abs($0) > 22.0)", x.re
        )
        slope = self.f("pv_tan($0)", x.im)
        beta = self.f("(1.0 + $0 * $0)", slope)
        s = self.f("pv_sinh(abs($0) > 23.0 ? pv_copysign(23.0, $0) : $0)", x.re)
        rho = self.f("sqrt(1.0 + $0 * $0)", s)
        under = self.f("(1.0 + $0 * $1 * $1)", beta, s)
        waves = self.f("(4.0 * pv_sin($0) * pv_cos($0))", x.im)
        limit = Z(
            self.f("(pv_isinf($0) || !pv_isnan($1) ? pv_copysign(1.0, $0) : $1)", x.re, waves),
            self.f("(pv_isinf($0) ? 0.0 : $1 * pv_exp(-2.0 * abs($0)))", x.re, waves),
        )
        near = Z(
            self.f("($2 == 0.0 ? $2 : $0 * $1 * $2 / $3)", beta, rho, s, under),
            self.f("($0 == 0.0 ? $0 : $0 / $1)", slope, under),
        )
        return self.choose(far, limit, near)

    def tan(self, x: Z) -> Z:
        turned = self.tanh(Z(self.f("(-$0)", x.im), x.re))
        return Z(turned.im, self.f("(-$0)", turned.re))

    # The inverse functions follow Kahan, "Branch cuts for complex elementary functions".
    def _roots(self, x: Z) -> tuple[Z, Z]:
        """The square roots of 1 - x and 1 + x, whose imaginary parts keep the sign of zero."""
        minus = Z(self.f("(1.0 - $0)", x.re), self.f("(-$0)", x.im))
        return self.sqrt(minus), self.sqrt(Z(self.f("(1.0 + $0)", x.re), x.im))

    def asin(self, x: Z) -> Z:
        minus, plus = self._roots(x)
        far, length = self._far(x)
        near = Z(
            self.f("pv_atan2($0, $1)", x.re, self.mul(minus, plus).re),
            self.f("pv_asinh($0)", self.mul(self.conj(minus), plus).im),
        )
        beyond = Z(
            self.f("pv_atan2($0, abs($1))", x.re, x.im),
            self.f("pv_copysign($0, $1)", length, x.im),
        )
        return self.choose(far, beyond, near)

    def _far(self, x: Z) -> tuple[Term, Term]:
        """Whether 1 is nothing beside the square of x, which may be infinite, and log(2 |x|)."""
        far = self.test("(max(abs($0), abs($1)) > 1e9)", x.re, x.im)
        return far, self.f("($0 + 0.6931471805599453)", self.log(x).re)

    def acos(self, x: Z) -> Z:
        minus, plus = self._roots(x)
        far, length = self._far(x)
        im = self.f("pv_asinh($0)", self.mul(self.conj(plus), minus).im)
        near = Z(self.f("(2.0 * pv_atan2($0, $1))", minus.re, plus.re), im)
        beyond = Z(
            self.f("pv_atan2(abs($1), $0)", x.re, x.im),
            self.f("pv_copysign($0, -$1)", length, x.im),
        )
        return self.choose(far, beyond, near)

    def atanh(self, x: Z) -> Z:
        far, length = self.test("(max(abs($0), abs($1)) > 1e18)", x.re, x.im), self.abs(x)
        size = self.f("abs($0)", x.re)
        gap = self.f("pv_hypot(1.0 - $0, $1)", size, x.im)  # whose square may be 0
        real = self.f(
            "($1 < 1e-9 ? 0.34657359027997264 - 0.5 * pv_log($1) : 0.25 * pv_log1p(4.0 * $0 / ($1 * $1)))",
            size,
            gap,
        )
        near = Z(
            self.f("pv_copysign($0, $1)", real, x.re),
            self.f("(0.5 * pv_atan2(2.0 * $1, (1.0 - $0) * (1.0 + $0) - $1 * $1))", x.re, x.im),
        )
        beyond = Z(
            self.f(
                "pv_copysign(abs($0) > 0.0 && !pv_isinf($1) ? abs($0) / $1 / $1 : 0.0, $0)",
                x.re,
                length,
            ),
            self.f("pv_copysign(1.5707963267948966, $0)", x.im),
        )
        return self.choose(far, beyond, near)

    def asinh(self, x: Z) -> Z:
        made = self.asin(Z(self.f("(-$0)", x.im), x.re))
        return Z(made.im, self.f("(-$0)", made.re))

    def acosh(self, x: Z) -> Z:
        minus = self.sqrt(Z(self.f("($0 - 1.0)", x.re), x.im))
        plus = self.sqrt(Z(self.f("($0 + 1.0)", x.re), x.im))
        far, length = self._far(x)
        return Z(
            self._choose(far, length, self.f("pv_asinh($0)", self.mul(self.conj(minus), plus).re)),
            self._choose(far, self.angle(x), self.f("(2.0 * pv_atan2($0, $1))", minus.im, plus.re)),
        )

    def atan(self, x: Z) -> Z:
        made = self.atanh(Z(self.f("(-$0)", x.im), x.re))
        return Z(made.im, self.f("(-$0)", made.re))

    def sigmoid(self, x: Z) -> Z:
        return self.reciprocal(self.add(self.number(1), self.exp(self.neg(x))))


Function = Callable[[Algebra, Z], Z]
