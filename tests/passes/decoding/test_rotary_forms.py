"""Rotary embeddings as models write them, against eager torch: those that one node runs, and some that
only look alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.passes.decoding.harness import check

pytestmark = pytest.mark.device

Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _turned(x: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1)


def _plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + _turned(x) * sin


def _in_float(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * cos.float() + _turned(wide) * sin.float()).to(x.dtype)


def _stays_float(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    made = wide * cos.float() + _turned(wide) * sin.float()
    return made.to(x.dtype) + made.sum()


def _to_another(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    other = torch.bfloat16 if x.dtype is torch.float16 else torch.float16
    return (wide * cos + _turned(wide) * sin).to(other)


def _joined(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, -1)
    cos, sin = cos[..., : one.shape[-1]], sin[..., : one.shape[-1]]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def _joined_otherwise(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, -1)
    cos, sin = cos[..., : one.shape[-1]], sin[..., : one.shape[-1]]
    return torch.cat((cos * one - sin * two, sin * one + cos * two), -1)


def _back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """By the negative angle."""
    one, two = x.chunk(2, -1)
    cos, sin = cos[..., : one.shape[-1]], sin[..., : one.shape[-1]]
    return torch.cat((one * cos + two * sin, two * cos - one * sin), -1)


def _crossed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Both products of the second half have the wrong angles."""
    one, two = x.chunk(2, -1)
    cos, sin = cos[..., : one.shape[-1]], sin[..., : one.shape[-1]]
    return torch.cat((one * cos - two * sin, two * sin + one * cos), -1)


def _of_two(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The halves are those of two tensors."""
    one, two = x.chunk(2, -1)[0], (x + 1).chunk(2, -1)[1]
    cos, sin = cos[..., : one.shape[-1]], sin[..., : one.shape[-1]]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def _scaled(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, -1)
    cos, sin = cos[..., : one.shape[-1]], sin[..., : one.shape[-1]]
    return torch.cat((torch.sub(one * cos, two * sin, alpha=2), two * cos + one * sin), -1)


class _Module(torch.nn.Module):
    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.rotation = rotation

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self.rotation(x, cos, sin)


FOUND = (_plain, _in_float, _joined, _joined_otherwise)
OTHERS = (_stays_float, _to_another, _back, _crossed, _of_two, _scaled)
SIZES = {
    "rows last": ((2, 3, 5, 16), (1, 1, 5, 16)),
    "heads last": ((2, 5, 3, 16), (1, 5, 1, 16)),
    "as many": ((2, 3, 3, 16), (3, 16)),
    "without batches": ((5, 3, 16), (5, 1, 16)),
    "heads first": ((3, 5, 16), (5, 16)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rotation", (*FOUND, *OTHERS), ids=lambda each: each.__name__)
def test_rotations(rotation: Rotation, sizes: str, dtype: torch.dtype) -> None:
    if rotation in OTHERS and sizes != "rows last":
        pytest.skip("not a rotation for any sizes")
    generator = torch.Generator().manual_seed(0)
    x, angles = (torch.randn(each, generator=generator) for each in SIZES[sizes])
    given = (x.to(dtype), angles.cos().to(dtype), angles.sin().to(dtype))
    ops = check(_Module(rotation), [given])
    if rotation in FOUND:
        assert ops.count("purevk.rotate_halves") == 1
        assert set(ops) <= {
            "purevk.rotate_halves",
            "aten.view.default",
            "purevk.pointwise",
            "purevk.copy",
        }


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.chunk(2, -1)[1].half(),
        lambda x: x.unbind(0)[1].half(),
        lambda x: x.max(-1)[1].float(),
    ],
)
def test_conversions_of_another_result(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Nobody reads the first result of the node that makes what is converted."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    check(Module(), [(torch.randn(2, 10),)])
