"""Constant weights in panels of columns, against torch, and which matmuls read them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import purevk
from purevk.graph.context import default_context

pytestmark = pytest.mark.device


class TwoLayers(nn.Module):
    """Linear layers of two widths, the second with what a residual adds."""

    def __init__(self, terms: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(terms, columns, bias)
        self.second = nn.Linear(columns, terms, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.second(torch.relu(self.first(x)))
        return result


def is_software() -> bool:
    return not default_context().traits.profile.has_fast_shared_memory


def panels(program: purevk.Program) -> int:
    """Dispatches that read a weight in panels."""
    plan = program.method("forward").executable.plan
    return sum(("B_PANELS", "1") in each.kernel.macros for each in plan.dispatches)


@pytest.mark.parametrize("rows", [(1,), (3,), (2, 17)], ids=str)
@pytest.mark.parametrize(
    ("terms", "columns", "bias", "expected"),
    [(8, 24, True, 2), (40, 104, False, 2), (16, 8, True, 2), (12, 24, False, 1), (7, 8, True, 0)],
)
@torch.inference_mode()
def test_layers_have_the_results_of_torch(
    rows: tuple[int, ...], terms: int, columns: int, bias: bool, expected: int
) -> None:
    torch.manual_seed(0)
    module, x = TwoLayers(terms, columns, bias).eval(), torch.randn(*rows, terms)
    program = purevk.compile(module, (x,))
    torch.testing.assert_close(program.forward(x), module(x), rtol=1e-5, atol=1e-5)
    assert panels(program) == (expected if is_software() else 0)


@torch.inference_mode()
def test_matmuls_of_one_weight_share_its_panels() -> None:
    weight = nn.Parameter(torch.randn(16, 24))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.sin(x @ self.weight).sum() + (y @ self.weight).exp()

    if not is_software():
        pytest.skip("devices with shared memory have other kernels")
    inputs = torch.randn(3, 16), torch.randn(2, 16)
    program = purevk.compile(Twice().eval(), inputs)
    torch.testing.assert_close(program.forward(*inputs), Twice()(*inputs), rtol=1e-5, atol=1e-5)
    assert panels(program) == 2
    plan = program.method("forward").executable.plan
    read = {
        each.bindings[1].storage for each in plan.dispatches if each.kernel.template[:6] == "matmul"
    }
    assert len(read) == 1


class Tied(nn.Module):
    """An embedding whose table is the weight of the last layer too."""

    def __init__(self, rows: int, width: int, index: bool) -> None:
        super().__init__()
        self.table, self.index = nn.Parameter(torch.randn(rows, width)), index

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embed = nn.functional.embedding
        rows = self.table[tokens] if self.index else embed(tokens, self.table)
        return torch.tanh(rows) @ self.table.T


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("index", [False, True])
@torch.inference_mode()
def test_a_tied_table_is_in_memory_once(dtype: torch.dtype, index: bool) -> None:
    torch.manual_seed(0)
    module = Tied(56, 20, index)
    tokens = torch.tensor([[0, 7, 8, 55, 13]], dtype=dtype)
    program = purevk.compile(module, (tokens,))
    torch.testing.assert_close(program.forward(tokens), module(tokens), rtol=1e-5, atol=1e-5)
    assert program.memory.weights < 2 * module.table.nbytes or not is_software()
    if index:  # numbers below 0 count from the end
        tokens -= 56
        torch.testing.assert_close(program.forward(tokens), module(tokens), rtol=1e-5, atol=1e-5)
    for wrong in (56, -1 - 56 * index):
        tokens[0, 1] = wrong
        with pytest.raises(purevk.PurevkError):
            program.forward(tokens)
