"""The references themselves: a wrong reference would make every comparison with it worthless."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

pytestmark = pytest.mark.export
torch = pytest.importorskip("torch")
pytest.importorskip("executorch")


@pytest.mark.parametrize("name", ["decoder", "decoder_plain", "decoder_dyn"])
def test_stepped_decoder_is_the_uncached_one(name: str) -> None:
    """The llama operators with their cache give what plain causal attention over all tokens at once
    gives."""
    from tests.models.zoo import CASES

    built = CASES[name].build()
    model, functional = built.module, torch.nn.functional
    with torch.no_grad():
        stepped = torch.cat([model(*sample) for sample in built.samples], dim=1)
        tokens = torch.cat([sample[0] for sample in built.samples], dim=1)
        rows = tokens.shape[1]
        angles = torch.complex(model.cos[:rows], model.sin[:rows])[None, :, None, :]

        def rotated(x: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * angles).flatten(3)

        x = model.embedding(tokens)
        for block in model.blocks:
            h = functional.rms_norm(x, (256,), block.norm1.weight, 1e-6)
            q = rotated(block.wq(h).view(1, rows, 4, 64)).transpose(1, 2)
            k = rotated(block.wk(h).view(1, rows, 2, 64)).transpose(1, 2)
            v = block.wv(h).view(1, rows, 2, 64).transpose(1, 2)
            attended = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            x = x + block.wo(attended.transpose(1, 2).reshape(1, rows, 256))
            h = functional.rms_norm(x, (256,), block.norm2.weight, 1e-6)
            x = x + block.down(functional.silu(block.gate(h)) * block.up(h))
        expected = model.head(functional.rms_norm(x, (256,), model.norm.weight, 1e-6))
    # float32 rounding of two different orders of the same sums, values up to about 2.5
    torch.testing.assert_close(stepped, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_an_export_is_kept_and_its_samples_are_read_back(tmp_path: Path) -> None:
    """The second call writes nothing, a stale stamp exports anew, and the samples are eager
    torch's."""
    from tests.models.export import export_pte, load_samples
    from tests.models.zoo import CASES

    path = export_pte("fallback_cumsum", "fp16", tmp_path)
    assert path.name == "fallback_cumsum_fp16.pte"
    written = path.stat().st_mtime_ns
    assert export_pte("fallback_cumsum", "fp16", tmp_path) == path
    assert path.stat().st_mtime_ns == written
    built, samples = CASES["fallback_cumsum"].build(), load_samples(path)
    assert len(samples) == len(built.samples)
    for (inputs, outputs), sample in zip(samples, built.samples, strict=True):
        numpy.testing.assert_array_equal(inputs[0], sample[0].numpy())
        with torch.no_grad():
            numpy.testing.assert_allclose(
                outputs[0], built.module(*sample).numpy(), rtol=1e-6, atol=1e-6
            )
    path.with_suffix(".key").write_text("other")
    export_pte("fallback_cumsum", "fp16", tmp_path)
    assert path.stat().st_mtime_ns > written


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    from tests.models.export import export_pte

    with pytest.raises(ValueError, match="'int3' is none of fp32, fp16"):
        export_pte("fallback_cumsum", "int3", tmp_path)
