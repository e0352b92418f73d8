"""Writes purevk/glsl/core/bessel_tables.glslh: polynomials for Bessel and Airy functions, fitted to
the values of mpmath by Chebyshev's expansion. Needs mpmath; nothing else does.

python scripts/fit_bessel.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpmath as mp

mp.mp.dps = 50
TARGET = Path(__file__).parents[1] / "purevk" / "glsl" / "core" / "bessel_tables.glslh"
POINTS = 64
NEAR, FAR, TURN, LEFT = mp.mpf(8), mp.mpf(2), mp.mpf(2), mp.mpf("2.5")  # as in bessel.glslh


def _root(square: Any) -> Any:
    """A number whose square is that, and not 0, where some functions have no value."""
    return mp.sqrt(max(square, mp.mpf("1e-24")))


def _near(function: Callable[[Any], Any], end: Any) -> Callable[[Any], Any]:
    return lambda s: function(_root((s + 1) / 2) * end)


def _wave(order: int, second: bool) -> Callable[[Any], Any]:
    """The factors of the cosine and of the sine of an oscillation, as functions of (NEAR / x)^2."""

    def value(s: Any) -> Any:
        x = NEAR / _root((s + 1) / 2)
        angle = x - mp.pi * (2 * order + 1) / 4
        j, y = mp.besselj(order, x), mp.bessely(order, x)
        scale = mp.sqrt(mp.pi * x / 2)
        if second:
            return x * scale * (y * mp.cos(angle) - j * mp.sin(angle))
        return scale * (j * mp.cos(angle) + y * mp.sin(angle))

    return value


def _airy(second: bool) -> Callable[[Any], Any]:
    def value(s: Any) -> Any:
        zeta = LEFT ** mp.mpf("1.5") * 2 / 3 / max((s + 1) / 2, mp.mpf("1e-6"))
        x = (zeta * 3 / 2) ** (mp.mpf(2) / 3)
        angle = zeta + mp.pi / 4
        a, b = mp.airyai(-x), mp.airybi(-x)
        scale = mp.sqrt(mp.pi) * x ** mp.mpf("0.25")
        if second:
            return scale * (b * mp.sin(angle) - a * mp.cos(angle))
        return scale * (a * mp.sin(angle) + b * mp.cos(angle))

    return value


def _airy_right(s: Any) -> Any:
    zeta = TURN ** mp.mpf("1.5") * 2 / 3 / max((s + 1) / 2, mp.mpf("1e-6"))
    x = (zeta * 3 / 2) ** (mp.mpf(2) / 3)
    return 2 * mp.sqrt(mp.pi) * x ** mp.mpf("0.25") * mp.exp(zeta) * mp.airyai(x)


def _scaled_k(order: int) -> Callable[[Any], Any]:
    def value(s: Any) -> Any:
        x = FAR / max((s + 1) / 2, mp.mpf("1e-6"))
        return mp.sqrt(x) * mp.exp(x) * mp.besselk(order, x)

    return value


TABLES: dict[str, Callable[[Any], Any]] = {
    "j0": _near(lambda x: mp.besselj(0, x), NEAR),
    "j1": _near(lambda x: mp.besselj(1, x) / x, NEAR),
    "y0": _near(lambda x: mp.bessely(0, x) - 2 / mp.pi * mp.log(x) * mp.besselj(0, x), NEAR),
    "y1": _near(
        lambda x: (mp.bessely(1, x) - 2 / mp.pi * (mp.log(x) * mp.besselj(1, x) - 1 / x)) / x, NEAR
    ),
    "p0": _wave(0, False),
    "q0": _wave(0, True),
    "p1": _wave(1, False),
    "q1": _wave(1, True),
    "i0": _near(lambda x: mp.besseli(0, x), FAR),
    "i1": _near(lambda x: mp.besseli(1, x) / x, FAR),
    "k0": _near(lambda x: mp.besselk(0, x) + mp.log(x / 2) * mp.besseli(0, x), FAR),
    "k1": _near(lambda x: (mp.besselk(1, x) - 1 / x - mp.log(x / 2) * mp.besseli(1, x)) / x, FAR),
    "far_k0": _scaled_k(0),
    "far_k1": _scaled_k(1),
    "airy": lambda s: mp.airyai(s * (LEFT + TURN) / 2 + (TURN - LEFT) / 2),
    "airy_right": _airy_right,
    "airy_f": _airy(False),
    "airy_g": _airy(True),
}


def _chebyshev(function: Callable[[Any], Any]) -> list[Any]:
    """The coefficients of Chebyshev's expansion on [-1, 1]."""
    angles = [mp.pi * (k + mp.mpf(1) / 2) / POINTS for k in range(POINTS)]
    values = [function(mp.cos(angle)) for angle in angles]
    made = [
        sum(value * mp.cos(n * angle) for value, angle in zip(values, angles)) * 2 / POINTS
        for n in range(POINTS)
    ]
    return [made[0] / 2, *made[1:]]


def _powers(coefficients: list[Any]) -> list[Any]:
    """The same polynomial as a sum of powers."""
    total = [mp.mpf(0)] * len(coefficients)
    before, current = [mp.mpf(1)], [mp.mpf(0), mp.mpf(1)]
    for n, coefficient in enumerate(coefficients):
        basis = before if n == 0 else current
        for k, part in enumerate(basis):
            total[k] += coefficient * part
        if n:
            doubled = [mp.mpf(0), *(2 * part for part in current)]
            padded = [*before, *[mp.mpf(0)] * (len(doubled) - len(before))]
            before, current = current, [a - b for a, b in zip(doubled, padded)]
    return total


def _function(kind: str, name: str, coefficients: list[Any], error: float, digits: int) -> str:
    size = max(abs(each) for each in coefficients)
    kept = max(n for n, each in enumerate(coefficients) if abs(each) > error * size) + 1
    suffix = "lf" if kind == "double" else ""
    words = [
        mp.nstr(each, digits, strip_zeros=False) + suffix for each in _powers(coefficients[:kept])
    ]
    lines, line = [], ""
    for number, word in enumerate(reversed(words)):
        text = f"r = {word};" if number == 0 else f"r = r * s + {word};"
        if len(line) + len(text) > 100:
            lines, line = [*lines, line], ""
        line = f"{line} {text}".strip()
    body = "\n    ".join([*lines, line])
    return f"{kind} bf_table_{name}({kind} s) {{\n    {kind} r;\n    {body}\n    return r;\n}}\n"


def main() -> None:
    expansions = {name: _chebyshev(function) for name, function in TABLES.items()}
    text = [
        "// Polynomials on [-1, 1] for Bessel and Airy functions; bessel.glslh says of what.\n",
        "// Made by scripts/fit_bessel.py; do not edit.\n",
    ]
    text += [_function("float", name, each, 3e-9, 9) for name, each in expansions.items()]
    text += ["#if HAS_FLOAT64\n"]
    text += [_function("double", name, each, 2e-18, 19) for name, each in expansions.items()]
    text += ["#endif\n"]
    TARGET.write_text("".join(text).replace("+ -", "- "), encoding="utf-8")


if __name__ == "__main__":
    main()
