"""Matmuls of few rows with the norm before and what reads them after, against eager torch. The
device has the traits of a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from purevk.graph.context import Context, default_context
from purevk.ops.matmul import operators as matmul
from purevk.ops.quantized import choice as quantized
from purevk.ops.quantized.kernels import Form, QuantizedMatmul
from purevk.tuning import DEFAULT, DeviceTraits
from purevk.tuning.tiles import DotSizes
from tests.passes.decoding.harness import Int4, Int8, Projections, check, rotated

pytestmark = pytest.mark.device
_NAMES = ("purevk.matmul fused", "purevk.matmul to cache", "purevk.norm", "purevk.pointwise")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Context:
    """The device of the tests as a GPU without matrix cores, which would take some of these rows."""
    context = default_context()
    traits = dataclasses.replace(
        context.traits,
        profile=DEFAULT,
        cores=4,
        max_texels=0,
        coopmat_shape=None,
        coopmat_columns=(),
    )
    monkeypatch.setattr(context, "traits", traits)
    return context


@pytest.fixture(params=["rows", "columns"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, gpu: Context) -> str:
    """How weights are dense: along the rows or the columns of B. The latter have a kernel of their
    own, which takes many terms by default."""
    monkeypatch.setattr(matmul, "prefers_columns", lambda *_: request.param == "columns")
    size = gpu.traits.subgroup_size
    tiles = DEFAULT.tiles._replace(dot=(DotSizes(2 * size, 1), DotSizes(size, 2)))
    profile = dataclasses.replace(DEFAULT, name="columns", tiles=tiles)
    monkeypatch.setattr(gpu, "traits", dataclasses.replace(gpu.traits, profile=profile))
    return str(request.param)


def counts(ops: list[str]) -> tuple[int, ...]:
    return tuple(ops.count(name) for name in _NAMES)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("heads_first", "bias", "rows", "dtype"),
    [(True, False, 1, torch.float16), (False, True, 5, torch.float32)],
)
def test_projections_to_a_cache(
    norm: bool, heads_first: bool, bias: bool, rows: int, dtype: torch.dtype, gpu: Context
) -> None:
    torch.manual_seed(0)
    module = Projections(heads_first, rotated, bias, norm).to(dtype)
    calls = [
        (torch.randn(1, rows, 24, dtype=dtype), torch.tensor([at])) for at in (0, 7, 19 - rows)
    ]
    ops = check(module, calls, context=gpu)
    assert counts(ops)[1:3] == (1, 0) and "purevk.rotate_to_cache" not in ops


def test_up_to_8_rows(gpu: Context) -> None:
    torch.manual_seed(1)
    length = torch.export.Dim("length", min=2, max=8)
    calls = [(torch.randn(1, n, 24), torch.tensor([at])) for n, at in ((8, 0), (3, 8), (2, 17))]
    module = Projections(True, rotated, norm=True)
    ops = check(module, calls, ({1: length}, None), gpu)
    assert counts(ops)[1:3] == (1, 0)


def test_many_rows_stay_as_they_are(gpu: Context) -> None:
    torch.manual_seed(2)
    module = Projections(True, rotated, norm=True)
    ops = check(module, [(torch.randn(1, 17, 24), torch.tensor([1]))], context=gpu)
    assert counts(ops)[:3] == (0, 0, 1) and ops.count("purevk.rotate_to_cache") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("norm", "bias", "rows"), [(True, False, 1), (False, True, 1), (True, True, 7)]
)
def test_layouts_of_projections(
    layout: str, norm: bool, bias: bool, rows: int, dtype: torch.dtype, gpu: Context
) -> None:
    torch.manual_seed(9)
    module = Projections(True, rotated, bias, norm, width=520).to(dtype)
    calls = [(torch.randn(1, rows, 520, dtype=dtype), torch.tensor([at])) for at in (0, 19 - rows)]
    kernels: set[str] = set()
    ops = check(module, calls, context=gpu, kernels=kernels)
    assert counts(ops)[1:3] == (1, 0)
    assert ("matmul/matmul_dot.comp" in kernels) == (layout == "columns")


class WideNorm(torch.nn.Module):
    """A norm whose weight is of float32, as in Gemma."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-3)
        return (scaled * (1 + self.weight.float())).type_as(x)


@pytest.mark.parametrize("linear", [torch.nn.Linear, Int4])
def test_norms_with_weights_of_another_dtype(
    layout: str, linear: Callable[..., torch.nn.Module], gpu: Context
) -> None:
    torch.manual_seed(5)
    width = 64 if linear is Int4 else 520
    module = Projections(True, rotated, linear=linear, width=width)
    module.norm = WideNorm(width)
    module = module.half()
    calls = [(torch.randn(1, 1, width).half(), torch.tensor([at])) for at in (0, 18)]
    assert counts(check(module, calls, context=gpu))[2] == 0


class Gated(torch.nn.Module):
    """A gated network of 40 columns after a norm; `join` has what the projections give."""

    def __init__(
        self,
        join: Callable[..., torch.Tensor],
        bias: bool = False,
        linear: Callable[..., torch.nn.Module] = torch.nn.Linear,
        width: int = 24,
    ) -> None:
        super().__init__()
        self.join = join
        self.norm = torch.nn.RMSNorm(width, eps=1e-2)
        self.first, self.second = (linear(width, 40, bias) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return self.join(self.first(h), self.second(h), h)


def _gate(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return functional.silu(a) * b


def _gate_second(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return functional.gelu(b) - a


def _sum_too(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return functional.silu(a) * b + b.sum(-1, keepdim=True)


def _normalized_too(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return functional.silu(a) * b + h.sum(-1, keepdim=True)


def _rolled(a: torch.Tensor, b: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return functional.silu(a[..., :20]) * b[..., 20:]


@pytest.mark.parametrize(
    ("join", "shape", "bias", "dtype", "wanted"),
    [
        (_gate, (1, 1, 24), False, torch.float16, (1, 0, 0, 0)),
        (_gate, (2, 3, 24), True, torch.float32, (1, 0, 0, 0)),
        (_gate_second, (7, 24), False, torch.float32, (1, 0, 0, 0)),
        (_sum_too, (2, 24), False, torch.float32, (1, 0, 0, 1)),
        (_normalized_too, (2, 24), True, torch.float32, (0, 0, 1, 1)),
        (_rolled, (3, 24), False, torch.float32, (1, 0, 0, 1)),
    ],
)
def test_gates(
    join: Callable[..., torch.Tensor],
    shape: tuple[int, ...],
    bias: bool,
    dtype: torch.dtype,
    wanted: tuple[int, ...],
    gpu: Context,
) -> None:
    torch.manual_seed(3)
    module = Gated(join, bias).to(dtype)
    assert counts(check(module, [(torch.randn(shape, dtype=dtype),)], context=gpu)) == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("shape", "bias"), [((1, 520), False), ((2, 3, 520), True)])
def test_layouts_of_gates(
    layout: str, shape: tuple[int, ...], bias: bool, dtype: torch.dtype, gpu: Context
) -> None:
    torch.manual_seed(10)
    module = Gated(_gate, bias, width=520).to(dtype)
    kernels: set[str] = set()
    ops = check(module, [(torch.randn(shape, dtype=dtype),)], context=gpu, kernels=kernels)
    assert counts(ops) == (1, 0, 0, 0)
    assert ("matmul/matmul_dot.comp" in kernels) == (layout == "columns")


@pytest.mark.parametrize("columns", [1, 3])
def test_layouts_of_few_columns(layout: str, columns: int, gpu: Context) -> None:
    """A weight of one column is dense along both dims."""
    torch.manual_seed(12)
    module = torch.nn.Sequential(torch.nn.RMSNorm(520), torch.nn.Linear(520, columns))
    kernels: set[str] = set()
    ops = check(module, [(torch.randn(2, 520),)], context=gpu, kernels=kernels)
    if columns > 1 or layout == "rows":
        assert counts(ops)[0] == 1
        assert ("matmul/matmul_dot.comp" in kernels) == (layout == "columns")


def test_a_norm_and_what_follows(gpu: Context) -> None:
    """A pointwise program after a matmul of normalized rows is part of the kernel, too."""

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = torch.nn.RMSNorm(32), torch.nn.Linear(32, 37)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.head(self.norm(x[:, -1]))) + y

    torch.manual_seed(4)
    calls = [(torch.randn(3, 5, 32) * 100, torch.randn(3, 37)) for _ in range(2)]
    assert counts(check(Head(), calls, context=gpu)) == (1, 0, 0, 0)


def test_it_can_be_skipped(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_SKIP_PASSES", "fuse_few_rows")
    torch.manual_seed(5)
    assert counts(check(Gated(_gate), [(torch.randn(2, 24),)], context=gpu)) == (0, 0, 1, 1)


_QUANTIZED = (
    "purevk.quantized_matmul fused",
    "purevk.quantized_matmul to cache",
    "purevk.quantized_matmul",
    "purevk.norm",
)


@pytest.mark.parametrize(
    ("linear", "bias", "rows"), [(Int4, False, 1), (Int4, True, 3), (Int8, False, 1)]
)
def test_quantized_gates(
    linear: Callable[..., torch.nn.Module], bias: bool, rows: int, gpu: Context
) -> None:
    torch.manual_seed(6)
    ops = check(Gated(_gate, bias, linear, 96), [(torch.randn(1, rows, 96),)], context=gpu)
    assert [ops.count(name) for name in _QUANTIZED] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("heads_first", "norm", "linear", "bias", "rows", "dtype"),
    [
        (True, True, Int4, True, 1, torch.float32),
        (False, False, Int8, False, 1, torch.float32),
        (True, True, Int4, False, 2, torch.float16),
    ],
)
def test_quantized_projections_to_a_cache(
    heads_first: bool,
    norm: bool,
    linear: Callable[..., torch.nn.Module],
    bias: bool,
    rows: int,
    dtype: torch.dtype,
    gpu: Context,
) -> None:
    torch.manual_seed(7)
    module = Projections(heads_first, rotated, bias, norm, linear, 96).to(dtype)
    calls = [(torch.randn(1, rows, 96, dtype=dtype), torch.tensor([at])) for at in (0, 11)]
    ops = check(module, calls, context=gpu)
    assert [ops.count(name) for name in _QUANTIZED] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("linear", "bias", "dtype"),
    [
        (Int4, False, torch.float16),
        (Int4, False, torch.float32),
        (Int4, True, torch.float32),
        (Int8, False, torch.float32),
    ],
)
def test_one_row_of_many_terms(
    linear: Callable[..., torch.nn.Module], bias: bool, dtype: torch.dtype, gpu: Context
) -> None:
    torch.manual_seed(11)
    x, kernels = torch.randn(1, 1, 544, dtype=dtype), set[str]()
    gated = Gated(_gate, bias, linear, 544).to(dtype)
    ops = check(gated, [(x,)], context=gpu, kernels=kernels)
    assert [ops.count(name) for name in _QUANTIZED] == [1, 0, 0, 0]
    projections = Projections(True, rotated, bias, True, linear, 544).to(dtype)
    for each in (projections.q, projections.k, projections.v):
        each.scales *= 0.2  # their products, with so many terms, stay as small as tolerances expect
    calls = [(x, torch.tensor([at])) for at in (0, 11)]
    ops = check(projections, calls, context=gpu, kernels=kernels)
    assert [ops.count(name) for name in _QUANTIZED] == [0, 1, 0, 0]
    assert {name for name in kernels if "quantized" in name} == {"quantized/qdot.comp"}


def test_quantized_weights_stay_apart(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_SKIP_PASSES", "merge_quantized")
    torch.manual_seed(8)
    ops = check(Gated(_gate, False, Int4, 64), [(torch.randn(2, 64),)], context=gpu)
    assert [ops.count(name) for name in _QUANTIZED] == [0, 0, 2, 1]


@pytest.mark.parametrize("bias", [False, True])
def test_software_devices_join_quantized_weights_without_epilogues(bias: bool) -> None:
    if default_context().traits.profile.has_fast_shared_memory:
        pytest.skip("GPUs join more of them")
    torch.manual_seed(9)
    calls = [(torch.randn(1, 1, 96), torch.tensor([at])) for at in (0, 11)]
    ops = check(Projections(True, rotated, bias, False, Int4, 96), calls)
    assert ops.count("purevk.quantized_matmul") == 1
    ops = check(Gated(_gate, bias, Int4, 64), [(torch.randn(2, 64),)])
    assert ops.count("purevk.quantized_matmul") == 2


# -- the kernel on matrix cores, in scalar arithmetic ----------------------------------------------
@pytest.fixture
def fragments(gpu: Context, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Has matmuls of few rows choose as for a GPU with matrix cores; a set for the kernels that ran."""

    plain = quantized.choose

    def choose(traits: DeviceTraits, matmul: QuantizedMatmul) -> Form:
        made = plain(
            dataclasses.replace(
                traits,
                features=traits.features | {"subgroup_shuffle", "subgroup_arithmetic"},
                max_shared_memory=49152,
                coopmat_columns=(8,),
                fragment_order=lambda dtype, columns: True,
            ),
            matmul,
        )
        if made.template != "quantized/qdot_coopmat.comp":
            return plain(traits, matmul)
        macros = {**made.macros, "COOPMAT": 0}
        return dataclasses.replace(made, macros=macros, subgroup_size=None)

    monkeypatch.setattr(quantized, "choose", choose)
    return set()


@pytest.mark.parametrize(("rows", "width"), [(2, 128), (3, 288), (4, 288), (4, 128)])
def test_gates_on_fragments(rows: int, width: int, gpu: Context, fragments: set[str]) -> None:
    torch.manual_seed(6)
    gated = Gated(_gate, False, Int4, width).half()
    ops = check(gated, [(torch.randn(1, rows, width).half(),)], context=gpu, kernels=fragments)
    assert [ops.count(name) for name in _QUANTIZED] == [1, 0, 0, 0]
    assert "quantized/qdot_coopmat.comp" in fragments


@pytest.mark.parametrize("heads_first", [True, False])
def test_projections_on_fragments(heads_first: bool, gpu: Context, fragments: set[str]) -> None:
    """Of 2 to 4 rows in one program."""
    torch.manual_seed(7)
    module = Projections(heads_first, rotated, False, True, Int4, 256).half()
    for each in (module.q, module.k, module.v):
        each.scales *= 0.3  # their products stay as small as tolerances expect
    calls = [
        (torch.randn(1, rows, 256).half(), torch.tensor([at])) for rows, at in ((4, 0), (3, 8))
    ]
    length = torch.export.Dim("length", min=2, max=4)
    ops = check(module, calls, ({1: length}, None), gpu, kernels=fragments)
    assert [ops.count(name) for name in _QUANTIZED] == [0, 1, 0, 0]
    assert "quantized/qdot_coopmat.comp" in fragments


def test_more_rows_compute_their_norm_once(gpu: Context, fragments: set[str]) -> None:
    torch.manual_seed(8)
    gated = Gated(_gate, False, Int4, 128).half()
    ops = check(gated, [(torch.randn(1, 7, 128).half(),)], context=gpu, kernels=fragments)
    assert [ops.count(name) for name in _QUANTIZED[:2]] == [0, 0]
    assert ops.count("purevk.norm") == 1
