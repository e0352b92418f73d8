"""Numbers that a call computes: arithmetic, relations and logic on sizes and on elements of tensors
agree with eager torch, in modules, in saved programs and under torch.compile."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.export import Dim as Dynamic  # noqa: E402

import purevk  # noqa: E402
from purevk.dtypes import DType  # noqa: E402
from purevk.errors import GraphError  # noqa: E402
from purevk.frontends.importer import Importer  # noqa: E402
from purevk.ir import Dim, GuardLog, Symbol  # noqa: E402
from purevk.passes.simplify import drop_unused  # noqa: E402
from purevk.program.variants.lowering import lower_graph  # noqa: E402
from tests.passes.harness import TRAITS  # noqa: E402
from tests.program.signatures.harness import not_before  # noqa: E402

pytestmark = pytest.mark.device
new_export = not_before("2.10", "torch.export takes no such numbers as operands")

Env = dict[str, Any]
Number = Callable[[Env], Any]
_INTEGERS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "max": torch.sym_max,
    "min": torch.sym_min,
}
_BY_CONSTANT = {
    "//": lambda a, k: a // k,
    "%": lambda a, k: a % k,
    "<<": lambda a, k: a << (k % 4),
    ">>": lambda a, k: a >> (k % 4),
    "*.7": lambda a, k: torch.sym_int(a * (k * 0.1)),
    "/": lambda a, k: torch.sym_int(a / k),
    "abs": lambda a, k: abs(a - k),
    "neg": lambda a, k: -a,
}
_NAMES = ["n", "above", "large", "first", "second"]
_RELATIONS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


class Numbers(nn.Module):
    """Random numbers, each used in a tensor: the sizes of x[n, 3], how many elements of it are above
    two bounds, its sum, and elements of an input."""

    def __init__(self, seed: int, count: int = 24) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.text: list[str] = []
        self.uses = [self._use(rng) for _ in range(count)]

    def integer(self, rng: random.Random, depth: int) -> tuple[str, Number]:
        kind = rng.randrange(5) if depth else 0
        if kind == 0:
            name = rng.choice([*_NAMES, str(rng.randint(-3, 9))])
            return name, lambda env: env[name] if name in env else int(name)
        if kind == 1:
            one, other = rng.choice(_NAMES), rng.choice(_NAMES)
            c, condition = self.truth(rng, depth - 1)
            return f"ite({c}, {one}, {other})", lambda env: torch.sym_ite(
                condition(env), env[one], env[other]
            )
        a, f = self.integer(rng, depth - 1)
        if kind == 2:
            (op, step), k = rng.choice([*_BY_CONSTANT.items()]), rng.randint(1, 7)
            return f"{op}({a}, {k})", lambda env: step(f(env), k)
        b, g = self.integer(rng, depth - 1)
        op, join = rng.choice([*_INTEGERS.items()])
        return f"({a} {op} {b})", lambda env: join(f(env), g(env))

    def truth(self, rng: random.Random, depth: int) -> tuple[str, Number]:
        kind = rng.randrange(6) if depth else 0
        if kind == 1:
            a, f = self.truth(rng, depth - 1)
            return f"not {a}", lambda env: torch.sym_not(f(env))
        if kind == 2:
            (a, f), (b, g) = self.truth(rng, depth - 1), self.truth(rng, depth - 1)
            if rng.random() < 0.5:
                return f"({a} and {b})", lambda env: f(env) & g(env)
            return f"({a} or {b})", lambda env: f(env) | g(env)
        op, compare = rng.choice([*_RELATIONS.items()])
        if kind == 3:
            bound, op = rng.choice([-1.5, 0.25, 2.0]), rng.choice("<>")
            compare = _RELATIONS[op]
            return f"total {op} {bound}", lambda env: compare(env["total"], bound)
        (a, f), (b, g) = self.integer(rng, depth), self.integer(rng, max(depth - 1, 0))
        return f"({a} {op} {b})", lambda env: compare(f(env), g(env))

    def _use(self, rng: random.Random) -> Callable[[Any, Env], Any]:
        if rng.random() < 0.4:
            text, number = self.integer(rng, 3)
            uses = [
                lambda x, env: x * number(env),
                lambda x, env: x.long() + number(env),
                lambda x, env: torch.full((2,), number(env)),
                lambda x, env: number(env),
            ]
        else:
            text, number = self.truth(rng, 2)
            uses = [
                lambda x, env: x * number(env),
                lambda x, env: x.half() + number(env),
                lambda x, env: x.int() * number(env),
                lambda x, env: (x > 0) & torch.scalar_tensor(number(env), dtype=torch.bool),
                lambda x, env: torch.where(x > 0, number(env), x > 1),
                lambda x, env: torch.full((2,), number(env)),
                lambda x, env: number(env),
            ]
        at = rng.randrange(len(uses))
        self.text.append(f"{text}, use {at}")
        return uses[at]

    def forward(self, x: Any, i: Any) -> list[Any]:
        env = {
            "n": x.shape[0],
            "above": (x > 0).sum().item(),
            "large": (x > 1).sum().item(),
            "total": x.sum().item(),
            "first": i[0].item(),
            "second": i[1].item(),
        }
        return [use(x, env) for use in self.uses]


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _calls(seed: int) -> list[tuple[Any, Any]]:
    rng = torch.Generator().manual_seed(seed)
    sizes = [4, 7, 2, 11]
    return [
        (
            torch.randn(n, 3, generator=rng) * at,
            torch.randint(-6, 9, (2,), generator=rng),
        )
        for at, n in enumerate(sizes, 1)
    ]


def _agree(made: list[Any], module: Numbers, call: tuple[Any, Any]) -> None:
    for text, have, want in zip(module.text, made, module(*call), strict=True):
        have = have if isinstance(want, torch.Tensor) or isinstance(have, type(want)) else None
        assert have is not None, text
        have, want = torch.as_tensor(have), torch.as_tensor(want)
        assert have.dtype is want.dtype and torch.equal(have, want), text


@pytest.mark.parametrize("seed", range(2))
def test_numbers_of_programs(seed: int, tmp_path: Path) -> None:
    module, calls = Numbers(seed), _calls(seed)
    with purevk.compile(module, calls[0], ({0: Dynamic("n", min=2, max=64)}, None)) as program:
        for call in calls:
            _agree(program(*call), module, call)
        program.save(tmp_path / "numbers.pvk")
    with purevk.load(tmp_path / "numbers.pvk") as program:
        for call in calls:
            _agree(program(*call), module, call)


def test_numbers_under_torch_compile() -> None:
    module, calls = Numbers(4, 16), _calls(4)
    function = torch.compile(
        module, backend="purevk", fullgraph=True, dynamic=True, options={"fallback": False}
    )
    with torch.no_grad(), torch._dynamo.config.patch(capture_scalar_outputs=True):
        for call in calls:
            _agree(function(*call), module, call)


def test_decisions_about_computed_numbers_are_checked() -> None:
    """A pass that decides by a number which follows from data has each call read it, and a decision
    that no call can check is refused."""
    graph = Importer("test", "test")
    x = graph.input(DType.float32, (9,), False)
    count = graph.emit("aten.sum.default", (x, DType.int64), [], [], "count")[0]
    size = graph.element(count, 0, 0, 9)
    double = graph.emit("aten.mul.Tensor", (x, 2), [], [], "double")[0]
    made = graph.finish([double])
    assert not drop_unused(made, TRAITS).unbacked
    with GuardLog():
        assert size == 9
        assert drop_unused(made, TRAITS).unbacked
    gone = Dim.of(Symbol("u9", 9, unbacked=True))
    with pytest.raises(GraphError, match="cannot be checked"):
        lower_graph(lambda: (gone == 9, made)[1], TRAITS)


_CORNER = torch.tensor([[1.0, -1, -1, -1, 5], [0.5, 2, -3, 0.25, 1]])
_AT = torch.tensor([[0], [1]])
_FACTORS: list[Callable[[Any, Any], Any]] = [
    lambda x, n: torch.addmm(torch.eye(2), x, x.T, alpha=n),
    lambda x, n: torch.baddbmm(torch.eye(2)[None], x[None], x.T[None], beta=n, alpha=n),
    lambda x, n: torch.addmv(x[:, 0], x, x[0], alpha=n),
    lambda x, n: torch.addbmm(torch.eye(2), x[None], x.T[None], beta=n),
    lambda x, n: torch.addcmul(x, x, x, value=n),
    lambda x, n: torch.addcdiv(x, x, x, value=n),
    nn.functional.leaky_relu,
    nn.functional.elu,
    nn.functional.celu,
    lambda x, n: nn.functional.threshold(x, n, n),
    nn.functional.softplus,
    nn.functional.hardshrink,
    lambda x, n: torch.linspace(-n, n + 1, 4),
    lambda x, n: torch.logspace(0, n, 3),
    lambda x, n: torch.linspace(n, 2, 1),
    lambda x, n: x.clone().fill_(n),
    lambda x, n: x.index_fill(0, torch.tensor([1]), n),
    lambda x, n: x.scatter(1, _AT, n),
    lambda x, n: x.scatter(1, _AT, n, reduce="add"),
    lambda x, n: torch.bucketize(n, x.flatten().sort().values),
]


class Factors(nn.Module):
    def __init__(self, of_integers: bool) -> None:
        super().__init__()
        self.of_integers = of_integers

    def forward(self, x: Any) -> Any:
        if not self.of_integers:
            number = x.abs().mean().item()
            return [function(x, number) for function in _FACTORS[:-1]]
        number = (x > 0).sum().item()
        sums = [torch.add(x, x, alpha=number), torch.sub(x, x, alpha=number)]
        chosen = x[:, : torch.sym_ite(number > 3, 1, 2)]
        return [*sums, chosen, *[function(x, number) for function in _FACTORS]]


@pytest.mark.parametrize("of_integers", [pytest.param(True, marks=new_export), False])
def test_numbers_as_arguments_of_operators(
    of_integers: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "purevk")
    module = Factors(of_integers)
    program = purevk.compile(module, (_CORNER,))
    program.save(tmp_path / "numbers.pvk")
    with purevk.load(tmp_path / "numbers.pvk") as saved:
        for x in (_CORNER, _CORNER * 2 - 1, -_CORNER.abs() + 0.75):
            for called in (program, saved):
                torch.testing.assert_close(
                    called(x), module(x), rtol=1e-5, atol=1e-5, equal_nan=True
                )
    assert "on the CPU" not in caplog.text


@new_export
def test_integers_of_calls_may_be_negative() -> None:
    module = _Function(
        lambda x, i: [x * (i >= 0), x * abs(i), x + (i & 7), x * torch.sym_max(i, -9)]
    )
    x = torch.arange(3.0)
    with purevk.compile(module, (x, 5), ((None, Dynamic.AUTO),)) as program:
        for i in (5, -4, -40, 0, 3):
            for have, want in zip(program(x, i), module(x, i), strict=True):
                assert torch.equal(have, want), i


_WIDE: dict[str, Callable[[Any, int], Any]] = {
    "add": lambda x, n: x + n,
    "mul": lambda x, n: x * (n - 3),
    "eq": lambda x, n: x == n,
    "floor_divide": lambda x, n: x // torch.sym_max(n, 1),
    "remainder": lambda x, n: x % torch.sym_max(n, 5),
    "full": lambda x, n: torch.full((3,), n, dtype=x.dtype),
    "clamp": lambda x, n: x.clamp(max=n),
    "truth": lambda x, n: (x > 0).float() * (n > 2**40),
}


@new_export
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64], ids=str)
def test_integers_of_calls_may_have_64_bits(dtype: Any, tmp_path: Path) -> None:
    rng = random.Random(7)

    class Wide(nn.Module):
        def forward(self, x: Any, numbers: Any) -> list[Any]:
            return [make(x, numbers[1].item()) for make in _WIDE.values()]

    # Ties of float32, and numbers next to them.
    numbers = [0xFFFFFFFF, 2**31, 2**56 + 2**32, 2**56 + 2**32 + 1, -(2**40) - 1]
    numbers += [rng.randrange(-(2 ** (k - 1)), 2 ** (k - 1)) for k in (20, 34, 50, 55, 58)]
    x = torch.tensor([1, -7, 2**33 + 5, numbers[3]]).to(dtype)
    with purevk.compile(Wide(), (x, torch.tensor([0, 5]))) as program:
        program.save(tmp_path / "wide.pvk")
    with purevk.load(tmp_path / "wide.pvk") as loaded:
        for number in numbers:
            call = x, torch.tensor([0, number])
            for name, made, reference in zip(_WIDE, loaded(*call), Wide()(*call)):
                where = f"{name} of {number}"
                torch.testing.assert_close(made, reference, rtol=0, atol=0, msg=where)


def test_products_of_sizes_may_have_64_bits() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + x.shape[0] * x.shape[0] * 100_000

    with purevk.compile(Scaled(), (torch.ones(8),), ({0: Dynamic.AUTO},)) as program:
        for size in (3, 400, 5000):
            x = torch.ones(size, dtype=torch.float32)
            assert torch.equal(program(x), Scaled()(x))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sizes_that_follow_from_ratios_are_planned_as_traced(seed: int) -> None:
    """An image is resized by a ratio of its sizes, and halved until a level has one row: torch decides
    that by the traced number, which the device computes."""
    chosen = random.Random(seed)
    low, high = chosen.randint(40, 64), chosen.randint(65, 96)
    halvings = max(low, high).bit_length()

    def grids(x: Any) -> Any:
        ratio = min(low / min(x.shape[-2:]), high / max(x.shape[-2:]))
        x = nn.functional.interpolate(x, scale_factor=ratio, recompute_scale_factor=True)
        height, width = x.shape[-2:]
        made = []
        for level in range(halvings):
            height, width = (height - 1) // 2 + 1, (width - 1) // 2 + 1
            if level > 3:
                made += torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        return x * 2, [torch.stack(pair) for pair in zip(made[::2], made[1::2])]

    torch._dynamo.reset()
    compiled = torch.compile(grids, backend="purevk", options={"fallback": False})
    images = [torch.randn(1, 1, *size) for size in ((64, 96), (96, 64), (80, 81), (40, 30))]
    with torch.no_grad():
        try:
            for x in images:
                torch.testing.assert_close(compiled(x), grids(x))
        except torch._dynamo.exc.TorchRuntimeError as error:
            compiled = torch.compile(grids, backend="eager")
            with pytest.raises(type(error)):
                for x in images:
                    compiled(x)
            pytest.skip("this torch traces it with no backend")  # 2.15
