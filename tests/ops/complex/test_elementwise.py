"""Pointwise operators of complex numbers, beside torch's."""

import numpy as np
import pytest
import torch

import purevk
from tests.ops.complex.harness import numbers
from tests.ops.harness import Case, check, program_of, tensor

aten = torch.ops.aten
pytestmark = pytest.mark.device


UNARY = (
    "neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tan sinh cosh tanh"
    " asin acos atan asinh acosh atanh sigmoid silu sgn abs angle isnan isinf isfinite logical_not"
    " _conj real imag"
).split()  # fmt: skip
EXPONENTIAL = (torch.exp, torch.sin, torch.cos, torch.sinh, torch.cosh, torch.tanh, torch.tan)
# Ratios of functions whose absolute errors are those of single precision.
LOOSE = {"tan", "tanh", "silu", "rsqrt", "sigmoid"}


def functions(x: torch.Tensor) -> list[Case]:
    found = []
    for name in UNARY:
        packet = getattr(aten, name)
        rtol = 5e-5 if name in LOOSE and x.dtype is torch.complex64 else 2e-5
        found.append(Case(packet.default, (x,), rtol=rtol, atol=2e-5))
    return found


def test_functions():
    # Few elements in several tensors: one program has all functions.
    check(functions(numbers(61)))


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
def test_functions_of_special_numbers(double):
    """Parts that are 0, on the cuts, large and small."""
    values = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-4, -2e3, 1e15]
    grid = torch.tensor([complex(a, b) for a in values for b in values])
    x = grid.to(torch.complex128 if double else torch.complex64)
    rtol = 1e-12 if double else 3e-5
    names = "neg sqrt abs angle sgn log isfinite logical_not square _conj".split()
    check([Case(getattr(aten, name).default, (x,), rtol=rtol, atol=rtol) for name in names])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_logarithms_and_roots_of_all_sizes(dtype):
    """Parts of all exponents, up to the largest, whose squares and sums are no floats; 0 and infinity."""
    generator = torch.Generator().manual_seed(5)
    largest = torch.finfo(dtype.to_real()).max
    most = torch.tensor(largest, dtype=torch.float64).log()
    parts = torch.rand(2, 400, generator=generator, dtype=torch.float64) * 2 - 1
    parts[:, 200:] = parts[:, 200:].sign() * ((parts[:, 200:].abs() * 2 - 1) * most * 0.98).exp()
    parts[:, :200] *= largest
    parts[1, ::3] = parts[0, ::3]
    ends = torch.tensor([0.0, -0.0, 1.0, -2.0, torch.inf, -torch.inf], dtype=torch.float64)
    x = torch.cat([parts, torch.cartesian_prod(ends, ends).T], 1).to(dtype.to_real())
    x = torch.complex(x[0], x[1])
    rtol = 2e-5 if dtype is torch.complex64 else 1e-12
    names = "abs log log1p sqrt acos asin atan asinh acosh atanh angle".split()
    # The sign of -0.0 chooses a side of the cuts.
    cases = [Case(getattr(aten, name).default, (x,), rtol=rtol, atol=1e-37) for name in names]
    finite = x[x.isfinite() & (x != 0)]
    check([*cases, *(Case(f, (finite,), rtol=rtol, atol=1e-37) for f in (torch.log2, torch.log10))])


@pytest.mark.parametrize(
    "dtype",
    [torch.complex64, pytest.param(torch.complex128, marks=pytest.mark.slow)],
    ids=str,
)
def test_exponentials_of_all_sizes(dtype):
    """Whose factors are infinite beside a product that is not, or 0; and at infinity, and NaN."""
    ends = [0.0, -0.0, 1e-3, 1.0, -1.0, torch.inf, -torch.inf, torch.nan]
    most = float(np.log(torch.finfo(dtype.to_real()).max))
    drawn = (torch.rand(9, generator=torch.Generator().manual_seed(3)) * 2.4 - 1.2) * most
    parts = torch.cat([torch.tensor(ends), drawn]).to(dtype.to_real())
    x = torch.view_as_complex(torch.cartesian_prod(parts, parts))
    x = x[x.real.isfinite() | x.imag.isfinite()]  # else the signs of infinity may be any
    rtol = 3e-5 if dtype is torch.complex64 else 1e-11
    with program_of(lambda x: tuple(f(x) for f in EXPONENTIAL), (x,)) as program:
        results = program(x)
    for function, result in zip(EXPONENTIAL, results):
        # Torch computes several elements at once by other formulas.
        want = torch.cat([function(x[at : at + 1]) for at in range(len(x))])
        pair = torch.view_as_real(result), torch.view_as_real(want)
        torch.testing.assert_close(*pair, rtol=rtol, atol=1e-37, equal_nan=True)


def test_infinities_and_nans():
    parts = [0.0, 1.0, float("inf"), float("-inf"), float("nan")]
    x = torch.tensor([complex(a, b) for a in parts for b in parts])
    names = "isnan isinf isfinite abs neg _conj real imag angle logical_not".split()
    cases = [Case(getattr(aten, name).default, (x,)) for name in names]
    check([*cases, Case(aten.add.Tensor, (x, 1.5)), Case(aten.eq.Tensor, (x, x))])


@pytest.mark.slow
def test_functions_in_double_precision():
    x = numbers(61, double=True)
    names = "exp log sqrt sin tanh asin acos atan acosh reciprocal abs sgn".split()
    check([Case(getattr(aten, name).default, (x,), rtol=1e-13, atol=1e-13) for name in names])


@pytest.mark.slow
def test_two_operands():
    x, y, real = numbers(7, 5), numbers(7, 5, seed=1), tensor(7, 5, seed=2)
    row, wide = numbers(5, seed=3), numbers(7, 5, seed=4, double=True)
    cases = []
    for other in (y, row, real, wide, 2.5, -1j, 3):
        tests = (
            (aten.eq.Tensor, aten.ne.Tensor)
            if isinstance(other, torch.Tensor)
            else (aten.eq.Scalar, aten.ne.Scalar)
        )
        cases += [
            Case(aten.add.Tensor, (x, other), {"alpha": 2}),
            Case(aten.sub.Tensor, (x, other)),
            Case(aten.mul.Tensor, (x, other)),
            Case(aten.div.Tensor, (x, other)),
            *(Case(test, (x, other)) for test in tests),
        ]
    cases += [
        Case(aten.mul.Tensor, (real, x)),
        Case(aten.sub.Tensor, (real, x)),
        Case(aten.div.Tensor, (real, x)),
        Case(aten.rsub.Scalar, (x, 2 - 1j)),
        Case(aten.add.Tensor, (real, 1j)),
        Case(aten.eq.Tensor, (x, x.clone())),
        Case(aten.logical_and.default, (x, y)),
        Case(aten.add.Tensor, (x, y), {"alpha": 1 - 2j}),
    ]
    check(cases)


def test_powers_of_zero():
    exponents = torch.tensor([2, 0.5, -1, -2.5, 0, 1j, -2j, 1 - 1j, -1 + 3j, 3])
    for zero in (0j, complex(-0.0, 0.0)):
        x = torch.full((10,), zero)
        check(
            [
                *(Case(aten.pow.Tensor_Scalar, (x[:1], y.item())) for y in exponents),
                Case(aten.pow.Tensor_Tensor, (x, exponents)),
                Case(aten.pow.Tensor_Tensor, (x, exponents.real)),
                Case(aten.pow.Scalar, (0.0, exponents)),
            ]
        )


@pytest.mark.slow
def test_powers():
    x, y = numbers(6, 5), numbers(6, 5, seed=1)
    x[0, 0] = 0
    exponents = [0, 1, 2, 3, -1, 0.5, -0.5, 2.5, 1 + 2j]
    cases = [Case(aten.pow.Tensor_Scalar, (x[1:], each)) for each in exponents]
    cases += [
        Case(aten.pow.Tensor_Tensor, (x[1:], y[1:])),
        Case(aten.pow.Tensor_Tensor, (x[:1].abs() + 1j, y[:1])),
        Case(aten.pow.Scalar, (2.0, y)),
    ]
    for case in cases:
        case.rtol, case.atol = 5e-5, 1e-4  # logarithms times exponents up to 3, then exponentials
    check(cases)


@pytest.mark.slow
def test_three_operands():
    x, y, z = (numbers(7, 5, seed=seed) for seed in range(3))
    mask, real = tensor(7, 5, dtype=torch.bool), tensor(7, 5)
    check(
        Case(aten.where.self, (mask, x, y)),
        Case(aten.where.self, (mask, x, real)),
        Case(aten.masked_fill.Scalar, (x, mask, 1 - 2j)),
        Case(aten.addcmul.default, (x, y, z), {"value": 0.5 + 1j}),
        Case(aten.addcdiv.default, (x, y, z)),
        Case(aten.lerp.Scalar, (x, y, 0.25), rtol=1e-5, atol=1e-5),
    )


@pytest.mark.slow
def test_conversions():
    x, real, whole = numbers(7, 5), tensor(7, 5), tensor(7, 5, dtype=torch.int64)
    check(
        Case(aten._to_copy.default, (x,), {"dtype": torch.complex128}),
        Case(aten._to_copy.default, (x,), {"dtype": torch.float32}),
        Case(aten._to_copy.default, (x,), {"dtype": torch.float16}),
        Case(aten._to_copy.default, (x,), {"dtype": torch.bool}),
        Case(aten._to_copy.default, (real,), {"dtype": torch.complex64}),
        Case(aten._to_copy.default, (whole,), {"dtype": torch.complex128}),
        Case(aten.complex.default, (real, tensor(7, 1))),
        Case(aten.polar.default, (real, tensor(7, 5, seed=1))),
        Case(aten.view_as_complex.default, (tensor(7, 5, 2),)),
        Case(aten.view_as_real.default, (x,)),
        Case(aten._neg_view.default, (x,)),
        Case(aten.clone.default, (x,)),
    )


def test_chains_are_one_kernel():
    """A chain of operators reads its inputs and writes the pairs of its result in one dispatch."""

    def chain(x, y):
        return (x * y + y.conj()).exp() / x

    x, y = numbers(33, 65), numbers(33, 65, seed=1)
    with program_of(chain, (x, y)) as program:
        torch.testing.assert_close(program.forward(x, y), chain(x, y), rtol=1e-4, atol=1e-4)
        assert [
            each.kernel.template for each in program.method("forward").executable.plan.dispatches
        ] == ["elementwise/pointwise.comp"]


@pytest.mark.slow
def test_dynamic_sizes():
    def scaled(x, y):
        return x * y.conj(), (x * y).abs()

    most = numbers(9, 4), numbers(9, 4, seed=1)
    with program_of(scaled, most, dynamic=True) as program:
        for rows in (9, 3, 2):
            x, y = (each[:rows] for each in most)
            torch.testing.assert_close(program.forward(x, y), scaled(x, y))


def test_conjugated_and_negated_inputs():
    """Torch's lazy conjugates and negations are flags of a tensor, not elements."""

    class Twice(torch.nn.Module):
        def forward(self, x):
            return x * 2, x.imag

    x = numbers(4, 3)
    with purevk.compile(Twice(), (x,)) as program:
        for given in (x, x.conj(), x.mT.conj().mT, torch._neg_view(x), x.conj()[:, ::1]):
            made, imaginary = program.forward(given)
            torch.testing.assert_close(made, given.resolve_conj().resolve_neg() * 2)
            torch.testing.assert_close(imaginary, given.imag.resolve_neg())
        array = x.numpy()[::-1].copy()[::-1]
        made, imaginary = program.forward(array)
        assert made.dtype == np.complex64
        np.testing.assert_array_equal(made, array * 2)


def test_signatures_keep_complex_types():
    class Same(torch.nn.Module):
        def forward(self, x):
            return x + 1

    x = numbers(4, 3)
    with purevk.compile(Same(), (x,)) as program:
        (given,) = program.method("forward").graph.inputs
        assert given.type.dtype.name == "complex64" and given.type.dims == (4, 3)
        with pytest.raises(purevk.InputError, match="complex64 is expected"):
            program.forward(x.real)
        out = torch.empty_like(x)
        program.method("forward")(x, out=out)
        torch.testing.assert_close(out, x + 1)


def test_between_nodes_on_the_cpu():
    """An operator without a kernel reads and gives complex tensors between kernels."""

    class Mixed(torch.nn.Module):
        def forward(self, x):
            return torch.sinc(x * 0.25).conj() * x[1:3].sum(), torch.sinc(x)[:, :2]

    x = numbers(4, 3)
    with purevk.compile(Mixed(), (x,)) as program:
        assert program.report()["cpu_nodes"] == 2
        torch.testing.assert_close(
            program.forward(x), tuple(each.resolve_conj() for each in Mixed()(x))
        )


@pytest.mark.slow
def test_complex_constants_and_states():
    class Turned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("turns", numbers(3, seed=5))
            self.register_buffer("total", torch.zeros(3, dtype=torch.complex64))

        def forward(self, x):
            self.total += x * self.turns
            return self.total * 1j, self.total

    module, x = Turned(), numbers(3)
    with purevk.compile(Turned(), (x,)) as program:
        assert program.report()["cpu_nodes"] == 0
        for _ in range(3):
            made = program.forward(x)
            torch.testing.assert_close(made, module(x))
