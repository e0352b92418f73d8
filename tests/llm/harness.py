"""Tiny models for the tests: GGUF files with random weights, and the same in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from purevk.pte.blocks import BLOCK_TYPES, FORMS

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    """Random bytes [count, bytes of a block] whose scales are finite, and of the size of weights."""
    (type,) = (each for each in BLOCK_TYPES.values() if each.name == kind)
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (count, type.nbytes), np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = generator.integers(120, 124, count)
        return blocks
    at, least = {"Q2_K": (80, 82), "Q3_K": (108, 0), "Q6_K": (208, 0)}.get(kind, (0, 2))
    factors = generator.uniform(0.5, 1.0, (count, 1))
    scales = {4: 2e-2, 8: 1e-3}[FORMS[kind].bits] / (30 if kind.endswith(("_K", "XS")) else 1)
    scales = (factors * scales * (8 if kind in ("Q5_0", "Q5_1", "Q5_K") else 1)).astype(np.float16)
    blocks[:, at : at + 2] = scales.view(np.uint8)
    if FORMS[kind].has_minimums:
        middle = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}[kind]
        blocks[:, least : least + 2] = (scales * middle).astype(np.float16).view(np.uint8)
    return blocks


def write_llama(
    path: Path,
    kind: str = "F32",
    *,
    table: str = "",
    width: int = 64,
    vocabulary: bool = False,
    family: str = "Llama",
    rotation_factors: bool = False,
    trained: int = 4096,
    **writer_options: Any,
) -> Any:
    """Writes a random Llama, and returns it as transformers' module with the weights of the file.

    Args:
        family: transformers' name: "Llama", "Qwen2" or "Qwen3".
        rotation_factors: frequencies have factors, and projections biases.
        kind: of the matrices.
        table: of the embedding, which is the head too; "": the same, with a head of its own.
        vocabulary: the file has a tokenizer: bytes, some merges and control tokens.
        trained: tokens that it was trained with.
    """
    generator = np.random.default_rng(0)
    tokens = _vocabulary() if vocabulary else []
    architecture, head_width = family.lower(), 2 * width // 4 if family == "Qwen3" else width // 4
    config = getattr(transformers, f"{family}Config")(
        vocab_size=max(len(tokens), 96),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_width,
        max_position_embeddings=trained,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=bool(table),
        **({"attention_bias": True} if rotation_factors else {}),
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    writer = gguf.GGUFWriter(path, architecture, **writer_options)
    writer.add_context_length(trained)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head_width)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_rope_freq_base(10000.0)
    if tokens:
        _add_vocabulary(writer, tokens)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            elements = generator.uniform(0.8, 1.2, weight.shape).astype(np.float32)
            writer.add_tensor(_name_of(name), elements)
        else:
            own = table if name.startswith("model.embed") and table else kind
            elements = _add_matrix(writer, _name_of(name), own, weight.shape, generator)
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads and family == "Llama":  # the file rotates neighbours
            rows = elements.reshape(heads, -1, 2, *elements.shape[1:])
            elements = rows.swapaxes(1, 2).reshape(elements.shape)
        weight.copy_(torch.from_numpy(np.ascontiguousarray(elements)))
    if rotation_factors:
        factors = generator.uniform(1, 8, head_width // 2).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)
        model.model.rotary_emb.inv_freq.div_(2.0 * torch.from_numpy(factors))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _name_of(name: str) -> str:
    plain = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in plain:
        return plain[name]
    _, _, layer, part = name.split(".", 3)
    part, _, kind = part.rpartition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def _add_matrix(
    writer: Any, name: str, kind: str, shape: tuple[int, int], generator: np.random.Generator
) -> np.ndarray:
    """Adds a random matrix, and returns its elements."""
    rows, columns = shape
    type = gguf.GGMLQuantizationType[kind]
    if kind in FORMS:
        elements, _ = gguf.GGML_QUANT_SIZES[type]
        count = rows * columns // elements
        data = random_blocks(kind, count, int(generator.integers(1 << 30))).reshape(rows, -1)
    else:
        numbers = generator.normal(0, 0.08, shape).astype(np.float32)
        data = gguf.quants.quantize(numbers, type)
    writer.add_tensor(name, data, raw_dtype=type)
    return gguf.quants.dequantize(data, type).reshape(shape)


def _vocabulary() -> list[str]:
    from purevk.llm.tokenizer import byte_codes

    letters = [chr(code) for _, code in sorted(byte_codes().items())]
    return [*letters, "he", "ll", "hell", "hello", "Ġw", "12", *CONTROL]


def _add_vocabulary(writer: Any, tokens: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if each in CONTROL else 1 for each in tokens])
    writer.add_token_merges(["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
