"""Programs that must find all kernels in the cache."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import purevk
from purevk import KernelNotCachedError, api, knobs
from purevk.cache import Cache
from purevk.errors import InputError, ShaderCompilerError
from purevk.graph.context import Context

pytestmark = pytest.mark.device


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Takes 1 to 9 rows; a single row has a lowering of its own."""
    path = tmp_path / "rows.pvk"

    class Rows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.avg_pool1d(torch.softmax(x, 0), 2).cumsum(0)

    sizes = [{0: torch.export.Dim("n", min=1, max=9)}]
    with purevk.compile(Rows().eval(), torch.ones(2, 4, 6), sizes) as program:
        program.save(path)
    return path


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """The device with an empty cache."""
    with Context(api.open_device(), Cache(tmp_path / "cache")) as made:
        yield made


def test_what_is_missing_is_named(model: Path, context: Context) -> None:
    with pytest.raises(KernelNotCachedError) as caught:
        purevk.load(model, context=context, compile="never")
    error = caught.value
    assert "rows.pvk, method forward, exported bounds" in error.where
    assert str(context.cache) in error.where
    assert "=" not in error.why and len(error.why) < 300  # no macros
    assert "reduce/softmax.comp" in error.why and "no entry of" in error.why
    assert "purevk warmup" in error.next
    assert isinstance(error, ShaderCompilerError)
    assert pickle.loads(pickle.dumps(error)).why == error.why
    assert context.kernels.report.compiled == 0


def test_a_warm_cache_is_all_that_it_takes(model: Path, context: Context) -> None:
    x = torch.rand(3, 4, 6)
    with purevk.load(model, context=context) as program:
        expected = program.forward(x)
    with purevk.load(model, context=context, compile="never") as program:
        assert torch.equal(program.forward(x), expected)


def test_sizes_that_need_another_lowering(model: Path, context: Context) -> None:
    purevk.load(model, context=context).close()
    with purevk.load(model, context=context, compile="never") as program:
        with pytest.raises(KernelNotCachedError) as caught:
            program.forward(torch.rand(1, 4, 6))
        assert "inputs of sizes 1x4x6" in caught.value.where
        x = torch.rand(2, 4, 6)  # the program still works
        result = torch.nn.functional.avg_pool1d(torch.softmax(x, 0), 2).cumsum(0)
        torch.testing.assert_close(program.forward(x), result)


def test_the_variable_asserts_for_all_programs(
    model: Path, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(knobs.CACHE.name, "only=1")
    with pytest.raises(KernelNotCachedError):
        purevk.load(model, context=context)
    with pytest.raises(KernelNotCachedError):
        purevk.compile(torch.nn.Tanh(), torch.ones(3), context=context)
    assert context.kernels.report.compiled == 0


def test_a_module(context: Context) -> None:
    with pytest.raises(KernelNotCachedError, match="method forward"):
        purevk.compile(torch.nn.Tanh(), torch.ones(3), context=context, compile="never")


def test_eager_torch_does_not_take_over(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    from purevk.dynamo import make_backend

    monkeypatch.setenv(knobs.CACHE.name, "only=1")
    monkeypatch.setenv(knobs.EAGER_FALLBACK.name, "1")
    compiled = torch.compile(torch.nn.Tanh(), backend=make_backend(context))
    with torch.no_grad(), pytest.raises(KernelNotCachedError):
        compiled(torch.ones(3))


def test_other_words_are_refused(model: Path, context: Context) -> None:
    with pytest.raises(InputError, match="compile='maybe'"):
        purevk.load(model, context=context, compile="maybe")
