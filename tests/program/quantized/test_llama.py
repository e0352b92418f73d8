"""A Llama with int8 activations and int4 weights, as executorch exports it: where its logits differ
from eager torch, an activation lies on the boundary between two quantized values."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.export, pytest.mark.device, pytest.mark.slow]
torch = pytest.importorskip("torch")
pytest.importorskip("torchao")
pytest.importorskip("executorch")

import purevk  # noqa: E402
from tests.models.export import trace_patterns_once  # noqa: E402
from tests.models.quantized import quiet  # noqa: E402

PREFILLS, TOKENS, VOCABULARY = 60, 8, 128
TIE = 1e-4  # of a quantization step: activations of up to 127 steps with an error of 1e-6


class Tapped(torch.nn.Module):
    """A model that also returns the input of each linear layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        taps: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args: taps.append(args[0]))
            for layer in self.model.modules()
            if isinstance(layer, torch.nn.Linear)
        ]
        logits = self.model(tokens)
        for hook in hooks:
            hook.remove()
        return logits, *taps


def llama() -> torch.nn.Module:
    from executorch.examples.models.llama.llama_transformer import construct_transformer
    from executorch.examples.models.llama.model_args import ModelArgs
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    torch.manual_seed(0)
    sizes = ModelArgs(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=VOCABULARY,
        hidden_dim=128,
        max_seq_len=32,
        max_context_len=32,
        generate_full_logits=True,
    )
    model = construct_transformer(sizes).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    )
    quantize_(model, config)
    return model


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 activations, and the numbers in quantization steps before they are rounded."""
    from torchao.quantization.quant_primitives import (
        MappingType,
        choose_qparams_affine,
        quantize_affine,
    )

    row = (*(1 for _ in x.shape[:-1]), x.shape[-1])
    scale, zero = choose_qparams_affine(
        x,
        MappingType.ASYMMETRIC,
        row,
        torch.int8,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int8,
    )
    steps = x.double() / scale.double().reshape(*x.shape[:-1], 1)
    return quantize_affine(x, row, scale, zero, torch.int8), steps


def test_logits_differ_only_after_a_tie() -> None:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    trace_patterns_once()
    model = Tapped(llama())
    calls = [torch.randint(VOCABULARY, (1, TOKENS)) for _ in range(PREFILLS)]
    with quiet(), torch.no_grad():
        edge = to_edge_transform_and_lower(
            torch.export.export(model, (calls[0],), strict=False),
            partitioner=[VulkanPartitioner()],
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
    program, ties = purevk.load(edge.to_executorch().buffer), 0
    for tokens in calls:
        with torch.no_grad():
            want, *eager = model(tokens)
        have, *taps = program.forward(tokens)
        for ours, theirs in zip(taps, eager, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            (quantized, steps), (expected, boundary) = quantize(ours), quantize(theirs)
            differ = quantized != expected
            if differ.any():
                for each in (steps[differ], boundary[differ]):
                    assert (each - each.floor() - 0.5).abs().max() < TIE
                ties += 1
                break  # the layers behind it have other inputs
        else:
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    assert 0 < ties < PREFILLS // 4
