"""Calls with new sizes cost a recording, those with known ones nothing; inputs above the bounds of
files."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import purevk
import purevk.program.variants.variant as variant_module
from purevk.errors import SizeConstraintError
from purevk.graph.size_table import SizeTable
from purevk.ir import Dim, Symbol
from purevk.ir import dims as _dims
from tests.harness import DATA

A, B = Symbol("a", 64, lower=1), Symbol("b", 64, lower=1)
SIZES = st.recursive(
    st.one_of(st.integers(-5, 40), st.sampled_from([Dim.of(A), Dim.of(B)])),
    lambda inner: st.builds(
        lambda f, x, y: f(x, y),
        st.sampled_from(
            [
                lambda x, y: x + y,
                lambda x, y: x * y,
                lambda x, y: x // 3 - y,
                _dims.minimum,
                _dims.maximum,
            ]
        ),
        inner,
        inner,
    ),
    max_leaves=6,
)


@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(1, 64), st.integers(1, 64))
def test_a_table_of_sizes(sizes, a, b):
    env = {A: a, B: b}
    assert SizeTable(sizes).evaluate(env).tolist() == [_dims.evaluate(size, env) for size in sizes]


def _views(columns: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(columns).standard_normal((1, columns, 8), np.float32)
    y = x.reshape(1, columns, 2, 4) + 1
    return x, np.concatenate([y, y * y], -1)


@pytest.mark.device
def test_recordings_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purevk.graph.compute_graph.RECORDINGS", 3)
    with purevk.load(DATA / "dynamic_views.pte") as program:
        graph = program.method("forward").executable.graph
        for sizes, recorded in (
            ((5, 4, 5, 4, 5, 4), 2),
            ((3, 5, 4, 3), 3),
            ((2, 3, 4), 4),
            ((5,), 5),
        ):
            for size in sizes:
                x, wanted = _views(size)
                np.testing.assert_allclose(program.forward(x), wanted, rtol=1e-6)
            assert graph.recorded == recorded


@pytest.mark.device
def test_a_file_grows_once_or_holds_its_bounds(caplog: pytest.LogCaptureFixture) -> None:
    with (
        purevk.load(DATA / "dynamic_views.pte", bounds="grow") as program,
        caplog.at_level(logging.WARNING, "purevk"),
    ):
        bound = max(
            _dims.upper(size) for size in program.method("forward").graph.inputs[0].type.dims[:2]
        )
        for size in (bound, bound + 1, 2 * bound, bound + 3, 2):
            x, wanted = _views(size)
            np.testing.assert_allclose(program.forward(x), wanted, rtol=1e-6)
        assert len(program.method("forward").specializations) <= 3
        assert caplog.text.count("above the exported bounds") <= 2
        for size in (bound + 1, 2 * bound):
            program.forward(_views(size)[0])
        assert caplog.text.count("above the exported bounds") <= 2
    for bounds in ("exported", "strict"):
        with (
            purevk.load(DATA / "dynamic_views.pte", bounds=bounds) as program,
            pytest.raises(SizeConstraintError, match=rf"exported for 0 to {bound}"),
        ):
            program.forward(_views(bound + 1)[0])


@pytest.mark.device
def test_the_specialization_that_was_not_used_for_longest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    from tests.ops.harness import program_of, tensor

    def differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum(0) + y.sum(0)

    monkeypatch.setattr(variant_module, "MAX_SPECIALIZATIONS", 3)
    with program_of(differ, (tensor(40, 4), tensor(40, 4, seed=1)), dynamic=True) as program:
        method = program.methods["forward"]
        for a, b in ((2, 3), (3, 4), (2, 3), (30, 31), (2, 3), (40, 40)):
            x, y = tensor(a, 4), tensor(b, 4, seed=2)
            torch.testing.assert_close(program.forward(x, y), differ(x, y), rtol=1e-5, atol=1e-5)
        assert [each.graph.inputs[0].type.dims[0] for each in method.specializations[1:]] == [2, 30]
