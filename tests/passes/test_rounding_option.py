"""The option `round` of `purevk.compile`, `purevk.load` and `torch.compile`."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import purevk


class Chain(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b + a) * 0.3 - b


def test_rounding_option(tmp_path: Path) -> None:
    a, b = (torch.randn(2, 400, generator=torch.Generator().manual_seed(1)) * 9).half()
    expected = Chain()(a, b)
    program = purevk.compile(Chain(), (a, b), round="eager")
    assert torch.equal(program(a, b), expected)
    path = tmp_path / "chain.pvk"
    program.save(path)
    # The second load of each kind takes the plan of the first.
    for _ in range(2):
        with purevk.load(path, round="eager") as loaded:
            assert torch.equal(loaded(a, b), expected)
        with purevk.load(path) as loaded:
            assert not torch.equal(loaded(a, b), expected)
    with purevk.load(path, round="eager") as loaded:
        assert torch.equal(pickle.loads(pickle.dumps(loaded))(a, b), expected)
    with pytest.raises(purevk.InputError, match=r"round='half' is not known"):
        purevk.load(path, round="half")  # type: ignore[call-overload]


def test_rounding_option_of_torch_compile() -> None:
    a, b = (torch.randn(2, 400, generator=torch.Generator().manual_seed(2)) * 9).bfloat16()
    options = {"round": "eager", "fallback": False}
    compiled = torch.compile(Chain(), backend="purevk", options=options)
    with torch.no_grad():
        assert torch.equal(compiled(a, b), Chain()(a, b))
        with pytest.raises(Exception, match=r"round='half' is not known"):
            torch.compile(Chain(), backend="purevk", options={"round": "half"})(a, b)
