"""Norms of heads that rotate what they make, against eager torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import purevk
from tests.ops.quantized.harness import kernels_of
from tests.passes.decoding.harness import (
    TOLERANCES,
    NormedProjections,
    ops_of,
    rotated,
    rotated_by_slices,
)
from tests.passes.decoding.harness import check as check_cached

pytestmark = pytest.mark.device

JOINED, ROTATED = "purevk.norm fused", "purevk.rotate_halves"
JOINED_TO_CACHE = "purevk.norm to cache"


class Heads(torch.nn.Module):
    """Queries of 4 heads and keys of 2 out of one tensor, normalized and rotated."""

    def __init__(
        self,
        norm: Callable[..., torch.Tensor],
        width: int,
        heads_first: bool = True,
        rotate: Callable[..., torch.Tensor] = rotated,
    ) -> None:
        super().__init__()
        self.norm, self.rotate, self.width, self.heads_first = norm, rotate, width, heads_first
        self.weights = torch.nn.ParameterList([torch.rand(width) + 0.5 for _ in range(2)])
        self.biases = torch.nn.ParameterList([torch.randn(width) for _ in range(2)])
        self.register_buffer("cos", torch.randn(40, width))
        self.register_buffer("sin", torch.randn(40, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = []
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        parts = x.split([4 * self.width, 2 * self.width], -1)
        for part, weight, bias in zip(parts, self.weights, self.biases):
            heads = self.norm(part.unflatten(-1, (-1, self.width)), weight, bias)
            if self.heads_first:
                made.append(self.rotate(heads.transpose(1, 2), cos, sin))
            else:
                made.append(self.rotate(heads, cos[:, None], sin[:, None]))
        return tuple(made)


def rms(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-3)


def rms_alone(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), None, 1e-3)


def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-3)


def layer_without_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, None, 1e-3)


NORMS = [rms, rms_alone, layer, layer_without_bias]


def check(module: torch.nn.Module, inputs: list[torch.Tensor], shapes: object = None) -> list[str]:
    """Compares a module with eager torch; its operators."""
    with torch.no_grad(), purevk.compile(module, (inputs[0],), shapes) as program:
        for x in inputs:
            tolerance = TOLERANCES.get(x.dtype, {"rtol": 1e-5, "atol": 1e-5})
            for made, wanted in zip(program.forward(x), module(x)):
                torch.testing.assert_close(made, wanted, **tolerance)
        return ops_of(program)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.__name__)
def test_norm_and_rotation_are_one_node(
    norm: Callable[..., torch.Tensor], heads_first: bool, device: str
) -> None:
    module = Heads(norm, 16, heads_first)
    with kernels_of(device):
        ops = check(module, [torch.randn(2, 7, 96)])
    assert ops.count(JOINED) == 2 and ROTATED not in ops


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("width", [2, 4, 6, 12, 72, 128, 256])
def test_widths_of_heads(width: int, device: str) -> None:
    """Half a row of some is no multiple of what is read at once."""
    module = Heads(rms, width, rotate=rotated_by_slices)
    with kernels_of(device):
        assert check(module, [torch.randn(1, 5, 6 * width)]).count(JOINED) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_narrow_dtypes(device: str, dtype: torch.dtype) -> None:
    module = Heads(rms, 32).to(dtype)
    with kernels_of(device):
        assert check(module, [torch.randn(2, 9, 192).to(dtype)]).count(JOINED) == 2


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_numbers_of_positions_that_change(device: str) -> None:
    calls = [torch.randn(2, count, 96) for count in (6, 1, 40, 17)]
    with kernels_of(device):
        ops = check(Heads(layer, 16), calls, ({1: torch.export.Dim("tokens", max=40)},))
    assert ops.count(JOINED) == 2


class ReadTwice(Heads):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = rms(x.unflatten(-1, (-1, self.width)), self.weights[0], self.biases[0])
        return heads, self.rotate(heads.transpose(1, 2), self.cos[:7], self.sin[:7])


class InPart(Heads):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = rms(x.unflatten(-1, (-1, self.width)), self.weights[0], self.biases[0])
        first, rest = heads.transpose(1, 2).split([8, self.width - 8], -1)
        return (torch.cat((self.rotate(first, self.cos[:7, :8], self.sin[:7, :8]), rest), -1),)


class OfAllHeads(Heads):
    """As in OLMo 2: all heads of a position are normalized together."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = F.rms_norm(x, (x.shape[-1],), None, 1e-3).unflatten(-1, (-1, self.width))
        return (self.rotate(made.transpose(1, 2), self.cos[:7], self.sin[:7]),)


@pytest.mark.parametrize("kind", [ReadTwice, InPart, OfAllHeads])
def test_others_stay_apart(kind: type[Heads]) -> None:
    assert JOINED not in check(kind(rms, 16), [torch.randn(2, 7, 96)])


class Written(Heads):
    """The weight changes between the norm and the rotation."""

    def __init__(self) -> None:
        super().__init__(rms, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = rms(x.unflatten(-1, (-1, self.width)), self.scale, self.biases[0])
        self.scale.add_(1)
        return (self.rotate(heads.transpose(1, 2), self.cos[:7], self.sin[:7]),)


def test_a_weight_that_changes_is_read_before() -> None:
    module, x = Written(), torch.randn(2, 7, 96)
    with torch.no_grad(), purevk.compile(module, (x,)) as program:
        for _ in range(2):
            torch.testing.assert_close(program.forward(x)[0], module(x)[0], rtol=1e-5, atol=1e-5)


def test_the_pass_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUREVK_SKIP_PASSES", "rotate_norms")
    ops = check(Heads(rms, 16), [torch.randn(2, 7, 96)])
    assert JOINED not in ops and ops.count(ROTATED) == 2


# -- with a cache --------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("norm", [rms, layer], ids=lambda norm: norm.__name__)
def test_keys_are_stored_in_the_cache(
    norm: Callable[..., torch.Tensor], heads_first: bool, device: str
) -> None:
    calls = [(torch.randn(1, n, 24), torch.tensor(at)) for n, at in ((3, 0), (1, 3), (5, 14))]
    shapes = {"x": {1: torch.export.Dim("rows", max=8)}, "position": None}
    with kernels_of(device):
        ops = check_cached(NormedProjections(norm, heads_first), calls, shapes)
    assert {JOINED, JOINED_TO_CACHE, "purevk.write_rows"} <= set(ops)
    assert not {"purevk.norm", "purevk.rotate_to_cache"} & set(ops)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_narrow_caches(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(1, 1, 24).to(dtype) / 4, torch.tensor(at)) for at in (0, 18, 7)]
    module = NormedProjections(rms, True).to(dtype)
    with torch.no_grad():
        for buffer in (module.keys, module.values, module.cos, module.sin):
            buffer.div_(4)  # sums of rounded numbers stay small
    with kernels_of(device):
        assert JOINED_TO_CACHE in check_cached(module, calls)


def test_queries_without_a_norm_go_another_way() -> None:
    calls = [(torch.randn(1, 1, 24), torch.tensor(4))]
    ops = check_cached(NormedProjections(rms, True, of_queries=False), calls)
    assert JOINED_TO_CACHE not in ops and "purevk.rotate_to_cache" in ops
