"""Folders whose weights torchao or gpt-oss have packed, against what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
torch = pytest.importorskip("torch")

import purevk.llm  # noqa: E402
from purevk.errors import FileFormatError, UnsupportedProgramError  # noqa: E402
from purevk.llm.checkpoint import Folder  # noqa: E402
from tests.llm.families import PROMPT, expected, tiny  # noqa: E402

NAME = "model.layers.0.self_attn.q_proj"


def quantized(kind: str) -> torch.Tensor:
    """A weight [64, 64] of a kind of torchao."""
    q = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    if kind == "int4":  # what makes them needs a GPU
        codes = torch.randint(-128, 128, (64, 32)).to(torch.int8)
        scales, zeros = torch.rand(2, 64), torch.randn(2, 64)
        return q.Int4Tensor(codes, scales, zeros, [1, 32], torch.Size((64, 64)))
    configs = {
        "int8": q.Int8WeightOnlyConfig(),
        "int8 activations": q.Int8DynamicActivationInt8WeightConfig(),
        "intx 4": q.IntxWeightOnlyConfig(torch.int4, q.PerGroup(32)),
        "intx 8": q.IntxWeightOnlyConfig(torch.int8, q.PerAxis(0)),
        "intx 3 with zero points": q.IntxWeightOnlyConfig(
            torch.int3, q.PerGroup(16), q.quant_primitives.MappingType.ASYMMETRIC
        ),
        "float8": q.Float8WeightOnlyConfig(),
    }
    layer = torch.nn.Linear(64, 64, bias=False)
    q.quantize_(layer, configs[kind])
    return layer.weight


def save(weight: torch.Tensor, path: Path, change: dict[str, str] | None = None) -> None:
    """A model whose first projection is this weight."""
    flatten = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    tiny("mistral").save_pretrained(path)
    stored = safetensors.load_file(path / "model.safetensors")
    del stored[f"{NAME}.weight"]
    parts, about = flatten.flatten_tensor_state_dict({f"{NAME}.weight": weight})
    safetensors.save_file(
        {**stored, **parts}, path / "model.safetensors", {**about, **(change or {})}
    )


def dequantized(weight: Any) -> torch.Tensor:
    if type(weight).__name__ != "Int4Tensor":
        return weight.dequantize()
    codes = weight.qdata
    low, high = (codes << 4).to(torch.int8) >> 4, codes >> 4
    values = torch.stack((low, high), -1).reshape(64, 64).float()
    scales, zeros = (each.T.repeat_interleave(32, 1) for each in (weight.scale, weight.zero_point))
    return values * scales + zeros


@pytest.mark.parametrize("kind, bits, has_minimums", [
    ("int8", 8, False), ("int8 activations", 8, False), ("intx 4", 4, False), ("intx 8", 8, False),
    ("intx 3 with zero points", 4, True), ("int4", 4, True), ("float8", 0, False),
])  # fmt: skip
def test_weights_of_torchao(kind: str, bits: int, has_minimums: bool, tmp_path: Path) -> None:
    weight = quantized(kind)
    save(weight, tmp_path)
    folder = Folder(tmp_path)
    tensor = folder.tensors["blk.0.attn_q.weight"]
    if not bits:
        have = tensor.floats()
    else:
        assert tensor.form and (tensor.form.bits, tensor.form.has_minimums) == (bits, has_minimums)
        values, parts = tensor.values(), tensor.parts()
        if bits == 4:
            values = np.stack((values & 15, values >> 4), -1).reshape(64, 64).astype(np.int8) - 8
        spread = {name: part.repeat(tensor.form.group, 1) for name, part in parts.items()}
        half = 1 << bits - 1 if has_minimums else 0
        have = (values.astype(np.float32) + half) * spread["scales"] + spread.get("minimums", 0)
    want = dequantized(weight).detach().float().numpy()
    assert np.abs(have - want).max() <= 1e-6 * np.abs(want).max()
    folder.close()


def test_unknown_tensors_of_torchao(tmp_path: Path) -> None:
    weight = quantized("intx 4")
    other = json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": {}})
    save(weight, tmp_path, {f"{NAME}.weight": other})
    with pytest.raises(UnsupportedProgramError, match="Int4TilePackedTo4dTensor"):
        Folder(tmp_path)
    weight.scale = weight.scale[:3]
    save(weight, tmp_path)
    with pytest.raises(FileFormatError, match="packed weight"):
        Folder(tmp_path)


@pytest.mark.device
@pytest.mark.parametrize("kind", ["int8", "intx 3 with zero points"])
def test_logits_with_weights_of_torchao(kind: str, tmp_path: Path) -> None:
    weight = quantized(kind)
    save(weight, tmp_path)
    reference = tiny("mistral")
    projection = reference.model.layers[0].self_attn.q_proj.weight
    projection.copy_(dequantized(weight).float())
    check(reference, tmp_path)


def check(reference: Any, path: Path) -> None:
    with purevk.llm.load(path, context=32, dtype="float32") as model:
        for prompt in (PROMPT, PROMPT[:1]):
            model.position = 0
            model.generate(prompt, max_tokens=1).tokens()
            want = expected(reference, prompt)
            assert np.abs(model.logits - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.device
def test_experts_of_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss has them: they stay packed, and have the logits of what they stand for."""
    numbers = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6))
    reference = tiny("gpt-oss")
    reference.save_pretrained(tmp_path)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    for key in [key for key in stored if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(key).shape
        codes = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(121, 125, codes.shape[:3], dtype=torch.uint8)
        stored |= {f"{key}_blocks": codes, f"{key}_scales": exponents}
        values = numbers[torch.stack((codes & 15, codes >> 4), -1).long()].flatten(3)
        values = values * 2.0 ** (exponents[..., None].float() - 127)
        reference.get_parameter(key).copy_(values.flatten(2).transpose(1, 2))
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    folder = Folder(tmp_path)
    for part, first in (("gate", 0), ("up", 1)):
        tensor = folder.tensors[f"blk.1.ffn_{part}_exps.weight"]
        have = tensor.values() * tensor.parts()["scales"].repeat(32, 1)
        weight = reference.model.layers[1].mlp.experts.gate_up_proj[..., first::2]
        assert (have.reshape(8, 96, 64) == weight.transpose(1, 2).numpy()).all()
    folder.close()
    check(reference, tmp_path)
    with purevk.llm.load(tmp_path, context=32, dtype="float32") as model:
        packed = 4 * 8 * 3 * 64 * 96  # one byte each
        assert (
            model.plan.weights
            < packed * 9 / 8
            + 4
            * sum(tensor.numel() for key, tensor in stored.items() if tensor.dtype is torch.float32)
            + 8 * 32 * 32
        )
