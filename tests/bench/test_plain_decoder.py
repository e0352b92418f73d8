"""The decoder that benchmarks time in plain torch is the reference decoder."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.export
torch = pytest.importorskip("torch")
pytest.importorskip("executorch")


@pytest.mark.parametrize("name", ["decoder", "decoder_dyn"])
def test_it_answers_what_the_reference_does(name: str) -> None:
    from bench.plain_decoder import build
    from tests.models.zoo import CASES

    plain, reference = build(name), CASES[name].build()
    with torch.no_grad():
        for one, two in zip(plain.samples, reference.samples, strict=True):
            # float32 rounding of two orders of the same sums, values up to about 2.5
            torch.testing.assert_close(
                plain.module(*one), reference.module(*two), rtol=0, atol=1e-5
            )
