"""Measures the errors of operators with float32 results, over their whole range.

python scripts/accuracy.py                  prints the table
python scripts/accuracy.py --write          adds this device to docs/data/accuracy.json and docs/accuracy.md
python scripts/accuracy.py log softmax      measures some operators

The reference is torch in float64. Errors are in units in the last place (ulp) of the nearest float32.
`tests/ops/elementwise/test_accuracy.py` holds the bounds, with fewer numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import purevk.ops  # noqa: E402, F401
from purevk.graph.context import default_context  # noqa: E402
from purevk.ops import registry  # noqa: E402
from tests.ops import harness  # noqa: E402

DATA = ROOT / "docs" / "data" / "accuracy.json"
PAGE = ROOT / "docs" / "accuracy.md"
USUAL = 4.0  # ulp
aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operator:
    """An operator, and where it is measured.

    Attributes:
        function: of tensors of any float dtype.
        inputs: makes float32 tensors, of about so many numbers.
        scale: of the result for these inputs, where the error is relative to more than the result;
            None: to the result.
    """

    name: str
    function: Callable[..., torch.Tensor]
    inputs: Callable[[int], Tensors]
    scale: Callable[..., torch.Tensor] | None = None


def any_float(count: int, seed: int = 0, low: float = 0.0, high: float = torch.inf) -> torch.Tensor:
    """Float32 numbers of both signs, of all exponents and mantissas, with a magnitude in a range."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.tensor([low, min(high, torch.finfo(torch.float32).max)]).view(torch.int32).tolist()
    bits = torch.randint(ends[0], ends[1] + 1, (count // 2,), generator=generator)
    usual = (torch.rand(count - count // 2, generator=generator) * 2 - 1) * min(high, 20.0)
    usual = usual.where(usual.abs() >= low, low)
    x = torch.cat([bits.to(torch.int32).view(torch.float32), usual])
    return x * (torch.randint(0, 2, x.shape, generator=generator) * 2 - 1)


def _one(low: float = 0.0, high: float = torch.inf) -> Callable[[int], Tensors]:
    return lambda count: (any_float(count, 0, low, high),)


def _positive(inputs: Callable[[int], Tensors]) -> Callable[[int], Tensors]:
    return lambda count: tuple(x.abs() for x in inputs(count))


def _two(low: float = 0.0, high: float = torch.inf) -> Callable[[int], Tensors]:
    return lambda count: (
        any_float(count, 0, low, high),
        any_float(count, 1, low, high)[
            torch.randperm(count, generator=torch.Generator().manual_seed(2))
        ],
    )


def _larger(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The larger magnitude of two arguments."""
    return torch.maximum(x.abs(), y.abs())


def _rows(mean: float, deviation: float, columns: int = 64) -> Callable[[int], Tensors]:
    def make(count: int) -> Tensors:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(max(count // columns, 4), columns, generator=generator, dtype=torch.float64)
        return ((x * deviation + mean).float(),)

    return make


def _size_of_terms(x: torch.Tensor) -> torch.Tensor:
    """The largest term of a row: a sum of a row may cancel."""
    return x.abs().amax(-1, keepdim=True)


def _batch_norm(x: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x, x[0] * 0.1, x[1] ** 2 + 1)


def _instance_norm(x: torch.Tensor) -> torch.Tensor:
    return functional.instance_norm(x[:64].view(2, 32, -1))


def _entropy(x: torch.Tensor) -> torch.Tensor:
    target = (x.flip(0) > 0).to(x.dtype)
    return functional.binary_cross_entropy(
        (x * 0.1).clamp(-0.4, 0.4) + 0.5, target, reduction="none"
    )


def _entropy_of_logits(x: torch.Tensor) -> torch.Tensor:
    target = (x.flip(0) > 0).to(x.dtype)
    return functional.binary_cross_entropy_with_logits(x, target, reduction="none")


def _cross_entropy(x: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(x, x.flip(0).argmax(-1), reduction="none")


def _divergence(x: torch.Tensor) -> torch.Tensor:
    return functional.kl_div(x.log_softmax(-1), x.flip(0).softmax(-1), reduction="none")


def _convolved(x: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(
        x[:64].view(1, 4, 32, 32), x[:36].reshape(-1)[: 8 * 36].view(8, 4, 3, 3)
    )


def _spread(x: torch.Tensor) -> torch.Tensor:
    weight = x[:36].reshape(-1)[: 8 * 36].view(4, 8, 3, 3)
    return functional.conv_transpose2d(x[:64].view(1, 4, 32, 32), weight, stride=2)


def _attention(x: torch.Tensor) -> torch.Tensor:
    heads = x[:64].view(1, 2, 32, 64)
    return functional.scaled_dot_product_attention(heads, heads.flip(2), heads)


def _resized(mode: str) -> Callable[..., torch.Tensor]:
    def resize(x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x[:32].view(1, 1, 32, 64), size=(50, 90), mode=mode)

    return resize


# What is not a function of one number, and ranges of those that are. Beyond them a result is infinite,
# or all numbers that follow from it are.
def _operators() -> list[Operator]:
    unary = []
    for definition in registry.definitions():
        form, name = definition.form, definition.name
        plain = definition.parameters
        if (
            not isinstance(form, registry.Pointwise)
            or not name.startswith("aten.")
            or plain[0] != "x"
        ):
            continue
        if any(each in plain for each in "yz") or name.startswith(_NO_CURVES):
            continue
        _, packet, overload = name.split(".")
        function = getattr(getattr(aten, packet), overload)
        if _takes(function, torch.ones(2)) and _takes(function, torch.ones(2, dtype=torch.float64)):
            inputs = _one(*_RANGES.get(packet, ()))
            unary.append(
                Operator(packet, function, _positive(inputs) if packet in _POSITIVE else inputs)
            )
    return sorted(unary, key=lambda each: each.name) + _OTHERS


def _takes(function: Callable[..., Any], x: torch.Tensor) -> bool:
    try:
        made = function(x)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return isinstance(made, torch.Tensor) and made.dtype is x.dtype


# Copies, roundings, choices; Bessel functions, which tests/ops/elementwise/test_bessel.py measures.
_NO_CURVES = tuple(f"aten.{name}" for name in (
    "alias", "_to_copy", "to", "neg", "abs", "sign", "sgn", "floor", "ceil", "trunc", "round",
    "relu", "clamp", "hardtanh", "threshold", "positive", "nan_to_num", "hardshrink", "softshrink",
    "special_bessel", "special_modified_bessel_k", "special_scaled", "special_airy", "angle",
    "lift", "logical", "special_spherical",
))  # fmt: skip
# Below 0, the error of these is that of the distance to a pole, relative to the terms of a sum.
_POSITIVE = ("lgamma", "digamma")
_RANGES = {
    "acos": (0, 1), "asin": (0, 1), "atanh": (0, 1), "erfinv": (0, 1), "special_ndtri": (0, 1), "logit": (0, 1),
    "digamma": (1e-3, 1e30), "lgamma": (1e-3, 1e30), "exp": (0, 104), "exp2": (0, 150), "expm1": (0, 89),
    "sinh": (0, 89.4), "cosh": (0, 89.4), "i0": (0, 90), "special_i1": (0, 90), "special_erfcx": (0, 1e10),
}  # fmt: skip
_OTHERS = [
    Operator("div", torch.div, _two()),
    Operator("atan2", torch.atan2, _two()),
    Operator("hypot", torch.hypot, _two()),
    Operator(
        "pow",
        torch.pow,
        lambda n: (any_float(n, 0, 1e-30, 1e30).abs(), any_float(n, 1, 1e-3, 30.0)),
    ),
    Operator("logaddexp", torch.logaddexp, _two(0, 1e4), _larger),
    Operator("logaddexp2", torch.logaddexp2, _two(0, 1e4), _larger),
    Operator("xlogy", torch.xlogy, lambda n: (any_float(n, 0), any_float(n, 1).abs())),
    Operator("xlog1py", torch.special.xlog1py, lambda n: (any_float(n, 0), any_float(n, 1).abs())),
    Operator("fmod", torch.fmod, _two(1e-3, 1e3)),
    Operator("remainder", torch.remainder, _two(1e-3, 1e3)),
    Operator("softmax", lambda x: x.softmax(-1), _rows(0, 30)),
    Operator("log_softmax", lambda x: x.log_softmax(-1), _rows(0, 30)),
    Operator("logsumexp", lambda x: x.logsumexp(-1), _rows(0, 30)),
    Operator("sum", lambda x: x.sum(-1, keepdim=True), _rows(0, 1), _size_of_terms),
    Operator("mean", lambda x: x.mean(-1, keepdim=True), _rows(0, 1), _size_of_terms),
    Operator("norm", lambda x: torch.linalg.vector_norm(x, dim=-1), _rows(3, 1)),
    Operator("var", lambda x: x.var(-1), _rows(0, 1)),
    Operator("var, far from 0", lambda x: x.var(-1), _rows(10000, 0.1)),
    Operator("std, far from 0", lambda x: x.std(-1), _rows(-300, 0.01)),
    Operator(
        "layer_norm",
        lambda x: torch.nn.functional.layer_norm(x, (x.shape[-1],)),
        _rows(0, 1),
        lambda x: torch.ones(()),
    ),
    Operator(
        "layer_norm, far from 0",
        lambda x: torch.nn.functional.layer_norm(x, (x.shape[-1],)),
        _rows(10000, 0.1),
        lambda x: torch.ones(()),
    ),
    Operator(
        "group_norm, far from 0",
        lambda x: torch.nn.functional.group_norm(x.view(4, 4, -1), 2),
        _rows(1000, 0.1),
        lambda x: torch.ones(()),
    ),
    Operator("prod", lambda x: x.prod(-1), _rows(1, 0.1)),
    Operator("cumsum", lambda x: x.cumsum(-1), _rows(1, 0.1)),
    Operator("cumprod", lambda x: x.cumprod(-1), _rows(1, 0.1)),
    Operator("logcumsumexp", lambda x: x.logcumsumexp(-1), _rows(0, 3), lambda x: torch.ones(())),
    Operator("nansum", lambda x: x.nansum(-1, keepdim=True), _rows(0, 1), _size_of_terms),
    Operator("norm of 1", lambda x: torch.linalg.vector_norm(x, 1, -1), _rows(3, 1)),
    Operator("norm of 3", lambda x: torch.linalg.vector_norm(x, 3, -1), _rows(3, 1)),
    Operator("norm of 0.5", lambda x: torch.linalg.vector_norm(x, 0.5, -1), _rows(3, 1)),
    Operator("std", lambda x: x.std(-1), _rows(0, 1)),
    Operator("normalize", lambda x: functional.normalize(x, dim=-1), _rows(0, 1)),
    Operator("rms_norm", lambda x: functional.rms_norm(x, (x.shape[-1],)), _rows(0, 1)),
    Operator("batch_norm", _batch_norm, _rows(0, 1), lambda x: torch.ones(())),
    Operator("instance_norm", _instance_norm, _rows(0, 1), lambda x: torch.ones(())),
    Operator("softmin", lambda x: functional.softmin(x, -1), _rows(0, 3)),
    Operator("glu", lambda x: functional.glu(x), _rows(0, 3)),
    Operator(
        "pairwise_distance", lambda x: functional.pairwise_distance(x, x.flip(0)), _rows(0, 9)
    ),
    Operator("cdist", lambda x: torch.cdist(x[:64], x[:64].flip(0) + 1), _rows(0, 9)),
    Operator(
        "mse_loss", lambda x: functional.mse_loss(x, x.flip(0), reduction="none"), _rows(0, 1)
    ),
    Operator("huber_loss", lambda x: functional.huber_loss(x, x.flip(0), "none"), _rows(0, 1)),
    Operator("binary_cross_entropy", _entropy, _rows(0, 3)),
    Operator("binary_cross_entropy_with_logits", _entropy_of_logits, _rows(0, 3)),
    Operator("cross_entropy", _cross_entropy, _rows(0, 3), lambda x: torch.ones(())),
    Operator("kl_div", _divergence, _rows(0, 1), lambda x: torch.ones(())),
    Operator(
        "matmul", lambda x: x[:64] @ x[:64], _rows(0, 1), lambda x: x[:64].abs() @ x[:64].abs()
    ),
    Operator("conv2d", _convolved, _rows(0, 1), lambda x: _convolved(x.abs())),
    Operator("conv_transpose2d", _spread, _rows(0, 1), lambda x: _spread(x.abs())),
    Operator("attention", _attention, _rows(0, 1), lambda x: torch.ones(())),
    Operator("avg_pool2d", lambda x: functional.avg_pool2d(x[:64][None, None], 4), _rows(3, 1)),
    Operator(
        "interpolate bilinear", _resized("bilinear"), _rows(3, 1), lambda x: 4 * torch.ones(())
    ),
    Operator("interpolate bicubic", _resized("bicubic"), _rows(3, 1), lambda x: 4 * torch.ones(())),
    Operator("lerp", lambda x, y: torch.lerp(x, y, 0.3), _two(1e-3, 1e3), _larger),
    Operator(
        "addcmul",
        lambda x, y: torch.addcmul(x, y, y),
        _two(1e-3, 1e3),
        lambda x, y: x.abs() + y * y,
    ),
    Operator(
        "addcdiv",
        lambda x, y: torch.addcdiv(x, x, y),
        _two(1e-3, 1e3),
        lambda x, y: x.abs() + (x / y).abs(),
    ),
    Operator("polygamma of 1", lambda x: torch.polygamma(1, x), _positive(_one(1e-3, 1e3))),
    Operator(
        "special_entr",
        torch.special.entr,
        _positive(_one(1e-30, 1e3)),
        lambda x: x.clamp(min=1e-30),
    ),
]

# Bounds, in ulp, that are more than 4 and twice eager torch's error, with the reason.
REASONS: dict[str, tuple[float, str]] = {
    "erfc": (7.0, "around 0.9 it is 1 - erf(x), where torch has further polynomials"),
    "lgamma": (10.0, "from 1.2 to 1.5, terms of the sum cancel"),
    "pow": (16.0, "y log2(x) is in two float32 numbers, the logarithm in one; torch takes float64"),
    "tan": (5.0, "a quotient of two functions; Vulkan allows 2.5 ulp for the division"),
    "var, far from 0": (5.0, "4.4 on SwiftShader: parts are joined by quotients in one pass"),
}


def errors(made: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Errors in ulp of float32. Infinite where one is NaN, or infinite, and the other is not.

    Args:
        made: float32.
        wanted: float64.
        scale: what the ulp is that of, at least; None: `wanted`.
    """
    nearest = wanted.float()
    size = (nearest.abs() if scale is None else torch.maximum(nearest.abs(), scale.float())).clamp(
        max=3.4e38
    )
    if harness.keeps_subnormal_numbers():
        unit = torch.ldexp(
            torch.ones((), dtype=torch.float64), (torch.frexp(size).exponent - 24).clamp(min=-149)
        )
    else:  # a number below the normal ones may be 0, also on the way to a result above them
        unit = torch.ldexp(torch.ones((), dtype=torch.float64), torch.frexp(size).exponent - 24)
        unit = unit.where(size >= 2.0**-100, 2.0**-100)
    apart = (made.double() - wanted).abs() / unit
    same = (made == nearest) | (made.isnan() & nearest.isnan())
    # A float that is rounded up to infinity.
    edge = made.isinf() & (wanted.abs() > 3.4e38) & (made.sign() == wanted.sign())
    return torch.where(same | edge, 0.0, torch.nan_to_num(apart, torch.inf, torch.inf))


@dataclass(frozen=True)
class Row:
    """The largest errors of an operator, in ulp, and the arguments of purevk's."""

    name: str
    error: float
    eager: float
    at: str

    @property
    def bound(self) -> float:
        return max(USUAL, 2 * self.eager, REASONS.get(self.name, (0.0, ""))[0])


def measure(operators: Sequence[Operator], count: int) -> list[Row]:
    """Runs the operators in one program, each on so many numbers."""
    rows = []
    inputs = [operator.inputs(count) for operator in operators]
    if not harness.keeps_subnormal_numbers():
        tiny = 2.0**-125
        inputs = [tuple(x.where(x.abs() >= tiny, tiny) for x in each) for each in inputs]
    made = harness.results_of([harness.Case(o.function, x) for o, x in zip(operators, inputs)])
    for operator, x, result in zip(operators, inputs, made):
        wide = [each.double() for each in x]
        wanted = operator.function(*wide)
        scale = operator.scale(*wide).broadcast_to(wanted.shape) if operator.scale else None
        own, eager = (errors(each, wanted, scale) for each in (result, operator.function(*x)))
        worst = int(own.argmax())
        at = ""
        if all(each.shape == own.shape for each in x):
            at = ", ".join(f"{float(each.flatten()[worst]):.9g}" for each in x)
        rows.append(Row(operator.name, float(own.max()), float(eager.max()), at))
    return rows


def _shown(error: float) -> float | str:
    return float(f"{error:.3g}") if error < 1e30 else "inf"


def page(data: dict[str, dict[str, list[float | str]]]) -> str:
    """The text of docs/accuracy.md."""
    devices = list(data)
    names = list(dict.fromkeys(name for device in devices for name in data[device]))
    table = [
        f"| operator | {' | '.join(devices)} | eager torch | bound | why it is above 4 |",
        f"|---|{'--:|' * len(devices)}--:|--:|---|",
    ]
    for name in names:
        errors = [str(data[device].get(name, [""])[0]) for device in devices]
        eager = max(float(data[device][name][1]) for device in devices if name in data[device])
        bound, why = REASONS.get(name, (0.0, ""))
        if bound < max(USUAL, 2 * eager):
            bound, why = max((USUAL, ""), (2 * eager, "twice the error of eager torch"))
        table.append(
            f"| {name} | {' | '.join(errors)} | {_shown(eager)} | {_shown(bound)} | {why} |"
        )
    return _PAGE + "\n".join(table) + "\n"


_PAGE = """# Accuracy

<!-- Made by scripts/accuracy.py; do not edit. -->

The largest errors of operators with float32 results, in units in the last place (ulp), against
torch in float64. Arguments are 200,000 numbers of all exponents, of both signs, and numbers up to
20. Rows have 64 columns. "Far from 0" is a mean of 10,000, -300 or 1,000 with a deviation of 0.1,
0.01 or 0.1.

- `inf`: a result is NaN, infinite or 0 where it is not in float64, or the other way round. Eager
  torch in float32 does this where a step on the way overflows or vanishes.
- Errors of a sum, a mean and a norm layer are relative to the largest term, or to 1; those of
  logaddexp to the larger argument; those of a product of matrices to the sum of magnitudes; those
  of resizing to 4.
- Where a device takes numbers below the normal ones for 0 ([limits.md](limits.md)), results below
  2^-100 are compared with that number.
- The bound is 4 ulp, or twice eager torch's error, or what its row says. A test holds it.

"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("operators", nargs="*", help="those to measure; default: all")
    parser.add_argument("--count", type=int, default=200_000, help="numbers for each")
    parser.add_argument("--write", action="store_true", help=f"writes {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    chosen = [o for o in operators() if not options.operators or o.name in options.operators]
    rows = []
    for start in range(0, len(chosen), 20):
        for row in measure(chosen[start : start + 20], options.count):
            rows.append(row)
            bad = "" if row.error <= row.bound else "   <- above its bound"
            print(
                f"{row.name:24} {row.error:12.2f} {row.eager:12.2f} {row.bound:12.1f}   {row.at}{bad}",
                flush=True,
            )
    if options.write:
        data = json.loads(DATA.read_text()) if DATA.exists() else {}
        device = default_context().device.name
        data.setdefault(device, {})
        data[device] |= {row.name: [_shown(row.error), _shown(row.eager)] for row in rows}
        DATA.write_text(json.dumps(data, indent=1) + "\n")
        PAGE.write_text(page(data))


operators = _operators

if __name__ == "__main__":
    main()
