"""bfloat16 in matmuls, norms, softmax and attention, against eager torch: with the kernels of a
software device, and with those of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import purevk
from purevk.dtypes import DType
from purevk.graph.context import Context

pytestmark = pytest.mark.device
# A rounding of the largest results, which eager torch makes after each operator.
CLOSE = {"rtol": 1.6e-2, "atol": 1.6e-2}


class Of(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)  # type: ignore[no-any-return]


def numbers(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes).to(torch.bfloat16)


def check(module: torch.nn.Module, *inputs: torch.Tensor, context: Context) -> list[str]:
    """Compares with eager torch; returns the templates of the kernels."""
    with torch.no_grad(), purevk.compile(module, inputs, context=context) as program:
        made, wanted = program.forward(*inputs), module(*inputs)
        assert made.dtype is torch.bfloat16
        torch.testing.assert_close(made, wanted, **CLOSE)
        plan = program.methods["forward"].executable.plan
        return [dispatch.kernel.template for dispatch in plan.dispatches]


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 64, 40), (3, 7, 5), (17, 33, 19), (40, 64, 36), (70, 256, 64)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_matmul(m: int, k: int, n: int, transposed: bool, either_context: Context) -> None:
    torch.manual_seed(m)
    b = numbers(n, k) if transposed else numbers(k, n)
    found = check(
        Of(lambda a, b: a @ (b.mT if transposed else b)), numbers(m, k), b, context=either_context
    )
    assert not any("pointwise" in each for each in found)  # nothing is converted


def test_batches(either_context: Context) -> None:
    torch.manual_seed(0)
    check(Of(torch.matmul), numbers(3, 16, 32), numbers(3, 32, 24), context=either_context)


@pytest.mark.parametrize("rows", [1, 6, 20])
def test_block(rows: int, either_context: Context) -> None:
    """A norm, a linear layer with bias and activation, one that adds a residual."""
    torch.manual_seed(rows)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(64)
            self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(functional.gelu(self.up(self.norm(x))))

    found = check(Block().to(torch.bfloat16), numbers(rows, 64), context=either_context)
    assert not any("pointwise" in each for each in found)


def test_weights_stay_bfloat16(either_context: Context) -> None:
    layer = torch.nn.Linear(256, 512, bias=False).to(torch.bfloat16)
    with purevk.compile(layer, (numbers(4, 256),), context=either_context) as program:
        plan = program.methods["forward"].executable.plan
        large = {
            value.type.dtype
            for dispatch in plan.dispatches
            for value in (binding.storage for binding in dispatch.bindings)
            if value.type.numel == 256 * 512
        }
        assert large == {DType.bfloat16}


@pytest.mark.parametrize("make", [torch.nn.LayerNorm, torch.nn.RMSNorm])
@pytest.mark.parametrize("width", [63, 64])
def test_norm(make: Callable[[int], torch.nn.Module], width: int, either_context: Context) -> None:
    torch.manual_seed(width)
    check(make(width).to(torch.bfloat16), numbers(3, 5, width), context=either_context)


def test_group_norm(either_context: Context) -> None:
    torch.manual_seed(0)
    check(
        torch.nn.GroupNorm(4, 16).to(torch.bfloat16), numbers(2, 16, 5, 5), context=either_context
    )


@pytest.mark.parametrize(("sizes", "dim"), [((4, 33), -1), ((4, 64), -1), ((64, 36), 0)])
def test_softmax(sizes: tuple[int, ...], dim: int, either_context: Context) -> None:
    torch.manual_seed(0)
    check(Of(lambda x: x.softmax(dim)), numbers(*sizes), context=either_context)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(queries: int, causal: bool, either_context: Context) -> None:
    torch.manual_seed(queries)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    inputs = (numbers(1, 4, queries, 32), numbers(1, 4, 20, 32), numbers(1, 4, 20, 32))
    check(Of(attend), *inputs, context=either_context)


def test_attention_with_a_mask(either_context: Context) -> None:
    torch.manual_seed(0)
    inputs = [numbers(1, 4, 20, 32) for _ in range(3)]
    attend = Of(functional.scaled_dot_product_attention)
    check(attend, *inputs, numbers(20, 20), context=either_context)


def test_infinities_and_nan(either_context: Context) -> None:
    a = torch.tensor([[float("inf"), 1.0], [float("nan"), 0.0]], dtype=torch.bfloat16)
    b = torch.tensor([[1.0, -1.0], [2.0, 0.5]], dtype=torch.bfloat16)
    with purevk.compile(Of(torch.matmul), (a, b), context=either_context) as program:
        torch.testing.assert_close(program.forward(a, b), a @ b, equal_nan=True)
