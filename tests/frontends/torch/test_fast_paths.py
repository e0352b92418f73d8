"""Kernels of whole layers that torch's transformer modules call for inference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import purevk
from tests.ops.harness import host_nodes

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore")]
PADDED = torch.zeros(2, 7, dtype=torch.bool)
PADDED[1, 5:] = True
LATER = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)


def tokens() -> torch.Tensor:
    return torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))


class Layer(torch.nn.Module):
    """Calls the kernel of a layer."""

    def __init__(self, mask_type: int | None = None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
        self.mask_type = mask_type

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        one, own = self.layer, self.layer.self_attn
        return torch.ops.aten._transformer_encoder_layer_fwd(
            x, 32, 4, own.in_proj_weight, own.in_proj_bias, own.out_proj.weight, own.out_proj.bias,
            one.activation_relu_or_gelu == 2, one.norm_first, one.norm1.eps, one.norm1.weight,
            one.norm1.bias, one.norm2.weight, one.norm2.bias, one.linear1.weight, one.linear1.bias,
            one.linear2.weight, one.linear2.bias, mask, self.mask_type,
        )  # fmt: skip


@pytest.mark.parametrize(
    "mask_type, mask, options",
    [
        (None, None, {}),
        (None, None, {"norm_first": True, "activation": "gelu"}),
        (1, PADDED, {}),
        (0, LATER, {}),
        (2, (PADDED[:, None, None] | LATER).expand(2, 4, 7, 7), {}),
        (1, torch.ones(2, 7, dtype=torch.bool), {}),
    ],
    ids=["plain", "norm first, gelu", "padded", "causal", "both", "all padded"],
)
def test_encoder_layer(
    mask_type: int | None, mask: torch.Tensor | None, options: dict[str, Any]
) -> None:
    layer, given = Layer(mask_type, **options).eval(), (tokens(), mask)[: 1 + (mask is not None)]
    with torch.no_grad(), purevk.compile(layer, given) as program:
        assert not host_nodes(program)
        wanted = layer(*given)
        torch.testing.assert_close(program(*given), wanted, rtol=1e-5, atol=2e-6, equal_nan=True)


def test_modules_under_torch_compile() -> None:
    """In inference they call these kernels."""
    torch.manual_seed(1)
    options = {"backend": "purevk", "options": {"fallback": False}}
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    attention = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = tokens()
    with torch.no_grad():
        made = torch.compile(encoder, **options)(x, src_key_padding_mask=PADDED)
        torch.testing.assert_close(
            made, encoder(x, src_key_padding_mask=PADDED), rtol=1e-5, atol=2e-6
        )
        for average in (True, False):
            given = {"key_padding_mask": PADDED, "average_attn_weights": average}
            made = torch.compile(attention, **options)(x, x, x, **given)
            torch.testing.assert_close(made, attention(x, x, x, **given), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["later", "random"])
def test_masks_that_may_be_causal(kind: str) -> None:
    """Not told, the modules compare the elements of a mask with a causal one."""
    detect = torch.nn.modules.transformer._detect_is_causal_mask

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.inner = torch.nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

        def forward(self, text: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            later = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            mask = later if kind == "later" else later.cos().nan_to_num()
            return self.inner(text, x, tgt_mask=mask)

    def inputs(size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(size, 4, 16), torch.randn(size, length, 16)

    model, batch, length = Both().eval(), torch.export.Dim("batch"), torch.export.Dim("length")
    shapes = ({0: batch}, {0: batch, 1: length})
    with torch.no_grad(), purevk.compile(model, inputs(2, 5), shapes) as program:
        for given in (inputs(2, 5), inputs(3, 7)):
            torch.testing.assert_close(program(*given), model(*given), rtol=1e-4, atol=1e-5)
    assert torch.nn.modules.transformer._detect_is_causal_mask is detect
