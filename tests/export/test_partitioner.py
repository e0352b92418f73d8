"""What `PurevkPartitioner` delegates, in files that executorch writes and purevk runs, against
eager torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")

import purevk  # noqa: E402
from purevk import pte  # noqa: E402
from purevk.ops import registry  # noqa: E402
from tests.models import quantized  # noqa: E402
from tests.models.quantized import EXPORTS  # noqa: E402

pytestmark = [pytest.mark.export, pytest.mark.device, pytest.mark.slow]


class Beyond(torch.nn.Module):
    """Operators that ET-VK's partitioner leaves to the CPU, between ones that it takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, indices = torch.topk(torch.erf(x).cumsum(1), 4)
        attended = torch.nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None]
        )
        return values * indices + attended[0, 0, :, :4].log1p()


class Special(torch.nn.Module):
    """One operator that the test takes the kernel away from: nearly all of executorch's have one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x.exp()).sum(-1)


@pytest.fixture
def lower(tmp_path: Path) -> Callable[..., tuple[Any, purevk.Program, int, int]]:
    """The partitioner, the program, and how many delegates and kernels its file has."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    from purevk.export import PurevkPartitioner

    def make(module: torch.nn.Module, inputs: tuple, dynamic: Any = None, **settings: Any) -> tuple:
        partitioner = PurevkPartitioner(**settings)
        with torch.no_grad():
            exported = torch.export.export(
                module.eval(), inputs, dynamic_shapes=dynamic, strict=False
            )
            config = EdgeCompileConfig(_check_ir_validity=False)
            edge = to_edge_transform_and_lower(
                exported, partitioner=[partitioner], compile_config=config
            )
        path = tmp_path / "model.pte"
        path.write_bytes(edge.to_executorch().buffer)
        with pte.read_program(path) as read:
            plan = read.method("forward")
            kernels = sum(
                isinstance(each, pte.types.KernelCall) for each in plan.chains[0].instructions
            )
            delegates = len(plan.delegates)
        return partitioner, purevk.load(path), delegates, kernels

    return make


def test_everything_is_one_delegate(lower) -> None:
    x = torch.rand(6, 16)
    partitioner, program, delegates, kernels = lower(
        Beyond(), (x,), ({0: torch.export.Dim("n", min=2, max=32)},)
    )
    assert (partitioner.refused, delegates, kernels) == ([], 1, 0)
    for rows in (6, 2, 31):
        x = torch.rand(rows, 16)
        torch.testing.assert_close(program.forward(x), Beyond()(x))
    assert program.report()["cpu_nodes"] == 0


def test_portable_files_hold_what_etvk_runs(lower) -> None:
    x = torch.rand(6, 16)
    partitioner, program, delegates, kernels = lower(Beyond(), (x,), portable_to_etvk=True)
    refused = {each.operator: each.reason for each in partitioner.refused}
    assert {"aten.erf.default", "aten.cumsum.default", "aten.topk.default"} <= set(refused)
    assert refused["aten.logical_not.default"] == "ET-VK's runtime has no such operator"
    assert delegates > 1 and kernels == len(partitioner.refused)
    torch.testing.assert_close(program.forward(x), Beyond()(x))


def test_what_has_no_kernel_stays_outside(lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._canonical, "aten.special_bessel_j0.default")
    x = torch.rand(4, 8)
    partitioner, program, delegates, kernels = lower(Special(), (x,))
    assert [str(each) for each in partitioner.refused] == [
        "aten_special_bessel_j0_default: aten.special_bessel_j0.default: no kernel"
    ]
    assert (delegates, kernels, program.report()["cpu_nodes"]) == (2, 1, 1)
    torch.testing.assert_close(program.forward(x), Special()(x))


def test_options_and_lists(lower) -> None:
    module, x = (
        torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)),
        torch.rand(3, 16),
    )
    partitioner, program, delegates, kernels = lower(
        module,
        (x,),
        compile_options={"force_fp16": True},
        operator_blocklist=[torch.ops.aten.gelu.default],
    )
    assert [(each.operator, each.reason) for each in partitioner.refused] == [
        ("aten.gelu.default", "in operator_blocklist")
    ]
    assert (delegates, kernels) == (2, 1)
    torch.testing.assert_close(program.forward(x), module(x), atol=2e-3, rtol=2e-3)
    partitioner, _, delegates, kernels = lower(
        module, (x,), nn_module_allowlist=["torch.nn.modules.activation.GELU"]
    )
    assert delegates == 1 and {each.reason for each in partitioner.refused} == {
        "its module is not in nn_module_allowlist"
    }
    assert len(partitioner.refused) == kernels


def test_integers_keep_64_bits(lower) -> None:
    class Big(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3 + 1

    x = torch.tensor([2**40, -5])
    partitioner, program, delegates, kernels = lower(Big(), (x,))
    assert (partitioner.refused, delegates, kernels) == ([], 1, 0)
    assert torch.equal(program.forward(x), x * 3 + 1)


def _cost(blob: bytes, inputs: tuple, wanted: torch.Tensor) -> tuple[float, int, int, int]:
    """How far a file is from a result, relative to its largest element, and its delegates and
    kernels, GPU segments, and nodes on the CPU."""
    with pte.read_program(blob) as read:
        calls = read.method("forward").chains[0].instructions
        outside = sum(isinstance(each, pte.types.KernelCall) for each in calls)
    with purevk.load(blob) as program:
        error = (program.forward(*inputs) - wanted).abs().max() / wanted.abs().max()
        report = program.report()
    return float(error), outside, report["segments"], report["cpu_nodes"]


@pytest.mark.parametrize(
    "flow", ["xnnpack_dynamic_linear", "vulkan_dynamic4", "torchao_8da4w", "xnnpack_static_linear"]
)
def test_quantized_models_are_no_worse_than_with_etvk(flow: str) -> None:
    """Against the quantized model in eager torch. The exporter folds a quantize and its dequantize
    away, so both partitioners may leave it."""
    from purevk.export import PurevkPartitioner

    theirs = quantized.export(flow)
    partitioner = PurevkPartitioner()
    ours = quantized.export(flow, partitioner)
    error, *cost = _cost(ours.blob, ours.inputs, ours.eager_result)
    their_error, *their_cost = _cost(theirs.blob, theirs.inputs, theirs.eager_result)
    assert error <= their_error * 1.05 + 1e-6
    assert all(one <= two for one, two in zip(cost, their_cost))
    assert partitioner.refused == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_of_4_bits_for_any_number_of_outputs(lower, dynamic: bool) -> None:
    """executorch's replacement takes multiples of 4 alone."""
    pytest.importorskip("torchao")
    from torchao.quantization import (
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
        quantize_,
    )
    from torchao.quantization.granularity import PerGroup

    torch.manual_seed(0)
    module, x = torch.nn.Sequential(torch.nn.Linear(64, 10)).eval(), torch.randn(3, 64)
    config = Int8DynamicActivationIntxWeightConfig if dynamic else IntxWeightOnlyConfig
    quantize_(module, config(torch.int4, PerGroup(32)))
    partitioner, program, delegates, kernels = lower(module, (x,))
    assert (partitioner.refused, delegates, kernels) == ([], 1, 0)
    tolerance = 2e-2 if dynamic else 1e-5  # the exporter folds the quantization of x away
    with torch.no_grad():
        torch.testing.assert_close(program.forward(x), module(x), rtol=tolerance, atol=tolerance)


# Flows whose quantization of activations the exporter folds away, at least in part.
_FOLDED = {
    "xnnpack_static_tensor",
    "xnnpack_dynamic_tensor",
    "xnnpack_static_conv_tensor",
    "xnnpack_static_conv1d",
    "xnnpack_static_attention",
    "xnnpack_dynamic_attention",
    "torchao_8da4w_attention",
}


_TO_BACKEND = ("embedding_byte", "8da4w_per_token", "xnnpack_static_conv1d", "vulkan_w8_attention")


@pytest.mark.parametrize(
    "flow, whole", [*((flow, True) for flow in EXPORTS), *((flow, False) for flow in _TO_BACKEND)]
)
def test_quantized_models_are_delegated(flow: str, whole: bool) -> None:
    """In one delegate and one segment, against the quantized model in eager torch and the float
    model."""
    from purevk.export import PurevkPartitioner

    made = quantized.export(flow, PurevkPartitioner(), whole)
    error, outside, segments, cpu_nodes = _cost(made.blob, made.inputs, made.eager_result)
    assert (outside, segments, cpu_nodes) == (0, 1, 0)
    assert error < (2e-2 if flow in _FOLDED else 1e-5)
    assert _cost(made.blob, made.inputs, made.float_result)[0] < quantized.EXPORTS[flow].tolerance


def test_constants_of_operators_that_etvk_lacks(lower) -> None:
    class Constants(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(4, 5))
            self.register_buffer("edges", torch.linspace(0, 1, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.logaddexp(self.weight, x) + torch.searchsorted(self.edges, x)

    module, x = Constants(), torch.rand(4, 5)
    partitioner, program, delegates, kernels = lower(module, (x,))
    assert (partitioner.refused, delegates, kernels) == ([], 1, 0)
    with torch.no_grad():
        torch.testing.assert_close(program.forward(x), module(x))


def test_portable_files_quantize_on_the_way_as_eager_torch_does() -> None:
    """ET-VK's runtime has no operators for scales that a call computes. They stay outside of the
    delegates, as kernels of executorch's, and purevk runs them on the device."""
    from purevk.export import PurevkPartitioner

    partitioner = PurevkPartitioner(portable_to_etvk=True)
    made = quantized.export("xnnpack_dynamic_linear", partitioner)
    assert "quantized_decomposed.choose_qparams.tensor" in {
        each.operator for each in partitioner.refused
    }
    error, outside, segments, cpu_nodes = _cost(made.blob, made.inputs, made.eager_result)
    assert error < 1e-5 and outside > 0 and (segments, cpu_nodes) == (1, 0)


class Copies(torch.nn.Module):
    """Copies into a buffer, with a conversion."""

    def __init__(self, dtype: torch.dtype, converts: bool, *sizes: int) -> None:
        super().__init__()
        self.converts = converts
        self.register_buffer("last", torch.zeros(*sizes, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        self.last.copy_(made.to(self.last.dtype).expand_as(self.last) if self.converts else made)
        return self.last + 1


@pytest.mark.parametrize("dtype, sizes", [(torch.float16, (4,)), (torch.float32, (3, 4))])
def test_a_conversion_that_torch_drops(lower, dtype, sizes):
    from purevk.errors import UnsupportedProgramError

    x = torch.tensor([1.00049, 2, 3, 4])
    with pytest.raises(UnsupportedProgramError, match="the buffer last is .* and would become"):
        lower(Copies(dtype, False, *sizes), (x,))
    _, program, _, _ = lower(Copies(dtype, True, *sizes), (x,))
    with program:
        wanted = Copies(dtype, True, *sizes)(x)
        torch.testing.assert_close(program.forward(x), wanted, atol=0, rtol=0)


class Swapped(torch.nn.Module):
    """Two buffers of one type, each of which gets what is computed from the other one, and a counter
    beside a constant of its type."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(3.0))
        self.register_buffer("b", torch.full((3,), 7.0))
        self.register_buffer("n", torch.tensor(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.a, self.b = self.b + x, self.a * 2
        self.n.add_(1)
        return self.a - self.b, x * self.n


class Unread(torch.nn.Module):
    """A buffer that is written before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(3.0))
        self.register_buffer("b", torch.full((3,), 7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.copy_(x)
        self.b.add_(self.a)
        self.a.add_(1)
        return self.b * 1


class Earlier(torch.nn.Module):
    """Gives what a buffer held before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.a.clone()
        self.a.mul_(x)
        return before, self.a + x


@pytest.mark.parametrize("kind", [Swapped, Unread, Earlier])
def test_buffers_of_one_type(lower, kind: type[torch.nn.Module]) -> None:
    module, x = kind(), torch.arange(1.0, 4.0)
    expected = kind()
    _, program, delegates, kernels = lower(module, (x,))
    assert (delegates, kernels) == (1, 0)
    for scale in (1, 2, 3):
        purevk.testing.assert_close(program.forward(x * scale), expected(x * scale))


class Divided(torch.nn.Module):
    """A buffer that is read before and after an operator on the CPU, and written after it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (self.a + x).sigmoid().exp() * 2
        self.a.add_(y)
        return self.a + y


def test_a_buffer_of_two_delegates(lower) -> None:
    x, expected, blocked = torch.arange(1.0, 4.0), Divided(), [torch.ops.aten.exp.default]
    _, program, delegates, _ = lower(Divided(), (x,), operator_blocklist=blocked)
    assert delegates == 2
    for scale in (1, 2, 3):
        purevk.testing.assert_close(program.forward(x * scale), expected(x * scale))


def test_numbers_that_only_a_call_knows(lower) -> None:
    """What makes them stays outside of the delegate if what takes them does."""

    class Numbers(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            count = (x @ x).remainder(7).item()
            torch._check(count >= 0)
            torch._check(count < 7)
            return torch.arange(count), torch.full((2,), x.sum().item()), y * count, y.exp()

    x, y = torch.tensor([3, 4, 5]), torch.tensor([1.0, 2.0, 3.0])
    partitioner, program, delegates, _ = lower(Numbers(), (x, y))
    assert delegates
    assert "aten._local_scalar_dense.default" in {each.operator for each in partitioner.refused}
    for rise in range(3):
        for have, want in zip(program.forward(x + rise, y), Numbers()(x + rise, y), strict=True):
            torch.testing.assert_close(have, want)


def test_numbers_that_are_equal_in_python(lower) -> None:
    class Numbers(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.where(x > 0, 1.0, 2.0), (x > 0).any(1), x.long().sum(-1) ** -1.0

    x = torch.tensor([[1.0, -2.0, 3.0], [-4.0, -5.0, -6.0]])
    _, program, delegates, _ = lower(Numbers(), (x,))
    assert delegates == 1
    for have, want in zip(program.forward(x), Numbers()(x), strict=True):
        torch.testing.assert_close(have, want)
